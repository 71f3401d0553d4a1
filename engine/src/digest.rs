//! Digests: what a model is given of a result that is too long for its context. Pure.
//!
//! A digest is never longer than its budget, and always says what was left out and how to get it:
//! the whole result is kept, and the tool `result.read` reads any part of it.

use crate::id::CallId;
use crate::json::Json;
use crate::tokens;

/// From this budget on, a digest always says how much there is, of what call, and how to read the
/// rest. With less it says as much of that as fits.
pub const MIN_BUDGET: usize = 64;

/// Where a result comes from, and what it was wanted for.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pub call_id: &'a CallId,
    pub tool: &'a str,
    /// What was asked (a question, the call's arguments): words that make a part relevant.
    pub hint: Option<&'a str>,
}

/// What a model is given instead of a long result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    pub text: String,
    /// How many tokens the text is; never more than the budget.
    pub tokens: usize,
    /// How many bytes the result is.
    pub whole_bytes: usize,
}

/// A digest of a result that is over the budget; none where the result fits as it is.
pub fn digest(data: &Json, budget_tokens: usize, source: &Source<'_>) -> Option<Digest> {
    let whole = data.text();
    if !tokens::exceeds(whole, budget_tokens) {
        return None;
    }
    let note = note(whole.len(), budget_tokens, source);
    let room = budget_tokens.saturating_sub(tokens::count(&note) + 4);
    let head = tokens::first(whole, room * 2 / 3);
    let tail = tokens::last(&whole[head.len()..], room - tokens::count(head).min(room));
    let mut text = note.clone();
    if !head.is_empty() {
        text = format!("{note}\n{head}\n…\n{tail}");
    }
    if tokens::exceeds(&text, budget_tokens) {
        text = tokens::first(&text, budget_tokens).to_owned();
    }
    Some(Digest { tokens: tokens::count(&text), text, whole_bytes: whole.len() })
}

/// What was left out and how to get it, in the longest words that fit.
fn note(bytes: usize, budget: usize, source: &Source<'_>) -> String {
    let Source { call_id, tool, .. } = source;
    let forms = [
        format!(
            "[{tool}: {bytes} bytes, of which parts are left out. \
             Read any part: result.read {{\"tool_call_id\":\"{call_id}\",\"pointer\":\"/…\"}}]"
        ),
        format!("[{bytes} bytes, left out: result.read {{\"tool_call_id\":\"{call_id}\"}}]"),
        format!("[left out: result.read {call_id}]"),
        "[left out]".to_owned(),
    ];
    let fits = |form: &String| !tokens::exceeds(form, budget);
    forms.into_iter().find(fits).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_within_any_budget_and_says_how_to_get_the_rest() {
        let call_id: CallId = "tc_01JD0ABCDEFGHJKMNPQRSTVWXY".parse().unwrap();
        let source = Source { call_id: &call_id, tool: "file.read", hint: None };
        let data = Json::of(&"line of text, number 7\n".repeat(500)).unwrap();
        for budget in 0..300 {
            let digest = digest(&data, budget, &source).unwrap();
            assert!(digest.tokens <= budget, "{budget}");
            assert_eq!(digest.tokens, tokens::count(&digest.text));
            assert_eq!(digest.whole_bytes, data.text().len());
            if budget >= MIN_BUDGET {
                assert!(digest.text.contains(call_id.as_str()), "{}", digest.text);
                assert!(digest.text.contains("result.read"), "{}", digest.text);
            }
        }
        assert_eq!(digest(&data, 100_000, &source), None);
    }
}
