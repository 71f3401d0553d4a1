//! Names for models: one mapping between a tool's name and a name that every model API takes. Pure.
//!
//! OpenAI's functions are named with 1 to 64 letters, digits, `_` and `-`; our names have dots and
//! slashes and up to 128 characters. A dot becomes `__`, a slash `--`, and what is too long is cut
//! and ends in a part of its hash. The mapping is undone by looking it up among the tools there
//! are, never by guessing: `a__b` may be `a.b`, or a tool that is really called so.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use crate::tool::hex;

/// The longest name that every model API takes.
pub const MAX_LENGTH: usize = 64;

/// `_` and so many digits of the hash at the end of a name.
const HASH_DIGITS: usize = 8;

/// A tool's name as models are told it.
///
/// ```
/// use toolcrib::names::for_model;
/// assert_eq!(for_model("calculation.eval"), "calculation__eval");
/// assert_eq!(for_model("mcp/github.create"), "mcp--github__create");
/// ```
pub fn for_model(name: &str) -> String {
    let mapped = mapped(name);
    if mapped.len() <= MAX_LENGTH { mapped } else { hashed(name, &mapped) }
}

/// The same with a part of the name's hash at its end: for tools whose mapped names are the same.
pub fn told_apart(name: &str) -> String {
    hashed(name, &mapped(name))
}

/// These tools' names as models are told them, in the same order, each another: where the mapped
/// names of two tools are the same, both end in a part of their own hash.
pub fn for_models<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let named: Vec<(&str, String)> = names.map(|name| (name, for_model(name))).collect();
    let mut taken: HashMap<&str, usize> = HashMap::new();
    for (_, told) in &named {
        *taken.entry(told).or_default() += 1;
    }
    let alone: Vec<bool> = named.iter().map(|(_, told)| taken[told.as_str()] == 1).collect();
    let pairs = named.into_iter().zip(alone);
    pairs.map(|((name, told), alone)| if alone { told } else { told_apart(name) }).collect()
}

/// The longest name that others like it are looked for: as long as a tool's name can be. Comparing
/// costs the product of both lengths, and a model may write a name as long as it likes.
const MAX_COMPARED: usize = 128;

/// The names most like this one, at most three, the likest first.
pub(crate) fn nearest<'n>(name: &str, others: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    if name.len() > MAX_COMPARED {
        return Vec::new();
    }
    let mut near: Vec<(f64, &str)> = others
        .map(|other| (strsim::jaro_winkler(name, other), other))
        .filter(|(likeness, _)| *likeness > 0.7)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

fn mapped(name: &str) -> String {
    name.replace('.', "__").replace('/', "--")
}

fn hashed(name: &str, mapped: &str) -> String {
    let hash = hex(&Sha256::digest(name.as_bytes()));
    let kept: String = mapped.chars().take(MAX_LENGTH - 1 - HASH_DIGITS).collect();
    format!("{kept}_{}", &hash[..HASH_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_plain(name: &str) -> bool {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        (1..=MAX_LENGTH).contains(&name.len()) && name.bytes().all(plain)
    }

    #[test]
    fn a_name_is_compared_with_others_only_where_it_can_be_one() {
        let others = ["calc.add", "calc.sub", "weather.query"];
        assert_eq!(nearest("calc.ad", others.into_iter()), ["calc.add", "calc.sub"]);
        let long = format!("calc.add{}", "d".repeat(MAX_COMPARED));
        assert_eq!(nearest(&long, others.into_iter()), [""; 0]);
    }

    #[test]
    fn every_name_becomes_one_that_models_take() {
        let long = format!("{}.{}", "a".repeat(60), "b".repeat(60));
        for name in ["weather.query", "a", "mcp/github.create-issue", "9.x_y", long.as_str()] {
            assert!(is_plain(&for_model(name)), "{name}: {}", for_model(name));
            assert!(is_plain(&told_apart(name)), "{name}: {}", told_apart(name));
        }
        assert_eq!(for_model("weather.query"), "weather__query");
        assert_eq!(for_model("plain_name-2"), "plain_name-2");
    }

    #[test]
    fn long_names_stay_different() {
        let head = "a".repeat(100);
        let (one, two) = (for_model(&format!("{head}.one")), for_model(&format!("{head}.two")));
        assert_ne!(one, two);
        assert_eq!((one.len(), two.len()), (64, 64));
        assert_eq!(one, for_model(&format!("{head}.one")), "always the same");
        let exactly = "b".repeat(64);
        assert_eq!(for_model(&exactly), exactly);
    }

    #[test]
    fn names_that_would_be_the_same_both_get_a_hash() {
        let told = for_models(["a.b", "a__b", "c.d"].into_iter());
        assert_eq!(told[0], told_apart("a.b"));
        assert_eq!(told[1], told_apart("a__b"));
        assert_eq!(told[2], "c__d");
        assert!(told[0].starts_with("a__b_") && told[0] != told[1], "{told:?}");
    }
}
