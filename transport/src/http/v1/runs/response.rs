//! Response bodies of runs: the summary in lists, and the detail.

use serde::Serialize;
use serde_json::Value;
use toolcrib::calls::CallQuery;
use toolcrib::domain::fault::{Error, Fault};
use toolcrib::domain::model_reply::TokenUsage;
use toolcrib::domain::run::progress::TerminatingCall;
use toolcrib::domain::run::{JournalEntry, JournalKind, Run};
use toolcrib::{Call, Caller, Engine};
use utoipa::ToSchema;

use super::super::super::wire::FaultBody;

/// Maximum number of a run's newest calls in its detail.
const MAX_LISTED_CALLS: usize = 200;

/// A run, without its steps.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunSummary {
    run_id: String,
    /// `RUNNING`, `WAITING` (only late results are outstanding), `SUCCEEDED`, `FAILED` or
    /// `CANCELED`.
    status: &'static str,
    model: String,
    agent: String,
    /// The agent that continues the run after a handoff.
    #[serde(skip_serializing_if = "Option::is_none")]
    active_agent: Option<String>,
    /// The agent whose call started the run, as `agent_id` of `/v1/agents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_id: Option<String>,
    /// The run that called this agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_run_id: Option<String>,
    /// The call whose outcome the end of the run is.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
    /// The final answer. A failed run has one if all its tool calls failed and the model answered.
    answer: Option<String>,
    /// The limit that made Toolcrib request the final answer: `steps`, `calls`, `tokens`, `time`,
    /// `repeats` or `failures`.
    limit_reached: Option<&'static str>,
    /// The card with the answer, once the run has ended with one: the result that terminated the
    /// run, or the model's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    deliverable_card_id: Option<String>,
    /// The call whose result terminated the run, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    terminated_by: Option<TerminatingCallBody>,
    error: Option<FaultBody>,
    step_count: u32,
    call_count: u32,
    failed_call_count: u32,
    usage: UsageBody,
    /// Calls whose results are outstanding.
    waiting_for: Vec<PendingCallBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    /// Unix seconds.
    created_at: u64,
    /// Unix seconds.
    completed_at: Option<u64>,
    created_at_ms: u64,
    updated_at_ms: u64,
    completed_at_ms: Option<u64>,
}

/// Tokens that a run has used.
#[derive(Serialize, ToSchema)]
pub(crate) struct UsageBody {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
}

impl From<TokenUsage> for UsageBody {
    fn from(usage: TokenUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        }
    }
}

/// A call whose result terminated a run.
#[derive(Serialize, ToSchema)]
pub(crate) struct TerminatingCallBody {
    tool_call_id: String,
    name: String,
    /// The typed fields that the tool `run.finish` set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    result_fields: Option<Value>,
}

impl From<&TerminatingCall> for TerminatingCallBody {
    fn from(call: &TerminatingCall) -> Self {
        Self {
            tool_call_id: call.tool_call_id.to_string(),
            name: call.name.clone(),
            result_fields: call.result_fields.clone(),
        }
    }
}

/// A call whose result is outstanding.
#[derive(Serialize, ToSchema)]
#[schema(as = WaitingBody)]
pub(crate) struct PendingCallBody {
    tool_call_id: String,
    call_id: String,
    name: String,
}

/// A run, with its steps, calls and messages.
#[derive(Serialize, ToSchema)]
#[schema(as = RunAnswer)]
pub(crate) struct RunDetailBody {
    #[serde(flatten)]
    summary: RunSummary,
    steps: Vec<StepBody>,
    /// The newest 200 calls, without arguments and results.
    calls: Vec<RunCallBody>,
    /// True if there are older calls; `GET /v1/tool_calls?run_id=…` lists all of them.
    calls_truncated: bool,
    /// The conversation, in OpenAI's chat format.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    #[schema(value_type = Object)]
    limits: Value,
    tools: Option<Vec<String>>,
    /// Tool definitions that the model receives, if the run sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned_tools: Option<Vec<String>>,
    /// True if the request joined this run, whose answer had not been delivered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) joined: bool,
}

/// One response of the model, and the results of its calls.
#[derive(Serialize, ToSchema)]
pub(crate) struct StepBody {
    step: u64,
    at_ms: u64,
    text: String,
    usage: UsageBody,
    /// Id, name and arguments of each call, as the model wrote them.
    #[schema(value_type = Vec<Object>)]
    calls: Value,
    /// Result of each call: `call_id`, `tool_call_id`, `name`, `status`, `ok`, `digested`, `error`,
    /// and `after_execution` once it has ended.
    #[schema(value_type = Vec<Object>)]
    results: Value,
}

