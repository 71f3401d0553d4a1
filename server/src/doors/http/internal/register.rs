//! Registering tools.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::directory::Others;
use toolcrib::engine::Registration;
use toolcrib::retry::PolicyPatch;
use toolcrib::tool::{Alternate, Definition, Effect, Risk};
use toolcrib::{Caller, Engine, Executor};
use utoipa::{IntoParams, ToSchema};

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Asked, Body, NamePath, Who};
use super::super::wire::timeout_ms;

/// A client's tools.
#[derive(Deserialize, ToSchema)]
pub(super) struct RegisterBody {
    client_id: String,
    tools: Vec<OfferBody>,
    /// Take back what this client offered before and does not name now.
    #[serde(default)]
    replace: bool,
}

/// One tool.
#[derive(Deserialize, ToSchema)]
pub(super) struct OfferBody {
    name: String,
    /// JSON Schema of the arguments, 2020-12 or draft-07.
    #[serde(default = "toolcrib::Json::empty_object")]
    #[schema(value_type = Object)]
    schema: toolcrib::Json,
    /// 1 to 86400000; the configured default unless said.
    #[serde(default, deserialize_with = "timeout_ms")]
    timeout_ms: Option<u64>,
    /// Its calls are background tasks: nobody waits for them, the result arrives later.
    #[serde(default, rename = "async")]
    background: bool,
    #[serde(default)]
    description: String,
    /// JSON Schema of the result.
    #[schema(value_type = Option<Object>)]
    output_schema: Option<toolcrib::Json>,
    /// What running it does to the world; `irreversible` unless said.
    #[serde(default)]
    #[schema(value_type = String, example = "read")]
    effect: Effect,
    /// `medium` unless said.
    #[serde(default)]
    #[schema(value_type = String, example = "low")]
    risk: Risk,
    /// Limits of its own: max_parallel, default_timeout_ms, max_retries, backoff.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    policy: PolicyPatch,
    /// Tools to use instead: `[{"tool": "other.tool", "args": {"q": {"from": "/query"}}}]`.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    fallback: Vec<Alternate>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<toolcrib::Json>,
}

impl OfferBody {
    fn definition(self, project: &str, default_timeout_ms: u64) -> Definition {
        let own = self.policy.default_timeout_ms;
        Definition {
            project: Some(project.to_owned()),
            name: self.name,
            description: self.description,
            executor: Executor::Client,
            input_schema: self.schema,
            output_schema: self.output_schema,
            timeout_ms: self.timeout_ms.or(own).unwrap_or(default_timeout_ms),
            background: self.background,
            effect: self.effect,
            risk: self.risk,
            policy: self.policy,
            fallback: self.fallback,
            metadata: self.metadata,
            utp: None,
        }
    }
}

impl RegisterBody {
    /// These tools of this client, beside what it offered before.
    pub(super) fn of(client_id: String, tools: Vec<OfferBody>) -> Self {
        Self { client_id, tools, replace: false }
    }

    pub(super) fn registration(self, engine: &Engine, caller: &Caller) -> Registration {
        let default_ms = engine.default_timeout_ms(caller);
        let project = caller.project.as_str();
        let definition = |offer: OfferBody| offer.definition(project, default_ms);
        Registration {
            client_id: self.client_id,
            tools: self.tools.into_iter().map(definition).collect(),
            others: if self.replace { Others::Withdraw } else { Others::Keep },
        }
    }
}

/// How many tools were registered.
#[derive(Serialize, ToSchema)]
pub(super) struct RegisteredBody {
    ok: bool,
    registered_count: usize,
}

/// Offers tools, or offers them anew.
#[utoipa::path(post, path = "/internal/tools/register", tag = "providers",
    request_body = RegisterBody,
    responses((status = 200, body = RegisteredBody), (status = 403, body = Problem),
        (status = 409, body = Problem), (status = 422, body = Problem)))]
pub(super) async fn register(
    State(door): State<Door>,
    Who(caller): Who,
    Body(body): Body<RegisterBody>,
) -> Result<Json<RegisteredBody>, Refused> {
    let registration = body.registration(&door.engine, &caller);
    let registered_count = door.engine.register(&caller, registration).await?;
    Ok(Json(RegisteredBody { ok: true, registered_count }))
}

/// Which client.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WhichClient {
    client_id: String,
}

/// Takes a tool back. A tool that no client offers is gone.
#[utoipa::path(delete, path = "/internal/tools/{name}", tag = "providers",
    params(("name" = String, Path, description = "The tool's name"), WhichClient),
    responses((status = 204), (status = 404, body = Problem)))]
pub(super) async fn withdraw(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
    Asked(which): Asked<WhichClient>,
) -> Result<StatusCode, Refused> {
    door.engine.withdraw(&caller, &which.client_id, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets a client, with all it offers. It must not be connected nor have requests in hand.
#[utoipa::path(delete, path = "/internal/clients/{client_id}", tag = "providers",
    params(("client_id" = String, Path, description = "The client's id")),
    responses((status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
        (status = 409, body = Problem)))]
pub(super) async fn forget(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(client_id): NamePath,
) -> Result<StatusCode, Refused> {
    door.engine.forget_client(&caller, &client_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The same for a tool whose name is `register`.
pub(super) async fn withdraw_register(
    state: State<Door>,
    who: Who,
    which: Asked<WhichClient>,
) -> Result<StatusCode, Refused> {
    withdraw(state, who, NamePath("register".to_owned()), which).await
}
