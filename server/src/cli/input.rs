//! Parses the arguments of a tool from the command line: `name=value`, and JSON from an option, a
//! file or standard input.

use std::collections::HashSet;
use std::io::Read;

use serde_json::{Map, Value};
use toolcrib::Json;

use super::failure::CommandFailure;

/// Builds the arguments of a call from `--args` and the `name=value` pairs, which override members
/// of `--args`.
pub fn parse_arguments(json: Option<&str>, pairs: &[String]) -> Result<Value, CommandFailure> {
    let mut value = match json {
        Some(json) => read_json(json)?,
        None => Value::Object(Map::new()),
    };
    if pairs.is_empty() {
        return Ok(value);
    }
    let Value::Object(object) = &mut value else {
        let message = "name=value needs --args to be an object, or no --args";
        return Err(CommandFailure::usage(message));
    };
    let mut given = HashSet::new();
    for pair in pairs {
        let Some((name, text)) = pair.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            return Err(CommandFailure::usage(format!("\"{pair}\" is not name=value"))
                .hint("write query=\"weather in Beijing\", or --args '{\"query\": …}'"));
        };
        if !given.insert(name) {
            let message = format!("the argument \"{name}\" is given twice; give each one once");
            return Err(CommandFailure::usage(message));
        }
        // A value that is not JSON is text, so that text needs no second pair of quotes.
        let parsed = match serde_json::from_str(text) {
            Ok(value) => refuse_repeated_keys(name, text, value)?,
            Err(_) => Value::from(text),
        };
        object.insert(name.to_owned(), parsed);
    }
    Ok(value)
}

/// Parses JSON from the argument itself, from the file of `@file`, or from standard input for `-`.
fn read_json(json: &str) -> Result<Value, CommandFailure> {
    let (origin, text) = match json.strip_prefix('@') {
        _ if json == "-" => {
            let mut text = String::new();
            let read = std::io::stdin().read_to_string(&mut text);
            read.map_err(|error| {
                CommandFailure::usage(format!("cannot read standard input: {error}"))
            })?;
            ("standard input", text)
        }
        Some(file) => {
            let read = std::fs::read_to_string(file);
            (
                file,
                read.map_err(|error| {
                    CommandFailure::usage(format!("cannot read {file}: {error}"))
                })?,
            )
        }
        None => ("--args", json.to_owned()),
    };
    let value = serde_json::from_str(&text).map_err(|error| {
        CommandFailure::usage(format!("{origin} is not JSON: {error}"))
            .hint("quote it for the shell: --args '{\"expression\": \"2*21\"}'")
    })?;
    refuse_repeated_keys(origin, &text, value)
}

/// Returns the value that was parsed from this text, unless an object has the same key twice: the
/// parsed value contains only one of them, and the server could not refuse it.
fn refuse_repeated_keys(origin: &str, text: &str, value: Value) -> Result<Value, CommandFailure> {
    let repeated = Json::parse(text).ok().and_then(|json| json.to_value_with_unique_keys().err());
    match repeated {
        None => Ok(value),
        Some(repeated) => {
            let (key, pointer) = (&repeated.key, &repeated.pointer);
            let message = format!("{origin}: {pointer}: the key \"{key}\" is given twice");
            Err(CommandFailure::usage(message).hint("give each key once"))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pairs(pairs: &[&str]) -> Vec<String> {
        pairs.iter().map(|&pair| pair.to_owned()).collect()
    }

    #[test]
    fn values_are_json_or_text() {
        let pairs =
            pairs(&["q=weather in Beijing", "n=5", "on=true", "list=[1,2]", "e=", "eq=a=b"]);
        let expected = json!({
            "q": "weather in Beijing", "n": 5, "on": true, "list": [1, 2], "e": "", "eq": "a=b"
        });
        assert_eq!(parse_arguments(None, &pairs).unwrap(), expected);
    }

    #[test]
    fn pairs_override_the_json_document() {
        let parsed = parse_arguments(Some(r#"{"a":1,"b":2}"#), &pairs(&["b=3"])).unwrap();
        assert_eq!(parsed, json!({"a": 1, "b": 3}));
        assert_eq!(
            parse_arguments(Some("[1]"), &[]).unwrap(),
            json!([1]),
            "the tool's schema decides"
        );
        assert!(parse_arguments(Some("[1]"), &pairs(&["a=1"])).is_err());
    }

    #[test]
    fn repeated_keys_are_refused() {
        let refused = |json: Option<&str>, given: &[&str]| {
            parse_arguments(json, &pairs(given)).unwrap_err().message
        };
        let message = refused(Some(r#"{"n":1,"n":2}"#), &[]);
        assert_eq!(message, "--args: /n: the key \"n\" is given twice");
        let message = refused(Some(r#"{"a":[{"b":1,"\u0062":2}]}"#), &["c=1"]);
        assert_eq!(message, "--args: /a/0/b: the key \"b\" is given twice");
        let message = refused(None, &["o={\"b\":1,\"b\":2}"]);
        assert_eq!(message, "o: /b: the key \"b\" is given twice");
        let message = refused(None, &["n=1", "m=1", "n=2"]);
        assert_eq!(message, "the argument \"n\" is given twice; give each one once");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"n\":1,\"n\":2}").unwrap();
        let name = format!("@{}", file.path().display());
        assert!(refused(Some(&name), &[]).contains("/n: the key \"n\" is given twice"));
    }

    #[test]
    fn arguments_are_read_from_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"a\": 1}").unwrap();
        let name = format!("@{}", file.path().display());
        assert_eq!(parse_arguments(Some(&name), &[]).unwrap(), json!({"a": 1}));
        assert!(
            parse_arguments(Some("@/nonexistent"), &[])
                .unwrap_err()
                .message
                .contains("/nonexistent")
        );
    }

    #[test]
    fn invalid_input_is_refused_with_a_message() {
        for invalid in ["x", "=1", ""] {
            assert!(parse_arguments(None, &pairs(&[invalid])).is_err(), "{invalid:?}");
        }
        assert!(parse_arguments(Some("{"), &[]).unwrap_err().message.contains("not JSON"));
        let deep = format!("a={}", "[".repeat(100_000));
        assert!(parse_arguments(None, &[deep]).unwrap()["a"].is_string(), "too deep to be JSON");
    }
}
