//! Tests of webhooks, with a manual clock and a scripted receiver.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Notify;
use toolcrib::domain::delivery::{
    Delivery, DeliveryAttempt, DeliveryResponse, DeliveryStatus, RetrySchedule,
};
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::Code;
use toolcrib::engine::{DeliveryQuery, EventQuery};
use toolcrib::maintenance::purge;
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::ports::webhook_sender::{DeliverySettings, WebhookMessage, WebhookSender};
use toolcrib::webhooks::dispatcher;
use toolcrib::{CallId, CallRequest, Caller, Engine, Fault, FnTool, Role, Status};

use crate::support::{Chance, FlakyStore};

const NOW: u64 = 1_790_000_000_000;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// A receiver that records messages and responds with the next scripted response, or else 200.
#[derive(Default)]
struct Receiver {
    told: Mutex<Vec<WebhookMessage>>,
    answers: Mutex<Vec<DeliveryResponse>>,
    /// Releases the responses for URLs that contain `slow`.
    slow: Notify,
    waiting: AtomicUsize,
}

impl Receiver {
    fn answering(codes: &[u16]) -> Arc<Self> {
        let answers = codes.iter().rev().map(|code| answered(*code)).collect();
        Arc::new(Self { answers: Mutex::new(answers), ..Self::default() })
    }

    fn told(&self) -> Vec<String> {
        self.told.lock().iter().map(|notice| notice.delivery.message_id()).collect()
    }
}

fn answered(code: u16) -> DeliveryResponse {
    DeliveryResponse { result: Ok(code), retry_after_ms: None }
}

#[async_trait]
impl WebhookSender for Receiver {
    fn check_url(&self, project: &str, url: &str) -> Result<String, String> {
        assert_eq!(project, "default");
        if url.starts_with("https://") { Ok(url.to_owned()) } else { Err("must be https".into()) }
    }

    async fn send(&self, notice: WebhookMessage) -> DeliveryResponse {
        let slow = notice.delivery.url.contains("slow");
        self.told.lock().push(notice);
        if slow {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.slow.notified().await;
        }
        self.answers.lock().pop().unwrap_or_else(|| answered(200))
    }
}

struct World {
    engine: Engine,
    clock: ManualClock,
    receiver: Arc<Receiver>,
    caller: Caller,
}

fn tool() -> FnTool {
    FnTool::new("t.job", "A job", |_: Nothing| async { Ok::<_, Fault>("done") }).background()
}

impl World {
    async fn with(receiver: Arc<Receiver>) -> Self {
        let store = Arc::new(MemoryStore::default());
        let clock = ManualClock::at(NOW);
        Self::on(store, clock, receiver).await
    }

    async fn on(store: Arc<dyn Store>, clock: ManualClock, receiver: Arc<Receiver>) -> Self {
        let schedule = RetrySchedule { retry_ms: vec![5_000, 300_000], jitter: 0.0 };
        let notifying =
            DeliverySettings { schedule, max_parallel: 4, max_parallel_per_receiver: 2 };
        let engine = Engine::builder()
            .store(store)
            .clock(Arc::new(clock.clone()))
            .tool(tool())
            .tool(FnTool::new("t.long", "Never ends", |_: Nothing| async {
                std::future::pending::<Result<u32, Fault>>().await
            }))
            .webhook_sender(receiver.clone(), notifying)
            .build_idle()
            .await
            .unwrap();
        Self { engine, clock, receiver, caller: Caller::local("default") }
    }

    async fn ended(&self, url: &str) -> CallId {
        let mut asked = CallRequest::new("t.job", "{}").unwrap();
        asked.callback_url = Some(url.to_owned());
        let ticket = self.engine.invoke(&self.caller, asked).await.unwrap();
        self.engine.wait_until_finished(&self.caller, &ticket.call.id).await.unwrap();
        ticket.call.id.clone()
    }

    async fn run(&self) -> usize {
        dispatcher::run_once(&self.engine).await.unwrap()
    }

    async fn delivery(&self, id: &CallId) -> (Delivery, Vec<DeliveryAttempt>) {
        self.engine.delivery(&self.caller, id).await.unwrap().unwrap()
    }
}

