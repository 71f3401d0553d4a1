//! What an upstream's answer means.

use serde_json::json;

use super::upstream::{Upstream, call, called, define};

#[tokio::test]
async fn every_status_is_the_right_fault() {
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
        let ended = called(&api, json!({ "http": { "url": url } }), json!({})).await;
        let error = &ended["error"];
        assert_eq!((&ended["status"], &error["code"]), (&json!("FAILED"), &json!(code)), "{ended}");
        assert_eq!(error["detail"]["status_code"], status);
        assert_eq!(error["detail"]["tool_name"], "api.ask");
        assert_eq!(error["detail"]["details"]["method"], "GET", "the body, for who must find out");
        let id = ended["tool_call_id"].as_str().unwrap();
        let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
        assert_eq!(cards["cards"][1]["content"]["error"]["code"], utp);
    }
}

#[tokio::test]
async fn who_says_when_to_come_again_is_asked_again_then() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 1).await;
    let api = server.api();
    let begun = std::time::Instant::now();
    let ended = called(&api, json!({ "http": { "url": upstream.url("/busy") } }), json!({})).await;
    assert_eq!((&ended["status"], upstream.asked().len()), (&json!("SUCCEEDED"), 2), "{ended}");
    assert!(begun.elapsed() >= std::time::Duration::from_millis(1_500), "not before");
}

#[tokio::test]
async fn slow_large_broken_and_absent_upstreams() {
    let upstream = Upstream::start().await;
    let server = upstream
        .server_with(|config| {
            config.policy.max_retries = 0;
            config.http.max_response_bytes = 50_000;
            config.http.hosts.push("http://127.0.0.1:9".into());
        })
        .await;
    let api = server.api();
    let at = |url: String| json!({ "http": { "url": url, "timeout_s": 0.2 } });
    let slow = called(&api, at(upstream.url("/hang")), json!({})).await;
    assert_eq!(slow["error"]["code"], "TIMEOUT", "{slow}");
    let without = |path: &str| json!({ "http": { "url": upstream.url(path) } });
    let large = called(&api, without("/large"), json!({})).await;
    assert_eq!(large["error"]["code"], "PAYLOAD_TOO_LARGE", "{large}");
    let broken = called(&api, without("/broken"), json!({})).await;
    assert_eq!(broken["error"]["code"], "RUNTIME_ERROR", "{broken}");
    let binary = called(&api, without("/binary"), json!({})).await;
    assert!(binary["error"]["message"].as_str().unwrap().contains("image/png"), "{binary}");
    let nobody = json!({ "http": { "url": "http://127.0.0.1:9/x" } });
    let absent = called(&api, nobody, json!({})).await;
    assert_eq!(absent["error"]["code"], "UPSTREAM_UNAVAILABLE", "{absent}");
}

#[tokio::test]
async fn what_of_the_answer_is_the_result() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let at = |path: &str| json!({ "http": { "url": upstream.url(path) } });
    let ended = called(&api, at("/nested"), json!({})).await;
    assert_eq!(ended["result"], json!({ "data": { "items": [1, 2] } }));
    let ended = called(&api, at("/list"), json!({})).await;
    assert_eq!(ended["result"], json!([1, 2]));
    let ended = called(&api, at("/empty"), json!({})).await;
    assert_eq!(ended["result"], json!({ "status_code": 204 }));
    let ended = called(&api, at("/text"), json!({})).await;
    assert!(ended["result"]["data"].as_str().unwrap().starts_with("you sent"), "{ended}");
    let mapped = |pointer: &str| {
        let url = upstream.url("/nested");
        json!({ "http": { "url": url, "response": { "pointer": pointer } } })
    };
    let ended = called(&api, mapped("/data/items"), json!({})).await;
    assert_eq!(ended["result"], json!([1, 2]));
    let ended = called(&api, mapped("/nothing"), json!({})).await;
    assert_eq!(ended["error"]["code"], "RUNTIME_ERROR");
}

#[tokio::test]
async fn an_irreversible_operation_that_may_have_happened_is_not_sent_again() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 3).await;
    let api = server.api();
    let post = json!({ "http": { "method": "POST", "url": upstream.url("/status/500") } });
    let made = define(&api, json!({ "tool_name": "api.pay", "options": post })).await;
    assert_eq!(made["effect"], "irreversible");
    call(&api, "api.pay", json!({ "n": 1 })).await;
    assert_eq!(upstream.asked().len(), 1);
    let read = json!({ "http": { "url": upstream.url("/status/500") } });
    let ended = called(&api, read, json!({})).await;
    assert_eq!((upstream.asked().len(), &ended["attempt"]), (5, &json!(4)), "what reads is");
}

#[tokio::test]
async fn a_canceled_call_lets_go_of_its_upstream() {
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
