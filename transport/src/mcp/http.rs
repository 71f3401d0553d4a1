//! Streamable HTTP at `/mcp`. Authenticates each request before the protocol is parsed, by the same
//! rules as the other transports.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::json;
use toolcrib::Caller;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::json;
use toolcrib_protocol::outbound::is_loopback_host;

use super::request::{CallerView, CatalogueMode, session_id};
use super::server::{McpHandler, McpTransport};
use super::tool_list::splice::ToolListSplice;
use crate::auth::{self, OriginPolicy, RequestCredentials};
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
    service: StreamableHttpService<McpHandler, LocalSessionManager>,
    sessions: Arc<SessionOwners>,
}

/// Returns the routes of the MCP transport.
pub fn router(transport: McpTransport) -> Router {
    let manager = Arc::new(LocalSessionManager::default());
    let config = StreamableHttpServerConfig::default()
        // `handle_request` checks hosts and origins, with the same error format as the other
        // transports.
        .disable_allowed_hosts()
        .disable_allowed_origins()
        .with_json_response(true)
        .with_max_request_body_bytes(transport.shared.settings.max_body_bytes);
    let making = transport.clone();
    let service = StreamableHttpService::new(
        move || {
            let no_caller = || std::io::Error::other("a server without a caller");
            let view = CALLER_VIEW.try_with(CallerView::clone).map_err(|_| no_caller())?;
            Ok(making.new_handler(view))
        },
        manager.clone(),
        config,
    );
    let sessions = Arc::new(SessionOwners { manager, owners: Mutex::default() });
    let entrance = McpHttpState { transport, service, sessions };
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
        return error_response(Error::refused(Code::NotFound, "this server takes no OAuth tokens"));
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
        let caller = auth::authenticate_request(&shared.engine, origins, &parts.headers)?;
        let session = session_id(&parts.headers);
        self.sessions.check_owner(session.as_deref(), &caller)?;
        let standing = Some(RequestCredentials::new(&caller, &parts.headers));
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
            let message = "one source has no catalogue: ask /mcp for it";
            return Err(Error::refused(Code::ValidationError, message));
        }
        let view = CallerView { caller, credentials: standing, catalogue, source };
        if let Some(session) = &session {
            self.transport.legacy_sessions.update_credentials(session, &view);
        }
        parts.extensions.insert(view.clone());
        // The secret is removed here, so that no later code sees it.
        parts.headers.remove(header::AUTHORIZATION);
        let post = parts.method == Method::POST;
        let body = read_body(body, shared.settings.max_body_bytes).await?;
        let params = match serde_json::from_slice::<JsonRpcMethod>(&body) {
            Err(error) if post && !error.is_data() => return Ok(parse_error_response(&error)),
            read => read.ok().and_then(|params| params.method),
        };
        if post && session.is_none() && params.as_deref() == Some("initialize") {
            self.sessions.check_capacity(shared.settings.max_sessions, &view.caller).await?;
        }
        // A session responds with a stream whose later messages cannot be spliced.
        let lists = post && session.is_none() && params.as_deref() == Some("tools/list");
        let beside = lists.then(ToolListSplice::default);
        if let Some(beside) = &beside {
            parts.extensions.insert(beside.clone());
        }
        let request = Request::from_parts(parts, Body::from(body));
        let answer = CALLER_VIEW.scope(view.clone(), self.service.handle(request)).await;
        if let Some(new_session) = session_id(answer.headers()) {
            self.sessions.add_session(new_session, &view.caller).await;
        }
        let answer = answer.map(Body::new);
        match beside {
            Some(beside) => beside.splice_into(answer).await,
            None => Ok(answer),
        }
    }
}

/// The method of a message, which decides whether it creates a session.
#[derive(serde::Deserialize)]
struct JsonRpcMethod {
    method: Option<String>,
}

/// Returns the JSON-RPC response to a body that is not JSON.
fn parse_error_response(error: &serde_json::Error) -> Response {
    let message = format!("the body is no JSON: {error}");
    let error = json!({ "code": -32700, "message": message });
    let body = json!({ "jsonrpc": "2.0", "id": null, "error": error });
    (StatusCode::BAD_REQUEST, axum::Json(body)).into_response()
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
async fn read_body(body: Body, limit: usize) -> Result<axum::body::Bytes, Error> {
    let reading = tokio::time::timeout(MCP_BODY_TIMEOUT, axum::body::to_bytes(body, limit));
    let bytes = reading
        .await
        .map_err(|_| Error::refused(Code::BadRequest, "the body took too long to come"))?
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

/// The owner of each session: a session id alone grants no access.
struct SessionOwners {
    manager: Arc<LocalSessionManager>,
    owners: Mutex<HashMap<String, Caller>>,
}

impl SessionOwners {
    /// Refuses a session of another caller as one that does not exist.
    fn check_owner(&self, session: Option<&str>, caller: &Caller) -> Result<(), Error> {
        let Some(session) = session else { return Ok(()) };
        match self.owners.lock().get(session) {
            Some(owner) if owner == caller => Ok(()),
            _ => Err(Error::refused(Code::NotFound, "there is no such session; initialize again")),
        }
    }

    /// Refuses a session over the limit. One project may use at most half of all sessions, so that
    /// it leaves capacity for the others.
    async fn check_capacity(&self, limit: usize, caller: &Caller) -> Result<(), Error> {
        let sessions = self.manager.sessions.read().await;
        let owners = self.owners.lock();
        let theirs = owners.iter().filter(|(id, owner)| {
            owner.project == caller.project && sessions.contains_key(id.as_str())
        });
        let too_many = match () {
            () if sessions.len() >= limit => "too many MCP sessions are open",
            () if theirs.count() >= (limit / 2).max(1) => "the project has too many MCP sessions",
            () => return Ok(()),
        };
        Err(Error::retry_later(Code::Overloaded, too_many, 1_000))
    }

    async fn add_session(&self, session: String, caller: &Caller) {
        let open: Vec<String> = {
            let sessions = self.manager.sessions.read().await;
            sessions.keys().map(|id| id.to_string()).collect()
        };
        let mut owners = self.owners.lock();
        // Owners of ended sessions are removed once there are twice as many owners as open
        // sessions.
        if owners.len() > 64 && owners.len() > open.len() * 2 {
            owners.retain(|id, _| open.contains(id));
        }
        owners.insert(session, caller.clone());
    }
}
