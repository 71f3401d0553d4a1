//! Parses tool calls as models write them, and formats the answers. Pure.
//!
//! Four formats are detected automatically: Toolcrib's envelope, OpenAI chat, OpenAI Responses, and
//! Anthropic. Every format parses to the same [`ParsedToolCall`]; the answer uses the format of the
//! request. This module knows nothing about any tool.

mod anthropic;
mod arguments;
mod definitions;
mod envelope;
mod fields;
mod openai;
mod responses;

#[cfg(test)]
mod tests;
use std::borrow::Cow;

use fields::RawFields;
use serde::Serialize;

use crate::domain::call::CallMetrics;
use crate::domain::fault::{Code, Fault};
use crate::domain::json::{Json, decode_unicode_escapes};
use crate::results::embedded::decode_embedded_escapes;
use crate::results::mcp_content::{self, MediaPart};

pub use definitions::{ToolFormat, accepts_object, describe_tool, mcp_schema};

/// The format of a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `{call_id, name, args, timeout_ms, retry, idempotency_key}`.
    Envelope,
    /// `{id, type: "function", function: {name, arguments: "…"}}`.
    OpenAi,
    /// `{type: "function_call", call_id, name, arguments: "…"}`.
    Responses,
    /// `{type: "tool_use", id, name, input: {…}}`.
    Anthropic,
}

/// A parsed tool call, regardless of its format.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedToolCall {
    /// Format in which the call was written.
    pub format: CallFormat,
    /// The caller's own id. Models repeat theirs; the id is returned in the answer and never
    /// compared.
    pub id: Option<String>,
    /// The tool's name, or its model-facing name.
    pub name: String,
    /// Arguments, parsed from a JSON text where the format uses one.
    pub args: Json,
    /// Timeout in milliseconds, if the entry sets one; only envelopes can.
    pub timeout_ms: Option<u64>,
    /// Time limit of each attempt, if the entry sets one; only envelopes can.
    pub attempt_timeout_ms: Option<u64>,
    /// Time to wait for input, if the entry sets one; only envelopes can.
    pub input_timeout_ms: Option<u64>,
    /// Maximum number of retries, if the entry sets one; only envelopes can.
    pub retry: Option<u32>,
    /// Idempotency key, if the entry sets one; only envelopes can.
    pub idempotency_key: Option<String>,
    /// Webhook URL that is notified when the call ends.
    pub callback_url: Option<String>,
}

impl ParsedToolCall {
    fn new(format: CallFormat, id: Option<String>, name: String, args: Json) -> Self {
        Self {
            format,
            id: normalize_id(format, id),
            name,
            args,
            timeout_ms: None,
            attempt_timeout_ms: None,
            input_timeout_ms: None,
            retry: None,
            idempotency_key: None,
            callback_url: None,
        }
    }
}

/// A tool call that cannot be parsed, with the parts that could be read.
#[derive(Debug, Clone, PartialEq)]
pub struct CallParseError {
    /// Format in which the call was written, as far as it was recognized.
    pub format: CallFormat,
    /// The caller's own id of the call, if it could be read.
    pub id: Option<String>,
    /// Tool name as written, if it could be read.
    pub name: Option<String>,
    /// The problem and its location.
    pub fault: Box<Fault>,
}

impl CallParseError {
    fn new(format: CallFormat, id: Option<String>, name: Option<String>, fault: Fault) -> Self {
        Self { format, id: normalize_id(format, id), name, fault: Box::new(fault) }
    }
}

/// Treats an empty id from a model as missing. An envelope keeps it, so that validation reports it.
fn normalize_id(format: CallFormat, id: Option<String>) -> Option<String> {
    id.filter(|id| format == CallFormat::Envelope || !id.is_empty())
}

