//! Concurrency limits, and the rejection of calls beyond the limit of open calls.

use serde_json::{Value, json};
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib_server::config::ProjectSettings;

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

#[tokio::test]
async fn max_parallel_of_a_tool_is_respected() {
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
        client.expect_no_message().await;
        // The limit does not delay other tools.
        let other = api.invoke("b.tool", json!({})).await;
        let request = client.take().await;
        assert_eq!(request["tool_call_id"], json!(other));
        client.succeed(&request, json!(0)).await;
        let assignment = json!({ "tool_call_id": id, "attempt": 1 });
        client.succeed(&assignment, json!(1)).await;
    }
    let last = api.call(&ids[2]).await;
    let metrics = &last["outcome"]["metrics"];
    assert!(metrics["queue_ms"].as_u64() > Some(0), "it was queued: {metrics}");
}

#[tokio::test]
async fn a_failed_attempt_frees_its_slot() {
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
        client.expect_no_message().await;
        client.succeed(&request, json!(1)).await;
    }
    for id in [first, second] {
        assert_eq!(api.call(&id).await["status"], "SUCCEEDED");
    }
}

/// Makes calls until one is rejected. Returns the tickets and the rejection.
async fn fill(api: &Api, max: usize) -> (Vec<String>, Value, u16) {
    let mut accepted = Vec::new();
    loop {
        let body = json!({ "run_id": "run_1", "args": {} });
        let answer = api.post("/v1/tools/a.tool/invoke", body).await;
        if answer.status == 202 {
            accepted.push(answer.body["tool_call_id"].as_str().unwrap().to_owned());
            assert!(accepted.len() <= max, "more than {max} were accepted");
            continue;
        }
        let after: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!(after >= 1, "whole seconds: {after}");
        let status = answer.status.as_u16();
        let code = if status == 429 { "RATE_LIMITED" } else { "OVERLOADED" };
        return (accepted, answer.refused(status, code), status);
    }
}

#[tokio::test]
async fn a_project_at_its_limit_of_open_calls_gets_429() {
    let server = Server::with(|config| config.limits.max_open_calls_per_project = 3).await;
    let (api, other) = (server.api(), server.api().project("other"));
    for api in [&api, &other] {
        api.register("c1", json!([offer("a.tool")])).await;
    }
    let (accepted, error, status) = fill(&api, 3).await;
    assert_eq!((accepted.len(), status), (3, 429));
    assert_eq!(error["retryable"], true);
    assert!(message(&error).contains("retry is safe"), "{error}");
    let (theirs, _, _) = fill(&other, 3).await;
    assert_eq!(theirs.len(), 3, "the limit does not affect another project");
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 3, "a rejected call is not stored");
    api.succeed(&accepted[0], json!(1)).await;
    let (more, _, _) = fill(&api, 1).await;
    assert_eq!(more.len(), 1, "one ended, one is accepted");
}

#[tokio::test]
async fn a_server_at_its_limit_of_open_calls_answers_503() {
    let server = Server::with(|config| config.limits.max_open_calls = 2).await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let (accepted, error, status) = fill(&api, 2).await;
    assert_eq!((accepted.len(), status), (2, 503));
    assert_eq!(error["retryable"], true);
    for id in &accepted {
        api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    }
    let (again, _, _) = fill(&api, 2).await;
    assert_eq!(again.len(), 2, "canceled calls free capacity");
}

#[tokio::test]
async fn replayed_and_rejected_calls_take_no_capacity() {
    let server = Server::with(|config| config.limits.max_open_calls_per_project = 2).await;
    let api = server.api();
    let schema = json!({ "type": "object", "required": ["n"] });
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": schema }))])).await;
    for _ in 0..5 {
        let bad = json!({ "run_id": "run_1", "args": {} });
        api.post("/v1/tools/a.tool/invoke", bad).await.refused(422, "VALIDATION_ERROR");
        let request = json!({ "run_id": "run_1", "args": { "n": 1 }, "idempotency_key": "k" });
        api.post("/v1/tools/a.tool/invoke", request).await.is(202);
    }
    api.invoke("a.tool", json!({ "n": 2 })).await;
}

#[tokio::test]
async fn max_parallel_of_the_server_queues_calls_and_loses_none() {
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
async fn max_parallel_of_the_server_and_the_project_counts_clients() {
    let policy = |max_parallel| ExecutionPolicyPatch { max_parallel, ..Default::default() };
    let project = ProjectSettings { policy: policy(Some(1)) };
    for per_project in [false, true] {
        let server = Server::with(|config| match per_project {
            true => drop(config.projects.insert("default".into(), project.clone())),
            false => config.policy.max_parallel = 1,
        })
        .await;
        let api = server.api();
        // Calls that wait for an absent client take no slot from the others.
        api.register("absent", json!([offer("absent.tool")])).await;
        api.invoke("absent.tool", json!({})).await;
        let tools = json!([offer("a.tool"), offer("b.tool")]);
        let mut client = Ws::offering(&api, "c1", tools).await;
        let first = api.invoke("a.tool", json!({})).await;
        let second = api.invoke("b.tool", json!({})).await;
        let sum = api.invoke("calculation.eval", json!({ "expression": "1+1" })).await;
        let request = client.take().await;
        assert_eq!(request["tool_call_id"], json!(first));
        client.expect_no_message().await;
        assert_eq!(api.call(&sum).await["status"], "PENDING", "the client has the only slot");
        client.succeed(&request, json!(1)).await;
        let request = client.take().await;
        assert_eq!(request["tool_call_id"], json!(second));
        client.succeed(&request, json!(2)).await;
        assert_eq!(api.finished(&sum).await["result"]["result"], 2);
    }
}

#[tokio::test]
async fn an_ended_call_leaves_the_queue() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({ "policy": { "max_parallel": 1 } });
    api.register("c1", json!([offer_with("a.tool", policy)])).await;
    // Its client is not connected, so it holds the only slot.
    let first = api.invoke("a.tool", json!({})).await;
    let mut waiting = Vec::new();
    for _ in 0..10 {
        waiting.push(api.invoke("a.tool", json!({})).await);
    }
    assert_eq!(server.engine.calls().queued_call_count(), 10);
    for id in &waiting[1..] {
        api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    }
    assert_eq!(server.engine.calls().queued_call_count(), 1);
    api.succeed(&first, json!(1)).await;
    let next = api.poll("c1").await;
    assert_eq!(next["tool_call_id"], json!(waiting[0]));
    assert_eq!(server.engine.calls().queued_call_count(), 0);
}
