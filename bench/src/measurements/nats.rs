//! Measures tools over NATS against NATS itself, with a dedicated broker and a tool service in
//! another process.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::StreamExt;
use serde_json::json;
use toolcrib_protocol::utp::nats_connection::{DAY, NatsEndpoint, stream_config};
use toolcrib_protocol::utp::{DEFAULT_VERSION, NatsConnection, wire};
use toolcrib_sources::utp::host::ToolHost;

use super::{Bench, CALLERS, median};
use crate::load;
use crate::processes::{
    CALL_BODY, ChildProcess, MeasuredServer, ServiceTools, call_path, free_port,
    wait_until_listening,
};
use crate::report::{Limit, Measurement};

/// The tool, and the target that serves it.
const TOOL: &str = "bench.utp";
const TARGET: &str = "bench";

/// The stream for raw publishes: configured like the stream of commands, and deleted after each
/// round, so that the messages of one measurement do not slow down the next.
const RAW_STREAM: &str = "bench_raw";

async fn create_raw_stream(nats: &NatsConnection) -> anyhow::Result<()> {
    nats.ensure_streams().await?;
    let config = stream_config(RAW_STREAM.to_owned(), format!("{RAW_STREAM}.>"), DAY);
    nats.jetstream().create_stream(config).await?;
    Ok(())
}

async fn delete_raw_stream(nats: &NatsConnection) -> anyhow::Result<()> {
    nats.jetstream().delete_stream(RAW_STREAM).await?;
    Ok(())
}

/// Starts a NATS server and returns its URL as well. Returns `None` if `nats-server` is not
/// installed.
async fn start_nats_server(dir: &Path) -> anyhow::Result<Option<(ChildProcess, String)>> {
    let port = free_port()?;
    let mut command = Command::new("nats-server");
    command.args(["-js", "-a", "127.0.0.1", "-p", &port.to_string(), "-sd"]).arg(dir);
    let Ok(broker) = ChildProcess::start(command.stderr(Stdio::null())) else { return Ok(None) };
    wait_until_listening(&format!("127.0.0.1:{port}"), Duration::from_secs(10))
        .await
        .context("nats-server does not answer")?;
    Ok(Some((broker, format!("nats://127.0.0.1:{port}"))))
}

/// Executes the tool that Toolcrib calls over NATS, until the process is killed.
///
/// # Errors
///
/// When NATS cannot be reached.
pub async fn run_tool_service(url: &str) -> anyhow::Result<()> {
    let host = ToolHost::connect(url).await?.with_max_concurrency(256);
    host.with_tool(TOOL, |_| async { Ok(json!({})) }).serve(TARGET, std::future::pending()).await
}

impl Bench<'_> {
    /// Measures tools over NATS, if `nats-server` is installed.
    pub(super) async fn measure_nats_tools(&mut self) -> anyhow::Result<()> {
        let Some((_broker, url)) = start_nats_server(&self.scratch.dir("nats")?).await? else {
            return Ok(());
        };
        self.advance_progress("tools over NATS: start");
        let (dir, bare_dir) = (self.scratch.dir("utp")?, self.scratch.dir("bare")?);
        let settings = [("TOOLCRIB_NATS__URL", url.as_str())];
        let (product, _) = self.launcher.start_toolcrib(&dir, &settings).await?;
        let _service = self.launcher.start_tool_service(&dir, &url, ServiceTools::Toolcrib)?;
        // Started before its server: it executes the call that tests whether the server is ready.
        let _bare_service =
            self.launcher.start_tool_service(&bare_dir, &url, ServiceTools::Baseline)?;
        let bare = self.launcher.start_baseline(&bare_dir, Some(&url)).await?;
        let address = NatsEndpoint { url, credentials: None, version: DEFAULT_VERSION.to_owned() };
        let nats = NatsConnection::connect(&address, "bench").await?;
        register_tool(&product).await?;
        let (warm, path) = (Duration::from_secs(1), call_path(TOOL));
        load::closed_loop(&product.addr, 8, warm, &path, CALL_BODY, None).await?;
        let shared = vec![nats.clone(); CALLERS];
        let connections = (0..CALLERS).map(|_| NatsConnection::connect(&address, "bench"));
        let connections = futures::future::try_join_all(connections).await?;
        let mut rates: [Vec<f64>; 4] = Default::default();
        let (mut one, mut trip) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            rates[0].push(
                self.sample_round("tools over NATS", &product, CALLERS, &path).await?.calls_per_s,
            );
            let sample = self.sample_round("the bare way", &bare, CALLERS, &bare.call_path).await?;
            rates[1].push(sample.calls_per_s);
            rates[2].push(publish_rate(&shared, self.plan.round_length).await?);
            rates[3].push(publish_rate(&connections, self.plan.round_length).await?);
            trip.push(round_trip_us(&nats, self.plan.round_length).await?);
            let alone = self.sample_round("tools over NATS", &product, 1, &path).await?;
            one.push(alone.p50_us as f64);
        }
        self.push_rates(rates.map(median));
        let name = "tools over NATS, one at a time, p50, against a publish and a request";
        let (p50, baseline) = (median(one), median(trip));
        self.push_measurement(Measurement::against_baseline(
            name,
            "µs",
            p50,
            baseline,
            Limit::AtMost(4.0),
        ));
        Ok(())
    }

    /// Reports the concurrent rates: of Toolcrib, of the NATS baseline, and of publishing alone,
    /// over one connection and over one connection per publisher, as callers have them.
    fn push_rates(&mut self, [product, bare, publishing, apart]: [f64; 4]) {
        let limit = Limit::AtLeast(0.25);
        let all = [
            ("tools over NATS", "JetStream's publish", product, publishing, limit),
            ("tools over NATS", "a connection for each", product, apart, Limit::None),
            ("tools over NATS", "the bare way", product, bare, Limit::None),
            ("the bare way", "JetStream's publish", bare, publishing, Limit::None),
        ];
        for (operation, against, rate, baseline, limit) in all {
            let name = format!("{operation}, {CALLERS} at once, against {against}");
            self.push_measurement(Measurement::against_baseline(
                name, "calls/s", rate, baseline, limit,
            ));
        }
    }
}

