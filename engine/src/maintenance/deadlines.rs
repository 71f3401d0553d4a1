//! Acts where the clock alone must: deadlines, and retries that are due.

use std::sync::Arc;

use crate::calls::Calls;
use crate::domain::call::{Call, Hold};
use crate::domain::tool::Executor;
use crate::lifecycle::Event;

/// Maximum sleep. It bounds the time until a change of the system time is noticed.
const IDLE_MS: u64 = 5_000;
const MAX_DUE_PER_PASS: usize = 1_000;

pub(crate) async fn run(calls: Arc<Calls>) {
    loop {
        let idle_ms = calls.core.clock.now_ms() + IDLE_MS;
        let next_ms = calls.dispatcher.open_calls.next_due_ms().unwrap_or(idle_ms).min(idle_ms);
        tokio::select! {
            () = calls.core.clock.sleep_until(next_ms) => { run_once(&calls).await; }
            () = calls.dispatcher.open_calls.wait_earlier_due() => {}
            () = calls.core.shutdown.cancelled() => return,
        }
    }
}

/// Returns the event that is due.
fn due_event(calls: &Arc<Calls>, call: &Call, wall_ms: u64, wall_offset_ms: i64) -> Event {
    if wall_ms < call.deadline_ms {
        // The client queue has monotonic times; the call has times of day.
        let delivered_ms = calls.dispatcher.client_queue.delivered_ms(&call.id);
        let delivered_ms = delivered_ms.map(|ms| ms.saturating_add_signed(wall_offset_ms));
        return Event::AttemptDeadline { attempt: call.attempt, delivered_ms };
    }
    // A predecessor that waits for a person has more time than it had when this call was accepted.
    let before = call.awaited_call().filter(|_| call.hold.is_some());
    let before = before.and_then(|id| calls.dispatcher.open_calls.get(id));
    match (call.hold, before.map(|entry| entry.call().deadline_ms)) {
        (Some(Hold::Predecessor { timeout_ms }), Some(deadline_ms))
            if deadline_ms.saturating_add(timeout_ms) > call.deadline_ms =>
        {
            Event::PredecessorExtended { deadline_ms }
        }
        _ => Event::Deadline,
    }
}

/// Adds the refusal of the last report to the end of a call that no tool service acknowledged:
/// otherwise the call would end as if there had been no report.
async fn with_refused_report(calls: &Arc<Calls>, call: &Call, event: Event) -> Event {
    let is_unacknowledged =
        call.hold == Some(Hold::Unacknowledged) && call.target.executor == Executor::UTP;
    if event != Event::Deadline || !is_unacknowledged {
        return event;
    }
    match calls.dispatcher.find_refused_report(call).await {
        Ok(Some(refusal)) => Event::DeadlineAfterReport { refusal },
        Ok(None) => event,
        Err(error) => {
            tracing::warn!(call = %call.id, %error, "refused reports not read");
            event
        }
    }
}

/// Ends the calls whose approval has expired by the time of day. The timers of calls are monotonic,
/// so they miss the time in which the machine was suspended. No change of the clock extends an
/// approval.
async fn expire_approvals(calls: &Arc<Calls>) -> usize {
    let mut count = 0;
    for id in calls.dispatcher.approval_index.waiting_calls() {
        let Some(entry) = calls.dispatcher.open_calls.get(&id) else { continue };
        let call = entry.call();
        let Some(Hold::Approval { expires_ms, .. }) = call.hold else { continue };
        if expires_ms <= calls.core.wall_ms() {
            count += 1;
            calls.dispatcher.advance_with_retry(&call.project, &id, Event::Deadline).await;
        }
    }
    count
}

/// Follows a change of the system time, and acts on every call that is due. Returns the number of
/// calls.
pub async fn run_once(calls: &Arc<Calls>) -> usize {
    calls.dispatcher.record_clock_step(calls.core.clock.wall_offset_ms()).await;
    calls.dispatcher.follow_wall_clock().await;
    let mut count = expire_approvals(calls).await;
    loop {
        let now_ms = calls.core.clock.now_ms();
        let due = calls.dispatcher.open_calls.due_calls(now_ms, MAX_DUE_PER_PASS);
        if due.is_empty() {
            return count;
        }
        count += due.len();
        let acts = due.into_iter().map(|id| async move {
            let Some(entry) = calls.dispatcher.open_calls.get(&id) else { return };
            let wall_offset_ms = calls.core.clock.wall_offset_ms();
            let call = entry.call_by_offset(wall_offset_ms);
            let wall_ms = now_ms.saturating_add_signed(wall_offset_ms);
            match call.hold {
                Some(Hold::Retry { .. }) if wall_ms < call.deadline_ms => {
                    calls.dispatcher.enqueue_call(&call)
                }
                _ => {
                    let event = due_event(calls, &call, wall_ms, wall_offset_ms);
                    let event = Box::pin(with_refused_report(calls, &call, event)).await;
                    calls.dispatcher.advance_with_retry(&call.project, &id, event).await;
                }
            }
        });
        // A thousand simultaneous deadlines share a few commits.
        futures::future::join_all(acts).await;
        // Calls that could not be stored are still due; the next start handles them.
        if calls.core.shutdown.is_cancelled() {
            return count;
        }
    }
}
