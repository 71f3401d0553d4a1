//! Bootstrap: builds the store, the engine, the built-in tools and the transports from the settings
//! and connects them. Makes no decisions.

mod session_key;
mod settings;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use toolcrib::{Caller, Engine, Tool};
use toolcrib_protocol::utp::NatsConnection;
use toolcrib_sources::builtin;
use toolcrib_sources::http::HttpSource;
use toolcrib_sources::mcp::McpSource;
use toolcrib_sources::models::ModelRegistry;
use toolcrib_sources::utp::UtpSource;
use toolcrib_transport::auth::oauth::JwtAuthenticator;
use toolcrib_transport::http::{HttpState, HttpStateParts, SourceAdmin};
use toolcrib_transport::mcp;

use crate::config::Config;
use crate::mcp_servers::McpServerReconciler;
use crate::telemetry::{self, OtlpExporter};
use crate::webhooks::HttpWebhookSender;
use crate::{open_store, operator_token};

pub use settings::{engine_limits, nats_endpoint};

/// A started server: the engine, its transports and its MCP servers, with the lock that keeps a
/// SQLite database exclusive to this process.
pub struct ServerRuntime {
    pub engine: Engine,
    mcp_reconciler: Arc<McpServerReconciler>,
    _nats_transport: Option<toolcrib_transport::nats::NatsTransportHandle>,
    _postgres_reports: Option<toolcrib_transport::postgres_reports::PostgresReportsHandle>,
    otlp: Option<Arc<OtlpExporter>>,
    _lock: Option<File>,
}

impl ServerRuntime {
    /// Returns the router of all HTTP transports, including MCP.
    pub fn http_router(&self, config: &Config) -> axum::Router {
        build_router(config, &self.engine, Some(&self.mcp_reconciler))
    }

    /// Returns the MCP transport of the server.
    pub fn mcp_transport(&self, config: &Config) -> mcp::McpTransport {
        let settings = mcp_transport_settings(config);
        mcp::McpTransport::with_passthrough(
            self.engine.clone(),
            settings,
            self.mcp_reconciler.passthrough(),
        )
    }

    /// Returns true if the MCP server is connected. Waits until that is decided, at most `limit`.
    pub async fn wait_for_mcp_server(
        &self,
        project: &str,
        upstream: &str,
        limit: Duration,
    ) -> bool {
        self.mcp_reconciler.wait_until_ready(project, upstream, limit).await
    }

    /// Returns the current problem of an MCP server, or an empty string.
    pub fn mcp_server_problem(&self, project: &str, upstream: &str) -> String {
        self.mcp_reconciler.problem(project, upstream).unwrap_or_default()
    }

    /// Sets the address that the server listens on as the base of its browser-facing URLs, unless
    /// the settings give a public URL.
    pub fn set_listen_address(&self, config: &Config, address: SocketAddr) {
        if config.mcp_servers.public_url.is_none() {
            self.mcp_reconciler.set_public_base_url(crate::config::local_url(address));
        }
    }

    /// Returns the passthrough for what upstreams offer besides tools: resources and prompts.
    pub fn mcp_passthrough(&self) -> Arc<crate::mcp_servers::UpstreamPassthrough> {
        self.mcp_reconciler.passthrough()
    }

    /// Stops the MCP servers that were started as child processes. Call it after the engine's
    /// shutdown.
    pub async fn stop_mcp_servers(&self) {
        self.mcp_reconciler.close().await;
    }

    /// Sends the queued spans and metrics, for at most `limit`. Call it after the engine's
    /// shutdown.
    pub async fn flush_telemetry(&self, limit: Duration) {
        let Some(otlp) = self.otlp.clone() else { return };
        let _ = tokio::task::spawn_blocking(move || otlp.stop(limit)).await;
    }
}

/// Starts a server: opens its store exclusively, resumes open calls and starts the reconcilers.
pub async fn start_server(config: &Config) -> anyhow::Result<ServerRuntime> {
    // Installed before the first call: anything counted without a recorder is lost.
    telemetry::metrics_handle();
    let (store, lock) =
        open_store::open_exclusive(&config.store_location()?, &config.nats.version).await?;
    let otlp = OtlpExporter::start(&config.telemetry).await?;
    let nats_connection = match nats_endpoint(&config.nats) {
        Some(address) => Some(NatsConnection::connect(&address, "toolcrib").await.context("NATS")?),
        None => None,
    };
    let upstreams = Arc::new(McpSource::new(
        crate::mcp_servers::outbound_policy(&config.mcp_servers),
        config.public_url(),
    ));
    let webhook_sender = HttpWebhookSender::new(&config.webhooks)
        .map_err(|reason| anyhow::anyhow!("callbacks cannot be signed: {reason}"))?;
    let mut builder = Engine::builder()
        .store(store)
        .source(upstreams.clone())
        .source(Arc::new(UtpSource::new(nats_connection.clone())))
        .source(Arc::new(build_http_source(config)?))
        .publishes_outbox(nats_connection.is_some())
        .limits(engine_limits(config))
        .policies(settings::execution_policies(config))
        .approval_settings(settings::approval_settings(config))
        .webhook_sender(Arc::new(webhook_sender), settings::webhook_delivery(&config.webhooks))
        .models(Arc::new(ModelRegistry::new(&config.llm)))
        .model_request_policy(config.llm.request_policy())
        .tool_modes(config.llm.tool_modes())
        .tools(builtin_tools(config)?);
    if config.builtin.enabled {
        builder = builder.with_result_read_tool().with_run_finish_tool();
    }
    if let Some(model) = &config.llm.summary_model {
        builder = builder.summary_model(model);
    }
    if let Some(settings) = &config.auth.oauth {
        builder = builder.authenticator(JwtAuthenticator::start(settings.clone()).await?);
    }
    if let Some(operator) = operator_token::prepare_credential(&config.data_dir) {
        builder = builder.operator_credential(operator);
    }
    if let Some(retention_ms) = settings::retention_ms(config) {
        builder = builder.retention_ms(retention_ms);
    }
    if let Some(retention_ms) = settings::audit_retention_ms(config) {
        builder = builder.audit_retention_ms(retention_ms);
    }
    if let Some(is_enabled) = config.telemetry.tool_names_in_metrics {
        builder = builder.tool_names_in_metrics(is_enabled);
    }
    if let Some(otlp) = &otlp {
        builder = builder.observer(otlp.clone());
    }
    let engine = builder.start().await?;
    apply_configured_directory(&engine, config).await?;
    let nats = nats_connection
        .map(|nats_connection| toolcrib_transport::nats::start(engine.clone(), nats_connection));
    let (configured, admission) = (config.mcp.clone(), config.mcp_servers.clone());
    let secrets = settings::secret_policy(config)?;
    let reconciler =
        McpServerReconciler::start(engine.clone(), upstreams, configured, admission, secrets);
    let rows = toolcrib_transport::postgres_reports::start(engine.clone());
    Ok(ServerRuntime {
        engine,
        mcp_reconciler: reconciler,
        otlp,
        _nats_transport: nats,
        _postgres_reports: rows,
        _lock: lock,
    })
}

