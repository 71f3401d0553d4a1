//! UTP: the message format of tools over NATS, and the NATS connection that carries it.

pub mod card_followers;
pub mod nats_connection;
pub mod report;
pub mod turn;
pub mod wire;

pub use nats_connection::NatsConnection;

/// Default protocol version.
pub const DEFAULT_VERSION: &str = "v1r3";
