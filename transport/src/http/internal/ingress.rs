//! Delivery of requests to clients: WebSocket, SSE and long poll over one queue.
//! docs/protocol/ingress.md describes the protocol for authors of clients.

pub(super) mod poll;
pub(super) mod sse;
pub(super) mod ws;
use serde::Serialize;
use toolcrib::clients::{ClientMessage, WorkItem};
use toolcrib::domain::fault::Error;
use toolcrib::{CallId, Engine, Json};

use crate::http::extract::invalid_parameter;

/// Maximum number of requests in flight per client.
const MAX_WINDOW: usize = 1_024;

/// A request as sent to a client. The arguments are those of the caller, byte for byte.
#[derive(Serialize)]
struct ToolRequestMessage {
    args: Json,
    attempt: u32,
    deadline_at_ms: u64,
    effect: &'static str,
    redelivered: bool,
    run_id: String,
    timeout_ms: u64,
    tool_call_id: CallId,
    tool_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    #[serde(rename = "type")]
    kind: &'static str,
}

/// A cancellation as sent to a client.
#[derive(Serialize)]
struct ToolCancelMessage {
    attempt: u32,
    tool_call_id: CallId,
    #[serde(rename = "type")]
    kind: &'static str,
}

/// A message as sent to a client.
#[derive(Serialize)]
#[serde(untagged)]
enum IngressMessage {
    Request(ToolRequestMessage),
    Cancel(ToolCancelMessage),
}

impl ToolRequestMessage {
    fn new(engine: &Engine, request: WorkItem) -> Self {
        Self {
            args: request.args,
            attempt: request.attempt,
            deadline_at_ms: request.deadline_ms,
            effect: request.effect.as_str(),
            redelivered: request.redelivered,
            run_id: request.run_id,
            timeout_ms: request.deadline_ms.saturating_sub(engine.now_ms()),
            tool_call_id: request.call_id,
            tool_name: request.tool,
            traceparent: request.traceparent.map(|trace| trace.to_string()),
            kind: "tool_request",
        }
    }
}

impl IngressMessage {
    fn new(engine: &Engine, message: ClientMessage) -> Self {
        match message {
            ClientMessage::Execute(request) => {
                Self::Request(ToolRequestMessage::new(engine, request))
            }
            ClientMessage::Cancel { call_id, attempt } => Self::Cancel(ToolCancelMessage {
                attempt,
                tool_call_id: call_id,
                kind: "tool_cancel",
            }),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Request(body) => body.kind,
            Self::Cancel(body) => body.kind,
        }
    }
}

/// Serializes a message. This cannot fail: keys are names, and values are JSON.
fn to_json(body: &impl Serialize) -> String {
    serde_json::to_string(body).unwrap_or_default()
}

/// Resolves the number of requests in flight that a client requests. Clamps it to the maximum, and
/// refuses 0, which no client that requests work can mean.
fn resolve_window(field: &str, requested: Option<usize>, default: usize) -> Result<usize, Error> {
    match requested.unwrap_or(default) {
        0 => {
            let message = format!("{field} must be at least 1");
            Err(invalid_parameter(field, message))
        }
        requested => Ok(requested.min(MAX_WINDOW)),
    }
}
