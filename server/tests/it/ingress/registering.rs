//! Registration, update and removal of the tools of clients.

use serde_json::{Value, json};

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server, until};

async fn register(api: &Api, client_id: &str, tools: Value) -> crate::support::api::Reply {
    let body = json!({ "client_id": client_id, "tools": tools });
    api.post("/internal/tools/register", body).await
}

async fn client_tools(api: &Api) -> Vec<String> {
    let list = api.get("/v1/tools").await.is(200);
    let tools = list["tools"].as_array().unwrap().iter();
    let client_tools = tools.filter(|tool| tool["source"] == "client");
    client_tools.map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn registering_again_updates_the_tools() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool"), offer("b.tool")])).await;
    let before = api.get("/v1/tools/a.tool").await.is(200);
    api.register("c1", json!([offer("a.tool")])).await;
    assert_eq!(
        api.get("/v1/tools/a.tool").await.is(200),
        before,
        "an equal registration changes nothing"
    );
    let changed = json!({
        "name": "a.tool", "timeout_ms": 1_234, "description": "Does more now",
        "schema": { "type": "object", "required": ["n"] },
        "output_schema": { "type": "integer" },
        "effect": "read", "risk": "low", "metadata": { "team": "blue" }
    });
    api.register("c1", json!([changed])).await;
    let after = api.get("/v1/tools/a.tool").await.is(200);
    for field in ["timeout_ms", "description", "schema", "output_schema", "effect", "risk"] {
        assert_eq!(after[field], changed[field], "{field}");
    }
    assert_eq!(after["metadata"], changed["metadata"]);
    assert_ne!(after["version"], before["version"]);
    let body = json!({ "run_id": "run_1", "args": {} });
    api.post("/v1/tools/a.tool/invoke", body).await.refused(422, "VALIDATION_ERROR");
    assert_eq!(client_tools(&api).await, ["a.tool", "b.tool"], "tools that are not listed stay");
}

#[tokio::test]
async fn omitted_fields_have_defaults() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([{ "name": "a.tool" }])).await;
    let tool = api.get("/v1/tools/a.tool").await.is(200);
    assert_eq!(tool["timeout_ms"], 30_000);
    assert_eq!(tool["effect"], "irreversible", "the safe default");
    assert_eq!(tool["risk"], "medium");
    assert_eq!(tool["executor"], "client");
    assert_eq!(tool["schema"], json!({}));
    assert_eq!(tool["output_schema"], Value::Null);
}

#[tokio::test]
async fn tools_are_removed_one_by_one_or_by_replacement() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool"), offer("b.tool"), offer("c.tool")])).await;
    api.register("c2", json!([offer("a.tool")])).await;
    assert_eq!(api.delete("/internal/tools/a.tool?client_id=c1").await.status, 204);
    assert_eq!(client_tools(&api).await, ["a.tool", "b.tool", "c.tool"], "c2 still offers it");
    assert_eq!(api.delete("/internal/tools/b.tool?client_id=c1").await.status, 204);
    assert_eq!(client_tools(&api).await, ["a.tool", "c.tool"]);
    let again = api.delete("/internal/tools/b.tool?client_id=c1").await;
    again.refused(404, "NOT_FOUND");
    let body = json!({ "client_id": "c1", "tools": [offer("d.tool")], "replace": true });
    api.post("/internal/tools/register", body).await.is(200);
    assert_eq!(client_tools(&api).await, ["a.tool", "d.tool"]);
    api.get("/v1/tools/c.tool").await.refused(404, "TOOL_NOT_FOUND");
}

#[tokio::test]
async fn a_tool_can_be_named_register() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("register")])).await;
    assert_eq!(client_tools(&api).await, ["register"]);
    assert_eq!(api.delete("/internal/tools/register?client_id=c1").await.status, 204);
    assert!(client_tools(&api).await.is_empty());
}

