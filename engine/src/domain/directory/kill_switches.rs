//! Kill switches: an operator turns a tool, an agent, a source or a project off, with a reason.
//! Pure.
//!
//! While a switch is set, new calls that it covers are refused, and open ones end. A switch belongs
//! to a project. The names of tools and sources may be patterns.

use std::collections::HashMap;
use std::str::FromStr;

use serde_json::json;

use crate::domain::access_rules::pattern_matches;
use crate::domain::agent::{AGENT_TOOL_PREFIX, agent_tool_name};
use crate::domain::call::{Call, Target};
use crate::domain::fault::{Code, Fault};
use crate::domain::run::handoff::HANDOFF_TOOL_PREFIX;
use crate::domain::tool::Executor;

/// The kind of subject that a switch turns off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SwitchKind {
    /// A tool, or the tools that match a pattern.
    Tool,
    /// An agent: a caller, or one of the roster.
    Agent,
    /// A source: an executor such as `mcp` or `http`, or an MCP server by its name.
    Source,
    /// A project.
    Project,
}

impl SwitchKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Tool, Self::Agent, Self::Source, Self::Project];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tool => "tool",
            Self::Agent => "agent",
            Self::Source => "source",
            Self::Project => "project",
        }
    }

    /// Returns true if the name may be a pattern.
    pub fn has_patterns(self) -> bool {
        matches!(self, Self::Tool | Self::Source)
    }
}

impl FromStr for SwitchKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// A switch that is set: its subject is off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KillSwitch {
    /// Project that the switch belongs to. For a switch of the kind project, the same as `name`.
    pub project: String,
    /// Kind of the subject.
    pub kind: SwitchKind,
    /// Name of the subject, or a pattern.
    pub name: String,
    /// Reason, as callers and models see it.
    pub reason: String,
    /// Agent name of the caller that set the switch.
    pub set_by: String,
    /// Time when it was set, in Unix milliseconds.
    pub set_ms: u64,
}

impl KillSwitch {
    /// Says that the subject is off, and why: `tool "mail.send" is switched off: wrong receivers`.
    pub fn describe(&self) -> String {
        format!("{} \"{}\" is switched off: {}", self.kind.as_str(), self.name, self.reason)
    }

    /// Returns the fault of a call that the switch forbids or ends.
    pub fn to_fault(&self) -> Fault {
        let switch = json!({ "kind": self.kind.as_str(), "name": self.name });
        let detail = json!({ "switch": switch, "reason": self.reason });
        let hint = "an operator has switched this off; toolcrib switch ls lists the switches";
        let fault = Fault::new(Code::PermissionDenied, self.describe()).without_side_effect();
        fault.with_detail(detail).with_hint(hint)
    }
}

/// Returns the names of a tool's source: its executor and, for a tool of an upstream, the upstream.
pub fn source_names(executor: Executor, tool: &str) -> impl Iterator<Item = &str> {
    let upstream = (executor == Executor::MCP).then(|| tool.split_once('.')).flatten();
    [executor.as_str()].into_iter().chain(upstream.map(|(upstream, _)| upstream))
}

/// Returns the id of the agent that a tool calls or hands a run off to.
fn agent_of_tool(executor: Executor, tool: &str) -> Option<&str> {
    match executor {
        Executor::AGENT => tool.strip_prefix(AGENT_TOOL_PREFIX),
        Executor::HANDOFF => tool.strip_prefix(HANDOFF_TOOL_PREFIX),
        _ => None,
    }
}

type SwitchesByName = HashMap<String, KillSwitch, foldhash::fast::RandomState>;

/// The switches of one project.
#[derive(Debug, Clone, Default, PartialEq)]
struct ProjectSwitches {
    exact: [SwitchesByName; 4],
    patterns: Vec<KillSwitch>,
}

impl ProjectSwitches {
    fn find(&self, kind: SwitchKind, name: &str) -> Option<&KillSwitch> {
        let matches =
            |switch: &&KillSwitch| switch.kind == kind && pattern_matches(&switch.name, name);
        self.exact[kind as usize].get(name).or_else(|| self.patterns.iter().find(matches))
    }
}

/// All switches that are set, indexed by project and name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KillSwitchSet(HashMap<String, ProjectSwitches, foldhash::fast::RandomState>);

impl KillSwitchSet {
    /// Builds the index.
    pub fn new(switches: &[KillSwitch]) -> Self {
        let mut set = Self::default();
        for switch in switches {
            let project = set.0.entry(switch.project.clone()).or_default();
            if switch.kind.has_patterns() && switch.name.contains('*') {
                project.patterns.push(switch.clone());
            } else {
                let exact = &mut project.exact[switch.kind as usize];
                exact.insert(switch.name.clone(), switch.clone());
            }
        }
        set
    }

