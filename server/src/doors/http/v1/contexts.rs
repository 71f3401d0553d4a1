//! The context of a run: its tools, its calls and their results, in whatever form a model wants
//! them; and what the caller ran itself.

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

/// The most tokens anybody may ask for.
const MAX_BUDGET_TOKENS: usize = 1_000_000;

/// How the context is shown. Numbers are read as texts, so that nonsense is answered by its name.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Showing {
    /// `json` unless said, `openai`, `anthropic` or `prompt`.
    format: Option<String>,
    /// The most tokens of the prompt (1000 unless said), or of all answers of a conversation
    /// together (no limit unless said).
    #[param(value_type = Option<u64>, minimum = 1)]
    budget_tokens: Option<String>,
    /// So many of the newest calls, beside those that are still open: 1 to 200, 50 unless said.
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

/// The tools of a run, what was called, and what came of it.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextBody<'a> {
    run_id: &'a str,
    /// The tools the run is told of, by name.
    tool_definitions: Vec<ToolBody>,
    /// In the order they were made.
    tool_calls: Vec<ContextCallBody<'a>>,
    /// In the order they came, each matched to its call by `call_id`, and by `tool_call_id` where
    /// a `call_id` was used more than once.
    tool_results: Vec<ContextResultBody<'a>>,
    /// Older calls of the run, all of them ended, are not here.
    truncated: bool,
}

/// A call of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextCallBody<'a> {
    /// The caller's own id; the ticket where it gave none.
    call_id: &'a str,
    tool_call_id: Option<&'a str>,
    name: &'a str,
    #[schema(value_type = Object)]
    args: &'a toolcrib::Json,
    /// Whether it is a background task.
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

/// Calls and results as messages of a conversation, ready to be appended to one.
#[derive(Serialize, ToSchema)]
pub(super) struct ConversationBody {
    run_id: String,
    /// Assistant messages with calls, each followed by the messages that answer all of them.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<toolcrib::Json>,
    /// The run's tools, as the same API wants them described.
    #[schema(value_type = Vec<Object>)]
    tools: Vec<toolcrib::Json>,
    truncated: bool,
}

/// The state of the tools for a system prompt.
#[derive(Serialize, ToSchema)]
pub(super) struct PromptBody {
    text: String,
    /// How many tokens the text is.
    tokens: usize,
    budget_tokens: usize,
    left_out: LeftOutBody,
}

/// What did not fit.
#[derive(Serialize, ToSchema)]
pub(super) struct LeftOutBody {
    tools: usize,
    pending: usize,
    finished: usize,
}

/// Shows the tools of a run, what was called in it, and what came of it.
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

/// A text, unless JSON is asked for.
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

/// The tools a run is told of.
#[derive(Serialize, ToSchema)]
pub(super) struct RunToolsBody {
    run_id: String,
    /// All of them, by name.
    tool_definitions: Vec<ToolBody>,
}

/// Sets which tools a run is told of, instead of what was set before: the caller's own, beside
/// those of the crib. It decides nothing about what may be called.
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

/// The calls as they are now, in the order of the request.
#[derive(Serialize, ToSchema)]
pub(super) struct RecordedBody<'a> {
    tool_calls: Vec<CallBody<'a>>,
}

fn recorded(status: StatusCode, calls: &[std::sync::Arc<toolcrib::Call>]) -> Response {
    let tool_calls = calls.iter().map(|call| CallBody::from(call.as_ref())).collect();
    (status, Json(RecordedBody { tool_calls })).into_response()
}

/// Records calls that the caller runs itself. Each is a ticket like any other; one that comes with
/// its result has ended at once.
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

/// Records how calls went that the caller ran itself. A result answers the newest unanswered call
/// with its `call_id`; the same again gets the same answer, another gets 409.
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
