//! The time of an attempt: hung and absent providers, and clients that disconnect.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use toolcrib::domain::tool::Fallback;
use toolcrib::{Effect, Engine, FnTool};

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

fn request(more: Value) -> Value {
    let mut body = json!({ "run_id": "run_1", "args": {} });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn quick_backoff() -> Value {
    json!({ "backoff": { "initial_ms": 1, "max_ms": 1 } })
}

#[tokio::test]
async fn a_hung_client_is_stopped_and_the_retries_run() {
    let server = Server::start().await;
    let api = server.api();
    let tool = offer_with("a.tool", json!({ "effect": "read", "policy": quick_backoff() }));
    let mut client = Ws::offering(&api, "c1", json!([tool])).await;
    let limits = json!({ "timeout_ms": 30_000, "attempt_timeout_ms": 300, "retry": 2 });
    let id = api.invoke_with("a.tool", request(limits)).await;
    for attempt in 1..=2 {
        let taken = client.take().await;
        assert_eq!(taken["attempt"], attempt);
        let stopped = client.expect_message("tool_cancel").await;
        assert_eq!(stopped["attempt"], attempt);
    }
    let call = api.call(&id).await;
    assert_eq!(
        (&call["attempt_timeout_ms"], &call["deadline_at_ms"].is_u64()),
        (&json!(300), &true)
    );
    let last = client.take().await;
    client.succeed(&last, json!("third time lucky")).await;
    let call = api.call(&id).await;
    assert_eq!((&call["result"], &call["attempt"]), (&json!("third time lucky"), &json!(3)));
    let history = api.history(&id).await;
    assert_eq!(history.iter().filter(|kind| *kind == "tool.call.retrying").count(), 2);
}

#[tokio::test]
async fn without_a_limit_the_attempts_share_the_time_of_the_call() {
    let server = Server::start().await;
    let api = server.api();
    let policy = json!({ "max_retries": 0 });
    let fallback = json!([{ "tool": "spare.tool" }]);
    let first = json!({ "effect": "read", "policy": policy, "fallback": fallback });
    let spare = json!({ "effect": "read", "policy": policy });
    let tools = json!([offer_with("first.tool", first), offer_with("spare.tool", spare)]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    let begun = Instant::now();
    let id = api.invoke_with("first.tool", request(json!({ "timeout_ms": 2_000 }))).await;
    client.take().await;
    let running = api.until_status(&id, "RUNNING").await;
    assert!(running["attempt_deadline_at_ms"].as_u64() < running["deadline_at_ms"].as_u64());
    client.expect_message("tool_cancel").await;
    let spare = client.take().await;
    assert_eq!(spare["tool_name"], "spare.tool");
    assert!(begun.elapsed() < Duration::from_millis(1_900), "{:?}", begun.elapsed());
    client.succeed(&spare, json!("from the spare")).await;
    assert_eq!(api.call(&id).await["result"], "from the spare");
}

#[tokio::test]
async fn a_hung_tool_of_the_server_is_stopped_and_its_fallback_runs() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct NoArgs {}
    let hangs = |_: NoArgs| std::future::pending::<Result<i64, String>>();
    let answers = |_: NoArgs| async { Ok::<i64, String>(7) };
    let fallback = vec![Fallback { tool: "quick.tool".into(), args: None }];
    let slow = FnTool::new("slow.tool", "Never answers", hangs).effect(Effect::Read);
    let slow = slow.timeout_ms(20_000).attempt_timeout_ms(100).fallback(fallback);
    let quick = FnTool::new("quick.tool", "Answers", answers).effect(Effect::Read);
    let engine = Engine::builder().tool(slow).tool(quick).start().await.unwrap();
    let server = Server::with_engine(engine).await;
    let api = server.api();
    let id = api.invoke("slow.tool", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!((&call["ran_tool"], &call["result"]), (&json!("quick.tool"), &json!(7)), "{call}");
    assert_eq!(call["attempt"], 4, "three attempts on the slow tool, then the fallback");
    let late = api.history(&id).await;
    assert!(!late.iter().any(|kind| kind == "tool.call.report_ignored"), "{late:?}");
}

#[tokio::test]
async fn an_irreversible_attempt_without_an_answer_ends_with_an_unknown_outcome() {
    let server = Server::start().await;
    let api = server.api();
    let tool = offer_with("pay.tool", json!({ "attempt_timeout_ms": 300 }));
    let mut client = Ws::offering(&api, "c1", json!([tool])).await;
    let id = api.invoke_with("pay.tool", request(json!({ "retry": 2 }))).await;
    let taken = client.take().await;
    client.expect_message("tool_cancel").await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["attempt"]), (&json!("FAILED"), &json!(1)), "{call}");
    let error = &call["error"];
    assert_eq!((&error["code"], &error["retryable"]), (&json!("OUTCOME_UNKNOWN"), &json!(false)));
    assert!(message(error).contains("it may have taken effect, so a retry is not safe"), "{error}");
    client.expect_no_message().await;
    assert_eq!(taken["attempt"], 1);
    // By default, an irreversible attempt has the whole time of its call.
    api.register("c1", json!([offer("other.tool")])).await;
    let id = api.invoke("other.tool", json!({})).await;
    client.take().await;
    let running = api.until_status(&id, "RUNNING").await;
    assert_eq!(running["attempt_deadline_at_ms"], Value::Null, "{running}");
}

