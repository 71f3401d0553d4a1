//! Decisions: who may make them, what they do, and what happens without one.

use serde_json::{Value, json};

use super::{Fixture, set_rule};
use crate::support::Server;
use crate::support::api::message;
use toolcrib::domain::access_rules::{RuleAction, RuleVerdict};

#[tokio::test]
async fn a_call_waits_until_a_person_approves_it() {
    let fixture = Fixture::start().await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({ "to": "ada" })).await;
    let call = fixture.api.call(&call_id).await;
    assert_eq!(call["status"], "PENDING");
    assert_eq!(call["hold"], "approval");
    assert_eq!(call["approval_id"], json!(approval_id));
    assert_eq!(call["hold_details"]["decide_with"], "POST /v1/approvals/decide");
    let listed = fixture.operator.get("/v1/approvals?status=pending").await.is(200);
    assert_eq!(listed["approvals"].as_array().unwrap().len(), 1, "{listed}");
    let shown = fixture.approval(&approval_id).await;
    assert_eq!(shown, listed["approvals"][0]);
    for (field, value) in [
        ("status", json!("pending")),
        ("tool_call_id", json!(call_id)),
        ("tool_name", json!("mail.send")),
        ("args", json!({ "to": "ada" })),
        ("rule_id", json!("mail")),
        ("difference", Value::Null),
        ("decision", Value::Null),
    ] {
        assert_eq!(shown[field], value, "{field}");
    }
    assert_eq!(shown["requested_by"]["agent"], "default");
    let hours = |ms: &Value| ms.as_u64().unwrap() / 3_600_000;
    let lasts = shown["expires_at_ms"].as_u64().unwrap() - shown["created_at_ms"].as_u64().unwrap();
    assert_eq!(hours(&json!(lasts)), 24, "the default");
    let none = fixture.api.get("/internal/ingress/poll?client_id=mailer&wait_ms=0").await.is(200);
    assert_eq!(none["requests"], json!([]), "nothing runs before the decision");

    let decision = json!({ "approval_id": approval_id, "verdict": "approve", "reason": "fine" });
    let result = fixture.decide(decision).await;
    assert_eq!((&result["ok"], &result["status"]), (&json!(true), &json!("approved")));
    let request = fixture.execute(json!("sent")).await;
    assert_eq!(request["tool_call_id"], json!(call_id));
    let call = fixture.api.finished(&call_id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("sent")));
    let decided = fixture.approval(&approval_id).await;
    assert_eq!(decided["decision"]["by"], "operator");
    assert_eq!(decided["decision"]["reason"], "fine");
    let history = fixture.api.history(&call_id).await;
    assert_eq!(history[..3], ["tool.call.requested", "approval.requested", "approval.decided"]);
    let audit = fixture.operator.get("/v1/audit").await.is(200).to_string();
    assert!(audit.contains("\"approval.requested\""), "{audit}");
    assert!(audit.contains("\"approval.decided\""), "{audit}");
}

#[tokio::test]
async fn the_time_of_a_person_does_not_count_and_the_difference_is_shown() {
    let fixture = Fixture::start().await;
    let (first, approval) =
        fixture.held(&fixture.api, json!({ "to": "ada", "sum": 10, "tags": ["a"] })).await;
    fixture.approve(&approval).await;
    fixture.execute(json!(1)).await;
    fixture.api.finished(&first).await;
    // A timeout that is much shorter than the wait for the person.
    let args = json!({ "to": "ada", "sum": 900, "tags": [] });
    let body = json!({ "run_id": "r", "args": args, "timeout_ms": 2_000 });
    let ticket = fixture.api.post("/v1/tools/mail.send/invoke", body).await.is(202);
    let approval = ticket["approval_id"].as_str().unwrap();
    let shown = fixture.approval(approval).await;
    assert_eq!(shown["previous"]["tool_call_id"], json!(first));
    let difference = shown["difference"].as_array().unwrap();
    assert!(difference.contains(&json!({ "path": "/sum", "before": 10, "after": 900 })));
    assert!(difference.contains(&json!({ "path": "/tags/0", "before": "a" })), "{shown}");
    let deadline = |call: &Value| call["deadline_at_ms"].as_u64().unwrap();
    let id = ticket["tool_call_id"].as_str().unwrap();
    let waiting = fixture.api.call(id).await;
    assert_eq!(deadline(&waiting), shown["expires_at_ms"].as_u64().unwrap());
    fixture.approve(approval).await;
    let released = fixture.api.call(id).await;
    let left = deadline(&released) - shown["created_at_ms"].as_u64().unwrap();
    assert!((1_500..60_000).contains(&left), "it has its own time again: {left}");
}

