//! Converts the outcome of a call into a tool result that a model can read.
//!
//! A failure of the tool, or of its arguments, is a result with `isError` and a text, because the
//! model can react to it. Only a problem of the request itself (the tool does not exist) or of
//! Toolcrib is a protocol error, which models never see.
//!
//! To add a field to tool results: a field of the results of stored calls goes into the `_meta`
//! of [`with_call_meta`], under a name that begins with `toolcrib/`; a field of successes into
//! [`success_result`], of failures into [`error_result`], of calls that have not ended into
//! [`pending_result`]. MCP clients check `structuredContent` against the output schema that they
//! have seen, also in failures, and show nothing of a result that does not match: a failure or a
//! ticket of such a tool has its fields in `_meta`, and a long result has a shortened structure
//! that matches. Results over HTTP are built in `http/wire.rs`; `docs/mcp.md` describes the fields
//! for users.

use std::borrow::Cow;
use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ContentBlock, ErrorCode, JsonObject, MetaObject, Resource, ResourceContents,
    ResultType,
};
use serde_json::{Map, Value, json};
use toolcrib::Json;
use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::domain::fault::{Code, Error, Fault, SideEffect};
use toolcrib::domain::json::decode_unicode_escapes;
use toolcrib::domain::tool::Effect;
use toolcrib::domain::utp::AfterExecution;
use toolcrib::registry::{CatalogEntry, RESULT_READ};
use toolcrib::results::embedded::decode_embedded_escapes;
use toolcrib::results::mcp_content::link_text;
use toolcrib::results::{digest, shorten, tokens};

use super::request::{McpClientInfo, ProtocolRevision};
use super::tool_list::listed_name;

/// Size of a result above which it is converted on a blocking thread.
const BLOCKING_THRESHOLD_BYTES: usize = 64 << 10;

/// Returns the resource URI of a call's full result.
fn result_uri(id: &toolcrib::CallId) -> String {
    format!("toolcrib://tool_calls/{id}/result")
}

/// Returns the tool result of an ended call, in at most `budget` tokens of text.
pub(super) async fn ended_call_result(
    call: &Arc<Call>,
    tool: &ResultFormat,
    budget: usize,
) -> CallToolResult {
    let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    if data.is_none_or(|data| data.text().len() <= BLOCKING_THRESHOLD_BYTES) {
        return from_ended_call(call, tool, budget);
    }
    // Converting a large result would block the async worker thread.
    let (full_call, format) = (call.clone(), tool.clone());
    match tokio::task::spawn_blocking(move || from_ended_call(&full_call, &format, budget)).await {
        Ok(result) => result,
        Err(_) => from_ended_call(call, tool, usize::MAX),
    }
}

fn from_ended_call(call: &Call, tool: &ResultFormat, budget: usize) -> CallToolResult {
    let outcome = call.outcome.as_ref();
    let data = outcome.and_then(|outcome| outcome.data.as_ref());
    let result = match (data, outcome.and_then(|outcome| outcome.error.as_ref())) {
        (_, Some(fault)) => {
            let is_unsafe = call.target.effect == Effect::Irreversible;
            typed_error_result(fault, Some(call.id.as_str()), is_unsafe, tool)
        }
        (Some(data), None) => success_result(call, data, tool, budget),
        (None, None) => CallToolResult::success(vec![]),
    };
    with_call_meta(result, call)
}

/// Adds the `_meta` fields that the results of all calls have: the id of the call and, once it has
/// ended, the effect of its result on the client's run.
fn with_call_meta(mut result: CallToolResult, call: &Call) -> CallToolResult {
    let meta = result.meta.get_or_insert_with(|| MetaObject(JsonObject::new()));
    meta.0.insert("toolcrib/tool_call_id".to_owned(), call.id.as_str().into());
    if let Some(after) = AfterExecution::from_call(call) {
        meta.0.insert("toolcrib/after_execution".to_owned(), after.as_str().into());
    }
    result
}

