//! Maps tool names to model-facing names that every model API accepts. Pure.
//!
//! OpenAI function names have 1 to 64 letters, digits, `_` and `-`; tool names have dots and
//! slashes and up to 128 characters. A dot becomes `__`, a slash becomes `--`, and a name that is
//! too long is truncated and ends in part of its hash. The mapping is reversed by a lookup among
//! the existing tools, never by guessing: `a__b` may stand for `a.b` or for a tool that is really
//! named `a__b`.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use crate::domain::id::hex;

/// Maximum length of a name that every model API accepts.
pub const MAX_LENGTH: usize = 64;

/// Number of hash digits after the `_` at the end of a name.
const HASH_DIGITS: usize = 8;

/// Returns the model-facing name of a tool.
///
/// ```
/// use toolcrib::registry::name_for_model;
/// assert_eq!(name_for_model("calculation.eval"), "calculation__eval");
/// assert_eq!(name_for_model("mcp/github.create"), "mcp--github__create");
/// ```
pub fn name_for_model(name: &str) -> String {
    let mapped = replace_separators(name);
    if mapped.len() <= MAX_LENGTH { mapped } else { append_hash(name, &mapped) }
}

/// Returns the model-facing name with part of the name's hash at its end, for tools whose mapped
/// names collide.
pub fn hashed_name_for_model(name: &str) -> String {
    append_hash(name, &replace_separators(name))
}

/// Returns the model-facing names of these tools, in the same order and all distinct: if the mapped
/// names of two tools collide, both end in part of their own hash.
pub fn names_for_model<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mapped: Vec<(&str, String)> = names.map(|name| (name, name_for_model(name))).collect();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for (_, model_name) in &mapped {
        *counts.entry(model_name).or_default() += 1;
    }
    let is_unique: Vec<bool> =
        mapped.iter().map(|(_, model_name)| counts[model_name.as_str()] == 1).collect();
    let pairs = mapped.into_iter().zip(is_unique);
    pairs
        .map(
            |((name, model_name), is_unique)| {
                if is_unique { model_name } else { hashed_name_for_model(name) }
            },
        )
        .collect()
}

/// Maximum length of a name for which similar names are searched: the maximum length of a tool
/// name. A comparison costs the product of both lengths, and a model can write a name of any
/// length.
const MAX_COMPARED: usize = 128;

/// Returns up to three names that are most similar to `name`, best first.
pub(crate) fn suggest_similar<'n>(
    name: &str,
    names: impl Iterator<Item = &'n str>,
) -> Vec<&'n str> {
    if name.len() > MAX_COMPARED {
        return Vec::new();
    }
    let mut candidates: Vec<(f64, &str)> = names
        .map(|other| (strsim::jaro_winkler(name, other), other))
        .filter(|(similarity, _)| *similarity > 0.7)
        .collect();
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    candidates.into_iter().take(3).map(|(_, name)| name).collect()
}

fn replace_separators(name: &str) -> String {
    name.replace('.', "__").replace('/', "--")
}

fn append_hash(name: &str, mapped: &str) -> String {
    let hash = hex(&Sha256::digest(name.as_bytes()));
    let prefix: String = mapped.chars().take(MAX_LENGTH - 1 - HASH_DIGITS).collect();
    format!("{prefix}_{}", &hash[..HASH_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_plain(name: &str) -> bool {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        (1..=MAX_LENGTH).contains(&name.len()) && name.bytes().all(is_allowed)
    }

    #[test]
    fn overlong_names_get_no_suggestions() {
        let others = ["calc.add", "calc.sub", "weather.query"];
        assert_eq!(suggest_similar("calc.ad", others.into_iter()), ["calc.add", "calc.sub"]);
        let long = format!("calc.add{}", "d".repeat(MAX_COMPARED));
        assert_eq!(suggest_similar(&long, others.into_iter()), [""; 0]);
    }

    #[test]
    fn every_name_becomes_a_valid_model_facing_name() {
        let long = format!("{}.{}", "a".repeat(60), "b".repeat(60));
        for name in ["weather.query", "a", "mcp/github.create-issue", "9.x_y", long.as_str()] {
            assert!(is_plain(&name_for_model(name)), "{name}: {}", name_for_model(name));
            assert!(
                is_plain(&hashed_name_for_model(name)),
                "{name}: {}",
                hashed_name_for_model(name)
            );
        }
        assert_eq!(name_for_model("weather.query"), "weather__query");
        assert_eq!(name_for_model("plain_name-2"), "plain_name-2");
    }

    #[test]
    fn long_names_stay_distinct() {
        let head = "a".repeat(100);
        let (one, two) =
            (name_for_model(&format!("{head}.one")), name_for_model(&format!("{head}.two")));
        assert_ne!(one, two);
        assert_eq!((one.len(), two.len()), (64, 64));
        assert_eq!(one, name_for_model(&format!("{head}.one")), "the name is deterministic");
        let exactly = "b".repeat(64);
        assert_eq!(name_for_model(&exactly), exactly);
    }

    #[test]
    fn colliding_model_facing_names_both_get_a_hash() {
        let model_names = names_for_model(["a.b", "a__b", "c.d"].into_iter());
        assert_eq!(model_names[0], hashed_name_for_model("a.b"));
        assert_eq!(model_names[1], hashed_name_for_model("a__b"));
        assert_eq!(model_names[2], "c__d");
        assert!(
            model_names[0].starts_with("a__b_") && model_names[0] != model_names[1],
            "{model_names:?}"
        );
    }
}
