//! Detection of duplicate reports: a duplicate gets the same reply as the first.

use super::{Call, Fault, Json, Status};

/// Returns true if a report repeats the failure that led to another attempt. A report without an
/// attempt number refers to the failed attempt only while no other is in flight.
pub(super) fn repeats_failed_attempt(
    call: &Call,
    attempt: Option<u32>,
    result: &Result<Json, Fault>,
) -> bool {
    let (Some(failed), Err(fault)) = (&call.failed_attempt, result) else { return false };
    let meant = attempt.or((!call.has_attempt_in_flight()).then_some(failed.attempt));
    let over = failed.attempt < call.attempt || !call.has_attempt_in_flight();
    over && meant.is_some_and(|attempt| failed.matches_report(attempt, fault))
}

/// Returns true if a report matches the call's outcome.
pub(super) fn matches_outcome(call: &Call, result: &Result<Json, Fault>) -> bool {
    let Some(outcome) = &call.outcome else { return false };
    match (call.status, result) {
        (Status::Succeeded, Ok(data)) => outcome.data.as_ref() == Some(data),
        (Status::Failed, Err(fault)) => outcome
            .error
            .as_ref()
            .is_some_and(|error| (error.code, &error.message) == (fault.code, &fault.message)),
        _ => false,
    }
}
