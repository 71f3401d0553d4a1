//! Standing approvals: for one run or until a date, for exactly one set of arguments.

use serde_json::{Value, json};

use super::Fixture;

/// Calls `mail.send` in a run. Returns the ticket.
async fn send(fixture: &Fixture, run: &str, args: Value) -> Value {
    let body = json!({ "run_id": run, "args": args });
    fixture.api.post("/v1/tools/mail.send/invoke", body).await.is(202)
}

async fn standing(fixture: &Fixture) -> Vec<Value> {
    let listed = fixture.operator.get("/v1/approvals/standing").await.is(200);
    listed["standing"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_run_scope_releases_equal_calls_of_the_run_only() {
    let fixture = Fixture::start().await;
    let ticket = send(&fixture, "run_1", json!({ "n": 1 })).await;
    let decision = json!({
        "approval_id": ticket["approval_id"], "verdict": "approve", "scope": "run",
    });
    let result = fixture.decide(decision).await;
    let standing_id = result["standing_id"].as_str().unwrap();
    fixture.execute(json!(1)).await;
    let listed = standing(&fixture).await;
    assert_eq!(listed[0]["standing_id"], json!(standing_id));
    assert_eq!((&listed[0]["scope"], &listed[0]["run_id"]), (&json!("run"), &json!("run_1")));
    let equal = send(&fixture, "run_1", json!({ "n": 1 })).await;
    assert_eq!(equal["hold"], Value::Null, "it is released: {equal}");
    fixture.execute(json!(2)).await;
    let call = fixture.api.finished(equal["tool_call_id"].as_str().unwrap()).await;
    assert_eq!(call["result"], 2);
    assert_eq!(send(&fixture, "run_2", json!({ "n": 1 })).await["hold"], "approval");
    assert_eq!(send(&fixture, "run_1", json!({ "n": 2 })).await["hold"], "approval");
    // It survives a restart, and a change of the rule ends its effect.
    let server = fixture.server.restart().await;
    let (api, operator) = (server.api(), server.operator());
    let fixture = Fixture { server, api, operator };
    assert_eq!(standing(&fixture).await.len(), 1);
    let again = send(&fixture, "run_1", json!({ "n": 1 })).await;
    assert_eq!(again["hold"], Value::Null, "{again}");
    fixture.execute(json!(3)).await;
    fixture.ask("mail", &["mail.send"], |rule| rule.note = "stricter now".into()).await;
    assert_eq!(send(&fixture, "run_1", json!({ "n": 1 })).await["hold"], "approval");
}

#[tokio::test]
async fn a_standing_approval_is_revoked_and_expires() {
    let fixture = Fixture::start().await;
    let ticket = send(&fixture, "r", json!({})).await;
    let until = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
    let decision = json!({
        "approval_id": ticket["approval_id"], "verdict": "approve", "scope": "until",
        "until": until.to_string(),
    });
    let id = fixture.decide(decision).await["standing_id"].as_str().unwrap().to_owned();
    fixture.execute(json!(1)).await;
    let other_run = send(&fixture, "another", json!({})).await;
    assert_eq!(other_run["hold"], Value::Null, "until a date, every run");
    fixture.execute(json!(2)).await;
    let path = format!("/v1/approvals/standing/{id}");
    fixture.api.delete(&path).await.refused(401, "UNAUTHENTICATED");
    assert_eq!(fixture.operator.delete(&path).await.is(200)["revoked_by"], "operator");
    fixture.operator.delete(&path).await.refused(404, "NOT_FOUND");
    assert_eq!(standing(&fixture).await, [] as [Value; 0]);
    let held = send(&fixture, "r", json!({})).await;
    assert_eq!(held["hold"], "approval");
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_millis(1_500);
    let decision = json!({
        "approval_id": held["approval_id"], "verdict": "approve", "scope": "until",
        "until": soon.to_string(),
    });
    fixture.decide(decision).await;
    fixture.execute(json!(3)).await;
    crate::support::until("the standing approval to expire", || async {
        standing(&fixture).await.is_empty().then_some(())
    })
    .await;
    assert_eq!(send(&fixture, "r", json!({})).await["hold"], "approval");
    let audit = fixture.operator.get("/v1/audit").await.is(200).to_string();
    assert!(audit.contains("standing_approval.granted"), "{audit}");
    assert!(audit.contains("standing_approval.revoked"), "{audit}");
}
