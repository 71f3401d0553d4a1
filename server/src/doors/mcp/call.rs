//! `tools/call`: the same engine method as every other door, and then the wait.
//!
//! A call ends one of four ways for the client: with its result; as a task, where the client knows
//! tasks; with questions, where the tool wants to know something first; or, when it has waited
//! long enough, with the ticket in words. Whichever it is, the call itself goes on or has ended in
//! the engine: nothing about it is kept here.

use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, CreateTaskResult,
    InputRequests, InputRequiredResult, JsonObject, MetaObject,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use serde_json::Value;
use toolcrib::call::{Call, Hold};
use toolcrib::engine::CatalogEntry;
use toolcrib::{Invocation, Json, Ticket};

use super::answer::{self, Shape};
use super::input::{self, Heard};
use super::progress::Progress;
use super::server::{Server, View};
use super::tasks;
use super::tools::Revision;

/// What a client said about itself with a request.
pub(super) struct Client {
    pub(super) revision: Revision,
    pub(super) capabilities: ClientCapabilities,
}

impl Client {
    /// Of the one who sent this.
    pub(super) fn of(context: &RequestContext<RoleServer>) -> Self {
        Self {
            revision: Revision::of(context.protocol_version().as_ref()),
            capabilities: context.client_capabilities().unwrap_or_default(),
        }
    }

    /// Whether it can be answered with a task.
    pub(super) fn knows_tasks(&self) -> bool {
        self.capabilities.supports_tasks()
    }
}

/// Where the client knows the tool from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// Its own entry in the list, with its schemas.
    List,
    /// The catalogue, which promises nothing about the form of results.
    Catalogue,
}

/// Calls a tool of the crib.
pub(super) async fn call(
    server: &Server,
    view: &View,
    params: CallToolRequestParams,
    context: &RequestContext<RoleServer>,
    seen: Seen,
) -> Result<CallToolResponse, ErrorData> {
    let client = Client::of(context);
    if let Some(state) = params.request_state.clone() {
        let tool = server.engine().tool(&view.caller, &params.name).ok();
        let shape = shape(tool.as_deref().filter(|_| seen == Seen::List), client.revision);
        let ticket = input::go_on(server, view, params, &state).await?;
        return Wait { server, view, client, shape, context }.until_told(&ticket).await;
    }
    let tool = server.engine().tool(&view.caller, &params.name).ok();
    if let Some(needed) = tool.as_ref().and_then(|tool| missing(tool, &client)) {
        return Err(ErrorData::missing_required_client_capability(needed));
    }
    let shape = shape(tool.as_deref().filter(|_| seen == Seen::List), client.revision);
    let invocation = invocation(params, &context.meta.0)?;
    let ticket = match Box::pin(server.engine().invoke(&view.caller, invocation)).await {
        Ok(ticket) => ticket,
        Err(error) => return answer::refused(error).map(CallToolResponse::Complete),
    };
    if client.knows_tasks() && ticket.call.asked.background {
        let task = tasks::task(server, &ticket.call);
        return Ok(CallToolResponse::Task(CreateTaskResult::new(task)));
    }
    Wait { server, view, client, shape, context }.until_told(&ticket).await
}

/// How results of a tool are written for this client.
pub(super) fn shape(tool: Option<&CatalogEntry>, revision: Revision) -> Shape {
    let schema = tool.and_then(|tool| tool.definition.output_schema.as_ref()).map(|s| s.value());
    let is_object = |schema: &Value| schema.get("type").is_some_and(|kind| kind == "object");
    let promised = schema.is_some_and(|schema| revision == Revision::Modern || is_object(&schema));
    Shape { revision, promised }
}

/// What the tool's owner says that a client must be able to do, and this one is not: `metadata` may
/// say `"task_support": "required"`, and `"client_capabilities"` as MCP writes them.
fn missing(tool: &CatalogEntry, client: &Client) -> Option<ClientCapabilities> {
    let metadata = tool.definition.metadata.as_ref()?.value();
    let support = metadata.get("task_support").and_then(Value::as_str);
    if support == Some("required") && !client.knows_tasks() {
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

/// What is asked for. The envelope of HTTP is in `_meta` here, with our name before each word.
fn invocation(params: CallToolRequestParams, meta: &MetaObject) -> Result<Invocation, ErrorData> {
    let invalid = |word: &str, kind: &str| {
        ErrorData::invalid_params(format!("_meta: toolcrib/{word} must be {kind}"), None)
    };
    let given = |word: &str| meta.0.get(&format!("toolcrib/{word}")).filter(|v| !v.is_null());
    let text = |word: &str| match given(word) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(word, "a text")),
    };
    let number = |word: &str| match given(word) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| invalid(word, "a number from 0 on")),
    };
    let args = Value::Object(params.arguments.unwrap_or_default());
    let retry = number("retry")?.map(|retry| u32::try_from(retry).unwrap_or(u32::MAX));
    Ok(Invocation {
        tool: params.name.into_owned(),
        args: Json::of_value(&args),
        run_id: text("run_id")?.unwrap_or_else(|| "run_mcp".to_owned()),
        call_id: text("call_id")?,
        timeout_ms: number("timeout_ms")?,
        retry,
        idempotency_key: text("idempotency_key")?,
        client_id: text("client_id")?,
        user_id: text("user_id")?,
        traceparent: meta.get_traceparent().map(str::to_owned),
        turn: None,
        callback_url: None,
        answers: params.input_responses.map(input::answers).transpose()?,
    })
}

/// One client that waits for one call.
pub(super) struct Wait<'a> {
    pub(super) server: &'a Server,
    pub(super) view: &'a View,
    pub(super) client: Client,
    pub(super) shape: Shape,
    pub(super) context: &'a RequestContext<RoleServer>,
}

