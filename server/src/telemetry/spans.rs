//! Converts calls to spans and metrics that follow OpenTelemetry's conventions for generative AI.
//!
//! A span is built when its call or attempt has ended, from the stored times; so it is the same for
//! a call that outlived its request or the process. A span does not include arguments, results or
//! the messages of faults, which may quote them: only sizes and codes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use toolcrib::domain::call::Call;
use toolcrib::domain::fault::Code;
use toolcrib::domain::trace::TraceParent;
use toolcrib::ports::observer::{EndedAttempt, EndedCall};
use toolcrib::{Executor, Json};

/// The version of the conventions used here; all of them are still in development.
const SCHEMA: &str = "https://opentelemetry.io/schemas/gen-ai/1.42.0";

/// Maximum size of captured arguments and results.
const MAX_CONTENT_BYTES: usize = 32 << 10;

/// Returns the instrumentation scope of Toolcrib.
pub(super) fn instrumentation_scope() -> InstrumentationScope {
    static SCOPE: LazyLock<InstrumentationScope> = LazyLock::new(|| {
        InstrumentationScope::builder("toolcrib")
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(SCHEMA)
            .build()
    });
    SCOPE.clone()
}

/// Attributes of a recent measurement on this thread. Every call needs attributes and few are new,
/// so each thread caches them.
struct RecentMetricAttributes {
    tool_name: String,
    agent: String,
    executor: Executor,
    error: Option<Code>,
    attributes: Vec<KeyValue>,
}

/// Maximum number of cached attribute sets per thread.
const MAX_RECENT: usize = 16;

impl RecentMetricAttributes {
    /// Builds the attributes from agent and tool, never from ids: a metric needs low cardinality.
    fn new(call: &Call, error: Option<Code>) -> Self {
        let (tool_name, agent) = (call.tool_name.clone(), call.origin.agent.clone());
        let executor = call.target.executor;
        let mut attributes = vec![
            KeyValue::new("gen_ai.tool.name", tool_name.clone()),
            KeyValue::new("gen_ai.tool.type", tool_type(executor)),
            KeyValue::new("gen_ai.agent.name", agent.clone()),
        ];
        attributes.extend(error.map(|code| KeyValue::new("error.type", code.as_str())));
        Self { tool_name, agent, executor, error, attributes }
    }

    fn matches(&self, call: &Call, error: Option<Code>) -> bool {
        (self.executor, self.error) == (call.target.executor, error)
            && self.tool_name == call.tool_name
            && self.agent == call.origin.agent
    }
}

/// Records a measurement with the attributes of a call.
pub(super) fn record_with_attributes(
    call: &Call,
    error: Option<Code>,
    record: impl FnOnce(&[KeyValue]),
) {
    thread_local! {
        static RECENT: RefCell<VecDeque<RecentMetricAttributes>> =
            const { RefCell::new(VecDeque::new()) };
    }
    RECENT.with_borrow_mut(|lately| {
        if let Some(cached) = lately.iter().find(|cached| cached.matches(call, error)) {
            return record(&cached.attributes);
        }
        let new = RecentMetricAttributes::new(call, error);
        record(&new.attributes);
        lately.truncate(MAX_RECENT - 1);
        lately.push_front(new);
    });
}

/// Returns the tool type of the conventions: `function` for tools executed by a client, `extension`
/// for those of every other executor.
fn tool_type(executor: Executor) -> &'static str {
    match executor {
        Executor::CLIENT => "function",
        _ => "extension",
    }
}

