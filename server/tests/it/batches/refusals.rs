//! An invalid batch is rejected with the name of the field, and none of its entries is executed.

use serde_json::{Value, json};

use super::{body, count_calls, eval, send};
use crate::support::Server;
use crate::support::api::message;

#[tokio::test]
async fn an_invalid_batch_field_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    let long = "x".repeat(256);
    let many = |count: usize| Value::Array(vec![eval("c", "1"); count]);
    let cases = [
        ("tool_calls", json!([])),
        ("tool_calls", many(257)),
        ("tool_calls", many(10_000)),
        ("tool_calls", json!({})),
        ("tool_calls", json!("calculation.eval")),
        ("tool_calls", Value::Null),
        ("run_id", json!("")),
        ("run_id", json!(7)),
        ("run_id", json!(long)),
        ("run_id", Value::Null),
        ("mode", json!("sideways")),
        ("mode", json!(1)),
        ("mode", json!(["serial"])),
        ("order", json!("random")),
        ("order", json!("free")),
        ("max_parallel", json!(0)),
        ("max_parallel", json!(-1)),
        ("max_parallel", json!(257)),
        ("max_parallel", json!(1.5)),
        ("max_parallel", json!("four")),
        ("budget_tokens", json!(0)),
        ("budget_tokens", json!(-100)),
        ("budget_tokens", json!("many")),
        ("budget_tokens", json!({})),
        ("wait_ms", json!(-1)),
        ("wait_ms", json!("a while")),
        ("idempotency_key", json!("")),
        ("idempotency_key", json!(long)),
        ("idempotency_key", json!([1])),
        ("user_id", json!(true)),
        ("user_id", json!("")),
    ];
    for (field, value) in cases {
        let mut batch = body("serial", json!([eval("c", "1+1")]));
        batch[field] = value.clone();
        let excerpt: String = value.to_string().chars().take(60).collect();
        let error = send(&api, batch).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains(field), "{field} {excerpt}: {error}");
        assert_eq!(error["detail"]["pointer"], format!("/{field}"), "{excerpt}: {error}");
        assert!(message(&error).len() < 200, "{error}");
    }
    assert_eq!(count_calls(&api).await, 0, "no entry was executed");
}

#[tokio::test]
async fn a_batch_body_that_is_not_an_object_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    for text in ["", "[]", "null", "7", "{\"run_id\": ", "not json"] {
        let answer = api.post_raw("/v1/tool_calls", text).await;
        let (status, code) =
            if text.is_empty() { (422, "VALIDATION_ERROR") } else { (400, "BAD_REQUEST") };
        answer.refused(status, code);
    }
    let answer = api.post("/v1/tool_calls?wait_ms=soon", body("serial", json!([]))).await;
    assert_eq!(answer.refused(422, "VALIDATION_ERROR")["detail"]["field"], "wait_ms");
}

#[tokio::test]
async fn very_large_wait_and_budget_values_are_accepted() {
    let server = Server::start().await;
    let api = server.api();
    let mut batch = body("parallel", json!([eval("c", "1+1")]));
    batch["wait_ms"] = json!(u64::MAX);
    batch["budget_tokens"] = json!(u64::MAX);
    batch["order"] = json!("free");
    assert_eq!(send(&api, batch).await.is(200)["results"][0]["ok"], true);
}

#[tokio::test]
async fn batch_limits_are_configurable() {
    let server = Server::with(|config| {
        config.limits.max_batch_entries = 2;
        config.limits.max_batch_parallel = 3;
    })
    .await;
    let api = server.api();
    let one = eval("c", "1");
    let three = body("serial", json!([one, one, one]));
    let error = send(&api, three).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("1 to 2 entries, and are 3"), "{error}");
    let mut wide = body("parallel", json!([one]));
    wide["max_parallel"] = json!(4);
    let error = send(&api, wide).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("from 1 to 3"), "{error}");
}
