//! Message forms that transports and sources share, and the connections that carry them: UTP
//! messages and the NATS connection, HTTP operations and OpenAPI documents, YAML, Server-Sent
//! Events, guarded outbound HTTP, and secrets by reference.
//!
//! This crate knows neither transports nor sources. It decides nothing about calls: it reads and
//! writes the formats that both directions speak.

pub mod approval;
pub mod background_task;
pub mod duration;
pub mod http_operation;
pub mod openapi;
pub mod outbound;
pub mod secrets;
pub mod settings;
pub mod sse;
pub mod utp;
pub mod yaml;
