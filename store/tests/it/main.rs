//! Tests of the stores: one conformance suite that every store passes, and tests of what only one
//! of them has.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod examples;
mod postgres;
mod sqlite;
mod suite;
mod support;
mod table_columns;

// One line runs the whole suite against a store.
suite::conformance!(memory, Some(crate::support::memory()));
suite::conformance!(sqlite_file, Some(crate::support::sqlite()));
suite::conformance!(postgres_database, crate::support::database::store().await);
