//! Tests of rejoin: a repeated request joins an earlier call whose answer was not delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Semaphore;
use toolcrib::calls::{Batch, BatchMode, Ticket, Until};
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::registry::{Credentials, NewKey};
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool, Json, Role, Status};

#[derive(Deserialize, JsonSchema)]
struct Payment {
    #[allow(dead_code, reason = "the count matters, not the amount")]
    amount: u32,
}

/// A server whose tools count their executions, with a store that outlives it.
struct Fixture {
    store: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    paid: Arc<AtomicU32>,
    /// An execution needs a permit.
    gate: Arc<Semaphore>,
}

impl Fixture {
    fn new() -> Self {
        let gate = Arc::new(Semaphore::new(1_000));
        let clock = Arc::new(ManualClock::at(1_700_000_000_000));
        Self { store: Arc::default(), clock, paid: Arc::default(), gate }
    }

    fn tool(&self, name: &str, effect: Effect) -> FnTool {
        let (paid, gate) = (self.paid.clone(), self.gate.clone());
        FnTool::new(name, "Pays", move |_: Payment| {
            let (paid, gate) = (paid.clone(), gate.clone());
            async move {
                gate.acquire().await.map_err(|_| Fault::runtime("closed"))?.forget();
                Ok::<u32, Fault>(paid.fetch_add(1, Ordering::SeqCst) + 1)
            }
        })
        .effect(effect)
    }

    async fn engine(&self) -> Engine {
        let off = ExecutionPolicyPatch { rejoin: Some(false), ..ExecutionPolicyPatch::default() };
        Engine::builder()
            .store(self.store.clone())
            .clock(self.clock.clone())
            .tool(self.tool("bank.pay", Effect::Irreversible))
            .tool(self.tool("bank.set", Effect::Idempotent))
            .tool(self.tool("bank.read", Effect::Read))
            .tool(self.tool("bank.anew", Effect::Irreversible).policy(off))
            .start()
            .await
            .unwrap()
    }

    fn paid(&self) -> u32 {
        self.paid.load(Ordering::SeqCst)
    }

    /// Returns the number of stored undelivered requests.
    async fn stored(&self) -> usize {
        self.store.undelivered().list_undelivered(0).await.unwrap().len()
    }
}

fn caller() -> Caller {
    Caller::local("default")
}

fn request(tool: &str, args: &str) -> CallRequest {
    let request = CallRequest::new(tool, args).unwrap();
    let timeout_ms = Some(3_600_000);
    CallRequest { rejoin: true, run_id: "run_1".into(), timeout_ms, ..request }
}

async fn invoke(engine: &Engine, tool: &str, args: &str) -> Ticket {
    engine.calls().invoke(&caller(), request(tool, args)).await.unwrap()
}

async fn wait(engine: &Engine, ticket: &Ticket) {
    let call = engine.calls().wait(&caller(), ticket, Until::Ended).await.unwrap();
    assert_eq!(call.status, Status::Succeeded);
}

#[tokio::test]
async fn a_repeated_request_joins_the_call_whose_requester_is_gone() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    for tool in ["bank.pay", "bank.set"] {
        let first = invoke(&engine, tool, r#"{"amount": 5}"#).await;
        wait(&engine, &first).await;
        let id = first.call.id.clone();
        drop(first);
        let again = invoke(&engine, tool, r#"{ "amount":5 }"#).await;
        assert!(again.joined && !again.replayed);
        assert_eq!((&again.call.id, again.call.status), (&id, Status::Succeeded));
        again.delivery().unwrap().mark_delivered();
    }
    assert_eq!(fixture.paid(), 2);
}

#[tokio::test]
async fn nothing_joins_a_call_whose_requester_waits_or_has_its_answer() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let first = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    let second = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    assert!(!second.joined, "the first requester waits");
    for ticket in [&first, &second] {
        wait(&engine, ticket).await;
        ticket.delivery().unwrap().mark_delivered();
    }
    drop((first, second));
    let third = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    wait(&engine, &third).await;
    assert!(!third.joined, "both requesters have their answers");
    assert_eq!(fixture.paid(), 3);
}

