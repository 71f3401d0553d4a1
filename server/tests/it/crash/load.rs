//! kill -9 under load, at random moments, repeatedly on the same data.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

use super::SeededRng;
use super::clients::ToolClients;
use crate::support::process::{Server, check, text};

const INVOKERS: usize = 24;
const KILLS: usize = 8;
/// The load continues after the last kill until this many calls were acknowledged.
const MIN_CALLS: usize = 3_000;
const TIMEOUT_MS: u64 = 8_000;
/// Allowed delay between the deadline and the end of a call: the server may be down then.
const SLACK_MS: u64 = 5_000;

/// A call whose ticket an invoker received.
#[derive(Clone)]
struct AcknowledgedCall {
    id: String,
    tool: &'static str,
    body: Value,
    /// The call as an invoker saw it after its end.
    seen: Option<Value>,
}

/// State shared by the invokers.
#[derive(Clone)]
struct LoadState {
    http: Client,
    base: String,
    acked: Arc<Mutex<Vec<AcknowledgedCall>>>,
    count: Arc<AtomicUsize>,
    enough: Arc<AtomicBool>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_under_load_lose_no_acknowledged_call() {
    let mut rng = SeededRng::from_env();
    let mut server = Server::ready().await;
    let clients = ToolClients::register(&server).await;
    clients.connect_all();
    let load = LoadState {
        http: server.http.clone(),
        base: server.url(""),
        acked: Arc::default(),
        count: Arc::default(),
        enough: Arc::default(),
    };
    let invokers: Vec<_> = (0..INVOKERS)
        .map(|number| tokio::spawn(invoke_repeatedly(load.clone(), number, rng.split())))
        .collect();
    let began = Instant::now();
    let mut ready_ms = Vec::new();
    for kill in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(rng.from(150..900))).await;
        server.kill();
        if kill % 3 == 2 {
            // Kill it again during recovery.
            server.spawn();
            tokio::time::sleep(Duration::from_millis(rng.from(20..250))).await;
            server.kill();
        }
        check(&server.data_dir());
        ready_ms.push(server.start().await.as_millis());
    }
    while load.count.load(Ordering::Relaxed) < MIN_CALLS {
        assert!(began.elapsed() < Duration::from_secs(60), "the load makes no progress");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    load.enough.store(true, Ordering::Relaxed);
    for invoker in invokers {
        invoker.await.unwrap();
    }
    let acked = load.acked.lock().unwrap().clone();
    let rate = acked.len() as f64 / began.elapsed().as_secs_f64();
    eprintln!("{} calls acknowledged, {rate:.0}/s; ready after {ready_ms:?} ms", acked.len());
    let ended = assert_all_end(&server, &acked).await;
    assert_keys_return_their_tickets(&server, &acked).await;
    clients.disconnect().await;
    assert_execution_counts(&ended, &clients.executed());
    assert_no_open_calls(&server).await;
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!(stored.open, 0);
    for call in &acked {
        assert!(stored.calls.contains_key(&call.id), "{} is lost", call.id);
    }
    eprintln!(
        "{} stored: {} SUCCEEDED, {} FAILED, {} TIMEOUT",
        stored.calls.len(),
        stored.count("SUCCEEDED"),
        stored.count("FAILED"),
        stored.count("TIMEOUT"),
    );
}

