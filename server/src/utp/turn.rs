//! Turns as agents write and read them, over HTTP and NATS alike.

use serde::Deserialize;
use serde_json::{Value, json};
use toolcrib::engine::{Dispatch, Lease, Resumed, StepCall};
use toolcrib::utp::{Turn, Waiting};
use utoipa::ToSchema;

/// A turn that an agent wants to lease.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(default)]
pub struct LeaseBody {
    /// Made up unless given; one whose lease ran out is taken over.
    agent_turn_id: Option<String>,
    /// `public` unless given.
    channel_id: Option<String>,
    /// How long the lease holds without being renewed; 300000 unless said.
    lease_ms: Option<u64>,
    /// The parent agent's step that began this turn.
    parent_step_id: Option<String>,
    context_box_id: Option<String>,
    /// How deep agents called agents; below 20.
    recursion_depth: u32,
    traceparent: Option<String>,
    tracestate: Option<String>,
}

impl LeaseBody {
    /// As the engine takes it.
    pub fn lease(self) -> Lease {
        Lease {
            turn_id: self.agent_turn_id,
            channel: self.channel_id,
            lease_ms: self.lease_ms,
            traceparent: self.traceparent,
            tracestate: self.tracestate,
            parent_step_id: self.parent_step_id,
            context_box_id: self.context_box_id,
            depth: self.recursion_depth,
        }
    }
}

/// The calls of a step.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct DispatchBody {
    turn_epoch: u64,
    /// Made up unless given; with it, the same request again gives the same calls.
    step_id: Option<String>,
    calls: Vec<StepCallBody>,
    /// Whether the turn is suspended by this; true unless said.
    suspend: Option<bool>,
}

/// One call of a step.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct StepCallBody {
    /// Unique in its turn: as the model gave it.
    tool_call_id: String,
    tool_name: String,
    /// An object, or the text of one.
    #[serde(default)]
    #[schema(value_type = Object)]
    arguments: Value,
    /// How long this call may take; the tool's own unless said.
    timeout_ms: Option<u64>,
}

impl DispatchBody {
    /// As the engine takes it.
    pub fn dispatch(self) -> Dispatch {
        let calls = self.calls.into_iter().map(|call| StepCall {
            tool_call_id: call.tool_call_id,
            tool_name: call.tool_name,
            arguments: call.arguments,
            timeout_ms: call.timeout_ms,
        });
        Dispatch {
            epoch: self.turn_epoch,
            step_id: self.step_id,
            calls: calls.collect(),
            suspend: self.suspend.unwrap_or(true),
        }
    }
}

/// Why a turn ends, as much of it as is kept and published.
pub fn reason(given: &str) -> String {
    given.chars().take(500).collect()
}

/// A turn as it is shown.
pub fn turn_body(turn: &Turn, calls: &[Waiting]) -> Value {
    let shown: Vec<Value> = calls
        .iter()
        .map(|call| {
            json!({
                "tool_call_id": call.tool_call_id,
                "tool_name": call.tool_name,
                "call_id": call.call_id,
                "wait_status": if call.inbox_id.is_some() { "received" } else { "waiting" },
                "tool_result_card_id": call.result_card_id,
            })
        })
        .collect();
    let waiting = calls.iter().filter(|call| call.inbox_id.is_none());
    json!({
        "project_id": turn.project,
        "agent_id": turn.agent_id,
        "agent_turn_id": turn.turn_id,
        "turn_epoch": turn.epoch,
        "status": turn.status.as_str(),
        "channel_id": turn.channel,
        "step_id": turn.step_id,
        "parent_step_id": turn.parent_step_id,
        "traceparent": turn.traceparent,
        "recursion_depth": turn.depth,
        "lease_until_ms": turn.lease_until_ms,
        "resume_deadline_ms": turn.resume_deadline_ms,
        "waiting_tool_count": waiting.count(),
        "calls": shown,
        "reason": turn.reason,
        "created_at_ms": turn.created_ms,
        "updated_at_ms": turn.updated_ms,
    })
}

/// A turn with the results it goes on with.
pub fn resumed_body(resumed: &Resumed) -> Value {
    let mut body = turn_body(&resumed.turn, &[]);
    let results = resumed.results.iter().map(|result| {
        json!({
            "tool_call_id": result.tool_call_id,
            "tool_name": result.tool_name,
            "status": result.status,
            "after_execution": result.after_execution.as_str(),
            "tool_result_card_id": result.card_id,
            "result": result.result,
            "error": result.error,
        })
    });
    body["results"] = results.collect();
    body
}
