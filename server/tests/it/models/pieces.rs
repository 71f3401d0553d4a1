//! Calls in pieces, as real endpoints number them, name them and give them ids: what is one call
//! stays one, and what are two stay two.

use serde_json::{Value, json};
use toolcrib::ports::model::ToolCallRequest;
use toolcrib_bench::model::{ScriptedBehavior, ScriptedModel};

use super::*;

/// A stream of these pieces of calls, each list in an event of its own.
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

/// The calls that come of it, and what was told on the way.
async fn calls(deltas: &[Value]) -> (Vec<ToolCallRequest>, Vec<Delta>) {
    let scripted = ScriptedModel::start_with_replies([stream(deltas)]).await.unwrap();
    let (reply, told) = asked(&openai(&scripted), &prompt()).await;
    (reply.unwrap().calls, told)
}

/// Names and arguments.
fn of(calls: &[ToolCallRequest]) -> Vec<(&str, &str)> {
    calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

#[tokio::test]
async fn an_id_that_comes_after_the_first_piece_is_the_id_of_that_call() {
    let (made, told) = calls(&[
        json!([{ "index": 0, "function": { "name": "w__slow", "arguments": "" } }]),
        json!([{ "index": 0, "id": "late_id", "function": { "arguments": "{\"key\":" } }]),
        json!([{ "index": 0, "id": "late_id", "function": { "arguments": "\"REAL\"}" } }]),
    ])
    .await;
    assert_eq!(of(&made), [("w__slow", r#"{"key":"REAL"}"#)]);
    assert_eq!(made[0].id, "late_id");
    let ids: Vec<String> = told
        .into_iter()
        .filter_map(|piece| match piece {
            Delta::Call { id, .. } => id,
            Delta::Text(_) => None,
        })
        .collect();
    assert_eq!(ids.last().map(String::as_str), Some("late_id"), "{ids:?}");
    // Without a number it is the same.
    let (made, _) = calls(&[
        json!([{ "function": { "name": "w__slow" } }]),
        json!([{ "id": "late_id", "function": { "arguments": "{}" } }]),
    ])
    .await;
    assert_eq!((of(&made), made[0].id.as_str()), (vec![("w__slow", "{}")], "late_id"));
}

#[tokio::test]
async fn two_whole_calls_with_one_id_or_none_stay_two() {
    let whole = |head: Value, arguments: &str| {
        let mut piece = head;
        piece["function"] = json!({ "name": "mail__send", "arguments": arguments });
        piece
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
    for (what, deltas) in cases {
        let (made, _) = calls(&deltas).await;
        assert_eq!(of(&made), [("mail__send", one), ("mail__send", two)], "{what}");
    }
}

#[tokio::test]
async fn calls_without_arguments_are_told_apart_by_their_names() {
    let bare = |name: &str| json!([{ "index": 0, "id": "", "function": { "name": name } }]);
    let (made, _) = calls(&[bare("one"), bare("two")]).await;
    assert_eq!(of(&made), [("one", ""), ("two", "")]);
}

#[tokio::test]
async fn pieces_that_repeat_the_name_are_one_call() {
    for id in ["x", ""] {
        let piece = |arguments: &str| {
            let function = json!({ "name": "mail__send", "arguments": arguments });
            json!([{ "index": 0, "id": id, "function": function }])
        };
        // A brace within a text ends nothing; the last piece says nothing more.
        let pieces = ["", "{\"to\":\"}", "\\\"{\",", "\"n\":{}", "}", ""].map(piece);
        let (made, _) = calls(&pieces).await;
        assert_eq!(of(&made), [("mail__send", r#"{"to":"}\"{","n":{}}"#)], "id {id:?}");
    }
}

#[tokio::test]
async fn calls_that_come_side_by_side_are_told_apart_by_their_numbers() {
    let piece = |index: u64, arguments: &str| json!({ "index": index, "function": { "arguments": arguments } });
    let head = |index: u64, name: &str| json!({ "index": index, "id": name, "function": { "name": name } });
    let (made, _) = calls(&[
        json!([head(0, "one"), head(1, "two")]),
        json!([piece(1, "{\"b\""), piece(0, "{\"a\"")]),
        json!([piece(0, ":1}")]),
        json!([piece(1, ":2}")]),
    ])
    .await;
    assert_eq!(of(&made), [("one", r#"{"a":1}"#), ("two", r#"{"b":2}"#)]);
}

#[tokio::test]
async fn text_in_parts_is_text() {
    let parts = json!([
        { "type": "text", "text": "It is " }, { "type": "image_url" }, { "type": "text", "text": "42." },
    ]);
    let whole = json!({ "choices": [{ "index": 0, "finish_reason": "stop",
        "message": { "role": "assistant", "content": parts } }] });
    let chunk = json!({ "choices": [{ "index": 0, "finish_reason": "stop",
        "delta": { "content": parts } }] });
    for turn in [
        ScriptedBehavior::Raw("application/json", whole.to_string().into_bytes()),
        ScriptedBehavior::Raw("text/event-stream", format!("data: {chunk}\n\n").into_bytes()),
    ] {
        let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
        let (reply, told) = asked(&openai(&scripted), &prompt()).await;
        assert_eq!((reply.unwrap().text, text_of(&told)), ("It is 42.".into(), "It is 42.".into()));
    }
}

#[tokio::test]
async fn a_mark_of_the_byte_order_before_a_stream_costs_no_event() {
    let chunk = |text: &str, end: Value| json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": end }] });
    let (first, last) = (chunk("It is ", Value::Null), chunk("42.", "stop".into()));
    let text = format!("\u{feff}data: {first}\n\ndata: {last}\n\n");
    let turn = ScriptedBehavior::Raw("text/event-stream", text.into_bytes());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    assert_eq!(asked(&openai(&scripted), &prompt()).await.0.unwrap().text, "It is 42.");
}
