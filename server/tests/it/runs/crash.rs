//! The real binary is killed during a run: the run resumes from its last stored step.

use serde_json::{Value, json};
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply,
};

use crate::support::process::{PATIENCE, Server, eventually, text};

async fn wait_for_run(server: &Server, id: &str) -> Value {
    let url = server.url(&format!("/v1/runs/{id}?wait_ms=20000"));
    server.http.get(url).send().await.unwrap().json().await.unwrap()
}

async fn start_run(server: &Server) -> String {
    let body = json!({ "messages": [{ "role": "user", "content": "Pay, then report" }] });
    let request = server.http.post(server.url("/v1/runs")).json(&body);
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    text(&answer, "run_id")
}

fn server_with(model: &ScriptedModel) -> Server {
    Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_killed_during_a_tool_call_resumes_without_repeats() {
    // Two calls in one answer: at the kill one has ended and one is leased to its client.
    let both = ScriptedAnswer::text("").with_call("c1", "bank__pay", r#"{"amount":7}"#).with_call(
        "c2",
        "bank__report",
        "{}",
    );
    let model = ScriptedModel::start_with_replies([
        ScriptedBehavior::Reply(both),
        text_reply("Paid and reported."),
    ])
    .await
    .unwrap();
    let mut server = server_with(&model);
    server.start().await;
    let tools = json!([
        { "name": "bank.pay", "timeout_ms": 60_000 }, { "name": "bank.report", "timeout_ms": 60_000 },
    ]);
    let registration = json!({ "client_id": "bank", "tools": tools });
    server.post("/internal/tools/register", registration).await;
    let id = start_run(&server).await;
    let paid = server.poll_requests("bank", 1).await.remove(0);
    assert_eq!(paid["tool_name"], "bank.pay");
    let done = json!({ "status": "SUCCEEDED", "result": { "receipt": 1 } });
    server.submit(&text(&paid, "tool_call_id"), done).await;
    // The second call is dispatched only when the end of the first is stored.
    let report = server.poll_requests("bank", 1).await.remove(0);
    assert_eq!(report["tool_name"], "bank.report");
    server.kill();

    server.start().await;
    let done = json!({ "status": "SUCCEEDED", "result": { "pages": 2 } });
    server.submit(&text(&report, "tool_call_id"), done).await;
    let run = wait_for_run(&server, &id).await;
    assert_eq!(run["answer"], "Paid and reported.", "{run}\n{}", server.log());
    assert_eq!(run["calls"].as_array().unwrap().len(), 2, "no call may be repeated: {run}");
    let steps: Vec<&Value> =
        run["steps"].as_array().unwrap().iter().map(|step| &step["step"]).collect();
    assert_eq!(steps, [1, 2], "each step must be listed once: {run}");
    let requests = model.requests();
    assert_eq!(requests.len(), 2, "a stored answer must not be requested again");
    let messages = requests[1].messages();
    assert_eq!(messages[2]["content"], "{\"receipt\":1}");
    assert_eq!(messages[3]["content"], "{\"pages\":2}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_killed_during_a_model_request_repeats_only_that() {
    let request_count = |model: &ScriptedModel| model.requests().len();
    let first =
        ScriptedAnswer::text("").with_call("c1", "calculation__eval", r#"{"expression":"6*7"}"#);
    let model = ScriptedModel::start_with_replies([
        ScriptedBehavior::Reply(first),
        // The server is killed during this answer.
        ScriptedBehavior::Stall(ScriptedAnswer::text("It is for"), 2),
        text_reply("It is 42."),
    ])
    .await
    .unwrap();
    let mut server = server_with(&model);
    server.start().await;
    let id = start_run(&server).await;
    eventually("the second request", PATIENCE, async || (request_count(&model) == 2).then_some(()))
        .await;
    server.kill();

    server.start().await;
    let run = wait_for_run(&server, &id).await;
    assert_eq!(run["answer"], "It is 42.", "{run}\n{}", server.log());
    let requests = model.requests();
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[1].body["messages"], requests[2].body["messages"], "the same request");
    assert_eq!(run["call_count"], 1);
    server.stop().await;
}

const RUNS: usize = 12;
const STEPS: usize = 6;
const KILLS: usize = 3;

/// Replies with one call per step, each with another sum, and finally with their number.
fn counting_reply(request: &RecordedRequest) -> ScriptedBehavior {
    let results = request.messages().iter().filter(|message| message["role"] == "tool").count();
    if results == STEPS {
        return text_reply(format!("{results} sums"));
    }
    let sum = format!("{{\"expression\":\"{results}+1\"}}");
    ScriptedBehavior::Reply(ScriptedAnswer::text("").with_call(
        &format!("c{results}"),
        "calculation__eval",
        sum,
    ))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_killed_repeatedly_make_every_call_once() {
    let model = ScriptedModel::start_with_script(counting_reply).await.unwrap();
    let mut server = server_with(&model);
    server.start().await;
    let mut ids = Vec::new();
    for _ in 0..RUNS {
        ids.push(start_run(&server).await);
    }
    for n in 1..=KILLS {
        // Kill at an arbitrary point of each run.
        let enough = n * RUNS * STEPS / (KILLS + 1);
        eventually("requests", PATIENCE, async || (model.requests().len() >= enough).then_some(()))
            .await;
        server.kill();
        server.start().await;
    }
    for id in &ids {
        let run = wait_for_run(&server, id).await;
        assert_eq!(run["answer"], format!("{STEPS} sums"), "{run}");
        let calls = run["calls"].as_array().unwrap();
        let ids: std::collections::BTreeSet<&str> =
            calls.iter().map(|call| call["call_id"].as_str().unwrap()).collect();
        assert_eq!((calls.len(), ids.len()), (STEPS, STEPS), "each call once: {run}");
        let results: Vec<&Value> = run["messages"].as_array().unwrap().iter().collect();
        let results = results.iter().filter(|message| message["role"] == "tool");
        for (n, result) in results.enumerate() {
            let sum = format!("{{\"result\":{0},\"text\":\"{0}\"}}", n + 1);
            assert_eq!(result["content"], sum);
        }
    }
    // Each kill costs a run at most the answer in flight.
    let max = RUNS * (STEPS + 1 + KILLS);
    assert!(model.requests().len() <= max, "{} of {max}", model.requests().len());
    server.stop().await;
}