impl Wait<'_> {
    /// Waits for what the client can be told.
    async fn until_told(self, ticket: &Ticket) -> Result<CallToolResponse, ErrorData> {
        let (engine, caller) = (self.server.engine(), &self.view.caller);
        let settings = self.server.settings();
        let patience_ms = match self.client.knows_tasks() {
            true => settings.task_after_ms,
            false => settings.wait_ms,
        };
        let patience = Duration::from_millis(patience_ms);
        let mut until = tokio::time::Instant::now() + patience;
        let mut progress = Progress::of(self.server, self.view, self.context, &ticket.call);
        let mut call = ticket.call.clone();
        while !call.status.is_terminal() {
            let questions = input::questions(&call, &self.client.capabilities);
            if !questions.is_empty() {
                if self.client.revision == Revision::Modern {
                    let state = input::state(&call);
                    let asks = InputRequiredResult::new(Some(questions), Some(state));
                    return Ok(CallToolResponse::InputRequired(asks));
                }
                if !self.ask(ticket, &call, questions).await? {
                    return Ok(self.not_finished(&call));
                }
                call = engine.call(caller, &call.id).await.map_err(answer::protocol_error)?;
                // The time it took to think is not held against the call.
                until = tokio::time::Instant::now() + patience;
                continue;
            }
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            if left.is_zero() {
                return Ok(self.not_finished(&call));
            }
            let left_ms = left.as_millis() as u64 + 1;
            tokio::select! {
                biased;
                () = self.context.ct.cancelled() => return Err(self.left(&call).await),
                news = engine.news(caller, ticket, call.version, left_ms) => {
                    let news = news.map_err(answer::protocol_error)?;
                    if news.version == call.version {
                        // The time is over, or the server stops.
                        return Ok(self.not_finished(&call));
                    }
                    call = news;
                }
                () = progress.pass_on() => {}
            }
        }
        progress.pass_on_the_rest().await;
        Ok(CallToolResponse::Complete(self.server.ended(&call, self.shape).await))
    }

    /// Asks a client of an older revision, which can be asked while it waits. What nobody wants to
    /// know any more it is not asked any longer. False when the server stops.
    async fn ask(
        &self,
        ticket: &Ticket,
        call: &Call,
        questions: InputRequests,
    ) -> Result<bool, ErrorData> {
        let keys: Vec<String> = questions.keys().cloned().collect();
        let pointless = async {
            tokio::select! {
                () = self.context.ct.cancelled() => true,
                goes_on = self.has_gone_on(ticket, call, &keys) => goes_on,
            }
        };
        let answers = match input::ask(&self.context.peer, questions, pointless).await {
            Heard::Answers(answers) => answers,
            Heard::Pointless(_) if self.context.ct.is_cancelled() => {
                return Err(self.left(call).await);
            }
            Heard::Pointless(goes_on) => return Ok(goes_on),
            Heard::Nothing => {
                return Err(self.cancel(call, "the client did not answer what was asked").await);
            }
        };
        let given = input::give(self.server, self.view, &call.id, answers).await;
        if given.is_err() {
            // It is told why, and has no ticket to answer again with.
            self.cancel(call, "the client's answers could not be taken").await;
        }
        given.map(|()| true)
    }

    /// Waits until the call does not want to know any of this any more: it was answered by somebody
    /// else, or has ended. False when the server stops.
    async fn has_gone_on(&self, ticket: &Ticket, call: &Call, keys: &[String]) -> bool {
        let (engine, caller) = (self.server.engine(), &self.view.caller);
        let mut seen = call.version;
        loop {
            // What cannot be read is read again by who goes on, and the error is told.
            let Ok(news) = engine.news(caller, ticket, seen, u64::MAX).await else { return true };
            if news.version == seen && engine.is_draining() {
                return false;
            }
            let open = news.dialogue.as_ref().map(|dialogue| &dialogue.open);
            let waits = news.hold == Some(Hold::Input) && news.attempt == call.attempt;
            if !waits || !open.is_some_and(|open| keys.iter().any(|key| open.contains_key(key))) {
                return true;
            }
            seen = news.version;
        }
    }

    /// The client has gone. One that only lost its stream can ask again, where it gave its call a
    /// key for that: without a session nothing else than the stream says that it has gone.
    async fn left(&self, call: &Call) -> ErrorData {
        let over_http = self.context.extensions.get::<axum::http::request::Parts>().is_some();
        let stream_only = over_http && self.client.revision == Revision::Modern;
        if stream_only && call.asked.idempotency_key.is_some() {
            return ErrorData::internal_error("the client has hung up", None);
        }
        self.cancel(call, "the client does not want it any more").await
    }

    async fn cancel(&self, call: &Call, reason: &str) -> ErrorData {
        let (engine, caller) = (self.server.engine(), &self.view.caller);
        // It may have ended meanwhile; then there is nothing to cancel.
        let _ = engine.cancel(caller, &call.id, Some(reason.to_owned())).await;
        ErrorData::internal_error(format!("canceled: {reason}"), None)
    }

    /// The patience is over: as a task, or in words.
    fn not_finished(&self, call: &Call) -> CallToolResponse {
        if self.client.knows_tasks() {
            let task = tasks::task(self.server, call);
            return CallToolResponse::Task(CreateTaskResult::new(task));
        }
        CallToolResponse::Complete(ticketed(answer::not_finished(call, &self.shape), call))
    }
}

/// Every result says which call it is of.
pub(super) fn ticketed(mut result: CallToolResult, call: &Call) -> CallToolResult {
    let meta = result.meta.get_or_insert_with(|| MetaObject(JsonObject::new()));
    meta.0.insert("toolcrib/tool_call_id".to_owned(), call.id.as_str().into());
    result
}
