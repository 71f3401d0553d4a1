//! The MCP handler: every method of the protocol, each delegated to the module that implements it.
//!
//! The caller is determined for every request from its own credentials. Neither a session nor a
//! stream authenticates later requests.

// Logging and subscriptions to single resources belong to the legacy revisions, whose clients still
// use them.
#![allow(deprecated)]

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams,
    CompleteRequestParams, CompleteResult, CustomRequest, CustomResult, Extensions,
    GetPromptRequestParams, GetPromptResponse, GetTaskParams, GetTaskResult, Implementation,
    ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    LoggingLevel, PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse,
    Reference, ResultType, ServerCapabilities, ServerConfig, SetLevelRequestParams,
    SubscribeRequestParams, SubscriptionFilter, Tool, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use toolcrib::engine::RESULT_READ;
use toolcrib::{Call, Caller, Engine};

use super::call::{self, ToolDiscovery, with_call_id};
use super::catalogue::{self, CatalogueMode};
use super::http::session_id;
use super::tools::{ProtocolRevision, ToolListCache, cursor_after, parse_cursor};
use super::{McpTransportSettings, resources, tasks};
use crate::auth::RequestCredentials;
use crate::mcp::passthrough::PassthroughProvider;
use crate::mcp::tool_list_splice::ToolListSplice;
use crate::mcp::tool_result::{self, ResultFormat};
use crate::mcp::{builtin_tools, elicitation, notifications, param_errors};

/// Size of a result above which it is converted on a blocking thread.
const BLOCKING_THRESHOLD_BYTES: usize = 64 << 10;

/// The caller of a request, and the part of the tools that the caller chose to see.
#[derive(Clone)]
pub(super) struct CallerView {
    pub(super) caller: Caller,
    /// The credentials of the request, if they can be revoked.
    pub(super) credentials: Option<RequestCredentials>,
    /// The requested catalogue mode. If `None`, the number of tools decides.
    pub(super) catalogue: Option<CatalogueMode>,
    /// The only source that the caller sees, under unprefixed names.
    pub(super) source: Option<Arc<str>>,
}

impl CallerView {
    /// Returns the prefix that is removed from the names the caller sees.
    pub(super) fn prefix(&self) -> Option<String> {
        self.source.as_ref().map(|source| format!("{source}."))
    }

    /// Returns Toolcrib's name for a tool name of the MCP client. The tool that reads long results
    /// belongs to Toolcrib and has no prefix, whatever the source.
    pub(super) fn qualified_tool_name(&self, name: &str) -> String {
        if name == RESULT_READ { name.to_owned() } else { self.qualified_name(name) }
    }

    /// Returns Toolcrib's name for a name of the MCP client.
    pub(super) fn qualified_name(&self, name: &str) -> String {
        match &self.source {
            Some(source) => format!("{source}.{name}"),
            None => name.to_owned(),
        }
    }
}

/// State that all handlers of one transport share.
pub(super) struct McpTransportState {
    pub(super) engine: Engine,
    pub(super) settings: McpTransportSettings,
    pub(super) tool_lists: ToolListCache,
    pub(super) passthrough: Arc<dyn PassthroughProvider>,
    pub(super) legacy_sessions: notifications::LegacySessions,
}

/// Settings that a legacy MCP client made in its session.
#[derive(Default)]
pub(super) struct LegacySessionState {
    level: Mutex<Option<LoggingLevel>>,
    subscribed_resources: Mutex<HashSet<String>>,
}

impl LegacySessionState {
    /// Returns the minimum level of log messages that the MCP client receives.
    pub(super) fn level(&self) -> Option<LoggingLevel> {
        *self.level.lock()
    }

    /// Returns whether the MCP client subscribed to this resource.
    pub(super) fn is_subscribed(&self, uri: &str) -> bool {
        self.subscribed_resources.lock().contains(uri)
    }
}

/// The handler of one request, one session, or one pair of pipes.
#[derive(Clone)]
pub(super) struct McpHandler {
    pub(super) shared: Arc<McpTransportState>,
    pub(super) session: Arc<LegacySessionState>,
    /// The caller of requests that have no [`CallerView`] themselves, as over pipes.
    pub(super) view: CallerView,
}

impl McpHandler {
    pub(super) fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    pub(super) fn settings(&self) -> &McpTransportSettings {
        &self.shared.settings
    }

