//! Calls of server tools and of caller tools in one conversation and in one answer. The client sees
//! and returns only its own calls; the model must see both.

use serde_json::json;
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};

use super::*;
use crate::support::api::offer_with;

/// A server tool call, then a call of each kind in one answer, then the final text.
fn mixed_replies() -> [ScriptedBehavior; 3] {
    let both = ScriptedAnswer::text("Nearly.").with_call("call_b", "open_door", "{}").with_call(
        "call_c",
        "calculation__eval",
        eval("2 ^ 10").to_string(),
    );
    [
        tool_call_reply("call_a", "calculation__eval", &eval("6 * 7")),
        ScriptedBehavior::Reply(both),
        text_reply("All done."),
    ]
}

fn mixed_request() -> Value {
    let mut body = question("6 * 7, then 2 ^ 10 and open the door");
    body["tools"] = json!([caller_tool("open_door")]);
    body
}

/// Returns the client's next request: its messages, the answer, and the results of its tools.
fn next_request(mut body: Value, answer: &Value) -> Value {
    let message = &answer["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().unwrap();
    let messages = body["messages"].as_array_mut().unwrap();
    // A client stores only the documented fields.
    messages.push(json!({ "role": "assistant", "content": message["content"],
        "tool_calls": calls }));
    for call in calls {
        messages.push(json!({ "role": "tool", "tool_call_id": call["id"], "content": "opened" }));
    }
    body
}

/// Asserts the messages of the last model request, and that no call was repeated.
async fn assert_last_request(server: &Server, scripted: &ScriptedModel) {
    let requests = scripted.requests();
    let last = requests.last().unwrap();
    let shape = message_shape(last);
    assert_eq!(shape.len(), 7, "{shape:?}");
    assert_eq!(shape[..3], ["user", "assistant call_a", "tool call_a"]);
    let call_id = shape[3].split(' ').nth(1).unwrap();
    assert_eq!(
        shape[3],
        format!("assistant {call_id} call_c"),
        "the order of the model must be kept"
    );
    assert_eq!(shape[4], "tool call_c");
    assert_eq!(shape[5], format!("tool {call_id}"));
    let messages = last.messages();
    assert!(messages[2]["content"].as_str().unwrap().contains("42"), "{}", messages[2]);
    assert_eq!(messages[3]["content"], "Nearly.");
    assert!(messages[4]["content"].as_str().unwrap().contains("1024"), "{}", messages[4]);
    assert_eq!(messages[5]["content"], "opened");
    assert_eq!(messages[6], json!({ "role": "user", "content": "And?" }));
    let listed = server.api().get("/v1/tool_calls").await.is(200);
    assert_eq!(listed["tool_calls"].as_array().unwrap().len(), 2, "{listed}");
}

#[tokio::test]
async fn the_model_sees_the_calls_hidden_from_the_client() {
    let (server, scripted) = start_with_replies(mixed_replies()).await;
    let api = server.api();
    let answer = api.post("/v1/chat/completions", mixed_request()).await.is(200);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Nearly.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let names: Vec<&str> = calls.iter().map(|c| c["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["open_door"], "server tool calls must not reach the client");
    let mut next = next_request(mixed_request(), &answer);
    next["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": "And?" }));
    let answer = api.post("/v1/chat/completions", next).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "All done.");
    assert_last_request(&server, &scripted).await;
}

#[tokio::test]
async fn a_restart_between_the_two_requests_changes_nothing() {
    let (server, scripted) = start_with_replies(mixed_replies()).await;
    let answer = server.api().post("/v1/chat/completions", mixed_request()).await.is(200);
    let server = server.restart().await;
    let mut next = next_request(mixed_request(), &answer);
    next["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": "And?" }));
    server.api().post("/v1/chat/completions", next).await.is(200);
    assert_last_request(&server, &scripted).await;
}

#[tokio::test]
async fn several_steps_of_a_conversation_may_be_mixed() {
    let mixed = |n: usize| {
        ScriptedBehavior::Reply(
            ScriptedAnswer::text("").with_call(&format!("own_{n}"), "open_door", "{}").with_call(
                &format!("crib_{n}"),
                "calculation__eval",
                eval("1 + 1").to_string(),
            ),
        )
    };
    let (server, scripted) = start_with_replies([mixed(1), mixed(2), text_reply("Done.")]).await;
    let (api, mut body) = (server.api(), mixed_request());
    for _ in 0..2 {
        let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
        body = next_request(body, &answer);
    }
    api.post("/v1/chat/completions", body).await.is(200);
    let shape = message_shape(scripted.requests().last().unwrap());
    assert_eq!(shape.len(), 7, "{shape:?}");
    for (n, index) in [(1, 1), (2, 4)] {
        assert!(shape[index].starts_with("assistant call_"), "{shape:?}");
        assert!(shape[index].ends_with(&format!(" crib_{n}")), "{shape:?}");
        assert_eq!(shape[index + 1], format!("tool crib_{n}"));
    }
}

