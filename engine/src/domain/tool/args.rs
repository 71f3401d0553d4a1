//! Arguments of a tool: the mapping to those of a fallback tool, and the argument rules of a
//! definition. Pure.
//!
//! The rules are defaults, fixed values, environment variables, templates, and the schema shown to
//! a model. Precedence: environment > fixed > caller > default. This module never sees the values
//! of environment variables: the executor inserts them at the last moment, so no stored record
//! contains them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// For each argument of the fallback tool, the source of its value.
pub type ArgumentMapping = BTreeMap<String, ArgumentSource>;

/// Source of one argument's value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ArgumentSource {
    /// A JSON pointer into the first tool's arguments. A missing value leaves the argument out.
    #[serde(rename = "from")]
    Pointer(String),
    /// A fixed value.
    Value(Value),
}

/// Builds the fallback tool's arguments. Without a mapping they equal the first tool's.
pub fn map_arguments(mapping: Option<&ArgumentMapping>, args: &Value) -> Value {
    let Some(mapping) = mapping else { return args.clone() };
    let mut mapped = Map::new();
    for (name, from) in mapping {
        let value = match from {
            ArgumentSource::Pointer(pointer) => args.pointer(pointer).cloned(),
            ArgumentSource::Value(value) => Some(value.clone()),
        };
        if let Some(value) = value {
            mapped.insert(name.clone(), value);
        }
    }
    Value::Object(mapped)
}

/// The argument rules of a definition: `options.args` and `options.envs`.
#[derive(Debug, Clone, PartialEq)]
pub struct ArgumentRules {
    defaults: Map<String, Value>,
    fixed: Map<String, Value>,
    envs: BTreeMap<String, String>,
    hidden_from_model: BTreeSet<String>,
}

/// Arguments as executed and stored, and the changes that the rules made to them.
#[derive(Debug, Clone, PartialEq)]
pub struct AppliedArguments {
    /// Arguments to execute; without those that an environment variable supplies.
    pub args: Value,
    /// Names of the defaults that were applied, in order.
    pub defaults: Vec<String>,
    /// Names of the fixed values that were applied, in order.
    pub fixed: Vec<String>,
    /// Arguments from the caller that were dropped because an environment variable supplies them.
    pub overridden_by_env: Vec<String>,
}

impl ArgumentRules {
    /// Reads the rules from a definition's options; `None` if the options have none.
    pub fn from_options(options: &Value) -> Option<Self> {
        let map =
            |object: &Value, name: &str| object[name].as_object().cloned().unwrap_or_default();
        let args = &options["args"];
        let (defaults, fixed) = (map(args, "defaults"), map(args, "fixed"));
        let envs = parse_env_arguments(options);
        let env_options = map(options, "envs");
        let hidden: BTreeSet<String> = fixed.keys().chain(env_options.keys()).cloned().collect();
        if defaults.is_empty() && hidden.is_empty() {
            return None;
        }
        Some(Self { defaults, fixed, envs, hidden_from_model: hidden })
    }

    /// Returns the first problem in the argument part of the options, if any.
    pub fn find_problem(options: &Value) -> Option<String> {
        let parts = [
            ("options.args", options.get("args")),
            ("options.args.defaults", options["args"].get("defaults")),
            ("options.args.fixed", options["args"].get("fixed")),
            ("options.envs", options.get("envs")),
        ];
        let invalid = parts
            .into_iter()
            .find(|(_, part)| part.is_some_and(|part| !part.is_object() && !part.is_null()));
        invalid.map(|(name, _)| format!("{name} must be a mapping"))
    }

    /// For each argument that comes from the environment, the variable's name.
    pub fn env_arguments(&self) -> &BTreeMap<String, String> {
        &self.envs
    }

