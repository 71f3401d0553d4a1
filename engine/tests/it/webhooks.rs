//! Tests of webhooks, with a manual clock and a scripted receiver.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Notify;
use toolcrib::calls::{EventQuery, Until};
use toolcrib::domain::delivery::{
    Delivery, DeliveryAttempt, DeliveryResponse, DeliveryStatus, RetrySchedule,
};
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::Code;
use toolcrib::maintenance::purge;
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::ports::webhook_sender::{DeliverySettings, WebhookMessage, WebhookSender};
use toolcrib::webhooks::DeliveryQuery;
use toolcrib::webhooks::dispatcher;
use toolcrib::{CallId, CallRequest, Caller, Engine, Fault, FnTool, Role, Status};

use crate::support::{FlakyStore, SeededRng};

const NOW: u64 = 1_790_000_000_000;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// A receiver that records messages and responds with the next scripted response, or else 200.
#[derive(Default)]
struct Receiver {
    received: Mutex<Vec<WebhookMessage>>,
    answers: Mutex<Vec<DeliveryResponse>>,
    /// Releases the responses for URLs that contain `slow`.
    slow: Notify,
    slow_requests: AtomicUsize,
}

impl Receiver {
    fn responding_with(codes: &[u16]) -> Arc<Self> {
        let answers = codes.iter().rev().map(|code| response(*code)).collect();
        Arc::new(Self { answers: Mutex::new(answers), ..Self::default() })
    }

    fn received_ids(&self) -> Vec<String> {
        self.received.lock().iter().map(|message| message.delivery.message_id()).collect()
    }
}

fn response(code: u16) -> DeliveryResponse {
    DeliveryResponse { result: Ok(code), retry_after_ms: None }
}

#[async_trait]
impl WebhookSender for Receiver {
    fn check_url(&self, project: &str, url: &str) -> Result<String, String> {
        assert_eq!(project, "default");
        if url.starts_with("https://") { Ok(url.to_owned()) } else { Err("must be https".into()) }
    }

    async fn send(&self, message: WebhookMessage) -> DeliveryResponse {
        let slow = message.delivery.url.contains("slow");
        self.received.lock().push(message);
        if slow {
            self.slow_requests.fetch_add(1, Ordering::SeqCst);
            self.slow.notified().await;
        }
        self.answers.lock().pop().unwrap_or_else(|| response(200))
    }
}

struct WebhookTest {
    engine: Engine,
    clock: ManualClock,
    receiver: Arc<Receiver>,
    caller: Caller,
}

fn tool() -> FnTool {
    FnTool::new("t.job", "A job", |_: Nothing| async { Ok::<_, Fault>("done") }).background()
}

impl WebhookTest {
    async fn with(receiver: Arc<Receiver>) -> Self {
        let store = Arc::new(MemoryStore::default());
        let clock = ManualClock::at(NOW);
        Self::on(store, clock, receiver).await
    }

    async fn on(store: Arc<dyn Store>, clock: ManualClock, receiver: Arc<Receiver>) -> Self {
        let schedule = RetrySchedule { retry_ms: vec![5_000, 300_000], jitter: 0.0 };
        let settings = DeliverySettings { schedule, max_parallel: 4, max_parallel_per_receiver: 2 };
        let engine = Engine::builder()
            .store(store)
            .clock(Arc::new(clock.clone()))
            .tool(tool())
            .tool(FnTool::new("t.long", "Never ends", |_: Nothing| async {
                std::future::pending::<Result<u32, Fault>>().await
            }))
            .webhook_sender(receiver.clone(), settings)
            .build_idle()
            .await
            .unwrap();
        Self { engine, clock, receiver, caller: Caller::local("default") }
    }

    async fn end_call(&self, url: &str) -> CallId {
        let mut request = CallRequest::new("t.job", "{}").unwrap();
        request.callback_url = Some(url.to_owned());
        let ticket = self.engine.calls().invoke(&self.caller, request).await.unwrap();
        self.engine.calls().wait(&self.caller, &ticket.call.id, Until::Ended).await.unwrap();
        ticket.call.id.clone()
    }

    async fn run(&self) -> usize {
        dispatcher::run_once(self.engine.webhooks()).await.unwrap()
    }

    async fn delivery(&self, id: &CallId) -> (Delivery, Vec<DeliveryAttempt>) {
        self.engine.webhooks().delivery(&self.caller, id).await.unwrap().unwrap()
    }
}

