//! The forms of HTTP v1, and how the engine's types become them. The names and casing of the
//! first fields of each are fixed; more may be added, none renamed.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use toolcrib::Engine;
use toolcrib::call::{Call, Hold, Metrics, Outcome};
use toolcrib::engine::CatalogEntry;
use toolcrib::event::Event;
use toolcrib::fault::{Code, Fault};
use toolcrib::json::Json;
use toolcrib::tool::Definition;
use toolcrib::trace::TraceParent;
use utoipa::ToSchema;

use crate::task::{MAX_DATA_BYTES, TaskEnd};

/// How a call or a request went wrong.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(super) struct FaultBody {
    /// From the table in docs/errors.md.
    pub(super) code: String,
    pub(super) message: String,
    /// Structured facts: problems with pointers, nearest names, what it already is.
    #[schema(value_type = Option<Object>)]
    pub(super) detail: Option<Value>,
    /// Whether the same again can succeed.
    pub(super) retryable: bool,
}

impl From<&Fault> for FaultBody {
    fn from(fault: &Fault) -> Self {
        Self {
            code: fault.code.as_str().to_owned(),
            message: fault.message.clone(),
            detail: fault.detail.clone(),
            retryable: fault.retryable,
        }
    }
}

/// A tool.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ToolBody {
    name: String,
    /// `server` or `client`.
    source: String,
    /// JSON Schema of the arguments.
    #[schema(value_type = Object)]
    schema: Json,
    timeout_ms: u64,
    /// Whether its calls are background tasks, whose results arrive later.
    #[serde(rename = "async")]
    background: bool,
    description: String,
    /// Who executes it: `builtin`, `client`, `utp`, `mcp`, `http`, or `caller`: you.
    executor: String,
    /// `read`, `idempotent` or `irreversible`.
    effect: String,
    /// `low`, `medium`, `high` or `critical`.
    risk: String,
    #[schema(value_type = Option<Object>)]
    output_schema: Option<Json>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Json>,
    /// A fingerprint of the definition.
    version: String,
}

impl From<&CatalogEntry> for ToolBody {
    fn from(entry: &CatalogEntry) -> Self {
        Self::new(&entry.definition, entry.version.clone())
    }
}

impl From<&Definition> for ToolBody {
    fn from(tool: &Definition) -> Self {
        Self::new(tool, tool.version())
    }
}

impl ToolBody {
    fn new(tool: &Definition, version: String) -> Self {
        Self {
            name: tool.name.clone(),
            source: tool.executor.source().to_owned(),
            schema: tool.input_schema.clone(),
            timeout_ms: tool.timeout_ms,
            background: tool.background,
            description: tool.description.clone(),
            executor: tool.executor.as_str().to_owned(),
            effect: tool.effect.as_str().to_owned(),
            risk: tool.risk.as_str().to_owned(),
            output_schema: tool.output_schema.clone(),
            metadata: tool.metadata.clone(),
            version,
        }
    }
}

/// A call, with its outcome once it has one.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CallBody<'a> {
    tool_call_id: &'a str,
    run_id: &'a str,
    tool_name: &'a str,
    /// `server` or `client`.
    source: &'static str,
    /// `PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED`, `TIMEOUT` or `CANCELED`.
    status: &'static str,
    #[schema(value_type = Object)]
    args: Json,
    #[schema(value_type = Option<Object>)]
    result: Option<Json>,
    error: Option<FaultBody>,
    /// Unix seconds.
    created_at: u64,
    /// Unix seconds.
    completed_at: Option<u64>,
    created_at_ms: u64,
    started_at_ms: Option<u64>,
    completed_at_ms: Option<u64>,
    /// When it ends as TIMEOUT.
    deadline_at_ms: u64,
    /// While PENDING: `queue`, `retry`, `parked`, `input` or `after`.
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<HoldBody<'a>>,
    /// The attempt under way, or the last one.
    attempt: u32,
    /// `builtin`, `client`, `utp`, `mcp`, `http`, or `caller`: whoever called it ran it itself.
    executor: &'static str,
    effect: &'static str,
    /// The tool that really ran: another than `tool_name` after a fallback.
    ran_tool: &'a str,
    agent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<&'a str>,
    /// Of an async tool: the ticket once more, as a task's.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    /// The client it is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<&'a str>,
    /// The client that took it.
    #[serde(skip_serializing_if = "Option::is_none")]
    taken_by: Option<&'a str>,
    /// It worked, but not all of it; left out otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    partial: bool,
    /// The trace it belongs to: the caller's, or its own where spans are exported.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    outcome: Option<OutcomeBody>,
}

