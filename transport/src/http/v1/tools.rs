//! Tools: list, show, invoke.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::calls::Until;
use toolcrib::domain::call::Status;
use toolcrib::domain::fault::Error;
use toolcrib::domain::trace::TraceParent;
use toolcrib::model_formats::ToolFormat;
use toolcrib::registry::CatalogEntry;
use toolcrib::{CallRequest, Caller, Engine, Ticket};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::{CallBody, ToolBody, timeout_ms};
use super::calls::parse_page_limit;
use crate::delivery::{JOINED_HEADER, ResponseDeliveries};
use crate::http::extract::{
    AuthenticatedCaller, CallHeaders, NamePath, QueryParams, StrictJsonBody, TRACEPARENT,
    invalid_parameter,
};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::rate_limit_headers::set_rate_limit_headers;
use crate::http::wait_param::{WaitParam, set_retry_after};

/// The tools that the caller may call.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolList {
    tools: Vec<ToolBody>,
}

/// The same tools, in the format of a model API.
#[derive(Serialize)]
struct ModelToolList {
    tools: Vec<toolcrib::Json>,
}

/// Format and filter of the tool list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ToolListQuery {
    /// `openai`, `openai_responses`, `anthropic` or `mcp`: describe the tools in that API's format,
    /// ready to be put into a request, under names that the API accepts.
    format: Option<String>,
    /// Only tools that match these words or this part of a name, best match first.
    query: Option<String>,
    /// With `query`: maximum number of tools, 1 to 200 (default: 20).
    limit: Option<usize>,
}

