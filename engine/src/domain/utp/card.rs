//! Cards: immutable records that UTP messages point at. Pure.
//!
//! Cards from tool services and agents are validated here and stored. The cards of calls derive
//! from the calls (see [`crate::domain::derived`]) and have reserved ids.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{AfterExecution, ToolStatus};
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;

/// Type of the card that requests a call.
pub const TOOL_CALL: &str = "tool.call";
/// Type of the card that holds its result.
pub const TOOL_RESULT: &str = "tool.result";
/// Type of the card that a turn or a run ends with, unless a result ended it.
pub const TASK_DELIVERABLE: &str = "task.deliverable";

/// Every card type.
const CARD_TYPES: [&str; 12] = [
    "task.instruction",
    "agent.thought",
    TOOL_CALL,
    TOOL_RESULT,
    TASK_DELIVERABLE,
    "task.result_fields",
    "agent.error",
    "sys.profile",
    "sys.rendered_prompt",
    "sys.tools",
    "sys.judge_feedback",
    "meta.parent_pointer",
];

/// The content types, each with its required and optional keys.
const CONTENT_FIELDS: [(&str, &[&str], &[&str]); 6] = [
    ("ToolCallContent", &["tool_name", "arguments", "status"], &["target_subject"]),
    ("ToolResultContent", &["status", "after_execution"], &["result", "error"]),
    ("JsonContent", &["data"], &[]),
    ("TextContent", &["text"], &[]),
    ("FieldsSchemaContent", &["fields"], &[]),
    ("ToolContent", &["tools"], &[]),
];

/// One card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// Unique id of at most 128 letters, digits, `_` and `-`.
    pub card_id: String,
    /// Id of the project that the card belongs to.
    pub project: String,
    /// `tool.call`, `tool.result`, …
    pub kind: String,
    /// Includes the discriminator `__type__`.
    pub content: Map<String, Value>,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
    /// Id of the agent, tool service or component that wrote the card.
    pub author_id: String,
    /// Lineage and further data: `agent_turn_id`, `step_id`, `trace_id`, ….
    pub metadata: Map<String, Value>,
    /// Tool calls of a model's message, as given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Id of the call that the card belongs to, as in the call's route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Lifetime that the author states, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

