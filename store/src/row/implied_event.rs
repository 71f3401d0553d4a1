//! Events that need no row because the row of their call contains the same facts.

use serde_json::Value;
use toolcrib::domain::event::{EventKind, EventRecord};

/// An event that follows from the row of its call: the request, the start of the first attempt, or
/// the end of a call that ended before it was stored. Nearly every call has the first two, so
/// implying them saves nearly every call two rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImpliedEvent {
    Requested,
    Started,
    /// The end of a call that had already finished when it was first stored.
    Finished,
}

impl ImpliedEvent {
    pub(crate) const ALL: [Self; 3] = [Self::Requested, Self::Started, Self::Finished];

    /// Returns the code that follows the event's number in the call's event list.
    pub(crate) fn code(self) -> char {
        match self {
            Self::Requested => 'r',
            Self::Started => 's',
            Self::Finished => 'f',
        }
    }
}

/// The facts in a call's row from which its events follow.
pub(crate) struct CallEventFacts<'a> {
    pub(crate) tool_name: &'a str,
    pub(crate) args_bytes: usize,
    pub(crate) created_ms: u64,
    pub(crate) started_ms: Option<u64>,
    pub(crate) completed_ms: Option<u64>,
    /// Set only for a call that succeeded.
    pub(crate) result_bytes: Option<usize>,
}

impl CallEventFacts<'_> {
    /// Returns the implied event that equals this record, if the call's row contains all its facts.
    /// The facts are compared one by one: building the implied events only to compare them would
    /// dominate the cost of a call.
    pub(super) fn find_implied(&self, record: &EventRecord) -> Option<ImpliedEvent> {
        let field = |name: &str| record.data.get(name);
        let number = |name: &str, value: u64| field(name).and_then(Value::as_u64) == Some(value);
        let same_tool = field("tool").and_then(Value::as_str) == Some(self.tool_name);
        let (facts, at_ms, attempt) = (record.data.len(), record.at_ms, record.attempt);
        let (implied, is_same) = match record.kind {
            EventKind::Requested => {
                let is_same = (facts, at_ms, attempt) == (2, self.created_ms, 0);
                (ImpliedEvent::Requested, is_same && number("args_bytes", self.args_bytes as u64))
            }
            EventKind::Started => {
                let is_same = (facts, Some(at_ms), attempt) == (1, self.started_ms, 1);
                (ImpliedEvent::Started, is_same)
            }
            EventKind::Finished => {
                let latency_ms = at_ms.saturating_sub(self.created_ms);
                let is_same = (facts, Some(at_ms), attempt) == (4, self.completed_ms, 1)
                    && number("latency_ms", latency_ms)
                    && number("queue_ms", self.queue_ms())
                    && number("result_bytes", self.result_bytes? as u64);
                (ImpliedEvent::Finished, is_same)
            }
            _ => return None,
        };
        (is_same && same_tool).then_some(implied)
    }

    /// Returns the time from the creation to the start, as in the metrics of an outcome.
    fn queue_ms(&self) -> u64 {
        self.started_ms.map_or(0, |started_ms| started_ms.saturating_sub(self.created_ms))
    }

    /// Builds the record of an implied event; `None` when the row lacks a needed fact.
    pub(crate) fn build_record(&self, implied: ImpliedEvent) -> Option<EventRecord> {
        match implied {
            ImpliedEvent::Requested => Some(
                EventRecord::new(EventKind::Requested, self.created_ms, 0)
                    .with("tool", self.tool_name)
                    .with("args_bytes", self.args_bytes),
            ),
            ImpliedEvent::Started => Some(
                EventRecord::new(EventKind::Started, self.started_ms?, 1)
                    .with("tool", self.tool_name),
            ),
            ImpliedEvent::Finished => {
                let completed_ms = self.completed_ms?;
                let latency_ms = completed_ms.saturating_sub(self.created_ms);
                Some(
                    EventRecord::new(EventKind::Finished, completed_ms, 1)
                        .with("latency_ms", latency_ms)
                        .with("queue_ms", self.queue_ms())
                        .with("tool", self.tool_name)
                        .with("result_bytes", self.result_bytes?),
                )
            }
        }
    }
}
