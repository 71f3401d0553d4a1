//! Batches: all the calls that a model requested in one message.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::calls::batch::{self, BatchEntryResult, BatchMode};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::utp::AfterExecution;
use toolcrib::model_formats::{ENVELOPE_FIELDS, unknown_envelope_fields};
use toolcrib::{Batch, BatchAnswer};
use utoipa::ToSchema;

use super::super::HttpState;
use super::super::wire::{FaultBody, MetricsBody};
use crate::delivery::{JOINED_HEADER, ResponseDeliveries};
use crate::http::extract::{
    AuthenticatedCaller, CallHeaders, StrictJsonBody, TRACEPARENT, UnknownField,
    refuse_unknown_fields,
};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::rate_limit_headers::set_rate_limit_headers;
use crate::http::wait_param::WaitParam;

/// A batch of calls. Fields are parsed one by one, so that an error names the invalid field.
#[derive(Deserialize, ToSchema)]
pub(super) struct BatchBody {
    /// The run that the calls belong to.
    #[schema(value_type = String)]
    run_id: Option<toolcrib::Json>,
    /// The calls, each in any of these formats: the envelope (`{call_id, name, args, timeout_ms,
    /// attempt_timeout_ms, input_timeout_ms, retry, idempotency_key, callback_url}`), OpenAI's chat
    /// format (`{id, type: "function", function}`), its Responses format (`{type:
    /// "function_call"}`), or Anthropic's (`{type: "tool_use"}`).
    #[schema(value_type = Vec<Object>)]
    tool_calls: Option<toolcrib::Json>,
    /// `serial` (default) or `parallel`: read-only tools run concurrently, the others in the
    /// requested order.
    #[schema(value_type = Option<String>)]
    mode: Option<toolcrib::Json>,
    /// With `parallel`: `asked` (default), or `free` to run all calls concurrently.
    #[schema(value_type = Option<String>)]
    order: Option<toolcrib::Json>,
    /// Maximum number of calls in flight.
    #[schema(value_type = Option<u64>)]
    max_parallel: Option<toolcrib::Json>,
    /// Maximum number of tokens of all messages together.
    #[schema(value_type = Option<u64>)]
    budget_tokens: Option<toolcrib::Json>,
    /// Maximum time to wait for all calls, in milliseconds (default: the server's maximum).
    /// Alternative: the query parameter.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<toolcrib::Json>,
    /// The same key with the same batch returns the same tickets. Alternative: the header
    /// `Idempotency-Key`.
    #[schema(value_type = Option<String>)]
    idempotency_key: Option<toolcrib::Json>,
    /// A label for people. It has no effect.
    #[schema(value_type = Option<String>)]
    user_id: Option<toolcrib::Json>,
    /// URL that receives a signed POST at the end of each call.
    #[schema(value_type = Option<String>)]
    callback_url: Option<toolcrib::Json>,
    /// False if no call joins an earlier identical one whose answer was not delivered, or that
    /// waits for an approval (default: true).
    #[schema(value_type = Option<bool>)]
    rejoin: Option<toolcrib::Json>,
}

/// The result of each call, and the messages for the model.
#[derive(Serialize, ToSchema)]
#[schema(as = BatchAnswerBody)]
pub(super) struct BatchResponseBody<'a> {
    /// Results in the requested order.
    results: Vec<BatchResultBody<'a>>,
    /// Messages in the requested order, each in the format of its call: messages with the role
    /// `tool`, items `function_call_output`, or blocks `tool_result`.
    #[schema(value_type = Vec<Object>)]
    messages: &'a [toolcrib::Json],
}

/// The result of one call.
#[derive(Serialize, ToSchema)]
#[schema(as = ResultBody)]
pub(super) struct BatchResultBody<'a> {
    /// The caller's own id. Models reuse theirs; `tool_call_id` is unique.
    call_id: Option<&'a str>,
    /// The ticket; null if the entry was refused.
    tool_call_id: Option<&'a str>,
    /// Null while the call has no outcome.
    ok: Option<bool>,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<&'a toolcrib::Json>,
    error: Option<FaultBody>,
    metrics: Option<MetricsBody>,
    /// Once the call has ended, the effect of its result on your run: `suspend` (continue with it)
    /// or `terminate` (it is the answer).
    #[serde(skip_serializing_if = "Option::is_none")]
    after_execution: Option<&'static str>,
    /// The tool name, as requested.
    name: Option<&'a str>,
    /// `pending` while the call has not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    /// For an async tool whose call has not ended: the same as `tool_call_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    /// `approval` if the call waits for a person's approval.
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<&'static str>,
    /// The approval that the call waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    approval_id: Option<&'a str>,
    /// While the call has not ended: an explanation for the caller and the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
    /// If the call waits for them: the unanswered questions of its tool, by key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    questions: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// True if the idempotency key was used before; this is the call that it created then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replayed: bool,
    /// True if the entry joined an earlier call whose answer was not delivered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    joined: bool,
    /// True if the message is shortened to fit the budget; `data` is complete.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    digested: bool,
    /// Size of a result that is too large to be included; fetch it with the ticket.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out_bytes: Option<usize>,
}

