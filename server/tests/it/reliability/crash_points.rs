//! T1: kill -9 at chosen system calls. A scenario of five calls runs until strace kills the server;
//! after a restart the same clients repeat what was not answered. Each call must have its one
//! outcome, and an irreversible one must have been executed once.
//!
//! Kills at `pwrite64` hit the server before and within a commit, kills at `fdatasync` between a
//! commit and its response, and kills at `writev` and `sendto` before it answers a caller, a client
//! or, with PostgreSQL, between two statements.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::by_form;
use crate::support::database::Database;
use crate::support::faults::{arm_kill, can_trace};
use crate::support::process::{PATIENCE, Server, check, eventually, text};

/// Time in which the restarted server continues an acknowledged call.
const CONTINUED_WITHIN: Duration = Duration::from_secs(2);

/// Length of a preallocated WAL: the server writes 20 MiB at least.
const PREALLOCATED: u64 = 16 << 20;

/// The server was killed before it answered.
struct Killed;

type Answered<T> = Result<T, Killed>;

/// The clients of the scenario, which outlive the server.
#[derive(Default)]
struct Scenario {
    /// The ticket of each idempotency key, once it was acknowledged.
    tickets: HashMap<&'static str, String>,
    /// Number of executions of the irreversible call.
    executions: u32,
    /// Steps that were answered.
    steps: usize,
}

impl Scenario {
    async fn send(
        &self,
        server: &Server,
        path: &str,
        body: Option<&Value>,
    ) -> Answered<(StatusCode, Value)> {
        let request = match body {
            Some(body) => server.http.post(server.url(path)).json(body),
            None => server.http.get(server.url(path)),
        };
        let answer = request.send().await.map_err(|_| Killed)?;
        let status = answer.status();
        Ok((status, answer.json().await.map_err(|_| Killed)?))
    }

    async fn register(&self, server: &Server) -> Answered<()> {
        let backoff = json!({ "initial_ms": 20, "factor": 1.0, "max_ms": 20, "jitter": 0.0 });
        let tool = |name: &str, effect: &str| json!({ "name": name, "effect": effect, "policy": { "backoff": backoff } });
        for (client, tool) in [
            ("payer", tool("probe.once", "irreversible")),
            ("reader", tool("probe.flaky", "read")),
            ("absent", tool("probe.absent", "read")),
        ] {
            let body = json!({ "client_id": client, "tools": [tool] });
            let (status, answer) =
                self.send(server, "/internal/tools/register", Some(&body)).await?;
            assert_eq!(status, StatusCode::OK, "{answer}");
        }
        Ok(())
    }

    /// Makes a call, or finds it by its key. An acknowledged ticket never changes.
    async fn invoke(
        &mut self,
        server: &Server,
        key: &'static str,
        tool: &str,
        args: Value,
        timeout_ms: u64,
    ) -> Answered<String> {
        let body = json!({ "run_id": "run_points", "args": args, "idempotency_key": key,
            "timeout_ms": timeout_ms });
        let path = format!("/v1/tools/{tool}/invoke");
        let (status, answer) = self.send(server, &path, Some(&body)).await?;
        assert_eq!(status, StatusCode::ACCEPTED, "{key}: {answer}");
        let id = text(&answer, "tool_call_id");
        let known = self.tickets.entry(key).or_insert_with(|| id.clone());
        assert_eq!(*known, id, "the key {key} gave another ticket");
        self.steps += 1;
        Ok(id)
    }

    /// Waits for the end of a call.
    async fn ended(&mut self, server: &Server, id: &str) -> Answered<Value> {
        let path = format!("/v1/tool_calls/{id}?wait_ms=10000");
        let (status, call) = self.send(server, &path, None).await?;
        assert_eq!(status, StatusCode::OK, "{id} was acknowledged: {call}");
        let is_open = matches!(call["status"].as_str().unwrap(), "PENDING" | "RUNNING");
        assert!(!is_open, "{id} does not end: {call}");
        self.steps += 1;
        Ok(call)
    }

    async fn is_open(&self, server: &Server, id: &str) -> Answered<bool> {
        let (status, call) = self.send(server, &format!("/v1/tool_calls/{id}"), None).await?;
        assert_eq!(status, StatusCode::OK, "{id} was acknowledged: {call}");
        Ok(matches!(call["status"].as_str().unwrap(), "PENDING" | "RUNNING"))
    }

