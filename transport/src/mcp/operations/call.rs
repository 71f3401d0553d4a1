//! `tools/call`: accepts the call through the same engine method as every other transport, then
//! waits.
//!
//! The MCP client gets one of four responses: the result; a task, if it supports tasks; an
//! elicitation, if the tool needs input first; or, when the wait time is over, a text with the call
//! id. In each case the call belongs to the engine. This module stores nothing about it.

use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, CreateTaskResult, InputRequests,
    InputRequiredResult, MetaObject,
};
use serde_json::Value;
use toolcrib::calls::Until;
use toolcrib::domain::call::Call;
use toolcrib::registry::CatalogEntry;
use toolcrib::{CallRequest, Json, Ticket};

use super::elicitation::{self, ElicitationOutcome};
use super::progress::ProgressForwarder;
use super::tasks;
use crate::mcp::request::{McpClientInfo, ProtocolRevision, http_parts};
use crate::mcp::state::RequestScope;
use crate::mcp::tool_result::{self, ResultFormat};

/// The way in which the MCP client discovered the tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolDiscovery {
    /// From its entry in the tool list, with its schemas.
    List,
    /// Through the catalogue, which declares no output schema.
    Catalogue,
}

/// Calls a tool and waits for a response that the MCP client can receive.
pub(crate) async fn call_tool(
    scope: RequestScope<'_>,
    params: CallToolRequestParams,
    discovery: ToolDiscovery,
) -> Result<CallToolResponse, ErrorData> {
    let RequestScope { shared, view, context, .. } = scope;
    let client = McpClientInfo::from_context(context);
    let tool = shared.engine.registry().tool(&view.caller, &params.name).ok();
    let listed = tool.as_deref().filter(|_| discovery == ToolDiscovery::List);
    let format = ResultFormat::new(listed, client.revision);
    if let Some(state) = params.request_state.clone() {
        let ticket = elicitation::resume_call(shared, view, params, &state).await?;
        return ToolCallWaiter { scope, client, format }.wait_for_response(&ticket).await;
    }
    if let Some(needed) = tool.as_ref().and_then(|tool| missing_capabilities(tool, &client)) {
        return Err(ErrorData::missing_required_client_capability(needed));
    }
    let invocation = to_call_request(params, &context.meta.0)?;
    let ticket = match Box::pin(shared.engine.calls().invoke(&view.caller, invocation)).await {
        Ok(ticket) => ticket,
        Err(error) => {
            return tool_result::refused_call_result(error).map(CallToolResponse::Complete);
        }
    };
    let waiter = ToolCallWaiter { scope, client, format };
    if waiter.client.supports_tasks() && ticket.call.origin.background {
        return Ok(waiter.task_response(&ticket.call));
    }
    waiter.wait_for_response(&ticket).await
}

/// Returns the client capabilities that the tool requires and this MCP client lacks. The tool's
/// `metadata` may contain `"task_support": "required"`, and `"client_capabilities"` in MCP's
/// format.
fn missing_capabilities(tool: &CatalogEntry, client: &McpClientInfo) -> Option<ClientCapabilities> {
    let metadata = tool.definition.metadata.as_ref()?.to_value();
    let support = metadata.get("task_support").and_then(Value::as_str);
    if support == Some("required") && !client.supports_tasks() {
        return Some(ClientCapabilities::builder().enable_tasks().build());
    }
    let needed = metadata.get("client_capabilities")?;
    let needed: ClientCapabilities = serde_json::from_value(needed.clone()).ok()?;
    let has = &client.capabilities;
    let able = (needed.elicitation.is_none() || has.elicitation.is_some())
        && (needed.sampling.is_none() || has.sampling.is_some())
        && (needed.roots.is_none() || has.roots.is_some());
    (!able).then_some(needed)
}

