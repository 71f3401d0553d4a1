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
use toolcrib::fault::{Code, Error};
use toolcrib::json;

use super::Door;
use super::beside::Beside;
use super::catalogue::Catalogue;
use super::server::{Server, View};
use crate::auth::{self, Standing, is_loopback_name};
use crate::doors::http::refusal;

const SESSION: &str = "mcp-session-id";

/// Maximum time to receive a request body.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

tokio::task_local! {
    /// The caller of the current request. rmcp creates a handler for each request or session, and
    /// the factory reads the caller from here.
    static WHO: View;
}

#[derive(Clone)]
struct Entrance {
    door: Door,
    service: StreamableHttpService<Server, LocalSessionManager>,
    sessions: Arc<Sessions>,
}

/// Returns the routes of the MCP transport.
pub fn router(door: Door) -> Router {
    let manager = Arc::new(LocalSessionManager::default());
    let config = StreamableHttpServerConfig::default()
        // `handle_request` checks hosts and origins, with the same error format as the other
        // transports.
        .disable_allowed_hosts()
        .disable_allowed_origins()
        .with_json_response(true)
        .with_max_request_body_bytes(door.shared.settings.max_body_bytes);
    let making = door.clone();
    let service = StreamableHttpService::new(
        move || {
            let nobody = || std::io::Error::other("a server without a caller");
            let view = WHO.try_with(View::clone).map_err(|_| nobody())?;
            Ok(making.server(view))
        },
        manager.clone(),
        config,
    );
    let sessions = Arc::new(Sessions { manager, owners: Mutex::default() });
    let entrance = Entrance { door, service, sessions };
    Router::new()
        .route("/mcp", any(answer))
        .route("/mcp/{source}", any(answer))
        .route(METADATA, get(metadata))
        .route(&format!("{METADATA}/mcp"), get(metadata))
        .with_state(entrance)
}

async fn answer(State(entrance): State<Entrance>, request: Request) -> Response {
    match entrance.admitted(request).await {
        Ok(answer) => answer,
        Err(error) => {
            let nobody = error.code() == Code::Unauthenticated;
            let mut answer = refusal(error);
            let issuer = entrance.door.shared.settings.issuer.as_ref().filter(|_| nobody);
            let place = issuer.map(|issuer| metadata_url(&issuer.resource));
            let challenge = place.map(|place| format!("Bearer resource_metadata=\"{place}\""));
            if let Some(value) = challenge.and_then(|text| HeaderValue::from_str(&text).ok()) {
                answer.headers_mut().insert(header::WWW_AUTHENTICATE, value);
            }
            answer
        }
    }
}

const METADATA: &str = "/.well-known/oauth-protected-resource";

/// Returns the URL of the resource metadata. RFC 9728 inserts the well-known path before the path
/// of the resource.
fn metadata_url(resource: &str) -> String {
    let scheme_end = resource.find("://").map_or(0, |at| at + 3);
    let path = resource[scheme_end..].find('/').map(|at| scheme_end + at);
    let (origin, path) = resource.split_at(path.unwrap_or(resource.len()));
    format!("{origin}{METADATA}{}", path.trim_end_matches('/'))
}

/// Serves the metadata that says where to get a token (RFC 9728).
async fn metadata(State(entrance): State<Entrance>) -> Response {
    let Some(issuer) = &entrance.door.shared.settings.issuer else {
        return refusal(Error::refused(Code::NotFound, "this server takes no OAuth tokens"));
    };
    let body = json!({
        "resource": issuer.resource,
        "authorization_servers": [issuer.issuer],
        "bearer_methods_supported": ["header"],
        "resource_name": "Toolcrib",
    });
    axum::Json(body).into_response()
}

impl Entrance {
    async fn admitted(&self, request: Request) -> Result<Response, Error> {
        let shared = &self.door.shared;
        let (mut parts, body) = request.into_parts();
        check_host(&parts.headers, &shared.settings.allowed_hosts)?;
        check_origin(&parts.headers, &shared.settings.allowed_origins)?;
        let caller = auth::caller(&shared.engine, &parts.headers)?;
        let session = session_of(&parts.headers);
        self.sessions.check(session.as_deref(), &caller)?;
        let standing = Some(Standing::new(&caller, &parts.headers));
        let query = parts.uri.query().unwrap_or_default();
        let (catalogue, source) = (catalogue(query)?, source(parts.uri.path())?);
        if let Some(name) = source.as_deref().filter(|name| !shared.shelf.has(&caller, name)) {
            let message = format!("there is no source \"{name}\"");
            return Err(Error::refused(Code::NotFound, message));
        }
        if source.is_some() && catalogue == Some(Catalogue::Search) {
            let message = "one source has no catalogue: ask /mcp for it";
            return Err(Error::refused(Code::ValidationError, message));
        }
        let view = View { caller, standing, catalogue, source };
        if let Some(session) = &session {
            shared.peers.renew(session, &view);
        }
        parts.extensions.insert(view.clone());
        // The secret is removed here, so that no later code sees it.
        parts.headers.remove(header::AUTHORIZATION);
        let post = parts.method == Method::POST;
        let body = read(body, shared.settings.max_body_bytes).await?;
        let asked = match serde_json::from_slice::<Asked>(&body) {
            Err(error) if post && !error.is_data() => return Ok(unreadable(&error)),
            read => read.ok().and_then(|asked| asked.method),
        };
        if post && session.is_none() && asked.as_deref() == Some("initialize") {
            self.sessions.check_room(shared.settings.max_sessions, &view.caller).await?;
        }
        // A session responds with a stream whose later messages cannot be spliced.
        let lists = post && session.is_none() && asked.as_deref() == Some("tools/list");
        let beside = lists.then(Beside::default);
        if let Some(beside) = &beside {
            parts.extensions.insert(beside.clone());
        }
        let request = Request::from_parts(parts, Body::from(body));
        let answer = WHO.scope(view.clone(), self.service.handle(request)).await;
        if let Some(made) = session_of(answer.headers()) {
            self.sessions.made(made, &view.caller).await;
        }
        let answer = answer.map(Body::new);
        match beside {
            Some(beside) => beside.into(answer).await,
            None => Ok(answer),
        }
    }
}

