//! Puts the parts together: the store, the engine, the built-in tools, the doors. Constructs and
//! connects; decides nothing.

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

/// A server's engine, and what keeps its database its own.
pub struct Served {
    pub engine: Engine,
    keeper: Arc<Keeper>,
    _nats: Option<crate::doors::nats::Open>,
    _rows: Option<crate::doors::rows::Open>,
    otlp: Option<Arc<Otlp>>,
    _lock: Option<File>,
}

impl Served {
    /// All doors of the server that are reached over HTTP.
    pub fn router(&self, config: &Config) -> axum::Router {
        doors(config, &self.engine, Some(&self.keeper))
    }

    /// The MCP door of the server.
    pub fn mcp_door(&self, config: &Config) -> mcp::Door {
        let settings = mcp_settings(config);
        mcp::Door::with_shelf(self.engine.clone(), settings, self.keeper.shelf())
    }

    /// Whether an upstream is there, once that is known or the time is over.
    pub async fn ready(&self, project: &str, upstream: &str, limit: Duration) -> bool {
        self.keeper.ready(project, upstream, limit).await
    }

    /// What is wrong with an upstream.
    pub fn problem(&self, project: &str, upstream: &str) -> String {
        self.keeper.problem(project, upstream).unwrap_or_default()
    }

    /// The server listens here: people's browsers reach it so, unless the settings say otherwise.
    pub fn listens(&self, config: &Config, address: SocketAddr) {
        if config.upstreams.public_url.is_none() {
            self.keeper.set_base(crate::config::local_url(address));
        }
    }

    /// What lies beside the tools of upstreams.
    pub fn shelf(&self) -> Arc<crate::upstreams::Beside> {
        self.keeper.shelf()
    }

    /// After the engine's shutdown: ends the programs that were started for their tools.
    pub async fn close(&self) {
        self.keeper.close().await;
    }

    /// Sends the spans and metrics that still wait, within a limit; after the engine's shutdown.
    pub async fn flush(&self, limit: Duration) {
        let Some(otlp) = self.otlp.clone() else { return };
        let _ = tokio::task::spawn_blocking(move || otlp.stop(limit)).await;
    }
}

/// The engine of a server: it takes up what is open and runs its reconcilers.
pub async fn engine(config: &Config) -> anyhow::Result<Served> {
    // Before the first call is counted: what is counted without a collector is lost.
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

/// An engine for a look at the directory or a change to it: it runs nothing by itself, and may be
/// used beside a running server.
pub async fn operator(config: &Config) -> anyhow::Result<Engine> {
    let store = kept::look(&config.kept()?).await?;
    Ok(Engine::builder().store(store).limits(config.limits()).idle().await?)
}

/// The HTTP door of a server.
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

/// All doors of an engine that are reached over HTTP, without upstreams behind it.
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

/// What asks HTTP APIs.
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

/// The tools that come with the server, as configured.
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

/// Arguments that nobody looks at.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Anything {}

/// What the benchmark calls: as little as a tool can be.
fn noop() -> FnTool {
    let nothing = |_: Anything| async { Ok::<_, String>(serde_json::json!({})) };
    FnTool::new("bench.noop", "Does nothing and returns {}: for the benchmark", nothing)
        .effect(Effect::Read)
        .risk(Risk::Low)
}
