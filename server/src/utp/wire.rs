//! The forms of UTP's wire: headers, commands, cards, answers.

use async_nats::HeaderMap;
use serde_json::{Map, Value, json};
use toolcrib::engine::Ingested;
use toolcrib::fault::{Error, Fault};
use toolcrib::source::{Attempt, Command};
use toolcrib::utp::{Card, InboxItem, trace};

/// The headers that every command and event has.
pub fn headers(version: &str, kind: &str, traceparent: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", traceparent);
    headers.insert("CG-Timestamp", now_ms().to_string().as_str());
    headers.insert("CG-Version", version);
    headers.insert("CG-Msg-Type", kind);
    headers.insert("CG-Sender", "toolcrib");
    headers
}

/// Unix milliseconds.
pub fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// The subject, headers and payload of a command; or why there can be none.
pub fn command(
    version: &str,
    attempt: &Attempt,
    command: &Command,
) -> Result<(String, HeaderMap, Value), String> {
    let Command { route, binding, card_id, traceparent } = command;
    let subject = toolcrib::utp::subject::fill(
        &binding.target_subject,
        version,
        &attempt.project,
        &route.channel,
        &route.agent_id,
    )?;
    let mut headers = headers(version, "ToolCommand", traceparent);
    headers.insert("CG-Recursion-Depth", route.depth.to_string().as_str());
    if let Some(state) = &route.tracestate {
        headers.insert("tracestate", state.as_str());
    }
    let mut payload = json!({
        "tool_call_card_id": card_id,
        "tool_name": attempt.tool,
        "after_execution": binding.after_execution.as_str(),
    });
    let identity = [
        ("CG-Project-Id", "project_id", json!(attempt.project)),
        ("CG-Channel-Id", "channel", json!(route.channel)),
        ("CG-Agent-Id", "agent_id", json!(route.agent_id)),
        ("CG-Turn-Id", "agent_turn_id", json!(route.turn_id)),
        ("CG-Turn-Epoch", "turn_epoch", json!(route.epoch)),
        ("CG-Step-Id", "step_id", json!(route.step_id)),
        ("CG-Tool-Call-Id", "tool_call_id", json!(route.tool_call_id)),
    ];
    // The later version has the identity in headers, and nothing of it in the payload.
    let in_headers = version == HEADERS_SINCE;
    for (header, field, value) in identity {
        if in_headers {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            headers.insert(header, text.as_str());
        } else {
            payload[field] = value;
        }
    }
    if !in_headers {
        payload["context_box_id"] = json!(route.context_box_id);
        payload["effect"] = json!(attempt.effect.as_str());
        payload["deadline_at_ms"] = json!(attempt.deadline_ms);
    }
    Ok((subject, headers, payload))
}

/// The version that has identity in headers.
pub const HEADERS_SINCE: &str = "v1r4";

/// A card as it is shown.
pub fn card(card: &Card) -> Value {
    json!({
        "card_id": card.card_id,
        "project_id": card.project,
        "type": card.kind,
        "content": card.content,
        "created_at": time(card.created_ms),
        "author_id": card.author_id,
        "metadata": card.metadata,
        "tool_calls": card.tool_calls,
        "tool_call_id": card.tool_call_id,
        "ttl_seconds": card.ttl_seconds,
    })
}

/// RFC 3339.
pub fn time(unix_ms: u64) -> String {
    let ms = i64::try_from(unix_ms).unwrap_or_default();
    jiff::Timestamp::from_millisecond(ms).map(|time| time.to_string()).unwrap_or_default()
}

/// Something in an inbox as it is shown.
pub fn inbox_item(item: &InboxItem) -> Value {
    json!({
        "inbox_id": item.inbox_id,
        "project_id": item.project,
        "agent_id": item.agent_id,
        "message_type": item.message_type,
        "correlation_id": item.tool_call_id,
        "payload": item.payload,
        "traceparent": item.traceparent,
        "tracestate": item.tracestate,
        "trace_id": trace::parse(&item.traceparent).map(|(trace_id, _)| trace_id),
        "parent_step_id": item.parent_step_id,
        "source_agent_id": item.source_agent_id,
        "recursion_depth": item.depth,
        "created_at": time(item.created_ms),
    })
}

/// How a report was taken.
pub fn ingested(ingested: &Ingested) -> Value {
    json!({
        "ok": true,
        "inbox_id": ingested.inbox_id,
        "duplicate": ingested.duplicate,
        "late": ingested.late,
        "call_id": ingested.call.id.as_str(),
        "call_status": ingested.call.status.as_str(),
    })
}

/// A refusal.
pub fn refusal(error: &Error) -> Value {
    let internal = Fault::new(toolcrib::Code::Internal, "internal error; see the server's log");
    let fault = match error {
        Error::Refused { fault, .. } => fault,
        Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            &internal
        }
    };
    let detail = fault.detail.clone().unwrap_or(Value::Null);
    let error = json!({
        "code": fault.code.utp(),
        "message": fault.message,
        "detail": detail,
        "retryable": fault.retryable,
    });
    json!({ "ok": false, "error": error })
}

/// Headers as a map of texts, with their names in lower case.
pub fn header_map(headers: Option<&HeaderMap>) -> Map<String, Value> {
    let all = headers.into_iter().flat_map(HeaderMap::iter);
    all.filter_map(|(name, values)| {
        let value = values.first()?.as_str();
        Some((name.to_string().to_lowercase(), value.into()))
    })
    .collect()
}
