//! The durable stores of Toolcrib: SQLite and PostgreSQL implementations of the engine's `Store`
//! port.
//!
//! One writer takes all queued changes and commits them in one transaction; callers wait for that
//! commit. Reads run concurrently on other connections. A store compares versions and persists what
//! it receives; it never decides a status.

pub mod file_permissions;
pub mod postgres;
mod row;
pub mod sqlite;

pub use postgres::{PostgresOpenError, PostgresStore};
pub use sqlite::migrate::SQLITE_SCHEMA_VERSION;
pub use sqlite::{SqliteOpenError, SqliteStore};

/// The guide for Rust users. Its code is compiled and run here, because it uses both the engine and
/// a store.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
pub struct LibraryPage;