    async fn submit(&mut self, server: &Server, id: &str, body: Value) -> Answered<StatusCode> {
        let path = format!("/internal/tool_calls/{id}/submit");
        let (status, answer) = self.send(server, &path, Some(&body)).await?;
        let expected = [StatusCode::OK, StatusCode::CONFLICT];
        assert!(expected.contains(&status), "{path}: {status} {answer}");
        self.steps += 1;
        Ok(status)
    }

    /// A call of a built-in tool.
    async fn evaluate(&mut self, server: &Server) -> Answered<()> {
        let args = json!({ "expression": "6*7" });
        let id = self.invoke(server, "evaluated", "calculation.eval", args, 60_000).await?;
        let call = self.ended(server, &id).await?;
        assert_eq!((&call["status"], &call["result"]["result"]), (&json!("SUCCEEDED"), &json!(42)));
        Ok(())
    }

    /// An irreversible call, executed after its acknowledgement was answered.
    async fn pay(&mut self, server: &Server) -> Answered<()> {
        let id = self.invoke(server, "paid", "probe.once", json!({ "sum": 7 }), 60_000).await?;
        if self.executions == 0 {
            let path = "/internal/ingress/poll?client_id=payer&wait_ms=500&ack=explicit";
            let (_, polled) = self.send(server, path, None).await?;
            // Without a request, the acknowledgement was stored and its answer lost.
            if let Some(request) = polled["requests"].get(0) {
                assert_eq!(request["tool_call_id"], id.as_str());
            }
            let ack = json!({ "client_id": "payer", "attempt": 1 });
            let path = format!("/internal/tool_calls/{id}/ack");
            let (status, answer) = self.send(server, &path, Some(&ack)).await?;
            assert_eq!(status, StatusCode::OK, "{answer}");
            self.executions += 1;
        }
        let report = json!({ "status": "SUCCEEDED", "result": { "paid": 7 },
            "client_id": "payer", "attempt": 1 });
        assert_eq!(self.submit(server, &id, report).await?, StatusCode::OK, "the same result");
        assert_eq!(self.ended(server, &id).await?["result"], json!({ "paid": 7 }));
        Ok(())
    }

    /// A reading call whose first attempt fails.
    async fn retry(&mut self, server: &Server) -> Answered<()> {
        let id = self.invoke(server, "retried", "probe.flaky", json!({}), 60_000).await?;
        while self.is_open(server, &id).await? {
            let path = "/internal/ingress/poll?client_id=reader&wait_ms=500&ack=explicit";
            let (_, polled) = self.send(server, path, None).await?;
            let Some(request) = polled["requests"].get(0) else { continue };
            let mut report = json!({ "client_id": "reader", "attempt": request["attempt"] });
            match request["attempt"].as_u64() {
                Some(1) => {
                    report["status"] = "FAILED".into();
                    report["error"] = json!({ "message": "not yet", "retryable": true });
                }
                _ => report["status"] = "SUCCEEDED".into(),
            }
            self.submit(server, &id, report).await?;
        }
        let call = self.ended(server, &id).await?;
        assert_eq!((&call["status"], &call["attempt"]), (&json!("SUCCEEDED"), &json!(2)), "{call}");
        Ok(())
    }

    async fn cancel(&mut self, server: &Server) -> Answered<()> {
        let id = self.invoke(server, "canceled", "probe.absent", json!({}), 60_000).await?;
        let path = format!("/v1/tool_calls/{id}/cancel");
        let (status, answer) = self.send(server, &path, Some(&json!({}))).await?;
        // After a lost answer the call is canceled already.
        assert!(status == StatusCode::OK || status == StatusCode::CONFLICT, "{answer}");
        assert_eq!(self.ended(server, &id).await?["status"], "CANCELED");
        Ok(())
    }

    async fn time_out(&mut self, server: &Server) -> Answered<()> {
        let id = self.invoke(server, "timed out", "probe.absent", json!({}), 200).await?;
        assert_eq!(self.ended(server, &id).await?["status"], "TIMEOUT");
        Ok(())
    }

    /// Runs all steps. Repeated steps find the calls of an earlier run.
    async fn run(&mut self, server: &Server) -> Answered<()> {
        self.register(server).await?;
        self.evaluate(server).await?;
        self.pay(server).await?;
        self.retry(server).await?;
        self.cancel(server).await?;
        self.time_out(server).await
    }
}

