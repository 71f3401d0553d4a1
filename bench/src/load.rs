//! The load generator: drives any server that implements the invoke API and times its responses.
//!
//! It runs on the same cores as the server it measures, so it does as little as possible: requests
//! are built once, responses are searched and not parsed as JSON, latencies are pushed onto plain
//! lists. It never retries a failed call: it counts the failure and makes the next call.
//!
//! In all functions `addr` is `127.0.0.1:port`, `path` is the path with its query, `body` the JSON
//! body sent unchanged with every call, and `bearer` the token for the `Authorization` header, if
//! the server requires one. A call is *ok* when its status is 2xx and its body contains
//! `SUCCEEDED`; `path` should therefore request to wait:
//! `/v1/tools/bench.noop/invoke?wait_ms=10000`.
//!
//! Call these functions from a tokio runtime with time and I/O enabled; a `current_thread` runtime
//! is the cheapest and sufficient. Run one at a time, and warm up the server with a short loop
//! first.

pub mod http;
pub mod sample;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use http::{Connection, HttpResponse};
use sample::{BurstSample, Sample, micros};
use tokio::task::JoinSet;

/// Maximum time to wait for outstanding responses after the measured time is over.
const GRACE: Duration = Duration::from_secs(30);
/// Pause after a failed connection, so that a dead server does not make the worker spin.
const FAILURE_PAUSE: Duration = Duration::from_millis(10);
/// Pause between two attempts while a server starts; it bounds the error of
/// [`time_to_first_success`].
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(1);

/// A server and a prepared request to it.
#[derive(Clone)]
struct LoadTarget {
    addr: Arc<str>,
    request: Arc<[u8]>,
    /// Decides whether a response is ok.
    is_ok: ResponseCheck,
}

