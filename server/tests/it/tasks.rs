//! Background tasks: an immediate ticket, events while they run, the result later.

use serde_json::{Value, json};

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

/// Starts a server with an async and a synchronous tool of client `c1`.
async fn start_with_tools() -> (Server, Api) {
    let server = Server::start().await;
    let api = server.api();
    let output = json!({ "type": "object", "required": ["rows"],
        "properties": { "rows": { "type": "integer" } } });
    let input = json!({ "type": "object", "required": ["table"] });
    let task = json!({ "async": true, "schema": input, "output_schema": output });
    api.register("c1", json!([offer_with("report.build", task), offer("plain.tool")])).await;
    (server, api)
}

async fn submit_task(api: &Api, call_id: &str) -> String {
    let args = json!({ "table": "orders" });
    let body = json!({ "run_id": "run_1", "call_id": call_id, "args": args });
    let ticket = api.post("/v1/tools/report.build/invoke", body).await.is(202);
    assert_eq!(ticket["task_id"], ticket["tool_call_id"], "{ticket}");
    assert_eq!(ticket["status"], "pending");
    ticket["task_id"].as_str().unwrap().to_owned()
}

async fn task(api: &Api, id: &str) -> Value {
    api.get(&format!("/v1/tasks/{id}")).await.is(200)
}

async fn progress(api: &Api, id: &str, body: Value) {
    api.post(&format!("/internal/tool_calls/{id}/progress"), body).await.is(200);
}

#[tokio::test]
async fn a_task_goes_from_submitted_to_completed() {
    let (_server, api) = start_with_tools().await;
    let id = submit_task(&api, "mine-1").await;
    let task_body = task(&api, &id).await;
    assert_eq!(task_body["status"], "submitted");
    assert_eq!((&task_body["task_id"], &task_body["tool_call_id"]), (&json!(id), &json!(id)));
    assert_eq!((&task_body["call_id"], &task_body["run_id"]), (&json!("mine-1"), &json!("run_1")));
    assert_eq!(
        (&task_body["tool_name"], &task_body["async"]),
        (&json!("report.build"), &json!(true))
    );
    assert!(task_body.get("progress").is_none() && task_body["result"].is_null(), "{task_body}");
    api.poll("c1").await;
    assert_eq!(task(&api, &id).await["status"], "running");
    progress(&api, &id, json!({ "percent": 10, "message": "reading" })).await;
    progress(&api, &id, json!({ "percent": 55.5, "data": { "rows": 7 } })).await;
    let task_body = task(&api, &id).await;
    assert_eq!(task_body["progress"]["percent"], 55.5, "the last one: {task_body}");
    assert_eq!(task_body["progress"]["data"], json!({ "rows": 7 }));
    assert!(task_body["progress"].get("message").is_none(), "{task_body}");
    let waiting = api.clone();
    let path = format!("/v1/tasks/{id}?wait_ms=30000");
    let waited = tokio::spawn(async move { waiting.get(&path).await.is(200) });
    api.succeed(&id, json!({ "rows": 12 })).await;
    let done = waited.await.unwrap();
    assert_eq!(done["status"], "completed");
    assert_eq!(done["result"], json!({ "rows": 12 }));
    assert_eq!((&done["error"], &done["metrics"]["attempts"]), (&Value::Null, &json!(1)));
    assert_eq!(done["progress"]["percent"], 55.5, "the last progress stays visible");
    assert_eq!(api.call(&id).await["task_id"], json!(id));
}

