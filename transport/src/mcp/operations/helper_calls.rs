//! Handles calls of the helper tools: `call.result`, and the three tools of the search catalogue.
//!
//! `tools.call` makes an ordinary call of another tool, with the same checks and the same
//! durability. The other three only read from the engine, and nothing is stored about them.

use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, JsonObject,
};
use serde_json::{Value, json};
use toolcrib::CallId;
use toolcrib::calls::Until;
use toolcrib::domain::fault::{Code, Fault};

use super::call::{self, ToolDiscovery};
use crate::mcp::request::McpClientInfo;
use crate::mcp::state::RequestScope;
use crate::mcp::tool_list::helper_tools::{
    CALL, CALL_RESULT, CallResultArgs, CatalogueCallArgs, DESCRIBE, DescribeArgs, SEARCH,
    SearchArgs, helper_name, parse_arguments,
};
use crate::mcp::tool_list::{definition, listed_name};
use crate::mcp::tool_result::{self, ResultFormat};

/// Number of search results, unless the arguments set another.
const DEFAULT_SEARCH_LIMIT: usize = 10;

/// Maximum number of search results.
const MAX_SEARCH_LIMIT: usize = 50;

/// Maximum number of tools described at once.
const MAX_DESCRIBED_TOOLS: usize = 20;

/// Maximum number of characters of a description in search results.
const MAX_SUMMARY_CHARS: usize = 240;

/// Time that `call.result` waits, unless its arguments set another.
const DEFAULT_RESULT_WAIT_MS: u64 = 20_000;

/// Handles a call of a helper tool that the caller sees. Returns `None` for any other tool.
pub(crate) async fn handle_call(
    scope: RequestScope<'_>,
    params: &mut CallToolRequestParams,
) -> Option<Result<CallToolResponse, ErrorData>> {
    let RequestScope { shared, view, .. } = scope;
    let helper = helper_name(&params.name);
    if helper == Some(CALL_RESULT) && view.caller.may_invoke() {
        return Some(call_result(scope, params.arguments.take()).await);
    }
    if !shared.uses_search_catalogue(view) {
        return None;
    }
    let take_arguments = |params: &mut CallToolRequestParams| params.arguments.take();
    let outcome = match helper? {
        SEARCH => search(scope, take_arguments(params)).await,
        DESCRIBE => describe(scope, take_arguments(params)),
        CALL => match parse_arguments::<CatalogueCallArgs>(CALL, take_arguments(params)) {
            Ok(args) => {
                params.name = args.name.into();
                params.arguments = Some(args.arguments);
                let discovery = ToolDiscovery::Catalogue;
                return Some(call::call_tool(scope, params.clone(), discovery).await);
            }
            Err(fault) => Err(fault),
        },
        _ => return None,
    };
    let result = outcome.unwrap_or_else(|fault| tool_result::error_result(&fault, None, false));
    Some(Ok(CallToolResponse::Complete(result)))
}

async fn search(
    scope: RequestScope<'_>,
    arguments: Option<JsonObject>,
) -> Result<CallToolResult, Fault> {
    let RequestScope { shared, view, .. } = scope;
    let args: SearchArgs = parse_arguments(SEARCH, arguments)?;
    let limit = args.limit.unwrap_or(DEFAULT_SEARCH_LIMIT);
    if !(1..=MAX_SEARCH_LIMIT).contains(&limit) {
        let message = format!("limit must be from 1 to {MAX_SEARCH_LIMIT}");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect());
    }
    let hits = shared
        .engine
        .registry()
        .search(&view.caller, &args.query, limit)
        .await
        .map_err(into_fault)?;
    if hits.is_empty() {
        let text = "No tool matches. Try other words for what the tool does.";
        let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
        result.structured_content = Some(json!({ "tools": [] }));
        return Ok(result);
    }
    let tools: Vec<Value> = hits
        .iter()
        .map(|hit| {
            let tool = &hit.entry.definition;
            let name = callable_name(scope, &tool.name);
            let summary = summarize_description(&tool.description);
            let mut body = json!({ "name": name, "description": summary });
            if let Some(flags) = definition::injection_flags(tool) {
                body["flags"] = flags;
            }
            body
        })
        .collect();
    let lines = tools.iter().map(|tool| {
        let text = |key: &str| tool[key].as_str().unwrap_or_default().to_owned();
        let flagged =
            if tool["flags"].is_array() { " [flagged: its words are not trusted]" } else { "" };
        format!("{}{flagged}: {}", text("name"), text("description"))
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(json!({ "tools": tools }));
    Ok(result)
}

fn describe(
    scope: RequestScope<'_>,
    arguments: Option<JsonObject>,
) -> Result<CallToolResult, Fault> {
    let RequestScope { shared, view, .. } = scope;
    let args: DescribeArgs = parse_arguments(DESCRIBE, arguments)?;
    if !(1..=MAX_DESCRIBED_TOOLS).contains(&args.names.len()) {
        let message = format!("names must be 1 to {MAX_DESCRIBED_TOOLS} names");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect());
    }
    let mut described = Vec::new();
    for name in &args.names {
        let entry = shared.engine.registry().listed_tool(&view.caller, name).map_err(into_fault)?;
        let mut tool = definition::to_mcp_tool(&entry.shown_definition());
        if let Some(tool) = &mut tool {
            tool.name = callable_name(scope, &tool.name).into();
        }
        described.extend(tool.and_then(|tool| serde_json::to_value(tool).ok()));
    }
    let value = json!({ "tools": described });
    let mut result = CallToolResult::success(vec![ContentBlock::text(value.to_string())]);
    result.structured_content = Some(value);
    Ok(result)
}

