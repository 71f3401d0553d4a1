//! Registration of a client's tools.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::UnlistedTools;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::{Effect, Fallback, Risk, ToolDefinition};
use toolcrib::registry::ClientRegistration;
use toolcrib::{Caller, Engine, Executor};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::timeout_ms;
use crate::http::extract::{AuthenticatedCaller, NamePath, QueryParams, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// The tools of a client.
#[derive(Deserialize, ToSchema)]
pub(super) struct RegisterBody {
    client_id: String,
    tools: Vec<ToolOfferBody>,
    /// Withdraw tools that this client registered before and that are not in this list.
    #[serde(default)]
    replace: bool,
}

/// A tool that a client provides.
#[derive(Deserialize, ToSchema)]
#[schema(as = OfferBody)]
pub(super) struct ToolOfferBody {
    name: String,
    /// JSON Schema of the arguments, 2020-12 or draft-07.
    #[serde(default = "toolcrib::Json::empty_object")]
    #[schema(value_type = Object)]
    schema: toolcrib::Json,
    /// Time limit of a call in milliseconds, 1 to 86400000 (default: the configured one).
    #[serde(default, deserialize_with = "timeout_ms")]
    timeout_ms: Option<u64>,
    /// Time limit of each attempt of a call in milliseconds, 1 to 86400000. The same as
    /// `policy.attempt_timeout_ms`.
    #[serde(default, deserialize_with = "timeout_ms")]
    attempt_timeout_ms: Option<u64>,
    /// Time in milliseconds that a call waits for answers to the tool's questions, 1 to 86400000.
    /// The same as `policy.input_timeout_ms`.
    #[serde(default, deserialize_with = "timeout_ms")]
    input_timeout_ms: Option<u64>,
    /// True if its calls are background tasks: callers do not wait, and the result arrives later.
    #[serde(default, rename = "async")]
    background: bool,
    #[serde(default)]
    description: String,
    /// JSON Schema of the result.
    #[schema(value_type = Option<Object>)]
    output_schema: Option<toolcrib::Json>,
    /// Effect of running the tool: `read`, `idempotent` or `irreversible` (default).
    #[serde(default)]
    #[schema(value_type = String, example = "read")]
    effect: Effect,
    /// `low`, `medium` (default), `high` or `critical`. Also accepted as `risk_level`.
    #[serde(default, alias = "risk_level")]
    #[schema(value_type = String, example = "low")]
    risk: Risk,
    /// Limits of this tool: max_parallel, default_timeout_ms, attempt_timeout_ms, input_timeout_ms,
    /// max_retries, backoff, rejoin, rejoin_window_ms, disconnect_grace_ms.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    policy: ExecutionPolicyPatch,
    /// Tools to fall back to: `[{"tool": "other.tool", "args": {"q": {"from": "/query"}}}]`.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    fallback: Vec<Fallback>,
    /// False if a repeated request never joins an earlier call of the tool (default: true).
    rejoin: Option<bool>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<toolcrib::Json>,
}

impl ToolOfferBody {
    fn into_definition(self, project: &str, default_timeout_ms: u64) -> ToolDefinition {
        let policy_timeout_ms = self.policy.default_timeout_ms;
        ToolDefinition {
            project: Some(project.to_owned()),
            name: self.name,
            description: self.description,
            executor: Executor::CLIENT,
            input_schema: self.schema,
            output_schema: self.output_schema,
            timeout_ms: self.timeout_ms.or(policy_timeout_ms).unwrap_or(default_timeout_ms),
            background: self.background,
            effect: self.effect,
            risk: self.risk,
            policy: ExecutionPolicyPatch {
                attempt_timeout_ms: self.attempt_timeout_ms.or(self.policy.attempt_timeout_ms),
                input_timeout_ms: self.input_timeout_ms.or(self.policy.input_timeout_ms),
                rejoin: self.rejoin.or(self.policy.rejoin),
                ..self.policy
            },
            fallback: self.fallback,
            metadata: self.metadata,
            binding: None,
        }
    }
}

impl RegisterBody {
    /// Adds these tools to those that the client registered before.
    pub(super) fn new(client_id: String, tools: Vec<ToolOfferBody>) -> Self {
        Self { client_id, tools, replace: false }
    }

    pub(super) fn into_registration(self, engine: &Engine, caller: &Caller) -> ClientRegistration {
        let default_ms = engine.registry().default_timeout_ms(caller);
        let project = caller.project.as_str();
        let definition = |offer: ToolOfferBody| offer.into_definition(project, default_ms);
        ClientRegistration {
            client_id: self.client_id,
            tools: self.tools.into_iter().map(definition).collect(),
            unlisted_tools: if self.replace {
                UnlistedTools::Withdraw
            } else {
                UnlistedTools::Keep
            },
        }
    }
}

/// The number of registered tools.
#[derive(Serialize, ToSchema)]
pub(super) struct RegisteredBody {
    ok: bool,
    registered_count: usize,
}

/// Registers or updates the tools of a client.
#[utoipa::path(post, path = "/internal/tools/register", tag = "providers",
    request_body = RegisterBody,
    responses((status = 200, body = RegisteredBody), (status = 403, body = ProblemDetails),
        (status = 409, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(super) async fn register(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    StrictJsonBody(body): StrictJsonBody<RegisterBody>,
) -> Result<Json<RegisteredBody>, ApiError> {
    let registration = body.into_registration(&state.engine, &caller);
    let registered_count = state.engine.registry().register(&caller, registration).await?;
    Ok(Json(RegisteredBody { ok: true, registered_count }))
}

/// Identifies a client.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ClientQuery {
    client_id: String,
}

/// Withdraws a client's tool. A tool that no client provides any more is removed.
#[utoipa::path(delete, path = "/internal/tools/{name}", tag = "providers",
    params(("name" = String, Path, description = "The tool's name"), ClientQuery),
    responses((status = 204), (status = 404, body = ProblemDetails)))]
pub(super) async fn withdraw(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
    QueryParams(which): QueryParams<ClientQuery>,
) -> Result<StatusCode, ApiError> {
    state.engine.registry().withdraw(&caller, &which.client_id, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a client and its tools. It must not be connected or have requests in flight.
#[utoipa::path(delete, path = "/internal/clients/{client_id}", tag = "providers",
    params(("client_id" = String, Path, description = "The client's id")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn forget_client(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(client_id): NamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.clients().remove_client(&caller, &client_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Withdraws a tool with the name `register`.
pub(super) async fn withdraw_register(
    state: State<HttpState>,
    caller: AuthenticatedCaller,
    which: QueryParams<ClientQuery>,
) -> Result<StatusCode, ApiError> {
    withdraw(state, caller, NamePath("register".to_owned()), which).await
}
