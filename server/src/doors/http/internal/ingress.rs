//! How a client hears of work: WebSocket, SSE and long poll over one queue.
//! docs/protocol/ingress.md is the description for whoever writes a client.

pub(super) mod poll;
pub(super) mod sse;
pub(super) mod ws;

use serde_json::{Value, json};
use toolcrib::Engine;
use toolcrib::desk::{Message, Request};

/// A request as a client sees it.
fn request_body(engine: &Engine, request: &Request) -> Value {
    let mut body = json!({
        "type": "tool_request",
        "tool_call_id": request.call_id,
        "run_id": request.run_id,
        "tool_name": request.tool,
        "args": request.args.value(),
        "attempt": request.attempt,
        "effect": request.effect.as_str(),
        "timeout_ms": request.deadline_ms.saturating_sub(engine.now_ms()),
        "deadline_at_ms": request.deadline_ms,
        "redelivered": request.redelivered,
    });
    if let Some(traceparent) = &request.traceparent {
        body["traceparent"] = traceparent.to_string().into();
    }
    body
}

/// A message as a client sees it.
fn message_body(engine: &Engine, message: &Message) -> Value {
    match message {
        Message::Request(request) => request_body(engine, request),
        Message::Cancel { call_id, attempt } => {
            json!({ "type": "tool_cancel", "tool_call_id": call_id, "attempt": attempt })
        }
    }
}

/// How many requests a client takes at once, within reason.
fn window(asked: Option<usize>, usual: usize) -> usize {
    asked.unwrap_or(usual).clamp(1, 1_024)
}
