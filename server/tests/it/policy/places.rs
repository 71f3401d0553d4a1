//! How many at once, and what happens when there is no room.

use serde_json::{Value, json};

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

#[tokio::test]
async fn a_tools_own_limit_holds() {
    let server = Server::start().await;
    let api = server.api();
    let tool = offer_with("a.tool", json!({ "policy": { "max_parallel": 1 } }));
    let mut client = Ws::offering(&api, "c1", json!([tool, offer("b.tool")])).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(api.invoke("a.tool", json!({})).await);
    }
    for id in &ids {
        let request = client.take().await;
        assert_eq!(request["tool_call_id"], json!(id), "one after the other, in order");
        client.quiet().await;
        // Another tool is not held up by it.
        let other = api.invoke("b.tool", json!({})).await;
        let request = client.take().await;
        assert_eq!(request["tool_call_id"], json!(other));
        client.succeed(&request, json!(0)).await;
        let mine = json!({ "tool_call_id": id, "attempt": 1 });
        client.succeed(&mine, json!(1)).await;
    }
    let last = api.call(&ids[2]).await;
    let metrics = &last["outcome"]["metrics"];
    assert!(metrics["queue_ms"].as_u64() > Some(0), "it stood in line: {metrics}");
}

#[tokio::test]
async fn a_limit_counts_attempts_that_failed_as_over() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({
        "max_parallel": 1, "max_retries": 1, "backoff": { "initial_ms": 1, "max_ms": 1 }
    });
    let tool = offer_with("a.tool", json!({ "effect": "read", "policy": policy }));
    let mut client = Ws::offering(&api, "c1", json!([tool])).await;
    let first = api.invoke("a.tool", json!({})).await;
    let second = api.invoke("a.tool", json!({})).await;
    for _ in 0..2 {
        let request = client.take().await;
        client.fail(&request, json!("once")).await;
    }
    for _ in 0..2 {
        let request = client.take().await;
        client.quiet().await;
        client.succeed(&request, json!(1)).await;
    }
    for id in [first, second] {
        assert_eq!(api.call(&id).await["status"], "SUCCEEDED");
    }
}

/// Calls until no more are taken; gives the tickets and the refusal.
async fn fill(api: &Api, most: usize) -> (Vec<String>, Value, u16) {
    let mut taken = Vec::new();
    loop {
        let body = json!({ "run_id": "run_1", "args": {} });
        let answer = api.post("/v1/tools/a.tool/invoke", body).await;
        if answer.status == 202 {
            taken.push(answer.body["tool_call_id"].as_str().unwrap().to_owned());
            assert!(taken.len() <= most, "more than {most} were taken");
            continue;
        }
        let after: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!(after >= 1, "whole seconds: {after}");
        let status = answer.status.as_u16();
        let code = if status == 429 { "RATE_LIMITED" } else { "OVERLOADED" };
        return (taken, answer.refused(status, code), status);
    }
}

#[tokio::test]
async fn a_project_that_has_too_many_open_is_told_to_wait() {
    let server = Server::with(|config| config.limits.max_open_calls_per_project = 3).await;
    let (api, other) = (server.api(), server.api().project("other"));
    for api in [&api, &other] {
        api.register("c1", json!([offer("a.tool")])).await;
    }
    let (taken, error, status) = fill(&api, 3).await;
    assert_eq!((taken.len(), status), (3, 429));
    assert_eq!(error["retryable"], true);
    assert!(message(&error).contains("retry is safe"), "{error}");
    let (theirs, _, _) = fill(&other, 3).await;
    assert_eq!(theirs.len(), 3, "another project is not held up");
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 3, "what was refused is no call");
    api.succeed(&taken[0], json!(1)).await;
    let (more, _, _) = fill(&api, 1).await;
    assert_eq!(more.len(), 1, "one ended, one is taken");
}

#[tokio::test]
async fn a_server_that_has_too_many_open_says_so() {
    let server = Server::with(|config| config.limits.max_open_calls = 2).await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let (taken, error, status) = fill(&api, 2).await;
    assert_eq!((taken.len(), status), (2, 503));
    assert_eq!(error["retryable"], true);
    for id in &taken {
        api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    }
    let (again, _, _) = fill(&api, 2).await;
    assert_eq!(again.len(), 2, "canceled calls make room");
}

#[tokio::test]
async fn a_replay_and_a_refused_call_take_no_room() {
    let server = Server::with(|config| config.limits.max_open_calls_per_project = 2).await;
    let api = server.api();
    let schema = json!({ "type": "object", "required": ["n"] });
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": schema }))])).await;
    for _ in 0..5 {
        let bad = json!({ "run_id": "run_1", "args": {} });
        api.post("/v1/tools/a.tool/invoke", bad).await.refused(422, "VALIDATION_ERROR");
        let same = json!({ "run_id": "run_1", "args": { "n": 1 }, "idempotency_key": "k" });
        api.post("/v1/tools/a.tool/invoke", same).await.is(202);
    }
    api.invoke("a.tool", json!({ "n": 2 })).await;
}

#[tokio::test]
async fn the_servers_own_limit_makes_calls_wait_and_loses_none() {
    let server = Server::with(|config| config.policy.max_parallel = 1).await;
    let api = server.api();
    let calls = (0..30).map(|n| {
        let api = api.clone();
        async move {
            let args = json!({ "expression": format!("{n}*2") });
            let id = api.invoke("calculation.eval", args).await;
            (n, api.finished(&id).await)
        }
    });
    for (n, call) in futures::future::join_all(calls).await {
        assert_eq!(call["result"]["result"], n * 2, "{call}");
    }
}

#[tokio::test]
async fn who_has_ended_does_not_stand_in_line() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({ "policy": { "max_parallel": 1 } });
    api.register("c1", json!([offer_with("a.tool", policy)])).await;
    // Its client is away, so that it keeps the only place.
    let first = api.invoke("a.tool", json!({})).await;
    let mut waiting = Vec::new();
    for _ in 0..10 {
        waiting.push(api.invoke("a.tool", json!({})).await);
    }
    assert_eq!(server.engine.queued_call_count(), 10);
    for id in &waiting[1..] {
        api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    }
    assert_eq!(server.engine.queued_call_count(), 1);
    api.succeed(&first, json!(1)).await;
    let next = api.poll("c1").await;
    assert_eq!(next["tool_call_id"], json!(waiting[0]));
    assert_eq!(server.engine.queued_call_count(), 0);
}
