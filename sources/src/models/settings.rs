//! Settings of language models: their endpoints and limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;
use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::access_rules::check_pattern;
use toolcrib::domain::retry::{Backoff, MAX_RETRIES_LIMIT};
use toolcrib::domain::run::options::ModelRequestPolicy;
use toolcrib::domain::tool::tool_mode::{
    AgentToolMode, DEFAULT_THRESHOLD_TOKENS, ToolMode, ToolModeSettings,
};
use toolcrib_protocol::secrets::SecretReference;
use toolcrib_protocol::settings::InvalidSetting;

use crate::models::{ApiKeySource, DEMO, ModelApi, ModelEndpoint, ModelResponseLimits};

/// The longest time a setting may give a model to answer: an hour.
const HOUR_MS: u64 = 3_600_000;

/// Language models.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LlmSettings {
    /// API of the endpoint: `openai` (chat completions, which most endpoints support), `anthropic`
    /// (messages) or `responses` (OpenAI's Responses API, which has a tool search).
    pub kind: ModelKind,
    /// Base URL of the endpoint: the part before `/chat/completions`, `/messages` or `/responses`.
    /// Default: the
    /// vendor's own, if a model is set.
    pub base_url: Option<String>,
    /// The default model, by the name the endpoint uses.
    pub model: Option<String>,
    /// Reference to the API key: `env:NAME` or `file:/path`. It takes precedence over `api_key_env`
    /// and `api_key_file`.
    pub api_key: Option<String>,
    /// The environment variable with the API key. Default: `OPENAI_API_KEY`, or `ANTHROPIC_API_KEY`
    /// for that kind. If empty, no key is sent.
    pub api_key_env: Option<String>,
    /// A file with the API key. It takes precedence over the variable and is read for every
    /// request.
    pub api_key_file: Option<PathBuf>,
    /// Maximum number of tokens in an answer, unless the request sets it. Anthropic's API requires
    /// a number; the default there is 4096.
    pub max_tokens: Option<u32>,
    /// Maximum time for a whole answer.
    pub timeout_ms: u64,
    /// Maximum time a model sends nothing, before and during its answer.
    pub idle_timeout_ms: u64,
    /// Maximum size of a whole answer on the wire.
    pub max_answer_bytes: usize,
    /// Maximum number of retries after a transient error: 429, 5xx, a timeout, a truncated stream.
    pub max_retries: u32,
    /// Wait before the first retry; each further wait is twice as long. `Retry-After` takes
    /// precedence.
    pub retry_backoff_ms: u64,
    /// Sends a model name that has no table below to `base_url` as it is. If false, such names are
    /// rejected.
    pub other_models: bool,
    /// The model that summarizes long results in runs. If unset, results are digested without a
    /// model.
    pub summary_model: Option<String>,
    /// Tool definitions that a model receives: `auto` (all of them up to `tool_tokens`, `search`
    /// above it), `all`, `search` (the pinned ones, those that the conversation has used or found,
    /// and a tool search) or `pinned` (only those). Runs, requests and agents can set it too.
    pub tool_mode: ToolModeName,
    /// Number of tokens of all tool definitions above which `auto` means `search`. More than 128
    /// tools mean `search` in any case.
    pub tool_tokens: usize,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`.
    pub pinned_tools: Vec<String>,
    /// Uses the API's own search for deferred tools, where the API has one. Switch it off for an
    /// endpoint that does not support it.
    pub native_tool_search: bool,
    /// Tools of single agents: `[llm.agents.NAME]`.
    pub agents: BTreeMap<String, AgentToolSettings>,
    /// Further models: `[llm.models.NAME]`.
    pub models: BTreeMap<String, NamedModelSettings>,
}

impl Default for LlmSettings {
    fn default() -> Self {
        let limits = ModelResponseLimits::default();
        Self {
            kind: ModelKind::default(),
            base_url: None,
            model: None,
            api_key: None,
            api_key_env: None,
            api_key_file: None,
            max_tokens: None,
            timeout_ms: limits.total.as_millis() as u64,
            idle_timeout_ms: limits.idle.as_millis() as u64,
            max_answer_bytes: limits.max_bytes,
            max_retries: ModelRequestPolicy::default().retries,
            retry_backoff_ms: ModelRequestPolicy::default().backoff.initial_ms,
            other_models: true,
            summary_model: None,
            tool_mode: ToolModeName::default(),
            tool_tokens: DEFAULT_THRESHOLD_TOKENS,
            pinned_tools: Vec::new(),
            native_tool_search: true,
            agents: BTreeMap::new(),
            models: BTreeMap::new(),
        }
    }
}

// No doc comments on the variants: they would turn the schema's plain `enum` list into `oneOf`
// alternatives.
/// API of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    #[default]
    Openai,
    Anthropic,
    Responses,
}

impl From<ModelKind> for ModelApi {
    fn from(kind: ModelKind) -> Self {
        match kind {
            ModelKind::Openai => Self::OpenAi,
            ModelKind::Anthropic => Self::Anthropic,
            ModelKind::Responses => Self::Responses,
        }
    }
}

// No doc comments on the variants, as above.
/// Tool definitions that a model receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolModeName {
    #[default]
    Auto,
    All,
    Search,
    Pinned,
}

impl From<ToolModeName> for ToolMode {
    fn from(mode: ToolModeName) -> Self {
        match mode {
            ToolModeName::Auto => Self::Auto,
            ToolModeName::All => Self::All,
            ToolModeName::Search => Self::Search,
            ToolModeName::Pinned => Self::Pinned,
        }
    }
}

/// The tools of an agent. Settings that are not given come from `[llm]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AgentToolSettings {
    /// `auto`, `all`, `search` or `pinned`.
    pub tool_mode: Option<ToolModeName>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`.
    pub pinned_tools: Option<Vec<String>>,
}

/// A further model, under the name of its table. Settings that are not given come from `[llm]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NamedModelSettings {
    /// `openai`, `anthropic` or `responses`.
    pub kind: Option<ModelKind>,
    /// Base URL of its endpoint. If its kind or URL differs from `[llm]`, the key of `[llm]` is not
    /// sent; at a URL that is not the vendor's own, no key is sent unless one is named here.
    pub base_url: Option<String>,
    /// The name the endpoint uses for the model. Default: the name of this table.
    pub model: Option<String>,
    /// Reference to the API key: `env:NAME` or `file:/path`.
    pub api_key: Option<String>,
    /// The environment variable with the API key. If empty, no key is sent. Default: the key of
    /// `[llm]` at the URL of `[llm]`, the kind's usual variable at the vendor's own URL, otherwise
    /// none.
    pub api_key_env: Option<String>,
    /// A file with the API key.
    pub api_key_file: Option<PathBuf>,
    /// Maximum number of tokens in an answer, unless the request sets it.
    pub max_tokens: Option<u32>,
    /// Maximum time for a whole answer.
    pub timeout_ms: Option<u64>,
    /// Maximum time a model sends nothing.
    pub idle_timeout_ms: Option<u64>,
    /// Uses the API's own search for deferred tools.
    pub native_tool_search: Option<bool>,
}

impl LlmSettings {
    /// Builds the engine's settings of the tool definitions that models receive.
    pub fn tool_modes(&self) -> ToolModeSettings {
        let agents = self.agents.iter().map(|(name, agent)| {
            let mode = agent.tool_mode.map(ToolMode::from);
            (name.clone(), AgentToolMode { mode, pinned_tools: agent.pinned_tools.clone() })
        });
        ToolModeSettings {
            mode: self.tool_mode.into(),
            pinned_tools: self.pinned_tools.clone(),
            threshold_tokens: self.tool_tokens,
            agents: agents.collect(),
        }
    }

    /// Builds the engine's policy for model requests and their retries.
    pub fn request_policy(&self) -> ModelRequestPolicy {
        let default = ModelRequestPolicy::default();
        let timeouts = self.models.values().filter_map(|model| model.timeout_ms);
        let backoff = Backoff { initial_ms: self.retry_backoff_ms, ..default.backoff };
        ModelRequestPolicy {
            retries: self.max_retries,
            backoff,
            // An upper bound for all endpoints; each endpoint's own timeout ends sooner.
            request_ms: timeouts.chain([self.timeout_ms]).max().unwrap_or(default.request_ms),
            max_answer_bytes: self.max_answer_bytes,
        }
    }

    /// Returns true if `[llm]` itself names an endpoint.
    pub(crate) fn has_endpoint(&self) -> bool {
        self.base_url.is_some() || self.model.is_some()
    }

    /// Returns the endpoint of `[llm]` itself.
    pub fn endpoint(&self) -> Option<ModelEndpoint> {
        self.has_endpoint().then(|| ModelEndpoint {
            kind: self.kind.into(),
            base_url: base_url_or_default(self.base_url.as_deref(), self.kind.into()),
            key: self.key_source(self.kind),
            max_tokens: self.max_tokens,
            limits: ModelResponseLimits {
                total: Duration::from_millis(self.timeout_ms),
                idle: Duration::from_millis(self.idle_timeout_ms),
                max_bytes: self.max_answer_bytes,
            },
            native_tool_search: self.native_tool_search,
        })
    }

    fn key_source(&self, kind: ModelKind) -> ApiKeySource {
        referenced_key(self.api_key.as_deref()).unwrap_or_else(|| {
            api_key_source(self.api_key_env.as_deref(), self.api_key_file.clone(), kind)
        })
    }

    /// Returns each further model: its name, its name at the endpoint, and the endpoint.
    pub fn named_endpoints(&self) -> impl Iterator<Item = (&String, String, ModelEndpoint)> {
        self.models.iter().map(|(name, settings)| {
            let model = settings.model.clone().unwrap_or_else(|| name.clone());
            (name, model, self.named_endpoint(settings))
        })
    }

    fn named_endpoint(&self, model: &NamedModelSettings) -> ModelEndpoint {
        let kind = model.kind.unwrap_or(self.kind);
        let same_kind = kind == self.kind;
        let base = model.base_url.as_deref();
        let base = base.or_else(|| self.base_url.as_deref().filter(|_| same_kind));
        let base_url = base_url_or_default(base, kind.into());
        let is_same = same_kind
            && base_url == base_url_or_default(self.base_url.as_deref(), self.kind.into());
        let has_key = model.api_key_env.is_some() || model.api_key_file.is_some();
        // A key is sent only to the endpoint it was meant for.
        let key = if let Some(referenced) = referenced_key(model.api_key.as_deref()) {
            referenced
        } else if has_key {
            api_key_source(model.api_key_env.as_deref(), model.api_key_file.clone(), kind)
        } else if is_same {
            self.key_source(kind)
        } else if base_url == base_url_or_default(None, kind.into()) {
            api_key_source(None, None, kind)
        } else {
            // The usual variable may hold the key of `[llm]` or of the vendor.
            ApiKeySource { variable: None, file: None, is_required: false }
        };
        let timeout_ms = model.timeout_ms.unwrap_or(self.timeout_ms);
        let idle = model.idle_timeout_ms.unwrap_or(self.idle_timeout_ms);
        ModelEndpoint {
            kind: kind.into(),
            base_url,
            key,
            max_tokens: model.max_tokens.or(self.max_tokens),
            limits: ModelResponseLimits {
                total: Duration::from_millis(timeout_ms),
                idle: Duration::from_millis(idle),
                max_bytes: self.max_answer_bytes,
            },
            native_tool_search: model.native_tool_search.unwrap_or(self.native_tool_search),
        }
    }

    pub fn validate(&self) -> Result<(), InvalidSetting> {
        check_url("llm.base_url", self.base_url.as_deref())?;
        check_reference("llm.api_key", self.api_key.as_deref())?;
        check_variable("llm.api_key_env", self.api_key_env.as_deref())?;
        check_model_name("llm.model", self.model.as_deref())?;
        check_time("llm.timeout_ms", Some(self.timeout_ms))?;
        check_time("llm.idle_timeout_ms", Some(self.idle_timeout_ms))?;
        check_tokens("llm.max_tokens", self.max_tokens)?;
        check_time("llm.retry_backoff_ms", Some(self.retry_backoff_ms))?;
        if self.max_retries > MAX_RETRIES_LIMIT {
            let reason = format!("must be from 0 to {MAX_RETRIES_LIMIT}");
            return Err(InvalidSetting::new("llm.max_retries", reason));
        }
        if self.max_answer_bytes == 0 {
            return Err(InvalidSetting::new("llm.max_answer_bytes", "must be at least 1"));
        }
        check_tool_mode("llm", self.tool_mode, &self.pinned_tools)?;
        for (name, agent) in &self.agents {
            let mode = agent.tool_mode.unwrap_or(self.tool_mode);
            let pinned = agent.pinned_tools.as_ref().unwrap_or(&self.pinned_tools);
            check_tool_mode(&format!("llm.agents.{name}"), mode, pinned)?;
        }
        for (name, model) in &self.models {
            let key = |field: &str| format!("llm.models.{name}.{field}");
            if name == DEMO {
                let reason =
                    "is the scripted model that comes with the server: choose another name";
                return Err(InvalidSetting::new("llm.models.demo", reason));
            }
            check_model_name("llm.models", Some(name))?;
            check_url(&key("base_url"), model.base_url.as_deref())?;
            check_reference(&key("api_key"), model.api_key.as_deref())?;
            check_variable(&key("api_key_env"), model.api_key_env.as_deref())?;
            check_model_name(&key("model"), model.model.as_deref())?;
            check_time(&key("timeout_ms"), model.timeout_ms)?;
            check_time(&key("idle_timeout_ms"), model.idle_timeout_ms)?;
            check_tokens(&key("max_tokens"), model.max_tokens)?;
        }
        let Some(summary) = &self.summary_model else { return Ok(()) };
        let is_configured = summary == DEMO
            || self.models.contains_key(summary)
            || self.model.as_ref() == Some(summary)
            || (self.has_endpoint() && self.other_models);
        if is_configured {
            return Ok(());
        }
        let reason = "must be a model of [llm] or a name of [llm.models]";
        Err(InvalidSetting::new("llm.summary_model", reason))
    }
}

fn base_url_or_default(value: Option<&str>, kind: ModelApi) -> String {
    value.unwrap_or(kind.default_base_url()).trim_end_matches('/').to_owned()
}

/// Returns the source of a key that a reference names.
fn referenced_key(reference: Option<&str>) -> Option<ApiKeySource> {
    let (variable, file) = match SecretReference::parse(reference?)? {
        SecretReference::Env(name) => (Some(name), None),
        SecretReference::File(path) => (None, Some(path)),
    };
    Some(ApiKeySource { variable, file, is_required: true })
}

fn check_reference(key: &str, value: Option<&str>) -> Result<(), InvalidSetting> {
    // The message does not repeat the value: it may be the key, written here by mistake.
    if value.is_some_and(|text| SecretReference::parse(text).is_none()) {
        let reason = "must be env:NAME or file:/path, not the key itself";
        return Err(InvalidSetting::new(key, reason));
    }
    Ok(())
}

fn api_key_source(variable: Option<&str>, file: Option<PathBuf>, kind: ModelKind) -> ApiKeySource {
    let default = match kind {
        ModelKind::Openai | ModelKind::Responses => "OPENAI_API_KEY",
        ModelKind::Anthropic => "ANTHROPIC_API_KEY",
    };
    match variable {
        Some("") => ApiKeySource { variable: None, file, is_required: false },
        Some(name) => ApiKeySource { variable: Some(name.to_owned()), file, is_required: true },
        // Endpoints on the local machine require no key.
        None => ApiKeySource { variable: Some(default.to_owned()), file, is_required: false },
    }
}

fn check_url(key: &str, value: Option<&str>) -> Result<(), InvalidSetting> {
    let Some(text) = value else { return Ok(()) };
    // The message does not repeat the value: it may contain a password.
    let Ok(url) = Url::parse(text) else {
        return Err(InvalidSetting::new(key, "must be a URL such as https://host/v1"));
    };
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(InvalidSetting::new(key, "must begin with https:// or http://"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        let reason = "must not have a user name or password in it; api_key_env names the key";
        return Err(InvalidSetting::new(key, reason));
    }
    Ok(())
}

fn check_variable(key: &str, value: Option<&str>) -> Result<(), InvalidSetting> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    // Catches a key that was written here by mistake, before it appears in a log.
    if value.is_some_and(|name| !name.chars().all(is_allowed) || name.len() > 128) {
        let reason = "must be the name of an environment variable, not the key itself";
        return Err(InvalidSetting::new(key, reason));
    }
    Ok(())
}

fn check_model_name(key: &str, value: Option<&str>) -> Result<(), InvalidSetting> {
    let fits = |word: &str| (1..=200).contains(&word.len()) && !word.chars().any(char::is_control);
    if value.is_some_and(|word| !fits(word)) {
        return Err(InvalidSetting::new(key, "must be a name of 1 to 200 bytes"));
    }
    Ok(())
}

fn check_time(key: &str, value: Option<u64>) -> Result<(), InvalidSetting> {
    if value.is_some_and(|time| !(1..=HOUR_MS).contains(&time)) {
        return Err(InvalidSetting::new(key, format!("must be from 1 to {HOUR_MS}")));
    }
    Ok(())
}

fn check_tool_mode(
    table: &str,
    mode: ToolModeName,
    pinned: &[String],
) -> Result<(), InvalidSetting> {
    let key = format!("{table}.pinned_tools");
    if mode == ToolModeName::Pinned && pinned.is_empty() {
        return Err(InvalidSetting::new(&key, "must name a tool: the mode is pinned"));
    }
    match pinned.iter().find_map(|pattern| check_pattern(pattern).err()) {
        Some(problem) => Err(InvalidSetting::new(&key, problem)),
        None => Ok(()),
    }
}

fn check_tokens(key: &str, value: Option<u32>) -> Result<(), InvalidSetting> {
    if value == Some(0) {
        return Err(InvalidSetting::new(key, "must be at least 1"));
    }
    Ok(())
}
