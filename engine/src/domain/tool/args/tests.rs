//! Tests of the argument mapping and of the argument rules, one per rule.

use super::*;

fn rules(options: Value) -> ArgumentRules {
    ArgumentRules::from_options(&options).unwrap()
}

fn vars() -> TemplateVars {
    TemplateVars(BTreeMap::from([
        ("project_id", "p1".to_owned()),
        ("turn_epoch", "7".to_owned()),
        ("agent_id", "{project_id}".to_owned()),
    ]))
}

fn apply_rules(options: Value, args: Value) -> Value {
    rules(options).apply(&args, &vars()).args
}

#[test]
fn precedence_is_environment_fixed_caller_default() {
    let options = json!({
        "args": {
            "defaults": { "a": "default", "b": "default", "c": "default", "d": "default" },
            "fixed": { "c": "fixed", "d": "fixed" },
        },
        "envs": { "d": "SECRET" },
    });
    let input = json!({ "b": "caller", "c": "caller", "d": "caller", "e": "caller" });
    let prepared = rules(options).apply(&input, &vars());
    let expected = json!({ "a": "default", "b": "caller", "c": "fixed", "e": "caller" });
    assert_eq!(prepared.args, expected, "d is taken from the environment at execution");
    assert_eq!(prepared.defaults, ["a"]);
    assert_eq!(prepared.fixed, ["c"]);
    assert_eq!(prepared.overridden_by_env, ["d"]);
}

#[test]
fn null_counts_as_given_and_null_defaults_are_applied() {
    let options = json!({ "args": { "defaults": { "a": 1, "b": null } } });
    assert_eq!(apply_rules(options.clone(), json!({ "a": null })), json!({ "a": null, "b": null }));
    assert_eq!(apply_rules(options, json!({})), json!({ "a": 1, "b": null }));
}

#[test]
fn only_named_variables_count_as_environment() {
    let options = json!({ "envs": { "a": " KEY ", "b": "  ", "c": 7, "d": "" } });
    let rules = rules(options);
    assert_eq!(rules.env_arguments(), &BTreeMap::from([("a".to_owned(), "KEY".to_owned())]));
    let input = json!({ "a": 1, "b": 2, "c": 3 });
    assert_eq!(rules.apply(&input, &vars()).args, json!({ "b": 2, "c": 3 }));
}

#[test]
fn templates_are_expanded_once_and_only_at_the_top_level() {
    let fixed = json!({
        "one": "{project_id}/{turn_epoch}",
        "nested": "{agent_id}",
        "unknown": "{nobody} {project_id",
        "empty": "{} {{project_id}}",
        "inner": { "text": "{project_id}" },
        "list": ["{project_id}"],
        "number": 5,
        "epoch": "{turn_epoch}",
        "absent": "{context_box_id}",
    });
    let prepared = apply_rules(json!({ "args": { "fixed": fixed } }), json!({}));
    assert_eq!(prepared["one"], "p1/7");
    assert_eq!(prepared["nested"], "{project_id}", "expanded values are not expanded again");
    assert_eq!(prepared["unknown"], "{nobody} {project_id");
    assert_eq!(prepared["empty"], "{} {p1}");
    assert_eq!(prepared["inner"], json!({ "text": "{project_id}" }));
    assert_eq!(prepared["list"], json!(["{project_id}"]));
    assert_eq!(prepared["number"], 5);
    assert_eq!(prepared["epoch"], "7", "numbers are expanded as text");
    assert_eq!(prepared["absent"], "{context_box_id}");
}

#[test]
fn defaults_are_expanded_and_caller_values_are_not() {
    let options = json!({ "args": { "defaults": { "a": "{project_id}" } } });
    assert_eq!(apply_rules(options.clone(), json!({})), json!({ "a": "p1" }));
    let caller_args = json!({ "a": "{project_id}" });
    assert_eq!(apply_rules(options, caller_args.clone()), caller_args);
}

