//! What an approval is bound to: a changed rule, tool or target asks again.

use serde_json::json;
use toolcrib::domain::access_rules::RuleVerdict;

use super::{Fixture, set_rule};
use crate::support::api::{message, offer_with};
use crate::support::{Server, until};

#[tokio::test]
async fn a_changed_rule_asks_again() {
    let fixture = Fixture::start().await;
    let (call_id, first) = fixture.held(&fixture.api, json!({})).await;
    fixture.ask("mail", &["mail.send"], |rule| rule.note = "another text".into()).await;
    let second = until("another approval", || async {
        let id = fixture.api.call(&call_id).await["approval_id"].as_str().unwrap().to_owned();
        (id != first).then_some(id)
    })
    .await;
    assert_eq!(fixture.approval(&first).await["status"], "superseded");
    assert_eq!(fixture.approval(&second).await["supersedes"], json!(first));
    let late = json!({ "decisions": [{ "approval_id": first, "verdict": "approve" }] });
    fixture.operator.post("/v1/approvals/decide", late).await.refused(409, "CONFLICT");
    fixture.approve(&second).await;
    fixture.execute(json!("sent")).await;
    assert_eq!(fixture.api.finished(&call_id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn rules_that_deny_or_no_longer_ask_apply_to_waiting_calls() {
    let fixture = Fixture::start().await;
    let (call_id, first) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    set_rule(&fixture.server, "never", RuleVerdict::Deny, &["mail.send"], |_| {}).await;
    let call = fixture.api.finished(&call_id).await;
    assert_eq!(call["error"]["code"], "PERMISSION_DENIED");
    assert!(message(&call["error"]).contains("never"), "{call}");
    assert_eq!(fixture.approval(&first).await["status"], "canceled");
    set_rule(&fixture.server, "never", RuleVerdict::Allow, &["mail.send"], |_| {}).await;
    let (call_id, second) = fixture.held(&fixture.api, json!({ "n": 2 })).await;
    set_rule(&fixture.server, "mail", RuleVerdict::Allow, &["mail.send"], |_| {}).await;
    fixture.execute(json!("sent")).await;
    assert_eq!(fixture.api.finished(&call_id).await["status"], "SUCCEEDED");
    assert_eq!(fixture.approval(&second).await["status"], "superseded");
}

#[tokio::test]
async fn an_approved_call_whose_tool_changes_before_it_starts_asks_again() {
    // One slot, which another call holds, so that the approved call waits in the queue.
    let server = Server::with(|config| {
        let tool = config.tools.entry("mail.send".into()).or_default();
        tool.policy.max_parallel = Some(1);
    })
    .await;
    let fixture = Fixture::on(server).await;
    let (blocker, first) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    fixture.approve(&first).await;
    let request = fixture.api.poll("mailer").await;
    let (call_id, second) = fixture.held(&fixture.api, json!({ "n": 2 })).await;
    fixture.approve(&second).await;
    assert_eq!(fixture.api.call(&call_id).await["hold"], "queue");
    let changed = offer_with("mail.send", json!({ "description": "sends it twice" }));
    fixture.api.register("mailer", json!([changed])).await;
    assert_eq!(request["tool_call_id"], json!(blocker));
    fixture.api.succeed(&blocker, json!(1)).await;
    let held = fixture.until_hold(&call_id, "approval").await;
    let third = held["approval_id"].as_str().unwrap().to_owned();
    assert_ne!(third, second);
    assert_eq!(fixture.approval(&second).await["status"], "superseded");
    fixture.approve(&third).await;
    fixture.execute(json!(2)).await;
    assert_eq!(fixture.api.finished(&call_id).await["result"], 2);
}

#[tokio::test]
async fn an_approval_of_a_tool_does_not_cover_its_fallback() {
    let server = Server::start().await;
    let api = server.api();
    let first = offer_with(
        "mail.fast",
        json!({ "effect": "read", "fallback": [{ "tool": "mail.send" }],
                "policy": { "max_retries": 0 } }),
    );
    api.register("fast", json!([first])).await;
    let fixture = Fixture::on(server).await;
    fixture.ask("fast", &["mail.fast"], |_| {}).await;
    let body = json!({ "run_id": "r", "args": {} });
    let ticket = fixture.api.post("/v1/tools/mail.fast/invoke", body).await.is(202);
    let (id, approval) = (ticket["tool_call_id"].as_str().unwrap(), &ticket["approval_id"]);
    fixture.approve(approval.as_str().unwrap()).await;
    let request = fixture.api.poll("fast").await;
    let error = json!({ "code": "VALIDATION_ERROR", "message": "no" });
    fixture.api.fail(request["tool_call_id"].as_str().unwrap(), error).await;
    let held = fixture.until_hold(id, "approval").await;
    let second = held["approval_id"].as_str().unwrap().to_owned();
    assert_ne!(json!(second), *approval);
    assert_eq!(fixture.approval(&second).await["tool_name"], "mail.send");
    let first = fixture.approval(approval.as_str().unwrap()).await;
    assert_eq!(first["status"], "approved", "it was used");
    fixture.approve(&second).await;
    fixture.execute(json!("slow")).await;
    let call = fixture.api.finished(id).await;
    assert_eq!((&call["result"], &call["ran_tool"]), (&json!("slow"), &json!("mail.send")));
}

#[tokio::test]
async fn retries_of_one_call_need_one_approval() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({ "max_retries": 2, "backoff": { "initial_ms": 1, "max_ms": 1 } });
    api.register(
        "flaky",
        json!([offer_with("mail.flaky", json!({ "effect": "idempotent", "policy": policy }))]),
    )
    .await;
    let fixture = Fixture::on(server).await;
    fixture.ask("flaky", &["mail.flaky"], |_| {}).await;
    let body = json!({ "run_id": "r", "args": {} });
    let ticket = fixture.api.post("/v1/tools/mail.flaky/invoke", body).await.is(202);
    fixture.approve(ticket["approval_id"].as_str().unwrap()).await;
    let id = ticket["tool_call_id"].as_str().unwrap();
    fixture.api.poll("flaky").await;
    let error = json!({ "code": "UPSTREAM_UNAVAILABLE", "message": "later", "retryable": true });
    fixture.api.fail(id, error).await;
    fixture.api.poll("flaky").await;
    fixture.api.succeed(id, json!("second attempt")).await;
    assert_eq!(fixture.api.finished(id).await["result"], "second attempt");
}
