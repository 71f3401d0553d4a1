//! Chat completions and responses in progress: they are runs like any other.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply, tool_call_reply};

use super::command::run_against;
use super::handoff::start_with_agents;
use super::{eval, question, start_with_model};
use crate::support::api::message;
use crate::support::{Api, until};

/// A request to the model that never ends by itself, after some text.
fn stuck() -> ScriptedBehavior {
    ScriptedBehavior::Stall(ScriptedAnswer::text("Let me see. "), 2)
}

fn chat(run_id: &str) -> Value {
    let mut body = question("Hi");
    body["toolcrib"] = json!({ "run_id": run_id });
    body
}

async fn listed(api: &Api, query: &str) -> Vec<(String, String)> {
    let page = api.get(&format!("/v1/runs{query}")).await.is(200);
    let text = |run: &Value, field: &str| run[field].as_str().unwrap().to_owned();
    let runs = page["runs"].as_array().unwrap().iter();
    runs.map(|run| (text(run, "run_id"), text(run, "status"))).collect()
}

fn pair(run_id: &str, status: &str) -> (String, String) {
    (run_id.to_owned(), status.to_owned())
}

#[tokio::test]
async fn one_in_progress_is_listed_shown_followed_and_canceled() {
    let (server, model) = start_with_model([eval("c1", "6*7"), stuck()]).await;
    let (api, operator) = (server.api(), server.operator());
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    let watching = async {
        until("the second request to the model", || async {
            (model.requests().len() == 2).then_some(())
        })
        .await;
        assert_eq!(listed(&api, "").await, [pair("run_chat", "RUNNING")]);
        assert_eq!(server.engine.runs().open_run_count(), 1, "it counts in the metrics");
        assert_eq!(listed(&api, "?status=running&model=large-1").await.len(), 1);
        assert!(listed(&api, "?status=succeeded").await.is_empty());
        assert!(listed(&api, "?model=other").await.is_empty());
        let run = api.get("/v1/runs/run_chat").await.is(200);
        assert_eq!((&run["status"], &run["step_count"]), (&json!("RUNNING"), &json!(1)), "{run}");
        assert_eq!(run["calls"][0]["tool_name"], "calculation.eval");
        assert_eq!(run["completed_at_ms"], Value::Null);
        let mut events = api.follow("/v1/runs/run_chat/events", None).await;
        events.wait_for("tool.call.finished").await;
        // What needs a stored conversation is refused until there is one.
        let more = json!({ "messages": [{ "role": "user", "content": "Hello?" }] });
        let refused = api.post("/v1/runs/run_chat/messages", more).await.refused(409, "CONFLICT");
        assert!(message(&refused).contains("in progress"), "{refused}");
        let canceled = Instant::now();
        let reason = json!({ "reason": "enough" });
        let run = operator.post("/v1/runs/run_chat/cancel", reason).await.is(200);
        assert!(canceled.elapsed() < Duration::from_secs(1), "{:?}", canceled.elapsed());
        assert_eq!(run["status"], "CANCELED", "{run}");
        let end = events.wait_for("run.canceled").await.data;
        assert_eq!((&end["by"], &end["reason"]), (&json!("operator"), &json!("enough")), "{end}");
        assert!(events.next().await.is_none(), "the stream ends with the run");
    };
    let (reply, ()) = tokio::join!(chatting, watching);
    assert_eq!(reply.header("x-should-retry"), Some("false"), "SDKs do not repeat it");
    assert_eq!(reply.header("toolcrib-run-id"), Some("run_chat"));
    let error = reply.is(409);
    assert_eq!(error["error"]["code"], "CANCELED", "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("enough"), "{error}");
    assert_eq!(listed(&api, "").await, [pair("run_chat", "CANCELED")]);
    assert_eq!(server.engine.runs().open_run_count(), 0);
    // It continues like any canceled run.
    let repeated = api.post("/v1/runs/run_chat/cancel", json!({})).await.is(200);
    assert_eq!(repeated["status"], "CANCELED");
}

#[tokio::test]
async fn its_text_is_streamed_to_those_who_follow_it() {
    let slow = ScriptedAnswer {
        delay: Duration::from_millis(300),
        ..ScriptedAnswer::text("It is forty-two.")
    };
    let (server, model) = start_with_model([ScriptedBehavior::Reply(slow)]).await;
    let api = server.api();
    let mut body = question("Hi");
    (body["input"], body["toolcrib"]) = ("Hi".into(), json!({ "run_id": "session-7" }));
    body.as_object_mut().unwrap().remove("messages");
    let responding = api.post("/v1/responses", body);
    let following = async {
        until("the request to the model", || async {
            (!model.requests().is_empty()).then_some(())
        })
        .await;
        // The caller chose the id of the run.
        assert_eq!(listed(&api, "").await, [pair("session-7", "RUNNING")]);
        let mut events = api.follow("/v1/runs/session-7/events", None).await;
        let text = events.wait_for("run.text").await.data;
        assert!("It is forty-two.".starts_with(text["text"].as_str().unwrap()), "{text}");
        let end = events.wait_for("run.finished").await.data;
        assert_eq!(end["answer"], "It is forty-two.");
        assert!(events.next().await.is_none(), "the stream ends with the run");
    };
    let (reply, ()) = tokio::join!(responding, following);
    reply.is(200);
    assert_eq!(listed(&api, "").await, [pair("session-7", "SUCCEEDED")]);
}

#[tokio::test]
async fn a_page_of_runs_holds_those_in_progress_in_their_order() {
    let replies = (0..4).map(|_| text_reply("Done.")).chain([stuck(), stuck()]);
    let (server, model) = start_with_model(replies).await;
    let (api, operator) = (server.api(), server.operator());
    for id in ["a", "run_b", "run_d", "x"] {
        api.post("/v1/chat/completions", chat(id)).await.is(200);
    }
    // A second conversation of a run that had ended, and a new run between the others.
    let chatting = async {
        let (again, new) = (chat("x"), chat("run_c"));
        tokio::join!(api.post("/v1/chat/completions", again), api.post("/v1/chat/completions", new))
    };
    let listing = async {
        until("both requests to the model", || async {
            (model.requests().len() == 6).then_some(())
        })
        .await;
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = api.get(&format!("/v1/runs?limit=2{cursor}")).await.is(200);
            let runs = page["runs"].as_array().unwrap();
            assert!(runs.len() <= 2, "{page}");
            let word = |run: &Value| format!("{} {}", run["run_id"], run["status"]);
            seen.extend(runs.iter().map(|run| word(run).replace('"', "")));
            let Some(next) = page["next_cursor"].as_str() else { break };
            cursor = format!("&cursor={next}");
        }
        let expected =
            ["x RUNNING", "run_d SUCCEEDED", "run_c RUNNING", "run_b SUCCEEDED", "a SUCCEEDED"];
        assert_eq!(seen, expected);
        let ended = listed(&api, "?status=succeeded").await;
        assert_eq!(ended.len(), 3, "x is in progress again: {ended:?}");
        for id in ["x", "run_c"] {
            operator.post(&format!("/v1/runs/{id}/cancel"), json!({})).await.is(200);
        }
    };
    let ((again, new), ()) = tokio::join!(chatting, listing);
    assert_eq!((again.status.as_u16(), new.status.as_u16()), (409, 409));
}

