//! Approvals: the calls that wait for a person, decisions about them, and standing approvals.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::approvals::{ApprovalQuery, DecisionRequest, DecisionResult, DecisionVerdict};
use toolcrib::domain::call::approval::{ApprovalScope, ApprovalStatus};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::{Caller, Engine};
use toolcrib_protocol::approval::{ApprovalBody, StandingApprovalBody};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::FaultBody;
use super::calls::{DEFAULT_PAGE_SIZE, parse_time, unknown_cursor};
use crate::http::extract::{
    AuthenticatedCaller, NamePath, QueryParams, StrictJsonBody, invalid_parameter,
};
use crate::http::pagination;
use crate::http::problem::{ApiError, ProblemDetails, problem_response};

/// A page of approvals, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalList<'a> {
    approvals: Vec<ApprovalBody<'a>>,
    /// Cursor of the next page; null on the last page.
    next_cursor: Option<&'a str>,
}

/// Filters of the list of approvals.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ApprovalListQuery {
    /// Only approvals in this status: `pending`, `approved`, `rejected`, `expired`, `superseded` or
    /// `canceled`.
    status: Option<String>,
    /// Only approvals of this tool.
    tool_name: Option<String>,
    /// Maximum number of approvals, 1 to 1,000 (default: 50).
    limit: Option<u64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Lists the project's approvals, newest first. An agent sees those of its own calls.
#[utoipa::path(get, path = "/v1/approvals", tag = "approvers", params(ApprovalListQuery),
    responses((status = 200, body = ApprovalList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<ApprovalListQuery>,
) -> Result<Response, ApiError> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(word) => Some(word.to_lowercase().parse().map_err(|()| {
            let statuses = ApprovalStatus::ALL.map(ApprovalStatus::as_str).join(", ");
            invalid_parameter("status", format!("status must be one of {statuses}"))
        })?),
    };
    let limit = listing.limit.unwrap_or(DEFAULT_PAGE_SIZE);
    if !(1..=1_000).contains(&limit) {
        return Err(invalid_parameter("limit", "limit must be from 1 to 1000").into());
    }
    let before = listing.cursor.filter(|cursor| !cursor.is_empty());
    if before.as_ref().is_some_and(|cursor| !cursor.starts_with("apr_")) {
        return Err(unknown_cursor().into());
    }
    let query = ApprovalQuery { status, tool: listing.tool_name, before, limit: limit as usize };
    let approvals = state.engine.approvals();
    let page = approvals.list(&caller, query).await?;
    let bodies = page.approvals.iter();
    let list = ApprovalList {
        approvals: bodies.map(|one| ApprovalBody::new(one, approvals.link(&one.id))).collect(),
        next_cursor: page.next_before.as_deref(),
    };
    Ok(pagination::page_response(list, page.next_before.clone()))
}

