//! Batches: all the calls that a model asked for at once.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::batch::{self, Mode, Settled};
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::{Batch, BatchAnswer};
use utoipa::ToSchema;

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Body, Carried, TRACEPARENT, Who};
use super::super::waiting::Wait;
use super::super::wire::{FaultBody, MetricsBody};

/// What to call. Read field by field, so that whatever is wrong is answered with its name.
#[derive(Deserialize, ToSchema)]
pub(super) struct BatchBody {
    /// The run these calls belong to.
    #[schema(value_type = String)]
    run_id: Option<toolcrib::Json>,
    /// The calls, each in a form of its own: the envelope
    /// (`{call_id, name, args, timeout_ms, retry, idempotency_key, callback_url}`), OpenAI's chat
    /// form (`{id, type: "function", function}`), its Responses form (`{type: "function_call"}`), or
    /// Anthropic's (`{type: "tool_use"}`).
    #[schema(value_type = Vec<Object>)]
    tool_calls: Option<toolcrib::Json>,
    /// `serial` (unless said) or `parallel`: tools that only read side by side, the others in the
    /// order asked.
    #[schema(value_type = Option<String>)]
    mode: Option<toolcrib::Json>,
    /// In parallel: `asked` (unless said), or `free` to run all side by side.
    #[schema(value_type = Option<String>)]
    order: Option<toolcrib::Json>,
    /// How many may be under way at the same time.
    #[schema(value_type = Option<u64>)]
    max_parallel: Option<toolcrib::Json>,
    /// How many tokens the messages may have together.
    #[schema(value_type = Option<u64>)]
    budget_tokens: Option<toolcrib::Json>,
    /// How long to wait for all of them; unless said, as long as the server permits. Also as a
    /// query parameter.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<toolcrib::Json>,
    /// The same batch with the same key gives the same tickets. Also as the header
    /// `Idempotency-Key`.
    #[schema(value_type = Option<String>)]
    idempotency_key: Option<toolcrib::Json>,
    /// A label for people; it decides nothing.
    #[schema(value_type = Option<String>)]
    user_id: Option<toolcrib::Json>,
    /// Is told of the end of each call, with a signed POST.
    #[schema(value_type = Option<String>)]
    callback_url: Option<toolcrib::Json>,
}

/// What each call came to, and what to tell the model.
#[derive(Serialize, ToSchema)]
pub(super) struct BatchAnswerBody<'a> {
    /// In the order asked.
    results: Vec<ResultBody<'a>>,
    /// In the order asked, each in the form of its call: messages of the role `tool`, items
    /// `function_call_output`, blocks `tool_result`.
    #[schema(value_type = Vec<Object>)]
    messages: &'a [toolcrib::Json],
}

/// What one call came to.
#[derive(Serialize, ToSchema)]
pub(super) struct ResultBody<'a> {
    /// The caller's own id. Models repeat theirs; `tool_call_id` is never repeated.
    call_id: Option<&'a str>,
    /// The ticket; none if it became no call.
    tool_call_id: Option<&'a str>,
    /// Null while nobody knows.
    ok: Option<bool>,
    #[schema(value_type = Option<Object>)]
    data: Option<&'a toolcrib::Json>,
    error: Option<FaultBody>,
    metrics: Option<MetricsBody>,
    /// The tool, as asked.
    name: Option<&'a str>,
    /// `pending` while it goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    /// Of an async tool that goes on: the same as `tool_call_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    /// While it goes on: what happens now.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
    /// Its idempotency key was used before: this is the call it made then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replayed: bool,
    /// Its message is shortened to keep to the budget; `data` is whole.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    digested: bool,
    /// The result is so large that it is not here: the ticket leads to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out_bytes: Option<usize>,
}

impl<'a> From<&'a Settled> for ResultBody<'a> {
    fn from(settled: &'a Settled) -> Self {
        let (pending, left_out_bytes) = match &settled.state {
            batch::State::Open(call) => (Some(batch::pending(call)), None),
            batch::State::Ended { left_out_bytes, .. } => (None, *left_out_bytes),
            batch::State::Refused(_) => (None, None),
        };
        Self {
            call_id: settled.call_id.as_deref(),
            tool_call_id: settled.call().map(|call| call.id.as_str()),
            ok: settled.ok(),
            data: settled.data(),
            error: settled.error().map(FaultBody::from),
            metrics: settled.metrics().map(MetricsBody::from),
            name: settled.name.as_deref(),
            status: pending.map(|pending| pending.status),
            task_id: pending.and_then(|pending| pending.task_id),
            message: pending.map(|pending| pending.message),
            replayed: settled.replayed,
            digested: settled.digested,
            left_out_bytes,
        }
    }
}

/// Calls tools, all that a model asked for at once. Each entry is a call of its own and is answered
/// by itself; one that is denied, unknown or invalid is an answer, not a refused batch.
#[utoipa::path(post, path = "/v1/tool_calls", tag = "agents",
    params(
        Wait,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same tickets")
    ),
    request_body = BatchBody,
    responses(
        (status = 200, description = "All have ended", body = BatchAnswerBody),
        (status = 202, description = "Some go on: these are tickets", body = BatchAnswerBody),
        (status = 400, body = Problem), (status = 403, body = Problem),
        (status = 413, body = Problem), (status = 422, body = Problem),
        (status = 503, body = Problem)
    ))]
