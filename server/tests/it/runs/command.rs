//! `toolcrib run` on the real binary: with and without a server, as text and as JSON.

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

/// Runs the command to its end without blocking the async runtime.
async fn run_command(server: &Server, arguments: &[&str]) -> (i32, String, String) {
    let mut command = server.command(arguments);
    let run = move || -> Output { command.output().unwrap() };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Runs the command against a server that this process has started.
pub(super) async fn run_against(address: &str, arguments: &[&str]) -> (i32, String, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(["--server", &format!("http://{address}")]).args(arguments);
    command.env_remove("TOOLCRIB_KEY").env("NO_COLOR", "1");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn parse_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_model_runs_without_a_key_network_or_server() {
    let server = Server::new();
    let question = ["run", "--model", "demo", "What is 6 * 7?"];
    let (code, stdout, stderr) = run_command(&server, &question).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("42"), "{stdout}");
    assert!(stderr.contains("→ calculation.eval {\"expression\":\"6 * 7\"}"), "{stderr}");
    assert!(stderr.contains("✓ calculation.eval ") && stderr.contains(" tokens"), "{stderr}");
    // The run is stored, so the next command finds it.
    let id = stderr.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let (code, stdout, stderr) = run_command(&server, &["run", "--replay", id]).await;
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stderr.contains("the same as recorded"), "{stderr}");
    let (code, stdout, _) = run_command(&server, &["run", "--continue", id, "And 5 + 5?"]).await;
    assert_eq!(code, 0);
    assert!(stdout.contains("10") && !stdout.contains("42"), "only the new answer: {stdout}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_output_has_one_event_per_line() {
    let server = Server::new();
    let question = ["run", "--model", "demo", "What is 6 * 7?", "--json"];
    let (code, stdout, stderr) = run_command(&server, &question).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    let events = parse_lines(&stdout);
    assert_eq!(events[0]["type"], "run.created");
    assert!(events.iter().any(|event| event["type"] == "tool.call.finished"), "{stdout}");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "run.finished");
    assert!(last["answer"].as_str().unwrap().contains("42"), "{last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_model_is_reported_and_the_run_is_resumable() {
    let model = ScriptedModel::start_with_replies([eval("c1", "6*7"), text_reply("It is 42.")])
        .await
        .unwrap();
    let mut server = Server::new()
        .with("LLM__BASE_URL", "http://127.0.0.1:9/v1")
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    let (code, _, stderr) = run_command(&server, &["run", "What is 6 * 7?"]).await;
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("toolcrib run --resume run_"), "{stderr}");
    let id = stderr.split_whitespace().find(|word| word.starts_with("run_")).unwrap().to_owned();
    server = server.with("LLM__BASE_URL", &model.url);
    let (code, stdout, stderr) = run_command(&server, &["run", "--resume", &id]).await;
    assert_eq!((code, stdout.trim()), (0, "It is 42."), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_with_differences_shows_them_and_exits_with_1() {
    let replies =
        [eval("c1", "6*7"), text_reply("It is 42."), eval("c1", "7*7"), text_reply("It is 49.")];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    let (code, _, stderr) = run_command(&server, &["run", "What is 6 * 7?"]).await;
    assert_eq!(code, 0, "{stderr}");
    let id = stderr.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let (code, stdout, _) = run_command(&server, &["run", "--replay", id]).await;
    assert_eq!(code, 1);
    assert!(stdout.contains("step 1 differs"), "{stdout}");
    assert!(stdout.contains("recorded  calculation__eval {\"expression\":\"6*7\"}"), "{stdout}");
    assert!(stdout.contains("now       calculation__eval {\"expression\":\"7*7\"}"), "{stdout}");
    let (code, _, stderr) = run_command(&server, &["run", "--replay", "run_nobody"]).await;
    assert_eq!(code, 1);
    assert!(stderr.contains("there is no run"), "{stderr}");
}

/// An answer of many words, one delta per word, sent all at once.
fn many_small_deltas(words: usize) -> (String, ScriptedBehavior) {
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
async fn a_burst_of_deltas_is_printed_once_and_without_gaps() {
    let (whole, reply) = many_small_deltas(20_000);
    let model = ScriptedModel::start_with_replies([reply]).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    let (code, stdout, stderr) = run_command(&server, &["run", "Count"]).await;
    assert_eq!(code, 0, "{stderr}");
    let (stdout, whole) = (stdout.trim_end(), whole.trim_end());
    let difference =
        stdout.bytes().zip(whole.bytes()).position(|(printed, expected)| printed != expected);
    assert_eq!((stdout.len(), difference), (whole.len(), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_output_has_the_same_error_as_the_run() {
    let busy = ScriptedBehavior::Refuse(503, None, json!({ "error": { "message": "busy" } }));
    let model = ScriptedModel::start_with_replies([busy]).await.unwrap();
    let server = Server::new()
        .with("LLM__BASE_URL", &model.url)
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    let (code, stdout, stderr) = run_command(&server, &["run", "Well?", "--json"]).await;
    assert_eq!(code, 1, "{stdout}");
    let (events, failure) = (parse_lines(&stdout), parse_lines(&stderr).pop().unwrap());
    let run_error = &events.last().unwrap()["error"];
    assert_eq!(failure["error"]["retryable"], true, "{failure}");
    assert_eq!(failure["error"]["detail"]["http_status"], 503, "{failure}");
    for field in ["code", "message", "detail", "retryable"] {
        assert_eq!(failure["error"][field], run_error[field], "{field}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_of_a_new_run_are_refused_for_an_existing_run() {
    let server = Server::new();
    let options = [("--tools", "weather.*"), ("--steps", "1"), ("--system", "Be brief.")];
    for which in ["--continue", "--resume", "--follow", "--replay"] {
        let model = (which != "--replay").then_some(("--model", "demo"));
        for (option, value) in options.into_iter().chain(model) {
            let (code, stdout, stderr) =
                run_command(&server, &["run", which, "run_1", option, value]).await;
            assert_eq!((code, stdout.as_str()), (2, ""), "{which} {option}: {stderr}");
            let both = stderr.contains(which) && stderr.contains(option);
            assert!(both && stderr.contains("cannot be used with"), "{which} {option}: {stderr}");
        }
    }
}

/// Starts a proxy to the server at this port that delays the body of event streams. Returns its
/// address.
async fn start_delaying_proxy(port: u16) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut client_reader, mut client_writer) = client.into_split();
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (mut server_reader, mut server_writer) = server.into_split();
            let delays_body = Arc::new(AtomicBool::new(false));
            let saw_events_request = delays_body.clone();
            tokio::spawn(async move {
                let mut bytes = vec![0; 16_384];
                while let Ok(length @ 1..) = client_reader.read(&mut bytes).await {
                    let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                    saw_events_request.fetch_or(text.contains("/events "), Ordering::SeqCst);
                    server_writer.write_all(&bytes[..length]).await.unwrap();
                }
            });
            tokio::spawn(async move {
                let mut bytes = vec![0; 16_384];
                while let Ok(length @ 1..) = server_reader.read(&mut bytes).await {
                    let mut received = &bytes[..length];
                    if delays_body.swap(false, Ordering::SeqCst) {
                        // The head of the response is not delayed.
                        let head = received.windows(4).position(|end| end == b"\r\n\r\n").unwrap();
                        let _ = client_writer.write_all(&received[..head + 4]).await;
                        received = &received[head + 4..];
                        tokio::time::sleep(Duration::from_millis(1_500)).await;
                    }
                    if client_writer.write_all(received).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_continued_run_prints_nothing_of_its_history() {
    let busy = ScriptedBehavior::Refuse(503, None, json!({ "error": { "message": "busy" } }));
    let replies = [
        eval("c1", "6*7"),
        text_reply("The old answer."),
        text_reply("The new one."),
        busy,
        text_reply("Last."),
    ];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let mut server = Server::new()
        .with("LLM__BASE_URL", &model.url)
        .with("LLM__MODEL", "large-1")
        .with("LLM__MAX_RETRIES", 0);
    server.start().await;
    let proxy = start_delaying_proxy(server.port).await;
    let (code, stdout, stderr) = run_against(&proxy, &["run", "Well?"]).await;
    assert_eq!((code, stdout.trim()), (0, "The old answer."), "{stderr}");
    let id = stderr.split_whitespace().find(|word| word.starts_with("run_")).unwrap();
    let more = ["run", "--continue", id, "And now?"];
    let (code, stdout, stderr) = run_against(&proxy, &more).await;
    assert_eq!((code, stdout.trim()), (0, "The new one."), "{stderr}");
    assert!(!stderr.contains("calculation.eval"), "{stderr}");
    let (code, stdout, stderr) = run_against(&proxy, &more).await;
    assert_eq!((code, stdout.trim()), (1, ""), "{stderr}");
    let again = ["run", "--resume", id];
    let (code, stdout, stderr) = run_against(&proxy, &again).await;
    assert_eq!((code, stdout.trim()), (0, "Last."), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_of_runs_is_not_sent_to_the_model() {
    let model = ScriptedModel::start_with_replies([text_reply("Hello.")]).await.unwrap();
    let server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    for words in [&["run", "ls"][..], &["run", "show", "run_1"], &["run", "cancel", "run_1"]] {
        let (code, _, stderr) = run_command(&server, words).await;
        assert_eq!(code, 2, "{stderr}");
        let command = format!("toolcrib runs {}", words[1..].join(" "));
        assert!(stderr.contains(&command), "{stderr}");
    }
    let (code, _, stderr) = run_command(&server, &["run", "What", "is", "it?"]).await;
    assert_eq!(code, 2);
    assert!(stderr.contains("toolcrib run 'What is it?'"), "{stderr}");
    assert_eq!(model.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_listed_shown_followed_and_canceled() {
    let model = ScriptedModel::start_with_replies([
        eval("c1", "6*7"),
        text_reply("It is 42."),
        toolcrib_bench::model::tool_call_reply("c1", "slow__tool", &json!({})),
    ])
    .await
    .unwrap();
    let url = model.url.clone();
    let server = crate::support::Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
    })
    .await;
    let api = server.api();
    let run = super::run_to_end(&api, super::question("What is 6 * 7?")).await;
    let id = run["run_id"].as_str().unwrap();
    let toolcrib = async |words: &[&str]| run_against(&server.address, words).await;
    let (code, stdout, stderr) = toolcrib(&["runs"]).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains(id) && stdout.contains("SUCCEEDED"), "{stdout}");
    let (_, stdout, _) = toolcrib(&["runs", "ls", "--status", "failed"]).await;
    assert!(!stdout.contains(id), "{stdout}");
    let (code, stdout, _) = toolcrib(&["runs", "show", id]).await;
    assert_eq!(code, 0);
    assert!(stdout.contains("It is 42.") && stdout.contains("calculation.eval"), "{stdout}");
    let (code, stdout, stderr) = toolcrib(&["runs", "follow", id]).await;
    assert_eq!((code, stdout.trim()), (0, "It is 42."), "{stderr}");
    assert!(stderr.contains("✓ calculation.eval"), "{stderr}");
    let tool = json!([{ "name": "slow.tool", "timeout_ms": 60_000 }]);
    api.register("c1", tool).await;
    let run = api.post("/v1/runs", super::question("Slow")).await.is(202);
    let id = run["run_id"].as_str().unwrap();
    let (code, _, stderr) = toolcrib(&["runs", "cancel", id, "--reason", "enough"]).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("CANCELED"), "{stderr}");
    assert_eq!(api.get(&format!("/v1/runs/{id}")).await.is(200)["status"], "CANCELED");
    let (code, _, stderr) = toolcrib(&["runs", "show", "run_nobody"]).await;
    assert_eq!(code, 1);
    assert!(stderr.contains("there is no run"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_chat_completions_and_responses_are_listed_shown_and_continued() {
    let model = ScriptedModel::start_with_replies([
        eval("c1", "6*7"),
        text_reply("It is 42."),
        text_reply("Hello."),
        text_reply("And 43."),
    ])
    .await
    .unwrap();
    let url = model.url.clone();
    let server = crate::support::Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
    })
    .await;
    let api = server.api();
    let chat = json!({ "model": "large-1",
        "messages": [{ "role": "user", "content": "What is 6 * 7?" }] });
    let answer = api.post("/v1/chat/completions", chat).await.is(200);
    let id = answer["toolcrib"]["run_id"].as_str().unwrap();
    let response = json!({ "model": "large-1", "input": "Hi" });
    api.post("/v1/responses", response).await.is(200);
    let toolcrib = async |words: &[&str]| run_against(&server.address, words).await;
    let (code, stdout, stderr) = toolcrib(&["runs", "ls"]).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains(id) && stdout.contains("It is 42."), "{stdout}");
    assert!(stdout.contains("Hello."), "{stdout}");
    let (code, stdout, stderr) = toolcrib(&["runs", "show", id]).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("It is 42.") && stdout.contains("calculation.eval"), "{stdout}");
    let (code, stdout, stderr) = toolcrib(&["runs", "follow", id]).await;
    assert_eq!((code, stdout.trim()), (0, "It is 42."), "{stderr}");
    // The run goes on with the whole conversation.
    let more = ["run", "--continue", id, "And one more?"];
    let (code, stdout, stderr) = toolcrib(&more).await;
    assert_eq!((code, stdout.trim()), (0, "And 43."), "{stderr}");
    let requests = model.requests();
    let messages = requests.last().unwrap().body["messages"].to_string();
    assert!(messages.contains("What is 6 * 7?") && messages.contains("It is 42."), "{messages}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_of_a_chat_completion_can_be_followed_to_its_end() {
    let model = ScriptedModel::start_with_replies([
        toolcrib_bench::model::tool_call_reply("c1", "slow__tool", &json!({})),
        text_reply("Done."),
    ])
    .await
    .unwrap();
    let url = model.url.clone();
    let server = crate::support::Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
    })
    .await;
    let api = server.api();
    api.register("c1", json!([{ "name": "slow.tool", "timeout_ms": 60_000 }])).await;
    let chat = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Hi" }],
        "toolcrib": { "run_id": "run_chat" } });
    let chatting = api.post("/v1/chat/completions", chat);
    let answering = async {
        let mut events = api.follow("/v1/runs/run_chat/events", None).await;
        let requested = events.wait_for("tool.call.requested").await;
        let address = server.address.clone();
        let following =
            tokio::spawn(
                async move { run_against(&address, &["run", "--follow", "run_chat"]).await },
            );
        api.succeed(requested.data["tool_call_id"].as_str().unwrap(), json!("ok")).await;
        following.await.unwrap()
    };
    let (reply, (code, _, stderr)) = tokio::join!(chatting, answering);
    assert_eq!(reply.is(200)["choices"][0]["message"]["content"], "Done.");
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("→ slow.tool") && stderr.contains("✓ slow.tool"), "{stderr}");
    // Afterwards too, and an id without calls is refused.
    let (code, _, stderr) = run_against(&server.address, &["runs", "follow", "run_chat"]).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("✓ slow.tool"), "{stderr}");
    let (code, _, stderr) = run_against(&server.address, &["run", "--follow", "run_none"]).await;
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("there is no run"), "{stderr}");
}
