//! Tools from operations of HTTP APIs: real upstreams on loopback, real secrets in the environment
//! of the server, and protection of private networks and secrets.

mod arguments;
mod faults;
mod importing;
mod jina;
mod outbound;
mod secrets;
pub mod upstream;
