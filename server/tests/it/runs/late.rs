//! Tools that take long: the run goes on without them, sleeps, and is woken.

use serde_json::json;
use toolcrib_bench::model::{call, say};

use super::{question, site};

#[tokio::test]
async fn a_run_sleeps_until_a_late_result_comes_also_over_a_restart() {
    let (server, model) = site([
        call("c1", "report__make", &json!({})),
        say("It is being made."),
        say("The report is ready."),
    ])
    .await;
    let api = server.api();
    let tool = json!([{ "name": "report.make", "async": true, "timeout_ms": 60_000 }]);
    api.register("c1", tool).await;
    let id = api.post("/v1/runs", question("A report")).await.is(202)["run_id"].clone();
    let id = id.as_str().unwrap().to_owned();
    let mut events = api.follow(&format!("/v1/runs/{id}/events"), None).await;
    let waiting = events.named("run.waiting").await;
    let ticket = waiting.data["calls"][0]["tool_call_id"].as_str().unwrap().to_owned();
    let run = api.get(&format!("/v1/runs/{id}")).await.is(200);
    assert_eq!(run["status"], "WAITING");
    assert_eq!(run["waiting_for"][0]["tool_call_id"], ticket.as_str());
    let server = server.restart().await;
    let api = server.api();
    api.succeed(&ticket, json!({ "pages": 7 })).await;
    let run = api.get(&format!("/v1/runs/{id}?wait_ms=30000")).await.is(200);
    assert_eq!(run["answer"], "The report is ready.", "{run}");
    let asked = model.asked();
    assert_eq!(asked.len(), 3, "nothing was asked twice");
    assert!(
        asked[2].last().contains("called as c1, has come:\n{\"pages\":7}"),
        "{}",
        asked[2].last()
    );
}
