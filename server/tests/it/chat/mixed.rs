//! Calls of the crib's tools and of the client's own in one conversation, and in one answer. The
//! client sees only its own, and sends back only those; the model must see both.

use serde_json::json;
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};

use super::*;
use crate::support::api::offer_with;

/// Calculates, then asks for both at once, and then says how it went.
fn script() -> [ScriptedBehavior; 3] {
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

fn asking() -> Value {
    let mut body = question("6 * 7, then 2 ^ 10 and open the door");
    body["tools"] = json!([own_tool("open_door")]);
    body
}

/// The client's next request: what it had, what it was answered, and what its tool came to.
fn going_on(mut body: Value, answer: &Value) -> Value {
    let message = &answer["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().unwrap();
    let messages = body["messages"].as_array_mut().unwrap();
    // As a client keeps it: nothing but what the API documents.
    messages.push(json!({ "role": "assistant", "content": message["content"],
        "tool_calls": calls }));
    for call in calls {
        messages.push(json!({ "role": "tool", "tool_call_id": call["id"], "content": "opened" }));
    }
    body
}

/// What the model is asked in the end, and that no call was made twice.
async fn check(server: &Server, scripted: &ScriptedModel) {
    let asked = scripted.requests();
    let last = asked.last().unwrap();
    let shape = shape(last);
    assert_eq!(shape.len(), 7, "{shape:?}");
    assert_eq!(shape[..3], ["user", "assistant call_a", "tool call_a"]);
    let handed = shape[3].split(' ').nth(1).unwrap();
    assert_eq!(shape[3], format!("assistant {handed} call_c"), "in the model's own order");
    assert_eq!(shape[4], "tool call_c");
    assert_eq!(shape[5], format!("tool {handed}"));
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
async fn the_model_sees_what_the_client_did_not() {
    let (server, scripted) = serving(script()).await;
    let api = server.api();
    let answer = api.post("/v1/chat/completions", asking()).await.is(200);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Nearly.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let names: Vec<&str> = calls.iter().map(|c| c["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["open_door"], "the crib's are not the client's to make");
    let mut next = going_on(asking(), &answer);
    next["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": "And?" }));
    let answer = api.post("/v1/chat/completions", next).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "All done.");
    check(&server, &scripted).await;
}

#[tokio::test]
async fn a_restart_between_the_two_requests_changes_nothing() {
    let (server, scripted) = serving(script()).await;
    let answer = server.api().post("/v1/chat/completions", asking()).await.is(200);
    let server = server.restart().await;
    let mut next = going_on(asking(), &answer);
    next["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": "And?" }));
    server.api().post("/v1/chat/completions", next).await.is(200);
    check(&server, &scripted).await;
}

#[tokio::test]
async fn a_conversation_may_be_mixed_more_than_once() {
    let mixed = |n: usize| {
        ScriptedBehavior::Reply(
            ScriptedAnswer::text("").with_call(&format!("own_{n}"), "open_door", "{}").with_call(
                &format!("crib_{n}"),
                "calculation__eval",
                eval("1 + 1").to_string(),
            ),
        )
    };
    let (server, scripted) = serving([mixed(1), mixed(2), text_reply("Done.")]).await;
    let (api, mut body) = (server.api(), asking());
    for _ in 0..2 {
        let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
        body = going_on(body, &answer);
    }
    api.post("/v1/chat/completions", body).await.is(200);
    let shape = shape(scripted.requests().last().unwrap());
    assert_eq!(shape.len(), 7, "{shape:?}");
    for (n, at) in [(1, 1), (2, 4)] {
        assert!(shape[at].starts_with("assistant call_"), "{shape:?}");
        assert!(shape[at].ends_with(&format!(" crib_{n}")), "{shape:?}");
        assert_eq!(shape[at + 1], format!("tool crib_{n}"));
    }
}

