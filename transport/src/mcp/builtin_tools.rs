//! The built-in tools of the MCP transport. They query the engine about calls and tools and create
//! no calls, so they are handled here and nothing is stored.

use std::sync::Arc;
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::RoleServer;
use rmcp::model::{CallToolResponse, JsonObject, Tool, ToolAnnotations};
use rmcp::service::RequestContext;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use toolcrib::CallId;
use toolcrib::domain::fault::{Code, Fault};

use super::call::{McpClientInfo, result_format, with_call_id};
use super::server::{CallerView, McpHandler};
use crate::mcp::tool_result;

/// Returns the result of a call that had not ended when its MCP client got a response.
pub(super) const CALL_RESULT: &str = "call.result";

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ResultArgs")]
struct CallResultArgs {
    /// Id of the tool call: tc_ followed by 26 letters and digits.
    tool_call_id: String,
    /// Maximum time to wait for the result, in milliseconds. Default: 20000.
    #[serde(default)]
    wait_ms: Option<u64>,
}

/// Returns the built-in tools that are listed, sorted by name.
pub(super) fn tools() -> Vec<Tool> {
    vec![read_only_tool::<CallResultArgs>(
        CALL_RESULT,
        "Result of a call",
        "Gives the result of a tool call that was not finished when it was answered, by its \
         ticket. Waits a while for it; ask again when it is still not there.",
    )]
}

/// Returns the definition of a built-in tool that only reads.
pub(super) fn read_only_tool<A: JsonSchema>(
    name: &'static str,
    title: &str,
    text: &'static str,
) -> Tool {
    let schema = match schemars::schema_for!(A).to_value() {
        Value::Object(schema) => schema,
        _ => JsonObject::new(),
    };
    let annotations = ToolAnnotations::new()
        .read_only(true)
        .destructive(false)
        .idempotent(true)
        .open_world(false);
    Tool::new(name, text, Arc::new(schema)).with_title(title).with_annotations(annotations)
}

/// Deserializes the arguments, or returns a fault that says what is wrong with them.
pub(super) fn parse_arguments<A: DeserializeOwned>(
    tool: &str,
    arguments: Option<JsonObject>,
) -> Result<A, Fault> {
    let value = Value::Object(arguments.unwrap_or_default());
    serde_json::from_value(value).map_err(|error| {
        let message = format!("the arguments of {tool} do not fit its schema: {error}");
        Fault::new(Code::ValidationError, message).without_side_effect()
    })
}

/// Handles a call of `call.result`.
pub(super) async fn call_result(
    server: &McpHandler,
    view: &CallerView,
    given: Option<JsonObject>,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let told =
        |fault: Fault| Ok(CallToolResponse::Complete(tool_result::error_result(&fault, None)));
    let args: CallResultArgs = match parse_arguments(CALL_RESULT, given) {
        Ok(args) => args,
        Err(fault) => return told(fault),
    };
    let shown: String = args.tool_call_id.chars().take(80).collect();
    let Ok(id) = args.tool_call_id.parse::<CallId>() else {
        return told(Fault::new(Code::NotFound, format!("there is no call \"{shown}\"")));
    };
    let wait_ms = args.wait_ms.unwrap_or(20_000).min(server.settings().wait_ms);
    let waiting = server.engine().wait(&view.caller, &id, wait_ms);
    let found = tokio::select! {
        // Canceling this request does not cancel the call that it asks about.
        () = context.ct.cancelled() => {
            return Err(ErrorData::internal_error("canceled by the client", None));
        }
        // A safety margin over the engine's wait, which has a limit of its own.
        found = tokio::time::timeout(Duration::from_millis(wait_ms + 60_000), waiting) => found,
    };
    let call = match found {
        Ok(Ok(call)) => call,
        Ok(Err(error)) => {
            return tool_result::refused_call_result(error).map(CallToolResponse::Complete);
        }
        Err(_) => return Err(ErrorData::internal_error("the wait did not end", None)),
    };
    // The result is one of `call.result`, which declares no output schema.
    let mut shape = result_format(None, McpClientInfo::of(context).revision);
    shape.has_output_schema = false;
    let result = match call.status.is_terminal() {
        true => server.ended_call_result(&call, shape).await,
        false => with_call_id(tool_result::pending_result(&call, &shape), &call),
    };
    Ok(CallToolResponse::Complete(result))
}
