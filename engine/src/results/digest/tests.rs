//! Tests with generated results: a digest stays within its budget and states how to read the rest.

use serde_json::{Value, json};

use super::*;
use crate::results::text_lines::bounded_lines;

fn call_id() -> CallId {
    "tc_01JD0ABCDEFGHJKMNPQRSTVWXY".parse().unwrap()
}

#[track_caller]
fn make_digest(data: &Value, budget: usize, hint: Option<&str>) -> Digest {
    let call_id = call_id();
    let source = DigestSource { call_id: &call_id, tool: "some.tool", hint, reader: "result.read" };
    let data = Json::from_value(data);
    let digest = digest(&data, budget, &source).expect("over the budget");
    assert_eq!(digest.tokens, tokens::count(&digest.text));
    assert!(digest.tokens <= budget, "{} of {budget}:\n{}", digest.tokens, digest.text);
    assert_eq!(digest.whole_bytes, data.text().len());
    if budget >= MIN_BUDGET {
        assert!(digest.text.contains(call_id.as_str()), "{}", digest.text);
        assert!(digest.text.contains("result.read"), "{}", digest.text);
        assert!(digest.text.contains("omitted"), "{}", digest.text);
    }
    digest
}

#[track_caller]
fn assert_contains(digest: &Digest, parts: &[&str]) {
    for part in parts {
        assert!(digest.text.contains(part), "no {part:?} in\n{}", digest.text);
    }
}

