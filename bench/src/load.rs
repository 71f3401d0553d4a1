//! The load generator: it drives any server that speaks the invoke API and times the answers.
//!
//! It runs on the same cores as the server it measures, so it does as little as it can: requests
//! are built once, answers are searched and not parsed as JSON, latencies go to plain lists. It
//! never retries a failed call to make it good: the failure is counted and the next call is made.
//!
//! In all functions `addr` is `127.0.0.1:port`, `path` is the path with its query, `body` the
//! JSON body sent as it is with every call, and `bearer` the token for the `Authorization`
//! header, if the server wants one. A call is *ok* when its status is 2xx and its body contains
//! `SUCCEEDED`; so `path` should ask to wait: `/v1/tools/bench.noop/invoke?wait_ms=10000`.
//!
//! Call them from a tokio runtime with time and I/O enabled; a `current_thread` runtime is the
//! cheapest and enough. Run one at a time, and warm the server up with a short loop first.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::task::JoinSet;

use crate::http::{self, Answer, Connection};
use crate::sample::{BurstSample, Sample, micros};

/// How long a call may stay unanswered after the time is over before it is given up.
const GRACE: Duration = Duration::from_secs(30);
/// Pause after a connection has failed: a dead server must not turn the worker into a spinner.
const AFTER_FAILURE: Duration = Duration::from_millis(10);
/// Pause between two attempts while waiting for a server to come up; it bounds the error of
/// [`first_answer`].
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// A server and a request to it, ready to be sent.
#[derive(Clone)]
struct Target {
    addr: Arc<str>,
    request: Arc<[u8]>,
    /// What counts as a good answer.
    ok: Judge,
}

