//! Step calls that are refused before a call exists.

use serde_json::{Map, Value, json};

use super::dispatch::{SentCall, StepCallRequest, build_step_call};
use crate::domain::access_rules::pattern_matches;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::utp::card::{self, Card, TOOL_CALL, TOOL_RESULT, into_map};
use crate::domain::utp::{AfterExecution, InboxItem, Route, Turn, trace};
use crate::engine::{Core, from_store_error};
use crate::utp::inbox::derive_inbox_id;

/// Returns the id of a card that belongs to a refused call.
pub(super) fn failed_card_id(
    project: &str,
    turn_id: &str,
    tool_call_id: &str,
    end: &str,
) -> String {
    let inbox_id = derive_inbox_id(project, turn_id, tool_call_id);
    format!("{end}{}", inbox_id.trim_start_matches("inbox_"))
}

impl Core {
    /// Returns the fault if the roster or the protocol forbids the call. Checked before the call is
    /// invoked.
    pub(super) fn find_step_call_fault(
        &self,
        agent: &Caller,
        call: &StepCallRequest,
        inbox_open: bool,
    ) -> Option<Fault> {
        let tool = &call.tool_name;
        let Some(member) = self.find_agent_entry(&agent.project, &agent.agent) else {
            let message = format!("agent \"{}\" is not on the roster any more", agent.agent);
            return Some(Fault::new(Code::PermissionDenied, message).without_side_effect());
        };
        let allowed = member.allowed_tools;
        if allowed.is_some_and(|list| !list.iter().any(|pattern| pattern_matches(pattern, tool))) {
            let message = format!("{tool} is not among the agent's allowed tools");
            return Some(Fault::new(Code::PermissionDenied, message).without_side_effect());
        }
        let found = self.catalog().find(&agent.project, tool);
        let ends = found.and_then(|entry| entry.definition.binding.clone());
        if inbox_open && ends.is_some_and(|utp| utp.after_execution == AfterExecution::Terminate) {
            let message = "inbox_not_empty: take what waits in the inbox before the turn ends";
            return Some(Fault::new(Code::Conflict, message).without_side_effect());
        }
        None
    }

    /// Records a refused call: stores its cards and builds its inbox item.
    pub(super) async fn record_failed_call(
        &self,
        turn: &Turn,
        route: &Route,
        call: &StepCallRequest,
        args: &Value,
        fault: &Fault,
    ) -> Result<SentCall, Error> {
        let now_ms = self.clock.now_ms();
        let inbox_id = derive_inbox_id(&turn.project, &route.turn_id, &route.tool_call_id);
        let error = card::error_json(fault, "worker");
        let trace_id = turn.traceparent.as_deref().and_then(trace::parse).map(|(id, _)| id);
        let mut metadata = into_map(json!({
            "agent_turn_id": route.turn_id,
            "step_id": route.step_id,
            "tool_call_id": route.tool_call_id,
            "trace_id": trace_id,
            "parent_step_id": route.parent_step_id,
        }));
        let make = |kind: &str, end: &str, content: Value, metadata: &Map<String, Value>| Card {
            card_id: failed_card_id(&turn.project, &route.turn_id, &route.tool_call_id, end),
            project: turn.project.clone(),
            kind: kind.to_owned(),
            content: into_map(content),
            created_ms: now_ms,
            author_id: turn.agent_id.clone(),
            metadata: metadata.clone(),
            tool_calls: None,
            tool_call_id: Some(route.tool_call_id.clone()),
            ttl_seconds: None,
        };
        let asked = json!({
            "__type__": "ToolCallContent", "tool_name": call.tool_name, "arguments": args,
            "status": "called", "target_subject": null,
        });
        let asked = make(TOOL_CALL, "call", asked, &metadata);
        metadata.insert("role".into(), "tool".into());
        metadata.insert("function_name".into(), call.tool_name.as_str().into());
        let result = json!({
            "__type__": "ToolResultContent", "status": "failed", "after_execution": "suspend",
            "result": card::error_as_result(&error), "error": error,
        });
        let result = make(TOOL_RESULT, "result", result, &metadata);
        let card_id = result.card_id.clone();
        for card in [asked, result] {
            self.store.utp().put_card(card).await.map_err(from_store_error)?;
        }
        let mut waiting = build_step_call(turn, route, call, None);
        waiting.result_card_id = Some(card_id.clone());
        waiting.inbox_id = Some(inbox_id.clone());
        let parent = turn.traceparent.clone().unwrap_or_default();
        let inbox = InboxItem {
            project: turn.project.clone(),
            agent_id: turn.agent_id.clone(),
            message_type: "tool_result".to_owned(),
            turn_id: route.turn_id.clone(),
            tool_call_id: route.tool_call_id.clone(),
            payload: into_map(json!({
                "tool_call_id": route.tool_call_id, "agent_turn_id": route.turn_id,
                "turn_epoch": route.epoch, "agent_id": route.agent_id,
                "after_execution": "suspend", "status": "failed",
                "tool_result_card_id": card_id, "step_id": route.step_id,
            })),
            traceparent: trace::child_traceparent(&parent, &inbox_id),
            tracestate: route.tracestate.clone(),
            parent_step_id: Some(route.step_id.clone()),
            source_agent_id: Some(turn.agent_id.clone()),
            depth: route.depth,
            created_ms: now_ms,
            inbox_id,
        };
        Ok(SentCall { step_call: waiting, deadline_ms: now_ms, inbox_item: Some(inbox) })
    }
}
