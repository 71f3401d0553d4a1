//! The context of a run: its tools, its calls and their results, in the format of a model API; and
//! calls that the caller executed itself.

mod posted;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::context::{DEFAULT_BUDGET_TOKENS, ToolCall, ToolCallContext, ToolResult};
use toolcrib::engine::{CONTEXT_CALLS, Style};
use toolcrib::fault::Error;
use utoipa::{IntoParams, ToSchema};

use self::posted::{CallsBody, DefinitionsBody, ResultsBody};
use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{
    Asked, Body, NamePath, ResultBody, Who, traceparent, wrong_parameter,
};
use super::super::wire::{CallBody, FaultBody, ToolBody};

/// Upper limit of `budget_tokens`.
const MAX_BUDGET_TOKENS: usize = 1_000_000;

/// Format and size of the context. Numbers arrive as text and are parsed here, so that an error
/// names the parameter.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Showing {
    /// `json` (default), `openai`, `anthropic` or `prompt`.
    format: Option<String>,
    /// Maximum number of tokens of the prompt (default: 1000), or of all tool results of a
    /// conversation together (default: unlimited).
    #[param(value_type = Option<u64>, minimum = 1)]
    budget_tokens: Option<String>,
    /// Number of the newest calls to include, beside those that are still open: 1 to 200 (default:
    /// 50).
    #[param(value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
}

enum Format {
    Json,
    Conversation(Style),
    Prompt,
}

impl Showing {
    fn format(&self) -> Result<Format, Error> {
        match self.format.as_deref() {
            None | Some("" | "json") => Ok(Format::Json),
            Some("openai") => Ok(Format::Conversation(Style::OpenAi)),
            Some("anthropic") => Ok(Format::Conversation(Style::Anthropic)),
            Some("prompt") => Ok(Format::Prompt),
            Some(_) => Err(invalid("format", "must be json, openai, anthropic or prompt")),
        }
    }

    fn budget_tokens(&self, format: &Format) -> Result<Option<usize>, Error> {
        let budget = number("budget_tokens", self.budget_tokens.as_deref(), MAX_BUDGET_TOKENS)?;
        if budget.is_some() && matches!(format, Format::Json) {
            return Err(invalid("budget_tokens", "is for format=prompt, openai and anthropic"));
        }
        Ok(budget)
    }

    fn limit(&self) -> Result<usize, Error> {
        let (usual, most) = CONTEXT_CALLS;
        Ok(number("limit", self.limit.as_deref(), most)?.unwrap_or(usual))
    }
}

fn invalid(field: &str, what: &str) -> Error {
    wrong_parameter(field, format!("{field} {what}"))
}

fn number(field: &str, text: Option<&str>, most: usize) -> Result<Option<usize>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.parse::<usize>().ok().filter(|number| (1..=most).contains(number));
    let refused = || invalid(field, &format!("must be from 1 to {most}"));
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
    #[schema(value_type = Object)]
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
    #[schema(value_type = Option<Object>)]
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
    left_out: LeftOutBody,
}

/// Numbers of entries that did not fit.
#[derive(Serialize, ToSchema)]
pub(super) struct LeftOutBody {
    tools: usize,
    pending: usize,
    finished: usize,
}

/// Returns the tools, calls and results of a run.
#[utoipa::path(get, path = "/v1/runs/{run_id}/context", tag = "agents",
    params(("run_id" = String, Path, description = "The run"), Showing),
    responses(
        (status = 200, description = "As JSON; with format=openai or anthropic, messages and \
            tools; with format=prompt, a text (or JSON, where Accept asks for it)",
            body = ContextBody),
        (status = 422, body = Problem)))]
