//! Endpoints that refuse, break, fall silent, or never stop.

use std::time::Duration;

use serde_json::json;
use toolcrib::Code;
use toolcrib::model::{Silence, Stopped};
use toolcrib_bench::model::{Answer, Scripted, Turn, say};
use toolcrib_server::models::{Kind, OpenAi, Patience};

use super::*;
use crate::support::soon;

fn long_call() -> Answer {
    Answer::text("One moment.").call("call_1", "mail__send", r#"{"to": "everybody@example.com"}"#)
}

async fn silence_of(turn: Turn, patience: Patience) -> Silence {
    let scripted = Scripted::saying([turn]).await.unwrap();
    let model = hasty(&scripted, patience);
    let prompt = prompt();
    soon("the end of the wait", asked(&model, &prompt)).await.0.unwrap_err()
}

#[tokio::test]
async fn a_stream_that_is_cut_in_the_arguments_is_no_answer() {
    // The connection breaks, or the stream ends as if that were all: at every event.
    let events = {
        let scripted = Scripted::saying([Turn::Say(long_call())]).await.unwrap();
        let (reply, told) = asked(&openai(&scripted), &prompt()).await;
        assert_eq!(reply.unwrap().calls.len(), 1);
        told.len()
    };
    for after in 1..=events {
        for turn in [Turn::Cut(long_call(), after), Turn::End(long_call(), after)] {
            let silence = silence_of(turn, Patience::default()).await;
            assert!(silence.passing, "after {after} events: {silence}");
            assert_eq!(silence.fault.code, Code::UpstreamUnavailable);
        }
    }
    for after in 1..8 {
        let scripted = Scripted::saying([Turn::Cut(long_call(), after)]).await.unwrap();
        let silence = asked(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
        assert!(silence.passing, "after {after} events: {silence}");
    }
}

#[tokio::test]
async fn what_was_said_to_its_end_counts_though_the_connection_breaks_then() {
    let answer = Answer { piece: 100, ..Answer::text("All of it.") };
    // The role, the text, the reason for the end; then the usage would come.
    let scripted = Scripted::saying([Turn::Cut(answer, 3)]).await.unwrap();
    let reply = asked(&openai(&scripted), &prompt()).await.0.unwrap();
    assert_eq!((reply.text.as_str(), reply.stopped), ("All of it.", Stopped::Stop));
}

#[tokio::test]
async fn refusals_say_whether_and_when_to_come_again() {
    let error = |code: &str| json!({ "error": { "message": "No.", "type": "t", "code": code } });
    let asked = async |status, after, code| {
        silence_of(Turn::Refuse(status, after, error(code)), Patience::default()).await
    };
    let limited = asked(429, Some("7"), "rate_limit_exceeded").await;
    assert!(limited.passing);
    assert_eq!(limited.retry_after, Some(Duration::from_secs(7)));
    assert!(limited.fault.message.contains("answered 429: No."), "{limited}");
    let exact = asked(429, Some("1.5"), "rate_limit_exceeded").await;
    assert!(
        exact.retry_after.is_some_and(|wait| wait >= Duration::from_millis(1_500)),
        "{exact:?}"
    );
    for odd in ["-1.5", "1e400", "NaN", "soon"] {
        let odd = asked(429, Some(odd), "rate_limit_exceeded").await;
        assert!(odd.passing && odd.retry_after.is_none(), "{odd:?}");
    }
    for status in [408, 500, 502, 503, 529] {
        let silence = asked(status, None, "x").await;
        assert!(silence.passing && silence.retry_after.is_none(), "{status}: {silence}");
    }
    for status in [400, 401, 403, 404, 422] {
        assert!(!asked(status, None, "x").await.passing, "{status}");
    }
    // Nothing was paid for; that does not pass by itself.
    assert!(!asked(429, None, "insufficient_quota").await.passing);
    let detail = asked(404, None, "model_not_found").await.fault.detail.unwrap();
    assert_eq!(detail, json!({ "http_status": 404, "type": "t", "code": "model_not_found" }));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let turn = Turn::Refuse(307, None, json!({}));
    assert!(!silence_of(turn, Patience::default()).await.passing);
}

#[tokio::test]
async fn a_model_that_says_nothing_is_given_up() {
    let idle = Patience { idle: SHORT, ..Patience::default() };
    let never = Turn::Say(Answer::text("late").after(Duration::from_secs(3_600)));
    for turn in [never, Turn::Stall(long_call(), 0), Turn::Stall(long_call(), 4)] {
        let silence = silence_of(turn, idle).await;
        assert!(silence.passing, "{silence}");
        assert!(silence.fault.message.contains("said nothing for 100 ms"), "{silence}");
    }
}

#[tokio::test]
async fn a_model_that_never_stops_is_cut_off_by_time_and_by_size() {
    let whole = Patience { whole: SHORT, bytes: usize::MAX, ..Patience::default() };
    let silence = silence_of(Turn::Endless, whole).await;
    assert!(silence.fault.message.contains("was not done after 100 ms"), "{silence}");
    let bytes = Patience { bytes: 1 << 20, ..Patience::default() };
    let silence = silence_of(Turn::Endless, bytes).await;
    assert!(!silence.passing, "the next would be as long");
    assert_eq!(silence.fault.code, Code::PayloadTooLarge);
    // All at once, without a stream, is no way around it.
    let huge = Turn::Raw("application/json", vec![b' '; 100 << 20]);
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
        let silence = silence_of(Turn::Raw(kind, text.into()), Patience::default()).await;
        assert!(silence.passing, "{text}: {silence}");
        assert!(!silence.fault.message.contains("log in"), "{silence}");
    }
}

#[tokio::test]
async fn an_error_in_the_stream_ends_it() {
    let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hel\"}}]}\n\n\
                data: {\"error\":{\"message\":\"overloaded\",\"type\":\"server_error\"}}\n\n";
    let silence =
        silence_of(Turn::Raw("text/event-stream", text.into()), Patience::default()).await;
    assert!(silence.passing && silence.fault.message.contains("gave up: overloaded"), "{silence}");
    let text = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\
                \"message\":\"Overloaded\"}}\n\n";
    let turn = Turn::Raw("text/event-stream", text.into());
    let scripted = Scripted::saying([turn]).await.unwrap();
    let silence = asked(&anthropic(&scripted), &prompt()).await.0.unwrap_err();
    assert!(silence.passing && silence.fault.message.contains("Overloaded"), "{silence}");
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
    let turn = Turn::Raw("text/event-stream; charset=utf-8", text.into());
    let scripted = Scripted::saying([turn]).await.unwrap();
    let reply = asked(&openai(&scripted), &prompt()).await.0.unwrap();
    let calls: Vec<(&str, &str)> =
        reply.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(calls, [("one", "{\"x\":1}"), ("two", "{}")]);
    assert_eq!(reply.stopped, Stopped::ToolCalls);
}

#[tokio::test]
async fn an_endpoint_that_is_down_is_said_with_its_address() {
    let mut at = {
        let scripted = Scripted::saying([say("x")]).await.unwrap();
        endpoint(&scripted, Kind::OpenAi)
    };
    // Nobody listens on port 1.
    at.base_url = "http://127.0.0.1:1/v1?secret=abc".into();
    let silence = asked(&OpenAi::at(at), &prompt()).await.0.unwrap_err();
    assert!(silence.passing);
    assert!(silence.fault.message.contains("127.0.0.1:1"), "{silence}");
    assert!(!silence.fault.message.contains("abc"), "{silence}");
}
