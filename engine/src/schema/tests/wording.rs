//! Tests of the wording of problems and of their locations.

use serde_json::json;

use super::{DRAFT7, any_json, nested, problems};
use crate::schema::*;

fn messages(schema: Value, instance: Value) -> Vec<String> {
    problems(schema, instance).into_iter().map(|problem| problem.message).collect()
}

/// Returns the pointer and the message of the only problem.
fn only_problem(schema: Value, instance: Value) -> (String, String) {
    let mut found = problems(schema, instance);
    assert_eq!(found.len(), 1, "{found:#?}");
    let problem = found.remove(0);
    (problem.pointer, problem.message)
}

fn problem_at(pointer: &str, message: &str) -> (String, String) {
    (pointer.to_string(), message.to_string())
}

/// Asserts that the message is the same at the top level and below, except for the location.
fn assert_worded(schema: Value, instance: Value, message: &str) {
    let at_root = only_problem(schema.clone(), instance.clone());
    assert_eq!(at_root, problem_at("", &format!("the value must {message}")));
    let mut below = json!({"properties": {"a~/b": schema}});
    if let Some(dialect) = below["properties"]["a~/b"].get("$schema").cloned() {
        below["$schema"] = dialect;
    }
    let at_member = only_problem(below, json!({ "a~/b": instance }));
    assert_eq!(at_member, problem_at("/a~0~1b", &format!("/a~0~1b must {message}")));
}

#[test]
fn scalar_keywords_are_worded() {
    for (schema, instance, message) in [
        (
            json!({"type": "integer"}),
            json!("wide"),
            "be an integer, but a string (\"wide\") was given",
        ),
        (
            json!({"type": ["string", "null"]}),
            json!(1.5),
            "be null or a string, but a number (1.5) was given",
        ),
        (
            json!({"enum": ["a", 1]}),
            json!("c"),
            "be one of \"a\", 1, but a string (\"c\") was given",
        ),
        (json!({"const": {"a": 1}}), json!(null), "be exactly {\"a\":1}, but null was given"),
        (json!({"minimum": 5}), json!(2), "be at least 5, but an integer (2) was given"),
        (json!({"maximum": 5}), json!(6), "be at most 5, but an integer (6) was given"),
        (
            json!({"exclusiveMinimum": 5}),
            json!(5),
            "be greater than 5, but an integer (5) was given",
        ),
        (json!({"exclusiveMaximum": 5}), json!(5), "be less than 5, but an integer (5) was given"),
        (json!({"multipleOf": 5}), json!(7), "be a multiple of 5, but an integer (7) was given"),
        (json!({"minLength": 2}), json!("é"), "have at least 2 characters, but has 1 character"),
        (json!({"maxLength": 1}), json!("ab"), "have at most 1 character, but has 2 characters"),
        (
            json!({"pattern": "^a"}),
            json!("b"),
            "be a string that matches the pattern ^a, but a string (\"b\") was given",
        ),
        (
            json!({"format": "date"}),
            json!("x"),
            "be a date such as 2025-01-31 (format date), but a string (\"x\") was given",
        ),
    ] {
        assert_worded(schema, instance, message);
    }
}

#[test]
fn container_keywords_are_worded() {
    for (schema, instance, message) in [
        (json!({"minItems": 1}), json!([]), "have at least 1 item, but has 0 items"),
        (json!({"maxItems": 1}), json!([1, 2]), "have at most 1 item, but has 2 items"),
        (
            json!({"uniqueItems": true}),
            json!([1, 2, 1.0]),
            "not repeat items, but items 0 and 2 are equal",
        ),
        (
            json!({"minProperties": 2}),
            json!({"a": 1}),
            "have at least 2 properties, but has 1 property",
        ),
        (
            json!({"maxProperties": 0}),
            json!({"a": 1}),
            "have at most 0 properties, but has 1 property",
        ),
        (
            json!({"contains": {"type": "null"}}),
            json!([1]),
            "contain at least 1 item fitting {\"type\":\"null\"}, but an array ([1]) was given",
        ),
        (
            json!({"contains": true, "minContains": 2}),
            json!([1]),
            "contain at least 2 items fitting true, but an array ([1]) was given",
        ),
        (
            json!({"not": {"type": "null"}}),
            json!(null),
            "be something that does not fit {\"type\":\"null\"}, but null was given",
        ),
        (
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            json!(true),
            "be a string, or null, but a boolean (true) was given",
        ),
        (
            json!({"$schema": DRAFT7, "items": [true], "additionalItems": false}),
            json!([1, 2]),
            "have at most 1 item, but has 2 items",
        ),
        (
            json!({"$schema": DRAFT7, "contentEncoding": "base64"}),
            json!("$"),
            "be a string in the encoding base64, but a string (\"$\") was given",
        ),
    ] {
        assert_worded(schema, instance, message);
    }
}

