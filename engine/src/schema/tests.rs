//! Tests of accepted and refused schemas, the reported locations, and the cost of validation.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use serde_json::json;

use super::*;

mod cost;
mod formats;
mod wording;

const DRAFT7: &str = "http://json-schema.org/draft-07/schema#";

fn schema_error(schema: &Value) -> SchemaError {
    match Schema::compile(schema) {
        Ok(_) => panic!("accepted {}", phrases::truncate_chars(&schema.to_string(), 300)),
        Err(error) => error,
    }
}

fn compile_schema(schema: &Value) -> Schema {
    Schema::compile(schema).unwrap_or_else(|error| {
        panic!("{error}: {}", phrases::truncate_chars(&schema.to_string(), 300))
    })
}

fn problems(schema: Value, instance: Value) -> Vec<SchemaProblem> {
    compile_schema(&schema).problems(&instance)
}

fn pointer(schema: Value, instance: Value) -> String {
    let mut found = problems(schema, instance);
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0).pointer
}

fn levels(count: usize, level: impl Fn(String) -> Value) -> Value {
    let mut defs = serde_json::Map::new();
    for i in 0..count {
        defs.insert(format!("l{i}"), level(format!("#/$defs/l{}", i + 1)));
    }
    defs.insert(format!("l{count}"), json!({"type": "string"}));
    json!({"$ref": "#/$defs/l0", "$defs": defs})
}

fn nested(mut value: Value, depth: usize) -> Value {
    for _ in 0..depth {
        value = json!({ "a": value });
    }
    value
}

fn any_json() -> Value {
    json!({"anyOf": [
        {"type": "string"},
        {"type": "number"},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "additionalProperties": {"$ref": "#"}}
    ]})
}

/// A tagged union whose branches recurse through the same property names.
fn expression(branches: usize) -> Value {
    let branch = |i: usize| {
        json!({
            "type": "object",
            "properties": {
                "op": {"const": format!("op{i}")},
                "left": {"$ref": "#/$defs/Expr"},
                "right": {"$ref": "#/$defs/Expr"}
            },
            "required": ["op"]
        })
    };
    let branches: Vec<Value> = (0..branches).map(branch).collect();
    json!({"$ref": "#/$defs/Expr", "$defs": {"Expr": {"oneOf": branches}}})
}