/// Marks the result of a call that the request joined.
pub(super) fn mark_joined(mut result: CallToolResult) -> CallToolResult {
    let meta = result.meta.get_or_insert_with(|| MetaObject(JsonObject::new()));
    meta.0.insert("toolcrib/joined".to_owned(), true.into());
    result
}

/// Properties of the tool and the MCP client that decide how a result is written.
#[derive(Clone)]
pub(super) struct ResultFormat {
    revision: ProtocolRevision,
    /// The tool, if the MCP client has seen its output schema.
    typed_tool: Option<Arc<CatalogEntry>>,
    /// True if the MCP client handles links to resources.
    has_links: bool,
    /// The form of tool names that the MCP client sees.
    names: ToolNameForm,
    /// The name of the tool that reads long results, as the MCP client sees it.
    reader: String,
}

impl ResultFormat {
    /// Returns the format for a tool. `tool` is `None` if the MCP client has seen no output schema:
    /// it called the tool through the catalogue, or asks `call.result`, which declares none.
    pub(super) fn new(
        tool: Option<&Arc<CatalogEntry>>,
        revision: ProtocolRevision,
        names: ToolNameForm,
    ) -> Self {
        let is_object =
            |schema: &Json| schema.to_value().get("type").is_some_and(|kind| kind == "object");
        // Legacy revisions list only object schemas.
        let has_seen_schema = |tool: &&Arc<CatalogEntry>| {
            let schema = tool.definition.output_schema.as_ref();
            schema.is_some_and(|schema| revision == ProtocolRevision::Modern || is_object(schema))
        };
        let has_links = revision == ProtocolRevision::Modern;
        let typed_tool = tool.filter(has_seen_schema).cloned();
        Self { revision, typed_tool, has_links, names, reader: listed_name(RESULT_READ, names) }
    }

    /// Adapts the format to an MCP client.
    pub(super) fn for_client(self, client: &McpClientInfo) -> Self {
        Self { has_links: client.accepts_resource_links(), ..self }
    }

    /// Returns the name of the call's tool, as the MCP client sees it.
    fn tool_name(&self, call: &Call) -> String {
        listed_name(&call.tool_name, self.names)
    }

    /// Returns whether the MCP client checks structured content.
    fn is_typed(&self) -> bool {
        self.typed_tool.is_some()
    }

    /// Returns a structure within the budget that matches the output schema, in place of one that
    /// exceeds it. A structure that cannot be shortened stays whole, because the MCP client would
    /// show nothing at all without it.
    fn shorten_structure(&self, value: Value, note: &str, budget: usize) -> Option<Value> {
        let tool = self.typed_tool.as_ref()?;
        let schema = tool.output_schema.as_ref();
        let is_valid =
            |value: &Value| schema.is_none_or(|schema| schema.problems(value).is_empty());
        Some(shorten::shorten_value(&value, note, budget, is_valid).unwrap_or(value))
    }
}

fn success_result(call: &Call, data: &Json, tool: &ResultFormat, budget: usize) -> CallToolResult {
    let value = data.to_value();
    if call.target.traits.mcp_results
        && value.get("content").is_some_and(Value::is_array)
        && let Ok(mut result) = serde_json::from_value::<CallToolResult>(value.clone())
    {
        // The result is in MCP's own format already: images and audio stay unchanged, and so do
        // links for an MCP client that handles them.
        result.result_type = Some(ResultType::COMPLETE);
        decode_text_blocks(&mut result.content);
        let mut result = digest_text_blocks(call, data, tool, budget, result);
        if !tool.has_links {
            replace_links(&mut result.content);
        }
        return result;
    }
    let text = match &value {
        Value::String(text) => decode_embedded_escapes(text).into_owned(),
        _ => decode_unicode_escapes(data.text()).into_owned(),
    };
    if let Some(digest) = digest(call, data, tool, budget) {
        let note = read_note(call, &tool.reader, data.text().len());
        let mut result = CallToolResult::success(vec![ContentBlock::text(digest)]);
        result.structured_content = tool.shorten_structure(value, &note, budget);
        return with_result_link(result, call, tool, data.text().len());
    }
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    // Legacy revisions allow only objects as structured content.
    let structured = tool.revision == ProtocolRevision::Modern || value.is_object();
    result.structured_content = structured.then_some(value);
    result
}

