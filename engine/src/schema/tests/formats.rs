//! The `format` cases of the JSON Schema Test Suite, for both dialects.
//!
//! `format_suite.json` has the cases of `optional/format` whose instance is a text, as
//! `[instance, is valid, description]` (copyright 2012 Julian Berman, MIT license).

use std::collections::BTreeMap;

use super::*;

/// Cases of one format.
type FormatCases = Vec<(String, bool, String)>;

/// Returns the cases in which Toolcrib and the suite disagree.
fn find_disagreements() -> Vec<String> {
    let suite: BTreeMap<String, BTreeMap<String, FormatCases>> =
        serde_json::from_str(include_str!("format_suite.json")).unwrap();
    let mut found = Vec::new();
    for (draft, formats) in suite {
        let dialect = match draft.as_str() {
            "draft7" => DRAFT7,
            _ => "https://json-schema.org/draft/2020-12/schema",
        };
        for (format, cases) in formats {
            let schema = compile_schema(&json!({ "$schema": dialect, "format": format }));
            for (instance, valid, description) in cases {
                if schema.problems(&json!(instance)).is_empty() != valid {
                    found.push(format!("{draft} {format}: {description}: {instance:?}"));
                }
            }
        }
    }
    found
}

#[test]
fn formats_agree_with_the_test_suite() {
    assert_eq!(find_disagreements(), [""; 0]);
}
