//! Selects the tools that a model sees, and resolves the names that it uses for them.
//!
//! The tools of a run are those of its context. Up to a threshold the model receives all of them;
//! above it, the pinned ones, those that the conversation has used or found, and a tool that
//! searches the others. Handoffs to agents are tools like the others. The order is fixed: later
//! tools are only ever appended, so the prefix of a request stays the same and prompt caches hold.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::domain::access_rules;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::run::handoff::{
    HANDOFF_TOOL_PREFIX, handoff_tool_name, is_handoff_name, transfer_name,
};
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::ToolSearchText;
use crate::domain::tool::tool_mode::ToolMode;
use crate::domain::tool::{Executor, ToolDefinition};
use crate::model_formats::{ToolFormat, describe_tool};
use crate::ports::model::FoundTool;
use crate::registry::catalog::{CatalogEntry, RESULT_READ, RUN_FINISH};
use crate::registry::model_tool_names;
use crate::results::tokens;
use crate::runs::agent_loop::tool_search;
use crate::runs::run_context::matches_tool;
use crate::runs::{RunToolSelection, Runs};

/// Maximum number of tools in one request. OpenAI's API refuses more.
const MAX_TOOLS: usize = 128;

/// Maximum number of deferred tools in a request, of those that the conversation used or found;
/// the newest are offered.
const MAX_LOADED_TOOLS: usize = 48;

/// Tokens of a definition apart from its name, its description and its schema.
const DEFINITION_TOKENS: usize = 12;

const GUIDANCE: &str = "Tools marked (async) run in the background: such a call is accepted at \
                        once, and its result is added to the conversation later. Meanwhile do \
                        other work; do not call the tool again for the same thing, and do not make \
                        up its result. All other tools return their result before you continue.";

/// The tools of one conversation.
pub(super) struct ToolSelection {
    /// Descriptions of the tools that every request offers, in the chat format.
    pub(super) tools: Vec<Json>,
    /// Toolcrib's tools, by their model-facing names.
    pub(super) tool_names: HashMap<String, String>,
    /// Names of the caller tools.
    pub(super) caller_tools: HashSet<String>,
    /// Version of the directory that the tools were read from.
    pub(super) version: u64,
    /// Caller tools of the run's context, by their model-facing names.
    context_tools: HashMap<String, ToolDefinition>,
    /// Toolcrib's tools that requests offer only once they were used or found.
    deferred: HashMap<String, Arc<CatalogEntry>>,
    /// True if the model can search for the deferred tools.
    pub(super) has_search: bool,
    /// The patterns that selected the tools, and the agent that they are for.
    scope: String,
    /// All tools of the run.
    definitions: Vec<ToolDefinition>,
}

/// The tools of one request.
#[derive(Default)]
pub(super) struct RequestTools {
    pub(super) tools: Vec<Json>,
    pub(super) found_tools: Vec<FoundTool>,
    pub(super) tool_search: Option<String>,
    pub(super) guidance: Option<String>,
}

impl ToolSelection {
    /// Selects the tools; refuses options that name a tool that does not exist.
    pub(super) fn validated(
        engine: &Arc<Runs>,
        caller: &Caller,
        options: &RunOptions,
    ) -> Result<Self, Error> {
        check_tool_patterns(engine, caller, options.tools.as_deref().unwrap_or_default())?;
        Ok(Self::new(engine, caller, options, options.offered_tools(), None))
    }

