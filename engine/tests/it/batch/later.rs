//! Tests of batch calls that have not started when the wait ends: each starts after its
//! predecessor.

use std::time::Duration;
use toolcrib::calls::Until;

use tokio::sync::Semaphore;
use toolcrib::domain::call::{Call, Hold, Origin};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{MemoryStore, NewCall, Store};

use super::*;

/// Tools that end on request, and a record of what they did.
#[derive(Clone)]
struct ManualTools {
    store: Arc<MemoryStore>,
    go: Arc<Semaphore>,
    notes: Arc<Mutex<Vec<String>>>,
    /// Number of running tools now, and the maximum so far.
    running: Arc<(AtomicUsize, AtomicUsize)>,
}

impl ManualTools {
    fn new() -> Self {
        let (store, go) = (Arc::new(MemoryStore::default()), Arc::new(Semaphore::new(0)));
        Self { store, go, notes: Arc::default(), running: Arc::default() }
    }

    fn tool(&self, name: &str) -> FnTool {
        let tools = self.clone();
        FnTool::new(name, "Ends when it is told to", move |args: Numbered| {
            let tools = tools.clone();
            async move {
                let (now, peak) = &*tools.running;
                peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tools.notes.lock().push(format!("+{}", args.n));
                tools.go.acquire().await.unwrap().forget();
                tools.notes.lock().push(format!("-{}", args.n));
                now.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Fault>(args.n)
            }
        })
    }

    async fn engine(&self) -> Engine {
        let engine = Engine::builder().store(self.store.clone());
        let engine = engine.tool(self.tool("t.read").effect(Effect::Read));
        let engine = engine.tool(self.tool("t.write").effect(Effect::Idempotent));
        engine.tool(self.tool("t.task").background()).start().await.unwrap()
    }

    async fn wait_for_start(&self, n: usize) {
        let note = format!("+{n}");
        while !self.notes.lock().contains(&note) {
            tokio::task::yield_now().await;
        }
    }
}

fn open_calls(answer: &BatchAnswer) -> Vec<Arc<Call>> {
    let open = |settled: &BatchEntryResult| match &settled.state {
        BatchEntryState::Open(call) => call.clone(),
        other => panic!("{other:?}"),
    };
    answer.results.iter().map(open).collect()
}

async fn wait_for_end(engine: &Engine, id: &CallId) -> Arc<Call> {
    engine.calls().wait(&caller(), id, Until::Ended).await.unwrap()
}

#[tokio::test]
async fn serial_entries_are_returned_as_tickets_and_run_in_order() {
    let tools = ManualTools::new();
    let engine = tools.engine().await;
    let entries = (0..4).map(|n| envelope("t.write", n));
    let requested = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let answer = run(&engine, requested).await;
    let calls = open_calls(&answer);
    assert_eq!(stored_call_count(&engine).await, 4, "every entry is stored");
    for (n, call) in calls.iter().enumerate().skip(1) {
        assert!(matches!(call.hold, Some(Hold::Predecessor { .. })), "{:?}", call.hold);
        assert_eq!(call.origin.predecessor.as_ref(), Some(&calls[n - 1].id));
        let message = answer.messages[n].text();
        assert!(message.contains("its turn has not come"), "{message}");
    }
    tools.wait_for_start(0).await;
    assert_eq!(*tools.notes.lock(), ["+0"], "the dependents wait");
    tools.go.add_permits(4);
    for (n, call) in calls.iter().enumerate() {
        let outcome = wait_for_end(&engine, &call.id).await.outcome.clone().unwrap();
        assert_eq!(outcome.data.unwrap().to_value(), json!(n));
    }
    assert_eq!(*tools.notes.lock(), ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]);
}

