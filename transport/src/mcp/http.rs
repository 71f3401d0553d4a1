//! Streamable HTTP at `/mcp`. Authenticates each request before the protocol is parsed, by the same
//! rules as the other transports.

mod server_card;
mod stateless_call;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::select_all;
use rmcp::model::InitializeRequestParams;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::json;
use toolcrib::registry::audit;
use toolcrib_protocol::outbound::is_loopback_host;

use self::stateless_call::StatelessCall;
use super::call_arguments;
use super::call_stream::{
    self, CallEventId, CallStoredSignal, CallStreamOptions, InternalIds, StreamId, StreamedRequest,
};
use super::request::{CallerView, CatalogueMode, McpViewOptions, session_id};
use super::resume::{self, EventChunks, ResumedStreams};
use super::server::{McpHandler, McpTransport};
use super::sessions::{RestorableSessions, SessionKey};
use super::task_subscription::TaskSubscription;
use super::tool_list::splice::ToolListSplice;
use super::tool_result;
use crate::auth::{self, OriginPolicy};
use crate::delivery::ResponseDeliveries;
use crate::http::error_response;

/// The header that repeats the name of a tool or the id of a task.
const NAME_HEADER: &str = "mcp-name";

/// Maximum time to receive a request body.
const MCP_BODY_TIMEOUT: Duration = Duration::from_secs(30);

tokio::task_local! {
    /// The caller of the current request. rmcp creates a handler for each request or session, and
    /// the factory reads the caller from here.
    static CALLER_VIEW: CallerView;
}

#[derive(Clone)]
struct McpHttpState {
    transport: McpTransport,
    service: StreamableHttpService<McpHandler, RestorableSessions>,
    sessions: Arc<RestorableSessions>,
    resumed: Arc<ResumedStreams>,
}

/// Returns the routes of the MCP transport.
pub fn router(transport: McpTransport) -> Router {
    let settings = &transport.shared.settings;
    let key = settings.session_key.clone().unwrap_or_else(SessionKey::generate);
    let sessions = Arc::new(RestorableSessions::new(key, settings.max_sessions));
    let mut config = StreamableHttpServerConfig::default()
        // `handle_request` checks hosts and origins, with the same error format as the other
        // transports.
        .disable_allowed_hosts()
        .disable_allowed_origins()
        .with_json_response(true)
        // `call_stream` and `resume` write the events that tell an MCP client how to resume.
        .with_sse_retry(None)
        .with_max_request_body_bytes(transport.shared.settings.max_body_bytes);
    config.session_store = Some(sessions.clone());
    let making = transport.clone();
    let service = StreamableHttpService::new(
        move || {
            let no_caller = || std::io::Error::other("a server without a caller");
            let view = CALLER_VIEW.try_with(CallerView::clone).map_err(|_| no_caller())?;
            Ok(making.new_handler(view))
        },
        sessions.clone(),
        config,
    );
    transport.shared.events.start();
    let entrance = McpHttpState { transport, service, sessions, resumed: Arc::default() };
    Router::new()
        .route("/mcp", any(serve_mcp))
        .route("/mcp/{source}", any(serve_mcp))
        .route(server_card::CARD_PATHS[0], get(serve_card))
        .route(server_card::CARD_PATHS[1], get(serve_card))
        .route(server_card::CATALOG_PATH, get(serve_catalog))
        .route(METADATA_PATH, get(resource_metadata))
        .route(&format!("{METADATA_PATH}/mcp"), get(resource_metadata))
        .with_state(entrance)
}

async fn serve_mcp(State(entrance): State<McpHttpState>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    match entrance.admit(&mut parts).await {
        Ok((view, session)) => {
            let answer = entrance.handle_request(parts, body, view, session).await;
            answer.unwrap_or_else(error_response)
        }
        Err(error) => entrance.refuse(error, &parts, body).await,
    }
}

async fn serve_card(State(entrance): State<McpHttpState>, request: Request) -> Response {
    let shared = &entrance.transport.shared;
    let needs_key = shared.engine.registry().credentials().has_keys();
    let public_url = shared.settings.public_url.as_deref();
    server_card::card_response(&request.into_parts().0, public_url, needs_key)
}

async fn serve_catalog(State(entrance): State<McpHttpState>, request: Request) -> Response {
    let public_url = entrance.transport.shared.settings.public_url.as_deref();
    server_card::catalog_response(&request.into_parts().0, public_url)
}

