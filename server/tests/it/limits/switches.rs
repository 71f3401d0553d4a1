//! Kill switches: effective within a second on every path, and undone by DELETE.

use std::time::{Duration, Instant};

use serde_json::json;
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply};

use crate::openapi::upstream::Upstream;
use crate::support::api::{message, offer, offer_with};
use crate::support::mcp::Mcp;
use crate::support::nats::{Nats, tool};
use crate::support::upstream::Http;
use crate::support::ws::Ws;
use crate::support::{Api, Server, until};

const REASON: &str = "wrong receivers";

async fn switch_off(server: &Server, path: &str) -> Instant {
    let began = Instant::now();
    let body = json!({ "reason": REASON });
    let switch = server.operator().put(&format!("/v1/switches/{path}"), body).await.is(200);
    assert_eq!((&switch["reason"], &switch["set_by"]), (&json!(REASON), &json!("operator")));
    began
}

/// Waits for the end of a call, and asserts that it came within a second of the switch.
async fn failed(api: &Api, id: &str, switched: Instant, code: &str) -> String {
    let call = api.finished(id).await;
    assert!(switched.elapsed() < Duration::from_secs(1), "{:?}", switched.elapsed());
    assert_eq!(
        (&call["status"], &call["error"]["code"]),
        (&json!("FAILED"), &json!(code)),
        "{call}"
    );
    let text = call["error"]["message"].as_str().unwrap().to_owned();
    assert!(text.contains(REASON), "{text}");
    text
}

#[tokio::test]
async fn work_of_clients_is_canceled_and_queued_calls_end() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({ "effect": "irreversible", "policy": { "max_parallel": 1 } });
    let tools = json!([offer_with("mail.send", policy), offer("calc.add")]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    let running = api.invoke("mail.send", json!({})).await;
    let queued = api.invoke("mail.send", json!({})).await;
    let other = api.invoke("calc.add", json!({})).await;
    let mut requests = [client.take().await, client.take().await];
    requests.sort_by_key(|request| request["tool"].as_str() != Some("mail.send"));
    api.until_status(&running, "RUNNING").await;
    let switched = switch_off(&server, "tool/mail.*").await;
    let text = failed(&api, &running, switched, "OUTCOME_UNKNOWN").await;
    assert!(text.contains("may have taken effect"), "{text}");
    failed(&api, &queued, switched, "PERMISSION_DENIED").await;
    let cancel = client.expect_message("tool_cancel").await;
    assert_eq!(cancel["tool_call_id"], running.as_str(), "{cancel}");
    let body = json!({ "run_id": "r", "args": {} });
    let error = api.post("/v1/tools/mail.send/invoke", body).await;
    let error = error.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("tool \"mail.*\" is switched off: wrong receivers"));
    let listed = api.get("/v1/tools/mail.send").await.is(200);
    assert_eq!(listed["available"], false, "{listed}");
    assert!(listed["unavailable_reason"].as_str().unwrap().contains(REASON), "{listed}");
    assert_eq!(api.call(&other).await["status"], "RUNNING", "other tools go on");
    let mcp = Mcp::modern(&api);
    let result = mcp.call("mail.send", json!({})).await.result();
    assert_eq!(result["isError"], true, "{result}");
    assert!(result["content"][0]["text"].as_str().unwrap().contains(REASON), "{result}");
    assert_eq!(server.operator().delete("/v1/switches/tool/mail.*").await.status, 204);
    assert_eq!(api.get("/v1/tools/mail.send").await.is(200)["available"], true);
    let again = api.invoke("mail.send", json!({})).await;
    api.until_status(&again, "PENDING").await;
    let log = server.operator().get("/v1/audit").await.is(200);
    let entries = log["audit"].as_array().unwrap().iter();
    let actions = entries.map(|entry| entry["action"].as_str().unwrap());
    let actions: Vec<&str> = actions.filter(|action| action.starts_with("switch.")).collect();
    assert_eq!(actions, ["switch.removed", "switch.set"]);
}