#[tokio::test]
async fn a_delivery_is_retried_by_the_schedule_until_exhausted() {
    let test = WebhookTest::with(Receiver::responding_with(&[500, 302, 404])).await;
    let id = test.end_call("https://a.example/x").await;
    assert_eq!((test.run().await, test.run().await), (1, 0), "not before it is due");
    test.clock.advance(4_999);
    assert_eq!(test.run().await, 0);
    test.clock.advance(1);
    assert_eq!(test.run().await, 1);
    test.clock.advance(300_000);
    assert_eq!(test.run().await, 1);
    let (delivery, attempts) = test.delivery(&id).await;
    assert_eq!((delivery.status, delivery.attempts), (DeliveryStatus::Exhausted, 3));
    let codes: Vec<_> = attempts.iter().map(|attempt| attempt.status_code.unwrap()).collect();
    assert_eq!(codes, [500, 302, 404]);
    assert_eq!(attempts[2].at_ms, NOW + 305_000);
    assert!(attempts[1].error.as_ref().unwrap().contains("redirects are not followed"));
    test.clock.advance(86_400_000);
    assert_eq!(test.run().await, 0);
    let message = test.receiver.received_ids().pop().unwrap();
    assert_eq!(
        test.receiver.received_ids(),
        vec![message; 3],
        "every attempt has the same message id"
    );
}

#[tokio::test]
async fn after_410_a_delivery_is_sent_only_on_redelivery() {
    let test = WebhookTest::with(Receiver::responding_with(&[410])).await;
    let id = test.end_call("https://a.example/x").await;
    test.run().await;
    assert_eq!(test.delivery(&id).await.0.status, DeliveryStatus::Gone);
    test.clock.advance(86_400_000);
    assert_eq!(test.run().await, 0);
    let redelivered = test.engine.webhooks().redeliver(&test.caller, &id).await.unwrap();
    assert_eq!(redelivered.status, DeliveryStatus::Pending);
    assert_eq!(test.run().await, 1);
    let (delivery, attempts) = test.delivery(&id).await;
    assert_eq!((delivery.status, attempts.len()), (DeliveryStatus::Delivered, 2));
    // Redelivery also works after a successful delivery.
    test.engine.webhooks().redeliver(&test.caller, &id).await.unwrap();
    assert_eq!(test.run().await, 1);
    assert_eq!(test.receiver.received_ids().len(), 3);
}

#[tokio::test]
async fn after_410_pending_deliveries_to_the_same_url_are_given_up() {
    let test = WebhookTest::with(Receiver::responding_with(&[500, 410])).await;
    let (url, other) = ("https://a.example/x", "https://a.example/y");
    let first = test.end_call(url).await;
    test.run().await;
    let [second, elsewhere] = [test.end_call(url).await, test.end_call(other).await];
    // This call is still running when the receiver responds with 410.
    let mut request = CallRequest::new("t.long", "{}").unwrap();
    request.callback_url = Some(url.to_owned());
    let open = test.engine.calls().invoke(&test.caller, request).await.unwrap().call.id.clone();
    assert_eq!(test.run().await, 2);
    for id in [&first, &second, &open] {
        assert_eq!(test.delivery(id).await.0.status, DeliveryStatus::Gone, "{id}");
    }
    assert_eq!(test.delivery(&elsewhere).await.0.status, DeliveryStatus::Delivered);
    test.engine.calls().cancel(&test.caller, &open, None).await.unwrap();
    test.clock.advance(86_400_000);
    assert_eq!(test.run().await, 0);
    let (delivery, attempts) = test.delivery(&open).await;
    assert!(delivery.last_error.unwrap().contains("410") && attempts.is_empty());
    // A redelivery and a new call with the URL are still sent.
    test.engine.webhooks().redeliver(&test.caller, &open).await.unwrap();
    let later = test.end_call(url).await;
    assert_eq!(test.run().await, 2);
    for id in [&open, &later] {
        assert_eq!(test.delivery(id).await.0.status, DeliveryStatus::Delivered);
    }
}

