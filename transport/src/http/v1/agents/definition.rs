//! Agents as JSON: on the roster, and as tools.

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, body};
use serde::Serialize;
use serde_json::Value;
use toolcrib::domain::agent::{AgentDefinition, AgentEntry, AgentVersion, agent_tool_name};
use toolcrib::domain::fault::{Code, Error, Fault};
use utoipa::ToSchema;

use super::super::super::HttpState;
use crate::http::extract::{self, AuthenticatedCaller, NamePath};
use crate::http::problem::{ApiError, ProblemDetails};

/// An agent that can be called, woken, or both.
#[derive(Serialize, ToSchema)]
pub struct AgentBody {
    agent_id: String,
    /// Number of the version; null if the agent can only be woken.
    version: Option<u64>,
    /// The tool that calls it: `agent.` and its id; null if it can only be woken.
    tool: Option<String>,
    /// `loop` or `worker`; null if the agent can only be woken.
    driver: Option<&'static str>,
    /// Target of its wakeup commands: `cmd.agent.<worker_target>.wakeup`.
    worker_target: Option<String>,
    /// URL that receives a signed webhook when an item waits in its inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    wakeup_url: Option<String>,
    /// Instructions, model, tools, limits and result fields; free-form if it can only be woken.
    #[schema(value_type = Option<AgentProfileBody>)]
    profile: Option<Value>,
    /// `cancel` or `detach`: the fate of its work when the run that called it ends.
    on_parent_end: Option<&'static str>,
    /// Names or patterns of the tools that it may call in a turn; null = all that its rules allow.
    allowed_tools: Option<Vec<String>>,
    /// The caller that defined this version.
    created_by: Option<String>,
    /// The agent that bounds its tools, budget and depth.
    #[serde(skip_serializing_if = "Option::is_none")]
    derived_from: Option<String>,
    updated_at_ms: u64,
}