/// Returns one approval: who asks, for which tool and arguments, why, and what differs from the
/// last approved call of the tool.
#[utoipa::path(get, path = "/v1/approvals/{approval_id}", tag = "approvers",
    params(("approval_id" = String, Path, description = "The id of the approval")),
    responses((status = 200, body = ApprovalBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<Response, ApiError> {
    let approvals = state.engine.approvals();
    let approval = approvals.approval(&caller, &id).await?;
    Ok(Json(ApprovalBody::new(&approval, approvals.link(&approval.id))).into_response())
}

/// Decisions, all made in one commit.
#[derive(Deserialize, ToSchema)]
#[schema(as = Decisions)]
pub(in crate::http) struct DecisionListBody {
    /// 1 to 1,000 decisions, each about another approval.
    decisions: Vec<DecisionRequestBody>,
}

/// A decision about one approval.
#[derive(Deserialize, ToSchema)]
#[schema(as = DecisionRequest)]
struct DecisionRequestBody {
    approval_id: String,
    /// `approve` or `reject`.
    verdict: String,
    /// Reason of the decision; the model sees the reason of a rejection.
    #[serde(default)]
    reason: Option<String>,
    /// `once` (default), `run` or `until`: a standing approval for every equal call of the same
    /// requester in the same run, or until a date.
    #[serde(default)]
    scope: Option<String>,
    /// End of a standing approval with the scope `until`: RFC 3339, or Unix seconds or
    /// milliseconds.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    until: Option<Value>,
    /// Other arguments: a new call with these is executed in place of this one, which takes over
    /// its outcome.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    args: Option<toolcrib::Json>,
}

/// The results of decisions, in their order.
#[derive(Serialize, ToSchema)]
#[schema(as = DecisionResults)]
struct DecisionResultList<'a> {
    /// Number of decisions that were made, now or before.
    decided: usize,
    /// Number of decisions that were refused.
    failed: usize,
    results: Vec<DecisionResultBody<'a>>,
}

/// The result of one decision.
#[derive(Serialize, ToSchema)]
#[schema(as = DecisionResult)]
struct DecisionResultBody<'a> {
    approval_id: &'a str,
    /// True if the decision is in force.
    ok: bool,
    /// Status of the approval after the decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    /// The call that waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
    /// Status of that call after the decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    call_status: Option<&'static str>,
    /// The new call with other arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    replaced_by: Option<&'a str>,
    /// The standing approval that the decision created.
    #[serde(skip_serializing_if = "Option::is_none")]
    standing_id: Option<&'a str>,
    /// True if the same decision was made before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    repeated: bool,
    /// Why the decision was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<FaultBody>,
}

