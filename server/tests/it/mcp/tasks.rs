//! Tasks: calls that a client follows by their tickets.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

async fn task(client: &Mcp, id: &str) -> Value {
    client.ask("tasks/get", json!({ "taskId": id })).await.result()
}

fn background(name: &str) -> Value {
    offer_with(name, json!({ "async": true }))
}

#[tokio::test]
async fn a_background_tool_is_a_task_at_once_and_survives_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let made = client.call("report.make", json!({})).await.result();
    assert_eq!(made["resultType"], "task", "{made}");
    assert_eq!(made["status"], "working");
    let id = made["taskId"].as_str().unwrap().to_owned();
    assert!(id.starts_with("tc_"));
    assert!(made["ttlMs"].as_u64().is_some_and(|ttl| ttl > 0), "{made}");
    assert_eq!(task(&client, &id).await["status"], "working");

    let server = server.restart().await;
    let api = server.api();
    let client = Mcp::modern(&api).with_tasks();
    assert_eq!(task(&client, &id).await["status"], "working");
    let given = api.poll("pc_1").await;
    assert_eq!(given["tool_call_id"], id.as_str());
    api.succeed(&id, json!({ "pages": 7 })).await;
    let done = task(&client, &id).await;
    assert_eq!(done["status"], "completed", "{done}");
    assert_eq!(done["result"]["structuredContent"], json!({ "pages": 7 }));
    assert_eq!(done["createdAt"], made["createdAt"]);

    let server = server.restart().await;
    let client = Mcp::modern(&server.api()).with_tasks();
    assert_eq!(task(&client, &id).await["result"], done["result"]);
}

#[tokio::test]
async fn a_call_that_takes_long_becomes_a_task_and_hanging_up_does_not_cancel_it() {
    // Where there is time enough, what is done within it is no task.
    let patient = Server::with(|config| config.transports.mcp.task_after_ms = 60_000).await;
    let client = Mcp::modern(&patient.api()).with_tasks();
    let quick = client.call("calculation.eval", json!({ "expression": "1" })).await.result();
    assert_eq!(quick["resultType"], "complete");
    let server = Server::with(|config| config.transports.mcp.task_after_ms = 50).await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let made = client.call("slow.one", json!({})).await.result();
    assert_eq!(made["resultType"], "task");
    let id = made["taskId"].as_str().unwrap();
    drop(client);
    assert_eq!(api.poll("pc_1").await["tool_call_id"], id);
    api.succeed(id, json!("done")).await;
    assert_eq!(task(&Mcp::modern(&api).with_tasks(), id).await["status"], "completed");
}

#[tokio::test]
async fn a_tool_that_fails_is_a_completed_task_whose_result_says_so() {
    let server = Server::start().await;
    let api = server.api();
    let short = json!({ "async": true, "timeout_ms": 100 });
    api.register("pc_1", json!([background("a.fails"), offer_with("a.late", short)])).await;
    let client = Mcp::modern(&api).with_tasks();
    let made = client.call("a.fails", json!({})).await.result();
    let id = made["taskId"].as_str().unwrap();
    api.poll("pc_1").await;
    api.fail(id, json!({ "message": "no paper", "retryable": false })).await;
    let failed = task(&client, id).await;
    assert_eq!(failed["status"], "completed", "{failed}");
    assert_eq!(failed["result"]["isError"], true);
    let text = failed["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("no paper"), "{text}");
    let late = client.call("a.late", json!({})).await.result();
    let id = late["taskId"].as_str().unwrap();
    api.finished(id).await;
    let late = task(&client, id).await;
    assert_eq!((&late["status"], &late["result"]["isError"]), (&json!("completed"), &json!(true)));
}

#[tokio::test]
async fn a_task_can_be_canceled_and_is_its_projects_alone() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([background("report.make")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let made = client.call("report.make", json!({})).await.result();
    let id = made["taskId"].as_str().unwrap();
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
    assert_eq!(task(&client, id).await["status"], "cancelled");
    assert_eq!(api.call(id).await["status"], "CANCELED");
    let nothing = json!({ "taskId": "tc_nothing" });
    client.ask("tasks/get", nothing).await.error(-32602);
}

#[tokio::test]
async fn who_does_not_declare_the_extension_meets_no_tasks() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 50).await;
    let api = server.api();
    let only = json!({ "async": true, "metadata": { "task_support": "required" } });
    api.register("pc_1", json!([background("report.make"), offer_with("report.only", only)])).await;
    let plain = Mcp::modern(&api);
    let told = plain.call("report.make", json!({})).await.result();
    assert_eq!(told["resultType"], "complete");
    let id = told["structuredContent"]["tool_call_id"].as_str().unwrap();
    let error = plain.ask("tasks/get", json!({ "taskId": id })).await.error(-32021);
    let needed = &error["data"]["requiredCapabilities"]["extensions"];
    assert!(needed["io.modelcontextprotocol/tasks"].is_object(), "{error}");
    plain.call("report.only", json!({})).await.error(-32021);
    let discovered = plain.ask("server/discover", json!({})).await.result();
    let extensions = &discovered["capabilities"]["extensions"];
    assert!(extensions["io.modelcontextprotocol/tasks"].is_object(), "{discovered}");
}