/// The method of a message, which decides whether it creates a session.
#[derive(serde::Deserialize)]
struct Asked {
    method: Option<String>,
}

/// Returns the JSON-RPC response to a body that is not JSON.
fn unreadable(error: &serde_json::Error) -> Response {
    let message = format!("the body is no JSON: {error}");
    let error = json!({ "code": -32700, "message": message });
    let body = json!({ "jsonrpc": "2.0", "id": null, "error": error });
    (StatusCode::BAD_REQUEST, axum::Json(body)).into_response()
}

/// Returns the catalogue mode that the MCP client requests: `/mcp?catalogue=search`.
fn catalogue(query: &str) -> Result<Option<Catalogue>, Error> {
    let given = query.split('&').find_map(|pair| pair.strip_prefix("catalogue="));
    let Some(word) = given else { return Ok(None) };
    let catalogue = Catalogue::parse(word)
        .ok_or_else(|| Error::refused(Code::ValidationError, "catalogue must be search or full"))?;
    Ok(Some(catalogue))
}

/// Returns the source to which the MCP client restricts its view, under unprefixed names:
/// `/mcp/files`.
fn source(path: &str) -> Result<Option<Arc<str>>, Error> {
    let Some(name) = path.strip_prefix("/mcp/").filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    toolcrib::tool::check_upstream_name(name)
        .map_err(|why| Error::refused(Code::NotFound, format!("there is no such source: {why}")))?;
    Ok(Some(name.into()))
}

/// Returns the id of the session that a message belongs to.
pub(super) fn session_of(headers: &HeaderMap) -> Option<String> {
    headers.get(SESSION).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Reads the full body within its limits of size, time and nesting depth.
async fn read(body: Body, limit: usize) -> Result<axum::body::Bytes, Error> {
    let reading = tokio::time::timeout(BODY_PATIENCE, axum::body::to_bytes(body, limit));
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
/// be one of this server's names.
fn check_host(headers: &HeaderMap, allowed: &[String]) -> Result<(), Error> {
    let Some(host) = headers.get(header::HOST).map(text) else { return Ok(()) };
    let bare = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let named =
        |known: &String| known.eq_ignore_ascii_case(host) || known.eq_ignore_ascii_case(bare);
    if allowed.is_empty() || is_loopback_name(host) || allowed.iter().any(named) {
        return Ok(());
    }
    let message = "this is not a name of this server; doors.mcp.allowed_hosts lists them";
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Allows web pages only from this machine, from this server itself, or from an allowed origin.
fn check_origin(headers: &HeaderMap, allowed: &[String]) -> Result<(), Error> {
    let Some(origin) = headers.get(header::ORIGIN).map(text) else { return Ok(()) };
    let place = origin.split_once("://").map_or("", |(_, place)| place);
    let own = headers.get(header::HOST).is_some_and(|host| text(host) == place);
    if !place.is_empty() && (own || is_loopback_name(place)) || allowed.iter().any(|o| o == origin)
    {
        return Ok(());
    }
    let message = "pages of this origin may not use this server; doors.mcp.allowed_origins lists \
                   those that may";
    Err(Error::refused(Code::PermissionDenied, message))
}

fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("")
}

/// The owner of each session: a session id alone grants no access.
struct Sessions {
    manager: Arc<LocalSessionManager>,
    owners: Mutex<HashMap<String, Caller>>,
}

impl Sessions {
    /// Refuses a session of another caller as one that does not exist.
    fn check(&self, session: Option<&str>, caller: &Caller) -> Result<(), Error> {
        let Some(session) = session else { return Ok(()) };
        match self.owners.lock().get(session) {
            Some(owner) if owner == caller => Ok(()),
            _ => Err(Error::refused(Code::NotFound, "there is no such session; initialize again")),
        }
    }

    /// Refuses a session over the limit. One project may use at most half of all sessions, so that
    /// it leaves capacity for the others.
    async fn check_room(&self, limit: usize, caller: &Caller) -> Result<(), Error> {
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
        Err(Error::later(Code::Overloaded, too_many, 1_000))
    }

    async fn made(&self, session: String, caller: &Caller) {
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
