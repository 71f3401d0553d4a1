//! Toolcrib, a durable tool-call server for AI agents, as a library.
//!
//! An agent calls a tool by name. The [`Engine`] authorizes the caller, validates the arguments,
//! commits a durable ticket, dispatches the work to the [`ports::source::Source`] that executes the
//! tool, retries where that is safe, and stores the outcome. Every transport (HTTP, MCP, NATS, a
//! command line, your own program) ends in the same method, and every kind of tool starts through
//! the same port.
//!
//! This crate opens no socket and no file: it has no dependency that could. It includes an
//! in-memory store and in-process wakeups; the crate `toolcrib-store` stores the tickets in SQLite
//! or PostgreSQL.
//!
//! ```
//! use toolcrib::calls::Until;
//! use toolcrib::{CallRequest, Caller, Engine, FnTool};
//!
//! #[derive(serde::Deserialize, schemars::JsonSchema)]
//! struct Add { a: i64, b: i64 }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let add = FnTool::new("calc.add", "Adds two integers", |args: Add| async move {
//!     Ok::<i64, String>(args.a + args.b)
//! });
//! let engine = Engine::builder().tool(add).start().await?;
//! let caller = Caller::local("default");
//! let request = CallRequest::new("calc.add", r#"{"a":20,"b":22}"#)?;
//! let ticket = engine.calls().invoke(&caller, request).await?;
//! let call = engine.calls().wait(&caller, &ticket, Until::Ended).await?;
//! let answer = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
//! assert_eq!(answer.map(|data| data.text()), Some("42"));
//! # Ok(()) }
//! ```

#![warn(missing_docs)]

pub mod approvals;
pub mod calls;
pub mod clients;
pub mod domain;
pub mod engine;
pub mod lifecycle;
pub mod maintenance;
pub mod model_formats;
pub mod ports;
pub mod registry;
pub mod results;
pub mod runs;
pub mod schema;
pub mod utp;
pub mod webhooks;

pub use calls::accept::Ticket;
pub use calls::batch::{Batch, BatchAnswer};
pub use calls::request::CallRequest;
pub use domain::call::{Call, Outcome, Status};
pub use domain::caller::{Caller, CallerAttributes, Role, RoleSet};
pub use domain::fault::{Code, Error, Fault};
pub use domain::id::CallId;
pub use domain::json::Json;
pub use domain::tool::{Effect, Executor, Risk, ToolDefinition};
pub use engine::Engine;
pub use ports::core::EngineLimits;
pub use ports::fn_tool::{FnTool, Tool, ToolContext};
pub use ports::source::AttemptProgress;
pub use runs::context::ToolCallContext;
pub use schema::ProjectLimiter;
