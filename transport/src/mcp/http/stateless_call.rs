//! `tools/call` of revision 2026-07-28, which has no session: the request is read here and its
//! response written here, without `rmcp`.
//!
//! Most calls take this path. `rmcp` 3.8.0 serves each request like a connection: it parses the
//! message into an untagged enum, writes it as a tree again to compare it with the headers, builds
//! the definition of the tool, and passes request and response through three tasks and their
//! queues. This module handles only a request that is valid beyond doubt. It leaves any other one
//! to `rmcp`, which explains what is wrong with it.

use axum::body::{Body, Bytes};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures::FutureExt;
use futures::future::BoxFuture;
use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ErrorCode, JsonRpcVersion2_0, ProtocolVersion,
    RequestId, RequestMetaObject, ServerJsonRpcMessage, ServerResult,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{NAME_HEADER, content_type};
use crate::mcp::request::{CallerView, McpClientInfo, McpPeer, McpRequest, ProtocolRevision};
use crate::mcp::server::{McpHandler, McpTransport};
use crate::mcp::state::McpTransportState;

const VERSION_HEADER: &str = "mcp-protocol-version";
const METHOD_HEADER: &str = "mcp-method";

/// Number of notifications that wait for the stream of the response to be read.
const NOTIFICATION_QUEUE: usize = 16;

/// The keyword of an argument that a header repeats. `rmcp` compares the two.
const MIRRORED_ARGUMENT: &str = "x-mcp-header";

/// A request that was read.
pub(super) struct StatelessCall {
    id: RequestId,
    params: CallToolRequestParams,
    meta: RequestMetaObject,
    client: McpClientInfo,
}

#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(rename = "jsonrpc")]
    _version: JsonRpcVersion2_0,
    id: RequestId,
    #[serde(borrow)]
    params: &'a RawValue,
}

#[derive(Deserialize)]
struct MetaField {
    #[serde(rename = "_meta")]
    meta: RequestMetaObject,
}

impl StatelessCall {
    /// Reads a `tools/call` message. Returns `None` for a request that `rmcp` must read.
    pub(super) fn read(
        shared: &McpTransportState,
        view: &CallerView,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Option<Self> {
        let revision = ProtocolVersion::V_2026_07_28;
        let accepted = single_header(headers, header::ACCEPT.as_str())?;
        let is_accepted =
            ["application/json", "text/event-stream"].iter().all(|kind| accepted.contains(kind));
        let is_plain = is_accepted
            && content_type(headers)? == "application/json"
            && single_header(headers, VERSION_HEADER)? == revision.as_str()
            && single_header(headers, METHOD_HEADER)? == "tools/call";
        if !is_plain {
            return None;
        }
        let message: RawMessage<'_> = serde_json::from_slice(body).ok()?;
        let MetaField { meta } = serde_json::from_str(message.params.get()).ok()?;
        let mut params: CallToolRequestParams = serde_json::from_str(message.params.get()).ok()?;
        params.meta = None;
        if single_header(headers, NAME_HEADER)? != params.name
            || meta.protocol_version()? != revision
        {
            return None;
        }
        let client = McpClientInfo {
            revision: ProtocolRevision::Modern,
            capabilities: meta.client_capabilities()?,
            program: meta.client_info(),
        };
        let name = shared.qualified_tool_name(view, &params.name);
        let tool = shared.engine.registry().tool(&view.caller, &name).ok();
        let mirrors = |schema: &str| schema.contains(MIRRORED_ARGUMENT);
        if tool.is_some_and(|tool| mirrors(tool.definition.input_schema.text())) {
            return None;
        }
        Some(Self { id: message.id, params, meta, client })
    }

    /// Handles the request in a task of its own, which learns when the response is dropped because
    /// the MCP client has disconnected. Returns the response to come and the notifications before
    /// it.
    pub(super) fn handle(
        self,
        transport: &McpTransport,
        parts: Parts,
        view: CallerView,
    ) -> (BoxFuture<'static, Response>, mpsc::Receiver<String>) {
        let (sender, notifications) = mpsc::channel(NOTIFICATION_QUEUE);
        let canceled = CancellationToken::new();
        let disconnected = canceled.clone().drop_guard();
        let handler = transport.new_handler(view);
        let task = tokio::spawn(self.call(handler, parts, canceled, McpPeer::Stream(sender)));
        let response = async move {
            let response = task.await;
            disconnected.disarm();
            response.unwrap_or_else(|_| {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                response
            })
        };
        (response.boxed(), notifications)
    }

    async fn call(
        self,
        handler: McpHandler,
        parts: Parts,
        canceled: CancellationToken,
        peer: McpPeer,
    ) -> Response {
        let Self { id, params, meta, client } = self;
        let request =
            McpRequest { client, meta: &meta, http: Some(&parts), canceled: &canceled, peer };
        to_response(id, handler.handle_tool_call(params, request).await)
    }
}

/// Returns the value of a header that occurs once.
fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

fn to_response(id: RequestId, outcome: Result<CallToolResponse, ErrorData>) -> Response {
    let (message, status) = match outcome {
        Ok(result) => {
            (ServerJsonRpcMessage::response(ServerResult::from(result), id), StatusCode::OK)
        }
        Err(error) => {
            let status = match error.code {
                ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => StatusCode::BAD_REQUEST,
                ErrorCode::METHOD_NOT_FOUND => StatusCode::NOT_FOUND,
                _ => StatusCode::OK,
            };
            (ServerJsonRpcMessage::error(error, Some(id)), status)
        }
    };
    let body = serde_json::to_vec(&message).unwrap_or_default();
    let mut response = Response::new(Body::from(Bytes::from(body)));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
