//! A command as a tool service parses it, and the errors it may contain.

use async_nats::jetstream::Message;
use serde_json::{Map, Value};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::utp::card::{error_as_result, error_json};
use toolcrib::domain::utp::{AfterExecution, Route, ToolStatus, subject, trace};
use toolcrib_protocol::utp::wire;

use super::{ToolJob, ToolJobResult};

/// The reason why a command cannot be executed.
pub(super) enum CommandError {
    /// The server does not reply; the command is returned for a later delivery.
    ServerUnavailable,
    /// The command is invalid; holds the result to report.
    Rejected(Box<ToolJobResult>),
}

impl CommandError {
    pub(super) fn rejected(code: Code, message: impl Into<String>) -> Self {
        let fault = Fault::new(code, message).without_side_effect().retryable(false);
        Self::Rejected(Box::new(ToolJobResult::failed(fault)))
    }
}

/// A command that can be answered.
pub(super) struct ReceivedCommand {
    pub(super) project: String,
    pub(super) channel: String,
    pub(super) version: String,
    pub(super) tool_call_id: String,
    pub(super) turn_id: String,
    pub(super) agent_id: String,
    pub(super) epoch: i64,
    pub(super) step_id: Option<String>,
    pub(super) card_id: Option<String>,
    tool_name: Option<String>,
    after_execution: Option<String>,
    pub(super) traceparent: String,
    pub(super) tracestate: Option<String>,
    pub(super) recursion_depth: Option<String>,
    effect: Option<String>,
    deadline_ms: Option<u64>,
    fields: Map<String, Value>,
}

