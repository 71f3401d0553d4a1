//! How models write calls of tools, and how they want to be answered. Pure.
//!
//! Four forms are read, and each is recognised by itself: the envelope of Toolcrib, OpenAI's chat
//! form, OpenAI's Responses form, and Anthropic's. What was read is the same [`Entry`] whatever the
//! form was; the answer goes back in the form of the question. Nothing here knows a tool.

mod anthropic;
mod arguments;
mod definitions;
mod envelope;
mod fields;
mod openai;
mod responses;

#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::call::Metrics;
use crate::fault::{Code, Fault};
use crate::json::Json;
use fields::Fields;

pub use definitions::{Format, definition, takes_object};

/// The form of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `{call_id, name, args, timeout_ms, retry, idempotency_key}`.
    Envelope,
    /// `{id, type: "function", function: {name, arguments: "…"}}`.
    OpenAi,
    /// `{type: "function_call", call_id, name, arguments: "…"}`.
    Responses,
    /// `{type: "tool_use", id, name, input: {…}}`.
    Anthropic,
}

/// One call of a tool, as it was asked for in any form.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub form: Form,
    /// The asker's own id. Models repeat theirs; it is given back and never compared.
    pub id: Option<String>,
    /// The tool's name, or the name that models know it by.
    pub name: String,
    pub args: Json,
    pub timeout_ms: Option<u64>,
    pub retry: Option<u32>,
    pub idempotency_key: Option<String>,
    /// Is told of the end.
    pub callback_url: Option<String>,
}

impl Entry {
    fn new(form: Form, id: Option<String>, name: String, args: Json) -> Self {
        Self {
            form,
            id: said(form, id),
            name,
            args,
            timeout_ms: None,
            retry: None,
            idempotency_key: None,
            callback_url: None,
        }
    }
}

/// An entry that cannot be read, with what could be.
#[derive(Debug, Clone, PartialEq)]
pub struct Misfit {
    pub form: Form,
    pub id: Option<String>,
    pub name: Option<String>,
    /// What is wrong, and where.
    pub fault: Box<Fault>,
}

impl Misfit {
    fn new(form: Form, id: Option<String>, name: Option<String>, fault: Fault) -> Self {
        Self { form, id: said(form, id), name, fault: Box::new(fault) }
    }
}

/// Of a model, an id that says nothing is none. Who writes an envelope is told that it is wrong.
fn said(form: Form, id: Option<String>) -> Option<String> {
    id.filter(|id| form == Form::Envelope || !id.is_empty())
}

/// Reads one entry, in whatever form it is.
///
/// ```
/// use toolcrib::{Json, dialect};
/// let asked = r#"{"id":"call_0","type":"function",
///                 "function":{"name":"calc__add","arguments":"{\"a\":1}"}}"#;
/// let entry = dialect::parse(&Json::parse(asked)?).unwrap();
/// assert_eq!((entry.form, entry.args.text()), (dialect::Form::OpenAi, r#"{"a":1}"#));
/// # Ok::<(), toolcrib::json::NotJson>(())
/// ```
pub fn parse(entry: &Json) -> Result<Entry, Misfit> {
    let unreadable = |fault| Misfit::new(Form::Envelope, None, None, fault);
    let fields = Fields::of(entry).map_err(unreadable)?;
    let of_any = || fields.hint("call_id").or_else(|| fields.hint("id"));
    let form = form_of(&fields).map_err(|fault| {
        let (id, name) = (of_any(), fields.hint("name"));
        Misfit::new(Form::Envelope, id, name, fault)
    })?;
    let read = match form {
        Form::Envelope => envelope::read(&fields),
        Form::OpenAi => openai::read(&fields),
        Form::Responses => responses::read(&fields),
        Form::Anthropic => anthropic::read(&fields),
    };
    read.map_err(|fault| {
        let id = match form {
            Form::Envelope | Form::Responses => fields.hint("call_id"),
            Form::OpenAi | Form::Anthropic => fields.hint("id"),
        };
        let name = match form {
            Form::OpenAi => openai::name_hint(&fields),
            _ => fields.hint("name"),
        };
        Misfit::new(form, id, name, fault)
    })
}

fn form_of(fields: &Fields<'_>) -> Result<Form, Fault> {
    match fields.word("type")?.as_deref() {
        Some("function") => Ok(Form::OpenAi),
        Some("function_call") => Ok(Form::Responses),
        Some("tool_use") => Ok(Form::Anthropic),
        // Some servers that speak OpenAI's form leave the type out.
        None if fields.has("function") => Ok(Form::OpenAi),
        None => Ok(Form::Envelope),
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!(
                "an entry of the type \"{shown}\" is not a call of a tool here; known are \
                 \"function\", \"function_call\" and \"tool_use\", and the envelope has no type"
            );
            Err(misfit("/type", message))
        }
    }
}

/// What is wrong with an entry, and where in it.
fn misfit(pointer: &str, message: impl Into<String>) -> Fault {
    let detail = serde_json::json!({ "pointer": pointer });
    Fault::new(Code::ValidationError, message).not_happened().with_detail(detail)
}

/// What there is to say about one entry.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// None while nobody knows.
    pub ok: Option<bool>,
    /// For a model: the result, the fault or the state, in one text.
    pub content: &'a str,
    /// For the envelope: the result, unless the content stands for it.
    pub data: Option<&'a Json>,
    pub error: Option<&'a Fault>,
    pub metrics: Option<Metrics>,
    /// While nobody knows: the ticket.
    pub pending: Option<Pending<'a>>,
}

/// A call that goes on, as its asker is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pending<'a> {
    /// `pending`.
    pub status: &'static str,
    pub tool_call_id: &'a str,
    /// Given for a background task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_id: Option<&'a str>,
    pub message: &'static str,
}

/// The answer to an entry, in the entry's own form.
pub fn message(form: Form, id: Option<&str>, answer: &Answer<'_>) -> Json {
    match form {
        Form::Envelope => envelope::message(id, answer),
        Form::OpenAi => openai::message(id.unwrap_or_default(), answer),
        Form::Responses => responses::message(id.unwrap_or_default(), answer),
        Form::Anthropic => anthropic::message(id.unwrap_or_default(), answer),
    }
}

/// A fault as models and callers read it.
#[derive(Serialize)]
struct Said<'a> {
    code: &'static str,
    message: &'a str,
    detail: Option<&'a serde_json::Value>,
    retryable: bool,
}

impl<'a> From<&'a Fault> for Said<'a> {
    fn from(fault: &'a Fault) -> Self {
        Self {
            code: fault.code.as_str(),
            message: &fault.message,
            detail: fault.detail.as_ref(),
            retryable: fault.retryable,
        }
    }
}

/// A fault as the content of a message: `{"error":{code, message, detail, retryable}}`.
pub fn fault_content(fault: &Fault) -> String {
    #[derive(Serialize)]
    struct Content<'a> {
        error: Said<'a>,
    }
    written(&Content { error: fault.into() }).text().to_owned()
}

/// A result as the content of a message: a text as it is, everything else as JSON.
pub fn data_content(data: &Json) -> String {
    let text = data.text();
    // Only what looks like a text is read as one.
    let said =
        text.trim_start().starts_with('"').then(|| serde_json::from_str(text).ok()).flatten();
    said.unwrap_or_else(|| text.to_owned())
}

/// A ticket as the content of a message.
pub fn pending_content(pending: &Pending<'_>) -> String {
    written(pending).text().to_owned()
}

/// Structs of texts, numbers and JSON always have a JSON form.
fn written<T: Serialize>(value: &T) -> Json {
    Json::of(value).unwrap_or_else(|_| Json::null())
}
