//! Calls of other agents: every route answers them like calls that do not exist.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::offer;
use crate::support::mcp::Mcp;

const UNKNOWN: &str = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV";

/// Returns an id without its prefix, as it is part of the ids of cards.
fn body_of(id: &str) -> &str {
    id.trim_start_matches("tc_")
}

#[tokio::test]
async fn a_call_of_another_agent_is_answered_like_an_unknown_one_on_every_route() {
    let server = Server::start().await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["*"]).await;
    provider.register("c1", json!([offer("x.one")])).await;
    let open = ada.invoke("x.one", json!({})).await;
    let ended = ada.invoke("calculation.eval", json!({"expression": "6*7"})).await;
    ada.finished(&ended).await;
    for id in [&open, &ended] {
        for (method, path) in [
            (Method::GET, format!("/v1/tool_calls/{id}")),
            (Method::GET, format!("/v1/tool_calls/{id}/result")),
            (Method::GET, format!("/v1/tool_calls/{id}?wait_ms=1")),
            (Method::GET, format!("/v1/tool_calls/{id}/events")),
            (Method::GET, format!("/v1/tool_calls/{id}/cards")),
            (Method::GET, format!("/v1/tool_calls/{id}/deliveries")),
            (Method::GET, format!("/v1/cards/card_{}_call", body_of(id))),
            (Method::POST, format!("/v1/tool_calls/{id}/deliveries/repeat")),
            (Method::POST, format!("/v1/tool_calls/{id}/cancel")),
            (Method::POST, format!("/v1/tool_calls/{id}/answer")),
            (Method::GET, format!("/v1/tasks/{id}")),
            (Method::POST, format!("/v1/tasks/{id}/cancel")),
        ] {
            let send = |path: String| {
                let request = bob.request(method.clone(), &path);
                let request = match method == Method::POST {
                    true => request.json(&json!({ "answers": {} })),
                    false => request,
                };
                bob.send(request)
            };
            let forbidden = send(path.clone()).await;
            let unknown = send(path.replace(body_of(id), body_of(UNKNOWN))).await;
            assert_eq!(forbidden.status, unknown.status, "{method} {path}");
            assert_eq!(forbidden.status, 404, "{method} {path}");
            let text = forbidden.body.to_string().replace(body_of(id), body_of(UNKNOWN));
            assert_eq!(text, unknown.body.to_string(), "{method} {path}");
        }
    }
    assert_eq!(ada.call(&open).await["status"], "PENDING", "bob canceled nothing");
    assert_eq!(bob.get("/v1/tool_calls").await.is(200)["tool_calls"], json!([]));
    assert_eq!(ada.get("/v1/tool_calls").await.is(200)["tool_calls"].as_array().unwrap().len(), 2);
    let context = bob.get("/v1/runs/run_1/context").await.is(200);
    assert_eq!(context["tool_results"], json!([]), "{context}");

    // The result tool reads what its caller may read.
    let read = |id: &str| json!({"run_id": "run_1", "args": {"tool_call_id": id}});
    let path = "/v1/tools/result.read/invoke?wait_ms=20000";
    assert_eq!(ada.post(path, read(&ended)).await.is(202)["status"], "SUCCEEDED");
    let refused = bob.post(path, read(&ended)).await.is(202);
    assert_eq!(
        (&refused["status"], &refused["error"]["code"]),
        (&json!("FAILED"), &json!("NOT_FOUND"))
    );
}

