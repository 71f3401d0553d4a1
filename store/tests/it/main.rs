//! The tests of the stores: one suite that every store passes, and what only one of them has.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod examples;
mod postgres;
mod sqlite;
mod suite;
mod support;

// A new store gets the whole suite with one line.
suite::conformance!(memory, Some(crate::support::memory()));
suite::conformance!(sqlite_file, Some(crate::support::sqlite()));
suite::conformance!(postgres_database, crate::support::database::store().await);
