//! Rules: patterns, deny before allow, default deny, immediate effect of changes.

use serde_json::{Value, json};

use crate::support::api::{message, offer};
use crate::support::{Api, Server};

const EVAL: &str = "/v1/tools/calculation.eval/invoke?wait_ms=20000";

fn sum_body() -> Value {
    json!({ "run_id": "run_1", "args": { "expression": "1+1" } })
}

async fn set_rule(admin: &Api, agent: &str, pattern: &str, verdict: &str) {
    let body = json!({ "agent": agent, "pattern": pattern, "verdict": verdict });
    assert_eq!(admin.put("/v1/rules", body.clone()).await.is(200), body);
}

async fn tools(api: &Api) -> Vec<String> {
    let list = api.get("/v1/tools").await.is(200);
    let tools = list["tools"].as_array().unwrap();
    tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_tool_is_denied_until_a_rule_allows_it() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &[]).await;
    assert_eq!(tools(&ada).await, Vec::<String>::new());
    let error = ada.post(EVAL, sum_body()).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("ada"), "{error}");
    assert!(message(&error).contains("calculation.eval"), "{error}");
    assert!(message(&error).contains("no rule of project \"p\" allows it"), "{error}");
    assert_eq!(error["detail"]["agent"], "ada");
    assert_eq!(error["detail"]["tool"], "calculation.eval");
    ada.get("/v1/tools/calculation.eval").await.refused(404, "TOOL_NOT_FOUND");
    let unknown = ada.post("/v1/tools/no.such/invoke", sum_body()).await;
    unknown.refused(403, "PERMISSION_DENIED");
    let audit = admin.audit_entries().await;
    let entry = &audit[1];
    assert_eq!((&entry["action"], &entry["agent"]), (&json!("call.denied"), &json!("ada")));
    assert_eq!(entry["subject"], "calculation.eval");
    assert!(entry["reason"].as_str().unwrap().contains("no rule"), "{entry}");
    let list = ada.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"], json!([]), "a denied call is not stored");
}

#[tokio::test]
async fn a_rule_change_takes_effect_immediately() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &[]).await;
    ada.post(EVAL, sum_body()).await.refused(403, "PERMISSION_DENIED");
    set_rule(&admin, "ada", "calculation.*", "allow").await;
    assert_eq!(ada.post(EVAL, sum_body()).await.is(202)["status"], "SUCCEEDED");
    assert_eq!(tools(&ada).await, ["calculation.eval"]);
    set_rule(&admin, "ada", "calculation.eval", "deny").await;
    let error = ada.post(EVAL, sum_body()).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("deny calculation.eval for agent ada"), "{error}");
    assert_eq!(tools(&ada).await, Vec::<String>::new());
    let path = "/v1/rules?agent=ada&pattern=calculation.eval";
    assert_eq!(admin.delete(path).await.status, 204);
    assert_eq!(ada.post(EVAL, sum_body()).await.is(202)["status"], "SUCCEEDED");
    admin.delete(path).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn patterns_and_rules_for_all_agents_apply() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    let offers = ["file.read", "file.write", "net.get"].map(offer);
    provider.register("c1", json!(offers)).await;
    let ada = server.keyed("p", "ada", "agent", &["file.*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["*.get", "weather.query"]).await;
    assert_eq!(tools(&ada).await, ["file.read", "file.write"]);
    assert_eq!(tools(&bob).await, ["net.get", "weather.query"]);
    set_rule(&admin, "*", "*.write", "deny").await;
    set_rule(&admin, "*", "database.*", "allow").await;
    assert_eq!(tools(&ada).await, ["database.query", "file.read"]);
    assert_eq!(tools(&bob).await, ["database.query", "net.get", "weather.query"]);
    let body = json!({ "run_id": "run_1", "args": {} });
    let denied = ada.post("/v1/tools/file.write/invoke", body.clone()).await;
    let error = denied.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("deny *.write for agent *"), "{error}");
    ada.post("/v1/tools/file.read/invoke", body).await.is(202);
    let rules = admin.get("/v1/rules").await.is(200);
    let rules = rules["rules"].as_array().unwrap();
    assert!(rules.contains(&json!({
        "id": "deny:*:*.write", "verdict": "deny", "tools": ["*.write"],
        "agent": "*", "pattern": "*.write",
    })));
    assert_eq!(rules.len(), 5);
}

#[tokio::test]
async fn rules_of_another_project_do_not_apply() {
    let server = Server::start().await;
    let other_admin = server.keyed("q", "boss", "admin", &[]).await;
    set_rule(&other_admin, "*", "*", "allow").await;
    let ada = server.keyed("p", "ada", "agent", &[]).await;
    assert_eq!(tools(&ada).await, Vec::<String>::new());
    ada.post(EVAL, sum_body()).await.refused(403, "PERMISSION_DENIED");
}

#[tokio::test]
async fn suggested_names_are_only_tools_the_caller_may_call() {
    let server = Server::start().await;
    let ada = server.keyed("p", "ada", "agent", &["calculation.*"]).await;
    let error = ada.post("/v1/tools/calculation.evil/invoke", sum_body()).await;
    let error = error.refused(404, "TOOL_NOT_FOUND");
    assert_eq!(error["detail"]["nearest"], json!(["calculation.eval"]));
    assert!(message(&error).contains("did you mean \"calculation.eval\"?"), "{error}");
    let error = ada.get("/v1/tools/weather.querry").await.refused(404, "TOOL_NOT_FOUND");
    assert_eq!(error["detail"]["nearest"], json!([]), "forbidden tools are not suggested");
}

#[tokio::test]
async fn a_fallback_that_the_caller_may_not_call_is_not_used() {
    let server = Server::start().await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    let first = json!({
        "name": "first.tool", "schema": {}, "effect": "read", "fallback": [{ "tool": "spare.tool" }]
    });
    provider.register("c1", json!([first, offer("spare.tool")])).await;
    let ada = server.keyed("p", "ada", "agent", &["first.*"]).await;
    let body = json!({ "run_id": "run_1", "args": {}, "retry": 0 });
    let id = ada.invoke_with("first.tool", body).await;
    provider.fail(&id, json!({ "message": "no", "happened": false })).await;
    let call = ada.call(&id).await;
    assert_eq!((&call["status"], &call["ran_tool"]), (&json!("FAILED"), &json!("first.tool")));
}

#[tokio::test]
async fn an_invalid_rule_is_rejected() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    for body in [
        json!({ "agent": "ada", "pattern": "a b", "verdict": "allow" }),
        json!({ "agent": "ada", "pattern": "", "verdict": "allow" }),
        json!({ "agent": "", "pattern": "*", "verdict": "allow" }),
        json!({ "agent": "ada*", "pattern": "*", "verdict": "deny" }),
        json!({ "agent": "ada", "pattern": "*", "verdict": "perhaps" }),
    ] {
        admin.put("/v1/rules", body).await.refused(422, "VALIDATION_ERROR");
    }
    admin.put("/v1/rules", json!({ "agent": "ada" })).await.refused(400, "BAD_REQUEST");
    assert_eq!(admin.get("/v1/rules").await.is(200)["rules"], json!([]));
}