/// Builds the call request. The fields that HTTP takes in the request body come from `_meta` here,
/// prefixed with `toolcrib/`.
fn to_call_request(
    params: CallToolRequestParams,
    meta: &MetaObject,
) -> Result<CallRequest, ErrorData> {
    let invalid = |word: &str, kind: &str| {
        ErrorData::invalid_params(format!("_meta: toolcrib/{word} must be {kind}"), None)
    };
    let field = |word: &str| meta.0.get(&format!("toolcrib/{word}")).filter(|v| !v.is_null());
    let text = |word: &str| match field(word) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(word, "a text")),
    };
    let number = |word: &str| match field(word) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| invalid(word, "a number from 0 on")),
    };
    let args = Value::Object(params.arguments.unwrap_or_default());
    let retry = number("retry")?.map(|retry| u32::try_from(retry).unwrap_or(u32::MAX));
    Ok(CallRequest {
        tool: params.name.into_owned(),
        args: Json::from_value(&args),
        run_id: text("run_id")?.unwrap_or_else(|| "run_mcp".to_owned()),
        call_id: text("call_id")?,
        timeout_ms: number("timeout_ms")?,
        attempt_timeout_ms: number("attempt_timeout_ms")?,
        input_timeout_ms: number("input_timeout_ms")?,
        retry,
        idempotency_key: text("idempotency_key")?,
        client_id: text("client_id")?,
        user_id: text("user_id")?,
        traceparent: meta.get_traceparent().map(str::to_owned),
        route: None,
        callback_url: None,
        answers: params.input_responses.map(elicitation::parse_answers).transpose()?,
    })
}

/// Waits for one call on behalf of one MCP client.
struct ToolCallWaiter<'a> {
    scope: RequestScope<'a>,
    client: McpClientInfo,
    format: ResultFormat,
}

