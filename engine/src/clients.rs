//! Connected programs that provide tools: the queue of work for them, and their connections.

pub mod connections;
pub mod queue;