#[tokio::test]
async fn it_is_tried_again_by_the_schedule_and_then_never() {
    let world = World::with(Receiver::answering(&[500, 302, 404])).await;
    let id = world.ended("https://a.example/x").await;
    assert_eq!((world.run().await, world.run().await), (1, 0), "not before it is due");
    world.clock.advance(4_999);
    assert_eq!(world.run().await, 0);
    world.clock.advance(1);
    assert_eq!(world.run().await, 1);
    world.clock.advance(300_000);
    assert_eq!(world.run().await, 1);
    let (delivery, tries) = world.delivery(&id).await;
    assert_eq!((delivery.status, delivery.attempts), (DeliveryStatus::Exhausted, 3));
    let codes: Vec<_> = tries.iter().map(|tried| tried.status_code.unwrap()).collect();
    assert_eq!(codes, [500, 302, 404]);
    assert_eq!(tries[2].at_ms, NOW + 305_000);
    assert!(tries[1].error.as_ref().unwrap().contains("redirects are not followed"));
    world.clock.advance(86_400_000);
    assert_eq!(world.run().await, 0);
    let message = world.receiver.told().pop().unwrap();
    assert_eq!(world.receiver.told(), vec![message; 3], "it is one message all along");
}

#[tokio::test]
async fn a_receiver_that_is_gone_is_left_alone_until_somebody_asks_again() {
    let world = World::with(Receiver::answering(&[410])).await;
    let id = world.ended("https://a.example/x").await;
    world.run().await;
    assert_eq!(world.delivery(&id).await.0.status, DeliveryStatus::Gone);
    world.clock.advance(86_400_000);
    assert_eq!(world.run().await, 0);
    let again = world.engine.redeliver(&world.caller, &id).await.unwrap();
    assert_eq!(again.status, DeliveryStatus::Pending);
    assert_eq!(world.run().await, 1);
    let (delivery, tries) = world.delivery(&id).await;
    assert_eq!((delivery.status, tries.len()), (DeliveryStatus::Delivered, 2));
    // Redelivery also works after a successful delivery.
    world.engine.redeliver(&world.caller, &id).await.unwrap();
    assert_eq!(world.run().await, 1);
    assert_eq!(world.receiver.told().len(), 3);
}

#[tokio::test]
async fn a_url_that_is_gone_is_sent_nothing_more_of_what_was_asked_before() {
    let world = World::with(Receiver::answering(&[500, 410])).await;
    let (gone, other) = ("https://a.example/x", "https://a.example/y");
    let first = world.ended(gone).await;
    world.run().await;
    let [second, elsewhere] = [world.ended(gone).await, world.ended(other).await];
    // This call is still running when the receiver responds with 410.
    let mut asked = CallRequest::new("t.long", "{}").unwrap();
    asked.callback_url = Some(gone.to_owned());
    let open = world.engine.invoke(&world.caller, asked).await.unwrap().call.id.clone();
    assert_eq!(world.run().await, 2);
    for id in [&first, &second, &open] {
        assert_eq!(world.delivery(id).await.0.status, DeliveryStatus::Gone, "{id}");
    }
    assert_eq!(world.delivery(&elsewhere).await.0.status, DeliveryStatus::Delivered);
    world.engine.cancel(&world.caller, &open, None).await.unwrap();
    world.clock.advance(86_400_000);
    assert_eq!(world.run().await, 0);
    let (delivery, tries) = world.delivery(&open).await;
    assert!(delivery.last_error.unwrap().contains("410") && tries.is_empty());
    // A redelivery request, or a new call with the URL, is attempted again.
    world.engine.redeliver(&world.caller, &open).await.unwrap();
    let later = world.ended(gone).await;
    assert_eq!(world.run().await, 2);
    for id in [&open, &later] {
        assert_eq!(world.delivery(id).await.0.status, DeliveryStatus::Delivered);
    }
}

#[tokio::test]
async fn a_crash_between_the_end_and_the_delivery_costs_only_time() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(NOW));
    let before = World::on(store.clone(), clock.clone(), Receiver::answering(&[])).await;
    let id = before.ended("https://a.example/x").await;
    // The engine was dropped before it checked for due deliveries.
    drop(before);
    let after = World::on(store, clock, Receiver::answering(&[])).await;
    assert_eq!(after.run().await, 1);
    let notice = after.receiver.told.lock()[0].clone();
    assert_eq!(notice.call.id, id);
    assert_eq!(notice.call.outcome.as_ref().unwrap().data.as_ref().unwrap().text(), "\"done\"");
    assert_eq!(after.delivery(&id).await.0.status, DeliveryStatus::Delivered);
}

