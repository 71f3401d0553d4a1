//! `options.jina` against an upstream that stands in for Jina.

use serde_json::{Value, json};

use super::upstream::{Upstream, call, define, define_and_call};

#[tokio::test]
async fn search_and_reader_requests_have_the_expected_form() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let search = json!({ "jina": { "mode": "search", "defaults": { "n": 3 } } });
    let ended = define_and_call(&api, search, json!({ "query": "tool crib" })).await;
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
    let request = upstream.last();
    assert_eq!(
        (request.method.as_str(), request.path.as_str()),
        ("GET", "/search?n=3&q=tool+crib")
    );
    assert_eq!(request.header("accept"), Some("text/plain"));
    assert_eq!(request.header("traceparent"), None);
    assert!(ended["result"]["latency_ms"].is_u64(), "{ended}");
    assert_eq!(ended["effect"], "read");
    let reader = json!({ "jina": { "mode": "reader" } });
    define_and_call(&api, reader, json!({ "url": "https://example.com/a?b=c" })).await;
    assert_eq!(upstream.last().path, "/https%3A%2F%2Fexample.com%2Fa%3Fb%3Dc");
    // The URL to read cannot select another path of Jina.
    let with_prefix = json!({ "jina": { "mode": "reader", "endpoint_template": "/v1/{url}" } });
    let before = upstream.requests().len();
    for url in [".", "..", "%2e%2E"] {
        let ended = define_and_call(&api, with_prefix.clone(), json!({ "url": url })).await;
        match url.contains('%') {
            true => assert_eq!(upstream.last().path, "/v1/%252e%252E", "{ended}"),
            false => assert_eq!(ended["error"]["code"], "BAD_REQUEST", "{ended}"),
        }
    }
    assert_eq!(upstream.requests().len(), before + 1);
}

#[tokio::test]
async fn responses_are_wrapped_and_their_errors_detected() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 0).await;
    let api = server.api();
    let options_for = |path: &str| json!({ "jina": { "mode": "search", "path": path } });
    let q = || json!({ "q": "x" });
    let ended = define_and_call(&api, options_for("/list"), q()).await;
    assert_eq!(ended["result"]["value"], json!([1, 2]));
    let ended = define_and_call(&api, options_for("/text"), q()).await;
    assert!(ended["result"]["data"].as_str().unwrap().starts_with("you sent"), "{ended}");
    assert!(ended["result"]["latency_ms"].is_u64());
    let ended = define_and_call(&api, options_for("/error"), q()).await;
    assert_eq!(ended["error"]["code"], "UPSTREAM_UNAVAILABLE", "{ended}");
    assert_eq!(ended["error"]["detail"]["details"], "out of order");
    for (status, code) in
        [(400, "BAD_REQUEST"), (401, "UNAUTHENTICATED"), (502, "UPSTREAM_UNAVAILABLE")]
    {
        let ended = define_and_call(&api, options_for(&format!("/status/{status}")), q()).await;
        assert_eq!(ended["error"]["code"], code, "{ended}");
        assert_eq!(ended["error"]["detail"]["status_code"], status);
    }
    let slow = json!({ "jina": { "mode": "search", "path": "/hang", "timeout_s": 0.2 } });
    let ended = define_and_call(&api, slow, q()).await;
    assert_eq!(ended["error"]["code"], "TIMEOUT", "{ended}");
}

#[tokio::test]
async fn missing_arguments_and_invalid_options_are_bad_requests() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let search = || json!({ "jina": { "mode": "search" } });
    let other_host = json!({ "jina": { "mode": "search", "base_url": "https://evil.example" } });
    let no_mode = json!({ "jina": {} });
    let cases: [(Value, Value); 3] = [
        (search(), json!({})),
        (search(), json!({ "q": "  " })),
        (json!({ "jina": { "mode": "reader" } }), json!({})),
    ];
    for (options, args) in cases {
        let ended = define_and_call(&api, options, args).await;
        assert_eq!(ended["error"]["code"], "BAD_REQUEST", "{ended}");
    }
    // Options that no call could satisfy are refused in the definition.
    let host = json!({ "jina": { "mode": "search", "headers": { "Host": "evil.example" } } });
    let invalid_header = json!({ "openapi": { "path": "/search", "headers": { "a b": "c" } } });
    for options in [other_host, no_mode, host, invalid_header] {
        let definition = json!({ "tool_name": "api.ask", "options": options });
        api.post("/projects/default/tools", definition).await.refused(400, "BAD_REQUEST");
    }
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn the_host_sets_the_mode_and_post_sends_a_body() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let port = upstream.address.rsplit(':').next().unwrap();
    let by_host = json!({ "jina": { "base_url": format!("http://localhost:{port}") } });
    define_and_call(&api, by_host, json!({ "target_url": "x" })).await;
    assert_eq!(upstream.last().path, "/x", "the reader's host");
    let post = json!({ "jina": { "mode": "search", "method": "POST" } });
    define(&api, json!({ "tool_name": "api.ask", "effect": "read", "options": post })).await;
    call(&api, "api.ask", json!({ "q": "x", "n": null })).await;
    let request = upstream.last();
    assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/search"));
    let body: Value = serde_json::from_str(&request.body).unwrap();
    assert_eq!(body, json!({ "q": "x", "n": null }));
}

#[tokio::test]
async fn by_default_only_the_hosts_of_jina_are_allowed() {
    let server = crate::support::Server::start().await;
    let urls = ["https://s.jina.ai", "https://r.jina.ai"];
    assert_eq!(server.config.http.jina.search_url, urls[0]);
    assert_eq!(server.config.http.jina.reader_url, urls[1]);
    assert_eq!(server.config.http.hosts, ["s.jina.ai", "r.jina.ai"]);
    for base_url in ["http://s.jina.ai", "https://s.jina.ai:8443"] {
        let options = json!({ "jina": { "mode": "search", "base_url": base_url } });
        let ended = define_and_call(&server.api(), options, json!({ "q": "x" })).await;
        assert_eq!(ended["error"]["code"], "PERMISSION_DENIED", "{base_url}: {ended}");
    }
}
