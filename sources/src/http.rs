//! The source of tools that are operations of HTTP APIs.
//!
//! Definitions come from callers, so a definition never decides where the server connects to: the
//! host must be on the operator's allowlist, the address it resolves to must not be private, and a
//! response cannot redirect the request to another host. Secrets are read here, at the moment of
//! use, and redacted from every response.

mod client;
mod response;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use client::HttpApiClient;
use parking_lot::Mutex;
use reqwest::Url;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib::domain::access_rules;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::json::Json;
use toolcrib::domain::tool::{Executor, ToolDefinition, args};
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib_protocol::http_operation::destination::DestinationRules;
use toolcrib_protocol::http_operation::jina::{self, JinaEndpoints};
use toolcrib_protocol::http_operation::{
    HttpToolSpec, OperationRequest, bad_request_fault, missing_secret_fault, seconds_to_ms,
};
use toolcrib_protocol::secrets::redaction::SecretRedactor;
use toolcrib_protocol::secrets::{SecretPolicy, SecretReference};

/// Tools that are operations of HTTP APIs.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    /// Hosts that tools may connect to: `api.example.com`, `*.example.com`. Another port or plain
    /// HTTP must be written out: `api.example.com:8443`, `http://127.0.0.1:8080`.
    pub hosts: Vec<String>,
    /// Allow every listed host to have an address in a private network.
    pub allow_private: bool,
    /// Hosts whose addresses may be in private networks.
    pub allow_hosts: Vec<String>,
    /// Patterns of the environment variables that a definition may name, such as `PET_*`. By
    /// default none: a provider could otherwise send any variable to an allowed host.
    /// Variables in `envs` and `jina.envs`, and Jina's own `JINA_API_KEY`, need no pattern. The
    /// server's own variables (`TOOLCRIB_…`) are never allowed.
    pub allow_envs: Vec<String>,
    /// Default timeout of a request in milliseconds, where the definition sets none.
    pub timeout_ms: u64,
    /// Maximum size of a response in bytes.
    pub max_response_bytes: usize,
    /// Arguments of every HTTP tool that come from the environment: `{ argument = "VARIABLE" }`.
    pub envs: BTreeMap<String, String>,
    /// Jina's search and reader.
    pub jina: JinaSettings,
}

impl HttpSettings {
    /// Returns the rules on destinations, or an error message about the settings.
    pub fn destination_rules(&self) -> Result<DestinationRules, String> {
        DestinationRules::new(&self.hosts, self.allow_private, &self.allow_hosts)
    }
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            hosts: vec!["s.jina.ai".into(), "r.jina.ai".into()],
            allow_private: false,
            allow_hosts: Vec::new(),
            allow_envs: Vec::new(),
            timeout_ms: 30_000,
            max_response_bytes: 1 << 20,
            envs: BTreeMap::new(),
            jina: JinaSettings::default(),
        }
    }
}

/// Jina's search and reader.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JinaSettings {
    /// URL of the search. Its host must be in `hosts`.
    pub search_url: String,
    /// URL of the reader. Its host must be in `hosts`.
    pub reader_url: String,
    /// Arguments of Jina's tools that come from the environment.
    pub envs: BTreeMap<String, String>,
}

impl Default for JinaSettings {
    fn default() -> Self {
        let (search_url, reader_url) = ("https://s.jina.ai".into(), "https://r.jina.ai".into());
        Self { search_url, reader_url, envs: BTreeMap::new() }
    }
}

/// Executes tools by calling HTTP APIs.
pub struct HttpSource {
    /// Secrets that each tool may use.
    secrets: SecretPolicy,
    destinations: DestinationRules,
    jina_endpoints: JinaEndpoints,
    settings: HttpSettings,
    client: HttpApiClient,
    running: Mutex<HashMap<(CallId, u32), CancellationToken>>,
}

impl HttpSource {
    /// Creates the source, or returns an error message about the settings.
    pub fn new(settings: HttpSettings, secrets: SecretPolicy) -> Result<Self, String> {
        let endpoints = JinaEndpoints::parse(&settings.jina.search_url, &settings.jina.reader_url)?;
        let destinations = settings.destination_rules()?;
        let upstream =
            HttpApiClient::new(destinations.outbound().clone(), settings.max_response_bytes);
        Ok(Self {
            secrets,
            destinations,
            jina_endpoints: endpoints,
            settings,
            client: upstream,
            running: Mutex::default(),
        })
    }

    /// Returns the value of a variable or of a reference to a secret that the definition of a tool
    /// may name, if it is set and not empty.
    fn read_variable(&self, tool: &str, name: &str) -> Option<String> {
        if let Some(reference) = SecretReference::parse(name) {
            let secret = self.secrets.read(tool, &reference);
            return secret.inspect_err(|reason| tracing::warn!(tool, why = reason)).ok();
        }
        let mut patterns = self.settings.allow_envs.iter();
        if !patterns.any(|pattern| access_rules::pattern_matches(pattern, name)) {
            tracing::warn!(variable = name, "http.allow_envs does not allow this variable");
            return None;
        }
        read_operator_variable(name)
    }

    /// Returns the value of a variable that a definition of a Jina tool may name: one that any
    /// definition may name, or the variable of Jina's key if the request goes to Jina.
    fn read_jina_variable(&self, tool: &str, name: &str) -> Option<String> {
        match name {
            jina::DEFAULT_KEY_VARIABLE => read_operator_variable(name),
            other => self.read_variable(tool, other),
        }
    }

