//! Chat completions and responses: a repeated request follows the same conversation.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedModel, text_reply, tool_call_reply};

use super::{TOOL, count_calls, send_request, text};
use crate::support::Server;
use crate::support::api::{Api, Reply, offer, offer_with};

/// Starts a server whose model pays once and then answers.
pub async fn start_paying(effect: &str) -> (Server, ScriptedModel) {
    let replies = [
        tool_call_reply("call_1", "bank__pay", &json!({ "amount": 5 })),
        text_reply("paid 5"),
        tool_call_reply("call_2", "bank__pay", &json!({ "amount": 5 })),
        text_reply("paid 5 again"),
    ];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let server = Server::with(|config| {
        config.llm.base_url = Some(model.url.clone());
        config.llm.model = Some("large".into());
    })
    .await;
    server.api().register("bank", json!([offer_with(TOOL, json!({ "effect": effect }))])).await;
    (server, model)
}

pub fn chat_body(stream: bool) -> Value {
    json!({ "model": "large", "stream": stream, "toolcrib": { "tools": [TOOL] },
        "messages": [{ "role": "user", "content": "pay" }] })
}

fn responses_body(stream: bool) -> Value {
    json!({ "model": "large", "stream": stream, "toolcrib": { "tools": [TOOL] }, "input": "pay" })
}

async fn repeat(api: &Api, path: &'static str, body: Value) -> tokio::task::JoinHandle<Reply> {
    let api = api.clone();
    tokio::spawn(async move { api.post(path, body).await })
}

#[tokio::test]
async fn a_repeated_request_gets_the_answer_of_the_same_conversation() {
    for (path, stream, body) in [
        ("/v1/chat/completions", false, chat_body(false)),
        ("/v1/chat/completions", true, chat_body(true)),
        ("/v1/responses", false, responses_body(false)),
        ("/v1/responses", true, responses_body(true)),
    ] {
        let (server, model) = start_paying("irreversible").await;
        let api = server.api();
        let connection = send_request(&api.address, path, &body).await;
        let request = api.poll("bank").await;
        drop(connection);
        let again = repeat(&api, path, body.clone()).await;
        api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
        let reply = again.await.unwrap();
        assert_eq!(reply.status, 200, "{path} {}", reply.text);
        assert!(reply.text.contains("paid 5"), "{path} {stream}: {}", reply.text);
        let run_id = reply.header("toolcrib-run-id").map(str::to_owned);
        assert_eq!(reply.header("toolcrib-joined"), run_id.as_deref(), "{path} {stream}");
        if stream {
            let mut events = reply.text.split("data:").skip(1);
            let position = events.position(|event| event.contains(r#""joined":true"#));
            let is_chat = path.contains("chat");
            assert!(position.is_some_and(|event| event == 0 || !is_chat), "{path}: {}", reply.text);
        } else {
            assert_eq!(reply.body["toolcrib"]["joined"], true, "{}", reply.text);
        }
        assert_eq!(count_calls(&api).await, 1, "{path} {stream}");
        assert_eq!(model.requests().len(), 2, "{path} {stream}");
        // The answer was delivered, so the same request is a new one.
        let third = repeat(&api, path, body).await;
        let request = api.poll("bank").await;
        api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
        let reply = third.await.unwrap();
        assert_eq!(reply.header("toolcrib-joined"), None, "{path} {stream}");
        assert!(reply.text.contains("again"), "{path} {stream}: {}", reply.text);
        assert_eq!(count_calls(&api).await, 2);
    }
}

#[tokio::test]
async fn an_answer_that_came_while_no_requester_was_there_is_given_to_the_next() {
    let (server, model) = start_paying("irreversible").await;
    let api = server.api();
    let connection = send_request(&api.address, "/v1/chat/completions", &chat_body(false)).await;
    let request = api.poll("bank").await;
    drop(connection);
    api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
    crate::support::until("the model to answer", || async {
        (model.requests().len() == 2).then_some(())
    })
    .await;
    let reply = api.post("/v1/chat/completions", chat_body(false)).await;
    assert!(reply.header("toolcrib-joined").is_some());
    assert_eq!(reply.is(200)["choices"][0]["message"]["content"], "paid 5");
    assert_eq!((count_calls(&api).await, model.requests().len()), (1, 2));
}

#[tokio::test]
async fn a_conversation_without_its_requester_stops_after_the_grace_period() {
    let replies =
        [tool_call_reply("call_1", "bank__pay", &json!({ "amount": 5 })), text_reply("paid 5")];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let server = Server::with(|config| {
        config.llm.base_url = Some(model.url.clone());
        config.llm.model = Some("large".into());
        config.policy.disconnect_grace_ms = 50;
    })
    .await;
    let api = server.api();
    api.register("bank", json!([offer(TOOL)])).await;
    let connection = send_request(&api.address, "/v1/chat/completions", &chat_body(false)).await;
    let request = api.poll("bank").await;
    drop(connection);
    // The task of the conversation ends after the grace period. Its call goes on.
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    crate::support::until("the conversation to stop", || async {
        (tasks() < before).then_some(())
    })
    .await;
    api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
    assert_eq!(model.requests().len(), 1, "the loop has stopped");
    let reply = api.post("/v1/chat/completions", chat_body(false)).await;
    assert!(reply.header("toolcrib-joined").is_some(), "{}", reply.text);
    assert_eq!(reply.is(200)["choices"][0]["message"]["content"], "paid 5");
    assert_eq!((count_calls(&api).await, model.requests().len()), (1, 2));
}

#[tokio::test]
async fn a_conversation_that_only_reads_ends_with_its_requester() {
    let (server, model) = start_paying("read").await;
    let api = server.api();
    let connection = send_request(&api.address, "/v1/chat/completions", &chat_body(false)).await;
    let first = api.poll("bank").await;
    drop(connection);
    let again = repeat(&api, "/v1/chat/completions", chat_body(false)).await;
    // The second conversation asks the model anew, which answers at once.
    let reply = again.await.unwrap();
    assert_eq!(reply.header("toolcrib-joined"), None, "{}", reply.text);
    api.succeed(text(&first, "tool_call_id"), json!({})).await;
    assert_eq!(model.requests().len(), 2);
}
