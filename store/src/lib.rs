//! Where Toolcrib keeps its tickets: SQLite behind the engine's `Store` port.
//!
//! One writer thread takes everything that waits and commits it as one transaction
//! (`synchronous=FULL`); callers wait for that commit. Readers work beside it. The store compares
//! versions and keeps what it is given; it never decides a status.

mod migrate;
mod row;
pub mod sqlite;

pub use migrate::SCHEMA_VERSION;
pub use sqlite::{OpenError, SqliteStore};

/// The page for Rust users: its code is compiled and run here, where both crates are at hand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
pub struct LibraryPage;