#[tokio::test]
async fn a_slow_receiver_does_not_hold_up_the_others() {
    let world = World::with(Receiver::answering(&[])).await;
    for n in 0..5 {
        world.ended(&format!("https://slow.example/{n}")).await;
    }
    let quick = world.ended("https://quick.example/").await;
    let engine = world.engine.clone();
    let round = tokio::spawn(async move { dispatcher::run_once(&engine).await.unwrap() });
    while world.delivery(&quick).await.0.status != DeliveryStatus::Delivered {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.receiver.waiting.load(Ordering::SeqCst), 2, "no more than that at once");
    world.receiver.slow.notify_waiters();
    assert_eq!(round.await.unwrap(), 3);
}

#[tokio::test]
async fn an_overloaded_receiver_is_left_alone_and_says_for_how_long() {
    let busy = DeliveryResponse { result: Ok(429), retry_after_ms: Some(30_000) };
    let receiver = Arc::new(Receiver { answers: Mutex::new(vec![busy]), ..Receiver::default() });
    let world = World::with(receiver).await;
    let first = world.ended("https://busy.example/1").await;
    assert_eq!(world.run().await, 1);
    assert_eq!(world.delivery(&first).await.0.due_ms, Some(NOW + 30_000));
    world.ended("https://busy.example/2").await;
    let other = world.ended("https://other.example/").await;
    assert_eq!(world.run().await, 1, "only the one for somebody else");
    assert_eq!(world.delivery(&other).await.0.status, DeliveryStatus::Delivered);
    world.clock.advance(30_000);
    assert_eq!(world.run().await, 2);
}

#[tokio::test]
async fn asking_again_while_a_try_is_under_way_brings_another() {
    let world = World::with(Receiver::answering(&[])).await;
    let id = world.ended("https://slow.example/").await;
    let engine = world.engine.clone();
    let round = tokio::spawn(async move { dispatcher::run_once(&engine).await.unwrap() });
    while world.receiver.waiting.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    world.engine.redeliver(&world.caller, &id).await.unwrap();
    world.receiver.slow.notify_waiters();
    assert_eq!(round.await.unwrap(), 1);
    let (delivery, tries) = world.delivery(&id).await;
    assert_eq!((delivery.status, tries.len()), (DeliveryStatus::Pending, 1));
    world.receiver.slow.notify_one();
    assert_eq!(world.run().await, 1);
    assert_eq!(world.delivery(&id).await.0.status, DeliveryStatus::Delivered);
}

