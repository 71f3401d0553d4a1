//! Liveness, readiness and metrics. These routes require no key and reveal nothing about calls.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use toolcrib::domain::fault::{Code, Fault};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;
use crate::http::extract::QueryParams;
use crate::http::problem::problem_response;

pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(healthz))
        .routes(routes!(livez))
        .routes(routes!(readyz))
        .routes(routes!(metrics))
}

/// Returns `ok` if the process responds.
#[utoipa::path(get, path = "/healthz", tag = "operators",
    responses((status = 200, body = String)))]
async fn healthz() -> &'static str {
    "ok"
}

/// Returns `ok` if the process responds.
#[utoipa::path(get, path = "/livez", tag = "operators", responses((status = 200, body = String)))]
async fn livez() -> &'static str {
    "ok"
}

/// Level of detail of `/readyz`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ReadinessQuery {
    /// If present, the response has one line per component.
    verbose: Option<String>,
}

/// Returns 200 if the store responds, recovery of open calls is complete, every source's
/// dependencies are healthy, and the server is not shutting down.
#[utoipa::path(get, path = "/readyz", tag = "operators", params(ReadinessQuery),
    responses((status = 200, body = String), (status = 503, body = String)))]
async fn readyz(
    State(state): State<HttpState>,
    QueryParams(verbose): QueryParams<ReadinessQuery>,
) -> Response {
    let store = state.engine.check_store().await;
    let mut parts = vec![
        ("store", store.err().map(|error| error.to_string())),
        (
            "recovery",
            (!state.engine.calls().is_recovered()).then(|| "open calls are being taken up".into()),
        ),
    ];
    let sources = state.engine.sources_health();
    parts.extend(sources.into_iter().map(|health| (health.name, health.problem)));
    if state.engine.is_draining() {
        parts.push(("shutdown", Some("no more calls are taken".to_owned())));
    }
    let ready = parts.iter().all(|(_, trouble)| trouble.is_none());
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut text = String::new();
    let verbose = verbose.verbose.is_some();
    if verbose || !ready {
        for (part, trouble) in &parts {
            match trouble {
                None if !verbose => {}
                None => text.push_str(&format!("[+]{part} ok\n")),
                Some(trouble) => text.push_str(&format!("[-]{part} failed: {trouble}\n")),
            }
        }
    }
    text.push_str(if ready { "ready" } else { "not ready" });
    (status, text).into_response()
}

/// Prometheus metrics.
#[utoipa::path(get, path = "/metrics", tag = "operators",
    responses((status = 200, body = String)))]
async fn metrics(State(http_state): State<HttpState>) -> Response {
    let Some(handle) = &http_state.metrics else {
        let fault = Fault::new(Code::NotFound, "this process does not collect metrics");
        return problem_response(&fault, None);
    };
    let engine = &http_state.engine;
    metrics::gauge!("toolcrib_runs_open").set(engine.runs().open_run_count() as f64);
    for (state, count) in engine.calls().open_calls_by_state() {
        metrics::gauge!("toolcrib_tool_calls_open", "state" => state).set(count as f64);
    }
    metrics::gauge!("toolcrib_tool_calls_waiting").set(engine.calls().queued_call_count() as f64);
    metrics::gauge!("toolcrib_clients_connected")
        .set(engine.clients().client_connection_count() as f64);
    let age_ms = engine.calls().oldest_open_call_age_ms();
    metrics::gauge!("toolcrib_oldest_open_call_age_seconds").set(age_ms as f64 / 1_000.0);
    for (state, count) in http_state.sources.iter().flat_map(|sources| sources.count_by_state()) {
        metrics::gauge!("toolcrib_upstreams", "state" => state).set(count as f64);
    }
    metrics::gauge!("toolcrib_schemas_compiled_bytes")
        .set(toolcrib::schema::compiled_bytes() as f64);
    if let Ok(bytes) = engine.store_size_bytes().await {
        metrics::gauge!("toolcrib_store_size_bytes").set(bytes as f64);
    }
    handle.run_upkeep();
    let content_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (content_type, handle.render()).into_response()
}
