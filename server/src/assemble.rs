//! Bootstrap: builds the store, the engine, the built-in tools and the transports from the settings
//! and connects them. Makes no decisions.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use toolcrib::{Effect, Engine, FnTool, Risk, Tool};

use crate::auth::oauth::Oauth;
use crate::config::Config;
use crate::doors::http::{Door, Settings, Sources};
use crate::doors::mcp;
use crate::kept;
use crate::models::Shelf;
use crate::operation::jina::Places;
use crate::sources::builtin;
use crate::sources::http::HttpTools;
use crate::sources::mcp::Upstreams;
use crate::sources::utp::Commands;
use crate::telemetry::{self, Otlp};
use crate::upstreams::Keeper;
use crate::utp::Link;
use crate::webhooks::Webhooks;

/// A started server: the engine, its transports and its MCP servers, with the lock that keeps a
/// SQLite database exclusive to this process.
pub struct Served {
    pub engine: Engine,
    keeper: Arc<Keeper>,
    _nats: Option<crate::doors::nats::Open>,
    _rows: Option<crate::doors::rows::Open>,
    otlp: Option<Arc<Otlp>>,
    _lock: Option<File>,
}

impl Served {
    /// Returns the router of all HTTP transports, including MCP.
    pub fn router(&self, config: &Config) -> axum::Router {
        doors(config, &self.engine, Some(&self.keeper))
    }

    /// Returns the MCP transport of the server.
    pub fn mcp_door(&self, config: &Config) -> mcp::Door {
        let settings = mcp_settings(config);
        mcp::Door::with_shelf(self.engine.clone(), settings, self.keeper.shelf())
    }

    /// Returns true if the MCP server is connected. Waits until that is decided, at most `limit`.
    pub async fn ready(&self, project: &str, upstream: &str, limit: Duration) -> bool {
        self.keeper.ready(project, upstream, limit).await
    }

    /// Returns the current problem of an MCP server, or an empty string.
    pub fn problem(&self, project: &str, upstream: &str) -> String {
        self.keeper.problem(project, upstream).unwrap_or_default()
    }

    /// Sets the address that the server listens on as the base of its browser-facing URLs, unless
    /// the settings give a public URL.
    pub fn listens(&self, config: &Config, address: SocketAddr) {
        if config.upstreams.public_url.is_none() {
            self.keeper.set_base(crate::config::local_url(address));
        }
    }

    /// Returns the passthrough for what upstreams offer besides tools: resources and prompts.
    pub fn shelf(&self) -> Arc<crate::upstreams::Beside> {
        self.keeper.shelf()
    }

    /// Stops the MCP servers that were started as child processes. Call it after the engine's
    /// shutdown.
    pub async fn close(&self) {
        self.keeper.close().await;
    }

    /// Sends the queued spans and metrics, for at most `limit`. Call it after the engine's
    /// shutdown.
    pub async fn flush(&self, limit: Duration) {
        let Some(otlp) = self.otlp.clone() else { return };
        let _ = tokio::task::spawn_blocking(move || otlp.stop(limit)).await;
    }
}

/// Starts a server: opens its store exclusively, resumes open calls and starts the reconcilers.
pub async fn engine(config: &Config) -> anyhow::Result<Served> {
    // Installed before the first call: anything counted without a recorder is lost.
    telemetry::metrics();
    let (store, lock) = kept::serve(&config.kept()?).await?;
    let otlp = Otlp::start(&config.telemetry).await?;
    let link = match config.nats.address() {
        Some(address) => Some(Link::connect(&address, "toolcrib").await.context("NATS")?),
        None => None,
    };
    let upstreams = Arc::new(Upstreams::new(
        crate::upstreams::outbound(&config.upstreams),
        config.public_url(),
    ));
    let mut builder = Engine::builder()
        .store(store)
        .source(upstreams.clone())
        .source(Arc::new(Commands::new(link.clone())))
        .source(Arc::new(http_tools(config)?))
        .publishes(link.is_some())
        .limits(config.limits())
        .policies(config.policies())
        .notifier(Arc::new(webhooks(config)?), config.webhooks.notifying())
        .models(Arc::new(Shelf::new(&config.llm)))
        .asking(config.llm.asking())
        .tools(builtin_tools(config)?);
    if config.builtin.enabled {
        builder = builder.result_read();
    }
    if let Some(model) = &config.llm.summary_model {
        builder = builder.summaries(model);
    }
    if let Some(settings) = &config.auth.oauth {
        builder = builder.recognise(Oauth::start(settings.clone()).await?);
    }
    let days = config.retention.finished_calls_days;
    if days > 0.0 {
        builder = builder.retention_ms((days * 86_400_000.0) as u64);
    }
    if let Some(named) = config.telemetry.tool_names_in_metrics {
        builder = builder.tool_names_in_metrics(named);
    }
    if let Some(otlp) = &otlp {
        builder = builder.observer(otlp.clone());
    }
    let engine = builder.start().await?;
    let nats = link.map(|link| crate::doors::nats::open(engine.clone(), link));
    let (configured, settings) = (config.mcp.clone(), config.upstreams.clone());
    let keeper = Keeper::start(engine.clone(), upstreams, configured, settings);
    let rows = crate::doors::rows::open(engine.clone());
    Ok(Served { engine, keeper, otlp, _nats: nats, _rows: rows, _lock: lock })
}

