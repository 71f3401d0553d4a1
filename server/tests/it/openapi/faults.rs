//! Responses of upstreams, and the results and faults that they become.

use serde_json::json;

use super::upstream::{Upstream, call, define, define_and_call};

#[tokio::test]
async fn every_http_status_maps_to_its_error_code() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 0).await;
    let api = server.api();
    for (status, code, utp) in [
        (400, "BAD_REQUEST", "bad_request"),
        (401, "UNAUTHENTICATED", "auth_failed"),
        (403, "PERMISSION_DENIED", "auth_failed"),
        (404, "NOT_FOUND", "not_found"),
        (409, "CONFLICT", "conflict"),
        (413, "PAYLOAD_TOO_LARGE", "bad_request"),
        (418, "BAD_REQUEST", "bad_request"),
        (422, "VALIDATION_ERROR", "bad_request"),
        (429, "RATE_LIMITED", "upstream_unavailable"),
        (500, "UPSTREAM_UNAVAILABLE", "upstream_unavailable"),
        (503, "UPSTREAM_UNAVAILABLE", "upstream_unavailable"),
    ] {
        let url = upstream.url(&format!("/status/{status}"));
        let ended = define_and_call(&api, json!({ "http": { "url": url } }), json!({})).await;
        let error = &ended["error"];
        assert_eq!((&ended["status"], &error["code"]), (&json!("FAILED"), &json!(code)), "{ended}");
        assert_eq!(error["detail"]["status_code"], status);
        assert_eq!(error["detail"]["tool_name"], "api.ask");
        let hint = error["detail"]["hint"].as_str().unwrap();
        assert!(hint.starts_with("the API "), "the advice is about the API: {hint}");
        assert_eq!(
            error["detail"]["details"]["method"], "GET",
            "the response body helps to find the cause"
        );
        let id = ended["tool_call_id"].as_str().unwrap();
        let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
        assert_eq!(cards["cards"][1]["content"]["error"]["code"], utp);
    }
}

#[tokio::test]
async fn the_retry_delay_of_the_upstream_is_honored() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 1).await;
    let api = server.api();
    let started = std::time::Instant::now();
    let ended =
        define_and_call(&api, json!({ "http": { "url": upstream.url("/busy") } }), json!({})).await;
    assert_eq!((&ended["status"], upstream.requests().len()), (&json!("SUCCEEDED"), 2), "{ended}");
    assert!(
        started.elapsed() >= std::time::Duration::from_millis(1_500),
        "the retry came too early"
    );
}

#[tokio::test]
async fn slow_large_broken_and_unreachable_upstreams_fail_the_call() {
    let upstream = Upstream::start().await;
    let server = upstream
        .server_with(|config| {
            config.policy.max_retries = 0;
            config.http.max_response_bytes = 50_000;
            config.http.hosts.push("http://127.0.0.1:9".into());
        })
        .await;
    let api = server.api();
    let with_timeout = |url: String| json!({ "http": { "url": url, "timeout_s": 0.2 } });
    let slow = define_and_call(&api, with_timeout(upstream.url("/hang")), json!({})).await;
    assert_eq!(slow["error"]["code"], "TIMEOUT", "{slow}");
    let without_timeout = |path: &str| json!({ "http": { "url": upstream.url(path) } });
    let large = define_and_call(&api, without_timeout("/large"), json!({})).await;
    assert_eq!(large["error"]["code"], "PAYLOAD_TOO_LARGE", "{large}");
    let broken = define_and_call(&api, without_timeout("/broken"), json!({})).await;
    assert_eq!(broken["error"]["code"], "RUNTIME_ERROR", "{broken}");
    let binary = define_and_call(&api, without_timeout("/binary"), json!({})).await;
    assert!(binary["error"]["message"].as_str().unwrap().contains("image/png"), "{binary}");
    let closed_port = json!({ "http": { "url": "http://127.0.0.1:9/x" } });
    let unreachable = define_and_call(&api, closed_port, json!({})).await;
    assert_eq!(unreachable["error"]["code"], "UPSTREAM_UNAVAILABLE", "{unreachable}");
}

#[tokio::test]
async fn the_response_body_becomes_the_result() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let options_for = |path: &str| json!({ "http": { "url": upstream.url(path) } });
    let ended = define_and_call(&api, options_for("/nested"), json!({})).await;
    assert_eq!(ended["result"], json!({ "data": { "items": [1, 2] } }));
    let ended = define_and_call(&api, options_for("/list"), json!({})).await;
    assert_eq!(ended["result"], json!([1, 2]));
    let ended = define_and_call(&api, options_for("/empty"), json!({})).await;
    assert_eq!(ended["result"], json!({ "status_code": 204 }));
    let ended = define_and_call(&api, options_for("/text"), json!({})).await;
    assert!(ended["result"]["data"].as_str().unwrap().starts_with("you sent"), "{ended}");
    let mapped = |pointer: &str| {
        let url = upstream.url("/nested");
        json!({ "http": { "url": url, "response": { "pointer": pointer } } })
    };
    let ended = define_and_call(&api, mapped("/data/items"), json!({})).await;
    assert_eq!(ended["result"], json!([1, 2]));
    let ended = define_and_call(&api, mapped("/nothing"), json!({})).await;
    assert_eq!(ended["error"]["code"], "RUNTIME_ERROR");
}

#[tokio::test]
async fn an_irreversible_operation_is_not_retried_after_a_500() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 3).await;
    let api = server.api();
    let post = json!({ "http": { "method": "POST", "url": upstream.url("/status/500") } });
    let defined = define(&api, json!({ "tool_name": "api.pay", "options": post })).await;
    assert_eq!(defined["effect"], "irreversible");
    call(&api, "api.pay", json!({ "n": 1 })).await;
    assert_eq!(upstream.requests().len(), 1);
    let read = json!({ "http": { "url": upstream.url("/status/500") } });
    let ended = define_and_call(&api, read, json!({})).await;
    assert_eq!((upstream.requests().len(), &ended["attempt"]), (5, &json!(4)), "a read is retried");
}

#[tokio::test]
async fn the_attempts_of_a_hanging_upstream_share_the_time_of_the_call() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let hang = |method: &str| json!({ "http": { "method": method, "url": upstream.url("/hang") } });
    define(&api, json!({ "tool_name": "api.ask", "options": hang("GET") })).await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 3_000, "retry": 2 });
    let ended = api.finished(&api.invoke_with("api.ask", body).await).await;
    assert_eq!(ended["error"]["code"], "TIMEOUT", "{ended}");
    assert_eq!((&ended["attempt"], upstream.requests().len()), (&json!(3), 3), "{ended}");
    // An attempt that may have taken effect is the last one, and its outcome is unknown.
    define(&api, json!({ "tool_name": "api.pay", "options": hang("POST") })).await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 9_000, "attempt_timeout_ms": 500 });
    let ended = api.finished(&api.invoke_with("api.pay", body).await).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert_eq!((&ended["attempt"], upstream.requests().len()), (&json!(1), 4), "{ended}");
}

#[tokio::test]
async fn a_call_can_be_canceled_while_its_upstream_hangs() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let hang = json!({ "http": { "url": upstream.url("/hang") } });
    define(&api, json!({ "tool_name": "api.ask", "options": hang })).await;
    let id = api.invoke("api.ask", json!({})).await;
    api.until_status(&id, "RUNNING").await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(api.finished(&id).await["status"], "CANCELED");
}
