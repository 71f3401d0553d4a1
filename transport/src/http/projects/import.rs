//! Imports the operations of an OpenAPI document as tools of a project.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use reqwest::Url;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::tool::check_tool_name;
use toolcrib::schema::compile_off_thread;
use toolcrib_protocol::http_operation::destination::DestinationRules;
use toolcrib_protocol::openapi::{self, ImportOptions, ImportReport, ImportedTool};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::definition;
use crate::http::extract::{AuthenticatedCaller, NamePath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// Options of an import.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ImportQuery {
    /// Prefix of every tool name, followed by a dot.
    prefix: Option<String>,
    /// Base URL of the API (default: the one in the document).
    server: Option<String>,
    /// Report what would be imported, and import nothing.
    dry_run: Option<bool>,
}

/// An operation that was imported as a tool.
#[derive(Serialize, ToSchema)]
#[schema(as = ImportedBody)]
struct ImportedToolBody {
    tool_name: String,
    /// `GET /pets/{id}`
    operation: String,
    url: String,
    effect: &'static str,
    version: String,
    /// Environment variables of the server that the tool needs.
    envs: Vec<String>,
}

impl From<&ImportedTool> for ImportedToolBody {
    fn from(tool: &ImportedTool) -> Self {
        Self {
            tool_name: tool.definition.name.clone(),
            operation: tool.operation.clone(),
            url: tool.url.clone(),
            effect: tool.definition.effect.as_str(),
            version: tool.definition.version(),
            envs: tool.envs.clone(),
        }
    }
}

/// An operation that cannot be imported.
#[derive(Serialize, ToSchema)]
#[schema(as = SkippedBody)]
struct SkippedOperationBody {
    operation: String,
    reason: String,
}

/// The result of an import.
#[derive(Serialize, ToSchema)]
pub(super) struct ImportBody {
    project_id: String,
    imported: Vec<ImportedToolBody>,
    skipped: Vec<SkippedOperationBody>,
    /// Reasons why calls of imported tools will be denied, with the settings that permit them.
    warnings: Vec<String>,
    dry_run: bool,
}

/// Imports the operations of an OpenAPI 3.0 or 3.1 document as tools.
///
/// Operations that cannot become tools are skipped and listed; the others are stored together or
/// not at all. The document is YAML or JSON, as the body or in the field `file` of a form.
#[utoipa::path(post, path = "/projects/{project_id}/tools/import", tag = "operators",
    params(("project_id" = String, Path, description = "The project"), ImportQuery),
    request_body(content = String, content_type = "application/yaml"),
    responses((status = 201, body = ImportBody), (status = 200, description = "A dry run",
        body = ImportBody), (status = 400, body = ProblemDetails),
        (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 413, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(super) async fn import(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(project): NamePath,
    QueryParams(query): QueryParams<ImportQuery>,
    request: Request,
) -> Result<Response, ApiError> {
    if !caller.may_provide() {
        let message = format!("a key with the role {} cannot define tools", caller.roles);
        return Err(Error::refused(Code::PermissionDenied, message).into());
    }
    let caller = state.engine.projects().switch_project(&caller, &project)?;
    let limit = state.settings.max_body_bytes;
    let document =
        definition::read_document(request, limit, toolcrib_protocol::yaml::parse_large).await?;
    let dry_run = query.dry_run.unwrap_or(false);
    let options = parse_options(query)?;
    let timeout_ms = state.engine.registry().default_timeout_ms(&caller);
    let project = caller.project.clone();
    let importing = compile_off_thread(&caller.project, move || {
        openapi::import(&document, &project, &options, timeout_ms)
    });
    let import = importing
        .await
        .map_err(|error| Error::Internal(Box::new(error)))?
        .map_err(|reason| Error::refused(Code::ValidationError, reason))?;
    if import.tools.is_empty() {
        return Err(empty_import_error(&import).into());
    }
    if !dry_run {
        let tools = import.tools.iter().map(|tool| tool.definition.clone()).collect();
        state.engine.projects().put_tools(&caller, tools).await?;
    }
    let warnings = destination_warnings(state.settings.destinations.as_ref(), &import.tools);
    let skipped = import.skipped.into_iter();
    let body = ImportBody {
        project_id: caller.project.clone(),
        imported: import.tools.iter().map(ImportedToolBody::from).collect(),
        skipped: skipped
            .map(|skipped| SkippedOperationBody {
                operation: skipped.operation,
                reason: skipped.reason,
            })
            .collect(),
        warnings,
        dry_run,
    };
    let status = if dry_run { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(body)).into_response())
}

/// Returns one warning for each host of the tools that they may not connect to. The tools are
/// imported all the same: the operator can change the settings later.
fn destination_warnings(rules: Option<&DestinationRules>, tools: &[ImportedTool]) -> Vec<String> {
    let Some(rules) = rules else { return Vec::new() };
    let mut warnings: Vec<String> = Vec::new();
    for url in tools.iter().filter_map(|tool| Url::parse(&tool.url).ok()) {
        let Err(forbidden) = rules.check(&url) else { continue };
        let hint = forbidden.hint.map(|hint| format!("; {hint}")).unwrap_or_default();
        let warning = format!("calls will be denied: {}{hint}", forbidden.message);
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
    warnings
}

fn parse_options(query: ImportQuery) -> Result<ImportOptions, Error> {
    let invalid = |field: &str, message: String| {
        let fault = Fault::new(Code::ValidationError, message);
        Error::from(fault.with_detail(json!({ "pointer": format!("/{field}") })))
    };
    let prefix = query.prefix.filter(|prefix| !prefix.is_empty());
    if let Some(prefix) = &prefix {
        check_tool_name(prefix).map_err(|error| invalid("prefix", format!("prefix: {error}")))?;
    }
    let server = query.server.filter(|server| !server.is_empty());
    if server
        .as_ref()
        .is_some_and(|url| !url.starts_with("https://") && !url.starts_with("http://"))
    {
        let message = "server must begin with https:// or http://".to_owned();
        return Err(invalid("server", message));
    }
    Ok(ImportOptions { prefix, server })
}

fn empty_import_error(import: &ImportReport) -> Error {
    let first = import.skipped.first();
    let reason = first.map_or("it has no operations".to_owned(), |skipped| {
        format!("{}: {}", skipped.operation, skipped.reason)
    });
    let all: Vec<_> = import
        .skipped
        .iter()
        .take(50)
        .map(|skipped| json!({ "operation": skipped.operation, "reason": skipped.reason }))
        .collect();
    let fault = Fault::new(Code::ValidationError, format!("nothing can be imported: {reason}"));
    fault.without_side_effect().with_detail(json!({ "skipped": all })).into()
}
