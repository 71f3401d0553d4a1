//! Settings of an MCP server: its address and the operator's policy for its tools. The
//! configuration, the API and the store use the same form.

mod desktop_config;
pub(super) mod oauth;
pub(super) mod resolved;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toolcrib::domain::tool::{Effect, Risk};
use toolcrib_protocol::secrets::SecretReference;

pub use desktop_config::parse_desktop_config;

use oauth::McpOauthSettings;

/// An MCP server. Set either `command` or `url`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "McpSettings")]
pub struct McpServerSettings {
    /// First part of the names of its tools: letters, digits, `_` and `-`.
    pub name: String,
    /// Project that has its tools.
    #[serde(skip_serializing_if = "is_default_project")]
    pub project: String,
    /// `false` disables it: Toolcrib does not connect to it.
    #[serde(skip_serializing_if = "is_true")]
    pub enabled: bool,
    /// Program to start, which speaks MCP on its standard input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Arguments of the program. `${NAME}` is replaced from the server's environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment of the program, in addition to a few basic variables. `${NAME}` is replaced from
    /// the server's environment when the program starts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Names of variables that the program inherits unchanged from the server's environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env_from: Vec<String>,
    /// Working directory of the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// URL of a server that is reached over streamable HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Headers of every request. `${NAME}` is replaced from the server's environment.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// OAuth settings, to obtain tokens for it: `oauth = { grant = "client_credentials", … }`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oauth: Option<McpOauthSettings>,
    /// Use the handshake of the revisions before 2026-07-28, without trying the newer one first.
    #[serde(skip_serializing_if = "is_false")]
    pub older: bool,
    /// Pin its tools to their accepted definitions: a changed definition is shown, and calls to the
    /// tool are refused, until an operator accepts it.
    #[serde(skip_serializing_if = "is_false")]
    pub pin: bool,
    /// Minimum effect of its tools, regardless of what the server declares: `read`, `idempotent` or
    /// `irreversible`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EffectWord>")]
    pub effect: Option<Effect>,
    /// Minimum risk of its tools: `low`, `medium`, `high` or `critical`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<RiskWord>")]
    pub risk: Option<Risk>,
    /// Timeout of calls to its tools, in milliseconds. Default: the policy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Maximum time, in milliseconds, to connect and to return the tool list.
    #[serde(skip_serializing_if = "is_usual_time")]
    pub connect_timeout_ms: u64,
    /// Maximum number of its tools that are registered.
    #[serde(skip_serializing_if = "is_usual_number")]
    pub max_tools: usize,
    /// Settings of single tools: `[mcp.tools.NAME]`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tools: BTreeMap<String, McpToolSettings>,
    /// `true` if the outbound policy limits its address: set when it was added with an API key.
    #[serde(skip_serializing_if = "is_false")]
    #[schemars(skip)]
    pub guarded: bool,
}

/// The operator's settings for one tool. They override what the server declares.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct McpToolSettings {
    /// `false` hides the tool. Default: `true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EffectWord>")]
    pub effect: Option<Effect>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<RiskWord>")]
    pub risk: Option<Risk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "only its schema is used")]
enum EffectWord {
    Read,
    Idempotent,
    Irreversible,
}

#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "only its schema is used")]
enum RiskWord {
    Low,
    Medium,
    High,
    Critical,
}

/// Default maximum number of tools of one server.
const MAX_TOOLS: usize = 1_000;

/// Default maximum time for an upstream's first answer.
const CONNECT_TIMEOUT_MS: u64 = 30_000;

/// First parts of the names of the helper tools: `tools.search`, `call.result`.
const RESERVED: [&str; 2] = ["tools", "call"];

impl Default for McpServerSettings {
    fn default() -> Self {
        Self {
            name: String::new(),
            project: "default".to_owned(),
            enabled: true,
            command: None,
            args: Vec::new(),
            env: BTreeMap::new(),
            env_from: Vec::new(),
            cwd: None,
            url: None,
            headers: BTreeMap::new(),
            oauth: None,
            older: false,
            pin: false,
            effect: None,
            risk: None,
            timeout_ms: None,
            connect_timeout_ms: CONNECT_TIMEOUT_MS,
            max_tools: MAX_TOOLS,
            tools: BTreeMap::new(),
            guarded: false,
        }
    }
}

fn is_default_project(project: &String) -> bool {
    project == "default"
}

fn is_true(value: &bool) -> bool {
    *value
}

fn is_false(value: &bool) -> bool {
    !*value
}

fn is_usual_time(time: &u64) -> bool {
    *time == CONNECT_TIMEOUT_MS
}

fn is_usual_number(number: &usize) -> bool {
    *number == MAX_TOOLS
}

/// An error in the settings: the field, and a phrase that follows its name.
#[derive(Debug, PartialEq, Eq)]
pub struct McpSettingsError {
    pub field: &'static str,
    pub why: String,
}

fn settings_error(field: &'static str, reason: impl Into<String>) -> Result<(), McpSettingsError> {
    Err(McpSettingsError { field, why: reason.into() })
}

