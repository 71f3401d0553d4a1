//! JSON bodies of HTTP v1, and their conversion from the engine's types. The names and casing of
//! existing fields are fixed: fields may be added, never renamed.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use toolcrib::domain::call::{Call, CallMetrics, Hold, Outcome};
use toolcrib::domain::event::CallEvent;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::json::Json;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::domain::tool::availability::ToolClient;
use toolcrib::domain::trace::TraceParent;
use toolcrib::domain::utp::AfterExecution;
use toolcrib::registry::CatalogEntry;
use toolcrib::{Caller, Engine};
use toolcrib_protocol::background_task::{MAX_DATA_BYTES, TaskOutcome};
use utoipa::ToSchema;

/// The error of a failed call or a refused request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(super) struct FaultBody {
    /// A code from the table in docs/errors.md.
    pub(super) code: String,
    pub(super) message: String,
    /// Structured details: problems with JSON pointers, nearest names, the current state.
    #[schema(value_type = Option<serde_json::Value>)]
    pub(super) detail: Option<Value>,
    /// True if the same request can succeed when repeated.
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
    /// True if calls of this tool are background tasks, whose results arrive later.
    #[serde(rename = "async")]
    background: bool,
    description: String,
    /// Executor of the tool: `builtin`, `client`, `utp`, `mcp`, `http`, `agent`, `internal`,
    /// `handoff` or, in the context of a run, `caller` (you execute it). A program that embeds the
    /// engine may have others.
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
    /// False if no executor can take a call now: it is accepted, and waits. Omitted if that is not
    /// known.
    #[serde(skip_serializing_if = "Option::is_none")]
    available: Option<bool>,
    /// Reason why no executor can accept a call now.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable_reason: Option<String>,
    /// The clients that offer the tool, for tools of clients.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    providers: Vec<ToolClientBody>,
}

/// A client that offers a tool.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ToolClientBody {
    client_id: String,
    /// True if the client is connected, or polls and did so recently.
    connected: bool,
    /// When the client was last connected, in Unix milliseconds; omitted if it has not connected
    /// since the server started.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_seen_ms: Option<u64>,
}

impl From<ToolClient> for ToolClientBody {
    fn from(client: ToolClient) -> Self {
        let ToolClient { client_id, is_connected, last_seen_ms } = client;
        Self { client_id, connected: is_connected, last_seen_ms }
    }
}

impl From<&ToolDefinition> for ToolBody {
    fn from(tool: &ToolDefinition) -> Self {
        Self::new(tool, tool.version())
    }
}

impl ToolBody {
    /// Builds the body of a registered tool, with its availability for the caller's project.
    pub(super) fn with_availability(
        engine: &Engine,
        caller: &Caller,
        entry: &CatalogEntry,
    ) -> Self {
        let availability = engine.calls().tool_availability(&caller.project, &entry.definition);
        Self {
            available: Some(availability.is_available()),
            unavailable_reason: availability.problem,
            providers: availability.clients.into_iter().map(ToolClientBody::from).collect(),
            risk: entry.risk.as_str().to_owned(),
            ..Self::new(&entry.definition, entry.version.clone())
        }
    }

    fn new(tool: &ToolDefinition, version: String) -> Self {
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
            available: None,
            unavailable_reason: None,
            providers: Vec::new(),
        }
    }
}

