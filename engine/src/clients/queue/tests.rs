//! Tests of the client queue alone: assignment and redelivery.

use super::*;
use crate::domain::id::IdGenerator;
use crate::ports::clock::ManualClock;

struct Room {
    desk: ClientQueue,
    clock: ManualClock,
    minter: IdGenerator,
}

impl Room {
    fn new() -> Self {
        let clock = ManualClock::at(1_000);
        let desk = ClientQueue::new(Arc::new(clock.clone()));
        Self { desk, clock, minter: IdGenerator::default() }
    }

    fn connect(
        &self,
        client_id: &str,
        line: Transport,
        memory: Redelivery,
        window: usize,
    ) -> ClientSession {
        self.desk.connect(ConnectRequest {
            project: "p".into(),
            client_id: client_id.into(),
            tools: ["t".to_owned()].into(),
            window,
            redelivery: memory,
            transport: line,
        })
    }

    async fn put(&self, effect: Effect, pinned: Option<&str>, taken_by: Option<&str>) -> CallId {
        self.put_until(u64::MAX, effect, pinned, taken_by).await
    }

    async fn put_until(
        &self,
        deadline_ms: u64,
        effect: Effect,
        pinned: Option<&str>,
        taken_by: Option<&str>,
    ) -> CallId {
        let id = self.minter.next_call_id(self.clock.now_ms());
        let attempt = Attempt {
            call_id: id.clone(),
            project: "p".into(),
            run_id: "r".into(),
            agent: "a".into(),
            number: 1,
            tool: "t".into(),
            effect,
            args: Json::empty_object(),
            command: None,
            deadline_ms,
            traceparent: None,
            client_id: pinned.map(str::to_owned),
            acknowledged_by: taken_by.map(str::to_owned),
            redelivered: taken_by.is_some(),
            elicitation: None,
        };
        self.desk.start(attempt, Arc::new(|_| {})).await;
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
async fn work_is_shared_evenly_and_within_the_window() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 3);
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 3);
    let mut calls = Vec::new();
    for _ in 0..10 {
        calls.push(room.put(Effect::Read, None, None).await);
    }
    let (first, second) = (ids(&mut one), ids(&mut two));
    assert_eq!((first.len(), second.len()), (3, 3), "the rest waits");
    room.desk.release_attempt(&first[0].0, 1);
    assert_eq!(ids(&mut one), [(calls[6].clone(), false)], "one done, the next is given, in order");
}

#[tokio::test]
async fn what_was_not_acknowledged_goes_to_somebody_else() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = room.put(Effect::Irreversible, None, None).await;
    assert_eq!(ids(&mut one).len(), 1);
    drop(one);
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn what_was_acknowledged_comes_again_only_where_that_is_safe() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let read = room.put(Effect::Read, None, None).await;
    let once = room.put(Effect::Irreversible, None, None).await;
    assert_eq!(ids(&mut one).len(), 2);
    room.desk.acknowledge("p", "one", &read);
    room.desk.acknowledge("p", "one", &once);
    drop(one);
    let mut other = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut other), [], "it stays with its client");
    let mut back = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut back), [(read.clone(), true)]);
    drop(back);
    let mut back = room.connect("one", Transport::Streaming, Redelivery::All, 8);
    let mut given = ids(&mut back);
    given.sort();
    assert_eq!(given, [(read, true), (once, true)], "a client with a record is asked for both");
}

#[tokio::test]
async fn a_client_that_stays_away_loses_what_others_may_do() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let read = room.put(Effect::Read, None, None).await;
    let once = room.put(Effect::Irreversible, None, None).await;
    ids(&mut one);
    room.desk.acknowledge("p", "one", &read);
    room.desk.acknowledge("p", "one", &once);
    drop(one);
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    room.clock.advance(DISCONNECT_GRACE_MS - 1);
    room.desk.requeue_expired();
    assert_eq!(ids(&mut two), []);
    room.clock.advance(1);
    room.desk.requeue_expired();
    assert_eq!(ids(&mut two), [(read, true)], "never the irreversible one");
}