/// Opens an engine for administration: it reads and changes the directory but executes nothing, so
/// it is safe to use beside a running server.
pub async fn operator(config: &Config) -> anyhow::Result<Engine> {
    let store = kept::look(&config.kept()?).await?;
    Ok(Engine::builder().store(store).limits(config.limits()).idle().await?)
}

/// Builds the state that the handlers of the HTTP transport share.
fn door(config: &Config, engine: Engine, keeper: Option<&Arc<Keeper>>) -> Door {
    let settings = Settings {
        max_body_bytes: config.limits.max_body_bytes,
        heartbeat_ms: config.ingress.heartbeat_ms,
        dead_after_ms: config.ingress.dead_after_ms,
        window: config.ingress.window as usize,
        default_allow: config.auth.default_allow.clone(),
        utp_version: config.nats.version.clone(),
        jina: Places::read(&config.http.jina.search_url, &config.http.jina.reader_url).ok(),
    };
    let sources = keeper.map(|keeper| keeper.clone() as Arc<dyn Sources>);
    Door { engine, settings: Arc::new(settings), metrics: telemetry::metrics(), sources }
}

fn mcp_settings(config: &Config) -> mcp::Settings {
    let doors = &config.doors.mcp;
    let days = config.retention.finished_calls_days;
    mcp::Settings {
        task_after_ms: doors.task_after_ms,
        wait_ms: doors.wait_ms.min(config.limits.max_wait_ms),
        page_size: doors.page_size,
        catalogue_over: doors.catalogue_over,
        result_tokens: doors.result_tokens,
        ttl_ms: doors.ttl_ms,
        retention_ms: (days > 0.0).then_some((days * 86_400_000.0) as u64),
        max_body_bytes: config.limits.max_body_bytes,
        max_sessions: doors.max_sessions,
        allowed_origins: doors.allowed_origins.clone(),
        allowed_hosts: doors.allowed_hosts.clone(),
        issuer: config.auth.oauth.as_ref().map(|oauth| mcp::Issuer {
            issuer: oauth.issuer.clone(),
            resource: oauth.resource.clone(),
        }),
    }
}

/// Returns the router of all HTTP transports of an engine that has no MCP servers.
pub fn router(config: &Config, engine: Engine) -> axum::Router {
    doors(config, &engine, None)
}

fn doors(config: &Config, engine: &Engine, keeper: Option<&Arc<Keeper>>) -> axum::Router {
    let router = crate::doors::http::router(door(config, engine.clone(), keeper));
    if !config.doors.mcp.enabled {
        return router;
    }
    let (engine, settings) = (engine.clone(), mcp_settings(config));
    let door = match keeper {
        Some(keeper) => mcp::Door::with_shelf(engine, settings, keeper.shelf()),
        None => mcp::Door::new(engine, settings),
    };
    router.merge(mcp::router(door))
}

/// Builds the source that calls HTTP APIs.
pub fn http_tools(config: &Config) -> anyhow::Result<HttpTools> {
    HttpTools::new(config.http.clone()).map_err(|why| anyhow::anyhow!("http.{why}"))
}

fn webhooks(config: &Config) -> anyhow::Result<Webhooks> {
    let settings = &config.webhooks;
    let timeout = Duration::from_millis(settings.timeout_ms);
    let (keys, outbound) = (settings.key_ring(), settings.outbound());
    Webhooks::new(keys, outbound, timeout, settings.max_data_bytes)
        .map_err(|why| anyhow::anyhow!("callbacks cannot be signed: {why}"))
}

/// Returns the built-in tools that the settings enable.
pub fn builtin_tools(config: &Config) -> anyhow::Result<Vec<Arc<dyn Tool>>> {
    let mut tools = Vec::new();
    if config.builtin.enabled {
        tools = builtin::tools(builtin::Settings {
            data_dir: config.data_dir.clone(),
            database: config.builtin.database.clone(),
            weather: config.builtin.weather.clone(),
        })
        .map_err(|error| anyhow::anyhow!("the built-in tools cannot be set up: {error}"))?;
    }
    if std::env::var_os("TOOLCRIB_BENCH_NOOP").is_some() {
        tools.push(Arc::new(noop()));
    }
    Ok(tools)
}

/// Arguments of a tool that ignores them.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Anything {}

/// The minimal tool that the benchmark calls.
fn noop() -> FnTool {
    let nothing = |_: Anything| async { Ok::<_, String>(serde_json::json!({})) };
    FnTool::new("bench.noop", "Does nothing and returns {}: for the benchmark", nothing)
        .effect(Effect::Read)
        .risk(Risk::Low)
}