#[tokio::test]
async fn a_delivery_is_sent_after_a_crash_between_end_and_delivery() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(NOW));
    let before =
        WebhookTest::on(store.clone(), clock.clone(), Receiver::responding_with(&[])).await;
    let id = before.end_call("https://a.example/x").await;
    // The engine was dropped before it checked for due deliveries.
    drop(before);
    let after = WebhookTest::on(store, clock, Receiver::responding_with(&[])).await;
    assert_eq!(after.run().await, 1);
    let message = after.receiver.received.lock()[0].clone();
    assert_eq!(message.call.id, id);
    assert_eq!(message.call.outcome.as_ref().unwrap().data.as_ref().unwrap().text(), "\"done\"");
    assert_eq!(after.delivery(&id).await.0.status, DeliveryStatus::Delivered);
}

#[tokio::test]
async fn a_slow_receiver_does_not_delay_other_receivers() {
    let test = WebhookTest::with(Receiver::responding_with(&[])).await;
    for n in 0..5 {
        test.end_call(&format!("https://slow.example/{n}")).await;
    }
    let quick = test.end_call("https://quick.example/").await;
    let engine = test.engine.clone();
    let round = tokio::spawn(async move { dispatcher::run_once(engine.webhooks()).await.unwrap() });
    while test.delivery(&quick).await.0.status != DeliveryStatus::Delivered {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        test.receiver.slow_requests.load(Ordering::SeqCst),
        2,
        "at most max_parallel_per_receiver at once"
    );
    test.receiver.slow.notify_waiters();
    assert_eq!(round.await.unwrap(), 3);
}

#[tokio::test]
async fn retry_after_pauses_all_deliveries_to_the_receiver() {
    let busy = DeliveryResponse { result: Ok(429), retry_after_ms: Some(30_000) };
    let receiver = Arc::new(Receiver { answers: Mutex::new(vec![busy]), ..Receiver::default() });
    let test = WebhookTest::with(receiver).await;
    let first = test.end_call("https://busy.example/1").await;
    assert_eq!(test.run().await, 1);
    assert_eq!(test.delivery(&first).await.0.due_ms, Some(NOW + 30_000));
    test.end_call("https://busy.example/2").await;
    let other = test.end_call("https://other.example/").await;
    assert_eq!(test.run().await, 1, "only the delivery to the other receiver");
    assert_eq!(test.delivery(&other).await.0.status, DeliveryStatus::Delivered);
    test.clock.advance(30_000);
    assert_eq!(test.run().await, 2);
}

#[tokio::test]
async fn redelivery_during_an_attempt_queues_another_attempt() {
    let test = WebhookTest::with(Receiver::responding_with(&[])).await;
    let id = test.end_call("https://slow.example/").await;
    let engine = test.engine.clone();
    let round = tokio::spawn(async move { dispatcher::run_once(engine.webhooks()).await.unwrap() });
    while test.receiver.slow_requests.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    test.engine.webhooks().redeliver(&test.caller, &id).await.unwrap();
    test.receiver.slow.notify_waiters();
    assert_eq!(round.await.unwrap(), 1);
    let (delivery, attempts) = test.delivery(&id).await;
    assert_eq!((delivery.status, attempts.len()), (DeliveryStatus::Pending, 1));
    test.receiver.slow.notify_one();
    assert_eq!(test.run().await, 1);
    assert_eq!(test.delivery(&id).await.0.status, DeliveryStatus::Delivered);
}

