//! Selects the tools that a model sees, and resolves the names that it uses for them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::domain::access_rules;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::handoff::{
    HANDOFF_TOOL_PREFIX, handoff_tool_name, is_handoff_name, transfer_name,
};
use crate::domain::run::options::RunOptions;
use crate::model_formats::{ToolFormat, describe_tool};
use crate::registry::catalog::{CatalogEntry, RESULT_READ, RUN_FINISH};
use crate::registry::model_tool_names;
use crate::runs::Runs;

/// The tools of one conversation.
pub(super) struct ToolSelection {
    /// Tool descriptions, in the chat format.
    pub(super) tools: Vec<Value>,
    /// Toolcrib's tools, by their model-facing names.
    pub(super) tool_names: HashMap<String, String>,
    /// Names of the caller tools.
    pub(super) caller_tools: HashSet<String>,
    /// Version of the directory that the tools were read from.
    pub(super) version: u64,
}

impl ToolSelection {
    /// Selects the tools; refuses options that name a tool that does not exist.
    pub(super) fn validated(
        engine: &Arc<Runs>,
        caller: &Caller,
        options: &RunOptions,
    ) -> Result<Self, Error> {
        check_tool_patterns(engine, caller, options.tools.as_deref().unwrap_or_default())?;
        Ok(Self::new(engine, caller, options))
    }

    /// Selects the tools of the options that exist.
    pub(super) fn new(engine: &Arc<Runs>, caller: &Caller, options: &RunOptions) -> Self {
        let version = engine.registry.directory_version();
        let caller_tools: HashSet<String> =
            options.caller_tools.iter().filter_map(function_name).map(str::to_owned).collect();
        let mut tools = engine.registry.tools_for_model(caller);
        let fits = |name: &str| {
            let model_name = model_tool_names::name_for_model(name);
            options.offered_tools().is_none_or(|patterns| {
                patterns.iter().any(|p| {
                    access_rules::pattern_matches(p, name)
                        || access_rules::pattern_matches(p, &model_name)
                })
            })
        };
        tools.retain(|entry| fits(&entry.definition.name));
        let mut handoffs = engine.registry.handoff_tools(caller);
        let active = options.active_agent.as_ref().map(|agent| handoff_tool_name(&agent.agent_id));
        handoffs.retain(|entry| {
            let name = &entry.definition.name;
            let agent_id = name.trim_start_matches(HANDOFF_TOOL_PREFIX);
            active.as_ref() != Some(name) && (fits(name) || fits(&transfer_name(agent_id)))
        });
        let has_reader = tools.iter().any(|entry| entry.definition.name == RESULT_READ);
        if !tools.is_empty() && !has_reader {
            // The model needs it to read the omitted parts of a digest.
            tools.extend(engine.registry.tool(caller, RESULT_READ));
        }
        if !tools.is_empty() {
            // A run without any tool ends with its answer, and its model may not know tools at all.
            tools.extend(engine.registry.tool(caller, RUN_FINISH));
        }
        let model_names = model_tool_names::names_for_model(
            tools.iter().map(|entry| entry.definition.name.as_str()),
        );
        let mut offer = Self {
            tools: options.caller_tools.clone(),
            tool_names: HashMap::new(),
            caller_tools,
            version,
        };
        for (entry, name) in tools.iter().zip(model_names) {
            if offer.caller_tools.contains(&name) {
                continue;
            }
            offer
                .tools
                .push(describe_tool(ToolFormat::OpenAi, &name, &entry.definition).to_value());
            offer.tool_names.insert(name, entry.definition.name.clone());
        }
        offer.add_handoffs(&handoffs);
        offer
    }

    /// Adds the handoffs, under the names that models know from OpenAI's Agents SDK.
    fn add_handoffs(&mut self, handoffs: &[Arc<CatalogEntry>]) {
        for entry in handoffs {
            let tool = &entry.definition.name;
            let mut name = transfer_name(tool.trim_start_matches(HANDOFF_TOOL_PREFIX));
            let is_taken = |name: &String| {
                self.caller_tools.contains(name) || self.tool_names.contains_key(name)
            };
            if is_taken(&name) {
                name = model_tool_names::name_for_model(tool);
            }
            self.tools.push(describe_tool(ToolFormat::OpenAi, &name, &entry.definition).to_value());
            self.tool_names.insert(name, tool.clone());
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

    /// Returns every name that the model received.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tool_names.keys().chain(&self.caller_tools).map(String::as_str)
    }
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
