//! The HTTP transport: agents (`/v1`), tool providers (`/internal`), OpenAI's API, projects,
//! health, metrics, and the API's documentation pages.
//!
//! `routes` decides which routes exist: it merges the groups, and each group lists its own routes
//! in a function `routes` at the top of its file (`v1`, `internal`, `openai`, `projects`,
//! `health`, `oauth`). The OpenAPI document is generated from the same list.
//!
//! To add a route, write a handler with `#[utoipa::path]` in the file of its resource, with its
//! bodies next to it; add it to the `routes` of its group; then run
//! `UPDATE=1 cargo test -p toolcrib-server --test it wire_files`, which writes `api/openapi.json`.
//! A row in `server/tests/it/permissions_matrix/routes.rs` and a section in `docs/http.md` follow.
//! `extract` reads the caller, parameters and bodies, `wire` has the bodies that several
//! handlers share, and `problem` writes errors.
//!
//! Pages that are not part of the API are merged in `router`, as the documentation pages are. A
//! web console belongs there: a router of its own that serves static files and uses `/v1` as any
//! caller does. `/mcp` is the MCP transport's own router; `bootstrap` in the server crate merges it
//! with this one.

mod docs;
mod extract;
mod health;
mod internal;
mod oauth;
mod openai;
mod pagination;
mod problem;
mod projects;
mod rate_limit_headers;
mod stream_limiter;
mod v1;
mod wait_param;
mod wire;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
pub use docs::errors_page;
use docs::security::BearerSecurity;
use futures::FutureExt;
use metrics_exporter_prometheus::PrometheusHandle;
pub use openai::LiveConversations;
pub(crate) use problem::error_response;
use problem::{problem_response, problem_with_status};
pub use stream_limiter::{LongPollAdmission, StreamCaller, StreamLimiter, StreamPermit};
use tokio::sync::OwnedSemaphorePermit;
use toolcrib::Engine;
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::registry::audit;
use toolcrib_protocol::http_operation::destination::DestinationRules;
use toolcrib_protocol::http_operation::jina::JinaEndpoints;
use tower::Service;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
pub use v1::{
    AgentBody, AuditBody, AuditVerificationBody, KeyBody, NewKeyBody, OauthCallback,
    SessionTokenBody, SkippedToolBody, SourceAdmin, SourceBody, SourceOauth, SourceToolChange,
};

use crate::auth::{CredentialWatch, OriginPolicy};

/// The axum state of every HTTP handler. All clones share one allocation, because axum clones the
/// state several times per request.
#[derive(Clone)]
pub struct HttpState(Arc<HttpStateParts>);

/// The values that HTTP handlers use.
pub struct HttpStateParts {
    pub engine: Engine,
    pub settings: Arc<HttpTransportSettings>,
    pub metrics: Option<PrometheusHandle>,
    /// Administers tool sources; `None` if this server manages none.
    pub sources: Option<Arc<dyn SourceAdmin>>,
    /// Conversations of OpenAI's API that a repeated request can take over.
    pub conversations: LiveConversations,
}

impl From<HttpStateParts> for HttpState {
    fn from(parts: HttpStateParts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Deref for HttpState {
    type Target = HttpStateParts;

    fn deref(&self) -> &HttpStateParts {
        &self.0
    }
}

impl HttpState {
    /// Maximum size of a body that carries a result: the result and the JSON around it.
    fn max_result_body_bytes(&self) -> usize {
        self.settings.max_body_bytes.max(self.engine.limits().max_result_bytes + 4_096)
    }

    /// Maximum number of bytes read of a report on a call. This is more than the limit for a
    /// result, so that an oversized result fails its call instead of breaking the connection.
    fn max_report_bytes(&self) -> usize {
        self.max_result_body_bytes().saturating_mul(4)
    }
}

/// Permits from the limits on open connections and streams. A WebSocket outlives the request that
/// started it and holds them until it closes.
#[derive(Clone)]
pub struct ConnectionPermit {
    pub connection: Arc<OwnedSemaphorePermit>,
    pub stream: Arc<StreamPermit>,
}

/// Returns whether a path is a health check, which is answered even if no connection is free.
pub fn is_health_check(path: &str) -> bool {
    matches!(path, "/livez" | "/readyz" | "/healthz" | "/metrics")
}

/// Returns the response to a request that exceeds the number of connections.
pub fn connection_refusal() -> Response {
    let message = "the server has reached its maximum number of connections \
                   (limits.max_connections); nothing was done, a retry is safe";
    let fault = Fault::new(Code::Overloaded, message).without_side_effect();
    problem_response(&fault, Some(1_000))
}

/// Limits and defaults of the HTTP transport, from the configuration of the server.
#[derive(Debug, Clone)]
pub struct HttpTransportSettings {
    pub max_body_bytes: usize,
    pub heartbeat_ms: u64,
    pub dead_after_ms: u64,
    /// Default number of requests in flight per client.
    pub default_max_in_flight: usize,
    /// Tool patterns that a new agent key may call by default.
    pub default_allow: Vec<String>,
    /// UTP version: a part of the NATS subjects in tool definitions.
    pub utp_version: String,
    /// Rules on the destinations of HTTP tools, for the warnings of an import.
    pub destinations: Option<DestinationRules>,
    /// Hosts and origins that may use the server without credentials.
    pub origins: OriginPolicy,
    /// Jina endpoints, for tools that use Jina.
    pub jina: Option<JinaEndpoints>,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Toolcrib",
        description = "The tool crib for AI agents: agents call tools by name, every call is a \
                       durable ticket, and an available executor runs it. A server without keys \
                       accepts requests without credentials, except those of operators: for \
                       these, enter the operator token with Authorize.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "agents", description = "Calling tools"),
        (name = "models", description = "OpenAI's API, with Toolcrib's tools behind it"),
        (name = "runs", description = "Agent runs: stored conversations with a model"),
        (name = "providers", description = "Offering tools and executing calls"),
        (name = "approvers", description = "Deciding about calls that wait for a person"),
        (name = "operators", description = "Keys, rules, health")
    ),
    external_docs(url = "/docs/errors", description = "Error codes and what to do about them"),
    modifiers(&BearerSecurity)
)]
struct ApiDoc;