/// Asserts that every call ends by its deadline, including calls whose invoker received no answer
/// because of a kill.
async fn assert_no_open_calls(server: &Server) {
    let until = Instant::now() + Duration::from_millis(TIMEOUT_MS + SLACK_MS);
    loop {
        let metrics = server.http.get(server.url("/metrics")).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        let none = |state: &&str| {
            metrics.contains(&format!("toolcrib_tool_calls_open{{state=\"{state}\"}} 0\n"))
        };
        if ["running", "queue", "parked", "retry"].iter().all(none) {
            return;
        }
        assert!(Instant::now() < until, "{metrics}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Calls tools until there were enough, even while the server is down.
async fn invoke_repeatedly(load: LoadState, invoker: usize, mut rng: SeededRng) {
    for number in 0.. {
        if load.enough.load(Ordering::Relaxed) {
            return;
        }
        let (tool, args) = match rng.from(0..5) {
            0 => ("probe.once", json!({ "n": number })),
            1 => ("probe.read", json!({ "n": number })),
            _ => ("calculation.eval", json!({ "expression": format!("{number} * 3") })),
        };
        let run_id = format!("run_{invoker}");
        let mut body = json!({ "run_id": run_id, "args": args, "timeout_ms": TIMEOUT_MS });
        if rng.from(0..3) == 0 {
            body["idempotency_key"] = json!(format!("key {invoker}/{number}"));
        }
        if rng.from(0..2) == 0 {
            body["wait_ms"] = json!(rng.from(50..500));
        }
        if let Some(mut acked) = invoke(&load, tool, body).await {
            if acked.seen.is_none() && rng.from(0..2) == 0 {
                acked.seen = fetch_if_ended(&load, &acked.id).await;
            }
            load.acked.lock().unwrap().push(acked);
            load.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Makes one call. With an idempotency key, it repeats the request until there is an answer;
/// without one, it gives up after the first failure.
async fn invoke(load: &LoadState, tool: &'static str, body: Value) -> Option<AcknowledgedCall> {
    let url = format!("{}/v1/tools/{tool}/invoke", load.base);
    loop {
        let answer = match load.http.post(&url).json(&body).send().await {
            Ok(answer) => match (answer.status(), answer.json::<Value>().await) {
                (StatusCode::ACCEPTED, Ok(answer)) => Some(answer),
                (StatusCode::ACCEPTED | StatusCode::SERVICE_UNAVAILABLE, _) => None,
                (status, answer) => panic!("{tool} was answered {status}: {answer:?}"),
            },
            Err(_) => None,
        };
        if let Some(answer) = answer {
            let id = text(&answer, "tool_call_id");
            let seen = Some(answer).filter(has_ended);
            return Some(AcknowledgedCall { id, tool, body, seen });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        if body["idempotency_key"].is_null() {
            return None;
        }
    }
}

async fn fetch_if_ended(load: &LoadState, id: &str) -> Option<Value> {
    let url = format!("{}/v1/tool_calls/{id}", load.base);
    let answer = load.http.get(url).send().await.ok()?;
    let status = answer.status();
    let body = answer.json::<Value>().await.ok()?;
    assert_eq!(status, StatusCode::OK, "{id} was acknowledged: {body}");
    Some(body).filter(has_ended)
}

fn has_ended(call: &Value) -> bool {
    let ends = ["SUCCEEDED", "FAILED", "TIMEOUT", "CANCELED"];
    call["status"].as_str().is_some_and(|status| ends.contains(&status))
}

/// Asserts that every call ends in time, with the right result, and never changes after its end.
async fn assert_all_end(
    server: &Server,
    acked: &[AcknowledgedCall],
) -> Vec<(AcknowledgedCall, Value)> {
    let wait_ms = TIMEOUT_MS + SLACK_MS;
    let ended: Vec<(AcknowledgedCall, Value)> = futures::stream::iter(acked.iter().cloned())
        .map(async |call| {
            let ended = server.call(&call.id, wait_ms).await;
            (call, ended)
        })
        .buffer_unordered(64)
        .collect()
        .await;
    for (call, ended) in &ended {
        assert!(has_ended(ended), "{} after its deadline: {ended}", call.id);
        if let Some(seen) = &call.seen {
            assert_eq!(seen, ended, "{} changed after its end", call.id);
        }
        let time_ms = |field: &str| ended[field].as_u64().unwrap();
        assert!(time_ms("completed_at_ms") <= time_ms("deadline_at_ms") + SLACK_MS, "{ended}");
        let args = &call.body["args"];
        match (call.tool, ended["status"].as_str().unwrap()) {
            ("calculation.eval", "SUCCEEDED") => {
                let (number, _) = args["expression"].as_str().unwrap().split_once(' ').unwrap();
                let number: u64 = number.parse().unwrap();
                assert_eq!(ended["result"]["result"], json!(number * 3), "{ended}");
            }
            (_, "SUCCEEDED") => assert_eq!(ended["result"], json!({ "echo": args }), "{ended}"),
            // Acknowledged, but the client did not receive the confirmation: no retry is allowed.
            ("probe.once", "TIMEOUT") => {
                let message = ended["error"]["message"].as_str().unwrap();
                assert!(message.contains("may have taken effect"), "{ended}");
            }
            // Every attempt was interrupted by a kill, so the server gave up.
            ("calculation.eval", "FAILED") => assert_eq!(ended["attempt"], 3, "{ended}"),
            _ => panic!("{ended}"),
        }
    }
    ended
}

async fn assert_keys_return_their_tickets(server: &Server, acked: &[AcknowledgedCall]) {
    let keyed = acked.iter().filter(|call| !call.body["idempotency_key"].is_null());
    let mut count = 0;
    let mut again = futures::stream::iter(keyed.cloned())
        .map(async |call| {
            let mut body = call.body.clone();
            body.as_object_mut().unwrap().remove("wait_ms");
            let answer = server.invoking(call.tool, &body).send().await.unwrap();
            assert_eq!(answer.headers()["idempotent-replayed"], "true", "{}", call.id);
            (call.id.clone(), answer.json::<Value>().await.unwrap())
        })
        .buffer_unordered(32);
    while let Some((id, answer)) = again.next().await {
        assert_eq!(answer["tool_call_id"], json!(id));
        count += 1;
    }
    eprintln!("{count} keys used again gave the same tickets");
    assert!(count > 100);
}

fn assert_execution_counts(ended: &[(AcknowledgedCall, Value)], executed: &HashMap<String, u32>) {
    let (mut once, mut again) = (0, 0);
    for (call, ended) in ended {
        let times = executed.get(&call.id).copied().unwrap_or(0);
        match call.tool {
            "probe.once" => {
                assert!(times <= 1, "{} was executed {times} times", call.id);
                let succeeded = ended["status"] == "SUCCEEDED";
                assert!(!succeeded || times == 1, "{} succeeded without execution", call.id);
                once += 1;
            }
            "probe.read" => {
                assert!(times >= 1, "{} succeeded without execution", call.id);
                again += usize::from(times > 1);
            }
            _ => {}
        }
    }
    eprintln!("{once} irreversible calls, none executed twice; {again} reading ones were");
}
