//! Who hears of results. A listener that fails or panics is logged and stops nobody.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{ToolCall, ToolResult};
use crate::function::panic_text;

/// Why a listener failed: whatever it likes to say.
pub type ListenerError = Box<dyn std::error::Error + Send + Sync>;

/// What a listener answers.
pub type Told = Result<(), ListenerError>;

type Listener = Arc<dyn Fn(&ToolCall, &ToolResult) -> Told + Send + Sync>;

/// Those who listen, in the order they came.
#[derive(Clone, Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} listeners", self.all.len())
    }
}

impl Listeners {
    pub(super) fn add(
        &mut self,
        listener: impl Fn(&ToolCall, &ToolResult) -> Told + Send + Sync + 'static,
    ) {
        self.all.push(Arc::new(listener));
    }

    pub(super) fn tell(&self, call: &ToolCall, result: &ToolResult) {
        for listener in &self.all {
            // A listener has nothing of ours to leave half-done: it was lent two records to read.
            let told = catch_unwind(AssertUnwindSafe(|| listener(call, result)));
            let why = match told {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("it panicked: {}", panic_text(&*panic)),
            };
            let (tool, call_id) = (&call.name, &call.call_id);
            tracing::error!(tool, call_id, why, "a listener of tool calls failed");
        }
    }
}
