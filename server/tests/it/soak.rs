//! T21: a steady load with followers of the event streams. The WAL stays bounded, the memory and
//! the open files of the server do not grow, and no follower misses an event.
//!
//! `./scripts/test soak` runs the long forms, 3 and 15 minutes, and sets `TOOLCRIB_TEST_SOAK`.
//! Other runs have short forms.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::support::process::{PATIENCE, Server, check, eventually, text};

/// Greatest length of the WAL, and the length to which it returns.
const MAX_WAL: u64 = 64 << 20;
const USUAL_WAL: u64 = 20 << 20;
/// Greatest growth of the memory after the warm-up: the allocator returns pages late.
const MAX_GROWTH_KIB: i64 = 16 << 10;

fn duration(short_s: u64, long_s: u64) -> Duration {
    let is_long = std::env::var_os("TOOLCRIB_TEST_SOAK").is_some();
    Duration::from_secs(if is_long { long_s } else { short_s })
}

/// Callers, a client that executes calls, and followers, until the token is cancelled.
struct Load {
    stopped: CancellationToken,
    tasks: TaskTracker,
    calls: Arc<AtomicU64>,
    events: Arc<AtomicU64>,
    missed: Arc<AtomicU64>,
    http: reqwest::Client,
    base: String,
}

impl Load {
    fn new(server: &Server) -> Self {
        Self {
            stopped: CancellationToken::new(),
            tasks: TaskTracker::new(),
            calls: Arc::default(),
            events: Arc::default(),
            missed: Arc::default(),
            http: server.http.clone(),
            base: server.url(""),
        }
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stopped.clone();
        self.tasks.spawn(async move {
            stopped.run_until_cancelled(work).await;
        });
    }

    /// Adds callers that make one call after the other, each with this pause.
    fn add_callers(&self, count: usize, args_bytes: usize, pause: Duration) {
        for number in 0..count {
            let (http, base, calls) = (self.http.clone(), self.base.clone(), self.calls.clone());
            let is_local = number % 2 == 0;
            let (tool, args) = match is_local {
                true => ("calculation.eval", json!({ "expression": "6*7" })),
                false => ("probe.echo", json!({ "text": "x".repeat(args_bytes) })),
            };
            let body = json!({ "run_id": format!("run_{number}"), "args": args,
                "timeout_ms": 60_000, "wait_ms": 20_000 });
            self.spawn(async move {
                loop {
                    let url = format!("{base}/v1/tools/{tool}/invoke");
                    let answer = http.post(url).json(&body).send().await.unwrap();
                    let call: Value = answer.json().await.unwrap();
                    assert_eq!(call["status"], "SUCCEEDED", "{call}");
                    calls.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(pause).await;
                }
            });
        }
    }

    /// Adds a client that executes `probe.echo`.
    fn add_client(&self) {
        let (http, base) = (self.http.clone(), self.base.clone());
        self.spawn(async move {
            loop {
                let path = "/internal/ingress/poll?client_id=echo&wait_ms=5000&max=16";
                let answer = http.get(format!("{base}{path}")).send().await.unwrap();
                let work: Value = answer.json().await.unwrap();
                let submits = work["requests"].as_array().unwrap().iter().map(async |request| {
                    let id = text(request, "tool_call_id");
                    let report = json!({ "status": "SUCCEEDED", "result": request["args"] });
                    let url = format!("{base}/internal/tool_calls/{id}/submit");
                    http.post(url).json(&report).send().await.unwrap();
                });
                futures::future::join_all(submits).await;
            }
        });
    }

    /// Adds followers of all events. Every second one reconnects after some events.
    fn add_followers(&self, count: usize) {
        for number in 0..count {
            let (http, base) = (self.http.clone(), self.base.clone());
            let (events, missed) = (self.events.clone(), self.missed.clone());
            let reconnect_after = if number % 2 == 0 { u64::MAX } else { 200 + number as u64 };
            self.spawn(async move {
                let mut last = 0;
                loop {
                    let request = http
                        .get(format!("{base}/v1/events?after=0"))
                        .timeout(Duration::from_secs(3_600))
                        .header("last-event-id", last);
                    let answer = request.send().await.unwrap();
                    let mut chunks = answer.bytes_stream();
                    let (mut received, mut seen) = (Vec::new(), 0);
                    'connected: while let Some(Ok(chunk)) = chunks.next().await {
                        received.extend_from_slice(&chunk);
                        while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
                            let line: Vec<u8> = received.drain(..=end).collect();
                            let line = String::from_utf8_lossy(&line);
                            let Some(id) = line.strip_prefix("id: ") else { continue };
                            let id: u64 = id.trim().parse().unwrap();
                            missed.fetch_add(u64::from(id != last + 1), Ordering::Relaxed);
                            (last, seen) = (id, seen + 1);
                            events.fetch_add(1, Ordering::Relaxed);
                            if seen >= reconnect_after {
                                break 'connected;
                            }
                        }
                    }
                }
            });
        }
    }

    async fn stop(self) -> (u64, u64) {
        self.stopped.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        assert_eq!(read(&self.missed), 0, "followers missed events");
        (read(&self.calls), read(&self.events))
    }
}

