//! Weighs regular expressions by their potential cost.
//!
//! This module never matches anything itself; the linear-time engine behind `jsonschema` does.
//!
//! "Linear" means the length of the text times the size of the expression. `[01]*1[01]{4000}` is
//! short, yet takes half a minute for a megabyte. An expression is therefore weighed by the size of
//! its expanded counted repetitions, and matching a text costs weight times length.

use serde_json::Value;

/// Returns an upper bound on the number of states of an expression that are active at once.
pub(super) fn pattern_weight(pattern: &str) -> usize {
    // In an anchored expression, the first repetition is active in only one state: the current
    // position in the text. This spares the most common kind, `^[a-z]{1,4096}$`.
    let mut first = pattern.starts_with('^') && !pattern.contains('|');
    let mut outer: Vec<usize> = Vec::new();
    let (mut sum, mut atom, mut group) = (0_usize, 0_usize, false);
    let mut rest = pattern.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '(' => {
                outer.push(sum.saturating_add(atom));
                if rest.next_if_eq(&'?').is_some() {
                    rest.next();
                }
                (sum, atom, group) = (0, 0, false);
                continue;
            }
            ')' => {
                (atom, sum) = (sum.saturating_add(atom), outer.pop().unwrap_or(0));
                group = true;
                continue;
            }
            '{' => {
                let counts: String = rest.by_ref().take_while(|c| *c != '}').collect();
                let max = counts.split(',').filter_map(|n| n.trim().parse::<usize>().ok()).max();
                let repeats = max.unwrap_or(1).max(1);
                let free = first && !group && outer.is_empty();
                atom = if free { atom } else { atom.saturating_mul(repeats) };
                first = false;
                continue;
            }
            '*' | '+' => first = false,
            '?' | '^' | '$' | '|' => {}
            '\\' => {
                rest.next();
                (sum, atom, group) = (sum.saturating_add(atom), 1, false);
            }
            '[' => {
                skip_char_class(&mut rest);
                (sum, atom, group) = (sum.saturating_add(atom), 1, false);
            }
            _ => (sum, atom, group) = (sum.saturating_add(atom), 1, false),
        }
    }
    let open = outer.iter().fold(0_usize, |total, sum| total.saturating_add(*sum));
    open.saturating_add(sum).saturating_add(atom).min(1 << 32)
}

fn skip_char_class(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    let mut escaped = false;
    for c in rest.by_ref() {
        if c == ']' && !escaped {
            return;
        }
        escaped = c == '\\' && !escaped;
    }
}

/// Returns the total weight of all patterns in `patternProperties`, because every property name is
/// matched against each of them.
pub(super) fn name_weight(schema: &Value) -> usize {
    let patterns = schema.get("patternProperties").and_then(Value::as_object);
    patterns.into_iter().flat_map(|map| map.keys()).map(|pattern| pattern_weight(pattern)).sum()
}
