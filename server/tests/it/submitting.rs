//! A call ends once: an equal report gets the same answer, a different one changes nothing.

use serde_json::{Value, json};
use toolcrib::{Engine, FnTool};

use crate::support::api::{message, offer};
use crate::support::{Api, Server};

async fn make_ended_call(body: Value) -> (Server, Api, String, Value) {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    api.submit(&id, body).await.is(200);
    let call = api.call(&id).await;
    (server, api, id, call)
}

#[tokio::test]
async fn submitting_the_same_success_again_returns_the_same_answer() {
    let body = json!({ "status": "SUCCEEDED", "result": { "a": 1, "b": [2] } });
    let (_server, api, id, call) = make_ended_call(body.clone()).await;
    let expected = json!({ "ok": true, "tool_call_id": id, "status": "SUCCEEDED" });
    assert_eq!(api.submit(&id, body).await.is(200), expected);
    let reformatted = "{\"status\":\"SUCCEEDED\", \"result\": {\"b\":[2],  \"a\":1}}";
    let answer = api.post_raw(&format!("/internal/tool_calls/{id}/submit"), reformatted).await;
    assert_eq!(answer.is(200), expected, "in any formatting");
    assert_eq!(api.call(&id).await, call);
    assert!(!api.history(&id).await.contains(&"tool.call.late".to_owned()));
}

#[tokio::test]
async fn submitting_the_same_failure_again_returns_the_same_answer() {
    let body = json!({ "status": "FAILED", "error": { "message": "no", "code": "RUNTIME_ERROR" } });
    let (_server, api, id, call) = make_ended_call(body.clone()).await;
    assert_eq!(api.submit(&id, body).await.is(200)["status"], "FAILED");
    assert_eq!(api.call(&id).await, call);
}

#[tokio::test]
async fn a_different_result_is_rejected_and_stored_as_an_event() {
    let (_server, api, id, call) =
        make_ended_call(json!({ "status": "SUCCEEDED", "result": 1 })).await;
    for (n, other) in [
        json!({ "status": "SUCCEEDED", "result": 2 }),
        json!({ "status": "FAILED", "error": "after all" }),
    ]
    .into_iter()
    .enumerate()
    {
        let error = api.submit(&id, other).await.refused(409, "CONFLICT");
        assert!(message(&error).contains("SUCCEEDED already"), "{error}");
        assert_eq!(error["detail"]["status"], "SUCCEEDED", "the current status");
        assert_eq!(error["detail"]["completed_at_ms"], call["completed_at_ms"]);
        let history = api.history(&id).await;
        let late = history.iter().filter(|name| *name == "tool.call.late").count();
        assert_eq!(late, n + 1, "{history:?}");
    }
    assert_eq!(api.call(&id).await, call);
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let late = events.wait_for("tool.call.late").await;
    assert_eq!(late.data["reported"], "SUCCEEDED");
    assert!(late.data["why"].as_str().unwrap().contains("SUCCEEDED"), "{late:?}");
}

#[tokio::test]
async fn a_result_after_the_timeout_is_a_conflict() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let body = json!({ "run_id": "run_1", "args": {}, "timeout_ms": 20 });
    let id = api.invoke_with("a.tool", body).await;
    let call = api.finished(&id).await;
    let late = api.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    assert_eq!(late.refused(409, "CONFLICT")["detail"]["status"], "TIMEOUT");
    assert_eq!(api.call(&id).await, call);
}

#[tokio::test]
async fn one_of_many_concurrent_results_is_accepted() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let answers = (0..20).map(|n| api.submit(&id, json!({ "status": "SUCCEEDED", "result": n })));
    let answers = futures::future::join_all(answers).await;
    let accepted: Vec<usize> = answers
        .iter()
        .enumerate()
        .filter(|(_, reply)| reply.status == 200)
        .map(|(n, _)| n)
        .collect();
    assert_eq!(accepted.len(), 1);
    assert_eq!(api.call(&id).await["result"], accepted[0]);
    assert!(answers.iter().all(|reply| reply.status == 200 || reply.status == 409));
}