#[tokio::test]
async fn a_pinned_call_waits_for_its_client() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = room.put(Effect::Read, Some("two"), None).await;
    assert_eq!(ids(&mut one), []);
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call.clone(), false)]);
    drop(two);
    assert_eq!(ids(&mut one), [], "also after a hang-up");
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(call, true)]);
}

#[tokio::test]
async fn a_polled_request_comes_again_when_its_lease_is_over() {
    let room = Room::new();
    let call = room.put(Effect::Irreversible, None, None).await;
    let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [(call.clone(), false)]);
    poll.start_poll_lease(&call);
    drop(poll);
    let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [], "it is being worked on");
    drop(poll);
    room.clock.advance(POLL_LEASE_MS);
    room.desk.requeue_expired();
    let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 1);
    assert_eq!(ids(&mut poll), [(call, true)]);
}

#[tokio::test]
async fn what_was_taken_after_a_poll_comes_again_after_half_of_its_time() {
    let room = Room::new();
    // Acknowledged with the poll, after it, and before a restart.
    for how in ["with", "after", "before"] {
        let deadline_ms = room.clock.now_ms() + 4 * POLL_LEASE_MS;
        let taken_by = (how == "before").then_some("one");
        let read = room.put_until(deadline_ms, Effect::Read, None, taken_by).await;
        let once = room.put_until(deadline_ms, Effect::Irreversible, None, taken_by).await;
        if how != "before" {
            let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
            assert_eq!(ids(&mut poll).len(), 2);
            let take = || {
                [&read, &once].iter().for_each(|id| room.desk.acknowledge("p", "one", id));
            };
            [&read, &once].iter().for_each(|id| poll.start_poll_lease(id));
            if how == "with" {
                take();
            }
            drop(poll);
            if how == "after" {
                take();
            }
        }
        // The client keeps polling, so it never counts as disconnected.
        for wait_ms in [DISCONNECT_GRACE_MS - 1, DISCONNECT_GRACE_MS - 1, 1] {
            room.clock.advance(wait_ms);
            room.desk.requeue_expired();
            let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
            assert_eq!(ids(&mut poll), [], "{how}");
        }
        room.clock.advance(1);
        room.desk.requeue_expired();
        let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
        assert_eq!(ids(&mut poll), [(read.clone(), true)], "{how}, never the irreversible one");
        [read, once].iter().for_each(|id| room.desk.release_attempt(id, 1));
    }
}

#[tokio::test]
async fn what_somebody_takes_unasked_is_given_to_nobody_else() {
    let room = Room::new();
    let call = room.put(Effect::Irreversible, None, None).await;
    room.desk.acknowledge("p", "one", &call);
    assert_eq!(room.desk.lease_holder(&call).as_deref(), Some("one"));
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), []);
    room.desk.acknowledge("p", "two", &call);
    assert_eq!(room.desk.lease_holder(&call).as_deref(), Some("one"), "one has it");
}

#[tokio::test]
async fn what_a_poll_did_not_bring_goes_back_in_line_at_once() {
    let room = Room::new();
    let read = room.put(Effect::Read, None, None).await;
    let unread = room.put(Effect::Read, None, None).await;
    let mut poll = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 2);
    assert!(
        matches!(poll.try_next(), Some(ClientMessage::Execute(request)) if request.call_id == read)
    );
    drop(poll);
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), [(read, true), (unread, true)]);
}

#[tokio::test]
async fn after_a_restart_a_taken_request_is_still_its_clients() {
    let room = Room::new();
    let read = room.put(Effect::Read, None, Some("one")).await;
    let once = room.put(Effect::Irreversible, None, Some("one")).await;
    let mut two = room.connect("two", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut two), []);
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut one), [(read, true)]);
    assert_eq!(room.desk.lease_holder(&once).as_deref(), Some("one"), "it may still answer");
}

