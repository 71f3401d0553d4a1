//! The ways in. A door turns its wire into a caller and a question to the engine, and the answer
//! back; it knows neither the store nor the sources.

mod form;
pub mod http;
pub mod mcp;
pub mod nats;
pub mod rows;