#[tokio::test]
async fn every_json_value_is_a_valid_result() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for result in
        ["null", "false", "0", "1.10", "\"\"", "[]", "{\"z\":1,\"a\":1e300}", "\"\\u0000\""]
    {
        let id = api.invoke("a.tool", json!({})).await;
        let body = format!("{{\"status\":\"SUCCEEDED\",\"result\":{result}}}");
        api.post_raw(&format!("/internal/tool_calls/{id}/submit"), body).await;
        let text = api.get(&format!("/v1/tool_calls/{id}")).await.text;
        assert!(text.contains(&format!("\"result\":{result},")), "{result}: {text}");
    }
}

#[tokio::test]
async fn an_error_is_stored_as_reported() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for (error, code, expected) in [
        (json!("plain text"), "RUNTIME_ERROR", "plain text"),
        (
            json!({ "message": "with a code", "code": "UPSTREAM_UNAVAILABLE", "retryable": false }),
            "UPSTREAM_UNAVAILABLE",
            "with a code",
        ),
        (json!({ "message": "odd code", "code": "MADE_UP" }), "RUNTIME_ERROR", "odd code"),
        (json!({ "reason": 7 }), "RUNTIME_ERROR", "{\"reason\":7}"),
        (json!(null), "RUNTIME_ERROR", "did not say why"),
    ] {
        let id = api.invoke("a.tool", json!({})).await;
        api.fail(&id, error.clone()).await;
        let call = api.call(&id).await;
        assert_eq!(call["status"], "FAILED");
        assert_eq!(call["error"]["code"], code, "{error}");
        assert!(message(&call["error"]).contains(expected), "{error}: {call}");
    }
    let id = api.invoke("a.tool", json!({})).await;
    api.fail(&id, json!({ "message": "more", "detail": { "line": 7 } })).await;
    assert_eq!(api.call(&id).await["error"]["detail"], json!({ "line": 7 }));
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct NoArgs {}

fn panics(_: NoArgs) -> std::future::Ready<Result<i64, String>> {
    panic!("a tool fell over")
}

#[tokio::test]
async fn a_panic_in_a_tool_fails_only_its_call() {
    let later = |_: NoArgs| async {
        tokio::task::yield_now().await;
        let numbers: Vec<i64> = Vec::new();
        Ok::<i64, String>(*numbers.first().expect("a tool fell over later"))
    };
    let fine = |_: NoArgs| async { Ok::<i64, String>(42) };
    let engine = Engine::builder()
        .tool(FnTool::new("falls.over", "Panics at once", panics))
        .tool(FnTool::new("falls.later", "Panics after a while", later))
        .tool(FnTool::new("works.fine", "Answers", fine))
        .start()
        .await
        .unwrap();
    let server = Server::with_engine(engine).await;
    let api = server.api();
    for (tool, expected) in [("falls.over", "a tool fell over"), ("falls.later", "over later")] {
        let id = api.invoke(tool, json!({})).await;
        let call = api.finished(&id).await;
        assert_eq!(call["status"], "FAILED");
        assert_eq!(call["error"]["code"], "RUNTIME_ERROR");
        assert!(message(&call["error"]).contains(expected), "{call}");
        assert_eq!(call["outcome"]["metrics"]["attempts"], 1, "it may have taken effect");
    }
    let id = api.invoke("works.fine", json!({})).await;
    assert_eq!(api.finished(&id).await["result"], 42, "the server still works");
    assert_eq!(api.get("/healthz").await.text, "ok");
}

#[tokio::test]
async fn the_number_of_stored_late_events_is_limited() {
    let body = json!({ "status": "SUCCEEDED", "result": 0 });
    let (_server, api, id, call) = make_ended_call(body).await;
    for n in 1..=210 {
        let other = json!({ "status": "SUCCEEDED", "result": n });
        api.submit(&id, other).await.refused(409, "CONFLICT");
    }
    let late = api.history(&id).await.into_iter().filter(|kind| kind == "tool.call.late").count();
    assert_eq!(late, 200);
    assert_eq!(api.call(&id).await, call);
}
