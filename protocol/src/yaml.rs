//! Parses untrusted YAML within a budget, so that a small text cannot expand into a large value.

use serde_json::Value;

/// Parses one document. `no` and `yes` are strings, and a duplicate key is an error.
pub fn parse(text: &str) -> Result<Value, String> {
    parse_with_budget(text, 20_000)
}

/// Parses a large document, such as the description of an API.
pub fn parse_large(text: &str) -> Result<Value, String> {
    parse_with_budget(text, 500_000)
}

fn parse_with_budget(text: &str, max_nodes: usize) -> Result<Value, String> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_nodes: max_nodes,
            max_events: max_nodes.saturating_mul(5) / 2,
            max_aliases: 100,
            max_anchors: 100,
            max_depth: 64,
        },
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_are_not_booleans_and_alias_bombs_are_refused() {
        assert_eq!(parse("country: NO\nn: 1.5\non: true").unwrap()["country"], json!("NO"));
        assert!(parse("a: 1\na: 2").is_err(), "a key twice");
        assert!(parse("a: [1, 2").is_err());
        let mut bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned();
        for (n, letter) in ('b'..='j').enumerate() {
            let before = (b'a' + n as u8) as char;
            let list = vec![format!("*{before}"); 9].join(",");
            bomb.push_str(&format!("{letter}: &{letter} [{list}]\n"));
        }
        assert!(parse(&bomb).is_err());
    }
}
