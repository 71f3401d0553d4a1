//! `events/stream` (SEP-3415): the events of one subscription as notifications, for as long as the
//! request is open.
//!
//! Nothing is stored about a stream. Every notification has the cursor from which another stream
//! continues, also in another process.

use std::time::Duration;

use rmcp::model::{CustomNotification, CustomRequest, CustomResult, RequestId, ServerNotification};
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer, ServiceError};
use serde::Deserialize;
use serde_json::{Value, json};

use super::events::{empty_object, event_error, parse, parse_cursor, parse_event};
use crate::mcp::events::error_code;
use crate::mcp::events::types::EventType;
use crate::mcp::request::{CallerView, McpRequest, ProtocolRevision};
use crate::mcp::state::McpTransportState;
use crate::mcp::tool_result;

/// The method of the request.
pub(crate) const EVENT_STREAM: &str = "events/stream";

/// Interval of the notifications that tell the MCP client that the stream is alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);

/// Delay before the store is read again after an error.
const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
struct StreamParams {
    name: String,
    #[serde(default = "empty_object")]
    arguments: Value,
    #[serde(default)]
    cursor: Option<String>,
    #[serde(rename = "maxAgeMs", default)]
    max_age_ms: Option<u64>,
}

/// Sends the events after the cursor, or those from now on, until the MCP client cancels the
/// request.
pub(crate) async fn stream(
    shared: &McpTransportState,
    view: &CallerView,
    request: &CustomRequest,
    context: &RequestContext<RoleServer>,
) -> Result<CustomResult, ErrorData> {
    let received = McpRequest::from_context(context);
    if received.http.is_some() && received.client.revision == ProtocolRevision::Legacy {
        // In a session, only progress reaches the stream of its request.
        let data = json!({ "feature": "deliveryMode", "value": "push" });
        let message = "events/stream needs revision 2026-07-28 over HTTP: use events/poll";
        return Err(event_error(error_code::UNSUPPORTED, message, data));
    }
    let params: StreamParams = parse(request)?;
    let (kind, filter) = parse_event(&params.name, &params.arguments)?;
    let filter = filter.with_max_age(params.max_age_ms);
    let cursor = parse_cursor(params.cursor.as_deref())?;
    let newest = kind.newest(&shared.engine, &view.caller).await;
    let newest = newest.map_err(tool_result::protocol_error)?;
    let mut stream = EventStream {
        peer: &context.peer,
        request_id: &context.id,
        kind,
        position: cursor.unwrap_or(newest),
    };
    let sending = async {
        stream.send_active(false).await?;
        loop {
            let (engine, caller, after) = (&shared.engine, &view.caller, stream.position);
            let page = tokio::select! {
                page = kind.wait_for_page(engine, caller, &filter, after) => page,
                () = tokio::time::sleep(HEARTBEAT_INTERVAL) => {
                    stream.send_heartbeat().await?;
                    continue;
                }
            };
            let page = match page {
                Ok(Some(page)) => page,
                Ok(None) => return Ok(()),
                Err(error) => {
                    stream.send_error(tool_result::protocol_error(error)).await?;
                    tokio::time::sleep(RETRY_DELAY).await;
                    continue;
                }
            };
            let credentials = view.credentials.as_ref();
            if credentials.is_some_and(|credentials| credentials.revalidate(engine).is_err()) {
                return stream.send_terminated().await;
            }
            stream.position = page.position;
            if page.skipped {
                stream.send_active(true).await?;
            }
            for (position, occurrence) in page.occurrences {
                stream.position = position;
                stream.send("event", occurrence).await?;
            }
            stream.position = page.position;
        }
    };
    tokio::select! {
        // An error means that the MCP client has disconnected.
        _ = sending => {}
        () = context.ct.cancelled() => {}
    }
    Ok(CustomResult::new(json!({ "resultType": "complete", "_meta": {} })))
}

/// The stream of one request.
struct EventStream<'a> {
    peer: &'a Peer<RoleServer>,
    request_id: &'a RequestId,
    kind: EventType,
    /// Position of the last event that was sent or that the subscription is not about.
    position: u64,
}

impl EventStream<'_> {
    /// Sends a notification of the stream, which names its request.
    async fn send(&self, method: &str, mut params: Value) -> Result<(), ServiceError> {
        params["_meta"] = json!({ "io.modelcontextprotocol/subscriptionId": self.request_id });
        let method = format!("notifications/events/{method}");
        let notification = CustomNotification::new(method, Some(params));
        self.peer.send_notification(ServerNotification::CustomNotification(notification)).await
    }

    /// Confirms the subscription from the present position on. `truncated` is true if events before
    /// that position were omitted.
    async fn send_active(&self, truncated: bool) -> Result<(), ServiceError> {
        let params = json!({ "cursor": self.position.to_string(), "truncated": truncated,
            "name": self.kind.name() });
        self.send("active", params).await
    }

    async fn send_heartbeat(&self) -> Result<(), ServiceError> {
        self.send("heartbeat", json!({ "cursor": self.position.to_string() })).await
    }

    /// Reports a failure after which the stream continues.
    async fn send_error(&self, error: ErrorData) -> Result<(), ServiceError> {
        self.send("error", json!({ "error": error })).await
    }

    async fn send_terminated(&self) -> Result<(), ServiceError> {
        let message = "the credentials were revoked";
        let error = json!({ "code": error_code::FORBIDDEN, "message": message });
        self.send("terminated", json!({ "error": error })).await
    }
}
