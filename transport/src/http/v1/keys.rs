//! API keys: creating, listing, rotating and revoking them. Requires an admin key, or the operator
//! on the local machine; a key with the role auditor can list them.

pub(super) mod session_tokens;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::RoleSet;
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::credential::{AssertableAttribute, McpPreferences, ToolNameForm};
use toolcrib::domain::directory::{ApiKey, KeyAttributes};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::registry::NewKey;
use utoipa::ToSchema;

use super::super::HttpState;
use crate::auth::generate_secret;
use crate::http::extract::{AuthenticatedCaller, NamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// A key, without its secret.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyBody {
    id: String,
    project: String,
    agent: String,
    /// The roles in one text, with commas.
    role: String,
    roles: Vec<&'static str>,
    groups: Vec<String>,
    environment: Option<String>,
    user: Option<String>,
    /// Patterns of the tools that the key is limited to; null for no limit.
    tools: Option<Vec<String>>,
    /// Networks that the key may be used from; empty for no limit.
    networks: Vec<String>,
    /// Attributes that requests may assert with `X-Toolcrib-User` and `X-Toolcrib-Session`.
    may_assert: Vec<&'static str>,
    /// `active`, `expired` or `revoked`.
    status: &'static str,
    /// Unix seconds.
    created_at: u64,
    created_at_ms: u64,
    /// RFC 3339; null for a key without an end.
    expires_at: Option<String>,
    expires_at_ms: Option<u64>,
    revoked_at_ms: Option<u64>,
    /// Id of the key that this one replaces.
    rotated_from: Option<String>,
    /// False if requests of the key's agent never join an earlier call.
    rejoin: bool,
    /// Form of the names of tools that MCP clients with the key see: `model` or `dotted`; null for
    /// the server's.
    mcp_names: Option<&'static str>,
    /// Time that `tools/call` of MCP clients with the key waits for a result; null for the
    /// server's.
    mcp_wait_ms: Option<u64>,
}

impl KeyBody {
    /// Returns the body of a key; the time decides its status.
    pub fn new(key: &ApiKey, now_ms: u64) -> Self {
        let KeyAttributes {
            groups,
            user,
            environment,
            tools,
            networks,
            may_assert,
            rotated_from,
            mcp,
        } = key.attributes.clone();
        let mcp = mcp.map(|preferences| *preferences).unwrap_or_default();
        Self {
            id: key.id.clone(),
            project: key.project.clone(),
            agent: key.agent.clone(),
            role: key.roles.to_string(),
            roles: key.roles.iter().map(Role::as_str).collect(),
            groups,
            environment,
            user,
            tools,
            networks,
            may_assert: may_assert.into_iter().map(AssertableAttribute::as_str).collect(),
            status: key.status(now_ms).as_str(),
            created_at: key.created_ms / 1_000,
            created_at_ms: key.created_ms,
            expires_at: key.expires_ms.map(format_time),
            expires_at_ms: key.expires_ms,
            revoked_at_ms: key.revoked_ms,
            rotated_from,
            rejoin: key.rejoin,
            mcp_names: mcp.names.map(ToolNameForm::as_str),
            mcp_wait_ms: mcp.wait_ms,
        }
    }
}

/// Returns a time in RFC 3339.
pub(super) fn format_time(ms: u64) -> String {
    jiff::Timestamp::from_millisecond(ms as i64).unwrap_or_default().to_string()
}

/// The keys of a project.
#[derive(Serialize, ToSchema)]
pub(super) struct KeyList {
    keys: Vec<KeyBody>,
}

/// Lists the project's keys, without secrets.
#[utoipa::path(get, path = "/v1/keys", tag = "operators",
    responses((status = 200, body = KeyList), (status = 403, body = ProblemDetails)))]
