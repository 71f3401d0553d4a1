//! Tests of the client queue alone: assignment and redelivery.

use super::*;
use crate::domain::id::IdGenerator;
use crate::ports::clock::ManualClock;

struct TestQueue {
    queue: ClientQueue,
    clock: ManualClock,
    id_generator: IdGenerator,
}

impl TestQueue {
    fn new() -> Self {
        let clock = ManualClock::at(1_000);
        let queue = ClientQueue::new(Arc::new(clock.clone()));
        Self { queue, clock, id_generator: IdGenerator::default() }
    }

    fn connect(
        &self,
        client_id: &str,
        transport: Transport,
        redelivery: Redelivery,
        window: usize,
    ) -> ClientSession {
        self.queue.connect(ConnectRequest {
            project: "p".into(),
            client_id: client_id.into(),
            tools: ["t".to_owned()].into(),
            window,
            redelivery,
            transport,
        })
    }

    async fn put(
        &self,
        effect: Effect,
        pinned: Option<&str>,
        acknowledged_by: Option<&str>,
    ) -> CallId {
        self.put_until(u64::MAX, effect, pinned, acknowledged_by).await
    }

    async fn put_until(
        &self,
        deadline_ms: u64,
        effect: Effect,
        pinned: Option<&str>,
        acknowledged_by: Option<&str>,
    ) -> CallId {
        let id = self.id_generator.next_call_id(self.clock.now_ms());
        let attempt = Attempt {
            call_id: id.clone(),
            project: "p".into(),
            run_id: "r".into(),
            agent: "a".into(),
            auth_method: Default::default(),
            attributes: Default::default(),
            number: 1,
            tool: "t".into(),
            effect,
            args: Json::empty_object(),
            command: None,
            deadline_ms,
            connect_deadline_ms: deadline_ms,
            input_timeout_ms: 3_600_000,
            traceparent: None,
            client_id: pinned.map(str::to_owned),
            acknowledged_by: acknowledged_by.map(str::to_owned),
            redelivered: acknowledged_by.is_some(),
            elicitation: None,
            meta: None,
        };
        self.queue.start(attempt, Arc::new(|_| {})).await;
        id
    }
}

fn ids(session: &mut ClientSession) -> Vec<(CallId, bool)> {
    let mut all = Vec::new();
    while let Some(ClientMessage::Execute(request)) = session.try_next() {
        all.push((request.call_id, request.redelivered));
    }
    all
}

#[tokio::test]
async fn work_is_distributed_evenly_and_within_the_window() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 3);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 3);
    let mut calls = Vec::new();
    for _ in 0..10 {
        calls.push(fixture.put(Effect::Read, None, None).await);
    }
    let (first, second) = (ids(&mut one), ids(&mut two));
    assert_eq!((first.len(), second.len()), (3, 3), "the other items wait");
    fixture.queue.release_attempt(&first[0].0, 1);
    assert_eq!(
        ids(&mut one),
        [(calls[6].clone(), false)],
        "one ended, the next is delivered in order"
    );
}

#[tokio::test]
async fn an_unacknowledged_item_is_redelivered_to_another_client() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = fixture.put(Effect::Irreversible, None, None).await;
    assert_eq!(ids(&mut one).len(), 1);
    drop(one);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn an_acknowledged_item_is_redelivered_only_if_that_is_safe() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let read = fixture.put(Effect::Read, None, None).await;
    let once = fixture.put(Effect::Irreversible, None, None).await;
    assert_eq!(ids(&mut one).len(), 2);
    fixture.queue.acknowledge("p", "one", &read);
    fixture.queue.acknowledge("p", "one", &once);
    drop(one);
    let mut other = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut other), [], "the item stays with its client");
    let mut reconnected =
        fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut reconnected), [(read.clone(), true)]);
    drop(reconnected);
    let mut reconnected = fixture.connect("one", Transport::Streaming, Redelivery::All, 8);
    let mut received = ids(&mut reconnected);
    received.sort();
    assert_eq!(
        received,
        [(read, true), (once, true)],
        "a client that accepts all redeliveries gets both"
    );
}

