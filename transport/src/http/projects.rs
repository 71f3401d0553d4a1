//! Projects and their tools, as in UTP's management API.

mod definition;
mod import;
use axum::Json;
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::Project;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::registry::CatalogEntry;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;
use crate::http::extract::{AuthenticatedCaller, JsonBody, NamePath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(put_tool, list_tools))
        .routes(routes!(show_tool, drop_tool))
        .routes(routes!(import::import))
}

/// A project to create.
#[derive(Deserialize, ToSchema)]
struct NewProjectBody {
    /// Project id: letters, digits, `_` and `-` (default: generated).
    project_id: Option<String>,
    /// A title for people.
    #[serde(default)]
    title: String,
}

/// A project.
#[derive(Serialize, ToSchema)]
struct ProjectBody {
    project_id: String,
    title: String,
    created_at_ms: u64,
}

impl From<Project> for ProjectBody {
    fn from(project: Project) -> Self {
        Self { project_id: project.id, title: project.title, created_at_ms: project.created_ms }
    }
}

/// Creates a project.
///
/// A project that a key was created for exists without this call.
#[utoipa::path(post, path = "/projects", tag = "operators", request_body = NewProjectBody,
    responses((status = 201, body = ProjectBody), (status = 403, body = ProblemDetails),
        (status = 409, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
async fn create(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<NewProjectBody>,
) -> Result<Response, ApiError> {
    let generate_id = || format!("proj_{}", ulid::Ulid::generate().to_string().to_lowercase());
    let id = body.project_id.unwrap_or_else(generate_id);
    let title: String = body.title.chars().take(200).collect();
    let project = state.engine.projects().create(&caller, &id, &title).await?;
    Ok((StatusCode::CREATED, Json(ProjectBody::from(project))).into_response())
}

/// Lists the projects that the caller may see.
#[utoipa::path(get, path = "/projects", tag = "operators",
    responses((status = 200, body = Vec<ProjectBody>), (status = 401, body = ProblemDetails)))]
async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Json<Vec<ProjectBody>> {
    Json(state.engine.projects().list(&caller).into_iter().map(ProjectBody::from).collect())
}

/// A tool of a project.
#[derive(Serialize, ToSchema)]
struct ProjectToolBody {
    project_id: String,
    tool_name: String,
    description: String,
    /// JSON Schema of the arguments.
    #[schema(value_type = Object)]
    parameters: toolcrib::Json,
    /// NATS subject of its commands; `{project_id}` and `{channel_id}` are filled in.
    target_subject: Option<String>,
    /// `suspend` or `terminate`.
    after_execution: Option<&'static str>,
    #[schema(value_type = Object)]
    options: toolcrib::Json,
    /// A fingerprint of this definition. A call stores the version it was made with.
    version: String,
    /// `utp` or `http`.
    executor: &'static str,
    effect: &'static str,
    risk: &'static str,
    timeout_ms: u64,
}

impl From<&CatalogEntry> for ProjectToolBody {
    fn from(entry: &CatalogEntry) -> Self {
        let tool = &entry.definition;
        let utp = tool.binding.as_ref();
        let full = utp.and_then(|utp| utp.parameters.as_ref());
        Self {
            project_id: tool.project.clone().unwrap_or_default(),
            tool_name: tool.name.clone(),
            description: tool.description.clone(),
            parameters: full.unwrap_or(&tool.input_schema).clone(),
            target_subject: utp.and_then(|utp| utp.target_subject.clone()),
            after_execution: utp.map(|utp| utp.after_execution.as_str()),
            options: utp.map_or_else(toolcrib::Json::empty_object, |utp| utp.options.clone()),
            version: entry.version.clone(),
            executor: tool.executor.as_str(),
            effect: tool.effect.as_str(),
            risk: entry.risk.as_str(),
            timeout_ms: tool.timeout_ms,
        }
    }
}

