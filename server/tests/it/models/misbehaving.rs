//! Endpoints that refuse, disconnect, stall, or never stop.

use std::time::Duration;

use serde_json::json;
use toolcrib::Code;
use toolcrib::domain::model_reply::FinishReason;
use toolcrib::ports::model::ModelError;
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply};
use toolcrib_sources::models::{ModelApi, ModelResponseLimits, OpenAiModel};

use super::*;
use crate::support::soon;

fn long_call() -> ScriptedAnswer {
    ScriptedAnswer::text("One moment.").with_call(
        "call_1",
        "mail__send",
        r#"{"to": "everybody@example.com"}"#,
    )
}

async fn request_failure(behavior: ScriptedBehavior, limits: ModelResponseLimits) -> ModelError {
    let scripted = ScriptedModel::start_with_replies([behavior]).await.unwrap();
    let model = openai_with_limits(&scripted, limits);
    let prompt = prompt();
    soon("the end of the wait", request_reply(&model, &prompt)).await.0.unwrap_err()
}

#[tokio::test]
async fn a_stream_truncated_in_the_arguments_is_an_error() {
    // After every event the connection breaks or the stream ends early.
    let events = {
        let scripted = ScriptedModel::start_with_replies([ScriptedBehavior::Reply(long_call())])
            .await
            .unwrap();
        let (reply, deltas) = request_reply(&openai(&scripted), &prompt()).await;
        assert_eq!(reply.unwrap().calls.len(), 1);
        deltas.len()
    };
    for after in 1..=events {
        for behavior in [
            ScriptedBehavior::Disconnect(long_call(), after),
            ScriptedBehavior::EndEarly(long_call(), after),
        ] {
            let failure = request_failure(behavior, ModelResponseLimits::default()).await;
            assert!(failure.is_transient, "after {after} events: {failure}");
            assert_eq!(failure.fault.code, Code::UpstreamUnavailable);
        }
    }
    for after in 1..8 {
        let scripted =
            ScriptedModel::start_with_replies([ScriptedBehavior::Disconnect(long_call(), after)])
                .await
                .unwrap();
        let failure = request_reply(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
        assert!(failure.is_transient, "after {after} events: {failure}");
    }
}

#[tokio::test]
async fn a_disconnect_after_the_finish_reason_keeps_the_answer() {
    let answer = ScriptedAnswer { chunk_chars: 100, ..ScriptedAnswer::text("All of it.") };
    // The role, the text and the finish reason arrive; the usage is missing.
    let scripted =
        ScriptedModel::start_with_replies([ScriptedBehavior::Disconnect(answer, 3)]).await.unwrap();
    let reply = request_reply(&openai(&scripted), &prompt()).await.0.unwrap();
    assert_eq!((reply.text.as_str(), reply.finish_reason), ("All of it.", FinishReason::Stop));
}

#[tokio::test]
async fn refusals_say_if_and_when_to_retry() {
    let error = |code: &str| json!({ "error": { "message": "No.", "type": "t", "code": code } });
    let refused_with = async |status, after, code| {
        request_failure(
            ScriptedBehavior::Refuse(status, after, error(code)),
            ModelResponseLimits::default(),
        )
        .await
    };
    let limited = refused_with(429, Some("7"), "rate_limit_exceeded").await;
    assert!(limited.is_transient);
    assert_eq!(limited.retry_after, Some(Duration::from_secs(7)));
    assert!(limited.fault.message.contains("answered 429: No."), "{limited}");
    let exact = refused_with(429, Some("1.5"), "rate_limit_exceeded").await;
    assert!(
        exact.retry_after.is_some_and(|wait| wait >= Duration::from_millis(1_500)),
        "{exact:?}"
    );
    for odd in ["-1.5", "1e400", "NaN", "soon"] {
        let odd = refused_with(429, Some(odd), "rate_limit_exceeded").await;
        assert!(odd.is_transient && odd.retry_after.is_none(), "{odd:?}");
    }
    for status in [408, 500, 502, 503, 529] {
        let failure = refused_with(status, None, "x").await;
        assert!(failure.is_transient && failure.retry_after.is_none(), "{status}: {failure}");
    }
    for status in [400, 401, 403, 404, 422] {
        assert!(!refused_with(status, None, "x").await.is_transient, "{status}");
    }
    // An exhausted quota does not recover on its own.
    assert!(!refused_with(429, None, "insufficient_quota").await.is_transient);
    let detail = refused_with(404, None, "model_not_found").await.fault.detail.unwrap();
    assert_eq!(detail, json!({ "http_status": 404, "type": "t", "code": "model_not_found" }));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let turn = ScriptedBehavior::Refuse(307, None, json!({}));
    assert!(!request_failure(turn, ModelResponseLimits::default()).await.is_transient);
}

#[tokio::test]
async fn a_silent_model_times_out() {
    let idle = ModelResponseLimits { idle: SHORT, ..ModelResponseLimits::default() };
    let never = ScriptedBehavior::Reply(
        ScriptedAnswer::text("late").with_delay(Duration::from_secs(3_600)),
    );
    for turn in
        [never, ScriptedBehavior::Stall(long_call(), 0), ScriptedBehavior::Stall(long_call(), 4)]
    {
        let failure = request_failure(turn, idle).await;
        assert!(failure.is_transient, "{failure}");
        assert!(failure.fault.message.contains("sent nothing for 100 ms"), "{failure}");
    }
}

#[tokio::test]
async fn an_endless_answer_is_limited_by_time_and_size() {
    let whole = ModelResponseLimits {
        total: SHORT,
        max_bytes: usize::MAX,
        ..ModelResponseLimits::default()
    };
    let failure = request_failure(ScriptedBehavior::Endless, whole).await;
    assert!(failure.fault.message.contains("did not finish within 100 ms"), "{failure}");
    let bytes = ModelResponseLimits { max_bytes: 1 << 20, ..ModelResponseLimits::default() };
    let failure = request_failure(ScriptedBehavior::Endless, bytes).await;
    assert!(!failure.is_transient, "a retry would be as long");
    assert_eq!(failure.fault.code, Code::PayloadTooLarge);
    // The limit also applies to a response without streaming.
    let huge = ScriptedBehavior::Raw("application/json", vec![b' '; 100 << 20]);
    assert_eq!(request_failure(huge, bytes).await.fault.code, Code::PayloadTooLarge);
}

#[tokio::test]
async fn responses_outside_the_protocol_are_transient_errors() {
    for (kind, text) in [
        ("text/html", "<html>Please log in</html>"),
        ("application/json", "[1, 2]"),
        ("text/event-stream", "data: {\"choices\": [\n\n"),
        ("text/event-stream", "data: 7\n\ndata: [DONE]\n\n"),
        ("text/event-stream", ""),
        ("application/json", ""),
    ] {
        let failure = request_failure(
            ScriptedBehavior::Raw(kind, text.into()),
            ModelResponseLimits::default(),
        )
        .await;
        assert!(failure.is_transient, "{text}: {failure}");
        assert!(!failure.fault.message.contains("log in"), "{failure}");
    }
}

#[tokio::test]
async fn an_error_in_the_stream_ends_it() {
    let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hel\"}}]}\n\n\
                data: {\"error\":{\"message\":\"overloaded\",\"type\":\"server_error\"}}\n\n";
    let failure = request_failure(
        ScriptedBehavior::Raw("text/event-stream", text.into()),
        ModelResponseLimits::default(),
    )
    .await;
    assert!(
        failure.is_transient && failure.fault.message.contains("stopped with an error: overloaded"),
        "{failure}"
    );
    let text = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\
                \"message\":\"Overloaded\"}}\n\n";
    let turn = ScriptedBehavior::Raw("text/event-stream", text.into());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let failure = request_reply(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
    assert!(failure.is_transient && failure.fault.message.contains("Overloaded"), "{failure}");
}

#[tokio::test]
async fn nonstandard_streams_of_real_endpoints_are_parsed() {
    // Every call has index 0, there are comments, and [DONE] is missing.
    let text = ": alive\n\ndata: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\
        \"id\":\"a\",\"function\":{\"name\":\"one\",\"arguments\":\"{\\\"x\\\":\"}}]}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"\",\
        \"function\":{\"arguments\":\"1}\"}}]}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"b\",\
        \"function\":{\"name\":\"two\",\"arguments\":\"{}\"}}]},\"finish_reason\":\"stop\"}]}\n\n";
    let turn = ScriptedBehavior::Raw("text/event-stream; charset=utf-8", text.into());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let reply = request_reply(&openai(&scripted), &prompt()).await.0.unwrap();
    let calls: Vec<(&str, &str)> =
        reply.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(calls, [("one", "{\"x\":1}"), ("two", "{}")]);
    assert_eq!(reply.finish_reason, FinishReason::ToolCalls);
}

#[tokio::test]
async fn an_unreachable_endpoint_is_reported_with_its_address() {
    let mut unreachable = {
        let scripted = ScriptedModel::start_with_replies([text_reply("x")]).await.unwrap();
        endpoint(&scripted, ModelApi::OpenAi)
    };
    // Nothing listens on port 1.
    unreachable.base_url = "http://127.0.0.1:1/v1?secret=abc".into();
    let failure = request_reply(&OpenAiModel::new(unreachable), &prompt()).await.0.unwrap_err();
    assert!(failure.is_transient);
    assert!(failure.fault.message.contains("127.0.0.1:1"), "{failure}");
    assert!(!failure.fault.message.contains("abc"), "{failure}");
}
