//! Retries: only where a second attempt is safe, and not more often than allowed.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{message, offer_with};
use crate::support::ws::Ws;

fn tool(effect: &str, max_retries: u32) -> Value {
    let backoff = json!({ "initial_ms": 1, "factor": 1.0, "max_ms": 1, "jitter": 0.0 });
    let policy = json!({ "max_retries": max_retries, "backoff": backoff });
    json!([offer_with("a.tool", json!({ "effect": effect, "policy": policy }))])
}

#[tokio::test]
async fn a_read_that_fails_twice_succeeds_on_the_third_attempt() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tool("read", 2)).await;
    let id = api.invoke("a.tool", json!({ "n": 1 })).await;
    for attempt in 1..=2 {
        let request = client.take().await;
        assert_eq!(request["attempt"], attempt);
        assert_eq!(request["redelivered"], false, "a new attempt is not a redelivery");
        assert_eq!(request["args"], json!({ "n": 1 }));
        let answer = client.fail(&request, json!(format!("failure {attempt}"))).await;
        assert_eq!(answer["status"], "PENDING", "a retry is scheduled");
    }
    let request = client.take().await;
    assert_eq!(request["attempt"], 3);
    client.succeed(&request, json!("at last")).await;
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("at last")));
    let metrics = &call["outcome"]["metrics"];
    assert_eq!((&metrics["attempts"], &metrics["retries"]), (&json!(3), &json!(2)));
    assert_eq!(call["error"], Value::Null);
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let retrying = events.wait_for("tool.call.retrying").await;
    assert_eq!(retrying.data["code"], "RUNTIME_ERROR");
    assert_eq!(retrying.data["message"], "failure 1");
    assert!(retrying.data["next_attempt_at_ms"].is_u64());
}

#[tokio::test]
async fn retries_are_limited_by_the_request_and_the_tool() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tool("idempotent", 5)).await;
    for (retry, attempts) in [(json!(1), 2), (json!(0), 1), (Value::Null, 6)] {
        let body = json!({ "run_id": "run_1", "args": {}, "retry": retry });
        let id = api.invoke_with("a.tool", body).await;
        for attempt in 1..=attempts {
            let request = client.take().await;
            let answer = client.fail(&request, json!("always")).await;
            let expected = if attempt == attempts { "FAILED" } else { "PENDING" };
            assert_eq!(answer["status"], expected);
        }
        let call = api.call(&id).await;
        assert_eq!(call["outcome"]["metrics"]["attempts"], attempts);
        assert_eq!(message(&call["error"]), "always");
    }
}

#[tokio::test]
async fn an_irreversible_call_is_not_retried() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tool("irreversible", 5)).await;
    let body = json!({ "run_id": "run_1", "args": {}, "retry": 5 });
    let id = api.invoke_with("a.tool", body).await;
    let request = client.take().await;
    let answer = client.fail(&request, json!({ "message": "no", "retryable": true })).await;
    assert_eq!(answer["status"], "FAILED");
    client.expect_no_message().await;
    assert_eq!(api.call(&id).await["outcome"]["metrics"]["attempts"], 1);
}

#[tokio::test]
async fn an_irreversible_call_without_side_effect_is_retried() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tool("irreversible", 1)).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    let error = json!({ "message": "could not connect", "happened": false });
    assert_eq!(client.fail(&request, error.clone()).await["status"], "PENDING");
    let request = client.take().await;
    assert_eq!(request["attempt"], 2);
    assert_eq!(client.fail(&request, error).await["status"], "FAILED");
    assert_eq!(api.call(&id).await["outcome"]["metrics"]["retries"], 1);
}

#[tokio::test]
async fn a_non_retryable_error_is_not_retried() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tool("read", 5)).await;
    for error in [
        json!({ "message": "wrong arguments", "code": "VALIDATION_ERROR" }),
        json!({ "message": "never", "retryable": false }),
    ] {
        api.invoke("a.tool", json!({})).await;
        let request = client.take().await;
        assert_eq!(client.fail(&request, error).await["status"], "FAILED");
    }
    client.expect_no_message().await;
}

#[tokio::test]
async fn a_call_shows_the_time_of_its_next_attempt() {
    let server = Server::start().await;
    let api = server.api();
    let policy =
        json!({ "max_retries": 1, "backoff": { "initial_ms": 86_400_000u64, "jitter": 0 } });
    let slow = offer_with("a.tool", json!({ "effect": "read", "policy": policy }));
    api.register("c1", json!([slow])).await;
    let body = json!({ "run_id": "run_1", "args": {}, "timeout_ms": 86_400_000u64 });
    let id = api.invoke_with("a.tool", body).await;
    // The maximum of the backoff policy limits the delay to 30 s.
    let answer = api.fail(&id, json!("later")).await;
    assert_eq!(answer["status"], "PENDING");
    // A client that lost the answer reports the failure again.
    assert_eq!(api.fail(&id, json!("later")).await, answer);
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["hold"]), (&json!("PENDING"), &json!("retry")));
    let due = call["hold_details"]["until_ms"].as_u64().unwrap()
        - call["created_at_ms"].as_u64().unwrap();
    assert!((30_000..60_000).contains(&due), "{call}");
    let late = api.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    late.refused(409, "CONFLICT");
    let canceled = api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(canceled["status"], "CANCELED");
}

#[tokio::test]
async fn the_configured_policy_overrides_the_tools_policy() {
    let server = Server::with(|config| {
        let settings = config.tools.entry("a.tool".to_owned()).or_default();
        settings.policy.max_retries = Some(0);
    })
    .await;
    let api = server.api();
    api.register("c1", tool("read", 5)).await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(api.fail(&id, json!("no")).await["status"], "FAILED");
    assert_eq!(api.call(&id).await["outcome"]["metrics"]["attempts"], 1);
}

#[tokio::test]
async fn a_scheduled_retry_survives_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", tool("read", 1)).await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(api.fail(&id, json!("first")).await["status"], "PENDING");
    let server = server.restart().await;
    let api = server.api();
    let request = api.poll("c1").await;
    assert_eq!((&request["tool_call_id"], &request["attempt"]), (&json!(id), &json!(2)));
    api.succeed(&id, json!(1)).await;
    assert_eq!(api.call(&id).await["outcome"]["metrics"]["retries"], 1);
}