/// Decides about approvals, all in one commit.
///
/// Each decision has its own result: one that is refused does not affect the others. If every
/// decision is refused for the same reason, the answer has the status of that reason.
#[utoipa::path(post, path = "/v1/approvals/decide", tag = "approvers",
    request_body = DecisionListBody,
    responses((status = 200, body = DecisionResultList), (status = 401, body = ProblemDetails),
        (status = 403, description = "The caller may not decide", body = ProblemDetails),
        (status = 404, description = "No such approval", body = ProblemDetails),
        (status = 409, description = "Decided otherwise", body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn decide(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    StrictJsonBody(body): StrictJsonBody<DecisionListBody>,
) -> Result<Response, ApiError> {
    let (ids, results) = decide_each(&state.engine, &caller, body).await?;
    let faults = || results.iter().filter_map(|result| result.as_ref().err()).map(to_fault);
    if let Some(first) = faults().next()
        && results.iter().all(Result::is_err)
        && faults().all(|fault| fault.code == first.code)
    {
        return Ok(problem_response(&first, None));
    }
    Ok(Json(DecisionResultList::new(&ids, &results)).into_response())
}

/// Makes decisions and returns the body of the answer, for another transport.
pub(in crate::http) async fn decide_all(
    engine: &Engine,
    caller: &Caller,
    body: DecisionListBody,
) -> Result<Value, Error> {
    let (ids, results) = decide_each(engine, caller, body).await?;
    Ok(serde_json::to_value(DecisionResultList::new(&ids, &results)).unwrap_or_default())
}

type DecisionResults = Vec<Result<DecisionResult, Error>>;

async fn decide_each(
    engine: &Engine,
    caller: &Caller,
    body: DecisionListBody,
) -> Result<(Vec<String>, DecisionResults), Error> {
    let ids = body.decisions.iter().map(|one| one.approval_id.clone()).collect();
    let requests = body.decisions.into_iter().enumerate();
    let requests =
        requests.map(|(index, one)| parse_decision(index, one)).collect::<Result<_, _>>();
    Ok((ids, engine.approvals().decide(caller, requests?).await?))
}

impl<'a> DecisionResultList<'a> {
    fn new(ids: &'a [String], results: &'a [Result<DecisionResult, Error>]) -> Self {
        let decided = results.iter().filter(|result| result.is_ok()).count();
        let bodies = ids.iter().zip(results).map(|(id, result)| match result {
            Ok(result) => result_body(id, result),
            Err(error) => DecisionResultBody {
                approval_id: id,
                ok: false,
                status: None,
                tool_call_id: None,
                call_status: None,
                replaced_by: None,
                standing_id: None,
                repeated: false,
                error: Some(FaultBody::from(&to_fault(error))),
            },
        });
        Self { decided, failed: results.len() - decided, results: bodies.collect() }
    }
}

fn result_body<'a>(id: &'a str, result: &'a DecisionResult) -> DecisionResultBody<'a> {
    let decision = result.approval.decision.as_ref();
    DecisionResultBody {
        approval_id: id,
        ok: true,
        status: Some(result.approval.status.as_str()),
        tool_call_id: Some(result.call.id.as_str()),
        call_status: Some(result.call.status.as_str()),
        replaced_by: decision.and_then(|one| one.replaced_by.as_ref()).map(|id| id.as_str()),
        standing_id: decision.and_then(|one| one.standing_id.as_deref()),
        repeated: result.is_repeated,
        error: None,
    }
}

fn to_fault(error: &Error) -> Fault {
    match error {
        Error::Refused { fault, .. } => fault.clone(),
        Error::Internal(source) => {
            tracing::error!(error = %source, "a decision failed");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}

fn parse_decision(index: usize, body: DecisionRequestBody) -> Result<DecisionRequest, Error> {
    let invalid = |field: &str, message: &str| {
        let pointer = format!("/decisions/{index}/{field}");
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Error::from(fault.with_detail(serde_json::json!({ "pointer": pointer })))
    };
    let verdict = match body.verdict.as_str() {
        "approve" => DecisionVerdict::Approve,
        "reject" => DecisionVerdict::Reject,
        _ => return Err(invalid("verdict", "verdict must be approve or reject")),
    };
    let scope = match body.scope.as_deref() {
        None | Some("once") => ApprovalScope::Once,
        Some("run") => ApprovalScope::Run,
        Some("until") => ApprovalScope::Until,
        Some(_) => return Err(invalid("scope", "scope must be once, run or until")),
    };
    let until_ms = match &body.until {
        None | Some(Value::Null) => None,
        Some(until) => {
            let text = until.as_str().map_or_else(|| until.to_string(), str::to_owned);
            let message = "until must be an RFC 3339 time, or Unix seconds or milliseconds";
            Some(parse_time(&text).ok_or_else(|| invalid("until", message))?)
        }
    };
    let args = body.args.filter(|args| args.text() != "null");
    if args.as_ref().is_some_and(|args| !args.text().trim_start().starts_with('{')) {
        return Err(invalid("args", "args must be an object"));
    }
    let approval_id = body.approval_id;
    Ok(DecisionRequest { approval_id, verdict, reason: body.reason, scope, until_ms, args })
}

/// The active standing approvals, oldest first.
#[derive(Serialize, ToSchema)]
#[schema(as = StandingApprovals)]
pub(super) struct StandingApprovalList<'a> {
    standing: Vec<StandingApprovalBody<'a>>,
}

/// Lists the project's active standing approvals.
#[utoipa::path(get, path = "/v1/approvals/standing", tag = "approvers",
    responses((status = 200, body = StandingApprovalList), (status = 403, body = ProblemDetails)))]
pub(super) async fn list_standing(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Response, ApiError> {
    let standing = state.engine.approvals().standing(&caller).await?;
    let standing = standing.iter().map(StandingApprovalBody::new).collect();
    Ok(Json(StandingApprovalList { standing }).into_response())
}

/// Revokes a standing approval.
#[utoipa::path(delete, path = "/v1/approvals/standing/{standing_id}", tag = "approvers",
    params(("standing_id" = String, Path, description = "The id of the standing approval")),
    responses((status = 200, body = StandingApprovalBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn revoke_standing(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<Response, ApiError> {
    let revoked = state.engine.approvals().revoke_standing(&caller, &id).await?;
    Ok(Json(StandingApprovalBody::new(&revoked)).into_response())
}
