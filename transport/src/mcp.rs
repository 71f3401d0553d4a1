//! The MCP transport: offers every tool of Toolcrib to MCP clients, over streamable HTTP at `/mcp`
//! and over standard input and output.
//!
//! One address serves both revisions, as the MCP client requests: 2026-07-28, which has no
//! sessions, and 2025-11-25 and older, which have them. `rmcp` implements the protocol. This module
//! decides who the caller is, which tools the caller sees, and how the outcome of a call is
//! reported.
//!
//! Layers, lowest first. A module uses only modules of lower layers:
//!
//! 1. `passthrough`, `request` and `call_arguments`: the port to resources and prompts of MCP
//!    servers, the properties of one request, and the arguments that rmcp would change;
//!    `param_errors`: the explanation of requests that rmcp cannot parse; `sessions` and
//!    `call_stream`: session ids and streams that outlive the process; `events`: event types and
//!    their webhooks.
//! 2. `settings`: limits and defaults; `tool_list`: the tools that a caller sees; `resume`: the
//!    streams that continue a lost one.
//! 3. `tool_result`: conversion from the engine's records to MCP's format; `state`: the state that
//!    all requests share, and that of a legacy session.
//! 4. `task_subscription`: the tasks that a subscription names.
//! 5. `operations`: one module per group of MCP methods.
//! 6. `server`: rmcp's handler, which delegates each method to its operation. A method is added
//!    there.
//! 7. `http`: the route `/mcp`, with authentication.

mod call_arguments;
mod call_stream;
mod events;
mod http;
mod operations;
mod param_errors;
mod passthrough;
mod request;
mod resume;
mod server;
mod sessions;
mod settings;
mod state;
mod task_subscription;
mod tool_list;
mod tool_result;

pub use call_arguments::mark_lines;
pub use http::router;
pub use passthrough::{
    PassthroughChange, PassthroughChangeKind, PassthroughChangeStream, PassthroughProvider,
};
pub use request::{CatalogueMode, McpViewOptions};
pub use server::McpTransport;
pub use sessions::SessionKey;
pub use settings::{McpTransportSettings, ProtectedResourceMetadata};
