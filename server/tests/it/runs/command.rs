//! `toolcrib run`, on the real binary: without a server and with one, for people and for programs.

use std::process::Output;

use serde_json::Value;
use toolcrib_bench::model::{Scripted, say};

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
