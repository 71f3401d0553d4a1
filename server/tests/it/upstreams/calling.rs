//! Calling tools of upstreams, and passing their resources and prompts through.

use serde_json::json;
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, http_upstream, result_text, server, wait_for_state};
use crate::support::mcp::Mcp;
use crate::support::upstream::{Http, program};
use crate::support::{Server, until};

#[tokio::test]
async fn tools_of_a_stdio_upstream_are_listed_and_called() {
    let server = server(vec![program("good")]).await;
    let api = server.operator();
    let echo = api.get("/v1/tools/fixture.echo").await.is(200);
    assert_eq!((&echo["effect"], &echo["risk"]), (&json!("read"), &json!("low")), "{echo}");
    let add = api.get("/v1/tools/fixture.add").await.is(200);
    assert_eq!(add["effect"], "idempotent");
    assert_eq!(api.get("/v1/tools/fixture.fail").await.is(200)["effect"], "irreversible");
    let done = call(&api, "fixture.echo", json!({ "text": "hello" })).await;
    assert_eq!((result_text(&done), &done["executor"]), ("hello", &json!("mcp")));
    let done = call(&api, "fixture.add", json!({ "a": 2, "b": 40 })).await;
    assert_eq!(done["result"]["structuredContent"], json!({ "sum": 42.0 }), "{done}");
    let failed = call(&api, "fixture.fail", json!({})).await;
    assert_eq!(failed["error"]["code"], "RUNTIME_ERROR", "{failed}");
    let message = failed["error"]["message"].as_str().unwrap();
    assert_eq!(message, "it cannot be done; it may have taken effect, so a retry is not safe");
    let path = "/v1/tools/fixture.add/invoke";
    let body = json!({ "run_id": "r", "args": { "a": "x" } });
    api.post(path, body).await.refused(422, "VALIDATION_ERROR");
    let source = wait_for_state(&api, "fixture", "ready").await;
    assert_eq!(source["transport"], "stdio");
    assert_eq!(source["server_name"], "fixture");
    assert!(source["pid"].is_number(), "{source}");
}

#[tokio::test]
async fn tools_over_http_are_called_by_mcp_clients_of_both_revisions() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let source = wait_for_state(&server.operator(), "fixture", "ready").await;
    assert_eq!(source["protocol_version"], "2026-07-28", "{source}");
    let params = json!({ "name": "fixture.add", "arguments": { "a": 1, "b": 2 } });
    for client in [Mcp::modern(&server.operator()), Mcp::legacy(&server.operator()).await] {
        let result = client.ask("tools/call", params.clone()).await.result();
        assert_eq!(result["structuredContent"], json!({ "sum": 3.0 }), "{result}");
        assert_eq!(result["isError"], false);
    }
}

#[tokio::test]
async fn upstream_progress_is_forwarded() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.progress", json!({})).await;
    api.finished(&id).await;
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let all = events.rest().await;
    let progress = all.iter().find(|event| event.name == "tool.call.progress").unwrap();
    assert_eq!(progress.data["percent"], 50.0, "{:?}", progress.data);
}

#[tokio::test]
async fn a_cancel_reaches_the_upstream() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.slow", json!({})).await;
    until("the upstream to have the call", || async {
        (upstream.fixture.calls() == 1).then_some(())
    })
    .await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    until("the upstream to hear of it", || async {
        (upstream.fixture.canceled() == 1).then_some(())
    })
    .await;
    assert_eq!(api.finished(&id).await["status"], "CANCELED");
}

#[tokio::test]
async fn only_listed_variables_reach_a_program_and_stay_secret() {
    let mut settings = program("good");
    settings.env.insert("TOKEN".into(), "sesame-open-123".into());
    settings.env_from.push("CARGO_PKG_NAME".into());
    let server = server(vec![settings]).await;
    let api = server.operator();
    let done = call(&api, "fixture.env", json!({})).await;
    let names: Vec<&str> = result_text(&done).split(' ').collect();
    assert!(names.contains(&"TOKEN") && names.contains(&"CARGO_PKG_NAME"), "{names:?}");
    assert!(!names.contains(&"CARGO_MANIFEST_DIR"), "{names:?}");
    call(&api, "fixture.die", json!({})).await;
    let source = until("its last words", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        let lines = source["stderr"].as_array().unwrap();
        let has_message =
            lines.iter().any(|line| line.as_str().unwrap().contains("dying as asked"));
        has_message.then_some(source)
    })
    .await;
    assert!(!source.to_string().contains("sesame-open-123"), "{source}");
    assert!(source["env"].to_string().contains("TOKEN"), "{source}");
}