pub(super) async fn show(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    Asked(showing): Asked<Showing>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let format = showing.format()?;
    let (budget, limit) = (showing.budget_tokens(&format)?, showing.limit()?);
    match format {
        Format::Json => {
            let context = door.engine.context(&caller, &run_id, limit).await?;
            Ok(Json(ContextBody::from(&context)).into_response())
        }
        Format::Conversation(style) => {
            let made = door.engine.conversation(&caller, &run_id, limit, style, budget).await?;
            let (conversation, truncated) = made;
            let (messages, tools) = (conversation.messages, conversation.tools);
            Ok(Json(ConversationBody { run_id, messages, tools, truncated }).into_response())
        }
        Format::Prompt => {
            let budget = budget.unwrap_or(DEFAULT_BUDGET_TOKENS);
            let prompt = door.engine.prompt(&caller, &run_id, limit, budget).await?;
            let left_out = LeftOutBody {
                tools: prompt.left_out.tools,
                pending: prompt.left_out.pending,
                finished: prompt.left_out.finished,
            };
            let (text, tokens) = (prompt.text, prompt.tokens);
            let body = PromptBody { text, tokens, budget_tokens: budget, left_out };
            Ok(prompt_answer(body, &headers))
        }
    }
}

/// Responds with text, or with JSON if the `Accept` header requests it.
fn prompt_answer(body: PromptBody, headers: &HeaderMap) -> Response {
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

/// Replaces the tools that a run lists: the caller's own, beside those of Toolcrib.
///
/// This has no effect on the tools that may be called.
#[utoipa::path(put, path = "/v1/runs/{run_id}/context/tool_definitions", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = DefinitionsBody,
    responses((status = 200, body = RunToolsBody), (status = 403, body = Problem),
        (status = 422, body = Problem)))]
pub(super) async fn set_tools(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    Body(body): Body<DefinitionsBody>,
) -> Result<Json<RunToolsBody>, Refused> {
    let default_ms = door.engine.default_timeout_ms(&caller);
    let tools = body.tools(&caller.project, default_ms)?;
    let set = door.engine.set_run_tools(&caller, &run_id, tools).await?;
    let tool_definitions = set.iter().map(ToolBody::from).collect();
    Ok(Json(RunToolsBody { run_id, tool_definitions }))
}

/// The present state of the calls, in the order of the request.
#[derive(Serialize, ToSchema)]
pub(super) struct RecordedBody<'a> {
    tool_calls: Vec<CallBody<'a>>,
}

fn recorded(status: StatusCode, calls: &[std::sync::Arc<toolcrib::Call>]) -> Response {
    let tool_calls = calls.iter().map(|call| CallBody::from(call.as_ref())).collect();
    (status, Json(RecordedBody { tool_calls })).into_response()
}

/// Records calls that the caller executes itself.
///
/// Each becomes a ticket like any other. A call that is recorded with its result has ended at once.
#[utoipa::path(post, path = "/v1/runs/{run_id}/context/tool_calls", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = CallsBody,
    responses((status = 201, body = RecordedBody), (status = 403, body = Problem),
        (status = 422, body = Problem), (status = 429, body = Problem),
        (status = 503, body = Problem)))]
pub(super) async fn record_calls(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    headers: HeaderMap,
    ResultBody(body): ResultBody<CallsBody>,
) -> Result<Response, Refused> {
    let traceparent = traceparent(&headers).map(|trace| trace.to_string());
    let calls = body.calls(&run_id, traceparent.as_deref())?;
    let made = Box::pin(door.engine.record_calls(&caller, &run_id, calls)).await?;
    Ok(recorded(StatusCode::CREATED, &made))
}

/// Records the results of calls that the caller executed itself.
///
/// A result belongs to the newest call with its `call_id` that has no result yet. Recording the
/// same result again returns the same response; a different one returns 409.
#[utoipa::path(post, path = "/v1/runs/{run_id}/context/tool_results", tag = "agents",
    params(("run_id" = String, Path, description = "The run")),
    request_body = ResultsBody,
    responses((status = 200, body = RecordedBody), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 409, body = Problem),
        (status = 422, body = Problem)))]
pub(super) async fn record_results(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    ResultBody(body): ResultBody<ResultsBody>,
) -> Result<Response, Refused> {
    let results = body.results()?;
    let ended = Box::pin(door.engine.record_results(&caller, &run_id, results)).await?;
    Ok(recorded(StatusCode::OK, &ended))
}