#[tokio::test]
async fn task_events_can_be_resumed() {
    let (_server, api) = start_with_tools().await;
    let id = submit_task(&api, "mine-2").await;
    let path = format!("/v1/tasks/{id}/events");
    let mut events = api.follow(&path, None).await;
    let first = events.event().await;
    assert_eq!((first.name.as_str(), &first.data["type"]), ("task.submit", &json!("task.submit")));
    for (field, value) in [("task_id", id.as_str()), ("call_id", "mine-2"), ("run_id", "run_1")] {
        assert_eq!(first.data[field], value, "{}", first.data);
    }
    api.poll("c1").await;
    progress(&api, &id, json!({ "percent": 40, "message": "half way", "data": [1] })).await;
    let second = events.event().await;
    assert_eq!(second.name, "task.progress");
    let fields = ["percent", "message", "data"].map(|field| second.data[field].clone());
    assert_eq!(fields, [json!(40.0), json!("half way"), json!([1])]);
    drop(events);
    api.succeed(&id, json!({ "rows": 3 })).await;
    let mut rest = api.follow(&path, second.id).await;
    let last = rest.event().await;
    assert_eq!((last.name.as_str(), &last.data["status"]), ("task.completed", &json!("completed")));
    assert_eq!((&last.data["ok"], &last.data["data"]), (&json!(true), &json!({ "rows": 3 })));
    assert_eq!((&last.data["call_id"], &last.data["task_id"]), (&json!("mine-2"), &json!(id)));
    assert_eq!(rest.next().await, None, "the stream ends");
    // Task events have the numbers of the call's events, with other names.
    let mut calls = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    assert_eq!(calls.wait_for("tool.call.progress").await.id, second.id);
    assert_eq!(calls.wait_for("tool.call.finished").await.id, last.id);
}

#[tokio::test]
async fn a_result_that_violates_the_output_schema_fails_the_task() {
    let (_server, api) = start_with_tools().await;
    let id = submit_task(&api, "mine-3").await;
    api.poll("c1").await;
    api.submit(&id, json!({ "status": "SUCCEEDED", "result": { "rows": "many" } })).await.is(200);
    let task = api.get(&format!("/v1/tasks/{id}?wait_ms=30000")).await.is(200);
    assert_eq!((&task["status"], &task["result"]), (&json!("failed"), &Value::Null));
    assert_eq!(task["error"]["code"], "VALIDATION_ERROR", "{task}");
    let mut events = api.follow(&format!("/v1/tasks/{id}/events"), None).await;
    let last = events.rest().await.pop().unwrap();
    assert_eq!((last.name.as_str(), &last.data["ok"]), ("task.failed", &json!(false)));
    assert_eq!(last.data["error"]["code"], "VALIDATION_ERROR");
    assert!(message(&last.data["error"]).contains("/rows"), "{}", last.data);
    // Arguments are validated before a task is accepted.
    let body = json!({ "run_id": "run_1", "args": {} });
    let refused = api.post("/v1/tools/report.build/invoke", body).await;
    refused.refused(422, "VALIDATION_ERROR");
}

