//! Where Toolcrib keeps its tickets: SQLite behind the engine's `Store` port.
//!
//! One writer thread takes everything that waits and commits it as one transaction
//! (`synchronous=FULL`); callers wait for that commit. Readers work beside it. The store compares
//! versions and keeps what it is given; it never decides a status.

mod definition;
mod migrate;
mod row;
pub mod sqlite;

pub use migrate::SCHEMA_VERSION;
pub use sqlite::{OpenError, SqliteStore};