    /// Returns true if no switch is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the switch that turns a project or an agent of it off.
    pub fn find_for_agent(&self, project: &str, agent: &str) -> Option<&KillSwitch> {
        let switches = self.0.get(project)?;
        let whole = switches.find(SwitchKind::Project, project);
        whole.or_else(|| switches.find(SwitchKind::Agent, agent))
    }

    /// Returns the switch that turns a tool, its source or its project off. A tool that calls an
    /// agent, or hands a run off to one, is off with the agent.
    pub fn find_for_tool(
        &self,
        project: &str,
        tool: &str,
        executor: Executor,
    ) -> Option<&KillSwitch> {
        let switches = self.0.get(project)?;
        let source = || {
            let mut names = source_names(executor, tool);
            names.find_map(|name| switches.find(SwitchKind::Source, name))
        };
        let agent = || {
            let id = agent_of_tool(executor, tool)?;
            let by_id = switches.find(SwitchKind::Agent, id);
            by_id.or_else(|| switches.find(SwitchKind::Tool, &agent_tool_name(id)))
        };
        let whole = switches.find(SwitchKind::Project, project);
        whole.or_else(|| switches.find(SwitchKind::Tool, tool)).or_else(source).or_else(agent)
    }

    /// Returns the switch that turns a source itself off, whatever tools it has.
    pub fn find_for_source(&self, project: &str, source: &str) -> Option<&KillSwitch> {
        let switches = self.0.get(project)?;
        let whole = switches.find(SwitchKind::Project, project);
        whole.or_else(|| switches.find(SwitchKind::Source, source))
    }

    /// Returns the switch that ends a call. A call that fell back to another tool ends with either.
    pub fn find_for_call(&self, call: &Call) -> Option<&KillSwitch> {
        if self.is_empty() {
            return None;
        }
        let Target { tool, executor, .. } = &call.target;
        let requested = (*tool != call.tool_name)
            .then(|| self.0.get(&call.project)?.find(SwitchKind::Tool, &call.tool_name));
        let agent = self.find_for_agent(&call.project, &call.origin.agent);
        agent
            .or_else(|| self.find_for_tool(&call.project, tool, *executor))
            .or_else(|| requested.flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_found_by_name_pattern_source_and_project() {
        let switch = |project: &str, kind: SwitchKind, name: &str| KillSwitch {
            project: project.into(),
            kind,
            name: name.into(),
            reason: "why".into(),
            set_by: "ops".into(),
            set_ms: 0,
        };
        let set = KillSwitchSet::new(&[
            switch("p", SwitchKind::Tool, "mail.*"),
            switch("p", SwitchKind::Tool, "calc"),
            switch("p", SwitchKind::Source, "git*"),
            switch("p", SwitchKind::Source, "http"),
            switch("p", SwitchKind::Agent, "ada"),
            switch("p", SwitchKind::Tool, "agent.b*"),
            switch("q", SwitchKind::Project, "q"),
        ]);
        let tool = |project, tool, executor| {
            set.find_for_tool(project, tool, executor).map(|switch| switch.name.as_str())
        };
        assert_eq!(tool("p", "mail.send", Executor::CLIENT), Some("mail.*"));
        assert_eq!(tool("p", "calc", Executor::BUILTIN), Some("calc"));
        assert_eq!(tool("p", "calculator", Executor::BUILTIN), None);
        assert_eq!(tool("p", "github.issue", Executor::MCP), Some("git*"));
        assert_eq!(tool("p", "github.issue", Executor::CLIENT), None, "a source is no prefix");
        assert_eq!(tool("p", "any", Executor::HTTP), Some("http"));
        assert_eq!(tool("q", "any", Executor::CLIENT), Some("q"));
        assert_eq!(tool("p", "agent.ada", Executor::AGENT), Some("ada"));
        assert_eq!(tool("p", "handoff.to_ada", Executor::HANDOFF), Some("ada"));
        assert_eq!(tool("p", "handoff.to_bob", Executor::HANDOFF), Some("agent.b*"));
        assert_eq!(tool("p", "agent.ada", Executor::CLIENT), None);
        assert_eq!(tool("r", "mail.send", Executor::CLIENT), None);
        assert!(set.find_for_agent("p", "ada").is_some());
        assert!(set.find_for_agent("p", "*").is_none());
        assert!(set.find_for_agent("q", "bob").is_some());
        assert!(set.find_for_source("p", "github").is_some());
        assert!(KillSwitchSet::new(&[]).is_empty());
    }
}
