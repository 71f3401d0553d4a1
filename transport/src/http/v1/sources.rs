//! Sources of tools: add, inspect and remove MCP servers while Toolcrib runs.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::Caller;
use toolcrib::domain::fault::{Code, Error};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, JsonBody, NamePath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// Maximum time that adding a source waits for the MCP server's first response.
const MAX_CONNECT_WAIT: Duration = Duration::from_secs(60);

/// A source of tools, and its state.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceBody {
    /// Name of the source. Its tools are named `NAME.tool`.
    pub name: String,
    pub project: String,
    /// `mcp`.
    pub kind: &'static str,
    /// `stdio` or `http`.
    pub transport: &'static str,
    /// The program, or the URL without parts that may be secret.
    pub place: String,
    /// `configuration` or `api`.
    pub origin: &'static str,
    /// `starting`, `ready`, `waiting` (unreachable, will be retried), `needs_sign_in` (a person
    /// must open `oauth.sign_in_url`) or `off`.
    pub state: &'static str,
    pub since_ms: u64,
    /// The present problem, if any.
    pub problem: Option<String>,
    /// Number of reconnects.
    pub restarts: u64,
    pub next_try_at_ms: Option<u64>,
    /// Process id of a stdio server.
    pub pid: Option<u32>,
    /// Revision of MCP that the server speaks.
    pub protocol_version: Option<String>,
    pub server_name: Option<String>,
    pub server_version: Option<String>,
    /// Number of its tools in the registry.
    pub tools: usize,
    /// True if changed definitions are refused until they are accepted.
    pub pinned: bool,
    /// Tools that could not be imported.
    pub skipped: Vec<SkippedToolBody>,
    /// Tools whose descriptions contain instructions to the model.
    pub flagged: Vec<String>,
    /// For a pinned source: changes that are not accepted. Calls of these tools are refused.
    pub pending: Vec<SourceToolChange>,
    /// Changes while the source was connected, newest first.
    pub changes: Vec<SourceToolChange>,
    /// Names of the environment variables and headers passed to it; never their values.
    pub env: Vec<String>,
    pub headers: Vec<String>,
    /// State of its OAuth tokens, never the tokens. Present only for servers that are reached over
    /// HTTP without a token in a configured header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oauth: Option<SourceOauth>,
    /// The last lines of the program's standard error. Present only when one source is requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Vec<String>>,
}

/// State of the OAuth tokens of a source.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceOauth {
    /// `authorization_code` (a person signs in) or `client_credentials` (the server signs in by
    /// itself).
    pub grant: &'static str,
    /// True if there is a token.
    pub signed_in: bool,
    /// Issuer of the token.
    pub issuer: Option<String>,
    /// Scopes of the token.
    pub scopes: Vec<String>,
    /// URL that a person must open to sign in, if that is needed.
    pub sign_in_url: Option<String>,
    /// When `sign_in_url` expires.
    pub sign_in_expires_at_ms: Option<u64>,
}

/// A tool that could not be imported.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SourceSkipped)]
pub struct SkippedToolBody {
    pub tool: String,
    pub why: String,
}

/// A change to a tool of a source.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SourceChange)]
pub struct SourceToolChange {
    pub tool: String,
    /// `added`, `changed` or `removed`.
    pub change: &'static str,
    /// The fields that changed.
    pub fields: Vec<&'static str>,
    pub at_ms: u64,
}

/// The sources of a project.
#[derive(Serialize, ToSchema)]
pub(super) struct SourceList {
    sources: Vec<SourceBody>,
}

/// Time to wait for a source.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SourceWaitQuery {
    /// Maximum time to wait for the server's first response, in milliseconds (default: 0).
    wait_ms: Option<u64>,
}

impl SourceWaitQuery {
    fn duration(&self) -> Duration {
        Duration::from_millis(self.wait_ms.unwrap_or(0)).min(MAX_CONNECT_WAIT)
    }
}

/// An MCP server to add: `name`, and `command` with `args`, `env`, `env_from`, `cwd`, or `url` with
/// `headers` or `oauth`; `pin`, `effect`, `risk`, `timeout_ms`, `max_tools`, `tools` as in the
/// configuration file. Or `mcpServers` in the format of desktop applications.
#[derive(Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Object)]
#[schema(as = NewSource)]
pub(super) struct NewSourceBody(Value);

/// The changes to accept.
#[derive(Deserialize, ToSchema)]
#[schema(as = Accepting)]
pub(super) struct AcceptToolsBody {
    /// Names of the tools (default: all pending changes).
    #[serde(default)]
    tools: Option<Vec<String>>,
}

/// The accepted changes.
#[derive(Serialize, ToSchema)]
#[schema(as = Accepted)]
pub(super) struct AcceptedToolsBody {
    accepted: Vec<SourceToolChange>,
}

fn require_sources(state: &HttpState) -> Result<&Arc<dyn SourceAdmin>, ApiError> {
    let message = "this server has no sources";
    state.sources.as_ref().ok_or_else(|| Error::refused(Code::NotFound, message).into())
}

