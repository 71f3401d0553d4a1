//! Converts the configuration to the settings of the engine, the transports and NATS, each of which
//! has its own types and does not know the configuration.

use toolcrib::EngineLimits;
use toolcrib::domain::delivery::RetrySchedule;
use toolcrib::domain::retry::ExecutionPolicy;
use toolcrib::ports::core::ApprovalSettings;
use toolcrib::ports::core::{ExecutionPolicies, ToolOverride};
use toolcrib::ports::webhook_sender::DeliverySettings;
use toolcrib_protocol::http_operation::jina::JinaEndpoints;
use toolcrib_protocol::outbound::OutboundPolicy;
use toolcrib_protocol::secrets::SecretPolicy;
use toolcrib_protocol::utp::nats_connection::NatsEndpoint;
use toolcrib_transport::auth::OriginPolicy;
use toolcrib_transport::http::HttpTransportSettings;
use toolcrib_transport::mcp::{McpTransportSettings, ProtectedResourceMetadata};

use crate::config::{Config, NatsSettings, WebhookSettings};

/// Returns the execution policies of all calls, of projects and of tools.
pub fn execution_policies(config: &Config) -> ExecutionPolicies {
    let policy = &config.policy;
    ExecutionPolicies {
        global: ExecutionPolicy {
            max_parallel: Some(policy.max_parallel),
            default_timeout_ms: policy.default_timeout_ms,
            attempt_timeout_ms: policy.attempt_timeout_ms,
            input_timeout_ms: policy.input_timeout_ms,
            max_retries: policy.max_retries,
            backoff: policy.backoff.clone(),
            rejoin: policy.rejoin,
            rejoin_window_ms: policy.rejoin_window_ms,
            disconnect_grace_ms: policy.disconnect_grace_ms,
        },
        projects: config
            .projects
            .iter()
            .map(|(name, project)| (name.clone(), project.policy.clone()))
            .collect(),
        tools: config
            .tools
            .iter()
            .map(|(name, tool)| {
                let (policy, fallback) = (tool.policy.clone(), tool.fallback.clone());
                (name.clone(), ToolOverride { policy, fallback, risk: tool.risk })
            })
            .collect(),
        limits: config.limits.configured_limits(),
    }
}

/// Returns the engine's limits.
pub fn engine_limits(config: &Config) -> EngineLimits {
    let limits = &config.limits;
    EngineLimits {
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
    }
}

/// Returns the rules on the secrets that tools may use.
pub fn secret_policy(config: &Config) -> anyhow::Result<SecretPolicy> {
    let policy = SecretPolicy::new(config.secrets.clone());
    policy.map_err(|reason| anyhow::anyhow!("secrets: {reason}"))
}

/// Returns the time after which finished calls are deleted, or `None` if they are never deleted.
pub fn retention_ms(config: &Config) -> Option<u64> {
    days_as_ms(config.retention.finished_calls_days)
}

/// Returns the time after which audit entries are deleted, or `None` if they are kept forever.
pub fn audit_retention_ms(config: &Config) -> Option<u64> {
    days_as_ms(config.retention.audit_days)
}

fn days_as_ms(days: f64) -> Option<u64> {
    (days > 0.0).then_some((days * 86_400_000.0) as u64)
}

/// Returns the settings of approvals.
pub fn approval_settings(config: &Config) -> ApprovalSettings {
    ApprovalSettings {
        expires_in_ms: config.approvals.expires_in_ms,
        webhook_url: config.approvals.webhook_url.clone(),
        public_url: Some(config.public_url()),
    }
}

/// Returns the retry schedule and the concurrency of webhook deliveries.
pub fn webhook_delivery(settings: &WebhookSettings) -> DeliverySettings {
    DeliverySettings {
        schedule: RetrySchedule {
            retry_ms: settings.retry_schedule_ms.clone(),
            jitter: settings.jitter,
        },
        max_parallel: settings.max_parallel as usize,
        max_parallel_per_receiver: settings.max_parallel_per_receiver as usize,
    }
}

/// Returns the NATS server to connect to, if one is configured.
pub fn nats_endpoint(settings: &NatsSettings) -> Option<NatsEndpoint> {
    let (version, credentials) = (settings.version.clone(), settings.credentials.clone());
    Some(NatsEndpoint { url: settings.url.clone()?, credentials, version })
}

