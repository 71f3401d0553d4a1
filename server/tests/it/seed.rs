//! The first API contract, exactly: fields, casing, status codes, messages, and its two examples.

use serde_json::{Value, json};

use crate::support::{Server, weather};

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn unix_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// The registration in the contract.
fn browser_and_file() -> Value {
    json!({
        "client_id": "client_abc123",
        "tools": [
            {
                "name": "browser.screenshot",
                "schema": {
                    "type": "object",
                    "properties": {
                        "url": {"type": "string"},
                        "width": {"type": "integer"},
                        "height": {"type": "integer"}
                    },
                    "required": ["url"]
                },
                "timeout_ms": 30000
            },
            {
                "name": "file.read",
                "schema": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}},
                    "required": ["path"]
                },
                "timeout_ms": 5000
            }
        ]
    })
}

#[tokio::test]
async fn registration_returns_ok_and_the_count() {
    let server = Server::start().await;
    let api = server.api();
    let answer = api.post("/internal/tools/register", browser_and_file()).await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.is(200), json!({ "ok": true, "registered_count": 2 }));
}

#[tokio::test]
async fn the_tool_list_contains_tools_of_the_server_and_of_clients() {
    let server = Server::start().await;
    let api = server.api();
    api.post("/internal/tools/register", browser_and_file()).await.is(200);
    let list = api.get("/v1/tools").await.is(200);
    let tools = list["tools"].as_array().unwrap();
    let listed: Vec<(&str, &str, u64)> = tools
        .iter()
        .map(|tool| {
            assert!(tool["schema"].is_object(), "{tool}");
            let (name, source) = (tool["name"].as_str().unwrap(), tool["source"].as_str().unwrap());
            (name, source, tool["timeout_ms"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(
        listed,
        [
            ("browser.screenshot", "client", 30_000),
            ("calculation.eval", "server", 3_000),
            ("database.query", "server", 10_000),
            ("file.read", "client", 5_000),
            ("result.read", "server", 10_000),
            ("weather.query", "server", 5_000),
        ]
    );
    let registered = browser_and_file();
    assert_eq!(tools[0]["schema"], registered["tools"][0]["schema"], "as it was registered");
    assert_eq!(api.get("/v1/tools/file.read").await.is(200), tools[3]);
    for (tool, argument) in [(1, "expression"), (2, "sql"), (5, "query")] {
        assert_eq!(tools[tool]["schema"]["properties"][argument]["type"], "string");
    }
}

#[tokio::test]
async fn example_1_a_tool_of_the_server() {
    let address = weather::stand_in().await;
    let server = Server::with(|config| {
        config.builtin.weather.geocoding_url = address.clone();
        config.builtin.weather.forecast_url = address;
    })
    .await;
    let api = server.api();
    let before = unix_now();
    let body = json!({ "run_id": "run_001", "args": { "query": "Beijing weather" } });
    let ticket = api.post("/v1/tools/weather.query/invoke", body).await.is(202);
    let id = ticket["tool_call_id"].as_str().unwrap();
    assert!(id.starts_with("tc_"), "{id}");
    let expected = json!({
        "tool_call_id": id,
        "status": "pending",
        "message": "tool call created, use tool_call_id to poll result"
    });
    assert_eq!(ticket, expected);
    let call = api.finished(id).await;
    assert_eq!(call["tool_call_id"], id);
    assert_eq!(call["run_id"], "run_001");
    assert_eq!(call["tool_name"], "weather.query");
    assert_eq!(call["source"], "server");
    assert_eq!(call["status"], "SUCCEEDED");
    assert_eq!(call["args"], json!({ "query": "Beijing weather" }));
    assert_eq!(call["result"]["weather"], "Sunny");
    assert_eq!(call["result"]["temperature"], 31.4);
    assert_eq!(call["error"], Value::Null);
    let (created, completed) = (&call["created_at"], &call["completed_at"]);
    let seconds = before..=unix_now();
    assert!(seconds.contains(&created.as_u64().unwrap()), "Unix seconds: {created}");
    assert!(seconds.contains(&completed.as_u64().unwrap()), "Unix seconds: {completed}");
    assert_eq!(call["created_at_ms"].as_u64().unwrap() / 1_000, created.as_u64().unwrap());
}

#[tokio::test]
async fn example_2_a_tool_of_a_client() {
    let server = Server::start().await;
    let api = server.api();
    api.post("/internal/tools/register", browser_and_file()).await.is(200);
    let body = json!({ "run_id": "run_002", "args": { "url": "https://example.com" } });
    let ticket = api.post("/v1/tools/browser.screenshot/invoke", body).await;
    let location = ticket.header("location").unwrap().to_owned();
    let ticket = ticket.is(202);
    assert_eq!(keys(&ticket), ["message", "status", "tool_call_id"]);
    let id = ticket["tool_call_id"].as_str().unwrap();
    assert_eq!(location, format!("/v1/tool_calls/{id}"));
    let call = api.call(id).await;
    assert_eq!(call["status"], "PENDING", "not acknowledged yet");
    assert_eq!(call["source"], "client");
    assert_eq!((&call["result"], &call["error"]), (&Value::Null, &Value::Null));
    assert_eq!(call["completed_at"], Value::Null);
    let result = json!({ "screenshot_url": "https://cdn.example.com/screenshot.png" });
    let body = json!({ "status": "SUCCEEDED", "result": result });
    let answer = api.submit(id, body).await.is(200);
    assert_eq!(answer, json!({ "ok": true, "tool_call_id": id, "status": "SUCCEEDED" }));
    let call = api.call(id).await;
    assert_eq!(call["status"], "SUCCEEDED");
    assert_eq!(call["result"], result);
    assert_eq!(call["error"], Value::Null);
    assert!(call["completed_at"].is_u64());
}

#[tokio::test]
async fn a_call_has_the_fields_of_the_contract_first_and_in_order() {
    let server = Server::start().await;
    let api = server.api();
    let id = api.invoke("calculation.eval", json!({ "expression": "2*21" })).await;
    api.finished(&id).await;
    let text = api.get(&format!("/v1/tool_calls/{id}")).await.text;
    let fields = [
        "tool_call_id",
        "run_id",
        "tool_name",
        "source",
        "status",
        "args",
        "result",
        "error",
        "created_at",
        "completed_at",
    ];
    let positions: Vec<usize> =
        fields.iter().map(|field| text.find(&format!("\"{field}\":")).unwrap()).collect();
    assert!(positions.is_sorted(), "{text}");
}

#[tokio::test]
async fn a_client_submits_a_failure() {
    let server = Server::start().await;
    let api = server.api();
    api.post("/internal/tools/register", browser_and_file()).await.is(200);
    let id = api.invoke("file.read", json!({ "path": "/etc/motd" })).await;
    let body =
        json!({ "status": "FAILED", "result": null, "error": { "message": "no such file" } });
    let answer = api.submit(&id, body).await.is(200);
    assert_eq!(answer, json!({ "ok": true, "tool_call_id": id, "status": "FAILED" }));
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("FAILED"), &Value::Null));
    let message = call["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("no such file"), "{message}");
    assert_eq!(call["error"]["code"], "RUNTIME_ERROR");
}

#[tokio::test]
async fn an_unacknowledged_call_times_out() {
    let server = Server::start().await;
    let api = server.api();
    api.post("/internal/tools/register", browser_and_file()).await.is(200);
    let body = json!({ "run_id": "run_003", "args": { "path": "/a" }, "timeout_ms": 50 });
    let id = api.invoke_with("file.read", body).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "TIMEOUT");
    assert_eq!(call["error"]["code"], "TIMEOUT");
    assert!(call["completed_at"].is_u64());
}

#[tokio::test]
async fn an_unknown_tool_and_an_unknown_call_are_not_found() {
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "run_id": "run_001", "args": {} });
    api.post("/v1/tools/nowhere.at_all/invoke", body).await.refused(404, "TOOL_NOT_FOUND");
    api.get("/v1/tool_calls/tc_001").await.refused(404, "NOT_FOUND");
}
