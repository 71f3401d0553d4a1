//! A cancellation reaches the executor of the call and takes effect once.

use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::{Engine, FnTool, ToolContext};

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server, soon};

async fn cancel(api: &Api, id: &str, body: Value) -> crate::support::api::Reply {
    api.post(&format!("/v1/tool_calls/{id}/cancel"), body).await
}

#[tokio::test]
async fn canceling_an_unacknowledged_call_ends_it_once() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let call = cancel(&api, &id, json!({ "reason": "not needed" })).await.is(200);
    assert_eq!(call["status"], "CANCELED");
    assert_eq!(call["error"]["code"], "CANCELED");
    assert_eq!(message(&call["error"]), "canceled by default: not needed");
    assert_eq!(call["outcome"]["ok"], false);
    assert!(call["completed_at"].is_u64());
    let again = cancel(&api, &id, json!({ "reason": "another" })).await.is(200);
    assert_eq!(again, call, "canceling twice is the same as once");
    let path = "/internal/ingress/poll?client_id=c1";
    assert_eq!(
        api.get(path).await.is(200),
        json!({ "requests": [] }),
        "no client receives the call"
    );
}

#[tokio::test]
async fn cancel_accepts_an_empty_body() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = api.request(reqwest::Method::POST, &format!("/v1/tool_calls/{id}/cancel"));
    let call = api.send(request).await.is(200);
    assert_eq!(message(&call["error"]), "canceled by default");
}

#[tokio::test]
async fn canceling_notifies_the_client_that_acknowledged_the_call() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    api.until_status(&id, "RUNNING").await;
    let call = cancel(&api, &id, json!({})).await.is(200);
    assert_eq!(call["status"], "CANCELED");
    assert!(message(&call["error"]).contains("may have taken effect"), "{call}");
    let cancel_message = client.expect_message("tool_cancel").await;
    assert_eq!(
        (&cancel_message["tool_call_id"], &cancel_message["attempt"]),
        (&json!(id), &json!(1))
    );
    // A late result changes nothing, and the client receives the status of the call.
    client
        .send(json!({
            "type": "tool_result", "tool_call_id": request["tool_call_id"],
            "attempt": 1, "status": "SUCCEEDED", "result": "too late"
        }))
        .await;
    let answer = client.expect_message("error").await;
    assert_eq!(answer["error"]["code"], "CONFLICT");
    assert_eq!(answer["error"]["detail"]["status"], "CANCELED");
    assert_eq!(api.call(&id).await, call, "nothing changed");
    assert_eq!(api.history(&id).await.last().unwrap(), "tool.call.late");
}

#[tokio::test]
async fn canceling_notifies_a_client_that_has_not_acknowledged_the_call() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    client.expect_message("tool_request").await;
    let call = cancel(&api, &id, json!({})).await.is(200);
    assert!(!message(&call["error"]).contains("may have"), "the call had not started: {call}");
    assert_eq!(client.expect_message("tool_cancel").await["tool_call_id"], json!(id));
}

#[tokio::test]
async fn canceling_notifies_a_client_over_sse() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(work.event().await.name, "tool_request");
    cancel(&api, &id, json!({})).await.is(200);
    let event = work.event().await;
    assert_eq!(event.name, "tool_cancel");
    assert_eq!(event.data["tool_call_id"], json!(id));
}

#[tokio::test]
async fn a_timeout_sends_the_client_a_cancel_message() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let body = json!({ "run_id": "run_1", "args": {}, "timeout_ms": 1_500 });
    let id = api.invoke_with("a.tool", body).await;
    client.take().await;
    assert_eq!(client.expect_message("tool_cancel").await["tool_call_id"], json!(id));
    assert_eq!(api.finished(&id).await["status"], "TIMEOUT");
}

#[tokio::test]
async fn canceling_an_ended_call_is_a_conflict() {
    let server = Server::start().await;
    let api = server.api();
    let id = api.invoke("calculation.eval", json!({ "expression": "1+1" })).await;
    let call = api.finished(&id).await;
    let error = cancel(&api, &id, json!({})).await.refused(409, "CONFLICT");
    assert_eq!(error["detail"]["status"], "SUCCEEDED", "the error has the current status");
    assert_eq!(error["retryable"], false);
    assert!(message(&error).contains("SUCCEEDED"), "{error}");
    assert_eq!(api.call(&id).await, call);
    cancel(&api, "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV", json!({})).await.refused(404, "NOT_FOUND");
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct NoArgs {}

#[tokio::test]
async fn canceling_stops_a_tool_of_the_server() {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let body = move |_: NoArgs, context: ToolContext| {
        let sender = sender.clone();
        // The drop of this value reports the end of the attempt, even if the tool ignores
        // cancellation.
        struct CancelRecorder(tokio::sync::mpsc::UnboundedSender<&'static str>);
        impl Drop for CancelRecorder {
            fn drop(&mut self) {
                let _ = self.0.send("stopped");
            }
        }
        async move {
            let _recorder = CancelRecorder(sender.clone());
            let _ = sender.send("began");
            assert!(!context.canceled.is_cancelled());
            std::future::pending::<Result<(), String>>().await
        }
    };
    let engine = Engine::builder()
        .tool(FnTool::with_context("slow.tool", "Waits to be canceled", body))
        .start()
        .await
        .unwrap();
    let server = Server::with_engine(engine).await;
    let api = server.api();
    let id = api.invoke("slow.tool", json!({})).await;
    assert_eq!(soon("the tool to begin", receiver.recv()).await, Some("began"));
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    let call = cancel(&api, &id, json!({})).await.is(200);
    assert_eq!(call["status"], "CANCELED");
    assert_eq!(soon("the tool to stop", receiver.recv()).await, Some("stopped"));
    assert_eq!(api.call(&id).await, call);
    let history = api.history(&id).await;
    assert_eq!(history.last().unwrap(), "tool.call.canceled", "being stopped is not a late report");
}

#[tokio::test]
async fn canceling_a_queued_call_lets_the_next_one_run() {
    let server = Server::start().await;
    let api = server.api();
    let tool = offer_with("a.tool", json!({ "policy": { "max_parallel": 1 } }));
    let mut client = Ws::offering(&api, "c1", json!([tool])).await;
    let first = api.invoke("a.tool", json!({})).await;
    let second = api.invoke("a.tool", json!({})).await;
    let third = api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    assert_eq!(request["tool_call_id"], json!(first));
    assert_eq!(api.call(&second).await["hold"], "queue");
    cancel(&api, &second, json!({})).await.is(200);
    client.succeed(&request, json!(1)).await;
    let next = tokio::time::timeout(Duration::from_secs(30), client.take()).await.unwrap();
    assert_eq!(next["tool_call_id"], json!(third), "the canceled call is skipped");
}