/// Kills a server at one point, restarts it and completes the scenario. Returns false if the
/// scenario ended before the point.
async fn check_point(mut server: Server, syscall: &str, count: usize) -> bool {
    server.start().await;
    wait_for_preallocation(&server).await;
    assert!(arm_kill(&server, syscall, count).await);
    let mut scenario = Scenario::default();
    if scenario.run(&server).await.is_ok() {
        server.kill();
        return false;
    }
    // The process ends with the connection, or a moment later.
    server.ended(PATIENCE).await;
    let steps = scenario.steps;
    server.start().await;
    let ready = Instant::now();
    let completed = scenario.run(&server).await;
    let took = ready.elapsed();
    assert!(completed.is_ok(), "{syscall} {count}: the second server does not answer");
    assert_eq!(scenario.executions, 1, "{syscall} {count}");
    // Nothing waits for a timer of its own: the steps wait 500 ms for work at most.
    assert!(took < CONTINUED_WITHIN * 3, "{syscall} {count}: it took {took:?}");
    assert_histories(&server, &scenario).await;
    assert!(server.stop().await.success());
    if server.database().exists() {
        let stored = check(&server.data_dir());
        assert_eq!((stored.open, stored.calls.len()), (0, 5), "{syscall} {count}: {stored:?}");
    }
    eprintln!("{syscall} {count}: killed after {steps} steps, completed {took:?} after the start");
    true
}

/// Asserts that there are no other calls than those of the scenario, and that each has one end.
async fn assert_histories(server: &Server, scenario: &Scenario) {
    let listed = server.http.get(server.url("/v1/tool_calls?limit=200")).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    assert_eq!(listed["tool_calls"].as_array().unwrap().len(), 5, "{listed}");
    for (key, id) in &scenario.tickets {
        let events = server.url(&format!("/v1/tool_calls/{id}/events"));
        let events = server.http.get(events).send().await.unwrap().text().await.unwrap();
        let kinds = events.lines().filter_map(|line| line.strip_prefix("event: tool.call."));
        let is_end = |kind: &&str| matches!(*kind, "finished" | "failed" | "timeout" | "canceled");
        assert_eq!(kinds.filter(is_end).count(), 1, "{key}: {events}");
    }
}

/// Waits until the server has written the zeros behind its WAL, which would count as points.
async fn wait_for_preallocation(server: &Server) {
    if !server.database().exists() {
        return;
    }
    let wal = server.data_dir().join("toolcrib.db-wal");
    eventually("the WAL is preallocated", PATIENCE, || async {
        std::fs::metadata(&wal).is_ok_and(|file| file.len() >= PREALLOCATED).then_some(())
    })
    .await;
}

/// Checks points of one system call, every `step`-th in the long form, until one lies behind the
/// end of the scenario.
async fn check_points(syscall: &str, short: &[usize], step: usize) {
    if !can_trace() {
        return;
    }
    let all: Vec<usize> = (1..1_000).step_by(step).collect();
    let mut checked = 0;
    for count in by_form(short, &all) {
        let server = Server::new().variable("TOKIO_WORKER_THREADS", "1");
        if !check_point(server, syscall, *count).await {
            break;
        }
        checked += 1;
    }
    eprintln!("{checked} points at {syscall}");
    assert!(checked > 0, "no point at {syscall} was reached");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_a_write_loses_no_acknowledged_call() {
    check_points("pwrite64", &[8, 40, 75], 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_a_flush_loses_no_acknowledged_call() {
    check_points("fdatasync", &[4, 7, 12], 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_before_an_answer_loses_no_acknowledged_call() {
    check_points("writev", &[5, 9, 14], 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_between_statements_loses_no_acknowledged_call_with_postgresql() {
    if std::env::var_os("TOOLCRIB_TEST_QUICK").is_some() || !can_trace() {
        return;
    }
    let all: Vec<usize> = (1..600).step_by(3).collect();
    let mut checked = 0;
    for count in by_form(&[40, 90][..], &all) {
        let Some(database) = Database::new().await else { return };
        let server =
            Server::new().with("STORE__URL", &database.url).variable("TOKIO_WORKER_THREADS", "1");
        let goes_on = check_point(server, "sendto", *count).await;
        database.drop().await;
        if !goes_on {
            break;
        }
        checked += 1;
    }
    assert!(checked > 0, "no point was reached");
}