const METADATA_PATH: &str = "/.well-known/oauth-protected-resource";

/// Returns the URL of the resource metadata. RFC 9728 inserts the well-known path before the path
/// of the resource.
fn metadata_url(resource: &str) -> String {
    let scheme_end = resource.find("://").map_or(0, |index| index + 3);
    let path = resource[scheme_end..].find('/').map(|index| scheme_end + index);
    let (origin, path) = resource.split_at(path.unwrap_or(resource.len()));
    format!("{origin}{METADATA_PATH}{}", path.trim_end_matches('/'))
}

/// Serves the metadata that says where to get a token (RFC 9728).
async fn resource_metadata(State(entrance): State<McpHttpState>) -> Response {
    let Some(issuer) = &entrance.transport.shared.settings.protected_resource else {
        return error_response(Error::refused(
            Code::NotFound,
            "this server does not accept OAuth tokens",
        ));
    };
    let body = json!({
        "resource": issuer.resource,
        "authorization_servers": [issuer.issuer],
        "bearer_methods_supported": ["header"],
        "resource_name": "Toolcrib",
    });
    axum::Json(body).into_response()
}

impl McpHttpState {
    /// Authenticates a request. Returns its caller with the chosen view, and the id of its session.
    async fn admit(&self, parts: &mut Parts) -> Result<(CallerView, Option<String>), Error> {
        let shared = &self.transport.shared;
        let origins = &shared.settings.origins;
        check_host(&parts.headers, origins)?;
        check_origin(&parts.headers, &origins.allowed_origins)?;
        let credentials =
            auth::authenticate_request(&shared.engine, origins, &parts.headers, &parts.extensions)?;
        let caller = credentials.caller().clone();
        let session = session_id(&parts.headers);
        if let Some(session) = &session {
            self.sessions.check_session(session, &caller).await?;
        }
        let credentials = Some(credentials);
        let options = parse_view_options(parts)?;
        let source = options.source.as_deref();
        if let Some(name) = source.filter(|name| !shared.passthrough.has_source(&caller, name)) {
            let message = format!("there is no MCP server \"{name}\"");
            return Err(Error::refused(Code::NotFound, message));
        }
        let view = CallerView::new(&shared.engine, caller, credentials, options);
        if let Some(session) = &session {
            self.transport.legacy_sessions.update_credentials(session, &view);
        }
        parts.extensions.insert(view.clone());
        parts.extensions.insert(audit::current_origin());
        // The secret is removed here, so that no later code sees it.
        parts.headers.remove(header::AUTHORIZATION);
        Ok((view, session))
    }

    /// Returns the response to a request that is not admitted. MCP clients show the error of a
    /// JSON-RPC response; to other requests the response is the one of the HTTP API.
    async fn refuse(&self, error: Error, parts: &Parts, body: Body) -> Response {
        let is_unauthenticated = error.code() == Code::Unauthenticated;
        let is_denied = is_unauthenticated || error.code() == Code::PermissionDenied;
        let mut answer = match error {
            Error::Refused { fault, .. } if is_denied && parts.method == Method::POST => {
                refusal_message(&fault, read_message_id(body).await)
            }
            error => error_response(error),
        };
        if is_unauthenticated {
            let issuer = self.transport.shared.settings.protected_resource.as_ref();
            let url = issuer.map(|issuer| metadata_url(&issuer.resource));
            let challenge = match url {
                Some(url) => format!("Bearer resource_metadata=\"{url}\""),
                None => "Bearer".to_owned(),
            };
            if let Ok(value) = HeaderValue::from_str(&challenge) {
                answer.headers_mut().insert(header::WWW_AUTHENTICATE, value);
            }
        }
        answer
    }

