//! Tests of the argument rules, one per rule.

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

fn applied(options: Value, args: Value) -> Value {
    rules(options).apply(&args, &vars()).args
}

#[test]
fn environment_goes_before_fixed_before_caller_before_default() {
    let options = json!({
        "args": {
            "defaults": { "a": "default", "b": "default", "c": "default", "d": "default" },
            "fixed": { "c": "fixed", "d": "fixed" },
        },
        "envs": { "d": "SECRET" },
    });
    let given = json!({ "b": "caller", "c": "caller", "d": "caller", "e": "caller" });
    let made = rules(options).apply(&given, &vars());
    let expected = json!({ "a": "default", "b": "caller", "c": "fixed", "e": "caller" });
    assert_eq!(made.args, expected, "d comes from the environment, at the last moment");
    assert_eq!(made.defaults, ["a"]);
    assert_eq!(made.fixed, ["c"]);
    assert_eq!(made.overridden_by_env, ["d"]);
}

#[test]
fn null_counts_as_given_and_a_null_default_is_put_in() {
    let options = json!({ "args": { "defaults": { "a": 1, "b": null } } });
    assert_eq!(applied(options.clone(), json!({ "a": null })), json!({ "a": null, "b": null }));
    assert_eq!(applied(options, json!({})), json!({ "a": 1, "b": null }));
}

#[test]
fn only_named_variables_count_as_environment() {
    let options = json!({ "envs": { "a": " KEY ", "b": "  ", "c": 7, "d": "" } });
    let rules = rules(options);
    assert_eq!(rules.env_arguments(), &BTreeMap::from([("a".to_owned(), "KEY".to_owned())]));
    let given = json!({ "a": 1, "b": 2, "c": 3 });
    assert_eq!(rules.apply(&given, &vars()).args, json!({ "b": 2, "c": 3 }));
}

#[test]
fn templates_are_filled_in_one_pass_at_the_top_only() {
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
    let made = applied(json!({ "args": { "fixed": fixed } }), json!({}));
    assert_eq!(made["one"], "p1/7");
    assert_eq!(made["nested"], "{project_id}", "what a variable brings in is not looked at again");
    assert_eq!(made["unknown"], "{nobody} {project_id");
    assert_eq!(made["empty"], "{} {p1}");
    assert_eq!(made["inner"], json!({ "text": "{project_id}" }));
    assert_eq!(made["list"], json!(["{project_id}"]));
    assert_eq!(made["number"], 5);
    assert_eq!(made["epoch"], "7", "a text, also of a number");
    assert_eq!(made["absent"], "{context_box_id}");
}

#[test]
fn defaults_are_rendered_too_and_what_a_caller_says_is_not() {
    let options = json!({ "args": { "defaults": { "a": "{project_id}" } } });
    assert_eq!(applied(options.clone(), json!({})), json!({ "a": "p1" }));
    let said = json!({ "a": "{project_id}" });
    assert_eq!(applied(options, said.clone()), said);
}

#[test]
fn a_model_sees_neither_fixed_nor_environment_and_sees_defaults_as_written() {
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
fn what_is_executed_must_fit_all_but_the_environment() {
    let rules = rules(json!({ "args": { "fixed": { "a": 1 } }, "envs": { "b": "KEY" } }));
    let full = json!({ "properties": { "a": {}, "b": {}, "c": {} }, "required": ["a", "b"] });
    let expected = json!({ "properties": { "a": {}, "c": {} }, "required": ["a"] });
    assert_eq!(rules.schema_for_execution(&full), expected);
}

#[test]
fn no_rules_cost_nothing_and_wrong_ones_are_named() {
    assert_eq!(ArgumentRules::from_options(&json!({ "jina": {} })), None);
    assert_eq!(ArgumentRules::from_options(&json!({ "args": { "fixed": {} }, "envs": {} })), None);
    assert_eq!(ArgumentRules::find_problem(&json!({ "args": { "fixed": {} } })), None);
    for (options, named) in [
        (json!({ "args": [] }), "options.args "),
        (json!({ "args": { "fixed": 1 } }), "options.args.fixed"),
        (json!({ "args": { "defaults": "x" } }), "options.args.defaults"),
        (json!({ "envs": ["x"] }), "options.envs"),
    ] {
        assert!(ArgumentRules::find_problem(&options).unwrap().contains(named), "{options}");
    }
}

#[test]
fn what_is_no_object_is_left_to_the_schema() {
    let rules = rules(json!({ "args": { "fixed": { "a": 1 } } }));
    assert_eq!(rules.apply(&json!([1]), &vars()).args, json!([1]));
}

#[test]
fn a_card_names_what_was_put_in_and_no_value() {
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
