//! A principal asks experts in the loop and experts that Python workers drive, of which one fails,
//! one is killed and one never answers; and the server is killed in between.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply,
};

use crate::support::nats::{Nats, NatsPeer};
use crate::support::process::{self, eventually};

/// Time for a whole tree of agents on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Kills its process when it is dropped.
struct PythonWorker(Child);

impl PythonWorker {
    fn start(nats: &Nats, folder: &std::path::Path, target: &str) -> Self {
        let script = folder.join("worker.py");
        std::fs::write(&script, WORKER).unwrap();
        let name = std::env::var("TOOLCRIB_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let kit = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk/python/src");
        let mut command = Command::new(name);
        command.arg(script).env("PYTHONPATH", kit).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("NATS_URL", nats.url()).env("TARGET", target).env("FOLDER", folder);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for PythonWorker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Answers an instruction, fails, or notes that it has begun and then works for a long time.
const WORKER: &str = r#"
import asyncio, os
from toolcrib_sdk.utp import Worker

worker = Worker(os.environ["NATS_URL"], target=os.environ["TARGET"], lease_s=60)

@worker.agent()
async def work(turn):
    with open(os.path.join(os.environ["FOLDER"], turn.agent_id), "a") as file:
        file.write(turn.agent_turn_id + "\n")
    if "fail" in turn.instruction:
        raise ValueError("the archive is closed")
    if "sum" in turn.instruction:
        result = await turn.call_tool("calculation.eval", expression="6*7")
        return {"sum": result["result"]}
    await asyncio.sleep(600)

worker.run()
"#;

async fn request(peer: &NatsPeer, agent: &str, operation: &str, body: Value) -> Value {
    let answer = peer.request(&format!("agent.{agent}.{operation}"), body).await;
    assert_eq!(answer["ok"], true, "{operation}: {answer}");
    answer
}

async fn put_agent(server: &process::Server, agent: &str, body: Value) {
    let url = server.url(&format!("/v1/agents/{agent}"));
    let reply = server.http.put(url).json(&body).send().await.unwrap();
    let status = reply.status();
    assert!(status.is_success(), "{status}: {}", reply.text().await.unwrap());
}

async fn dispatch_fork(peer: &NatsPeer, deadline_seconds: u64) {
    request(peer, "ada", "lease", json!({ "agent_turn_id": "t1" })).await;
    let task = |agent: &str, instruction: &str| json!({ "target_strategy": "new", "target_ref": agent, "instruction": instruction });
    let tasks = [
        task("adder", "sum up"),
        task("archivist", "fail"),
        task("victim", "work"),
        task("mute", "work"),
        task("speaker", "speak"),
    ];
    let args = json!({ "tasks": tasks, "deadline_seconds": deadline_seconds });
    let calls = json!([{ "tool_call_id": "f1", "tool_name": "fork_join", "arguments": args }]);
    let body = json!({ "agent_turn_id": "t1", "turn_epoch": 1, "step_id": "s1", "calls": calls });
    request(peer, "ada", "dispatch", body).await;
}

/// Defines the principal and its experts: two that workers drive, three in the loop.
async fn define_experts(server: &process::Server) {
    put_agent(server, "ada", json!({ "worker_target": "principals" })).await;
    for (agent, target) in [("adder", "first"), ("victim", "second")] {
        let profile = json!({ "instructions": "Help.", "tools": ["calculation.*"] });
        let body = json!({ "driver": "worker", "worker_target": target, "profile": profile });
        put_agent(server, agent, body).await;
    }
    for agent in ["archivist", "mute", "speaker"] {
        let profile =
            json!({ "instructions": format!("You are the {agent}."), "model": "scripted" });
        put_agent(server, agent, json!({ "driver": "loop", "profile": profile })).await;
    }
}

/// Starts a model that fails the archivist, never answers the mute, and answers the speaker.
async fn start_model() -> ScriptedModel {
    let script = |request: &RecordedRequest| {
        let first = request.messages()[0]["content"].as_str().unwrap_or_default().to_owned();
        match first {
            text if text.contains("archivist") => {
                let error = json!({ "error": { "message": "the archive is closed" } });
                ScriptedBehavior::Refuse(400, None, error)
            }
            text if text.contains("mute") => ScriptedBehavior::Stall(ScriptedAnswer::default(), 0),
            _ => text_reply("It is said."),
        }
    };
    ScriptedModel::start_with_script(script).await.unwrap()
}

/// Forks five experts, kills one of them and the server, and checks the partial result.
pub async fn check_joined_experts(nats: &Nats, store_url: Option<&str>) {
    let model = start_model().await;
    let mut server = process::Server::new()
        .with("NATS__URL", nats.url())
        .with("LLM__BASE_URL", &model.url)
        .with("LLM__MODEL", "scripted");
    if let Some(url) = store_url {
        server = server.with("STORE__URL", url);
    }
    server.start().await;
    let peer = nats.peer().await;
    define_experts(&server).await;
    let folder = tempfile::tempdir().unwrap();
    let _first = PythonWorker::start(nats, folder.path(), "first");
    let second = PythonWorker::start(nats, folder.path(), "second");
    dispatch_fork(&peer, 25).await;
    let begun = |agent: &str| folder.path().join(agent).exists();
    eventually("the victim to begin", PATIENCE, async || begun("victim").then_some(())).await;
    // A worker whose request loses its response waits for the end of its lease, which is later than
    // the deadline: the kill may not hit a request of the adder.
    eventually("the adder to end", PATIENCE, async || {
        let url = server.url("/v1/tool_calls?tool_name=agent.adder&status=SUCCEEDED");
        let listed: Value = server.http.get(url).send().await.unwrap().json().await.unwrap();
        (listed["tool_calls"].as_array().map_or(0, Vec::len) == 1).then_some(())
    })
    .await;
    drop(second);
    server.kill();
    server.start().await;
    let resumed = eventually("the result of the join", PATIENCE, async || {
        let body = json!({ "agent_turn_id": "t1", "turn_epoch": 1, "wait_ms": 5_000 });
        let answer = peer.request("agent.ada.resume", body).await;
        (answer["ok"] == true).then_some(answer)
    })
    .await;
    check_partial_result(&resumed);
    eventually("the end of every call", PATIENCE, async || {
        (count_open_calls(&server).await == 0).then_some(())
    })
    .await;
    let inbox = request(&peer, "ada", "inbox", json!({})).await;
    assert_eq!(inbox["items"], json!([]), "no second notice");
    server.stop().await;
}

fn check_partial_result(resumed: &Value) {
    let [result] = resumed["results"].as_array().unwrap().as_slice() else {
        panic!("one notice: {resumed}")
    };
    assert_eq!(result["status"], "partial", "{result}");
    let of = |n: usize| &result["result"]["results"][n];
    let success = json!("success");
    assert_eq!((&of(0)["status"], &of(0)["result"]["sum"]), (&success, &json!(42)), "{result}");
    assert_eq!(of(1)["status"], "failed", "{result}");
    assert!(of(1)["error"].as_str().unwrap().contains("the archive is closed"), "{result}");
    assert_eq!((&of(2)["status"], &of(3)["status"]), (&json!("timeout"), &json!("timeout")));
    assert_eq!(of(4)["status"], success, "{result}");
    assert!(of(4)["result"].to_string().contains("It is said."), "{result}");
}

async fn count_open_calls(server: &process::Server) -> usize {
    let mut open = 0;
    for status in ["PENDING", "RUNNING"] {
        let url = server.url(&format!("/v1/tool_calls?status={status}"));
        let listed: Value = server.http.get(url).send().await.unwrap().json().await.unwrap();
        open += listed["tool_calls"].as_array().map_or(0, Vec::len);
    }
    open
}

#[tokio::test(flavor = "multi_thread")]
async fn experts_in_the_loop_and_in_python_are_joined_while_the_server_is_killed() {
    let Some(nats) = Nats::start().await else { return };
    check_joined_experts(&nats, None).await;
}