/// Why a PENDING call waits.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct HoldBody<'a> {
    reason: &'static str,
    /// When its next attempt is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    until_ms: Option<u64>,
    /// The call that has to end before its turn comes.
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'a str>,
    /// What the tool wants to know, by key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    questions: Option<Map<String, Value>>,
}

/// How a call ended.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OutcomeBody {
    ok: bool,
    #[schema(value_type = Option<Object>)]
    data: Option<Json>,
    error: Option<FaultBody>,
    metrics: MetricsBody,
}

/// What it took.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MetricsBody {
    latency_ms: u64,
    retries: u32,
    queue_ms: u64,
    attempts: u32,
}

impl From<&Outcome> for OutcomeBody {
    fn from(outcome: &Outcome) -> Self {
        Self {
            ok: outcome.ok,
            data: outcome.data.clone(),
            error: outcome.error.as_ref().map(FaultBody::from),
            metrics: outcome.metrics.into(),
        }
    }
}

impl From<Metrics> for MetricsBody {
    fn from(metrics: Metrics) -> Self {
        let Metrics { latency_ms, queue_ms, attempts, retries } = metrics;
        Self { latency_ms, retries, queue_ms, attempts }
    }
}

impl<'a> From<&'a Call> for CallBody<'a> {
    fn from(call: &'a Call) -> Self {
        let outcome = call.outcome.as_ref();
        Self {
            tool_call_id: call.id.as_str(),
            run_id: &call.run_id,
            tool_name: &call.tool_name,
            source: call.target.executor.source(),
            status: call.status.as_str(),
            args: call.args.clone(),
            result: outcome.and_then(|outcome| outcome.data.clone()),
            error: outcome.and_then(|outcome| outcome.error.as_ref()).map(FaultBody::from),
            created_at: call.created_ms / 1_000,
            completed_at: call.completed_ms.map(|ms| ms / 1_000),
            created_at_ms: call.created_ms,
            started_at_ms: call.started_ms,
            completed_at_ms: call.completed_ms,
            deadline_at_ms: call.deadline_ms,
            hold: call.hold.map(|hold| HoldBody {
                reason: hold.as_str(),
                until_ms: match hold {
                    Hold::Retry { at_ms } => Some(at_ms),
                    _ => None,
                },
                after: match (hold, &call.asked.after) {
                    (Hold::After { .. }, Some(before)) => Some(before.as_str()),
                    _ => None,
                },
                questions: match (hold, &call.dialogue) {
                    (Hold::Input, Some(dialogue)) => Some(dialogue.open.clone()),
                    _ => None,
                },
            }),
            attempt: call.attempt,
            executor: call.target.executor.as_str(),
            effect: call.target.effect.as_str(),
            ran_tool: &call.target.tool,
            agent: &call.asked.agent,
            call_id: call.asked.call_id.as_deref(),
            task_id: call.asked.background.then_some(call.id.as_str()),
            client_id: call.asked.client_id.as_deref(),
            user_id: call.asked.user_id.as_deref(),
            taken_by: call.taken_by.as_deref(),
            partial: outcome.is_some_and(|outcome| outcome.partial),
            trace_id: None,
            outcome: outcome.map(OutcomeBody::from),
        }
    }
}

impl<'a> CallBody<'a> {
    /// The call as it is shown, with its trace.
    pub(super) fn of(engine: &Engine, call: &'a Call) -> Self {
        Self::traced(call, engine.trace_of(call))
    }

    /// The same with a trace that is known already.
    pub(super) fn traced(call: &'a Call, trace: Option<TraceParent>) -> Self {
        Self { trace_id: trace.map(|trace| trace.trace_id_text()), ..Self::from(call) }
    }
}

