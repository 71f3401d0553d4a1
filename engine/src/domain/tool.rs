//! The definition of a tool: its name, schemas, effect and executor. Pure.

pub mod args;
pub mod availability;
pub mod tool_mode;
use std::collections::BTreeSet;
use std::str::FromStr;

use args::{ArgumentMapping, ArgumentRules};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::domain::id::hex;
use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::utp::{AfterExecution, Binding};

/// The name of the party that executes a tool, such as `mcp`.
///
/// The set is open: each source brings its own name. Names are stored and sent, so they never
/// change. The constants are the names that Toolcrib itself uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Executor(&'static str);

impl Executor {
    /// A function in this process.
    pub const BUILTIN: Self = Self("builtin");
    /// A connected client.
    pub const CLIENT: Self = Self("client");
    /// A tool service on NATS.
    pub const UTP: Self = Self("utp");
    /// An MCP server.
    pub const MCP: Self = Self("mcp");
    /// An HTTP API.
    pub const HTTP: Self = Self("http");
    /// The caller itself; Toolcrib only records the call.
    pub const CALLER: Self = Self("caller");
    /// An agent.
    pub const AGENT: Self = Self("agent");
    /// Toolcrib itself, for the tools that hand work to agents. A call only waits for others.
    pub const INTERNAL: Self = Self("internal");
    /// The agent loop that made the call: it hands its run off to another agent.
    pub const HANDOFF: Self = Self("handoff");

    /// The executors whose position is part of the versions of their tools, so the order never
    /// changes. Any other executor is part of the versions by its name.
    pub const STANDARD: [Self; 8] = [
        Self::BUILTIN,
        Self::CLIENT,
        Self::UTP,
        Self::MCP,
        Self::HTTP,
        Self::CALLER,
        Self::AGENT,
        Self::HANDOFF,
    ];

    /// Names an executor: lower-case letters, digits and `_`, at most 32.
    ///
    /// # Panics
    ///
    /// Panics, at compile time in a constant, if the name has another form.
    #[allow(clippy::panic, reason = "a source names its executor in a constant")]
    pub const fn new(name: &'static str) -> Self {
        if !is_executor_name(name) {
            panic!("an executor's name has 1 to 32 lower-case letters, digits and '_'");
        }
        Self(name)
    }

    /// Returns the name, as it is stored and sent.
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Adds the executor to the fingerprint of a tool.
    fn update_hash(self, hash: &mut Sha256) {
        match Self::STANDARD.iter().position(|standard| *standard == self) {
            // Versions are stored, so the standard executors keep their number of one byte.
            Some(position) => hash.update([position as u8]),
            None => {
                hash.update([u8::MAX]);
                hash.update(self.0.as_bytes());
                hash.update([0]);
            }
        }
    }

    /// Returns the value of the public field `source`: `server` if the server executes the tool,
    /// else `client`.
    pub fn source(self) -> &'static str {
        match self {
            Self::CLIENT | Self::CALLER => "client",
            _ => "server",
        }
    }

    /// Returns the usual traits of this executor's sources. A target that was stored without traits
    /// has these.
    pub fn traits(self) -> SourceTraits {
        let common = SourceTraits { retries: true, exact_numbers: true, ..Default::default() };
        match self {
            Self::BUILTIN => SourceTraits { in_process: true, speculative_reads: true, ..common },
            Self::CLIENT => {
                SourceTraits { reports_later: true, needs_acknowledgement: true, ..common }
            }
            // A tool service answers a repeated call from its memory, so a retry has no effect.
            Self::UTP => SourceTraits {
                reports_later: true,
                needs_acknowledgement: true,
                needs_command: true,
                retries: false,
                exact_numbers: false,
                ..common
            },
            Self::MCP => SourceTraits { mcp_results: true, ..common },
            Self::HTTP => SourceTraits { needs_command: true, exact_numbers: false, ..common },
            // The caller executes its own calls: the attempt needs no acknowledgement.
            Self::CALLER => SourceTraits { reports_later: true, ..common },
            // The run of an agent is stored, and its end is the result of the call.
            Self::AGENT => SourceTraits { reports_later: true, retries: false, ..common },
            // The work is in other calls, which survive a restart; the call is delivered again.
            Self::INTERNAL => SourceTraits { reports_later: true, retries: false, ..common },
            _ => common,
        }
    }

    /// Returns the question to ask if no executor acknowledges a call.
    pub fn availability_question(self) -> &'static str {
        match self {
            Self::UTP => "is its tool service running, and NATS reachable",
            _ => "is the client that offers it connected",
        }
    }
}

