//! How clients hear of work and answer: WebSocket, SSE and long poll over one queue.

mod again;
mod poll;
mod registering;
mod sharing;
mod sse;
mod ws;