/// Describes the omission for a reader who sees only the structure.
fn read_note(call: &Call, reader: &str, bytes: usize) -> String {
    let id = &call.id;
    format!("shortened from {bytes} bytes; read the rest: {reader} {{\"tool_call_id\":\"{id}\"}}")
}

/// Adds the address of the whole result: as a link for MCP clients that handle links, and in
/// `_meta`.
fn with_result_link(
    mut result: CallToolResult,
    call: &Call,
    tool: &ResultFormat,
    bytes: usize,
) -> CallToolResult {
    if tool.has_links {
        result.content.push(result_link(call, bytes));
    }
    set_meta(&mut result, "toolcrib/result_uri", result_uri(&call.id).into());
    set_meta(&mut result, "toolcrib/digest", true.into());
    result
}

fn digest(call: &Call, data: &Json, tool: &ResultFormat, budget: usize) -> Option<String> {
    let (call_id, hint, name) = (&call.id, Some(call.args.text()), &tool.tool_name(call));
    let source = digest::DigestSource { call_id, tool: name, hint, reader: &tool.reader };
    digest::digest(data, budget, &source).map(|digest| digest.text)
}

/// Replaces the text of an MCP result with a digest if its text blocks or its structured content
/// exceed the budget. Images and audio stay.
fn digest_text_blocks(
    call: &Call,
    data: &Json,
    tool: &ResultFormat,
    budget: usize,
    mut result: CallToolResult,
) -> CallToolResult {
    let words: Vec<&str> = result.content.iter().filter_map(block_text).collect();
    let words = Json::from_value(&Value::String(words.join("\n")));
    let structure = result.structured_content.as_ref().map(Json::from_value);
    let exceeds_budget = |text: &Json| tokens::exceeds(text.text(), budget);
    let worded = exceeds_budget(&words);
    if !worded && !structure.as_ref().is_some_and(exceeds_budget) {
        return result;
    }
    // Tools that return both usually repeat the same content, so the digest covers the structured
    // content only if the text is within the budget.
    let stripped = strip_media(data, !worded);
    let Some(digest) = digest(call, &stripped, tool, budget) else { return result };
    result.content.retain(|block| block_text(block).is_none());
    result.content.insert(0, ContentBlock::text(digest));
    let note = read_note(call, &tool.reader, data.text().len());
    let structure = result.structured_content.take();
    let shortened = structure.map(|value| tool.shorten_structure(value, &note, budget));
    result.structured_content = shortened.flatten();
    with_result_link(result, call, tool, data.text().len())
}

/// Writes the characters of texts that hold JSON as themselves, because a model reads these texts.
fn decode_text_blocks(blocks: &mut [ContentBlock]) {
    for block in blocks {
        if let ContentBlock::Text(text) = block
            && let Cow::Owned(decoded) = decode_embedded_escapes(&text.text)
        {
            text.text = decoded;
        }
    }
}

/// Replaces links to resources by texts, for an MCP client that may fail at a link.
fn replace_links(blocks: &mut [ContentBlock]) {
    for block in blocks {
        if let ContentBlock::ResourceLink(link) = block {
            let text = link_text(&link.name, &link.uri, link.description.as_deref());
            *block = ContentBlock::text(text);
        }
    }
}

/// Returns the text of a block that a model can read.
fn block_text(block: &ContentBlock) -> Option<&str> {
    match block {
        ContentBlock::Text(text) => Some(&text.text),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => Some(text),
            _ => None,
        },
        _ => None,
    }
}

