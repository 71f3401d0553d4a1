//! The audit log: list, verify, export.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::audit::{AuditLink, AuditRow, AuditVerification, RequestOrigin};
use toolcrib::{Caller, Engine};
use utoipa::{IntoParams, ToSchema};

use super::super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, QueryParams, invalid_parameter};
use crate::http::problem::{ApiError, ProblemDetails};

/// An entry of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditBody {
    /// Position in the log, ascending.
    number: u64,
    at_ms: u64,
    project: String,
    /// Agent name of the caller, or the name of the upstream that changed its tools.
    agent: String,
    /// User that the agent acted for.
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// Id of the key or session token of the caller.
    #[serde(skip_serializing_if = "Option::is_none")]
    credential: Option<String>,
    /// The change or decision, such as `call.denied`, `key.created` or `rule.set`.
    action: String,
    subject: String,
    reason: String,
    /// Origin of the request, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<AuditOriginBody>,
    /// SHA-256 over the hash of the entry before it, and this entry.
    hash: String,
}

/// The origin of a request.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditOriginBody {
    /// Address of the other end of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    /// The id of the request: the header `X-Request-Id` of its response.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    /// `http`, `websocket`, `mcp`, `stdio`, `nats`, `run` or `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport: Option<String>,
}

impl From<AuditRow> for AuditBody {
    fn from(row: AuditRow) -> Self {
        let AuditRow { number, entry, hash } = row;
        let is_known = !entry.origin.is_unknown();
        let RequestOrigin { peer, request_id, transport } = entry.origin;
        Self {
            number,
            at_ms: entry.at_ms,
            project: entry.project,
            agent: entry.agent,
            user: entry.user,
            credential: entry.credential,
            action: entry.action,
            subject: entry.subject,
            reason: entry.reason,
            origin: is_known.then_some(AuditOriginBody { peer, request_id, transport }),
            hash,
        }
    }
}

/// Denials, decisions and administrative changes, newest first.
#[derive(Serialize, ToSchema)]
pub(in crate::http::v1) struct AuditList {
    audit: Vec<AuditBody>,
}

/// Page of the audit log.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::http::v1) struct AuditQuery {
    /// Maximum number of entries, 1 to 1000 (default: 100).
    limit: Option<usize>,
    /// Only entries with a lower number: the number of the last entry of the previous page.
    before: Option<u64>,
}

/// Returns denials, decisions and administrative changes, newest first.
#[utoipa::path(get, path = "/v1/audit", tag = "operators", params(AuditQuery),
    responses((status = 200, body = AuditList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn audit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<Json<AuditList>, ApiError> {
    let limit = parse_limit(query.limit)?.unwrap_or(100);
    let rows = state.engine.admin().audit_log(&caller, query.before, limit).await?;
    Ok(Json(AuditList { audit: rows.into_iter().map(AuditBody::from).collect() }))
}

fn parse_limit(limit: Option<usize>) -> Result<Option<usize>, ApiError> {
    if limit.is_some_and(|limit| !(1..=1_000).contains(&limit)) {
        return Err(invalid_parameter("limit", "limit must be from 1 to 1000").into());
    }
    Ok(limit)
}

/// A position in the hash chain.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditLinkBody {
    /// Number of the entry; 0 before the first.
    number: u64,
    hash: String,
}

impl From<AuditLink> for AuditLinkBody {
    fn from(link: AuditLink) -> Self {
        Self { number: link.number, hash: link.hash }
    }
}

/// An entry that does not fit the hash chain.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditProblemBody {
    number: u64,
    message: String,
}

/// The result of verifying the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditVerificationBody {
    /// True if no entry was changed, removed or moved.
    ok: bool,
    /// Number of entries that were checked, of all projects.
    entries: u64,
    /// Number of earlier entries that retention has deleted.
    pruned: u64,
    /// The last entry. Keep it elsewhere, and pass its hash as `expect` later.
    head: AuditLinkBody,
    /// Entries that do not fit, up to 20.
    problems: Vec<AuditProblemBody>,
}

impl From<AuditVerification> for AuditVerificationBody {
    fn from(found: AuditVerification) -> Self {
        let AuditVerification { entries, pruned, head, problems } = found;
        let problems: Vec<AuditProblemBody> = problems
            .into_iter()
            .map(|problem| AuditProblemBody { number: problem.number, message: problem.message })
            .collect();
        Self { ok: problems.is_empty(), entries, pruned, head: head.into(), problems }
    }
}

/// Parameters of a verification.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::http::v1) struct AuditVerifyQuery {
    /// Hash of an earlier head, which must be in the log.
    expect: Option<String>,
}

/// Checks the audit log against its hash chain.
///
/// Finds entries that were changed, removed or moved in the database.
#[utoipa::path(get, path = "/v1/audit/verify", tag = "operators", params(AuditVerifyQuery),
    responses((status = 200, body = AuditVerificationBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn verify_audit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(query): QueryParams<AuditVerifyQuery>,
) -> Result<Json<AuditVerificationBody>, ApiError> {
    let verified = state.engine.admin().verify_audit_log(&caller, query.expect).await?;
    Ok(Json(verified.into()))
}

/// Range of an export.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::http::v1) struct AuditExportQuery {
    /// Only entries with a higher number (default: 0).
    after: Option<u64>,
    /// Maximum number of entries, 1 to 1000 (default: all).
    limit: Option<usize>,
}

/// Exports the audit log as JSON Lines, oldest entry first.
///
/// The operator receives the entries of all projects, a key those of its own.
#[utoipa::path(get, path = "/v1/audit/export", tag = "operators", params(AuditExportQuery),
    responses((status = 200, description = "One entry per line", body = AuditBody,
            content_type = "application/x-ndjson"),
        (status = 403, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn export_audit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(query): QueryParams<AuditExportQuery>,
) -> Result<Response, ApiError> {
    let limit = parse_limit(query.limit)?;
    let after = query.after.unwrap_or(0);
    // Reads the first page here, so that a refusal is a response and not a broken stream.
    let first = state.engine.admin().export_audit_log(&caller, after).await?;
    let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    let body = match limit {
        Some(limit) => Body::from(json_lines(first.into_iter().take(limit))),
        None => stream_export(state.engine.clone(), caller, first),
    };
    Ok(([kind], body).into_response())
}

/// Streams an export page by page, from a page that was read before.
fn stream_export(engine: Engine, caller: Caller, first: Vec<AuditRow>) -> Body {
    let pages = stream::try_unfold(Some(first), move |page| {
        let (engine, caller) = (engine.clone(), caller.clone());
        async move {
            let Some(page) = page else { return Ok(None) };
            let Some(last) = page.last().map(|row| row.number) else { return Ok(None) };
            let lines = json_lines(page);
            let next = engine.admin().export_audit_log(&caller, last).await;
            let next = next.map_err(|error| std::io::Error::other(error.to_string()))?;
            Ok::<_, std::io::Error>(Some((lines, Some(next))))
        }
    });
    Body::from_stream(pages)
}

fn json_lines(rows: impl IntoIterator<Item = AuditRow>) -> String {
    let mut lines = String::new();
    for row in rows {
        // A struct of texts and numbers always serializes.
        lines += &serde_json::to_string(&AuditBody::from(row)).unwrap_or_default();
        lines.push('\n');
    }
    lines
}