/// Parses one tool call in any supported format.
///
/// ```
/// use toolcrib::Json;
/// use toolcrib::model_formats::{self, CallFormat};
///
/// let asked = r#"{"id":"call_0","type":"function",
///                 "function":{"name":"calc__add","arguments":"{\"a\":1}"}}"#;
/// let entry = model_formats::parse(&Json::parse(asked)?).unwrap();
/// assert_eq!((entry.format, entry.args.text()), (CallFormat::OpenAi, r#"{"a":1}"#));
/// # Ok::<(), toolcrib::domain::json::JsonError>(())
/// ```
pub fn parse(entry: &Json) -> Result<ParsedToolCall, CallParseError> {
    let unreadable = |fault| CallParseError::new(CallFormat::Envelope, None, None, fault);
    let fields = RawFields::parse(entry).map_err(unreadable)?;
    let any_id = || fields.text_if_valid("call_id").or_else(|| fields.text_if_valid("id"));
    let format = detect_format(&fields).map_err(|fault| {
        let (id, name) = (any_id(), fields.text_if_valid("name"));
        CallParseError::new(CallFormat::Envelope, id, name, fault)
    })?;
    let read = match format {
        CallFormat::Envelope => envelope::read(&fields),
        CallFormat::OpenAi => openai::read(&fields),
        CallFormat::Responses => responses::read(&fields),
        CallFormat::Anthropic => anthropic::read(&fields),
    };
    read.map_err(|fault| {
        let id = match format {
            CallFormat::Envelope | CallFormat::Responses => fields.text_if_valid("call_id"),
            CallFormat::OpenAi | CallFormat::Anthropic => fields.text_if_valid("id"),
        };
        let name = match format {
            CallFormat::OpenAi => openai::name_hint(&fields),
            _ => fields.text_if_valid("name"),
        };
        CallParseError::new(format, id, name, fault)
    })
}

/// The fields of [`CallFormat::Envelope`].
pub const ENVELOPE_FIELDS: &[&str] = envelope::FIELDS;

/// Returns the names of an entry's fields that the envelope format does not define. Fields of the
/// other formats belong to their APIs and are not checked; nor are those of an entry whose format
/// is not recognized.
pub fn unknown_envelope_fields(entry: &Json) -> Vec<String> {
    let Ok(fields) = RawFields::parse(entry) else { return Vec::new() };
    if detect_format(&fields) != Ok(CallFormat::Envelope) {
        return Vec::new();
    }
    // The parser already reports arguments under the field name of another format.
    let is_explained = |name: &str| matches!(name, "arguments" | "input") && !fields.has("args");
    let is_unknown = |name: &&str| !ENVELOPE_FIELDS.contains(name) && !is_explained(name);
    fields.names().filter(is_unknown).map(str::to_owned).collect()
}

fn detect_format(fields: &RawFields<'_>) -> Result<CallFormat, Fault> {
    match fields.borrowed_text("type")?.as_deref() {
        Some("function") => Ok(CallFormat::OpenAi),
        Some("function_call") => Ok(CallFormat::Responses),
        Some("tool_use") => Ok(CallFormat::Anthropic),
        // Some OpenAI-compatible servers omit the type.
        None if fields.has("function") => Ok(CallFormat::OpenAi),
        None => Ok(CallFormat::Envelope),
        Some(other) => {
            let excerpt: String = other.chars().take(40).collect();
            let message = format!(
                "\"{excerpt}\" is not a supported type of tool call; use \"function\", \
                 \"function_call\" or \"tool_use\", or an envelope without a type"
            );
            Err(parse_fault("/type", message))
        }
    }
}

/// Returns a validation fault that points at a location in the entry.
fn parse_fault(pointer: &str, message: impl Into<String>) -> Fault {
    let detail = serde_json::json!({ "pointer": pointer });
    Fault::new(Code::ValidationError, message).without_side_effect().with_detail(detail)
}

