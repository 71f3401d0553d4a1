//! Puts the parts together: the store, the engine, the built-in tools, the doors. Constructs and
//! connects; decides nothing.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use toolcrib::{Effect, Engine, FnTool, Risk, Tool};
use toolcrib_store::SqliteStore;

use crate::auth::oauth::Oauth;
use crate::config::Config;
use crate::doors::http::{Door, Settings};
use crate::doors::mcp;
use crate::sources::builtin;
use crate::sources::utp::Commands;
use crate::telemetry::{self, Otlp};
use crate::utp::Link;
use crate::webhooks::Webhooks;

/// Two servers on one database would each believe to be the only writer: the first keeps this
/// file locked for as long as it lives, however it ends. One that has just stopped may be survived
/// by its lock for a moment, in a process that it was starting: so that is waited for.
async fn lock(store: &Path) -> anyhow::Result<File> {
    if let Some(directory) = store.parent() {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let path = store.with_extension("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    for _ in 0..LOCK_LOOKS {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_LOOK).await,
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
    bail!(
        "another toolcrib serves {}: stop it, or choose another directory with --data-dir",
        store.display()
    )
}

/// How often, and with which pause, a lock that is held is looked at again.
const LOCK_LOOKS: u32 = 40;
const LOCK_LOOK: std::time::Duration = std::time::Duration::from_millis(25);

/// A server's engine, and what keeps its database its own.
pub struct Served {
    pub engine: Engine,
    _nats: Option<crate::doors::nats::Open>,
    otlp: Option<Arc<Otlp>>,
    _lock: File,
}

impl Served {
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
    let path = config.store_path()?;
    let lock = lock(&path).await?;
    let otlp = Otlp::start(&config.telemetry).await?;
    let opened = {
        let path = path.clone();
        tokio::task::spawn_blocking(move || SqliteStore::open(&path)).await?
    };
    let store = opened.with_context(|| format!("cannot open {}", path.display()))?;
    let link = match config.nats.address() {
        Some(address) => Some(Link::connect(&address, "toolcrib").await.context("NATS")?),
        None => None,
    };
    let mut builder = Engine::builder()
        .store(Arc::new(store))
        .source(Arc::new(Commands::new(link.clone())))
        .publishes(link.is_some())
        .limits(config.limits())
        .policies(config.policies())
        .notifier(Arc::new(webhooks(config)?), config.webhooks.notifying())
        .tools(builtin_tools(config)?);
    if config.builtin.enabled {
        builder = builder.result_read();
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
    Ok(Served { engine, otlp, _nats: nats, _lock: lock })
}

/// An engine for a look at the directory or a change to it: it runs nothing by itself, and may be
/// used beside a running server.
pub async fn operator(config: &Config) -> anyhow::Result<Engine> {
    let path = config.store_path()?;
    let opened = {
        let path = path.clone();
        tokio::task::spawn_blocking(move || SqliteStore::open_briefly(&path)).await?
    };
    let store = opened.with_context(|| format!("cannot open {}", path.display()))?;
    Ok(Engine::builder().store(Arc::new(store)).limits(config.limits()).idle().await?)
}

/// The HTTP door of a server.
pub fn door(config: &Config, engine: Engine) -> Door {
    let settings = Settings {
        max_body_bytes: config.limits.max_body_bytes,
        heartbeat_ms: config.ingress.heartbeat_ms,
        dead_after_ms: config.ingress.dead_after_ms,
        window: config.ingress.window as usize,
        default_allow: config.auth.default_allow.clone(),
    };
    Door { engine, settings: Arc::new(settings), metrics: telemetry::metrics() }
}

/// The MCP door of a server.
pub fn mcp_door(config: &Config, engine: Engine) -> mcp::Door {
    let doors = &config.doors.mcp;
    let days = config.retention.finished_calls_days;
    let settings = mcp::Settings {
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
    };
    mcp::Door::new(engine, settings)
}

/// All doors of a server that are reached over HTTP.
pub fn router(config: &Config, engine: Engine) -> axum::Router {
    let router = crate::doors::http::router(door(config, engine.clone()));
    match config.doors.mcp.enabled {
        true => router.merge(mcp::router(mcp_door(config, engine))),
        false => router,
    }
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