#[test]
fn the_model_schema_hides_fixed_and_env_arguments_and_shows_defaults() {
    let rules = rules(json!({
        "args": {
            "defaults": { "q": "{project_id}", "limit": 5, "odd": 1, "secret": "x", "none": 1 },
            "fixed": { "mode": "fast" },
        },
        "envs": { "secret": "KEY", "blank": " " },
    }));
    let full = json!({
        "type": "object",
        "properties": {
            "q": { "type": "string" }, "limit": { "type": "integer", "default": 3 },
            "odd": true, "mode": { "type": "string" }, "secret": { "type": "string" },
            "blank": { "type": "string" },
        },
        "required": ["q", "mode", "secret", "blank"],
        "$defs": { "mode": { "type": "string" } },
    });
    let expected = json!({
        "type": "object",
        "properties": {
            "q": { "type": "string", "default": "{project_id}" },
            "limit": { "type": "integer", "default": 3 },
            "odd": true,
        },
        "required": ["q"],
        "$defs": { "mode": { "type": "string" } },
    });
    assert_eq!(rules.schema_for_model(&full), expected);
    let nothing = json!({ "type": "object", "properties": {} });
    assert_eq!(rules.schema_for_model(&json!({})), nothing);
}

#[test]
fn the_execution_schema_omits_environment_arguments() {
    let rules = rules(json!({ "args": { "fixed": { "a": 1 } }, "envs": { "b": "KEY" } }));
    let full = json!({ "properties": { "a": {}, "b": {}, "c": {} }, "required": ["a", "b"] });
    let expected = json!({ "properties": { "a": {}, "c": {} }, "required": ["a"] });
    assert_eq!(rules.schema_for_execution(&full), expected);
}

#[test]
fn absent_rules_are_none_and_invalid_rules_are_named() {
    assert_eq!(ArgumentRules::from_options(&json!({ "jina": {} })), None);
    assert_eq!(ArgumentRules::from_options(&json!({ "args": { "fixed": {} }, "envs": {} })), None);
    assert_eq!(ArgumentRules::find_problem(&json!({ "args": { "fixed": {} } })), None);
    for (options, expected) in [
        (json!({ "args": [] }), "options.args "),
        (json!({ "args": { "fixed": 1 } }), "options.args.fixed"),
        (json!({ "args": { "defaults": "x" } }), "options.args.defaults"),
        (json!({ "envs": ["x"] }), "options.envs"),
    ] {
        assert!(ArgumentRules::find_problem(&options).unwrap().contains(expected), "{options}");
    }
}

#[test]
fn arguments_that_are_no_object_are_unchanged() {
    let rules = rules(json!({ "args": { "fixed": { "a": 1 } } }));
    assert_eq!(rules.apply(&json!([1]), &vars()).args, json!([1]));
}

#[test]
fn the_audit_metadata_names_applied_arguments_without_values() {
    let rules = rules(json!({
        "args": { "defaults": { "z": 1, "a": 2 }, "fixed": { "f": 3 } }, "envs": { "k": "KEY" },
    }));
    let audit = Value::Object(rules.audit_metadata(&json!({ "z": 0 })));
    let expected = json!({
        "tool_args_defaults_applied": ["a"],
        "tool_args_fixed_applied": ["f"],
        "tool_args_envs": { "k": "KEY" },
    });
    assert_eq!(audit, expected);
}

#[test]
fn a_mapping_picks_sets_or_omits_arguments() {
    let mapping: ArgumentMapping = serde_json::from_value(json!({
        "q": {"from": "/query"}, "limit": {"value": 5}, "gone": {"from": "/nowhere"}
    }))
    .unwrap();
    let prepared = map_arguments(Some(&mapping), &json!({"query": "rain", "x": 1}));
    assert_eq!(prepared, json!({"q": "rain", "limit": 5}));
    assert_eq!(map_arguments(None, &json!({"a": 1})), json!({"a": 1}));
}