    /// Selects the tools that exist: those that match the patterns, and the caller tools of the
    /// options and of the run's context.
    pub(super) fn new(
        engine: &Arc<Runs>,
        caller: &Caller,
        options: &RunOptions,
        patterns: Option<&[String]>,
        context: Option<&RunToolSelection>,
    ) -> Self {
        let version = engine.registry.directory_version();
        let entries = engine.contexts.select_model_tools(caller, patterns);
        let handoffs = select_handoffs(engine, caller, options, patterns);
        let model_names = model_tool_names::names_for_model(
            entries.iter().map(|entry| entry.definition.name.as_str()),
        );
        let mut selection = Self {
            tools: options.caller_tools.iter().map(Json::from_value).collect(),
            tool_names: HashMap::new(),
            caller_tools: options
                .caller_tools
                .iter()
                .filter_map(function_name)
                .map(str::to_owned)
                .collect(),
            version,
            context_tools: HashMap::new(),
            deferred: HashMap::new(),
            has_search: false,
            scope: selection_scope(options, patterns),
            definitions: Vec::new(),
        };
        selection.add_context_tools(context);
        let mut named: Vec<(String, Arc<CatalogEntry>)> = model_names
            .into_iter()
            .zip(entries)
            .filter(|(name, _)| !selection.caller_tools.contains(name))
            .collect();
        selection.definitions.extend(named.iter().map(|(_, entry)| entry.definition.clone()));
        selection.add_handoffs(&mut named, handoffs);
        let (mode, pinned) = options.resolve_tool_mode(&engine.tool_modes, &caller.agent);
        // A tool that the request forces must be in the request.
        let forced = options.settings.get("tool_choice").and_then(function_name);
        let is_pinned = |name: &str, entry: &CatalogEntry| {
            let tool = &entry.definition.name;
            forced == Some(name)
                || tool == RUN_FINISH
                || matches_tool(pinned, tool)
                || is_handoff_entry(entry) && matches_tool(pinned, name)
        };
        // A digest refers to the reader of results, also if no other tool is offered beside the
        // pinned ones.
        let is_reader = |entry: &CatalogEntry| entry.definition.name == RESULT_READ;
        if mode == ToolMode::Pinned {
            named.retain(|(name, entry)| is_pinned(name, entry) || is_reader(entry));
        }
        let can_search = !selection.caller_tools.contains(tool_search::NAME);
        let max_tokens = engine.tool_modes.threshold_tokens;
        selection.has_search = can_search
            && match mode {
                ToolMode::Search => !named.is_empty(),
                ToolMode::Auto => {
                    selection.tools.len() + named.len() > MAX_TOOLS
                        || exceeds_tokens(&named, max_tokens)
                }
                ToolMode::All | ToolMode::Pinned => false,
            };
        if selection.has_search {
            let names = named.iter().map(|(_, entry)| entry.definition.name.as_str());
            selection.tools.push(Json::from_value(&tool_search::definition(names)));
        }
        let defers_others = selection.has_search || mode == ToolMode::Pinned;
        for (name, entry) in named {
            selection.tool_names.insert(name.clone(), entry.definition.name.clone());
            if defers_others && !is_pinned(&name, &entry) {
                selection.deferred.insert(name, entry);
            } else {
                selection.tools.push(entry.describe_for_model(&name));
            }
        }
        selection
    }

    /// Offers the tool that ends a run, unless it is offered already. Every run has it, also one
    /// without any other tool; a conversation of a caller without tools has none.
    pub(super) fn add_finish(&mut self, engine: &Runs, caller: &Caller) {
        if self.tool_names.values().any(|name| name == RUN_FINISH) {
            return;
        }
        let name = model_tool_names::name_for_model(RUN_FINISH);
        let Ok(entry) = engine.registry.tool(caller, RUN_FINISH) else { return };
        if self.caller_tools.contains(&name) {
            return;
        }
        self.tools.push(entry.describe_for_model(&name));
        self.tool_names.insert(name, RUN_FINISH.to_owned());
        self.definitions.push(entry.definition.clone());
    }

    fn add_context_tools(&mut self, context: Option<&RunToolSelection>) {
        let tools = context.map_or(&[][..], |context| &context.caller_tools);
        let names = model_tool_names::names_for_model(tools.iter().map(|tool| tool.name.as_str()));
        for (tool, name) in tools.iter().zip(names) {
            if self.caller_tools.insert(name.clone()) {
                self.tools.push(describe(&name, tool));
                self.definitions.push(tool.clone());
                self.context_tools.insert(name, tool.clone());
            }
        }
    }

    /// Adds the handoffs, under the names that models know from OpenAI's Agents SDK.
    fn add_handoffs(
        &self,
        named: &mut Vec<(String, Arc<CatalogEntry>)>,
        handoffs: Vec<Arc<CatalogEntry>>,
    ) {
        let mut taken: HashSet<String> =
            named.iter().map(|(name, _)| name.clone()).chain(self.caller_tools.clone()).collect();
        for entry in handoffs {
            let tool = &entry.definition.name;
            let name = transfer_name(tool.trim_start_matches(HANDOFF_TOOL_PREFIX));
            // Agents whose ids differ in other characters only have the same name.
            let is_taken = taken.contains(&name);
            let name = if is_taken { model_tool_names::name_for_model(tool) } else { name };
            taken.insert(name.clone());
            named.push((name, entry));
        }
    }

    /// Returns the Toolcrib tool that the model means.
    pub(super) fn tool(&self, name: &str) -> Option<&str> {
        let by_own_name = || self.tool_names.values().find(|real| *real == name);
        let by_agent = || {
            let agent = |real: &str| real.strip_prefix(HANDOFF_TOOL_PREFIX).map(str::to_owned);
            let means = |real: &&String| agent(real).is_some_and(|id| is_handoff_name(name, &id));
            self.tool_names.values().find(means)
        };
        self.tool_names.get(name).or_else(by_own_name).or_else(by_agent).map(String::as_str)
    }