/// A call of a run.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunCallBody {
    tool_call_id: String,
    call_id: Option<String>,
    tool_name: String,
    status: &'static str,
    created_at_ms: u64,
    completed_at_ms: Option<u64>,
    latency_ms: Option<u64>,
    attempts: u32,
}

impl From<&Call> for RunCallBody {
    fn from(call: &Call) -> Self {
        Self {
            tool_call_id: call.id.to_string(),
            call_id: call.origin.caller_call_id.clone(),
            tool_name: call.tool_name.clone(),
            status: call.status.as_str(),
            created_at_ms: call.created_ms,
            completed_at_ms: call.completed_ms,
            latency_ms: call.outcome.as_ref().map(|outcome| outcome.metrics.latency_ms),
            attempts: call.attempt,
        }
    }
}

pub(crate) fn to_summary(run: &Run) -> RunSummary {
    let progress = &run.progress;
    let lineage = run.lineage.as_deref();
    let waiting = progress.pending_calls.iter().map(|call| PendingCallBody {
        tool_call_id: call.tool_call_id.to_string(),
        call_id: call.call_id.clone(),
        name: call.name.clone(),
    });
    RunSummary {
        run_id: run.id.clone(),
        status: run.status.as_str(),
        model: run.model.clone(),
        agent: run.owner.agent.clone(),
        active_agent: run.active_agent_id().map(str::to_owned),
        agent_id: lineage.map(|lineage| lineage.agent_id.clone()),
        parent_run_id: lineage.and_then(|lineage| lineage.parent_run_id.clone()),
        tool_call_id: lineage.map(|lineage| lineage.call_id.to_string()),
        answer: run.answer.as_ref().map(|answer| answer.text.clone()),
        limit_reached: run.answer.as_ref().and_then(|answer| Some(answer.stop_reason?.as_str())),
        deliverable_card_id: run.deliverable_card_id.clone(),
        terminated_by: run
            .answer
            .as_ref()
            .and_then(|answer| answer.terminated_by.as_ref())
            .map(TerminatingCallBody::from),
        error: run.error.clone().map(|error| FaultBody::from(&Fault::from(error))),
        step_count: progress.steps,
        call_count: progress.calls,
        failed_call_count: progress.failed_calls,
        usage: progress.usage.into(),
        waiting_for: if run.status.is_terminal() { Vec::new() } else { waiting.collect() },
        user_id: run.options.user_id.clone(),
        created_at: run.created_ms / 1_000,
        completed_at: run.ended_ms.map(|ms| ms / 1_000),
        created_at_ms: run.created_ms,
        updated_at_ms: run.updated_ms,
        completed_at_ms: run.ended_ms,
    }
}

pub(crate) async fn run_detail(
    engine: &Engine,
    caller: &Caller,
    run: &Run,
) -> Result<RunDetailBody, Error> {
    let mut journal = engine.runs().streams().journal(caller, &run.id).await?;
    let query =
        CallQuery { run_id: Some(run.id.clone()), limit: MAX_LISTED_CALLS, ..CallQuery::default() };
    let page = engine.calls().calls(caller, query).await?;
    let steps = journal_steps(&journal);
    let messages = journal.iter_mut().flat_map(|entry| std::mem::take(&mut entry.record.messages));
    Ok(RunDetailBody {
        summary: to_summary(run),
        steps,
        calls: page.calls.iter().rev().map(RunCallBody::from).collect(),
        calls_truncated: page.next_before.is_some(),
        messages: messages.collect(),
        limits: serde_json::to_value(&run.options.limits).unwrap_or_default(),
        tools: run.options.tools.clone(),
        tool_mode: run.options.tool_mode.map(|mode| mode.as_str()),
        pinned_tools: run.options.pinned_tools.clone(),
        joined: false,
    })
}

fn journal_steps(journal: &[JournalEntry]) -> Vec<StepBody> {
    let mut steps: Vec<StepBody> = Vec::new();
    let list = |value: &Value| if value.is_array() { value.clone() } else { Value::Array(vec![]) };
    for entry in journal {
        let data = &entry.record.data;
        match entry.record.kind {
            JournalKind::Replied => {
                let usage: TokenUsage =
                    serde_json::from_value(data["usage"].clone()).unwrap_or_default();
                steps.push(StepBody {
                    step: data["step"].as_u64().unwrap_or_default(),
                    at_ms: entry.record.at_ms,
                    text: data["text"].as_str().unwrap_or_default().to_owned(),
                    usage: usage.into(),
                    calls: list(&data["calls"]),
                    results: list(&Value::Null),
                });
            }
            JournalKind::ToolResults => {
                if let Some(last) = steps.last_mut() {
                    last.results = list(&data["calls"]);
                }
            }
            _ => {}
        }
    }
    steps
}