#[tokio::test]
async fn after_the_grace_period_reversible_items_go_to_other_clients() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let read = fixture.put(Effect::Read, None, None).await;
    let once = fixture.put(Effect::Irreversible, None, None).await;
    ids(&mut one);
    fixture.queue.acknowledge("p", "one", &read);
    fixture.queue.acknowledge("p", "one", &once);
    drop(one);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    fixture.clock.advance(FAILOVER_GRACE_MS - 1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), []);
    fixture.clock.advance(1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), [(read, true)], "never the irreversible one");
}

#[tokio::test]
async fn without_another_client_an_item_stays_for_the_whole_grace_period() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let read = fixture.put(Effect::Read, None, None).await;
    ids(&mut one);
    fixture.queue.acknowledge("p", "one", &read);
    drop(one);
    fixture.clock.advance(DISCONNECT_GRACE_MS - 1);
    fixture.queue.requeue_expired();
    assert_eq!(fixture.queue.lease_holder(&read).as_deref(), Some("one"));
    fixture.clock.advance(1);
    fixture.queue.requeue_expired();
    assert_eq!(fixture.queue.lease_holder(&read), None);
}

#[tokio::test]
async fn a_client_between_two_polls_keeps_its_item() {
    let fixture = TestQueue::new();
    let read = fixture.put(Effect::Read, None, None).await;
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll).len(), 1);
    poll.start_poll_lease(&read);
    fixture.queue.acknowledge("p", "one", &read);
    drop(poll);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    fixture.clock.advance(DISCONNECT_GRACE_MS - 1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), []);
}

#[tokio::test]
async fn a_pinned_call_waits_for_its_client() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = fixture.put(Effect::Read, Some("two"), None).await;
    assert_eq!(ids(&mut one), []);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call.clone(), false)]);
    drop(two);
    assert_eq!(ids(&mut one), [], "also after a disconnect");
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn a_polled_item_is_redelivered_when_its_lease_expires() {
    let fixture = TestQueue::new();
    let call = fixture.put(Effect::Irreversible, None, None).await;
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [(call.clone(), false)]);
    poll.start_poll_lease(&call);
    drop(poll);
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [], "the lease is still valid");
    drop(poll);
    fixture.clock.advance(POLL_LEASE_MS);
    fixture.queue.requeue_expired();
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [(call, true)]);
}

#[tokio::test]
async fn an_acknowledged_polled_item_is_redelivered_after_half_its_time() {
    let fixture = TestQueue::new();
    // Acknowledged with the poll, after it, and before a restart.
    for when in ["with", "after", "before"] {
        let deadline_ms = fixture.clock.now_ms() + 4 * POLL_LEASE_MS;
        let acknowledged_by = (when == "before").then_some("one");
        let read = fixture.put_until(deadline_ms, Effect::Read, None, acknowledged_by).await;
        let once =
            fixture.put_until(deadline_ms, Effect::Irreversible, None, acknowledged_by).await;
        if when != "before" {
            let mut poll =
                fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
            assert_eq!(ids(&mut poll).len(), 2);
            let acknowledge_both = || {
                [&read, &once].iter().for_each(|id| fixture.queue.acknowledge("p", "one", id));
            };
            [&read, &once].iter().for_each(|id| poll.start_poll_lease(id));
            if when == "with" {
                acknowledge_both();
            }
            drop(poll);
            if when == "after" {
                acknowledge_both();
            }
        }
        // The client keeps polling, so it never counts as disconnected.
        for wait_ms in [DISCONNECT_GRACE_MS - 1, DISCONNECT_GRACE_MS - 1, 1] {
            fixture.clock.advance(wait_ms);
            fixture.queue.requeue_expired();
            let mut poll =
                fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
            assert_eq!(ids(&mut poll), [], "{when}");
        }
        fixture.clock.advance(1);
        fixture.queue.requeue_expired();
        let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
        assert_eq!(ids(&mut poll), [(read.clone(), true)], "{when}, never the irreversible one");
        [read, once].iter().for_each(|id| fixture.queue.release_attempt(id, 1));
    }
}

