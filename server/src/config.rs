//! The configuration: every setting, its default and its valid values.
//!
//! A setting comes from, in order of precedence: a flag, the environment (`TOOLCRIB_LISTEN`; two
//! underscores for a setting in a table, `TOOLCRIB_POLICY__MAX_PARALLEL`), the file
//! (`toolcrib.toml` in the current directory, or the one given with `--config`), the default
//! defined here. An unknown key is an error: a misspelt limit that silently has no effect is worse
//! than a server that does not start. The doc comments are the user documentation, and keys are
//! checked against a schema generated from the same types, so the two cannot disagree.

mod agents;
mod approvals;
mod layers;
mod mcp_servers;
pub mod rules;
mod store_location;
mod telemetry;
mod transports;
mod usage_limits;
mod validate;
mod webhooks;

#[cfg(test)]
mod tests;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::retry::{Backoff, ExecutionPolicy, ExecutionPolicyPatch};
use toolcrib::domain::tool::Fallback;
use toolcrib_protocol::secrets::SecretRule;
use toolcrib_sources::builtin::{DatabaseSettings, WeatherSettings};
use toolcrib_sources::http::HttpSettings;

pub use crate::config::approvals::ApprovalConfig;
pub use crate::config::mcp_servers::{McpServerAdmissionSettings, local_url};
pub use crate::config::store_location::StoreLocation;
pub use crate::config::transports::{McpEndpointSettings, TransportSettings};
pub use layers::ConfigError;
pub use telemetry::TelemetrySettings;
pub(crate) use telemetry::check_endpoint;
pub use toolcrib_sources::models::settings::{LlmSettings, ModelKind, NamedModelSettings};
pub use toolcrib_transport::auth::settings::OauthSettings;
pub use usage_limits::{UsageLimitSettings, UsageLimitsByName};
pub use webhooks::{SIGNING_KEY_PREFIX, WebhookKeySettings, WebhookSettings};

/// The file that is read when `--config` names no other.
pub const DEFAULT_FILE: &str = "toolcrib.toml";

/// Every setting.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address and port to listen on. An address other than loopback requires at least one key.
    pub listen: String,
    /// Directory for all stored data. A relative path starts at the current directory.
    pub data_dir: PathBuf,
    /// The database that stores calls.
    pub store: StoreSettings,
    /// Log level and format.
    pub log: LogSettings,
    /// Keys and permissions.
    pub auth: AuthSettings,
    /// Default execution policy for calls. A project or a tool can override it.
    pub policy: PolicySettings,
    /// Settings of one project: `[projects.NAME.policy]`.
    pub projects: BTreeMap<String, ProjectSettings>,
    /// Settings of one tool: `[tools."NAME".policy]`, `[[tools."NAME".fallback]]`.
    pub tools: BTreeMap<String, ToolSettings>,
    /// Access rules: `[[rules]]`, with the fields of `PUT /v1/rules/{id}`. Those here and in
    /// `rules_file` replace the rules of their projects at every start.
    #[schemars(with = "Vec<rules::RuleSettings>")]
    pub rules: Vec<serde_json::Value>,
    /// File with access rules: JSON or TOML with `rules`.
    pub rules_file: Option<PathBuf>,
    /// Agents: `[[agents]]`, with the fields of `PUT /v1/agents/{agent_id}` and `agent_id`. Each is
    /// defined at every start; a changed one becomes a new version.
    #[schemars(with = "Vec<agents::AgentSettings>")]
    pub agents: Vec<serde_json::Value>,
    /// Limits on everything that could grow.
    pub limits: LimitSettings,
    /// Retention of finished calls.
    pub retention: RetentionSettings,
    /// Shutdown of the server.
    pub shutdown: ShutdownSettings,
    /// Connections of clients: programs that provide tools.
    pub ingress: IngressSettings,
    /// Webhooks that report finished calls.
    pub webhooks: WebhookSettings,
    /// Calls that wait for a person's approval.
    pub approvals: ApprovalConfig,
    /// The built-in tools.
    pub builtin: BuiltinSettings,
    /// Transports: the interfaces that callers use.
    #[serde(rename = "doors")]
    pub transports: TransportSettings,
    /// Tools over NATS.
    pub nats: NatsSettings,
    /// MCP servers whose tools Toolcrib offers: `[[mcp]]`.
    pub mcp: Vec<toolcrib_sources::mcp::McpServerSettings>,
    /// Rules for MCP servers that are added over the API.
    #[serde(rename = "upstreams")]
    pub mcp_servers: McpServerAdmissionSettings,
    /// Language models.
    pub llm: LlmSettings,
    /// Tools that are operations of HTTP APIs.
    pub http: HttpSettings,
    /// Secrets that tools may use by reference: `[[secrets]]`. By default none.
    pub secrets: Vec<SecretRule>,
    /// Traces and metrics.
    pub telemetry: TelemetrySettings,
    /// The file that was read. Not a setting.
    #[serde(skip)]
    #[schemars(skip)]
    pub file: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".into(),
            data_dir: "./toolcrib-data".into(),
            store: StoreSettings::default(),
            log: LogSettings::default(),
            auth: AuthSettings::default(),
            policy: PolicySettings::default(),
            projects: BTreeMap::new(),
            tools: BTreeMap::new(),
            rules: Vec::new(),
            rules_file: None,
            agents: Vec::new(),
            limits: LimitSettings::default(),
            retention: RetentionSettings::default(),
            shutdown: ShutdownSettings::default(),
            ingress: IngressSettings::default(),
            webhooks: WebhookSettings::default(),
            approvals: ApprovalConfig::default(),
            builtin: BuiltinSettings::default(),
            transports: TransportSettings::default(),
            nats: NatsSettings::default(),
            mcp: Vec::new(),
            mcp_servers: McpServerAdmissionSettings::default(),
            llm: LlmSettings::default(),
            http: HttpSettings::default(),
            secrets: Vec::new(),
            telemetry: TelemetrySettings::default(),
            file: None,
        }
    }
}

