//! Transports: the ways into Toolcrib. A transport turns its wire format into a caller and an
//! engine request, and turns the response back. It uses neither the store nor the sources.

pub mod auth;
pub mod delivery;
mod elicitation_answers;
pub mod http;
pub mod mcp;
pub mod nats;
pub mod postgres_reports;
pub mod tcp_timeout;