#[tokio::test]
async fn what_one_agent_was_not_shown_is_not_anothers_to_see() {
    let mut turns = script().to_vec();
    turns.push(text_reply("Hm."));
    let (server, scripted) = serving(turns).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let answer = ada.post("/v1/chat/completions", asking()).await.is(200);
    let next = going_on(asking(), &answer);
    for (project, agent) in [("p", "eve"), ("q", "ada")] {
        let other = server.keyed(project, agent, "agent", &["*"]).await;
        other.post("/v1/chat/completions", next.clone()).await.is(200);
        let asked = scripted.requests();
        let last = asked.last().unwrap();
        assert_eq!(last.messages().len(), 3, "only what it sent: {:?}", shape(last));
    }
}

#[tokio::test]
async fn a_result_that_came_while_the_client_was_away_is_told_when_it_comes_back() {
    let both = ScriptedAnswer::text("").with_call("own", "open_door", "{}").with_call(
        "crib",
        "report__make",
        r#"{"about": "doors"}"#,
    );
    let (server, scripted) =
        serving([ScriptedBehavior::Reply(both), text_reply("Open, and 7 pages.")]).await;
    let api = server.api();
    let report = offer_with("report.make", json!({ "async": true }));
    api.register("c1", json!([report])).await;
    let mut body = asking();
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let request = api.poll("c1").await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let answer = api.post("/v1/chat/completions", going_on(body, &answer)).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "Open, and 7 pages.");
    let asked = scripted.requests();
    let told = asked[1].messages();
    let ticket = told.iter().find(|message| message["tool_call_id"] == "crib").unwrap();
    assert!(ticket["content"].as_str().unwrap().contains("pending"), "{ticket}");
    assert!(asked[1].last_content().contains("{\"pages\":7}"), "{told:?}");
}

#[tokio::test]
async fn calls_of_one_step_that_come_back_apart_are_one_step() {
    let both = ScriptedAnswer::text("")
        .with_call("a", "open_door", "{}")
        .with_call("b", "open_door", r#"{"which":2}"#)
        .with_call("c", "calculation__eval", eval("6 * 7").to_string());
    let (server, scripted) =
        serving([ScriptedBehavior::Reply(both), text_reply("Both are open.")]).await;
    let api = server.api();
    let answer = api.post("/v1/chat/completions", asking()).await.is(200);
    let mut next = asking();
    let messages = next["messages"].as_array_mut().unwrap();
    // Some clients keep each call as a message of its own.
    for call in answer["choices"][0]["message"]["tool_calls"].as_array().unwrap() {
        messages.push(json!({ "role": "assistant", "content": null, "tool_calls": [call] }));
        messages.push(json!({ "role": "tool", "tool_call_id": call["id"], "content": "opened" }));
    }
    api.post("/v1/chat/completions", next).await.is(200);
    let asked = scripted.requests();
    let shape = shape(asked.last().unwrap());
    let calling = shape.iter().filter(|line| line.starts_with("assistant")).count();
    let told = shape.iter().filter(|line| line.starts_with("tool")).count();
    assert_eq!((calling, told), (1, 3), "{shape:?}");
}

#[tokio::test]
async fn what_was_told_late_is_not_told_again() {
    let both = ScriptedAnswer::text("").with_call("own", "open_door", "{}").with_call(
        "crib",
        "report__make",
        "{}",
    );
    let (server, scripted) = serving([
        ScriptedBehavior::Reply(both),
        text_reply("Open, and 7 pages."),
        text_reply("Bye."),
    ])
    .await;
    let api = server.api();
    api.register("c1", json!([offer_with("report.make", json!({ "async": true }))])).await;
    let mut body = asking();
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let request = api.poll("c1").await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let mut next = going_on(body, &answer);
    api.post("/v1/chat/completions", next.clone()).await.is(200);
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(json!({ "role": "assistant", "content": "Open, and 7 pages." }));
    messages.push(json!({ "role": "user", "content": "Thanks" }));
    api.post("/v1/chat/completions", next).await.is(200);
    let asked = scripted.requests();
    assert!(asked[1].last_content().contains("has come:"), "{}", asked[1].last_content());
    assert_eq!(asked[2].last_content(), "Thanks");
    let again = asked[2].messages().iter().any(|m| m.to_string().contains("has come:"));
    assert!(!again, "{:?}", asked[2].messages());
}