    /// Returns the caller of a request.
    pub(super) fn view(&self, extensions: &Extensions) -> CallerView {
        let parts = extensions.get::<axum::http::request::Parts>();
        parts.and_then(|parts| parts.extensions.get::<CallerView>()).unwrap_or(&self.view).clone()
    }

    /// Returns whether this caller sees the catalogue in place of the full list.
    fn uses_search_catalogue(&self, view: &CallerView) -> bool {
        match view.catalogue {
            Some(catalogue) => catalogue == CatalogueMode::Search && view.caller.may_invoke(),
            None if view.source.is_some() => false,
            None => {
                self.shared.tool_lists.for_caller(self.engine(), &view.caller).len()
                    > self.settings().catalogue_threshold
            }
        }
    }

    /// Returns the result of an ended call for this MCP client.
    pub(super) async fn ended_call_result(
        &self,
        call: &Arc<Call>,
        shape: ResultFormat,
    ) -> CallToolResult {
        let budget = self.settings().result_tokens;
        let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
        let told = move |call: &Call| {
            with_call_id(tool_result::from_ended_call(call, shape, budget), call)
        };
        if data.is_none_or(|data| data.text().len() <= BLOCKING_THRESHOLD_BYTES) {
            return told(call);
        }
        // Converting a large result would block the async worker thread.
        let whole = call.clone();
        match tokio::task::spawn_blocking(move || told(&whole)).await {
            Ok(result) => result,
            Err(_) => with_call_id(tool_result::from_ended_call(call, shape, usize::MAX), call),
        }
    }
}

