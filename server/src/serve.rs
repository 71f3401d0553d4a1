//! Runs the server: listens, prints the banner, accepts connections and shuts down in an orderly
//! way.
//!
//! `connections` limits the number of connections and the time that each may stay idle. On SIGTERM
//! or Ctrl-C the server accepts no more calls and lets running calls finish within a limit. The
//! next start recovers the rest.

mod connections;
mod pause_tolerant_timer;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use axum::Router;
use connections::{ConnectionLimits, accept_connections};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolcrib::{Caller, Engine, Executor};

use crate::config::{Config, StoreLocation};
use crate::{bootstrap, operator_token, release_memory, telemetry};

/// Maximum time that connections have to finish after the calls have ended.
const CONNECTION_DRAIN: Duration = Duration::from_secs(2);

/// Maximum time to send the last spans and metrics.
const TELEMETRY_FLUSH: Duration = Duration::from_secs(3);

/// Maximum time to shut down after the store has failed, in which callers get their responses.
const FAILURE_DRAIN: Duration = Duration::from_secs(2);

/// Runs the server until SIGTERM or Ctrl-C.
///
/// # Errors
/// The server cannot start, or its store fails for good while it runs.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let began = Instant::now();
    telemetry::start_logging(&config.log.level, config.log.format);
    let listener = bind(&config.listen).await?;
    let address = listener.local_addr().context("the listener has no address")?;
    let served = bootstrap::start_server(&config).await?;
    let engine = served.engine.clone();
    require_keys_or_loopback(&engine, address)?;
    served.set_listen_address(&config, address);
    let router = served.http_router(&config);
    print_banner(&config, &engine, address, began.elapsed());
    release_memory::release_startup_pages();
    let stopping = CancellationToken::new();
    let limits = ConnectionLimits::from_config(&config);
    let connections = TaskTracker::new();
    let stop = async {
        shutdown_signal().await;
        tracing::info!("stopping: no new calls are accepted, running calls may finish");
        engine.shut_down(Duration::from_millis(config.shutdown.drain_ms)).await;
    };
    // After a failed flush the stored state is unknown, and a later flush that succeeds proves
    // nothing about it. The server stops, and its next start reads the state from the disk.
    let fail = async {
        let reason = engine.wait_for_store_failure().await;
        tracing::error!(reason, "stopping: the store has failed");
        let _ = tokio::time::timeout(FAILURE_DRAIN, engine.shut_down(Duration::ZERO)).await;
        reason
    };
    // The listener stays open during the drain: new requests are refused with a "retry later" error
    // instead of waiting for a response that never comes.
    let failure = tokio::select! {
        () = accept_connections(&listener, router, &limits, &connections, &stopping) => None,
        () = stop => None,
        reason = fail => Some(reason),
    };
    drop(listener);
    stopping.cancel();
    connections.close();
    let _ = tokio::time::timeout(CONNECTION_DRAIN, connections.wait()).await;
    served.stop_mcp_servers().await;
    served.flush_telemetry(TELEMETRY_FLUSH).await;
    match failure {
        None => Ok(()),
        Some(reason) => bail!("the store has failed: {reason}"),
    }
}

async fn bind(address: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program listens there; choose another address with --listen \
                 127.0.0.1:8081, or run toolcrib doctor"
            }
            std::io::ErrorKind::PermissionDenied => "ports below 1024 need more rights",
            _ => "give an address such as 127.0.0.1:8080",
        };
        anyhow::anyhow!("cannot listen on {address}: {error}; {hint}")
    })
}

/// Refuses to listen beyond loopback while there are no keys: without keys every request may call
/// every tool.
fn require_keys_or_loopback(engine: &Engine, address: SocketAddr) -> anyhow::Result<()> {
    if address.ip().is_loopback() || engine.registry().credentials().has_keys() {
        return Ok(());
    }
    bail!(
        "{address} is not a loopback address and there are no keys, so any program that reaches it \
         could call your tools. Make a key first:\n\n    \
         toolcrib keys create --agent operator --role admin\n\n\
         or listen on 127.0.0.1"
    )
}

/// Describes where data is stored, without credentials.
fn describe_storage(config: &Config) -> String {
    let directory = config.data_dir.display().to_string();
    match config.store_location() {
        Ok(location @ StoreLocation::Postgres(_)) => {
            format!("{} and {directory}", location.redacted())
        }
        _ => directory,
    }
}

fn print_banner(config: &Config, engine: &Engine, address: SocketAddr, took: Duration) {
    let tools = engine.registry().tools(&Caller::local("default"));
    let builtin = tools.iter().filter(|tool| tool.definition.executor == Executor::BUILTIN);
    let names: Vec<&str> = builtin.map(|tool| tool.definition.name.as_str()).collect();
    tracing::info!(%address, data = describe_storage(config), tools = names.len(), "ready");
    if !std::io::stdout().is_terminal() && std::env::var_os("TOOLCRIB_QUIET").is_some() {
        return;
    }
    let base = crate::config::local_url(address);
    let program = std::env::args().next().unwrap_or_else(|| "toolcrib".to_owned());
    let (keys, key_flag, key_header) = match engine.registry().credentials().has_keys() {
        true => {
            ("needed: toolcrib keys".to_owned(), " --key KEY", " -H 'Authorization: Bearer KEY'")
        }
        false => {
            let token = operator_token::token_file(&config.data_dir);
            let keys = format!(
                "none: every local program may call tools; to administer, {}",
                token.display()
            );
            (keys, "", "")
        }
    };
    let settings =
        config.file.as_ref().map_or("defaults".to_owned(), |path| path.display().to_string());
    println!(
        "\n  toolcrib {} ready in {} ms\n\n  \
         API       {base}/v1\n  \
         Docs      {base}/docs\n  \
         Data      {}\n  \
         Settings  {settings}\n  \
         Keys      {keys}\n  \
         Tools     {} built in: {}\n\n  \
         Try       {program} --server {base}{key_flag} call calculation.eval \
         expression='2*21'\n  \
         or        curl -s '{base}/v1/tools/calculation.eval/invoke?wait_ms=5000'\
         {key_header} \\\n  \
         {:>10}-d '{{\"run_id\":\"run_001\",\"args\":{{\"expression\":\"2*21\"}}}}'\n",
        env!("CARGO_PKG_VERSION"),
        took.as_millis(),
        describe_storage(config),
        names.len(),
        names.join("  "),
        "",
    );
}

/// Serves a router on a listener until `stop` is canceled. For commands that have their own
/// startup and shutdown.
pub async fn serve_listener(
    listener: TcpListener,
    router: Router,
    config: &Config,
    stop: CancellationToken,
) {
    let (limits, connections) = (ConnectionLimits::from_config(config), TaskTracker::new());
    tokio::select! {
        () = accept_connections(&listener, router, &limits, &connections, &stop) => {}
        () = stop.cancelled() => {}
    }
    connections.close();
    let _ = tokio::time::timeout(CONNECTION_DRAIN, connections.wait()).await;
}

/// Returns on SIGTERM or Ctrl-C.
pub(crate) async fn shutdown_signal() {
    let interrupted = tokio::signal::ctrl_c();
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = interrupted => {}
        () = terminated => {}
    }
}