    /// Returns the caller tool of the run's context that the model means.
    pub(super) fn context_tool(&self, name: &str) -> Option<&ToolDefinition> {
        self.context_tools.get(name)
    }

    /// Returns every name that the model may use.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tool_names.keys().chain(&self.caller_tools).map(String::as_str)
    }

    /// Returns the tools of the run, offered or not.
    pub(super) fn definitions(&self) -> &[ToolDefinition] {
        &self.definitions
    }

    /// Returns the names of Toolcrib's tools of the run.
    pub(super) fn toolcrib_names(&self) -> Vec<String> {
        let is_toolcrib = |tool: &&ToolDefinition| {
            !self.context_tools.values().any(|other| other.name == tool.name)
        };
        let mut names: Vec<String> =
            self.definitions.iter().filter(is_toolcrib).map(|tool| tool.name.clone()).collect();
        names.sort();
        names
    }

    /// Gives the tool search the description that the run's earlier requests have, or keeps its own
    /// for the later ones.
    pub(super) fn keep_search_text(&mut self, kept: &mut Option<ToolSearchText>) {
        if !self.has_search {
            return;
        }
        let found = self.tools.iter_mut().find_map(|tool| {
            let described = tool.to_value();
            (function_name(&described) == Some(tool_search::NAME)).then_some((tool, described))
        });
        let Some((tool, mut described)) = found else { return };
        let description = &mut described["function"]["description"];
        match kept.as_ref().filter(|kept| kept.scope == self.scope) {
            Some(kept) => {
                *description = kept.text.as_str().into();
                *tool = Json::from_value(&described);
            }
            None => {
                let text = description.as_str().unwrap_or_default().to_owned();
                *kept = Some(ToolSearchText { scope: self.scope.clone(), text });
            }
        }
    }

    /// Returns the tools for a request with these messages.
    pub(super) fn request_tools(&self, messages: &[Value]) -> RequestTools {
        let (mut tools, mut found_tools) = (self.tools.clone(), Vec::new());
        for loaded in self.loaded_tools(messages) {
            let Some(entry) = self.deferred.get(&loaded.name) else { continue };
            tools.push(entry.describe_for_model(&loaded.name));
            if let Some(call_id) = loaded.call_id {
                found_tools.push(FoundTool { name: loaded.name, call_id });
            }
        }
        let has_async = self.definitions.iter().any(|tool| tool.background);
        let guidance = (has_async && !tools.is_empty()).then(|| GUIDANCE.to_owned());
        let tool_search = self.has_search.then(|| tool_search::NAME.to_owned());
        RequestTools { tools, found_tools, tool_search, guidance }
    }

    /// Returns the deferred tools that the conversation has used or found, in the order in which
    /// it did. The messages are the only record of that, so every copy of the conversation leads to
    /// the same tools.
    fn loaded_tools(&self, messages: &[Value]) -> Vec<LoadedTool> {
        if self.deferred.is_empty() {
            return Vec::new();
        }
        let (mut loaded, mut known) = (Vec::new(), HashSet::new());
        let mut add = |name: &str, call_id: Option<&str>| {
            if self.deferred.contains_key(name) && known.insert(name.to_owned()) {
                let call_id = call_id.map(str::to_owned);
                loaded.push(LoadedTool { name: name.to_owned(), call_id });
            }
        };
        let mut searches: HashSet<&str> = HashSet::new();
        let reader = model_tool_names::name_for_model(RESULT_READ);
        for message in messages {
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let name = call["function"]["name"].as_str().unwrap_or_default();
                match name == tool_search::NAME {
                    true => searches.extend(call["id"].as_str()),
                    false => add(&self.model_name(name), None),
                }
            }
            let content = message["content"].as_str().unwrap_or_default();
            let answered = message["tool_call_id"].as_str();
            if let Some(call_id) = answered.filter(|id| searches.remove(*id)) {
                for name in tool_search::found_names(content) {
                    add(&name, Some(call_id));
                }
            } else if content.contains(RESULT_READ) || content.contains(&reader) {
                // The content is a digest, which refers to the reader of results.
                add(&reader, None);
            }
        }
        let excess = loaded.len().saturating_sub(MAX_LOADED_TOOLS);
        loaded.split_off(excess)
    }

    /// Returns the model-facing form of a name that a model wrote.
    fn model_name(&self, name: &str) -> String {
        if self.tool_names.contains_key(name) {
            return name.to_owned();
        }
        let own = model_tool_names::name_for_model(name);
        if self.tool_names.contains_key(&own) {
            return own;
        }
        // A handoff has several names.
        let tool = self.tool(name);
        let mut names = self.tool_names.iter();
        names.find(|(_, real)| Some(real.as_str()) == tool).map_or(own, |(name, _)| name.clone())
    }
}