async fn start_server() -> Server {
    let server = Server::ready().await;
    server.register("echo", "probe.echo", "read").await;
    server
}

fn wal_length(server: &Server) -> u64 {
    std::fs::metadata(server.data_dir().join("toolcrib.db-wal")).map_or(0, |file| file.len())
}

fn resident_kib(server: &Server) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wal_stays_bounded_while_events_are_followed() {
    let lasts = duration(5, 180);
    let mut server = start_server().await;
    let load = Load::new(&server);
    load.add_client();
    load.add_callers(8, 50_000, Duration::from_millis(10));
    load.add_followers(16);
    let (began, mut longest) = (Instant::now(), 0);
    while began.elapsed() < lasts {
        longest = longest.max(wal_length(&server));
        assert!(longest <= MAX_WAL, "{longest} bytes");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (calls, events) = load.stop().await;
    let is_short = async || (wal_length(&server) <= USUAL_WAL).then_some(());
    eventually("the WAL is short again", PATIENCE, is_short).await;
    eprintln!(
        "{} s: {calls} calls, {events} events to 16 followers; the WAL had up to {:.1} MiB, then {:.1}",
        lasts.as_secs(),
        longest as f64 / 1_048_576.0,
        wal_length(&server) as f64 / 1_048_576.0,
    );
    assert!(calls > lasts.as_secs(), "{calls} calls");
    assert!(server.stop().await.success());
    check(&server.data_dir());
}

/// Returns the mean of some samples.
fn mean(samples: &[i64]) -> i64 {
    samples.iter().sum::<i64>() / samples.len() as i64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_and_files_do_not_grow_under_a_steady_load() {
    let lasts = duration(8, 900);
    let mut server = start_server().await;
    let load = Load::new(&server);
    load.add_client();
    // About 20 calls per second.
    load.add_callers(4, 2_000, Duration::from_millis(200));
    load.add_followers(8);
    let (mut memory, mut files, mut longest) = (Vec::new(), Vec::new(), 0);
    let began = Instant::now();
    while began.elapsed() < lasts {
        memory.push(resident_kib(&server));
        files.push(open_files(&server));
        longest = longest.max(wal_length(&server));
        tokio::time::sleep(lasts / 200).await;
    }
    let (calls, events) = load.stop().await;
    // The first third is the warm-up.
    let (memory, files) = (&memory[memory.len() / 3..], &files[files.len() / 3..]);
    let quarter = memory.len() / 4;
    let growth = mean(&memory[memory.len() - quarter..]) - mean(&memory[..quarter]);
    let hours = (lasts * 2 / 3).as_secs_f64() * 0.75 / 3_600.0;
    let (fewest, most) = (*files.iter().min().unwrap(), *files.iter().max().unwrap());
    eprintln!(
        "{} s: {calls} calls, {events} events to 8 followers; memory {} KiB, {growth:+} KiB after the \
         warm-up ({:+.1} MiB/h); {fewest} to {most} open files; the WAL had up to {:.1} MiB",
        lasts.as_secs(),
        memory.last().unwrap(),
        growth as f64 / 1_024.0 / hours,
        longest as f64 / 1_048_576.0,
    );
    assert!(growth < MAX_GROWTH_KIB, "the memory grew by {growth} KiB");
    // Followers that reconnect are counted twice for a moment.
    assert!(most - fewest <= 16, "{fewest} to {most} open files");
    assert!(longest <= MAX_WAL, "{longest} bytes");
    assert!(calls > lasts.as_secs() * 5, "{calls} calls");
    assert!(server.stop().await.success());
    check(&server.data_dir());
}
