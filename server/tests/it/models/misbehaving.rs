//! Endpoints that refuse, break, fall silent, or never stop.

use std::time::Duration;

use serde_json::json;
use toolcrib::Code;
use toolcrib::ports::model::{FinishReason, ModelError};
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

async fn silence_of(turn: ScriptedBehavior, patience: ModelResponseLimits) -> ModelError {
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let model = hasty(&scripted, patience);
    let prompt = prompt();
    soon("the end of the wait", asked(&model, &prompt)).await.0.unwrap_err()
}

#[tokio::test]
async fn a_stream_that_is_cut_in_the_arguments_is_no_answer() {
    // The connection breaks, or the stream ends as if that were all: at every event.
    let events = {
        let scripted = ScriptedModel::start_with_replies([ScriptedBehavior::Reply(long_call())])
            .await
            .unwrap();
        let (reply, told) = asked(&openai(&scripted), &prompt()).await;
        assert_eq!(reply.unwrap().calls.len(), 1);
        told.len()
    };
    for after in 1..=events {
        for turn in [
            ScriptedBehavior::Disconnect(long_call(), after),
            ScriptedBehavior::EndEarly(long_call(), after),
        ] {
            let silence = silence_of(turn, ModelResponseLimits::default()).await;
            assert!(silence.is_transient, "after {after} events: {silence}");
            assert_eq!(silence.fault.code, Code::UpstreamUnavailable);
        }
    }
    for after in 1..8 {
        let scripted =
            ScriptedModel::start_with_replies([ScriptedBehavior::Disconnect(long_call(), after)])
                .await
                .unwrap();
        let silence = asked(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
        assert!(silence.is_transient, "after {after} events: {silence}");
    }
}

#[tokio::test]
async fn what_was_said_to_its_end_counts_though_the_connection_breaks_then() {
    let answer = ScriptedAnswer { chunk_chars: 100, ..ScriptedAnswer::text("All of it.") };
    // The role, the text, the reason for the end; then the usage would come.
    let scripted =
        ScriptedModel::start_with_replies([ScriptedBehavior::Disconnect(answer, 3)]).await.unwrap();
    let reply = asked(&openai(&scripted), &prompt()).await.0.unwrap();
    assert_eq!((reply.text.as_str(), reply.finish_reason), ("All of it.", FinishReason::Stop));
}

#[tokio::test]
async fn refusals_say_whether_and_when_to_come_again() {
    let error = |code: &str| json!({ "error": { "message": "No.", "type": "t", "code": code } });
    let asked = async |status, after, code| {
        silence_of(
            ScriptedBehavior::Refuse(status, after, error(code)),
            ModelResponseLimits::default(),
        )
        .await
    };
    let limited = asked(429, Some("7"), "rate_limit_exceeded").await;
    assert!(limited.is_transient);
    assert_eq!(limited.retry_after, Some(Duration::from_secs(7)));
    assert!(limited.fault.message.contains("answered 429: No."), "{limited}");
    let exact = asked(429, Some("1.5"), "rate_limit_exceeded").await;
    assert!(
        exact.retry_after.is_some_and(|wait| wait >= Duration::from_millis(1_500)),
        "{exact:?}"
    );
    for odd in ["-1.5", "1e400", "NaN", "soon"] {
        let odd = asked(429, Some(odd), "rate_limit_exceeded").await;
        assert!(odd.is_transient && odd.retry_after.is_none(), "{odd:?}");
    }
    for status in [408, 500, 502, 503, 529] {
        let silence = asked(status, None, "x").await;
        assert!(silence.is_transient && silence.retry_after.is_none(), "{status}: {silence}");
    }
    for status in [400, 401, 403, 404, 422] {
        assert!(!asked(status, None, "x").await.is_transient, "{status}");
    }
    // Nothing was paid for; that does not pass by itself.
    assert!(!asked(429, None, "insufficient_quota").await.is_transient);
    let detail = asked(404, None, "model_not_found").await.fault.detail.unwrap();
    assert_eq!(detail, json!({ "http_status": 404, "type": "t", "code": "model_not_found" }));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let turn = ScriptedBehavior::Refuse(307, None, json!({}));
    assert!(!silence_of(turn, ModelResponseLimits::default()).await.is_transient);
}

#[tokio::test]
async fn a_model_that_says_nothing_is_given_up() {
    let idle = ModelResponseLimits { idle: SHORT, ..ModelResponseLimits::default() };
    let never = ScriptedBehavior::Reply(
        ScriptedAnswer::text("late").with_delay(Duration::from_secs(3_600)),
    );
    for turn in
        [never, ScriptedBehavior::Stall(long_call(), 0), ScriptedBehavior::Stall(long_call(), 4)]
    {
        let silence = silence_of(turn, idle).await;
        assert!(silence.is_transient, "{silence}");
        assert!(silence.fault.message.contains("said nothing for 100 ms"), "{silence}");
    }
}

#[tokio::test]
async fn a_model_that_never_stops_is_cut_off_by_time_and_by_size() {
    let whole = ModelResponseLimits {
        total: SHORT,
        max_bytes: usize::MAX,
        ..ModelResponseLimits::default()
    };
    let silence = silence_of(ScriptedBehavior::Endless, whole).await;
    assert!(silence.fault.message.contains("was not done after 100 ms"), "{silence}");
    let bytes = ModelResponseLimits { max_bytes: 1 << 20, ..ModelResponseLimits::default() };
    let silence = silence_of(ScriptedBehavior::Endless, bytes).await;
    assert!(!silence.is_transient, "the next would be as long");
    assert_eq!(silence.fault.code, Code::PayloadTooLarge);
    // All at once, without a stream, is no way around it.
    let huge = ScriptedBehavior::Raw("application/json", vec![b' '; 100 << 20]);
    assert_eq!(silence_of(huge, bytes).await.fault.code, Code::PayloadTooLarge);
}

#[tokio::test]
async fn what_is_not_the_protocol_is_said_so() {
    for (kind, text) in [
        ("text/html", "<html>Please log in</html>"),
        ("application/json", "[1, 2]"),
        ("text/event-stream", "data: {\"choices\": [\n\n"),
        ("text/event-stream", "data: 7\n\ndata: [DONE]\n\n"),
        ("text/event-stream", ""),
        ("application/json", ""),
    ] {
        let silence =
            silence_of(ScriptedBehavior::Raw(kind, text.into()), ModelResponseLimits::default())
                .await;
        assert!(silence.is_transient, "{text}: {silence}");
        assert!(!silence.fault.message.contains("log in"), "{silence}");
    }
}

#[tokio::test]
async fn an_error_in_the_stream_ends_it() {
    let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hel\"}}]}\n\n\
                data: {\"error\":{\"message\":\"overloaded\",\"type\":\"server_error\"}}\n\n";
    let silence = silence_of(
        ScriptedBehavior::Raw("text/event-stream", text.into()),
        ModelResponseLimits::default(),
    )
    .await;
    assert!(
        silence.is_transient && silence.fault.message.contains("gave up: overloaded"),
        "{silence}"
    );
    let text = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\
                \"message\":\"Overloaded\"}}\n\n";
    let turn = ScriptedBehavior::Raw("text/event-stream", text.into());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let silence = asked(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
    assert!(silence.is_transient && silence.fault.message.contains("Overloaded"), "{silence}");
}

#[tokio::test]
async fn odd_streams_of_real_endpoints_are_understood() {
    // Every call has the number 0, as some do it; no [DONE] at the end; comments between.
    let text = ": alive\n\ndata: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\
        \"id\":\"a\",\"function\":{\"name\":\"one\",\"arguments\":\"{\\\"x\\\":\"}}]}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"\",\
        \"function\":{\"arguments\":\"1}\"}}]}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"b\",\
        \"function\":{\"name\":\"two\",\"arguments\":\"{}\"}}]},\"finish_reason\":\"stop\"}]}\n\n";
    let turn = ScriptedBehavior::Raw("text/event-stream; charset=utf-8", text.into());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let reply = asked(&openai(&scripted), &prompt()).await.0.unwrap();
    let calls: Vec<(&str, &str)> =
        reply.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(calls, [("one", "{\"x\":1}"), ("two", "{}")]);
    assert_eq!(reply.finish_reason, FinishReason::ToolCalls);
}

#[tokio::test]
async fn an_endpoint_that_is_down_is_said_with_its_address() {
    let mut at = {
        let scripted = ScriptedModel::start_with_replies([text_reply("x")]).await.unwrap();
        endpoint(&scripted, ModelApi::OpenAi)
    };
    // Nobody listens on port 1.
    at.base_url = "http://127.0.0.1:1/v1?secret=abc".into();
    let silence = asked(&OpenAiModel::new(at), &prompt()).await.0.unwrap_err();
    assert!(silence.is_transient);
    assert!(silence.fault.message.contains("127.0.0.1:1"), "{silence}");
    assert!(!silence.fault.message.contains("abc"), "{silence}");
}
