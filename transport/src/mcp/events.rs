//! MCP Events (SEP-3415): MCP clients list, poll and subscribe to what happens at Toolcrib.
//!
//! [`types`] has the event types and reads their occurrences from the store, [`webhook`] signs and
//! posts them to an MCP client's URL, and [`subscriptions`] delivers each subscription in order. A
//! cursor is the number of an event in the store, so a poll or a subscription misses none, also
//! after a restart.

pub(super) mod subscriptions;
pub(super) mod types;
pub(super) mod webhook;

/// Error codes of the extension.
pub(super) mod error_code {
    /// An event or a subscription does not exist.
    pub(crate) const NOT_FOUND: i32 = -32011;
    /// The caller may not subscribe.
    pub(crate) const FORBIDDEN: i32 = -32012;
    /// A limit is reached.
    pub(crate) const RESOURCE_EXHAUSTED: i32 = -32013;
    /// An option is not supported.
    pub(crate) const UNSUPPORTED: i32 = -32014;
    /// The MCP client's URL cannot be reached or did not confirm.
    pub(crate) const CALLBACK_ENDPOINT: i32 = -32015;
}
