//! `wait_ms`: one request instead of many, for invoke and get.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::Server;
use crate::support::api::offer;

const EVAL: &str = "/v1/tools/calculation.eval/invoke";

#[tokio::test]
async fn invoke_with_wait_returns_the_ended_call() {
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "run_id": "run_1", "args": { "expression": "2*21" } });
    let call = api.post(&format!("{EVAL}?wait_ms=30000"), body.clone()).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED");
    assert_eq!(call["tool_name"], "calculation.eval");
    assert_eq!(call["outcome"]["ok"], true);
    let mut within = body;
    within["wait_ms"] = json!(30_000);
    let call = api.post(EVAL, within).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED", "wait_ms in the body: {call}");
}

#[tokio::test]
async fn invoke_with_wait_returns_the_open_call_after_the_wait() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("slow.tool")])).await;
    let began = Instant::now();
    let body = json!({ "run_id": "run_1", "args": {} });
    let call = api.post("/v1/tools/slow.tool/invoke?wait_ms=100", body).await.is(202);
    assert!(began.elapsed() >= Duration::from_millis(100), "{:?}", began.elapsed());
    assert_eq!(call["status"], "PENDING");
    assert!(call["tool_call_id"].as_str().unwrap().starts_with("tc_"));
    assert_eq!(call["outcome"], json!(null));
}

#[tokio::test]
async fn get_with_wait_returns_as_soon_as_there_is_an_outcome() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("slow.tool")])).await;
    let id = api.invoke("slow.tool", json!({})).await;
    let answer = api.get(&format!("/v1/tool_calls/{id}?wait_ms=50")).await;
    assert_eq!(answer.header("retry-after"), Some("1"), "a hint for polling callers");
    assert_eq!(answer.is(200)["status"], "PENDING");
    let waiting = {
        let (api, path) = (api.clone(), format!("/v1/tool_calls/{id}?wait_ms=50000"));
        tokio::spawn(async move { (api.get(&path).await.is(200), Instant::now()) })
    };
    // An acknowledgement does not end the wait for the outcome.
    let ack = json!({ "client_id": "c1" });
    api.post(&format!("/internal/tool_calls/{id}/ack"), ack).await.is(200);
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    assert!(!waiting.is_finished());
    let submitted = Instant::now();
    api.succeed(&id, json!({ "n": 1 })).await;
    let (call, answered) = waiting.await.unwrap();
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "n": 1 })));
    assert!(answered >= submitted && answered - submitted < Duration::from_secs(20));
}

#[tokio::test]
async fn many_requests_can_wait_for_one_call() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("slow.tool")])).await;
    let id = api.invoke("slow.tool", json!({})).await;
    let waiting = (0..20).map(|_| {
        let (api, id) = (api.clone(), id.clone());
        tokio::spawn(async move { api.finished(&id).await })
    });
    let waiting: Vec<_> = waiting.collect();
    api.succeed(&id, json!("done")).await;
    for waiter in waiting {
        assert_eq!(waiter.await.unwrap()["result"], "done");
    }
}

#[tokio::test]
async fn a_wait_is_capped_by_the_servers_limit() {
    let server = Server::with(|config| config.limits.max_wait_ms = 50).await;
    let api = server.api();
    api.register("c1", json!([offer("slow.tool")])).await;
    let id = api.invoke("slow.tool", json!({})).await;
    let path = format!("/v1/tool_calls/{id}?wait_ms=18446744073709551615");
    assert_eq!(api.get(&path).await.is(200)["status"], "PENDING");
    let error = api.get(&format!("/v1/tool_calls/{id}?wait_ms=soon")).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert!(error["message"].as_str().unwrap().contains("wait_ms"), "{error}");
    let negative = api.get(&format!("/v1/tool_calls/{id}?wait_ms=-1")).await;
    negative.refused(422, "VALIDATION_ERROR");
}

#[tokio::test]
async fn a_wait_can_have_a_unit_or_be_a_prefer_header() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("slow.tool")])).await;
    let body = json!({ "run_id": "run_1", "args": { "expression": "2*21" } });
    let call = api.post(&format!("{EVAL}?wait=30s"), body.clone()).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    let request = api.request(reqwest::Method::POST, EVAL).json(&body);
    let call = api.send(request.header("Prefer", "respond-async, wait=30")).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    let error = api.post(&format!("{EVAL}?wait=soon"), body).await.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"], json!({ "field": "wait" }));
    let ticket = api.post("/v1/tools/slow.tool/invoke", json!({ "run_id": "r", "args": {} })).await;
    assert_eq!(ticket.header("retry-after"), Some("1"));
    let id = ticket.is(202)["tool_call_id"].as_str().unwrap().to_owned();
    let began = Instant::now();
    let path = format!("/v1/tool_calls/{id}");
    let look = api.request(reqwest::Method::GET, &path).header("Prefer", "wait=1");
    assert_eq!(api.send(look).await.is(200)["status"], "PENDING");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    let look = api.request(reqwest::Method::GET, &format!("{path}?wait_ms=0"));
    let began = Instant::now();
    api.send(look.header("Prefer", "wait=30")).await.is(200);
    let body = json!({ "run_id": "r", "args": {}, "wait_ms": 0 });
    let ask = api.request(reqwest::Method::POST, "/v1/tools/slow.tool/invoke").json(&body);
    api.send(ask.header("Prefer", "wait=30")).await.is(202);
    assert!(began.elapsed() < Duration::from_secs(20), "wait_ms takes precedence over Prefer");
}