/// A call, with its outcome once it has ended.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CallBody<'a> {
    tool_call_id: &'a str,
    run_id: &'a str,
    tool_name: &'a str,
    /// `server` or `client`.
    source: &'static str,
    /// `PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED`, `TIMEOUT` or `CANCELED`.
    status: &'static str,
    #[schema(value_type = serde_json::Value)]
    args: Json,
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Json>,
    error: Option<FaultBody>,
    /// Unix seconds.
    created_at: u64,
    /// Unix seconds.
    completed_at: Option<u64>,
    created_at_ms: u64,
    started_at_ms: Option<u64>,
    completed_at_ms: Option<u64>,
    /// Time at which the call times out, in Unix milliseconds.
    deadline_at_ms: u64,
    /// Reason a PENDING call waits: `queue`, `retry`, `parked`, `input`, `after` or `approval`.
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<&'static str>,
    /// Details of the wait; omitted if `hold` says it all.
    #[serde(skip_serializing_if = "Option::is_none")]
    hold_details: Option<HoldDetails<'a>>,
    /// The approval that the call waits for, or that released it.
    #[serde(skip_serializing_if = "Option::is_none")]
    approval_id: Option<&'a str>,
    /// The call with other arguments that a person approved in place of this one, which takes over
    /// its outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    replaced_by: Option<&'a str>,
    /// The call that this one replaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    replaces: Option<&'a str>,
    /// Number of the current or last attempt.
    attempt: u32,
    /// Time limit of each attempt; null if each attempt that may still follow gets an equal part of
    /// the remaining time.
    attempt_timeout_ms: Option<u64>,
    /// When the attempt in flight ends, in Unix milliseconds; absent if that is the deadline.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt_deadline_at_ms: Option<u64>,
    /// Time that the call waits for answers to its tool's questions. It does not count against the
    /// deadline: while the call waits, `deadline_at_ms` is the end of that wait.
    input_timeout_ms: u64,
    /// `builtin`, `client`, `utp`, `mcp`, `http`, `agent`, `internal`, `handoff` or `caller` (the
    /// caller executed it). A program that embeds the engine may have others.
    executor: &'static str,
    effect: &'static str,
    /// The tool that ran. Differs from `tool_name` after a fallback.
    ran_tool: &'a str,
    agent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<&'a str>,
    /// For an async tool: the same id as `tool_call_id`, as the id of its task.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    /// The only client that may execute the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<&'a str>,
    /// The client that took the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    taken_by: Option<&'a str>,
    /// True if the call succeeded only in part; omitted otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    partial: bool,
    /// Once the call has ended, the effect of its result on the run or turn that made it: `suspend`
    /// (it continues) or `terminate` (it ends). The result's `__cg_control.after_execution` takes
    /// precedence over the tool's definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    after_execution: Option<&'static str>,
    /// The trace of the call: the caller's, or a new one if the server exports spans.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    /// True if the request joined this call, whose answer had not been delivered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    joined: bool,
    outcome: Option<OutcomeBody>,
}

/// Details of the wait of a PENDING call.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
pub(super) struct HoldDetails<'a> {
    /// Explanation of the wait: a client that is not connected, for example.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// When the next attempt is due, or the wait for a person ends, in Unix milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    until_ms: Option<u64>,
    /// The call that must end before this one starts, or that replaces it.
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'a str>,
    /// The tool's open questions, by key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    questions: Option<Map<String, Value>>,
    /// The request that answers the questions.
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_with: Option<String>,
    /// The request that decides about the approval in `approval_id` of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    decide_with: Option<&'static str>,
}

/// The outcome of a call.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OutcomeBody {
    ok: bool,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Json>,
    error: Option<FaultBody>,
    metrics: MetricsBody,
}

/// Durations and attempts of a call.
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

impl From<CallMetrics> for MetricsBody {
    fn from(metrics: CallMetrics) -> Self {
        let CallMetrics { latency_ms, queue_ms, attempts, retries } = metrics;
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
            hold: call.hold.map(Hold::as_str),
            hold_details: HoldDetails::new(call, None),
            approval_id: call.approval.as_ref().map(|approval| approval.id.as_str()),
            replaced_by: call.replaced_by().map(|id| id.as_str()),
            replaces: call.origin.replaces.as_ref().map(|id| id.as_str()),
            attempt: call.attempt,
            attempt_timeout_ms: call.attempt_timeout_ms,
            attempt_deadline_at_ms: call.attempt_deadline_ms,
            input_timeout_ms: call.input_timeout_ms,
            executor: call.target.executor.as_str(),
            effect: call.target.effect.as_str(),
            ran_tool: &call.target.tool,
            agent: &call.origin.agent,
            call_id: call.origin.caller_call_id.as_deref(),
            task_id: call.origin.background.then_some(call.id.as_str()),
            client_id: call.origin.client_id.as_deref(),
            user_id: call.origin.user_id.as_deref(),
            taken_by: call.acknowledged_by.as_deref(),
            partial: outcome.is_some_and(|outcome| outcome.partial),
            after_execution: AfterExecution::from_call(call).map(AfterExecution::as_str),
            trace_id: None,
            joined: false,
            outcome: outcome.map(OutcomeBody::from),
        }
    }
}

impl<'a> HoldDetails<'a> {
    /// Returns what is known about the wait of a call, with the engine's explanation; none if there
    /// is nothing to say, as for a call that waits for a free slot.
    fn new(call: &'a Call, message: Option<String>) -> Option<Self> {
        let hold = call.hold?;
        let details = Self {
            message,
            until_ms: match hold {
                Hold::Retry { at_ms } => Some(at_ms),
                Hold::Input { .. } | Hold::Approval { .. } => Some(call.deadline_ms),
                _ => None,
            },
            after: match (hold, call.awaited_call()) {
                (Hold::Predecessor { .. }, Some(before)) => Some(before.as_str()),
                _ => None,
            },
            questions: match (hold, &call.elicitation) {
                (Hold::Input { .. }, Some(dialogue)) => Some(dialogue.unanswered.clone()),
                _ => None,
            },
            answer_with: call
                .waits_for_input()
                .then(|| format!("POST /v1/tool_calls/{}/answer", call.id)),
            decide_with: call.pending_approval().map(|_| "POST /v1/approvals/decide"),
        };
        (details != Self::default()).then_some(details)
    }
}

