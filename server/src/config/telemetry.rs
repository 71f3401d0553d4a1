//! Settings of traces and metrics.

use schemars::JsonSchema;
use serde::Deserialize;

use super::ConfigError;

/// Traces and metrics. A setting that is not given falls back to OpenTelemetry's own variable
/// (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`).
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetrySettings {
    /// Endpoint for spans and metrics over OTLP/HTTP (protobuf), such as `http://localhost:4318`;
    /// `/v1/traces` and `/v1/metrics` are appended. Without it nothing is exported.
    pub otlp_endpoint: Option<String>,
    /// The environment variable with headers to send, as `name=value,name=value`: for the key of a
    /// tracing service, which does not belong in a file.
    pub otlp_headers_env: Option<String>,
    /// Service name in traces. Default: `toolcrib`.
    pub service_name: Option<String>,
    /// Share of the traces started here that is recorded, from 0 to 1. Default: all. A caller's
    /// trace is recorded when the caller records it.
    pub sample_ratio: Option<f64>,
    /// Interval between exports of spans.
    pub export_interval_ms: u64,
    /// Interval between exports of metrics.
    pub metrics_interval_ms: u64,
    /// Maximum number of spans queued for export. Spans beyond it are dropped and counted.
    pub max_queued_spans: usize,
    /// Adds the arguments and results of calls to spans. They may be confidential.
    pub capture_content: bool,
    /// Names the tools of projects in `/metrics`, which requires no key. Default: only to requests
    /// with the operator token or an admin key. Built-in tools are always named.
    pub tool_names_in_metrics: Option<bool>,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_headers_env: None,
            service_name: None,
            sample_ratio: None,
            export_interval_ms: 5_000,
            metrics_interval_ms: 60_000,
            max_queued_spans: 8_192,
            capture_content: false,
            tool_names_in_metrics: None,
        }
    }
}

impl TelemetrySettings {
    /// Checks what the types alone cannot express.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |key: &str, reason: &str| {
            Err(ConfigError::invalid(&format!("telemetry.{key}"), reason.to_owned()))
        };
        if let Some(endpoint) = &self.otlp_endpoint {
            check_endpoint(endpoint).or_else(|reason| invalid("otlp_endpoint", &reason))?;
        }
        if self.sample_ratio.is_some_and(|ratio| !(0.0..=1.0).contains(&ratio)) {
            return invalid("sample_ratio", "must be from 0 to 1");
        }
        if self.max_queued_spans == 0 {
            return invalid("max_queued_spans", "must be at least 1");
        }
        if self.otlp_headers_env.as_ref().is_some_and(|name| !is_variable(name)) {
            let reason = "must be the name of an environment variable, not the headers themselves";
            return invalid("otlp_headers_env", reason);
        }
        Ok(())
    }
}

/// Checks that spans can be sent to an endpoint. Rejects a password in it, which would end up in
/// files and logs.
pub(crate) fn check_endpoint(endpoint: &str) -> Result<(), String> {
    let url = reqwest::Url::parse(endpoint).ok();
    match url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host()) {
        None => Err("must be an address such as http://localhost:4318".into()),
        Some(url) if !url.username().is_empty() || url.password().is_some() => {
            Err("must not hold a password: name a variable with otlp_headers_env".into())
        }
        Some(_) => Ok(()),
    }
}

fn is_variable(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.chars().all(is_allowed)
}
