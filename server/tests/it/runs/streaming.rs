//! A run as it happens: words as they are said, calls as they begin and end, in their order.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply};

use super::{eval, question, run, site};
use crate::support::sse::Sse;

fn joined(events: &[crate::support::sse::Event], step: u64) -> String {
    let words = events.iter().filter(|event| event.name == "run.text");
    let words = words.filter(|event| event.data["step"] == step);
    words.map(|event| event.data["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_streamed_run_tells_everything_in_order() {
    let (server, _model) = site([eval("c1", "6*7"), text_reply("It is forty-two, I think.")]).await;
    let mut body = question("?");
    body["stream"] = true.into();
    let request = server.api().request(reqwest::Method::POST, "/v1/runs").json(&body);
    let events = Sse::open(request).await.rest().await;
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    let without = |name: &&&str| !matches!(**name, "run.text" | "run.call");
    let story: Vec<&str> = names.iter().filter(without).copied().collect();
    assert_eq!(
        story,
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
    let at = |name: &str| names.iter().rposition(|other| *other == name).unwrap();
    assert!(at("run.text") < at("run.replied"), "words come before the whole: {names:?}");
    assert_eq!(joined(&events, 2), "It is forty-two, I think.");
    assert!(events.iter().filter(|event| event.name == "run.text").count() > 2, "in pieces");
    let kept: Vec<u64> = events.iter().filter_map(|event| event.id).collect();
    assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{kept:?}");
    let last = events.last().unwrap();
    assert_eq!(last.data["answer"], "It is forty-two, I think.");
}

#[tokio::test]
async fn who_comes_back_goes_on_where_it_was() {
    let (server, _model) = site([eval("c1", "6*7"), text_reply("42")]).await;
    let api = server.api();
    let id = run(&api, question("?")).await["run_id"].as_str().unwrap().to_owned();
    let all = api.follow(&format!("/v1/runs/{id}/events"), None).await.rest().await;
    let numbers: Vec<u64> = all.iter().filter_map(|event| event.id).collect();
    let request = api.request(reqwest::Method::GET, &format!("/v1/runs/{id}/events"));
    let request = request.header("last-event-id", numbers[2]);
    let rest = Sse::open(request).await.rest().await;
    let rest: Vec<u64> = rest.iter().filter_map(|event| event.id).collect();
    assert_eq!(rest, numbers[3..]);
}

#[tokio::test]
async fn an_answer_that_was_cut_is_told_to_be_void() {
    let (server, _model) = site([
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
    assert_eq!(joined(&events[again..], 1), "It is 42.");
}

#[tokio::test]
async fn a_replay_asks_again_and_touches_nothing() {
    let same = [eval("c1", "6*7"), text_reply("It is 42.")];
    let other = [eval("c1", "7*7"), text_reply("It is 49.")];
    let turns = same.clone().into_iter().chain(same).chain(other);
    let (server, model) = site(turns).await;
    let api = server.api();
    let id = run(&api, question("?")).await["run_id"].as_str().unwrap().to_owned();
    let path = format!("/v1/runs/{id}/replay");
    let replayed = async || -> Value {
        let request = api.request(reqwest::Method::POST, &path).json(&json!({}));
        Sse::open(request).await.rest().await.pop().unwrap().data
    };
    let first = replayed().await;
    assert_eq!((&first["type"], &first["same"]), (&json!("replay.finished"), &json!(true)));
    let second = replayed().await;
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