    async fn handle_request(
        &self,
        mut parts: Parts,
        body: Body,
        view: CallerView,
        session: Option<String>,
    ) -> Result<Response, Error> {
        let shared = &self.transport.shared;
        if let Some(session) = session.as_ref().filter(|_| parts.method != Method::DELETE) {
            self.restore_session(&parts, &view, session).await;
        }
        if parts.method == Method::GET {
            return self.serve_get(parts, view, session).await;
        }
        let (post, is_delete) = (parts.method == Method::POST, parts.method == Method::DELETE);
        let body = read_body(body, shared.settings.max_body_bytes).await?;
        let JsonRpcMethod { method, id } = match serde_json::from_slice(&body) {
            Err(error) if post && !error.is_data() => return Ok(parse_error_response(&error)),
            read => read.unwrap_or_default(),
        };
        let method = method.filter(|_| post);
        let is_json = content_type(&parts.headers).is_some_and(|kind| kind == "application/json");
        let deliveries = ResponseDeliveries::default();
        parts.extensions.insert(deliveries.clone());
        let requester = deliveries.guard();
        let mut answer = self.dispatch(parts, body, view, session, method.as_deref()).await?;
        requester.disarm();
        // rmcp reports every body that it cannot read as one of an unsupported type.
        if is_json && answer.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            let message = "the body is JSON, but not a JSON-RPC 2.0 request, notification or \
                           response";
            return Ok(invalid_message_response(id, -32600, message));
        }
        if is_delete && answer.status() == StatusCode::ACCEPTED {
            // The session is closed now; 202 would say that it will be.
            *answer.status_mut() = StatusCode::NO_CONTENT;
        }
        answer.extensions_mut().insert(deliveries);
        Ok(answer)
    }

    /// Answers a message by its method.
    async fn dispatch(
        &self,
        mut parts: Parts,
        body: Bytes,
        view: CallerView,
        session: Option<String>,
        method: Option<&str>,
    ) -> Result<Response, Error> {
        Ok(match (method, &session) {
            (Some("tools/call"), _) => {
                let marked = call_arguments::mark_message(&body);
                let body = marked.map_or(body, Bytes::from);
                self.serve_call(parts, body, view, session).await
            }
            (Some("initialize"), None) => {
                let params = serde_json::from_slice::<InitializeMessage>(&body);
                let caller = view.caller.clone();
                let handling = self.handle(parts, body, view);
                let params = params.ok().map(|message| message.params);
                add_event_capability(self.sessions.create(&caller, params, handling).await?).await?
            }
            // A session responds with a stream whose later messages cannot be spliced.
            (Some("tools/list"), None) => {
                let splice = ToolListSplice::default();
                parts.extensions.insert(splice.clone());
                splice.splice_into(self.handle(parts, body, view).await).await?
            }
            // Some MCP clients omit the header that routes requests to a task.
            (Some("tasks/get" | "tasks/update" | "tasks/cancel"), _) => {
                add_task_name(&mut parts.headers, &body);
                self.handle(parts, body, view).await
            }
            (Some("subscriptions/listen"), None) => match TaskSubscription::parse(&body) {
                Some(tasks) => {
                    parts.extensions.insert(tasks.clone());
                    tasks.acknowledge_in(self.handle(parts, body, view).await)
                }
                None => self.handle(parts, body, view).await,
            },
            (Some("server/discover"), None) if resume::needs_session(&parts.headers) => {
                resume::undiscoverable_response(&body)
            }
            (Some("server/discover"), None) => {
                add_event_capability(self.handle(parts, body, view).await).await?
            }
            (Some("notifications/cancelled"), Some(session)) => {
                let body = self.resumed.with_internal_request_id(session, body);
                self.handle(parts, body, view).await
            }
            _ => self.handle(parts, body, view).await,
        })
    }

    /// Restores a session that this process does not know, before any of its requests.
    ///
    /// rmcp restores a session with its first request, but fails when requests come concurrently,
    /// as they do after a restart: one finds a session that is not initialized, another one that
    /// is present unexpectedly. So an internal `ping` comes first, and requests wait for it. It
    /// runs in its own task, because a session that is restored halfway is unusable.
    async fn restore_session(&self, parts: &Parts, view: &CallerView, session: &str) {
        let Some(lock) = self.sessions.restoring(session).await else { return };
        let (this, mut parts) = (self.clone(), parts.clone());
        let (view, session) = (view.clone(), session.to_owned());
        parts.method = Method::POST;
        let both = HeaderValue::from_static("application/json, text/event-stream");
        parts.headers.insert(header::ACCEPT, both);
        let json = HeaderValue::from_static("application/json");
        parts.headers.insert(header::CONTENT_TYPE, json);
        let restoring = tokio::spawn(async move {
            let _held = lock.lock().await;
            if !this.sessions.is_open(&session).await {
                let id = format!("restored-{}", ulid::Ulid::generate());
                let ping = json!({ "jsonrpc": "2.0", "id": id, "method": "ping" });
                let pinged = this.handle(parts, ping.to_string(), view).await;
                drop(axum::body::to_bytes(pinged.into_body(), usize::MAX).await);
            }
            this.sessions.end_restoring(&session);
        });
        // If it fails, the request itself is answered with 404.
        drop(restoring.await);
    }

    /// Passes a request to rmcp.
    fn handle(
        &self,
        parts: Parts,
        body: impl Into<Body>,
        view: CallerView,
    ) -> BoxFuture<'static, Response> {
        let (service, request) = (self.service.clone(), Request::from_parts(parts, body.into()));
        let handling = async move { service.handle(request).await.map(Body::new) };
        CALLER_VIEW.scope(view, handling).boxed()
    }

    /// Answers `tools/call`, with a stream if the call does not end at once.
    async fn serve_call(
        &self,
        mut parts: Parts,
        body: Bytes,
        view: CallerView,
        session: Option<String>,
    ) -> Response {
        let message = serde_json::from_slice::<Value>(&body).unwrap_or_default();
        let Some(request) = StreamedRequest::parse(&message) else {
            return self.handle(parts, body, view).await;
        };
        let shared = &self.transport.shared;
        let stateless = match session {
            None => StatelessCall::read(shared, &view, &parts.headers, &body),
            Some(_) => None,
        };
        let (signal, stored) = CallStoredSignal::new();
        parts.extensions.insert(signal);
        parts.extensions.insert(StreamId(request.stream.clone()));
        let options = CallStreamOptions {
            request,
            retry_ms: self.transport.shared.settings.retry_ms,
            priming: resume::priming_format(&parts.headers),
            internal: None,
        };
        let on_open = self.resumed.track_call(session.filter(|_| {
            // Only an MCP client that does not resume the streams of calls needs their ids on the
            // stream of its session.
            resume::needs_session(&parts.headers)
        }));
        let (handling, notifications) = match stateless {
            Some(call) => {
                let (handling, notifications) = call.handle(&self.transport, parts, view);
                (handling, Some(notifications))
            }
            None => (self.handle(parts, body, view), None),
        };
        call_stream::respond(handling, notifications, stored, options, on_open).await
    }

    /// Serves `GET`: the continuation of a call, or the stream of a session.
    async fn serve_get(
        &self,
        mut parts: Parts,
        view: CallerView,
        session: Option<String>,
    ) -> Result<Response, Error> {
        if let Some(id) = CallEventId::parse(resume::last_event_id(&parts.headers)) {
            // Without a session, rmcp explains to a legacy MCP client that it needs one.
            if id.request.capabilities.is_some() || session.is_some() {
                let (chunks, delivery) = self.resume_call(&parts, &view, session, id).await;
                let mut response = call_stream::event_stream_response(chunks);
                response.extensions_mut().insert(delivery);
                return Ok(response);
            }
        }
        let Some(session) = session else {
            return Ok(self.handle(parts, Body::empty(), view).await);
        };
        let open_calls = self.resumed.take_session_event(&mut parts.headers);
        let tracks_calls = resume::needs_session(&parts.headers);
        let mut streams: Vec<EventChunks> = Vec::new();
        let deliveries = ResponseDeliveries::default();
        for id in open_calls.iter().filter(|_| tracks_calls) {
            if let Some(id) = CallEventId::parse(id) {
                let session = Some(session.clone());
                let (chunks, delivery) = self.resume_call(&parts, &view, session, id).await;
                deliveries.add_part(delivery);
                streams.push(chunks);
            }
        }
        let response = self.handle(parts, Body::empty(), view).await;
        if response.status() != StatusCode::OK {
            return Ok(response);
        }
        let tracked = tracks_calls.then_some(session.as_str());
        let retry_ms = self.transport.shared.settings.retry_ms;
        let own = self.resumed.session_stream(response.into_body(), tracked, retry_ms);
        if streams.is_empty() {
            return Ok(call_stream::event_stream_response(own));
        }
        // The stream of the session never ends before those of the calls.
        streams.push(own);
        let mut response = call_stream::event_stream_response(select_all(streams));
        response.extensions_mut().insert(deliveries);
        Ok(response)
    }

    /// Returns the events that continue a call, and the delivery of its answer.
    async fn resume_call(
        &self,
        parts: &Parts,
        view: &CallerView,
        session: Option<String>,
        id: CallEventId,
    ) -> (EventChunks, ResponseDeliveries) {
        let deliveries = ResponseDeliveries::default();
        metrics::counter!("toolcrib_mcp_resumed_streams_total").increment(1);
        let engine = &self.transport.shared.engine;
        let call = match engine.calls().call(&view.caller, &id.call.id).await {
            Ok(call) => call,
            Err(error) => {
                let error = tool_result::protocol_error(error);
                let message = call_stream::error_message(&id.request.id, &error);
                let event = Bytes::from(format!("data: {message}\n\n"));
                return (Box::pin(futures::stream::iter([event])), deliveries);
            }
        };
        let internal = InternalIds {
            request: format!("resumed-{}", ulid::Ulid::generate()),
            progress_token: format!("progress-{}", ulid::Ulid::generate()),
        };
        let prefix = view.prefix().unwrap_or_default();
        let tool = call.tool_name.strip_prefix(&prefix).unwrap_or(&call.tool_name);
        let (mut parts, message) = resume::resuming_request(parts, view, &id, tool, &internal);
        let (signal, stored) = CallStoredSignal::new();
        parts.extensions.insert(signal);
        parts.extensions.insert(deliveries.clone());
        let on_open = self.resumed.map_request(session, &id.request.id, &internal.request);
        let options = CallStreamOptions {
            request: id.request,
            retry_ms: self.transport.shared.settings.retry_ms,
            priming: resume::priming_format(&parts.headers),
            internal: Some(internal),
        };
        let handling = self.handle(parts, message.to_string(), view.clone());
        let stream = call_stream::resume(handling, stored, options, on_open);
        (Box::pin(stream.into_chunks()), deliveries)
    }
}

