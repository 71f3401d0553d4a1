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
use toolcrib::fault::{Code, Error};
use utoipa::{IntoParams, ToSchema};

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Asked, Body, NamePath, Who};

/// Maximum time that adding a source waits for the MCP server's first response.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

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
    pub skipped: Vec<SourceSkipped>,
    /// Tools whose descriptions contain instructions to the model.
    pub flagged: Vec<String>,
    /// For a pinned source: changes that are not accepted. Calls of these tools are refused.
    pub pending: Vec<SourceChange>,
    /// Changes while the source was connected, newest first.
    pub changes: Vec<SourceChange>,
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
pub struct SourceSkipped {
    pub tool: String,
    pub why: String,
}

/// A change to a tool of a source.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceChange {
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
pub(super) struct Patience {
    /// Maximum time to wait for the server's first response, in milliseconds (default: 0).
    wait_ms: Option<u64>,
}

impl Patience {
    fn time(&self) -> Duration {
        Duration::from_millis(self.wait_ms.unwrap_or(0)).min(LONGEST_WAIT)
    }
}

/// An MCP server to add: `name`, and `command` with `args`, `env`, `env_from`, `cwd`, or `url` with
/// `headers` or `oauth`; `pin`, `effect`, `risk`, `timeout_ms`, `max_tools`, `tools` as in the
/// configuration file. Or `mcpServers` in the format of desktop applications.
#[derive(Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Object)]
pub(super) struct NewSource(Value);

/// The changes to accept.
#[derive(Deserialize, ToSchema)]
pub(super) struct Accepting {
    /// Names of the tools (default: all pending changes).
    #[serde(default)]
    tools: Option<Vec<String>>,
}

/// The accepted changes.
#[derive(Serialize, ToSchema)]
pub(super) struct Accepted {
    accepted: Vec<SourceChange>,
}

fn kept(door: &Door) -> Result<&Arc<dyn Sources>, Refused> {
    let message = "this server keeps no sources";
    door.sources.as_ref().ok_or_else(|| Error::refused(Code::NotFound, message).into())
}

/// Lists the MCP servers of the project, with their states.
#[utoipa::path(get, path = "/v1/sources/mcp", tag = "operators",
    responses((status = 200, body = SourceList), (status = 403, body = Problem)))]
pub(super) async fn list(
    State(door): State<Door>,
    Who(caller): Who,
) -> Result<Json<SourceList>, Refused> {
    Ok(Json(SourceList { sources: kept(&door)?.list(&caller)? }))
}

/// Adds an MCP server or replaces its settings.
///
/// Accepts the configuration of a desktop application as well, and adds all its servers.
#[utoipa::path(post, path = "/v1/sources/mcp", tag = "operators", params(Patience),
    request_body(content = NewSource, description = "A server, or {\"mcpServers\": {…}}"),
    responses((status = 201, body = SourceList), (status = 403, body = Problem),
        (status = 409, description = "It is in the server's configuration", body = Problem),
        (status = 422, body = Problem)))]
pub(super) async fn add(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(patience): Asked<Patience>,
    Body(body): Body<NewSource>,
) -> Result<Response, Refused> {
    let sources = kept(&door)?.add(&caller, body.0, patience.time()).await?;
    Ok((StatusCode::CREATED, Json(SourceList { sources })).into_response())
}

/// Returns one MCP server, with the last lines of a program's standard error.
#[utoipa::path(get, path = "/v1/sources/mcp/{name}", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 200, body = SourceBody), (status = 403, body = Problem),
        (status = 404, body = Problem)))]
pub(super) async fn show(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
) -> Result<Json<SourceBody>, Refused> {
    Ok(Json(kept(&door)?.one(&caller, &name)?))
}

/// Removes an MCP server that was added over the API or the command line, with its tools.
#[utoipa::path(delete, path = "/v1/sources/mcp/{name}", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
        (status = 409, description = "It is in the server's configuration", body = Problem)))]
pub(super) async fn remove(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
) -> Result<StatusCode, Refused> {
    kept(&door)?.remove(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Accepts the present tool definitions of a pinned MCP server.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/accept", tag = "operators",
    params(("name" = String, Path, description = "The source")), request_body = Accepting,
    responses((status = 200, body = Accepted), (status = 403, body = Problem),
        (status = 404, body = Problem)))]
pub(super) async fn accept(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
    Body(body): Body<Accepting>,
) -> Result<Json<Accepted>, Refused> {
    let accepted = kept(&door)?.accept(&caller, &name, body.tools).await?;
    Ok(Json(Accepted { accepted }))
}

/// Reconnects to an MCP server at once, or fetches its tool list if it is connected.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/refresh", tag = "operators",
    params(("name" = String, Path, description = "The source"), Patience),
    responses((status = 200, body = SourceBody), (status = 403, body = Problem),
        (status = 404, body = Problem)))]
pub(super) async fn refresh(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
    Asked(patience): Asked<Patience>,
) -> Result<Json<SourceBody>, Refused> {
    Ok(Json(kept(&door)?.refresh(&caller, &name, patience.time()).await?))
}

/// Starts a sign-in at an MCP server; the response has the URL that a person must open.
#[utoipa::path(post, path = "/v1/sources/mcp/{name}/sign-in", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 200, body = SourceBody), (status = 403, body = Problem),
        (status = 404, body = Problem),
        (status = 409, description = "It cannot be signed in to, and why", body = Problem)))]
pub(super) async fn sign_in(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
) -> Result<Json<SourceBody>, Refused> {
    Ok(Json(kept(&door)?.sign_in(&caller, &name).await?))
}

/// Deletes the tokens of an MCP server. Toolcrib then connects without them.
#[utoipa::path(delete, path = "/v1/sources/mcp/{name}/sign-in", tag = "operators",
    params(("name" = String, Path, description = "The source")),
    responses((status = 204), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub(super) async fn sign_out(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
) -> Result<StatusCode, Refused> {
    kept(&door)?.sign_out(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Administers tool sources. Every method with a caller acts for that caller's project.
#[async_trait]
pub trait Sources: Send + Sync + 'static {
    /// Returns the sources of the caller's project, by name.
    fn list(&self, caller: &Caller) -> Result<Vec<SourceBody>, Error>;

    /// Returns one source, with all details.
    fn one(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error>;

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
    ) -> Result<Vec<SourceChange>, Error>;

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
    async fn signed_in(&self, returned: Returned) -> Option<(String, Result<(), String>)>;

    /// Returns the number of sources in each state, over all projects.
    fn counted(&self) -> Vec<(&'static str, usize)>;

    /// Returns the base URL at which a browser reaches this server.
    fn base(&self) -> String;
}

/// The parameters of an OAuth redirect back to Toolcrib.
pub struct Returned {
    pub state: String,
    pub code: Result<String, String>,
    pub issuer: Option<String>,
}