impl ToolCallWaiter<'_> {
    /// Waits until there is a response for the MCP client.
    async fn wait_for_response(self, ticket: &Ticket) -> Result<CallToolResponse, ErrorData> {
        let RequestScope { shared, view, context, .. } = self.scope;
        let (engine, caller, settings) = (&shared.engine, &view.caller, &shared.settings);
        let patience_ms = match self.client.supports_tasks() {
            true => settings.task_after_ms,
            false => settings.wait_ms,
        };
        let patience = Duration::from_millis(patience_ms);
        let mut until = tokio::time::Instant::now() + patience;
        let mut progress = ProgressForwarder::new(self.scope, &ticket.call);
        let mut call = ticket.call.clone();
        while !call.status.is_terminal() {
            let questions = elicitation::answerable_requests(&call, &self.client.capabilities);
            if !questions.is_empty() {
                if self.client.revision == ProtocolRevision::Modern {
                    let state = elicitation::request_state(&call);
                    let asks = InputRequiredResult::new(Some(questions), Some(state));
                    return Ok(CallToolResponse::InputRequired(asks));
                }
                if !self.elicit(ticket, &call, questions).await? {
                    return Ok(self.pending_response(&call));
                }
                call = engine
                    .calls()
                    .call(caller, &call.id)
                    .await
                    .map_err(tool_result::protocol_error)?;
                // The time that the answer took does not count against the wait.
                until = tokio::time::Instant::now() + patience;
                continue;
            }
            let remaining = until.saturating_duration_since(tokio::time::Instant::now());
            if remaining.is_zero() {
                return Ok(self.pending_response(&call));
            }
            let left_ms = remaining.as_millis() as u64 + 1;
            let until = Until::ChangedSince { version: call.version, within_ms: left_ms };
            tokio::select! {
                biased;
                () = context.ct.cancelled() => return Err(self.handle_disconnect(&call).await),
                update = engine.calls().wait(caller, ticket, until) => {
                    let update = update.map_err(tool_result::protocol_error)?;
                    if update.version == call.version {
                        // The wait time is over, or the server stops.
                        return Ok(self.pending_response(&call));
                    }
                    call = update;
                }
                () = progress.forward_next() => {}
            }
        }
        progress.forward_remaining().await;
        let budget = settings.result_tokens;
        let result = tool_result::ended_call_result(&call, self.format, budget).await;
        Ok(CallToolResponse::Complete(result))
    }

    /// Sends the questions to a legacy MCP client, which can receive requests while it waits. The
    /// questions are withdrawn once they are superseded. Returns `false` if the server stops.
    async fn elicit(
        &self,
        ticket: &Ticket,
        call: &Call,
        questions: InputRequests,
    ) -> Result<bool, ErrorData> {
        let RequestScope { shared, view, context, .. } = self.scope;
        let keys: Vec<String> = questions.keys().cloned().collect();
        let pointless = async {
            tokio::select! {
                () = context.ct.cancelled() => true,
                goes_on = self.wait_until_superseded(ticket, call, &keys) => goes_on,
            }
        };
        let answers = match elicitation::elicit(&context.peer, questions, pointless).await {
            ElicitationOutcome::Answers(answers) => answers,
            ElicitationOutcome::Superseded(_) if context.ct.is_cancelled() => {
                return Err(self.handle_disconnect(call).await);
            }
            ElicitationOutcome::Superseded(goes_on) => return Ok(goes_on),
            ElicitationOutcome::Unanswered => {
                return Err(self.cancel(call, "the client did not answer what was asked").await);
            }
        };
        let submitted = elicitation::submit_answers(shared, view, &call.id, answers).await;
        if submitted.is_err() {
            // The MCP client learns the reason, but has no call id with which to answer again.
            self.cancel(call, "the client's answers could not be taken").await;
        }
        submitted.map(|()| true)
    }

    /// Waits until none of these questions is open: they were answered through another request, or
    /// the call has ended. Returns `false` if the server stops.
    async fn wait_until_superseded(&self, ticket: &Ticket, call: &Call, keys: &[String]) -> bool {
        let (engine, caller) = (&self.scope.shared.engine, &self.scope.view.caller);
        let mut seen = call.version;
        loop {
            // On a read error, the caller of this function reads the call again and reports the
            // error.
            let Ok(update) = engine
                .calls()
                .wait(caller, ticket, Until::ChangedSince { version: seen, within_ms: u64::MAX })
                .await
            else {
                return true;
            };
            if update.version == seen && engine.is_draining() {
                return false;
            }
            let open = update.elicitation.as_ref().map(|dialogue| &dialogue.unanswered);
            let waits = update.waits_for_input() && update.attempt == call.attempt;
            if !waits || !open.is_some_and(|open| keys.iter().any(|key| open.contains_key(key))) {
                return true;
            }
            seen = update.version;
        }
    }

    /// Handles a disconnect and returns the error for the response. The call is canceled, except if
    /// only the HTTP stream of a sessionless MCP client is lost and the call has an idempotency
    /// key: that client can then send the same request again.
    async fn handle_disconnect(&self, call: &Call) -> ErrorData {
        let over_http = http_parts(&self.scope.context.extensions).is_some();
        let stream_only = over_http && self.client.revision == ProtocolRevision::Modern;
        if stream_only && call.origin.idempotency_key.is_some() {
            return ErrorData::internal_error("the client has hung up", None);
        }
        self.cancel(call, "the client does not want it any more").await
    }

    async fn cancel(&self, call: &Call, reason: &str) -> ErrorData {
        let (engine, caller) = (&self.scope.shared.engine, &self.scope.view.caller);
        // The call may have ended meanwhile; then there is nothing to cancel.
        let _ = engine.calls().cancel(caller, &call.id, Some(reason.to_owned())).await;
        ErrorData::internal_error(format!("canceled: {reason}"), None)
    }

    /// Returns the response when the wait time is over: a task, or a text with the call id.
    fn pending_response(&self, call: &Call) -> CallToolResponse {
        if self.client.supports_tasks() {
            return self.task_response(call);
        }
        CallToolResponse::Complete(tool_result::pending_result(call, self.format))
    }

    fn task_response(&self, call: &Call) -> CallToolResponse {
        let task = tasks::to_task(call, self.scope.shared.settings.retention_ms);
        CallToolResponse::Task(CreateTaskResult::new(task))
    }
}
