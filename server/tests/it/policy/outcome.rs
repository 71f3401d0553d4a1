//! The shape of outcomes, and the messages of timeouts.

use serde_json::{Value, json};
use toolcrib::{Effect, Engine, FnTool};

use crate::support::Server;
use crate::support::api::{message, offer, offer_with};
use crate::support::mcp::Mcp;
use crate::support::ws::Ws;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[tokio::test]
async fn the_outcome_of_a_success_has_data_and_metrics() {
    let server = Server::start().await;
    let api = server.api();
    let id = api.invoke("calculation.eval", json!({ "expression": "2*21" })).await;
    let call = api.finished(&id).await;
    let outcome = &call["outcome"];
    assert_eq!(keys(outcome), ["data", "error", "metrics", "ok"]);
    assert_eq!((&outcome["ok"], &outcome["error"]), (&json!(true), &Value::Null));
    assert_eq!(outcome["data"], call["result"], "equal to the field `result`");
    let metrics = &outcome["metrics"];
    assert_eq!(keys(metrics), ["attempts", "latency_ms", "queue_ms", "retries"]);
    assert_eq!((&metrics["attempts"], &metrics["retries"]), (&json!(1), &json!(0)));
    let took = call["completed_at_ms"].as_u64().unwrap() - call["created_at_ms"].as_u64().unwrap();
    assert_eq!(metrics["latency_ms"], took);
    assert!(metrics["queue_ms"].as_u64().unwrap() <= took);
}

#[tokio::test]
async fn the_outcome_of_a_failure_has_the_error() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(api.call(&id).await["outcome"], Value::Null, "an open call has no outcome");
    api.fail(&id, json!({ "message": "broken", "detail": [1] })).await;
    let call = api.call(&id).await;
    let outcome = &call["outcome"];
    assert_eq!((&outcome["ok"], &outcome["data"]), (&json!(false), &Value::Null));
    assert_eq!(outcome["error"], call["error"]);
    // The tool is irreversible.
    let text = "broken; it may have taken effect, so a retry is not safe";
    let error = json!({
        "code": "RUNTIME_ERROR", "message": text, "detail": [1], "retryable": false
    });
    assert_eq!(call["error"], error);
}

#[tokio::test]
async fn a_failed_irreversible_call_says_everywhere_that_a_retry_is_not_safe() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("pay.tool")])).await;
    let unsafe_retry = |error: &Value| {
        assert_eq!(error["retryable"], false, "{error}");
        assert!(
            message(error).contains("it may have taken effect, so a retry is not safe"),
            "{error}"
        );
    };
    // A batch, in the envelope and in the format of OpenAI.
    let call = json!({ "id": "b", "type": "function",
        "function": { "name": "pay__tool", "arguments": "{}" } });
    let body = json!({ "run_id": "run_1",
        "tool_calls": [{ "call_id": "a", "name": "pay.tool", "args": {} }, call] });
    let posting = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/tool_calls", body).await.is(200) })
    };
    for _ in 0..2 {
        let request = client.take().await;
        client.fail(&request, json!("no paper")).await;
    }
    let answer = posting.await.unwrap();
    unsafe_retry(&answer["results"][0]["error"]);
    unsafe_retry(&answer["messages"][0]["error"]);
    let content = answer["messages"][1]["content"].as_str().unwrap();
    unsafe_retry(&serde_json::from_str::<Value>(content).unwrap()["error"]);
    // MCP: the text that the model reads, and the structured error.
    let calling = {
        let mcp = Mcp::modern(&api);
        tokio::spawn(async move { mcp.call("pay.tool", json!({})).await.result() })
    };
    let request = client.take().await;
    client.fail(&request, json!("no paper")).await;
    let result = calling.await.unwrap();
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("the same call may do it a second time"), "{text}");
    unsafe_retry(&result["structuredContent"]["error"]);
    // A failure that certainly had no effect stays retryable.
    let id = api.invoke_with("pay.tool", json!({ "run_id": "r", "args": {}, "retry": 0 })).await;
    let request = client.take().await;
    client.fail(&request, json!({ "message": "refused", "happened": false })).await;
    let call = api.call(&id).await;
    assert_eq!((message(&call["error"]), &call["error"]["retryable"]), ("refused", &json!(true)));
}

