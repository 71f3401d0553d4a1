//! Counts the tokens of a text with a real tokenizer (`o200k_base`) and divides token budgets.
//! Pure.
//!
//! The vocabulary is compressed in the program and expanded on first use, never at startup, so a
//! process that counts no tokens does not pay for it. Other models tokenize slightly differently;
//! a budget counted here is exact for this encoding and a close estimate for them.

mod o200k;

use o200k::{MAX_TOKEN_BYTES, Merger, split};

/// Returns the number of tokens of the text.
pub fn count(text: &str) -> usize {
    let mut merger = Merger::new();
    split(text).map(|piece| merger.count(piece)).sum()
}

/// Returns whether the text has more tokens than the budget. Reads only as much of it as needed.
pub fn exceeds(text: &str, budget: usize) -> bool {
    // Every token has at least one byte and at most `MAX_TOKEN_BYTES`.
    if text.len() <= budget {
        return false;
    }
    if text.len() > budget.saturating_mul(MAX_TOKEN_BYTES) {
        return true;
    }
    let mut merger = Merger::new();
    let mut left = budget;
    for piece in split(text) {
        match left.checked_sub(merger.count(piece)) {
            Some(rest) => left = rest,
            None => return true,
        }
    }
    false
}

/// Returns the longest prefix of the text within the budget, in whole characters.
///
/// A prefix on its own can differ by a token or two from the same text in its context; the returned
/// prefix on its own is within the budget.
pub fn prefix_within(text: &str, budget: usize) -> &str {
    if text.len() <= budget {
        return text;
    }
    let max_bytes = budget.saturating_mul(MAX_TOKEN_BYTES).min(text.len());
    let text = &text[..text.floor_char_boundary(max_bytes)];
    let mut merger = Merger::new();
    let (mut end, mut left) = (0, budget);
    for piece in split(text) {
        if let Some(rest) = left.checked_sub(merger.count(piece)) {
            left = rest;
            end += piece.len();
            continue;
        }
        let bytes: usize = merger.lengths(piece).iter().take(left).sum();
        end = text.floor_char_boundary(end + bytes);
        break;
    }
    // After the cut, the prefix may tokenize differently than it did inside the text.
    while exceeds(&text[..end], budget) {
        end = text.floor_char_boundary(end - 1);
    }
    &text[..end]
}

/// Returns the longest suffix of the text within the budget, in whole characters.
pub fn suffix_within(text: &str, budget: usize) -> &str {
    let max_bytes = budget.saturating_mul(MAX_TOKEN_BYTES).min(text.len());
    let text = &text[text.ceil_char_boundary(text.len() - max_bytes)..];
    let pieces: Vec<&str> = split(text).collect();
    let mut merger = Merger::new();
    let (mut begin, mut left) = (text.len(), budget);
    for piece in pieces.into_iter().rev() {
        if let Some(rest) = left.checked_sub(merger.count(piece)) {
            left = rest;
            begin -= piece.len();
            continue;
        }
        let bytes: usize = merger.lengths(piece).iter().rev().take(left).sum();
        begin = text.ceil_char_boundary(begin - bytes);
        break;
    }
    while exceeds(&text[begin..], budget) {
        begin = text.ceil_char_boundary(begin + 1);
    }
    &text[begin..]
}

/// Divides a budget among several needs. Needs below an even share are met in full, and the others
/// share the remainder evenly. The shares never add up to more than the budget.
pub(crate) fn divide_budget(budget: usize, needs: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|index| needs[*index]);
    let mut shares = vec![0; needs.len()];
    let mut left = budget;
    for (rank, index) in order.into_iter().enumerate() {
        let even = left / (needs.len() - rank);
        shares[index] = needs[index].min(even);
        left -= shares[index];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_counts_match_the_reference_encoding() {
        // Reference values from the publisher of the encoding.
        assert_eq!(count(""), 0);
        assert_eq!(count("hello world"), 2);
        assert_eq!(count("antidisestablishmentarianism"), 6);
        assert_eq!(count("2 + 2 = 4"), 7);
        assert_eq!(count("お誕生日おめでとう"), 8);
    }

    #[test]
    fn exceeds_is_true_only_above_the_budget() {
        for text in
            ["", "a", "hello world", "お誕生日おめでとう", &"a".repeat(5_000), &" ".repeat(9_000)]
        {
            let tokens = count(text);
            assert!(!exceeds(text, tokens), "{tokens}");
            if tokens > 0 {
                assert!(exceeds(text, tokens - 1), "{tokens}");
            }
        }
    }

    #[test]
    fn prefixes_and_suffixes_fit_the_budget_and_nearly_use_it() {
        let text =
            "Zeile 1: Grüße, 日本語 and \u{1F469}\u{200D}\u{1F680} 12345 errors\n\n".repeat(40);
        let whole = count(&text);
        for budget in 0..whole + 2 {
            let (head, tail) = (prefix_within(&text, budget), suffix_within(&text, budget));
            assert!(text.starts_with(head) && text.ends_with(tail));
            assert!(count(head) <= budget && count(tail) <= budget, "{budget}");
            let min = budget.min(whole).saturating_sub(6);
            assert!(count(head) >= min && count(tail) >= min, "{budget}");
        }
    }

    #[test]
    fn small_items_get_what_they_need_and_large_ones_share_the_rest() {
        assert_eq!(divide_budget(100, &[10, 500, 20, 1_000]), [10, 35, 20, 35]);
        assert_eq!(divide_budget(100, &[10, 20]), [10, 20]);
        assert_eq!(divide_budget(100, &[1_000]), [100]);
        assert_eq!(divide_budget(3, &[5, 5, 5, 5]), [0, 1, 1, 1]);
        assert_eq!(divide_budget(100, &[]), [0; 0]);
        for budget in 0..50 {
            let shares = divide_budget(budget, &[7, 0, 31, 4, 4, 90]);
            assert!(shares.iter().sum::<usize>() <= budget, "{budget}: {shares:?}");
        }
    }
}
