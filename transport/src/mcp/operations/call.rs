//! `tools/call`: accepts the call through the same engine method as every other transport, then
//! waits.
//!
//! The MCP client gets one of four responses: the result; a task, if it supports tasks; an
//! elicitation, if the tool needs input first; or a text with the call id, when the wait time is
//! over or the tool needs input that this MCP client cannot give. In each case the call belongs to
//! the engine. This module stores nothing about it.

use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, CreateTaskResult, InputRequests,
    InputRequiredResult, MetaObject,
};
use serde_json::Value;
use toolcrib::calls::{Until, duplicate_key_error};
use toolcrib::domain::call::Call;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::registry::CatalogEntry;
use toolcrib::{CallRequest, Json, Ticket};

use super::elicitation::{self, ElicitationOutcome};
use super::progress::ProgressForwarder;
use super::tasks;
use crate::delivery::ResponseDeliveries;
use crate::mcp::call_arguments;
use crate::mcp::call_stream::{
    CallStoredSignal, StreamId, StreamWaiter, StreamedCall, superseded_error,
};
use crate::mcp::request::{McpClientInfo, McpPeer, ProtocolRevision, passthrough_meta};
use crate::mcp::state::RequestScope;
use crate::mcp::tool_list::helper_tools::CALL_RESULT;
use crate::mcp::tool_list::listed_name;
use crate::mcp::tool_result::{self, ResultFormat};

/// Maximum size of the metadata that is passed on to the tool's executor.
const MAX_META_BYTES: usize = 16 << 10;

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
    let RequestScope { shared, view, request, .. } = scope;
    let client = &request.client;
    let tool = shared.engine.registry().tool(&view.caller, &params.name).ok();
    let listed = tool.as_ref().filter(|_| discovery == ToolDiscovery::List);
    let format = ResultFormat::new(listed, client.revision, scope.name_form()).for_client(client);
    if let Some(state) = params.request_state.clone() {
        let ticket = elicitation::resume_call(shared, view, params, &state).await?;
        let waiter = ToolCallWaiter { is_resumed: true, ..ToolCallWaiter::new(scope, format) };
        return waiter.wait_for_response(&ticket, discovery).await;
    }
    if let Some(needed) = tool.as_ref().and_then(|tool| missing_capabilities(tool, client)) {
        return Err(ErrorData::missing_required_client_capability(needed));
    }
    if let Some(duplicate) = call_arguments::find_mark(&request.meta.0) {
        let error = duplicate_key_error(&params.name, duplicate);
        return tool_result::refused_call_result(error, &format).map(CallToolResponse::Complete);
    }
    let mut invocation = to_call_request(params, &request.meta.0)?;
    let meta = passthrough_meta(request.meta).map(|meta| Json::from_value(&meta.0.0.into()));
    if meta.as_ref().is_some_and(|meta| meta.text().len() > MAX_META_BYTES) {
        let message = format!("_meta must have at most {MAX_META_BYTES} bytes");
        return Err(ErrorData::invalid_params(message, None));
    }
    invocation.meta = meta;
    let ticket = match shared.engine.calls().invoke(&view.caller, invocation).await {
        Ok(ticket) => ticket,
        Err(error) => {
            return tool_result::refused_call_result(error, &format)
                .map(CallToolResponse::Complete);
        }
    };
    let waiter = ToolCallWaiter::new(scope, format);
    waiter.track_delivery(&ticket);
    if waiter.client.supports_tasks() && ticket.call.origin.background {
        return waiter.answer(&ticket, Ok(waiter.task_response(&ticket.call)));
    }
    let response = waiter.wait_for_response(&ticket, discovery).await;
    waiter.answer(&ticket, response)
}