#[test]
fn ordinary_schemas_are_accepted() {
    for schema in [
        json!(true),
        json!(false),
        json!({}),
        json!({"$schema": "https://json-schema.org/draft/2020-12/schema"}),
        json!({"$schema": DRAFT7}),
        json!({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}),
        json!({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
        any_json(),
        expression(5),
        // A tree whose additional members are trees too: no name is covered twice.
        json!({"properties": {"left": {"$ref": "#"}}, "additionalProperties": {"$ref": "#"}}),
        json!({"prefixItems": [{"$ref": "#"}], "items": {"$ref": "#"}}),
        json!({"if": {"required": ["a"]}, "then": {"properties": {"x": {"$ref": "#"}}},
               "else": {"properties": {"x": {"$ref": "#"}}}}),
        // References by identifier, by anchor, and into an unknown keyword.
        json!({"$id": "http://x.example/root", "properties": {
            "a": {"$ref": "http://x.example/root#/$defs/b"}, "b": {"$ref": "item"},
            "c": {"$ref": "#here"}, "d": {"$dynamicRef": "#there"}},
            "$defs": {"b": {}, "i": {"$id": "item"}, "h": {"$anchor": "here"},
                      "t": {"$dynamicAnchor": "there"}}}),
        json!({"$ref": "#/components/schemas/A", "components": {"schemas": {
            "A": {"properties": {"b": {"$ref": "#/components/schemas/B"}}}, "B": {}}}}),
        json!({"$defs": {"u": {"$id": "urn:in:doc"}}, "$ref": "urn:in:doc"}),
        json!({"$id": "http://x.example/", "allOf": [{"$ref": "dir/"}], "properties": {"p": {
            "properties": {"q": {"$id": "dir/", "items": {"$ref": "leaf"},
                                 "$defs": {"l": {"$id": "leaf"}}}}}}}),
        json!({"$schema": DRAFT7, "definitions": {"a": {"$id": "#foo", "type": "string"}},
               "properties": {"x": {"$ref": "#foo"}}}),
        // These only look like references.
        json!({"properties": {"$ref": {"type": "string"}}, "enum": [{"$ref": "http://x/"}],
               "default": {"$ref": "http://x/"}, "required": ["$ref"]}),
        json!({"pattern": "^(a+)+$"}),
    ] {
        compile_schema(&schema);
    }
}

#[test]
fn schemas_of_derive_macros_are_accepted() {
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Filter",
        "oneOf": [
            {"type": "object", "properties": {"And": {"type": "array", "items": {"$ref": "#"}}},
             "required": ["And"], "additionalProperties": false},
            {"type": "object", "properties": {"Not": {"$ref": "#"}},
             "required": ["Not"], "additionalProperties": false},
            {"type": "object", "properties": {"Eq": {"$ref": "#/$defs/Eq"}},
             "required": ["Eq"], "additionalProperties": false}
        ],
        "$defs": {"Eq": {"type": "object", "required": ["field", "value"], "properties": {
            "field": {"type": "string"},
            "value": {"anyOf": [{"$ref": "#/$defs/Scalar"}, {"type": "null"}]},
            "width": {"type": "integer", "format": "uint8", "minimum": 0, "maximum": 255}}},
            "Scalar": {"type": ["string", "number", "boolean"]}}
    });
    let eq = json!({"Eq": {"field": "a", "value": null}});
    let schema = compile_schema(&schema);
    assert_eq!(schema.problems(&json!({"And": [eq, {"Not": eq}]})), vec![]);
    assert!(!schema.problems(&json!({"And": [eq, {"Nor": eq}]})).is_empty());
}