#[tokio::test]
async fn an_outcome_is_the_same_after_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    let read = offer_with("a.tool", json!({ "effect": "read", "policy": quick_retries() }));
    api.register("c1", json!([read])).await;
    let id = api.invoke("a.tool", json!({})).await;
    api.fail(&id, json!("once")).await;
    let request = api.poll("c1").await;
    assert_eq!(request["attempt"], 2);
    api.succeed(&id, json!("twice")).await;
    let before = api.call(&id).await;
    let server = server.restart().await;
    assert_eq!(server.api().call(&id).await, before);
}

fn quick_retries() -> Value {
    json!({ "max_retries": 5, "backoff": { "initial_ms": 1, "max_ms": 1 } })
}

#[tokio::test]
async fn a_timeout_error_says_whether_the_call_took_effect() {
    let server = Server::start().await;
    let api = server.api();
    let reads = offer_with("reads.tool", json!({ "effect": "read" }));
    let limited = offer_with("full.tool", json!({ "policy": { "max_parallel": 1 } }));
    let tools = json!([reads, offer("acts.tool"), limited]);
    api.register("c1", tools).await;
    let short = |ms: u64| json!({ "run_id": "run_1", "args": {}, "timeout_ms": ms });
    let unacknowledged = api.invoke_with("acts.tool", short(30)).await;
    let error = api.finished(&unacknowledged).await["error"].clone();
    assert_eq!((&error["code"], &error["retryable"]), (&json!("TIMEOUT"), &json!(true)));
    assert!(message(&error).contains("no executor took acts.tool within 30 ms"), "{error}");
    assert!(message(&error).contains("is the client that offers it connected?"), "{error}");
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    for (tool, expected, retryable) in [
        ("reads.tool", "it only reads, so calling again is safe", true),
        ("acts.tool", "it was in flight: it may have taken effect, so a retry is not safe", false),
    ] {
        // With retries, the first attempt would have a third of the time.
        let mut once = short(1_500);
        once["retry"] = json!(0);
        let id = api.invoke_with(tool, once).await;
        client.take().await;
        let call = api.finished(&id).await;
        assert_eq!(call["status"], "TIMEOUT", "{call}");
        assert!(message(&call["error"]).contains("did not answer within 1500 ms"), "{call}");
        assert!(message(&call["error"]).contains(expected), "{call}");
        assert_eq!(call["error"]["retryable"], retryable);
        client.expect_message("tool_cancel").await;
    }
    api.invoke("full.tool", json!({})).await;
    let waiting = api.invoke_with("full.tool", short(30)).await;
    let call = api.finished(&waiting).await;
    assert!(message(&call["error"]).contains("no execution slot was free for full.tool"), "{call}");
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct NoArgs {}

#[tokio::test]
async fn a_tool_of_the_server_that_exceeds_its_timeout_is_stopped() {
    let hangs = |_: NoArgs| std::future::pending::<Result<i64, String>>();
    let tool = FnTool::new("slow.tool", "Never answers", hangs).effect(Effect::Read).timeout_ms(50);
    let engine = Engine::builder().tool(tool).start().await.unwrap();
    let server = Server::with_engine(engine).await;
    let api = server.api();
    let id = api.invoke("slow.tool", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["error"]["code"]), (&json!("TIMEOUT"), &json!("TIMEOUT")));
    assert!(message(&call["error"]).contains("slow.tool did not answer within 50 ms"), "{call}");
    let history = api.history(&id).await;
    assert_eq!(history.last().unwrap(), "tool.call.timeout");
}