/// Waits for a call whose stream was lost, and returns the response to the request that made it.
pub(crate) async fn resume_stream(
    scope: RequestScope<'_>,
    call: &StreamedCall,
) -> Result<CallToolResponse, ErrorData> {
    let RequestScope { shared, view, request, .. } = scope;
    let client = &request.client;
    let ticket = shared.engine.calls().ticket(&view.caller, &call.id).await;
    let ticket = ticket.map_err(tool_result::protocol_error)?;
    let tool = shared.engine.registry().tool(&view.caller, &ticket.call.tool_name).ok();
    let discovery = match call.through_catalogue {
        true => ToolDiscovery::Catalogue,
        false => ToolDiscovery::List,
    };
    let listed = tool.as_ref().filter(|_| discovery == ToolDiscovery::List);
    let format = ResultFormat::new(listed, client.revision, scope.name_form()).for_client(client);
    let waiter = ToolCallWaiter::new(scope, format);
    waiter.track_delivery(&ticket);
    let response = waiter.wait_for_response(&ticket, discovery).await;
    waiter.answer(&ticket, response)
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
    let flag = |word: &str| match field(word) {
        None => Ok(None),
        Some(value) => value.as_bool().map(Some).ok_or_else(|| invalid(word, "true or false")),
    };
    let args = call_arguments::read_arguments(meta, params.arguments.unwrap_or_default());
    let retry = number("retry")?.map(|retry| u32::try_from(retry).unwrap_or(u32::MAX));
    Ok(CallRequest {
        tool: params.name.into_owned(),
        args,
        run_id: text("run_id")?.unwrap_or_else(|| "run_mcp".to_owned()),
        call_id: text("call_id")?,
        max_timeout_ms: None,
        timeout_ms: number("timeout_ms")?,
        attempt_timeout_ms: number("attempt_timeout_ms")?,
        input_timeout_ms: number("input_timeout_ms")?,
        retry,
        idempotency_key: text("idempotency_key")?,
        client_id: text("client_id")?,
        user_id: text("user_id")?,
        traceparent: meta.get_traceparent().map(str::to_owned),
        route: None,
        depth: 0,
        callback_url: None,
        answers: params.input_responses.map(elicitation::parse_answers).transpose()?,
        rejoin: flag("rejoin")?.unwrap_or(true),
        joins_waiting: flag("rejoin")?.unwrap_or(true),
        meta: None,
    })
}

/// Waits for one call on behalf of one MCP client.
struct ToolCallWaiter<'a> {
    scope: RequestScope<'a>,
    client: &'a McpClientInfo,
    format: ResultFormat,
    /// The registration of this waiter, if its response is a stream that can be resumed.
    stream: Option<StreamWaiter>,
    /// True if an earlier response asked the MCP client for input or named an approval, and the
    /// client now repeats its request.
    is_resumed: bool,
}

impl<'a> ToolCallWaiter<'a> {
    fn new(scope: RequestScope<'a>, format: ResultFormat) -> Self {
        let stream = scope.request.attached::<StreamId>();
        let stream = stream.map(|stream| scope.shared.stream_waiters.register(&stream.0));
        Self { scope, client: &scope.request.client, format, stream, is_resumed: false }
    }

    /// Opens the stream of the response: from now on the MCP client can resume it.
    fn open_stream(&self, call: &Call, discovery: ToolDiscovery) {
        if let Some(signal) = self.scope.request.attached::<CallStoredSignal>() {
            let through_catalogue = discovery == ToolDiscovery::Catalogue;
            signal.send(StreamedCall { id: call.id.clone(), through_catalogue });
        }
    }

    /// Returns once a continuation has taken over the stream.
    async fn superseded(&self) {
        match &self.stream {
            Some(stream) => stream.superseded().await,
            None => std::future::pending().await,
        }
    }

    fn is_superseded(&self) -> bool {
        self.stream.as_ref().is_some_and(StreamWaiter::is_superseded)
    }

