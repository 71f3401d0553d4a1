//! `toolcrib run`, on the real binary: without a server and with one, for people and for programs.

use std::process::Output;

use serde_json::{Value, json};
use toolcrib_bench::model::{Scripted, Turn, say};

use super::eval;
use crate::support::process::Server;

/// The command to its end, without blocking who answers it.
async fn ended(server: &Server, arguments: &[&str]) -> (i32, String, String) {
    let mut command = server.command(arguments);
    let run = move || -> Output { command.output().unwrap() };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomer_sees_the_loop_without_a_key_a_network_or_a_server() {
    let place = Server::new();
    let question = ["run", "--model", "demo", "What is 6 * 7?"];
    let (code, said, shown) = ended(&place, &question).await;
    assert_eq!(code, 0, "{shown}");
    assert!(said.contains("42"), "{said}");
    assert!(shown.contains("→ calculation.eval {\"expression\":\"6 * 7\"}"), "{shown}");
    assert!(shown.contains("✓ calculation.eval ") && shown.contains(" tokens"), "{shown}");
    // It was kept: the next command finds it.
    let id = shown.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let (code, said, shown) = ended(&place, &["run", "--replay", id]).await;
    assert_eq!(code, 0, "{said}{shown}");
    assert!(shown.contains("the same as recorded"), "{shown}");
    let (code, said, _) = ended(&place, &["run", "--continue", id, "And 5 + 5?"]).await;
    assert_eq!(code, 0);
    assert!(said.contains("10") && !said.contains("42"), "only what is new: {said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_get_every_event_as_a_line() {
    let place = Server::new();
    let question = ["run", "--model", "demo", "What is 6 * 7?", "--json"];
    let (code, said, shown) = ended(&place, &question).await;
    assert_eq!((code, shown.as_str()), (0, ""));
    let events = lines(&said);
    assert_eq!(events[0]["type"], "run.created");
    assert!(events.iter().any(|event| event["type"] == "tool.call.finished"), "{said}");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "run.finished");
    assert!(last["answer"].as_str().unwrap().contains("42"), "{last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_down_is_said_and_the_run_can_be_resumed() {
    let model = Scripted::saying([eval("c1", "6*7"), say("It is 42.")]).await.unwrap();
    let mut server = Server::new()
        .with("LLM__BASE_URL", "http://127.0.0.1:9/v1")
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    let (code, _, shown) = ended(&server, &["run", "What is 6 * 7?"]).await;
    assert_eq!(code, 1, "{shown}");
    assert!(shown.contains("toolcrib run --resume run_"), "{shown}");
    let id = shown.split_whitespace().find(|word| word.starts_with("run_")).unwrap().to_owned();
    server = server.with("LLM__BASE_URL", &model.url);
    let (code, said, shown) = ended(&server, &["run", "--resume", &id]).await;
    assert_eq!((code, said.trim()), (0, "It is 42."), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_that_differs_says_where_and_ends_with_1() {
    let turns = [eval("c1", "6*7"), say("It is 42."), eval("c1", "7*7"), say("It is 49.")];
    let model = Scripted::saying(turns).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    let (code, _, shown) = ended(&server, &["run", "What is 6 * 7?"]).await;
    assert_eq!(code, 0, "{shown}");
    let id = shown.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let (code, said, _) = ended(&server, &["run", "--replay", id]).await;
    assert_eq!(code, 1);
    assert!(said.contains("step 1 went another way"), "{said}");
    assert!(said.contains("recorded  calculation__eval {\"expression\":\"6*7\"}"), "{said}");
    assert!(said.contains("now       calculation__eval {\"expression\":\"7*7\"}"), "{said}");
    let (code, _, shown) = ended(&server, &["run", "--replay", "run_nobody"]).await;
    assert_eq!(code, 1);
    assert!(shown.contains("there is no run"), "{shown}");
}

/// The words of an answer, in very small pieces that come all at once.
fn burst(words: usize) -> (String, Turn) {
    let (mut whole, mut stream) = (String::new(), String::new());
    for n in 0..words {
        let word = format!("w{n} ");
        let delta = json!({ "choices": [{ "index": 0, "delta": { "content": word } }] });
        stream.push_str(&format!("data: {delta}\n\n"));
        whole.push_str(&word);
    }
    let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
    stream.push_str(&format!("data: {end}\n\ndata: [DONE]\n\n"));
    (whole, Turn::Raw("text/event-stream", stream.into_bytes()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_a_burst_of_pieces_is_printed_once_and_without_gaps() {
    let (whole, turn) = burst(20_000);
    let model = Scripted::saying([turn]).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    let (code, said, shown) = ended(&server, &["run", "Count"]).await;
    assert_eq!(code, 0, "{shown}");
    let (said, whole) = (said.trim_end(), whole.trim_end());
    let apart = said.bytes().zip(whole.bytes()).position(|(said, whole)| said != whole);
    assert_eq!((said.len(), apart), (whole.len(), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_are_told_why_a_run_failed_as_the_run_tells_it() {
    let busy = Turn::Refuse(503, None, json!({ "error": { "message": "busy" } }));
    let model = Scripted::saying([busy]).await.unwrap();
    let server = Server::new()
        .with("LLM__BASE_URL", &model.url)
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    let (code, said, shown) = ended(&server, &["run", "Well?", "--json"]).await;
    assert_eq!(code, 1, "{said}");
    let (events, failure) = (lines(&said), lines(&shown).pop().unwrap());
    let own = &events.last().unwrap()["error"];
    assert_eq!(failure["error"]["retryable"], true, "{failure}");
    assert_eq!(failure["error"]["detail"]["http_status"], 503, "{failure}");
    for field in ["code", "message", "detail", "retryable"] {
        assert_eq!(failure["error"][field], own[field], "{field}");
    }
}