    /// Returns the arguments to execute. A value that is not an object stays unchanged, so that
    /// schema validation rejects it.
    pub fn apply(&self, args: &Value, vars: &TemplateVars) -> AppliedArguments {
        let (mut defaults, mut fixed, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
        let Value::Object(input) = args else {
            return AppliedArguments {
                args: args.clone(),
                defaults,
                fixed,
                overridden_by_env: dropped,
            };
        };
        let mut result = input.clone();
        for name in self.envs.keys() {
            if result.remove(name).is_some() {
                dropped.push(name.clone());
            }
        }
        for (name, value) in &self.defaults {
            // An explicit null counts as a given value.
            if !result.contains_key(name) && !self.envs.contains_key(name) {
                result.insert(name.clone(), vars.render_value(value));
                defaults.push(name.clone());
            }
        }
        for (name, value) in self.fixed.iter().filter(|(name, _)| !self.envs.contains_key(*name)) {
            result.insert(name.clone(), vars.render_value(value));
            fixed.push(name.clone());
        }
        defaults.sort();
        fixed.sort();
        AppliedArguments {
            args: Value::Object(result),
            defaults,
            fixed,
            overridden_by_env: dropped,
        }
    }

    /// Returns the schema for models: without the arguments that a model cannot set.
    pub fn schema_for_model(&self, parameters: &Value) -> Value {
        let mut schema = omit_properties(parameters, |name| self.hidden_from_model.contains(name));
        let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
        for (name, property) in properties.into_iter().flatten() {
            let Some(default) = self.defaults.get(name) else { continue };
            if let Value::Object(property) = property
                && !property.contains_key("default")
            {
                property.insert("default".into(), default.clone());
            }
        }
        schema
    }

    /// Returns the schema for the executed arguments: without those that the environment supplies.
    pub fn schema_for_execution(&self, parameters: &Value) -> Value {
        omit_properties(parameters, |name| self.envs.contains_key(name))
    }

    /// Returns the metadata of the `tool.call` card that records which rules were applied.
    pub fn audit_metadata(&self, args: &Value) -> Map<String, Value> {
        let applied = self.apply(args, &TemplateVars::default());
        let audit = json!({
            "tool_args_defaults_applied": applied.defaults,
            "tool_args_fixed_applied": applied.fixed,
            "tool_args_envs": self.envs,
        });
        match audit {
            Value::Object(audit) => audit,
            _ => Map::new(),
        }
    }
}

/// Reads `options.envs`: the variable for each argument. Ignores values that are blank or not
/// strings.
pub fn parse_env_arguments(options: &Value) -> BTreeMap<String, String> {
    let entries = options["envs"].as_object().into_iter().flatten();
    let variables = entries.filter_map(|(name, value)| Some((name, value.as_str()?.trim())));
    variables
        .filter(|(_, env)| !env.is_empty())
        .map(|(n, env)| (n.clone(), env.to_owned()))
        .collect()
}

fn omit_properties(parameters: &Value, hidden: impl Fn(&str) -> bool) -> Value {
    if parameters.as_object().is_none_or(Map::is_empty) {
        return json!({ "type": "object", "properties": {} });
    }
    let mut schema = parameters.clone();
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.retain(|name, _| !hidden(name));
    }
    if let Some(required) = schema.get_mut("required").and_then(Value::as_array_mut) {
        required.retain(|name| !name.as_str().is_some_and(&hidden));
    }
    schema
}

/// The values of the `{name}` placeholders in templates.
#[derive(Debug, Clone, Default)]
pub struct TemplateVars(BTreeMap<&'static str, String>);

impl TemplateVars {
    /// Creates variables with these values.
    pub(in crate::domain) fn new(values: BTreeMap<&'static str, String>) -> Self {
        Self(values)
    }

    /// Fills in the templates of a string; returns every other value unchanged.
    fn render_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) if text.contains('{') => Value::String(self.render(text)),
            other => other.clone(),
        }
    }

    /// Renders in one pass: a substituted value is not expanded again.
    fn render(&self, template: &str) -> String {
        let mut text = String::with_capacity(template.len());
        let mut rest = template;
        while let Some(open) = rest.find('{') {
            text.push_str(&rest[..open]);
            let inside = &rest[open + 1..];
            let variable =
                inside.find('}').and_then(|end| Some((end, self.0.get(&inside[..end])?)));
            rest = match variable {
                Some((end, value)) => {
                    text.push_str(value);
                    &inside[end + 1..]
                }
                None => {
                    text.push('{');
                    inside
                }
            };
        }
        text.push_str(rest);
        text
    }
}

#[cfg(test)]
mod tests;