/// Lists the tools that the caller may call, by name.
#[utoipa::path(get, path = "/v1/tools", tag = "agents", params(ToolListQuery),
    responses((status = 200, body = ToolList), (status = 401, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<ToolListQuery>,
) -> Result<Response, ApiError> {
    if listing.format.is_some() && listing.query.is_some() {
        return Err(invalid_parameter("format", "give format or query, not both").into());
    }
    let Some(format) = listing.format else {
        let tools = match &listing.query {
            Some(query) => search_tools(&state, &caller, query, listing.limit).await?,
            None => state.engine.registry().tools(&caller),
        };
        let body =
            |entry: &Arc<CatalogEntry>| ToolBody::with_availability(&state.engine, &caller, entry);
        let tools = tools.iter().map(body).collect();
        return Ok(Json(ToolList { tools }).into_response());
    };
    let format = format.parse::<ToolFormat>().map_err(|()| {
        let formats: Vec<&str> = ToolFormat::ALL.iter().map(|format| format.as_str()).collect();
        invalid_parameter("format", format!("format must be one of {}", formats.join(", ")))
    })?;
    Ok(Json(ModelToolList {
        tools: state.engine.registry().model_tool_definitions(&caller, format),
    })
    .into_response())
}

async fn search_tools(
    state: &HttpState,
    caller: &Caller,
    query: &str,
    limit: Option<usize>,
) -> Result<Vec<Arc<CatalogEntry>>, Error> {
    let limit = parse_page_limit(limit.map(|limit| limit as u64), 20)?;
    let found = state.engine.registry().search(caller, query, limit).await?;
    Ok(found.into_iter().map(|found| found.entry).collect())
}

/// Returns one tool.
#[utoipa::path(get, path = "/v1/tools/{name}", tag = "agents",
    params(("name" = String, Path, description = "The tool's name")),
    responses((status = 200, body = ToolBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
) -> Result<Json<ToolBody>, ApiError> {
    let entry = state.engine.registry().listed_tool(&caller, &name)?;
    Ok(Json(ToolBody::with_availability(&state.engine, &caller, &entry)))
}

/// A request to run one tool.
#[derive(Deserialize, ToSchema)]
pub(super) struct InvokeBody {
    /// The run that the call belongs to.
    run_id: String,
    /// The arguments, as described by the tool's schema.
    #[serde(default = "toolcrib::Json::empty_object")]
    #[schema(value_type = Object)]
    args: toolcrib::Json,
    /// The caller's own id for the call. It is returned with the call and never compared.
    call_id: Option<String>,
    /// Time in milliseconds within which the call must end: 1 to 86400000.
    #[serde(default, deserialize_with = "timeout_ms")]
    timeout_ms: Option<u64>,
    /// Time limit of each attempt in milliseconds: 1 to 86400000 (default: the policy's, else an
    /// equal part of the remaining time for each attempt that may follow).
    #[serde(default, deserialize_with = "timeout_ms")]
    attempt_timeout_ms: Option<u64>,
    /// Time in milliseconds that the call waits for answers to its tool's questions: 1 to 86400000
    /// (default: 3600000). It does not count against `timeout_ms`.
    #[serde(default, deserialize_with = "timeout_ms")]
    input_timeout_ms: Option<u64>,
    /// Maximum number of retries after the first attempt.
    retry: Option<u32>,
    /// The same key with the same request returns the same ticket. Alternative: the header
    /// `Idempotency-Key`.
    idempotency_key: Option<String>,
    /// Only this client may execute the call.
    client_id: Option<String>,
    /// A label for people. It has no effect.
    user_id: Option<String>,
    /// URL that receives a signed POST (Standard Webhooks) when the call has ended.
    callback_url: Option<String>,
    /// Maximum time to wait for the outcome, in milliseconds. Alternative: the query parameter.
    wait_ms: Option<u64>,
    /// False if the request never joins an earlier identical call whose answer was not delivered,
    /// or that waits for an approval (default: true).
    rejoin: Option<bool>,
}

/// The ticket of an accepted call.
#[derive(Serialize, ToSchema)]
pub(super) struct TicketBody<'a> {
    tool_call_id: String,
    /// `pending`. If the idempotency key was used before, the current status of its call:
    /// `pending`, `running`, `succeeded`, `failed`, `timeout` or `canceled`.
    status: String,
    message: &'static str,
    /// For an async tool: the same id, for use at `/v1/tasks/{task_id}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<String>,
    /// `approval` if the call waits for a person's approval.
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<&'static str>,
    /// The approval that the call waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    approval_id: Option<String>,
    /// The call, if the idempotency key was used before and its call has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    call: Option<CallBody<'a>>,
    /// True if the request joined an earlier call whose answer was not delivered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    joined: bool,
}

/// The ticket, or the call itself if the caller waits.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum InvokeResponseBody<'a> {
    Ticket(TicketBody<'a>),
    Call(CallBody<'a>),
}

impl<'a> TicketBody<'a> {
    fn new(engine: &Engine, ticket: &'a Ticket, trace: Option<TraceParent>) -> Self {
        let call = &ticket.call;
        // A new call may have ended before its ticket is sent. Its ticket is `pending` like any
        // other, because callers poll for the outcome of every new call.
        let status = if ticket.replayed || ticket.joined { call.status } else { Status::Pending };
        Self {
            tool_call_id: call.id.to_string(),
            status: status.as_str().to_lowercase(),
            message: match status {
                Status::Pending if call.waits_for_approval() => {
                    "tool call waits for a person's approval, use tool_call_id to poll result"
                }
                Status::Pending => "tool call created, use tool_call_id to poll result",
                Status::Running => "tool call is running, use tool_call_id to poll result",
                Status::Succeeded => "tool call succeeded, call has the result",
                Status::Failed => "tool call failed, call has the error",
                Status::Timeout => "tool call ended by timeout, call has the error",
                Status::Canceled => "tool call was canceled, call has the error",
            },
            hold: call.pending_approval().map(|_| "approval"),
            approval_id: call.pending_approval().map(str::to_owned),
            task_id: call.origin.background.then(|| call.id.to_string()),
            joined: ticket.joined,
            call: status.is_terminal().then(|| CallBody::with_trace(engine, call, trace)),
        }
    }
}

/// Calls a tool and returns a ticket.
///
/// An idempotency key that was used before returns the ticket of its call with the current status,
/// and the call itself once it has ended. With `wait_ms`, the response is the call itself, once it
/// has ended or the wait has expired.
#[utoipa::path(post, path = "/v1/tools/{name}/invoke", tag = "agents",
    params(
        ("name" = String, Path, description = "The tool's name"),
        WaitParam,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same ticket"),
        ("traceparent" = Option<String>, Header, description = "W3C trace context: the span that \
            the call is part of")
    ),
    request_body = InvokeBody,
    responses(
        (status = 202, description = "The ticket; with wait_ms the call itself",
            body = InvokeResponseBody),
        (status = 400, body = ProblemDetails), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 413, body = ProblemDetails),
        (status = 422, body = ProblemDetails), (status = 429, body = ProblemDetails),
        (status = 503, body = ProblemDetails)
    ))]
