//! The MCP transport of one engine, and rmcp's handler: every method of the protocol, each
//! delegated to the operation that implements it.
//!
//! The caller is determined for every request from its own credentials. Neither a session nor a
//! stream authenticates later requests.

// Logging and subscriptions to single resources belong to the legacy revisions, whose clients still
// use them.
#![allow(deprecated)]
use std::sync::Arc;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CancelTaskParams, CompleteRequestParams,
    CompleteResult, CustomRequest, CustomResult, Extensions, GetPromptRequestParams,
    GetPromptResponse, GetTaskParams, GetTaskResult, Implementation, InitializeRequestParams,
    InitializeResult, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult,
    ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse,
    ServerCapabilities, ServerConfig, SetLevelRequestParams, SubscribeRequestParams,
    SubscriptionFilter, TASKS_EXTENSION_ID, Tool, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::registry::audit;
use toolcrib::{Caller, Engine};

use super::call_arguments;
use super::call_stream::ResumedCall;
use super::events::subscriptions::EventSubscriptions;
use super::events::webhook::EventSender;
use super::operations::call::{self, ToolDiscovery};
use super::operations::notifications::{self, LegacySessions};
use super::operations::{
    event_stream, events, helper_calls, list_tools, prompts, resources, tasks,
};
use super::param_errors;
use super::passthrough::{EmptyPassthrough, PassthroughProvider};
use super::request::{
    CallerView, McpClientInfo, McpRequest, McpViewOptions, http_parts, passthrough_meta, session_id,
};
use super::settings::McpTransportSettings;
use super::state::{
    LegacySessionState, MAX_RESOURCE_SUBSCRIPTIONS, McpTransportState, RequestScope, SERVER_NAME,
};
use super::tool_list::ToolListCache;
use super::tool_list::definition::to_mcp_tool;
use super::tool_list::helper_tools::CALL_RESULT;
use super::tool_list::listed_name;

/// Maximum number of characters of the instructions for an MCP client.
const MAX_INSTRUCTIONS_CHARS: usize = 8_000;

/// The MCP transport of one engine.
#[derive(Clone)]
pub struct McpTransport {
    pub(super) shared: Arc<McpTransportState>,
    pub(super) legacy_sessions: Arc<LegacySessions>,
}

impl McpTransport {
    /// Returns a transport without resources and prompts of MCP servers.
    pub fn new(engine: Engine, settings: McpTransportSettings) -> Self {
        Self::with_passthrough(engine, settings, Arc::new(EmptyPassthrough))
    }

    /// Returns a transport that also offers the resources and prompts of `passthrough`.
    pub fn with_passthrough(
        engine: Engine,
        settings: McpTransportSettings,
        passthrough: Arc<dyn PassthroughProvider>,
    ) -> Self {
        let tool_lists = ToolListCache::default();
        let stream_waiters = Arc::default();
        let sender = EventSender::new(settings.event_callbacks.clone());
        let events = Arc::new(EventSubscriptions::new(engine.clone(), sender));
        let shared = Arc::new(McpTransportState {
            engine,
            settings,
            tool_lists,
            passthrough,
            stream_waiters,
            events,
        });
        Self { legacy_sessions: Arc::new(LegacySessions::new(shared.clone())), shared }
    }

    /// Returns a handler for one request, one session, or one pair of pipes.
    pub(super) fn new_handler(&self, view: CallerView) -> McpHandler {
        McpHandler { transport: self.clone(), view, session: Arc::default() }
    }

