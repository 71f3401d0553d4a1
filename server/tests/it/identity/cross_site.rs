//! Web pages of other origins: on a server without keys their requests have no effect. The headers
//! are those that browsers send for a page on another port of this machine, and on another host.

use reqwest::Method;
use serde_json::json;

use crate::support::Server;
use crate::support::api::offer;

/// Headers of a page's requests: an image or a link has no `Origin`, a form or `fetch` has one.
const IMAGE: [&[(&str, &str)]; 2] = [
    &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")],
    &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")],
];
const SCRIPT: [&[(&str, &str)]; 3] = [
    &[("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site")],
    &[("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")],
    &[("origin", "null"), ("sec-fetch-site", "cross-site")],
];

#[tokio::test]
async fn an_image_of_another_page_takes_no_work() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("x.y")])).await;
    let id = api.invoke("x.y", json!({})).await;
    for headers in IMAGE.iter().chain(&SCRIPT) {
        for path in [
            "/internal/ingress/poll?client_id=pc_1&wait_ms=1",
            "/internal/ingress/sse?client_id=pc_1",
        ] {
            let mut request = api.request(Method::GET, path);
            for (name, value) in *headers {
                request = request.header(*name, *value);
            }
            api.send(request).await.refused(403, "PERMISSION_DENIED");
        }
    }
    assert_eq!(api.call(&id).await["status"], "PENDING", "no page took it");
    assert_eq!(api.poll("pc_1").await["tool_call_id"], id.as_str());
}

#[tokio::test]
async fn forms_and_scripts_of_another_page_change_nothing() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("x.y")])).await;
    let id = api.invoke("x.y", json!({})).await;
    let call = json!({ "run_id": "evil", "args": {} });
    let chat = json!({ "model": "demo", "messages": [{ "role": "user", "content": "x" }] });
    let routes = [
        (Method::POST, "/v1/tools/x.y/invoke".to_owned(), call),
        (Method::POST, format!("/internal/tool_calls/{id}/submit"), json!({})),
        (Method::POST, format!("/v1/tool_calls/{id}/cancel"), json!({})),
        (Method::POST, "/internal/tools/register".to_owned(), json!({ "client_id": "evil" })),
        (Method::POST, "/projects".to_owned(), json!({ "project_id": "evil" })),
        (Method::POST, "/v1/chat/completions".to_owned(), chat.clone()),
        (Method::POST, "/v1/responses".to_owned(), json!({ "model": "demo", "input": "x" })),
        (Method::POST, "/v1/runs".to_owned(), chat),
        (Method::POST, "/v1/tool_calls".to_owned(), json!({ "run_id": "evil" })),
        (Method::POST, "/mcp".to_owned(), json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" })),
        (Method::DELETE, "/projects/default/tools/x.y".to_owned(), json!({})),
    ];
    for (method, path, body) in routes {
        for headers in SCRIPT {
            // A form can send this content type without asking the server first.
            let mut request = api
                .request(method.clone(), &path)
                .header("content-type", "text/plain")
                .header("accept", "application/json, text/event-stream")
                .body(body.to_string());
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let reply = api.send(request).await;
            assert_eq!(reply.status.as_u16(), 403, "{path} {headers:?}: {}", reply.text);
        }
    }
    assert_eq!(api.call(&id).await["status"], "PENDING");
    let calls = api.get("/v1/tool_calls?run_id=evil").await.is(200);
    assert_eq!(calls["tool_calls"], json!([]));
}

#[tokio::test]
async fn allowed_origins_and_hosts_and_explicit_keys_are_accepted() {
    let server = Server::with(|config| {
        config.transports.http.allowed_origins = vec!["http://localhost:5173".to_owned()];
        config.transports.http.allowed_hosts = vec!["tools.internal".to_owned()];
        config.mcp_servers.public_url = Some("https://crib.example.com/base".to_owned());
    })
    .await;
    let api = server.api();
    let status = async |api: &crate::support::Api, name: &str, value: &str| {
        let request = api.request(Method::POST, "/v1/tools/calculation.eval/invoke");
        let body = json!({ "run_id": "r", "args": { "expression": "1" } });
        api.send(request.header(name, value).json(&body)).await.status.as_u16()
    };
    assert_eq!(status(&api, "origin", "http://localhost:5173").await, 202);
    assert_eq!(status(&api, "origin", "http://localhost:5174").await, 403);
    for host in ["tools.internal", "Tools.Internal:8080", "crib.example.com", "localhost:1"] {
        assert_eq!(status(&api, "host", host).await, 202, "{host}");
    }
    for host in ["[::1].evil.example", "tools.internal.evil.example", "evil.example"] {
        assert_eq!(status(&api, "host", host).await, 403, "{host}");
    }
    // A page cannot know the token: who presents it was not forged.
    let operator = server.operator();
    assert_eq!(status(&operator, "origin", "https://evil.example").await, 202);
    assert_eq!(status(&operator, "host", "evil.example").await, 202);
    // A key that the server does not know changes nothing.
    let unknown = server.with_key("sk-anything");
    assert_eq!(status(&unknown, "origin", "https://evil.example").await, 403);
}

#[tokio::test]
async fn a_web_socket_of_another_page_is_refused() {
    let server = Server::start().await;
    server.api().register("pc_1", json!([offer("x.y")])).await;
    for (origin, expected) in
        [("http://localhost:3000".to_owned(), 403), (format!("http://{}", server.address), 101)]
    {
        let request = server.api().request(Method::GET, "/internal/ingress/ws?client_id=pc_1");
        let answer = request
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .header("origin", &origin)
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status().as_u16(), expected, "{origin}");
    }
}
