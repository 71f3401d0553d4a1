//! T21: a steady load with followers of the event streams. The WAL stays bounded, the memory and
//! the open files of the server do not grow, and every follower receives every event once, in
//! order.
//!
//! `./scripts/test soak` runs the long forms, 3 and 25 minutes, and sets `TOOLCRIB_TEST_SOAK`.
//! Other runs have short forms, which find gross faults only. No task scrapes `/metrics`, because a
//! scrape would empty what the server collects for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use crate::support::process::{PATIENCE, Server, check, eventually, text};

/// Greatest length of the WAL, and the length to which it returns.
const MAX_WAL: u64 = 64 << 20;
const USUAL_WAL: u64 = 20 << 20;
/// Greatest growth of the memory in the 15 minutes after the warm-up, in KiB.
const MAX_GROWTH_KIB: i64 = 1 << 10;
/// The same in a few seconds, which are part of the warm-up.
const MAX_SHORT_GROWTH_KIB: i64 = 16 << 10;
/// A leak of this size per call exceeds the greatest growth, with the calls of the long form.
const LEAK_BYTES: u64 = 42;

fn is_long() -> bool {
    std::env::var_os("TOOLCRIB_TEST_SOAK").is_some()
}

fn duration(short_s: u64, long_s: u64) -> Duration {
    Duration::from_secs(if is_long() { long_s } else { short_s })
}

/// Callers, a client that executes calls, and followers. A failed assertion in any of them fails
/// the test: `check_tasks` and `stop` repeat the panic of a task.
struct Load {
    /// True once the callers end, each after the call that it is making.
    callers_stopped: Arc<AtomicBool>,
    /// True once the clients end, after the calls.
    clients_stopped: Arc<AtomicBool>,
    callers: JoinSet<()>,
    clients: JoinSet<()>,
    followers: JoinSet<()>,
    /// The number of the last event, once it is known. A follower ends when it has it.
    last_event: watch::Sender<Option<u64>>,
    calls: Arc<AtomicU64>,
    events: Arc<AtomicU64>,
    http: reqwest::Client,
    base: String,
}