#[tokio::test]
async fn another_schema_under_the_same_name_is_a_conflict() {
    let server = Server::start().await;
    let api = server.api();
    let one = json!({ "type": "object", "properties": { "x": { "type": "string" } } });
    let same_schema = json!({ "properties": { "x": { "type": "string" } }, "type": "object" });
    let other = json!({ "type": "object", "properties": { "x": { "type": "integer" } } });
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": one }))])).await;
    let refused = register(
        &api,
        "c2",
        json!([offer("fine.tool"), offer_with("a.tool", json!({ "schema": other }))]),
    )
    .await;
    let error = refused.refused(409, "CONFLICT");
    assert_eq!(error["detail"]["tool"], "a.tool");
    assert!(message(&error).contains("different schema"), "{error}");
    assert_eq!(client_tools(&api).await, ["a.tool"], "all or nothing");
    api.register("c2", json!([offer_with("a.tool", json!({ "schema": same_schema }))])).await;
    let conflicting =
        register(&api, "c1", json!([offer_with("a.tool", json!({ "schema": other }))]));
    conflicting.await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn the_name_of_a_builtin_tool_is_reserved() {
    let server = Server::start().await;
    let api = server.api();
    let before = api.get("/v1/tools/weather.query").await.is(200);
    let error = register(&api, "c1", json!([offer("weather.query")])).await;
    let error = error.refused(409, "CONFLICT");
    assert!(message(&error).contains("built-in"), "{error}");
    assert_eq!(api.get("/v1/tools/weather.query").await.is(200), before);
}

#[tokio::test]
async fn an_invalid_registration_is_rejected() {
    let server = Server::with(|config| config.limits.max_tools_per_registration = 5).await;
    let api = server.api();
    let many: Vec<Value> = (0..6).map(|n| offer(&format!("t{n}.tool"))).collect();
    let cases = [
        (json!([offer("a.tool"), offer("a.tool")]), 409, "CONFLICT"),
        (json!([offer("not a name")]), 422, "VALIDATION_ERROR"),
        (json!([offer("")]), 422, "VALIDATION_ERROR"),
        (json!([offer_with("a.tool", json!({ "timeout_ms": 0 }))]), 422, "VALIDATION_ERROR"),
        (json!([offer_with("a.tool", json!({ "timeout_ms": -1 }))]), 422, "VALIDATION_ERROR"),
        (
            json!([offer_with("a.tool", json!({ "timeout_ms": 86_400_001 }))]),
            422,
            "VALIDATION_ERROR",
        ),
        (json!([offer_with("a.tool", json!({ "timeout_ms": "1s" }))]), 400, "BAD_REQUEST"),
        (json!([offer_with("a.tool", json!({ "effect": "nice" }))]), 400, "BAD_REQUEST"),
        (
            json!([offer_with("a.tool", json!({ "policy": { "max_parallel": 0 } }))]),
            422,
            "VALIDATION_ERROR",
        ),
        (json!(many), 413, "PAYLOAD_TOO_LARGE"),
    ];
    for (tools, status, code) in cases {
        register(&api, "c1", tools).await.refused(status, code);
    }
    register(&api, "", json!([offer("a.tool")])).await.refused(422, "VALIDATION_ERROR");
    register(&api, "two words", json!([])).await.refused(422, "VALIDATION_ERROR");
    assert_eq!(client_tools(&api).await, Vec::<String>::new(), "nothing was registered");
}

#[tokio::test]
async fn a_disconnected_client_keeps_its_tools_and_its_calls_wait() {
    let server = Server::start().await;
    let api = server.api();
    let client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    client.close().await;
    assert_eq!(client_tools(&api).await, ["a.tool"]);
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(api.call(&id).await["status"], "PENDING");
    let server = server.restart().await;
    let api = server.api();
    assert_eq!(client_tools(&api).await, ["a.tool"], "after a restart, too");
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    let request = client.take().await;
    assert_eq!(request["tool_call_id"], json!(id));
    client.succeed(&request, json!("at last")).await;
    assert_eq!(api.call(&id).await["result"], "at last");
}

#[tokio::test]
async fn a_tool_registered_over_http_reaches_an_open_connection() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    api.register("c1", json!([offer("b.tool")])).await;
    let id = api.invoke("b.tool", json!({})).await;
    assert_eq!(client.take().await["tool_call_id"], json!(id));
}

#[tokio::test]
async fn a_slash_in_a_tool_name_is_percent_encoded() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("mcp/github.create")])).await;
    let tool = api.get("/v1/tools/mcp%2Fgithub.create").await.is(200);
    assert_eq!(tool["name"], "mcp/github.create");
    let id = api.invoke("mcp%2Fgithub.create", json!({})).await;
    api.succeed(&id, json!(1)).await;
    assert_eq!(api.call(&id).await["tool_name"], "mcp/github.create");
}

#[tokio::test]
async fn a_project_at_its_tool_limit_accepts_only_known_tools() {
    let server = Server::with(|config| config.limits.max_tools_per_project = 3).await;
    let api = server.api();
    let tools = json!([offer("a.tool"), offer("b.tool"), offer("c.tool")]);
    api.register("c1", tools.clone()).await;
    api.register("c1", tools.clone()).await;
    api.register("c2", tools).await;
    let error = register(&api, "c1", json!([offer("a.tool"), offer("d.tool")])).await;
    let error = error.refused(413, "PAYLOAD_TOO_LARGE");
    assert!(message(&error).contains("more than 3 tools"), "{error}");
    assert_eq!(client_tools(&api).await, ["a.tool", "b.tool", "c.tool"]);
}