/// The content of an answer to one entry.
#[derive(Debug, Clone, Copy)]
pub struct EntryAnswer<'a> {
    /// Success or failure of the call; `None` while it is open.
    pub ok: Option<bool>,
    /// Text for a model: the result, the fault or the state.
    pub content: &'a str,
    /// Result for the envelope, unless `content` replaces it.
    pub data: Option<&'a Json>,
    /// Fault of a failed call or of a refused entry.
    pub error: Option<&'a Fault>,
    /// Timing and attempt counts, once the call has ended.
    pub metrics: Option<CallMetrics>,
    /// The ticket of a call that is still open.
    pub pending: Option<PendingNotice<'a>>,
    /// Images, recordings and files of the result, for formats whose tool results take them.
    pub media: &'a [MediaPart],
}

/// The notice about a call that is still open.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PendingNotice<'a> {
    /// Always `pending`.
    pub status: &'static str,
    /// Id of the open call: its ticket.
    pub tool_call_id: &'a str,
    /// Set for a background task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_id: Option<&'a str>,
    /// The approval that the call waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval_id: Option<&'a str>,
    /// Explanation for a caller or a model.
    pub message: &'static str,
    /// The tool's unanswered questions, if the call waits for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub questions: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

/// Formats the answer to an entry in the entry's own format.
pub fn answer_message(format: CallFormat, id: Option<&str>, answer: &EntryAnswer<'_>) -> Json {
    match format {
        CallFormat::Envelope => envelope::message(id, answer),
        CallFormat::OpenAi => openai::message(id.unwrap_or_default(), answer),
        CallFormat::Responses => responses::message(id.unwrap_or_default(), answer),
        CallFormat::Anthropic => anthropic::message(id.unwrap_or_default(), answer),
    }
}

/// Beginning of the text of each message of [`media_message`].
pub const MEDIA_MESSAGE_PREFIX: &str = "Returned by the tool call";

/// Returns a user message with the media of a result in the chat format, whose tool messages take
/// only text; `None` if there are none that it takes.
pub fn media_message(tool: &str, id: &str, media: &[MediaPart]) -> Option<Json> {
    openai::media_message(tool, id, media)
}

/// A fault as models and callers see it.
#[derive(Serialize)]
struct FaultBody<'a> {
    code: &'static str,
    message: &'a str,
    detail: Option<&'a serde_json::Value>,
    retryable: bool,
}

impl<'a> From<&'a Fault> for FaultBody<'a> {
    fn from(fault: &'a Fault) -> Self {
        Self {
            code: fault.code.as_str(),
            message: &fault.message,
            detail: fault.detail.as_ref(),
            retryable: fault.retryable,
        }
    }
}

/// Formats a fault as message content: `{"error":{code, message, detail, retryable}}`.
pub fn fault_content(fault: &Fault) -> String {
    #[derive(Serialize)]
    struct FaultContent<'a> {
        error: FaultBody<'a>,
    }
    to_json(&FaultContent { error: fault.into() }).text().to_owned()
}

/// Formats a result as message content: a string as plain text, an MCP result as its texts,
/// everything else as JSON. Characters are written as themselves, even if the tool escaped them.
pub fn data_content(data: &Json) -> String {
    if let Some(content) = mcp_content::read_content(data) {
        return content.text;
    }
    let text = data.text();
    // Only a document that starts like a string is decoded as one.
    let decoded: Option<String> =
        text.trim_start().starts_with('"').then(|| serde_json::from_str(text).ok()).flatten();
    match decoded {
        Some(text) => match decode_embedded_escapes(&text) {
            Cow::Owned(decoded) => decoded,
            Cow::Borrowed(_) => text,
        },
        None => decode_unicode_escapes(text).into_owned(),
    }
}

/// Formats a ticket as message content.
pub fn pending_content(pending: &PendingNotice<'_>) -> String {
    to_json(pending).text().to_owned()
}

/// Serializes a value. Structs of strings, numbers and JSON always serialize.
fn to_json<T: Serialize>(value: &T) -> Json {
    Json::from_serialize(value).unwrap_or_else(|_| Json::null())
}