#[tokio::test]
async fn canceling_one_cancels_its_open_calls() {
    let call = tool_call_reply("c1", "slow__tool", &json!({}));
    let (server, _model) = start_with_model([call, text_reply("Done.")]).await;
    let api = server.api();
    api.register("c1", json!([{ "name": "slow.tool", "timeout_ms": 60_000 }])).await;
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    let canceling = async {
        let mut events = api.follow("/v1/runs/run_chat/events", None).await;
        let requested = events.wait_for("tool.call.requested").await.data;
        api.post("/v1/runs/run_chat/cancel", json!({})).await.is(200);
        api.finished(requested["tool_call_id"].as_str().unwrap()).await
    };
    let (reply, ended) = tokio::join!(chatting, canceling);
    assert_eq!(reply.status, 409);
    assert_eq!(ended["status"], "CANCELED", "{ended}");
}

/// A model's reply with a call of each of these tools.
fn calls_of(tools: &[&str]) -> ScriptedBehavior {
    let add = |answer: ScriptedAnswer, tool: &&str| answer.with_call(tool, tool, "{}");
    ScriptedBehavior::Reply(tools.iter().fold(ScriptedAnswer::text(""), add))
}

/// Returns the messages of the journal, in order, each as its role and content.
async fn journal_messages(model: &toolcrib_bench::model::ScriptedModel) -> Vec<String> {
    let requests = model.requests();
    let messages = requests.last().unwrap().messages().to_vec();
    let word = |message: &Value| format!("{} {}", message["role"], message["content"]);
    messages.iter().map(word).map(|word| word.replace('"', "")).collect()
}