/// Builds the span of a call, from its acceptance to its outcome.
pub(super) fn call_span(ended: &EndedCall<'_>) -> SpanData {
    let (ids, call) = (&ended.ids, ended.call);
    let outcome = call.outcome.as_ref();
    let error = outcome.and_then(|outcome| outcome.error.as_ref()).map(|fault| fault.code);
    let metrics = outcome.map(|outcome| outcome.metrics).unwrap_or_default();
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", "execute_tool"),
        KeyValue::new("gen_ai.tool.name", call.tool_name.clone()),
        KeyValue::new("gen_ai.tool.call.id", call.id.to_string()),
        KeyValue::new("gen_ai.tool.type", tool_type(call.target.executor)),
        KeyValue::new("gen_ai.agent.name", call.origin.agent.clone()),
        KeyValue::new("gen_ai.agent.id", call.origin.agent.clone()),
        KeyValue::new("gen_ai.conversation.id", call.run_id.clone()),
        KeyValue::new("toolcrib.project", call.project.clone()),
        KeyValue::new("toolcrib.source", call.target.executor.as_str()),
        KeyValue::new("toolcrib.call.status", call.status.as_str()),
        KeyValue::new("toolcrib.call.attempt", i64::from(call.attempt)),
        KeyValue::new("toolcrib.call.queue_ms", saturating_i64(metrics.queue_ms)),
        KeyValue::new("toolcrib.call.args_bytes", byte_len(&call.args)),
    ];
    let optional = [
        ("gen_ai.tool.description", (ended.description)().filter(|text| !text.is_empty())),
        ("toolcrib.call.asked_as", call.origin.caller_call_id.clone()),
        ("toolcrib.client.id", call.acknowledged_by.clone()),
        ("toolcrib.ran_tool", Some(&call.target.tool).filter(|t| **t != call.tool_name).cloned()),
        ("error.type", error.map(|code| code.as_str().to_owned())),
    ];
    attributes
        .extend(optional.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value?))));
    let result = outcome.and_then(|outcome| outcome.data.as_ref());
    attributes.extend(result.map(|r| KeyValue::new("toolcrib.call.result_bytes", byte_len(r))));
    let times = (call.created_ms, call.completed_ms.unwrap_or(call.created_ms));
    let name = format!("execute_tool {}", call.tool_name);
    SpanData {
        parent_span_id: ids.parent.map_or(SpanId::INVALID, |p| SpanId::from_bytes(p.span_id)),
        parent_span_is_remote: ids.parent.is_some(),
        attributes,
        status: span_status(error),
        ..base_span(ids.call(true), name, SpanKind::Internal, times)
    }
}

/// Builds the span of one attempt, from its dispatch to the executor until its end.
pub(super) fn attempt_span(attempted: &EndedAttempt<'_>) -> SpanData {
    let (ids, call) = (&attempted.ids, attempted.call);
    let mut attributes = vec![
        KeyValue::new("gen_ai.tool.name", call.target.tool.clone()),
        KeyValue::new("gen_ai.tool.call.id", call.id.to_string()),
        KeyValue::new("toolcrib.source", call.target.executor.as_str()),
        KeyValue::new("toolcrib.call.attempt", i64::from(call.attempt)),
    ];
    let client_id = attempted.taken_by.map(str::to_owned);
    attributes.extend(client_id.map(|client| KeyValue::new("toolcrib.client.id", client)));
    let error = attempted.failed;
    attributes.extend(error.map(|code| KeyValue::new("error.type", code.as_str())));
    let began_ms = call.attempt_dispatched_ms.or(call.started_ms).unwrap_or(call.created_ms);
    // A remote executor continues the trace below a client span.
    let is_builtin = call.target.traits.in_process;
    let kind = if is_builtin { SpanKind::Internal } else { SpanKind::Client };
    let name = format!("attempt {}", call.target.tool);
    SpanData {
        parent_span_id: SpanId::from_bytes(ids.call(true).span_id),
        attributes,
        status: span_status(error),
        ..base_span(ids.attempt(call.attempt, true), name, kind, (began_ms, attempted.ended_ms))
    }
}

fn base_span(context: TraceParent, name: String, kind: SpanKind, times: (u64, u64)) -> SpanData {
    let (trace_id, span_id) =
        (TraceId::from_bytes(context.trace_id), SpanId::from_bytes(context.span_id));
    let flags = TraceFlags::SAMPLED;
    SpanData {
        span_context: SpanContext::new(trace_id, span_id, flags, false, TraceState::NONE),
        parent_span_id: SpanId::INVALID,
        parent_span_is_remote: false,
        span_kind: kind,
        name: name.into(),
        start_time: system_time(times.0),
        end_time: system_time(times.1.max(times.0)),
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: instrumentation_scope(),
    }
}

fn span_status(error: Option<Code>) -> Status {
    error.map_or(Status::Unset, |code| Status::error(code.title()))
}

fn system_time(ms: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(ms)
}

fn byte_len(json: &Json) -> i64 {
    json.text().len() as i64
}

fn saturating_i64(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// Truncates content to the size that a span may carry.
pub(super) fn truncate_content(json: &Json) -> String {
    let text = json.text();
    let mut end = text.len().min(MAX_CONTENT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