impl Card {
    /// Returns a text field of the metadata.
    pub fn metadata_text(&self, name: &str) -> Option<&str> {
        self.metadata.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    /// Returns a text field of the content.
    pub fn content_text(&self, name: &str) -> Option<&str> {
        self.content.get(name).and_then(Value::as_str)
    }

    /// Returns the turn it belongs to.
    pub fn turn_id(&self) -> Option<&str> {
        self.metadata_text("agent_turn_id")
    }

    /// Returns true if two cards are equal except for their creation time.
    pub fn equals_ignoring_time(&self, other: &Self) -> bool {
        let same = Self { created_ms: other.created_ms, ..self.clone() };
        same == *other
    }

    /// Parses a card from outside; rejects ids that are reserved for the derived cards of calls.
    pub fn parse_external(
        value: &Value,
        project: &str,
        now_ms: u64,
        mint: impl FnOnce() -> String,
    ) -> Result<Self, Fault> {
        let card = Self::parse(value, project, now_ms, mint)?;
        if parse_derived_id(&card.card_id).is_some() {
            return Err(bad_request("card_id is one of Toolcrib's own"));
        }
        Ok(card)
    }

    /// Parses a card whose id may be that of a call's derived card.
    pub fn parse(
        value: &Value,
        project: &str,
        now_ms: u64,
        mint: impl FnOnce() -> String,
    ) -> Result<Self, Fault> {
        let Value::Object(fields) = value else { return Err(bad_request("a card is an object")) };
        const KNOWN: [&str; 10] = [
            "card_id",
            "project_id",
            "type",
            "content",
            "created_at",
            "author_id",
            "metadata",
            "tool_calls",
            "tool_call_id",
            "ttl_seconds",
        ];
        if let Some(name) = fields.keys().find(|name| !KNOWN.contains(&name.as_str())) {
            return Err(bad_request(format!("a card has no field \"{name}\"")));
        }
        let text = |name: &str| match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if !text.trim().is_empty() => Ok(Some(text.clone())),
            Some(_) => Err(bad_request(format!("{name} must be a text"))),
        };
        let object = |name: &str| match fields.get(name) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(map)) => Ok(map.clone()),
            Some(_) => Err(bad_request(format!("{name} must be an object"))),
        };
        let card_id = text("card_id")?.unwrap_or_else(mint);
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if card_id.len() > 128 || !card_id.chars().all(is_allowed) {
            return Err(bad_request("card_id must be up to 128 letters, digits, '_' and '-'"));
        }
        if text("project_id")?.is_some_and(|project_id| project_id != project) {
            return Err(bad_request("project_id is another project than the one it is sent to"));
        }
        let kind = text("type")?.ok_or_else(|| bad_request("type is missing"))?;
        let ttl = fields.get("ttl_seconds").filter(|ttl| !ttl.is_null());
        let wrong_ttl = || bad_request("ttl_seconds must be a whole number from 0");
        let card = Self {
            card_id,
            project: project.to_owned(),
            content: object("content")?,
            created_ms: now_ms,
            author_id: text("author_id")?.ok_or_else(|| bad_request("author_id is missing"))?,
            metadata: object("metadata")?,
            tool_calls: fields.get("tool_calls").filter(|calls| !calls.is_null()).cloned(),
            tool_call_id: text("tool_call_id")?,
            ttl_seconds: ttl.map(|ttl| ttl.as_u64().ok_or_else(wrong_ttl)).transpose()?,
            kind,
        };
        card.check()?;
        Ok(card.with_tool_call_id())
    }

    fn check(&self) -> Result<(), Fault> {
        if !CARD_TYPES.contains(&self.kind.as_str()) {
            return Err(bad_request(format!(
                "type \"{}\" is not one of {}",
                self.kind,
                CARD_TYPES.join(" ")
            )));
        }
        let name = self.content_text("__type__").unwrap_or_default();
        let Some((_, required, more)) =
            CONTENT_FIELDS.iter().find(|(type_name, ..)| *type_name == name)
        else {
            return Err(bad_request(format!("content.__type__ \"{name}\" is not a known content")));
        };
        let expected = match self.kind.as_str() {
            TOOL_CALL => Some("ToolCallContent"),
            TOOL_RESULT => Some("ToolResultContent"),
            _ => None,
        };
        if let Some(expected) = expected.filter(|expected| *expected != name) {
            return Err(bad_request(format!("the content of a {} must be {expected}", self.kind)));
        }
        if let Some(missing) = required.iter().find(|key| !self.content.contains_key(**key)) {
            return Err(bad_request(format!("content.{missing} is missing")));
        }
        let is_known =
            |key: &str| key == "__type__" || required.contains(&key) || more.contains(&key);
        if let Some(other) = self.content.keys().find(|key| !is_known(key)) {
            return Err(bad_request(format!("{name} has no field \"{other}\"")));
        }
        match name {
            "ToolCallContent" => self.check_call(),
            "ToolResultContent" => self.check_result(),
            "TextContent" if self.content_text("text").is_none() => {
                Err(bad_request("content.text must be a text"))
            }
            "FieldsSchemaContent" if !self.content.get("fields").is_some_and(Value::is_array) => {
                Err(bad_request("content.fields must be a list"))
            }
            _ => Ok(()),
        }
    }

    fn check_call(&self) -> Result<(), Fault> {
        if self.content_text("tool_name").is_none_or(|name| name.trim().is_empty()) {
            return Err(bad_request("content.tool_name must be a text"));
        }
        if self.content_text("status").is_none() {
            return Err(bad_request("content.status must be a text"));
        }
        let target = self.content.get("target_subject").filter(|target| !target.is_null());
        if target.is_some_and(|target| !target.is_string()) {
            return Err(bad_request("content.target_subject must be a text"));
        }
        match self.content.get("arguments") {
            Some(Value::Object(_)) => Ok(()),
            _ => Err(bad_request("content.arguments must be an object")),
        }
    }

    fn check_result(&self) -> Result<(), Fault> {
        let status: ToolStatus =
            self.content_text("status").unwrap_or_default().parse().map_err(|()| {
                let statuses = ToolStatus::ALL.map(ToolStatus::as_str).join(", ");
                bad_request(format!("content.status must be one of {statuses}"))
            })?;
        let after = self.content_text("after_execution").unwrap_or_default();
        if after.parse::<AfterExecution>().is_err() {
            return Err(bad_request("content.after_execution must be suspend or terminate"));
        }
        let error = self.content.get("error").filter(|error| !error.is_null());
        match (status, error) {
            (ToolStatus::Success, Some(_)) => {
                return Err(bad_request("content.error must be null when the status is success"));
            }
            (ToolStatus::Success, None) => {}
            (_, error) => {
                let has = |name: &str| {
                    let text = error.and_then(|error| error.get(name)).and_then(Value::as_str);
                    text.is_some_and(|text| !text.is_empty())
                };
                if !has("code") || !has("message") {
                    let message = "content.error must be an object with code and message unless \
                                   the status is success";
                    return Err(bad_request(message));
                }
            }
        }
        let tool_call_id = self.metadata_text("tool_call_id").or(self.tool_call_id.as_deref());
        if self.turn_id().is_none() || tool_call_id.is_none() {
            let message = "metadata of a tool.result must have agent_turn_id and tool_call_id";
            return Err(bad_request(message));
        }
        let differs = |id: &str| Some(id) != self.metadata_text("tool_call_id");
        let both = self.metadata.contains_key("tool_call_id");
        if both && self.tool_call_id.as_deref().is_some_and(differs) {
            return Err(bad_request("tool_call_id and metadata.tool_call_id are different"));
        }
        Ok(())
    }

    /// Sets the tool call id in both places where the protocol stores it.
    fn with_tool_call_id(mut self) -> Self {
        if self.kind == TOOL_RESULT || self.kind == TOOL_CALL {
            let from_metadata = self.metadata_text("tool_call_id").map(str::to_owned);
            self.tool_call_id = self.tool_call_id.or(from_metadata);
            if let Some(id) = &self.tool_call_id {
                self.metadata.entry("tool_call_id").or_insert_with(|| id.as_str().into());
            }
        }
        self
    }

    /// Returns the result and the error of a `tool.result`.
    pub fn outcome(&self) -> (Value, Fault) {
        let result = self.content.get("result").cloned().unwrap_or(Value::Null);
        (result, fault_from_error(self.content.get("error")))
    }

    /// Returns the effect on the turn: the result's own control field, else the card's field.
    pub fn after_execution(&self) -> AfterExecution {
        let from_control = self.content.get("result").and_then(AfterExecution::from_control);
        let from_content =
            || self.content_text("after_execution").and_then(|text| text.parse().ok());
        from_control.or_else(from_content).unwrap_or_default()
    }
}