#[tokio::test]
async fn a_rule_lets_an_agent_read_and_cancel_the_calls_of_others() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["*"]).await;
    provider.register("c1", json!([offer("x.one"), offer("y.two")])).await;
    let (first, second) =
        (ada.invoke("x.one", json!({})).await, ada.invoke("y.two", json!({})).await);
    let rule = json!({"verdict": "allow", "agents": ["bob"], "tools": ["x.*"],
        "actions": ["read", "cancel"]});
    admin.put("/v1/rules/supervise", rule).await.is(200);
    assert_eq!(bob.call(&first).await["status"], "PENDING");
    let cancel = |id: &str| format!("/v1/tool_calls/{id}/cancel");
    bob.post(&cancel(&second), json!({})).await.refused(404, "NOT_FOUND");
    bob.post(&cancel(&first), json!({})).await.is(200);
    assert_eq!(ada.call(&first).await["status"], "CANCELED");
    let listed = bob.get("/v1/tool_calls").await.is(200);
    assert_eq!(listed["tool_calls"].as_array().unwrap().len(), 1, "{listed}");
    admin.delete("/v1/rules/supervise").await.is(204);
    bob.get(&format!("/v1/tool_calls/{first}")).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn mcp_lists_by_the_rules_and_hides_tasks_of_others() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["*"]).await;
    provider.register("c1", json!([offer("x.one")])).await;
    let hide = json!({"verdict": "deny", "tools": ["x.*"], "actions": ["list"], "agents": ["bob"]});
    admin.put("/v1/rules/hide", hide).await.is(200);
    assert!(Mcp::modern(&ada).names().await.contains(&"x__one".to_owned()));
    assert!(!Mcp::modern(&bob).names().await.contains(&"x__one".to_owned()));
    let id = ada.invoke("x.one", json!({})).await;
    let get =
        |mcp: Mcp, id: String| async move { mcp.ask("tasks/get", json!({ "taskId": id })).await };
    let own = get(Mcp::modern(&ada).with_tasks(), id.clone()).await.result();
    assert_eq!(own["taskId"], Value::from(id.clone()), "{own}");
    let error = get(Mcp::modern(&bob).with_tasks(), id.clone()).await.error(-32602);
    let unknown = get(Mcp::modern(&bob).with_tasks(), UNKNOWN.to_owned()).await.error(-32602);
    assert_eq!(error.to_string().replace(&id, UNKNOWN), unknown.to_string());
}

#[tokio::test]
async fn an_auditor_reads_every_call_and_a_service_those_of_the_user_it_acts_for() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let auditor = server.keyed("p", "eye", "auditor", &[]).await;
    let body = json!({"agent": "service", "roles": ["agent"], "may_assert": ["user", "session"]});
    let key = admin.post("/v1/keys", body).await.is(201)["key"].as_str().unwrap().to_owned();
    let rules = json!({"rules": [{"id": "all", "verdict": "allow"},
        {"id": "not-mallory", "verdict": "deny", "users": ["mallory"], "tools": ["calculation.*"]}]});
    admin.put("/v1/rules", rules).await.is(200);
    let service = server.with_key(&key);
    let send = |method: Method, path: String, user: &str| {
        let request = service.request(method.clone(), &path).header("X-Toolcrib-User", user);
        let body = json!({"run_id": "r", "args": {"expression": "1+1"}});
        let request = if method == Method::POST { request.json(&body) } else { request };
        service.send(request)
    };
    let invoke = "/v1/tools/calculation.eval/invoke?wait_ms=20000".to_owned();
    let denied = send(Method::POST, invoke.clone(), "mallory").await;
    assert_eq!(denied.refused(403, "PERMISSION_DENIED")["detail"]["rule_id"], "not-mallory");
    let call = send(Method::POST, invoke, "mia").await.is(202);
    let path = format!("/v1/tool_calls/{}", call["tool_call_id"].as_str().unwrap());
    send(Method::GET, path.clone(), "mia").await.is(200);
    send(Method::GET, path.clone(), "max").await.refused(404, "NOT_FOUND");
    auditor.get(&path).await.is(200);
    assert_eq!(
        auditor.get("/v1/tool_calls").await.is(200)["tool_calls"].as_array().unwrap().len(),
        1
    );
    auditor.get("/v1/rules").await.is(200);
    auditor.put("/v1/rules/x", json!({"verdict": "deny"})).await.refused(403, "PERMISSION_DENIED");
}