pub(super) async fn run(
    State(door): State<Door>,
    Who(caller): Who,
    wait: Wait,
    carried: Carried,
    Body(body): Body<BatchBody>,
) -> Result<Response, Refused> {
    let mut asked = read(body)?;
    asked.wait_ms = wait.ms(asked.wait_ms);
    asked.idempotency_key = carried.idempotency_key(asked.idempotency_key)?;
    asked.traceparent = carried.traceparent;
    let answering = door.engine.batch_written(&caller, asked, Some(result_text));
    let answer = Box::pin(answering).await?;
    let mut response = written(&answer);
    let first = answer.results.iter().find_map(Settled::call);
    let trace = first.and_then(|call| door.engine.trace_of(call));
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(&trace.to_string()).ok()) {
        response.headers_mut().insert(TRACEPARENT, trace);
    }
    // To let go of a hundred calls takes a while: who asked need not wait for it.
    tokio::spawn(async move { drop(answer) });
    Ok(response)
}

fn written(answer: &BatchAnswer) -> Response {
    let status = if answer.is_open() { StatusCode::ACCEPTED } else { StatusCode::OK };
    let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let mut response = (status, [kind], text_of(answer)).into_response();
    if answer.is_replayed() {
        let headers = response.headers_mut();
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    response
}

/// A [`ResultBody`].
fn result_text(settled: &Settled) -> String {
    // In room that most fit in: a text that grows is copied again and again.
    let mut text = Vec::with_capacity(384);
    let written = serde_json::to_writer(&mut text, &ResultBody::from(settled));
    written.ok().and_then(|()| String::from_utf8(text).ok()).unwrap_or_else(|| "null".to_owned())
}

/// A [`BatchAnswerBody`], put together from its parts.
fn text_of(answer: &BatchAnswer) -> String {
    let results = || answer.texts.iter().map(String::as_str);
    let messages = || answer.messages.iter().map(toolcrib::Json::text);
    let length: usize = results().chain(messages()).map(|part| part.len() + 1).sum();
    let mut text = String::with_capacity(length + 32);
    text.push_str("{\"results\":[");
    joined(&mut text, results());
    text.push_str("],\"messages\":[");
    joined(&mut text, messages());
    text.push_str("]}");
    text
}

fn joined<'a>(text: &mut String, parts: impl Iterator<Item = &'a str>) {
    for (n, part) in parts.enumerate() {
        if n > 0 {
            text.push(',');
        }
        text.push_str(part);
    }
}

fn read(body: BatchBody) -> Result<Batch, Error> {
    let run_id = text("run_id", body.run_id.as_ref())?;
    let run_id = run_id.ok_or_else(|| invalid("run_id", "run_id is missing"))?;
    let given = body.tool_calls.as_ref();
    let given = given.ok_or_else(|| invalid("tool_calls", "tool_calls is missing"))?;
    let entries = given.items().ok_or_else(|| not_a("tool_calls", "an array of calls", given))?;
    Ok(Batch {
        mode: mode(body.mode.as_ref(), body.order.as_ref())?,
        max_parallel: number("max_parallel", 1, body.max_parallel.as_ref())?.map(as_usize),
        budget_tokens: number("budget_tokens", 1, body.budget_tokens.as_ref())?.map(as_usize),
        wait_ms: number("wait_ms", 0, body.wait_ms.as_ref())?,
        idempotency_key: text("idempotency_key", body.idempotency_key.as_ref())?,
        user_id: text("user_id", body.user_id.as_ref())?,
        callback_url: text("callback_url", body.callback_url.as_ref())?,
        ..Batch::new(run_id, entries)
    })
}

fn mode(mode: Option<&toolcrib::Json>, order: Option<&toolcrib::Json>) -> Result<Mode, Error> {
    let (mode, order) = (text("mode", mode)?, text("order", order)?);
    let mode = match mode.as_deref() {
        None | Some("serial") => Mode::Serial,
        Some("parallel") => Mode::Parallel,
        Some(_) => return Err(invalid("mode", "mode must be \"serial\" or \"parallel\"")),
    };
    match (mode, order.as_deref()) {
        (mode, None | Some("asked")) => Ok(mode),
        (Mode::Serial, Some("free")) => {
            Err(invalid("order", "order can be \"free\" only where mode is \"parallel\""))
        }
        (_, Some("free")) => Ok(Mode::Unordered),
        (_, Some(_)) => Err(invalid("order", "order must be \"asked\" or \"free\"")),
    }
}

fn field<T: DeserializeOwned>(
    name: &str,
    given: Option<&toolcrib::Json>,
    what: &str,
) -> Result<Option<T>, Error> {
    let Some(given) = given else { return Ok(None) };
    serde_json::from_str(given.text()).map(Some).map_err(|_| not_a(name, what, given))
}

fn not_a(name: &str, what: &str, given: &toolcrib::Json) -> Error {
    let shown: String = given.text().chars().take(40).collect();
    invalid(name, &format!("{name} must be {what}, not {shown}"))
}

fn text(name: &str, given: Option<&toolcrib::Json>) -> Result<Option<String>, Error> {
    field(name, given, "a text")
}

fn number(name: &str, least: u64, given: Option<&toolcrib::Json>) -> Result<Option<u64>, Error> {
    let what = format!("a whole number, at least {least}");
    let Some(number) = field::<i128>(name, given, &what)? else { return Ok(None) };
    if number < i128::from(least) {
        return Err(invalid(name, &format!("{name} must be {what}, not {number}")));
    }
    // What is out of any range is out of ours, and is refused or cut as that.
    Ok(Some(u64::try_from(number).unwrap_or(u64::MAX)))
}

fn as_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn invalid(field: &str, message: &str) -> Error {
    let detail = json!({ "pointer": format!("/{field}") });
    Fault::new(Code::ValidationError, message).not_happened().with_detail(detail).into()
}
