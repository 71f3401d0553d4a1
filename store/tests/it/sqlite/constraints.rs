//! The schema rejects contradictory rows, whatever program writes them: one test per constraint.

use rusqlite::ErrorCode;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::call::Status;
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::{ApiKey, DirectoryChange, KeyAttributes};
use toolcrib::ports::store::{SaveResult, Store};

use super::{open_fresh, open_raw, query_number};
use crate::suite::directory::change_of_rules;
use crate::support::{NOW, call, database_in, put_with_status};

/// Creates a database with a call of every status, a key and a rule, and runs one statement of
/// another program. The named constraint must reject it, and nothing may have changed.
async fn assert_rejected(sql: &str, constraint: &str) {
    let (directory, store) = open_fresh();
    for status in Status::ALL {
        put_with_status(&store, &call(), status).await;
    }
    let key = ApiKey {
        id: "key_1".into(),
        digest: "d".into(),
        project: "p".into(),
        agent: "ada".into(),
        roles: Role::Agent.into(),
        attributes: KeyAttributes::default(),
        created_ms: NOW,
        expires_ms: None,
        revoked_ms: None,
        rejoin: true,
    };
    let rule = AccessRule::short("p", "ada", "*", RuleVerdict::Allow);
    let rules = change_of_rules(vec![rule], &[]);
    for (version, change) in [(0, DirectoryChange::AddKey(key)), (1, rules)] {
        assert_eq!(store.change_directory(change, version, None).await.unwrap(), SaveResult::Saved);
    }
    drop(store);
    let connection = open_raw(&database_in(&directory));
    connection.execute_batch("PRAGMA foreign_keys = ON").unwrap();
    let error = connection.execute(sql, []).expect_err("the constraint must reject this statement");
    assert_eq!(error.sqlite_error_code(), Some(ErrorCode::ConstraintViolation), "{error}");
    assert!(error.to_string().contains(constraint), "{error}");
    assert_eq!(query_number(&connection, "SELECT total_changes()"), 0);
}

#[tokio::test]
async fn a_status_is_one_of_six() {
    let open = "UPDATE tool_calls SET status = 'LOST' WHERE status = 'RUNNING'";
    assert_rejected(open, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)")
        .await;
    let ended = "UPDATE tool_calls SET status = 'LOST', result = NULL WHERE status = 'SUCCEEDED'";
    assert_rejected(ended, "status = 'RUNNING' OR result IS NOT NULL OR error IS NOT NULL").await;
}

#[tokio::test]
async fn a_hold_is_one_of_six() {
    let sql = "UPDATE tool_calls SET hold = 'somewhere' WHERE status = 'PENDING'";
    assert_rejected(sql, "hold = 'queue' OR hold = 'retry' OR hold = 'parked' OR hold = 'input'")
        .await;
}

#[tokio::test]
async fn versions_count_from_one() {
    assert_rejected("UPDATE tool_calls SET version = 0", "version > 0").await;
}

#[tokio::test]
async fn an_open_call_has_not_completed() {
    let sql = "UPDATE tool_calls SET completed_ms = created_ms WHERE status = 'RUNNING'";
    assert_rejected(sql, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)")
        .await;
}

#[tokio::test]
async fn an_ended_call_has_completed() {
    let sql = "UPDATE tool_calls SET completed_ms = NULL WHERE status = 'SUCCEEDED'";
    assert_rejected(sql, "(status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)")
        .await;
}

#[tokio::test]
async fn a_pending_call_has_a_hold() {
    let sql = "UPDATE tool_calls SET hold = NULL WHERE status = 'PENDING'";
    assert_rejected(sql, "(status = 'PENDING') = (hold IS NOT NULL)").await;
}

#[tokio::test]
async fn only_a_pending_call_has_a_hold() {
    let sql = "UPDATE tool_calls SET hold = 'queue' WHERE status = 'RUNNING'";
    assert_rejected(sql, "(status = 'PENDING') = (hold IS NOT NULL)").await;
}

#[tokio::test]
async fn a_running_call_has_started() {
    let sql = "UPDATE tool_calls SET started_ms = NULL WHERE status = 'RUNNING'";
    assert_rejected(sql, "status <> 'RUNNING' OR started_ms IS NOT NULL").await;
}

#[tokio::test]
async fn a_succeeded_call_has_a_result() {
    let sql = "UPDATE tool_calls SET result = NULL WHERE status = 'SUCCEEDED'";
    assert_rejected(sql, "(status = 'SUCCEEDED') = (result IS NOT NULL)").await;
}

#[tokio::test]
async fn only_a_succeeded_call_has_a_result() {
    let sql = "UPDATE tool_calls SET result = '1' WHERE status = 'CANCELED'";
    assert_rejected(sql, "(status = 'SUCCEEDED') = (result IS NOT NULL)").await;
}

#[tokio::test]
async fn a_call_that_did_not_succeed_has_an_error() {
    let sql = "UPDATE tool_calls SET error = NULL WHERE status = 'TIMEOUT'";
    assert_rejected(sql, "(status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')").await;
}

#[tokio::test]
async fn only_a_call_that_did_not_succeed_has_an_error() {
    let sql = "UPDATE tool_calls SET error = '{}' WHERE status = 'SUCCEEDED'";
    assert_rejected(sql, "(status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')").await;
}

#[tokio::test]
async fn a_call_does_not_end_before_its_creation() {
    let sql = "UPDATE tool_calls SET completed_ms = created_ms - 1 WHERE status = 'FAILED'";
    assert_rejected(sql, "completed_ms IS NULL OR completed_ms >= created_ms").await;
}

#[tokio::test]
async fn a_call_has_one_row() {
    let sql = "UPDATE tool_calls SET tool_call_id = (SELECT max(tool_call_id) FROM tool_calls)";
    assert_rejected(sql, "UNIQUE constraint failed").await;
}

#[tokio::test]
async fn timestamps_are_integers() {
    assert_rejected("UPDATE tool_calls SET deadline_ms = 'soon'", "TEXT value in INTEGER column")
        .await;
}

#[tokio::test]
async fn a_role_is_one_of_five() {
    for roles in ["root", "", "agent,root", "agent provider", "xagent"] {
        let sql = format!("UPDATE keys SET roles = '{roles}'");
        assert_rejected(&sql, "roles <> '' AND").await;
    }
}

#[tokio::test]
async fn an_api_key_is_not_revoked_before_its_creation() {
    let sql = "UPDATE keys SET revoked_ms = created_ms - 1";
    assert_rejected(sql, "revoked_ms IS NULL OR revoked_ms >= created_ms").await;
}

#[tokio::test]
async fn a_key_digest_is_unique() {
    let sql = "INSERT INTO keys SELECT 'key_2', digest, project, agent, roles, attributes, 1, NULL, \
               NULL, 1 FROM keys";
    assert_rejected(sql, "UNIQUE constraint failed: keys.digest").await;
}

#[tokio::test]
async fn a_verdict_is_one_of_three() {
    let sql = "UPDATE access_rules SET rule = '{\"verdict\":\"maybe\"}'";
    assert_rejected(sql, "IN ('allow', 'ask', 'deny')").await;
}

#[tokio::test]
async fn an_offer_refers_to_a_stored_client_and_a_stored_tool() {
    let sql = "INSERT INTO offers VALUES ('p', 'no.tool', 'nobody')";
    assert_rejected(sql, "FOREIGN KEY constraint failed").await;
}