#[tokio::test]
async fn a_running_engine_delivers_by_itself() {
    let receiver = Receiver::answering(&[503]);
    let schedule = RetrySchedule { retry_ms: vec![1], jitter: 0.0 };
    let engine = Engine::builder()
        .tool(tool())
        .webhook_sender(
            receiver.clone(),
            DeliverySettings { schedule, ..DeliverySettings::default() },
        )
        .start()
        .await
        .unwrap();
    let caller = Caller::local("default");
    let mut asked = CallRequest::new("t.job", "{}").unwrap();
    asked.callback_url = Some("https://a.example/x".into());
    let id = engine.invoke(&caller, asked).await.unwrap().call.id.clone();
    let delivered = async {
        loop {
            let found = engine.delivery(&caller, &id).await.unwrap().unwrap();
            if found.0.status == DeliveryStatus::Delivered {
                return found.1.len();
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let limit = std::time::Duration::from_secs(60);
    assert_eq!(tokio::time::timeout(limit, delivered).await.unwrap(), 2);
    engine.shut_down(std::time::Duration::from_secs(1)).await;
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let world = World::with(Receiver::answering(&[])).await;
    for url in ["", "ftp://a.example", &format!("https://a.example/{}", "x".repeat(2_048))] {
        let mut asked = CallRequest::new("t.job", "{}").unwrap();
        asked.callback_url = Some(url.to_owned());
        let error = world.engine.invoke(&world.caller, asked).await.err().unwrap();
        assert_eq!(error.code(), Code::ValidationError);
        let toolcrib::Error::Refused { fault, .. } = error else { panic!() };
        assert!(fault.message.starts_with("callback_url must"), "{}", fault.message);
        assert_eq!(fault.detail.unwrap()["pointer"], "/callback_url");
    }
    let plain = Engine::builder().tool(tool()).build_idle().await.unwrap();
    let mut asked = CallRequest::new("t.job", "{}").unwrap();
    asked.callback_url = Some("https://a.example".into());
    let error = plain.invoke(&world.caller, asked).await.err().unwrap();
    assert_eq!(error.code(), Code::ValidationError);

    let asked = CallRequest::new("t.job", "{}").unwrap();
    let without = world.engine.invoke(&world.caller, asked).await.unwrap().call.id.clone();
    let repeated = world.engine.redeliver(&world.caller, &without).await;
    assert_eq!(repeated.err().unwrap().code(), Code::NotFound);
    let provider = Caller { role: Role::Provider, ..world.caller.clone() };
    let query = DeliveryQuery { limit: 10, ..DeliveryQuery::default() };
    let listed = world.engine.deliveries(&provider, query).await;
    assert_eq!(listed.err().unwrap().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn the_same_key_with_another_url_is_another_request() {
    let world = World::with(Receiver::answering(&[])).await;
    let asked = |url: Option<&str>| CallRequest {
        idempotency_key: Some("k".into()),
        callback_url: url.map(str::to_owned),
        ..CallRequest::new("t.job", "{}").unwrap()
    };
    let first = Some("https://a.example/1");
    world.engine.invoke(&world.caller, asked(first)).await.unwrap();
    assert!(world.engine.invoke(&world.caller, asked(first)).await.unwrap().replayed);
    for other in [None, Some("https://a.example/2")] {
        let error = world.engine.invoke(&world.caller, asked(other)).await.err().unwrap();
        assert_eq!(error.code(), Code::IdempotencyMismatch);
    }
}

#[tokio::test]
async fn a_purged_call_takes_its_delivery_along() {
    let world = World::with(Receiver::answering(&[500])).await;
    world.ended("https://a.example/x").await;
    world.run().await;
    world.clock.advance(10_000);
    assert_eq!(purge::run_once(&world.engine, 1_000).await.unwrap(), 1);
    assert_eq!(world.run().await, 0);
    let query = DeliveryQuery { limit: 10, ..DeliveryQuery::default() };
    assert!(world.engine.deliveries(&world.caller, query).await.unwrap().deliveries.is_empty());
}

/// A subscriber of a run matches later results by the ids in the events.
#[tokio::test]
async fn the_events_of_a_task_name_it() {
    let world = World::with(Receiver::answering(&[])).await;
    let mut asked = CallRequest::new("t.job", "{}").unwrap();
    asked.call_id = Some("mine-7".into());
    let id = world.engine.invoke(&world.caller, asked).await.unwrap().call.id.clone();
    world.engine.wait_until_finished(&world.caller, &id).await.unwrap();
    let query = EventQuery::Run("run_default".into());
    let events = world.engine.events(&world.caller, &query, 0, 10).await.unwrap();
    let ends = [EventKind::Requested, EventKind::Finished];
    for event in events.iter().filter(|event| ends.contains(&event.record.kind)) {
        assert_eq!(event.record.data["task_id"], id.as_str());
        assert_eq!(event.record.data["call_id"], "mine-7");
    }
}

#[tokio::test]
async fn who_is_told_of_an_end_finds_it_so() {
    let store = FlakyStore::new(Chance::of(1));
    let receiver = Receiver::answering(&[]);
    let world = World::on(store.clone(), ManualClock::at(NOW), receiver).await;
    let mut asked = CallRequest::new("t.long", "{}").unwrap();
    asked.callback_url = Some("https://a.example/x".to_owned());
    let id = world.engine.invoke(&world.caller, asked).await.unwrap().call.id.clone();
    // The end is stored and not yet visible.
    let held = store.answering.write().await;
    let canceling = world.engine.cancel(&world.caller, &id, None);
    let telling = async {
        while world.run().await == 0 {
            tokio::task::yield_now().await;
        }
        world.engine.call(&world.caller, &id).await.unwrap().status
    };
    let answered = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(held);
    };
    let (canceled, found, ()) = tokio::join!(canceling, telling, answered);
    assert_eq!((canceled.unwrap().status, found), (Status::Canceled, Status::Canceled));
}
