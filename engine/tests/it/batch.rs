//! Tests of batches as an embedding program uses them: concurrency, and the outcome of each entry.

mod answers;
mod later;
mod media;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Barrier, Notify};
use toolcrib::calls::CallQuery;
use toolcrib::calls::{BatchEntryResult, BatchEntryState, BatchMode};
use toolcrib::domain::fault::Code;
use toolcrib::ports::clock::ManualClock;
use toolcrib::{Batch, BatchAnswer, Caller, Effect, Engine, Fault, FnTool, Json, Status};

#[derive(Deserialize, JsonSchema)]
struct Numbered {
    #[serde(default)]
    n: usize,
}

fn caller() -> Caller {
    Caller::local("default")
}

/// A tool that notes when it starts and ends.
fn noting_tool(name: &'static str, effect: Effect, notes: &Arc<Mutex<Vec<String>>>) -> FnTool {
    let notes = notes.clone();
    FnTool::new(name, "Notes", move |args: Numbered| {
        let notes = notes.clone();
        async move {
            notes.lock().push(format!("+{}", args.n));
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            notes.lock().push(format!("-{}", args.n));
            Ok::<_, Fault>(args.n)
        }
    })
    .effect(effect)
}

/// A tool that never ends by itself.
fn endless_tool(name: &str) -> FnTool {
    FnTool::new(name, "Never ends", |_: Numbered| async {
        std::future::pending::<Result<u32, Fault>>().await
    })
    .effect(Effect::Read)
}

/// A tool that fails for odd numbers.
fn even_only_tool() -> FnTool {
    FnTool::new("t.picky", "Fails for odd numbers", |args: Numbered| async move {
        if args.n % 2 == 1 { Err(Fault::runtime("odd").retryable(false)) } else { Ok(args.n) }
    })
    .effect(Effect::Read)
}

fn envelope(name: &str, n: usize) -> Value {
    json!({ "call_id": "call_0", "name": name, "args": { "n": n } })
}

fn batch(mode: BatchMode, entries: impl IntoIterator<Item = Value>) -> Batch {
    let entries = entries.into_iter().map(|entry| Json::from_value(&entry)).collect();
    Batch { mode, ..Batch::new("run_1", entries) }
}

async fn run(engine: &Engine, batch: Batch) -> BatchAnswer {
    engine.calls().run_batch(&caller(), batch).await.unwrap()
}

fn numbers(answer: &BatchAnswer) -> Vec<Value> {
    answer.results.iter().map(|r| r.data().map_or(Value::Null, Json::to_value)).collect()
}

fn code(settled: &BatchEntryResult) -> Code {
    settled.error().unwrap().code
}

async fn stored_call_count(engine: &Engine) -> usize {
    let query = CallQuery { limit: 200, ..CallQuery::default() };
    engine.calls().calls(&caller(), query).await.unwrap().calls.len()
}

#[tokio::test]
async fn serial_mode_runs_entries_one_at_a_time_in_request_order() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let engine = Engine::builder().tool(noting_tool("t.read", Effect::Read, &notes));
    let engine = engine.start().await.unwrap();
    let answer =
        run(&engine, batch(BatchMode::Serial, (0..5).map(|n| envelope("t.read", n)))).await;
    assert_eq!(numbers(&answer), [0, 1, 2, 3, 4].map(Value::from));
    let expected: Vec<String> = (0..5).flat_map(|n| [format!("+{n}"), format!("-{n}")]).collect();
    assert_eq!(*notes.lock(), expected);
}