#[tokio::test]
async fn resources_and_prompts_are_passed_to_authorized_callers() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let client = Mcp::modern(&server.operator());
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"][0]["uri"], "fixture://notes", "{listed}");
    let read = client.ask("resources/read", json!({ "uri": "fixture://notes" })).await.result();
    assert_eq!(read["contents"][0]["text"], "what was noted");
    let listed = client.ask("prompts/list", json!({})).await.result();
    assert_eq!(listed["prompts"][0]["name"], "fixture.greet", "{listed}");
    let prompt = client.ask("prompts/get", json!({ "name": "fixture.greet" })).await.result();
    assert_eq!(prompt["messages"][0]["content"]["text"], "Greet the reader");
    let outsider = server.keyed("default", "ada", "agent", &["weather.*"]).await;
    let client = Mcp::modern(&outsider);
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"], json!([]));
    client.ask("resources/read", json!({ "uri": "fixture://notes" })).await.error(-32602);
    let allowed = server.keyed("default", "eve", "agent", &["fixture.*"]).await;
    let client = Mcp::modern(&allowed);
    let listed = client.ask("prompts/list", json!({})).await.result();
    assert_eq!(listed["prompts"][0]["name"], "fixture.greet");
}

#[tokio::test]
async fn an_upstream_is_invisible_to_other_projects() {
    let upstream = Http::start().await;
    let server = Server::with(|config| {
        let mut settings = http_upstream(&upstream.url());
        settings.project = "acme".into();
        config.mcp = vec![settings];
    })
    .await;
    let acme = server.operator().project("acme");
    wait_for_state(&acme, "fixture", "ready").await;
    assert_eq!(result_text(&call(&acme, "fixture.echo", json!({ "text": "x" })).await), "x");
    let other = server.operator();
    other.get("/v1/sources/mcp/fixture").await.refused(404, "NOT_FOUND");
    other.get("/v1/tools/fixture.echo").await.refused(404, "TOOL_NOT_FOUND");
}

#[tokio::test]
async fn each_source_has_its_own_endpoint_with_unprefixed_names() {
    let upstream = Http::start().await;
    // Toolcrib's built-in tools are listed once, even if the upstream has a tool of that name.
    *upstream.fixture.shared.one_more.lock() = Some("call.result");
    let other = McpServerSettings { name: "other".into(), ..http_upstream(&upstream.url()) };
    let server = server(vec![http_upstream(&upstream.url()), other]).await;
    for client in [Mcp::modern(&server.operator()), Mcp::legacy(&server.operator()).await] {
        let client = client.with_path("/mcp/fixture");
        let listed = client.ask("tools/list", json!({})).await.result();
        let tools = listed["tools"].as_array().unwrap();
        let names: Vec<&str> = tools.iter().filter_map(|tool| tool["name"].as_str()).collect();
        assert!(names.contains(&"echo") && names.contains(&"call__result"), "{names:?}");
        for builtin in ["call__result", "result__read"] {
            assert_eq!(names.iter().filter(|name| **name == builtin).count(), 1, "{names:?}");
        }
        assert!(names.iter().all(|name| !name.contains("fixture")), "{names:?}");
        assert!(!names.contains(&"calculation__eval"), "only tools of that source: {names:?}");
        let params = json!({ "name": "echo", "arguments": { "text": "hello" } });
        let result = client.ask("tools/call", params).await.result();
        assert_eq!(result["content"][0]["text"], "hello", "{result}");
        let prompts = client.ask("prompts/list", json!({})).await.result();
        assert_eq!(prompts["prompts"][0]["name"], "greet", "{prompts}");
        assert_eq!(prompts["prompts"].as_array().unwrap().len(), 1);
        let prompt = client.ask("prompts/get", json!({ "name": "greet" })).await.result();
        assert!(prompt["messages"].is_array(), "{prompt}");
        let resources = client.ask("resources/list", json!({})).await.result();
        assert_eq!(resources["resources"].as_array().unwrap().len(), 1, "{resources}");
    }
    let api = server.operator();
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    for path in ["/mcp/no.such", "/mcp/fixtur"] {
        api.post(path, body.clone()).await.refused(404, "NOT_FOUND");
    }
    // A caller without permission for any of its tools cannot tell that the source exists.
    let ada = server.keyed("default", "ada", "agent", &["other.*"]).await;
    ada.post("/mcp/fixture", body.clone()).await.refused(404, "NOT_FOUND");
    let permitted =
        Mcp::modern(&ada).with_path("/mcp/other").ask("tools/list", json!({})).await.result();
    assert!(permitted["tools"].as_array().unwrap().len() > 1, "{permitted}");
}

#[tokio::test]
async fn a_long_result_can_be_read_at_the_endpoint_of_its_source() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let text: String = (0..20_000).map(|n| format!("line {n} of many\n")).collect();
    for client in [Mcp::modern(&server.operator()), Mcp::legacy(&server.operator()).await] {
        let client = client.with_path("/mcp/fixture");
        let result = client.call("echo", json!({ "text": text })).await.result();
        let hint = crate::mcp::parse_read_hint(&result);
        assert_eq!(hint["pointer"], "/content/0/text", "{hint}");
        let read = client.call("result.read", hint).await.result();
        assert!(read["structuredContent"].to_string().contains("line 99 of many"), "{read}");
    }
}