/// Returns a tool's name in the form that the MCP client sees, or Toolcrib's name if that form does
/// not identify the tool.
fn callable_name(scope: RequestScope<'_>, name: &str) -> String {
    let RequestScope { shared, view, .. } = scope;
    let listed = listed_name(name, scope.name_form());
    match shared.engine.registry().tool(&view.caller, &listed) {
        Ok(entry) if entry.definition.name == name => listed,
        _ => name.to_owned(),
    }
}

/// Returns the first line of a description, truncated to [`MAX_SUMMARY_CHARS`].
fn summarize_description(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    if first.chars().count() <= MAX_SUMMARY_CHARS {
        return first.to_owned();
    }
    let cut: String = first.chars().take(MAX_SUMMARY_CHARS).collect();
    format!("{cut}…")
}

fn into_fault(error: toolcrib::Error) -> Fault {
    match error {
        toolcrib::Error::Refused { fault, .. } => fault,
        toolcrib::Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}

/// Handles a call of `call.result`.
async fn call_result(
    scope: RequestScope<'_>,
    arguments: Option<JsonObject>,
) -> Result<CallToolResponse, ErrorData> {
    let RequestScope { shared, view, context, .. } = scope;
    let to_error_result = |fault: Fault| {
        Ok(CallToolResponse::Complete(tool_result::error_result(&fault, None, false)))
    };
    let args: CallResultArgs = match parse_arguments(CALL_RESULT, arguments) {
        Ok(args) => args,
        Err(fault) => return to_error_result(fault),
    };
    let excerpt: String = args.tool_call_id.chars().take(80).collect();
    let Ok(id) = args.tool_call_id.parse::<CallId>() else {
        return to_error_result(Fault::new(
            Code::NotFound,
            format!("there is no call \"{excerpt}\""),
        ));
    };
    let wait_ms = args.wait_ms.unwrap_or(DEFAULT_RESULT_WAIT_MS).min(shared.settings.wait_ms);
    let waiting = shared.engine.calls().wait(&view.caller, &id, Until::EndedWithin(wait_ms));
    let found = tokio::select! {
        // Canceling this request does not cancel the call that it asks about.
        () = context.ct.cancelled() => {
            return Err(ErrorData::internal_error("canceled by the client", None));
        }
        // A safety margin over the engine's wait, which has a limit of its own.
        found = tokio::time::timeout(Duration::from_millis(wait_ms + 60_000), waiting) => found,
    };
    // The result is one of `call.result`, which declares no output schema.
    let client = McpClientInfo::from_context(context);
    let format = ResultFormat::new(None, client.revision, scope.name_form()).for_client(&client);
    let call = match found {
        Ok(Ok(call)) => call,
        Ok(Err(error)) => {
            return tool_result::refused_call_result(error, &format)
                .map(CallToolResponse::Complete);
        }
        Err(_) => return Err(ErrorData::internal_error("the wait did not end", None)),
    };
    let result = match call.status.is_terminal() {
        true => tool_result::ended_call_result(&call, &format, shared.settings.result_tokens).await,
        false => {
            let link = call.pending_approval().map(|id| shared.engine.approvals().link(id));
            let helper = listed_name(CALL_RESULT, scope.name_form());
            tool_result::pending_result(&call, &format, &helper, link.as_deref())
        }
    };
    Ok(CallToolResponse::Complete(result))
}
