//! What was said before: a report that comes a second time is answered as the first.

use super::{Call, Fault, Json, Status};

/// Whether a report says again what has led to another attempt. Without a number it can mean the
/// one before only while no other is out.
pub(super) fn said_before(call: &Call, attempt: Option<u32>, result: &Result<Json, Fault>) -> bool {
    let (Some(failed), Err(fault)) = (&call.failed, result) else { return false };
    let meant = attempt.or((!call.attempt_is_out()).then_some(failed.attempt));
    let over = failed.attempt < call.attempt || !call.attempt_is_out();
    over && meant.is_some_and(|attempt| failed.is_same(attempt, fault))
}

/// Whether a report says what the call came to.
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
