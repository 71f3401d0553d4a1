//! Elicitations of upstreams: each form of them puts the call on hold until it is answered.

use serde_json::json;
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, http_upstream, result_text, server};
use crate::support::mcp::Mcp;
use crate::support::upstream::{Http, program};
use crate::support::{soon, until};

fn answer(key: &str) -> serde_json::Value {
    let answer = json!({ "action": "accept", "content": { "name": "Ada" } });
    json!({ "answers": { key: answer } })
}

#[tokio::test]
async fn an_elicitation_between_two_requests_is_answered_over_http() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let id = api.invoke("fixture.ask", json!({})).await;
    let paused = until("the question", || async {
        let call = api.call(&id).await;
        (call["hold"] == "input").then_some(call)
    })
    .await;
    let question = &paused["hold_details"]["questions"]["who"];
    assert_eq!(question["params"]["message"], "Which name?", "{paused}");
    let path = format!("/v1/tool_calls/{id}/answer");
    for content in [json!({}), json!({ "name": 7 }), json!("Ada")] {
        let invalid = json!({ "answers": { "who": { "action": "accept", "content": content } } });
        api.post(&path, invalid).await.refused(422, "VALIDATION_ERROR");
    }
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("who")).await.is(200);
    assert_eq!(result_text(&api.finished(&id).await), "Hello, Ada!");
}

#[tokio::test]
async fn an_mcp_client_answers_an_elicitation_with_its_next_request() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let client = Mcp::modern(&server.operator()).able(json!({ "elicitation": { "form": {} } }));
    let params = json!({ "name": "fixture.ask", "arguments": {} });
    let asks = client.ask("tools/call", params.clone()).await.result();
    assert_eq!(asks["resultType"], "input_required", "{asks}");
    let mut again = params;
    again["requestState"] = asks["requestState"].clone();
    again["inputResponses"] = answer("who")["answers"].clone();
    let result = client.ask("tools/call", again).await.result();
    assert_eq!(result["content"][0]["text"], "Hello, Ada!", "{result}");
}

/// Selects the legacy revision, in which an upstream elicits while its request is in flight.
fn legacy(settings: McpServerSettings) -> McpServerSettings {
    McpServerSettings { older: true, ..settings }
}