#[tokio::test]
async fn calls_at_mcp_servers_and_tool_services_are_canceled() {
    let Some(nats) = Nats::start().await else { return };
    let upstream = Http::start().await;
    let (url, nats_url) = (upstream.url(), nats.url());
    let server = Server::with(|config| {
        config.nats.url = Some(nats_url);
        config.mcp = vec![crate::upstreams::http_upstream(&url)];
    })
    .await;
    let api = server.operator();
    crate::upstreams::wait_for_state(&api, "fixture", "ready").await;
    let slow = api.invoke("fixture.slow", json!({})).await;
    until("the upstream to have the call", || async {
        (upstream.fixture.calls() == 1).then_some(())
    })
    .await;
    let switched = switch_off(&server, "source/fixture").await;
    failed(&api, &slow, switched, "PERMISSION_DENIED").await;
    until("the upstream to receive the cancellation", || async {
        (upstream.fixture.canceled() == 1).then_some(())
    })
    .await;
    let mcp = Mcp::modern(&api);
    let resources = mcp.ask("resources/list", json!({})).await.result();
    assert_eq!(resources["resources"], json!([]), "neither are its resources offered");
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let peer = nats.peer().await;
    let work = api.invoke("hand.work", json!({})).await;
    let command = peer.next("hand").await;
    command.ack().await;
    let switched = switch_off(&server, "source/utp").await;
    failed(&api, &work, switched, "OUTCOME_UNKNOWN").await;
}

#[tokio::test]
async fn calls_at_http_apis_end_too() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.operator();
    let options = json!({ "http": { "url": upstream.url("/hang") } });
    let body = json!({ "tool_name": "api.hang", "options": options });
    api.post("/projects/default/tools", body).await.is(201);
    let call = api.invoke("api.hang", json!({})).await;
    until("the API to have the request", || async {
        (upstream.requests().len() == 1).then_some(())
    })
    .await;
    let switched = switch_off(&server, "tool/api.hang").await;
    failed(&api, &call, switched, "PERMISSION_DENIED").await;
}

#[tokio::test]
async fn runs_of_a_switched_off_agent_fail_with_the_reason() {
    // The first model request never ends by itself.
    let stuck = ScriptedBehavior::Stall(ScriptedAnswer::text("never"), 0);
    let model = ScriptedModel::start_with_replies([stuck, text_reply("again")]).await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
    })
    .await;
    let api = server.api();
    let body = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Hi" }] });
    let run = api.post("/v1/runs", body.clone()).await.is(202);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    until("the model request", || async { (!model.requests().is_empty()).then_some(()) }).await;
    let switched = switch_off(&server, "agent/default").await;
    let run = api.get(&format!("{path}?wait_ms=30000")).await.is(200);
    assert!(switched.elapsed() < Duration::from_secs(1), "{:?}", switched.elapsed());
    assert_eq!(run["status"], "FAILED", "{run}");
    assert!(run["error"]["message"].as_str().unwrap().contains(REASON), "{run}");
    let refused = api.post("/v1/runs", body).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&refused).contains(REASON), "{refused}");
    let chat = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Hi" }] });
    let chat = api.post("/v1/chat/completions", chat).await;
    assert_eq!(chat.status, 403);
    assert_eq!(server.operator().delete("/v1/switches/agent/default").await.status, 204);
}

#[tokio::test]
async fn switches_need_a_reason_and_an_operator() {
    let server = Server::start().await;
    let operator = server.operator();
    for body in [json!({}), json!({ "reason": "" }), json!({ "reasn": "x" })] {
        let error = operator.put("/v1/switches/tool/mail.send", body).await;
        error.refused(422, "VALIDATION_ERROR");
    }
    let kind = operator.put("/v1/switches/door/x", json!({ "reason": "why" })).await;
    assert!(
        message(&kind.refused(422, "VALIDATION_ERROR")).contains("tool, agent, source, project")
    );
    let anonymous = server.api().put("/v1/switches/tool/x", json!({ "reason": "why" })).await;
    anonymous.refused(401, "UNAUTHENTICATED");
    operator.get("/v1/switches/tool/x").await.refused(404, "NOT_FOUND");
    assert_eq!(operator.get("/v1/switches").await.is(200), json!({ "switches": [] }));
}