#[tokio::test]
async fn the_number_of_clients_per_project_is_limited() {
    let server = Server::with(|config| config.limits.max_clients_per_project = 2).await;
    let api = server.api();
    for client in ["c1", "c2", "c1"] {
        api.register(client, json!([offer("a.tool")])).await;
    }
    let error = register(&api, "c3", json!([offer("a.tool")])).await;
    let error = error.refused(413, "PAYLOAD_TOO_LARGE");
    assert!(message(&error).contains("same client_id at every start"), "{error}");
    server.api().project("q").register("c3", json!([offer("a.tool")])).await;
}

#[tokio::test]
async fn an_idle_client_can_be_deleted() {
    let server = Server::with(|config| config.limits.max_clients_per_project = 2).await;
    let api = server.api();
    api.register("old", json!([offer("a.tool"), offer("b.tool")])).await;
    api.register("new", json!([offer("a.tool")])).await;
    let third = json!({ "client_id": "third", "tools": [offer("c.tool")] });
    let refused = api.post("/internal/tools/register", third.clone()).await;
    refused.refused(413, "PAYLOAD_TOO_LARGE");
    // The list of clients includes those that are not connected.
    let clients = api.get("/v1/clients").await.is(200);
    let expected = json!({
        "client_id": "old", "connections": 0, "in_hand": 0, "tools": ["a.tool", "b.tool"],
        "last_seen_ms": null,
    });
    assert_eq!(
        (&clients["clients"][0]["client_id"], &clients["clients"][1]),
        (&json!("new"), &expected)
    );
    // A client with a connection or a leased call cannot be deleted.
    let path = "/internal/clients/old";
    let work = api.follow("/internal/ingress/sse?client_id=old", None).await;
    api.delete(path).await.refused(409, "CONFLICT");
    drop(work);
    until("the end of the connection", || async {
        (server.engine.clients().client_connection_count() == 0).then_some(())
    })
    .await;
    let id = api.invoke("b.tool", json!({})).await;
    assert_eq!(api.poll("old").await["tool_call_id"], json!(id));
    api.delete(path).await.refused(409, "CONFLICT");
    let body = json!({ "client_id": "old", "status": "SUCCEEDED", "result": 1 });
    api.submit(&id, body).await.is(200);
    assert_eq!(api.delete(path).await.status, 204);
    api.delete(path).await.refused(404, "NOT_FOUND");
    let tools = api.get("/v1/tools").await.is(200);
    let offered = |name: &str| tools["tools"].as_array().unwrap().iter().any(|t| t["name"] == name);
    assert_eq!((offered("a.tool"), offered("b.tool")), (true, false), "{tools}");
    let clients = api.get("/v1/clients").await.is(200);
    assert!(!clients.to_string().contains("\"old\""), "{clients}");
    api.post("/internal/tools/register", third).await.is(200);
}

#[tokio::test]
async fn names_of_the_mcp_endpoint_cannot_be_registered() {
    let server = Server::start().await;
    let api = server.api();
    for name in ["tools.call", "tools.search", "tools.describe", "call.result", "result.read"] {
        let body = json!({ "client_id": "pc_1", "tools": [offer(name)] });
        let error = api.post("/internal/tools/register", body).await.refused(409, "CONFLICT");
        assert_eq!(error["detail"]["tool"], name);
        let options = json!({ "http": { "url": "https://api.example.com/x" } });
        let body = json!({ "tool_name": name, "options": options,
            "parameters": { "type": "object", "properties": {} } });
        let reply = api.post("/projects/default/tools", body).await;
        assert!(matches!(reply.status.as_u16(), 400 | 409), "{name}: {}", reply.text);
        let import = json!({
            "openapi": "3.1.0", "info": { "title": "t", "version": "1" },
            "servers": [{ "url": "https://api.example.com" }],
            "paths": { "/x": { "get": { "operationId": name.split_once('.').unwrap().1 } } },
        });
        let prefix = name.split_once('.').unwrap().0;
        let path = format!("/projects/default/tools/import?prefix={prefix}");
        let reply = api.post(&path, import).await;
        api.get("/projects/default/tools").await.is(200);
        assert!(!reply.body["imported"].to_string().contains(name), "{name}: {}", reply.text);
    }
    // The forms that models see.
    for name in ["tools__call", "tools__search", "tools__describe", "call__result", "result__read"]
    {
        let body = json!({ "client_id": "pc_1", "tools": [offer(name)] });
        let error = api.post("/internal/tools/register", body).await.refused(409, "CONFLICT");
        assert_eq!(error["detail"]["tool"], name);
    }
    let options = json!({ "http": { "url": "https://api.example.com/x" } });
    let body = json!({ "tool_name": "tools__call", "options": options,
        "parameters": { "type": "object", "properties": {} } });
    let reply = api.post("/projects/default/tools", body).await;
    assert_eq!(reply.status.as_u16(), 400, "{}", reply.text);
    let listed = api.get("/projects/default/tools").await.text;
    for name in ["tools.call", "call.result", "tools__call", "call__result"] {
        assert!(!listed.contains(name), "{name}: {listed}");
    }
}
