//! The tests of the stores: one suite that every store passes, and what only SQLite has.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod examples;
mod sqlite;
mod suite;
mod support;

// A new store gets the whole suite with one line.
suite::conformance!(memory, crate::support::memory());
suite::conformance!(sqlite_file, crate::support::sqlite());