#[tokio::test]
async fn one_request_joins_one_call_and_a_broken_join_can_be_joined_again() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let first = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    let id = first.call.id.clone();
    drop(first);
    let joined = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    let other = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    assert!(joined.joined && !other.joined, "one call has one requester");
    drop(joined);
    let again = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    assert_eq!((again.joined, &again.call.id), (true, &id));
}

#[tokio::test]
async fn a_call_is_joined_only_by_the_same_caller_run_tool_and_arguments() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    drop(invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await);
    let calls = engine.calls();
    let others = [
        (caller(), request("bank.pay", r#"{"amount": 6}"#)),
        (caller(), request("bank.set", r#"{"amount": 5}"#)),
        (caller(), CallRequest { run_id: "r".into(), ..request("bank.pay", r#"{"amount": 5}"#) }),
        (Caller::local("other"), request("bank.pay", r#"{"amount": 5}"#)),
        (Caller { agent: "eve".into(), ..caller() }, request("bank.pay", r#"{"amount": 5}"#)),
        (caller(), CallRequest { rejoin: false, ..request("bank.pay", r#"{"amount": 5}"#) }),
    ];
    for (caller, request) in others {
        let text = format!("{request:?}");
        assert!(!calls.invoke(&caller, request).await.unwrap().joined, "{text}");
    }
    assert!(invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await.joined);
}

#[tokio::test]
async fn reads_keyed_calls_and_tools_without_rejoin_are_not_joined() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    for tool in ["bank.read", "bank.anew"] {
        assert!(invoke(&engine, tool, r#"{"amount": 5}"#).await.delivery().is_none());
        assert!(!invoke(&engine, tool, r#"{"amount": 5}"#).await.joined);
    }
    let keyed = CallRequest {
        idempotency_key: Some("k".into()),
        ..request("bank.pay", r#"{"amount": 5}"#)
    };
    assert!(engine.calls().invoke(&caller(), keyed).await.unwrap().delivery().is_none());
    assert!(!invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await.joined);
}

#[tokio::test]
async fn a_key_without_rejoin_turns_it_off_for_its_agent() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let first = NewKey::new("default", "operator", Role::Admin);
    engine.admin().create_key(&caller(), first, "x".repeat(40)).await.unwrap();
    for (agent, rejoin) in [("ada", true), ("bob", false)] {
        let allow = vec!["*".to_owned()];
        let new = NewKey { allow, rejoin, ..NewKey::new("default", agent, Role::Agent) };
        let secret = format!("{agent:x>40}");
        engine.admin().create_key(&caller(), new, secret.clone()).await.unwrap();
        let caller = engine
            .registry()
            .credentials()
            .authenticate(&Credentials::new(&secret))
            .unwrap()
            .caller;
        let request = || request("bank.pay", r#"{"amount": 5}"#);
        drop(engine.calls().invoke(&caller, request()).await.unwrap());
        let again = engine.calls().invoke(&caller, request()).await.unwrap();
        assert_eq!(again.joined, rejoin, "{agent}");
    }
}

#[tokio::test]
async fn a_call_is_joined_within_the_window_only() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    for (age_ms, joined) in [(600_000, true), (600_001, false)] {
        let first = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
        wait(&engine, &first).await;
        drop(first);
        fixture.clock.advance(age_ms);
        let again = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
        assert_eq!(again.joined, joined, "{age_ms}");
        again.delivery().unwrap().mark_delivered();
    }
}

#[tokio::test]
async fn after_a_restart_every_requester_without_an_answer_is_gone() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let undelivered = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    let delivered = invoke(&engine, "bank.pay", r#"{"amount": 6}"#).await;
    wait(&engine, &undelivered).await;
    wait(&engine, &delivered).await;
    delivered.delivery().unwrap().mark_delivered();
    while fixture.stored().await != 1 {
        tokio::task::yield_now().await;
    }
    // The process is gone without any of its destructors.
    let id = undelivered.call.id.clone();
    std::mem::forget((undelivered, delivered));
    let restarted = fixture.engine().await;
    let again = invoke(&restarted, "bank.pay", r#"{"amount": 5}"#).await;
    assert_eq!((again.joined, &again.call.id), (true, &id));
    assert!(!invoke(&restarted, "bank.pay", r#"{"amount": 6}"#).await.joined);
    drop(engine);
}

#[tokio::test]
async fn a_delivered_request_leaves_the_store_at_shutdown_at_the_latest() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let ticket = invoke(&engine, "bank.pay", r#"{"amount": 5}"#).await;
    assert_eq!(fixture.stored().await, 1);
    ticket.delivery().unwrap().mark_delivered();
    engine.shut_down(std::time::Duration::from_secs(5)).await;
    assert_eq!(fixture.stored().await, 0);
}

fn payments(amounts: &[u32]) -> Batch {
    let entry = |amount: &u32| {
        let entry = format!(r#"{{"name":"bank.pay","args":{{"amount":{amount}}}}}"#);
        Json::parse(&entry).unwrap()
    };
    let entries = amounts.iter().map(entry).collect();
    Batch { mode: BatchMode::Unordered, rejoin: true, ..Batch::new("run_1", entries) }
}

#[tokio::test]
async fn a_repeated_batch_joins_entry_by_entry_and_never_within_itself() {
    let fixture = Fixture::new();
    let engine = fixture.engine().await;
    let first = engine.calls().run_batch(&caller(), payments(&[1, 1, 2])).await.unwrap();
    assert_eq!(fixture.paid(), 3, "two equal entries are two calls");
    assert!(first.results.iter().all(|entry| !entry.joined));
    drop(first);
    let again = engine.calls().run_batch(&caller(), payments(&[1, 1, 1, 2])).await.unwrap();
    assert_eq!(fixture.paid(), 4, "three of the four entries joined");
    assert_eq!(again.results.iter().filter(|entry| entry.joined).count(), 3);
    let ids = again.results.iter().map(|entry| entry.call().unwrap().id.to_string());
    assert_eq!(ids.collect::<std::collections::HashSet<_>>().len(), 4);
    again.deliveries.iter().for_each(|delivery| delivery.mark_delivered());
    drop(again);
    let third = engine.calls().run_batch(&caller(), payments(&[1, 2])).await.unwrap();
    assert!(third.results.iter().all(|entry| !entry.joined), "the second batch was delivered");
}

#[tokio::test]
async fn a_disconnected_call_is_canceled_after_the_grace_period_unless_it_is_joined() {
    let mut fixture = Fixture::new();
    fixture.gate = Arc::new(Semaphore::new(0));
    let engine = fixture.engine().await;
    let calls = engine.calls();
    let abandoned = invoke(&engine, "bank.pay", r#"{"amount": 1}"#).await;
    let revived = invoke(&engine, "bank.pay", r#"{"amount": 2}"#).await;
    let read = invoke(&engine, "bank.read", r#"{"amount": 3}"#).await;
    let ids = [&abandoned, &revived, &read].map(|ticket| ticket.call.id.clone());
    for ticket in [abandoned, revived, read] {
        calls.cancel_after_disconnect(&caller(), ticket, "gone").await.unwrap();
    }
    let status = async |id| calls.call(&caller(), id).await.unwrap().status;
    assert_eq!(status(&ids[2]).await, Status::Canceled, "a read has no grace period");
    // The task that waits for the requester must have read the time before it advances.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    fixture.clock.advance(29_000);
    let again = invoke(&engine, "bank.pay", r#"{"amount": 2}"#).await;
    assert!(again.joined);
    fixture.clock.advance(60_000);
    while status(&ids[0]).await != Status::Canceled {
        tokio::task::yield_now().await;
    }
    assert!(!status(&ids[1]).await.is_terminal());
    fixture.gate.add_permits(1);
    wait(&engine, &again).await;
}
