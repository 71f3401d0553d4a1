//! kill -9 under load, at moments thrown by dice, again and again on the same data.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

use super::Dice;
use super::provider::Providers;
use crate::support::process::{Server, check, text};

const INVOKERS: usize = 24;
const KILLS: usize = 8;
/// The load goes on after the last kill until so many calls were acknowledged.
const AT_LEAST: usize = 3_000;
const TIMEOUT_MS: u64 = 8_000;
/// How much later than its deadline a call may end: the server may be down then.
const SLACK_MS: u64 = 5_000;

/// A ticket that somebody was given.
#[derive(Clone)]
struct Acked {
    id: String,
    tool: &'static str,
    body: Value,
    /// The call as somebody saw it after its end.
    seen: Option<Value>,
}

/// Everything the invokers have been told.
#[derive(Clone)]
struct Notes {
    http: Client,
    base: String,
    acked: Arc<Mutex<Vec<Acked>>>,
    count: Arc<AtomicUsize>,
    enough: Arc<AtomicBool>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_under_load_it_loses_nothing_it_acknowledged() {
    let mut dice = Dice::thrown();
    let mut server = Server::ready().await;
    let providers = Providers::registered(&server).await;
    providers.connect_all();
    let notes = Notes {
        http: server.http.clone(),
        base: server.url(""),
        acked: Arc::default(),
        count: Arc::default(),
        enough: Arc::default(),
    };
    let invokers: Vec<_> = (0..INVOKERS)
        .map(|number| tokio::spawn(invoke_on(notes.clone(), number, dice.split())))
        .collect();
    let began = Instant::now();
    let mut ready_ms = Vec::new();
    for kill in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(dice.from(150..900))).await;
        server.kill();
        if kill % 3 == 2 {
            // Once more while it is taking up what it found.
            server.spawn();
            tokio::time::sleep(Duration::from_millis(dice.from(20..250))).await;
            server.kill();
        }
        check(&server.data_dir());
        ready_ms.push(server.start().await.as_millis());
    }
    while notes.count.load(Ordering::Relaxed) < AT_LEAST {
        assert!(began.elapsed() < Duration::from_secs(60), "the load does not get on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    notes.enough.store(true, Ordering::Relaxed);
    for invoker in invokers {
        invoker.await.unwrap();
    }
    let acked = notes.acked.lock().unwrap().clone();
    let rate = acked.len() as f64 / began.elapsed().as_secs_f64();
    eprintln!("{} calls acknowledged, {rate:.0}/s; ready after {ready_ms:?} ms", acked.len());
    let ended = all_end(&server, &acked).await;
    same_key_same_ticket(&server, &acked).await;
    providers.disconnect().await;
    executed_as_often_as_allowed(&ended, &providers.executed());
    nothing_stays_open(&server).await;
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

/// Also what nobody was told of, because the server was killed before it could answer, ends by its
/// deadline.
async fn nothing_stays_open(server: &Server) {
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

/// Calls tools until there were enough, whether the server is there or not.
async fn invoke_on(notes: Notes, invoker: usize, mut dice: Dice) {
    for number in 0.. {
        if notes.enough.load(Ordering::Relaxed) {
            return;
        }
        let (tool, args) = match dice.from(0..5) {
            0 => ("probe.once", json!({ "n": number })),
            1 => ("probe.read", json!({ "n": number })),
            _ => ("calculation.eval", json!({ "expression": format!("{number} * 3") })),
        };
        let run_id = format!("run_{invoker}");
        let mut body = json!({ "run_id": run_id, "args": args, "timeout_ms": TIMEOUT_MS });
        if dice.from(0..3) == 0 {
            body["idempotency_key"] = json!(format!("key {invoker}/{number}"));
        }
        if dice.from(0..2) == 0 {
            body["wait_ms"] = json!(dice.from(50..500));
        }
        if let Some(mut acked) = invoke(&notes, tool, body).await {
            if acked.seen.is_none() && dice.from(0..2) == 0 {
                acked.seen = look(&notes, &acked.id).await;
            }
            notes.acked.lock().unwrap().push(acked);
            notes.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One call. Who has a key asks again until there is an answer; who has none takes no answer for
/// an answer.
async fn invoke(notes: &Notes, tool: &'static str, body: Value) -> Option<Acked> {
    let url = format!("{}/v1/tools/{tool}/invoke", notes.base);
    loop {
        let answer = match notes.http.post(&url).json(&body).send().await {
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
            return Some(Acked { id, tool, body, seen });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        if body["idempotency_key"].is_null() {
            return None;
        }
    }
}

async fn look(notes: &Notes, id: &str) -> Option<Value> {
    let url = format!("{}/v1/tool_calls/{id}", notes.base);
    let answer = notes.http.get(url).send().await.ok()?;
    let status = answer.status();
    let body = answer.json::<Value>().await.ok()?;
    assert_eq!(status, StatusCode::OK, "{id} was acknowledged: {body}");
    Some(body).filter(has_ended)
}

fn has_ended(call: &Value) -> bool {
    let ends = ["SUCCEEDED", "FAILED", "TIMEOUT", "CANCELED"];
    call["status"].as_str().is_some_and(|status| ends.contains(&status))
}

/// Every ticket reaches its end in time, with the right result, and stays what it was seen to be.
async fn all_end(server: &Server, acked: &[Acked]) -> Vec<(Acked, Value)> {
    let wait_ms = TIMEOUT_MS + SLACK_MS;
    let ended: Vec<(Acked, Value)> = futures::stream::iter(acked.iter().cloned())
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
            assert_eq!(seen, ended, "{} is not what it was", call.id);
        }
        let at = |field: &str| ended[field].as_u64().unwrap();
        assert!(at("completed_at_ms") <= at("deadline_at_ms") + SLACK_MS, "{ended}");
        let args = &call.body["args"];
        match (call.tool, ended["status"].as_str().unwrap()) {
            ("calculation.eval", "SUCCEEDED") => {
                let (number, _) = args["expression"].as_str().unwrap().split_once(' ').unwrap();
                let number: u64 = number.parse().unwrap();
                assert_eq!(ended["result"]["result"], json!(number * 3), "{ended}");
            }
            (_, "SUCCEEDED") => assert_eq!(ended["result"], json!({ "echo": args }), "{ended}"),
            // Taken, and the taker was never told so: nobody may try it again.
            ("probe.once", "TIMEOUT") => {
                let message = ended["error"]["message"].as_str().unwrap();
                assert!(message.contains("may have taken effect"), "{ended}");
            }
            // It brought the process down each time, as far as anybody can know.
            ("calculation.eval", "FAILED") => assert_eq!(ended["attempt"], 3, "{ended}"),
            _ => panic!("{ended}"),
        }
    }
    ended
}

async fn same_key_same_ticket(server: &Server, acked: &[Acked]) {
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

fn executed_as_often_as_allowed(ended: &[(Acked, Value)], executed: &HashMap<String, u32>) {
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
