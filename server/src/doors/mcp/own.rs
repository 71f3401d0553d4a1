//! The tools that the door itself offers. They ask the engine about calls and tools and make no
//! calls of their own, so they are answered here and leave no ticket.

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
use toolcrib::fault::{Code, Fault};

use super::answer;
use super::call::{Client, shape, ticketed};
use super::server::{Server, View};

/// Asks for the result of a call that was not finished when its client was answered.
pub(super) const CALL_RESULT: &str = "call.result";

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResultArgs {
    /// The ticket: tc_ and 26 letters and digits.
    tool_call_id: String,
    /// How long to wait for the result, in milliseconds. 20000 unless said.
    #[serde(default)]
    wait_ms: Option<u64>,
}

/// Every tool of the door, in the order of their names.
pub(super) fn tools() -> Vec<Tool> {
    vec![described::<ResultArgs>(
        CALL_RESULT,
        "Result of a call",
        "Gives the result of a tool call that was not finished when it was answered, by its \
         ticket. Waits a while for it; ask again when it is still not there.",
    )]
}

/// A tool of the door that only reads.
pub(super) fn described<A: JsonSchema>(
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

/// The arguments, or what is wrong with them in words.
pub(super) fn arguments<A: DeserializeOwned>(
    tool: &str,
    arguments: Option<JsonObject>,
) -> Result<A, Fault> {
    let value = Value::Object(arguments.unwrap_or_default());
    serde_json::from_value(value).map_err(|error| {
        let message = format!("the arguments of {tool} do not fit its schema: {error}");
        Fault::new(Code::ValidationError, message).not_happened()
    })
}

/// Answers a call of `call.result`.
pub(super) async fn call_result(
    server: &Server,
    view: &View,
    given: Option<JsonObject>,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let told = |fault: Fault| Ok(CallToolResponse::Complete(answer::failed(&fault, None)));
    let args: ResultArgs = match arguments(CALL_RESULT, given) {
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
        // To stop asking is not to cancel what is asked about.
        () = context.ct.cancelled() => {
            return Err(ErrorData::internal_error("canceled by the client", None));
        }
        // A little longer than the engine waits, which has its own limit.
        found = tokio::time::timeout(Duration::from_millis(wait_ms + 60_000), waiting) => found,
    };
    let call = match found {
        Ok(Ok(call)) => call,
        Ok(Err(error)) => return answer::refused(error).map(CallToolResponse::Complete),
        Err(_) => return Err(ErrorData::internal_error("the wait did not end", None)),
    };
    // The schema that matters is the one of `call.result`, which has none.
    let mut shape = shape(None, Client::of(context).revision);
    shape.promised = false;
    let result = match call.status.is_terminal() {
        true => server.ended(&call, shape).await,
        false => ticketed(answer::not_finished(&call, &shape), &call),
    };
    Ok(CallToolResponse::Complete(result))
}