/// The database that stores calls.
#[derive(Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// `postgres://USER:PASSWORD@HOST/NAME` or `sqlite:PATH`. Default: the file `toolcrib.db` in
    /// the data directory.
    pub url: Option<String>,
}

/// Log level and format.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter such as `info,toolcrib=debug`. The
    /// variable `TOOLCRIB_LOG` takes precedence.
    pub level: String,
    /// `text` for people, `json` for programs. `auto` is text on a terminal and JSON elsewhere.
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Auto }
    }
}

// No doc comments on the variants: they would turn the schema's plain `enum` list into `oneOf`
// alternatives.
/// Format of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Auto,
    Text,
    Json,
}

/// Keys and permissions.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AuthSettings {
    /// Accepts tokens of an OAuth issuer in addition to keys.
    pub oauth: Option<OauthSettings>,
    /// Patterns (`weather.*`) of the tools that the agent of a new key may call. If empty, the
    /// agent may call nothing until `toolcrib allow` grants it.
    pub default_allow: Vec<String>,
}

/// Execution policy for calls.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicySettings {
    /// Maximum number of calls executed at the same time.
    pub max_parallel: u32,
    /// Time from the acceptance of a call to its outcome, unless the request or the tool sets
    /// another timeout.
    pub default_timeout_ms: u64,
    /// Time limit of each attempt. Default: the remaining time, divided by the attempts that may
    /// still follow, fallbacks included.
    pub attempt_timeout_ms: Option<u64>,
    /// Time that a call waits for answers to its tool's questions. It does not count against the
    /// call's timeout.
    pub input_timeout_ms: u64,
    /// Maximum number of attempts after the first, where the tool's effect permits a retry.
    pub max_retries: u32,
    /// Wait between attempts.
    #[schemars(with = "BackoffSettings")]
    pub backoff: Backoff,
    /// If true, a repeated request joins the earlier call if that call's answer was not delivered,
    /// where the tool's effect is not `read`.
    pub rejoin: bool,
    /// Maximum age of a call, run or conversation that a repeated request joins.
    pub rejoin_window_ms: u64,
    /// Time between a broken connection and the cancellation of the calls that waited on it, where
    /// the tool's effect is not `read`.
    pub disconnect_grace_ms: u64,
}

impl Default for PolicySettings {
    fn default() -> Self {
        let policy = ExecutionPolicy::default();
        Self {
            max_parallel: policy.max_parallel.unwrap_or(256),
            default_timeout_ms: policy.default_timeout_ms,
            attempt_timeout_ms: policy.attempt_timeout_ms,
            input_timeout_ms: policy.input_timeout_ms,
            max_retries: policy.max_retries,
            backoff: policy.backoff,
            rejoin: policy.rejoin,
            rejoin_window_ms: policy.rejoin_window_ms,
            disconnect_grace_ms: policy.disconnect_grace_ms,
        }
    }
}

/// Schema of the engine's backoff, used to check keys.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct BackoffSettings {
    /// Wait after the first attempt.
    initial_ms: u64,
    /// Factor by which each further wait grows.
    factor: f64,
    /// Maximum wait.
    max_ms: u64,
    /// Random share of the wait, from 0 to 1, so that simultaneous retries spread out.
    jitter: f64,
}