#[test]
fn a_result_within_the_budget_needs_no_digest() {
    let call_id = call_id();
    let source =
        DigestSource { call_id: &call_id, tool: "some.tool", hint: None, reader: "result.read" };
    let data = Json::parse(r#"{"sum": 42}"#).unwrap();
    let tokens = tokens::count(data.text());
    assert_eq!(digest(&data, tokens, &source), None);
    assert!(digest(&data, tokens - 1, &source).is_some());
}

#[test]
fn characters_that_the_tool_escaped_are_shown() {
    let call_id = call_id();
    let hint = Some(r#"{"city":"\u4e0a\u6d77"}"#);
    let source = DigestSource { call_id: &call_id, tool: "some.tool", hint, reader: "result.read" };
    let row = |n: usize| {
        let city = if n == 500 { "\\u4e0a\\u6d77" } else { "\\u5317\\u4eac" };
        format!(r#"{{"id":{n},"city":"{city}","sum":{n}.10}}"#)
    };
    let rows = (0..900).map(row).collect::<Vec<_>>();
    let table = format!("[{}]", rows.join(","));
    let text = |text: String| Json::from_value(&Value::from(text)).text().to_owned();
    let documents = [
        table.clone(),
        format!(r#"{{"content":[{{"type":"text","text":{}}}]}}"#, text(table.clone())),
        text(rows.join("\n")),
        format!(r#"{{"a":{table},"b":{table}}}"#),
    ];
    for document in documents {
        let data = Json::parse(&document).unwrap();
        let digest = digest(&data, 500, &source).unwrap();
        assert!(!digest.text.contains("\\u"), "{}", digest.text);
        assert_contains(&digest, &["北京", "上海", "500.10"]);
        assert_eq!(digest.whole_bytes, document.len());
    }
    // A result that fits once it is decoded needs no digest.
    let short = Json::parse(&format!(r#""{}""#, "\\u5317\\u4eac".repeat(20))).unwrap();
    assert_eq!(digest(&short, 60, &source), None);
}

#[test]
fn omitted_parts_of_a_page_without_line_breaks_are_at_their_offsets() {
    let paragraph = |n: usize| format!("<p>Paragraph {n:03} of the page</p>");
    let page = format!("<html><body>{}</body></html>", (0..900).map(paragraph).collect::<String>());
    let digest = make_digest(&Value::from(page.clone()), 250, Some("Paragraph 500"));
    let lines: Vec<&str> = bounded_lines(&page).collect();
    let (mut last, mut marks) = (None, Vec::new());
    for line in digest.text.lines() {
        if let Some(at) = line.strip_prefix("[… ").and_then(|mark| mark.split("offset ").nth(1)) {
            let offset: usize = at.trim_end_matches(']').parse().unwrap();
            // The paragraph after the last one shown begins there.
            let next = last.map_or(0, |number: usize| number + 1);
            let near = lines[offset..].iter().take(2).copied().collect::<String>();
            assert!(near.contains(&format!("Paragraph {next:03}")), "{next} not at {offset}");
            marks.push(offset);
        } else if let Some((_, words)) = line.split_once("Paragraph ") {
            last = words.get(..3).and_then(|number| number.parse().ok()).or(last);
        }
    }
    assert!(marks.len() >= 2 && marks.is_sorted() && marks[0] < marks[1], "{}", digest.text);
}

#[test]
fn a_text_digest_shows_head_tail_and_matching_lines() {
    let mut lines: Vec<String> = (0..4_000)
        .map(|n| format!("{n} the quick brown fox jumps over the lazy dog again and again"))
        .collect();
    lines[2_345] = "2345 the invoice of ACME-7731 was paid on Monday".into();
    lines[3_100] = "3100 ERROR: disk full, nothing was written".into();
    let text = Value::from(lines.join("\n"));
    let digest = make_digest(&text, 400, Some(r#"{"query":"acme-7731 invoice"}"#));
    assert_contains(
        &digest,
        &["4000 lines of text", "\n0 the quick", "3999 the quick", "ACME-7731", "ERROR: disk full"],
    );
    // Omitted lines are counted, and the mark gives the offset to read from.
    let first = digest.text.lines().find(|line| line.starts_with("[… ")).unwrap();
    let visible = digest.text.lines().skip(1).take_while(|line| !line.starts_with("[…")).count();
    assert!(first.ends_with(&format!("offset {visible}]")), "{first} after {visible}");
    assert_eq!(digest, make_digest(&text, 400, Some(r#"{"query":"acme-7731 invoice"}"#)));
}

#[test]
fn a_long_text_inside_an_object_is_digested_as_text() {
    let body: String = (0..3_000).map(|n| format!("line {n} of the page\n")).collect();
    let page = json!({ "status": 200, "url": "https://example.org/x", "body": body });
    let digest = make_digest(&page, 300, None);
    assert_contains(
        &digest,
        &["3000 lines of text", r#""pointer":"/body""#, r#""status":200"#, "line 2999"],
    );
}

#[test]
fn a_long_text_inside_a_list_is_digested_as_text() {
    let body: String = (0..3_000).map(|n| format!("line {n} of the page\n")).collect();
    let answer = json!({ "content": [{ "type": "text", "text": "a note" },
        { "type": "text", "text": body }], "isError": false });
    let digest = make_digest(&answer, 600, None);
    assert_contains(
        &digest,
        &["3000 lines of text", r#""pointer":"/content/1/text""#, "a note", "line 2999"],
    );
    // If no single item dominates, the array is digested as JSON.
    let halves = json!({ "content": [{ "text": body }, { "text": body }] });
    assert_contains(&make_digest(&halves, 300, None), &["JSON", "content: [2 × {text: string}]"]);
}

#[test]
fn a_table_shows_columns_count_and_sample_rows() {
    let row = |n: u32| json!({ "id": n, "name": format!("user {n}"), "vip": n < 7, "note": null });
    let rows: Vec<Value> = (0..2_000).map(row).collect();
    let digest = make_digest(&Value::from(rows), 300, None);
    assert_contains(
        &digest,
        &["2000 rows, 4 columns", "id number", "name string", "vip boolean", "note null"],
    );
    assert_contains(&digest, &["\n0: [0,\"user 0\",", "\n1999: [1999,"]);
    let row_numbers: Vec<usize> =
        digest.text.lines().filter_map(|line| line.split_once(": [")?.0.parse().ok()).collect();
    assert!(
        row_numbers.is_sorted() && row_numbers.iter().any(|n| (100..1_900).contains(n)),
        "{row_numbers:?}"
    );
}

#[test]
fn a_database_result_is_digested_as_a_table() {
    let rows: Vec<Value> = (0..900).map(|n| json!([n, format!("city {n}"), 1.5])).collect();
    let columns = ["id", "city", "share"];
    let answer = json!({ "columns": columns, "rows": rows, "row_count": 900, "truncated": false });
    let digest = make_digest(&answer, 250, None);
    assert_contains(
        &digest,
        &["table /rows: 900 rows, 3 columns", "id number, city string, share number"],
    );
    assert_contains(&digest, &[r#""row_count":900"#, r#""pointer":"/rows""#, "\n899: ["]);
}

#[test]
fn json_shows_its_shape_counts_and_first_items() {
    let user = |n: u32| {
        let mut user = json!({ "id": n, "tags": vec!["x"; n as usize % 5], "at": { "lat": 1.5 } });
        if n < 100 {
            user["mail"] = json!("a@example.org");
        }
        user
    };
    let users: Vec<Value> = (0..500).map(user).collect();
    let events: Vec<Value> = (0..300).map(|n| json!({ "kind": "seen", "n": n })).collect();
    let data = json!({ "users": users, "events": events, "total": 500, "next": null });
    let digest = make_digest(&data, 400, None);
    assert_contains(
        &digest,
        &["users: [500 × {", "id: number", "tags: [0–4 × string]", "mail?: string"],
    );
    assert_contains(
        &digest,
        &["events: [300 × {kind: string, n: number}]", "total: number", "next: null"],
    );
    assert_contains(&digest, &["data: {", r#""id":0"#, r#"{"kind":"seen","n":0}"#, " more]"]);
}

#[test]
fn long_strings_are_cut_and_state_their_size() {
    let long = "x y ".repeat(3_000);
    let data = json!({ "a": long, "b": long, "c": [1, 2, 3] });
    let digest = make_digest(&data, 200, None);
    assert_contains(
        &digest,
        &["bytes", "\"c\":[1,2,3]", "shape: {a: string, b: string, c: [3 × number]}"],
    );
}

/// A small deterministic generator, so that every test run sees the same documents.
struct SeededGenerator(u64);

impl SeededGenerator {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }

    fn text(&mut self) -> String {
        let words =
            ["error", "日本語", "42", "\n", "\"", "\\", "long ", "\u{1F600}", "a b c", "\t", "-"];
        (0..self.roll(30)).map(|_| words[self.roll(words.len())]).collect()
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.roll(if depth > 5 { 5 } else { 10 }) {
            0 => Value::Null,
            1 => json!(self.roll(2) == 0),
            2 => json!(self.roll(100_000) as f64 / 7.0),
            3 => json!(self.roll(1_000)),
            4 => Value::from(self.text().repeat(1 + self.roll(20))),
            5 | 6 => (0..self.roll(12)).map(|_| self.value(depth + 1)).collect(),
            7 => {
                let columns = 1 + self.roll(5);
                let keys: Vec<String> = (0..columns).map(|n| format!("k{n}")).collect();
                let row = |generator: &mut Self| {
                    let cells = keys.iter().map(|key| (key.clone(), generator.value(6)));
                    Value::Object(cells.collect())
                };
                (0..self.roll(60)).map(|_| row(self)).collect()
            }
            _ => {
                let entry = |generator: &mut Self| (generator.text(), generator.value(depth + 1));
                let entries: serde_json::Map<_, _> =
                    (0..self.roll(9)).map(|_| entry(self)).collect();
                Value::Object(entries)
            }
        }
    }
}

#[test]
fn digests_of_generated_documents_stay_within_any_budget() {
    let call_id = call_id();
    let mut generator = SeededGenerator(7);
    let mut digests = 0;
    for round in 0..150 {
        let value = json!([generator.value(0), generator.value(1)]);
        let value = if round % 3 == 0 { value[0].clone() } else { value };
        let data = Json::from_value(&value);
        let hint = generator.text();
        let source = DigestSource {
            call_id: &call_id,
            tool: "some.tool",
            hint: Some(&hint),
            reader: "result.read",
        };
        for budget in
            [generator.roll(8), generator.roll(64), generator.roll(400), 64 + generator.roll(2_000)]
        {
            let Some(digest) = digest(&data, budget, &source) else {
                assert!(tokens::count(data.text()) <= budget);
                continue;
            };
            digests += 1;
            let tokens = tokens::count(&digest.text);
            assert_eq!(digest.tokens, tokens);
            assert!(tokens <= budget, "round {round}: {tokens} of {budget}\n{}", digest.text);
            if budget >= MIN_BUDGET {
                assert_contains(&digest, &[call_id.as_str(), "omitted", "result.read"]);
            }
        }
    }
    assert!(digests > 200, "{digests}");
}

#[test]
fn every_small_budget_is_respected() {
    let rows: Vec<Value> = (0..200).map(|n| json!({ "id": n, "text": "some words" })).collect();
    let text = Value::from("one line of several words\n".repeat(300));
    let deep = (0..60).fold(json!("x".repeat(4_000)), |inner, n| json!([inner, n, {"k": n}]));
    for data in [Value::from(rows), text, deep, json!("a".repeat(9_000)), json!(" ".repeat(9_000))]
    {
        for budget in (0..20).chain((20..160).step_by(7)) {
            if tokens::exceeds(&data.to_string(), budget) {
                make_digest(&data, budget, Some("words"));
            }
        }
    }
}

#[test]
fn a_small_budget_still_shows_the_matching_line() {
    let mut lines: Vec<String> =
        (0..400).map(|n| format!("entry {n}: nothing of note happened here today")).collect();
    lines[211] = "the zebra has left its house".to_owned();
    let text = json!(lines.join("\n"));
    for budget in (90..=260).step_by(5) {
        let digest = make_digest(&text, budget, Some("where is the zebra?"));
        assert_contains(&digest, &["zebra has left", "omitted", "result.read", " bytes"]);
        if budget >= 140 {
            assert_contains(&digest, &["entry 0", "today"]);
        }
    }
}

#[test]
fn a_match_is_shown_even_in_an_overlong_line() {
    let long = |n: usize| format!("paragraph {n}: {}", "and so it went on and on ".repeat(60));
    let mut lines: Vec<String> = (0..200).map(long).collect();
    lines[120].push_str("until the zebra left its house, für immer. ");
    lines[120].push_str(&"Nothing more is known of it. ".repeat(40));
    for text in [lines.join("\n"), lines.concat()] {
        for budget in [120, 200, 400, 1_000] {
            let digest = make_digest(&json!(text), budget, Some("where is the zebra?"));
            assert_contains(&digest, &["zebra left its house"]);
        }
    }
}
