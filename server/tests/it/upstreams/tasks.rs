//! Tasks of upstreams are followed to their end.

use serde_json::json;

use super::{at, in_state, server, words};
use crate::support::until;
use crate::support::upstream::Http;

#[tokio::test]
async fn a_task_is_followed_to_its_end_also_by_another_process() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let api = server.api();
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
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    upstream.fixture.finish_task("done at last");
    assert_eq!(words(&api.finished(&id).await), "done at last");
    assert_eq!(upstream.fixture.tasks(), 1);
}

#[tokio::test]
async fn a_canceled_call_cancels_its_task() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let api = server.api();
    let id = api.invoke("fixture.task", json!({})).await;
    until("the task", || async { (upstream.fixture.tasks() == 1).then_some(()) }).await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    until("the upstream to hear of it", || async {
        (upstream.fixture.canceled() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_a_task_asks_is_answered() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let api = server.api();
    let id = api.invoke("fixture.asking_task", json!({})).await;
    until("the question", || async {
        (api.call(&id).await["hold"]["reason"] == "input").then_some(())
    })
    .await;
    let answer = json!({ "action": "accept", "content": { "name": "Ada" } });
    let body = json!({ "answers": { "who": answer } });
    api.post(&format!("/v1/tool_calls/{id}/answer"), body).await.is(200);
    assert_eq!(words(&api.finished(&id).await), "Hello, Ada!");
}