/// The parameters of `initialize`, from which a session can be restored.
#[derive(serde::Deserialize)]
struct InitializeMessage {
    params: InitializeRequestParams,
}

/// The method of a message, which decides whether it creates a session, and its id.
#[derive(Default, serde::Deserialize)]
struct JsonRpcMethod {
    method: Option<String>,
    #[serde(default)]
    id: Value,
}

/// Returns the JSON-RPC response to a body that is not JSON.
fn parse_error_response(error: &serde_json::Error) -> Response {
    let message = format!("the body is not JSON: {error}");
    invalid_message_response(Value::Null, -32700, &message)
}

/// Returns the JSON-RPC response to a body that is not a message.
fn invalid_message_response(id: Value, code: i32, message: &str) -> Response {
    let error = json!({ "code": code, "message": message });
    let body = json!({ "jsonrpc": "2.0", "id": id, "error": error });
    (StatusCode::BAD_REQUEST, axum::Json(body)).into_response()
}

/// Error code of requests without valid credentials or without permission.
const DENIED: i32 = -32001;

/// Maximum size of a refused message whose id is read, and the time to receive it.
const MAX_REFUSED_BYTES: usize = 64 << 10;
const REFUSED_BODY_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the id of a message that is refused, or null if it cannot be read at once.
async fn read_message_id(body: Body) -> Value {
    let reading = axum::body::to_bytes(body, MAX_REFUSED_BYTES);
    let Ok(Ok(bytes)) = tokio::time::timeout(REFUSED_BODY_TIMEOUT, reading).await else {
        return Value::Null;
    };
    let message = json::check(&bytes).ok().and_then(|()| serde_json::from_slice(&bytes).ok());
    message.map_or(Value::Null, |message: JsonRpcMethod| message.id)
}

