//! What an upstream wants to know puts the call on hold, whichever way it asks.

use serde_json::json;
use toolcrib_sources::mcp::McpServerSettings;

use super::{at, call, server, words};
use crate::support::mcp::Mcp;
use crate::support::upstream::{Http, program};
use crate::support::{soon, until};

fn answer(key: &str) -> serde_json::Value {
    let answer = json!({ "action": "accept", "content": { "name": "Ada" } });
    json!({ "answers": { key: answer } })
}

#[tokio::test]
async fn a_question_between_two_requests_is_answered_over_http() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let api = server.api();
    let id = api.invoke("fixture.ask", json!({})).await;
    let held = until("the question", || async {
        let call = api.call(&id).await;
        (call["hold"]["reason"] == "input").then_some(call)
    })
    .await;
    let question = &held["hold"]["questions"]["who"];
    assert_eq!(question["params"]["message"], "Which name?", "{held}");
    let place = format!("/v1/tool_calls/{id}/answer");
    for content in [json!({}), json!({ "name": 7 }), json!("Ada")] {
        let odd = json!({ "answers": { "who": { "action": "accept", "content": content } } });
        api.post(&place, odd).await.refused(422, "VALIDATION_ERROR");
    }
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("who")).await.is(200);
    assert_eq!(words(&api.finished(&id).await), "Hello, Ada!");
}

#[tokio::test]
async fn an_mcp_client_answers_with_its_next_request() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let client = Mcp::modern(&server.api()).able(json!({ "elicitation": { "form": {} } }));
    let params = json!({ "name": "fixture.ask", "arguments": {} });
    let asks = client.ask("tools/call", params.clone()).await.result();
    assert_eq!(asks["resultType"], "input_required", "{asks}");
    let mut again = params;
    again["requestState"] = asks["requestState"].clone();
    again["inputResponses"] = answer("who")["answers"].clone();
    let result = client.ask("tools/call", again).await.result();
    assert_eq!(result["content"][0]["text"], "Hello, Ada!", "{result}");
}

/// An upstream of the older revision asks while its request is out.
fn older(settings: McpServerSettings) -> McpServerSettings {
    McpServerSettings { older: true, ..settings }
}

#[tokio::test]
async fn a_question_within_a_request_is_answered_and_the_request_goes_on() {
    let upstream = Http::start().await;
    for settings in [older(program("good")), older(at(&upstream.url()))] {
        let server = server(vec![settings]).await;
        let api = server.api();
        let id = api.invoke("fixture.ask", json!({})).await;
        until("the question", || async {
            (api.call(&id).await["hold"]["reason"] == "input").then_some(())
        })
        .await;
        api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
        let done = api.finished(&id).await;
        assert_eq!(words(&done), "Hello, Ada!");
    }
    // Each was one request: nothing was asked twice.
    assert_eq!(upstream.fixture.calls(), 1);
}

#[tokio::test]
async fn two_calls_over_http_are_asked_each_its_own_question() {
    let upstream = Http::start().await;
    let server = server(vec![older(at(&upstream.url()))]).await;
    let api = server.api();
    let ids =
        [api.invoke("fixture.ask", json!({})).await, api.invoke("fixture.ask", json!({})).await];
    for id in &ids {
        until("the question", || async {
            (api.call(id).await["hold"]["reason"] == "input").then_some(())
        })
        .await;
    }
    for (id, name) in ids.iter().zip(["Ada", "Eve"]) {
        let answer = json!({ "action": "accept", "content": { "name": name } });
        let body = json!({ "answers": { "question_1": answer } });
        api.post(&format!("/v1/tool_calls/{id}/answer"), body).await.is(200);
        assert_eq!(words(&api.finished(id).await), format!("Hello, {name}!"));
    }
}

#[tokio::test]
async fn a_call_that_is_canceled_on_hold_is_canceled_upstream() {
    let server = server(vec![older(program("good"))]).await;
    let api = server.api();
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the question", || async {
        (api.call(&id).await["hold"]["reason"] == "input").then_some(())
    })
    .await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    // What was asked then is gone: the next question is the only one there is.
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the next question", || async {
        (api.call(&id).await["hold"]["reason"] == "input").then_some(())
    })
    .await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    assert_eq!(words(&soon("its end", api.finished(&id)).await), "Hello, Ada!");
    let _ = call(&api, "fixture.echo", json!({ "text": "x" })).await;
}

