//! The baseline that Toolcrib's speed is compared with, and the load generator that measures both.
//!
//! A figure such as "3000 calls a second" says more about the disk than about the program. Every
//! figure of Toolcrib is therefore a ratio to a *baseline* measured on the same machine in the same
//! run: the same HTTP stack (axum on tokio) and the same storage (SQLite with group commit) with
//! the same flow (invoke, ticket, result; every state change flushed before it is reported) and
//! nothing else.
//!
//! This crate never starts a process, reads no configuration and prints nothing but the baseline's
//! storage errors: the command `toolcrib bench` starts the product and the baseline as child
//! processes and calls this crate.
//!
//! | module       | content                                                                 |
//! |--------------|-------------------------------------------------------------------------|
//! | [`baseline`] | the comparison server: [`baseline::serve`]                              |
//! | [`load`]     | closed loop, burst, GET latencies, time to the first success            |
//! | [`http`]     | the small HTTP/1.1 client that [`load`] uses                            |
//! | [`sample`]   | the results of a load run, and percentiles                              |
//! | [`sink`]     | an OTLP endpoint that counts the bytes it receives                      |
//! | [`model`]    | a language model that follows a script, over the real wire protocols    |
//! | [`machine`]  | facts about the machine, among them its flush rate                      |
//! | [`process`]  | resident memory of a child process, a free loopback port                |
//! | [`report`]   | measurements, their limits, the table and the JSON                      |
//!
//! A run, from the caller's side:
//!
//! ```no_run
//! use std::time::Duration;
//! use toolcrib_bench::{floor, load, machine, report};
//!
//! # async fn run(product: &str, floor_addr: &str, dir: &std::path::Path) -> anyhow::Result<()> {
//! let path = format!("/v1/tools/{}/invoke?wait_ms=10000", floor::TOOL);
//! let body = r#"{"run_id":"bench","args":{}}"#;
//! let time = Duration::from_secs(5);
//! let ours = load::closed_loop(product, 64, time, &path, body, Some("a-token")).await?;
//! let base = load::closed_loop(floor_addr, 64, time, &path, body, None).await?;
//!
//! let facts = machine::Machine::probe(dir)?;
//! let mut report = report::Report::new("0.1.0", "2025-01-01", facts);
//! report.push(report::Measure::against_floor(
//!     "invoke and wait, 64 callers",
//!     "calls/s",
//!     ours.calls_per_s,
//!     base.calls_per_s,
//!     report::Limit::AtLeast(0.5),
//! ));
//! print!("{}", report.table());
//! # Ok(()) }
//! ```

pub mod baseline;
pub mod http;
pub mod load;
pub mod machine;
pub mod model;
pub mod process;
pub mod report;
pub mod sample;
pub mod sink;