#[tokio::test]
async fn an_absent_client_costs_no_attempt_and_its_fallback_runs() {
    let server = Server::start().await;
    let api = server.api();
    let mapping = json!({ "expression": { "value": "40+2" } });
    let fallback = json!([{ "tool": "calculation.eval", "args": mapping }]);
    let tools = json!([
        offer_with("replaced.tool", json!({ "fallback": fallback, "attempt_timeout_ms": 200 })),
        offer_with("alone.tool", json!({ "attempt_timeout_ms": 200 })),
    ]);
    api.register("c1", tools).await;
    let alone = api.invoke("alone.tool", json!({})).await;
    let replaced = api.invoke("replaced.tool", json!({})).await;
    let call = api.finished(&replaced).await;
    assert_eq!(
        (&call["ran_tool"], &call["result"]["result"]),
        (&json!("calculation.eval"), &json!(42)),
        "{call}"
    );
    // The other call still waits for its client, on its first attempt.
    let waiting = api.call(&alone).await;
    assert_eq!((&waiting["hold"], &waiting["attempt"]), (&json!("parked"), &json!(1)));
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    let taken = client.take().await;
    assert_eq!((&taken["tool_call_id"], &taken["attempt"]), (&json!(alone), &json!(1)));
    client.succeed(&taken, json!("here")).await;
    assert_eq!(api.call(&alone).await["result"], "here");
}

/// Waits for a request on the second client after the first one disconnects.
async fn take_over(api: &Api, effect: &str) -> Duration {
    let name = format!("{effect}.tool");
    let tool = json!([offer_with(&name, json!({ "effect": effect }))]);
    let mut one = Ws::offering(api, "one", tool.clone()).await;
    let id = api.invoke(&name, json!({})).await;
    one.take().await;
    api.until_status(&id, "RUNNING").await;
    let mut two = Ws::offering(api, "two", tool).await;
    one.close().await;
    let begun = Instant::now();
    let moved = two.take().await;
    let took = begun.elapsed();
    assert_eq!((&moved["tool_call_id"], &moved["redelivered"]), (&json!(id), &json!(true)));
    two.succeed(&moved, json!("from the other")).await;
    let call = api.call(&id).await;
    assert_eq!((&call["result"], &call["taken_by"]), (&json!("from the other"), &json!("two")));
    took
}

#[tokio::test]
async fn another_client_takes_over_within_two_seconds() {
    let server = Server::start().await;
    for effect in ["read", "idempotent"] {
        let took = take_over(&server.api(), effect).await;
        assert!(took < Duration::from_secs(2), "{effect}: {took:?}");
    }
}

#[tokio::test]
async fn time_limits_are_checked_and_survive_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    for field in ["attempt_timeout_ms", "input_timeout_ms"] {
        let body = request(json!({ (field): 0 }));
        let error = api.post("/v1/tools/calculation.eval/invoke", body).await;
        assert!(message(&error.refused(422, "VALIDATION_ERROR")).contains(field));
    }
    api.register("c1", json!([offer("a.tool")])).await;
    let limits = json!({ "attempt_timeout_ms": 7_000, "input_timeout_ms": 9_000 });
    let id = api.invoke_with("a.tool", request(limits)).await;
    let usual = api.invoke("a.tool", json!({})).await;
    let server = server.restart().await;
    let api = server.api();
    let call = api.call(&id).await;
    assert_eq!(
        (&call["attempt_timeout_ms"], &call["input_timeout_ms"]),
        (&json!(7_000), &json!(9_000))
    );
    let call = api.call(&usual).await;
    assert_eq!(
        (&call["attempt_timeout_ms"], &call["input_timeout_ms"]),
        (&Value::Null, &json!(3_600_000))
    );
}
