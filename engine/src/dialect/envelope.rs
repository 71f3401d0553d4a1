//! Toolcrib's own envelope: `{call_id, name, args, timeout_ms, retry, idempotency_key,
//! callback_url}`.

use serde::Serialize;

use super::fields::Fields;
use super::{Answer, Entry, Form, Pending, Said, misfit, written};
use crate::fault::Fault;
use crate::json::Json;

pub(super) fn read(fields: &Fields<'_>) -> Result<Entry, Fault> {
    // Arguments under the field name of another format would be ignored silently, and the tool
    // would run without them.
    for (field, kind) in [("arguments", "function_call"), ("input", "tool_use")] {
        if fields.has(field) && !fields.has("args") {
            let message = format!(
                "an envelope has its arguments in \"args\"; an entry with \"{field}\" says \
                 \"type\":\"{kind}\""
            );
            return Err(misfit(&format!("/{field}"), message));
        }
    }
    let (id, name) = (fields.text("call_id")?, fields.needed("name")?);
    let args = fields.raw("args").unwrap_or_else(Json::empty_object);
    Ok(Entry {
        timeout_ms: fields.number("timeout_ms")?,
        retry: fields.number("retry")?,
        idempotency_key: fields.text("idempotency_key")?,
        callback_url: fields.text("callback_url")?,
        ..Entry::new(Form::Envelope, id, name, args)
    })
}

#[derive(Serialize)]
struct Message<'a> {
    call_id: Option<&'a str>,
    ok: Option<bool>,
    /// The result, or the text that replaces it.
    data: Option<Shown<'a>>,
    error: Option<Said<'a>>,
    metrics: Option<Took>,
    #[serde(flatten)]
    pending: Option<Pending<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Shown<'a> {
    Whole(&'a Json),
    Instead(&'a str),
}

#[derive(Serialize)]
struct Took {
    latency_ms: u64,
    retries: u32,
}

pub(super) fn message(id: Option<&str>, answer: &Answer<'_>) -> Json {
    let whole = answer.data.map(Shown::Whole);
    let instead = || (answer.ok == Some(true)).then_some(Shown::Instead(answer.content));
    let metrics = answer.metrics.map(|m| Took { latency_ms: m.latency_ms, retries: m.retries });
    written(&Message {
        call_id: id,
        ok: answer.ok,
        data: whole.or_else(instead),
        error: answer.error.map(Said::from),
        metrics,
        pending: answer.pending,
    })
}
