//! A call's outcome as a tool result that a model can read.
//!
//! What went wrong with the tool, or with the arguments it was given, is a result with `isError`,
//! in words: the model is the one that can do something about it. Only what is about the request
//! itself (there is no such tool) or about the crib is a protocol error, which models never see.

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ContentBlock, ErrorCode, Resource, ResourceContents, ResultType,
};
use serde_json::{Value, json};
use toolcrib::call::{Call, Hold, Status};
use toolcrib::digest;
use toolcrib::fault::{Code, Error, Fault, Happened};
use toolcrib::{Executor, Json, tokens};

use super::tools::Revision;

/// The address of a call's whole result.
pub(super) fn result_uri(id: &toolcrib::CallId) -> String {
    format!("toolcrib://tool_calls/{id}/result")
}

/// How a call that has ended is told, in so many tokens.
pub(super) fn ended(call: &Call, tool: Shape, budget: usize) -> CallToolResult {
    let outcome = call.outcome.as_ref();
    match (outcome.and_then(|o| o.data.as_ref()), outcome.and_then(|o| o.error.as_ref())) {
        (_, Some(fault)) => failed(fault, Some(call.id.as_str())),
        (Some(data), None) => succeeded(call, data, tool, budget),
        (None, None) => CallToolResult::success(vec![]),
    }
}

/// What matters about the tool to how its result is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) revision: Revision,
    /// Whether the client was told a schema for the structured result.
    pub(super) promised: bool,
}

fn succeeded(call: &Call, data: &Json, tool: Shape, budget: usize) -> CallToolResult {
    let value = data.value();
    if call.target.executor == Executor::Mcp
        && value.get("content").is_some_and(Value::is_array)
        && let Ok(mut result) = serde_json::from_value::<CallToolResult>(value.clone())
    {
        // An MCP server said it in MCP's own words: images, sounds and links stay what they are.
        result.result_type = Some(ResultType::COMPLETE);
        return digested_words(call, data, tool, budget, result);
    }
    let text = match &value {
        Value::String(text) => text.clone(),
        _ => data.text().to_owned(),
    };
    if let Some(digest) = digest(call, data, budget) {
        let content = vec![ContentBlock::text(digest), link(call, data.text().len())];
        let mut result = CallToolResult::success(content);
        // Where a structure was promised it has to be there, however long it is.
        result.structured_content = tool.promised.then_some(value);
        return result;
    }
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    // The older wire has structured results for objects only.
    let structured = tool.revision == Revision::Modern || value.is_object();
    result.structured_content = structured.then_some(value);
    result
}

fn digest(call: &Call, data: &Json, budget: usize) -> Option<String> {
    let (call_id, tool, hint) = (&call.id, call.tool_name.as_str(), Some(call.args.text()));
    let source = digest::Source { call_id, tool, hint };
    digest::digest(data, budget, &source).map(|digest| digest.text)
}

/// An MCP result whose words are too many, in its texts or in a structure that nobody was promised:
/// their digest in place of both. Pictures and sounds stay.
fn digested_words(
    call: &Call,
    data: &Json,
    tool: Shape,
    budget: usize,
    mut result: CallToolResult,
) -> CallToolResult {
    let words: Vec<&str> = result.content.iter().filter_map(words_of).collect();
    let words = Json::of_value(&Value::String(words.join("\n")));
    let structure = result.structured_content.as_ref().filter(|_| !tool.promised);
    let structure = structure.map(Json::of_value);
    let over = |text: &Json| tokens::exceeds(text.text(), budget);
    let worded = over(&words);
    if !worded && !structure.as_ref().is_some_and(over) {
        return result;
    }
    // Most who answer with both say the same twice.
    let Some(digest) = digest(call, &without_media(data, !worded), budget) else { return result };
    result.content.retain(|block| words_of(block).is_none());
    result.content.insert(0, ContentBlock::text(digest));
    result.content.push(link(call, data.text().len()));
    if !tool.promised {
        result.structured_content = None;
    }
    result
}

/// What a block has for a model to read.
fn words_of(block: &ContentBlock) -> Option<&str> {
    match block {
        ContentBlock::Text(text) => Some(&text.text),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => Some(text),
            _ => None,
        },
        _ => None,
    }
}

/// An MCP result without the bytes of pictures and sounds. Everything else is where it is in the
/// whole, so what a digest of it says about places can be read there.
fn without_media(data: &Json, structured: bool) -> Json {
    let mut whole = data.value();
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
    Json::of_value(&whole)
}

/// A failure in words, with the fault beside it.
pub(super) fn failed(fault: &Fault, call_id: Option<&str>) -> CallToolResult {
    let again = match (fault.code, fault.happened) {
        _ if fault.retryable => "the same call can succeed later",
        // To call it again is for who has looked whether it happened.
        (Code::OutcomeUnknown | Code::Timeout | Code::Canceled, Happened::Maybe) => {
            "the same call may do it a second time"
        }
        (Code::Timeout | Code::Canceled, Happened::No) => "nothing was done",
        _ => "the same call will fail again",
    };
    let text = format!("{}: {}\n({}; {again})", fault.code, fault.message, fault.code.help());
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    let mut error = json!({
        "code": fault.code.as_str(),
        "message": fault.message,
        "retryable": fault.retryable,
    });
    if let Some(detail) = &fault.detail {
        error["detail"] = detail.clone();
    }
    let mut structured = json!({ "error": error });
    if let Some(id) = call_id {
        structured["tool_call_id"] = id.into();
    }
    result.structured_content = Some(structured);
    result
}

/// A refused call: in words where the model can act on it, otherwise a protocol error.
pub(super) fn refused(error: Error) -> Result<CallToolResult, ErrorData> {
    match error {
        Error::Refused { fault, .. } if fault.code == Code::ToolNotFound => {
            Err(ErrorData::invalid_params(fault.message, fault.detail))
        }
        Error::Refused { fault, .. } => Ok(failed(&fault, None)),
        internal @ Error::Internal(_) => Err(protocol_error(internal)),
    }
}

/// A refusal of a request that is not a call of a tool.
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

/// The call goes on, and the client cannot be told later: the ticket, and how to ask for it.
pub(super) fn not_finished(call: &Call, tool: &Shape) -> CallToolResult {
    let id = call.id.as_str();
    let state = match (call.status, call.hold) {
        (Status::Pending, Some(Hold::Input)) => {
            "waits for an answer to what it has asked, which somebody must give,"
        }
        (Status::Pending, _) => "waits to be executed",
        _ => "is being executed",
    };
    let text = format!(
        "{} {state} and will go on. Its ticket is {id}. To get the result, call the tool \
         \"call.result\" with {{\"tool_call_id\": \"{id}\"}}. Do not call {} again for the same \
         purpose: that would be a second call.",
        call.tool_name, call.tool_name
    );
    let ticket = json!({ "tool_call_id": id, "status": call.status.as_str() });
    // A client that was promised a schema refuses a success that does not fit it.
    let mut result = match tool.promised {
        true => CallToolResult::error(vec![ContentBlock::text(text)]),
        false => CallToolResult::success(vec![ContentBlock::text(text)]),
    };
    result.structured_content = Some(ticket);
    result
}

/// A link to a call's whole result.
pub(super) fn link(call: &Call, bytes: usize) -> ContentBlock {
    let resource = Resource::new(result_uri(&call.id), format!("result of {}", call.tool_name))
        .with_description("The whole result; the text beside this link is a digest of it")
        .with_mime_type("application/json")
        .with_size(bytes as u64);
    ContentBlock::resource_link(resource)
}
