//! The schema rejects contradictory rows, whatever program writes them: one test per constraint.

use rusqlite::ErrorCode;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::call::Status;
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::{ApiKey, DirectoryChange};
use toolcrib::ports::store::{SaveResult, Store};

use super::{fresh, number, raw};
use crate::support::{NOW, call, database_in, put_with_status};

/// Creates a database with a call of every status, a key and a rule, and runs one statement of
/// another program. The named constraint must reject it, and nothing may have changed.
async fn refused(sql: &str, constraint: &str) {
    let (directory, store) = fresh();
    for status in Status::ALL {
        put_with_status(&store, &call(), status).await;
    }
    let key = ApiKey {
        id: "key_1".into(),
        digest: "d".into(),
        project: "p".into(),
        agent: "ada".into(),
        role: Role::Agent,
        created_ms: NOW,
        revoked_ms: None,
    };
    let (project, agent, pattern) = ("p".into(), "ada".into(), "*".into());
    let rule = AccessRule { project, agent, pattern, verdict: RuleVerdict::Allow };
    for (version, change) in
        [(0, DirectoryChange::AddKey(key)), (1, DirectoryChange::PutRule(rule))]
    {
        assert_eq!(store.change_directory(change, version, None).await.unwrap(), SaveResult::Saved);
    }
    drop(store);
    let connection = raw(&database_in(&directory));
    connection.execute_batch("PRAGMA foreign_keys = ON").unwrap();
    let error = connection.execute(sql, []).expect_err("the database must refuse this");
    assert_eq!(error.sqlite_error_code(), Some(ErrorCode::ConstraintViolation), "{error}");
    assert!(error.to_string().contains(constraint), "{error}");
    assert_eq!(number(&connection, "SELECT total_changes()"), 0);
}

#[tokio::test]
async fn a_status_is_one_of_six() {
    let open = "UPDATE calls SET status = 'LOST' WHERE status = 'RUNNING'";
    refused(open, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)").await;
    let ended = "UPDATE calls SET status = 'LOST', result = NULL WHERE status = 'SUCCEEDED'";
    refused(ended, "status = 'RUNNING' OR result IS NOT NULL OR error IS NOT NULL").await;
}

#[tokio::test]
async fn a_hold_is_one_of_three() {
    let sql = "UPDATE calls SET hold = 'somewhere' WHERE status = 'PENDING'";
    refused(sql, "hold = 'queue' OR hold = 'retry' OR hold = 'parked'").await;
}

#[tokio::test]
async fn versions_count_from_one() {
    refused("UPDATE calls SET version = 0", "version > 0").await;
}

#[tokio::test]
async fn an_open_call_has_not_completed() {
    let sql = "UPDATE calls SET completed_ms = created_ms WHERE status = 'RUNNING'";
    refused(sql, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)").await;
}

#[tokio::test]
async fn an_ended_call_has_completed() {
    let sql = "UPDATE calls SET completed_ms = NULL WHERE status = 'SUCCEEDED'";
    refused(sql, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)").await;
}

#[tokio::test]
async fn a_pending_call_is_held_by_something() {
    let sql = "UPDATE calls SET hold = NULL WHERE status = 'PENDING'";
    refused(sql, "(status = 'PENDING') = (hold IS NOT NULL)").await;
}

#[tokio::test]
async fn only_a_pending_call_is_held() {
    let sql = "UPDATE calls SET hold = 'queue' WHERE status = 'RUNNING'";
    refused(sql, "(status = 'PENDING') = (hold IS NOT NULL)").await;
}

#[tokio::test]
async fn a_running_call_has_started() {
    let sql = "UPDATE calls SET started_ms = NULL WHERE status = 'RUNNING'";
    refused(sql, "status <> 'RUNNING' OR started_ms IS NOT NULL").await;
}

#[tokio::test]
async fn a_call_that_succeeded_has_a_result() {
    let sql = "UPDATE calls SET result = NULL WHERE status = 'SUCCEEDED'";
    refused(sql, "(status = 'SUCCEEDED') = (result IS NOT NULL)").await;
}

#[tokio::test]
async fn only_a_call_that_succeeded_has_a_result() {
    let sql = "UPDATE calls SET result = '1' WHERE status = 'CANCELED'";
    refused(sql, "(status = 'SUCCEEDED') = (result IS NOT NULL)").await;
}

#[tokio::test]
async fn a_call_that_went_wrong_has_an_error() {
    let sql = "UPDATE calls SET error = NULL WHERE status = 'TIMEOUT'";
    refused(sql, "(status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')").await;
}

#[tokio::test]
async fn only_a_call_that_went_wrong_has_an_error() {
    let sql = "UPDATE calls SET error = '{}' WHERE status = 'SUCCEEDED'";
    refused(sql, "(status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')").await;
}

#[tokio::test]
async fn a_call_does_not_end_before_it_came() {
    let sql = "UPDATE calls SET completed_ms = created_ms - 1 WHERE status = 'FAILED'";
    refused(sql, "completed_ms IS NULL OR completed_ms >= created_ms").await;
}

#[tokio::test]
async fn a_call_has_one_row() {
    let sql = "UPDATE calls SET id = (SELECT max(id) FROM calls)";
    refused(sql, "UNIQUE constraint failed").await;
}

#[tokio::test]
async fn times_are_numbers() {
    refused("UPDATE calls SET deadline_ms = 'soon'", "TEXT value in INTEGER column").await;
}

#[tokio::test]
async fn a_role_is_one_of_three() {
    refused("UPDATE keys SET role = 'root'", "role IN ('agent', 'provider', 'admin')").await;
}

#[tokio::test]
async fn a_key_is_not_revoked_before_it_was_made() {
    let sql = "UPDATE keys SET revoked_ms = created_ms - 1";
    refused(sql, "revoked_ms IS NULL OR revoked_ms >= created_ms").await;
}

#[tokio::test]
async fn a_secret_belongs_to_one_key() {
    let sql = "INSERT INTO keys SELECT 'key_2', digest, project, agent, role, 1, NULL FROM keys";
    refused(sql, "UNIQUE constraint failed: keys.digest").await;
}

#[tokio::test]
async fn a_verdict_is_one_of_two() {
    refused("UPDATE rules SET verdict = 'maybe'", "verdict IN ('allow', 'deny')").await;
}

#[tokio::test]
async fn only_a_known_client_offers_only_a_known_tool() {
    let sql = "INSERT INTO offers VALUES ('p', 'no.tool', 'nobody')";
    refused(sql, "FOREIGN KEY constraint failed").await;
}
