//! The context of a run: its tools, its calls and their results, in the format of a model API; and
//! calls that the caller executed itself.

mod request;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::domain::fault::Error;
use toolcrib::runs::context::{DEFAULT_BUDGET_TOKENS, ToolCall, ToolCallContext, ToolResult};
use toolcrib::runs::{CONTEXT_CALL_LIMITS, MessageFormat};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::{CallBody, FaultBody, ToolBody};
use crate::http::extract::{
    AuthenticatedCaller, NamePath, QueryParams, ResultJsonBody, StrictJsonBody, invalid_parameter,
    traceparent,
};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::v1::contexts::request::{CallsBody, DefinitionsBody, ResultsBody};

/// Upper limit of `budget_tokens`.
const MAX_BUDGET_TOKENS: usize = 1_000_000;

/// Format and size of the context. Numbers arrive as text and are parsed here, so that an error
/// names the parameter.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ContextQuery {
    /// `json` (default), `openai`, `anthropic` or `prompt`.
    format: Option<String>,
    /// Maximum number of tokens of the prompt (default: 1000), or of all tool results of a
    /// conversation together (default: unlimited).
    #[param(value_type = Option<u64>, minimum = 1)]
    budget_tokens: Option<String>,
    /// Number of the newest calls to include, in addition to those that are still open: 1 to 200
    /// (default: 50).
    #[param(value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
}

enum ContextFormat {
    Json,
    Conversation(MessageFormat),
    Prompt,
}

impl ContextQuery {
    fn format(&self) -> Result<ContextFormat, Error> {
        match self.format.as_deref() {
            None | Some("" | "json") => Ok(ContextFormat::Json),
            Some("openai") => Ok(ContextFormat::Conversation(MessageFormat::OpenAi)),
            Some("anthropic") => Ok(ContextFormat::Conversation(MessageFormat::Anthropic)),
            Some("prompt") => Ok(ContextFormat::Prompt),
            Some(_) => Err(param_error("format", "must be json, openai, anthropic or prompt")),
        }
    }

    fn budget_tokens(&self, format: &ContextFormat) -> Result<Option<usize>, Error> {
        let budget =
            parse_number("budget_tokens", self.budget_tokens.as_deref(), MAX_BUDGET_TOKENS)?;
        if budget.is_some() && matches!(format, ContextFormat::Json) {
            return Err(param_error("budget_tokens", "is for format=prompt, openai and anthropic"));
        }
        Ok(budget)
    }

    fn limit(&self) -> Result<usize, Error> {
        let (default, max) = CONTEXT_CALL_LIMITS;
        Ok(parse_number("limit", self.limit.as_deref(), max)?.unwrap_or(default))
    }
}

fn param_error(field: &str, message: &str) -> Error {
    invalid_parameter(field, format!("{field} {message}"))
}

fn parse_number(field: &str, text: Option<&str>, max: usize) -> Result<Option<usize>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.parse::<usize>().ok().filter(|number| (1..=max).contains(number));
    let refused = || param_error(field, &format!("must be from 1 to {max}"));
    number.map(Some).ok_or_else(refused)
}

/// The tools, calls and results of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextBody<'a> {
    run_id: &'a str,
    /// The tools that the run lists, by name.
    tool_definitions: Vec<ToolBody>,
    /// Calls in the order of their creation.
    tool_calls: Vec<ContextCallBody<'a>>,
    /// Results in the order of their arrival. `call_id` matches a result to its call, or
    /// `tool_call_id` if a `call_id` was used more than once.
    tool_results: Vec<ContextResultBody<'a>>,
    /// True if older calls of the run, all of them ended, are omitted.
    truncated: bool,
}

/// A call of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextCallBody<'a> {
    /// The caller's own id; the ticket if the caller gave none.
    call_id: &'a str,
    tool_call_id: Option<&'a str>,
    name: &'a str,
    #[schema(value_type = serde_json::Value)]
    args: &'a toolcrib::Json,
    /// True if the call is a background task.
    #[serde(rename = "async")]
    background: bool,
    /// `PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED`, `TIMEOUT` or `CANCELED`.
    status: &'static str,
    created_at_ms: Option<u64>,
}

