//! The wire format of UTP: headers, commands, cards and replies.

use std::str::FromStr;

use async_nats::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::{Error, Fault};
use toolcrib::domain::utp::{Card, InboxItem, OutboxMessage, trace};
use toolcrib::ports::source::{Attempt, ToolCommand};
use toolcrib::utp::ReportReceipt;

/// Names of the headers that every message has, built once.
pub mod names {
    use async_nats::HeaderName;

    pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
    pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
    pub(crate) const TIMESTAMP: HeaderName = HeaderName::from_static("CG-Timestamp");
    pub const VERSION: HeaderName = HeaderName::from_static("CG-Version");
    pub const KIND: HeaderName = HeaderName::from_static("CG-Msg-Type");
    pub const SENDER: HeaderName = HeaderName::from_static("CG-Sender");
    pub const DEPTH: HeaderName = HeaderName::from_static("CG-Recursion-Depth");
}

/// Returns the headers that every command and event has.
pub fn base_headers(version: &str, kind: &str, traceparent: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    set_header(&mut headers, names::TRACEPARENT, traceparent);
    set_header(&mut headers, names::TIMESTAMP, &now_ms().to_string());
    set_header(&mut headers, names::VERSION, version);
    set_header(&mut headers, names::KIND, kind);
    set_header(&mut headers, names::SENDER, "toolcrib");
    headers
}

/// Sets a header. Returns `false`, and sets nothing, if the value contains a line break.
pub fn set_header(headers: &mut HeaderMap, name: HeaderName, value: &str) -> bool {
    let Ok(value) = HeaderValue::from_str(value) else { return false };
    headers.insert(name, value);
    true
}

/// Returns the current time in Unix milliseconds.
pub fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// The payload of a command. In version `v1r4` the identity is in the headers and not in the
/// payload.
#[derive(Serialize)]
struct CommandBody<'a> {
    #[serde(flatten)]
    identity: Option<CommandIdentity<'a>>,
    tool_name: &'a str,
    after_execution: &'a str,
    tool_call_card_id: &'a str,
}

#[derive(Serialize)]
struct CommandIdentity<'a> {
    project_id: &'a str,
    channel: &'a str,
    agent_id: &'a str,
    agent_turn_id: &'a str,
    turn_epoch: u64,
    step_id: &'a str,
    tool_call_id: &'a str,
    context_box_id: Option<&'a str>,
    effect: &'a str,
    deadline_at_ms: u64,
}

/// Encodes a command as its subject, headers and payload, or returns the reason why that is
/// impossible.
pub fn encode_command(
    version: &str,
    attempt: &Attempt,
    command: &ToolCommand,
) -> Result<(String, HeaderMap, Vec<u8>), String> {
    let ToolCommand { route, binding, card_id, traceparent, .. } = command;
    let subject = toolcrib::domain::utp::subject::fill_template(
        binding.target_subject.as_deref().unwrap_or_default(),
        version,
        &attempt.project,
        &route.channel,
        &route.agent_id,
    )?;
    let mut headers = base_headers(version, "ToolCommand", traceparent);
    set_header(&mut headers, names::DEPTH, &route.depth.to_string());
    if let Some(state) = &route.tracestate {
        set_header(&mut headers, names::TRACESTATE, state);
    }
    let in_headers = version == HEADER_IDENTITY_VERSION;
    if in_headers {
        let identity: [(&'static str, &str); 9] = [
            ("CG-Project-Id", &attempt.project),
            ("CG-Channel-Id", &route.channel),
            ("CG-Agent-Id", &route.agent_id),
            ("CG-Turn-Id", &route.turn_id),
            ("CG-Turn-Epoch", &route.epoch.to_string()),
            ("CG-Step-Id", &route.step_id),
            ("CG-Tool-Call-Id", &route.tool_call_id),
            (EFFECT_HEADER, attempt.effect.as_str()),
            (DEADLINE_HEADER, &attempt.deadline_ms.to_string()),
        ];
        for (name, value) in identity {
            // A tool service could not report without these headers.
            if !set_header(&mut headers, HeaderName::from_static(name), value) {
                return Err(format!("{name} cannot be a header: it has a line break in it"));
            }
        }
    }
    let identity = (!in_headers).then(|| CommandIdentity {
        project_id: &attempt.project,
        channel: &route.channel,
        agent_id: &route.agent_id,
        agent_turn_id: &route.turn_id,
        turn_epoch: route.epoch,
        step_id: &route.step_id,
        tool_call_id: &route.tool_call_id,
        context_box_id: route.context_box_id.as_deref(),
        effect: attempt.effect.as_str(),
        deadline_at_ms: attempt.deadline_ms,
    });
    let body = CommandBody {
        identity,
        tool_name: &attempt.tool,
        after_execution: binding.after_execution.as_str(),
        tool_call_card_id: card_id,
    };
    let payload = serde_json::to_vec(&body).map_err(|error| error.to_string())?;
    Ok((subject, headers, payload))
}

/// The version that moves the identity into headers.
pub(crate) const HEADER_IDENTITY_VERSION: &str = "v1r4";
/// Headers for fields that the payload of that version lacks: the effect, which says whether the
/// tool may run twice, and the deadline of the call.
pub const EFFECT_HEADER: &str = "Toolcrib-Effect";
pub const DEADLINE_HEADER: &str = "Toolcrib-Deadline-At-Ms";

/// Encodes the headers and the payload of an outbox message for a protocol version. A value that is
/// not a valid header is omitted.
pub fn encode_outbox_message(version: &str, message: &OutboxMessage) -> (HeaderMap, Value) {
    let mut headers = base_headers(version, "dict", "");
    for (name, value) in &message.headers {
        let Ok(name) = HeaderName::from_str(name) else { continue };
        set_header(&mut headers, name, value);
    }
    let mut payload = message.payload.clone();
    if let (HEADER_IDENTITY_VERSION, Value::Object(fields)) = (version, &mut payload) {
        let identity = [
            ("agent_id", "CG-Agent-Id"),
            ("agent_turn_id", "CG-Turn-Id"),
            ("turn_epoch", "CG-Turn-Epoch"),
            ("step_id", "CG-Step-Id"),
        ];
        for (field, header) in identity {
            let Some(value) = fields.remove(field) else { continue };
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            set_header(&mut headers, HeaderName::from_static(header), &text);
        }
    }
    (headers, payload)
}

/// The JSON form of a card.
#[derive(Serialize)]
pub struct WireCard<'a> {
    card_id: &'a str,
    project_id: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    content: &'a Map<String, Value>,
    created_at: String,
    author_id: &'a str,
    metadata: &'a Map<String, Value>,
    tool_calls: Option<&'a Value>,
    tool_call_id: Option<&'a str>,
    ttl_seconds: Option<u64>,
}