#[tokio::test]
async fn a_question_whose_session_is_lost_is_not_asked_a_second_time_blindly() {
    let upstream = Http::start().await;
    let server = server(vec![older(at(&upstream.url()))]).await;
    let api = server.api();
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the question", || async {
        (api.call(&id).await["hold"]["reason"] == "input").then_some(())
    })
    .await;
    let server = server.restart().await;
    let api = server.api();
    super::in_state(&api, "fixture", "ready").await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    let ended = api.finished(&id).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert_eq!(upstream.fixture.calls(), 1);
}

/// The call is on hold with its question.
async fn on_hold(api: &crate::support::Api, id: &str) {
    until("the question", || async {
        (api.call(id).await["hold"]["reason"] == "input").then_some(())
    })
    .await;
}

#[tokio::test]
async fn over_pipes_a_question_reaches_the_call_that_can_have_asked_it() {
    let server = server(vec![older(program("good"))]).await;
    let api = server.api();
    let nap = api.invoke("fixture.nap", json!({})).await;
    let first = api.invoke("fixture.ask", json!({})).await;
    // The one that rests cannot have asked, once it has answered.
    on_hold(&api, &first).await;
    assert_eq!(words(&api.finished(&nap).await), "rested");
    // The one that waits for an answer cannot ask again.
    let second = api.invoke("fixture.ask", json!({})).await;
    on_hold(&api, &second).await;
    for (id, name) in [(&second, "Bob"), (&first, "Ada")] {
        let answer = json!({ "action": "accept", "content": { "name": name } });
        let answers = json!({ "answers": { "question_1": answer } });
        api.post(&format!("/v1/tool_calls/{id}/answer"), answers).await.is(200);
        assert_eq!(words(&api.finished(id).await), format!("Hello, {name}!"));
    }
}

#[tokio::test]
async fn over_pipes_a_question_that_could_be_of_two_calls_is_put_to_neither() {
    let server = server(vec![older(program("good"))]).await;
    let api = server.api();
    let ids = [
        api.invoke("fixture.ask_together", json!({})).await,
        api.invoke("fixture.ask_together", json!({})).await,
    ];
    for id in &ids {
        let ended = api.finished(id).await;
        assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
        let message = ended["error"]["message"].as_str().unwrap();
        assert!(message.contains("which call a question is for"), "{message}");
    }
    // The next one can be asked again.
    let id = api.invoke("fixture.ask", json!({})).await;
    on_hold(&api, &id).await;
}

#[tokio::test]
async fn over_pipes_a_question_of_a_call_that_has_ended_is_put_to_no_other() {
    let server = server(vec![older(program("good"))]).await;
    let api = server.api();
    let mut events = api.follow("/v1/events?after=0", None).await;
    let mut late = async |timeout_ms: u64| {
        let body = json!({ "run_id": "r", "args": {}, "timeout_ms": timeout_ms });
        let id = api.invoke_with("fixture.ask_late", body).await;
        // It has begun there.
        let begun = events.named("tool.call.progress").await;
        assert_eq!(begun.data["tool_call_id"], id.as_str());
        id
    };
    let id = late(2_000).await;
    assert_eq!(api.finished(&id).await["status"], "TIMEOUT");
    // The question comes while this one is the only call that is out.
    let nap = api.invoke("fixture.nap", json!({})).await;
    assert_eq!(words(&api.finished(&nap).await), "rested");
    let events = api.history(&nap).await;
    assert!(!events.contains(&"tool.call.asked".to_owned()), "{events:?}");
    // Where it cannot be told, that is said, and questions can be told apart again afterwards.
    let id = late(60_000).await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(api.finished(&id).await["status"], "CANCELED");
    let silent = call(&api, "fixture.silent", json!({})).await;
    assert_eq!(silent["error"]["code"], "OUTCOME_UNKNOWN", "{silent}");
    let message = silent["error"]["message"].as_str().unwrap();
    assert!(message.contains("given up"), "{message}");
    let id = api.invoke("fixture.ask", json!({})).await;
    on_hold(&api, &id).await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    assert_eq!(words(&api.finished(&id).await), "Hello, Ada!");
}