/// Behavior of a source's executor that the engine depends on.
///
/// The target of a call stores the traits of its source, so that the lifecycle needs no source to
/// decide. The default has no trait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceTraits {
    /// Tools run in this process.
    pub in_process: bool,
    /// The executor reports the result later, even if the node that started the attempt is lost.
    pub reports_later: bool,
    /// A call is PENDING until the executor acknowledges the attempt.
    pub needs_acknowledgement: bool,
    /// Another attempt may succeed where one has failed.
    pub retries: bool,
    /// Numbers reach the executor digit by digit. Otherwise those of more than 64 bits are refused.
    pub exact_numbers: bool,
    /// An attempt that only reads may start before its call is committed.
    pub speculative_reads: bool,
    /// An attempt needs a command, which the engine builds from the tool's binding.
    pub needs_command: bool,
    /// Results are MCP tool results: `content`, `structuredContent` and `isError`. Such a tool may
    /// also log.
    pub mcp_results: bool,
}

/// Maximum number of executors besides [`Executor::STANDARD`] that one process reads. A name read
/// from text lives as long as the process.
const MAX_OTHER_EXECUTORS: usize = 256;

const fn is_executor_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    let mut index = 0;
    while index < bytes.len() {
        if !matches!(bytes[index], b'a'..=b'z' | b'0'..=b'9' | b'_') {
            return false;
        }
        index += 1;
    }
    !bytes.is_empty() && bytes.len() <= 32
}

impl FromStr for Executor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        static OTHERS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        if let Some(standard) = Self::STANDARD.iter().find(|standard| standard.0 == text) {
            return Ok(*standard);
        }
        let mut others = OTHERS.lock();
        if let Some(name) = others.get(text) {
            return Ok(Self(name));
        }
        if !is_executor_name(text) || others.len() >= MAX_OTHER_EXECUTORS {
            return Err(());
        }
        let name: &'static str = Box::leak(text.to_owned().into_boxed_str());
        others.insert(name);
        Ok(Self(name))
    }
}

impl<'de> Deserialize<'de> for Executor {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let unknown = |()| serde::de::Error::custom(format!("unknown executor \"{text}\""));
        text.parse().map_err(unknown)
    }
}

/// The side effect of running a tool. It decides whether an attempt may be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Changes nothing.
    Read,
    /// Running it twice has the same effect as once.
    Idempotent,
    /// Running it twice differs from once. The default.
    #[default]
    Irreversible,
}

impl Effect {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Idempotent => "idempotent",
            Self::Irreversible => "irreversible",
        }
    }
}

/// Risk level of a tool, for policies and approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Risk {
    /// Low risk; MCP clients never see the tool as destructive.
    Low,
    /// Medium risk. The default.
    #[default]
    Medium,
    /// High risk; MCP clients see even an idempotent tool as destructive.
    High,
    /// Highest risk level.
    Critical,
}

impl Risk {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Critical => "critical",
        }
    }
}

/// A tool to use instead when the first one certainly had no effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fallback {
    /// Name of the fallback tool.
    pub tool: String,
    /// Mapping from the first tool's arguments; `None` passes the same arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<ArgumentMapping>,
}