impl McpServerSettings {
    /// Checks the constraints that the types do not express.
    pub fn check(&self) -> Result<(), McpSettingsError> {
        if let Err(reason) = toolcrib::domain::tool::check_upstream_name(&self.name) {
            return settings_error("name", reason);
        }
        if RESERVED.contains(&self.name.as_str()) {
            let reason =
                format!("\"{}\" is reserved: Toolcrib has tools under this name", self.name);
            return settings_error("name", reason);
        }
        match (&self.command, &self.url) {
            (Some(command), None) if command.trim().is_empty() => {
                return settings_error("command", "must name a program");
            }
            (Some(_), None) | (None, Some(_)) => {}
            _ => return settings_error("command", "set exactly one of command and url"),
        }
        if let Some(url) = &self.url {
            let parsed = reqwest::Url::parse(url);
            let web = |url: &reqwest::Url| matches!(url.scheme(), "http" | "https");
            if !parsed.as_ref().is_ok_and(|url| web(url) && url.host_str().is_some()) {
                return settings_error("url", "must begin with https:// or http://");
            }
        }
        for name in self.headers.keys() {
            let name = name.to_ascii_lowercase();
            if axum::http::HeaderName::from_bytes(name.as_bytes()).is_err() {
                return settings_error(
                    "headers",
                    format!("\"{name}\" is not the name of a header"),
                );
            }
        }
        if let Some(oauth) = &self.oauth {
            let authorized =
                self.headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
            if self.url.is_none() {
                return settings_error("oauth", "is for a server with a url");
            }
            if authorized {
                return settings_error("oauth", "and a header Authorization exclude each other");
            }
            oauth.check().or_else(|reason| settings_error("oauth", reason))?;
        }
        let variables = self.env.keys().chain(&self.env_from);
        for name in variables {
            if name.is_empty() || name.contains(['=', '\0']) {
                return settings_error("env", format!("\"{name}\" is not the name of a variable"));
            }
        }
        if self.timeout_ms.is_some_and(|ms| !(1..=86_400_000).contains(&ms)) {
            return settings_error("timeout_ms", "must be from 1 to 86400000");
        }
        if !(1..=600_000).contains(&self.connect_timeout_ms) {
            return settings_error("connect_timeout_ms", "must be from 1 to 600000");
        }
        if self.max_tools == 0 || self.max_tools > 20_000 {
            return settings_error("max_tools", "must be from 1 to 20000");
        }
        Ok(())
    }

    /// Returns the settings in which variables and references are replaced.
    fn expandable_fields(&self) -> impl Iterator<Item = &String> {
        let values = self.env.values().chain(self.headers.values()).chain(&self.args);
        let address = self.command.iter().chain(&self.url);
        let oauth = self.oauth.iter().flat_map(|oauth| oauth.expandable_fields());
        values.chain(address).chain(oauth)
    }

    /// Returns `true` if any setting takes a value from the server's environment.
    pub fn reads_environment(&self) -> bool {
        !self.env_from.is_empty() || self.expandable_fields().any(|text| text.contains("${"))
    }

    /// Returns the secrets that the settings name by reference: `env:NAME`, `file:/path`, or
    /// `${file:/path}` within a value.
    pub fn secret_references(&self) -> Vec<SecretReference> {
        let mut references = Vec::new();
        for text in self.expandable_fields() {
            references.extend(SecretReference::parse(text));
            let placeholders = text.split("${").skip(1).filter_map(|rest| rest.split('}').next());
            let names = placeholders.map(|inside| inside.split(":-").next().unwrap_or_default());
            let of_files = names.filter(|name| name.starts_with("file:"));
            references.extend(of_files.filter_map(SecretReference::parse));
        }
        references
    }

    /// Returns a short display form of the command or URL, without secrets.
    pub fn display_address(&self) -> String {
        match (&self.command, &self.url) {
            (Some(command), _) => command.clone(),
            (None, Some(url)) => redact_url(url),
            (None, None) => String::new(),
        }
    }
}

/// Removes the parts of a URL that may be secret: query, user name and password.
pub fn redact_url(url: &str) -> String {
    let Ok(mut parsed) = reqwest::Url::parse(url) else { return "…".to_owned() };
    let (_, _) = (parsed.set_username(""), parsed.set_password(None));
    if parsed.query().is_some() {
        parsed.set_query(Some("…"));
    }
    parsed.to_string().replace("%E2%80%A6", "…")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_stored_and_read_back() {
        let settings = McpServerSettings {
            name: "a".into(),
            command: Some("b".into()),
            pin: true,
            effect: Some(Effect::Idempotent),
            ..McpServerSettings::default()
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<McpServerSettings>(&text).unwrap(), settings);
    }

    #[test]
    fn exactly_one_of_command_and_url_is_required() {
        let minimal = McpServerSettings { name: "a".into(), ..McpServerSettings::default() };
        assert_eq!(minimal.check().unwrap_err().field, "command");
        let both = McpServerSettings {
            command: Some("x".into()),
            url: Some("http://x/".into()),
            ..minimal.clone()
        };
        assert_eq!(both.check().unwrap_err().field, "command");
        let reserved = McpServerSettings {
            name: "tools".into(),
            url: Some("http://x/".into()),
            ..minimal.clone()
        };
        assert_eq!(reserved.check().unwrap_err().field, "name");
        let odd = McpServerSettings { url: Some("ftp://x/".into()), ..minimal };
        assert_eq!(odd.check().unwrap_err().field, "url");
    }
}