impl<'a> From<&'a BatchEntryResult> for BatchResultBody<'a> {
    fn from(result: &'a BatchEntryResult) -> Self {
        let (pending, left_out_bytes) = match &result.state {
            batch::BatchEntryState::Open(call) => (Some(batch::pending_notice(call)), None),
            batch::BatchEntryState::Ended { omitted_bytes: left_out_bytes, .. } => {
                (None, *left_out_bytes)
            }
            batch::BatchEntryState::Refused(_) => (None, None),
        };
        Self {
            call_id: result.call_id.as_deref(),
            tool_call_id: result.call().map(|call| call.id.as_str()),
            ok: result.ok(),
            data: result.data(),
            error: result.error().map(FaultBody::from),
            metrics: result.metrics().map(MetricsBody::from),
            after_execution: result.after_execution().map(AfterExecution::as_str),
            name: result.name.as_deref(),
            hold: pending.and_then(|pending| pending.approval_id).map(|_| "approval"),
            approval_id: pending.and_then(|pending| pending.approval_id),
            status: pending.map(|pending| pending.status),
            task_id: pending.and_then(|pending| pending.task_id),
            message: pending.map(|pending| pending.message),
            questions: pending.and_then(|pending| pending.questions),
            replayed: result.replayed,
            joined: result.joined,
            digested: result.is_digested,
            left_out_bytes,
        }
    }
}

/// Calls all tools that a model requested in one message.
///
/// Each entry is a separate call with its own result. An entry that is denied, unknown or invalid
/// yields an error in its place and does not refuse the batch.
#[utoipa::path(post, path = "/v1/tool_calls", tag = "agents",
    params(
        WaitParam,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same tickets")
    ),
    request_body = BatchBody,
    responses(
        (status = 200, description = "All have ended", body = BatchResponseBody),
        (status = 202, description = "Some calls are still open", body = BatchResponseBody),
        (status = 400, body = ProblemDetails), (status = 403, body = ProblemDetails),
        (status = 413, body = ProblemDetails), (status = 422, body = ProblemDetails),
        (status = 503, body = ProblemDetails)
    ))]
pub(super) async fn run_batch(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    wait: WaitParam,
    carried: CallHeaders,
    StrictJsonBody(body): StrictJsonBody<BatchBody>,
) -> Result<Response, ApiError> {
    let mut batch = parse_batch(body)?;
    batch.wait_ms = wait.resolve_ms(batch.wait_ms);
    batch.idempotency_key = carried.idempotency_key(batch.idempotency_key)?;
    batch.traceparent = carried.traceparent;
    let answering = state.engine.calls().run_batch_with_renderer(&caller, batch, Some(result_json));
    let mut answer = Box::pin(answering).await?;
    let mut response = batch_response(&answer);
    let first = answer.results.iter().find_map(BatchEntryResult::call);
    let trace = first.and_then(|call| state.engine.calls().call_traceparent(call));
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(&trace.to_string()).ok()) {
        response.headers_mut().insert(TRACEPARENT, trace);
    }
    let names = answer.results.iter().filter_map(|entry| entry.name.as_deref());
    set_rate_limit_headers(&mut response, &state.engine, &caller, names);
    let deliveries = std::mem::take(&mut answer.deliveries);
    ResponseDeliveries::attach(&mut response, deliveries);
    // Dropping a hundred calls takes a while, and the caller need not wait for it.
    tokio::spawn(async move { drop(answer) });
    Ok(response)
}

fn batch_response(answer: &BatchAnswer) -> Response {
    let status = if answer.has_open_calls() { StatusCode::ACCEPTED } else { StatusCode::OK };
    let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let mut response = (status, [kind], batch_json(answer)).into_response();
    if answer.is_replayed() {
        let headers = response.headers_mut();
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    for entry in answer.results.iter().filter(|entry| entry.joined) {
        let id = entry.call().and_then(|call| HeaderValue::from_str(call.id.as_str()).ok());
        if let Some(id) = id {
            response.headers_mut().append(JOINED_HEADER, id);
        }
    }
    response
}

/// Serializes a [`BatchResultBody`].
fn result_json(result: &BatchEntryResult) -> String {
    // This capacity fits most results; a growing buffer would be copied repeatedly.
    let mut text = Vec::with_capacity(384);
    let written = serde_json::to_writer(&mut text, &BatchResultBody::from(result));
    written.ok().and_then(|()| String::from_utf8(text).ok()).unwrap_or_else(|| "null".to_owned())
}

/// Serializes a [`BatchResponseBody`] by joining its serialized parts.
fn batch_json(answer: &BatchAnswer) -> String {
    let results = || answer.texts.iter().map(String::as_str);
    let messages = || answer.messages.iter().map(toolcrib::Json::text);
    let length: usize = results().chain(messages()).map(|part| part.len() + 1).sum();
    let mut text = String::with_capacity(length + 32);
    text.push_str("{\"results\":[");
    push_joined(&mut text, results());
    text.push_str("],\"messages\":[");
    push_joined(&mut text, messages());
    text.push_str("]}");
    text
}

fn push_joined<'a>(text: &mut String, parts: impl Iterator<Item = &'a str>) {
    for (n, part) in parts.enumerate() {
        if n > 0 {
            text.push(',');
        }
        text.push_str(part);
    }
}