/// One tool, as its owner described it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// The project it belongs to; `None` for a tool of every project (built-in tools).
    pub project: Option<String>,
    /// Name that callers use, such as `weather.query`; unique in the project.
    pub name: String,
    /// Description for people and models.
    pub description: String,
    /// The party that executes the tool.
    pub executor: Executor,
    /// JSON Schema of the arguments.
    pub input_schema: Json,
    /// JSON Schema of the result; `None` accepts any result.
    pub output_schema: Option<Json>,
    /// Default time from acceptance of a call to its outcome, in milliseconds.
    pub timeout_ms: u64,
    /// True if its calls are background tasks: the caller continues, the result arrives later.
    /// Named `async` on every wire.
    pub background: bool,
    /// Side effect; decides whether an attempt may be repeated.
    pub effect: Effect,
    /// Risk level.
    pub risk: Risk,
    /// Limits and retries of its calls, in addition to those of the project.
    pub policy: ExecutionPolicyPatch,
    /// Tools to use instead, in order.
    pub fallback: Vec<Fallback>,
    /// Data from the tool's owner, returned with the tool; `title` is shown to people.
    pub metadata: Option<Json>,
    /// Execution settings of a project's tool; for a function only the effect of its results.
    pub binding: Option<Binding>,
}

impl ToolDefinition {
    /// Returns a fingerprint of everything that matters to callers and approvers of the tool.
    pub fn version(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.name.as_bytes());
        hash.update([0]);
        hash.update(self.description.as_bytes());
        hash.update([0]);
        hash.update(self.input_schema.canonical_text().as_bytes());
        if let Some(output) = &self.output_schema {
            hash.update([1]);
            hash.update(output.canonical_text().as_bytes());
        }
        // Versions are stored: the order of the variants of `Effect` and `Risk` must not change.
        hash.update([self.effect as u8, self.risk as u8]);
        self.executor.update_hash(&mut hash);
        if let Some(utp) = &self.binding {
            hash.update([2, utp.after_execution as u8]);
            hash.update(utp.target_subject.as_deref().unwrap_or_default().as_bytes());
            hash.update([0]);
            hash.update(utp.options.canonical_text().as_bytes());
            if let Some(parameters) = &utp.parameters {
                hash.update([3]);
                hash.update(parameters.canonical_text().as_bytes());
            }
        }
        // People and models see the title in place of the name.
        let metadata = self.metadata.as_ref().filter(|metadata| metadata.text().contains("title"));
        let title = metadata.and_then(|metadata| metadata.to_value().get("title").cloned());
        if let Some(title) = title.as_ref().and_then(serde_json::Value::as_str) {
            hash.update([4]);
            hash.update(title.as_bytes());
        }
        hex(&hash.finalize()[..8])
    }
}

impl ToolDefinition {
    /// Returns the effect of a result on the run or turn that made the call, if the definition
    /// declares one.
    pub fn after_execution(&self) -> Option<AfterExecution> {
        self.binding.as_ref().map(|binding| binding.after_execution)
    }

    /// Returns the argument rules, and the schema that the executed arguments must match.
    pub(crate) fn argument_rules(&self) -> (Option<ArgumentRules>, Json) {
        let Some(utp) = &self.binding else { return (None, self.input_schema.clone()) };
        let full = utp.parameters.as_ref().unwrap_or(&self.input_schema);
        match ArgumentRules::from_options(&utp.options.to_value()) {
            Some(rules) => {
                let executed = rules.schema_for_execution(&full.to_value());
                (Some(rules), Json::from_value(&executed))
            }
            None => (None, full.clone()),
        }
    }

    /// Restricts the input schema to the arguments that a model may set; keeps the full schema for
    /// execution.
    pub fn hide_preset_arguments(&mut self) {
        let Some(utp) = &mut self.binding else { return };
        let Some(rules) = ArgumentRules::from_options(&utp.options.to_value()) else { return };
        let full = utp.parameters.clone().unwrap_or_else(|| self.input_schema.clone());
        let visible = Json::from_value(&rules.schema_for_model(&full.to_value()));
        if visible != full {
            utp.parameters = Some(full);
            self.input_schema = visible;
        }
    }
}

