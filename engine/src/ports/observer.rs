//! The observer port: produces traces and metrics of calls.
//!
//! The engine notifies the observer when a call has ended and, for a sampled call, when an attempt
//! has ended; always after the commit, with the stored times. An observer must be fast and must not
//! block: it runs on the path of the call. Without an observer nothing of this has a cost.

use crate::domain::call::Call;
use crate::domain::fault::Code;
use crate::domain::trace::SpanIds;

/// An ended attempt of a sampled call.
pub struct EndedAttempt<'a> {
    /// Ids of the call's spans.
    pub ids: SpanIds,
    /// The call while the attempt was in flight: its number and target are those of the attempt.
    pub call: &'a Call,
    /// The client that executed it.
    pub taken_by: Option<&'a str>,
    /// Time at which the attempt ended, in Unix milliseconds.
    pub ended_ms: u64,
    /// Code of the failure; `None` when the attempt succeeded.
    pub failed: Option<Code>,
}

/// An ended call.
pub struct EndedCall<'a> {
    /// Ids of the call's spans.
    pub ids: SpanIds,
    /// The call with its outcome.
    pub call: &'a Call,
    /// Returns the tool's description, if the tool still exists.
    pub description: &'a dyn Fn() -> Option<String>,
}

/// Receives ended attempts and calls.
pub trait Observer: Send + Sync + 'static {
    /// Returns true if the spans of a call with these ids are recorded. The answer must be the same
    /// for the same ids: the executor receives it too.
    fn is_sampled(&self, ids: &SpanIds) -> bool;

    /// Called when an attempt of a sampled call has ended.
    fn attempt_ended(&self, attempted: &EndedAttempt<'_>);

    /// Called when a call has ended.
    fn call_ended(&self, ended: &EndedCall<'_>);
}