    /// Serves one MCP client over these pipes until they are closed. The MCP client sees every
    /// tool, or, if a source is given, the tools of that source under their unprefixed names.
    pub async fn serve_pipes<R, W>(
        &self,
        caller: Caller,
        options: McpViewOptions,
        input: R,
        output: W,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
    where
        R: tokio::io::AsyncRead + Send + Unpin + 'static,
        W: tokio::io::AsyncWrite + Send + Unpin + 'static,
    {
        let source = options.source.as_deref();
        if let Some(name) = source.filter(|name| !self.shared.passthrough.has_source(&caller, name))
        {
            return Err(format!("there is no MCP server \"{name}\"").into());
        }
        let view = CallerView::new(&self.shared.engine, caller, None, options);
        self.shared.events.start();
        let server = self.new_handler(view);
        let running =
            rmcp::serve_server(server, (call_arguments::mark_lines(input), output)).await?;
        running.waiting().await?;
        Ok(())
    }
}

/// The handler of one request, one session, or one pair of pipes.
#[derive(Clone)]
pub(super) struct McpHandler {
    transport: McpTransport,
    session: Arc<LegacySessionState>,
    /// The caller of requests that have no [`CallerView`] themselves, as over pipes.
    view: CallerView,
}

impl McpHandler {
    fn shared(&self) -> &Arc<McpTransportState> {
        &self.transport.shared
    }

    /// Returns the caller of a request.
    fn view<'a>(&'a self, extensions: &'a Extensions) -> &'a CallerView {
        let view = http_parts(extensions).and_then(|parts| parts.extensions.get::<CallerView>());
        view.unwrap_or(&self.view)
    }

