//! Models that misbehave: retries, the status of the run, and its stored state.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply};

use super::{eval, question, run_to_end, start_with_model};

fn refuse(status: u16, retry_after: Option<&'static str>) -> ScriptedBehavior {
    ScriptedBehavior::Refuse(status, retry_after, json!({ "error": { "message": "not now" } }))
}

#[tokio::test]
async fn transient_model_errors_are_retried() {
    let truncated =
        ScriptedAnswer::text("").with_call("c1", "calculation__eval", r#"{"expression":"6*7"}"#);
    let (server, model) = start_with_model([
        refuse(429, Some("0")),
        refuse(503, None),
        // The fourth reply is truncated in its arguments and must not be executed.
        eval("c1", "6*7"),
        ScriptedBehavior::Disconnect(truncated, 3),
        text_reply("It is 42."),
    ])
    .await;
    let run = run_to_end(&server.api(), question("?")).await;
    assert_eq!(run["answer"], "It is 42.", "{run}");
    assert_eq!(model.requests().len(), 5);
    assert_eq!(run["call_count"], 1);
    assert_eq!(
        run["calls"].as_array().unwrap().len(),
        1,
        "no call of the truncated answer may run"
    );
}

#[tokio::test]
async fn a_run_fails_after_all_retries_and_can_be_resumed() {
    let (server, model) = start_with_model([
        eval("c1", "6*7"),
        refuse(500, None),
        refuse(500, None),
        refuse(500, None),
        text_reply("Here again: 42."),
    ])
    .await;
    let api = server.api();
    let failed = run_to_end(&api, question("?")).await;
    assert_eq!(failed["status"], "FAILED");
    assert_eq!(failed["error"]["code"], "UPSTREAM_UNAVAILABLE");
    assert_eq!(failed["messages"].as_array().unwrap().len(), 3, "all messages so far are stored");
    let id = failed["run_id"].as_str().unwrap();
    let resumed = api.post(&format!("/v1/runs/{id}/resume?wait_ms=30000"), json!({})).await;
    let resumed = resumed.is(200);
    assert_eq!(
        (&resumed["answer"], &resumed["call_count"]),
        (&json!("Here again: 42."), &json!(1))
    );
    assert_eq!(model.requests().len(), 5);
    api.post(&format!("/v1/runs/{id}/resume"), json!({})).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn an_unreachable_endpoint_or_unknown_model_fails_the_run() {
    let (server, _model) = start_with_model([]).await;
    let mut config = server.config.clone();
    config.llm.base_url = Some("http://127.0.0.1:9/v1".into());
    config.llm.other_models = false;
    let server = server.restart_with(config).await;
    for model in ["large-1", "nobody"] {
        let mut body = question("?");
        body["model"] = model.into();
        let failed = run_to_end(&server.api(), body).await;
        assert_eq!(failed["status"], "FAILED", "{failed}");
        assert_eq!(failed["error"]["code"], "UPSTREAM_UNAVAILABLE", "{failed}");
    }
}

#[tokio::test]
async fn invalid_tool_calls_are_reported_to_the_model() {
    let nonsense = ScriptedAnswer::text("I try.")
        .with_call("c1", "calculation__evil", "{}")
        .with_call("c2", "calculation__eval", r#"{"expression":"6*7""#)
        .with_call("c3", "calculation__eval", r#"{"expression":42}"#)
        .with_call("c4", "calculation__eval", r#"{"expression":"6*7"}"#)
        .with_call("c4", "calculation__eval", r#"{"expression":"1+1"}"#);
    let (server, model) =
        start_with_model([ScriptedBehavior::Reply(nonsense), text_reply("I see.")]).await;
    let run = run_to_end(&server.api(), question("?")).await;
    assert_eq!(run["answer"], "I see.");
    let requests = model.requests();
    let results: Vec<&Value> = requests[1].messages()[2..].iter().collect();
    let texts: Vec<&str> = results.iter().map(|one| one["content"].as_str().unwrap()).collect();
    assert!(texts[0].contains("TOOL_NOT_FOUND") && texts[0].contains("calculation__eval"));
    assert!(texts[1].contains("not JSON"), "{}", texts[1]);
    assert!(texts[2].contains("VALIDATION_ERROR"), "{}", texts[2]);
    assert!(texts[3].contains("42") && texts[4].contains('2'), "{texts:?}");
    let ids: std::collections::HashSet<&str> =
        results.iter().map(|one| one["tool_call_id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 5, "every call needs its own result");
}

#[tokio::test]
async fn an_endless_answer_fails_the_run() {
    let (server, _model) = start_with_model([ScriptedBehavior::Endless, text_reply("brief")]).await;
    let failed = run_to_end(&server.api(), question("?")).await;
    assert_eq!(failed["status"], "FAILED");
    assert_eq!(failed["error"]["code"], "UPSTREAM_UNAVAILABLE");
    let id = failed["run_id"].as_str().unwrap();
    let path = format!("/v1/runs/{id}/resume?wait_ms=30000");
    assert_eq!(server.api().post(&path, json!({})).await.is(200)["answer"], "brief");
}

#[tokio::test]
async fn limits_and_repeated_calls_end_with_a_final_answer() {
    let (server, model) =
        start_with_model([eval("c1", "1"), eval("c2", "2"), text_reply("Only so far.")]).await;
    let mut body = question("?");
    body["limits"] = json!({ "steps": 2 });
    let limited = run_to_end(&server.api(), body).await;
    assert_eq!(limited["status"], "SUCCEEDED");
    assert_eq!(
        (&limited["answer"], &limited["limit_reached"]),
        (&json!("Only so far."), &json!("steps"))
    );
    assert!(model.requests()[2].tool_names().is_empty(), "the last request is without tools");

    let again = (0..5).map(|_| eval("c", "6*7")).chain([text_reply("It stays 42.")]);
    let (server, _model) = start_with_model(again).await;
    let repeated = run_to_end(&server.api(), question("?")).await;
    assert_eq!(repeated["limit_reached"], "repeats");
    assert_eq!(repeated["call_count"], 3);
}

#[tokio::test]
async fn canceling_a_run_cancels_its_calls() {
    let (server, _model) = start_with_model([
        super::tool_call_reply("c1", "slow__tool", &json!({})),
        text_reply("over"),
    ])
    .await;
    let api = server.api();
    let tool = json!([{ "name": "slow.tool", "effect": "irreversible", "timeout_ms": 60_000 }]);
    api.register("c1", tool).await;
    let id = api.post("/v1/runs", question("?")).await.is(202)["run_id"].clone();
    let id = id.as_str().unwrap();
    let mut events = api.follow(&format!("/v1/runs/{id}/events"), None).await;
    let requested = events.wait_for("tool.call.requested").await;
    let canceled = api.post(&format!("/v1/runs/{id}/cancel"), json!({ "reason": "enough" })).await;
    assert_eq!(canceled.is(200)["status"], "CANCELED");
    events.wait_for("run.canceled").await;
    let ticket = requested.data["tool_call_id"].as_str().unwrap();
    let call = api.get(&format!("/v1/tool_calls/{ticket}?wait_ms=30000")).await.is(200);
    assert_eq!(call["status"], "CANCELED");
    // The run can be resumed; the model is sent the canceled call.
    let path = format!("/v1/runs/{id}/resume?wait_ms=30000");
    assert_eq!(api.post(&path, json!({})).await.is(200)["answer"], "over");
    api.post(&format!("/v1/runs/{id}/cancel"), json!({})).await.refused(409, "CONFLICT");
}
