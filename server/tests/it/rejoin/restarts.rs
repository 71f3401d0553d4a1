//! The server is killed, or its disk fails, before the answer was delivered.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedModel, text_reply, tool_call_reply};

use super::conversations::chat_body;
use super::{TOOL, payment};
use crate::support::database::Database;
use crate::support::faults::fail_flushes;
use crate::support::process::{PATIENCE, Server, TOOLCRIB, eventually, text};

const WAITING: &str = "/v1/tools/bank.pay/invoke?wait_ms=30000";

/// Sends a request whose requester is gone with the server.
fn send_and_forget(server: &Server, path: &str, body: &Value) -> tokio::task::JoinHandle<()> {
    let request = server.http.post(server.url(path)).json(body);
    tokio::spawn(async move { drop(request.send().await) })
}

async fn post(server: &Server, path: &str, body: &Value) -> (Option<String>, Value) {
    let answer = server.http.post(server.url(path)).json(body).send().await.unwrap();
    let joined = answer.headers().get("toolcrib-joined");
    let joined = joined.map(|id| id.to_str().unwrap().to_owned());
    (joined, answer.json().await.unwrap())
}

async fn count_calls(server: &Server) -> usize {
    let listed = server.http.get(server.url("/v1/tool_calls?limit=200")).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    listed["tool_calls"].as_array().unwrap().len()
}

/// A call that was made before the kill is joined after it; one whose answer was delivered is not.
async fn check_kill_during_a_call(mut server: Server) {
    server.start().await;
    server.register("bank", TOOL, "irreversible").await;
    let delivered = json!({ "run_id": "run_2", "args": { "amount": 7 } });
    let ticket = server.ticket(TOOL, delivered.clone()).await;
    let request = server.poll_requests("bank", 1).await;
    assert_eq!(request[0]["tool_call_id"], ticket.as_str());
    server.submit(&ticket, json!({ "status": "SUCCEEDED", "result": {} })).await;
    let sent = send_and_forget(&server, WAITING, &payment());
    let id = text(&server.poll_requests("bank", 1).await[0], "tool_call_id");
    server.kill();
    sent.await.unwrap();
    server.start().await;
    let (joined, answer) = post(&server, "/v1/tools/bank.pay/invoke", &payment()).await;
    assert_eq!(joined.as_deref(), Some(id.as_str()), "{answer}");
    assert_eq!((&answer["joined"], &answer["tool_call_id"]), (&json!(true), &json!(id)));
    assert_eq!(count_calls(&server).await, 2);
    let (joined, _) = post(&server, "/v1/tools/bank.pay/invoke", &payment()).await;
    assert_eq!(joined, None, "the ticket was delivered");
    let (joined, _) = post(&server, "/v1/tools/bank.pay/invoke", &delivered).await;
    assert_eq!(joined, None, "its ticket was delivered before the kill");
    server.stop().await;
}

#[tokio::test]
async fn a_call_is_joined_after_a_kill() {
    check_kill_during_a_call(Server::new()).await;
}

#[tokio::test]
async fn a_call_is_joined_after_a_kill_with_postgresql() {
    let Some(database) = Database::new().await else { return };
    check_kill_during_a_call(Server::new().with("STORE__URL", &database.url)).await;
    database.drop().await;
}

/// A conversation goes on after a kill, from the step whose call was made.
async fn check_kill_during_a_conversation(server: impl Fn(&str) -> Server) {
    let replies =
        [tool_call_reply("call_1", "bank__pay", &json!({ "amount": 5 })), text_reply("paid 5")];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let mut server = server(&model.url);
    server.start().await;
    server.register("bank", TOOL, "irreversible").await;
    let sent = send_and_forget(&server, "/v1/chat/completions", &chat_body(false));
    let id = text(&server.poll_requests("bank", 1).await[0], "tool_call_id");
    server.kill();
    sent.await.unwrap();
    server.start().await;
    server.submit(&id, json!({ "status": "SUCCEEDED", "result": { "paid": 5 } })).await;
    let (joined, answer) = post(&server, "/v1/chat/completions", &chat_body(false)).await;
    assert!(joined.is_some(), "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "paid 5", "{answer}");
    assert_eq!(answer["toolcrib"]["tool_calls"][0]["tool_call_id"], id.as_str(), "{answer}");
    assert_eq!((count_calls(&server).await, model.requests().len()), (1, 2));
    server.stop().await;
}

fn with_model(server: Server, url: &str) -> Server {
    server.with("LLM__BASE_URL", url).with("LLM__MODEL", "large")
}

#[tokio::test]
async fn a_conversation_goes_on_after_a_kill() {
    check_kill_during_a_conversation(|url| with_model(Server::new(), url)).await;
}

#[tokio::test]
async fn a_conversation_goes_on_after_a_kill_with_postgresql() {
    let Some(database) = Database::new().await else { return };
    let with_database =
        |url: &str| with_model(Server::new().with("STORE__URL", &database.url), url);
    check_kill_during_a_conversation(with_database).await;
    database.drop().await;
}

#[tokio::test]
async fn a_failed_flush_is_reported_as_unknown_and_joined_after_a_restart() {
    let mut server = Server::ready().await;
    server.register("bank", TOOL, "irreversible").await;
    if !fail_flushes(&server, None).await {
        return;
    }
    let path = "/v1/tools/bank.pay/invoke";
    let answer = server.http.post(server.url(path)).json(&payment()).send().await.unwrap();
    assert_eq!(answer.status(), 502);
    let problem: Value = answer.json().await.unwrap();
    assert_eq!(problem["code"], "OUTCOME_UNKNOWN", "{problem}");
    let message = text(&problem, "detail");
    assert!(message.contains("unknown") && !message.contains("retry is safe"), "{message}");
    server.kill();
    server.start().await;
    let (joined, ticket) = post(&server, path, &payment()).await;
    assert_eq!(joined.as_deref(), ticket["tool_call_id"].as_str(), "{ticket}");
    assert_eq!(count_calls(&server).await, 1);
    let request = eventually("the call to be executed", PATIENCE, || async {
        server.poll("bank", 1, 100).await.pop()
    })
    .await;
    assert_eq!(request["tool_call_id"], ticket["tool_call_id"]);
    server.stop().await;
}

/// Runs `toolcrib call bank.pay amount=5` for a user with this home directory.
fn pay_with_command(server: &Server, home: &std::path::Path) -> std::process::Output {
    let mut command = std::process::Command::new(TOOLCRIB);
    command.args(["--server", &server.url(""), "call", TOOL, "amount=5", "--no-wait"]);
    command.env_remove("TOOLCRIB_KEY").env_remove("XDG_STATE_HOME").env("HOME", home);
    command.output().unwrap()
}

/// The command says that a repeated request joins the call, so the same command does. Commands that
/// got their tickets stay calls of their own.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_repeated_after_a_failed_flush_joins_its_call() {
    let home = tempfile::tempdir().unwrap();
    let mut server = Server::ready().await;
    server.register("bank", TOOL, "irreversible").await;
    if !fail_flushes(&server, None).await {
        return;
    }
    let failed = pay_with_command(&server, home.path());
    let message = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{message}");
    assert!(message.contains("repeat the command: it joins the call"), "{message}");
    server.kill();
    server.start().await;
    let repeated = pay_with_command(&server, home.path());
    assert!(repeated.status.success(), "{repeated:?}");
    assert_eq!(count_calls(&server).await, 1);
    for calls in [2, 3] {
        assert!(pay_with_command(&server, home.path()).status.success());
        assert_eq!(count_calls(&server).await, calls, "a deliberate command is a call of its own");
    }
    server.stop().await;
}