/// A result of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextResultBody<'a> {
    call_id: &'a str,
    tool_call_id: Option<&'a str>,
    ok: bool,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<&'a toolcrib::Json>,
    error: Option<FaultBody>,
    completed_at_ms: Option<u64>,
}

impl<'a> From<&'a ToolCall> for ContextCallBody<'a> {
    fn from(call: &'a ToolCall) -> Self {
        Self {
            call_id: &call.call_id,
            tool_call_id: call.tool_call_id.as_ref().map(toolcrib::CallId::as_str),
            name: &call.name,
            args: &call.args,
            background: call.background,
            status: call.status.as_str(),
            created_at_ms: call.created_ms,
        }
    }
}

impl<'a> From<&'a ToolResult> for ContextResultBody<'a> {
    fn from(result: &'a ToolResult) -> Self {
        Self {
            call_id: &result.call_id,
            tool_call_id: result.tool_call_id.as_ref().map(toolcrib::CallId::as_str),
            ok: result.ok(),
            data: result.outcome.as_ref().ok(),
            error: result.outcome.as_ref().err().map(FaultBody::from),
            completed_at_ms: result.completed_ms,
        }
    }
}

impl<'a> From<&'a ToolCallContext> for ContextBody<'a> {
    fn from(context: &'a ToolCallContext) -> Self {
        Self {
            run_id: context.run_id(),
            tool_definitions: context.tool_definitions().iter().map(ToolBody::from).collect(),
            tool_calls: context.tool_calls().iter().map(ContextCallBody::from).collect(),
            tool_results: context.tool_results().iter().map(ContextResultBody::from).collect(),
            truncated: context.truncated(),
        }
    }
}

/// Calls and results as messages, ready to be appended to a conversation.
#[derive(Serialize, ToSchema)]
pub(super) struct ConversationBody {
    run_id: String,
    /// Assistant messages with calls, each followed by the messages with the results of all its
    /// calls.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<toolcrib::Json>,
    /// The run's tools, in the format of the same API.
    #[schema(value_type = Vec<Object>)]
    tools: Vec<toolcrib::Json>,
    truncated: bool,
}

/// The state of the tools, as text for a system prompt.
#[derive(Serialize, ToSchema)]
pub(super) struct PromptBody {
    text: String,
    /// Number of tokens of the text.
    tokens: usize,
    budget_tokens: usize,
    left_out: OmittedCountsBody,
}

/// Numbers of entries that did not fit.
#[derive(Serialize, ToSchema)]
#[schema(as = LeftOutBody)]
pub(super) struct OmittedCountsBody {
    tools: usize,
    pending: usize,
    finished: usize,
}

/// Returns the tools, calls and results of a run.
#[utoipa::path(get, path = "/v1/runs/{run_id}/context", tag = "agents",
    params(("run_id" = String, Path, description = "The run"), ContextQuery),
    responses(
        (status = 200, description = "As JSON; with format=openai or anthropic, messages and \
                                      tools; with format=prompt, a text (or JSON, if Accept \
                                      requests it)",
            body = ContextBody),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    QueryParams(showing): QueryParams<ContextQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let format = showing.format()?;
    let (budget, limit) = (showing.budget_tokens(&format)?, showing.limit()?);
    match format {
        ContextFormat::Json => {
            let context = state.engine.runs().contexts().context(&caller, &run_id, limit).await?;
            Ok(Json(ContextBody::from(&context)).into_response())
        }
        ContextFormat::Conversation(style) => {
            let assembled = state
                .engine
                .runs()
                .contexts()
                .conversation(&caller, &run_id, limit, style, budget)
                .await?;
            let (conversation, truncated) = assembled;
            let (messages, tools) = (conversation.messages, conversation.tools);
            Ok(Json(ConversationBody { run_id, messages, tools, truncated }).into_response())
        }
        ContextFormat::Prompt => {
            let budget = budget.unwrap_or(DEFAULT_BUDGET_TOKENS);
            let prompt =
                state.engine.runs().contexts().prompt(&caller, &run_id, limit, budget).await?;
            let left_out = OmittedCountsBody {
                tools: prompt.omitted.tools,
                pending: prompt.omitted.pending,
                finished: prompt.omitted.finished,
            };
            let (text, tokens) = (prompt.text, prompt.tokens);
            let body = PromptBody { text, tokens, budget_tokens: budget, left_out };
            Ok(prompt_response(body, &headers))
        }
    }
}