/// Lists the MCP servers of the project, with their states.
#[utoipa::path(get, path = "/v1/sources/mcp", tag = "operators",
    responses((status = 200, body = SourceList), (status = 403, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<SourceList>, ApiError> {
    Ok(Json(SourceList { sources: require_sources(&state)?.list(&caller)? }))
}

/// Adds an MCP server or replaces its settings.
///
/// Accepts the configuration of a desktop application as well, and adds all its servers.
#[utoipa::path(post, path = "/v1/sources/mcp", tag = "operators", params(SourceWaitQuery),
    request_body(content = NewSourceBody, description = "A server, or {\"mcpServers\": {…}}"),
    responses((status = 201, body = SourceList), (status = 403, body = ProblemDetails),
        (status = 409, description = "It is in the server's configuration", body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn add(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(wait_limit): QueryParams<SourceWaitQuery>,
    JsonBody(body): JsonBody<NewSourceBody>,
) -> Result<Response, ApiError> {
    let sources = require_sources(&state)?.add(&caller, body.0, wait_limit.duration()).await?;
    Ok((StatusCode::CREATED, Json(SourceList { sources })).into_response())
}

/// Returns one MCP server, with the last lines of a program's standard error.
#[utoipa::path(get, path = "/v1/sources/mcp/{name}", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 200, body = SourceBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
) -> Result<Json<SourceBody>, ApiError> {
    Ok(Json(require_sources(&state)?.get(&caller, &name)?))
}

/// Removes an MCP server that was added over the API or the command line, with its tools.
#[utoipa::path(delete, path = "/v1/sources/mcp/{name}", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails),
        (status = 409, description = "It is in the server's configuration", body = ProblemDetails)))]
pub(super) async fn remove(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
) -> Result<StatusCode, ApiError> {
    require_sources(&state)?.remove(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Accepts the present tool definitions of a pinned MCP server.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/accept", tag = "operators",
    params(("name" = String, Path, description = "The source")), request_body = AcceptToolsBody,
    responses((status = 200, body = AcceptedToolsBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn accept(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
    JsonBody(body): JsonBody<AcceptToolsBody>,
) -> Result<Json<AcceptedToolsBody>, ApiError> {
    let accepted = require_sources(&state)?.accept(&caller, &name, body.tools).await?;
    Ok(Json(AcceptedToolsBody { accepted }))
}

/// Reconnects to an MCP server at once, or fetches its tool list if it is connected.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/refresh", tag = "operators",
    params(("name" = String, Path, description = "The source"), SourceWaitQuery),
    responses((status = 200, body = SourceBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn refresh(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
    QueryParams(wait_limit): QueryParams<SourceWaitQuery>,
) -> Result<Json<SourceBody>, ApiError> {
    Ok(Json(require_sources(&state)?.refresh(&caller, &name, wait_limit.duration()).await?))
}

/// Starts a sign-in at an MCP server; the response has the URL that a person must open.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/sign-in", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 200, body = SourceBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails),
        (status = 409, description = "It has no sign-in; the message says why", body = ProblemDetails)))]
pub(super) async fn sign_in(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
) -> Result<Json<SourceBody>, ApiError> {
    Ok(Json(require_sources(&state)?.sign_in(&caller, &name).await?))
}

/// Deletes the tokens of an MCP server. Toolcrib then connects without them.
#[utoipa::path(delete, path = "/v1/sources/mcp/{name}/sign-in", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn sign_out(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
) -> Result<StatusCode, ApiError> {
    require_sources(&state)?.sign_out(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Administers tool sources. Every method with a caller acts for that caller's project.
#[async_trait]
pub trait SourceAdmin: Send + Sync + 'static {
    /// Returns the sources of the caller's project, by name.
    fn list(&self, caller: &Caller) -> Result<Vec<SourceBody>, Error>;

    /// Returns one source, with all details.
    fn get(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error>;

    /// Adds one MCP server, or those of a desktop application's configuration, and waits up to
    /// `wait` for their first responses.
    async fn add(
        &self,
        caller: &Caller,
        document: Value,
        wait: Duration,
    ) -> Result<Vec<SourceBody>, Error>;

    /// Removes a source, with its tools.
    async fn remove(&self, caller: &Caller, name: &str) -> Result<(), Error>;

    /// Accepts the present tool definitions of a pinned source.
    async fn accept(
        &self,
        caller: &Caller,
        name: &str,
        tools: Option<Vec<String>>,
    ) -> Result<Vec<SourceToolChange>, Error>;

    /// Reconnects to a source at once, or fetches its tool list if it is connected.
    async fn refresh(
        &self,
        caller: &Caller,
        name: &str,
        wait: Duration,
    ) -> Result<SourceBody, Error>;

    /// Starts a person's sign-in at a source.
    async fn sign_in(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error>;

    /// Deletes the tokens of a source.
    async fn sign_out(&self, caller: &Caller, name: &str) -> Result<(), Error>;

    /// Completes a sign-in when a browser returns from an authorization server, with a code or an
    /// error. Returns the name of the source and the result, or `None` if no sign-in waits for this
    /// state.
    async fn complete_sign_in(
        &self,
        returned: OauthCallback,
    ) -> Option<(String, Result<(), String>)>;

    /// Returns the number of sources in each state, over all projects.
    fn count_by_state(&self) -> Vec<(&'static str, usize)>;

    /// Returns the base URL at which a browser reaches this server.
    fn public_base_url(&self) -> String;
}

/// The parameters of an OAuth redirect back to Toolcrib.
pub struct OauthCallback {
    pub state: String,
    pub code: Result<String, String>,
    pub issuer: Option<String>,
}