impl<'a> WireCard<'a> {
    /// Returns the JSON form of this card.
    pub fn new(card: &'a Card) -> Self {
        Self {
            card_id: &card.card_id,
            project_id: &card.project,
            kind: &card.kind,
            content: &card.content,
            created_at: format_rfc3339(card.created_ms),
            author_id: &card.author_id,
            metadata: &card.metadata,
            tool_calls: card.tool_calls.as_ref(),
            tool_call_id: card.tool_call_id.as_deref(),
            ttl_seconds: card.ttl_seconds,
        }
    }
}

/// Cards that are sent before the commands that name them.
#[derive(Serialize)]
pub struct PrefetchedCardsBody<'a> {
    pub cards: &'a [Box<RawValue>],
}

/// Returns a card as a JSON value.
pub fn card_json(card: &Card) -> Value {
    serde_json::to_value(WireCard::new(card)).unwrap_or_default()
}

/// Formats a time as RFC 3339.
pub fn format_rfc3339(unix_ms: u64) -> String {
    let ms = i64::try_from(unix_ms).unwrap_or_default();
    jiff::Timestamp::from_millisecond(ms).map(|time| time.to_string()).unwrap_or_default()
}

/// Returns the JSON form of an inbox item.
pub fn inbox_item_json(item: &InboxItem) -> Value {
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
        "created_at": format_rfc3339(item.created_ms),
    })
}

/// The reply to an accepted report.
#[derive(Serialize)]
pub struct IngestedBody<'a> {
    ok: bool,
    inbox_id: Option<&'a str>,
    duplicate: bool,
    late: bool,
    call_id: &'a str,
    call_status: &'a str,
}

impl<'a> IngestedBody<'a> {
    /// Returns the reply for this receipt.
    pub fn new(ingested: &'a ReportReceipt) -> Self {
        Self {
            ok: true,
            inbox_id: ingested.inbox_id.as_deref(),
            duplicate: ingested.is_duplicate,
            late: ingested.is_late,
            call_id: ingested.call.id.as_str(),
            call_status: ingested.call.status.as_str(),
        }
    }
}

/// Returns the reply to an accepted report as a JSON value.
pub fn ingested_json(ingested: &ReportReceipt) -> Value {
    serde_json::to_value(IngestedBody::new(ingested)).unwrap_or_default()
}

/// Returns the JSON form of an error.
pub fn error_json(error: &Error) -> Value {
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
        "code": fault.code.utp_code(),
        "message": fault.message,
        "detail": detail,
        "retryable": fault.retryable,
    });
    json!({ "ok": false, "error": error })
}

/// Returns headers as a map with names in lower case.
pub fn header_map(headers: Option<&HeaderMap>) -> Map<String, Value> {
    UtpHeaders::from_message(headers).to_lowercase_map()
}

/// Headers with case-insensitive lookup.
#[derive(Debug, Clone, Default)]
pub struct UtpHeaders<'a>(Vec<(&'a str, &'a str)>);

impl<'a> UtpHeaders<'a> {
    /// Returns the headers of a message, with the first value of each name.
    pub fn from_message(headers: Option<&'a HeaderMap>) -> Self {
        let all = headers.into_iter().flat_map(HeaderMap::iter);
        let all = all.filter_map(|(name, values)| Some((name.as_ref(), values.first()?.as_str())));
        Self(all.collect())
    }

    /// Reads headers from a JSON object. Values that are not strings are ignored.
    pub fn from_json(headers: &'a Map<String, Value>) -> Self {
        let all = headers.iter();
        Self(all.filter_map(|(name, value)| Some((name.as_str(), value.as_str()?))).collect())
    }

    /// Adds the headers of `others` as fallbacks for missing names.
    pub fn or_fallback(mut self, others: &Self) -> Self {
        self.0.extend(&others.0);
        self
    }

    /// Returns the value of a header.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| *value)
    }

    /// Returns the headers as a map with names in lower case.
    pub(crate) fn to_lowercase_map(&self) -> Map<String, Value> {
        let all = self.0.iter().rev();
        all.map(|(name, value)| (name.to_lowercase(), Value::from(*value))).collect()
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for UtpHeaders<'a> {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a str)>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}
