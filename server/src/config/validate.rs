//! Validates settings. Each error names its key.

use std::net::SocketAddr;

use toolcrib::domain::access_rules::check_pattern;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::check_tool_name;
use toolcrib_protocol::secrets::SecretPolicy;
use toolcrib_sources::http::HttpSource;

use super::{Config, ConfigError};

/// The longest time a setting may have: a day in milliseconds.
const DAY_MS: u64 = 86_400_000;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

impl Config {
    /// Checks what the types alone cannot express.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_listen()?;
        self.store_location()?;
        if self.data_dir.as_os_str().is_empty() {
            return Err(ConfigError::invalid("data_dir", "must name a directory"));
        }
        self.check_log_level()?;
        for pattern in &self.auth.default_allow {
            check_pattern(pattern)
                .map_err(|reason| ConfigError::invalid("auth.default_allow", reason))?;
        }
        self.auth.oauth.as_ref().map_or(Ok(()), |oauth| oauth.check())?;
        self.configured_rules()?;
        self.configured_agents()?;
        self.check_policies()?;
        self.check_numbers()?;
        self.limits.check_usage_limits()?;
        self.webhooks.validate()?;
        self.approvals.validate()?;
        for (setting, days) in [
            ("retention.finished_calls_days", self.retention.finished_calls_days),
            ("retention.audit_days", self.retention.audit_days),
        ] {
            if !(0.0..=36_500.0).contains(&days) {
                let reason = "must be from 0 (never delete) to 36500";
                return Err(ConfigError::invalid(setting, reason));
            }
        }
        self.check_nats()?;
        self.check_mcp()?;
        self.llm.validate()?;
        self.check_http()?;
        self.telemetry.validate()?;
        self.check_builtin()
    }

    fn check_nats(&self) -> Result<(), ConfigError> {
        let schemes = ["nats://", "tls://"];
        if let Some(url) = &self.nats.url {
            // The URL may hold a password, so the message does not repeat it.
            let each = url.split(',').all(|url| schemes.iter().any(|s| url.trim().starts_with(s)));
            if !each {
                let reason = "must begin with nats:// or tls://";
                return Err(ConfigError::invalid("nats.url", reason));
            }
        }
        if !toolcrib::domain::utp::is_token(&self.nats.version) {
            return Err(ConfigError::invalid("nats.version", "must be a word such as v1r3"));
        }
        Ok(())
    }

    fn check_http(&self) -> Result<(), ConfigError> {
        let http = &self.http;
        for pattern in &http.allow_envs {
            check_pattern(pattern)
                .map_err(|reason| ConfigError::invalid("http.allow_envs", reason))?;
        }
        let secrets = SecretPolicy::new(self.secrets.clone())
            .map_err(|reason| ConfigError::invalid("secrets", &reason))?;
        HttpSource::new(http.clone(), secrets).map(|_| ()).map_err(|reason| {
            let (field, reason) = reason.split_once(": ").unwrap_or(("hosts", reason.as_str()));
            ConfigError::invalid(&format!("http.{field}"), reason)
        })
    }

    pub(super) fn check_listen(&self) -> Result<(), ConfigError> {
        let listen = self.listen.as_str();
        let by_name = || {
            let (host, port) = listen.rsplit_once(':')?;
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
            let is_valid_host = !host.is_empty() && host.chars().all(is_allowed);
            port.parse::<u16>().ok().filter(|_| is_valid_host)
        };
        if listen.parse::<SocketAddr>().is_ok() || by_name().is_some() {
            return Ok(());
        }
        let reason = format!("{listen:?} is not an address and a port such as 127.0.0.1:8080");
        Err(ConfigError::invalid("listen", reason))
    }

    fn check_log_level(&self) -> Result<(), ConfigError> {
        let level = self.log.level.as_str();
        // A single word that is not a level would be parsed as the name of a module, and all other
        // modules would log nothing.
        let word = !level.contains(['=', ',']);
        let is_known_level = LEVELS.contains(&level.to_ascii_lowercase().as_str());
        let filter = || tracing_subscriber::EnvFilter::builder().parse(level).is_ok();
        if if word { is_known_level } else { filter() } {
            return Ok(());
        }
        let reason = format!(
            "{level:?} is neither a level ({}) nor a filter such as info,toolcrib=debug",
            LEVELS.join(", ")
        );
        Err(ConfigError::invalid("log.level", reason))
    }

    fn check_policies(&self) -> Result<(), ConfigError> {
        let global = ExecutionPolicyPatch {
            max_parallel: Some(self.policy.max_parallel),
            default_timeout_ms: Some(self.policy.default_timeout_ms),
            attempt_timeout_ms: self.policy.attempt_timeout_ms,
            input_timeout_ms: Some(self.policy.input_timeout_ms),
            max_retries: Some(self.policy.max_retries),
            backoff: Some(self.policy.backoff.clone()),
            rejoin: Some(self.policy.rejoin),
            rejoin_window_ms: Some(self.policy.rejoin_window_ms),
            disconnect_grace_ms: Some(self.policy.disconnect_grace_ms),
        };
        check_policy("policy", &global)?;
        for (name, project) in &self.projects {
            check_policy(&format!("projects.{name}.policy"), &project.policy)?;
        }
        for (name, tool) in &self.tools {
            let key = format!("tools.\"{name}\"");
            check_tool_name(name)
                .map_err(|reason| ConfigError::invalid(&key, reason.to_string()))?;
            check_policy(&format!("{key}.policy"), &tool.policy)?;
            for fallback in &tool.fallback {
                let key = format!("{key}.fallback");
                check_tool_name(&fallback.tool)
                    .map_err(|reason| ConfigError::invalid(&key, reason.to_string()))?;
                if fallback.tool == *name {
                    return Err(ConfigError::invalid(&key, "a tool cannot be its own fallback"));
                }
            }
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        let times = [
            ("limits.max_wait_ms", limits.max_wait_ms),
            ("limits.request_header_timeout_ms", limits.request_header_timeout_ms),
            ("limits.write_timeout_ms", limits.write_timeout_ms),
            ("ingress.heartbeat_ms", self.ingress.heartbeat_ms),
            ("ingress.dead_after_ms", self.ingress.dead_after_ms),
            ("doors.mcp.task_after_ms", self.transports.mcp.task_after_ms),
            ("doors.mcp.wait_ms", self.transports.mcp.wait_ms),
            ("doors.mcp.retry_ms", self.transports.mcp.retry_ms),
            ("telemetry.export_interval_ms", self.telemetry.export_interval_ms),
            ("telemetry.metrics_interval_ms", self.telemetry.metrics_interval_ms),
            ("builtin.database.timeout_ms", self.builtin.database.timeout_ms),
            ("builtin.weather.timeout_ms", self.builtin.weather.timeout_ms),
            ("http.timeout_ms", self.http.timeout_ms),
        ];
        for (key, time) in times {
            if !(1..=DAY_MS).contains(&time) {
                return Err(ConfigError::invalid(key, format!("must be from 1 to {DAY_MS}")));
            }
        }
        if self.shutdown.drain_ms > DAY_MS {
            let reason = format!("must be from 0 to {DAY_MS}");
            return Err(ConfigError::invalid("shutdown.drain_ms", reason));
        }
        let counts = [
            ("limits.max_args_bytes", limits.max_args_bytes),
            ("limits.max_result_bytes", limits.max_result_bytes),
            ("limits.max_open_calls", limits.max_open_calls),
            ("limits.max_open_calls_per_project", limits.max_open_calls_per_project),
            ("limits.max_tools_per_registration", limits.max_tools_per_registration),
            ("limits.max_tools_per_project", limits.max_tools_per_project),
            ("limits.max_clients_per_project", limits.max_clients_per_project),
            ("limits.max_batch_entries", limits.max_batch_entries),
            ("limits.max_batch_parallel", limits.max_batch_parallel),
            ("limits.max_batch_bytes", limits.max_batch_bytes),
            ("limits.max_open_runs", limits.max_open_runs),
            ("limits.max_child_runs", limits.max_child_runs),
            ("limits.max_boxes_per_project", limits.max_boxes_per_project),
            ("limits.max_body_bytes", limits.max_body_bytes),
            ("limits.max_connections", limits.max_connections),
            ("limits.max_streams", limits.max_streams),
            ("limits.max_streams_per_caller", limits.max_streams_per_caller),
            ("doors.mcp.catalogue_over", self.transports.mcp.catalogue_over),
            ("doors.mcp.result_tokens", self.transports.mcp.result_tokens),
            ("doors.mcp.page_size", self.transports.mcp.page_size),
            ("doors.mcp.max_sessions", self.transports.mcp.max_sessions),
            ("ingress.window", self.ingress.window as usize),
            ("builtin.database.max_rows", self.builtin.database.max_rows),
            ("builtin.database.max_bytes", self.builtin.database.max_bytes),
            ("http.max_response_bytes", self.http.max_response_bytes),
        ];
        for (key, count) in counts {
            if count == 0 {
                return Err(ConfigError::invalid(key, "must be at least 1"));
            }
        }
        let bounded = [
            ("limits.max_batch_entries", limits.max_batch_entries, 10_000),
            ("limits.max_batch_parallel", limits.max_batch_parallel, 256),
        ];
        for (key, count, max) in bounded {
            if count > max {
                return Err(ConfigError::invalid(key, format!("must be at most {max}")));
            }
        }
        if self.ingress.dead_after_ms <= self.ingress.heartbeat_ms {
            let reason = "must be longer than ingress.heartbeat_ms, or every connection looks dead";
            return Err(ConfigError::invalid("ingress.dead_after_ms", reason));
        }
        Ok(())
    }

    fn check_builtin(&self) -> Result<(), ConfigError> {
        let weather = &self.builtin.weather;
        let urls = [
            ("builtin.weather.geocoding_url", &weather.geocoding_url),
            ("builtin.weather.forecast_url", &weather.forecast_url),
        ];
        for (key, url) in urls {
            if !url.starts_with("http://") && !url.starts_with("https://") {
                return Err(ConfigError::invalid(key, "must begin with http:// or https://"));
            }
        }
        let schemes = ["postgres://", "postgresql://", "sqlite:"];
        match &self.builtin.database.url {
            // Without a scheme the value is the path of a SQLite file.
            Some(url)
                if url.contains("://") && !schemes.iter().any(|scheme| url.starts_with(scheme)) =>
            {
                // The value may hold a password, so the message does not repeat it.
                let reason = "must begin with postgres:// or sqlite:";
                Err(ConfigError::invalid("builtin.database.url", reason))
            }
            _ => Ok(()),
        }
    }
}

fn check_policy(key: &str, policy: &ExecutionPolicyPatch) -> Result<(), ConfigError> {
    match policy.find_problem() {
        // The problem starts with the name of the field, which completes the key.
        Some(problem) => match problem.split_once(' ') {
            Some((field, reason)) => Err(ConfigError::invalid(&format!("{key}.{field}"), reason)),
            None => Err(ConfigError::invalid(key, problem)),
        },
        None => Ok(()),
    }
}