pub(super) async fn list_keys(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<KeyList>, ApiError> {
    let now_ms = state.engine.registry().credentials().now_ms();
    let keys = state.engine.admin().keys(&caller)?;
    Ok(Json(KeyList { keys: keys.iter().map(|key| KeyBody::new(key, now_ms)).collect() }))
}

/// A key to create.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewKeyBody {
    agent: String,
    /// The project (default: the caller's).
    project: Option<String>,
    /// `agent`, `provider`, `approver`, `auditor` and `admin` (default: `agent`). Several roles add
    /// up.
    roles: Option<Vec<String>>,
    /// One role; a short form of `roles`.
    role: Option<String>,
    /// Groups of the agent, which access rules can match.
    groups: Option<Vec<String>>,
    /// Environment of the agent, such as `production`.
    environment: Option<String>,
    /// User that the agent acts for.
    user: Option<String>,
    /// Patterns of the tools that the key is limited to, whatever the rules allow.
    tools: Option<Vec<String>>,
    /// Networks in CIDR notation that the key may be used from.
    networks: Option<Vec<String>>,
    /// Time from which the key is no longer valid, in RFC 3339.
    expires_at: Option<String>,
    /// `user` and `session`: attributes that requests with the key may assert by the headers
    /// `X-Toolcrib-User` and `X-Toolcrib-Session`.
    may_assert: Option<Vec<String>>,
    /// Patterns of the tools that the agent may call from the start.
    allow: Option<Vec<String>>,
    /// False if requests of the agent never join an earlier call (default: true).
    rejoin: Option<bool>,
    /// Form of the names of tools that MCP clients with the key see: `model` (`calculation__eval`)
    /// or `dotted` (`calculation.eval`). Default: the server's.
    mcp_names: Option<String>,
    /// Time that `tools/call` of MCP clients with the key waits for a result, at most
    /// `limits.max_wait_ms`. Default: the server's.
    mcp_wait_ms: Option<u64>,
}

impl NewKeyBody {
    /// Converts the body. `default_allow` has the patterns of the tools that every agent may call.
    pub fn into_new_key(self, project: &str, default_allow: &[String]) -> Result<NewKey, Error> {
        let roles = match (self.roles, self.role) {
            (Some(_), Some(_)) => {
                return Err(invalid("/role", "give roles or role, not both".to_owned()));
            }
            (Some(roles), None) => parse_roles("/roles", &roles)?,
            (None, Some(role)) => parse_roles("/role", &[role])?,
            (None, None) => RoleSet::from(Role::Agent),
        };
        for (pointer, list) in [("/tools", &self.tools), ("/networks", &self.networks)] {
            if list.as_ref().is_some_and(Vec::is_empty) {
                let message = "an empty list has no meaning here; leave it out for no limit";
                return Err(invalid(pointer, message.to_owned()));
            }
        }
        let may_assert = self.may_assert.unwrap_or_default();
        let may_assert = may_assert.iter().map(|name| {
            let unknown = |()| invalid("/may_assert", "may_assert holds user and session".into());
            name.parse::<AssertableAttribute>().map_err(unknown)
        });
        let expires_ms = self.expires_at.as_deref().map(parse_time).transpose()?;
        let unknown = |()| invalid("/mcp_names", "mcp_names is model or dotted".into());
        let names = self.mcp_names.as_deref().map(|name| name.parse::<ToolNameForm>());
        let mcp = McpPreferences {
            names: names.transpose().map_err(unknown)?,
            wait_ms: self.mcp_wait_ms,
        };
        let mut allow = self.allow.unwrap_or_default();
        if roles.contains(Role::Agent) {
            allow.extend(default_allow.iter().cloned());
        }
        Ok(NewKey {
            attributes: KeyAttributes {
                groups: self.groups.unwrap_or_default(),
                user: self.user,
                environment: self.environment,
                tools: self.tools,
                networks: self.networks.unwrap_or_default(),
                may_assert: may_assert.collect::<Result<_, Error>>()?,
                rotated_from: None,
                mcp: (!mcp.is_empty()).then(|| Box::new(mcp)),
            },
            expires_ms,
            allow,
            rejoin: self.rejoin.unwrap_or(true),
            ..NewKey::new(self.project.as_deref().unwrap_or(project), self.agent, roles)
        })
    }
}

