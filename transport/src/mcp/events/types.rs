//! The event types: their schemas, and their occurrences as the store has them.

use serde::Deserialize;
use serde_json::{Value, json};
use toolcrib::calls::EventQuery;
use toolcrib::domain::access_rules::pattern_matches;
use toolcrib::domain::call::Call;
use toolcrib::domain::event::{CallEvent, EventKind};
use toolcrib::domain::fault::Error;
use toolcrib::{Caller, Engine};

/// Number of stored events that are read at once.
const EVENT_PAGE_SIZE: usize = 200;

/// A type of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mcp) enum EventType {
    /// A call has ended.
    CallEnded,
    /// A call waits for an approval.
    ApprovalRequested,
    /// A call waits for answers to questions.
    InputRequested,
    /// The directory has changed: tools, or the rules and keys that decide who may call them.
    ToolsChanged,
}

/// The arguments of a subscription: the calls that it is about.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(in crate::mcp) struct EventFilter {
    tool: Option<String>,
    run_id: Option<String>,
    /// Events before this time, in Unix milliseconds, are omitted.
    #[serde(skip)]
    not_before_ms: Option<i64>,
}

impl EventFilter {
    /// Returns a filter that also omits events that are older than `max_age_ms` now.
    pub(in crate::mcp) fn with_max_age(self, max_age_ms: Option<u64>) -> Self {
        let now_ms = jiff::Timestamp::now().as_millisecond();
        self.with_start(max_age_ms.map(|age_ms| now_ms.saturating_sub_unsigned(age_ms)))
    }

    /// Returns a filter that also omits events before a time, in Unix milliseconds.
    pub(in crate::mcp) fn with_start(self, not_before_ms: Option<i64>) -> Self {
        Self { not_before_ms, ..self }
    }

    fn matches(&self, call: &Call) -> bool {
        let is_tool =
            self.tool.as_ref().is_none_or(|pattern| pattern_matches(pattern, &call.tool_name));
        is_tool && self.run_id.as_ref().is_none_or(|run_id| *run_id == call.run_id)
    }
}

/// Occurrences after a position.
pub(in crate::mcp) struct EventPage {
    /// Each occurrence with its position.
    pub(in crate::mcp) occurrences: Vec<(u64, Value)>,
    /// The position up to which all occurrences are in this page.
    pub(in crate::mcp) position: u64,
    /// True if occurrences are omitted because of their age.
    pub(in crate::mcp) skipped: bool,
    /// True if no event was stored after this position when the page was read.
    pub(in crate::mcp) is_last: bool,
}

impl EventType {
    pub(in crate::mcp) const ALL: [Self; 4] =
        [Self::CallEnded, Self::ApprovalRequested, Self::InputRequested, Self::ToolsChanged];