#[tokio::test]
async fn a_client_that_works_without_polling_keeps_its_item_for_half_its_time() {
    let fixture = TestQueue::new();
    let deadline_ms = fixture.clock.now_ms() + 4 * POLL_LEASE_MS;
    let call = fixture.put_until(deadline_ms, Effect::Read, None, None).await;
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [(call.clone(), false)]);
    fixture.queue.acknowledge("p", "one", &call);
    drop(poll);
    // The client polls again only after it has answered, and another client waits for work.
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    for wait_ms in [DISCONNECT_GRACE_MS, POLL_LEASE_MS - 1] {
        fixture.clock.advance(wait_ms);
        fixture.queue.requeue_expired();
        assert_eq!(ids(&mut two), []);
    }
    fixture.clock.advance(1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn after_a_restart_an_item_leaves_a_client_that_does_not_return() {
    let fixture = TestQueue::new();
    let deadline_ms = fixture.clock.now_ms() + 4 * POLL_LEASE_MS;
    let call = fixture.put_until(deadline_ms, Effect::Read, None, Some("one")).await;
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    fixture.clock.advance(DISCONNECT_GRACE_MS - 1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), []);
    fixture.clock.advance(1);
    fixture.queue.requeue_expired();
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn an_item_acknowledged_before_delivery_is_not_given_to_others() {
    let fixture = TestQueue::new();
    let call = fixture.put(Effect::Irreversible, None, None).await;
    fixture.queue.acknowledge("p", "one", &call);
    assert_eq!(fixture.queue.lease_holder(&call).as_deref(), Some("one"));
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), []);
    fixture.queue.acknowledge("p", "two", &call);
    assert_eq!(
        fixture.queue.lease_holder(&call).as_deref(),
        Some("one"),
        "the first client holds the item"
    );
}

#[tokio::test]
async fn items_that_a_poll_did_not_deliver_are_requeued_immediately() {
    let fixture = TestQueue::new();
    let read = fixture.put(Effect::Read, None, None).await;
    let unread = fixture.put(Effect::Read, None, None).await;
    let mut poll = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 2);
    assert!(
        matches!(poll.try_next(), Some(ClientMessage::Execute(request)) if request.call_id == read)
    );
    drop(poll);
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(read, true), (unread, true)]);
}

#[tokio::test]
async fn after_a_restart_an_acknowledged_item_stays_with_its_client() {
    let fixture = TestQueue::new();
    let read = fixture.put(Effect::Read, None, Some("one")).await;
    let once = fixture.put(Effect::Irreversible, None, Some("one")).await;
    let mut two = fixture.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), []);
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut one), [(read, true)]);
    assert_eq!(
        fixture.queue.lease_holder(&once).as_deref(),
        Some("one"),
        "the first client may still report"
    );
}

#[tokio::test]
async fn a_cancellation_reaches_the_client_that_holds_the_item() {
    let fixture = TestQueue::new();
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = fixture.put(Effect::Read, None, None).await;
    ids(&mut one);
    fixture.queue.cancel(&call, 1);
    fixture.queue.release_attempt(&call, 1);
    assert!(matches!(
        one.try_next(),
        Some(ClientMessage::Cancel { call_id, attempt: 1 }) if call_id == call
    ));
    let waiting = fixture.put(Effect::Read, Some("nobody"), None).await;
    fixture.queue.cancel(&waiting, 1);
    fixture.queue.release_attempt(&waiting, 1);
    let mut nobody = fixture.connect("nobody", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut nobody), [], "a canceled item is not delivered");
}

#[tokio::test]
async fn closing_the_queue_ends_every_session() {
    let fixture = TestQueue::new();
    let mut before = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    fixture.queue.close();
    assert!(before.next().await.is_none());
    fixture.put(Effect::Read, None, None).await;
    let mut after = fixture.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
    assert!(after.next().await.is_none());
    assert_eq!(fixture.queue.connection_count(), 0);
}

