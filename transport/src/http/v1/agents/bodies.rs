//! Schemas of turns and inboxes for the OpenAPI document. The crate `toolcrib_protocol` builds the
//! JSON itself, because NATS uses the same form.

use serde_json::Value;
use utoipa::ToSchema;

/// The items of an inbox, oldest first.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct InboxBody {
    items: Vec<InboxItemBody>,
}

/// An item of an agent's inbox.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct InboxItemBody {
    inbox_id: String,
    project_id: String,
    agent_id: String,
    /// `turn`, `tool_result`, `timeout` or `stop`.
    message_type: String,
    /// The model's id for the call; of another item, the turn or its epoch.
    correlation_id: Option<String>,
    #[schema(value_type = Object)]
    payload: Value,
    traceparent: Option<String>,
    tracestate: Option<String>,
    trace_id: Option<String>,
    parent_step_id: Option<String>,
    source_agent_id: Option<String>,
    recursion_depth: u32,
    /// RFC 3339.
    created_at: String,
}

/// The acknowledged items of an inbox.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct InboxAckedBody {
    ok: bool,
    /// Number of items that were removed.
    acked: u64,
}

/// A turn of an agent.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
#[schema(as = AgentTurnBody)]
pub(super) struct TurnSchema {
    project_id: String,
    agent_id: String,
    agent_turn_id: String,
    /// Number of the epoch; every resume begins a new one.
    turn_epoch: u64,
    status: String,
    channel_id: Option<String>,
    step_id: Option<String>,
    parent_step_id: Option<String>,
    traceparent: Option<String>,
    recursion_depth: u32,
    /// Unix milliseconds.
    lease_until_ms: Option<u64>,
    /// Unix milliseconds.
    resume_deadline_ms: Option<u64>,
    /// Number of the step's calls that have no result yet.
    waiting_tool_count: u64,
    /// The calls of the step, where the operation returns them; otherwise empty.
    calls: Vec<DispatchedCallBody>,
    /// Reason of the end.
    reason: Option<String>,
    deliverable_card_id: Option<String>,
    delegation: Option<DelegationBody>,
    created_at_ms: u64,
    updated_at_ms: u64,
}

/// A call of a step.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct DispatchedCallBody {
    /// The model's id for the call.
    tool_call_id: String,
    tool_name: String,
    /// The ticket; null if the call was refused before it was created.
    call_id: Option<String>,
    /// `received` or `waiting`.
    wait_status: String,
    tool_result_card_id: Option<String>,
}

/// The call that a turn works on.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct DelegationBody {
    call_id: String,
    parent_agent_id: Option<String>,
    parent_agent_turn_id: Option<String>,
    instruction_card_id: Option<String>,
    /// Unix milliseconds.
    deadline_at_ms: Option<u64>,
    budget: DelegationAmounts,
    usage: DelegationAmounts,
}

/// Numbers of calls and tokens.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct DelegationAmounts {
    calls: Option<u64>,
    tokens: Option<u64>,
}

/// A resumed turn with the results of its step.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct ResumedTurnBody {
    #[schema(inline)]
    #[serde(flatten)]
    turn: TurnSchema,
    results: Vec<StepResultBody>,
}

/// The result of a call of a step.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct StepResultBody {
    tool_call_id: String,
    tool_name: String,
    status: String,
    after_execution: String,
    tool_result_card_id: Option<String>,
    /// The result of the tool; absent or null if it failed.
    result: Option<Value>,
    #[schema(value_type = Option<Object>)]
    error: Option<Value>,
}