/// Settings of one project.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProjectSettings {
    /// The same fields as in `[policy]`, each optional.
    #[schemars(with = "PolicySettings")]
    pub policy: ExecutionPolicyPatch,
}

/// Settings of one tool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ToolSettings {
    /// The same fields as in `[policy]`, each optional.
    #[schemars(with = "PolicySettings")]
    pub policy: ExecutionPolicyPatch,
    /// Tools to use instead, in this order, when an attempt is known to have had no effect.
    #[schemars(with = "Vec<AlternateSettings>")]
    pub fallback: Vec<Fallback>,
    /// Risk in place of the one that its source states: `low`, `medium`, `high` or `critical`.
    #[schemars(with = "Option<String>")]
    pub risk: Option<toolcrib::Risk>,
}

/// Schema of the engine's alternate, used to check keys.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct AlternateSettings {
    /// The tool to use instead.
    tool: String,
    /// Source of each of its arguments. Default: the same arguments.
    args: Option<BTreeMap<String, ArgumentSettings>>,
}

/// Source of one argument. Set exactly one of the two.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct ArgumentSettings {
    /// A JSON pointer into the arguments of the original tool.
    from: Option<String>,
    /// A fixed value.
    value: Option<serde_json::Value>,
}

/// Limits on everything that could grow.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitSettings {
    /// Maximum size of the arguments of one call.
    pub max_args_bytes: usize,
    /// Maximum size of the result of one call.
    pub max_result_bytes: usize,
    /// Maximum number of open calls across all projects.
    pub max_open_calls: usize,
    /// Maximum number of open calls of one project.
    pub max_open_calls_per_project: usize,
    /// Maximum time a request waits for an outcome.
    pub max_wait_ms: u64,
    /// Maximum number of progress events stored per call.
    pub max_progress_events: u32,
    /// Maximum number of tools in one registration.
    pub max_tools_per_registration: usize,
    /// Maximum number of tools of one project.
    pub max_tools_per_project: usize,
    /// Maximum number of clients that have ever registered in one project.
    pub max_clients_per_project: usize,
    /// Maximum number of entries in one batch.
    pub max_batch_entries: usize,
    /// Maximum number of entries of one batch in flight at the same time.
    pub max_batch_parallel: usize,
    /// Maximum total size of the results of one batch. Results beyond it are fetched by their
    /// tickets.
    pub max_batch_bytes: usize,
    /// Maximum number of open runs.
    pub max_open_runs: usize,
    /// Maximum number of agents that one run has called and that have not ended.
    pub max_child_runs: usize,
    /// Maximum number of stored boxes of cards of one project.
    pub max_boxes_per_project: usize,
    /// Maximum size of the body of one HTTP request.
    pub max_body_bytes: usize,
    /// Maximum number of concurrent HTTP connections.
    pub max_connections: usize,
    /// Maximum number of open event streams and WebSockets. At most nine tenths of
    /// `max_connections` are used.
    pub max_streams: usize,
    /// Maximum number of open event streams and WebSockets of one caller.
    pub max_streams_per_caller: usize,
    /// Maximum time to send the header of an HTTP request.
    pub request_header_timeout_ms: u64,
    /// Time after which a connection ends whose client takes no data.
    pub write_timeout_ms: u64,
    /// Limits on the calls of one agent: `[limits.agent.NAME]`; `*` is for each.
    pub agent: UsageLimitsByName,
    /// Limits on the calls for one user.
    pub user: UsageLimitsByName,
    /// Limits on the calls of one tool: `[limits.tool."NAME"]`.
    pub tool: UsageLimitsByName,
    /// Limits on the calls of one project.
    pub project: UsageLimitsByName,
}

impl Default for LimitSettings {
    fn default() -> Self {
        let limits = toolcrib::EngineLimits::default();
        Self {
            max_args_bytes: limits.max_args_bytes,
            max_result_bytes: limits.max_result_bytes,
            max_open_calls: limits.max_open_calls,
            max_open_calls_per_project: limits.max_open_calls_per_project,
            max_wait_ms: limits.max_wait_ms,
            max_progress_events: limits.max_progress_events,
            max_tools_per_registration: limits.max_tools_per_registration,
            max_tools_per_project: limits.max_tools_per_project,
            max_clients_per_project: limits.max_clients_per_project,
            max_batch_entries: limits.max_batch_entries,
            max_batch_parallel: limits.max_batch_parallel,
            max_batch_bytes: limits.max_batch_bytes,
            max_open_runs: limits.max_open_runs,
            max_child_runs: limits.max_child_runs,
            max_boxes_per_project: limits.max_boxes_per_project,
            max_body_bytes: 2 << 20,
            max_connections: 10_000,
            max_streams: 8_000,
            max_streams_per_caller: 4_000,
            request_header_timeout_ms: 10_000,
            write_timeout_ms: 30_000,
            agent: UsageLimitsByName::new(),
            user: UsageLimitsByName::new(),
            tool: UsageLimitsByName::new(),
            project: UsageLimitsByName::new(),
        }
    }
}