#[tokio::test]
async fn ended_items_are_removed_from_the_queue() {
    let fixture = TestQueue::new();
    let first = fixture.put(Effect::Read, None, None).await;
    let pinned = fixture.put(Effect::Read, Some("one"), None).await;
    for n in 0..100 {
        let id = fixture.put(Effect::Read, (n % 2 == 0).then_some("one"), None).await;
        fixture.queue.cancel(&id, 1);
        fixture.queue.release_attempt(&id, 1);
    }
    let acknowledged = fixture.put(Effect::Read, None, None).await;
    fixture.queue.acknowledge("p", "two", &acknowledged);
    assert_eq!(fixture.queue.state.lock().queued_count(), 2);
    let mut one = fixture.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 10);
    assert_eq!(ids(&mut one), [(pinned, false), (first, false)]);
    assert_eq!(fixture.queue.state.lock().queued_count(), 0);
}

fn canceled(session: &mut ClientSession) -> Vec<CallId> {
    let messages = session.take_cancels().into_iter();
    let id = |message| match message {
        ClientMessage::Cancel { call_id, .. } => call_id,
        ClientMessage::Execute(request) => panic!("{request:?}"),
    };
    messages.map(id).collect()
}

#[tokio::test]
async fn an_undelivered_cancellation_goes_to_another_connection() {
    let fixture = TestQueue::new();
    for transport in [Transport::Streaming, Transport::Polling] {
        let mut one = fixture.connect("one", transport, Redelivery::ReversibleOnly, 8);
        let calls = [
            fixture.put(Effect::Read, None, None).await,
            fixture.put(Effect::Read, None, None).await,
        ];
        assert_eq!(ids(&mut one).len(), 2);
        for call in &calls {
            fixture.queue.acknowledge("p", "one", call);
            fixture.queue.cancel(call, 1);
            fixture.queue.release_attempt(call, 1);
        }
        // One cancellation was read and deferred; the other was not read.
        let cancellation = one.try_next().unwrap();
        one.defer_cancel(cancellation);
        drop(one);
        let two = fixture.connect("one", transport, Redelivery::ReversibleOnly, 8);
        let mut three = fixture.connect("one", transport, Redelivery::ReversibleOnly, 8);
        assert_eq!(canceled(&mut three), [], "delivered to the other connection");
        drop(two);
        assert_eq!(canceled(&mut three), calls, "delivered to the remaining connection");
        drop(three);
        let mut four = fixture.connect("one", transport, Redelivery::ReversibleOnly, 8);
        assert_eq!(canceled(&mut four), [], "delivered once");
    }
}

#[tokio::test]
async fn a_client_that_never_connected_is_removed_with_its_last_item() {
    let fixture = TestQueue::new();
    let pinned = fixture.put(Effect::Read, Some("pinned"), None).await;
    let unassigned = fixture.put(Effect::Read, None, None).await;
    fixture.queue.acknowledge("p", "unasked", &unassigned);
    let before = [
        fixture.put(Effect::Read, None, Some("before")).await,
        fixture.put(Effect::Read, None, Some("before")).await,
    ];
    let seen = |fixture: &TestQueue| {
        let clients = fixture.queue.clients("p").into_iter();
        clients.map(|c| (c.client_id, c.last_seen_ms)).collect::<Vec<_>>()
    };
    let now_ms = Some(fixture.clock.now_ms());
    let all = [("before".into(), now_ms), ("pinned".into(), None), ("unasked".into(), now_ms)];
    assert_eq!(seen(&fixture), all);
    for id in [&pinned, &unassigned, &before[0]] {
        fixture.queue.release_attempt(id, 1);
    }
    assert_eq!(seen(&fixture), [("before".into(), now_ms)], "the client still holds an item");
    fixture.queue.release_attempt(&before[1], 1);
    assert_eq!(seen(&fixture), []);
    drop(fixture.connect("came", Transport::Polling, Redelivery::ReversibleOnly, 1));
    assert_eq!(seen(&fixture), [("came".into(), now_ms)], "a client that connected stays listed");
}
