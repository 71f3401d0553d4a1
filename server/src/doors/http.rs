//! HTTP: agents (`/v1`), tool providers (`/internal`), health, metrics, and the API's own pages.

mod answer;
mod docs;
mod health;
mod internal;
mod oauth;
mod openai;
mod paging;
mod projects;
mod question;
mod v1;
mod waiting;
mod wire;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::OwnedSemaphorePermit;
use toolcrib::Engine;
use toolcrib::fault::{Code, Fault};
use tower::Service;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::operation::jina::Places;
pub use answer::{Problem, refusal};
use answer::{problem, problem_as};
use docs::Security;
pub use docs::errors_page;
pub use v1::{Returned, SourceBody, SourceChange, SourceOauth, SourceSkipped, Sources};

/// What the door needs to know.
#[derive(Clone)]
pub struct Door {
    pub engine: Engine,
    pub settings: Arc<Settings>,
    pub metrics: Option<PrometheusHandle>,
    /// Who keeps the sources of tools, where somebody does.
    pub sources: Option<Arc<dyn Sources>>,
}

impl Door {
    /// A result and what is written around it.
    fn max_result_body_bytes(&self) -> usize {
        self.settings.max_body_bytes.max(self.engine.limits().max_result_bytes + 4_096)
    }

    /// What is read of a report on a call. It is more than a result may have, so that one over its
    /// limit fails its call and not the connection.
    fn max_report_bytes(&self) -> usize {
        self.max_result_body_bytes().saturating_mul(4)
    }
}

/// A connection's place among those that may be open. A WebSocket outlives the request that began
/// it, and keeps it.
#[derive(Clone)]
pub struct Place(pub Arc<OwnedSemaphorePermit>);

/// The door's own limits.
#[derive(Debug, Clone)]
pub struct Settings {
    pub max_body_bytes: usize,
    pub heartbeat_ms: u64,
    pub dead_after_ms: u64,
    /// Requests a client is given at once unless it says otherwise.
    pub window: usize,
    /// What a new agent's key may call unless told otherwise.
    pub default_allow: Vec<String>,
    /// The version of UTP: a part of the subjects that tools are defined with.
    pub utp_version: String,
    /// Where Jina is, for the tools that ask it.
    pub jina: Option<Places>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_body_bytes: 2 << 20,
            heartbeat_ms: 15_000,
            dead_after_ms: 45_000,
            window: 16,
            default_allow: Vec::new(),
            utp_version: crate::utp::DEFAULT_VERSION.to_owned(),
            jina: None,
        }
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Toolcrib",
        description = "The tool crib for AI agents: agents ask for tools by name, every call is a \
                       durable ticket, and whoever can do the work gets it.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "agents", description = "Calling tools"),
        (name = "models", description = "OpenAI's API, with the crib's tools behind it"),
        (name = "runs", description = "Conversations with a model, kept and driven here"),
        (name = "providers", description = "Offering tools and executing calls"),
        (name = "operators", description = "Keys, rules, health")
    ),
    modifiers(&Security)
)]
struct Api;

fn routes() -> OpenApiRouter<Door> {
    OpenApiRouter::with_openapi(Api::openapi())
        .merge(v1::routes())
        .merge(openai::routes())
        .merge(internal::routes())
        .merge(projects::routes())
        .merge(health::routes())
        .merge(oauth::routes())
}

/// The OpenAPI document, as JSON text.
pub fn openapi_json() -> String {
    let document = docs::distinct(routes().split_for_parts().1);
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The whole door.
pub fn router(door: Door) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .with_state(door)
        .merge(docs::pages())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        // Bodies are read and limited by `question::Body`, which answers in our own words.
        .layer(DefaultBodyLimit::disable())
}

async fn unknown_path(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    let message = format!("there is nothing at {path}; /docs shows what there is");
    problem(&Fault::new(Code::NotFound, message), None)
}

async fn wrong_method(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    let message = format!("{path} does not answer {}", request.method());
    problem_as(StatusCode::METHOD_NOT_ALLOWED, &Fault::new(Code::BadRequest, message), None)
}

/// A panic in a door is one request's misfortune; the log has it.
fn panicked(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    tracing::error!(panic = text, "a request panicked");
    problem(&Fault::new(Code::Internal, "internal error"), None).into_response()
}

const REQUEST_ID: &str = "x-request-id";

/// Answers one request: what every answer carries, and what a panic becomes. Done around the
/// router and not as its layers, because each layer there costs a call a few allocations.
pub async fn answer(mut router: Router, request: Request) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= 128).cloned();
    let id = given.unwrap_or_else(|| {
        let fresh = format!("req_{}", ulid::Ulid::generate());
        HeaderValue::from_str(&fresh).unwrap_or(HeaderValue::from_static("req"))
    });
    let trace = question::traceparent(request.headers());
    let asked = request.uri().clone();
    let answered = std::panic::AssertUnwindSafe(router.call(request)).catch_unwind().await;
    let mut answer = match answered {
        Ok(Ok(answer)) => answer,
        Ok(Err(never)) => match never {},
        Err(panic) => panicked(panic),
    };
    if answer.status().is_server_error() {
        tracing::warn!(request_id = ?id, status = answer.status().as_u16(), "answered");
    }
    if !answer.status().is_success() {
        answer = answer::completed(answer, &asked, trace.as_ref());
    }
    paging::linked(&mut answer, &asked);
    let headers = answer.headers_mut();
    headers.insert(REQUEST_ID, id);
    headers.insert("toolcrib-version", HeaderValue::from_static(env!("CARGO_PKG_VERSION")));
    answer
}
