//! Tools that are operations of HTTP APIs: real upstreams on loopback, real secrets in the
//! environment of the server, and what must not be reached or kept.

mod arguments;
mod faults;
mod importing;
mod jina;
mod outbound;
mod secrets;
pub mod upstream;
