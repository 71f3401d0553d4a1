//! Tests of slices: every pointer, type and limit, and invalid queries.

use serde_json::{Value, json};

use super::*;
use crate::domain::fault::Code;

const AMPLE: usize = 100_000;

fn rows() -> Json {
    let rows: Vec<Value> = (0..250).map(|n| json!({ "id": n, "name": format!("n{n}") })).collect();
    let log: Vec<String> = (0..300).map(|n| format!("{n} line of the log")).collect();
    Json::from_value(
        &json!({ "rows": rows, "log": log.join("\n"), "a/b": { "~": 1.5 }, "n": null }),
    )
}

fn query_at(pointer: &str) -> SliceQuery {
    SliceQuery { pointer: pointer.into(), ..SliceQuery::default() }
}

fn value(slice: &Slice) -> Value {
    match &slice.content {
        SliceContent::Value(value) => value.to_value(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pointer_selects_any_part_of_a_result() {
    let data = rows();
    for (pointer, expected) in [
        ("/rows/10", json!({ "id": 10, "name": "n10" })),
        ("/rows/10/name", json!("n10")),
        ("/a~1b/~0", json!(1.5)),
        ("/n", Value::Null),
    ] {
        let slice = read_slice(&data, &query_at(pointer), AMPLE).unwrap();
        assert_eq!(value(&slice), expected, "{pointer}");
        assert_eq!(slice.next_offset, None);
    }
    // The text is returned as written, not serialized again.
    let data = Json::parse(r#"{"x": {"price": 1.10}}"#).unwrap();
    let slice = read_slice(&data, &query_at("/x"), AMPLE).unwrap();
    assert_eq!(slice.content, SliceContent::Value(Json::parse(r#"{"price":1.10}"#).unwrap()));
    let SliceContent::Value(text) =
        read_slice(&data, &query_at("/x/price"), AMPLE).unwrap().content
    else {
        panic!("a value")
    };
    assert_eq!(text.text(), "1.10");
}

#[test]
fn arrays_objects_and_texts_are_read_in_slices() {
    let data = rows();
    let query = SliceQuery { offset: 240, limit: Some(7), ..query_at("/rows") };
    let slice = read_slice(&data, &query, AMPLE).unwrap();
    assert_eq!((slice.total, slice.shown, slice.next_offset), (Some(250), 7, Some(247)));
    assert_eq!(value(&slice)[0]["id"], 240);
    let query = SliceQuery { offset: 247, ..query };
    let slice = read_slice(&data, &query, AMPLE).unwrap();
    assert_eq!((slice.shown, slice.next_offset, slice.truncated), (3, None, false));

    let slice = read_slice(&data, &SliceQuery { offset: 1, limit: Some(1), ..query_at("") }, AMPLE)
        .unwrap();
    assert_eq!((slice.kind, slice.total, slice.next_offset), (JsonKind::Object, Some(4), Some(2)));
    assert_eq!(value(&slice).as_object().unwrap().len(), 1);

    let query = SliceQuery { offset: 298, ..query_at("/log") };
    let slice = read_slice(&data, &query, AMPLE).unwrap();
    assert_eq!((slice.kind, slice.total, slice.shown), (JsonKind::Text, Some(300), 2));
    assert_eq!(value(&slice), json!("298 line of the log\n299 line of the log"));

    let query = SliceQuery { offset: 9_999, ..query_at("/log") };
    let slice = read_slice(&data, &query, AMPLE).unwrap();
    assert_eq!((slice.shown, slice.next_offset, value(&slice)), (0, None, json!("")));
}

#[test]
fn consecutive_slices_cover_the_whole_value() {
    let data = rows();
    for (pointer, max_bytes) in [("/rows", 300), ("/log", 100), ("", AMPLE)] {
        let (mut offset, mut items, mut text, mut turns) = (0, 0, String::new(), 0);
        loop {
            let query = SliceQuery { offset, limit: Some(1_000), ..query_at(pointer) };
            let slice = read_slice(&data, &query, max_bytes).unwrap();
            match value(&slice) {
                Value::String(lines) => text += &lines,
                Value::Array(list) => items += list.len(),
                Value::Object(members) => items += members.len(),
                other => panic!("{other}"),
            }
            turns += 1;
            let Some(next) = slice.next_offset else { break };
            assert!(slice.truncated && next as u64 > offset);
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
fn an_overlong_item_is_shown_as_a_prefix_with_its_pointer() {
    let data = Json::from_value(&json!([1, "é".repeat(5_000), 3]));
    let slice = read_slice(&data, &SliceQuery { offset: 1, ..query_at("") }, 1_001).unwrap();
    let SliceContent::Prefix { text, pointer } = &slice.content else { panic!("{slice:?}") };
    assert!(text.len() <= 1_001 && pointer == "/1");
    assert_eq!((slice.truncated, slice.next_offset), (true, Some(2)));
    let inside = read_slice(&data, &query_at("/1"), 100_000).unwrap();
    assert_eq!(inside.total, Some(5), "a long line is split");
    let digits = Json::parse(&"7".repeat(300)).unwrap();
    let slice = read_slice(&digits, &query_at(""), 100).unwrap();
    assert!(matches!(slice.content, SliceContent::Prefix { .. }) && slice.truncated);
}

fn found(slice: &Slice) -> (Vec<(String, Option<usize>)>, usize) {
    match &slice.content {
        SliceContent::Matches { matches, matched } => {
            (matches.iter().map(|m| (m.pointer.clone(), m.line)).collect(), *matched)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn grep_returns_matches_with_their_location() {
    let data = rows();
    let grep = |pattern: &str| Some(pattern.to_owned());
    let slice =
        read_slice(&data, &SliceQuery { grep: grep("n24[0-2]"), ..query_at("/rows") }, AMPLE)
            .unwrap();
    let expected = ["/rows/240", "/rows/241", "/rows/242"].map(|p| (p.to_owned(), None));
    assert_eq!(found(&slice), (expected.to_vec(), 3));
    assert_eq!((slice.total, slice.next_offset), (Some(250), None));

    // At the top level, only the matching rows and lines are returned.
    let slice =
        read_slice(&data, &SliceQuery { grep: grep("n123\"|^77 line"), ..query_at("") }, AMPLE)
            .unwrap();
    let (mut pointers, matched) = found(&slice);
    pointers.sort();
    assert_eq!(pointers, [("/log".to_owned(), Some(77)), ("/rows/123".to_owned(), None)]);
    assert_eq!(matched, 2);

    let query = SliceQuery { grep: grep("line"), offset: 5, limit: Some(2), ..query_at("/log") };
    let slice = read_slice(&data, &query, AMPLE).unwrap();
    assert_eq!(found(&slice).0, [("/log".to_owned(), Some(5)), ("/log".to_owned(), Some(6))]);
    assert_eq!((found(&slice).1, slice.next_offset), (300, Some(7)));

    let slice =
        read_slice(&data, &SliceQuery { grep: grep("nowhere"), ..query_at("") }, AMPLE).unwrap();
    assert_eq!((found(&slice), slice.shown), ((vec![], 0), 0));
    let slice =
        read_slice(&data, &SliceQuery { grep: grep("^a/b$"), ..query_at("") }, AMPLE).unwrap();
    assert_eq!(found(&slice).0, [("/a~1b".to_owned(), None)], "matched by its key");
}

#[test]
fn invalid_queries_are_refused_with_the_field() {
    let data = rows();
    let slice_error = |query: SliceQuery| read_slice(&data, &query, AMPLE).unwrap_err();
    let assert_refused = |query: SliceQuery, field: &str| {
        let fault = slice_error(query);
        assert_eq!(fault.code, Code::ValidationError, "{fault}");
        assert!(fault.message.contains(field), "{fault}");
        assert_eq!(fault.detail.unwrap()["field"], field);
    };
    assert_refused(SliceQuery { limit: Some(0), ..SliceQuery::default() }, "limit");
    assert_refused(SliceQuery { limit: Some(1_001), ..SliceQuery::default() }, "limit");
    assert_refused(query_at("rows"), "pointer");
    assert_refused(query_at("/~2"), "pointer");
    assert_refused(SliceQuery { grep: Some("(".into()), ..SliceQuery::default() }, "grep");
    assert_refused(
        SliceQuery { grep: Some("a{1000}{1000}".into()), ..SliceQuery::default() },
        "grep",
    );
    assert_refused(SliceQuery { grep: Some("x".repeat(1_001)), ..SliceQuery::default() }, "grep");
}

#[test]
fn an_unresolved_pointer_reports_the_nearest_existing_one() {
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
        let fault = read_slice(&data, &query_at(pointer), AMPLE).unwrap_err();
        assert_eq!(fault.code, Code::NotFound);
        assert!(fault.message.contains(says), "{fault}");
        assert_eq!(fault.detail.unwrap()["nearest"], nearest);
    }
}

fn row_query(
    conditions: Value,
    select: &[&str],
    aggregates: &[(&str, &str)],
    by: &[&str],
) -> RowQuery {
    let mut query = RowQuery::default();
    query.add_conditions(conditions.as_object().unwrap()).unwrap();
    let strings = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    (query.select, query.group_by) = (strings(select), strings(by));
    let aggregate = |(operation, column): &(&str, &str)| {
        let column = Some((*column).to_owned());
        Aggregate::new(AggregateOperation::parse(operation).unwrap(), column).unwrap()
    };
    query.aggregates = aggregates.iter().map(aggregate).collect();
    query
}

#[track_caller]
fn query(data: &Value, pointer: &str, rows: RowQuery) -> (Value, Vec<usize>, usize, String) {
    let query = SliceQuery { rows, ..query_at(pointer) };
    let slice = read_slice(&Json::from_value(data), &query, AMPLE).unwrap();
    match slice.content {
        SliceContent::Rows { value, row_numbers, matched } => {
            (value.to_value(), row_numbers, matched, value.text().to_owned())
        }
        other => panic!("{other:?}"),
    }
}

fn invoices() -> Vec<Value> {
    let row = |n: usize| {
        let city = ["Berlin", "Oslo", "Rom"][n % 3];
        let tag = format!("t{n}");
        json!({ "id": n, "city": city, "amount": format!("{n}.10"),
            "paid": n.is_multiple_of(4), "to": { "zip": format!("{:05}", n) }, "tags": ["a", tag] })
    };
    (0..400).map(row).collect()
}

#[test]
fn rows_are_filtered_and_selected() {
    let data = json!({ "invoices": invoices(), "page": 1 });
    let by_city = json!({ "city": "Oslo", "id": { "gt": 380, "lt": 390 } });
    let (value, numbers, matched, _) =
        query(&data, "/invoices", row_query(by_city, &["id", "to.zip"], &[], &[]));
    assert_eq!(
        value,
        json!([{ "id": 382, "to.zip": "00382" }, { "id": 385, "to.zip": "00385" },
        { "id": 388, "to.zip": "00388" }])
    );
    assert_eq!((numbers, matched), (vec![382, 385, 388], 3));
    // The largest table is found without its pointer, and the answer names it.
    let tagged = row_query(json!({ "tags": { "contains": "t77" } }), &[], &[], &[]);
    let slice =
        read_slice(&Json::from_value(&data), &SliceQuery { rows: tagged, ..query_at("") }, AMPLE);
    let slice = slice.unwrap();
    assert_eq!((slice.pointer.as_str(), slice.total, slice.shown), ("/invoices", Some(400), 1));
    let (value, ..) = query(&data, "", row_query(json!({ "amount": 12.1 }), &["id"], &[], &[]));
    assert_eq!(value, json!([{ "id": 12 }]), "a number in a text is compared as a number");
    let (value, ..) =
        query(&data, "", row_query(json!({ "paid": true, "id": { "lt": 5 } }), &["id"], &[], &[]));
    assert_eq!(value, json!([{ "id": 0 }, { "id": 4 }]));
}

#[test]
fn rows_are_aggregated_exactly_and_by_group() {
    let data = json!(invoices());
    let figures = [("count", "*"), ("sum", "amount"), ("min", "id"), ("max", "id"), ("avg", "id")];
    let (_, _, matched, text) = query(&data, "", row_query(json!({}), &[], &figures, &[]));
    assert_eq!(
        text,
        r#"{"count":400,"sum(amount)":79840.00,"min(id)":0,"max(id)":399,"avg(id)":199.5}"#
    );
    assert_eq!(matched, 400);
    let late = json!({ "id": { "gte": 100 } });
    let (value, ..) =
        query(&data, "", row_query(late, &[], &[("count", "*"), ("max", "id")], &["city"]));
    assert_eq!(
        value,
        json!([{ "city": "Oslo", "count": 100, "max(id)": 397 },
        { "city": "Rom", "count": 100, "max(id)": 398 },
            { "city": "Berlin", "count": 100, "max(id)": 399 }])
    );
    let (value, ..) =
        query(&data, "", row_query(json!({ "id": 1_000 }), &[], &[("sum", "id")], &[]));
    assert_eq!(value, json!({ "sum(id)": 0 }));
}

#[test]
fn rows_of_texts_are_queried_like_any_other() {
    let csv: String = (0..300).map(|n| format!("{n},\"Name, {n}\",{}\n", n % 7)).collect();
    let csv = json!({ "content": [{ "type": "text", "text": format!("id,name,score\n{csv}") }] });
    let (value, ..) =
        query(&csv, "", row_query(json!({ "score": 6, "id": { "lt": 14 } }), &[], &[], &[]));
    assert_eq!(
        value,
        json!([{ "id": 6, "name": "Name, 6", "score": 6 },
        { "id": 13, "name": "Name, 13", "score": 6 }])
    );
    let text = json!({ "rows": invoices() }).to_string();
    let inner = json!({ "content": [{ "type": "text", "text": text }] });
    let (value, ..) = query(&inner, "", row_query(json!({}), &[], &[("max", "id")], &[]));
    assert_eq!(value, json!({ "max(id)": 399 }));
    // A pointer continues inside of the text.
    let slice =
        read_slice(&Json::from_value(&inner), &query_at("/content/0/text/rows/7/city"), AMPLE);
    assert_eq!(super::tests::value(&slice.unwrap()), json!("Oslo"));
}

#[test]
fn a_query_that_cannot_be_answered_says_why() {
    let data = Json::from_value(&json!(invoices()));
    let refusal = |rows: RowQuery| {
        read_slice(&data, &SliceQuery { rows, ..query_at("") }, AMPLE).unwrap_err().message
    };
    let message = refusal(row_query(json!({ "town": "Oslo" }), &[], &[], &[]));
    assert!(message.contains("\"town\"") && message.contains("city"), "{message}");
    let message = refusal(row_query(json!({}), &["id"], &[("count", "*")], &[]));
    assert!(message.contains("select"), "{message}");
    let mut query = RowQuery::default();
    let fault = query.add_conditions(json!({ "id": { "like": 1 } }).as_object().unwrap());
    assert!(fault.unwrap_err().message.contains("contains"));
    assert!(Aggregate::new(AggregateOperation::Sum, None).is_err());
    let scalar = Json::from_value(&json!({ "a": 1 }));
    let rows = row_query(json!({ "a": 1 }), &[], &[], &[]);
    let fault = read_slice(&scalar, &SliceQuery { rows, ..query_at("") }, AMPLE).unwrap_err();
    assert!(fault.message.contains("need a table"), "{fault}");
}

#[test]
fn figures_over_values_that_are_no_numbers_say_so() {
    let data = json!([
        { "name": "a", "price": 5, "kind": "x" }, { "name": "b", "price": "n/a", "kind": "y" },
        { "name": "c", "price": "7.5", "kind": "x" }, { "name": "d", "price": null, "kind": "x" },
    ]);
    for operation in ["sum", "avg"] {
        let rows = row_query(json!({}), &[], &[(operation, "name")], &[]);
        let part = SliceQuery { rows, ..SliceQuery::default() };
        let fault = read_slice(&Json::from_value(&data), &part, AMPLE).unwrap_err();
        let expected = format!("{operation} needs numbers, and none of the 4 values of \"name\"");
        assert!(fault.message.contains(&expected), "{}", fault.message);
    }
    let figures = |aggregates: &[(&str, &str)], groups: &[&str]| {
        query(&data, "", row_query(json!({}), &[], aggregates, groups)).0
    };
    let mixed = json!({ "numbers": 2, "others": 1 });
    let all = [("sum", "price"), ("avg", "price"), ("min", "price"), ("max", "price")];
    let expected = json!({ "sum(price)": 12.5, "avg(price)": 6.25, "min(price)": 5,
        "max(price)": 7.5, "values(price)": mixed });
    assert_eq!(figures(&all, &[]), expected);
    let expected = json!([
        { "kind": "x", "sum(price)": 12.5 },
        { "kind": "y", "sum(price)": null, "values(price)": { "numbers": 0, "others": 1 } },
    ]);
    assert_eq!(figures(&[("sum", "price")], &["kind"]), expected);
    // Texts alone have a least and a greatest, such as dates.
    assert_eq!(figures(&[("min", "name")], &[]), json!({ "min(name)": "a" }));
    assert_eq!(figures(&[("count", "price")], &[]), json!({ "count(price)": 3 }));
}

#[test]
fn a_refusal_names_the_columns_of_all_rows() {
    let mut rows: Vec<Value> = (0..1_000).map(|n| json!({ "id": n })).collect();
    rows.push(json!({ "id": 1_000, "note": "last" }));
    let data = Json::from_value(&json!(rows));
    let rows = row_query(json!({ "colour": 1 }), &[], &[], &[]);
    let part = SliceQuery { rows, ..SliceQuery::default() };
    let fault = read_slice(&data, &part, AMPLE).unwrap_err();
    assert!(fault.message.ends_with("the columns are: id, note"), "{}", fault.message);
}

#[test]
fn slices_show_characters_that_the_tool_escaped() {
    let rows = r#"[{"city":"\u5317\u4eac","n":1.10},{"city":"\u4e0a\u6d77","n":2.20},
        {"city":"\ud83d\ude00","n":3.30}]"#;
    let inner = Json::from_value(&Value::from(rows));
    let data = format!(r#"{{"rows":{rows},"text":{},"\u540d":"\u5317"}}"#, inner.text());
    let data = Json::parse(&data).unwrap();
    let read = |part: &SliceQuery| read_slice(&data, part, AMPLE).unwrap();
    let shown = |slice: Slice| match slice.content {
        SliceContent::Value(value) | SliceContent::Rows { value, .. } => value.text().to_owned(),
        SliceContent::Matches { matches, .. } => matches[0].value.text().to_owned(),
        SliceContent::Prefix { text, .. } => text,
    };
    assert_eq!(shown(read(&query_at("/rows/0"))), r#"{"city":"北京","n":1.10}"#);
    assert_eq!(shown(read(&query_at("/text/2"))), r#"{"city":"😀","n":3.30}"#);
    assert_eq!(shown(read(&query_at("/名"))), r#""北""#);
    assert!(shown(read(&query_at("/text"))).contains("上海"));
    for pointer in ["/rows", "/text"] {
        let rows = row_query(json!({ "n": { "gt": 2 } }), &["city"], &[], &[]);
        let part = SliceQuery { rows, ..query_at(pointer) };
        assert_eq!(shown(read(&part)), r#"[{"city":"上海"},{"city":"😀"}]"#);
        let part = SliceQuery { grep: Some("上海".into()), ..query_at(pointer) };
        assert!(shown(read(&part)).contains("上海"), "{pointer}");
    }
    let cut = read_slice(&data, &query_at("/rows"), 20).unwrap();
    assert!(shown(cut).starts_with(r#"{"city":"北京"#));
    assert_eq!(read(&query_at("/rows/0")).bytes, r#"{"city":"\u5317\u4eac","n":1.10}"#.len());
}

#[test]
fn grep_searches_decoded_text() {
    let spaced = "{\"accounts\": [{\"id\": 1, \"status\": \"past_due\"}, {\"id\": 2, \"state\": \
                  \"\\u5df2\\u51bb\\u7ed3\"}]}";
    let written = Json::parse(spaced).unwrap();
    let escaped = Json::from_value(&json!({ "content": [{ "type": "text", "text": spaced }] }));
    for (data, pointer) in [(&written, "/accounts"), (&escaped, "/content")] {
        for pattern in ["\"status\":\"past_due\"", "\"status\": \"past_due\"", "已冻结"] {
            let query = SliceQuery { grep: Some(pattern.to_owned()), ..query_at("") };
            let slice = read_slice(data, &query, AMPLE).unwrap();
            let (pointers, matched) = found(&slice);
            assert_eq!(matched, 1, "{pattern}: {slice:?}");
            assert!(pointers[0].0.starts_with(pointer), "{pattern}: {pointers:?}");
        }
    }
}

#[test]
fn grep_finds_matches_across_the_parts_of_a_long_line() {
    let grep = |text: &str, pattern: &str| {
        let part = SliceQuery { grep: Some(pattern.to_owned()), ..query_at("/text") };
        let slice = read_slice(&Json::from_value(&json!({ "text": text })), &part, AMPLE).unwrap();
        let SliceContent::Matches { matches, matched } = &slice.content else { panic!("matches") };
        let lines: Vec<usize> = matches.iter().map(|found| found.line.unwrap()).collect();
        assert_eq!(lines.len(), *matched);
        (lines, matches.iter().map(|found| found.value.to_value()).collect::<Vec<_>>())
    };
    let mut text = "x ".repeat(1_000);
    text.replace_range(1_993..2_000, "INV-778");
    text += "12 and more, also INV-77812";
    let (lines, values) = grep(&text, "INV-77812");
    assert_eq!(lines, [0, 1]);
    assert!(values[0].as_str().unwrap().ends_with("INV-77812"), "{values:?}");
    for (pattern, expected) in [
        ("INV-77812 and", vec![0]),
        ("also.*", vec![1]),
        (".*also.*", vec![1]),
        ("^x.*12$", vec![0]),
        ("^INV", vec![]),
        ("nowhere", vec![]),
    ] {
        assert_eq!(grep(&text, pattern).0, expected, "{pattern}");
    }
    let long = "é".repeat(3_000);
    let text = format!("one\n{long} two {long}\r\nthree\n{long}end\n");
    assert_eq!(grep(&text, "é two é").0, [3]);
    assert_eq!((grep(&text, "three$").0, grep(&text, "end$").0), (vec![8], vec![12]));
}

#[test]
fn grep_counts_the_rows_of_a_text_that_is_json() {
    let state = |n: usize| if n.is_multiple_of(3) { "已冻结" } else { "正常" };
    let rows: Vec<Value> =
        (0..300).map(|n| json!({ "id": n, "state": state(n), "note": "…".repeat(20) })).collect();
    for text in [json!(rows).to_string(), format!("{:#}", json!({ "rows": rows }))] {
        let data = Json::from_value(&json!({ "text": text }));
        let part = SliceQuery { grep: Some("已冻结".into()), ..query_at("/text") };
        let (pointers, matched) = found(&read_slice(&data, &part, AMPLE).unwrap());
        assert_eq!(matched, 100, "{text:.80}");
        assert!(pointers[1].0.ends_with("/3"), "{pointers:?}");
        let read = read_slice(&data, &query_at(&pointers[1].0), AMPLE).unwrap();
        assert_eq!(value(&read)["id"], 3);
    }
}