#[test]
fn invalid_schemas_are_refused_with_a_pointer() {
    let outside = "refers outside itself";
    for (schema, pointer, reason) in [
        (json!(5), "", "object or a boolean"),
        (json!([]), "", "object or a boolean"),
        (json!("string"), "", "object or a boolean"),
        (json!({"$schema": "http://json-schema.org/draft-04/schema#"}), "/$schema", "dialect"),
        (json!({"$schema": "https://json-schema.org/draft/2019-09/schema"}), "/$schema", "dialect"),
        (json!({"$schema": "https://json-schema.org/schema"}), "/$schema", "dialect"),
        (json!({"$schema": "https://my.example/dialect"}), "/$schema", "dialect"),
        (json!({"$schema": 7}), "/$schema", "dialect"),
        (json!({"$defs": {"a": {"$id": "x", "$schema": DRAFT7}}}), "/$defs/a/$schema", "dialect"),
        (
            json!({"properties": {"a": {"$ref": "http://x.example/s"}}}),
            "/properties/a/$ref",
            outside,
        ),
        (json!({"items": {"$ref": "https://x.example/s#/a"}}), "/items/$ref", outside),
        (json!({"items": {"$ref": "file:///etc/passwd"}}), "/items/$ref", outside),
        (json!({"items": {"$ref": "other.json"}}), "/items/$ref", outside),
        (json!({"items": {"$ref": "urn:not:here"}}), "/items/$ref", outside),
        (json!({"items": {"$ref": DRAFT7}}), "/items/$ref", outside),
        (json!({"items": {"$recursiveRef": "http://x.example/"}}), "/items/$recursiveRef", outside),
        (
            json!({"$schema": DRAFT7, "items": {"$ref": "http://x.example/"}}),
            "/items/$ref",
            outside,
        ),
        (json!({"a/b": {"$ref": "http://x/"}, "$ref": "#/a~1b"}), "/a~1b/$ref", outside),
        (json!({"items": {"$ref": "#/$defs/gone"}}), "/items/$ref", "does not resolve"),
        (json!({"items": {"$ref": "#gone"}}), "/items/$ref", "does not resolve"),
        (json!({"items": {"$dynamicRef": "#gone"}}), "/items/$dynamicRef", "does not resolve"),
        (json!({"items": {"$ref": "http://[bad"}}), "/items/$ref", "resolved"),
        (json!({"items": {"$id": "http://[bad"}}), "/items/$id", "resolved"),
        (json!({"$ref": "#"}), "", "without ever descending"),
        (json!({"allOf": [{"$ref": "#"}]}), "", "without ever descending"),
        (json!({"not": {"$ref": "#"}}), "", "without ever descending"),
        (
            json!({"items": {"$ref": "#/$defs/a"}, "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}]},
            "b": {"if": {"$ref": "#/$defs/a"}}}}),
            "/$defs/a",
            "without ever descending",
        ),
        (json!({"properties": 5}), "/properties", "object"),
        (json!({"type": "strin"}), "/type", "strin"),
        (json!({"properties": {"a": {"minLength": -1}}}), "/properties/a/minLength", "minimum"),
        (json!({"items": {"pattern": "(a"}}), "/items/pattern", "regular expression"),
        (json!({"items": {"pattern": "^(?=a)"}}), "/items/pattern", "look-around"),
        (json!({"items": {"pattern": "(?<!a)b"}}), "/items/pattern", "look-around"),
        (json!({"items": {"pattern": "(a)\\1"}}), "/items/pattern", "back-references"),
        (
            json!({"patternProperties": {"^(?!x/)": {}}}),
            "/patternProperties/^(?!x~1)",
            "look-around",
        ),
        (json!({"pattern": "((a{1000}){1000}){1000}"}), "/pattern", "too large"),
    ] {
        let error = schema_error(&schema);
        assert_eq!(error.pointer, pointer, "{schema}: {error}");
        assert!(error.reason.contains(reason), "{schema}: {error}");
    }
}

#[test]
fn oversized_schemas_are_refused_with_the_limit() {
    let large = json!({"description": "x".repeat(1024 * 1024)});
    assert!(schema_error(&large).reason.contains("256 KiB"));
    let mut deep = json!({});
    for _ in 0..40 {
        deep = json!({"properties": {"a": deep}});
    }
    let error = schema_error(&deep);
    assert!(error.reason.contains("64 levels"), "{error}");
    assert!(error.pointer.starts_with("/properties/a/properties"), "{error}");
    let many: serde_json::Map<_, _> = (0..10_001).map(|i| (format!("p{i}"), json!({}))).collect();
    assert!(schema_error(&json!({ "properties": many })).reason.contains("10000 subschemas"));
    let mut bottomless = json!(0);
    for _ in 0..1_000 {
        bottomless = json!([bottomless]);
    }
    assert!(schema_error(&json!({ "default": bottomless })).reason.contains("64 levels"));
}

