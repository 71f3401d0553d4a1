//! Integration tests of the benchmark.

#![allow(clippy::unwrap_used)]

mod baseline;
mod command;
