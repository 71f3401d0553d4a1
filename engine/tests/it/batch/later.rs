//! Tests of batch calls that have not started when the wait ends: each starts after its
//! predecessor.

use std::time::Duration;

use tokio::sync::Semaphore;
use toolcrib::domain::call::{Call, Hold, Origin};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{MemoryStore, NewCall, Store};

use super::*;

/// Tools that end on request, and a record of what they did.
#[derive(Clone)]
struct Bench {
    store: Arc<MemoryStore>,
    go: Arc<Semaphore>,
    notes: Arc<Mutex<Vec<String>>>,
    /// Number of running tools now, and the maximum so far.
    running: Arc<(AtomicUsize, AtomicUsize)>,
}

impl Bench {
    fn new() -> Self {
        let (store, go) = (Arc::new(MemoryStore::default()), Arc::new(Semaphore::new(0)));
        Self { store, go, notes: Arc::default(), running: Arc::default() }
    }

    fn tool(&self, name: &str) -> FnTool {
        let bench = self.clone();
        FnTool::new(name, "Ends when it is told to", move |args: Numbered| {
            let bench = bench.clone();
            async move {
                let (now, most) = &*bench.running;
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                bench.notes.lock().push(format!("+{}", args.n));
                bench.go.acquire().await.unwrap().forget();
                bench.notes.lock().push(format!("-{}", args.n));
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

    async fn began(&self, n: usize) {
        let note = format!("+{n}");
        while !self.notes.lock().contains(&note) {
            tokio::task::yield_now().await;
        }
    }
}

fn tickets(answer: &BatchAnswer) -> Vec<Arc<Call>> {
    let open = |settled: &BatchEntryResult| match &settled.state {
        BatchEntryState::Open(call) => call.clone(),
        other => panic!("{other:?}"),
    };
    answer.results.iter().map(open).collect()
}

async fn ended(engine: &Engine, id: &CallId) -> Arc<Call> {
    engine.wait_until_finished(&caller(), id).await.unwrap()
}

#[tokio::test]
async fn one_after_the_other_all_come_back_as_tickets_and_keep_their_order() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let entries = (0..4).map(|n| envelope("t.write", n));
    let asked = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let answer = run(&engine, asked).await;
    let calls = tickets(&answer);
    assert_eq!(stored(&engine).await, 4, "each is stored");
    for (n, call) in calls.iter().enumerate().skip(1) {
        assert!(matches!(call.hold, Some(Hold::Predecessor { .. })), "{:?}", call.hold);
        assert_eq!(call.origin.predecessor.as_ref(), Some(&calls[n - 1].id));
        let message = answer.messages[n].text();
        assert!(message.contains("its turn has not come"), "{message}");
    }
    bench.began(0).await;
    assert_eq!(*bench.notes.lock(), ["+0"], "the others wait");
    bench.go.add_permits(4);
    for (n, call) in calls.iter().enumerate() {
        let outcome = ended(&engine, &call.id).await.outcome.clone().unwrap();
        assert_eq!(outcome.data.unwrap().to_value(), json!(n));
    }
    assert_eq!(*bench.notes.lock(), ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]);
}

#[tokio::test]
async fn a_narrow_batch_is_never_wider_than_it_may_be() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let entries = (0..9).map(|n| envelope("t.read", n));
    let asked =
        Batch { wait_ms: Some(0), max_parallel: Some(2), ..batch(BatchMode::Parallel, entries) };
    let calls = tickets(&run(&engine, asked).await);
    let begun = calls.iter().filter(|call| call.origin.predecessor.is_none()).count();
    assert_eq!(begun, 2);
    bench.go.add_permits(9);
    for call in &calls {
        assert_eq!(ended(&engine, &call.id).await.status, Status::Succeeded);
    }
    assert_eq!(bench.running.1.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_turn_comes_also_after_a_restart() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let entries = (0..3).map(|n| envelope("t.write", n));
    let asked = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let calls = tickets(&run(&engine, asked).await);
    bench.began(0).await;
    engine.shut_down(Duration::ZERO).await;
    let bench = Bench { store: bench.store, ..Bench::new() };
    let engine = bench.engine().await;
    bench.began(0).await;
    assert_eq!(*bench.notes.lock(), ["+0"], "what was under way is tried again, alone");
    bench.go.add_permits(3);
    for call in &calls {
        assert_eq!(ended(&engine, &call.id).await.status, Status::Succeeded);
    }
    assert_eq!(*bench.notes.lock(), ["+0", "-0", "+1", "-1", "+2", "-2"]);
    // A call whose predecessor ended while no engine was running.
    engine.shut_down(Duration::ZERO).await;
    let last = calls[2].id.clone();
    let missed = Call {
        id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap(),
        origin: Origin { predecessor: Some(last), ..calls[2].origin.clone() },
        deadline_ms: engine.now_ms() + 60_000,
        ..(*calls[2]).clone()
    };
    let new =
        NewCall { call: Arc::new(missed.clone()), records: vec![], key: None, group_member: None };
    bench.store.create_call(new).await.unwrap();
    bench.go.add_permits(1);
    let engine = bench.engine().await;
    assert_eq!(ended(&engine, &missed.id).await.status, Status::Succeeded);
}

#[tokio::test]
async fn who_has_to_wait_is_not_in_the_way_and_its_end_is_no_turn() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let entries = [
        envelope("t.write", 0),
        envelope("t.write", 1),
        envelope("t.task", 2),
        envelope("t.nothing", 3),
        envelope("t.write", 4),
    ];
    let asked = Batch { wait_ms: Some(0), ..batch(BatchMode::Serial, entries) };
    let answer = run(&engine, asked).await;
    assert_eq!(code(&answer.results[3]), Code::ToolNotFound, "answered at once");
    let id = |n: usize| answer.results[n].call().unwrap().id.clone();
    let after = |n: usize| answer.results[n].call().unwrap().origin.predecessor.clone();
    assert_eq!((after(1), after(2), after(4)), (Some(id(0)), Some(id(1)), Some(id(1))));
    // A call canceled before it started has no effect. The cancellation is its end: its successors
    // may start then, and not earlier.
    let canceled = engine.cancel(&caller(), &id(1), None).await.unwrap();
    assert_eq!(canceled.status, Status::Canceled);
    assert_eq!(canceled.started_ms, None);
    bench.go.add_permits(3);
    for n in [0, 2, 4] {
        assert_eq!(ended(&engine, &id(n)).await.status, Status::Succeeded);
    }
    assert!(!bench.notes.lock().contains(&"+1".to_owned()));
}

#[tokio::test]
async fn what_time_it_has_begins_with_its_turn() {
    let bench = Bench::new();
    let clock = ManualClock::at(1_700_000_000_000);
    let engine = Engine::builder().clock(Arc::new(clock.clone()));
    let engine = engine.tool(bench.tool("t.read").effect(Effect::Read)).start().await.unwrap();
    let entries = (0..2).map(|n| envelope("t.read", n));
    let asked =
        Batch { wait_ms: Some(0), timeout_ms: Some(10_000), ..batch(BatchMode::Serial, entries) };
    let calls = tickets(&run(&engine, asked).await);
    let now_ms = calls[1].created_ms;
    assert_eq!(calls[1].deadline_ms, now_ms + 20_000, "what the other has, and its own");
    bench.began(0).await;
    clock.advance(6_000);
    bench.go.add_permits(1);
    bench.began(1).await;
    let begun = engine.call(&caller(), &calls[1].id).await.unwrap();
    assert_eq!((begun.status, begun.deadline_ms), (Status::Running, now_ms + 16_000));
    clock.advance(10_000);
    assert_eq!(ended(&engine, &calls[1].id).await.status, Status::Timeout);
}

#[tokio::test]
async fn the_same_batch_again_waits_for_the_same_calls() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let asked = |wait_ms| Batch {
        idempotency_key: Some("k".into()),
        wait_ms,
        ..batch(BatchMode::Serial, (0..3).map(|n| envelope("t.write", n)))
    };
    tickets(&run(&engine, asked(Some(0))).await);
    bench.go.add_permits(3);
    let again = run(&engine, asked(None)).await;
    assert_eq!(numbers(&again), [0, 1, 2].map(Value::from));
    assert!(again.is_replayed());
    assert_eq!(stored(&engine).await, 3);
}