/// Returns an MCP result without the bytes of images and audio. Everything else keeps its position,
/// so paths in a digest of it are valid in the full result.
fn strip_media(data: &Json, structured: bool) -> Json {
    let mut whole = data.to_value();
    let blocks = whole.get_mut("content").and_then(Value::as_array_mut);
    for block in blocks.into_iter().flatten().filter_map(Value::as_object_mut) {
        block.remove("data");
        if let Some(resource) = block.get_mut("resource").and_then(Value::as_object_mut) {
            resource.remove("blob");
        }
    }
    if let Some(whole) = whole.as_object_mut() {
        whole.retain(|key, _| key == "content" || structured && key == "structuredContent");
    }
    Json::from_value(&whole)
}

/// Returns a failure as text, with the fault as structured content. `is_irreversible` is true if
/// the failed call was one of an irreversible tool.
pub(super) fn error_result(
    fault: &Fault,
    call_id: Option<&str>,
    is_irreversible: bool,
) -> CallToolResult {
    let again = match (fault.code, fault.side_effect) {
        (_, SideEffect::Possible) if is_irreversible => {
            "it may have taken effect, so a retry is not safe: the same call may do it a second \
             time"
        }
        _ if fault.retryable => "the same call can succeed later",
        // The caller should check whether the effect happened before calling again.
        (Code::OutcomeUnknown | Code::Timeout | Code::Canceled, SideEffect::Possible) => {
            "the same call may do it a second time"
        }
        (Code::Timeout | Code::Canceled, SideEffect::None) => "nothing was done",
        _ => "the same call will fail again",
    };
    let text = format!("{}: {}\n({}; {again})", fault.code, fault.message, fault.hint());
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    let mut error = json!({
        "code": fault.code.as_str(),
        "message": fault.message,
        "retryable": fault.retryable,
    });
    if let Some(detail) = &fault.detail {
        error["detail"] = detail.clone();
    }
    set_meta(&mut result, "toolcrib/error", error.clone());
    let mut structured = json!({ "error": error });
    if let Some(id) = call_id {
        structured["tool_call_id"] = id.into();
    }
    result.structured_content = Some(structured);
    result
}

/// Returns a failure of a tool. If the MCP client has seen an output schema, which the fault does
/// not match, the fault is only in `_meta`.
fn typed_error_result(
    fault: &Fault,
    call_id: Option<&str>,
    is_irreversible: bool,
    tool: &ResultFormat,
) -> CallToolResult {
    let mut result = error_result(fault, call_id, is_irreversible);
    if tool.is_typed() {
        result.structured_content = None;
    }
    result
}

/// Sets a field of `_meta`.
fn set_meta(result: &mut CallToolResult, field: &str, value: Value) {
    let meta = result.meta.get_or_insert_with(|| MetaObject(JsonObject::new()));
    meta.0.insert(field.to_owned(), value);
}

/// Returns a refused call as a text result if the model can act on it, otherwise as a protocol
/// error.
pub(super) fn refused_call_result(
    error: Error,
    tool: &ResultFormat,
) -> Result<CallToolResult, ErrorData> {
    match error {
        Error::Refused { fault, .. } if fault.code == Code::ToolNotFound => {
            Err(ErrorData::invalid_params(fault.message, fault.detail))
        }
        Error::Refused { fault, .. } => Ok(typed_error_result(&fault, None, false, tool)),
        internal @ Error::Internal(_) => Err(protocol_error(internal)),
    }
}

/// Returns the protocol error for a refused request that is not a tool call.
pub(super) fn protocol_error(error: Error) -> ErrorData {
    match error {
        Error::Refused { fault, .. } => {
            let code = match fault.code {
                Code::Overloaded | Code::UpstreamUnavailable | Code::Internal => {
                    ErrorCode::INTERNAL_ERROR
                }
                _ => ErrorCode::INVALID_PARAMS,
            };
            let data = json!({ "code": fault.code.as_str(), "retryable": fault.retryable });
            ErrorData::new(code, fault.message, Some(data))
        }
        Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            ErrorData::internal_error("internal error; see the server's log", None)
        }
    }
}