#[tokio::test]
async fn canceled_and_timed_out_tasks_end_with_task_failed() {
    let (_server, api) = start_with_tools().await;
    let id = submit_task(&api, "mine-4").await;
    let cancel = format!("/v1/tasks/{id}/cancel");
    let task = api.post(&cancel, json!({ "reason": "not needed" })).await.is(200);
    assert_eq!((&task["status"], &task["task_id"]), (&json!("canceled"), &json!(id)));
    let mut events = api.follow(&format!("/v1/tasks/{id}/events"), None).await;
    let last = events.rest().await.pop().unwrap();
    assert_eq!((last.name.as_str(), &last.data["status"]), ("task.failed", &json!("canceled")));
    let body = json!({ "run_id": "run_1", "args": { "table": "x" }, "timeout_ms": 1 });
    let ticket = api.post("/v1/tools/report.build/invoke", body).await.is(202);
    let id = ticket["task_id"].as_str().unwrap();
    let mut events = api.follow(&format!("/v1/tasks/{id}/events"), None).await;
    let last = events.rest().await.pop().unwrap();
    assert_eq!((last.name.as_str(), &last.data["status"]), ("task.failed", &json!("timeout")));
    api.post(&format!("/v1/tasks/{id}/cancel"), json!({})).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn events_of_a_run_have_the_task_id() {
    let (_server, api) = start_with_tools().await;
    let plain = api.invoke("plain.tool", json!({})).await;
    let id = submit_task(&api, "mine-5").await;
    for _ in 0..2 {
        api.poll("c1").await;
    }
    progress(&api, &id, json!({ "percent": 1 })).await;
    for (id, result) in [(&plain, json!(1)), (&id, json!({ "rows": 1 }))] {
        api.succeed(id, result).await;
    }
    let mut run = api.follow("/v1/runs/run_1/events", None).await;
    let (mut names, mut ended) = (Vec::new(), 0);
    while ended < 2 {
        let event = run.event().await;
        ended += usize::from(event.name == "tool.call.finished");
        if event.data["tool_call_id"] == json!(plain) {
            assert!(event.data.get("task_id").is_none(), "{}", event.data);
        } else if event.data.get("task_id").is_some() {
            assert_eq!(
                (&event.data["task_id"], &event.data["call_id"]),
                (&json!(id), &json!("mine-5"))
            );
            names.push(event.name);
        }
    }
    assert_eq!(names, ["tool.call.requested", "tool.call.progress", "tool.call.finished"]);
}

#[tokio::test]
async fn tasks_are_listed_with_filters_and_pages() {
    let (_server, api) = start_with_tools().await;
    let plain = api.invoke("plain.tool", json!({})).await;
    let ids =
        [submit_task(&api, "a").await, submit_task(&api, "b").await, submit_task(&api, "c").await];
    api.post(&format!("/v1/tasks/{}/cancel", ids[1]), json!({})).await.is(200);
    let listed = async |query: &str| {
        let page = api.get(&format!("/v1/tasks?{query}")).await.is(200);
        let tasks = page["tasks"].as_array().unwrap().clone();
        let ids: Vec<String> =
            tasks.iter().map(|task| task["task_id"].as_str().unwrap().to_owned()).collect();
        (ids, page["next_cursor"].as_str().map(str::to_owned))
    };
    let [a, b, c] = ids;
    assert_eq!(listed("").await, (vec![c.clone(), b.clone(), a.clone()], None));
    assert_eq!(listed("status=canceled").await, (vec![b.clone()], None));
    assert_eq!(listed("status=submitted&run_id=run_1").await.0, [c.clone(), a.clone()]);
    assert_eq!(listed("run_id=other").await.0, Vec::<String>::new());
    let (first, cursor) = listed("limit=2").await;
    assert_eq!(first, [c, b]);
    assert_eq!(listed(&format!("limit=2&cursor={}", cursor.unwrap())).await, (vec![a], None));
    let error = api.get("/v1/tasks?status=SUCCEEDED").await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("submitted, running, completed"), "{error}");
    let task_body = task(&api, &plain).await;
    assert_eq!((&task_body["async"], &task_body["task_id"]), (&json!(false), &json!(plain)));
    api.get("/v1/tasks/tc_unknown").await.refused(404, "NOT_FOUND");
    assert!(api.call(&plain).await.get("task_id").is_none());
}

#[tokio::test]
async fn an_invoke_can_wait_for_an_async_tool() {
    let (_server, api) = start_with_tools().await;
    let waiting = api.clone();
    let body = json!({ "run_id": "run_1", "args": { "table": "x" }, "wait_ms": 30_000 });
    let invoked =
        tokio::spawn(
            async move { waiting.post("/v1/tools/report.build/invoke", body).await.is(202) },
        );
    let id = api.poll("c1").await["tool_call_id"].as_str().unwrap().to_owned();
    api.succeed(&id, json!({ "rows": 1 })).await;
    let call = invoked.await.unwrap();
    assert_eq!((&call["status"], &call["task_id"]), (&json!("SUCCEEDED"), &json!(id)));
}

#[tokio::test]
async fn progress_percent_must_be_from_0_to_100() {
    let (_server, api) = start_with_tools().await;
    let id = submit_task(&api, "mine-6").await;
    let mut ws = Ws::hello(&api, "c1", json!({})).await;
    ws.expect_message("tool_request").await;
    ws.send(json!({ "type": "tool_ack", "tool_call_id": id, "confirm": true })).await;
    ws.expect_message("tool_taken").await;
    let path = format!("/internal/tool_calls/{id}/progress");
    for percent in [-0.1, 100.1, 1e300] {
        let answer = api.post(&path, json!({ "percent": percent })).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("percent must be"), "{error}");
        assert_eq!(error["detail"]["pointer"], "/percent");
    }
    ws.send(json!({ "type": "tool_progress", "tool_call_id": id, "percent": 101 })).await;
    let error = ws.expect_message("error").await;
    assert_eq!(error["error"]["code"], "VALIDATION_ERROR", "{error}");
    for percent in [0, 100] {
        progress(&api, &id, json!({ "percent": percent })).await;
    }
    assert_eq!(task(&api, &id).await["progress"]["percent"], 100.0);
}