/// Retention of finished calls.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionSettings {
    /// Days after which a finished call is deleted. Fractions of a day are allowed; 0 keeps calls
    /// forever.
    pub finished_calls_days: f64,
    /// Days after which an entry of the audit log is deleted. Fractions of a day are allowed; 0
    /// keeps the log forever.
    pub audit_days: f64,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self { finished_calls_days: 30.0, audit_days: 0.0 }
    }
}

/// Shutdown of the server.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownSettings {
    /// Maximum time the server waits for running calls. The next start recovers the rest.
    pub drain_ms: u64,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { drain_ms: 10_000 }
    }
}

/// Connections of clients: programs that provide tools.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IngressSettings {
    /// Interval between heartbeats on a connection.
    pub heartbeat_ms: u64,
    /// Silence after which a connection is considered dead.
    pub dead_after_ms: u64,
    /// Maximum number of requests a client holds unanswered.
    pub window: u32,
}

impl Default for IngressSettings {
    fn default() -> Self {
        Self { heartbeat_ms: 15_000, dead_after_ms: 45_000, window: 16 }
    }
}

/// The built-in tools.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BuiltinSettings {
    /// Offers the built-in tools.
    pub enabled: bool,
    /// The tool `database.query`.
    pub database: DatabaseSettings,
    /// The tool `weather.query`.
    pub weather: WeatherSettings,
}

impl Default for BuiltinSettings {
    fn default() -> Self {
        let (database, weather) = (DatabaseSettings::default(), WeatherSettings::default());
        Self { enabled: true, database, weather }
    }
}

/// Tools over NATS.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NatsSettings {
    /// `nats://HOST:PORT`. Without it NATS is not used; everything else works.
    pub url: Option<String>,
    /// The protocol version, which is part of every subject: `v1r3` or `v1r4`.
    pub version: String,
    /// A file with NATS credentials.
    pub credentials: Option<PathBuf>,
}

impl Default for NatsSettings {
    fn default() -> Self {
        Self {
            url: None,
            version: toolcrib_protocol::utp::DEFAULT_VERSION.into(),
            credentials: None,
        }
    }
}

/// Settings given as flags; they take precedence over everything else.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ConfigOverrides {
    pub listen: Option<String>,
    pub data_dir: Option<PathBuf>,
    /// Replaces `store.url`.
    pub store: Option<String>,
}

impl Config {
    /// Reads the file and the environment of this process, applies the flags and validates the
    /// result.
    pub fn load(file: Option<&Path>, overrides: &ConfigOverrides) -> Result<Self, ConfigError> {
        Self::from_parts(file, std::env::vars_os(), overrides)
    }

    /// Reads the address that a server with these settings listens on. A command that only connects
    /// to the server calls this: it does not check settings that concern the server alone.
    pub fn load_listen_address(file: Option<&Path>) -> Result<String, ConfigError> {
        let file = Self::resolve_file(file);
        let config = layers::read_layers(file.as_deref(), std::env::vars_os())?;
        config.check_listen()?;
        Ok(config.listen)
    }

    /// Same as [`Config::load`], with the environment as a parameter.
    pub(crate) fn from_parts(
        file: Option<&Path>,
        environment: impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
        overrides: &ConfigOverrides,
    ) -> Result<Self, ConfigError> {
        let mut config = layers::read_layers(Self::resolve_file(file).as_deref(), environment)?;
        if let Some(listen) = &overrides.listen {
            config.listen.clone_from(listen);
        }
        if let Some(data_dir) = &overrides.data_dir {
            config.data_dir.clone_from(data_dir);
        }
        if overrides.store.is_some() {
            config.store.url.clone_from(&overrides.store);
        }
        config.validate()?;
        Ok(config)
    }

    /// Returns the file to read: the given one, or the default file if it exists in the current
    /// directory.
    pub fn resolve_file(explicit: Option<&Path>) -> Option<PathBuf> {
        match explicit {
            Some(path) => Some(path.to_owned()),
            None => Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()),
        }
    }
}