#[tokio::test]
async fn a_started_engine_delivers_and_retries() {
    let receiver = Receiver::responding_with(&[503]);
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
    let mut request = CallRequest::new("t.job", "{}").unwrap();
    request.callback_url = Some("https://a.example/x".into());
    let id = engine.calls().invoke(&caller, request).await.unwrap().call.id.clone();
    let delivered = async {
        loop {
            let found = engine.webhooks().delivery(&caller, &id).await.unwrap().unwrap();
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
async fn invalid_callback_urls_and_redeliveries_are_refused() {
    let test = WebhookTest::with(Receiver::responding_with(&[])).await;
    for url in ["", "ftp://a.example", &format!("https://a.example/{}", "x".repeat(2_048))] {
        let mut request = CallRequest::new("t.job", "{}").unwrap();
        request.callback_url = Some(url.to_owned());
        let error = test.engine.calls().invoke(&test.caller, request).await.err().unwrap();
        assert_eq!(error.code(), Code::ValidationError);
        let toolcrib::Error::Refused { fault, .. } = error else { panic!() };
        assert!(fault.message.starts_with("callback_url must"), "{}", fault.message);
        assert_eq!(fault.detail.unwrap()["pointer"], "/callback_url");
    }
    let plain = Engine::builder().tool(tool()).build_idle().await.unwrap();
    let mut request = CallRequest::new("t.job", "{}").unwrap();
    request.callback_url = Some("https://a.example".into());
    let error = plain.calls().invoke(&test.caller, request).await.err().unwrap();
    assert_eq!(error.code(), Code::ValidationError);

    let request = CallRequest::new("t.job", "{}").unwrap();
    let without = test.engine.calls().invoke(&test.caller, request).await.unwrap().call.id.clone();
    let repeated = test.engine.webhooks().redeliver(&test.caller, &without).await;
    assert_eq!(repeated.err().unwrap().code(), Code::NotFound);
    let provider = Caller { roles: Role::Provider.into(), ..test.caller.clone() };
    let query = DeliveryQuery { limit: 10, ..DeliveryQuery::default() };
    let listed = test.engine.webhooks().deliveries(&provider, query).await;
    assert_eq!(listed.err().unwrap().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn the_same_key_with_another_callback_url_is_a_mismatch() {
    let test = WebhookTest::with(Receiver::responding_with(&[])).await;
    let request = |url: Option<&str>| CallRequest {
        idempotency_key: Some("k".into()),
        callback_url: url.map(str::to_owned),
        ..CallRequest::new("t.job", "{}").unwrap()
    };
    let first = Some("https://a.example/1");
    test.engine.calls().invoke(&test.caller, request(first)).await.unwrap();
    assert!(test.engine.calls().invoke(&test.caller, request(first)).await.unwrap().replayed);
    for other in [None, Some("https://a.example/2")] {
        let error = test.engine.calls().invoke(&test.caller, request(other)).await.err().unwrap();
        assert_eq!(error.code(), Code::IdempotencyMismatch);
    }
}

#[tokio::test]
async fn purging_a_call_deletes_its_delivery() {
    let test = WebhookTest::with(Receiver::responding_with(&[500])).await;
    test.end_call("https://a.example/x").await;
    test.run().await;
    test.clock.advance(10_000);
    assert_eq!(purge::run_once(test.engine.calls(), 1_000).await.unwrap(), 1);
    assert_eq!(test.run().await, 0);
    let query = DeliveryQuery { limit: 10, ..DeliveryQuery::default() };
    assert!(
        test.engine.webhooks().deliveries(&test.caller, query).await.unwrap().deliveries.is_empty()
    );
}

/// A subscriber of a run matches later results by the ids in the events.
#[tokio::test]
async fn the_events_of_a_task_contain_its_ids() {
    let test = WebhookTest::with(Receiver::responding_with(&[])).await;
    let mut request = CallRequest::new("t.job", "{}").unwrap();
    request.call_id = Some("mine-7".into());
    let id = test.engine.calls().invoke(&test.caller, request).await.unwrap().call.id.clone();
    test.engine.calls().wait(&test.caller, &id, Until::Ended).await.unwrap();
    let query = EventQuery::Run("run_default".into());
    let events = test.engine.calls().events(&test.caller, &query, 0, 10).await.unwrap();
    let ends = [EventKind::Requested, EventKind::Finished];
    for event in events.iter().filter(|event| ends.contains(&event.record.kind)) {
        assert_eq!(event.record.data["task_id"], id.as_str());
        assert_eq!(event.record.data["call_id"], "mine-7");
    }
}

#[tokio::test]
async fn a_call_has_ended_when_its_webhook_is_sent() {
    let store = FlakyStore::new(SeededRng::new(1));
    let receiver = Receiver::responding_with(&[]);
    let test = WebhookTest::on(store.clone(), ManualClock::at(NOW), receiver).await;
    let mut request = CallRequest::new("t.long", "{}").unwrap();
    request.callback_url = Some("https://a.example/x".to_owned());
    let id = test.engine.calls().invoke(&test.caller, request).await.unwrap().call.id.clone();
    // While the gate is held, the store has committed the end and does not reply.
    let gate = store.reply_gate.write().await;
    let canceling = test.engine.calls().cancel(&test.caller, &id, None);
    let dispatched = async {
        while test.run().await == 0 {
            tokio::task::yield_now().await;
        }
        test.engine.calls().call(&test.caller, &id).await.unwrap().status
    };
    let release = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(gate);
    };
    let (canceled, found, ()) = tokio::join!(canceling, dispatched, release);
    assert_eq!((canceled.unwrap().status, found), (Status::Canceled, Status::Canceled));
}