#[tokio::test]
async fn one_that_continues_as_a_run_can_be_canceled() {
    let replies = [text_reply("Hello."), stuck(), stuck(), text_reply("Beside it.")];
    let (server, model) = start_with_model(replies).await;
    let api = server.api();
    api.post("/v1/chat/completions", chat("run_chat")).await.is(200);
    for requests in [2, 3] {
        let more = json!({ "messages": [{ "role": "user", "content": "And now?" }] });
        api.post("/v1/runs/run_chat/messages", more).await.is(202);
        until("the request to the model", || async {
            (model.requests().len() == requests).then_some(())
        })
        .await;
        let run = api.post("/v1/runs/run_chat/cancel", json!({})).await.is(200);
        assert_eq!(run["status"], "CANCELED", "{run}");
    }
    // A conversation under the id of a driven run leaves the record of that run as it is.
    api.post("/v1/chat/completions", chat("run_chat")).await.is(200);
    assert_eq!(listed(&api, "").await, [pair("run_chat", "CANCELED")]);
}

/// Returns the ids of the calls of a tool in a run.
async fn calls_in(api: &Api, run_id: &str, tool: &str) -> Vec<String> {
    let path = format!("/v1/tool_calls?run_id={run_id}&tool_name={tool}");
    let page = api.get(&path).await.is(200);
    let calls = page["tool_calls"].as_array().unwrap().iter();
    calls.map(|call| call["tool_call_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_canceled_one_that_is_resumed_repeats_no_call() {
    let calls = || calls_of(&["mail__send", "slow__tool"]);
    let replies = [calls(), text_reply("Sent."), calls(), text_reply("Sent.")];
    let (server, _model) = start_with_model(replies).await;
    let api = server.api();
    let tools = json!([{ "name": "mail.send" }, { "name": "slow.tool", "timeout_ms": 60_000 }]);
    api.register("c1", tools).await;
    for rejoin in [true, false] {
        let run_id = format!("run_{rejoin}");
        let mut body = chat(&run_id);
        body["toolcrib"]["rejoin"] = rejoin.into();
        let chatting = api.post("/v1/chat/completions", body);
        let canceling = async {
            let first = async || calls_in(&api, &run_id, "mail.send").await.pop();
            let sent = until("the first call", first).await;
            api.succeed(&sent, json!("sent")).await;
            let second = async || calls_in(&api, &run_id, "slow.tool").await.pop();
            until("the second call", second).await;
            api.post(&format!("/v1/runs/{run_id}/cancel"), json!({})).await.is(200);
            sent
        };
        let (reply, sent) = tokio::join!(chatting, canceling);
        assert_eq!(reply.status, 409);
        api.post(&format!("/v1/runs/{run_id}/resume"), json!({})).await.is(202);
        let run = api.get(&format!("/v1/runs/{run_id}?wait_ms=20000")).await.is(200);
        assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("Sent.")));
        let ids = calls_in(&api, &run_id, "mail.send").await;
        assert_eq!(ids, [sent], "rejoin {rejoin}: the mail is sent once");
    }
}

#[tokio::test]
async fn a_run_of_several_ones_has_each_message_once() {
    let replies = [eval("c1", "6*7"), text_reply("It is 42."), text_reply("Bye."), stuck()];
    let (server, model) = start_with_model(replies).await;
    let api = server.api();
    let user = |text: &str| json!({ "role": "user", "content": text });
    let mut body = chat("run_chat");
    body["messages"] = json!([user("6*7?")]);
    api.post("/v1/chat/completions", body.clone()).await.is(200);
    // The caller sends the conversation again, without the call that it did not see.
    let answer = json!({ "role": "assistant", "content": "It is 42." });
    body["messages"] = json!([user("6*7?"), answer, user("Thanks!")]);
    api.post("/v1/chat/completions", body).await.is(200);
    let more = json!({ "messages": [user("Wait!")] });
    api.post("/v1/runs/run_chat/messages", more).await.is(202);
    until("the last request to the model", || async {
        (model.requests().len() == 4).then_some(())
    })
    .await;
    let seen = journal_messages(&model).await;
    let texts: Vec<&String> = seen.iter().filter(|m| !m.starts_with("system")).collect();
    let starts = ["user 6*7?", "assistant", "tool", "assistant It is 42.", "user Thanks!"];
    let starts = starts.into_iter().chain(["assistant Bye.", "user Wait!"]);
    assert_eq!(texts.len(), 7, "{texts:?}");
    assert!(texts.iter().zip(starts).all(|(text, start)| text.starts_with(start)), "{texts:?}");
    api.post("/v1/runs/run_chat/cancel", json!({})).await.is(200);
}

