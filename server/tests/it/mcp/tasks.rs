//! MCP tasks: calls that a client polls by their id.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

async fn get_task(client: &Mcp, id: &str) -> Value {
    client.ask("tasks/get", json!({ "taskId": id })).await.result()
}

fn background_tool(name: &str) -> Value {
    offer_with(name, json!({ "async": true }))
}

#[tokio::test]
async fn a_background_tool_call_is_a_task_that_survives_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background_tool("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("report.make", json!({})).await.result();
    assert_eq!(task["resultType"], "task", "{task}");
    assert_eq!(task["status"], "working");
    let id = task["taskId"].as_str().unwrap().to_owned();
    assert!(id.starts_with("tc_"));
    assert!(task["ttlMs"].as_u64().is_some_and(|ttl| ttl > 0), "{task}");
    assert_eq!(get_task(&client, &id).await["status"], "working");

    let server = server.restart().await;
    let api = server.api();
    let client = Mcp::modern(&api).with_tasks();
    assert_eq!(get_task(&client, &id).await["status"], "working");
    let polled = api.poll("pc_1").await;
    assert_eq!(polled["tool_call_id"], id.as_str());
    api.succeed(&id, json!({ "pages": 7 })).await;
    let done = get_task(&client, &id).await;
    assert_eq!(done["status"], "completed", "{done}");
    assert_eq!(done["result"]["structuredContent"], json!({ "pages": 7 }));
    assert_eq!(done["createdAt"], task["createdAt"]);

    let server = server.restart().await;
    let client = Mcp::modern(&server.api()).with_tasks();
    assert_eq!(get_task(&client, &id).await["result"], done["result"]);
}

#[tokio::test]
async fn a_long_call_becomes_a_task_that_survives_a_disconnect() {
    // A call that finishes within `task_after_ms` is not a task.
    let patient = Server::with(|config| config.transports.mcp.task_after_ms = 60_000).await;
    let client = Mcp::modern(&patient.api()).with_tasks();
    let quick = client.call("calculation.eval", json!({ "expression": "1" })).await.result();
    assert_eq!(quick["resultType"], "complete");
    let server = Server::with(|config| config.transports.mcp.task_after_ms = 50).await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("slow.one", json!({})).await.result();
    assert_eq!(task["resultType"], "task");
    let id = task["taskId"].as_str().unwrap();
    drop(client);
    assert_eq!(api.poll("pc_1").await["tool_call_id"], id);
    api.succeed(id, json!("done")).await;
    assert_eq!(get_task(&Mcp::modern(&api).with_tasks(), id).await["status"], "completed");
}

#[tokio::test]
async fn a_failed_call_is_a_completed_task_with_an_error_result() {
    let server = Server::start().await;
    let api = server.api();
    let short = json!({ "async": true, "timeout_ms": 100 });
    api.register("pc_1", json!([background_tool("a.fails"), offer_with("a.late", short)])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("a.fails", json!({})).await.result();
    let id = task["taskId"].as_str().unwrap();
    api.poll("pc_1").await;
    api.fail(id, json!({ "message": "no paper", "retryable": false })).await;
    let failed = get_task(&client, id).await;
    assert_eq!(failed["status"], "completed", "{failed}");
    assert_eq!(failed["result"]["isError"], true);
    let text = failed["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("no paper"), "{text}");
    let late = client.call("a.late", json!({})).await.result();
    let id = late["taskId"].as_str().unwrap();
    api.finished(id).await;
    let late = get_task(&client, id).await;
    assert_eq!((&late["status"], &late["result"]["isError"]), (&json!("completed"), &json!(true)));
}

#[tokio::test]
async fn a_task_can_be_canceled_by_its_own_project_only() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background_tool("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("report.make", json!({})).await.result();
    let id = task["taskId"].as_str().unwrap();
    let other = Mcp::modern(&api.clone().project("other")).with_tasks();
    for method in ["tasks/get", "tasks/cancel"] {
        other.ask(method, json!({ "taskId": id })).await.error(-32602);
    }
    let update = json!({ "taskId": id, "inputResponses": {} });
    other.ask("tasks/update", update).await.error(-32602);
    for _ in 0..2 {
        let ack = client.ask("tasks/cancel", json!({ "taskId": id })).await.result();
        assert_eq!(ack, json!({ "resultType": "complete" }));
    }
    assert_eq!(get_task(&client, id).await["status"], "cancelled");
    assert_eq!(api.call(id).await["status"], "CANCELED");
    let nothing = json!({ "taskId": "tc_nothing" });
    client.ask("tasks/get", nothing).await.error(-32602);
}

#[tokio::test]
async fn a_task_can_be_read_without_the_header_that_repeats_its_id() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background_tool("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("report.make", json!({})).await.result();
    let id = task["taskId"].as_str().unwrap();
    for method in ["tasks/get", "tasks/update", "tasks/cancel"] {
        let params = json!({ "taskId": id, "inputResponses": {} });
        let mut request = client.request(method, params).build().unwrap();
        assert!(request.headers_mut().remove("mcp-name").is_some());
        let response = reqwest::Client::new().execute(request).await.unwrap();
        assert_eq!(response.status(), 200, "{method}: {}", response.text().await.unwrap());
    }
    let wrong = client.request("tasks/get", json!({ "taskId": id })).header("mcp-name", "other");
    assert_eq!(client.send(wrong).await.status, 400, "a header that contradicts the body");
}

#[tokio::test]
async fn legacy_clients_get_no_tasks_even_if_they_declare_the_extension() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 50).await;
    let api = server.api();
    api.register("pc_1", json!([background_tool("report.make")])).await;
    let declared = json!({ "extensions": { "io.modelcontextprotocol/tasks": {} } });
    let mut client = Mcp::legacy_with(&api, declared.clone()).await;
    let result = client.call("report.make", json!({})).await.result();
    assert!(result["taskId"].is_null() && result["content"].is_array(), "{result}");
    let params = json!({ "protocolVersion": "2025-11-25", "capabilities": declared,
        "clientInfo": { "name": "test", "version": "1" } });
    client.session = None;
    let hello = client.ask("initialize", params).await.result();
    assert!(hello["capabilities"]["extensions"].is_null(), "{hello}");
}

