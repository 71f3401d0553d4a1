//! Listeners for results. If one fails or panics, the error is logged and the others still run.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{ToolCall, ToolResult};
use crate::ports::fn_tool::panic_message;

/// The error of a listener.
pub type ListenerError = Box<dyn std::error::Error + Send + Sync>;

/// The return value of a listener.
pub type ListenerResult = Result<(), ListenerError>;

/// A listener that several contexts share.
pub(crate) type ResultListener =
    Arc<dyn Fn(&ToolCall, &ToolResult) -> ListenerResult + Send + Sync>;

/// Listeners in the order they were added.
#[derive(Clone, Default)]
pub(super) struct ResultListeners {
    all: Vec<ResultListener>,
}

impl fmt::Debug for ResultListeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} listeners", self.all.len())
    }
}

impl ResultListeners {
    pub(super) fn add(&mut self, listener: ResultListener) {
        self.all.push(listener);
    }

    pub(super) fn notify(&self, call: &ToolCall, result: &ToolResult) {
        for listener in &self.all {
            // Unwind safe: a listener only borrows two records and cannot leave the context
            // half-updated.
            let outcome = catch_unwind(AssertUnwindSafe(|| listener(call, result)));
            let reason = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("it panicked: {}", panic_message(&*panic)),
            };
            let (tool, call_id) = (&call.name, &call.call_id);
            tracing::error!(tool, call_id, why = reason, "a listener of tool calls failed");
        }
    }
}
