//! Short texts for entries when the token budget is small. Never cuts within an id or within JSON,
//! and marks every truncated text. Pure.

use crate::dialect::{self, Pending};
use crate::fault::Fault;
use crate::tokens;

/// Marks a truncated text.
const CUT: &str = "…";

/// Notice for a ticket when the usual notice is too long.
pub(super) const LATER: &str = "its result comes later, with this same call id";

/// Truncates a text to a number of tokens.
pub(super) fn cut(text: &str, budget: usize) -> String {
    if !tokens::exceeds(text, budget) {
        return text.to_owned();
    }
    let mut room = budget.saturating_sub(tokens::count(CUT));
    loop {
        let short = format!("{}{CUT}", tokens::first(text, room).trim_end());
        // The mark may tokenize differently after a text than alone.
        match room.checked_sub(1) {
            Some(less) if tokens::exceeds(&short, budget) => room = less,
            _ => return fitting([short], budget),
        }
    }
}

/// Shortens a fault: the whole fault without its detail, or its code and the beginning of its
/// message.
pub(super) fn fault(fault: &Fault, budget: usize) -> String {
    let brief = dialect::fault_content(&Fault { detail: None, ..fault.clone() });
    if !tokens::exceeds(&brief, budget) {
        return brief;
    }
    let code = fault.code.as_str();
    let said = cut(&format!("{code}: {}", fault.message), budget);
    if said.starts_with(code) { said } else { fitting(["failed".to_owned()], budget) }
}

/// Shortens the notice of an open call: with its whole id, or without an id.
pub(super) fn pending(pending: &Pending<'_>, budget: usize) -> String {
    let with_id = dialect::pending_content(&Pending { message: LATER, ..*pending });
    fitting([with_id, format!("pending: {LATER}"), "pending".to_owned()], budget)
}

/// Describes an omitted result: the call that reads it, or only the fact that it is omitted.
pub(super) fn left_out(bytes: usize, id: &str, budget: usize) -> String {
    let read = format!("[{bytes} bytes: result.read {{\"tool_call_id\":\"{id}\"}}]");
    fitting([read, "[left out]".to_owned(), CUT.to_owned()], budget)
}

/// Returns the first text that fits the budget, or an empty string.
fn fitting(said: impl IntoIterator<Item = String>, budget: usize) -> String {
    said.into_iter().find(|text| !tokens::exceeds(text, budget)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fault::Code;

    #[test]
    fn nothing_is_over_its_budget_and_no_id_is_cut() {
        let id = "tc_01M7H23XDKQJPB0X7SZ7GG11CR";
        let ticket = Pending {
            status: "pending",
            tool_call_id: id,
            task_id: Some(id),
            message: "a message that is longer than it has to be, as such messages are",
        };
        let long = Fault::new(Code::RuntimeError, "it went wrong in a way. ".repeat(100))
            .with_detail(json!({ "more": "x".repeat(500) }));
        for budget in 0..150 {
            let said = [
                pending(&ticket, budget),
                fault(&long, budget),
                left_out(7, id, budget),
                cut(&"ein langer Satz über Käse 😀 ".repeat(50), budget),
            ];
            for text in &said {
                assert!(!tokens::exceeds(text, budget), "{budget}: {text}");
                let json = !text.starts_with('{') || serde_json::from_str::<Value>(text).is_ok();
                assert!(json && text.contains("tc_") == text.contains(id), "{budget}: {text}");
            }
            let marked = said[1].is_empty() || said[1] == "failed" || said[1].ends_with(CUT);
            assert!(marked, "{budget}: {}", said[1]);
        }
        assert!(fault(&long, 20).starts_with("RUNTIME_ERROR: it went wrong in a way."));
        assert_eq!(pending(&ticket, 2), "pending");
        let small = Fault::new(Code::RuntimeError, "no").with_detail(json!("x".repeat(5_000)));
        let small: Value = serde_json::from_str(&fault(&small, 60)).unwrap();
        assert_eq!(small["error"]["message"], "no");
    }
}
