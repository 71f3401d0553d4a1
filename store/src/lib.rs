//! Where Toolcrib keeps its tickets: SQLite or PostgreSQL behind the engine's `Store` port.
//!
//! One writer takes everything that waits and commits it as one transaction; callers wait for
//! that commit. Readers work beside it. The store compares
//! versions and keeps what it is given; it never decides a status.

mod migrate;
pub mod postgres;
pub mod private;
mod row;
pub mod sqlite;

pub use migrate::SCHEMA_VERSION;
pub use postgres::{PostgresError, PostgresStore};
pub use sqlite::{OpenError, SqliteStore};

/// The page for Rust users: its code is compiled and run here, where both crates are at hand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
pub struct LibraryPage;
