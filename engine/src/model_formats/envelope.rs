//! Toolcrib's own envelope: `{call_id, name, args, timeout_ms, attempt_timeout_ms,
//! input_timeout_ms, retry, idempotency_key, callback_url}`.

use serde::Serialize;

use super::fields::RawFields;
use super::{
    CallFormat, EntryAnswer, FaultBody, ParsedToolCall, PendingNotice, parse_fault, to_json,
};
use crate::domain::fault::Fault;
use crate::domain::json::Json;

/// The fields of an envelope.
pub(super) const FIELDS: &[&str] = &[
    "call_id",
    "name",
    "args",
    "timeout_ms",
    "attempt_timeout_ms",
    "input_timeout_ms",
    "retry",
    "idempotency_key",
    "callback_url",
];

pub(super) fn read(fields: &RawFields<'_>) -> Result<ParsedToolCall, Fault> {
    // Arguments under the field name of another format would be ignored silently, and the tool
    // would run without them.
    for (field, kind) in [("arguments", "function_call"), ("input", "tool_use")] {
        if fields.has(field) && !fields.has("args") {
            let message = format!(
                "an envelope has its arguments in \"args\"; an entry with \"{field}\" needs \
                 \"type\":\"{kind}\""
            );
            return Err(parse_fault(&format!("/{field}"), message));
        }
    }
    let (id, name) = (fields.text("call_id")?, fields.required_text("name")?);
    let args = fields.json("args").unwrap_or_else(Json::empty_object);
    Ok(ParsedToolCall {
        timeout_ms: fields.number("timeout_ms")?,
        attempt_timeout_ms: fields.number("attempt_timeout_ms")?,
        input_timeout_ms: fields.number("input_timeout_ms")?,
        retry: fields.number("retry")?,
        idempotency_key: fields.text("idempotency_key")?,
        callback_url: fields.text("callback_url")?,
        ..ParsedToolCall::new(CallFormat::Envelope, id, name, args)
    })
}

#[derive(Serialize)]
struct EnvelopeMessage<'a> {
    call_id: Option<&'a str>,
    ok: Option<bool>,
    /// The result, or the text that replaces it.
    data: Option<EnvelopeData<'a>>,
    error: Option<FaultBody<'a>>,
    metrics: Option<EnvelopeMetrics>,
    #[serde(flatten)]
    pending: Option<PendingNotice<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EnvelopeData<'a> {
    Whole(&'a Json),
    Substitute(&'a str),
}

#[derive(Serialize)]
struct EnvelopeMetrics {
    latency_ms: u64,
    retries: u32,
}

pub(super) fn message(id: Option<&str>, answer: &EntryAnswer<'_>) -> Json {
    let whole = answer.data.map(EnvelopeData::Whole);
    let instead = || (answer.ok == Some(true)).then_some(EnvelopeData::Substitute(answer.content));
    let metrics =
        answer.metrics.map(|m| EnvelopeMetrics { latency_ms: m.latency_ms, retries: m.retries });
    to_json(&EnvelopeMessage {
        call_id: id,
        ok: answer.ok,
        data: whole.or_else(instead),
        error: answer.error.map(FaultBody::from),
        metrics,
        pending: answer.pending,
    })
}
