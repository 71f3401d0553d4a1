//! Checks that the arguments in a condition exist in the input schema of a tool.

use serde_json::Value;

use super::PathStep;

/// Returns the name of the first step that a schema does not describe. A schema that combines
/// others, or that describes no members, accepts every step.
pub(super) fn find_missing(schema: &Value, steps: &[PathStep]) -> Option<String> {
    const COMBINATORS: [&str; 9] = [
        "$ref",
        "$dynamicRef",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "not",
        "patternProperties",
        "dependentSchemas",
    ];
    let (step, rest) = steps.split_first()?;
    let schema = schema.as_object()?;
    if COMBINATORS.iter().any(|word| schema.contains_key(*word)) {
        return None;
    }
    match step {
        PathStep::Item => find_missing(schema.get("items")?, rest),
        PathStep::Field(name) => {
            let properties = schema.get("properties")?.as_object()?;
            match properties.get(name) {
                Some(property) => find_missing(property, rest),
                None => {
                    let others = schema.get("additionalProperties");
                    let is_open = others.is_some_and(|others| *others != Value::Bool(false));
                    (!is_open).then(|| name.clone())
                }
            }
        }
    }
}
