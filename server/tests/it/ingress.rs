//! Transports of clients: WebSocket, SSE and long poll over one queue.

mod availability;
mod poll;
mod redelivery;
mod registering;
mod sharing;
mod sse;
mod ws;

use toolcrib_server::config::Config;

/// Sets short timeouts, so that dead connections are detected soon.
fn use_short_heartbeat(config: &mut Config) {
    config.ingress.heartbeat_ms = 100;
    config.ingress.dead_after_ms = 1_000;
}
