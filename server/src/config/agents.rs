//! Agents in the configuration.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::Value;
use toolcrib::domain::caller::DEFAULT_PROJECT;
use toolcrib::registry::{ParsedAgent, parse_agent};

use super::{Config, ConfigError};

/// Schema of an agent, used to check keys. The engine reads the agent.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
pub struct AgentSettings {
    /// Id of the agent; its tool is `agent.` and the id.
    agent_id: String,
    /// The project. Default: `default`.
    project: Option<String>,
    /// Instructions, model, tools, limits and result.
    profile: Option<AgentProfileSettings>,
    /// `loop` (default) or `worker`.
    driver: Option<String>,
    /// Target of its wakeups over NATS; `worker` needs it or `wakeup_url`.
    worker_target: Option<String>,
    /// URL that receives a signed webhook when an item waits in its inbox.
    wakeup_url: Option<String>,
    /// `cancel` (default) or `detach`.
    on_parent_end: Option<String>,
}

/// Schema of an agent's profile.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct AgentProfileSettings {
    /// Description for callers and their models.
    description: Option<String>,
    /// System prompt.
    instructions: Option<String>,
    /// Name of its model.
    model: Option<String>,
    /// Names and patterns of its tools.
    tools: Option<Vec<String>>,
    /// `auto`, `all`, `search` or `pinned`.
    tool_mode: Option<String>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`.
    pinned_tools: Option<Vec<String>>,
    /// Limits of one call.
    limits: Option<AgentLimitSettings>,
    /// Names of the result's fields, or objects.
    result_fields: Option<Vec<Value>>,
}

/// Schema of an agent's limits.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct AgentLimitSettings {
    /// Maximum number of model responses.
    steps: Option<u32>,
    /// Maximum number of tool calls.
    calls: Option<u32>,
    /// Maximum number of tokens.
    tokens: Option<u64>,
    /// Maximum time in milliseconds.
    ms: Option<u64>,
    /// Number of levels of agents below it.
    depth: Option<u32>,
}

impl Config {
    /// Returns the configured agents by project.
    ///
    /// # Errors
    ///
    /// Refuses agents that cannot be read, and two with one id.
    pub fn configured_agents(&self) -> Result<BTreeMap<String, Vec<ParsedAgent>>, ConfigError> {
        let mut by_project: BTreeMap<String, Vec<ParsedAgent>> = BTreeMap::new();
        for (n, agent) in self.agents.iter().enumerate() {
            let invalid = |reason: String| ConfigError::invalid(&format!("agents.{n}"), reason);
            let mut agent = agent.clone();
            let project = agent.as_object_mut().and_then(|fields| fields.remove("project"));
            let project = match project {
                None | Some(Value::Null) => DEFAULT_PROJECT.to_owned(),
                Some(Value::String(project)) => project,
                Some(_) => return Err(invalid("project must be a text".to_owned())),
            };
            let parsed = parse_agent(&project, None, &agent);
            let parsed = parsed.map_err(|error| invalid(error.to_string()))?;
            if let ParsedAgent::Callable(definition) = &parsed
                && let Some((field, problem)) = definition.profile.find_problem()
            {
                return Err(invalid(format!("profile/{field} {problem}")));
            }
            let agents = by_project.entry(project).or_default();
            if agents.iter().any(|other| other.agent_id() == parsed.agent_id()) {
                return Err(invalid(format!("there are two agents \"{}\"", parsed.agent_id())));
            }
            agents.push(parsed);
        }
        Ok(by_project)
    }
}
