//! Tool calls in deltas, with the indexes, names and ids that real endpoints send: deltas of one
//! call are joined, and separate calls stay separate.

use serde_json::{Value, json};
use toolcrib::domain::model_reply::ToolCallRequest;
use toolcrib_bench::model::{ScriptedBehavior, ScriptedModel};

use super::*;

/// A stream of these deltas of calls, one event per list.
fn stream(deltas: &[Value]) -> ScriptedBehavior {
    let mut text = String::new();
    for calls in deltas {
        let chunk = json!({ "choices": [{ "index": 0, "delta": { "tool_calls": calls } }] });
        text.push_str(&format!("data: {chunk}\n\n"));
    }
    let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "tool_calls" }] });
    text.push_str(&format!("data: {end}\n\ndata: [DONE]\n\n"));
    ScriptedBehavior::Raw("text/event-stream", text.into_bytes())
}

/// Returns the assembled calls and the deltas that the model reported.
async fn collect_calls(deltas: &[Value]) -> (Vec<ToolCallRequest>, Vec<Delta>) {
    let scripted = ScriptedModel::start_with_replies([stream(deltas)]).await.unwrap();
    let (reply, seen) = request_reply(&openai(&scripted), &prompt()).await;
    (reply.unwrap().calls, seen)
}

/// Returns the name and arguments of each call.
fn names_and_arguments(calls: &[ToolCallRequest]) -> Vec<(&str, &str)> {
    calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

#[tokio::test]
async fn an_id_in_a_later_delta_belongs_to_its_call() {
    let (calls, deltas) = collect_calls(&[
        json!([{ "index": 0, "function": { "name": "w__slow", "arguments": "" } }]),
        json!([{ "index": 0, "id": "late_id", "function": { "arguments": "{\"key\":" } }]),
        json!([{ "index": 0, "id": "late_id", "function": { "arguments": "\"REAL\"}" } }]),
    ])
    .await;
    assert_eq!(names_and_arguments(&calls), [("w__slow", r#"{"key":"REAL"}"#)]);
    assert_eq!(calls[0].id, "late_id");
    let ids: Vec<String> = deltas
        .into_iter()
        .filter_map(|delta| match delta {
            Delta::Call { id, .. } => id,
            Delta::Text(_) => None,
        })
        .collect();
    assert_eq!(ids.last().map(String::as_str), Some("late_id"), "{ids:?}");
    // The same without an index.
    let (calls, _) = collect_calls(&[
        json!([{ "function": { "name": "w__slow" } }]),
        json!([{ "id": "late_id", "function": { "arguments": "{}" } }]),
    ])
    .await;
    assert_eq!(
        (names_and_arguments(&calls), calls[0].id.as_str()),
        (vec![("w__slow", "{}")], "late_id")
    );
}

#[tokio::test]
async fn whole_calls_with_equal_or_missing_ids_stay_separate() {
    let whole = |head: Value, arguments: &str| {
        let mut delta = head;
        delta["function"] = json!({ "name": "mail__send", "arguments": arguments });
        delta
    };
    let (one, two) = (r#"{"to":"a"}"#, r#"{"to":"b"}"#);
    let cases = [
        (
            "one delta, no number, no id",
            vec![json!([whole(json!({}), one), whole(json!({}), two)])],
        ),
        (
            "number 0, empty ids",
            vec![
                json!([whole(json!({ "index": 0, "id": "" }), one)]),
                json!([whole(json!({ "index": 0, "id": "" }), two)]),
            ],
        ),
        (
            "number 0, one id",
            vec![
                json!([whole(json!({ "index": 0, "id": "x" }), one)]),
                json!([whole(json!({ "index": 0, "id": "x" }), two)]),
            ],
        ),
        (
            "no number, one id",
            vec![
                json!([whole(json!({ "id": "x" }), one)]),
                json!([whole(json!({ "id": "x" }), two)]),
            ],
        ),
        (
            "the first without an id, the second with one",
            vec![
                json!([whole(json!({ "index": 0 }), one)]),
                json!([whole(json!({ "index": 0, "id": "x" }), two)]),
            ],
        ),
    ];
    for (case, deltas) in cases {
        let (calls, _) = collect_calls(&deltas).await;
        assert_eq!(
            names_and_arguments(&calls),
            [("mail__send", one), ("mail__send", two)],
            "{case}"
        );
    }
}

#[tokio::test]
async fn calls_without_arguments_are_distinguished_by_name() {
    let bare = |name: &str| json!([{ "index": 0, "id": "", "function": { "name": name } }]);
    let (calls, _) = collect_calls(&[bare("one"), bare("two")]).await;
    assert_eq!(names_and_arguments(&calls), [("one", ""), ("two", "")]);
}

#[tokio::test]
async fn deltas_that_repeat_the_name_are_one_call() {
    for id in ["x", ""] {
        let delta = |arguments: &str| {
            let function = json!({ "name": "mail__send", "arguments": arguments });
            json!([{ "index": 0, "id": id, "function": function }])
        };
        // A brace within a string does not end the arguments; the last delta is empty.
        let deltas = ["", "{\"to\":\"}", "\\\"{\",", "\"n\":{}", "}", ""].map(delta);
        let (calls, _) = collect_calls(&deltas).await;
        assert_eq!(
            names_and_arguments(&calls),
            [("mail__send", r#"{"to":"}\"{","n":{}}"#)],
            "id {id:?}"
        );
    }
}

#[tokio::test]
async fn interleaved_calls_are_distinguished_by_index() {
    let next = |index: u64, arguments: &str| json!({ "index": index, "function": { "arguments": arguments } });
    let head = |index: u64, name: &str| json!({ "index": index, "id": name, "function": { "name": name } });
    let (calls, _) = collect_calls(&[
        json!([head(0, "one"), head(1, "two")]),
        json!([next(1, "{\"b\""), next(0, "{\"a\"")]),
        json!([next(0, ":1}")]),
        json!([next(1, ":2}")]),
    ])
    .await;
    assert_eq!(names_and_arguments(&calls), [("one", r#"{"a":1}"#), ("two", r#"{"b":2}"#)]);
}

#[tokio::test]
async fn content_parts_are_joined_to_text() {
    let parts = json!([
        { "type": "text", "text": "It is " }, { "type": "image_url" }, { "type": "text", "text": "42." },
    ]);
    let whole = json!({ "choices": [{ "index": 0, "finish_reason": "stop",
        "message": { "role": "assistant", "content": parts } }] });
    let chunk = json!({ "choices": [{ "index": 0, "finish_reason": "stop",
        "delta": { "content": parts } }] });
    for reply_body in [
        ScriptedBehavior::Raw("application/json", whole.to_string().into_bytes()),
        ScriptedBehavior::Raw("text/event-stream", format!("data: {chunk}\n\n").into_bytes()),
    ] {
        let scripted = ScriptedModel::start_with_replies([reply_body]).await.unwrap();
        let (reply, deltas) = request_reply(&openai(&scripted), &prompt()).await;
        assert_eq!(
            (reply.unwrap().text, text_of(&deltas)),
            ("It is 42.".into(), "It is 42.".into())
        );
    }
}

#[tokio::test]
async fn a_byte_order_mark_before_a_stream_loses_no_event() {
    let chunk = |text: &str, end: Value| json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": end }] });
    let (first, last) = (chunk("It is ", Value::Null), chunk("42.", "stop".into()));
    let text = format!("\u{feff}data: {first}\n\ndata: {last}\n\n");
    let body = ScriptedBehavior::Raw("text/event-stream", text.into_bytes());
    let scripted = ScriptedModel::start_with_replies([body]).await.unwrap();
    assert_eq!(request_reply(&openai(&scripted), &prompt()).await.0.unwrap().text, "It is 42.");
}
