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

use super::answer::{self, Shape};
use super::beside::Beside;
use super::call::{self, Seen, ticketed};
use super::catalogue::{self, Catalogue};
use super::http::session_of;
use super::shelf::Shelf;
use super::tools::{Lists, Revision, cursor, name_in};
use super::{Settings, announce, input, own, resources, tasks, unread};
use crate::auth::Standing;

/// Size of a result above which it is converted on a blocking thread.
const LARGE: usize = 64 << 10;

/// The caller of a request, and the part of the tools that the caller chose to see.
#[derive(Clone)]
pub(super) struct View {
    pub(super) caller: Caller,
    /// The credentials of the request, if they can be revoked.
    pub(super) standing: Option<Standing>,
    /// The requested catalogue mode. If `None`, the number of tools decides.
    pub(super) catalogue: Option<Catalogue>,
    /// The only source that the caller sees, under unprefixed names.
    pub(super) source: Option<Arc<str>>,
}

impl View {
    /// Returns the prefix that is removed from the names the caller sees.
    pub(super) fn prefix(&self) -> Option<String> {
        self.source.as_ref().map(|source| format!("{source}."))
    }

    /// Returns Toolcrib's name for a tool name of the MCP client. The tool that reads long results
    /// belongs to Toolcrib and has no prefix, whatever the source.
    pub(super) fn tool_named(&self, name: &str) -> String {
        if name == RESULT_READ { name.to_owned() } else { self.named(name) }
    }

    /// Returns Toolcrib's name for a name of the MCP client.
    pub(super) fn named(&self, name: &str) -> String {
        match &self.source {
            Some(source) => format!("{source}.{name}"),
            None => name.to_owned(),
        }
    }
}

/// State that all handlers of one transport share.
pub(super) struct Shared {
    pub(super) engine: Engine,
    pub(super) settings: Settings,
    pub(super) lists: Lists,
    pub(super) shelf: Arc<dyn Shelf>,
    pub(super) peers: announce::Peers,
}

/// Settings that a legacy MCP client made in its session.
#[derive(Default)]
pub(super) struct Session {
    level: Mutex<Option<LoggingLevel>>,
    followed: Mutex<HashSet<String>>,
}

impl Session {
    /// Returns the minimum level of log messages that the MCP client receives.
    pub(super) fn level(&self) -> Option<LoggingLevel> {
        *self.level.lock()
    }

    /// Returns whether the MCP client subscribed to this resource.
    pub(super) fn follows(&self, uri: &str) -> bool {
        self.followed.lock().contains(uri)
    }
}

/// The handler of one request, one session, or one pair of pipes.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) shared: Arc<Shared>,
    pub(super) session: Arc<Session>,
    /// The caller of requests that have no [`CallerView`] themselves, as over pipes.
    pub(super) view: View,
}

impl Server {
    pub(super) fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Returns the caller of a request.
    pub(super) fn view(&self, extensions: &Extensions) -> View {
        let parts = extensions.get::<axum::http::request::Parts>();
        parts.and_then(|parts| parts.extensions.get::<View>()).unwrap_or(&self.view).clone()
    }

    /// Returns whether this caller sees the catalogue in place of the full list.
    fn searches(&self, view: &View) -> bool {
        match view.catalogue {
            Some(catalogue) => catalogue == Catalogue::Search && view.caller.may_invoke(),
            None if view.source.is_some() => false,
            None => {
                self.shared.lists.of(self.engine(), &view.caller).len()
                    > self.settings().catalogue_over
            }
        }
    }

    /// Returns the result of an ended call for this MCP client.
    pub(super) async fn ended(&self, call: &Arc<Call>, shape: Shape) -> CallToolResult {
        let budget = self.settings().result_tokens;
        let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
        let told = move |call: &Call| ticketed(answer::ended(call, shape, budget), call);
        if data.is_none_or(|data| data.text().len() <= LARGE) {
            return told(call);
        }
        // Converting a large result would block the async worker thread.
        let whole = call.clone();
        match tokio::task::spawn_blocking(move || told(&whole)).await {
            Ok(result) => result,
            Err(_) => ticketed(answer::ended(call, shape, usize::MAX), call),
        }
    }
}

