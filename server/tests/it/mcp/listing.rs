//! The tool list: visibility, descriptions, pagination and change notifications.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

fn find_tool<'a>(tools: &'a [Value], name: &str) -> &'a Value {
    tools.iter().find(|tool| tool["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[tokio::test]
async fn both_revisions_list_the_same_tools_sorted_by_name() {
    let server = Server::start().await;
    let modern = Mcp::modern(&server.api()).names().await;
    let legacy = Mcp::legacy(&server.api()).await.names().await;
    assert_eq!(modern, legacy);
    assert_eq!(
        modern,
        ["calculation__eval", "call__result", "database__query", "result__read", "weather__query"]
    );
}

#[tokio::test]
async fn a_listed_tool_has_all_fields_of_its_definition() {
    let server = Server::start().await;
    let api = server.api();
    let schema = json!({ "type": "object", "properties": { "to": { "type": "string" } } });
    let output = json!({ "type": "object", "properties": { "sent": { "type": "boolean" } } });
    let more = json!({
        "schema": schema, "output_schema": output, "description": "Sends a letter",
        "effect": "irreversible", "risk": "high", "metadata": { "title": "Post a letter" },
    });
    let read = json!({ "effect": "read", "risk": "low" });
    let tools = json!([offer_with("mail.send", more), offer_with("mail.list_all", read)]);
    api.register("pc_1", tools).await;
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let tools = client.tools().await;
        let send = find_tool(&tools, "mail__send");
        assert_eq!(send["title"], "Post a letter");
        assert_eq!(send["description"], "Sends a letter");
        assert_eq!(send["inputSchema"]["properties"], schema["properties"]);
        assert_eq!(send["outputSchema"]["properties"], output["properties"]);
        let hints = &send["annotations"];
        assert_eq!(hints["readOnlyHint"], false);
        assert_eq!(hints["destructiveHint"], true);
        assert_eq!(hints["idempotentHint"], false);
        let list = find_tool(&tools, "mail__list_all");
        assert_eq!(list["title"], "Mail list all");
        assert_eq!(list["annotations"]["readOnlyHint"], true);
        assert_eq!(list["annotations"]["destructiveHint"], false);
    }
}

#[tokio::test]
async fn non_object_output_schemas_are_listed_only_in_the_modern_revision() {
    let server = Server::start().await;
    let api = server.api();
    let more = json!({ "output_schema": { "type": "array", "items": { "type": "string" } } });
    api.register("pc_1", json!([offer_with("words.split", more)])).await;
    let modern = Mcp::modern(&api).tools().await;
    assert_eq!(find_tool(&modern, "words__split")["outputSchema"]["type"], "array");
    let legacy = Mcp::legacy(&api).await.tools().await;
    assert!(find_tool(&legacy, "words__split")["outputSchema"].is_null());
}

#[tokio::test]
async fn the_tool_list_is_paginated_and_cacheable() {
    let server = Server::with(|config| config.transports.mcp.page_size = 10).await;
    let api = server.api();
    let many: Vec<Value> = (0..37).map(|n| offer(&format!("many.tool_{n:02}"))).collect();
    api.register("pc_1", json!(many)).await;
    let client = Mcp::modern(&api);
    let first = client.ask("tools/list", json!({})).await.result();
    assert_eq!(first["tools"].as_array().unwrap().len(), 10);
    assert_eq!(first["cacheScope"], "private");
    assert_eq!(first["ttlMs"], 60_000);
    let names = client.names().await;
    let mut sorted = names.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(names, sorted, "each tool once, in order");
    assert_eq!(names.len(), 42);
    let unknown = json!({ "cursor": "nobody gave this out" });
    client.ask("tools/list", unknown).await.error(-32602);
}

#[tokio::test]
async fn tools_that_the_caller_may_not_call_are_not_listed() {
    let server = Server::start().await;
    let ada = server.keyed("default", "ada", "agent", &["calculation.*"]).await;
    // The tool that reads what a digest omits comes with any other.
    let names = ["calculation__eval", "call__result", "result__read"];
    assert_eq!(Mcp::modern(&ada).names().await, names);
    let provider = server.keyed("default", "worker", "provider", &[]).await;
    assert!(Mcp::modern(&provider).names().await.is_empty());
    let client = Mcp::legacy(&ada).await;
    let result = client.call("weather.query", json!({ "city": "Ulm" })).await.result();
    assert_eq!(result["isError"], true);
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("may not call \"weather.query\""), "{text}");
}

#[tokio::test]
async fn a_subscribed_client_is_notified_of_tool_list_changes() {
    let server = Server::start().await;
    let api = server.api();
    let params = json!({ "notifications": { "toolsListChanged": true } });
    let mut stream = Mcp::modern(&api).open("subscriptions/listen", params).await;
    stream.until("notifications/subscriptions/acknowledged").await;
    api.register("pc_1", json!([offer("new.tool")])).await;
    stream.until("notifications/tools/list_changed").await;
}

#[tokio::test]
async fn a_session_is_notified_of_changes_of_its_own_project_only() {
    let server = Server::start().await;
    let (owner, theirs) = (server.api(), server.api().project("other"));
    let client = Mcp::legacy(&owner).await;
    let mut stream = client.session_stream().await;
    theirs.register("pc_2", json!([offer("their.tool")])).await;
    owner.register("pc_1", json!([offer("our.tool")])).await;
    stream.until("notifications/tools/list_changed").await;
    assert!(client.names().await.contains(&"our__tool".to_owned()));
    // The next notification is about the next change of this project, not of the other one.
    theirs.register("pc_2", json!([offer("their.second")])).await;
    owner.register("pc_1", json!([offer("our.second")])).await;
    stream.until("notifications/tools/list_changed").await;
    assert!(client.names().await.contains(&"our__second".to_owned()));
}

#[tokio::test]
async fn a_revoked_key_ends_the_subscription() {
    let server = Server::start().await;
    let admin = server.keyed("default", "root", "admin", &[]).await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let params = json!({ "notifications": { "toolsListChanged": true } });
    let mut stream = Mcp::modern(&ada).open("subscriptions/listen", params).await;
    stream.until("notifications/subscriptions/acknowledged").await;
    let keys = admin.get("/v1/keys").await.is(200);
    let key = keys["keys"].as_array().unwrap().iter().find(|key| key["agent"] == "ada").unwrap();
    let id = key["id"].as_str().or(key["key_id"].as_str()).unwrap();
    admin.delete(&format!("/v1/keys/{id}")).await;
    let mut rest = Vec::new();
    while let Some(message) = stream.next().await {
        rest.push(message);
    }
    assert!(rest.iter().all(|m| m["method"].is_null()), "no notification may follow: {rest:?}");
}

#[tokio::test]
async fn a_catalogue_client_is_notified_of_tool_list_changes() {
    let server = Server::start().await;
    let api = server.api();
    let client = Mcp::modern(&api).with_path("/mcp?catalogue=search");
    let params = json!({ "notifications": { "toolsListChanged": true } });
    let mut stream = client.open("subscriptions/listen", params).await;
    stream.until("notifications/subscriptions/acknowledged").await;
    api.register("pc_1", json!([offer("our.tool")])).await;
    stream.until("notifications/tools/list_changed").await;
}
