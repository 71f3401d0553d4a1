//! Changed tool definitions are detected and reported; a changed pinned tool is refused.

use std::sync::atomic::Ordering;

use serde_json::json;

use super::{call, http_upstream, result_text, server, wait_for_state};
use crate::support::until;
use crate::support::upstream::{Http, program};

#[tokio::test]
async fn a_changed_tool_is_detected_and_reported() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    upstream.fixture.change();
    let tool = until("the new description", || async {
        let tool = api.get("/v1/tools/fixture.echo").await.is(200);
        (tool["description"] == "Says it back, twice").then_some(tool)
    })
    .await;
    assert_eq!(tool["name"], "fixture.echo");
    let source = until("the change to be shown", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["changes"] != json!([])).then_some(source)
    })
    .await;
    let change = &source["changes"][0];
    assert_eq!((&change["tool"], &change["change"]), (&json!("fixture.echo"), &json!("changed")));
    assert_eq!(change["fields"], json!(["description"]));
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "x" })).await), "x");
}

#[tokio::test]
async fn a_pinned_tool_that_changed_is_refused_until_it_is_accepted() {
    let upstream = Http::start().await;
    let mut settings = http_upstream(&upstream.url());
    settings.pin = true;
    let server = server(vec![settings]).await;
    let api = server.operator();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "x" })).await), "x");
    upstream.fixture.change();
    until("the change to be shown", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["pending"][0]["tool"] == "fixture.echo").then_some(())
    })
    .await;
    let refused = call(&api, "fixture.echo", json!({ "text": "x" })).await;
    assert_eq!(refused["error"]["code"], "CONFLICT", "{refused}");
    let tool = api.get("/v1/tools/fixture.echo").await.is(200);
    assert_eq!(tool["description"], "Says it back", "the accepted definition must be shown");
    // The accepted definition survives a restart.
    let server = server.restart().await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let refused = call(&api, "fixture.echo", json!({ "text": "x" })).await;
    assert_eq!(refused["error"]["code"], "CONFLICT", "{refused}");
    // Other tools are not affected.
    let sum = call(&api, "fixture.add", json!({ "a": 1, "b": 1 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "{sum}");
    let accepted = api.post("/v1/sources/mcp/fixture/accept", json!({})).await.is(200);
    assert_eq!(accepted["accepted"][0]["tool"], "fixture.echo", "{accepted}");
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "x" })).await), "x");
    let tool = api.get("/v1/tools/fixture.echo").await.is(200);
    assert_eq!(tool["description"], "Says it back, twice");
}

#[tokio::test]
async fn a_tool_change_does_not_affect_a_running_call() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.slow", json!({})).await;
    until("the call", || async { (upstream.fixture.calls() == 1).then_some(()) }).await;
    upstream.fixture.shared.many.store(3, Ordering::SeqCst);
    upstream.fixture.change();
    until("the change", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["changes"].as_array().unwrap().len() == 4).then_some(())
    })
    .await;
    upstream.fixture.let_go();
    assert_eq!(result_text(&api.finished(&id).await), "let go");
    assert_eq!(result_text(&call(&api, "fixture.tool_00001", json!({})).await), "tool_00001");
}

#[tokio::test]
async fn an_ended_change_stream_is_reopened() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let subscriptions = &upstream.fixture.shared.listened;
    for times in 1..=2 {
        until("a subscription", || async {
            (subscriptions.load(Ordering::SeqCst) == times).then_some(())
        })
        .await;
        upstream.fixture.hang_up();
    }
    until("another subscription", || async {
        (subscriptions.load(Ordering::SeqCst) == 3).then_some(())
    })
    .await;
    upstream.fixture.change();
    until("the new description", || async {
        let tool = api.get("/v1/tools/fixture.echo").await.is(200);
        (tool["description"] == "Says it back, twice").then_some(())
    })
    .await;
    let source = api.get("/v1/sources/mcp/fixture").await.is(200);
    assert_eq!((&source["state"], &source["restarts"]), (&json!("ready"), &json!(0)), "{source}");
}

#[tokio::test]
async fn a_pinned_tool_that_changed_while_disconnected_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = program("reborn");
    settings.pin = true;
    let once = directory.path().join("once").to_str().unwrap().to_owned();
    settings.env.insert("ONCE".into(), once);
    let server = server(vec![settings]).await;
    let api = server.operator();
    let body = json!({ "run_id": "r", "args": {}, "retry": 0 });
    let id = api.invoke_with("fixture.die_once", body).await;
    assert_eq!(api.finished(&id).await["status"], "FAILED");
    // The call waits for the upstream, which returns with a changed tool.
    let refused = call(&api, "fixture.echo", json!({ "text": "x" })).await;
    assert_eq!(refused["error"]["code"], "CONFLICT", "{refused}");
}

#[tokio::test]
async fn a_refresh_returns_the_current_number_of_tools() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    // The upstream does not announce the change.
    for more in 1..4 {
        upstream.fixture.shared.many.store(more, Ordering::SeqCst);
        let path = "/v1/sources/mcp/fixture/refresh?wait_ms=30000";
        let refreshed = api.post(path, json!({})).await.is(200);
        assert_eq!(refreshed["tools"], 20 + more, "{refreshed}");
    }
}
