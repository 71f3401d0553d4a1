//! Calls that wait for their predecessor.

use super::{Action, Call, Hold, Refusal, Transition, into_transition};

/// Queues a call whose predecessor has ended; its timeout starts now.
pub(super) fn start_after_predecessor(call: &Call, now_ms: u64) -> Result<Transition, Refusal> {
    let Some(Hold::Predecessor { timeout_ms }) = call.hold else {
        return Err(Refusal::NotApplicable);
    };
    let mut next = call.clone();
    next.hold = Some(Hold::Queue);
    next.deadline_ms = call.deadline_ms.min(now_ms.saturating_add(timeout_ms));
    Ok(into_transition(next, vec![], vec![Action::Enqueue]))
}