async fn register_tool(product: &MeasuredServer) -> anyhow::Result<()> {
    let tool = json!({
        "tool_name": TOOL,
        "target_subject": format!("cmd.tool.{TARGET}.run"),
        "after_execution": "suspend",
        "effect": "idempotent",
    });
    let url = format!("http://{}/projects/default/tools", product.addr);
    let client = reqwest::Client::builder().no_proxy().build()?;
    let answer = client.post(url).json(&tool).send().await.context("the tool")?;
    ensure!(answer.status().is_success(), "the tool was refused: {}", answer.status());
    Ok(())
}

/// Returns the number of messages per second that the broker accepts and acknowledges, with one
/// publisher per element. Elements may share a connection.
async fn publish_rate(publishers: &[NatsConnection], time: Duration) -> anyhow::Result<f64> {
    let nats = publishers.first().context("no publisher")?;
    create_raw_stream(nats).await?;
    let (count, started) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let workers = publishers.iter().enumerate().map(|(worker, nats)| {
        let (nats, count) = (nats.clone(), count.clone());
        tokio::spawn(async move {
            let mut n = 0u64;
            while started.elapsed() < time {
                let id = format!("raw-{worker}-{n}-{}", started.elapsed().as_nanos());
                publish(&nats, &id).await?;
                n += 1;
                count.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        })
    });
    for worker in futures::future::join_all(workers).await {
        worker??;
    }
    let rate = count.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    delete_raw_stream(nats).await?;
    Ok(rate)
}

async fn publish(nats: &NatsConnection, id: &str) -> anyhow::Result<()> {
    let subject = format!("{RAW_STREAM}.default.public.cmd.bench.run");
    let headers = wire::base_headers(DEFAULT_VERSION, "dict", "");
    Ok(nats.publish(subject, headers, vec![b'x'; 300], id).await?)
}

/// Returns the median time of one publish and one request with its reply, in microseconds.
async fn round_trip_us(nats: &NatsConnection, time: Duration) -> anyhow::Result<f64> {
    create_raw_stream(nats).await?;
    let mut requests = nats.client().subscribe("bench.echo").await?;
    let echo = nats.client().clone();
    let echoing = tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let Some(reply) = request.reply else { continue };
            let _ = echo.publish(reply, request.payload).await;
        }
    });
    let started = Instant::now();
    let mut times = Vec::new();
    while started.elapsed() < time {
        let one = Instant::now();
        publish(nats, &format!("one-{}", started.elapsed().as_nanos())).await?;
        nats.client().request("bench.echo", vec![b'x'; 300].into()).await?;
        times.push(one.elapsed().as_secs_f64() * 1e6);
    }
    echoing.abort();
    delete_raw_stream(nats).await?;
    Ok(median(times))
}