/// Repeats the panic of a task.
fn propagate(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// Waits for the end of all tasks, and repeats the panic of each.
async fn join(description: &str, mut tasks: JoinSet<()>) {
    while !tasks.is_empty() {
        let ended = tokio::time::timeout(PATIENCE * 3, tasks.join_next()).await;
        let ended = ended.unwrap_or_else(|_| panic!("{description}: {} remain", tasks.len()));
        ended.into_iter().for_each(propagate);
    }
}

impl Load {
    fn new(server: &Server) -> Self {
        Self {
            callers_stopped: Arc::default(),
            clients_stopped: Arc::default(),
            callers: JoinSet::new(),
            clients: JoinSet::new(),
            followers: JoinSet::new(),
            last_event: watch::Sender::new(None),
            calls: Arc::default(),
            events: Arc::default(),
            http: server.http.clone(),
            base: server.url(""),
        }
    }

    /// Adds callers that make one call after the other, each with this pause.
    fn add_callers(&mut self, count: usize, args_bytes: usize, pause: Duration) {
        for number in 0..count {
            let (http, base, calls) = (self.http.clone(), self.base.clone(), self.calls.clone());
            let stopped = self.callers_stopped.clone();
            let is_local = number % 2 == 0;
            let (tool, args, result) = match is_local {
                true => ("calculation.eval", json!({ "expression": "6*7" }), json!(42)),
                false => {
                    let args = json!({ "text": "x".repeat(args_bytes) });
                    ("probe.echo", args.clone(), args)
                }
            };
            let body = json!({ "run_id": format!("run_{number}"), "args": args,
                "timeout_ms": 60_000, "wait_ms": 20_000 });
            self.callers.spawn(async move {
                while !stopped.load(Ordering::Relaxed) {
                    let url = format!("{base}/v1/tools/{tool}/invoke");
                    let answer = http.post(url).json(&body).send().await.unwrap();
                    let call: Value = answer.json().await.unwrap();
                    assert_eq!(
                        call["status"], "SUCCEEDED",
                        "{}: {}",
                        call["tool_call_id"], call["error"]
                    );
                    let found = if is_local { &call["result"]["result"] } else { &call["result"] };
                    assert_eq!(*found, result);
                    calls.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(pause).await;
                }
            });
        }
    }

    /// Adds a client that executes `probe.echo`.
    fn add_client(&mut self) {
        let (http, base) = (self.http.clone(), self.base.clone());
        let stopped = self.clients_stopped.clone();
        self.clients.spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                let path = "/internal/ingress/poll?client_id=echo&wait_ms=5000&max=16";
                let answer = http.get(format!("{base}{path}")).send().await.unwrap();
                let work: Value = answer.json().await.unwrap();
                let requests = work["requests"].as_array().unwrap_or_else(|| panic!("{work}"));
                let submits = requests.iter().map(async |request| {
                    let id = text(request, "tool_call_id");
                    let report = json!({ "status": "SUCCEEDED", "result": request["args"] });
                    let url = format!("{base}/internal/tool_calls/{id}/submit");
                    let answer = http.post(url).json(&report).send().await.unwrap();
                    assert_eq!(answer.status(), 200, "{:?}", answer.text().await);
                });
                futures::future::join_all(submits).await;
            }
        });
    }

    /// Adds followers of all events. Every second one reconnects after some events.
    fn add_followers(&mut self, count: usize) {
        for number in 0..count {
            let reconnect_after = if number % 2 == 0 { u64::MAX } else { 200 + number as u64 };
            let mut follower = Follower {
                http: self.http.clone(),
                url: format!("{}/v1/events?after=0", self.base),
                last: 0,
                last_event: self.last_event.subscribe(),
                events: self.events.clone(),
            };
            self.followers.spawn(async move { while follower.follow(reconnect_after).await {} });
        }
    }

    /// Fails if a task has failed or ended.
    fn check_tasks(&mut self) {
        for tasks in [&mut self.callers, &mut self.clients, &mut self.followers] {
            if let Some(ended) = tasks.try_join_next() {
                propagate(ended);
                panic!("a task of the load ended early");
            }
        }
    }

    /// Ends the load, the followers once they have every event. Returns the number of calls, and
    /// of events that the followers received.
    async fn stop(self, server: &Server) -> (u64, u64) {
        self.callers_stopped.store(true, Ordering::Relaxed);
        join("the callers", self.callers).await;
        self.clients_stopped.store(true, Ordering::Relaxed);
        join("the clients", self.clients).await;
        let last_event = last_event(server);
        self.last_event.send_replace(Some(last_event));
        let followers = self.followers.len() as u64;
        join("the followers", self.followers).await;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        assert_eq!(read(&self.events), followers * last_event, "each follower has each event");
        (read(&self.calls), read(&self.events))
    }
}

/// Follows all events, and fails at the first one that is missing or repeated.
struct Follower {
    http: reqwest::Client,
    url: String,
    /// The last event that it received.
    last: u64,
    last_event: watch::Receiver<Option<u64>>,
    events: Arc<AtomicU64>,
}

impl Follower {
    /// Connects and receives this many events. Returns false at the last event of the load.
    async fn follow(&mut self, count: u64) -> bool {
        let request = self.http.get(&self.url).timeout(Duration::from_secs(3_600));
        let answer = request.header("last-event-id", self.last).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let mut chunks = answer.bytes_stream();
        let (mut received, mut seen) = (Vec::new(), 0);
        loop {
            if *self.last_event.borrow_and_update() == Some(self.last) {
                return false;
            }
            let chunk = tokio::select! {
                chunk = chunks.next() => chunk.expect("the server ended the stream").unwrap(),
                changed = self.last_event.changed() => {
                    changed.unwrap();
                    continue;
                }
            };
            received.extend_from_slice(&chunk);
            while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = received.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                let Some(id) = line.strip_prefix("id: ") else { continue };
                let id: u64 = id.trim().parse().unwrap();
                assert_eq!(id, self.last + 1, "the next event");
                (self.last, seen) = (id, seen + 1);
                self.events.fetch_add(1, Ordering::Relaxed);
                if seen >= count {
                    return true;
                }
            }
        }
    }
}