    fn scope<'a>(&'a self, request: &'a McpRequest<'a>) -> RequestScope<'a> {
        let view = request.attached::<CallerView>().unwrap_or(&self.view);
        RequestScope { shared: self.shared(), session: &self.session, view, request }
    }

    /// Returns the instructions for the MCP client: Toolcrib's, and those of the MCP servers behind
    /// it, within a limit.
    fn instructions(&self) -> String {
        let shared = self.shared();
        let helper = listed_name(CALL_RESULT, shared.name_form(&self.view, None));
        let own = format!(
            "Every call is a durable ticket: it continues when you disconnect, and its result is \
             stored. A slow call returns its ticket; get the result with {helper}."
        );
        let (caller, source) = (&self.view.caller, self.view.source.as_deref());
        let upstreams = shared.passthrough.instructions(caller, source);
        let mut text = own;
        for (name, instructions) in upstreams {
            let prefix = if source.is_some() { String::new() } else { format!("{name}: ") };
            let limit = MAX_INSTRUCTIONS_CHARS.saturating_sub(text.chars().count());
            let excerpt: String = instructions.trim().chars().take(limit).collect();
            if !excerpt.is_empty() {
                text.push_str(&format!("\n\n{prefix}{excerpt}"));
            }
        }
        text
    }

    /// Calls a tool, with the origin of the request in the audit log.
    pub(super) async fn handle_tool_call(
        &self,
        params: CallToolRequestParams,
        request: McpRequest<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        // The request is handled in a task of its own, which has no origin.
        let origin = request.attached::<RequestOrigin>().cloned();
        let origin = origin.unwrap_or_else(|| RequestOrigin {
            transport: Some("mcp".to_owned()),
            ..RequestOrigin::default()
        });
        audit::with_origin(origin, self.call_in_scope(params, self.scope(&request))).await
    }

    async fn call_in_scope(
        &self,
        mut params: CallToolRequestParams,
        scope: RequestScope<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        if let Some(resumed) = scope.request.attached::<ResumedCall>() {
            return call::resume_stream(scope, &resumed.0).await;
        }
        if let Some(result) = helper_calls::handle_call(scope, &mut params).await {
            return result;
        }
        if scope.view.source.is_some() {
            params.name = scope.shared.qualified_tool_name(scope.view, &params.name).into();
        }
        call::call_tool(scope, params, ToolDiscovery::List).await
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
                Implementation::new(SERVER_NAME, env!("CARGO_PKG_VERSION")).with_title("Toolcrib"),
            )
            .with_instructions(self.instructions())
    }

    /// Legacy revisions have tasks of another form, so the extension is not offered to their MCP
    /// clients.
    async fn initialize(
        &self,
        params: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        context.peer.set_peer_info(params.clone());
        let mut result = self.negotiate_initialize(&params)?;
        if let Some(extensions) = &mut result.capabilities.extensions {
            extensions.remove(TASKS_EXTENSION_ID);
        }
        result.capabilities.extensions.take_if(|extensions| extensions.is_empty());
        Ok(result)
    }

    async fn list_tools(
        &self,
        params: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        list_tools::list_tools(self.scope(&McpRequest::from_context(&context)), params)
    }

    /// Used by rmcp to check headers that mirror arguments. `call_tool` decides whether the caller
    /// may call the tool.
    fn get_tool(&self, name: &str) -> Option<Tool> {
        let name = self.shared().qualified_tool_name(&self.view, name);
        let engine = &self.shared().engine;
        to_mcp_tool(&engine.registry().tool(&self.view.caller, &name).ok()?.shown_definition())
    }

    async fn call_tool(
        &self,
        params: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.handle_tool_call(params, McpRequest::from_context(&context)).await
    }

    async fn get_task(
        &self,
        params: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let view = self.view(&context.extensions);
        let client = McpClientInfo::from_context(&context);
        let task = tasks::get_task(self.shared(), view, &client, &params.task_id).await?;
        Ok(GetTaskResult::new(task))
    }

    async fn update_task(
        &self,
        params: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let view = self.view(&context.extensions);
        tasks::update_task(self.shared(), view, &params.task_id, params.input_responses).await
    }

    async fn cancel_task(
        &self,
        params: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        tasks::cancel_task(self.shared(), self.view(&context.extensions), &params.task_id).await
    }

    async fn list_resources(
        &self,
        _params: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        resources::list_resources(self.shared(), self.view(&context.extensions)).await
    }

    async fn list_resource_templates(
        &self,
        _params: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        resources::list_templates(self.shared(), self.view(&context.extensions)).await
    }

    async fn read_resource(
        &self,
        mut params: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        params.meta = passthrough_meta(&context.meta);
        resources::read_resource(self.shared(), self.view(&context.extensions), params).await
    }

    async fn list_prompts(
        &self,
        _params: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        prompts::list_prompts(self.shared(), self.view(&context.extensions)).await
    }

    async fn get_prompt(
        &self,
        mut params: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        params.meta = passthrough_meta(&context.meta);
        prompts::get_prompt(self.shared(), self.view(&context.extensions), params).await
    }

    async fn complete(
        &self,
        mut params: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        params.meta = passthrough_meta(&context.meta);
        prompts::complete(self.shared(), self.view(&context.extensions), params).await
    }

    fn accepted_subscription_filter(
        &self,
        params: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(notifications::accept_filter(params))
    }

    async fn listen(&self, subscription: SubscriptionContext) -> Result<(), ErrorData> {
        let view = self.view(&subscription.request_context().extensions).clone();
        notifications::listen(self.shared(), &view, subscription).await
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let view = self.view(&context.extensions).clone();
        let id = http_parts(&context.extensions).and_then(|parts| session_id(&parts.headers));
        self.transport.legacy_sessions.add(id, self.session.clone(), view, context.peer);
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let view = self.view(&context.extensions);
        if request.method == event_stream::EVENT_STREAM {
            return event_stream::stream(self.shared(), view, &request, &context).await;
        }
        match events::handle(self.shared(), view, &request).await {
            Some(result) => result,
            None => Err(param_errors::explain_rejection(&request)),
        }
    }

    async fn set_level(
        &self,
        params: SetLevelRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.session.set_level(params.level);
        let view = self.view(&context.extensions);
        let level = serde_json::to_value(params.level).unwrap_or_default();
        let passthrough = &self.shared().passthrough;
        passthrough.set_log_level(&view.caller, view.source.as_deref(), &level).await;
        Ok(())
    }

    async fn subscribe(
        &self,
        params: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let (view, uri) = (self.view(&context.extensions), params.uri);
        if self.session.subscribe(uri.clone()) {
            let passthrough = &self.shared().passthrough;
            let source = view.source.as_deref();
            return passthrough.subscribe_resource(&view.caller, source, &uri).await;
        }
        let message = format!("at most {MAX_RESOURCE_SUBSCRIPTIONS} resources can be followed");
        Err(ErrorData::invalid_params(message, None))
    }

    async fn unsubscribe(
        &self,
        params: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.session.unsubscribe(&params.uri);
        Ok(())
    }
}
