//! How clients hear of work and answer: WebSocket, SSE and long poll over one queue.

mod again;
mod poll;
mod registering;
mod sharing;
mod sse;
mod ws;

use toolcrib_server::config::Config;

/// Dead connections are noticed soon.
fn impatient(config: &mut Config) {
    config.ingress.heartbeat_ms = 100;
    config.ingress.dead_after_ms = 1_000;
}
