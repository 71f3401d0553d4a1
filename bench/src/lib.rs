//! Measures Toolcrib's speed as ratios to a baseline.
//!
//! A figure such as "3000 calls a second" says more about the disk than about the program. Every
//! figure of Toolcrib is therefore a ratio to a *baseline* measured on the same machine in the same
//! run: the same HTTP stack (axum on tokio) and the same storage (SQLite with group commit) with
//! the same flow (invoke, ticket, result; every state change flushed before it is reported) and
//! nothing else.
//!
//! The binary `toolcrib-bench` starts the product and the baseline as child processes and prints
//! the report. The library is for that binary and for tests, which use the scripted model.
//!
//! | module           | content                                                                |
//! |------------------|------------------------------------------------------------------------|
//! | [`cli`]          | the command line of `toolcrib-bench`                                   |
//! | [`measurements`] | the measurements and their limits                                      |
//! | [`report`]       | the report as a table and as JSON; facts about the machine             |
//! | [`load`]         | closed loop, burst, GET latencies, time to the first success           |
//! | [`processes`]    | the measured servers and their helpers as child processes              |
//! | [`baseline`]     | the comparison server, and the same over NATS                          |
//! | [`fill_store`]   | writes finished calls into a store                                     |
//! | [`mcp_server`]   | an MCP server with tools of known cost                                 |
//! | [`model`]        | a language model that follows a script, over the real wire protocols   |
//! | [`otlp_sink`]    | an OTLP endpoint that counts the bytes it receives                     |

pub mod baseline;
pub mod cli;
pub mod fill_store;
pub mod load;
pub mod mcp_server;
pub mod measurements;
pub mod model;
pub mod otlp_sink;
pub mod processes;
pub mod report;
