//! Session tokens: credentials for a browser, an MCP client or a child process, made from a key.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::SessionToken;
use toolcrib::domain::directory::credential::SessionTokenAttributes;
use toolcrib::registry::NewSessionToken;
use utoipa::ToSchema;

use super::super::super::HttpState;
use super::format_time;
use crate::auth::generate_session_token;
use crate::http::extract::{AuthenticatedCaller, NamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// A session token, without its secret.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionTokenBody {
    id: String,
    /// Id of the key that the token was made from.
    key_id: String,
    project: String,
    user: Option<String>,
    session: Option<String>,
    environment: Option<String>,
    /// Patterns of the tools that the token is limited to; null for those of the key.
    tools: Option<Vec<String>>,
    /// `active`, `expired` or `revoked`.
    status: &'static str,
    created_at_ms: u64,
    /// RFC 3339.
    expires_at: String,
    expires_at_ms: u64,
    revoked_at_ms: Option<u64>,
}

impl SessionTokenBody {
    /// Returns the body of a token; the time decides its status.
    pub fn new(token: &SessionToken, now_ms: u64) -> Self {
        let SessionTokenAttributes { user, session, environment, tools } = token.attributes.clone();
        Self {
            id: token.id.clone(),
            key_id: token.key_id.clone(),
            project: token.project.clone(),
            user,
            session,
            environment,
            tools,
            status: token.status(now_ms).as_str(),
            created_at_ms: token.created_ms,
            expires_at: format_time(token.expires_ms),
            expires_at_ms: token.expires_ms,
            revoked_at_ms: token.revoked_ms,
        }
    }
}

/// Session tokens.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct SessionTokenList {
    session_tokens: Vec<SessionTokenBody>,
}

/// Lists the session tokens of the caller's key; for an admin or auditor, those of the project.
#[utoipa::path(get, path = "/v1/session_tokens", tag = "agents",
    responses((status = 200, body = SessionTokenList)))]
pub(in super::super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<SessionTokenList>, ApiError> {
    let now_ms = state.engine.registry().credentials().now_ms();
    let tokens = state.engine.admin().session_tokens(&caller)?;
    let tokens = tokens.iter().map(|token| SessionTokenBody::new(token, now_ms));
    Ok(Json(SessionTokenList { session_tokens: tokens.collect() }))
}

/// A session token to make. It can only narrow the key.
#[derive(Debug, Deserialize, ToSchema)]
pub(in super::super) struct NewSessionTokenBody {
    /// User that the bearer acts for. Requires a key that may assert one.
    user: Option<String>,
    /// Session of the bearer. Requires a key that may assert one.
    session: Option<String>,
    /// Environment of the bearer. A key with an environment keeps its own.
    environment: Option<String>,
    /// Patterns of the tools that the token is limited to, within those of the key.
    tools: Option<Vec<String>>,
    /// Seconds until the token ends, 1 to 2678400 (31 days). It ends with its key at the latest.
    ttl_s: u64,
}

/// A new session token, with its secret.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct CreatedSessionTokenBody {
    #[serde(flatten)]
    info: SessionTokenBody,
    /// The secret, which is sent like a key. It is returned only here and never stored.
    token: String,
}

/// Makes a session token from the key of the request.
///
/// The token has the agent and the groups of its key, and at most its roles agent and provider.
#[utoipa::path(post, path = "/v1/session_tokens", tag = "agents",
    request_body = NewSessionTokenBody,
    responses((status = 201, body = CreatedSessionTokenBody),
        (status = 403, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in super::super) async fn create(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    StrictJsonBody(body): StrictJsonBody<NewSessionTokenBody>,
) -> Result<(StatusCode, Json<CreatedSessionTokenBody>), ApiError> {
    let NewSessionTokenBody { user, session, environment, tools, ttl_s } = body;
    let attributes = SessionTokenAttributes { user, session, environment, tools };
    let new = NewSessionToken { attributes, ttl_ms: ttl_s.saturating_mul(1_000) };
    let admin = state.engine.admin();
    let created = admin.create_session_token(&caller, new, generate_session_token()).await?;
    let info = SessionTokenBody::new(&created.token, created.token.created_ms);
    Ok((StatusCode::CREATED, Json(CreatedSessionTokenBody { info, token: created.secret })))
}

/// Revokes a session token, effective at once.
#[utoipa::path(delete, path = "/v1/session_tokens/{id}", tag = "agents",
    params(("id" = String, Path, description = "The token's id, st_…")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(in super::super) async fn revoke(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.admin().revoke_session_token(&caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