    fn build_request(
        &self,
        tool: &str,
        options: &Value,
        args: &Json,
    ) -> Result<OperationRequest, Fault> {
        let plan = HttpToolSpec::from_options(options).map_err(bad_request_fault)?;
        let Value::Object(mut args) = args.to_value() else {
            return Err(bad_request_fault("the arguments must be an object"));
        };
        let mut secrets = SecretRedactor::default();
        self.insert_env_args(tool, &plan, options, &mut args, &mut secrets);
        self.resolve_fixed_args(tool, options, &mut args, &mut secrets)?;
        let request = match &plan {
            HttpToolSpec::Http(operation) => {
                let look = |name: &str| self.read_variable(tool, name);
                operation.build_request(&args, secrets, &look)
            }
            HttpToolSpec::Jina => {
                let lookup = |name: &str| self.read_jina_variable(tool, name);
                jina::build_request(options, &self.jina_endpoints, &args, secrets, &lookup)
            }
        }?;
        self.check_destination(&request.url)?;
        Ok(request)
    }

    /// Inserts the arguments from the environment. The operator's variables override the
    /// definition's.
    fn insert_env_args(
        &self,
        tool: &str,
        plan: &HttpToolSpec,
        options: &Value,
        args: &mut Map<String, Value>,
        secrets: &mut SecretRedactor,
    ) {
        let mut operator_envs = self.settings.envs.clone();
        if *plan == HttpToolSpec::Jina {
            operator_envs.extend(self.settings.jina.envs.clone());
        }
        let mut envs = args::parse_env_arguments(options);
        envs.retain(|arg, _| !operator_envs.contains_key(arg));
        let of_definition = envs.into_iter().map(|(arg, name)| {
            let value = self.read_variable(tool, &name);
            (arg, name, value)
        });
        let of_operator = operator_envs.into_iter().map(|(arg, name)| {
            let value = read_operator_variable(&name);
            (arg, name, value)
        });
        for (arg, name, value) in of_definition.chain(of_operator) {
            match value {
                Some(value) => {
                    secrets.add(&value);
                    args.insert(arg, Value::String(value));
                }
                None => tracing::warn!(arg, variable = name, "variable not set; omitted"),
            }
        }
    }

    /// Replaces fixed arguments that are references to secrets with the secrets. The stored
    /// arguments have the reference. An argument of the caller is never resolved, because callers
    /// must not name secrets.
    fn resolve_fixed_args(
        &self,
        tool: &str,
        options: &Value,
        args: &mut Map<String, Value>,
        secrets: &mut SecretRedactor,
    ) -> Result<(), Fault> {
        for (arg, fixed) in options["args"]["fixed"].as_object().into_iter().flatten() {
            let Some(name) = fixed.as_str().filter(|text| SecretReference::parse(text).is_some())
            else {
                continue;
            };
            // Resolves the argument only if the fixed value was applied.
            if args.get(arg) == Some(fixed) {
                let secret = self.read_variable(tool, name);
                let secret = secret.ok_or_else(|| missing_secret_fault(name))?;
                secrets.add(&secret);
                args.insert(arg.clone(), Value::String(secret));
            }
        }
        Ok(())
    }

    fn check_destination(&self, url: &Url) -> Result<(), Fault> {
        self.destinations.check(url).map_err(|forbidden| {
            let fault = Fault::new(Code::PermissionDenied, forbidden.message);
            let fault = fault.without_side_effect().retryable(false);
            match forbidden.hint {
                Some(hint) => fault.with_hint(hint),
                None => fault,
            }
        })
    }

    async fn run(&self, attempt: &Attempt) -> Result<Json, Fault> {
        let Some(command) = &attempt.command else {
            return Err(
                Fault::new(Code::Internal, "the definition no longer exists").without_side_effect()
            );
        };
        let options = command.binding.options.to_value();
        let request = self.build_request(&attempt.tool, &options, &attempt.args)?;
        let requested_ms = request.timeout_s.map(seconds_to_ms);
        let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
        let left_ms = attempt.deadline_ms.saturating_sub(now_ms);
        let limit = requested_ms.unwrap_or(self.settings.timeout_ms);
        // The engine ends the attempt at its deadline, and knows whether another one may follow.
        let limit = Duration::from_millis(limit.min(left_ms + ENGINE_TIMER_MS));
        let began = std::time::Instant::now();
        let response = self.client.send(&request, limit).await;
        let about = crate::http::response::HttpCallContext {
            tool: &attempt.tool,
            tool_call_id: &command.route.tool_call_id,
        };
        crate::http::response::interpret_response(&request, response, began.elapsed(), &about)
    }
}

/// Time after the deadline of an attempt within which the engine has ended it.
const ENGINE_TIMER_MS: u64 = 1_000;

/// Returns the value of a variable that the operator names, if it is set and not empty. Refuses the
/// server's own variables (`TOOLCRIB_…`), because they may contain its keys.
fn read_operator_variable(name: &str) -> Option<String> {
    if name.to_ascii_uppercase().starts_with("TOOLCRIB_") {
        tracing::warn!(variable = name, "tools may not read this variable of the server");
        return None;
    }
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns a URL's scheme, host and port, which contain no secret.
fn origin(url: &Url) -> String {
    url.origin().ascii_serialization()
}

#[async_trait]
impl Source for HttpSource {
    fn executor(&self) -> Executor {
        Executor::HTTP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        let canceled = CancellationToken::new();
        let key = (attempt.call_id.clone(), attempt.number);
        self.running.lock().insert(key.clone(), canceled.clone());
        let done = tokio::select! {
            done = self.run(&attempt) => done,
            () = canceled.cancelled() => Err(Fault::new(Code::Canceled, "stopped")),
        };
        self.running.lock().remove(&key);
        StartResult::Finished(done)
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(canceled) = self.running.lock().remove(&(call_id.clone(), attempt)) {
            canceled.cancel();
        }
    }
}
