//! Short texts for entries when the token budget is small.
//!
//! Keeps the id of a pending call or an omitted result whole or drops it; a truncated fault keeps
//! its code. A truncated text ends with `…`, unless only a fixed word or nothing fits. Pure.

use crate::domain::fault::Fault;
use crate::model_formats::{self, PendingNotice};
use crate::results::tokens;

/// Marks a truncated text.
const CUT: &str = "…";

/// Notice for a ticket when the usual notice is too long.
pub(super) const SHORT_PENDING_NOTICE: &str = "its result follows later, with the same call id";

/// Truncates a text to a number of tokens.
pub(super) fn truncate_to_tokens(text: &str, budget: usize) -> String {
    if !tokens::exceeds(text, budget) {
        return text.to_owned();
    }
    let mut content_budget = budget.saturating_sub(tokens::count(CUT));
    loop {
        let short = format!("{}{CUT}", tokens::prefix_within(text, content_budget).trim_end());
        // The mark may tokenize differently after a text than alone.
        match content_budget.checked_sub(1) {
            Some(less) if tokens::exceeds(&short, budget) => content_budget = less,
            _ => return first_fitting([short], budget),
        }
    }
}

/// Shortens a fault: the whole fault without its detail, or its code and the beginning of its
/// message.
pub(super) fn shorten_fault(fault: &Fault, budget: usize) -> String {
    let brief = model_formats::fault_content(&Fault { detail: None, ..fault.clone() });
    if !tokens::exceeds(&brief, budget) {
        return brief;
    }
    let code = fault.code.as_str();
    let message = truncate_to_tokens(&format!("{code}: {}", fault.message), budget);
    if message.starts_with(code) { message } else { first_fitting(["failed".to_owned()], budget) }
}

/// Shortens the notice of an open call: with its whole id, or without an id.
pub(super) fn shorten_pending(pending: &PendingNotice<'_>, budget: usize) -> String {
    let with_id = model_formats::pending_content(&PendingNotice {
        message: SHORT_PENDING_NOTICE,
        questions: None,
        ..*pending
    });
    first_fitting(
        [with_id, format!("pending: {SHORT_PENDING_NOTICE}"), "pending".to_owned()],
        budget,
    )
}

/// Describes an omitted result: the call that reads it, or only the fact that it is omitted.
pub(super) fn describe_omitted(bytes: usize, reader: &str, id: &str, budget: usize) -> String {
    let read = format!("[{bytes} bytes: {reader} {{\"tool_call_id\":\"{id}\"}}]");
    first_fitting([read, "[omitted]".to_owned(), CUT.to_owned()], budget)
}

/// Returns the first text that fits the budget, or an empty string.
fn first_fitting(candidates: impl IntoIterator<Item = String>, budget: usize) -> String {
    candidates.into_iter().find(|text| !tokens::exceeds(text, budget)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::domain::fault::Code;

    #[test]
    fn shortened_texts_fit_their_budget_and_never_cut_an_id() {
        let id = "tc_01M7H23XDKQJPB0X7SZ7GG11CR";
        let ticket = PendingNotice {
            status: "pending",
            tool_call_id: id,
            task_id: Some(id),
            message: "a message that is longer than it has to be, as such messages are",
            approval_id: None,
            questions: None,
        };
        let long = Fault::new(Code::RuntimeError, "it went wrong in a way. ".repeat(100))
            .with_detail(json!({ "more": "x".repeat(500) }));
        for budget in 0..150 {
            let shortened = [
                shorten_pending(&ticket, budget),
                shorten_fault(&long, budget),
                describe_omitted(7, "result.read", id, budget),
                truncate_to_tokens(&"ein langer Satz über Käse 😀 ".repeat(50), budget),
            ];
            for text in &shortened {
                assert!(!tokens::exceeds(text, budget), "{budget}: {text}");
                let json = !text.starts_with('{') || serde_json::from_str::<Value>(text).is_ok();
                assert!(json && text.contains("tc_") == text.contains(id), "{budget}: {text}");
            }
            let marked =
                shortened[1].is_empty() || shortened[1] == "failed" || shortened[1].ends_with(CUT);
            assert!(marked, "{budget}: {}", shortened[1]);
        }
        assert!(shorten_fault(&long, 20).starts_with("RUNTIME_ERROR: it went wrong in a way."));
        assert_eq!(shorten_pending(&ticket, 2), "pending");
        let small = Fault::new(Code::RuntimeError, "no").with_detail(json!("x".repeat(5_000)));
        let small: Value = serde_json::from_str(&shorten_fault(&small, 60)).unwrap();
        assert_eq!(small["error"]["message"], "no");
    }
}