#[tokio::test]
async fn a_rejection_reaches_the_caller_with_its_reason() {
    let fixture = Fixture::start().await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({})).await;
    let reason = "the recipient is not a customer";
    let decision = json!({ "approval_id": approval_id, "verdict": "reject", "reason": reason });
    let result = fixture.decide(decision).await;
    assert_eq!(result["call_status"], "FAILED");
    let call = fixture.api.finished(&call_id).await;
    assert_eq!(call["error"]["code"], "PERMISSION_DENIED");
    assert_eq!(
        message(&call["error"]),
        format!("operator rejected this call of mail.send: {reason}")
    );
    assert_eq!(call["error"]["detail"]["approval_id"], json!(approval_id));
}

#[tokio::test]
async fn without_a_decision_the_call_fails() {
    let fixture = Fixture::start().await;
    fixture.ask("mail", &["mail.send"], |rule| rule.expires_in_ms = Some(400)).await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({})).await;
    let call = fixture.api.finished(&call_id).await;
    assert_eq!(
        (&call["status"], &call["error"]["code"]),
        (&json!("FAILED"), &json!("PERMISSION_DENIED"))
    );
    assert!(message(&call["error"]).starts_with("approval expired"), "{call}");
    assert_eq!(fixture.approval(&approval_id).await["status"], "expired");
    let late = json!({ "decisions": [{ "approval_id": approval_id, "verdict": "approve" }] });
    let refused = fixture.operator.post("/v1/approvals/decide", late).await;
    let error = refused.refused(409, "CONFLICT");
    assert!(message(&error).contains("expired"), "{error}");
}

#[tokio::test]
async fn the_requester_never_approves_its_own_call() {
    let server = Server::start().await;
    let admin = server.keyed("default", "root", "admin", &[]).await;
    let ada = server.keyed("default", "ada", "agent,approver", &["mail.*"]).await;
    let bob = server.keyed("default", "bob", "approver", &[]).await;
    let eve = server.keyed("default", "eve", "agent", &["mail.*"]).await;
    let auditor = server.keyed("default", "audrey", "auditor", &[]).await;
    let stranger = server.keyed("other", "zoe", "admin", &[]).await;
    admin.register("mailer", json!([crate::support::api::offer("mail.send")])).await;
    let operator = server.operator();
    let fixture = Fixture { api: admin.clone(), operator, server };
    fixture.ask("mail", &["mail.send"], |_| {}).await;
    let (call_id, id) = fixture.held(&ada, json!({})).await;
    let body = json!({ "decisions": [{ "approval_id": id, "verdict": "approve" }] });
    let decide = |api: &crate::support::Api| {
        let (api, body) = (api.clone(), body.clone());
        async move { api.post("/v1/approvals/decide", body).await }
    };
    let own = decide(&ada).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&own).contains("no caller decides about its own"), "{own}");
    crate::support::until("the refusal in the audit log", || async {
        let audited = admin.audit_entries().await;
        let is_refusal =
            |entry: &&Value| entry["action"] == "approve.denied" && entry["subject"] == id.as_str();
        audited.iter().any(|entry| is_refusal(&entry)).then_some(())
    })
    .await;
    decide(&eve).await.refused(403, "PERMISSION_DENIED");
    decide(&auditor).await.refused(403, "PERMISSION_DENIED");
    // An approval of another project looks like one that does not exist.
    let foreign = decide(&stranger).await.refused(404, "NOT_FOUND");
    let unknown = json!({ "decisions": [{ "approval_id": "apr_none", "verdict": "approve" }] });
    let none = stranger.post("/v1/approvals/decide", unknown).await.refused(404, "NOT_FOUND");
    assert_eq!(message(&foreign).replace(&id, "X"), message(&none).replace("apr_none", "X"));
    stranger.get(&format!("/v1/approvals/{id}")).await.refused(404, "NOT_FOUND");
    // An agent sees its own approvals only; approvers and auditors see all.
    let count = |list: Value| list["approvals"].as_array().unwrap().len();
    assert_eq!(count(eve.get("/v1/approvals").await.is(200)), 0);
    eve.get(&format!("/v1/approvals/{id}")).await.refused(404, "NOT_FOUND");
    assert_eq!(count(ada.get("/v1/approvals").await.is(200)), 1);
    assert_eq!(count(bob.get("/v1/approvals").await.is(200)), 1);
    assert_eq!(count(auditor.get("/v1/approvals").await.is(200)), 1);
    assert_eq!(fixture.api.call(&call_id).await["status"], "PENDING", "nothing was released");

    // A rule can name the approvers, and a rule can take the right away.
    fixture.ask("mail", &["mail.send"], |rule| rule.approvers = vec!["carol".into()]).await;
    let (_, second) = fixture.held(&ada, json!({ "n": 2 })).await;
    let body = json!({ "decisions": [{ "approval_id": second, "verdict": "approve" }] });
    let error = bob.post("/v1/approvals/decide", body.clone()).await;
    assert!(message(&error.refused(403, "PERMISSION_DENIED")).contains("carol"));
    fixture.ask("mail", &["mail.send"], |rule| rule.approvers = vec!["bo*".into()]).await;
    let (_, third) = fixture.held(&ada, json!({ "n": 3 })).await;
    set_rule(&fixture.server, "no-bob", RuleVerdict::Deny, &["mail.*"], |rule| {
        rule.agents = vec!["bob".into()];
        rule.actions = vec![RuleAction::Approve];
    })
    .await;
    let body = json!({ "decisions": [{ "approval_id": third, "verdict": "approve" }] });
    let error = bob.post("/v1/approvals/decide", body.clone()).await;
    assert!(message(&error.refused(403, "PERMISSION_DENIED")).contains("no-bob"));
    fixture.approve(&third).await;
}

