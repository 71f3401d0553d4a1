//! Differences between the arguments of two calls, for the person that decides. Pure.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::domain::json::Json;

/// Maximum number of changes that are listed.
pub const MAX_CHANGES: usize = 100;

/// One changed value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArgumentChange {
    /// JSON pointer to the value; empty for the arguments as a whole.
    pub path: String,
    /// The value before; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read_value")]
    pub before: Option<Value>,
    /// The value now; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read_value")]
    pub after: Option<Value>,
}

/// Reads a value that is present: `null` is a value, too.
fn read_value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Returns the changes from one set of arguments to another, at most [`MAX_CHANGES`].
pub fn find_changes(before: &Json, after: &Json) -> Vec<ArgumentChange> {
    let mut changes = Vec::new();
    compare(&mut String::new(), Some(&before.to_value()), Some(&after.to_value()), &mut changes);
    changes
}

fn compare(
    path: &mut String,
    before: Option<&Value>,
    after: Option<&Value>,
    changes: &mut Vec<ArgumentChange>,
) {
    if before == after || changes.len() >= MAX_CHANGES {
        return;
    }
    let depth = path.len();
    match (before, after) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let added = new.keys().filter(|key| !old.contains_key(*key));
            for key in old.keys().chain(added) {
                path.push('/');
                path.push_str(&key.replace('~', "~0").replace('/', "~1"));
                compare(path, old.get(key), new.get(key), changes);
                path.truncate(depth);
            }
        }
        (Some(Value::Array(old)), Some(Value::Array(new))) => {
            for index in 0..old.len().max(new.len()) {
                path.push_str(&format!("/{index}"));
                compare(path, old.get(index), new.get(index), changes);
                path.truncate(depth);
            }
        }
        _ => changes.push(ArgumentChange {
            path: path.clone(),
            before: before.cloned(),
            after: after.cloned(),
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changes_name_their_positions() {
        let before = Json::parse(r#"{"to":"ada","sum":10,"tags":["a","b"],"a/b":1}"#).unwrap();
        let after = Json::parse(r#"{"to":"ada","sum":900,"tags":["a"],"note":null}"#).unwrap();
        let found = serde_json::to_value(find_changes(&before, &after)).unwrap();
        let expected = json!([
            { "path": "/a~1b", "before": 1 },
            { "path": "/sum", "before": 10, "after": 900 },
            { "path": "/tags/1", "before": "b" },
            { "path": "/note", "after": null },
        ]);
        let sorted = |value: Value| {
            let mut list = value.as_array().unwrap().clone();
            list.sort_by_key(|change| change["path"].as_str().unwrap().to_owned());
            list
        };
        assert_eq!(sorted(found), sorted(expected));
        assert_eq!(find_changes(&before, &before), []);
    }

    #[test]
    fn the_list_of_changes_is_bounded() {
        let list = |n: usize| Json::from_value(&json!(vec![n; 1_000]));
        assert_eq!(find_changes(&list(1), &list(2)).len(), MAX_CHANGES);
    }
}