#[tokio::test]
async fn deferred_entries_never_exceed_max_parallel() {
    let tools = ManualTools::new();
    let engine = tools.engine().await;
    let entries = (0..9).map(|n| envelope("t.read", n));
    let requested =
        Batch { wait_ms: Some(0), max_parallel: Some(2), ..batch(BatchMode::Parallel, entries) };
    let calls = open_calls(&run(&engine, requested).await);
    let started = calls.iter().filter(|call| call.origin.predecessor.is_none()).count();
    assert_eq!(started, 2);
    tools.go.add_permits(9);
    for call in &calls {
        assert_eq!(wait_for_end(&engine, &call.id).await.status, Status::Succeeded);
    }
    assert_eq!(tools.running.1.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn dependents_run_in_order_after_a_restart() {
    let tools = ManualTools::new();
    let engine = tools.engine().await;
    let entries = (0..3).map(|n| envelope("t.write", n));
    let requested = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let calls = open_calls(&run(&engine, requested).await);
    tools.wait_for_start(0).await;
    engine.shut_down(Duration::ZERO).await;
    let tools = ManualTools { store: tools.store, ..ManualTools::new() };
    let engine = tools.engine().await;
    tools.wait_for_start(0).await;
    assert_eq!(*tools.notes.lock(), ["+0"], "only the interrupted call is retried");
    tools.go.add_permits(3);
    for call in &calls {
        assert_eq!(wait_for_end(&engine, &call.id).await.status, Status::Succeeded);
    }
    assert_eq!(*tools.notes.lock(), ["+0", "-0", "+1", "-1", "+2", "-2"]);
    // A call whose predecessor ended while no engine was running.
    engine.shut_down(Duration::ZERO).await;
    let last = calls[2].id.clone();
    let missed = Call {
        id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap(),
        origin: Origin { predecessor: Some(last), ..calls[2].origin.clone() },
        deadline_ms: engine.now_ms() + 60_000,
        ..(*calls[2]).clone()
    };
    let new = NewCall {
        call: Arc::new(missed.clone()),
        records: vec![],
        key: None,
        undelivered: None,
        approval: None,
        group_member: None,
    };
    tools.store.create_call(new).await.unwrap();
    tools.go.add_permits(1);
    let engine = tools.engine().await;
    assert_eq!(wait_for_end(&engine, &missed.id).await.status, Status::Succeeded);
}

#[tokio::test]
async fn canceling_a_dependent_does_not_start_its_successors_early() {
    let tools = ManualTools::new();
    let engine = tools.engine().await;
    let entries = [
        envelope("t.write", 0),
        envelope("t.write", 1),
        envelope("t.task", 2),
        envelope("t.nothing", 3),
        envelope("t.write", 4),
    ];
    let requested = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let answer = run(&engine, requested).await;
    assert_eq!(code(&answer.results[3]), Code::ToolNotFound, "refused immediately");
    let id = |n: usize| answer.results[n].call().unwrap().id.clone();
    let after = |n: usize| answer.results[n].call().unwrap().origin.predecessor.clone();
    assert_eq!((after(1), after(2), after(4)), (Some(id(0)), Some(id(1)), Some(id(1))));
    // A call canceled before it started has no effect. The cancellation is its end: its successors
    // may start then, and not earlier.
    let canceled = engine.calls().cancel(&caller(), &id(1), None).await.unwrap();
    assert_eq!(canceled.status, Status::Canceled);
    assert_eq!(canceled.started_ms, None);
    tools.go.add_permits(3);
    for n in [0, 2, 4] {
        assert_eq!(wait_for_end(&engine, &id(n)).await.status, Status::Succeeded);
    }
    assert!(!tools.notes.lock().contains(&"+1".to_owned()));
}

#[tokio::test]
async fn a_dependents_timeout_starts_when_its_predecessor_ends() {
    let tools = ManualTools::new();
    let clock = ManualClock::at(1_700_000_000_000);
    let engine = Engine::builder().clock(Arc::new(clock.clone()));
    let engine = engine.tool(tools.tool("t.read").effect(Effect::Read)).start().await.unwrap();
    let entries = (0..2).map(|n| envelope("t.read", n));
    // Without retries, an attempt may take the whole time of its call.
    let requested = Batch {
        wait_ms: Some(0),
        timeout_ms: Some(10_000),
        retry: Some(0),
        ..batch(BatchMode::Serial, entries)
    };
    let calls = open_calls(&run(&engine, requested).await);
    let now_ms = calls[1].created_ms;
    assert_eq!(calls[1].deadline_ms, now_ms + 20_000, "the predecessor's timeout plus its own");
    tools.wait_for_start(0).await;
    clock.advance(6_000);
    tools.go.add_permits(1);
    tools.wait_for_start(1).await;
    let started = engine.calls().call(&caller(), &calls[1].id).await.unwrap();
    assert_eq!((started.status, started.deadline_ms), (Status::Running, now_ms + 16_000));
    clock.advance(10_000);
    assert_eq!(wait_for_end(&engine, &calls[1].id).await.status, Status::Timeout);
}

#[tokio::test]
async fn a_repeated_batch_waits_for_the_calls_of_the_first() {
    let tools = ManualTools::new();
    let engine = tools.engine().await;
    let requested = |wait_ms| Batch {
        idempotency_key: Some("k".into()),
        wait_ms,
        ..batch(BatchMode::Serial, (0..3).map(|n| envelope("t.write", n)))
    };
    open_calls(&run(&engine, requested(Some(0))).await);
    tools.go.add_permits(3);
    let again = run(&engine, requested(None)).await;
    assert_eq!(numbers(&again), [0, 1, 2].map(Value::from));
    assert!(again.is_replayed());
    assert_eq!(stored_call_count(&engine).await, 3);
}