type Judge = Arc<dyn Fn(&Answer<'_>) -> bool + Send + Sync>;

impl Target {
    fn post(addr: &str, path: &str, body: &str, bearer: Option<&str>) -> Self {
        Self {
            addr: addr.into(),
            request: http::post(addr, path, body, bearer).into(),
            ok: Arc::new(|answer| answer.has_succeeded()),
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

    /// One call, on a new connection if the old one is no longer open; how long its answer took,
    /// if it was ok.
    async fn call(&self, connection: &mut Connection) -> io::Result<Option<Duration>> {
        let begun = Instant::now();
        if !connection.is_open() {
            *connection = Connection::open(&self.addr).await?;
        }
        let answer = connection.round_trip(&self.request).await?;
        // Judging a long answer takes time that is not the server's.
        let took = begun.elapsed();
        Ok((self.ok)(&answer).then_some(took))
    }
}

/// What one worker saw. It outlives the worker's future, so that nothing is lost when the worker
/// is cut off in the middle of a call.
#[derive(Default)]
struct Tally {
    latencies: Vec<u64>,
    errors: u64,
}

impl Tally {
    /// Makes one call and notes how it went.
    async fn call(&mut self, target: &Target, connection: &mut Connection) {
        match target.call(connection).await {
            Ok(Some(took)) => self.latencies.push(micros(took)),
            Ok(None) => self.errors += 1,
            Err(_) => {
                self.errors += 1;
                tokio::time::sleep(AFTER_FAILURE).await;
            }
        }
    }

    fn merge(&mut self, mut other: Self) {
        self.latencies.append(&mut other.latencies);
        self.errors += other.errors;
    }
}

/// `concurrency` workers, each on a connection of its own, each sending its next call as soon as
/// the last was answered, until `duration` is over.
///
/// All connections are open before the clock starts. Calls under way when the time is over are
/// waited for (at most 30 s, then counted as errors) and counted; the rate is taken over the time
/// until the last answer.
///
/// # Errors
///
/// When the connections cannot be opened. Calls that fail later are counted in
/// [`Sample::errors`], which the caller should look at.
pub async fn closed_loop(
    addr: &str,
    concurrency: usize,
    duration: Duration,
    path: &str,
    body: &str,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    closed_loop_of(addr, concurrency, duration, http::post(addr, path, body, bearer)).await
}

/// The same with a request that is ready to be sent.
///
/// # Errors
///
/// As [`closed_loop`].
pub async fn closed_loop_of(
    addr: &str,
    concurrency: usize,
    duration: Duration,
    request: Vec<u8>,
) -> anyhow::Result<Sample> {
    let ok: Judge = Arc::new(|answer| answer.has_succeeded());
    let target = Target { addr: addr.into(), request: request.into(), ok };
    let connections = target.connect(concurrency).await?;
    let begun = Instant::now();
    let end = begun + duration;
    let mut workers = JoinSet::new();
    for mut connection in connections {
        let target = target.clone();
        workers.spawn(async move {
            let mut tally = Tally::default();
            let work = async {
                while Instant::now() < end {
                    tally.call(&target, &mut connection).await;
                }
            };
            // One timer for the whole worker, because one for each call would cost.
            if tokio::time::timeout_at((end + GRACE).into(), work).await.is_err() {
                tally.errors += 1;
            }
            tally
        });
    }
    let mut total = Tally::default();
    while let Some(tally) = workers.join_next().await {
        total.merge(tally.context("a worker of the load generator died")?);
    }
    Ok(Sample::from_latencies(total.latencies, total.errors, begun.elapsed()))
}

/// `n` calls at once, timed from the first byte sent until all results are in; `rounds` times on
/// the same `n` connections, which are open before the first round.
///
/// A round that is not over after 30 s is cut off, its open calls counted as errors.
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
    let target = Target::post(addr, path, body, bearer);
    let mut connections = target.connect(n).await?;
    let mut times = Vec::with_capacity(rounds);
    let mut total = Tally::default();
    for _ in 0..rounds {
        let mut calls = JoinSet::new();
        let begun = Instant::now();
        for mut connection in connections.drain(..) {
            let target = target.clone();
            calls.spawn(async move {
                let mut tally = Tally::default();
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
        times.push(micros(begun.elapsed()));
    }
    let count = total.latencies.len() as u64;
    Ok(BurstSample::from_rounds(n, times, count, total.errors))
}

/// Batches one after the other on one connection until `duration` is over; ok is a 2xx whose body
/// says of `entries` calls that they went well.
///
/// # Errors
///
/// When the connection cannot be opened, or a batch stays unanswered for 30 s. Batches that are
/// answered otherwise are counted in [`Sample::errors`].
pub async fn batches(
    addr: &str,
    entries: usize,
    duration: Duration,
    path: &str,
    body: &str,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    let ok: Judge = Arc::new(move |answer| answer.is_success() && answer.went_well() == entries);
    let target = Target { ok, ..Target::post(addr, path, body, bearer) };
    let mut connection =
        Connection::open(addr).await.with_context(|| format!("cannot connect to {addr}"))?;
    let mut tally = Tally::default();
    let begun = Instant::now();
    while begun.elapsed() < duration {
        tokio::time::timeout(GRACE, tally.call(&target, &mut connection))
            .await
            .with_context(|| format!("POST {path} stays unanswered"))?;
    }
    Ok(Sample::from_latencies(tally.latencies, tally.errors, begun.elapsed()))
}

/// `count` GETs of `path` one after the other on one connection; ok is any 2xx.
///
/// # Errors
///
/// When the connection cannot be opened, or a GET stays unanswered for 30 s. GETs that are
/// answered otherwise are counted in [`Sample::errors`].
pub async fn get_latencies(
    addr: &str,
    path: &str,
    count: usize,
    bearer: Option<&str>,
) -> anyhow::Result<Sample> {
    let target = Target {
        addr: addr.into(),
        request: http::get(addr, path, bearer).into(),
        ok: Arc::new(|answer| answer.is_success()),
    };
    let mut connection =
        Connection::open(addr).await.with_context(|| format!("cannot connect to {addr}"))?;
    let mut tally = Tally::default();
    let begun = Instant::now();
    for _ in 0..count {
        tokio::time::timeout(GRACE, tally.call(&target, &mut connection))
            .await
            .with_context(|| format!("GET {path} stays unanswered"))?;
    }
    Ok(Sample::from_latencies(tally.latencies, tally.errors, begun.elapsed()))
}

/// How long a server takes from `since` until it has answered its first call with success.
///
/// Take `since` just before the server's process is started. The server is tried every
/// millisecond; refused connections and answers that are not ok are what a server that is coming
/// up gives, and are tried again.
///
/// # Errors
///
/// When there is no success before `give_up` has passed since `since`; the error names what was
/// last seen.
pub async fn first_answer(
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
            match first_attempt(addr, &request).await {
                Ok(None) => return since.elapsed(),
                Ok(Some(seen)) => last_seen = seen,
                Err(error) => last_seen = error.to_string(),
            }
            tokio::time::sleep(BETWEEN_ATTEMPTS).await;
        }
    };
    let outcome = tokio::time::timeout_at((since + give_up).into(), attempts).await;
    outcome.with_context(|| {
        format!("{addr} gave no successful answer within {give_up:?}; last seen: {last_seen}")
    })
}

/// `None` when the call was ok, else what came instead.
async fn first_attempt(addr: &str, request: &[u8]) -> io::Result<Option<String>> {
    let mut connection = Connection::open(addr).await?;
    let answer = connection.round_trip(request).await?;
    if answer.has_succeeded() {
        return Ok(None);
    }
    let start: String = String::from_utf8_lossy(answer.body).chars().take(200).collect();
    Ok(Some(format!("status {} {start}", answer.status)))
}