pub(super) async fn invoke(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(name): NamePath,
    wait: WaitParam,
    carried: CallHeaders,
    StrictJsonBody(body): StrictJsonBody<InvokeBody>,
) -> Response {
    let tool = name.clone();
    let request = ToolInvocation { name, wait, carried, body };
    // Boxed, because the router moves this handler's future several times.
    let answering = Box::pin(invoke_tool(&state, &caller, request));
    let mut answer = answering.await.unwrap_or_else(IntoResponse::into_response);
    set_rate_limit_headers(&mut answer, &state.engine, &caller, [tool.as_str()].into_iter());
    answer
}

/// The parts of a request to run one tool.
struct ToolInvocation {
    name: String,
    wait: WaitParam,
    carried: CallHeaders,
    body: InvokeBody,
}

async fn invoke_tool(
    state: &HttpState,
    caller: &Caller,
    request: ToolInvocation,
) -> Result<Response, ApiError> {
    let ToolInvocation { name, wait, carried, body } = request;
    let wait_ms = wait.resolve_ms(body.wait_ms);
    let invocation = CallRequest {
        tool: name,
        args: body.args,
        run_id: body.run_id,
        call_id: body.call_id,
        max_timeout_ms: None,
        timeout_ms: body.timeout_ms,
        attempt_timeout_ms: body.attempt_timeout_ms,
        input_timeout_ms: body.input_timeout_ms,
        retry: body.retry,
        idempotency_key: carried.idempotency_key(body.idempotency_key)?,
        client_id: body.client_id,
        user_id: body.user_id,
        traceparent: carried.traceparent,
        route: None,
        depth: 0,
        callback_url: body.callback_url,
        answers: None,
        rejoin: body.rejoin.unwrap_or(true),
        joins_waiting: body.rejoin.unwrap_or(true),
        meta: None,
    };
    let ticket = state.engine.calls().invoke(caller, invocation).await?;
    let id = ticket.call.id.clone();
    let trace = state.engine.calls().call_traceparent(&ticket.call);
    let mut answer = match wait_ms {
        None | Some(0) => {
            let body = TicketBody::new(&state.engine, &ticket, trace);
            let is_open = body.call.is_none();
            let body = Json(InvokeResponseBody::Ticket(body));
            let mut answer = (StatusCode::ACCEPTED, body).into_response();
            if is_open {
                set_retry_after(&mut answer);
            }
            answer
        }
        Some(wait_ms) => {
            let calls = state.engine.calls();
            let call = calls.wait(caller, &ticket, Until::EndedWithin(wait_ms)).await?;
            let body = CallBody::with_trace(&state.engine, &call, trace).with_joined(ticket.joined);
            let body = Json(InvokeResponseBody::Call(body));
            let mut answer = (StatusCode::ACCEPTED, body).into_response();
            if !call.status.is_terminal() {
                set_retry_after(&mut answer);
            }
            answer
        }
    };
    let headers = answer.headers_mut();
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/tool_calls/{id}")) {
        headers.insert(header::LOCATION, location);
    }
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(&trace.to_string()).ok()) {
        headers.insert(TRACEPARENT, trace);
    }
    if ticket.replayed {
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    if ticket.joined
        && let Ok(id) = HeaderValue::from_str(id.as_str())
    {
        headers.insert(JOINED_HEADER, id);
    }
    ResponseDeliveries::attach(&mut answer, ticket.delivery().cloned());
    Ok(answer)
}