impl ReceivedCommand {
    /// Parses the fields that are needed to report a result. Returns the reason if that fails; such
    /// a command becomes a dead letter.
    pub(super) fn parse(message: &Message) -> Result<Self, String> {
        let parts =
            subject::parse(&message.subject).ok_or("this is not a subject of this server")?;
        let payload: Value = serde_json::from_slice(&message.payload)
            .map_err(|error| format!("the command is not JSON: {error}"))?;
        let Value::Object(fields) = payload else { return Err("a command is an object".into()) };
        let headers = wire::UtpHeaders::from_message(message.headers.as_ref());
        let header = |name: &str| headers.get(name).map(str::to_owned);
        let text = |name: &str, in_header: &str| {
            let value = fields.get(name).and_then(Value::as_str).map(str::to_owned);
            let value = value.or_else(|| header(in_header));
            value.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let needed = |name: &str, in_header: &str| {
            text(name, in_header).ok_or_else(|| format!("{name} is missing"))
        };
        let epoch = match fields.get("turn_epoch") {
            Some(Value::Number(number)) => number.as_i64(),
            Some(Value::String(text)) => text.trim().parse().ok(),
            _ => header("cg-turn-epoch").and_then(|text| text.trim().parse().ok()),
        };
        for (name, part) in [("cg-project-id", parts.project), ("cg-channel-id", parts.channel)] {
            if header(name).is_some_and(|value| value != part) {
                return Err(format!("the header {name} does not match the subject"));
            }
        }
        let deadline = fields.get("deadline_at_ms").and_then(Value::as_u64);
        let in_header = || header(wire::DEADLINE_HEADER)?.parse().ok();
        let tool_call_id = needed("tool_call_id", "cg-tool-call-id")?;
        // An invalid trace header is no reason to leave a command unanswered.
        let traced = header("traceparent").and_then(|text| trace::normalize(&text));
        Ok(Self {
            project: parts.project.to_owned(),
            channel: parts.channel.to_owned(),
            version: parts.version.to_owned(),
            turn_id: needed("agent_turn_id", "cg-turn-id")?,
            agent_id: needed("agent_id", "cg-agent-id")?,
            epoch: epoch.ok_or("turn_epoch is not a whole number")?,
            step_id: text("step_id", "cg-step-id"),
            card_id: text("tool_call_card_id", ""),
            tool_name: text("tool_name", ""),
            after_execution: text("after_execution", ""),
            traceparent: traced.unwrap_or_else(|| trace::from_seed(&tool_call_id)),
            tracestate: header("tracestate"),
            recursion_depth: header("cg-recursion-depth"),
            effect: text("effect", wire::EFFECT_HEADER),
            deadline_ms: deadline.or_else(in_header),
            tool_call_id,
            fields,
        })
    }

    /// Validates the other fields. An error here is reported as a failed result.
    pub(super) fn validate(&self) -> Result<(), CommandError> {
        for name in ["args", "arguments", "result"] {
            if self.fields.contains_key(name) {
                let message = format!("payload.{name} is forbidden: the card has the arguments");
                return Err(CommandError::rejected(Code::BadRequest, message));
            }
        }
        let needed = [
            ("tool_call_card_id", self.card_id.is_some()),
            ("tool_name", self.tool_name.is_some()),
            ("after_execution", self.after_execution.is_some()),
        ];
        let missing: Vec<&str> =
            needed.iter().filter(|(_, is_present)| !is_present).map(|(name, _)| *name).collect();
        if !missing.is_empty() {
            let message = format!("missing required fields {missing:?}");
            return Err(CommandError::rejected(Code::BadRequest, message));
        }
        let after = self.after_execution.as_deref().unwrap_or_default();
        if after.parse::<AfterExecution>().is_err() {
            let message = format!("after_execution \"{after}\" is neither suspend nor terminate");
            let fault = Fault::new(Code::BadRequest, message).without_side_effect();
            let result = error_as_result(&error_json(&fault, "tool"));
            let fault =
                fault.with_detail(serde_json::json!({ "utp_code": "invalid_after_execution" }));
            let answer = ToolJobResult { status: ToolStatus::Failed, result, error: Some(fault) };
            return Err(CommandError::Rejected(Box::new(answer)));
        }
        Ok(())
    }

    /// Returns the value to report for `after_execution`; an invalid value counts as `suspend`.
    pub(super) fn after_execution(&self) -> AfterExecution {
        let value = self.after_execution.as_deref().unwrap_or_default();
        value.parse().unwrap_or_default()
    }

    pub(super) fn call_key(&self) -> (String, String, String) {
        (self.project.clone(), self.turn_id.clone(), self.tool_call_id.clone())
    }

    /// Returns true unless the command declares that its tool may run twice.
    pub(super) fn is_irreversible(&self) -> bool {
        !matches!(self.effect.as_deref(), Some("read" | "idempotent"))
    }

    /// Returns the deadline of the call, if the command has one.
    pub(super) fn deadline_ms(&self) -> Option<u64> {
        self.deadline_ms
    }

    pub(super) fn tool_name(&self) -> &str {
        self.tool_name.as_deref().unwrap_or("unknown")
    }

    /// Converts the command into a job; `meta` is the metadata of its card.
    pub(super) fn to_job(&self, tool_name: &str, args: Value, meta: &Value) -> ToolJob {
        ToolJob {
            tool_name: tool_name.to_owned(),
            args,
            project: self.project.clone(),
            agent_id: self.agent_id.clone(),
            turn_id: self.turn_id.clone(),
            tool_call_id: self.tool_call_id.clone(),
            traceparent: self.traceparent.clone(),
            deadline_ms: self.deadline_ms(),
            route: self.route(meta),
        }
    }

    fn route(&self, meta: &Value) -> Route {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let depth = self.recursion_depth.as_deref().and_then(|depth| depth.trim().parse().ok());
        Route {
            agent_id: self.agent_id.clone(),
            turn_id: self.turn_id.clone(),
            epoch: u64::try_from(self.epoch).unwrap_or_default(),
            step_id: self.step_id.clone().unwrap_or_default(),
            tool_call_id: self.tool_call_id.clone(),
            channel: self.channel.clone(),
            parent_step_id: text(meta.get("parent_step_id")),
            tracestate: self.tracestate.clone(),
            context_box_id: text(self.fields.get("context_box_id")),
            depth: depth.unwrap_or_default(),
            project: Some(self.project.clone()),
            joined_by: None,
            is_detached: false,
        }
    }
}