#[tokio::test]
async fn hidden_calls_are_not_visible_to_other_agents() {
    let mut replies = mixed_replies().to_vec();
    replies.push(text_reply("Hm."));
    let (server, scripted) = start_with_replies(replies).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let answer = ada.post("/v1/chat/completions", mixed_request()).await.is(200);
    let next = next_request(mixed_request(), &answer);
    for (project, agent) in [("p", "eve"), ("q", "ada")] {
        let other = server.keyed(project, agent, "agent", &["*"]).await;
        other.post("/v1/chat/completions", next.clone()).await.is(200);
        let requests = scripted.requests();
        let last = requests.last().unwrap();
        assert_eq!(last.messages().len(), 3, "only its own messages: {:?}", message_shape(last));
    }
}

#[tokio::test]
async fn a_late_result_is_sent_to_the_model_with_the_next_request() {
    let both = ScriptedAnswer::text("").with_call("own", "open_door", "{}").with_call(
        "crib",
        "report__make",
        r#"{"about": "doors"}"#,
    );
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Reply(both), text_reply("Open, and 7 pages.")]).await;
    let api = server.api();
    let report = offer_with("report.make", json!({ "async": true }));
    api.register("c1", json!([report])).await;
    let mut body = mixed_request();
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let call = api.poll("c1").await;
    api.succeed(call["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let answer = api.post("/v1/chat/completions", next_request(body, &answer)).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "Open, and 7 pages.");
    let requests = scripted.requests();
    let messages = requests[1].messages();
    let ticket = messages.iter().find(|message| message["tool_call_id"] == "crib").unwrap();
    assert!(ticket["content"].as_str().unwrap().contains("pending"), "{ticket}");
    assert!(requests[1].last_content().contains("{\"pages\":7}"), "{messages:?}");
}

#[tokio::test]
async fn calls_returned_in_separate_messages_are_one_step() {
    let both = ScriptedAnswer::text("")
        .with_call("a", "open_door", "{}")
        .with_call("b", "open_door", r#"{"which":2}"#)
        .with_call("c", "calculation__eval", eval("6 * 7").to_string());
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Reply(both), text_reply("Both are open.")]).await;
    let api = server.api();
    let answer = api.post("/v1/chat/completions", mixed_request()).await.is(200);
    let mut next = mixed_request();
    let messages = next["messages"].as_array_mut().unwrap();
    // Some clients store each call as a separate message.
    for call in answer["choices"][0]["message"]["tool_calls"].as_array().unwrap() {
        messages.push(json!({ "role": "assistant", "content": null, "tool_calls": [call] }));
        messages.push(json!({ "role": "tool", "tool_call_id": call["id"], "content": "opened" }));
    }
    api.post("/v1/chat/completions", next).await.is(200);
    let requests = scripted.requests();
    let shape = message_shape(requests.last().unwrap());
    let steps = shape.iter().filter(|line| line.starts_with("assistant")).count();
    let results = shape.iter().filter(|line| line.starts_with("tool")).count();
    assert_eq!((steps, results), (1, 3), "{shape:?}");
}

#[tokio::test]
async fn a_late_result_is_sent_to_the_model_once() {
    let both = ScriptedAnswer::text("").with_call("own", "open_door", "{}").with_call(
        "crib",
        "report__make",
        "{}",
    );
    let (server, scripted) = start_with_replies([
        ScriptedBehavior::Reply(both),
        text_reply("Open, and 7 pages."),
        text_reply("Bye."),
    ])
    .await;
    let api = server.api();
    api.register("c1", json!([offer_with("report.make", json!({ "async": true }))])).await;
    let mut body = mixed_request();
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let call = api.poll("c1").await;
    api.succeed(call["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let mut next = next_request(body, &answer);
    api.post("/v1/chat/completions", next.clone()).await.is(200);
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(json!({ "role": "assistant", "content": "Open, and 7 pages." }));
    messages.push(json!({ "role": "user", "content": "Thanks" }));
    api.post("/v1/chat/completions", next).await.is(200);
    let requests = scripted.requests();
    assert!(requests[1].last_content().contains("has come:"), "{}", requests[1].last_content());
    assert_eq!(requests[2].last_content(), "Thanks");
    let again = requests[2].messages().iter().any(|m| m.to_string().contains("has come:"));
    assert!(!again, "{:?}", requests[2].messages());
}
