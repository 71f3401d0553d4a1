//! Streamable HTTP at `/mcp`. Authenticates each request before the protocol is parsed, by the same
//! rules as the other transports.

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
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::json;
use toolcrib::registry::audit;
use toolcrib_protocol::outbound::is_loopback_host;

use super::call_stream::{
    self, CallEventId, CallStoredSignal, CallStreamOptions, InternalIds, StreamId, StreamedRequest,
};
use super::duplicate_keys;
use super::request::{CallerView, CatalogueMode, session_id};
use super::resume::{self, EventChunks, ResumedStreams};
use super::server::{McpHandler, McpTransport};
use super::sessions::{RestorableSessions, SessionKey};
use super::tool_list::splice::ToolListSplice;
use super::tool_result;
use crate::auth::{self, OriginPolicy};
use crate::delivery::ResponseDeliveries;
use crate::http::error_response;

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
    let entrance = McpHttpState { transport, service, sessions, resumed: Arc::default() };
    Router::new()
        .route("/mcp", any(serve_mcp))
        .route("/mcp/{source}", any(serve_mcp))
        .route(METADATA_PATH, get(resource_metadata))
        .route(&format!("{METADATA_PATH}/mcp"), get(resource_metadata))
        .with_state(entrance)
}

async fn serve_mcp(State(entrance): State<McpHttpState>, request: Request) -> Response {
    match entrance.handle_request(request).await {
        Ok(answer) => answer,
        Err(error) => {
            let is_unauthenticated = error.code() == Code::Unauthenticated;
            let mut answer = error_response(error);
            let issuer = entrance
                .transport
                .shared
                .settings
                .protected_resource
                .as_ref()
                .filter(|_| is_unauthenticated);
            let url = issuer.map(|issuer| metadata_url(&issuer.resource));
            let challenge = url.map(|url| format!("Bearer resource_metadata=\"{url}\""));
            if let Some(value) = challenge.and_then(|text| HeaderValue::from_str(&text).ok()) {
                answer.headers_mut().insert(header::WWW_AUTHENTICATE, value);
            }
            answer
        }
    }
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
    async fn handle_request(&self, request: Request) -> Result<Response, Error> {
        let shared = &self.transport.shared;
        let (mut parts, body) = request.into_parts();
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
        let query = parts.uri.query().unwrap_or_default();
        let (catalogue, source) =
            (parse_catalogue_mode(query)?, parse_source_name(parts.uri.path())?);
        if let Some(name) =
            source.as_deref().filter(|name| !shared.passthrough.has_source(&caller, name))
        {
            let message = format!("there is no source \"{name}\"");
            return Err(Error::refused(Code::NotFound, message));
        }
        if source.is_some() && catalogue == Some(CatalogueMode::Search) {
            let message = "a single source has no search catalogue: use /mcp";
            return Err(Error::refused(Code::ValidationError, message));
        }
        let view = CallerView { caller, credentials, catalogue, source };
        if let Some(session) = &session {
            self.transport.legacy_sessions.update_credentials(session, &view);
        }
        parts.extensions.insert(view.clone());
        parts.extensions.insert(audit::current_origin());
        // The secret is removed here, so that no later code sees it.
        parts.headers.remove(header::AUTHORIZATION);
        if let Some(session) = session.as_ref().filter(|_| parts.method != Method::DELETE) {
            self.restore_session(&parts, &view, session).await;
        }
        if parts.method == Method::GET {
            return self.serve_get(parts, view, session).await;
        }
        let post = parts.method == Method::POST;
        let body = read_body(body, shared.settings.max_body_bytes).await?;
        let JsonRpcMethod { method, id } = match serde_json::from_slice(&body) {
            Err(error) if post && !error.is_data() => return Ok(parse_error_response(&error)),
            read => read.unwrap_or_default(),
        };
        let method = method.filter(|_| post);
        let is_json = content_type(&parts.headers).is_some_and(|kind| kind == "application/json");
        let deliveries = ResponseDeliveries::default();
        parts.extensions.insert(deliveries.clone());
        let mut answer = self.dispatch(parts, body, view, session, method.as_deref()).await?;
        // rmcp reports every body that it cannot read as one of an unsupported type.
        if is_json && answer.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            let message = "the body is JSON, but not a JSON-RPC 2.0 request, notification or \
                           response";
            return Ok(invalid_message_response(id, -32600, message));
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
                let marked = duplicate_keys::mark_message(&body);
                let body = marked.map_or(body, Bytes::from);
                self.serve_call(parts, body, view, session).await
            }
            (Some("initialize"), None) => {
                let params = serde_json::from_slice::<InitializeMessage>(&body);
                let caller = view.caller.clone();
                let handling = self.handle(parts, body, view);
                let params = params.ok().map(|message| message.params);
                self.sessions.create(&caller, params, handling).await?
            }
            // A session responds with a stream whose later messages cannot be spliced.
            (Some("tools/list"), None) => {
                let splice = ToolListSplice::default();
                parts.extensions.insert(splice.clone());
                splice.splice_into(self.handle(parts, body, view).await).await?
            }
            (Some("server/discover"), None) if resume::needs_session(&parts.headers) => {
                resume::undiscoverable_response(&body)
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
        call_stream::respond(self.handle(parts, body, view), stored, options, on_open).await
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
                let chunks = self.resume_call(&parts, &view, session, id).await;
                return Ok(call_stream::event_stream_response(chunks));
            }
        }
        let Some(session) = session else {
            return Ok(self.handle(parts, Body::empty(), view).await);
        };
        let open_calls = self.resumed.take_session_event(&mut parts.headers);
        let tracks_calls = resume::needs_session(&parts.headers);
        let mut streams: Vec<EventChunks> = Vec::new();
        for id in open_calls.iter().filter(|_| tracks_calls) {
            if let Some(id) = CallEventId::parse(id) {
                streams.push(self.resume_call(&parts, &view, Some(session.clone()), id).await);
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
        Ok(call_stream::event_stream_response(select_all(streams)))
    }

    /// Returns the events that continue a call.
    async fn resume_call(
        &self,
        parts: &Parts,
        view: &CallerView,
        session: Option<String>,
        id: CallEventId,
    ) -> EventChunks {
        metrics::counter!("toolcrib_mcp_resumed_streams_total").increment(1);
        let engine = &self.transport.shared.engine;
        let call = match engine.calls().call(&view.caller, &id.call.id).await {
            Ok(call) => call,
            Err(error) => {
                let error = tool_result::protocol_error(error);
                let message = call_stream::error_message(&id.request.id, &error);
                let event = Bytes::from(format!("data: {message}\n\n"));
                return Box::pin(futures::stream::iter([event]));
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
        let on_open = self.resumed.map_request(session, &id.request.id, &internal.request);
        let options = CallStreamOptions {
            request: id.request,
            retry_ms: self.transport.shared.settings.retry_ms,
            priming: resume::priming_format(&parts.headers),
            internal: Some(internal),
        };
        let handling = self.handle(parts, message.to_string(), view.clone());
        Box::pin(call_stream::resume(handling, stored, options, on_open).into_chunks())
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

/// Returns the media type of a request, without its parameters.
fn content_type(headers: &HeaderMap) -> Option<String> {
    let written = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(written.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

/// Returns the catalogue mode that the MCP client requests: `/mcp?catalogue=search`.
fn parse_catalogue_mode(query: &str) -> Result<Option<CatalogueMode>, Error> {
    let mode = query.split('&').find_map(|pair| pair.strip_prefix("catalogue="));
    let Some(word) = mode else { return Ok(None) };
    let catalogue = CatalogueMode::parse(word)
        .ok_or_else(|| Error::refused(Code::ValidationError, "catalogue must be search or full"))?;
    Ok(Some(catalogue))
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