/// The profile of an agent.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct AgentProfileBody {
    /// Description for callers and their models.
    description: Option<String>,
    /// System prompt.
    instructions: String,
    /// Name of its model (default: that of its caller, or the server's first).
    model: Option<String>,
    /// Names and patterns of its tools (default: all that its caller may call).
    tools: Option<Vec<String>>,
    /// Tool definitions that its model receives: `auto`, `all`, `search` or `pinned` (default: the
    /// server's setting).
    tool_mode: Option<String>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned` (default: the server's setting).
    pinned_tools: Option<Vec<String>>,
    limits: Option<AgentLimitsBody>,
    /// Names of the result's fields, or objects with `name`, `type`, `description`, `required`.
    #[schema(value_type = Option<Vec<Object>>)]
    result_fields: Option<Vec<Value>>,
}

/// Limits of one call of an agent. Calls and tokens are budgets of the agent and all agents that it
/// calls.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct AgentLimitsBody {
    /// Maximum number of model responses.
    steps: Option<u32>,
    /// Maximum number of tool calls.
    calls: Option<u32>,
    /// Maximum number of tokens.
    tokens: Option<u64>,
    /// Maximum time in milliseconds.
    ms: Option<u64>,
    /// Number of levels of agents below it.
    depth: Option<u32>,
}

/// A request to define an agent, or to put it on the roster.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct AgentRequest {
    profile: Option<AgentProfileBody>,
    /// `loop` (default) or `worker`. Without it, a body with `worker_target` only puts the agent
    /// on the roster.
    driver: Option<String>,
    /// Target of its wakeups over NATS; `worker` needs it or `wakeup_url`.
    worker_target: Option<String>,
    /// URL of its wakeups by webhook.
    wakeup_url: Option<String>,
    /// `cancel` (default) or `detach`.
    on_parent_end: Option<String>,
    /// For an agent that can only be woken: the tools that it may call in a turn.
    allowed_tools: Option<Vec<String>>,
}

impl From<AgentEntry> for AgentBody {
    fn from(entry: AgentEntry) -> Self {
        let updated_at_ms = entry.updated_ms;
        let Some(definition) = entry.definition else {
            return Self {
                agent_id: entry.agent_id,
                version: None,
                tool: None,
                driver: None,
                worker_target: Some(entry.worker_target),
                wakeup_url: None,
                profile: entry.profile.map(|profile| profile.to_value()),
                on_parent_end: None,
                allowed_tools: entry.allowed_tools,
                created_by: None,
                derived_from: None,
                updated_at_ms,
            };
        };
        let body = Self::from_definition(*definition, updated_at_ms);
        Self { allowed_tools: entry.allowed_tools, ..body }
    }
}

impl From<AgentVersion> for AgentBody {
    fn from(version: AgentVersion) -> Self {
        Self::from_definition(version.definition, version.created_ms)
    }
}

impl AgentBody {
    fn from_definition(definition: AgentDefinition, updated_at_ms: u64) -> Self {
        Self {
            tool: Some(agent_tool_name(&definition.agent_id)),
            agent_id: definition.agent_id,
            version: Some(definition.version),
            driver: Some(definition.driver.as_str()),
            worker_target: definition.worker_target,
            wakeup_url: definition.wakeup_url,
            profile: serde_json::to_value(&definition.profile).ok(),
            on_parent_end: Some(definition.on_parent_end.as_str()),
            allowed_tools: definition.profile.tools,
            created_by: Some(definition.created_by),
            derived_from: definition.derived_from,
            updated_at_ms,
        }
    }
}

/// The versions of an agent, newest first.
#[derive(Serialize, ToSchema)]
pub(crate) struct AgentVersionList {
    versions: Vec<AgentBody>,
}

/// Defines an agent, or a new version of it, or puts an agent on the roster.
///
/// An agent with a `driver` is offered as the tool `agent.ID`. The same definition again changes
/// nothing. The body is JSON, or YAML with the content type `application/yaml`.
#[utoipa::path(put, path = "/v1/agents/{agent_id}", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent")), request_body = AgentRequest,
    responses((status = 200, body = AgentBody), (status = 400, body = ProblemDetails),
        (status = 403, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(crate) async fn put(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
    request: Request<body::Body>,
) -> Result<Json<AgentBody>, ApiError> {
    let document = read_agent_document(request, state.settings.max_body_bytes).await?;
    Ok(Json(state.engine.roster().put_agent(&caller, Some(&agent_id), &document).await?.into()))
}

/// Lists the newest versions of an agent, newest first; also of one that was removed.
#[utoipa::path(get, path = "/v1/agents/{agent_id}/versions", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent")),
    responses((status = 200, body = AgentVersionList), (status = 404, body = ProblemDetails)))]
pub(crate) async fn versions(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
) -> Result<Response, ApiError> {
    let versions = state.engine.roster().agent_versions(&caller, &agent_id, usize::MAX).await?;
    if versions.is_empty() {
        let excerpt: String = agent_id.chars().take(80).collect();
        let message = format!("agent \"{excerpt}\" has no versions");
        return Err(Error::refused(Code::NotFound, message).into());
    }
    let versions = versions.into_iter().map(AgentBody::from).collect();
    Ok((StatusCode::OK, Json(AgentVersionList { versions })).into_response())
}

/// Reads the body as JSON, or as YAML if its content type says so.
async fn read_agent_document(request: Request, limit: usize) -> Result<Value, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_yaml = kind.is_some_and(|kind| kind.contains("yaml"));
    let bytes = extract::read_body(request, limit).await?;
    if !is_yaml {
        return match bytes.is_empty() {
            true => Ok(Value::Object(Default::default())),
            false => extract::parse_json_value(&bytes),
        };
    }
    let refused = |message: String| {
        ApiError::from(Error::from(Fault::new(Code::BadRequest, message).without_side_effect()))
    };
    let text = std::str::from_utf8(&bytes).map_err(|_| refused("the YAML is not UTF-8".into()))?;
    toolcrib_protocol::yaml::parse(text)
        .map_err(|reason| refused(format!("the YAML cannot be read: {reason}")))
}