#[tokio::test]
async fn a_cancel_reaches_the_client_that_has_it() {
    let room = Room::new();
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    let call = room.put(Effect::Read, None, None).await;
    ids(&mut one);
    room.desk.cancel(&call, 1);
    room.desk.release_attempt(&call, 1);
    assert!(
        matches!(one.try_next(), Some(ClientMessage::Cancel { call_id, attempt: 1 }) if call_id == call)
    );
    let waiting = room.put(Effect::Read, Some("nobody"), None).await;
    room.desk.cancel(&waiting, 1);
    room.desk.release_attempt(&waiting, 1);
    let mut nobody = room.connect("nobody", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    assert_eq!(ids(&mut nobody), [], "what is canceled is not given out");
}

#[tokio::test]
async fn a_closed_desk_hangs_up_on_everybody() {
    let room = Room::new();
    let mut before = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 8);
    room.desk.close();
    assert!(before.next().await.is_none());
    room.put(Effect::Read, None, None).await;
    let mut after = room.connect("one", Transport::Polling, Redelivery::ReversibleOnly, 8);
    assert!(after.next().await.is_none());
    assert_eq!(room.desk.connection_count(), 0);
}

#[tokio::test]
async fn what_nobody_came_for_is_forgotten_when_it_has_ended() {
    let room = Room::new();
    let first = room.put(Effect::Read, None, None).await;
    let pinned = room.put(Effect::Read, Some("one"), None).await;
    for n in 0..100 {
        let id = room.put(Effect::Read, (n % 2 == 0).then_some("one"), None).await;
        room.desk.cancel(&id, 1);
        room.desk.release_attempt(&id, 1);
    }
    let taken = room.put(Effect::Read, None, None).await;
    room.desk.acknowledge("p", "two", &taken);
    assert_eq!(room.desk.state.lock().queued_count(), 2);
    let mut one = room.connect("one", Transport::Streaming, Redelivery::ReversibleOnly, 10);
    assert_eq!(ids(&mut one), [(pinned, false), (first, false)]);
    assert_eq!(room.desk.state.lock().queued_count(), 0);
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
async fn a_cancel_that_was_not_passed_on_is_heard_on_another_connection() {
    let room = Room::new();
    for line in [Transport::Streaming, Transport::Polling] {
        let mut one = room.connect("one", line, Redelivery::ReversibleOnly, 8);
        let calls =
            [room.put(Effect::Read, None, None).await, room.put(Effect::Read, None, None).await];
        assert_eq!(ids(&mut one).len(), 2);
        for call in &calls {
            room.desk.acknowledge("p", "one", call);
            room.desk.cancel(call, 1);
            room.desk.release_attempt(call, 1);
        }
        // One cancellation was read and deferred; the other was not read.
        let kept = one.try_next().unwrap();
        one.defer_cancel(kept);
        drop(one);
        let two = room.connect("one", line, Redelivery::ReversibleOnly, 8);
        let mut three = room.connect("one", line, Redelivery::ReversibleOnly, 8);
        assert_eq!(canceled(&mut three), [], "said to the other one");
        drop(two);
        assert_eq!(canceled(&mut three), calls, "and to this one, which is left");
        drop(three);
        let mut four = room.connect("one", line, Redelivery::ReversibleOnly, 8);
        assert_eq!(canceled(&mut four), [], "once");
    }
}

#[tokio::test]
async fn who_never_came_is_forgotten_with_its_last_work() {
    let room = Room::new();
    let pinned = room.put(Effect::Read, Some("pinned"), None).await;
    let unasked = room.put(Effect::Read, None, None).await;
    room.desk.acknowledge("p", "unasked", &unasked);
    let before = [
        room.put(Effect::Read, None, Some("before")).await,
        room.put(Effect::Read, None, Some("before")).await,
    ];
    let seen = |room: &Room| {
        let clients = room.desk.clients("p").into_iter();
        clients.map(|c| (c.client_id, c.last_seen_ms)).collect::<Vec<_>>()
    };
    let now_ms = Some(room.clock.now_ms());
    let all = [("before".into(), now_ms), ("pinned".into(), None), ("unasked".into(), now_ms)];
    assert_eq!(seen(&room), all);
    for id in [&pinned, &unasked, &before[0]] {
        room.desk.release_attempt(id, 1);
    }
    assert_eq!(seen(&room), [("before".into(), now_ms)], "it has more to answer");
    room.desk.release_attempt(&before[1], 1);
    assert_eq!(seen(&room), []);
    drop(room.connect("came", Transport::Polling, Redelivery::ReversibleOnly, 1));
    assert_eq!(seen(&room), [("came".into(), now_ms)], "who was here is shown");
}
