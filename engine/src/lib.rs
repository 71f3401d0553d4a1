//! Toolcrib, a durable tool-call server for AI agents, as a library.
//!
//! An agent calls a tool by name. The [`Engine`] authorizes the caller, validates the arguments,
//! commits a durable ticket, dispatches the work to the [`source::Source`] that executes the tool,
//! retries where that is safe, and stores the outcome. Every transport (HTTP, MCP, NATS, a command
//! line, your own program) ends in the same method, and every kind of tool starts through the same
//! port.
//!
//! This crate opens no socket and no file: it has no dependency that could. It includes an
//! in-memory store and in-process wakeups; the crate `toolcrib-store` stores the tickets in SQLite
//! or PostgreSQL.
//!
//! ```
//! use toolcrib::{Caller, Engine, FnTool, Invocation};
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
//! let ticket = engine.invoke(&caller, Invocation::new("calc.add", r#"{"a":20,"b":22}"#)?).await?;
//! let call = engine.finished(&caller, &ticket.call.id).await?;
//! let answer = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
//! assert_eq!(answer.map(|data| data.text()), Some("42"));
//! # Ok(()) }
//! ```

pub mod args;
pub mod batch;
pub mod bus;
pub mod call;
pub mod caller;
pub mod clock;
pub mod context;
pub mod delivery;
pub mod desk;
pub mod dialect;
pub mod dialogue;
pub mod digest;
pub mod directory;
pub mod engine;
pub mod event;
pub mod fault;
pub mod function;
pub mod id;
pub mod json;
pub mod lifecycle;
pub(crate) mod lines;
pub mod model;
pub mod names;
pub mod notify;
pub mod observe;
pub mod piece;
pub mod policy;
pub mod retry;
pub mod run;
pub mod schema;
pub mod source;
pub mod store;
pub mod task;
pub mod tokens;
pub mod tool;
pub mod trace;
pub mod turn;
pub mod utp;

pub use batch::{Batch, BatchAnswer};
pub use call::{Call, Outcome, Status};
pub use caller::{Caller, Role};
pub use context::ToolCallContext;
pub use engine::{CallRequest, Engine, EngineLimits, Ticket};
pub use fault::{Code, Error, Fault};
pub use function::{AttemptProgress, FnTool, Tool, ToolContext};
pub use id::CallId;
pub use json::Json;
pub use tool::{Effect, Executor, Risk, ToolDefinition};