/// Returns the settings of the HTTP transport.
pub fn http_transport(config: &Config) -> HttpTransportSettings {
    HttpTransportSettings {
        max_body_bytes: config.limits.max_body_bytes,
        heartbeat_ms: config.ingress.heartbeat_ms,
        dead_after_ms: config.ingress.dead_after_ms,
        default_max_in_flight: config.ingress.window as usize,
        default_allow: config.auth.default_allow.clone(),
        utp_version: config.nats.version.clone(),
        destinations: config.http.destination_rules().ok(),
        origins: OriginPolicy {
            allowed_hosts: config.transports.http.allowed_hosts.clone(),
            public_host: public_host(config),
            allowed_origins: config.transports.http.allowed_origins.clone(),
            table: "doors.http",
        },
        jina: JinaEndpoints::parse(&config.http.jina.search_url, &config.http.jina.reader_url).ok(),
    }
}

/// Returns the host at which browsers reach this server, with its port unless it is the scheme's.
fn public_host(config: &Config) -> Option<String> {
    let url = reqwest::Url::parse(config.mcp_servers.public_url.as_deref()?).ok()?;
    let host = url.host_str()?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Returns the settings of the MCP transport.
pub fn mcp_transport(config: &Config) -> McpTransportSettings {
    let mcp = &config.transports.mcp;
    McpTransportSettings {
        task_after_ms: mcp.task_after_ms,
        wait_ms: mcp.wait_ms.min(config.limits.max_wait_ms),
        max_wait_ms: config.limits.max_wait_ms,
        names: mcp.names,
        page_size: mcp.page_size,
        catalogue_threshold: mcp.catalogue_over,
        result_tokens: mcp.result_tokens,
        ttl_ms: mcp.ttl_ms,
        retention_ms: retention_ms(config),
        max_body_bytes: config.limits.max_body_bytes,
        max_sessions: mcp.max_sessions,
        retry_ms: mcp.retry_ms,
        session_key: None,
        origins: OriginPolicy {
            allowed_hosts: mcp.allowed_hosts.clone(),
            public_host: public_host(config),
            allowed_origins: mcp.allowed_origins.clone(),
            table: "doors.mcp",
        },
        public_url: config.mcp_servers.public_url.clone(),
        event_callbacks: OutboundPolicy::new(
            "webhooks",
            config.webhooks.allow_private,
            &config.webhooks.allow_hosts,
        ),
        protected_resource: config.auth.oauth.as_ref().map(|oauth| ProtectedResourceMetadata {
            issuer: oauth.issuer.clone(),
            resource: oauth.resource.clone(),
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::ConfigOverrides;

    #[test]
    fn the_default_policy_equals_that_of_the_engine() {
        let policies = execution_policies(&Config::default());
        assert_eq!(policies.global, ExecutionPolicy::default());
    }

    #[test]
    fn projects_tools_and_fallbacks_reach_the_engine() {
        let toml = "
            [projects.acme.policy]
            max_parallel = 4
            [tools.\"weather.query\".policy]
            default_timeout_ms = 5000
            backoff = { initial_ms = 10 }
            [[tools.\"weather.query\".fallback]]
            tool = \"weather.backup\"
            args = { q = { from = \"/query\" }, units = { value = \"metric\" } }
            [limits]
            max_open_calls = 11
            [limits.agent.ada]
            per_minute = 60
            [limits.tool.\"mail.send\"]
            max_parallel = 2
        ";
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("toolcrib.toml");
        std::fs::write(&file, toml).unwrap();
        let config =
            Config::from_parts(Some(&file), std::iter::empty(), &ConfigOverrides::default());
        let config = config.unwrap();
        let policies = execution_policies(&config);
        assert_eq!(policies.projects["acme"].max_parallel, Some(4));
        let tool = &policies.tools["weather.query"];
        assert_eq!(tool.policy.default_timeout_ms, Some(5_000));
        assert_eq!(tool.policy.backoff.as_ref().unwrap().initial_ms, 10);
        assert_eq!(tool.fallback[0].tool, "weather.backup");
        assert_eq!(tool.fallback[0].args.as_ref().unwrap().len(), 2);
        assert_eq!(engine_limits(&config).max_open_calls, 11);
        let limits: Vec<_> = policies.limits.iter().map(|limit| limit.name.as_str()).collect();
        assert_eq!(limits, ["ada", "mail.send"]);
        assert_eq!(policies.limits[0].values.per_minute, Some(60));
        assert_eq!(policies.limits[1].values.max_parallel, Some(2));
    }
}
