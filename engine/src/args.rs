//! How arguments are made from other arguments. Pure.

mod rules;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use rules::{Applied, Rules, Vars, envs};

/// For each argument of the alternate tool, where its value comes from.
pub type Mapping = BTreeMap<String, From>;

/// Where one argument comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum From {
    /// A JSON pointer into the first tool's arguments; what is not there is left out.
    From(String),
    /// A fixed value.
    Value(Value),
}

/// The alternate's arguments.
pub fn mapped(mapping: Option<&Mapping>, args: &Value) -> Value {
    let Some(mapping) = mapping else { return args.clone() };
    let mut made = Map::new();
    for (name, from) in mapping {
        let value = match from {
            From::From(pointer) => args.pointer(pointer).cloned(),
            From::Value(value) => Some(value.clone()),
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
        let mapping: Mapping = serde_json::from_value(json!({
            "q": {"from": "/query"}, "limit": {"value": 5}, "gone": {"from": "/nowhere"}
        }))
        .unwrap();
        let made = mapped(Some(&mapping), &json!({"query": "rain", "x": 1}));
        assert_eq!(made, json!({"q": "rain", "limit": 5}));
        assert_eq!(mapped(None, &json!({"a": 1})), json!({"a": 1}));
    }
}
