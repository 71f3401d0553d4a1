//! `toolcrib run`, on the real binary: without a server and with one, for people and for programs.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use toolcrib_bench::model::{ScriptedBehavior, ScriptedModel, text_reply};

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
    let model = ScriptedModel::start_with_replies([eval("c1", "6*7"), text_reply("It is 42.")])
        .await
        .unwrap();
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
    let turns =
        [eval("c1", "6*7"), text_reply("It is 42."), eval("c1", "7*7"), text_reply("It is 49.")];
    let model = ScriptedModel::start_with_replies(turns).await.unwrap();
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
fn burst(words: usize) -> (String, ScriptedBehavior) {
    let (mut whole, mut stream) = (String::new(), String::new());
    for n in 0..words {
        let word = format!("w{n} ");
        let delta = json!({ "choices": [{ "index": 0, "delta": { "content": word } }] });
        stream.push_str(&format!("data: {delta}\n\n"));
        whole.push_str(&word);
    }
    let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
    stream.push_str(&format!("data: {end}\n\ndata: [DONE]\n\n"));
    (whole, ScriptedBehavior::Raw("text/event-stream", stream.into_bytes()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_a_burst_of_pieces_is_printed_once_and_without_gaps() {
    let (whole, turn) = burst(20_000);
    let model = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    let (code, said, shown) = ended(&server, &["run", "Count"]).await;
    assert_eq!(code, 0, "{shown}");
    let (said, whole) = (said.trim_end(), whole.trim_end());
    let apart = said.bytes().zip(whole.bytes()).position(|(said, whole)| said != whole);
    assert_eq!((said.len(), apart), (whole.len(), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_are_told_why_a_run_failed_as_the_run_tells_it() {
    let busy = ScriptedBehavior::Refuse(503, None, json!({ "error": { "message": "busy" } }));
    let model = ScriptedModel::start_with_replies([busy]).await.unwrap();
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_that_a_run_has_from_its_beginning_are_refused_for_one_that_is_there() {
    let place = Server::new();
    let own = [("--tools", "weather.*"), ("--steps", "1"), ("--system", "Be brief.")];
    for which in ["--continue", "--resume", "--follow", "--replay"] {
        let model = (which != "--replay").then_some(("--model", "demo"));
        for (option, value) in own.into_iter().chain(model) {
            let (code, said, shown) = ended(&place, &["run", which, "run_1", option, value]).await;
            assert_eq!((code, said.as_str()), (2, ""), "{which} {option}: {shown}");
            let both = shown.contains(which) && shown.contains(option);
            assert!(both && shown.contains("cannot be used with"), "{which} {option}: {shown}");
        }
    }
}

/// The server at this port, by a way on which the story of a run takes its time.
async fn slow_way_to(port: u16) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut asks, mut hears) = client.into_split();
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (mut answers, mut is_asked) = server.into_split();
            let story = Arc::new(AtomicBool::new(false));
            let asked_for = story.clone();
            tokio::spawn(async move {
                let mut bytes = vec![0; 16_384];
                while let Ok(length @ 1..) = asks.read(&mut bytes).await {
                    let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                    asked_for.fetch_or(text.contains("/events "), Ordering::SeqCst);
                    is_asked.write_all(&bytes[..length]).await.unwrap();
                }
            });
            tokio::spawn(async move {
                let mut bytes = vec![0; 16_384];
                while let Ok(length @ 1..) = answers.read(&mut bytes).await {
                    let mut heard = &bytes[..length];
                    if story.swap(false, Ordering::SeqCst) {
                        // Its head comes at once.
                        let head = heard.windows(4).position(|end| end == b"\r\n\r\n").unwrap();
                        let _ = hears.write_all(&heard[..head + 4]).await;
                        heard = &heard[head + 4..];
                        tokio::time::sleep(Duration::from_millis(1_500)).await;
                    }
                    if hears.write_all(heard).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_goes_on_shows_nothing_of_its_story_however_long_that_takes() {
    let away = ScriptedBehavior::Refuse(503, None, json!({ "error": { "message": "busy" } }));
    let turns = [
        eval("c1", "6*7"),
        text_reply("The old answer."),
        text_reply("The new one."),
        away,
        text_reply("Last."),
    ];
    let model = ScriptedModel::start_with_replies(turns).await.unwrap();
    let mut server = Server::new()
        .with("LLM__BASE_URL", &model.url)
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    server.start().await;
    let way = slow_way_to(server.port).await;
    let (code, said, shown) = ended(&server, &["run", "Well?", "--server", &way]).await;
    assert_eq!((code, said.trim()), (0, "The old answer."), "{shown}");
    let id = shown.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let more = ["run", "--continue", id, "And now?", "--server", &way];
    let (code, said, shown) = ended(&server, &more).await;
    assert_eq!((code, said.trim()), (0, "The new one."), "{shown}");
    assert!(!shown.contains("calculation.eval"), "{shown}");
    let (code, said, shown) = ended(&server, &more).await;
    assert_eq!((code, said.trim()), (1, ""), "{shown}");
    let again = ["run", "--resume", id, "--server", &way];
    let (code, said, shown) = ended(&server, &again).await;
    assert_eq!((code, said.trim()), (0, "Last."), "{shown}");
}