    /// Waits until there is a response for the MCP client.
    async fn wait_for_response(
        &self,
        ticket: &Ticket,
        discovery: ToolDiscovery,
    ) -> Result<CallToolResponse, ErrorData> {
        let RequestScope { shared, view, request, .. } = self.scope;
        if !ticket.call.status.is_terminal() {
            self.open_stream(&ticket.call, discovery);
        }
        let (engine, caller, settings) = (&shared.engine, &view.caller, &shared.settings);
        let wait_ms = match (view.wait_ms, self.client.supports_tasks()) {
            (Some(chosen), _) => chosen.min(settings.max_wait_ms),
            (None, true) => settings.task_after_ms,
            (None, false) => settings.wait_ms,
        };
        let wait = Duration::from_millis(wait_ms);
        let mut until = tokio::time::Instant::now() + wait;
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
                until = tokio::time::Instant::now() + wait;
                continue;
            }
            let remaining = until.saturating_duration_since(tokio::time::Instant::now());
            // A person must decide or answer, and this MCP client learns of it from this response.
            let asks_approval = call.waits_for_approval() && !self.is_resumed;
            if remaining.is_zero() || asks_approval || call.waits_for_input() {
                return Ok(self.pending_response(&call));
            }
            let left_ms = remaining.as_millis() as u64 + 1;
            let until = Until::ChangedSince { version: call.version, within_ms: left_ms };
            tokio::select! {
                biased;
                () = self.superseded() => return Err(superseded_error()),
                () = request.canceled.cancelled() => {
                    return Err(self.handle_disconnect(ticket, &call).await);
                }
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
        let result = tool_result::ended_call_result(&call, &self.format, budget).await;
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
        let RequestScope { shared, view, request, .. } = self.scope;
        let keys: Vec<String> = questions.keys().cloned().collect();
        let pointless = async {
            tokio::select! {
                () = self.superseded() => true,
                () = request.canceled.cancelled() => true,
                response = self.wait_until_superseded(ticket, call, &keys) => response,
            }
        };
        // Only rmcp can send questions to an MCP client that waits for a response.
        let McpPeer::Rmcp(peer) = &request.peer else { return Ok(false) };
        let answers = match elicitation::elicit(peer, questions, pointless).await {
            ElicitationOutcome::Answers(answers) => answers,
            ElicitationOutcome::Superseded(_) if self.is_superseded() => {
                return Err(superseded_error());
            }
            ElicitationOutcome::Superseded(_) if request.canceled.is_cancelled() => {
                return Err(self.handle_disconnect(ticket, call).await);
            }
            ElicitationOutcome::Superseded(response) => return Ok(response),
            ElicitationOutcome::Unanswered => {
                let message = "the MCP client did not answer the elicitation";
                let fault = Fault::new(Code::RuntimeError, message).retryable(false);
                return self.abort(call, fault).await.map(|()| true);
            }
        };
        let submitted = elicitation::submit_answers(shared, view, &call.id, answers).await;
        if let Err(error) = submitted {
            // The MCP client learns the reason, but has no call id with which to answer again.
            let message = format!("the MCP client's answers cannot be used: {}", error.message);
            self.abort(call, Fault::new(Code::ValidationError, message)).await?;
        }
        Ok(true)
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
            let open = update.elicitation.as_ref().map(|elicitation| &elicitation.unanswered);
            let waits = update.waits_for_input() && update.attempt == call.attempt;
            if !waits || !open.is_some_and(|open| keys.iter().any(|key| open.contains_key(key))) {
                return true;
            }
            seen = update.version;
        }
    }

    /// Adds the delivery of the call to the HTTP response.
    fn track_delivery(&self, ticket: &Ticket) {
        if let (Some(deliveries), Some(delivery)) = (self.deliveries(), ticket.delivery()) {
            deliveries.push(delivery.clone());
        }
    }

    fn deliveries(&self) -> Option<&ResponseDeliveries> {
        self.scope.request.attached::<ResponseDeliveries>()
    }

    /// Returns the response of a call, which the transport delivers next.
    fn answer(
        &self,
        ticket: &Ticket,
        response: Result<CallToolResponse, ErrorData>,
    ) -> Result<CallToolResponse, ErrorData> {
        match (self.deliveries(), ticket.delivery()) {
            // Another response carries the answer.
            (Some(deliveries), _) if self.is_superseded() => deliveries.clear(),
            (Some(deliveries), _) => deliveries.set_answered(),
            // A pipe has no moment of delivery that the server could observe.
            (None, Some(delivery)) => delivery.mark_delivered(),
            (None, None) => {}
        }
        match response {
            Ok(CallToolResponse::Complete(result)) if ticket.joined => {
                Ok(CallToolResponse::Complete(tool_result::mark_joined(result)))
            }
            other => other,
        }
    }

    /// Handles a disconnect and returns the error for the response. The call is canceled. If only
    /// the HTTP stream of a sessionless MCP client is lost, that client can send the same request
    /// again: a call with an idempotency key continues, and one with side effects is canceled only
    /// if no repeated request joins it within the grace period.
    async fn handle_disconnect(&self, ticket: &Ticket, call: &Call) -> ErrorData {
        if self.is_superseded() {
            return superseded_error();
        }
        let over_http = self.scope.request.http.is_some();
        let stream_only = over_http && self.client.revision == ProtocolRevision::Modern;
        if stream_only && call.origin.idempotency_key.is_some() {
            return ErrorData::internal_error("the client disconnected", None);
        }
        if stream_only {
            if let Some(deliveries) = self.deliveries() {
                deliveries.clear();
            }
            let (engine, caller) = (&self.scope.shared.engine, &self.scope.view.caller);
            let reason = "the client canceled the request";
            // The call may have ended meanwhile; then there is nothing to cancel.
            let calls = engine.calls();
            let _ = calls.cancel_after_disconnect(caller, ticket.clone(), reason).await;
            return ErrorData::internal_error("the client disconnected", None);
        }
        self.cancel(call, "the client canceled the request").await
    }

    async fn cancel(&self, call: &Call, reason: &str) -> ErrorData {
        let (engine, caller) = (&self.scope.shared.engine, &self.scope.view.caller);
        // The call may have ended meanwhile; then there is nothing to cancel.
        let _ = engine.calls().cancel(caller, &call.id, Some(reason.to_owned())).await;
        ErrorData::internal_error(format!("canceled: {reason}"), None)
    }

    /// Ends a call that cannot continue, although its caller did not cancel it.
    async fn abort(&self, call: &Call, fault: Fault) -> Result<(), ErrorData> {
        let (engine, caller) = (&self.scope.shared.engine, &self.scope.view.caller);
        match engine.calls().abort(caller, &call.id, fault).await {
            // A call that has ended meanwhile needs no end.
            Ok(_) => Ok(()),
            Err(Error::Refused { fault, .. }) if fault.code == Code::Conflict => Ok(()),
            Err(error) => Err(tool_result::protocol_error(error)),
        }
    }

    /// Returns the response to a call that has not ended: a task, or a text with the call id.
    fn pending_response(&self, call: &Call) -> CallToolResponse {
        if self.client.supports_tasks() {
            return self.task_response(call);
        }
        let shared = self.scope.shared;
        let is_modern = self.client.revision == ProtocolRevision::Modern;
        if call.waits_for_approval() && is_modern {
            let requests = elicitation::approval_requests(shared, call, &self.client.capabilities);
            if !requests.is_empty() {
                let state = elicitation::request_state(call);
                let asks = InputRequiredResult::new(Some(requests), Some(state));
                return CallToolResponse::InputRequired(asks);
            }
        }
        let link = call.pending_approval().map(|id| shared.engine.approvals().link(id));
        let helper = listed_name(CALL_RESULT, self.scope.name_form());
        let result = tool_result::pending_result(call, &self.format, &helper, link.as_deref());
        CallToolResponse::Complete(result)
    }

    fn task_response(&self, call: &Call) -> CallToolResponse {
        let task = tasks::to_task(self.scope.shared, call);
        CallToolResponse::Task(CreateTaskResult::new(task))
    }
}
