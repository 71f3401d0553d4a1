//! Maps the arguments of a call to those of a fallback tool, and applies argument rules. Pure.

mod rules;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use rules::{AppliedArguments, ArgumentRules, TemplateVars, parse_env_arguments};

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
    let mut made = Map::new();
    for (name, from) in mapping {
        let value = match from {
            ArgumentSource::Pointer(pointer) => args.pointer(pointer).cloned(),
            ArgumentSource::Value(value) => Some(value.clone()),
        };
        if let Some(value) = value {
            made.insert(name.clone(), value);
        }
    }
    Value::Object(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_picked_fixed_or_left_out() {
        let mapping: ArgumentMapping = serde_json::from_value(json!({
            "q": {"from": "/query"}, "limit": {"value": 5}, "gone": {"from": "/nowhere"}
        }))
        .unwrap();
        let made = map_arguments(Some(&mapping), &json!({"query": "rain", "x": 1}));
        assert_eq!(made, json!({"q": "rain", "limit": 5}));
        assert_eq!(map_arguments(None, &json!({"a": 1})), json!({"a": 1}));
    }
}