/// Returns the text for a call that has not ended and whose MCP client cannot be notified later: it
/// names the call id and how to get the result with the tool `helper`.
pub(super) fn pending_result(
    call: &Call,
    tool: &ResultFormat,
    helper: &str,
    approval_link: Option<&str>,
) -> CallToolResult {
    let id = call.id.as_str();
    let questions = call.elicitation.as_ref().filter(|_| call.waits_for_input());
    let questions = questions.map(|elicitation| &elicitation.unanswered);
    let state = match (call.status, questions) {
        (Status::Pending, Some(_)) => "waits for input that a person must give",
        (Status::Pending, None) if call.waits_for_approval() => "waits for an approval",
        (Status::Pending, None) => "waits to be executed",
        _ => "is being executed",
    };
    let described =
        questions.map(|questions| describe_questions(call, questions)).unwrap_or_default();
    let described = match approval_link {
        Some(link) => format!(" {}", approval_message(call, link)),
        None => described,
    };
    let name = tool.tool_name(call);
    let text = format!(
        "{name} {state} and continues in the background. Its ticket is {id}.{described} To get the \
         result, call the tool \"{helper}\" with {{\"tool_call_id\": \"{id}\"}}. Do not call \
         {name} again for the same purpose: that would be a second call."
    );
    // Some MCP clients show a model only the structure.
    let status = call.status.as_str();
    let mut ticket = json!({ "tool_call_id": id, "status": status, "message": text });
    if let Some(questions) = questions {
        ticket["questions"] = Value::Object(questions.clone());
        ticket["input_deadline_at_ms"] = call.deadline_ms.into();
    }
    if let Some(approval_id) = call.pending_approval() {
        ticket["hold"] = "approval".into();
        ticket["approval_id"] = approval_id.into();
        ticket["link"] = approval_link.into();
    }
    // An MCP client that has seen an output schema rejects a success that does not match it, and
    // any structured content that does not.
    let mut result = match tool.is_typed() {
        true => CallToolResult::error(vec![ContentBlock::text(text)]),
        false => CallToolResult::success(vec![ContentBlock::text(text)]),
    };
    set_meta(&mut result, "toolcrib/ticket", ticket.clone());
    result.structured_content = (!tool.is_typed()).then_some(ticket);
    with_call_meta(result, call)
}

/// Describes the approval that a call waits for, for a person.
pub(super) fn approval_message(call: &Call, link: &str) -> String {
    let id = call.pending_approval().unwrap_or_default();
    format!(
        "A rule asks for a person's approval of this call of {} with the arguments {}. An approver \
         decides at {link}, with POST /v1/approvals/decide, or on the command line with: toolcrib \
         approvals approve {id} (or: reject {id} --reason TEXT).",
        call.target.tool,
        call.target.args.text()
    )
}

/// Returns the texts of questions with their keys.
pub(super) fn question_texts(questions: &Map<String, Value>) -> String {
    let texts = questions.iter().map(|(key, question)| {
        let message = question["params"]["message"].as_str().unwrap_or("see its ticket");
        format!("{key}: \"{message}\"")
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// Describes the unanswered questions of a call, and the ways to answer them, for an MCP client
/// that cannot receive them.
fn describe_questions(call: &Call, questions: &Map<String, Value>) -> String {
    let (id, texts) = (&call.id, question_texts(questions));
    format!(
        " It asks {texts}. A person answers over HTTP, with POST /v1/tool_calls/{id}/answer and \
         {{\"answers\": {{KEY: {{\"action\": \"accept\", \"content\": {{…}}}}}}}}, or on the \
         command line, with: toolcrib calls answer {id} --question KEY FIELD=VALUE. An MCP client \
         that supports elicitation or tasks gets the questions itself. Without an answer, the call \
         ends {} s after this request.",
        call.input_timeout_ms / 1_000
    )
}

/// Returns a link to a call's full result.
fn result_link(call: &Call, bytes: usize) -> ContentBlock {
    let resource = Resource::new(result_uri(&call.id), format!("result of {}", call.tool_name))
        .with_description("The whole result; the text next to this link is a digest of it")
        .with_mime_type("application/json")
        .with_size(bytes as u64);
    ContentBlock::resource_link(resource)
}
