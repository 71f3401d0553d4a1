//! Tests of slices: every pointer, type and limit, and invalid queries.

use serde_json::{Value, json};

use super::*;

const PLENTY: usize = 100_000;

fn rows() -> Json {
    let rows: Vec<Value> = (0..250).map(|n| json!({ "id": n, "name": format!("n{n}") })).collect();
    let log: Vec<String> = (0..300).map(|n| format!("{n} line of the log")).collect();
    Json::from_value(
        &json!({ "rows": rows, "log": log.join("\n"), "a/b": { "~": 1.5 }, "n": null }),
    )
}

fn at(pointer: &str) -> SliceQuery {
    SliceQuery { pointer: pointer.into(), ..SliceQuery::default() }
}

fn value(piece: &Slice) -> Value {
    match &piece.content {
        SliceContent::Value(value) => value.to_value(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pointer_finds_any_part() {
    let data = rows();
    for (pointer, expected) in [
        ("/rows/10", json!({ "id": 10, "name": "n10" })),
        ("/rows/10/name", json!("n10")),
        ("/a~1b/~0", json!(1.5)),
        ("/n", Value::Null),
    ] {
        let piece = read_slice(&data, &at(pointer), PLENTY).unwrap();
        assert_eq!(value(&piece), expected, "{pointer}");
        assert_eq!(piece.next_offset, None);
    }
    // The text is returned as written, not serialized again.
    let data = Json::parse(r#"{"x": {"price": 1.10}}"#).unwrap();
    let piece = read_slice(&data, &at("/x"), PLENTY).unwrap();
    assert_eq!(piece.content, SliceContent::Value(Json::parse(r#"{"price":1.10}"#).unwrap()));
    let SliceContent::Value(text) = read_slice(&data, &at("/x/price"), PLENTY).unwrap().content
    else {
        panic!("a value")
    };
    assert_eq!(text.text(), "1.10");
}

#[test]
fn arrays_objects_and_texts_come_in_portions() {
    let data = rows();
    let part = SliceQuery { offset: 240, limit: Some(7), ..at("/rows") };
    let piece = read_slice(&data, &part, PLENTY).unwrap();
    assert_eq!((piece.total, piece.shown, piece.next_offset), (Some(250), 7, Some(247)));
    assert_eq!(value(&piece)[0]["id"], 240);
    let part = SliceQuery { offset: 247, ..part };
    let piece = read_slice(&data, &part, PLENTY).unwrap();
    assert_eq!((piece.shown, piece.next_offset, piece.truncated), (3, None, false));

    let piece =
        read_slice(&data, &SliceQuery { offset: 1, limit: Some(1), ..at("") }, PLENTY).unwrap();
    assert_eq!((piece.kind, piece.total, piece.next_offset), (JsonKind::Object, Some(4), Some(2)));
    assert_eq!(value(&piece).as_object().unwrap().len(), 1);

    let part = SliceQuery { offset: 298, ..at("/log") };
    let piece = read_slice(&data, &part, PLENTY).unwrap();
    assert_eq!((piece.kind, piece.total, piece.shown), (JsonKind::Text, Some(300), 2));
    assert_eq!(value(&piece), json!("298 line of the log\n299 line of the log"));

    let part = SliceQuery { offset: 9_999, ..at("/log") };
    let piece = read_slice(&data, &part, PLENTY).unwrap();
    assert_eq!((piece.shown, piece.next_offset, value(&piece)), (0, None, json!("")));
}

#[test]
fn portions_put_together_are_the_whole() {
    let data = rows();
    for (pointer, most_bytes) in [("/rows", 300), ("/log", 100), ("", PLENTY)] {
        let (mut offset, mut items, mut text, mut turns) = (0, 0, String::new(), 0);
        loop {
            let part = SliceQuery { offset, limit: Some(1_000), ..at(pointer) };
            let piece = read_slice(&data, &part, most_bytes).unwrap();
            match value(&piece) {
                Value::String(part) => text += &part,
                Value::Array(part) => items += part.len(),
                Value::Object(part) => items += part.len(),
                other => panic!("{other}"),
            }
            turns += 1;
            let Some(next) = piece.next_offset else { break };
            assert!(piece.truncated && next as u64 > offset);
            offset = next as u64;
        }
        let whole = if pointer.is_empty() {
            data.to_value()
        } else {
            data.to_value()[&pointer[1..]].clone()
        };
        match whole {
            Value::String(whole) => assert_eq!(text, whole),
            Value::Array(whole) => assert_eq!(items, whole.len()),
            other => assert_eq!(items, other.as_object().unwrap().len()),
        }
        assert!(turns > 3 || pointer.is_empty());
    }
}

#[test]
fn what_is_too_long_by_itself_shows_its_beginning_and_where_to_read_it() {
    let data = Json::from_value(&json!([1, "é".repeat(5_000), 3]));
    let piece = read_slice(&data, &SliceQuery { offset: 1, ..at("") }, 1_001).unwrap();
    let SliceContent::Prefix { text, pointer } = &piece.content else { panic!("{piece:?}") };
    assert!(text.len() <= 1_001 && pointer == "/1");
    assert_eq!((piece.truncated, piece.next_offset), (true, Some(2)));
    let inside = read_slice(&data, &at("/1"), 100_000).unwrap();
    assert_eq!(inside.total, Some(5), "a long line is several");
    let digits = Json::parse(&"7".repeat(300)).unwrap();
    let piece = read_slice(&digits, &at(""), 100).unwrap();
    assert!(matches!(piece.content, SliceContent::Prefix { .. }) && piece.truncated);
}

fn found(piece: &Slice) -> (Vec<(String, Option<usize>)>, usize) {
    match &piece.content {
        SliceContent::Matches { matches, matched } => {
            (matches.iter().map(|m| (m.pointer.clone(), m.line)).collect(), *matched)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn grep_gives_what_fits_and_where_it_is() {
    let data = rows();
    let grep = |pattern: &str| Some(pattern.to_owned());
    let piece =
        read_slice(&data, &SliceQuery { grep: grep("n24[0-2]"), ..at("/rows") }, PLENTY).unwrap();
    let expected = ["/rows/240", "/rows/241", "/rows/242"].map(|p| (p.to_owned(), None));
    assert_eq!(found(&piece), (expected.to_vec(), 3));
    assert_eq!((piece.total, piece.next_offset), (Some(250), None));

    // At the top level, only the matching rows and lines are returned.
    let piece =
        read_slice(&data, &SliceQuery { grep: grep("n123\"|^77 line"), ..at("") }, PLENTY).unwrap();
    let (mut places, matched) = found(&piece);
    places.sort();
    assert_eq!(places, [("/log".to_owned(), Some(77)), ("/rows/123".to_owned(), None)]);
    assert_eq!(matched, 2);

    let part = SliceQuery { grep: grep("line"), offset: 5, limit: Some(2), ..at("/log") };
    let piece = read_slice(&data, &part, PLENTY).unwrap();
    assert_eq!(found(&piece).0, [("/log".to_owned(), Some(5)), ("/log".to_owned(), Some(6))]);
    assert_eq!((found(&piece).1, piece.next_offset), (300, Some(7)));

    let piece = read_slice(&data, &SliceQuery { grep: grep("nowhere"), ..at("") }, PLENTY).unwrap();
    assert_eq!((found(&piece), piece.shown), ((vec![], 0), 0));
    let piece = read_slice(&data, &SliceQuery { grep: grep("^a/b$"), ..at("") }, PLENTY).unwrap();
    assert_eq!(found(&piece).0, [("/a~1b".to_owned(), None)], "by its key");
}

#[test]
fn what_is_wrong_is_named() {
    let data = rows();
    let ask = |part: SliceQuery| read_slice(&data, &part, PLENTY).unwrap_err();
    let refused = |part: SliceQuery, field: &str| {
        let fault = ask(part);
        assert_eq!(fault.code, Code::ValidationError, "{fault}");
        assert!(fault.message.contains(field), "{fault}");
        assert_eq!(fault.detail.unwrap()["field"], field);
    };
    refused(SliceQuery { limit: Some(0), ..SliceQuery::default() }, "limit");
    refused(SliceQuery { limit: Some(1_001), ..SliceQuery::default() }, "limit");
    refused(at("rows"), "pointer");
    refused(at("/~2"), "pointer");
    refused(SliceQuery { grep: Some("(".into()), ..SliceQuery::default() }, "grep");
    refused(SliceQuery { grep: Some("a{1000}{1000}".into()), ..SliceQuery::default() }, "grep");
    refused(SliceQuery { grep: Some("x".repeat(1_001)), ..SliceQuery::default() }, "grep");
}

#[test]
fn a_pointer_that_goes_astray_says_what_is_nearest() {
    let data = rows();
    for (pointer, nearest, says) in [
        ("/row", "", "4 keys"),
        ("/rows/250", "/rows", "250 items, 0 to 249"),
        ("/rows/01", "/rows", "array"),
        ("/rows/-1", "/rows", "array"),
        ("/rows/3/nam", "/rows/3", "\"name\""),
        ("/log/1", "/log", "has no parts"),
        ("/a~1b/x/y", "/a~1b", "\"~\""),
    ] {
        let fault = read_slice(&data, &at(pointer), PLENTY).unwrap_err();
        assert_eq!(fault.code, Code::NotFound);
        assert!(fault.message.contains(says), "{fault}");
        assert_eq!(fault.detail.unwrap()["nearest"], nearest);
    }
}
