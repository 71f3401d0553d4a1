//! The context of a run: its tools, its calls and their results.
//!
//! The context is built from the store: the newest calls of the run, and every open call regardless
//! of its age. The selection of tools is set per run and decides what its model is offered, in the
//! agent loop too; access rules decide what may be called.

use std::collections::HashSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::calls::request::check_label;
use crate::calls::{Calls, Dispatcher};
use crate::domain::access_rules::{self, AccessDecision, RuleAction};
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::run::Run;
use crate::domain::tool::{Executor, ToolDefinition};
use crate::ports::bus::Topic;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::{CallFilter, RunToolDefinitions};
use crate::registry::Registry;
use crate::registry::catalog::{
    CatalogEntry, RESULT_READ, RUN_FINISH, check_definition, compile_definitions,
};
use crate::registry::model_tool_names;
use crate::runs::context::{
    ContextMessages, ContextPrompt, ToolCall, ToolCallContext, ToolResult, definitions,
};

/// Number of a run's calls in a context: default and maximum.
pub const CONTEXT_CALL_LIMITS: (usize, usize) = (50, 200);

/// Interval at which a waiter polls the store when no wakeup arrives.
const CONTEXT_POLL_MS: u64 = 2_000;

/// The tools that a run presents to its model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunToolSelection {
    /// Tools that the caller executes itself. Each hides a Toolcrib tool with the same name.
    #[serde(with = "definitions")]
    #[serde(rename = "own")]
    pub caller_tools: Vec<ToolDefinition>,
    /// Names of Toolcrib's tools; `None` means all that the caller may call.
    #[serde(rename = "crib")]
    pub toolcrib_tools: Option<Vec<String>>,
}

/// Message format in which a run's calls and results are rendered for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageFormat {
    /// Messages of OpenAI's Chat Completions API.
    OpenAi,
    /// Messages of Anthropic's Messages API.
    Anthropic,
}

/// The contexts of runs: the tools that their models are offered, their calls and the results.
pub struct RunContexts {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
}

impl RunContexts {
    pub(crate) fn new(calls: &Arc<Calls>) -> Self {
        Self {
            core: calls.core.clone(),
            registry: calls.registry.clone(),
            dispatcher: calls.dispatcher.clone(),
            calls: calls.clone(),
        }
    }

    /// Returns the context of a run: its newest `limit` calls (1 to 200), and those that are still
    /// open. An unused run id has the tools that a run would have, and no calls.
    pub async fn context(
        &self,
        caller: &Caller,
        run_id: &str,
        limit: usize,
    ) -> Result<ToolCallContext, Error> {
        check_label("run_id", run_id)?;
        let mut context = ToolCallContext::new(run_id);
        context.set_tool_definitions(self.run_tools(caller, run_id).await?);
        let (calls, truncated) = self.load_run_calls(caller, run_id, limit).await?;
        context.set_truncated(truncated);
        add_calls(&mut context, &calls);
        Ok(context)
    }

    /// Renders the state of a run's tools for a system prompt of at most `budget_tokens`.
    pub async fn prompt(
        &self,
        caller: &Caller,
        run_id: &str,
        limit: usize,
        budget_tokens: usize,
    ) -> Result<ContextPrompt, Error> {
        let (context, now_ms) = (self.context(caller, run_id, limit).await?, self.core.wall_ms());
        // Token counting is CPU-bound and would block this async worker thread.
        let rendering = tokio::task::spawn_blocking(move || context.prompt(budget_tokens, now_ms));
        rendering.await.map_err(|error| Error::Internal(Box::new(error)))
    }

    /// Renders a run's calls and results as messages of a conversation. With a budget, the results
    /// together have at most that many tokens. Also returns whether older calls were omitted.
    pub async fn conversation(
        &self,
        caller: &Caller,
        run_id: &str,
        limit: usize,
        style: MessageFormat,
        budget_tokens: Option<usize>,
    ) -> Result<(ContextMessages, bool), Error> {
        let (context, now_ms) = (self.context(caller, run_id, limit).await?, self.core.wall_ms());
        let rendering = tokio::task::spawn_blocking(move || match style {
            MessageFormat::OpenAi => {
                (context.to_openai(budget_tokens, now_ms), context.truncated())
            }
            MessageFormat::Anthropic => {
                (context.to_anthropic(budget_tokens, now_ms), context.truncated())
            }
        });
        rendering.await.map_err(|error| Error::Internal(Box::new(error)))
    }