#[tokio::test]
async fn reads_run_concurrently() {
    run_concurrently(8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_reads_run_concurrently_on_several_threads() {
    run_concurrently(100).await;
}

async fn run_concurrently(count: usize) {
    // Each call waits for all the others, so a serial execution would never end.
    let together = Arc::new(Barrier::new(count));
    let meet = FnTool::new("t.meet", "Waits for the others", move |args: Numbered| {
        let together = together.clone();
        async move {
            together.wait().await;
            Ok::<_, Fault>(args.n)
        }
    })
    .effect(Effect::Read);
    let engine = Engine::builder().tool(meet).start().await.unwrap();
    let entries = (0..count).map(|n| envelope("t.meet", n));
    let answer = run(&engine, batch(BatchMode::Parallel, entries)).await;
    let expected: Vec<Value> = (0..count).map(Value::from).collect();
    assert_eq!(numbers(&answer), expected, "in request order");
}

#[tokio::test]
async fn parallel_mode_orders_side_effects_and_does_not_delay_reads() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let read = Arc::new(Notify::new());
    let first = {
        let (read, notes) = (read.clone(), notes.clone());
        FnTool::new("t.first", "Waits until the read has run", move |args: Numbered| {
            let (read, notes) = (read.clone(), notes.clone());
            async move {
                read.notified().await;
                notes.lock().push("first".to_owned());
                Ok::<_, Fault>(args.n)
            }
        })
    };
    let look = FnTool::new("t.look", "Reads", move |args: Numbered| {
        read.notify_one();
        async move { Ok::<_, Fault>(args.n) }
    })
    .effect(Effect::Read);
    let engine = Engine::builder().tool(first).tool(look);
    let engine =
        engine.tool(noting_tool("t.put", Effect::Idempotent, &notes)).start().await.unwrap();
    let requested = [envelope("t.first", 0), envelope("t.put", 1), envelope("t.put", 2)];
    let requested = requested.into_iter().chain([envelope("t.look", 3)]);
    let answer = run(&engine, batch(BatchMode::Parallel, requested)).await;
    assert_eq!(numbers(&answer), [0, 1, 2, 3].map(Value::from));
    assert_eq!(*notes.lock(), ["first", "+1", "-1", "+2", "-2"]);
}

#[tokio::test]
async fn unordered_mode_runs_side_effects_concurrently() {
    let together = Arc::new(Barrier::new(3));
    let meet = FnTool::new("t.write", "Waits for the others", move |args: Numbered| {
        let together = together.clone();
        async move {
            together.wait().await;
            Ok::<_, Fault>(args.n)
        }
    });
    let engine = Engine::builder().tool(meet).start().await.unwrap();
    let answer =
        run(&engine, batch(BatchMode::Unordered, (0..3).map(|n| envelope("t.write", n)))).await;
    assert_eq!(numbers(&answer), [0, 1, 2].map(Value::from));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_parallel_is_never_exceeded() {
    let (now, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counting = |name: &str, effect| {
        let (now, peak) = (now.clone(), peak.clone());
        FnTool::new(name, "Counts", move |_: Numbered| {
            let (now, peak) = (now.clone(), peak.clone());
            async move {
                peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                for _ in 0..50 {
                    tokio::task::yield_now().await;
                }
                now.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Fault>(0)
            }
        })
        .effect(effect)
    };
    let engine = Engine::builder().tool(counting("t.read", Effect::Read));
    let engine = engine.tool(counting("t.write", Effect::Irreversible)).start().await.unwrap();
    for (width, mode) in
        [(3, BatchMode::Parallel), (2, BatchMode::Unordered), (1, BatchMode::Parallel)]
    {
        peak.store(0, Ordering::SeqCst);
        let tools = ["t.read", "t.write"].into_iter().cycle();
        let entries = tools.take(40).map(|tool| envelope(tool, 0));
        let requested = Batch { max_parallel: Some(width), ..batch(mode, entries) };
        let answer = run(&engine, requested).await;
        assert!(answer.results.iter().all(|settled| settled.ok() == Some(true)));
        assert!(peak.load(Ordering::SeqCst) <= width, "{mode:?}");
    }
}

#[tokio::test]
async fn a_failed_or_refused_entry_does_not_affect_the_others() {
    let engine = Engine::builder().tool(even_only_tool()).start().await.unwrap();
    for mode in [BatchMode::Serial, BatchMode::Parallel] {
        let entries = [
            envelope("t.picky", 0),
            envelope("t.picky", 1),
            envelope("t.pick", 2),
            json!({ "name": "t.picky", "args": { "n": "two" } }),
            json!(["nonsense"]),
            json!({ "id": "a", "type": "function",
                    "function": { "name": "t__picky", "arguments": "{\"n\": 2" } }),
            json!({ "name": "t.picky", "timeout_ms": 0 }),
            envelope("t.picky", 8),
        ];
        let answer = run(&engine, batch(mode, entries)).await;
        let oks: Vec<Option<bool>> = answer.results.iter().map(BatchEntryResult::ok).collect();
        let expected = [true, false, false, false, false, false, false, true].map(Some);
        assert_eq!(oks, expected, "{mode:?}");
        let codes: Vec<Code> = answer.results[1..7].iter().map(code).collect();
        let invalid = Code::ValidationError;
        let expected = [Code::RuntimeError, Code::ToolNotFound, invalid, invalid, invalid, invalid];
        assert_eq!(codes, expected, "{mode:?}");
        assert!(answer.results[2].error().unwrap().message.contains("did you mean"));
        assert_eq!(answer.messages.len(), 8);
        let not_json = answer.messages[5].to_value();
        assert_eq!((&not_json["role"], &not_json["tool_call_id"]), (&json!("tool"), &json!("a")));
        assert!(!answer.has_open_calls());
    }
    assert_eq!(
        stored_call_count(&engine).await,
        6,
        "every accepted entry is one call; refused entries are none"
    );
}

#[tokio::test]
async fn a_batch_does_not_wait_for_background_entries() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let engine = Engine::builder().tool(endless_tool("t.slow").background());
    let engine = engine.tool(noting_tool("t.read", Effect::Read, &notes)).start().await.unwrap();
    for mode in [BatchMode::Serial, BatchMode::Parallel] {
        let entries = [
            json!({ "id": "call_0", "type": "function", "function": { "name": "t__slow" } }),
            envelope("t.slow", 1),
            envelope("t.read", 2),
        ];
        let answer = run(&engine, batch(mode, entries)).await;
        assert!(answer.has_open_calls());
        assert_eq!(answer.results[2].ok(), Some(true), "the other entries continue");
        let BatchEntryState::Open(call) = &answer.results[0].state else { panic!() };
        assert_eq!(call.status, Status::Running);
        let message = answer.messages[0].to_value();
        let content: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
        assert_eq!(content["task_id"], call.id.as_str());
        assert!(content["message"].as_str().unwrap().contains("in the background"), "{content}");
        let neutral = answer.messages[1].to_value();
        assert_eq!((&neutral["ok"], &neutral["status"]), (&Value::Null, &json!("pending")));
    }
}

#[tokio::test]
async fn entries_still_running_after_the_wait_are_returned_as_tickets() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let clock = ManualClock::at(1_700_000_000_000);
    let engine = Engine::builder().tool(endless_tool("t.stuck")).tool(endless_tool("t.too"));
    let engine =
        engine.tool(noting_tool("t.read", Effect::Read, &notes)).clock(Arc::new(clock.clone()));
    let engine = engine.start().await.unwrap();
    let entries = [envelope("t.stuck", 0), envelope("t.read", 1), envelope("t.too", 2)];
    let requested = Batch { wait_ms: Some(200), ..batch(BatchMode::Parallel, entries.clone()) };
    let one_ended = async {
        let query = CallQuery { status: Some(Status::Succeeded), limit: 5, ..CallQuery::default() };
        while engine.calls().calls(&caller(), query.clone()).await.unwrap().calls.is_empty() {
            tokio::task::yield_now().await;
        }
        clock.advance(200);
    };
    let (answer, ()) = tokio::join!(run(&engine, requested), one_ended);
    let oks: Vec<Option<bool>> = answer.results.iter().map(BatchEntryResult::ok).collect();
    assert_eq!(oks, [None, Some(true), None]);
    let message = answer.messages[0].to_value();
    assert_eq!(message["tool_call_id"], answer.results[0].call().unwrap().id.as_str());
    // In serial mode only the first call has started; with `later: false` the others never start.
    notes.lock().clear();
    let before = stored_call_count(&engine).await;
    let requested =
        Batch { wait_ms: Some(0), defer_unstarted: false, ..batch(BatchMode::Serial, entries) };
    let answer = run(&engine, requested).await;
    assert_eq!(answer.results[0].ok(), None);
    for late in &answer.results[1..] {
        assert_eq!(
            (late.ok(), code(late), late.call().is_none()),
            (Some(false), Code::Canceled, true)
        );
        let fault = late.error().unwrap();
        assert!(fault.retryable && fault.message.contains("Nothing was done"), "{fault}");
    }
    assert_eq!(stored_call_count(&engine).await, before + 1);
    assert!(notes.lock().is_empty());
}

#[tokio::test]
async fn with_wait_0_entries_start_up_to_max_parallel() {
    let engine = Engine::builder().tool(endless_tool("t.stuck")).start().await.unwrap();
    let entries = (0..5).map(|n| envelope("t.stuck", n));
    let requested = batch(BatchMode::Parallel, entries);
    let answer = run(&engine, Batch { wait_ms: Some(0), ..requested.clone() }).await;
    assert!(answer.results.iter().all(|settled| settled.ok().is_none()), "all are tickets");
    let narrow =
        Batch { wait_ms: Some(0), max_parallel: Some(2), defer_unstarted: false, ..requested };
    let answer = run(&engine, narrow).await;
    let open = answer.results.iter().filter(|settled| settled.ok().is_none()).count();
    assert_eq!(open, 2, "and no more than max_parallel");
}

#[tokio::test]
async fn entries_with_equal_call_ids_are_separate_calls() {
    let engine = Engine::builder().tool(even_only_tool()).start().await.unwrap();
    let entries = [0, 2, 0].map(|n| {
        let arguments = format!("{{\"n\":{n}}}");
        json!({ "id": "call_0", "type": "function",
                "function": { "name": "t__picky", "arguments": arguments } })
    });
    for _ in 0..2 {
        let answer = run(&engine, batch(BatchMode::Parallel, entries.clone())).await;
        assert_eq!(numbers(&answer), [0, 2, 0].map(Value::from));
        assert!(
            answer.messages.iter().all(|message| message.to_value()["tool_call_id"] == "call_0")
        );
        assert!(!answer.is_replayed());
    }
    assert_eq!(stored_call_count(&engine).await, 6);
}

#[tokio::test]
async fn a_batch_with_the_same_idempotency_key_replays_its_calls() {
    let engine = Engine::builder()
        .tool(even_only_tool())
        .tool(endless_tool("t.stuck"))
        .start()
        .await
        .unwrap();
    let ids = |answer: &BatchAnswer| -> Vec<String> {
        let calls = answer.results.iter().filter_map(BatchEntryResult::call);
        calls.map(|call| call.id.to_string()).collect()
    };
    let requested = |entries: Vec<Value>| {
        let key = Some("turn-7".to_owned());
        Batch { idempotency_key: key, ..batch(BatchMode::Serial, entries) }
    };
    let entries = vec![envelope("t.picky", 2), envelope("t.picky", 2), envelope("t.picky", 3)];
    let first = run(&engine, requested(entries.clone())).await;
    assert!(!first.is_replayed());
    let again = run(&engine, requested(entries.clone())).await;
    assert!(again.is_replayed());
    assert_eq!(ids(&first), ids(&again));
    assert_eq!(first.messages, again.messages);
    // Another entry under the same key is refused alone; an additional entry is a new call.
    let mut other = entries;
    other[1] = envelope("t.picky", 4);
    other.push(envelope("t.picky", 6));
    let mixed = run(&engine, requested(other)).await;
    assert_eq!(code(&mixed.results[1]), Code::IdempotencyMismatch);
    assert_eq!(mixed.results[3].data().map(Json::to_value), Some(json!(6)));
    assert_eq!((mixed.results[0].replayed, mixed.results[3].replayed), (true, false));
    assert_eq!(stored_call_count(&engine).await, 4);
    // An entry's key takes precedence over the batch's.
    let mut entry = envelope("t.picky", 8);
    entry["idempotency_key"] = json!("mine");
    let one = run(&engine, batch(BatchMode::Serial, [entry.clone()])).await;
    let two = run(&engine, requested(vec![entry])).await;
    assert_eq!(ids(&one), ids(&two));
}

#[tokio::test]
async fn repeating_the_key_starts_the_entries_that_had_not_started() {
    let go = Arc::new(Notify::new());
    let waiting = {
        let go = go.clone();
        FnTool::new("t.wait", "Waits", move |_: Numbered| {
            let go = go.clone();
            async move {
                go.notified().await;
                Ok::<_, Fault>(0)
            }
        })
    };
    let engine = Engine::builder().tool(waiting).tool(even_only_tool()).start().await.unwrap();
    let entries = vec![envelope("t.wait", 0), envelope("t.picky", 2)];
    let requested = |wait_ms| Batch {
        idempotency_key: Some("k".into()),
        defer_unstarted: false,
        wait_ms,
        ..batch(BatchMode::Serial, entries.clone())
    };
    let first = run(&engine, requested(Some(10))).await;
    assert_eq!((first.results[0].ok(), first.results[1].ok()), (None, Some(false)));
    go.notify_one();
    let second = run(&engine, requested(None)).await;
    assert_eq!((second.results[0].ok(), second.results[1].ok()), (Some(true), Some(true)));
    assert!(second.results[0].replayed && !second.results[1].replayed);
    assert_eq!(stored_call_count(&engine).await, 2);
}