/// Defines or replaces a tool. Omitted fields get their defaults.
///
/// The definition is YAML in the field `file` of a form, or the body itself as YAML or JSON.
#[utoipa::path(post, path = "/projects/{project_id}/tools", tag = "operators",
    params(("project_id" = String, Path, description = "The project")),
    request_body(content = String, content_type = "application/yaml"),
    responses((status = 201, body = ProjectToolBody), (status = 400, body = ProblemDetails),
        (status = 403, body = ProblemDetails), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
async fn put_tool(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(project): NamePath,
    request: Request,
) -> Result<Response, ApiError> {
    if !caller.may_provide() {
        let message = format!("a key with the role {} cannot define tools", caller.roles);
        return Err(Error::refused(Code::PermissionDenied, message).into());
    }
    let limit = state.settings.max_body_bytes;
    let document =
        definition::read_document(request, limit, toolcrib_protocol::yaml::parse).await?;
    let checked = definition::validate(&document, state.settings.jina.as_ref())?;
    definition::check_schemas(&caller.project, &checked).await?;
    let caller = state.engine.projects().switch_project(&caller, &project)?;
    let default_ms = state.engine.registry().default_timeout_ms(&caller);
    let definition =
        checked.bind_to_project(&caller.project, &state.settings.utp_version, default_ms)?;
    let entry = state.engine.projects().put_tool(&caller, definition).await?;
    Ok((StatusCode::CREATED, Json(ProjectToolBody::from(entry.as_ref()))).into_response())
}

/// The page of the tool list to return.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ProjectToolsQuery {
    /// Maximum number of tools, up to 1000 (default: 200).
    limit: Option<usize>,
    /// Number of tools to skip.
    offset: Option<usize>,
}

/// Lists the tools of a project, by name.
#[utoipa::path(get, path = "/projects/{project_id}/tools", tag = "operators",
    params(("project_id" = String, Path, description = "The project"), ProjectToolsQuery),
    responses((status = 200, body = Vec<ProjectToolBody>), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
async fn list_tools(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(project): NamePath,
    page: Result<QueryParams<ProjectToolsQuery>, ApiError>,
) -> Result<Json<Vec<ProjectToolBody>>, ApiError> {
    let invalid = |_| {
        let message = "limit and offset must be whole numbers";
        ApiError::from(Error::refused(Code::ValidationError, message))
    };
    let QueryParams(page) = page.map_err(invalid)?;
    let caller = state.engine.projects().switch_project(&caller, &project)?;
    let tools = state.engine.projects().tools(&caller)?;
    let (offset, limit) = (page.offset.unwrap_or(0), page.limit.unwrap_or(200).min(1_000));
    let part = tools.iter().skip(offset).take(limit);
    Ok(Json(part.map(|entry| ProjectToolBody::from(entry.as_ref())).collect()))
}

/// A project and a tool name from the path.
struct ProjectToolPath {
    project: String,
    name: String,
}

impl FromRequestParts<HttpState> for ProjectToolPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, ApiError> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let unreadable = |_| Error::refused(Code::BadRequest, "the path is not UTF-8");
        let Path((project, name)) = path.map_err(unreadable)?;
        Ok(Self { project, name })
    }
}

/// Returns one tool of a project.
#[utoipa::path(get, path = "/projects/{project_id}/tools/{tool_name}", tag = "operators",
    params(("project_id" = String, Path, description = "The project"),
        ("tool_name" = String, Path, description = "The tool")),
    responses((status = 200, body = ProjectToolBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
async fn show_tool(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: ProjectToolPath,
) -> Result<Json<ProjectToolBody>, ApiError> {
    let caller = state.engine.projects().switch_project(&caller, &path.project)?;
    let entry = state.engine.projects().tool(&caller, &path.name)?;
    Ok(Json(ProjectToolBody::from(entry.as_ref())))
}

/// Deletes a tool. Calls that were made with it continue unchanged.
#[utoipa::path(delete, path = "/projects/{project_id}/tools/{tool_name}", tag = "operators",
    params(("project_id" = String, Path, description = "The project"),
        ("tool_name" = String, Path, description = "The tool")),
    responses((status = 204), (status = 400, body = ProblemDetails),
        (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
async fn drop_tool(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: ProjectToolPath,
) -> Result<StatusCode, ApiError> {
    let caller = state.engine.projects().switch_project(&caller, &path.project)?;
    state.engine.projects().remove_tool(&caller, &path.name).await?;
    Ok(StatusCode::NO_CONTENT)
}
