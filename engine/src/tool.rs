//! What a tool is: its name, schemas, effect, and who executes it. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::args::Rules;
use crate::json::Json;
use crate::retry::PolicyPatch;

/// Who executes a tool.
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
    /// Whoever asked: the caller runs it itself, and the crib keeps the record.
    Caller,
}

impl Executor {
    /// Every executor.
    pub const ALL: [Self; 6] =
        [Self::Builtin, Self::Client, Self::Utp, Self::Mcp, Self::Http, Self::Caller];

    /// As written on the wire.
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

    /// The coarse word of the public field `source`: whether the server executes it.
    pub fn source(self) -> &'static str {
        match self {
            Self::Client | Self::Caller => "client",
            _ => "server",
        }
    }

    /// Whether an attempt is with somebody else, who reports later. Such a call reads PENDING until
    /// that side has taken it; what the caller runs itself is taken from the first moment.
    pub fn parks(self) -> bool {
        matches!(self, Self::Client | Self::Utp | Self::Caller)
    }
}

impl FromStr for Executor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|executor| executor.as_str() == text).ok_or(())
    }
}

/// What running a tool does to the world. Decides what may be tried a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Changes nothing.
    Read,
    /// Twice is the same as once.
    Idempotent,
    /// Twice is not the same as once. What nobody said is taken as this.
    #[default]
    Irreversible,
}

impl Effect {
    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Idempotent => "idempotent",
            Self::Irreversible => "irreversible",
        }
    }
}

/// What policy and approval look at.
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
    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Critical => "critical",
        }
    }
}

/// A tool to use instead, when the first is known not to have taken effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternate {
    /// Its name.
    pub tool: String,
    /// How its arguments come from the first tool's; none = the same arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<crate::args::Mapping>,
}

/// One tool, as its owner described it.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The project it belongs to; none = every project has it (built-ins).
    pub project: Option<String>,
    pub name: String,
    pub description: String,
    pub executor: Executor,
    pub input_schema: Json,
    pub output_schema: Option<Json>,
    pub timeout_ms: u64,
    /// Whether its calls are background tasks: the rest goes on, the result arrives later. `async`
    /// on every wire.
    pub background: bool,
    pub effect: Effect,
    pub risk: Risk,
    pub policy: PolicyPatch,
    pub fallback: Vec<Alternate>,
    pub metadata: Option<Json>,
    /// How it is executed; only of tools that a tool service or an HTTP API executes.
    pub utp: Option<crate::utp::Binding>,
}

impl Definition {
    /// A fingerprint of everything that matters to who calls or approves it.
    pub fn version(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.name.as_bytes());
        hash.update([0]);
        hash.update(self.description.as_bytes());
        hash.update([0]);
        hash.update(self.input_schema.canonical().as_bytes());
        if let Some(output) = &self.output_schema {
            hash.update([1]);
            hash.update(output.canonical().as_bytes());
        }
        hash.update([self.effect as u8, self.risk as u8, self.executor as u8]);
        if let Some(utp) = &self.utp {
            hash.update([2, utp.after_execution as u8]);
            hash.update(utp.target_subject.as_deref().unwrap_or_default().as_bytes());
            hash.update([0]);
            hash.update(utp.options.canonical().as_bytes());
            if let Some(parameters) = &utp.parameters {
                hash.update([3]);
                hash.update(parameters.canonical().as_bytes());
            }
        }
        // What people and models are shown in place of the name.
        let metadata = self.metadata.as_ref().filter(|metadata| metadata.text().contains("title"));
        let title = metadata.and_then(|metadata| metadata.value().get("title").cloned());
        if let Some(title) = title.as_ref().and_then(serde_json::Value::as_str) {
            hash.update([4]);
            hash.update(title.as_bytes());
        }
        hex(&hash.finalize()[..8])
    }
}

impl Definition {
    /// What it says about arguments, and the schema that those which are executed must fit.
    pub(crate) fn rules(&self) -> (Option<Rules>, serde_json::Value) {
        let Some(utp) = &self.utp else { return (None, self.input_schema.value()) };
        let full = utp.parameters.as_ref().unwrap_or(&self.input_schema).value();
        match Rules::of(&utp.options.value()) {
            Some(rules) => {
                let executed = rules.executed(&full);
                (Some(rules), executed)
            }
            None => (None, full),
        }
    }

    /// Leaves of the schema what a model may decide, and keeps all of it for the execution.
    pub fn hide(&mut self) {
        let Some(utp) = &mut self.utp else { return };
        let Some(rules) = Rules::of(&utp.options.value()) else { return };
        let full = utp.parameters.clone().unwrap_or_else(|| self.input_schema.clone());
        let visible = Json::of_value(&rules.visible(&full.value()));
        if visible != full {
            utp.parameters = Some(full);
            self.input_schema = visible;
        }
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Why a text is not a tool's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a tool name: 1 to 128 letters, digits, '_', '-', '/' and single dots, \
     beginning with a letter or digit"
)]
pub struct NotAName(pub String);

/// Checks a tool's name.
pub fn check_name(name: &str) -> Result<(), NotAName> {
    let refused = || NotAName(name.chars().take(80).collect());
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'/' | b'.');
    let fits = !name.is_empty() && name.len() <= 128 && name.bytes().all(plain);
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if fits && begins && !name.contains("..") && !name.ends_with('.') {
        Ok(())
    } else {
        Err(refused())
    }
}

/// The longest name of an upstream.
const MAX_UPSTREAM_NAME: usize = 40;

/// Why a text is not the name of an upstream: its tools are called NAME.tool.
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
            assert!(check_name(good).is_ok(), "{good}");
        }
        let long = "a".repeat(129);
        for bad in ["", ".a", "a..b", "a.", "a b", "tür", "a\n", "-a", long.as_str()] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn executors_round_trip() {
        for executor in Executor::ALL {
            assert_eq!(executor.as_str().parse(), Ok(executor));
        }
    }
}
