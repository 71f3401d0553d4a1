//! Records that derive from a call: its trace ids, and its route, status, template variables and
//! cards in UTP. Pure.
//!
//! Nothing here is stored: the same call always gives the same records. The `tool.call` card of
//! every call, and the `tool.result` card of every call that no tool service executed, are such
//! records, so every call can be read as cards.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::domain::call::{Call, Status};
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::domain::tool::args::{ArgumentRules, TemplateVars};
use crate::domain::trace::{SpanIds, TraceParent};
use crate::domain::utp::card::{
    Card, TOOL_CALL, TOOL_RESULT, derived_id, error_as_result, error_json, into_map,
};
use crate::domain::utp::{
    AfterExecution, Binding, CONTROL_FIELD, DEFAULT_CHANNEL, Route, ToolStatus,
};

impl SpanIds {
    /// Returns the ids of this call's spans; the same call always has the same ids.
    pub fn for_call(call: &Call) -> Self {
        Self::new(&call.id, call.origin.traceparent.as_deref())
    }
}

/// Returns the `traceparent` of a call: that of its request, or a derived one.
pub fn call_traceparent(call: &Call) -> String {
    parse_or_derive_parent(call).to_string()
}

/// Returns the id of a call's trace.
pub fn trace_id_of(call: &Call) -> String {
    parse_or_derive_parent(call).trace_id_text()
}

fn parse_or_derive_parent(call: &Call) -> TraceParent {
    // Parses as strictly as the code that derives the spans; otherwise the two would be in
    // different traces.
    let requested = call.origin.traceparent.as_deref().and_then(|text| text.parse().ok());
    requested.unwrap_or_else(|| SpanIds::for_call(call).call(true))
}

impl Route {
    /// Returns the route of a call. A call outside any turn uses its run as the turn, with epoch 1.
    pub fn for_call(call: &Call) -> Self {
        if let Some(turn) = &call.origin.route {
            let mut route = turn.as_ref().clone();
            route.tool_call_id = id_for_target(&route.tool_call_id, call);
            return route;
        }
        let body = call.id.as_str().trim_start_matches(CallId::PREFIX);
        Self {
            agent_id: call.origin.agent.clone(),
            turn_id: call.run_id.clone(),
            epoch: 1,
            step_id: format!("step_{body}"),
            tool_call_id: id_for_target(call.id.as_str(), call),
            channel: DEFAULT_CHANNEL.to_owned(),
            parent_step_id: None,
            tracestate: None,
            context_box_id: None,
            depth: call.origin.depth,
            project: None,
            joined_by: None,
            is_detached: false,
        }
    }
}

/// Returns the call id for the current target. A tool service answers a known id from memory, so a
/// fallback needs a separate id.
fn id_for_target(id: &str, call: &Call) -> String {
    match call.target.tool == call.tool_name {
        true => id.to_owned(),
        false => format!("{id}-a{}", call.attempt - call.target_attempts.min(call.attempt) + 1),
    }
}

impl ToolStatus {
    /// Returns the status of an ended call; `None` while it is open. A call that its tool service
    /// canceled is FAILED with the code CANCELED, and `canceled` in UTP.
    pub fn from_call(call: &Call) -> Option<Self> {
        let partial = call.outcome.as_ref().is_some_and(|outcome| outcome.partial);
        let error = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
        let is_remote = matches!(call.target.executor, Executor::UTP | Executor::AGENT);
        let canceled_by_tool = is_remote && error.is_some_and(|fault| fault.code == Code::Canceled);
        match call.status {
            Status::Succeeded if partial => Some(Self::Partial),
            Status::Succeeded => Some(Self::Success),
            Status::Failed if canceled_by_tool => Some(Self::Canceled),
            Status::Failed => Some(Self::Failed),
            Status::Timeout => Some(Self::Timeout),
            Status::Canceled => Some(Self::Canceled),
            Status::Pending | Status::Running => None,
        }
    }
}

impl AfterExecution {
    /// Returns the effect of an ended call on the run or turn that made it; `None` while the call
    /// is open. The result's own control field takes precedence over the tool's definition. A call
    /// that ended before its first attempt has no result that could end anything.
    pub fn from_call(call: &Call) -> Option<Self> {
        let outcome = call.outcome.as_ref()?;
        if !outcome.ok && call.attempt == 0 {
            return Some(Self::Suspend);
        }
        let controlled = || control_of(outcome.data.as_ref()?, call.target.traits.mcp_results);
        Some(controlled().or(call.target.after_execution).unwrap_or_default())
    }
}

/// Returns the control field of a result. An MCP tool has it in its structured content.
fn control_of(data: &Json, mcp_result: bool) -> Option<AfterExecution> {
    // Nearly no result has the field, and parsing a large one is costly.
    if !data.text().contains(CONTROL_FIELD) {
        return None;
    }
    let result = data.to_value();
    let structured = result.get("structuredContent").filter(|_| mcp_result);
    AfterExecution::from_control(&result).or_else(|| AfterExecution::from_control(structured?))
}

