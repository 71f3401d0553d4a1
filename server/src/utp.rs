//! Tools over NATS (UTP): the connection, the wire, and the side of a tool service.
//!
//! A tool service in Rust is a few lines; see [`Host`].

pub mod follow;
pub mod host;
pub mod link;
pub mod report;
pub mod turn;
pub mod wire;

pub use host::{Answer, Host, Job};
pub use link::Link;

/// The version of the protocol that is spoken unless configured otherwise.
pub const DEFAULT_VERSION: &str = "v1r3";