/// The error for a text that is not a tool name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a tool name: 1 to 128 letters, digits, '_', '-', '/' and single dots, \
     beginning with a letter or digit"
)]
pub struct InvalidToolName(pub String);

/// Checks a tool's name.
pub fn check_tool_name(name: &str) -> Result<(), InvalidToolName> {
    let refused = || InvalidToolName(name.chars().take(80).collect());
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'/' | b'.');
    let fits = !name.is_empty() && name.len() <= 128 && name.bytes().all(is_allowed);
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if fits && begins && !name.contains("..") && !name.ends_with('.') {
        Ok(())
    } else {
        Err(refused())
    }
}

/// Names of the tools that the MCP transport adds to its lists. No other tool can have one of them:
/// an MCP client would call that tool instead.
pub const MCP_HELPER_TOOLS: [&str; 4] =
    ["call.result", "tools.search", "tools.describe", "tools.call"];

/// Returns true if a helper tool of the MCP transport has this name, as it is or as models see it.
pub(crate) fn is_mcp_helper_name(name: &str) -> bool {
    MCP_HELPER_TOOLS.iter().any(|helper| *helper == name || helper.replace('.', "__") == name)
}

/// Explains why a tool cannot have the name of a helper tool.
pub(crate) fn helper_name_conflict(name: &str) -> String {
    format!("\"{name}\" is a tool of the MCP endpoint; choose another name")
}

/// Maximum length of an upstream's name.
const MAX_UPSTREAM_NAME: usize = 40;

/// Checks an upstream's name; its tools are named NAME.tool.
pub fn check_upstream_name(name: &str) -> Result<(), String> {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if begins && name.len() <= MAX_UPSTREAM_NAME && name.bytes().all(is_allowed) {
        return Ok(());
    }
    let excerpt: String = name.chars().take(80).collect();
    Err(format!(
        "\"{excerpt}\" is not a name for a source: 1 to {MAX_UPSTREAM_NAME} letters, digits, '_' \
         and '-', beginning with a letter or digit"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_names_are_checked() {
        for good in ["weather.query", "a", "file_read-2", "9lives", "mcp/github.create"] {
            assert!(check_tool_name(good).is_ok(), "{good}");
        }
        let long = "a".repeat(129);
        for bad in ["", ".a", "a..b", "a.", "a b", "tür", "a\n", "-a", long.as_str()] {
            assert!(check_tool_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn executors_round_trip() {
        for executor in Executor::STANDARD.into_iter().chain([Executor::new("grpc")]) {
            assert_eq!(executor.as_str().parse(), Ok(executor));
            let json = serde_json::to_string(&executor).unwrap();
            assert_eq!(serde_json::from_str::<Executor>(&json).unwrap(), executor);
        }
        for bad in ["", "gRPC", "a b", &"a".repeat(33)] {
            assert!(bad.parse::<Executor>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_version_of_a_tool_is_the_one_stored_by_earlier_releases() {
        let tool = |executor| ToolDefinition {
            project: None,
            name: "a.b".to_owned(),
            description: "c".to_owned(),
            executor,
            input_schema: Json::parse("{}").unwrap(),
            output_schema: None,
            timeout_ms: 1,
            background: false,
            effect: Effect::Irreversible,
            risk: Risk::Medium,
            policy: ExecutionPolicyPatch::default(),
            fallback: Vec::new(),
            metadata: None,
            binding: None,
        };
        assert_eq!(tool(Executor::MCP).version(), "7239928d4394c474");
        let grpc = tool(Executor::new("grpc")).version();
        assert_ne!(grpc, tool(Executor::new("soap")).version());
    }

    #[test]
    fn stored_traits_may_lack_fields() {
        let stored: SourceTraits = serde_json::from_str(r#"{"reports_later":true}"#).unwrap();
        assert_eq!(stored, SourceTraits { reports_later: true, ..Default::default() });
    }
}
