//! Runs: the agent loop, its driver and journal, and the context of a run.

pub mod active;
pub mod agent_loop;
pub mod caller_executed;
pub mod context;
pub mod driver;
pub mod lifecycle;
pub mod read_result;
pub mod replay;
pub mod run_context;
pub mod saved_conversation;
pub mod stream;
pub mod subscribers;