/// A deferred tool that the conversation has used or found.
struct LoadedTool {
    /// Model-facing name of the tool.
    name: String,
    /// Id of the search that found it.
    call_id: Option<String>,
}

/// Returns the handoffs that match the patterns, except the one to the agent that is active.
fn select_handoffs(
    engine: &Runs,
    caller: &Caller,
    options: &RunOptions,
    patterns: Option<&[String]>,
) -> Vec<Arc<CatalogEntry>> {
    let fits = |name: &str| patterns.is_none_or(|patterns| matches_tool(patterns, name));
    let catalog = engine.registry.catalog();
    let mut handoffs = catalog.handoffs(&caller.project);
    handoffs.retain(|entry| catalog.is_listed(caller, entry));
    let active = options.active_agent.as_ref().map(|agent| handoff_tool_name(&agent.agent_id));
    handoffs.retain(|entry| {
        let name = &entry.definition.name;
        let agent_id = name.trim_start_matches(HANDOFF_TOOL_PREFIX);
        active.as_ref() != Some(name) && (fits(name) || fits(&transfer_name(agent_id)))
    });
    handoffs
}

/// Describes a selection of tools. It is the same as long as the caller selects the same tools.
fn selection_scope(options: &RunOptions, patterns: Option<&[String]>) -> String {
    let agent = options.active_agent.as_ref().map_or("", |agent| &agent.agent_id);
    format!("{agent}:{}", patterns.map_or_else(|| "*".to_owned(), |patterns| patterns.join(",")))
}

fn is_handoff_entry(entry: &CatalogEntry) -> bool {
    entry.definition.executor == Executor::HANDOFF
}

fn describe(name: &str, tool: &ToolDefinition) -> Json {
    describe_tool(ToolFormat::OpenAi, name, tool)
}

/// Returns whether the definitions have more than `max_tokens` tokens. Stops counting at that
/// number.
fn exceeds_tokens(named: &[(String, Arc<CatalogEntry>)], max_tokens: usize) -> bool {
    let size = |(name, entry): &(String, Arc<CatalogEntry>)| {
        let tool = &entry.definition;
        name.len() + tool.description.len() + tool.input_schema.text().len() + DEFINITION_TOKENS
    };
    // A token has at least one byte.
    if named.iter().map(size).sum::<usize>() <= max_tokens {
        return false;
    }
    let mut left = max_tokens;
    for (name, entry) in named {
        let tool = &entry.definition;
        let text = format!("{name} {} {}", tool.description, tool.input_schema.text());
        if tokens::exceeds(&text, left) {
            return true;
        }
        match left.checked_sub(tokens::count(&text) + DEFINITION_TOKENS) {
            Some(rest) => left = rest,
            None => return true,
        }
    }
    false
}

/// Returns the name of a tool in the chat format.
fn function_name(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

/// Checks the tools of a run. A pattern may match nothing yet; a plain name must exist.
pub fn check_tool_patterns(
    engine: &Arc<Runs>,
    caller: &Caller,
    patterns: &[String],
) -> Result<(), Error> {
    for (n, pattern) in patterns.iter().enumerate() {
        let problem = match access_rules::check_pattern(pattern) {
            Err(problem) => problem,
            Ok(()) if pattern.contains('*') => continue,
            Ok(()) => match engine.registry.tool(caller, pattern) {
                Ok(_) => continue,
                Err(Error::Refused { fault, .. }) => fault.message,
                Err(other) => return Err(other),
            },
        };
        let message = format!("tools/{n}: {problem}");
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        return Err(fault.with_detail(json!({ "pointer": format!("/tools/{n}") })).into());
    }
    Ok(())
}

/// Checks the pinned tools of a run or request. A name or pattern that matches no tool is valid.
pub fn check_pinned_tools(mode: Option<ToolMode>, pinned: Option<&[String]>) -> Result<(), Error> {
    let refused = |pointer: String, problem: &str| {
        let message = format!("{}: {problem}", pointer.trim_start_matches('/'));
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(fault.with_detail(json!({ "pointer": pointer })).into())
    };
    if mode == Some(ToolMode::Pinned) && pinned.is_some_and(<[String]>::is_empty) {
        return refused("/pinned_tools".to_owned(), "the mode pinned needs at least one tool");
    }
    for (n, pattern) in pinned.unwrap_or_default().iter().enumerate() {
        if let Err(problem) = access_rules::check_pattern(pattern) {
            return refused(format!("/pinned_tools/{n}"), &problem);
        }
    }
    Ok(())
}
