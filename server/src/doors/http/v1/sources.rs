//! Where tools come from: MCP servers that are added, looked at and removed while the crib runs.

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

/// The longest that adding waits for the first answer of a server.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A source of tools, and how it is.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceBody {
    /// Its tools are called `NAME.tool`.
    pub name: String,
    pub project: String,
    /// `mcp`.
    pub kind: &'static str,
    /// `stdio` or `http`.
    pub transport: &'static str,
    /// The program, or the address without what may be secret in it.
    pub place: String,
    /// `configuration` or `api`.
    pub origin: &'static str,
    /// `starting`, `ready`, `waiting` (it is not there, and will be tried again), `needs_sign_in`
    /// (somebody must open `oauth.sign_in_url`) or `off`.
    pub state: &'static str,
    pub since_ms: u64,
    /// What is wrong with it.
    pub problem: Option<String>,
    /// How often it had to be connected to again.
    pub restarts: u64,
    pub next_try_at_ms: Option<u64>,
    /// The process of a program.
    pub pid: Option<u32>,
    /// The revision of MCP that it speaks.
    pub protocol_version: Option<String>,
    pub server_name: Option<String>,
    pub server_version: Option<String>,
    /// How many tools it has here.
    pub tools: usize,
    /// Whether other definitions are refused until they are accepted.
    pub pinned: bool,
    /// Tools that could not be taken.
    pub skipped: Vec<SourceSkipped>,
    /// Tools whose descriptions speak to the model.
    pub flagged: Vec<String>,
    /// Of a pinned source: what is not accepted. Calls of these tools are refused.
    pub pending: Vec<SourceChange>,
    /// What has changed while it was connected, the newest first.
    pub changes: Vec<SourceChange>,
    /// The names of the variables and headers it is given; never their values.
    pub env: Vec<String>,
    pub headers: Vec<String>,
    /// How it stands with its tokens; never the tokens. Only of servers that are reached over HTTP
    /// and are not given a token as a header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oauth: Option<SourceOauth>,
    /// The last lines of a program's standard error. Only where one source is shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Vec<String>>,
}

/// How it stands with the tokens of a source.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceOauth {
    /// `authorization_code` (a person signs in) or `client_credentials` (the server by itself).
    pub grant: &'static str,
    /// Whether there is a token.
    pub signed_in: bool,
    /// Who gave it.
    pub issuer: Option<String>,
    /// What it is for.
    pub scopes: Vec<String>,
    /// What a person must open to sign in, where one is needed.
    pub sign_in_url: Option<String>,
    /// Until when it can be opened.
    pub sign_in_expires_at_ms: Option<u64>,
}

/// A tool that could not be taken.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceSkipped {
    pub tool: String,
    pub why: String,
}

/// How a tool is another than it was.
#[derive(Debug, Serialize, ToSchema)]
pub struct SourceChange {
    pub tool: String,
    /// `added`, `changed` or `removed`.
    pub change: &'static str,
    /// What is another about it.
    pub fields: Vec<&'static str>,
    pub at_ms: u64,
}

/// All sources.
#[derive(Serialize, ToSchema)]
pub(super) struct SourceList {
    sources: Vec<SourceBody>,
}

/// How long to wait.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Patience {
    /// How long to wait for the server's first answer, in milliseconds; 0 unless said.
    wait_ms: Option<u64>,
}

impl Patience {
    fn time(&self) -> Duration {
        Duration::from_millis(self.wait_ms.unwrap_or(0)).min(LONGEST_WAIT)
    }
}

/// A server to add: `name`, and `command` with `args`, `env`, `env_from`, `cwd`, or `url` with
/// `headers` or `oauth`; `pin`, `effect`, `risk`, `timeout_ms`, `max_tools`, `tools` as in the
/// configuration. Or `mcpServers` as desktop clients have it.
#[derive(Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Object)]
pub(super) struct NewSource(Value);

/// What to accept.
#[derive(Deserialize, ToSchema)]
pub(super) struct Accepting {
    /// These tools; all that is pending unless said.
    #[serde(default)]
    tools: Option<Vec<String>>,
}

/// What was accepted.
#[derive(Serialize, ToSchema)]
pub(super) struct Accepted {
    accepted: Vec<SourceChange>,
}

fn kept(door: &Door) -> Result<&Arc<dyn Sources>, Refused> {
    let message = "this server keeps no sources";
    door.sources.as_ref().ok_or_else(|| Error::refused(Code::NotFound, message).into())
}

/// Lists the MCP servers of the project, and how they are.
#[utoipa::path(get, path = "/v1/sources/mcp", tag = "operators",
    responses((status = 200, body = SourceList), (status = 403, body = Problem)))]
pub(super) async fn list(
    State(door): State<Door>,
    Who(caller): Who,
) -> Result<Json<SourceList>, Refused> {
    Ok(Json(SourceList { sources: kept(&door)?.list(&caller)? }))
}

/// Adds an MCP server, or replaces its settings; or adds those of a desktop client's configuration.
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

/// Shows one MCP server, with the last lines of a program's standard error.
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

/// Accepts what a pinned MCP server offers now.
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

/// Connects to an MCP server again at once, or looks at what it offers.
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

/// Begins a sign-in at an MCP server: the answer has the address that a person must open.
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

/// Forgets the tokens of an MCP server. It is then tried without.
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

/// Whoever keeps the sources. Every method answers for one caller.
#[async_trait]
pub trait Sources: Send + Sync + 'static {
    /// The sources of the caller's project, by name.
    fn list(&self, caller: &Caller) -> Result<Vec<SourceBody>, Error>;

    /// One of them, with everything that is known.
    fn one(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error>;

    /// Adds one, or those of a desktop client's configuration; waits for their first answers.
    async fn add(
        &self,
        caller: &Caller,
        document: Value,
        wait: Duration,
    ) -> Result<Vec<SourceBody>, Error>;

    /// Takes one away, with its tools.
    async fn remove(&self, caller: &Caller, name: &str) -> Result<(), Error>;

    /// Accepts what a pinned one offers now.
    async fn accept(
        &self,
        caller: &Caller,
        name: &str,
        tools: Option<Vec<String>>,
    ) -> Result<Vec<SourceChange>, Error>;

    /// Connects to one again at once, or looks at what it offers.
    async fn refresh(
        &self,
        caller: &Caller,
        name: &str,
        wait: Duration,
    ) -> Result<SourceBody, Error>;

    /// Begins a sign-in of a person at one.
    async fn sign_in(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error>;

    /// Forgets the tokens of one.
    async fn sign_out(&self, caller: &Caller, name: &str) -> Result<(), Error>;

    /// A browser has come back from an issuer, with a code or the reason why there is none. Gives
    /// the name of the source, and what came of it; none where nobody waits for this state.
    async fn signed_in(&self, returned: Returned) -> Option<(String, Result<(), String>)>;

    /// How many sources are in each state, over all projects.
    fn counted(&self) -> Vec<(&'static str, usize)>;

    /// Where a browser reaches this server.
    fn base(&self) -> String;
}

/// What a browser brings back from an issuer.
pub struct Returned {
    pub state: String,
    pub code: Result<String, String>,
    pub issuer: Option<String>,
}