fn parse_roles(pointer: &str, roles: &[String]) -> Result<RoleSet, Error> {
    let names = Role::ALL.map(Role::as_str).join(", ");
    let parse = |name: &String| {
        let excerpt: String = name.chars().take(40).collect();
        name.parse::<Role>().map_err(|()| {
            invalid(pointer, format!("\"{excerpt}\" is not a role; the roles are {names}"))
        })
    };
    let set: RoleSet = roles.iter().map(parse).collect::<Result<_, Error>>()?;
    match set.is_empty() {
        true => Err(invalid(pointer, format!("name at least one role: {names}"))),
        false => Ok(set),
    }
}

fn parse_time(text: &str) -> Result<u64, Error> {
    let time = text.parse::<jiff::Timestamp>().ok();
    time.and_then(|time| u64::try_from(time.as_millisecond()).ok()).ok_or_else(|| {
        let message = "expires_at must be a time in RFC 3339, such as 2027-01-31T00:00:00Z";
        invalid("/expires_at", message.to_owned())
    })
}

fn invalid(pointer: &str, message: String) -> Error {
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    fault.with_detail(json!({ "pointer": pointer })).into()
}

/// A new key, with its secret.
#[derive(Serialize, ToSchema)]
#[schema(as = ShownKeyBody)]
pub(super) struct CreatedKeyBody {
    #[serde(flatten)]
    info: KeyBody,
    /// The secret. It is returned only here and never stored.
    key: String,
}

/// Creates a key. The response is the only place where its secret appears.
///
/// The first key of a server must have the role admin and no end. Once a server has a key, it
/// refuses requests without credentials.
#[utoipa::path(post, path = "/v1/keys", tag = "operators", request_body = NewKeyBody,
    responses((status = 201, body = CreatedKeyBody), (status = 403, body = ProblemDetails),
        (status = 409, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(super) async fn create_key(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    StrictJsonBody(body): StrictJsonBody<NewKeyBody>,
) -> Result<(StatusCode, Json<CreatedKeyBody>), ApiError> {
    let new = body.into_new_key(&caller.project, &state.settings.default_allow)?;
    let created = state.engine.admin().create_key(&caller, new, generate_secret()).await?;
    let info = KeyBody::new(&created.key, created.key.created_ms);
    Ok((StatusCode::CREATED, Json(CreatedKeyBody { info, key: created.secret })))
}

/// The overlap of a rotation.
#[derive(Deserialize, ToSchema)]
pub(super) struct RotateKeyBody {
    /// Seconds for which the old key stays valid (default: 0).
    overlap_s: Option<u64>,
}

/// Replaces a key by one with the same rights and a new secret.
///
/// The old key, and the session tokens made from it, stay valid for the overlap.
#[utoipa::path(post, path = "/v1/keys/{id}/rotate", tag = "operators",
    params(("id" = String, Path, description = "The key's id, key_…")),
    request_body = RotateKeyBody,
    responses((status = 201, body = CreatedKeyBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn rotate_key(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
    StrictJsonBody(body): StrictJsonBody<RotateKeyBody>,
) -> Result<(StatusCode, Json<CreatedKeyBody>), ApiError> {
    let overlap_ms = body.overlap_s.unwrap_or(0).saturating_mul(1_000);
    let rotating = state.engine.admin().rotate_key(&caller, &id, overlap_ms, generate_secret());
    let created = rotating.await?;
    let info = KeyBody::new(&created.key, created.key.created_ms);
    Ok((StatusCode::CREATED, Json(CreatedKeyBody { info, key: created.secret })))
}

/// Revokes a key and its session tokens, effective at once. The last admin key stays while other
/// keys are valid.
#[utoipa::path(delete, path = "/v1/keys/{id}", tag = "operators",
    params(("id" = String, Path, description = "The key's id, key_…")),
    responses((status = 204), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn revoke_key(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.admin().revoke_key(&caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
