//! A call ends once: an equal report gets the same answer, a different one changes nothing.

use serde_json::{Value, json};
use toolcrib::{Engine, FnTool};

use crate::support::api::{message, offer, offer_with};
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
        (json!(null), "RUNTIME_ERROR", "gave no reason"),
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

#[tokio::test]
async fn a_report_names_only_a_client_that_offers_the_tool() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    api.register("c2", json!([offer("b.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let submit = |client: &str| json!({ "status": "SUCCEEDED", "result": 1, "client_id": client });
    let error = api.submit(&id, submit("nobody")).await.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("\"nobody\" has not registered"), "{error}");
    let error = api.submit(&id, submit("c2")).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("\"c2\" does not offer \"a.tool\""), "{error}");
    let hint = error["detail"]["hint"].as_str().unwrap();
    assert!(hint.contains("register the tool"), "no rule is the cause: {hint}");
    let path = format!("/internal/tool_calls/{id}/progress");
    let progress = json!({ "percent": 5, "client_id": "nobody" });
    api.post(&path, progress).await.refused(404, "NOT_FOUND");
    assert_eq!(api.call(&id).await["status"], "PENDING", "nothing changed");
    api.submit(&id, submit("c1")).await.is(200);
    assert_eq!(api.call(&id).await["taken_by"], "c1");
    // The same report again has the same answer. Another client has none to give.
    api.submit(&id, submit("c1")).await.is(200);
    api.submit(&id, submit("nobody")).await.refused(404, "NOT_FOUND");
    // A result without a client id is accepted as before.
    let id = api.invoke("a.tool", json!({})).await;
    api.succeed(&id, json!(2)).await;
}

#[tokio::test]
async fn a_client_reports_a_call_it_took_after_it_withdrew_the_tool() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    api.poll("c1").await;
    api.delete("/internal/tools/a.tool?client_id=c1").await.is(204);
    let body = json!({ "status": "SUCCEEDED", "result": 1, "client_id": "c1" });
    api.submit(&id, body).await.is(200);
    assert_eq!(api.call(&id).await["result"], 1);
}

#[tokio::test]
async fn rejected_reports_and_cancels_name_their_reason() {
    let server = Server::start().await;
    let api = server.api();
    let retrying = json!({ "effect": "read",
        "policy": { "max_retries": 1, "backoff": { "initial_ms": 20_000, "jitter": 0 } } });
    api.register("c1", json!([offer_with("a.tool", retrying), offer("b.tool")])).await;
    let reason = |error: &Value| error["detail"]["reason"].as_str().unwrap().to_owned();
    let ack = |id: &str| format!("/internal/tool_calls/{id}/ack");
    let cancel = |id: &str| format!("/v1/tool_calls/{id}/cancel");
    // The call waits for its second attempt.
    let id = api.invoke("a.tool", json!({})).await;
    let failed = json!({ "message": "busy", "code": "UPSTREAM_UNAVAILABLE" });
    assert_eq!(api.fail(&id, failed).await["status"], "PENDING");
    let error = api.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    let error = error.refused(409, "CONFLICT");
    assert_eq!(reason(&error), "no_attempt_in_flight", "{error}");
    assert!(message(&error).contains("waits for its next attempt"), "{error}");
    // Another attempt is meant.
    let id = api.invoke("b.tool", json!({})).await;
    let late = json!({ "status": "SUCCEEDED", "result": 1, "attempt": 7 });
    let error = api.submit(&id, late).await.refused(409, "CONFLICT");
    assert_eq!(reason(&error), "other_attempt", "{error}");
    let text = message(&error);
    assert!(text.contains("attempt 7") && text.contains("attempt 1"), "{error}");
    let error = api.post(&ack(&id), json!({ "client_id": "c1", "attempt": 7 })).await;
    assert_eq!(reason(&error.refused(409, "CONFLICT")), "other_attempt");
    // The call has ended, and the response says how.
    api.fail(&id, json!("the disk is full")).await;
    for answer in [
        api.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await,
        api.post(&ack(&id), json!({ "client_id": "c1" })).await,
        api.post(&cancel(&id), json!({})).await,
    ] {
        let error = answer.refused(409, "CONFLICT");
        assert_eq!(reason(&error), "already_ended", "{error}");
        assert!(message(&error).contains("FAILED already: the disk is full"), "{error}");
        assert_eq!(error["detail"]["error"]["code"], "RUNTIME_ERROR", "{error}");
    }
}