impl ServerHandler for McpHandler {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_resources()
            .enable_resources_list_changed()
            .enable_resources_subscribe()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_logging()
            .enable_completions()
            .enable_tasks()
            .build();
        ServerConfig::new(capabilities)
            .with_server_info(
                Implementation::new("toolcrib", env!("CARGO_PKG_VERSION")).with_title("Toolcrib"),
            )
            .with_instructions(
                "Every call is a durable ticket: it goes on when you hang up, and its result is \
                 kept. A call that takes long answers with its ticket; ask for the result with \
                 call.result.",
            )
    }

    async fn list_tools(
        &self,
        asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let view = self.view(&context.extensions);
        let given = asked.and_then(|asked| asked.cursor);
        let after = match given.as_deref() {
            None => None,
            Some(given) => Some(parse_cursor(given).ok_or_else(|| {
                ErrorData::invalid_params("this cursor is not one that was given out", None)
            })?),
        };
        let revision = ProtocolRevision::of(context.protocol_version().as_ref());
        let list = match self.uses_search_catalogue(&view) {
            true => self.shared.tool_lists.for_catalogue(),
            false => self.shared.tool_lists.for_caller(self.engine(), &view.caller),
        };
        let (prefix, size) = (view.prefix(), self.settings().page_size);
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let beside = parts.and_then(|parts| parts.extensions.get::<ToolListSplice>());
        let (tools, more) = match beside {
            Some(beside) if revision == ProtocolRevision::Modern && prefix.is_none() => {
                let (text, more) = list.page_text(after, size);
                beside.set_tools(text);
                (Vec::new(), more)
            }
            _ => list.page(after, size, revision, prefix.as_deref()),
        };
        let mut result = ListToolsResult::with_all_items(tools);
        result.next_cursor = more.map(|name| cursor_after(&name));
        if revision == ProtocolRevision::Modern {
            result = super::with_cache_hints(result, self.settings(), |r, ttl, scope| {
                r.with_ttl_ms(ttl).with_cache_scope(scope)
            });
        }
        Ok(result)
    }

    /// Used by rmcp to check headers that mirror arguments. `call_tool` decides whether the caller
    /// may call the tool.
    fn get_tool(&self, name: &str) -> Option<Tool> {
        let entry =
            self.engine().tool(&self.view.caller, &self.view.qualified_tool_name(name)).ok()?;
        super::tools::to_mcp_tool(&entry.definition)
    }

    async fn call_tool(
        &self,
        asked: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let view = self.view(&context.extensions);
        let mut asked = asked;
        if asked.name == builtin_tools::CALL_RESULT && view.caller.may_invoke() {
            return builtin_tools::call_result(self, &view, asked.arguments, &context).await;
        }
        if self.uses_search_catalogue(&view)
            && let Some(told) = catalogue::handle_call(self, &view, &mut asked, &context).await
        {
            return told;
        }
        if view.source.is_some() {
            asked.name = view.qualified_tool_name(&asked.name).into();
        }
        call::call_tool(self, &view, asked, &context, ToolDiscovery::List).await
    }

    async fn get_task(
        &self,
        asked: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::find_call(self, &view, &asked.task_id).await?;
        let client = context.client_capabilities().unwrap_or_default();
        Ok(GetTaskResult::new(tasks::to_detailed_task(self, &view, &client, &call).await))
    }

    async fn update_task(
        &self,
        asked: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::find_call(self, &view, &asked.task_id).await?;
        let answers = elicitation::parse_answers(asked.input_responses)?;
        if answers.is_empty() {
            return Ok(());
        }
        elicitation::submit_answers(self, &view, &call.id, answers).await
    }

    async fn cancel_task(
        &self,
        asked: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::find_call(self, &view, &asked.task_id).await?;
        if call.status.is_terminal() {
            return Ok(());
        }
        match self.engine().cancel(&view.caller, &call.id, None).await {
            // The call may have ended meanwhile; the MCP client sees its outcome when it polls.
            Ok(_) => Ok(()),
            Err(error) if error.code() == toolcrib::Code::Conflict => Ok(()),
            Err(error) => Err(tool_result::protocol_error(error)),
        }
    }

    async fn list_resources(
        &self,
        asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        resources::list_resources(self, &self.view(&context.extensions), asked).await
    }

    async fn list_resource_templates(
        &self,
        _asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        resources::list_templates(self, &self.view(&context.extensions)).await
    }

    async fn read_resource(
        &self,
        asked: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        resources::read_resource(self, &self.view(&context.extensions), asked).await
    }

    async fn list_prompts(
        &self,
        _asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let view = self.view(&context.extensions);
        let mut prompts = self.shared.passthrough.prompts(&view.caller).await?;
        if let Some(prefix) = view.prefix() {
            prompts.retain_mut(|prompt| match prompt.name.strip_prefix(&prefix) {
                Some(own) => {
                    prompt.name = own.to_owned();
                    true
                }
                None => false,
            });
        }
        let result = ListPromptsResult::with_all_items(prompts);
        Ok(super::with_cache_hints(result, self.settings(), |r, ttl, scope| {
            r.with_ttl_ms(ttl).with_cache_scope(scope)
        }))
    }

    async fn get_prompt(
        &self,
        asked: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let view = self.view(&context.extensions);
        let name: String = asked.name.chars().take(128).collect();
        let mut asked = asked;
        asked.name = view.qualified_name(&asked.name);
        match self.shared.passthrough.get_prompt(&view.caller, asked).await? {
            Some(GetPromptResponse::Complete(mut prompt)) => {
                prompt.result_type = Some(ResultType::COMPLETE);
                Ok(prompt.into())
            }
            Some(other) => Ok(other),
            None => Err(ErrorData::invalid_params(format!("there is no prompt \"{name}\""), None)),
        }
    }

    async fn complete(
        &self,
        asked: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let view = self.view(&context.extensions);
        let mut asked = asked;
        if let Reference::Prompt(prompt) = &mut asked.r#ref {
            prompt.name = view.qualified_name(&prompt.name);
        }
        self.shared.passthrough.complete(&view.caller, view.source.as_deref(), asked).await
    }

    fn accepted_subscription_filter(
        &self,
        asked: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(notifications::accept_filter(asked))
    }

    async fn listen(&self, subscription: SubscriptionContext) -> Result<(), ErrorData> {
        notifications::listen(self, subscription).await
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let view = self.view(&context.extensions);
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let id = parts.and_then(|parts| session_id(&parts.headers));
        self.shared.legacy_sessions.add(self, id, view, context.peer);
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(param_errors::explain_rejection(&request))
    }

    async fn set_level(
        &self,
        asked: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        *self.session.level.lock() = Some(asked.level);
        Ok(())
    }

    async fn subscribe(
        &self,
        asked: SubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let mut followed = self.session.subscribed_resources.lock();
        if followed.len() >= 1_000 {
            return Err(ErrorData::invalid_params("at most 1000 resources can be followed", None));
        }
        followed.insert(asked.uri);
        Ok(())
    }

    async fn unsubscribe(
        &self,
        asked: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.session.subscribed_resources.lock().remove(&asked.uri);
        Ok(())
    }
}
