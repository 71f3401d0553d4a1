//! The background protocol: the names of a task's statuses and events, and the form of its outcome.
//! `/v1/tasks`, its event stream and webhooks share them.

use serde::Serialize;
use serde_json::Value;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::Fault;
use toolcrib::{Call, Json, Status};
use utoipa::ToSchema;

/// Maximum size of a result in events and webhooks. Larger results are omitted, with a path to read
/// them from.
pub const MAX_DATA_BYTES: usize = 256 << 10;

/// Returns the name of a task's status. Task statuses map one to one to call statuses.
pub fn task_status(status: Status) -> &'static str {
    match status {
        Status::Pending => "submitted",
        Status::Running => "running",
        Status::Succeeded => "completed",
        Status::Failed => "failed",
        Status::Timeout => "timeout",
        Status::Canceled => "canceled",
    }
}

/// Parses a task status.
pub fn parse_status(word: &str) -> Option<Status> {
    Status::ALL.into_iter().find(|status| task_status(*status) == word)
}

/// Returns the name of the task event for an event of a call, or `None` if tasks have no such
/// event. A task that was canceled or timed out reports `task.failed`; its `status` gives the
/// cause.
pub fn task_event_name(kind: EventKind) -> Option<&'static str> {
    match kind {
        EventKind::Requested => Some("task.submit"),
        EventKind::Progress => Some("task.progress"),
        EventKind::Finished => Some("task.completed"),
        EventKind::Failed | EventKind::Timeout | EventKind::Canceled => Some("task.failed"),
        EventKind::Started
        | EventKind::Acknowledged
        | EventKind::Retrying
        | EventKind::Fallback
        | EventKind::InputRequired
        | EventKind::InputProvided
        | EventKind::ApprovalRequested
        | EventKind::ApprovalDecided
        | EventKind::Recovered
        | EventKind::ReportIgnored => None,
    }
}

/// The outcome of a task.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TaskEnd)]
pub struct TaskOutcome<'a> {
    pub task_id: &'a str,
    /// The same as `task_id`.
    pub tool_call_id: &'a str,
    /// The id that the caller gave the call.
    pub call_id: Option<&'a str>,
    pub run_id: &'a str,
    pub tool_name: &'a str,
    /// `completed`, `failed`, `timeout` or `canceled`.
    pub status: &'static str,
    pub ok: bool,
    /// The result.
    #[schema(value_type = Option<Object>)]
    pub data: Option<Json>,
    /// Set when the result is too large to include.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_omitted: Option<OmittedData>,
    #[schema(value_type = Option<Object>)]
    pub error: Option<TaskFault<'a>>,
    pub metrics: TaskMetrics,
    pub created_at_ms: u64,
    pub completed_at_ms: Option<u64>,
}

/// Describes a result that was omitted.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Omitted)]
pub struct OmittedData {
    pub bytes: usize,
    /// The path to read the result from.
    pub read_at: String,
}

/// The error of a failed task; the same object as on the call.
#[derive(Debug, Serialize, ToSchema)]
pub struct TaskFault<'a> {
    pub code: &'static str,
    pub message: &'a str,
    #[schema(value_type = Option<Object>)]
    pub detail: Option<&'a Value>,
    pub retryable: bool,
}

/// Timings and attempts of a task.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct TaskMetrics {
    pub latency_ms: u64,
    pub retries: u32,
    pub queue_ms: u64,
    pub attempts: u32,
}

impl<'a> TaskOutcome<'a> {
    /// Builds the outcome from an ended call. Omits a result of more than `max_data_bytes`.
    pub fn from_call(call: &'a Call, max_data_bytes: usize) -> Self {
        let outcome = call.outcome.as_ref();
        let data = outcome.and_then(|outcome| outcome.data.as_ref());
        let bytes = data.map_or(0, |data| data.text().len());
        let too_large = bytes > max_data_bytes;
        let fault = outcome.and_then(|outcome| outcome.error.as_ref());
        let metrics = outcome.map(|outcome| outcome.metrics).unwrap_or_default();
        Self {
            task_id: call.id.as_str(),
            tool_call_id: call.id.as_str(),
            call_id: call.origin.caller_call_id.as_deref(),
            run_id: &call.run_id,
            tool_name: &call.tool_name,
            status: task_status(call.status),
            ok: outcome.is_some_and(|outcome| outcome.ok),
            data: data.filter(|_| !too_large).cloned(),
            data_omitted: too_large
                .then(|| OmittedData { bytes, read_at: format!("/v1/tool_calls/{}", call.id) }),
            error: fault.map(TaskFault::from_fault),
            metrics: TaskMetrics {
                latency_ms: metrics.latency_ms,
                retries: metrics.retries,
                queue_ms: metrics.queue_ms,
                attempts: metrics.attempts,
            },
            created_at_ms: call.created_ms,
            completed_at_ms: call.completed_ms,
        }
    }

    /// Returns the name of the event that reports this outcome.
    pub fn event_name(&self) -> &'static str {
        if self.ok { "task.completed" } else { "task.failed" }
    }
}

impl<'a> TaskFault<'a> {
    fn from_fault(fault: &'a Fault) -> Self {
        Self {
            code: fault.code.as_str(),
            message: &fault.message,
            detail: fault.detail.as_ref(),
            retryable: fault.retryable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_round_trips_through_its_task_status() {
        for status in Status::ALL {
            assert_eq!(parse_status(task_status(status)), Some(status));
        }
        assert_eq!(parse_status("SUCCEEDED"), None);
    }

    #[test]
    fn exactly_the_terminal_events_end_a_task() {
        for kind in EventKind::ALL {
            let ends = task_event_name(kind)
                .is_some_and(|name| ["task.completed", "task.failed"].contains(&name));
            assert_eq!(ends, kind.is_terminal(), "{kind:?}");
        }
    }
}