/// Returns every route of the API.
fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::with_openapi(ApiDoc::openapi())
        .merge(v1::routes())
        .merge(openai::routes())
        .merge(internal::routes())
        .merge(projects::routes())
        .merge(health::routes())
        .merge(oauth::routes())
}

/// Returns the OpenAPI document as JSON text.
pub fn openapi_json() -> String {
    let document = docs::deduplicate_operation_ids(routes().split_for_parts().1);
    let document = docs::security::add_requirements(docs::add_common_refusals(document));
    let document = docs::examples::add_examples(document);
    let mut text = docs::examples::to_ordered_json(document);
    text.push('\n');
    text
}

/// Builds the router of the HTTP transport: the API, and the pages next to it.
pub fn router(state: HttpState) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .with_state(state)
        .merge(docs::docs_router())
        .fallback(path_not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // The body types of `extract` read and limit bodies, and report errors as problem details.
        .layer(DefaultBodyLimit::disable())
}

async fn path_not_found(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    let message = format!("there is no route {path}; /docs lists the routes");
    let fault = Fault::new(Code::NotFound, message).with_hint("check the path of the URL");
    problem_response(&fault, None)
}

async fn method_not_allowed(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    let message = format!("{path} does not answer {}", request.method());
    problem_with_status(
        StatusCode::METHOD_NOT_ALLOWED,
        &Fault::new(Code::BadRequest, message),
        None,
    )
}

/// Turns a panic into a 500 response for that one request, and logs it.
fn panic_response(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    tracing::error!(panic = text, "a request panicked");
    problem_response(&Fault::new(Code::Internal, "internal error"), None).into_response()
}

const REQUEST_ID: &str = "x-request-id";

/// Returns the router's response.
///
/// A response that takes long, or is sent in parts, ends when the credentials of its request are
/// revoked, expire or are narrowed.
pub async fn call_router(mut router: Router, mut request: Request) -> Response {
    let watch = CredentialWatch::default();
    request.extensions_mut().insert(watch.clone());
    let answer = tokio::select! {
        biased;
        answer = router.call(request) => answer,
        error = watch.clone().wait_until_invalid() => return error_response(error),
    };
    match answer {
        Ok(answer) => watch.limit_response(answer),
        Err(never) => match never {},
    }
}

/// Returns the origin of a request for the audit log.
fn request_origin(request: &Request, id: &HeaderValue) -> RequestOrigin {
    let is_mcp = request.uri().path().starts_with("/mcp");
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    RequestOrigin {
        transport: Some(if is_mcp { "mcp" } else { "http" }.to_owned()),
        peer: peer.map(|ConnectInfo(address)| address.ip().to_string()),
        request_id: id.to_str().ok().map(str::to_owned),
    }
}

/// Serves one request: sets the headers common to all responses and turns a panic into a response.
/// This wraps the router instead of being layers of it, because each layer costs a few allocations
/// per call.
pub async fn serve_request<F>(request: Request, answer: impl FnOnce(Request) -> F) -> Response
where
    F: Future<Output = Response>,
{
    let header_value = request.headers().get(REQUEST_ID).filter(|id| id.len() <= 128).cloned();
    let id = header_value.unwrap_or_else(|| {
        let fresh = format!("req_{}", ulid::Ulid::generate());
        HeaderValue::from_str(&fresh).unwrap_or(HeaderValue::from_static("req"))
    });
    let trace = crate::http::extract::traceparent(request.headers());
    let uri = request.uri().clone();
    let origin = request_origin(&request, &id);
    let answering = std::panic::AssertUnwindSafe(answer(request)).catch_unwind();
    let answered = audit::with_origin(origin, answering).await;
    let mut answer = match answered {
        Ok(answer) => answer,
        Err(panic) => panic_response(panic),
    };
    if answer.status().is_server_error() {
        tracing::warn!(request_id = ?id, status = answer.status().as_u16(), "server error");
    }
    if !answer.status().is_success() {
        answer = crate::http::problem::with_request_details(answer, &uri, trace.as_ref());
    }
    crate::http::pagination::add_link_header(&mut answer, &uri);
    let headers = answer.headers_mut();
    headers.insert(REQUEST_ID, id);
    headers.insert("toolcrib-version", HeaderValue::from_static(env!("CARGO_PKG_VERSION")));
    answer
}
