//! The words of the background protocol: what a task's statuses and events are called, and how its
//! end is told. The same on `/v1/tasks`, on its event stream and in callbacks.

use serde::Serialize;
use serde_json::Value;
use toolcrib::event::Kind;
use toolcrib::fault::Fault;
use toolcrib::{Call, Json, Status};
use utoipa::ToSchema;

/// Results that are larger are left out of events and callbacks, with a note where to read them.
pub const MAX_DATA_BYTES: usize = 256 << 10;

/// A task's status. One to one with the call's.
pub fn status_word(status: Status) -> &'static str {
    match status {
        Status::Pending => "submitted",
        Status::Running => "running",
        Status::Succeeded => "completed",
        Status::Failed => "failed",
        Status::Timeout => "timeout",
        Status::Canceled => "canceled",
    }
}

/// The status with this name.
pub fn parse_status(word: &str) -> Option<Status> {
    Status::ALL.into_iter().find(|status| status_word(*status) == word)
}

/// What an event of a call is called among those of tasks; none when it is not one of them. A task
/// that was canceled or ran out of time has failed, and its `status` says how.
pub fn event_name(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Requested => Some("task.submit"),
        Kind::Progress => Some("task.progress"),
        Kind::Finished => Some("task.completed"),
        Kind::Failed | Kind::Timeout | Kind::Canceled => Some("task.failed"),
        Kind::Started
        | Kind::Taken
        | Kind::Retrying
        | Kind::Fallback
        | Kind::Recovered
        | Kind::Late => None,
    }
}

/// How a task ended.
#[derive(Debug, Serialize, ToSchema)]
pub struct TaskEnd<'a> {
    pub task_id: &'a str,
    /// The same as `task_id`.
    pub tool_call_id: &'a str,
    /// The caller's own id for it.
    pub call_id: Option<&'a str>,
    pub run_id: &'a str,
    pub tool_name: &'a str,
    /// `completed`, `failed`, `timeout` or `canceled`.
    pub status: &'static str,
    pub ok: bool,
    /// The result.
    #[schema(value_type = Option<Object>)]
    pub data: Option<Json>,
    /// Set when the result is too large to be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_omitted: Option<Omitted>,
    #[schema(value_type = Option<Object>)]
    pub error: Option<TaskFault<'a>>,
    pub metrics: TaskMetrics,
    pub created_at_ms: u64,
    pub completed_at_ms: Option<u64>,
}

/// Where the result is that was left out.
#[derive(Debug, Serialize, ToSchema)]
pub struct Omitted {
    pub bytes: usize,
    /// The path to read it at.
    pub read_at: String,
}

/// What went wrong; the same object as on the call.
#[derive(Debug, Serialize, ToSchema)]
pub struct TaskFault<'a> {
    pub code: &'static str,
    pub message: &'a str,
    #[schema(value_type = Option<Object>)]
    pub detail: Option<&'a Value>,
    pub retryable: bool,
}

/// What it took.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct TaskMetrics {
    pub latency_ms: u64,
    pub retries: u32,
    pub queue_ms: u64,
    pub attempts: u32,
}

impl<'a> TaskEnd<'a> {
    /// The end of a call that has ended.
    pub fn of(call: &'a Call, max_data_bytes: usize) -> Self {
        let outcome = call.outcome.as_ref();
        let data = outcome.and_then(|outcome| outcome.data.as_ref());
        let bytes = data.map_or(0, |data| data.text().len());
        let too_large = bytes > max_data_bytes;
        let fault = outcome.and_then(|outcome| outcome.error.as_ref());
        let metrics = outcome.map(|outcome| outcome.metrics).unwrap_or_default();
        Self {
            task_id: call.id.as_str(),
            tool_call_id: call.id.as_str(),
            call_id: call.asked.call_id.as_deref(),
            run_id: &call.run_id,
            tool_name: &call.tool_name,
            status: status_word(call.status),
            ok: outcome.is_some_and(|outcome| outcome.ok),
            data: data.filter(|_| !too_large).cloned(),
            data_omitted: too_large
                .then(|| Omitted { bytes, read_at: format!("/v1/tool_calls/{}", call.id) }),
            error: fault.map(TaskFault::of),
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

    /// The event that says so.
    pub fn event(&self) -> &'static str {
        if self.ok { "task.completed" } else { "task.failed" }
    }
}

impl<'a> TaskFault<'a> {
    fn of(fault: &'a Fault) -> Self {
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
    fn every_status_has_its_own_word() {
        for status in Status::ALL {
            assert_eq!(parse_status(status_word(status)), Some(status));
        }
        assert_eq!(parse_status("SUCCEEDED"), None);
    }

    #[test]
    fn a_task_is_submitted_once_and_ends_once() {
        for kind in Kind::ALL {
            let ends = event_name(kind)
                .is_some_and(|name| ["task.completed", "task.failed"].contains(&name));
            assert_eq!(ends, kind.is_terminal(), "{kind:?}");
        }
    }
}
