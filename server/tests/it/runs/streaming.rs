//! Event streams of runs: text deltas and call events in their order.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply};

use super::{eval, question, run_to_end, start_with_model};
use crate::support::sse::Sse;

fn step_text(events: &[crate::support::sse::Event], step: u64) -> String {
    let deltas = events.iter().filter(|event| event.name == "run.text");
    let deltas = deltas.filter(|event| event.data["step"] == step);
    deltas.map(|event| event.data["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_streamed_run_sends_all_events_in_order() {
    let (server, _model) =
        start_with_model([eval("c1", "6*7"), text_reply("It is forty-two, I think.")]).await;
    let mut body = question("?");
    body["stream"] = true.into();
    let request = server.api().request(reqwest::Method::POST, "/v1/runs").json(&body);
    let events = Sse::open(request).await.rest().await;
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    let without = |name: &&&str| !matches!(**name, "run.text" | "run.call");
    let stored: Vec<&str> = names.iter().filter(without).copied().collect();
    assert_eq!(
        stored,
        [
            "run.created",
            "run.asking",
            "run.replied",
            "tool.call.requested",
            "tool.call.started",
            "tool.call.finished",
            "run.results",
            "run.asking",
            "run.replied",
            "run.finished"
        ]
    );
    let last_index = |name: &str| names.iter().rposition(|other| *other == name).unwrap();
    assert!(
        last_index("run.text") < last_index("run.replied"),
        "deltas come before the reply: {names:?}"
    );
    assert_eq!(step_text(&events, 2), "It is forty-two, I think.");
    assert!(
        events.iter().filter(|event| event.name == "run.text").count() > 2,
        "the text must come in deltas"
    );
    let ids: Vec<u64> = events.iter().filter_map(|event| event.id).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    let last = events.last().unwrap();
    assert_eq!(last.data["answer"], "It is forty-two, I think.");
}

#[tokio::test]
async fn an_event_stream_resumes_after_last_event_id() {
    let (server, _model) = start_with_model([eval("c1", "6*7"), text_reply("42")]).await;
    let api = server.api();
    let id = run_to_end(&api, question("?")).await["run_id"].as_str().unwrap().to_owned();
    let all = api.follow(&format!("/v1/runs/{id}/events"), None).await.rest().await;
    let numbers: Vec<u64> = all.iter().filter_map(|event| event.id).collect();
    let request = api.request(reqwest::Method::GET, &format!("/v1/runs/{id}/events"));
    let request = request.header("last-event-id", numbers[2]);
    let rest = Sse::open(request).await.rest().await;
    let rest: Vec<u64> = rest.iter().filter_map(|event| event.id).collect();
    assert_eq!(rest, numbers[3..]);
}

#[tokio::test]
async fn a_truncated_answer_is_announced_as_void() {
    let (server, _model) = start_with_model([
        ScriptedBehavior::Disconnect(ScriptedAnswer::text("It is fo"), 2),
        text_reply("It is 42."),
    ])
    .await;
    let mut body = question("?");
    body["stream"] = true.into();
    let request = server.api().request(reqwest::Method::POST, "/v1/runs").json(&body);
    let events = Sse::open(request).await.rest().await;
    let again = events.iter().position(|event| event.name == "run.asking_again").unwrap();
    assert_eq!(events[again].data["error"]["code"], "UPSTREAM_UNAVAILABLE");
    assert_eq!(step_text(&events[again..], 1), "It is 42.");
}

#[tokio::test]
async fn a_replay_requests_the_model_and_makes_no_calls() {
    let script = [eval("c1", "6*7"), text_reply("It is 42.")];
    let other = [eval("c1", "7*7"), text_reply("It is 49.")];
    let replies = script.clone().into_iter().chain(script).chain(other);
    let (server, model) = start_with_model(replies).await;
    let api = server.api();
    let id = run_to_end(&api, question("?")).await["run_id"].as_str().unwrap().to_owned();
    let path = format!("/v1/runs/{id}/replay");
    let replay = async || -> Value {
        let request = api.request(reqwest::Method::POST, &path).json(&json!({}));
        Sse::open(request).await.rest().await.pop().unwrap().data
    };
    let first = replay().await;
    assert_eq!((&first["type"], &first["same"]), (&json!("replay.finished"), &json!(true)));
    let second = replay().await;
    assert_eq!((&second["same"], &second["answer"]), (&json!(false), &json!("It is 49.")));
    assert_eq!(second["differences"][0]["step"], 1);
    assert_eq!(second["unrecorded_calls"], 1);
    assert!(
        model.requests()[5].last_content().contains("this is a replay"),
        "{}",
        model.requests()[5].last_content()
    );
    let calls = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"].as_array().unwrap().len(), 1, "only the recorded one");
}
