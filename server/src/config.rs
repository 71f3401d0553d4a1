//! The configuration: every setting, its default, and what it may be.
//!
//! A setting comes from, in this order: a flag, the environment (`TOOLCRIB_LISTEN`; a table's
//! settings with two underscores, `TOOLCRIB_POLICY__MAX_PARALLEL`), the file (`toolcrib.toml` in
//! the current directory, or the one named with `--config`), the default written here. A key that
//! nobody knows is an error, because a misspelt limit that is silently not in force is worse than
//! a server that does not start. The doc comments are the user documentation: the check of the
//! keys is made from the same types, so neither can say something the other does not.

mod doors;
mod kept;
mod layers;
mod llm;
mod nats;
mod oauth;
mod telemetry;
mod upstreams;
mod validate;
mod webhooks;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::engine::{Policies, ToolOverride};
use toolcrib::retry::{Backoff, ExecutionPolicy, PolicyPatch};
use toolcrib::tool::Alternate;

use crate::sources::builtin::{DatabaseSettings, WeatherSettings};
use crate::sources::http::HttpSettings;

pub use doors::{DoorSettings, McpSettings};
pub use kept::Kept;
pub use layers::ConfigError;
pub use llm::{LlmSettings, ModelKind, NamedModelSettings};
pub use nats::NatsSettings;
pub use oauth::OauthSettings;
pub use telemetry::TelemetrySettings;
pub(crate) use telemetry::check_endpoint;
pub use upstreams::{UpstreamSettings, local_url};
pub use webhooks::{WebhookKeySettings, WebhookSettings};

/// The file that is read when no other is named.
pub const DEFAULT_FILE: &str = "toolcrib.toml";

/// Every setting.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address and port to listen on. Other than a loopback address needs at least one key.
    pub listen: String,
    /// Directory for everything that is kept. A relative path starts at the current directory.
    pub data_dir: PathBuf,
    /// Where calls are kept.
    pub store: StoreSettings,
    /// What is logged, and how.
    pub log: LogSettings,
    /// Keys and permissions.
    pub auth: AuthSettings,
    /// How calls are executed where neither the project nor the tool says otherwise.
    pub policy: PolicySettings,
    /// What holds for one project: `[projects.NAME.policy]`.
    pub projects: BTreeMap<String, ProjectSettings>,
    /// What holds for one tool: `[tools."NAME".policy]`, `[[tools."NAME".fallback]]`.
    pub tools: BTreeMap<String, ToolSettings>,
    /// A limit on everything that could grow.
    pub limits: LimitSettings,
    /// How long finished calls are kept.
    pub retention: RetentionSettings,
    /// How the server stops.
    pub shutdown: ShutdownSettings,
    /// Connections of programs that offer tools.
    pub ingress: IngressSettings,
    /// Completion callbacks.
    pub webhooks: WebhookSettings,
    /// The tools that come with the server.
    pub builtin: BuiltinSettings,
    /// The ways in.
    pub doors: DoorSettings,
    /// Tools over NATS.
    pub nats: NatsSettings,
    /// MCP servers whose tools are offered: `[[mcp]]`.
    pub mcp: Vec<crate::sources::mcp::McpSettings>,
    /// MCP servers that are added over the API.
    pub upstreams: UpstreamSettings,
    /// Language models.
    pub llm: LlmSettings,
    /// Tools that are operations of HTTP APIs.
    pub http: HttpSettings,
    /// Traces and metrics.
    pub telemetry: TelemetrySettings,
    /// The file that was read; not a setting.
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
            limits: LimitSettings::default(),
            retention: RetentionSettings::default(),
            shutdown: ShutdownSettings::default(),
            ingress: IngressSettings::default(),
            webhooks: WebhookSettings::default(),
            builtin: BuiltinSettings::default(),
            doors: DoorSettings::default(),
            nats: NatsSettings::default(),
            mcp: Vec::new(),
            upstreams: UpstreamSettings::default(),
            llm: LlmSettings::default(),
            http: HttpSettings::default(),
            telemetry: TelemetrySettings::default(),
            file: None,
        }
    }
}