#[tokio::test]
async fn an_elicitation_within_a_request_is_answered_in_that_request() {
    let upstream = Http::start().await;
    for settings in [legacy(program("good")), legacy(http_upstream(&upstream.url()))] {
        let server = server(vec![settings]).await;
        let api = server.operator();
        let id = api.invoke("fixture.ask", json!({})).await;
        until("the question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
            .await;
        api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
        let done = api.finished(&id).await;
        assert_eq!(result_text(&done), "Hello, Ada!");
    }
    // Each call was one request: nothing was repeated.
    assert_eq!(upstream.fixture.calls(), 1);
}

#[tokio::test]
async fn concurrent_http_calls_get_their_own_elicitations() {
    let upstream = Http::start().await;
    let server = server(vec![legacy(http_upstream(&upstream.url()))]).await;
    let api = server.operator();
    let ids =
        [api.invoke("fixture.ask", json!({})).await, api.invoke("fixture.ask", json!({})).await];
    for id in &ids {
        until("the question", || async { (api.call(id).await["hold"] == "input").then_some(()) })
            .await;
    }
    for (id, name) in ids.iter().zip(["Ada", "Eve"]) {
        let answer = json!({ "action": "accept", "content": { "name": name } });
        let body = json!({ "answers": { "question_1": answer } });
        api.post(&format!("/v1/tool_calls/{id}/answer"), body).await.is(200);
        assert_eq!(result_text(&api.finished(id).await), format!("Hello, {name}!"));
    }
}

#[tokio::test]
async fn canceling_a_held_call_cancels_it_upstream() {
    let server = server(vec![legacy(program("good"))]).await;
    let api = server.operator();
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
        .await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    // The first elicitation is gone: the next one is the only one.
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the next question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
        .await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    assert_eq!(result_text(&soon("its end", api.finished(&id)).await), "Hello, Ada!");
    let _ = call(&api, "fixture.echo", json!({ "text": "x" })).await;
}

#[tokio::test]
async fn an_answer_for_a_lost_session_ends_with_outcome_unknown() {
    let upstream = Http::start().await;
    let server = server(vec![legacy(http_upstream(&upstream.url()))]).await;
    let api = server.operator();
    let id = api.invoke("fixture.ask", json!({})).await;
    until("the question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
        .await;
    let server = server.restart().await;
    let api = server.operator();
    super::wait_for_state(&api, "fixture", "ready").await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    let ended = api.finished(&id).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert_eq!(upstream.fixture.calls(), 1);
}

/// Waits until the call is held for input.
async fn wait_for_input_hold(api: &crate::support::Api, id: &str) {
    until("the question", || async { (api.call(id).await["hold"] == "input").then_some(()) }).await;
}

#[tokio::test]
async fn over_stdio_an_elicitation_reaches_the_only_possible_call() {
    let server = server(vec![legacy(program("good"))]).await;
    let api = server.operator();
    let nap = api.invoke("fixture.nap", json!({})).await;
    let first = api.invoke("fixture.ask", json!({})).await;
    // The sleeping call has ended, so it is not a candidate for the elicitation.
    wait_for_input_hold(&api, &first).await;
    assert_eq!(result_text(&api.finished(&nap).await), "rested");
    // A call that awaits an answer cannot elicit again.
    let second = api.invoke("fixture.ask", json!({})).await;
    wait_for_input_hold(&api, &second).await;
    for (id, name) in [(&second, "Bob"), (&first, "Ada")] {
        let answer = json!({ "action": "accept", "content": { "name": name } });
        let answers = json!({ "answers": { "question_1": answer } });
        api.post(&format!("/v1/tool_calls/{id}/answer"), answers).await.is(200);
        assert_eq!(result_text(&api.finished(id).await), format!("Hello, {name}!"));
    }
}

#[tokio::test]
async fn over_stdio_an_ambiguous_elicitation_reaches_no_call() {
    let server = server(vec![legacy(program("good"))]).await;
    let api = server.operator();
    let ids = [
        api.invoke("fixture.ask_together", json!({})).await,
        api.invoke("fixture.ask_together", json!({})).await,
    ];
    for id in &ids {
        let ended = api.finished(id).await;
        assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
        let message = ended["error"]["message"].as_str().unwrap();
        assert!(message.contains("which call a request belongs to"), "{message}");
    }
    // A later elicitation is unambiguous again.
    let id = api.invoke("fixture.ask", json!({})).await;
    wait_for_input_hold(&api, &id).await;
}

#[tokio::test]
async fn over_stdio_an_elicitation_of_an_ended_call_reaches_no_other() {
    let server = server(vec![legacy(program("good"))]).await;
    let api = server.operator();
    let mut events = api.follow("/v1/events?after=0", None).await;
    let mut invoke_late = async |timeout_ms: u64| {
        let body = json!({ "run_id": "r", "args": {}, "timeout_ms": timeout_ms });
        let id = api.invoke_with("fixture.ask_late", body).await;
        // The upstream has started the call.
        let started = events.wait_for("tool.call.progress").await;
        assert_eq!(started.data["tool_call_id"], id.as_str());
        id
    };
    let id = invoke_late(2_000).await;
    assert_eq!(api.finished(&id).await["status"], "TIMEOUT");
    // The elicitation arrives while this call is the only one in flight.
    let nap = api.invoke("fixture.nap", json!({})).await;
    assert_eq!(result_text(&api.finished(&nap).await), "rested");
    let events = api.history(&nap).await;
    assert!(!events.contains(&"tool.call.asked".to_owned()), "{events:?}");
    // An elicitation that cannot be assigned fails the call; later ones can be assigned again.
    let id = invoke_late(60_000).await;
    api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(api.finished(&id).await["status"], "CANCELED");
    let silent = call(&api, "fixture.silent", json!({})).await;
    assert_eq!(silent["error"]["code"], "OUTCOME_UNKNOWN", "{silent}");
    let message = silent["error"]["message"].as_str().unwrap();
    assert!(message.contains("given up"), "{message}");
    let id = api.invoke("fixture.ask", json!({})).await;
    wait_for_input_hold(&api, &id).await;
    api.post(&format!("/v1/tool_calls/{id}/answer"), answer("question_1")).await.is(200);
    assert_eq!(result_text(&api.finished(&id).await), "Hello, Ada!");
}
