//! Calls of a turn that an earlier request started: the request failed, or another change of the
//! turn came in between, before the turn was stored with them.

use std::sync::Arc;

use crate::calls::request::{CallRequest, build_idempotency_key};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::utp::Turn;
use crate::ports::core::from_store_error;
use crate::ports::store::CreateCallResult;
use crate::utp::Utp;
use crate::utp::trees::CallCharge;

/// The part of a call that an agent made by a command in the budget of its turn.
#[derive(Default)]
pub(crate) struct CommandedCall {
    /// True if the turn is not stored with the call yet.
    pub(crate) is_new: bool,
    /// The charge of the call until then, if it counts against a budget.
    pub(crate) charge: Option<CallCharge>,
}

/// Charges a call that its turn is not stored with. Returns the fault if the budget is used up
/// and the call has not started: an earlier request may have started it before it failed.
pub(crate) async fn charge_new_call(
    utp: &Utp,
    turn: &Turn,
    agent: &Caller,
    request: &CallRequest,
) -> Result<Result<Option<CallCharge>, Fault>, Error> {
    match utp.charge_call(turn, false).await? {
        Err(_) if find_started(utp, agent, request).await?.is_some() => {
            utp.charge_call(turn, true).await
        }
        charged => Ok(charged),
    }
}

/// Returns the call that was made under the idempotency key of this request, if there is one.
pub(crate) async fn find_started(
    utp: &Utp,
    agent: &Caller,
    request: &CallRequest,
) -> Result<Option<CreateCallResult>, Error> {
    let Some(key) = build_idempotency_key(agent, request) else { return Ok(None) };
    let found = utp.core.store.find_by_idempotency_key(&agent.project, &key).await;
    let found = found.map_err(from_store_error)?;
    Ok(found.filter(|found| !matches!(found, CreateCallResult::New)))
}

/// Returns the call that an earlier request made, if this one is refused: the call may be
/// executing, although the rules would refuse it now.
pub(crate) async fn find_call_behind_refusal(
    utp: &Utp,
    agent: &Caller,
    request: &CallRequest,
    refusal: Fault,
) -> Result<Result<Arc<Call>, Fault>, Error> {
    match find_started(utp, agent, request).await? {
        None | Some(CreateCallResult::New) => Ok(Err(refusal)),
        Some(CreateCallResult::Replayed(call)) => Ok(Ok(Arc::from(call))),
        // It is another request with the same id, or this one under another name of its tool.
        Some(CreateCallResult::Mismatch(_)) => Err(refusal.into()),
    }
}

/// Returns true if a refusal answers the call: a repetition of the request would be refused too.
pub(crate) fn is_final(refusal: &Fault) -> bool {
    !matches!(refusal.code, Code::Overloaded | Code::RateLimited | Code::IdempotencyMismatch)
}

/// Returns the number of calls that a turn is stored with.
pub(super) fn used_calls(turn: &Turn) -> u64 {
    turn.delegation.as_ref().map_or(0, |delegation| delegation.used_calls)
}

/// Adds a step and its `new_calls` to the present state of its turn, which others have changed.
pub(super) fn add_step(now: Turn, step: Turn, new_calls: u64) -> Turn {
    let mut delegation = now.delegation.clone();
    if let (Some(delegation), Some(own)) = (&mut delegation, &step.delegation) {
        delegation.used_calls += new_calls;
        delegation.report_tokens(Some(own.used_tokens));
    }
    let mut steps = now.steps.clone();
    steps.extend(step.steps.into_iter().filter(|id| !now.steps.contains(id)));
    Turn {
        step_id: step.step_id,
        steps,
        delegation,
        resume_deadline_ms: now.resume_deadline_ms.max(step.resume_deadline_ms),
        status: step.status,
        ..now
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn turn(changes: &Value) -> Turn {
        let mut turn = json!({
            "project": "p", "agent_id": "w", "turn_id": "turn_1", "epoch": 1, "status": "running",
            "channel": "c", "step_id": "s1", "steps": ["s1"], "lease_until_ms": 1, "lease_ms": 1,
            "resume_deadline_ms": 100, "created_ms": 1, "updated_ms": 1, "version": 1,
            "delegation": {
                "call_id": "tc_01M7H641R6DXZKTSNG6276X36B", "attempt": 1, "parent_agent_id": "a",
                "parent_turn_id": "run_1", "instruction_card_id": "task_1", "deadline_ms": 1,
                "used_calls": 1, "used_tokens": 5,
            },
        });
        for (pointer, value) in changes.as_object().unwrap() {
            *turn.pointer_mut(pointer).unwrap() = value.clone();
        }
        serde_json::from_value(turn).unwrap()
    }

    #[test]
    fn a_step_keeps_what_a_command_stored_meanwhile() {
        let before = turn(&json!({}));
        let step = turn(&json!({
            "/step_id": "s2", "/steps": ["s1", "s2"], "/status": "suspended",
            "/delegation/used_calls": 3, "/delegation/used_tokens": 9,
        }));
        // A command of the same step made a call that waits longer, and the lease was renewed.
        let now = turn(&json!({
            "/version": 3, "/lease_until_ms": 70, "/resume_deadline_ms": 900,
            "/steps": ["s0", "s1"], "/delegation/used_calls": 2,
        }));
        let new_calls = used_calls(&step) - used_calls(&before);
        let merged = add_step(now, step.clone(), new_calls);
        assert_eq!((used_calls(&merged), merged.resume_deadline_ms), (4, Some(900)));
        assert_eq!(merged.delegation.as_ref().unwrap().used_tokens, 9);
        assert_eq!((merged.version, merged.lease_until_ms), (3, 70));
        assert_eq!(merged.steps, ["s0", "s1", "s2"]);
        assert_eq!((merged.step_id, merged.status), (step.step_id, step.status));
    }
}