    /// Returns the name on the wire.
    pub(in crate::mcp) fn name(self) -> &'static str {
        match self {
            Self::CallEnded => "tool_call.ended",
            Self::ApprovalRequested => "approval.requested",
            Self::InputRequested => "input.requested",
            Self::ToolsChanged => "tools.changed",
        }
    }

    /// Returns the type with this name.
    pub(in crate::mcp) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn description(self) -> &'static str {
        match self {
            Self::CallEnded => {
                "A tool call has ended: it succeeded, failed, timed out or was canceled"
            }
            Self::ApprovalRequested => "A tool call waits for a person's approval",
            Self::InputRequested => "A tool call waits for answers to its tool's questions",
            Self::ToolsChanged => "The tools, or the rules on who may call them, have changed",
        }
    }

    /// Returns the entry in `events/list`.
    pub(in crate::mcp) fn describe(self) -> Value {
        let text = |description: &str| json!({ "type": "string", "description": description });
        let input = match self {
            Self::ToolsChanged => json!({}),
            _ => json!({
                "tool": text("Name or pattern of the tools: weather.query, weather.*"),
                "run_id": text("Only calls of this run"),
            }),
        };
        let mut payload = match self {
            Self::ToolsChanged => json!({ "version": { "type": "integer" } }),
            _ => json!({
                "tool_call_id": text("The ticket"),
                "tool_name": text("The tool"),
                "run_id": text("The run"),
                "status": text("PENDING, RUNNING, SUCCEEDED, FAILED, TIMEOUT or CANCELED"),
            }),
        };
        match self {
            Self::CallEnded => payload["error"] = json!({ "type": "object" }),
            Self::ApprovalRequested => {
                payload["approval_id"] = text("The approval");
                payload["link"] = text("A person decides here");
            }
            Self::InputRequested => payload["questions"] = json!({ "type": "object" }),
            Self::ToolsChanged => {}
        }
        json!({
            "name": self.name(),
            "description": self.description(),
            "delivery": ["poll", "push", "webhook"],
            "inputSchema": { "type": "object", "properties": input, "additionalProperties": false },
            "payloadSchema": { "type": "object", "properties": payload },
        })
    }

    fn includes(self, kind: EventKind) -> bool {
        match self {
            Self::CallEnded => kind.is_terminal(),
            Self::ApprovalRequested => kind == EventKind::ApprovalRequested,
            Self::InputRequested => kind == EventKind::InputRequired,
            Self::ToolsChanged => false,
        }
    }

    /// Returns the present position: later occurrences are after it.
    pub(in crate::mcp) async fn newest(
        self,
        engine: &Engine,
        caller: &Caller,
    ) -> Result<u64, Error> {
        match self {
            Self::ToolsChanged => Ok(engine.registry().directory_version()),
            _ => engine.calls().newest_event(caller).await,
        }
    }

    /// Waits until there is an event after a position, and returns the occurrences after it. The
    /// page may be empty, because the events may not concern the subscription. Returns `None` when
    /// the engine shuts down.
    pub(in crate::mcp) async fn wait_for_page(
        self,
        engine: &Engine,
        caller: &Caller,
        filter: &EventFilter,
        after: u64,
    ) -> Result<Option<EventPage>, Error> {
        if self == Self::ToolsChanged {
            let Some(version) = engine.registry().wait_for_directory_change(after).await else {
                return Ok(None);
            };
            return Ok(Some(self.directory_page(engine, version, true)));
        }
        let calls = engine.calls();
        let events = calls.events(caller, &EventQuery::Project, after, EVENT_PAGE_SIZE).await?;
        let Some(position) = events.last().map(|event| event.number) else { return Ok(None) };
        let (occurrences, skipped) = self.call_occurrences(engine, caller, filter, &events).await;
        Ok(Some(EventPage { occurrences, position, skipped, is_last: false }))
    }

    /// Returns the occurrences after a position that are stored now, without waiting for one. The
    /// position of the page passes events that the caller may not read, so that they delay nothing.
    pub(in crate::mcp) async fn read_page(
        self,
        engine: &Engine,
        caller: &Caller,
        filter: &EventFilter,
        after: u64,
    ) -> Result<EventPage, Error> {
        if self == Self::ToolsChanged {
            let version = engine.registry().directory_version();
            return Ok(self.directory_page(engine, version, version != after));
        }
        let page = engine.calls().read_events(caller, after, EVENT_PAGE_SIZE).await?;
        let (occurrences, skipped) =
            self.call_occurrences(engine, caller, filter, &page.events).await;
        let (position, is_last) = (page.position, page.is_last);
        Ok(EventPage { occurrences, position, skipped, is_last })
    }

    fn directory_page(self, engine: &Engine, version: u64, is_changed: bool) -> EventPage {
        let at_ms = engine.registry().directory_changed_ms() as i64;
        let data = json!({ "version": version });
        let occurrence = self.occurrence(&format!("evt_tools_{version}"), at_ms, data, version);
        let occurrences = if is_changed { vec![(version, occurrence)] } else { Vec::new() };
        EventPage { occurrences, position: version, skipped: false, is_last: true }
    }

    /// Returns the occurrences among events of calls, and whether some are omitted because of their
    /// age.
    async fn call_occurrences(
        self,
        engine: &Engine,
        caller: &Caller,
        filter: &EventFilter,
        events: &[CallEvent],
    ) -> (Vec<(u64, Value)>, bool) {
        let calls = engine.calls();
        let (mut occurrences, mut skipped) = (Vec::new(), false);
        for event in events.iter().filter(|event| self.includes(event.record.kind)) {
            // A call that is purged meanwhile has no details any more.
            let Ok(call) = calls.call(caller, &event.call_id).await else { continue };
            if !filter.matches(&call) {
                continue;
            }
            if filter.not_before_ms.is_some_and(|start_ms| (event.record.at_ms as i64) < start_ms) {
                skipped = true;
            } else {
                let occurrence = self.call_occurrence(engine, event, &call);
                occurrences.push((event.number, occurrence));
            }
        }
        (occurrences, skipped)
    }

    fn call_occurrence(self, engine: &Engine, event: &CallEvent, call: &Call) -> Value {
        let mut data = json!({
            "tool_call_id": call.id.as_str(),
            "tool_name": call.tool_name,
            "run_id": call.run_id,
            "status": call.status.as_str(),
        });
        match self {
            Self::CallEnded => {
                let fault = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
                if let Some(fault) = fault {
                    data["error"] =
                        json!({ "code": fault.code.as_str(), "message": fault.message });
                }
            }
            Self::ApprovalRequested => {
                if let Some(id) = call.pending_approval() {
                    data["approval_id"] = id.into();
                    data["link"] = engine.approvals().link(id).into();
                }
            }
            Self::InputRequested => {
                if let Some(elicitation) = &call.elicitation {
                    data["questions"] = Value::Object(elicitation.unanswered.clone());
                }
            }
            Self::ToolsChanged => {}
        }
        let id = format!("evt_{}", event.number);
        self.occurrence(&id, event.record.at_ms as i64, data, event.number)
    }

    fn occurrence(self, id: &str, at_ms: i64, data: Value, position: u64) -> Value {
        let timestamp = jiff::Timestamp::from_millisecond(at_ms).unwrap_or_default();
        json!({
            "eventId": id, "name": self.name(), "timestamp": format!("{timestamp:.3}"),
            "data": data, "cursor": position.to_string(),
        })
    }
}