/// Field of an error's detail with the code that the error has in Toolcrib, where UTP's code is
/// too coarse.
const CODE_IN_DETAIL: &str = "toolcrib_code";

/// Field of an error's detail that is `none` if the tool was not started, so that the call had no
/// side effect.
const SIDE_EFFECT_IN_DETAIL: &str = "toolcrib_side_effect";

/// Converts a UTP error to a fault. The detail keeps a code that Toolcrib does not have.
pub fn fault_from_error(error: Option<&Value>) -> Fault {
    let text = |name: &str| error.and_then(|e| e.get(name)).and_then(Value::as_str);
    let message: String =
        text("message").unwrap_or("the tool gave no reason").chars().take(8_000).collect();
    let code = text("code").unwrap_or_default();
    let mut fault = Fault::new(Code::parse(code).unwrap_or(Code::RuntimeError), message);
    if let Some(retryable) = error.and_then(|e| e.get("retryable")).and_then(Value::as_bool) {
        fault = fault.retryable(retryable);
    }
    let mut detail =
        error.and_then(|e| e.get("detail")).filter(|detail| !detail.is_null()).cloned();
    let named = detail.as_ref().and_then(|detail| detail.get(CODE_IN_DETAIL));
    let named = named.and_then(Value::as_str).and_then(Code::parse);
    // A detail may refine the error's code but must not contradict it.
    if let Some(named) = named.filter(|named| named.utp_code() == code) {
        fault.code = named;
        if let Some(Value::Object(fields)) = &mut detail {
            fields.remove(CODE_IN_DETAIL);
        }
        detail = detail.filter(|detail| detail.as_object().is_none_or(|fields| !fields.is_empty()));
    }
    if let Some(Value::Object(fields)) = &mut detail
        && fields.get(SIDE_EFFECT_IN_DETAIL).and_then(Value::as_str) == Some("none")
    {
        fault = fault.without_side_effect();
        fields.remove(SIDE_EFFECT_IN_DETAIL);
        detail = detail.filter(|detail| detail.as_object().is_none_or(|fields| !fields.is_empty()));
    }
    match (Code::parse(code), detail) {
        (Some(_), Some(detail)) => fault.with_detail(detail),
        (None, detail) => fault.with_detail(json!({ "code": code, "detail": detail })),
        (Some(_), None) => fault,
    }
}

