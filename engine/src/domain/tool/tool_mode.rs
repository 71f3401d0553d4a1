//! Selects the tool definitions that a model receives: all of them, or a few and a search. Pure.
//!
//! Hundreds of definitions cost more tokens than the conversation, and models choose worse among
//! them. Above a threshold a model therefore receives the pinned tools, the tools that the
//! conversation has used or found, and a tool that searches the others.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Selects the tool definitions that a model receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolMode {
    /// `All` up to the threshold, `Search` above it.
    #[default]
    Auto,
    /// Every tool of the run.
    All,
    /// The pinned tools, those that the conversation has used or found, and the tool search.
    Search,
    /// The pinned tools and no others, except the reader of results once a digest refers to it.
    Pinned,
}

impl ToolMode {
    /// All modes.
    pub const EVERY: [Self; 4] = [Self::Auto, Self::All, Self::Search, Self::Pinned];

    /// Returns the mode's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::All => "all",
            Self::Search => "search",
            Self::Pinned => "pinned",
        }
    }
}

impl FromStr for ToolMode {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::EVERY.into_iter().find(|mode| mode.as_str() == text).ok_or(())
    }
}

/// Default for the number of tokens of all definitions up to which a model receives all of them.
pub const DEFAULT_THRESHOLD_TOKENS: usize = 8_000;

/// Settings of the definitions that models receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolModeSettings {
    /// Mode of every run and request that sets none.
    pub mode: ToolMode,
    /// Names and patterns of the pinned tools.
    pub pinned_tools: Vec<String>,
    /// Number of tokens of all definitions above which `Auto` means `Search`.
    pub threshold_tokens: usize,
    /// Settings of single agents, by their names.
    pub agents: BTreeMap<String, AgentToolMode>,
}

impl Default for ToolModeSettings {
    fn default() -> Self {
        Self {
            mode: ToolMode::default(),
            pinned_tools: Vec::new(),
            threshold_tokens: DEFAULT_THRESHOLD_TOKENS,
            agents: BTreeMap::new(),
        }
    }
}

/// Settings of one agent. Those that are `None` come from [`ToolModeSettings`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AgentToolMode {
    /// Mode of the agent's runs and requests.
    pub mode: Option<ToolMode>,
    /// Names and patterns of the agent's pinned tools.
    pub pinned_tools: Option<Vec<String>>,
}

impl ToolModeSettings {
    /// Returns the mode and the pinned tools for an agent. Values of the run or request come first,
    /// then those of the agent.
    pub fn resolve<'s>(
        &'s self,
        agent: &str,
        mode: Option<ToolMode>,
        pinned_tools: Option<&'s [String]>,
    ) -> (ToolMode, &'s [String]) {
        let own = self.agents.get(agent);
        let mode = mode.or_else(|| own?.mode).unwrap_or(self.mode);
        let pinned = pinned_tools.or_else(|| own?.pinned_tools.as_deref());
        (mode, pinned.unwrap_or(&self.pinned_tools))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_takes_precedence_over_its_agent_and_the_agent_over_the_default() {
        let agent = AgentToolMode { mode: Some(ToolMode::Search), pinned_tools: None };
        let settings = ToolModeSettings {
            pinned_tools: vec!["a".to_owned()],
            agents: BTreeMap::from([("ada".to_owned(), agent)]),
            ..ToolModeSettings::default()
        };
        let all = ["a".to_owned()];
        assert_eq!(settings.resolve("bob", None, None), (ToolMode::Auto, &all[..]));
        assert_eq!(settings.resolve("ada", None, None), (ToolMode::Search, &all[..]));
        let own = ["b".to_owned()];
        let resolved = settings.resolve("ada", Some(ToolMode::Pinned), Some(&own));
        assert_eq!(resolved, (ToolMode::Pinned, &own[..]));
        for mode in ToolMode::EVERY {
            assert_eq!(mode.as_str().parse(), Ok(mode));
        }
    }
}