#[tokio::test]
async fn without_keys_only_the_operator_token_decides() {
    let fixture = Fixture::start().await;
    let (_, id) = fixture.held(&fixture.api, json!({})).await;
    let body = json!({ "decisions": [{ "approval_id": id, "verdict": "approve" }] });
    let error = fixture.api.post("/v1/approvals/decide", body).await;
    assert!(message(&error.refused(401, "UNAUTHENTICATED")).contains("operator token"));
    assert_eq!(fixture.approve(&id).await["ok"], true);
}

#[tokio::test]
async fn each_decision_has_its_own_result() {
    let fixture = Fixture::start().await;
    let (_, first) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let (_, second) = fixture.held(&fixture.api, json!({ "n": 2 })).await;
    fixture.approve(&first).await;
    let repeated = fixture.approve(&first).await;
    assert_eq!((&repeated["ok"], &repeated["repeated"]), (&json!(true), &json!(true)));
    let decisions = json!({ "decisions": [
        { "approval_id": "apr_unknown", "verdict": "approve" },
        { "approval_id": first, "verdict": "reject" },
        { "approval_id": second, "verdict": "reject", "reason": "no" },
    ] });
    let answer = fixture.operator.post("/v1/approvals/decide", decisions).await.is(200);
    assert_eq!((&answer["decided"], &answer["failed"]), (&json!(1), &json!(2)), "{answer}");
    let codes = |n: usize| answer["results"][n]["error"]["code"].clone();
    assert_eq!((codes(0), codes(1)), (json!("NOT_FOUND"), json!("CONFLICT")));
    assert_eq!(answer["results"][2]["status"], "rejected");
}