/// Returns the number of the last event in the database.
fn last_event(server: &Server) -> u64 {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let database = Connection::open_with_flags(server.database(), flags).unwrap();
    let number = database.query_row("SELECT max(number) FROM events", [], |row| row.get(0));
    number.map(i64::cast_unsigned).unwrap()
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
    let mut load = Load::new(&server);
    load.add_client();
    load.add_callers(8, 50_000, Duration::from_millis(10));
    load.add_followers(16);
    let (began, mut longest) = (Instant::now(), 0);
    while began.elapsed() < lasts {
        longest = longest.max(wal_length(&server));
        assert!(longest <= MAX_WAL, "{longest} bytes");
        load.check_tasks();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (calls, events) = load.stop(&server).await;
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

/// Returns the median of some samples.
fn median(samples: &[i64]) -> i64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

/// The memory, the open files and the WAL of the server under load, in equal intervals.
#[derive(Default)]
struct Samples {
    memory_kib: Vec<i64>,
    files: Vec<usize>,
    longest_wal: u64,
}

impl Samples {
    /// Takes 15 samples a minute, or 200 in the short form.
    async fn take(load: &mut Load, server: &Server, lasts: Duration) -> Self {
        let mut samples = Self::default();
        let pause = if is_long() { Duration::from_secs(4) } else { lasts / 200 };
        let began = Instant::now();
        while began.elapsed() < lasts {
            samples.memory_kib.push(resident_kib(server));
            samples.files.push(open_files(server));
            samples.longest_wal = samples.longest_wal.max(wal_length(server));
            load.check_tasks();
            tokio::time::sleep(pause).await;
        }
        samples
    }

    /// Returns the greatest median of a third of the samples less that of the first third. Medians
    /// ignore moments in which the allocator has not returned pages: single minutes differ by
    /// 1.5 MiB and more in either direction, without a trend.
    fn growth_kib(&self) -> i64 {
        let third = self.memory_kib.len().div_ceil(3);
        let medians: Vec<i64> = self.memory_kib.chunks(third).map(median).collect();
        medians.iter().max().unwrap() - medians[0]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_and_files_do_not_grow_under_a_steady_load() {
    // The warm-up fills the caches of SQLite's connections, of which some are rarely used.
    let (warm_up, lasts) = (duration(4, 600), duration(8, 900));
    let mut server = start_server().await;
    let mut load = Load::new(&server);
    load.add_client();
    // Up to 160 calls per second.
    load.add_callers(8, 2_000, Duration::from_millis(50));
    load.add_followers(8);
    Samples::take(&mut load, &server, warm_up).await;
    let warm_up_calls = load.calls.load(Ordering::Relaxed);
    let samples = Samples::take(&mut load, &server, lasts).await;
    let (calls, events) = load.stop(&server).await;
    let calls = calls - warm_up_calls;
    let growth = samples.growth_kib();
    let (fewest, most) =
        (*samples.files.iter().min().unwrap(), *samples.files.iter().max().unwrap());
    let minutes: Vec<i64> = samples.memory_kib.chunks_exact(15).map(median).collect();
    eprintln!(
        "{} s: {calls} calls after the warm-up, {events} events to 8 followers; memory {minutes:?} KiB, \
         {growth:+} KiB; {fewest} to {most} open files; the WAL had up to {:.1} MiB",
        lasts.as_secs(),
        samples.longest_wal as f64 / 1_048_576.0,
    );
    if is_long() {
        // The medians of the first and the last third are two thirds of the calls apart.
        let leaked_kib = calls * 2 / 3 * LEAK_BYTES / 1_024;
        assert!(leaked_kib > MAX_GROWTH_KIB as u64, "{calls} calls are too few to find a leak");
    }
    let max_growth = if is_long() { MAX_GROWTH_KIB } else { MAX_SHORT_GROWTH_KIB };
    assert!(growth <= max_growth, "the memory grew by {growth} KiB");
    // Followers that reconnect are counted twice for a moment.
    assert!(most - fewest <= 16, "{fewest} to {most} open files");
    assert!(samples.longest_wal <= MAX_WAL, "{} bytes", samples.longest_wal);
    assert!(calls > lasts.as_secs() * 5, "{calls} calls");
    assert!(server.stop().await.success());
    check(&server.data_dir());
}
