//! Detection of duplicate reports: a duplicate gets the same reply as the first.

use super::{Call, Fault, Json, Status};

/// Returns true if a report repeats the failure that led to another attempt. A report without an
/// attempt number refers to the failed attempt only while no other is in flight.
pub(super) fn said_before(call: &Call, attempt: Option<u32>, result: &Result<Json, Fault>) -> bool {
    let (Some(failed), Err(fault)) = (&call.failed, result) else { return false };
    let meant = attempt.or((!call.attempt_is_out()).then_some(failed.attempt));
    let over = failed.attempt < call.attempt || !call.attempt_is_out();
    over && meant.is_some_and(|attempt| failed.is_same(attempt, fault))
}

/// Returns true if a report matches the call's outcome.
pub(super) fn says_the_same(call: &Call, result: &Result<Json, Fault>) -> bool {
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
