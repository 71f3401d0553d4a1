//! Liveness, readiness and metrics. These routes require no key and reveal nothing about calls.

use std::borrow::Cow;
use std::collections::HashMap;

use axum::extract::State;
use axum::http::{Extensions, HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use toolcrib::domain::fault::{Code, Fault};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;
use crate::auth;
use crate::http::extract::QueryParams;
use crate::http::problem::{ProblemDetails, problem_response};

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
    responses((status = 200, body = String), (status = 400, body = ProblemDetails),
        (status = 503, body = String)))]
async fn readyz(
    State(state): State<HttpState>,
    QueryParams(verbose): QueryParams<ReadinessQuery>,
) -> Response {
    let store = state.engine.check_store().await;
    let mut parts = vec![
        ("store", store.err().map(|error| error.to_string())),
        (
            "recovery",
            (!state.engine.calls().is_recovered()).then(|| "open calls are being recovered".into()),
        ),
    ];
    let sources = state.engine.sources_health();
    parts.extend(sources.into_iter().map(|health| (health.name, health.problem)));
    if state.engine.is_draining() {
        parts.push(("shutdown", Some("no more calls are accepted".to_owned())));
    }
    let ready = parts.iter().all(|(_, problem)| problem.is_none());
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut text = String::new();
    let verbose = verbose.verbose.is_some();
    if verbose || !ready {
        for (part, problem) in &parts {
            match problem {
                None if !verbose => {}
                None => text.push_str(&format!("[+]{part} ok\n")),
                Some(problem) => text.push_str(&format!("[-]{part} failed: {problem}\n")),
            }
        }
    }
    text.push_str(if ready { "ready" } else { "not ready" });
    (status, text).into_response()
}

/// Prometheus metrics. The tools of projects are named to the operator and to admin keys.
#[utoipa::path(get, path = "/metrics", tag = "operators",
    responses((status = 200, body = String)))]
async fn metrics(
    State(http_state): State<HttpState>,
    headers: HeaderMap,
    extensions: Extensions,
) -> Response {
    let Some(handle) = &http_state.metrics else {
        let fault = Fault::new(Code::NotFound, "this process does not collect metrics");
        return problem_response(&fault, None);
    };
    let engine = &http_state.engine;
    metrics::gauge!("toolcrib_runs_open").set(engine.runs().open_run_count() as f64);
    for (state, count) in engine.calls().open_calls_by_state() {
        metrics::gauge!("toolcrib_tool_calls_open", "state" => state).set(count as f64);
    }
    metrics::gauge!("toolcrib_approvals_pending").set(engine.approvals().pending_count() as f64);
    metrics::gauge!("toolcrib_tool_calls_waiting").set(engine.calls().queued_call_count() as f64);
    metrics::gauge!("toolcrib_clients_connected")
        .set(engine.clients().client_connection_count() as f64);
    let age_ms = engine.calls().oldest_open_call_age_ms();
    metrics::gauge!("toolcrib_oldest_open_call_age_seconds").set(age_ms as f64 / 1_000.0);
    for (state, count) in http_state.sources.iter().flat_map(|sources| sources.count_by_state()) {
        metrics::gauge!("toolcrib_upstreams", "state" => state).set(count as f64);
    }
    for (kind, count) in engine.admin().switch_counts() {
        metrics::gauge!("toolcrib_switches", "kind" => kind).set(count as f64);
    }
    metrics::gauge!("toolcrib_schemas_compiled_bytes")
        .set(toolcrib::schema::compiled_bytes() as f64);
    if let Ok(bytes) = engine.store_size_bytes().await {
        metrics::gauge!("toolcrib_store_size_bytes").set(bytes as f64);
    }
    handle.run_upkeep();
    let content_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    let origins = &http_state.settings.origins;
    let credentials = auth::authenticate_request(engine, origins, &headers, &extensions).ok();
    let caller = credentials.as_ref().map(|credentials| credentials.caller());
    let mut text = handle.render();
    if !engine.registry().shows_tool_names(caller) {
        text = merge_private_tools(&text);
    }
    (content_type, text).into_response()
}

/// Replaces the names of projects' tools by `other` and adds up the series that become equal. The
/// names of built-in tools are public.
fn merge_private_tools(text: &str) -> String {
    let mut lines: Vec<(Cow<'_, str>, Option<f64>)> = Vec::new();
    let mut merged: HashMap<String, usize> = HashMap::new();
    for line in text.lines() {
        let Some((series, value)) = private_tool_series(line) else {
            lines.push((Cow::Borrowed(line), None));
            continue;
        };
        match merged.get(&series).and_then(|index| lines.get_mut(*index)) {
            Some((_, total)) => *total = Some(total.unwrap_or_default() + value),
            None => {
                merged.insert(series.clone(), lines.len());
                lines.push((Cow::Owned(series), Some(value)));
            }
        }
    }
    let mut output = String::with_capacity(text.len());
    for (line, value) in lines {
        output.push_str(&line);
        output.extend(value.map(|value| format!(" {value}")));
        output.push('\n');
    }
    output
}

/// Returns the series of a line without the tool's name, and its value, if the line is about a tool
/// of a project.
fn private_tool_series(line: &str) -> Option<(String, f64)> {
    if line.starts_with('#') || line.contains("{source=\"builtin\"") {
        return None;
    }
    let (before, rest) = line.split_once(",tool=\"")?;
    // Names of tools contain no quotes.
    let (_, after) = rest.split_once('"')?;
    let (labels, value) = after.rsplit_once(' ')?;
    Some((format!("{before},tool=\"other\"{labels}"), value.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_tools_are_added_up_as_other() {
        let text = "# TYPE d histogram\n\
            d_bucket{source=\"client\",tool=\"a.b\",le=\"1\"} 2\n\
            d_sum{source=\"client\",tool=\"a.b\"} 0.5\n\
            d_bucket{source=\"builtin\",tool=\"clock\",le=\"1\"} 7\n\
            d_bucket{source=\"client\",tool=\"other\",le=\"1\"} 3\n\
            d_sum{source=\"client\",tool=\"other\"} 1.25\n\
            d_bucket{source=\"mcp\",tool=\"x.y\",le=\"+Inf\"} 4\n\
            plain 1\n";
        let expected = "# TYPE d histogram\n\
            d_bucket{source=\"client\",tool=\"other\",le=\"1\"} 5\n\
            d_sum{source=\"client\",tool=\"other\"} 1.75\n\
            d_bucket{source=\"builtin\",tool=\"clock\",le=\"1\"} 7\n\
            d_bucket{source=\"mcp\",tool=\"other\",le=\"+Inf\"} 4\n\
            plain 1\n";
        assert_eq!(merge_private_tools(text), expected);
    }
}
