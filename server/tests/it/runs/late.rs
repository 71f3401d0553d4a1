//! Late results: the run continues without them, waits, and is woken by each one.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply, tool_call_reply};

use super::{question, start_with_model};

#[tokio::test]
async fn a_run_waits_for_a_late_result_across_a_restart() {
    let (server, model) = start_with_model([
        tool_call_reply("c1", "report__make", &json!({})),
        text_reply("It is being made."),
        text_reply("The report is ready."),
    ])
    .await;
    let api = server.api();
    let tool = json!([{ "name": "report.make", "async": true, "timeout_ms": 60_000 }]);
    api.register("c1", tool).await;
    let id = api.post("/v1/runs", question("A report")).await.is(202)["run_id"].clone();
    let id = id.as_str().unwrap().to_owned();
    let mut events = api.follow(&format!("/v1/runs/{id}/events"), None).await;
    let waiting = events.wait_for("run.waiting").await;
    let ticket = waiting.data["calls"][0]["tool_call_id"].as_str().unwrap().to_owned();
    let run = api.get(&format!("/v1/runs/{id}")).await.is(200);
    assert_eq!(run["status"], "WAITING");
    assert_eq!(run["waiting_for"][0]["tool_call_id"], ticket.as_str());
    let server = server.restart().await;
    let api = server.api();
    api.succeed(&ticket, json!({ "pages": 7 })).await;
    let run = api.get(&format!("/v1/runs/{id}?wait_ms=30000")).await.is(200);
    assert_eq!(run["answer"], "The report is ready.", "{run}");
    let requests = model.requests();
    assert_eq!(requests.len(), 3, "no request may be repeated");
    assert!(
        requests[2].last_content().contains("called as c1, has come:\n{\"pages\":7}"),
        "{}",
        requests[2].last_content()
    );
}

#[tokio::test]
async fn serial_calls_behind_a_late_call_are_late_too() {
    let answer = ScriptedAnswer::text("").with_call("c1", "slow__write", "{}").with_call(
        "c2",
        "slow__write",
        "{}",
    );
    let answer = answer.with_call("c3", "calculation__eval", "{\"expression\":\"6*7\"}");
    let replies = ["I wait.", "One is there.", "Two are there.", "All are there."].map(text_reply);
    let (server, model) =
        start_with_model([ScriptedBehavior::Reply(answer)].into_iter().chain(replies)).await;
    let api = server.api();
    api.register("c1", json!([{ "name": "slow.write", "timeout_ms": 60_000 }])).await;
    let mut body = question("Write");
    body["policy"] = json!({ "mode": "serial", "wait_ms": 50 });
    let id = api.post("/v1/runs", body).await.is(202)["run_id"].clone();
    let path = format!("/v1/runs/{}", id.as_str().unwrap());
    let mut events = api.follow(&format!("{path}/events"), None).await;
    let waiting = events.wait_for("run.waiting").await;
    let ticket = |n: usize| waiting.data["calls"][n]["tool_call_id"].as_str().unwrap().to_owned();
    let hold = |call: &Value| call["hold_details"]["after"].as_str().map(str::to_owned);
    assert_eq!(hold(&api.call(&ticket(1)).await), Some(ticket(0)));
    assert_eq!(hold(&api.call(&ticket(2)).await), Some(ticket(1)));
    let server = server.restart().await;
    let api = server.api();
    for n in [0, 1] {
        while api.call(&ticket(n)).await["hold"] != "parked" {}
        api.succeed(&ticket(n), json!({ "written": n })).await;
    }
    let run = api.get(&format!("{path}?wait_ms=30000")).await.is(200);
    assert_eq!(run["status"], "SUCCEEDED", "{run}");
    assert_eq!(api.call(&ticket(2)).await["result"]["result"], 42);
    let bodies: String = model.requests().iter().map(|request| request.body.to_string()).collect();
    for late_message in
        ["called as c1, has come", "called as c2, has come", "called as c3, has come"]
    {
        assert!(bodies.contains(late_message), "{late_message}: {bodies}");
    }
}

#[tokio::test]
async fn a_run_past_its_time_limit_starts_no_more_calls() {
    let answer = ScriptedAnswer::text("").with_call("c1", "slow__write", "{}").with_call(
        "c2",
        "slow__write",
        "{}",
    );
    // The model request uses the same time limit. If it used all of it, retry with a longer limit.
    for time_ms in [300, 1_200, 4_800, 19_200] {
        let replies = [ScriptedBehavior::Reply(answer.clone()), text_reply("Not all was done.")];
        let (server, model) =
            start_with_model(replies.into_iter().chain([text_reply("Nothing was done.")])).await;
        let api = server.api();
        api.register("c1", json!([{ "name": "slow.write", "timeout_ms": 60_000 }])).await;
        let mut body = question("Write");
        body["policy"] = json!({ "mode": "serial" });
        body["limits"] = json!({ "time_ms": time_ms });
        body["wait_ms"] = json!(30_000);
        let run = api.post("/v1/runs", body).await.is(200);
        assert_eq!(run["limit_reached"], "time", "{run}");
        if run["calls"] == json!([]) {
            continue;
        }
        assert_eq!(run["answer"], "Not all was done.");
        assert_eq!(run["calls"].as_array().unwrap().len(), 1, "{run}");
        assert!(
            model.requests()[1].body.to_string().contains("not started: the wait ended"),
            "the model must learn of the skipped call"
        );
        return;
    }
    panic!("the time limit never allowed the first call");
}
