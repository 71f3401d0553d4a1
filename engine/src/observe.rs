//! The observer port: whoever makes traces and metrics of calls out of what the engine does.
//!
//! An observer is told when a call has ended, and of a call that it records also when an attempt is
//! over; after the commit, with the times that are stored. It must be quick and must not wait: it
//! runs on the path of the call. Without an observer none of this costs anything.

use crate::call::Call;
use crate::fault::Code;
use crate::trace::Ids;

/// An attempt that is over, of a call that is recorded.
pub struct Attempted<'a> {
    /// Of the call's spans.
    pub ids: Ids,
    /// The call while the attempt was out: its number and its target are those of the attempt.
    pub call: &'a Call,
    /// The client that had it.
    pub taken_by: Option<&'a str>,
    pub ended_ms: u64,
    /// What went wrong; nothing when it succeeded.
    pub failed: Option<Code>,
}

/// A call that has ended.
pub struct Ended<'a> {
    /// Of the call's spans.
    pub ids: Ids,
    pub call: &'a Call,
    /// What the tool says about itself, if it is still there.
    pub description: &'a dyn Fn() -> Option<String>,
}

/// Told of what happened.
pub trait Observer: Send + Sync + 'static {
    /// Whether the spans of a call with these ids are recorded. Always the same answer for the
    /// same ids: it is also handed on to whoever executes.
    fn samples(&self, ids: &Ids) -> bool;

    /// An attempt of a call that is recorded is over.
    fn attempted(&self, attempted: &Attempted<'_>);

    /// A call has ended.
    fn ended(&self, ended: &Ended<'_>);
}
