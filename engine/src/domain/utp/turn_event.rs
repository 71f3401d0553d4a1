//! The events that a turn publishes: `evt.agent.<agent_id>.state`, `.step` and `.task`. Pure.

use serde_json::{Map, Value, json};

use super::{OutboxMessage, Turn, TurnStatus, trace};

/// Lifetime of an unpublished event; the event stream itself keeps events for a week.
const EVENT_TTL_MS: u64 = 86_400_000;

/// The content of the events about a turn's new state.
#[derive(Debug, Clone, Default)]
pub struct TurnEvent {
    /// The calls in flight, by the model's ids.
    pub pending_tool_call_ids: Vec<String>,
    /// Progress of the current step; `None` publishes no step event.
    pub step: Option<StepProgress>,
    /// End of the turn; `None` while it continues.
    pub completion: Option<TurnCompletion>,
}

/// Progress of a step.
#[derive(Debug, Clone)]
pub struct StepProgress {
    /// `executing` or `completed`.
    pub phase: &'static str,
    /// Ids of the cards that the step added.
    pub new_card_ids: Vec<String>,
}

/// The end of a turn; published once.
#[derive(Debug, Clone)]
pub struct TurnCompletion {
    /// One of the values of [`super::ToolStatus`].
    pub status: String,
    /// Id of the result card that ended the turn, if one did.
    pub tool_result_card_id: Option<String>,
    /// `tool_failed`, `agent_failed` or `stopped`; `None` after a success.
    pub error_code: Option<&'static str>,
    /// Reason in words, if the turn did not succeed.
    pub error: Option<String>,
}

impl TurnEvent {
    /// Builds the messages to publish.
    pub fn into_messages(self, turn: &Turn) -> Vec<OutboxMessage> {
        let mut messages =
            vec![event_message(turn, "state", state_payload(turn, &self.pending_tool_call_ids))];
        if let (Some(step), Some(step_id)) = (self.step, &turn.step_id) {
            let payload = json!({
                "agent_turn_id": turn.turn_id,
                "step_id": step_id,
                "phase": step.phase,
                "metadata": { "turn_epoch": turn.epoch },
                "new_card_ids": step.new_card_ids,
            });
            messages.push(event_message(turn, "step", payload));
        }
        if let Some(task) = self.completion {
            let mut payload = json!({
                "agent_turn_id": turn.turn_id,
                "status": task.status,
                "stats": { "turn_epoch": turn.epoch },
            });
            let words = [
                ("deliverable_card_id", turn.deliverable_card_id.clone()),
                ("tool_result_card_id", task.tool_result_card_id),
                ("error_code", task.error_code.map(str::to_owned)),
                ("error", task.error),
            ];
            for (name, word) in words {
                if let Some(word) = word {
                    payload[name] = word.into();
                }
            }
            messages.push(event_message(turn, "task", payload));
        }
        messages
    }
}

fn state_payload(turn: &Turn, waiting: &[String]) -> Value {
    let status = match turn.status {
        TurnStatus::Dispatched => "dispatched",
        TurnStatus::Running => "running",
        TurnStatus::Suspended => "suspended",
        TurnStatus::Finished | TurnStatus::Stopped | TurnStatus::Expired => "idle",
    };
    let mut metadata = Map::new();
    metadata.insert("activity".into(), turn.status.as_str().into());
    if turn.status == TurnStatus::Suspended {
        metadata.insert("waiting_tool_count".into(), waiting.len().into());
        metadata.insert("waiting_tool_call_ids".into(), json!(waiting));
        metadata
            .insert("resume_deadline".into(), turn.resume_deadline_ms.map(format_iso8601).into());
    }
    if let Some(reason) = &turn.reason {
        metadata.insert("error".into(), reason.as_str().into());
    }
    json!({
        "agent_id": turn.agent_id,
        "agent_turn_id": turn.turn_id,
        "status": status,
        "turn_epoch": turn.epoch,
        "updated_at": format_iso8601(turn.updated_ms),
        "metadata": metadata,
    })
}

fn event_message(turn: &Turn, kind: &str, payload: Value) -> OutboxMessage {
    let id = format!("evt-{kind}-{}-{}-{}", turn.project, turn.turn_id, turn.version);
    let parent = turn.traceparent.clone().unwrap_or_default();
    let mut headers = vec![
        ("traceparent".to_owned(), trace::child_traceparent(&parent, &id)),
        ("CG-Msg-Type".to_owned(), format!("agent.{kind}")),
        ("CG-Recursion-Depth".to_owned(), turn.depth.to_string()),
    ];
    headers.extend(turn.tracestate.clone().map(|state| ("tracestate".to_owned(), state)));
    OutboxMessage {
        id,
        subject: format!("{}.{}.evt.agent.{}.{kind}", turn.project, turn.channel, turn.agent_id),
        headers,
        payload,
        expires_ms: turn.updated_ms + EVENT_TTL_MS,
    }
}

/// Formats Unix milliseconds as ISO 8601 in UTC.
pub fn format_iso8601(unix_ms: u64) -> String {
    let (seconds, ms) = (unix_ms / 1_000, unix_ms % 1_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that start in March have their leap day at the end, and so have eras of 400 such years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (400 * era + year, month + 3),
        _ => (400 * era + year + 1, month - 9),
    };
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_formatted_as_iso_8601() {
        for (unix_ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (1_709_251_200_000, "2024-03-01T00:00:00.000Z"),
            (1_735_689_599_001, "2024-12-31T23:59:59.001Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(format_iso8601(unix_ms), text);
        }
    }
}