/// An event as the data of an SSE message.
pub(super) fn event_text(event: &Event) -> String {
    let mut body = Map::new();
    body.insert("number".into(), event.number.into());
    body.insert("type".into(), event.record.kind.as_str().into());
    body.insert("tool_call_id".into(), event.call_id.to_string().into());
    body.insert("run_id".into(), event.run_id.clone().into());
    if let Some(asked_as) = &event.asked_as {
        body.insert("call_id".into(), asked_as.clone().into());
    }
    body.insert("at_ms".into(), event.record.at_ms.into());
    body.insert("attempt".into(), event.record.attempt.into());
    let facts = event.record.data.iter();
    body.extend(facts.map(|(name, value)| (name.to_owned(), value.clone())));
    Value::Object(body).to_string()
}

/// The end of a task as the data of an SSE message.
#[derive(Serialize)]
struct TaskEndEvent<'a> {
    number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
    at_ms: u64,
    #[serde(flatten)]
    end: TaskEnd<'a>,
}

/// An event of a task as the data of an SSE message: each names its task in every way it is known
/// by, and the last one has the outcome.
pub(super) fn task_event_text(event: &Event, name: &str, call: &Call) -> String {
    let (number, at_ms) = (event.number, event.record.at_ms);
    if event.record.kind.is_terminal() {
        let end = TaskEnd::of(call, MAX_DATA_BYTES);
        let body = TaskEndEvent { number, kind: name, at_ms, end };
        return serde_json::to_string(&body).unwrap_or_default();
    }
    let mut body = Map::new();
    body.insert("number".into(), number.into());
    body.insert("type".into(), name.into());
    body.insert("at_ms".into(), at_ms.into());
    body.insert("task_id".into(), call.id.as_str().into());
    body.insert("tool_call_id".into(), call.id.as_str().into());
    body.insert("call_id".into(), call.asked.call_id.as_deref().into());
    body.insert("run_id".into(), call.run_id.as_str().into());
    body.insert("tool_name".into(), call.tool_name.as_str().into());
    let said = ["percent", "message", "data"].into_iter();
    body.extend(said.filter_map(|name| {
        event.record.data.get(name).map(|value| (name.to_owned(), value.clone()))
    }));
    Value::Object(body).to_string()
}

/// A time-out as somebody wrote it. A number that is out of any range becomes one that is out of
/// ours, so that it is refused as that and not as something that is no number.
pub(super) fn timeout_ms<'de, D>(deserializer: D) -> Result<Option<u64>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let Some(given) = Option::<serde_json::Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    if let Some(ms) = given.as_u64() {
        return Ok(Some(ms));
    }
    // Negative, larger than any number of milliseconds, or written with a decimal point.
    let ms = given.as_f64().unwrap_or(f64::MAX);
    if ms.fract() != 0.0 {
        let given = serde::de::Unexpected::Float(ms);
        return Err(serde::de::Error::invalid_value(given, &"a whole number of milliseconds"));
    }
    Ok(Some(ms as u64))
}

/// A failure as a provider reports it: a text, or an object with at least a message.
pub(super) fn reported_fault(error: Option<&Value>) -> Fault {
    let text = |name: &str| error.and_then(|e| e.get(name)).and_then(Value::as_str);
    let message = match error {
        None | Some(Value::Null) => "the tool failed and did not say why".to_owned(),
        Some(Value::String(message)) => message.clone(),
        Some(other) => text("message").map_or_else(|| other.to_string(), str::to_owned),
    };
    let message = message.chars().take(8_000).collect::<String>();
    let code = text("code").and_then(Code::parse).unwrap_or(Code::RuntimeError);
    let mut fault = Fault::new(code, message);
    if let Some(retryable) = error.and_then(|e| e.get("retryable")).and_then(Value::as_bool) {
        fault = fault.retryable(retryable);
    }
    // Only the provider can know that nothing was done; then even an irreversible tool may retry.
    if error.and_then(|e| e.get("happened")).and_then(Value::as_bool) == Some(false) {
        fault = fault.not_happened();
    }
    match error.and_then(|e| e.get("detail")).filter(|detail| !detail.is_null()) {
        Some(detail) => fault.with_detail(detail.clone()),
        None => fault,
    }
}