impl TemplateVars {
    /// Returns the variables of a call.
    pub fn for_call(call: &Call) -> Self {
        let route = Route::for_call(call);
        let optional = [
            ("parent_step_id", route.parent_step_id),
            ("trace_id", Some(trace_id_of(call))),
            ("context_box_id", route.context_box_id),
        ];
        let mut vars = BTreeMap::from([
            ("project_id", route.project.unwrap_or_else(|| call.project.clone())),
            ("channel_id", route.channel),
            ("agent_id", route.agent_id),
            ("agent_turn_id", route.turn_id),
            ("step_id", route.step_id),
            ("tool_call_id", route.tool_call_id),
            ("turn_epoch", route.epoch.to_string()),
            ("recursion_depth", route.depth.to_string()),
        ]);
        vars.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?))));
        Self::new(vars)
    }
}

/// Returns the `tool.call` card of a call.
pub fn call_card(call: &Call, binding: Option<&Binding>) -> Card {
    let route = Route::for_call(call);
    let arguments = match call.target.args.to_value() {
        Value::Object(arguments) => Value::Object(arguments),
        other => json!({ "_raw": other }),
    };
    let content = json!({
        "__type__": "ToolCallContent",
        "tool_name": call.target.tool,
        "arguments": arguments,
        "status": "called",
        "target_subject": binding.and_then(|binding| binding.target_subject.as_deref()),
    });
    let mut metadata = lineage_metadata(call, &route);
    let rules =
        binding.and_then(|binding| ArgumentRules::from_options(&binding.options.to_value()));
    if let Some(rules) = rules.filter(|_| call.target.tool == call.tool_name) {
        metadata.extend(rules.audit_metadata(&call.args.to_value()));
    }
    Card {
        card_id: derived_id(&call.id, TOOL_CALL),
        project: call.project.clone(),
        kind: TOOL_CALL.to_owned(),
        content: into_map(content),
        created_ms: call.created_ms,
        author_id: call.origin.agent.clone(),
        metadata,
        tool_calls: None,
        tool_call_id: Some(route.tool_call_id),
        ttl_seconds: None,
    }
}

/// Returns the fault of a partial result: the parts that are missing.
fn partial_fault(result: &Value) -> Fault {
    let parts = result["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let missing: Vec<&Value> = parts.iter().filter(|part| part["status"] != "success").collect();
    let message = match parts.len() {
        0 => "the result is partial".to_owned(),
        all => format!("{} of {all} tasks did not succeed; see result.results", missing.len()),
    };
    let is_late = |part: &&&Value| part["status"] == "timeout";
    let code = match missing.iter().any(|part| is_late(&part)) {
        true => Code::Timeout,
        false => Code::RuntimeError,
    };
    Fault::new(code, message).retryable(false)
}

/// Returns the `tool.result` card of an ended call.
pub fn result_card(call: &Call, binding: Option<&Binding>) -> Option<Card> {
    let status = ToolStatus::from_call(call)?;
    let outcome = call.outcome.as_ref()?;
    let by_clock = call.status == Status::Timeout;
    let is_internal = call.target.executor == Executor::INTERNAL;
    let source = match (by_clock, call.target.traits.in_process || is_internal) {
        (true, _) => "watchdog",
        (false, true) => "worker",
        (false, false) => "tool",
    };
    let error = outcome.error.as_ref().map(|fault| error_json(fault, source));
    let (result, error) = match error {
        Some(error) => (error_as_result(&error), Some(error)),
        None => {
            let data = outcome.data.as_ref().map_or(Value::Null, |data| data.to_value());
            // Only a success has no error.
            let missing = outcome.partial.then(|| error_json(&partial_fault(&data), source));
            (data, missing)
        }
    };
    let declared = binding.map(|binding| binding.after_execution);
    let after = declared.or(call.target.after_execution).unwrap_or_default();
    let content = json!({
        "__type__": "ToolResultContent",
        "status": status.as_str(),
        "after_execution": after.as_str(),
        "result": result,
        "error": error,
    });
    let route = Route::for_call(call);
    let mut metadata = lineage_metadata(call, &route);
    metadata.insert("role".into(), "tool".into());
    metadata.insert("function_name".into(), call.target.tool.as_str().into());
    let author = match (by_clock, is_internal) {
        (true, _) => "worker.watchdog",
        (false, true) => "sys.pmo",
        (false, false) => "tool.crib",
    };
    Some(Card {
        card_id: derived_id(&call.id, TOOL_RESULT),
        project: call.project.clone(),
        kind: TOOL_RESULT.to_owned(),
        content: into_map(content),
        created_ms: call.completed_ms.unwrap_or(call.created_ms),
        author_id: call
            .acknowledged_by
            .clone()
            .filter(|_| !by_clock)
            .unwrap_or_else(|| author.into()),
        metadata,
        tool_calls: None,
        tool_call_id: Some(route.tool_call_id),
        ttl_seconds: None,
    })
}

/// Returns the lineage of a call; both of its cards carry it.
pub fn lineage_metadata(call: &Call, route: &Route) -> Map<String, Value> {
    into_map(json!({
        "agent_turn_id": route.turn_id,
        "step_id": route.step_id,
        "tool_call_id": route.tool_call_id,
        "trace_id": trace_id_of(call),
        "parent_step_id": route.parent_step_id,
    }))
}
