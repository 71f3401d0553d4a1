//! MCP tasks of upstreams.

use serde_json::json;

use super::{http_upstream, result_text, server, wait_for_state};
use crate::support::until;
use crate::support::upstream::Http;

#[tokio::test]
async fn a_task_is_polled_to_its_end_across_a_restart() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.task", json!({})).await;
    until("the task to be written down", || async {
        let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
        let mut found = false;
        while !found {
            found = events.next().await.unwrap().name == "tool.call.taken";
        }
        Some(())
    })
    .await;
    let server = server.restart().await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    upstream.fixture.finish_task("done at last");
    assert_eq!(result_text(&api.finished(&id).await), "done at last");
    assert_eq!(upstream.fixture.tasks(), 1);
}

#[tokio::test]
async fn a_canceled_call_cancels_its_task() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.task", json!({})).await;
    until("the task", || async { (upstream.fixture.tasks() == 1).then_some(()) }).await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    until("the upstream to hear of it", || async {
        (upstream.fixture.canceled() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_elicitation_of_a_task_is_answered() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.asking_task", json!({})).await;
    until("the question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
        .await;
    let answer = json!({ "action": "accept", "content": { "name": "Ada" } });
    let body = json!({ "answers": { "who": answer } });
    api.post(&format!("/v1/tool_calls/{id}/answer"), body).await.is(200);
    assert_eq!(result_text(&api.finished(&id).await), "Hello, Ada!");
}