#[tokio::test]
async fn a_malformed_request_decides_nothing() {
    let fixture = Fixture::start().await;
    let (call_id, id) = fixture.held(&fixture.api, json!({})).await;
    let with = |more: Value| {
        let mut decision = json!({ "approval_id": id, "verdict": "approve" });
        decision.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        decision
    };
    for (decisions, pointer) in [
        (json!([]), "/decisions"),
        (json!([with(json!({})), with(json!({}))]), "/decisions/1/approval_id"),
        (json!([with(json!({ "verdict": "yes" }))]), "/decisions/0/verdict"),
        (json!([with(json!({ "scope": "always" }))]), "/decisions/0/scope"),
        (json!([with(json!({ "scope": "until" }))]), "/decisions/0/until"),
        (json!([with(json!({ "until": "2999-01-01T00:00:00Z" }))]), "/decisions/0/until"),
        (json!([with(json!({ "scope": "until", "until": 1_000 }))]), "/decisions/0/until"),
        (json!([with(json!({ "verdict": "reject", "args": {} }))]), "/decisions/0/args"),
        (json!([with(json!({ "args": [1] }))]), "/decisions/0/args"),
        (json!([with(json!({ "verdict": "reject", "scope": "run" }))]), "/decisions/0/scope"),
    ] {
        let body = json!({ "decisions": decisions });
        let answer = fixture.operator.post("/v1/approvals/decide", body.clone()).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["pointer"], pointer, "{body}");
    }
    let unknown = json!({ "decisions": [with(json!({ "reasons": "typo" }))] });
    let answer = fixture.operator.post("/v1/approvals/decide", unknown).await;
    assert!(message(&answer.refused(422, "VALIDATION_ERROR")).contains("reason"));
    assert_eq!(fixture.api.call(&call_id).await["hold"], "approval");
}

#[tokio::test]
async fn other_arguments_make_a_new_call_whose_outcome_the_first_one_has() {
    let fixture = Fixture::start().await;
    let (call_id, id) = fixture.held(&fixture.api, json!({ "sum": 900 })).await;
    let decision = json!({ "approval_id": id, "verdict": "approve", "args": { "sum": 100 } });
    let result = fixture.decide(decision).await;
    let new_id = result["replaced_by"].as_str().unwrap();
    let waiting = fixture.api.call(&call_id).await;
    assert_eq!((&waiting["status"], &waiting["replaced_by"]), (&json!("PENDING"), &json!(new_id)));
    let request = fixture.execute(json!("sent 100")).await;
    assert_eq!(request["tool_call_id"], json!(new_id), "only the new call runs");
    assert_eq!(request["args"], json!({ "sum": 100 }));
    let first = fixture.api.finished(&call_id).await;
    assert_eq!((&first["status"], &first["result"]), (&json!("SUCCEEDED"), &json!("sent 100")));
    assert_eq!(first["args"], json!({ "sum": 900 }), "what was requested stays on record");
    let new = fixture.api.call(new_id).await;
    assert_eq!((&new["replaces"], &new["approval_id"]), (&json!(call_id), &json!(id)));
    assert_eq!(fixture.approval(&id).await["decision"]["replaced_by"], json!(new_id));

    // Arguments that do not fit are refused, and the call keeps waiting.
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer" } } });
    let strict = json!([{ "name": "mail.strict", "description": "s", "schema": schema }]);
    fixture.api.register("strict", strict).await;
    fixture.ask("strict", &["mail.strict"], |_| {}).await;
    let body = json!({ "run_id": "r", "args": { "n": 1 } });
    let ticket = fixture.api.post("/v1/tools/mail.strict/invoke", body).await.is(202);
    let decision =
        json!({ "approval_id": ticket["approval_id"], "verdict": "approve", "args": { "n": "x" } });
    let answer = fixture.operator.post("/v1/approvals/decide", json!({ "decisions": [decision] }));
    answer.await.refused(422, "VALIDATION_ERROR");
    let held = fixture.api.call(ticket["tool_call_id"].as_str().unwrap()).await;
    assert_eq!(held["hold"], "approval");
}

#[tokio::test]
async fn a_canceled_call_cancels_its_approval() {
    let fixture = Fixture::start().await;
    let (call_id, id) = fixture.held(&fixture.api, json!({})).await;
    fixture.api.post(&format!("/v1/tool_calls/{call_id}/cancel"), json!({})).await.is(200);
    assert_eq!(fixture.approval(&id).await["status"], "canceled");
    let url = format!("http://{}/metrics", fixture.server.address);
    let text = reqwest::get(url).await.unwrap().text().await.unwrap();
    assert!(text.contains("toolcrib_approvals_pending"), "{text}");
    assert!(text.contains("toolcrib_approval_decisions_total{decision=\"canceled\"}"), "{text}");
    assert!(text.contains("toolcrib_approval_wait_seconds"), "{text}");
}
