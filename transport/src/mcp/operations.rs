//! Operations: one module per group of MCP methods. Each gets the shared state and the view of its
//! caller, asks the engine, and returns the result in rmcp's types. The engine holds all state of
//! calls; nothing is stored here.
//!
//! `helper_calls` uses `call`, which uses `tasks`, `progress` and `elicitation`; `notifications`
//! uses `tasks`, which uses `elicitation`; `event_stream` uses `events`. The others stand alone.

pub(super) mod call;
pub(super) mod elicitation;
pub(super) mod event_stream;
pub(super) mod events;
pub(super) mod helper_calls;
pub(super) mod list_tools;
pub(super) mod notifications;
mod progress;
pub(super) mod prompts;
pub(super) mod resources;
pub(super) mod tasks;