type ResponseCheck = Arc<dyn Fn(&HttpResponse<'_>) -> bool + Send + Sync>;

impl LoadTarget {
    fn post(addr: &str, path: &str, body: &str, bearer: Option<&str>) -> Self {
        Self {
            addr: addr.into(),
            request: http::post(addr, path, body, bearer).into(),
            is_ok: Arc::new(|answer| answer.has_succeeded()),
        }
    }

    async fn connect(&self, count: usize) -> anyhow::Result<Vec<Connection>> {
        let mut connections = Vec::with_capacity(count);
        for _ in 0..count {
            let connection = Connection::open(&self.addr)
                .await
                .with_context(|| format!("cannot connect to {}", self.addr))?;
            connections.push(connection);
        }
        Ok(connections)
    }

    /// Makes one call, on a new connection if the old one is no longer open. Returns its latency if
    /// the response was ok.
    async fn call(&self, connection: &mut Connection) -> io::Result<Option<Duration>> {
        let started = Instant::now();
        if !connection.is_open() {
            *connection = Connection::open(&self.addr).await?;
        }
        let answer = connection.round_trip(&self.request).await?;
        // Checking a long response takes time that must not count as the server's.
        let took = started.elapsed();
        Ok((self.is_ok)(&answer).then_some(took))
    }
}

/// The results of one worker. They outlive the worker's future, so that nothing is lost when the
/// worker is canceled during a call.
#[derive(Default)]
struct WorkerStats {
    latencies: Vec<u64>,
    errors: u64,
}

impl WorkerStats {
    /// Makes one call and records its result.
    async fn call(&mut self, target: &LoadTarget, connection: &mut Connection) {
        match target.call(connection).await {
            Ok(Some(took)) => self.latencies.push(micros(took)),
            Ok(None) => self.errors += 1,
            Err(_) => {
                self.errors += 1;
                tokio::time::sleep(FAILURE_PAUSE).await;
            }
        }
    }

    fn merge(&mut self, mut other: Self) {
        self.latencies.append(&mut other.latencies);
        self.errors += other.errors;
    }
}

/// Runs `concurrency` workers until `duration` is over. Each has its own connection and sends its
/// next call as soon as the last one has its response.
///
/// All connections are open before the clock starts. Calls in flight when the time is over are
/// awaited (at most 30 s, then counted as errors) and counted; the rate covers the time until the
/// last response.
///
/// # Errors
///
/// When the connections cannot be opened. Calls that fail later are counted in [`Sample::errors`],
/// which the caller should check.
pub async fn closed_loop(
    addr: &str,
    concurrency: usize,
    duration: Duration,
    path: &str,
    body: &str,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    closed_loop_with_request(addr, concurrency, duration, http::post(addr, path, body, bearer))
        .await
}

/// Like [`closed_loop`], with a prepared request.
///
/// # Errors
///
/// Like [`closed_loop`].
pub async fn closed_loop_with_request(
    addr: &str,
    concurrency: usize,
    duration: Duration,
    request: Vec<u8>,
) -> anyhow::Result<Sample> {
    let ok: ResponseCheck = Arc::new(|answer| answer.has_succeeded());
    let target = LoadTarget { addr: addr.into(), request: request.into(), is_ok: ok };
    let connections = target.connect(concurrency).await?;
    let started = Instant::now();
    let end = started + duration;
    let mut workers = JoinSet::new();
    for mut connection in connections {
        let target = target.clone();
        workers.spawn(async move {
            let mut tally = WorkerStats::default();
            let work = async {
                while Instant::now() < end {
                    tally.call(&target, &mut connection).await;
                }
            };
            // One timer for the whole worker: a timer per call would be expensive.
            if tokio::time::timeout_at((end + GRACE).into(), work).await.is_err() {
                tally.errors += 1;
            }
            tally
        });
    }
    let mut total = WorkerStats::default();
    while let Some(tally) = workers.join_next().await {
        total.merge(tally.context("a worker of the load generator died")?);
    }
    Ok(Sample::from_latencies(total.latencies, total.errors, started.elapsed()))
}

/// Sends `n` calls at once and measures the time from the first byte sent until all results have
/// arrived; repeats this `rounds` times on the same `n` connections, which are open before the
/// first round.
///
/// A round that is not over after 30 s is canceled, and its open calls are counted as errors.
///
/// # Errors
///
/// When the connections cannot be opened. Calls that fail later are counted in
/// [`BurstSample::errors`].
pub async fn burst(
    addr: &str,
    n: usize,
    rounds: usize,
    path: &str,
    body: &str,
    bearer: Option<&str>,
) -> anyhow::Result<BurstSample> {
    let target = LoadTarget::post(addr, path, body, bearer);
    let mut connections = target.connect(n).await?;
    let mut times = Vec::with_capacity(rounds);
    let mut total = WorkerStats::default();
    for _ in 0..rounds {
        let mut calls = JoinSet::new();
        let started = Instant::now();
        for mut connection in connections.drain(..) {
            let target = target.clone();
            calls.spawn(async move {
                let mut tally = WorkerStats::default();
                let call = tally.call(&target, &mut connection);
                if tokio::time::timeout(GRACE, call).await.is_err() {
                    tally.errors += 1;
                }
                (tally, connection)
            });
        }
        while let Some(call) = calls.join_next().await {
            let (tally, connection) = call.context("a caller of the load generator died")?;
            total.merge(tally);
            connections.push(connection);
        }
        times.push(micros(started.elapsed()));
    }
    let count = total.latencies.len() as u64;
    Ok(BurstSample::from_rounds(n, times, count, total.errors))
}

/// Sends batches one after the other on one connection until `duration` is over. A batch is ok when
/// its status is 2xx and its body reports `entries` successful calls.
///
/// # Errors
///
/// When the connection cannot be opened, or a batch has no response after 30 s. Batches with
/// another response are counted in [`Sample::errors`].
pub async fn batch_loop(
    addr: &str,
    entries: usize,
    duration: Duration,
    path: &str,
    body: &str,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    let ok: ResponseCheck =
        Arc::new(move |answer| answer.is_success() && answer.count_ok_entries() == entries);
    let target = LoadTarget { is_ok: ok, ..LoadTarget::post(addr, path, body, bearer) };
    let mut connection =
        Connection::open(addr).await.with_context(|| format!("cannot connect to {addr}"))?;
    let mut tally = WorkerStats::default();
    let started = Instant::now();
    while started.elapsed() < duration {
        tokio::time::timeout(GRACE, tally.call(&target, &mut connection))
            .await
            .with_context(|| format!("POST {path} stays unanswered"))?;
    }
    Ok(Sample::from_latencies(tally.latencies, tally.errors, started.elapsed()))
}

/// Sends `count` GETs of `path` one after the other on one connection; any 2xx is ok.
///
/// # Errors
///
/// When the connection cannot be opened, or a GET has no response after 30 s. GETs with another
/// response are counted in [`Sample::errors`].
pub async fn get_latencies(
    addr: &str,
    path: &str,
    count: usize,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    let target = LoadTarget {
        addr: addr.into(),
        request: http::get(addr, path, bearer).into(),
        is_ok: Arc::new(|answer| answer.is_success()),
    };
    let mut connection =
        Connection::open(addr).await.with_context(|| format!("cannot connect to {addr}"))?;
    let mut tally = WorkerStats::default();
    let started = Instant::now();
    for _ in 0..count {
        tokio::time::timeout(GRACE, tally.call(&target, &mut connection))
            .await
            .with_context(|| format!("GET {path} stays unanswered"))?;
    }
    Ok(Sample::from_latencies(tally.latencies, tally.errors, started.elapsed()))
}

/// Measures the time from `since` until a server answers its first call successfully.
///
/// Take `since` just before the server's process is started. The server is tried every millisecond;
/// a starting server refuses connections or gives responses that are not ok, so these are retried.
///
/// # Errors
///
/// When no call succeeds within `give_up` of `since`; the error names the last result.
pub async fn time_to_first_success(
    addr: &str,
    since: Instant,
    path: &str,
    body: &str,
    bearer: Option<&str>,
    give_up: Duration,
) -> anyhow::Result<Duration> {
    let request = http::post(addr, path, body, bearer);
    let mut last_seen = "nothing".to_owned();
    let attempts = async {
        loop {
            match try_first_call(addr, &request).await {
                Ok(None) => return since.elapsed(),
                Ok(Some(seen)) => last_seen = seen,
                Err(error) => last_seen = error.to_string(),
            }
            tokio::time::sleep(ATTEMPT_INTERVAL).await;
        }
    };
    let outcome = tokio::time::timeout_at((since + give_up).into(), attempts).await;
    outcome.with_context(|| {
        format!("{addr} gave no successful answer within {give_up:?}; last seen: {last_seen}")
    })
}

/// Returns `None` when the call was ok, else a description of the response.
async fn try_first_call(addr: &str, request: &[u8]) -> io::Result<Option<String>> {
    let mut connection = Connection::open(addr).await?;
    let answer = connection.round_trip(request).await?;
    if answer.has_succeeded() {
        return Ok(None);
    }
    let start: String = String::from_utf8_lossy(answer.body).chars().take(200).collect();
    Ok(Some(format!("status {} {start}", answer.status)))
}