fn bad_request(message: impl Into<String>) -> Fault {
    Fault::new(Code::BadRequest, message).without_side_effect()
}

/// Parses the id of a derived card into the call's id and the card type.
pub fn parse_derived_id(card_id: &str) -> Option<(CallId, &'static str)> {
    let (body, kind) = match card_id.strip_prefix("card_")? {
        rest if rest.ends_with("_call") => (rest.strip_suffix("_call")?, TOOL_CALL),
        rest => (rest.strip_suffix("_result")?, TOOL_RESULT),
    };
    format!("{}{body}", CallId::PREFIX).parse().ok().map(|id| (id, kind))
}

/// Returns the id of a call's derived card of this type.
pub fn derived_id(call: &CallId, kind: &str) -> String {
    let body = call.as_str().trim_start_matches(CallId::PREFIX);
    let end = if kind == TOOL_CALL { "call" } else { "result" };
    format!("card_{body}_{end}")
}

/// Returns a fault in UTP's form. UTP has no code for an unknown outcome. The detail names that
/// code, so that the outcome is not taken for a failure of the tool.
pub fn error_json(fault: &Fault, source: &str) -> Value {
    let mut detail = fault.detail.clone().unwrap_or(Value::Null);
    if fault.code == Code::OutcomeUnknown {
        let name = json!(fault.code.as_str());
        match &mut detail {
            Value::Object(fields) => drop(fields.insert(CODE_IN_DETAIL.to_owned(), name)),
            Value::Null => detail = json!({ CODE_IN_DETAIL: name }),
            other => detail = json!({ CODE_IN_DETAIL: name, "detail": other.take() }),
        }
    }
    json!({
        "code": fault.code.utp_code(),
        "message": fault.message,
        "source": source,
        "detail": detail,
        "retryable": fault.retryable,
        "http_status": fault.code.http_status(),
    })
}

/// Returns the `result` that accompanies an error.
pub fn error_as_result(error: &Value) -> Value {
    json!({
        "error_code": error["code"],
        "error_message": error["message"],
        "error": error,
        "error_detail": error["detail"],
    })
}

/// Converts a JSON object to a map.
pub fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::fault::SideEffect;

    #[test]
    fn an_unknown_outcome_is_read_back_as_one() {
        let plain = Fault::new(Code::OutcomeUnknown, "it may have happened");
        for fault in [plain.clone(), plain.with_detail(json!({ "order": 7 }))] {
            let error = error_json(&fault, "tool");
            assert_eq!(error["code"], "internal_error", "UTP's own code stays");
            assert_eq!(error["detail"]["toolcrib_code"], "OUTCOME_UNKNOWN");
            assert_eq!(fault_from_error(Some(&error)), fault);
        }
    }

    #[test]
    fn a_tool_that_was_not_started_had_no_side_effect() {
        let detail = json!({ "toolcrib_side_effect": "none" });
        let error = json!({ "code": "not_found", "message": "no such tool", "detail": detail });
        let fault = fault_from_error(Some(&error));
        assert_eq!((fault.side_effect, fault.detail), (SideEffect::None, None));
        let error = json!({ "code": "not_found", "message": "no such order" });
        assert_eq!(fault_from_error(Some(&error)).side_effect, SideEffect::Possible);
    }

    #[test]
    fn a_detail_does_not_contradict_the_code() {
        let detail = json!({ "toolcrib_code": "OUTCOME_UNKNOWN" });
        let error = json!({ "code": "not_found", "message": "no", "detail": detail });
        assert_eq!(fault_from_error(Some(&error)).code, Code::parse("not_found").unwrap());
        let failed = json!({ "code": "internal_error", "message": "no", "retryable": true });
        assert_eq!(fault_from_error(Some(&failed)).code, Code::RuntimeError);
    }
}
