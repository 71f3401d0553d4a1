//! Calls that wait for their predecessor.

use super::{Action, Call, Hold, Refusal, Step, committed};

/// Queues a call whose predecessor has ended; its timeout starts now.
pub(super) fn its_turn(call: &Call, now_ms: u64) -> Result<Step, Refusal> {
    let Some(Hold::After { timeout_ms }) = call.hold else { return Err(Refusal::NotNow) };
    let mut next = call.clone();
    next.hold = Some(Hold::Queue);
    next.deadline_ms = call.deadline_ms.min(now_ms.saturating_add(timeout_ms));
    Ok(committed(next, vec![], vec![Action::Enqueue]))
}