#[tokio::test]
async fn a_requester_that_disconnects_leaves_a_canceled_run() {
    let (server, model) = start_with_model([stuck()]).await;
    let api = server.api();
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    tokio::select! {
        reply = chatting => panic!("{}", reply.text),
        () = until("the request to the model", || async {
            (!model.requests().is_empty()).then_some(())
        }) => {}
    }
    let run = api.get("/v1/runs/run_chat?wait_ms=30000").await.is(200);
    assert_eq!(run["status"], "CANCELED", "{run}");
}

#[tokio::test]
async fn others_neither_see_nor_use_the_run_of_one_in_progress() {
    let (server, model) = start_with_model([stuck()]).await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["*"]).await;
    let chatting = ada.post("/v1/chat/completions", chat("run_chat"));
    let trying = async {
        until("the request to the model", || async {
            (!model.requests().is_empty()).then_some(())
        })
        .await;
        assert!(listed(&bob, "").await.is_empty());
        bob.get("/v1/runs/run_chat").await.refused(404, "NOT_FOUND");
        bob.post("/v1/runs/run_chat/cancel", json!({})).await.refused(404, "NOT_FOUND");
        assert_eq!(bob.post("/v1/chat/completions", chat("run_chat")).await.status, 403);
        assert_eq!(listed(&ada, "").await, [pair("run_chat", "RUNNING")]);
        ada.post("/v1/runs/run_chat/cancel", json!({})).await.is(200);
    };
    let (reply, ()) = tokio::join!(chatting, trying);
    assert_eq!(reply.status, 409);
}

#[tokio::test]
async fn a_kill_switch_ends_one_during_a_model_request() {
    let hand_off = tool_call_reply("c1", "transfer_to_billing", &json!({}));
    let (server, model) = start_with_agents([stuck(), hand_off, stuck()]).await;
    let (api, operator) = (server.api(), server.operator());
    // The agent of the caller, and the agent that the conversation was handed off to.
    for (agent, requests) in [("default", 1), ("billing", 3)] {
        let chatting = api.post("/v1/chat/completions", question("Hi"));
        let path = format!("/v1/switches/agent/{agent}");
        let switching = async {
            until("the request to the model", || async {
                (model.requests().len() == requests).then_some(())
            })
            .await;
            let switched = Instant::now();
            operator.put(&path, json!({ "reason": "wrong invoices" })).await.is(200);
            switched
        };
        let (reply, switched) = tokio::join!(chatting, switching);
        assert!(switched.elapsed() < Duration::from_secs(1), "{:?}", switched.elapsed());
        let run_id = reply.header("toolcrib-run-id").unwrap().to_owned();
        let error = reply.is(403);
        assert!(error.to_string().contains("wrong invoices"), "{error}");
        assert_eq!(operator.delete(&path).await.status, 204);
        let run = api.get(&format!("/v1/runs/{run_id}")).await.is(200);
        assert_eq!(run["status"], "FAILED", "{run}");
        assert!(run["error"]["message"].as_str().unwrap().contains("wrong invoices"), "{run}");
    }
}

/// `toolcrib runs follow run_chat`, connected.
struct Follower {
    process: tokio::process::Child,
    messages: Lines<BufReader<tokio::process::ChildStderr>>,
}

impl Follower {
    /// Starts the command, and waits until it has printed a line with this text.
    async fn start(address: &str, text: &str) -> Self {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_toolcrib"));
        command.args(["--server", &format!("http://{address}"), "runs", "follow", "run_chat"]);
        command.env_remove("TOOLCRIB_KEY").env("NO_COLOR", "1").kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut messages = BufReader::new(process.stderr.take().unwrap()).lines();
        loop {
            let line = messages.next_line().await.unwrap().expect("the follower goes on");
            if line.contains(text) {
                return Self { process, messages };
            }
        }
    }