fn parse_batch(body: BatchBody) -> Result<Batch, Error> {
    let run_id = text_field("run_id", body.run_id.as_ref())?;
    let run_id = run_id.ok_or_else(|| invalid_field("run_id", "run_id is missing"))?;
    let value = body.tool_calls.as_ref();
    let value = value.ok_or_else(|| invalid_field("tool_calls", "tool_calls is missing"))?;
    let entries =
        value.items().ok_or_else(|| wrong_type("tool_calls", "an array of calls", value))?;
    refuse_unknown_fields(&unknown_entry_fields(&entries))?;
    let rejoin = parse_field("rejoin", body.rejoin.as_ref(), "true or false")?.unwrap_or(true);
    Ok(Batch {
        mode: parse_mode(body.mode.as_ref(), body.order.as_ref())?,
        max_parallel: number_field("max_parallel", 1, body.max_parallel.as_ref())?
            .map(saturating_usize),
        budget_tokens: number_field("budget_tokens", 1, body.budget_tokens.as_ref())?
            .map(saturating_usize),
        wait_ms: number_field("wait_ms", 0, body.wait_ms.as_ref())?,
        idempotency_key: text_field("idempotency_key", body.idempotency_key.as_ref())?,
        user_id: text_field("user_id", body.user_id.as_ref())?,
        callback_url: text_field("callback_url", body.callback_url.as_ref())?,
        rejoin,
        joins_waiting: rejoin,
        ..Batch::new(run_id, entries)
    })
}

/// Finds the unknown fields of the entries in Toolcrib's format.
fn unknown_entry_fields(entries: &[toolcrib::Json]) -> Vec<UnknownField> {
    let mut unknown = Vec::new();
    for (n, entry) in entries.iter().enumerate() {
        let field =
            |name: String| UnknownField::new(&format!("/tool_calls/{n}"), &name, ENVELOPE_FIELDS);
        unknown.extend(unknown_envelope_fields(entry).into_iter().map(field));
    }
    unknown
}

fn parse_mode(
    mode: Option<&toolcrib::Json>,
    order: Option<&toolcrib::Json>,
) -> Result<BatchMode, Error> {
    let (mode, order) = (text_field("mode", mode)?, text_field("order", order)?);
    let mode = match mode.as_deref() {
        None | Some("serial") => BatchMode::Serial,
        Some("parallel") => BatchMode::Parallel,
        Some(_) => return Err(invalid_field("mode", "mode must be \"serial\" or \"parallel\"")),
    };
    match (mode, order.as_deref()) {
        (mode, None | Some("asked")) => Ok(mode),
        (BatchMode::Serial, Some("free")) => {
            Err(invalid_field("order", "order can be \"free\" only where mode is \"parallel\""))
        }
        (_, Some("free")) => Ok(BatchMode::Unordered),
        (_, Some(_)) => Err(invalid_field("order", "order must be \"asked\" or \"free\"")),
    }
}

fn parse_field<T: DeserializeOwned>(
    name: &str,
    value: Option<&toolcrib::Json>,
    expected: &str,
) -> Result<Option<T>, Error> {
    let Some(value) = value else { return Ok(None) };
    serde_json::from_str(value.text()).map(Some).map_err(|_| wrong_type(name, expected, value))
}

fn wrong_type(name: &str, expected: &str, value: &toolcrib::Json) -> Error {
    let excerpt: String = value.text().chars().take(40).collect();
    invalid_field(name, &format!("{name} must be {expected}, not {excerpt}"))
}

fn text_field(name: &str, value: Option<&toolcrib::Json>) -> Result<Option<String>, Error> {
    parse_field(name, value, "a text")
}

fn number_field(
    name: &str,
    min: u64,
    value: Option<&toolcrib::Json>,
) -> Result<Option<u64>, Error> {
    let expected = format!("a whole number, at least {min}");
    let Some(number) = parse_field::<i128>(name, value, &expected)? else { return Ok(None) };
    if number < i128::from(min) {
        return Err(invalid_field(name, &format!("{name} must be {expected}, not {number}")));
    }
    // A number above the range of `u64` is clamped. Later checks refuse or reduce it like any
    // other number above the permitted range.
    Ok(Some(u64::try_from(number).unwrap_or(u64::MAX)))
}

fn saturating_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn invalid_field(field: &str, message: &str) -> Error {
    let detail = json!({ "pointer": format!("/{field}") });
    Fault::new(Code::ValidationError, message).without_side_effect().with_detail(detail).into()
}