impl ServerHandler for Server {
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
            Some(given) => Some(name_in(given).ok_or_else(|| {
                ErrorData::invalid_params("this cursor is not one that was given out", None)
            })?),
        };
        let revision = Revision::of(context.protocol_version().as_ref());
        let list = match self.searches(&view) {
            true => self.shared.lists.of_catalogue(),
            false => self.shared.lists.of(self.engine(), &view.caller),
        };
        let (prefix, size) = (view.prefix(), self.settings().page_size);
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let beside = parts.and_then(|parts| parts.extensions.get::<Beside>());
        let (tools, more) = match beside {
            Some(beside) if revision == Revision::Modern && prefix.is_none() => {
                let (text, more) = list.page_text(after, size);
                beside.put(text);
                (Vec::new(), more)
            }
            _ => list.page(after, size, revision, prefix.as_deref()),
        };
        let mut result = ListToolsResult::with_all_items(tools);
        result.next_cursor = more.map(|name| cursor(&name));
        if revision == Revision::Modern {
            result = super::hints(result, self.settings(), |r, ttl, scope| {
                r.with_ttl_ms(ttl).with_cache_scope(scope)
            });
        }
        Ok(result)
    }

    /// Used by rmcp to check headers that mirror arguments. `call_tool` decides whether the caller
    /// may call the tool.
    fn get_tool(&self, name: &str) -> Option<Tool> {
        let entry = self.engine().tool(&self.view.caller, &self.view.tool_named(name)).ok()?;
        super::tools::described(&entry.definition)
    }

    async fn call_tool(
        &self,
        asked: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let view = self.view(&context.extensions);
        let mut asked = asked;
        if asked.name == own::CALL_RESULT && view.caller.may_invoke() {
            return own::call_result(self, &view, asked.arguments, &context).await;
        }
        if self.searches(&view)
            && let Some(told) = catalogue::answered(self, &view, &mut asked, &context).await
        {
            return told;
        }
        if view.source.is_some() {
            asked.name = view.tool_named(&asked.name).into();
        }
        call::call(self, &view, asked, &context, Seen::List).await
    }

    async fn get_task(
        &self,
        asked: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::found(self, &view, &asked.task_id).await?;
        let client = context.client_capabilities().unwrap_or_default();
        Ok(GetTaskResult::new(tasks::detailed(self, &view, &client, &call).await))
    }

    async fn update_task(
        &self,
        asked: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::found(self, &view, &asked.task_id).await?;
        let answers = input::answers(asked.input_responses)?;
        if answers.is_empty() {
            return Ok(());
        }
        input::give(self, &view, &call.id, answers).await
    }

    async fn cancel_task(
        &self,
        asked: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let view = self.view(&context.extensions);
        let call = tasks::found(self, &view, &asked.task_id).await?;
        if call.status.is_terminal() {
            return Ok(());
        }
        match self.engine().cancel(&view.caller, &call.id, None).await {
            // The call may have ended meanwhile; the MCP client sees its outcome when it polls.
            Ok(_) => Ok(()),
            Err(error) if error.code() == toolcrib::Code::Conflict => Ok(()),
            Err(error) => Err(answer::protocol_error(error)),
        }
    }

    async fn list_resources(
        &self,
        asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        resources::list(self, &self.view(&context.extensions), asked).await
    }

    async fn list_resource_templates(
        &self,
        _asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        resources::templates(self, &self.view(&context.extensions)).await
    }

    async fn read_resource(
        &self,
        asked: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        resources::read(self, &self.view(&context.extensions), asked).await
    }

    async fn list_prompts(
        &self,
        _asked: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let view = self.view(&context.extensions);
        let mut prompts = self.shared.shelf.prompts(&view.caller).await?;
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
        Ok(super::hints(result, self.settings(), |r, ttl, scope| {
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
        asked.name = view.named(&asked.name);
        match self.shared.shelf.prompt(&view.caller, asked).await? {
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
            prompt.name = view.named(&prompt.name);
        }
        self.shared.shelf.complete(&view.caller, view.source.as_deref(), asked).await
    }

    fn accepted_subscription_filter(
        &self,
        asked: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(announce::accepted(asked))
    }

    async fn listen(&self, subscription: SubscriptionContext) -> Result<(), ErrorData> {
        announce::listen(self, subscription).await
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let view = self.view(&context.extensions);
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let id = parts.and_then(|parts| session_of(&parts.headers));
        self.shared.peers.add(self, id, view, context.peer);
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(unread::why(&request))
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
        let mut followed = self.session.followed.lock();
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
        self.session.followed.lock().remove(&asked.uri);
        Ok(())
    }
}