    /// Refreshes a context with its run's new calls and results; its listeners are notified of the
    /// results. Waits until a result arrives, at most `wait_ms` and the engine's limit. Returns the
    /// number of new results.
    pub async fn refresh_context(
        &self,
        caller: &Caller,
        context: &mut ToolCallContext,
        wait_ms: u64,
    ) -> Result<usize, Error> {
        let (project, run_id) = (caller.project.clone(), context.run_id().to_owned());
        let mut listener = self.core.bus.listen(Topic::Run { project, run_id: run_id.clone() });
        let until_ms = self.core.clock.now_ms() + wait_ms.min(self.core.limits.max_wait_ms);
        loop {
            let before = context.tool_results().len();
            let (mut calls, _) =
                self.load_run_calls(caller, &run_id, CONTEXT_CALL_LIMITS.1).await?;
            let listed: HashSet<_> = calls.iter().map(|call| call.id.clone()).collect();
            let older = context.pending_calls().filter_map(|call| call.tool_call_id.clone());
            let older: Vec<_> = older.filter(|id| !listed.contains(id)).collect();
            for id in older {
                // A call that was purged in the meantime has nothing to add.
                if let Ok(call) = self.calls.call(caller, &id).await {
                    calls.push(call.as_ref().clone());
                }
            }
            add_calls(context, &calls);
            let count = context.tool_results().len() - before;
            let now_ms = self.core.clock.now_ms();
            if count > 0 || now_ms >= until_ms || self.core.shutdown.is_cancelled() {
                return Ok(count);
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(until_ms.min(now_ms + CONTEXT_POLL_MS)) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Sets the tools that a run presents to its model, replacing any earlier selection.
    pub async fn set_run_tools(
        &self,
        caller: &Caller,
        run_id: &str,
        mut tools: RunToolSelection,
    ) -> Result<Vec<ToolDefinition>, Error> {
        check_label("run_id", run_id)?;
        self.check_may_set_tools(caller, run_id).await?;
        self.check_run_tools(caller, &mut tools).await?;
        self.store_tool_selection(&caller.project, run_id, &tools).await?;
        self.run_tools(caller, run_id).await
    }

    /// Checks that this caller may set the tools of a run: they decide what its model is offered.
    /// Refused if the run acts for another caller.
    async fn check_may_set_tools(&self, caller: &Caller, run_id: &str) -> Result<(), Error> {
        let found = self.core.store.runs().run(&caller.project, run_id).await;
        found.map_err(from_store_error)?.map_or(Ok(()), |run| require_run_owner(caller, &run))
    }

    /// Stores the tools of a run.
    pub(crate) async fn store_tool_selection(
        &self,
        project: &str,
        run_id: &str,
        tools: &RunToolSelection,
    ) -> Result<(), Error> {
        let text = Json::from_serialize(tools).map_err(|error| Error::Internal(Box::new(error)))?;
        let run = RunToolDefinitions {
            project: project.to_owned(),
            run_id: run_id.to_owned(),
            tool_definitions: text,
            updated_ms: self.core.wall_ms(),
        };
        self.core.store.put_run_tool_definitions(run).await.map_err(from_store_error)
    }

    /// Returns the selection that was set for a run, if one was.
    pub(crate) async fn find_tool_selection(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolSelection>, Error> {
        let stored = self.core.store.run_tool_definitions(project, run_id).await;
        let Some(stored) = stored.map_err(from_store_error)? else { return Ok(None) };
        let read = serde_json::from_str(stored.tool_definitions.text());
        read.map(Some).map_err(|error| Error::Internal(Box::new(error)))
    }

    /// Returns the tools that a run presents to its model, sorted by name. For a run that Toolcrib
    /// drives these are the tools that its owner may call, within the selection that was set for it
    /// or the patterns that it was started with.
    pub(crate) async fn run_tools(
        &self,
        caller: &Caller,
        run_id: &str,
    ) -> Result<Vec<ToolDefinition>, Error> {
        let set = self.find_tool_selection(&caller.project, run_id).await?.unwrap_or_default();
        let run = self.core.store.runs().run(&caller.project, run_id).await;
        let catalog = self.registry.catalog();
        let is_readable = |run: &Run| catalog.may_access_run(caller, RuleAction::Read, run);
        let entries = match run.map_err(from_store_error)?.filter(is_readable) {
            Some(run) => {
                let (set, given) = (set.toolcrib_tools.as_deref(), run.options.offered_tools());
                // The later selection takes precedence, as in the agent loop: a handoff comes after
                // the tools were set.
                let names = match run.options.active_agent {
                    None => set.or(given),
                    Some(_) => given.or(set),
                };
                self.select_model_tools(&run.caller(), names)
            }
            None => {
                let mut entries = self.registry.tools(caller);
                if let Some(names) = &set.toolcrib_tools {
                    entries.retain(|entry| names.contains(&entry.definition.name));
                    // No list of tools has `run.finish`, but the model of this conversation has it.
                    if names.iter().any(|name| name == RUN_FINISH) {
                        entries.extend(self.registry.tool(caller, RUN_FINISH));
                    }
                }
                entries
            }
        };
        let mut tools = set.caller_tools;
        for entry in entries {
            let name = &entry.definition.name;
            if !tools.iter().any(|other| other.name == *name) {
                tools.push(entry.definition.clone());
            }
        }
        tools.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tools)
    }

    /// Returns the tools that a model may call for this caller: those that match one of the names
    /// or patterns, or all of them. Both forms of a name match.
    pub(crate) fn select_model_tools(
        &self,
        caller: &Caller,
        patterns: Option<&[String]>,
    ) -> Vec<Arc<CatalogEntry>> {
        let mut tools = self.registry.tools_for_model(caller);
        if let Some(patterns) = patterns {
            tools.retain(|entry| matches_tool(patterns, &entry.definition.name));
        }
        let has_reader = tools.iter().any(|entry| entry.definition.name == RESULT_READ);
        if !tools.is_empty() && !has_reader {
            // The model needs it to read the omitted parts of a digest.
            tools.extend(self.registry.tool(caller, RESULT_READ));
        }
        if !tools.is_empty() {
            // A chat completion without tools is a plain request: its model may not know tools, and
            // `tool_choice` and `response_format` keep their meaning. A stored run always has it.
            tools.extend(self.registry.tool(caller, RUN_FINISH));
        }
        tools
    }

    /// Validates a tool selection. Toolcrib's tools may be given by the names that models use; the
    /// exact names are stored.
    async fn check_run_tools(
        &self,
        caller: &Caller,
        tools: &mut RunToolSelection,
    ) -> Result<(), Error> {
        if !caller.may_invoke() {
            let message = "a provider's key cannot set the tools of a run";
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let limit = self.core.limits.max_tools_per_registration;
        let toolcrib_tools = tools.toolcrib_tools.as_deref_mut().unwrap_or_default();
        if tools.caller_tools.len().max(toolcrib_tools.len()) > limit {
            let message = format!("a run has at most {limit} tools of each kind");
            return Err(Error::refused(Code::PayloadTooLarge, message));
        }
        let catalog = self.registry.catalog();
        for (n, tool) in tools.caller_tools.iter().enumerate() {
            let pointer = format!("tool_definitions/{n}");
            check_definition(tool).map_err(|error| with_pointer(&pointer, error))?;
            if let AccessDecision::Denied(denial) =
                catalog.authorize_reported_call(caller, &tool.name, None)
            {
                let message = format!("{pointer}/name: \"{}\": {}", tool.name, denial.reason);
                return Err(Error::refused(Code::PermissionDenied, message));
            }
            if tools.caller_tools[..n].iter().any(|other| other.name == tool.name) {
                let message = format!("{pointer}/name: \"{}\" is listed twice", tool.name);
                return Err(Error::refused(Code::ValidationError, message));
            }
        }
        let definitions = tools.caller_tools.clone();
        let compiled = compile_definitions(&caller.project, definitions).await;
        compiled.map_err(|(n, error)| with_pointer(&format!("tool_definitions/{n}"), error))?;
        let toolcrib_tools = tools.toolcrib_tools.as_deref_mut().unwrap_or_default();
        for (n, name) in toolcrib_tools.iter_mut().enumerate() {
            let pointer = format!("crib_tools/{n}");
            let found = self
                .registry
                .tool(caller, name)
                .map_err(|error| into_validation_error(with_pointer(&pointer, error)))?;
            *name = found.definition.name.clone();
        }
        Ok(())
    }

    /// Loads the newest calls of a run and those still open, oldest first. Also returns whether
    /// older calls were omitted.
    pub(crate) async fn load_run_calls(
        &self,
        caller: &Caller,
        run_id: &str,
        limit: usize,
    ) -> Result<(Vec<Call>, bool), Error> {
        let limit = limit.clamp(1, CONTEXT_CALL_LIMITS.1);
        let filter = CallFilter {
            project: caller.project.clone(),
            run_id: Some(run_id.to_owned()),
            limit: limit + 1,
            ..CallFilter::default()
        };
        let store = &self.core.store;
        let mut calls = store.calls(filter.clone()).await.map_err(from_store_error)?;
        let truncated = calls.len() > limit;
        calls.truncate(limit);
        if truncated {
            let before = calls.last().map(|call| call.id.clone());
            for status in [Status::Pending, Status::Running] {
                let (status, before) = (Some(status), before.clone());
                let open =
                    CallFilter { status, before, limit: CONTEXT_CALL_LIMITS.1, ..filter.clone() };
                calls.extend(store.calls(open).await.map_err(from_store_error)?);
            }
        }
        calls.sort_by(|a, b| a.id.cmp(&b.id));
        calls.dedup_by(|a, b| a.id == b.id);
        let catalog = self.registry.catalog();
        calls.retain(|call| catalog.may_read_call(caller, call));
        Ok((calls, truncated))
    }
}

/// Requires that the caller owns the run. A run acts with the rights of its owner, so a caller with
/// other rights must not steer it, not even under the same agent name.
pub(super) fn require_run_owner(caller: &Caller, run: &Run) -> Result<(), Error> {
    if caller.may_administer() || run.owner.matches(caller) {
        return Ok(());
    }
    Err(not_run_owner(run))
}

pub(super) fn not_run_owner(run: &Run) -> Error {
    let message = format!(
        "this run acts for agent \"{}\", and only that agent may continue it",
        run.owner.agent
    );
    Error::refused(Code::PermissionDenied, message)
}

/// Returns whether a tool matches one of these names or patterns. Each may be written with the
/// tool's own name or with its model-facing one.
pub(crate) fn matches_tool(patterns: &[String], name: &str) -> bool {
    let model_name = model_tool_names::name_for_model(name);
    patterns.iter().any(|pattern| {
        access_rules::pattern_matches(pattern, name)
            || access_rules::pattern_matches(pattern, &model_name)
    })
}

/// Adds calls in order of creation, and their results in order of completion.
pub(crate) fn add_calls(context: &mut ToolCallContext, calls: &[Call]) {
    for step in group_concurrent_calls(calls) {
        context.set_tool_calls(step.iter().map(ToolCall::from));
    }
    let mut ended: Vec<&Call> = calls.iter().filter(|call| call.outcome.is_some()).collect();
    ended.sort_by_key(|call| (call.completed_ms, call.id.clone()));
    for result in ended.into_iter().filter_map(ToolResult::from_call) {
        // The call was added above and an outcome never changes, so this cannot fail.
        let _ = context.set_tool_call_result(result);
    }
}

/// Groups calls that ran concurrently into one step. The caller does not wait for a background
/// call, so a call made after it belongs to a new step.
fn group_concurrent_calls(calls: &[Call]) -> Vec<&[Call]> {
    let over_ms = |call: &Call| match call.origin.background {
        true => call.created_ms,
        false => call.completed_ms.unwrap_or(u64::MAX),
    };
    let (mut steps, mut begin, mut until_ms) = (Vec::new(), 0, u64::MAX);
    for (n, call) in calls.iter().enumerate() {
        if call.created_ms > until_ms {
            steps.push(&calls[begin..n]);
            (begin, until_ms) = (n, u64::MAX);
        }
        until_ms = until_ms.min(over_ms(call));
    }
    if begin < calls.len() {
        steps.push(&calls[begin..]);
    }
    steps
}

/// Adds the position in the request that a refusal is about.
pub(crate) fn with_pointer(pointer: &str, error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    fault.message = format!("{pointer}: {}", fault.message);
    if fault.detail.is_none() {
        fault.detail = Some(json!({ "pointer": format!("/{pointer}") }));
    }
    Error::Refused { fault, retry_after_ms }
}

/// Converts an unknown name in a request body into a validation error: the body is wrong, not the
/// path.
fn into_validation_error(error: Error) -> Error {
    let Error::Refused { fault, .. } = error else { return error };
    let invalid = Fault::new(Code::ValidationError, fault.message).without_side_effect();
    invalid.with_detail(fault.detail.unwrap_or_default()).into()
}

/// Builds a definition for a caller tool of which only the name is known.
pub(crate) fn caller_tool_definition(project: &str, name: &str, timeout_ms: u64) -> ToolDefinition {
    ToolDefinition {
        project: Some(project.to_owned()),
        name: name.to_owned(),
        description: String::new(),
        executor: Executor::CALLER,
        input_schema: Json::empty_object(),
        output_schema: None,
        timeout_ms,
        background: false,
        effect: Default::default(),
        risk: Default::default(),
        policy: Default::default(),
        fallback: Vec::new(),
        metadata: None,
        binding: None,
    }
}