/// Where calls are kept.
#[derive(Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// `postgres://USER:PASSWORD@HOST/NAME` or `sqlite:PATH`; without it, the file `toolcrib.db` in
    /// the data directory.
    pub url: Option<String>,
}

/// What is logged, and how.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter such as `info,toolcrib=debug`. The
    /// variable `TOOLCRIB_LOG` goes before it.
    pub level: String,
    /// `text` for people, `json` for programs; `auto` is text on a terminal and json elsewhere.
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Auto }
    }
}

// No doc comments on the words: they would turn the schema's plain list into alternatives.
/// How log lines are written.
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
    /// Tokens of an OAuth issuer, beside keys.
    pub oauth: Option<OauthSettings>,
    /// Patterns (`weather.*`) of the tools that the agent of a new key may call. Empty: nothing,
    /// until `toolcrib allow` says otherwise.
    pub default_allow: Vec<String>,
}

/// How calls are executed.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicySettings {
    /// How many calls may be executed at once.
    pub max_parallel: u32,
    /// How long a call has, from being accepted to its outcome, where nobody says otherwise.
    pub default_timeout_ms: u64,
    /// How many attempts may follow the first, where the tool's effect permits a second one.
    pub max_retries: u32,
    /// How long to wait before the next attempt.
    #[schemars(with = "BackoffSettings")]
    pub backoff: Backoff,
}

impl Default for PolicySettings {
    fn default() -> Self {
        let policy = ExecutionPolicy::default();
        Self {
            max_parallel: policy.max_parallel.unwrap_or(256),
            default_timeout_ms: policy.default_timeout_ms,
            max_retries: policy.max_retries,
            backoff: policy.backoff,
        }
    }
}

/// The engine's backoff, as far as the check of keys needs to know it.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct BackoffSettings {
    /// The wait after the first attempt.
    initial_ms: u64,
    /// How much longer each further wait is.
    factor: f64,
    /// The longest wait.
    max_ms: u64,
    /// How much of the wait is left to chance, from 0 to 1, so that a herd spreads.
    jitter: f64,
}

/// What holds for one project.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProjectSettings {
    /// The same fields as in `[policy]`, each optional.
    #[schemars(with = "PolicySettings")]
    pub policy: PolicyPatch,
}

/// What holds for one tool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ToolSettings {
    /// The same fields as in `[policy]`, each optional.
    #[schemars(with = "PolicySettings")]
    pub policy: PolicyPatch,
    /// Tools to use instead, in this order, when an attempt is known not to have taken effect.
    #[schemars(with = "Vec<AlternateSettings>")]
    pub fallback: Vec<Alternate>,
}

/// The engine's alternate, as far as the check of keys needs to know it.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct AlternateSettings {
    /// The tool to use instead.
    tool: String,
    /// For each of its arguments, where the value comes from; without it, the same arguments.
    args: Option<BTreeMap<String, ArgumentSettings>>,
}

/// Where one argument comes from: exactly one of the two.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct ArgumentSettings {
    /// A JSON pointer into the first tool's arguments.
    from: Option<String>,
    /// A fixed value.
    value: Option<serde_json::Value>,
}