#[test]
fn properties_are_worded() {
    let required = json!({"required": ["url", "x"], "properties": {"url": {"type": "string"}}});
    let found = problems(required.clone(), json!({}));
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].pointer.as_str(), found[0].given.as_str()), ("/url", "nothing"));
    assert_eq!(found[0].expected, "a string");
    assert_eq!(found[0].message, "the required property \"url\" is missing at the top level");
    let below = json!({"properties": {"s": required}});
    assert_eq!(
        messages(below, json!({"s": {"url": ""}})),
        ["the required property \"x\" is missing at /s"]
    );
    assert_eq!(
        only_problem(json!({"dependentRequired": {"card": ["address"]}}), json!({"card": 1})),
        problem_at(
            "/address",
            "the required property \"address\" is missing at the top level, \
                          because \"card\" is present"
        )
    );
    assert_eq!(
        only_problem(json!({"propertyNames": {"maxLength": 2}}), json!({"abc": 1, "ab": 1})),
        problem_at(
            "/abc",
            "the property name \"abc\" at the top level is not allowed; \
                      a name must be at most 2 characters"
        )
    );
    assert_eq!(only_problem(json!({"properties": {"a": false}}), json!({"a": 1})).0, "/a");
    for keyword in ["additionalProperties", "unevaluatedProperties"] {
        let style = json!({"properties": {"color": {}, "max_width": {}}, keyword: false});
        let hint = "known are: \"color\", \"max_width\"";
        assert_eq!(
            messages(style.clone(), json!({"colour": 1, "color": 2, "zzz": 3})),
            [
                format!("\"colour\" is not a known property; did you mean \"color\"? {hint}"),
                format!("\"zzz\" is not a known property; {hint}"),
            ]
        );
        let referred = json!({"properties": {"s": {"$ref": "#/$defs/S"}}, "$defs": {"S": style}});
        assert_eq!(
            only_problem(referred, json!({"s": {"maxWidth": 1}})),
            problem_at(
                "/s/maxWidth",
                &format!(
                    "\"maxWidth\" is not a known property of /s; \
                     did you mean \"max_width\"? {hint}"
                )
            )
        );
    }
    let inherited = json!({"allOf": [{"$ref": "#/$defs/B"}], "unevaluatedProperties": false,
                           "$defs": {"B": {"properties": {"name": {}}}}});
    assert!(only_problem(inherited, json!({"nam": 1})).1.contains("did you mean \"name\"?"));
}

#[test]
fn unions_report_the_problem_of_the_intended_branch() {
    let nullable = json!({"anyOf": [{"required": ["a"], "type": "object"}, {"type": "null"}]});
    assert_eq!(only_problem(nullable, json!({})).0, "/a");
    let tagged = json!({"oneOf": [
        {"properties": {"k": {"const": "a"}, "v": {"type": "string"}}, "required": ["k"]},
        {"properties": {"k": {"const": "b"}, "v": {"type": "integer"}}, "required": ["k"]}]});
    assert_eq!(
        only_problem(tagged.clone(), json!({"k": "b", "v": "x"})),
        problem_at("/v", "/v must be an integer, but a string (\"x\") was given")
    );
    assert_eq!(
        only_problem(tagged.clone(), json!({"k": "c"})),
        problem_at("/k", "/k must be one of \"a\", \"b\", but a string (\"c\") was given")
    );
    assert_eq!(only_problem(tagged, json!({})).0, "/k");
    let apart = json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]});
    assert_eq!(
        only_problem(apart.clone(), json!({})),
        problem_at(
            "",
            "the value must be an object with the property \"a\", or an object with the \
                  property \"b\", but an object ({}) was given"
        )
    );
    assert_eq!(
        only_problem(apart, json!({"a": 1, "b": 1})),
        problem_at(
            "",
            "the value must fit exactly one of 2 alternatives, but an object \
                  ({\"a\":1,\"b\":1}) fits several of them (numbers 1, 2)"
        )
    );
    // The innermost fault is found through sixty unions.
    let (pointer, message) = only_problem(any_json(), nested(json!(true), 60));
    assert_eq!(pointer, "/a".repeat(60));
    assert!(
        message.ends_with(
            "must be a string, or a number, or an array, or an object, \
                               but a boolean (true) was given"
        ),
        "{message}"
    );
    let names = json!({"propertyNames": {"anyOf": [{"pattern": "^[a-z]$"}, {"const": "X"}]}});
    assert!(only_problem(names, json!({"A1": 1})).1.contains("exactly \"X\""));
}

#[test]
fn every_problem_is_listed_up_to_the_limit() {
    let schema = json!({"properties": {"a": {"type": "string"}, "b": {"minimum": 1}},
                        "required": ["c"], "additionalProperties": false});
    let found = problems(schema, json!({"a": 1, "b": 0, "d": 1}));
    let mut pointers: Vec<&str> = found.iter().map(|problem| problem.pointer.as_str()).collect();
    pointers.sort_unstable();
    assert_eq!(pointers, ["/a", "/b", "/c", "/d"]);
    let many = problems(json!({"items": {"type": "string"}}), json!(vec![1; 100]));
    assert_eq!(many.len(), MAX_PROBLEMS);
    assert_eq!(many[31].pointer, "/31");
}

#[test]
fn given_values_are_truncated_between_characters() {
    for filler in ["é", "日", "🦀", "\n", "\"", "a"] {
        let cut = phrases::describe_value(&json!(filler.repeat(1000)));
        assert_eq!(cut.chars().count(), 80, "{cut}");
        assert!(cut.starts_with("a string (\"") && cut.ends_with("…)"), "{cut}");
        assert!(!cut.contains('\u{fffd}'), "{cut}");
    }
    assert_eq!(phrases::describe_value(&json!({"a": [1, null]})), "an object ({\"a\":[1,null]})");
    assert_eq!(phrases::truncate_chars("日本語", 3), "日本語");
    assert_eq!(phrases::truncate_chars("日本語", 2), "日…");
    let options: Vec<String> = (0..500).map(|i| format!("option {i}")).collect();
    let found = problems(json!({ "enum": options }), json!("x")).remove(0);
    assert!(found.expected.contains("more)") && found.expected.len() < 700, "{found:?}");
}