    /// Waits for its end. Returns the exit code, its output, and its messages since the start.
    async fn finish(mut self) -> (i32, String, String) {
        let mut messages = Vec::new();
        while let Some(line) = self.messages.next_line().await.unwrap() {
            messages.push(line);
        }
        let output = self.process.wait_with_output().await.unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), stdout, messages.join("\n"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_lists_shows_follows_and_cancels_one_in_progress() {
    let (server, model) = start_with_model([eval("c1", "6*7"), stuck()]).await;
    let api = server.api();
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    let commanding = async {
        until("the second request to the model", || async {
            (model.requests().len() == 2).then_some(())
        })
        .await;
        let (code, stdout, stderr) = run_against(&server.address, &["runs"]).await;
        assert_eq!(code, 0, "{stderr}");
        assert!(stdout.contains("run_chat") && stdout.contains("RUNNING"), "{stdout}");
        let (code, stdout, stderr) =
            run_against(&server.address, &["runs", "show", "run_chat"]).await;
        assert_eq!(code, 0, "{stderr}");
        assert!(stdout.contains("RUNNING") && stdout.contains("calculation.eval"), "{stdout}");
        let follower = Follower::start(&server.address, "✓ calculation.eval").await;
        let cancel = ["runs", "cancel", "run_chat", "--reason", "enough"];
        let (code, _, stderr) = run_against(&server.address, &cancel).await;
        assert_eq!(code, 0, "{stderr}");
        assert!(stderr.contains("CANCELED"), "{stderr}");
        let (code, _, stderr) = follower.finish().await;
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains("run_chat was canceled"), "{stderr}");
    };
    let (reply, ()) = tokio::join!(chatting, commanding);
    assert_eq!(reply.status, 409);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_on_the_command_line_sees_each_text_once() {
    let first = tool_call_reply("c1", "slow__tool", &json!({}));
    let (server, _model) = start_with_model([first, text_reply("It is 42.")]).await;
    let api = server.api();
    api.register("c1", json!([{ "name": "slow.tool", "timeout_ms": 60_000 }])).await;
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    let following = async {
        let mut events = api.follow("/v1/runs/run_chat/events", None).await;
        let requested = events.wait_for("tool.call.requested").await;
        let follower = Follower::start(&server.address, "→ slow.tool").await;
        api.succeed(requested.data["tool_call_id"].as_str().unwrap(), json!("ok")).await;
        follower.finish().await
    };
    let (reply, (code, stdout, stderr)) = tokio::join!(chatting, following);
    reply.is(200);
    assert_eq!((code, stdout.trim()), (0, "It is 42."), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_sees_every_conversation_under_one_run_id() {
    let call = |id: &str| tool_call_reply(id, "slow__tool", &json!({ "n": id }));
    let script = [text_reply("First."), call("c1"), call("c2"), text_reply("Second.")];
    let (server, _model) = start_with_model(script).await;
    let api = server.api();
    api.register("c1", json!([{ "name": "slow.tool", "timeout_ms": 60_000 }])).await;
    api.post("/v1/chat/completions", chat("run_chat")).await.is(200);
    let chatting = api.post("/v1/chat/completions", chat("run_chat"));
    let following = async {
        until("the second conversation", || async {
            (listed(&api, "").await == [pair("run_chat", "RUNNING")]).then_some(())
        })
        .await;
        let mut events = api.follow("/v1/runs/run_chat/events", None).await;
        let requested = events.wait_for("tool.call.requested").await;
        let follower = Follower::start(&server.address, "→ slow.tool").await;
        let mut order = api.follow("/v1/runs/run_chat/events", None).await;
        api.succeed(requested.data["tool_call_id"].as_str().unwrap(), json!("ok")).await;
        let requested = events.wait_for("tool.call.requested").await;
        // The third step begins live, after the single step of the earlier conversation.
        api.succeed(requested.data["tool_call_id"].as_str().unwrap(), json!("ok")).await;
        let mut shown = Vec::new();
        while let Some(event) = order.next().await {
            let name = event.data["type"].as_str().unwrap_or_default().to_owned();
            if name.starts_with("run.") && name != "run.call" && name != "run.asking" {
                shown.push(name);
            }
        }
        (shown, follower.finish().await)
    };
    let (reply, (shown, (code, stdout, stderr))) = tokio::join!(chatting, following);
    reply.is(200);
    assert_eq!(shown[..3], ["run.created", "run.replied", "run.finished"], "{shown:?}");
    let text = shown.iter().position(|name| name == "run.text");
    assert!(text < shown.iter().position(|name| name == "run.said"), "{shown:?}");
    assert_eq!(shown.last().map(String::as_str), Some("run.finished"));
    assert_eq!((code, stdout.trim()), (0, "First.\nSecond."), "{stderr}");
    assert!(!stderr.contains("text is missing"), "{stderr}");
    // Both are stored: a later follower sees them, too.
    let (code, stdout, stderr) =
        run_against(&server.address, &["runs", "follow", "run_chat"]).await;
    assert_eq!((code, stdout.trim()), (0, "First.\nSecond."), "{stderr}");
}