impl<'a> CallBody<'a> {
    /// Builds the body of a call, with its trace.
    pub(super) fn new(engine: &Engine, call: &'a Call) -> Self {
        Self::with_trace(engine, call, engine.calls().call_traceparent(call))
    }

    /// Builds the body of a call whose trace is already known.
    pub(super) fn with_trace(engine: &Engine, call: &'a Call, trace: Option<TraceParent>) -> Self {
        let mut body = Self::from(call);
        body.trace_id = trace.map(|trace| trace.trace_id_text());
        body.hold_details = HoldDetails::new(call, engine.calls().describe_hold(call));
        body
    }

    /// Returns the body as the answer to a request that joined the call, or did not.
    pub(super) fn with_joined(self, joined: bool) -> Self {
        Self { joined, ..self }
    }
}

/// Serializes an event as the data of an SSE message.
pub(super) fn event_json(event: &CallEvent) -> String {
    let mut body = Map::new();
    body.insert("number".into(), event.number.into());
    body.insert("type".into(), event.record.kind.as_str().into());
    body.insert("tool_call_id".into(), event.call_id.to_string().into());
    body.insert("run_id".into(), event.run_id.clone().into());
    if let Some(caller_call_id) = &event.caller_call_id {
        body.insert("call_id".into(), caller_call_id.clone().into());
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
    end: TaskOutcome<'a>,
}

/// Serializes a task's event as the data of an SSE message. Each event carries every id of its
/// task, and the last one carries the outcome.
pub(super) fn task_event_json(event: &CallEvent, name: &str, call: &Call) -> String {
    let (number, at_ms) = (event.number, event.record.at_ms);
    if event.record.kind.is_terminal() {
        let end = TaskOutcome::from_call(call, MAX_DATA_BYTES);
        let body = TaskEndEvent { number, kind: name, at_ms, end };
        return serde_json::to_string(&body).unwrap_or_default();
    }
    let mut body = Map::new();
    body.insert("number".into(), number.into());
    body.insert("type".into(), name.into());
    body.insert("at_ms".into(), at_ms.into());
    body.insert("task_id".into(), call.id.as_str().into());
    body.insert("tool_call_id".into(), call.id.as_str().into());
    body.insert("call_id".into(), call.origin.caller_call_id.as_deref().into());
    body.insert("run_id".into(), call.run_id.as_str().into());
    body.insert("tool_name".into(), call.tool_name.as_str().into());
    let names = ["percent", "message", "data"].into_iter();
    body.extend(names.filter_map(|name| {
        event.record.data.get(name).map(|value| (name.to_owned(), value.clone()))
    }));
    Value::Object(body).to_string()
}

/// Deserializes a timeout. A number outside the range of `u64` is clamped to one outside the
/// permitted range, so that it is refused as out of range and not as something that is not a
/// number.
pub(super) fn timeout_ms<'de, D>(deserializer: D) -> Result<Option<u64>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let Some(number) = Option::<serde_json::Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    if let Some(ms) = number.as_u64() {
        return Ok(Some(ms));
    }
    // Negative, larger than `u64::MAX`, or written with a decimal point.
    let ms = number.as_f64().unwrap_or(f64::MAX);
    if ms.fract() != 0.0 {
        let unexpected = serde::de::Unexpected::Float(ms);
        return Err(serde::de::Error::invalid_value(unexpected, &"a whole number of milliseconds"));
    }
    Ok(Some(ms as u64))
}

/// Parses a failure as a provider reports it: a text, or an object with at least a message.
pub(super) fn parse_reported_fault(error: Option<&Value>) -> Fault {
    let text = |name: &str| error.and_then(|e| e.get(name)).and_then(Value::as_str);
    let message = match error {
        None | Some(Value::Null) => "the tool failed and gave no reason".to_owned(),
        Some(Value::String(message)) => message.clone(),
        Some(other) => text("message").map_or_else(|| other.to_string(), str::to_owned),
    };
    let message = message.chars().take(8_000).collect::<String>();
    let code = text("code").and_then(Code::parse).unwrap_or(Code::RuntimeError);
    let mut fault = Fault::new(code, message);
    if let Some(retryable) = error.and_then(|e| e.get("retryable")).and_then(Value::as_bool) {
        fault = fault.retryable(retryable);
    }
    // Only the provider can know that no side effect occurred; then even an irreversible tool may
    // be retried.
    if error.and_then(|e| e.get("happened")).and_then(Value::as_bool) == Some(false) {
        fault = fault.without_side_effect();
    }
    match error.and_then(|e| e.get("detail")).filter(|detail| !detail.is_null()) {
        Some(detail) => fault.with_detail(detail.clone()),
        None => fault,
    }
}
