//! Shortens texts and formats times for a prompt.

use crate::results::tokens;

/// Maximum tokens of a tool's description line, and of a call's arguments.
pub(super) const LINE_TOKENS: usize = 32;

/// Returns the first line or sentence of a description.
pub(crate) fn first_line(text: &str) -> &str {
    let line = text.trim().lines().next().unwrap_or_default();
    line.split_once(". ").map_or(line, |(sentence, _)| sentence).trim_end_matches('.')
}

/// Joins the words of a text with single spaces.
pub(super) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Truncates a text to `budget` tokens and marks the truncation.
pub(crate) fn truncate_to_tokens(text: &str, budget: usize) -> String {
    if !tokens::exceeds(text, budget) {
        return text.to_owned();
    }
    let marked = format!("{}…", tokens::prefix_within(text, budget.saturating_sub(1)).trim_end());
    tokens::prefix_within(&marked, budget).to_owned()
}

/// Formats the time since `at_ms` in its two largest units.
pub(super) fn format_elapsed(at_ms: u64, now_ms: u64) -> String {
    let seconds = now_ms.saturating_sub(at_ms) / 1_000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}