/// Returns a refusal as a JSON-RPC response, with the fault in its data.
fn refusal_message(fault: &Fault, id: Value) -> Response {
    let data = json!({
        "code": fault.code.as_str(), "retryable": fault.retryable, "hint": fault.hint(),
        "detail": fault.detail,
    });
    let error = json!({ "code": DENIED, "message": fault.message, "data": data });
    let body = json!({ "jsonrpc": "2.0", "id": id, "error": error });
    let status = StatusCode::from_u16(fault.code.http_status()).unwrap_or(StatusCode::FORBIDDEN);
    (status, axum::Json(body)).into_response()
}

/// Adds the capability `events` to the response of a handshake. rmcp has no field for it.
async fn add_event_capability(response: Response) -> Result<Response, Error> {
    if response.status() != StatusCode::OK {
        return Ok(response);
    }
    let (mut parts, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await;
    let body = body.map_err(|error| Error::Internal(Box::new(error)))?;
    let text = String::from_utf8_lossy(&body);
    let text = text.replacen("\"capabilities\":{", "\"capabilities\":{\"events\":{},", 1);
    parts.headers.remove(header::CONTENT_LENGTH);
    Ok(Response::from_parts(parts, Body::from(text)))
}

/// Adds the header `Mcp-Name` to a request about a task, from its body, if it has none.
fn add_task_name(headers: &mut HeaderMap, body: &[u8]) {
    let message = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let task_id = message.pointer("/params/taskId").and_then(Value::as_str);
    let value = task_id.and_then(|id| HeaderValue::from_str(id).ok());
    if let Some(value) = value.filter(|_| !headers.contains_key(NAME_HEADER)) {
        headers.insert(NAME_HEADER, value);
    }
}

/// Returns the media type of a request, without its parameters.
fn content_type(headers: &HeaderMap) -> Option<String> {
    let written = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(written.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

/// Returns the choices that the MCP client made in its URL:
/// `/mcp?catalogue=search&names=dotted&wait_ms=5000` or `/mcp/files`.
fn parse_view_options(parts: &Parts) -> Result<McpViewOptions, Error> {
    let query = parts.uri.query().unwrap_or_default();
    let parameter = |name: &str| {
        query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)
    };
    let invalid = |message: &'static str| Error::refused(Code::ValidationError, message);
    let options = McpViewOptions {
        catalogue: parameter("catalogue")
            .map(|(_, word)| CatalogueMode::parse(word).ok_or("catalogue must be search or full"))
            .transpose()
            .map_err(invalid)?,
        source: parse_source_name(parts.uri.path())?,
        names: parameter("names")
            .map(|(_, word)| word.parse().map_err(|()| "names must be model or dotted"))
            .transpose()
            .map_err(invalid)?,
        wait_ms: parameter("wait_ms")
            .map(|(_, word)| word.parse().map_err(|_| "wait_ms must be a number of milliseconds"))
            .transpose()
            .map_err(invalid)?,
    };
    if options.source.is_some() && options.catalogue == Some(CatalogueMode::Search) {
        return Err(invalid("a single source has no search catalogue: use /mcp"));
    }
    Ok(options)
}

/// Returns the source to which the MCP client restricts its view, under unprefixed names:
/// `/mcp/files`.
fn parse_source_name(path: &str) -> Result<Option<Arc<str>>, Error> {
    let Some(name) = path.strip_prefix("/mcp/").filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    toolcrib::domain::tool::check_upstream_name(name).map_err(|reason| {
        Error::refused(Code::NotFound, format!("there is no such source: {reason}"))
    })?;
    Ok(Some(name.into()))
}

/// Reads the full body within its limits of size, time and nesting depth.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, Error> {
    let reading = tokio::time::timeout(MCP_BODY_TIMEOUT, axum::body::to_bytes(body, limit));
    let bytes = reading
        .await
        .map_err(|_| Error::refused(Code::BadRequest, "the body did not arrive in time"))?
        .map_err(|_| {
            let message = format!("the body is over the limit of {limit} bytes, or ended early");
            Error::refused(Code::PayloadTooLarge, message)
        })?;
    json::check(&bytes).map_err(|error| {
        Error::refused(Code::BadRequest, format!("the body cannot be read: {error}"))
    })?;
    Ok(bytes)
}

/// Prevents DNS rebinding, where a web page points its own host name at this machine: the host must
/// be one of this server's names. With keys this applies if the settings list the names.
fn check_host(headers: &HeaderMap, origins: &OriginPolicy) -> Result<(), Error> {
    let Some(host) = headers.get(header::HOST).map(header_text) else { return Ok(()) };
    if origins.allowed_hosts.is_empty() || origins.is_own_host(host) {
        return Ok(());
    }
    let message = "this is not a name of this server; doors.mcp.allowed_hosts lists them";
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Allows web pages only from this machine, from this server itself, or from an allowed origin.
/// [`OriginPolicy`] is stricter with requests that have no credentials.
fn check_origin(headers: &HeaderMap, allowed: &[String]) -> Result<(), Error> {
    let Some(origin) = headers.get(header::ORIGIN).map(header_text) else { return Ok(()) };
    let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
    let is_same_host = headers.get(header::HOST).is_some_and(|host| header_text(host) == authority);
    if !authority.is_empty() && (is_same_host || is_loopback_host(authority))
        || allowed.iter().any(|o| o == origin)
    {
        return Ok(());
    }
    let message = "pages of this origin may not use this server; doors.mcp.allowed_origins lists \
                   those that may";
    Err(Error::refused(Code::PermissionDenied, message))
}

fn header_text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("")
}