#[test]
fn schemas_with_exponential_cost_are_refused() {
    let twice = |to: String| json!([{"$ref": to}, {"$ref": to}]);
    // Thirty levels are refused for the length of the chain, fourteen for the number of paths.
    let error = schema_error(&levels(30, |to| json!({"anyOf": twice(to)})));
    assert!(error.reason.contains("chain"), "{error}");
    for (schema, reason) in [
        // Many paths on one value.
        (levels(14, |to| json!({"anyOf": twice(to)})), "20000 paths"),
        (levels(14, |to| json!({"allOf": twice(to)})), "20000 paths"),
        (
            levels(9, |to| json!({"not": {"oneOf": [{"$ref": to}, {"$ref": to}, {"$ref": to}]}})),
            "20000 paths",
        ),
        (levels(15, |to| json!({"$ref": to, "dependentSchemas": {"a": {"$ref": to}}})), "paths"),
        // As many paths on a value further down.
        (levels(30, |to| json!({"properties": {"a": {"anyOf": twice(to)}}})), "20000 paths"),
        (levels(30, |to| json!({"items": {"$ref": to}, "contains": {"$ref": to}})), "paths"),
        // Work that doubles for every level of the instance.
        (json!({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}}), "doubles"),
        (json!({"items": {"$ref": "#"}, "contains": {"$ref": "#"}}), "doubles"),
        (
            json!({"anyOf": [{"properties": {"a": {"$ref": "#"}}},
                          {"additionalProperties": {"$ref": "#"}}]}),
            "doubles",
        ),
        (
            json!({"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}],
                "$defs": {"x": {"additionalProperties": {"$ref": "#"}}}}),
            "doubles",
        ),
        (
            json!({"$dynamicAnchor": "n", "anyOf": [{"items": {"$dynamicRef": "#n"}},
                                                 {"items": {"$dynamicRef": "#n"}}]}),
            "doubles",
        ),
        // More choices than the analysis can weigh.
        (
            json!({"prefixItems": vec![
                json!({"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}); 65]}),
            "64 subschemas",
        ),
        // A recursion on one value that is as deep as the schema is long.
        (levels(500, |to| json!({"$ref": to})), "chain"),
    ] {
        let error = schema_error(&schema);
        assert!(error.reason.contains(reason), "{schema}: {error}");
    }
}

/// Without the meter, each of these runs for many seconds or fills gigabytes.
#[test]
fn validation_of_costly_instances_is_bounded() {
    let text = "0110100110010110".repeat(64 * 1024);
    let heavy = "[0-9a-f]*1[01]{4000}[2-9]";
    let constants: Vec<Value> = (0..4000).map(|i| json!({"const": format!("x{i}")})).collect();
    let names: Vec<String> = (0..9000).map(|i| format!("p{i}")).collect();
    let members: serde_json::Map<_, _> = (0..60_000).map(|i| (format!("y{i}"), json!(1))).collect();
    for (schema, instance) in [
        (json!({ "pattern": heavy }), json!(text)),
        (json!({"patternProperties": {heavy: {}}}), json!({text.as_str(): 1})),
        (json!({"propertyNames": {"pattern": heavy}}), json!({text.as_str(): 1})),
        (json!({"items": {"anyOf": constants}}), json!(vec!["x3999"; 100_000])),
        (json!({"propertyNames": {"anyOf": constants}}), Value::Object(members)),
        (json!({"anyOf": [{"required": names}, false]}), json!({ "x": text })),
        (any_json(), nested(json!(vec![true; 200_000]), 60)),
        (expression(4), nested(json!({"left": {"op": "none"}}), 60)),
        (
            expression(4),
            (0..60).fold(json!({"op": "none"}), |e, _| json!({"op": "op1", "left": e})),
        ),
        (
            json!({"additionalProperties": {"items": {"type": "string"}}}),
            json!({"k".repeat(500_000): vec![1; 100_000]}),
        ),
    ] {
        let found = compile_schema(&schema).problems(&instance);
        assert!(found.len() <= MAX_PROBLEMS);
        assert!(found.iter().all(|problem| problem.message.len() < 4000));
    }
    // Large, but not costly.
    let content = json!({"path": "/a", "content": text});
    let schema = json!({"properties": {
        "path": {"pattern": "^(/[a-z._-]{1,255}){1,64}$"}, "content": {"type": "string"}}});
    assert_eq!(problems(schema, content), vec![]);
    let parts = json!(vec![&text[..4096]; 200]);
    assert_eq!(problems(json!({"items": {"pattern": "^[01]{1,4096}$"}}), parts), vec![]);
    assert_eq!(problems(any_json(), nested(json!(vec![1; 250_000]), 62)), vec![]);
}

/// Worker threads of common async runtimes have stacks of 2 MiB.
#[test]
fn deep_instances_do_not_overflow_the_stack() {
    let run = || {
        let schema = levels(14, |to| json!({"anyOf": [{"$ref": to}, false]}));
        let mut schema = schema.as_object().unwrap().clone();
        schema["$defs"]["l14"] = json!({"additionalProperties": {"$ref": "#"}, "type": "object"});
        let schema = compile_schema(&Value::Object(schema));
        assert_eq!(schema.problems(&nested(json!({}), 60)), vec![]);
        assert_eq!(schema.problems(&nested(json!(1), 60)).len(), 1);
        let deep = schema.problems(&nested(json!(1), 100));
        assert!(deep[0].message.contains("nested deeper than"), "{deep:?}");
        let mut bottomless = json!(0);
        for _ in 0..1_000 {
            bottomless = json!([bottomless]);
        }
        assert_eq!(compile_schema(&any_json()).problems(&bottomless).len(), 1);
        let found = compile_schema(&any_json()).problems(&nested(json!(true), 128));
        assert_eq!(found[0].pointer, "/a".repeat(128));
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(run).unwrap().join().unwrap();
}

#[test]
fn draft_07_has_its_own_semantics() {
    // Siblings of `$ref` are ignored.
    let with_sibling = json!({"$schema": DRAFT7, "properties": {
        "a": {"$ref": "#/definitions/s", "maxLength": 1}},
        "definitions": {"s": {"type": "string"}}});
    assert_eq!(problems(with_sibling, json!({"a": "long"})), vec![]);
    let modern = json!({"properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}},
                        "$defs": {"s": {"type": "string"}}});
    assert_eq!(problems(modern, json!({"a": "long"})).len(), 1);
    let dependencies = json!({"$schema": DRAFT7, "dependencies": {"a": ["b"]}});
    assert_eq!(pointer(dependencies, json!({"a": 1})), "/b");
    let tuple = json!({"$schema": DRAFT7, "items": [{"type": "string"}, {"type": "integer"}]});
    assert_eq!(pointer(tuple, json!(["a", "b"])), "/1");
    let anchor = json!({"$schema": DRAFT7, "definitions": {"a": {"$id": "#foo", "type": "string"}},
                        "properties": {"x": {"$ref": "#foo"}}});
    assert_eq!(pointer(anchor, json!({"x": 1})), "/x");
}

#[test]
fn patterns_are_weighed_by_their_expanded_size() {
    for (pattern, weight) in [
        ("", 0),
        ("abc", 3),
        ("^a[bc]\\d$", 3),
        ("(?:ab)+", 2),
        ("a{10}", 10),
        ("(ab){10,20}c", 41),
        ("((a{10}){10}){10}", 1000),
        ("^[a-z]{1,4096}$", 1),
        ("^a{5}b{5}", 6),
        ("^a|b{50}", 51),
        ("^.*a{9}", 10),
        ("a{99999999999}{99999999999}", 1 << 32),
        ("[a{9}]", 1),
        ("a\\{9}", 4),
    ] {
        assert_eq!(pattern_weight::pattern_weight(pattern), weight, "{pattern}");
    }
}

#[test]
fn schemas_are_sendable_and_problems_serializable() {
    let schema = compile_schema(&json!({"type": "string"}));
    let copy = schema.clone();
    let found = std::thread::spawn(move || copy.problems(&json!(1))).join().unwrap();
    assert_eq!(found, schema.problems(&json!(1)));
    let text = serde_json::to_string(&found).unwrap();
    assert_eq!(serde_json::from_str::<Vec<SchemaProblem>>(&text).unwrap(), found);
    assert!(format!("{schema:?}").contains("string"));
    let error = schema_error(&json!({"type": 1})).to_string();
    assert!(error.starts_with("schema is not usable at /type: "), "{error}");
}