/// Responds with text, or with JSON if the `Accept` header requests it.
fn prompt_response(body: PromptBody, headers: &HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    if accepted.is_some_and(|accepted| accepted.contains("application/json")) {
        return Json(body).into_response();
    }
    let tokens = HeaderValue::from(body.tokens);
    let mut answer = body.text.into_response();
    answer.headers_mut().insert("toolcrib-prompt-tokens", tokens);
    answer
}

/// The tools that a run lists.
#[derive(Serialize, ToSchema)]
pub(super) struct RunToolsBody {
    run_id: String,
    /// All tools of the run, by name.
    tool_definitions: Vec<ToolBody>,
}

/// Replaces the tools that a run lists: the caller's own, in addition to those of Toolcrib.
///
/// This has no effect on the tools that may be called.
#[utoipa::path(put, path = "/v1/runs/{run_id}/context/tool_definitions", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = DefinitionsBody,
    responses((status = 200, body = RunToolsBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn set_tools(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    StrictJsonBody(body): StrictJsonBody<DefinitionsBody>,
) -> Result<Json<RunToolsBody>, ApiError> {
    let default_ms = state.engine.registry().default_timeout_ms(&caller);
    let tools = body.into_run_tools(&caller.project, default_ms)?;
    let set = state.engine.runs().contexts().set_run_tools(&caller, &run_id, tools).await?;
    let tool_definitions = set.iter().map(ToolBody::from).collect();
    Ok(Json(RunToolsBody { run_id, tool_definitions }))
}

/// The present state of the calls, in the order of the request.
#[derive(Serialize, ToSchema)]
#[schema(as = RecordedBody)]
pub(super) struct RecordedCallsBody<'a> {
    tool_calls: Vec<CallBody<'a>>,
}

fn recorded_response(status: StatusCode, calls: &[std::sync::Arc<toolcrib::Call>]) -> Response {
    let tool_calls = calls.iter().map(|call| CallBody::from(call.as_ref())).collect();
    (status, Json(RecordedCallsBody { tool_calls })).into_response()
}

/// Records calls that the caller executes itself.
///
/// Each becomes a ticket like any other. A call that is recorded with its result has ended at once.
#[utoipa::path(post, path = "/v1/runs/{run_id}/context/tool_calls", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = CallsBody,
    responses((status = 201, body = RecordedCallsBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails), (status = 429, body = ProblemDetails),
        (status = 503, body = ProblemDetails)))]
pub(super) async fn record_calls(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    headers: HeaderMap,
    ResultJsonBody(body): ResultJsonBody<CallsBody>,
) -> Result<Response, ApiError> {
    let traceparent = traceparent(&headers).map(|trace| trace.to_string());
    let calls = body.into_calls(&run_id, traceparent.as_deref())?;
    let recorded =
        Box::pin(state.engine.runs().contexts().record_calls(&caller, &run_id, calls)).await?;
    Ok(recorded_response(StatusCode::CREATED, &recorded))
}

/// Records the results of calls that the caller executed itself.
///
/// A result belongs to the newest call with its `call_id` that has no result yet. Recording the
/// same result again returns the same response; a different one returns 409.
#[utoipa::path(post, path = "/v1/runs/{run_id}/context/tool_results", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = ResultsBody,
    responses((status = 200, body = RecordedCallsBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn record_results(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    ResultJsonBody(body): ResultJsonBody<ResultsBody>,
) -> Result<Response, ApiError> {
    let results = body.into_results()?;
    let ended =
        Box::pin(state.engine.runs().contexts().record_results(&caller, &run_id, results)).await?;
    Ok(recorded_response(StatusCode::OK, &ended))
}
