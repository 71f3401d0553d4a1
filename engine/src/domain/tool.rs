//! The definition of a tool: its name, schemas, effect and executor. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::domain::args::ArgumentRules;
use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;

/// The executor of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Executor {
    /// A function in this process.
    Builtin,
    /// A connected client.
    Client,
    /// A tool service on NATS.
    Utp,
    /// An MCP server.
    Mcp,
    /// An HTTP API.
    Http,
    /// The caller itself; Toolcrib only records the call.
    Caller,
}

impl Executor {
    /// Every executor.
    pub const ALL: [Self; 6] =
        [Self::Builtin, Self::Client, Self::Utp, Self::Mcp, Self::Http, Self::Caller];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Client => "client",
            Self::Utp => "utp",
            Self::Mcp => "mcp",
            Self::Http => "http",
            Self::Caller => "caller",
        }
    }

    /// Returns the value of the public field `source`: `server` if the server executes the tool,
    /// else `client`.
    pub fn source(self) -> &'static str {
        match self {
            Self::Client | Self::Caller => "client",
            _ => "server",
        }
    }

    /// Returns true if a remote executor reports the result later. Such a call is PENDING until the
    /// executor acknowledges it; a caller-executed call counts as acknowledged from the start.
    pub fn reports_later(self) -> bool {
        matches!(self, Self::Client | Self::Utp | Self::Caller)
    }
}

impl FromStr for Executor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|executor| executor.as_str() == text).ok_or(())
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
    Low,
    #[default]
    Medium,
    High,
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
    pub args: Option<crate::domain::args::ArgumentMapping>,
}

/// One tool, as its owner described it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// The project it belongs to; `None` for a tool of every project (built-in tools).
    pub project: Option<String>,
    pub name: String,
    pub description: String,
    pub executor: Executor,
    pub input_schema: Json,
    pub output_schema: Option<Json>,
    pub timeout_ms: u64,
    /// True if its calls are background tasks: the caller continues, the result arrives later.
    /// Named `async` on every wire.
    pub background: bool,
    pub effect: Effect,
    pub risk: Risk,
    pub policy: ExecutionPolicyPatch,
    pub fallback: Vec<Fallback>,
    pub metadata: Option<Json>,
    /// Execution settings; only for tools that a tool service or an HTTP API executes.
    pub binding: Option<crate::domain::utp::Binding>,
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
        hash.update([self.effect as u8, self.risk as u8, self.executor as u8]);
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
    /// Returns the argument rules, and the schema that the executed arguments must match.
    pub(crate) fn argument_rules(&self) -> (Option<ArgumentRules>, serde_json::Value) {
        let Some(utp) = &self.binding else { return (None, self.input_schema.to_value()) };
        let full = utp.parameters.as_ref().unwrap_or(&self.input_schema).to_value();
        match ArgumentRules::from_options(&utp.options.to_value()) {
            Some(rules) => {
                let executed = rules.schema_for_execution(&full);
                (Some(rules), executed)
            }
            None => (None, full),
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

/// Formats bytes as lowercase hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
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
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'/' | b'.');
    let fits = !name.is_empty() && name.len() <= 128 && name.bytes().all(plain);
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if fits && begins && !name.contains("..") && !name.ends_with('.') {
        Ok(())
    } else {
        Err(refused())
    }
}

/// Maximum length of an upstream's name.
const MAX_UPSTREAM_NAME: usize = 40;

/// Checks an upstream's name; its tools are named NAME.tool.
pub fn check_upstream_name(name: &str) -> Result<(), String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if begins && name.len() <= MAX_UPSTREAM_NAME && name.bytes().all(plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    Err(format!(
        "\"{shown}\" is not a name for a source: 1 to {MAX_UPSTREAM_NAME} letters, digits, '_' and '-', \
         beginning with a letter or digit"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
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
        for executor in Executor::ALL {
            assert_eq!(executor.as_str().parse(), Ok(executor));
        }
    }
}