/// Opens an engine for administration: it reads and changes the directory but executes nothing, so
/// it is safe to use in addition to a running server.
pub async fn open_admin_engine(config: &Config) -> anyhow::Result<Engine> {
    let store = open_store::open_shared(&config.store_location()?).await?;
    // A rule can be about the properties of built-in tools.
    let tools = builtin_tools(config).unwrap_or_default();
    let builder = Engine::builder().store(store).limits(engine_limits(config));
    let builder = builder.policies(settings::execution_policies(config)).tools(tools);
    Ok(builder.build_idle().await?)
}

/// Stores the configured rules and agents, unless they are stored already.
async fn apply_configured_directory(engine: &Engine, config: &Config) -> anyhow::Result<()> {
    apply_configured_rules(engine, config).await?;
    for (project, agents) in config.configured_agents()? {
        let caller = Caller::local(&project);
        for agent in agents {
            let id = agent.agent_id().to_owned();
            let defined = engine.roster().put_parsed_agent(&caller, agent).await;
            defined.with_context(|| format!("the configured agent {id} of project {project}"))?;
        }
    }
    Ok(())
}

/// Makes the configured rules the rules of their projects, unless they are already.
async fn apply_configured_rules(engine: &Engine, config: &Config) -> anyhow::Result<()> {
    for (project, mut rules) in config.configured_rules()? {
        let caller = Caller::local(&project);
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        if engine.admin().rules(&caller)?.rules == rules {
            continue;
        }
        let replaced =
            engine.admin().replace_rules(&caller, &project, rules, "from the configuration").await;
        replaced.with_context(|| format!("the configured rules of project {project}"))?;
    }
    Ok(())
}

/// Builds the state that the handlers of the HTTP transport share.
fn http_transport_state(
    config: &Config,
    engine: Engine,
    reconciler: Option<&Arc<McpServerReconciler>>,
) -> HttpState {
    let sources = reconciler.map(|reconciler| reconciler.clone() as Arc<dyn SourceAdmin>);
    HttpState::from(HttpStateParts {
        engine,
        settings: Arc::new(settings::http_transport(config)),
        metrics: telemetry::metrics_handle(),
        sources,
        conversations: Default::default(),
    })
}

/// Returns the router of all HTTP transports of an engine that has no MCP servers.
pub fn router_without_mcp_servers(config: &Config, engine: Engine) -> axum::Router {
    build_router(config, &engine, None)
}

fn build_router(
    config: &Config,
    engine: &Engine,
    reconciler: Option<&Arc<McpServerReconciler>>,
) -> axum::Router {
    let router =
        toolcrib_transport::http::router(http_transport_state(config, engine.clone(), reconciler));
    if !config.transports.mcp.enabled {
        return router;
    }
    let engine = engine.clone();
    let transport = match reconciler {
        Some(reconciler) => mcp::McpTransport::with_passthrough(
            engine,
            mcp_transport_settings(config),
            reconciler.passthrough(),
        ),
        // The data directory belongs to a server.
        None => mcp::McpTransport::new(engine, settings::mcp_transport(config)),
    };
    router.merge(mcp::router(transport))
}

/// Returns the settings of the MCP transport, with the session key of the data directory.
fn mcp_transport_settings(config: &Config) -> mcp::McpTransportSettings {
    let session_key = session_key::load_or_create(&config.data_dir);
    mcp::McpTransportSettings { session_key, ..settings::mcp_transport(config) }
}

/// Builds the source that calls HTTP APIs.
pub fn build_http_source(config: &Config) -> anyhow::Result<HttpSource> {
    let secrets = settings::secret_policy(config)?;
    HttpSource::new(config.http.clone(), secrets).map_err(|reason| anyhow::anyhow!("http.{reason}"))
}

/// Returns the built-in tools that the settings enable.
pub fn builtin_tools(config: &Config) -> anyhow::Result<Vec<Arc<dyn Tool>>> {
    if !config.builtin.enabled {
        return Ok(Vec::new());
    }
    builtin::tools(builtin::BuiltinToolSettings {
        data_dir: config.data_dir.clone(),
        database: config.builtin.database.clone(),
        weather: config.builtin.weather.clone(),
    })
    .map_err(|error| anyhow::anyhow!("the built-in tools cannot be set up: {error}"))
}