/// A limit on everything that could grow.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitSettings {
    /// Size of the arguments of one call.
    pub max_args_bytes: usize,
    /// Size of the result of one call.
    pub max_result_bytes: usize,
    /// Calls that have not ended, of all projects together.
    pub max_open_calls: usize,
    /// Calls that have not ended, of one project.
    pub max_open_calls_per_project: usize,
    /// The longest a request may wait for an outcome.
    pub max_wait_ms: u64,
    /// Progress events that are kept of one call.
    pub max_progress_events: u32,
    /// Tools in one registration.
    pub max_tools_per_registration: usize,
    /// Tools of one project.
    pub max_tools_per_project: usize,
    /// Clients of one project that have ever registered.
    pub max_clients_per_project: usize,
    /// Entries of one batch.
    pub max_batch_entries: usize,
    /// Entries of one batch that are under way at the same time.
    pub max_batch_parallel: usize,
    /// Size of the results of one batch together; what is over it is fetched by its ticket.
    pub max_batch_bytes: usize,
    /// Runs that are not over.
    pub max_open_runs: usize,
    /// Size of the body of one HTTP request.
    pub max_body_bytes: usize,
    /// HTTP connections at the same time.
    pub max_connections: usize,
    /// How long a client may take to send the head of a request.
    pub request_header_timeout_ms: u64,
}

impl Default for LimitSettings {
    fn default() -> Self {
        let limits = toolcrib::Limits::default();
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
            max_body_bytes: 2 << 20,
            max_connections: 10_000,
            request_header_timeout_ms: 10_000,
        }
    }
}

/// How long finished calls are kept.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionSettings {
    /// Days after which a finished call is removed; parts of a day are fine, 0 keeps for ever.
    pub finished_calls_days: f64,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self { finished_calls_days: 30.0 }
    }
}

/// How the server stops.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownSettings {
    /// How long calls under way are waited for; the next start settles what is left.
    pub drain_ms: u64,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { drain_ms: 10_000 }
    }
}

/// Connections of programs that offer tools.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IngressSettings {
    /// How often a connection shows that it is alive.
    pub heartbeat_ms: u64,
    /// How long a connection may be silent before it is taken for dead.
    pub dead_after_ms: u64,
    /// Requests that a client may have without having answered them.
    pub window: u32,
}

impl Default for IngressSettings {
    fn default() -> Self {
        Self { heartbeat_ms: 15_000, dead_after_ms: 45_000, window: 16 }
    }
}

/// The tools that come with the server.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BuiltinSettings {
    /// Whether they are offered at all.
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

/// Settings given as flags, which go before everything else.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    pub listen: Option<String>,
    pub data_dir: Option<PathBuf>,
    /// Instead of `store.url`.
    pub store: Option<String>,
}

impl Config {
    /// Reads the file and this process's environment, lays the flags over them, and checks all
    /// of it.
    pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        Self::from_parts(file, std::env::vars_os(), overrides)
    }

    /// The same with the environment given.
    pub(crate) fn from_parts(
        file: Option<&Path>,
        environment: impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
        overrides: &Overrides,
    ) -> Result<Self, ConfigError> {
        let mut config = layers::read(Self::file_in_use(file).as_deref(), environment)?;
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

    /// The file that is read: the one named, or the one in the current directory when it is there.
    pub fn file_in_use(named: Option<&Path>) -> Option<PathBuf> {
        match named {
            Some(path) => Some(path.to_owned()),
            None => Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()),
        }
    }

    /// What the engine is told about execution.
    pub fn policies(&self) -> Policies {
        let policy = &self.policy;
        Policies {
            global: ExecutionPolicy {
                max_parallel: Some(policy.max_parallel),
                default_timeout_ms: policy.default_timeout_ms,
                max_retries: policy.max_retries,
                backoff: policy.backoff.clone(),
            },
            projects: self
                .projects
                .iter()
                .map(|(name, project)| (name.clone(), project.policy.clone()))
                .collect(),
            tools: self
                .tools
                .iter()
                .map(|(name, tool)| {
                    let (policy, fallback) = (tool.policy.clone(), tool.fallback.clone());
                    (name.clone(), ToolOverride { policy, fallback })
                })
                .collect(),
        }
    }

    /// What the engine is told about limits.
    pub fn limits(&self) -> toolcrib::Limits {
        let limits = &self.limits;
        toolcrib::Limits {
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
        }
    }
}