#[tokio::test]
async fn the_wait_is_chosen_by_the_url_or_by_the_key() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let impatient = Mcp::modern(&api).with_path("/mcp?wait_ms=0");
    let result = impatient.call("slow.one", json!({})).await.result();
    assert_eq!(result["structuredContent"]["status"], "PENDING", "{result}");
    let task = impatient.with_tasks().call("slow.one", json!({})).await.result();
    assert_eq!(task["resultType"], "task", "{task}");
    let wrong = Mcp::modern(&api).with_path("/mcp?wait_ms=soon").ask("tools/list", json!({})).await;
    assert_eq!(wrong.status, 422);
    let operator = server.operator();
    operator.post("/v1/keys", json!({ "agent": "root", "role": "admin" })).await.is(201);
    let body = json!({ "agent": "ada", "allow": ["*"], "mcp_wait_ms": 0, "mcp_names": "dotted" });
    let key = operator.post("/v1/keys", body).await.is(201);
    assert_eq!((&key["mcp_wait_ms"], &key["mcp_names"]), (&json!(0), &json!("dotted")), "{key}");
    let ada = Mcp::modern(&server.with_key(key["key"].as_str().unwrap()));
    let result = ada.call("slow.one", json!({})).await.result();
    assert_eq!(result["structuredContent"]["status"], "PENDING", "{result}");
}

#[tokio::test]
async fn a_subscriber_is_notified_of_the_states_of_its_tasks() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background_tool("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let task = client.call("report.make", json!({})).await.result();
    let id = task["taskId"].as_str().unwrap();
    let params = json!({ "notifications": { "taskIds": [id, "tc_nothing"] } });
    let mut stream = client.open("subscriptions/listen", params.clone()).await;
    let acknowledged = stream.until("notifications/subscriptions/acknowledged").await;
    assert_eq!(acknowledged["params"]["notifications"]["taskIds"][0], id, "{acknowledged}");
    let first = stream.until("notifications/tasks").await;
    assert_eq!(
        (&first["params"]["taskId"], &first["params"]["status"]),
        (&json!(id), &json!("working"))
    );
    let subscription = &first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"];
    assert!(!subscription.is_null(), "{first}");
    api.poll("pc_1").await;
    api.succeed(id, json!({ "pages": 7 })).await;
    let done = loop {
        let next = stream.until("notifications/tasks").await;
        if next["params"]["status"] != "working" {
            break next;
        }
    };
    let polled = get_task(&client, id).await;
    assert_eq!(done["params"]["status"], "completed", "{done}");
    assert_eq!(done["params"]["result"], polled["result"], "the same as tasks/get returns");
    // A subscription after the end has the final state at once.
    let mut late = client.open("subscriptions/listen", params.clone()).await;
    assert_eq!(late.until("notifications/tasks").await["params"]["status"], "completed");
    Mcp::modern(&api).ask("subscriptions/listen", params).await.error(-32021);
}

#[tokio::test]
async fn clients_without_the_tasks_extension_get_no_tasks() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 50).await;
    let api = server.api();
    let only = json!({ "async": true, "metadata": { "task_support": "required" } });
    api.register("pc_1", json!([background_tool("report.make"), offer_with("report.only", only)]))
        .await;
    let plain = Mcp::modern(&api);
    let result = plain.call("report.make", json!({})).await.result();
    assert_eq!(result["resultType"], "complete");
    let id = result["structuredContent"]["tool_call_id"].as_str().unwrap();
    let error = plain.ask("tasks/get", json!({ "taskId": id })).await.error(-32021);
    let needed = &error["data"]["requiredCapabilities"]["extensions"];
    assert!(needed["io.modelcontextprotocol/tasks"].is_object(), "{error}");
    plain.call("report.only", json!({})).await.error(-32021);
    let discovered = plain.ask("server/discover", json!({})).await.result();
    let extensions = &discovered["capabilities"]["extensions"];
    assert!(extensions["io.modelcontextprotocol/tasks"].is_object(), "{discovered}");
}
