//! The source of tools that are operations of HTTP APIs.
//!
//! Definitions come from callers, so a definition never decides where the server connects to: the
//! host must be on the operator's allowlist, the address it resolves to must not be private, and a
//! response cannot redirect the request to another host. Secrets are read from the environment
//! here, at the moment of use, and redacted from every response.

mod answer;
mod client;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use reqwest::Url;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib::args;
use toolcrib::fault::{Code, Fault};
use toolcrib::json::Json;
use toolcrib::policy;
use toolcrib::source::{Attempt, ProgressSink, Source, Started};
use toolcrib::tool::{Definition, Executor};

use crate::operation::allow::Allowed;
use crate::operation::jina::{self, Places};
use crate::operation::secrets::Secrets;
use crate::operation::{Plan, Request, bad, in_ms};
use crate::outbound::Outbound;
use client::Upstream;

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
    /// Patterns of the environment variables that a definition may name. The server's own variables
    /// (`TOOLCRIB_…`) are never allowed.
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

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            hosts: vec!["s.jina.ai".into(), "r.jina.ai".into()],
            allow_private: false,
            allow_hosts: Vec::new(),
            allow_envs: vec!["*".into()],
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
pub struct HttpTools {
    allowed: Allowed,
    outbound: Outbound,
    places: Places,
    settings: HttpSettings,
    upstream: Upstream,
    running: Mutex<HashMap<(CallId, u32), CancellationToken>>,
}

impl HttpTools {
    /// Creates the source, or returns an error message about the settings.
    pub fn new(settings: HttpSettings) -> Result<Self, String> {
        let places = Places::read(&settings.jina.search_url, &settings.jina.reader_url)?;
        let allowed = Allowed::read(&settings.hosts).map_err(|why| format!("hosts: {why}"))?;
        let outbound = Outbound::new("http", settings.allow_private, &settings.allow_hosts);
        let upstream = Upstream::new(outbound.clone(), settings.max_response_bytes);
        Ok(Self { allowed, outbound, places, settings, upstream, running: Mutex::default() })
    }

    /// Returns the value of a variable that a definition may name, if it is set and not empty.
    fn variable(&self, name: &str) -> Option<String> {
        let own = name.to_ascii_uppercase().starts_with("TOOLCRIB_");
        let named = self.settings.allow_envs.iter().any(|p| policy::matches(p, name));
        if own || !named {
            tracing::warn!(variable = name, "http.allow_envs does not allow this variable");
            return None;
        }
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn request(&self, options: &Value, given: &Json) -> Result<Request, Fault> {
        let plan = Plan::of(options).map_err(bad)?;
        let Value::Object(mut given) = given.value() else {
            return Err(bad("the arguments must be an object"));
        };
        let mut secrets = Secrets::default();
        self.put_environment(&plan, options, &mut given, &mut secrets);
        let look = |name: &str| self.variable(name);
        let request = match &plan {
            Plan::Http(operation) => operation.request(&given, secrets, &look),
            Plan::Jina => jina::request(options, &self.places, &given, secrets, &look),
        }?;
        self.check(&request.url)?;
        Ok(request)
    }

    /// Inserts the arguments from the environment. The operator's variables override the
    /// definition's.
    fn put_environment(
        &self,
        plan: &Plan,
        options: &Value,
        given: &mut Map<String, Value>,
        secrets: &mut Secrets,
    ) {
        let mut envs = args::envs(options);
        envs.extend(self.settings.envs.clone());
        if *plan == Plan::Jina {
            envs.extend(self.settings.jina.envs.clone());
        }
        for (arg, name) in envs {
            match self.variable(&name) {
                Some(value) => {
                    secrets.add(&value);
                    given.insert(arg, Value::String(value));
                }
                None => tracing::warn!(arg, variable = name, "variable not set; omitted"),
            }
        }
    }

    fn check(&self, url: &Url) -> Result<(), Fault> {
        let refused =
            |why: String| Fault::new(Code::PermissionDenied, why).not_happened().retryable(false);
        if !self.allowed.allows(url) {
            let place = place(url);
            let message = format!("{place} may not be asked: it is not in the setting http.hosts");
            return Err(refused(message));
        }
        let checked = self.outbound.check(url.as_str());
        checked.map(|_| ()).map_err(|why| refused(format!("the tool's URL {why}")))
    }

    async fn run(&self, attempt: &Attempt) -> Result<Json, Fault> {
        let Some(command) = &attempt.command else {
            return Err(Fault::new(Code::Internal, "the definition is gone").not_happened());
        };
        let request = self.request(&command.binding.options.value(), &attempt.args)?;
        let own_ms = request.timeout_s.map(in_ms);
        let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
        let left_ms = attempt.deadline_ms.saturating_sub(now_ms);
        let limit = Duration::from_millis(own_ms.unwrap_or(self.settings.timeout_ms).min(left_ms));
        let began = std::time::Instant::now();
        let came = self.upstream.ask(&request, limit).await;
        let about =
            answer::About { tool: &attempt.tool, tool_call_id: &command.route.tool_call_id };
        answer::read(&request, came, began.elapsed(), &about)
    }
}

/// Returns a URL's scheme, host and port, which contain no secret.
fn place(url: &Url) -> String {
    url.origin().ascii_serialization()
}

#[async_trait]
impl Source for HttpTools {
    fn executor(&self) -> Executor {
        Executor::Http
    }

    fn list(&self) -> Vec<Definition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> Started {
        let canceled = CancellationToken::new();
        let place = (attempt.call_id.clone(), attempt.number);
        self.running.lock().insert(place.clone(), canceled.clone());
        let done = tokio::select! {
            done = self.run(&attempt) => done,
            () = canceled.cancelled() => Err(Fault::new(Code::Canceled, "stopped")),
        };
        self.running.lock().remove(&place);
        Started::Done(done)
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(canceled) = self.running.lock().remove(&(call_id.clone(), attempt)) {
            canceled.cancel();
        }
    }
}
