//! Deliveries: stored with their call, due when it ends, saved by version; and background tasks in
//! lists of calls.

use toolcrib::domain::call::{Call, Origin, Status};
use toolcrib::domain::delivery::{
    Delivery, DeliveryAttempt, DeliveryResponse, DeliveryStatus, MAX_STORED_ATTEMPTS, RetrySchedule,
};
use toolcrib::domain::event::EventKind;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{CallFilter, CreateCallResult, DeliveryFilter, SaveResult, Store};

use crate::support::{
    NOW, append, call, call_at, call_of, ended, ids, key, put, put_keyed, put_with_status, record,
    running, save,
};

const URL: &str = "https://hooks.example/done?a=1";

fn with_callback_url(call: Call) -> Call {
    let callback_url = Some(URL.to_owned());
    Call { origin: Origin { callback_url, ..call.origin.clone() }, ..call }
}

async fn read_delivery(store: &dyn Store, call: &Call) -> Option<(Delivery, Vec<DeliveryAttempt>)> {
    store.delivery(&call.project, &call.id).await.unwrap()
}

async fn pending(store: &dyn Store) -> Vec<CallId> {
    let all = store.pending_deliveries(None, 1_000).await.unwrap();
    all.into_iter().map(|delivery| delivery.call_id).collect()
}

async fn put_due(store: &dyn Store, at_ms: u64) -> Delivery {
    let fresh = with_callback_url(call_at(at_ms - 1));
    put(store, &fresh).await;
    save(store, &ended(&fresh, Status::Succeeded, at_ms)).await;
    read_delivery(store, &fresh).await.unwrap().0
}

fn response(code: u16) -> DeliveryResponse {
    DeliveryResponse { result: Ok(code), retry_after_ms: None }
}

pub async fn a_delivery_is_stored_with_its_call_and_due_when_it_ends(store: &dyn Store) {
    let fresh = with_callback_url(call());
    put(store, &fresh).await;
    let expected = Delivery::for_call(&fresh).unwrap();
    assert_eq!(read_delivery(store, &fresh).await, Some((expected.clone(), vec![])));
    assert_eq!((expected.status, expected.url.as_str()), (DeliveryStatus::AwaitingOutcome, URL));
    let started = running(&fresh);
    save(store, &started).await;
    assert_eq!(
        read_delivery(store, &fresh).await,
        Some((expected.clone(), vec![])),
        "the call still runs"
    );
    assert_eq!(pending(store).await, []);
    save(store, &ended(&started, Status::Failed, NOW + 70)).await;
    let due = expected.after_call_ended(NOW + 70).unwrap();
    assert_eq!(read_delivery(store, &fresh).await, Some((due, vec![])));
    assert_eq!(pending(store).await, [fresh.id]);
}

pub async fn a_call_without_a_callback_url_has_no_delivery(store: &dyn Store) {
    let done = put_with_status(store, &call(), Status::Succeeded).await;
    assert_eq!(read_delivery(store, &done).await, None);
    assert_eq!(pending(store).await, []);
    let unknown = Delivery::for_call(&with_callback_url(call())).unwrap();
    let next = Delivery { version: 2, ..unknown };
    assert_eq!(store.save_delivery(next, None).await.unwrap(), SaveResult::Conflict);
}

pub async fn a_replayed_call_creates_no_second_delivery(store: &dyn Store) {
    let first = with_callback_url(call());
    put_keyed(store, &first, &key("ada", "k", "f")).await;
    let again = with_callback_url(call());
    let created = put_keyed(store, &again, &key("ada", "k", "f")).await;
    assert!(matches!(created, CreateCallResult::Replayed(existing) if existing.id == first.id));
    assert_eq!(read_delivery(store, &again).await, None);
}

pub async fn pending_deliveries_are_read_by_due_time_and_in_pages(store: &dyn Store) {
    let mut expected = vec![];
    for n in [4, 1, 3, 1, 2] {
        let due = put_due(store, NOW + n).await;
        expected.push((due.due_ms.unwrap(), due.call_id));
    }
    put(store, &with_callback_url(call())).await;
    expected.sort();
    let (mut seen, mut after) = (vec![], None);
    loop {
        let page = store.pending_deliveries(after.clone(), 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some((last.due_ms.unwrap(), last.call_id.clone()));
        seen.extend(page.into_iter().map(|delivery| (delivery.due_ms.unwrap(), delivery.call_id)));
    }
    assert_eq!(seen, expected);
}

pub async fn saving_a_delivery_stores_the_next_version_and_its_attempt(store: &dyn Store) {
    let due = put_due(store, NOW).await;
    let schedule = RetrySchedule { retry_ms: vec![500], jitter: 0.0 };
    let late =
        DeliveryResponse { result: Err("no answer within 20000 ms".into()), retry_after_ms: None };
    let (second, first_attempt) = due.after_attempt(&late, (NOW + 5, NOW + 25), &schedule);
    let saved = store.save_delivery(second.clone(), Some(first_attempt.clone())).await.unwrap();
    assert_eq!(saved, SaveResult::Saved);
    let stored = store.delivery("p", &due.call_id).await.unwrap();
    assert_eq!(stored, Some((second.clone(), vec![first_attempt.clone()])));
    assert_eq!(second.due_ms, Some(NOW + 525));
    // A save based on a stale version changes nothing.
    let (stale, lost) = due.after_attempt(&response(200), (NOW + 6, NOW + 7), &schedule);
    assert_eq!(store.save_delivery(stale, Some(lost)).await.unwrap(), SaveResult::Conflict);
    let (third, second_attempt) =
        second.after_attempt(&response(204), (NOW + 530, NOW + 531), &schedule);
    store.save_delivery(third.clone(), Some(second_attempt.clone())).await.unwrap();
    let stored = store.delivery("p", &due.call_id).await.unwrap();
    assert_eq!(stored, Some((third.clone(), vec![first_attempt, second_attempt])));
    assert_eq!((third.status, third.last_error), (DeliveryStatus::Delivered, None));
    assert_eq!(pending(store).await, []);
}

pub async fn only_the_latest_attempts_of_a_delivery_are_kept(store: &dyn Store) {
    let mut delivery = put_due(store, NOW).await;
    for n in 0..u64::from(MAX_STORED_ATTEMPTS) + 3 {
        let (next, attempt) = delivery.with_attempt_recorded(&response(500), (NOW + n, NOW + n));
        assert_eq!(
            store.save_delivery(next.clone(), Some(attempt)).await.unwrap(),
            SaveResult::Saved
        );
        delivery = next;
    }
    let (_, attempts_stored) = store.delivery("p", &delivery.call_id).await.unwrap().unwrap();
    let numbers: Vec<u32> = attempts_stored.iter().map(|attempt| attempt.number).collect();
    assert_eq!(numbers, (4..=MAX_STORED_ATTEMPTS + 3).collect::<Vec<_>>());
}

pub async fn deliveries_are_listed_by_project_status_and_page(store: &dyn Store) {
    let due = [put_due(store, NOW + 1).await, put_due(store, NOW + 2).await];
    let (ended_delivery, attempt) =
        due[0].after_attempt(&response(410), (NOW, NOW), &RetrySchedule::default());
    store.save_delivery(ended_delivery, Some(attempt)).await.unwrap();
    let waiting = with_callback_url(call_at(NOW + 3));
    put(store, &waiting).await;
    put(store, &with_callback_url(Call { project: "q".into(), ..call_of("q", "r", "t") })).await;
    let listed = async |status, before, limit| {
        let filter = DeliveryFilter { project: "p".into(), status, before, limit };
        let found = store.deliveries(filter).await.unwrap();
        found.into_iter().map(|delivery| delivery.call_id.to_string()).collect::<Vec<_>>()
    };
    let ids = [&waiting.id, &due[1].call_id, &due[0].call_id].map(CallId::as_str);
    assert_eq!(listed(None, None, 10).await, ids);
    assert_eq!(listed(None, Some(waiting.id.clone()), 1).await, ids[1..2]);
    assert_eq!(listed(Some(DeliveryStatus::Gone), None, 10).await, ids[2..]);
    assert_eq!(listed(Some(DeliveryStatus::Exhausted), None, 10).await, ids[3..]);
    let other = store.delivery("q", &waiting.id).await.unwrap();
    assert_eq!(other, None, "not found in another project");
}

pub async fn deliveries_and_tasks_are_purged_with_their_call(store: &dyn Store) {
    let due = put_due(store, NOW).await;
    let (next, attempt) = due.after_attempt(&response(500), (NOW, NOW), &RetrySchedule::default());
    store.save_delivery(next.clone(), Some(attempt)).await.unwrap();
    let task = background(call_at(NOW - 1));
    put(store, &task).await;
    save(store, &ended(&task, Status::Succeeded, NOW)).await;
    assert_eq!(store.purge(NOW + 1, 100).await.unwrap().calls, 2);
    assert_eq!(store.delivery("p", &due.call_id).await.unwrap(), None);
    assert_eq!(pending(store).await, []);
    assert_eq!(ids(store, tasks()).await, []);
    let (late, attempt) = next.after_attempt(&response(200), (NOW, NOW), &RetrySchedule::default());
    assert_eq!(store.save_delivery(late, Some(attempt)).await.unwrap(), SaveResult::Conflict);
    // A call that reuses the freed position inherits nothing.
    let fresh = put_due(store, NOW + 5).await;
    assert_eq!(store.delivery("p", &fresh.call_id).await.unwrap(), Some((fresh, vec![])));
}

fn background(call: Call) -> Call {
    Call { origin: Origin { background: true, ..call.origin.clone() }, ..call }
}

fn tasks() -> CallFilter {
    CallFilter { project: "p".into(), background: true, limit: 100, ..CallFilter::default() }
}

pub async fn lists_can_be_limited_to_background_tasks(store: &dyn Store) {
    let mut expected = vec![];
    for (n, status) in Status::ALL.into_iter().enumerate() {
        let at_ms = NOW + 10 * n as u64;
        put_with_status(store, &call_at(at_ms), status).await;
        let run_id = format!("r{}", n % 2);
        let task = Call { run_id, ..background(call_at(at_ms + 1)) };
        expected.push(put_with_status(store, &task, status).await);
    }
    put(store, &background(Call { project: "q".into(), ..call() })).await;
    expected.reverse();
    let listed = async |filter: CallFilter, fits: &dyn Fn(&Call) -> bool| {
        let context = format!("{filter:?}");
        let fitting = expected.iter().filter(|call| fits(call)).map(|call| call.id.clone());
        assert_eq!(ids(store, filter).await, fitting.collect::<Vec<_>>(), "{context}");
    };
    listed(tasks(), &|_| true).await;
    for status in Status::ALL {
        let filter = CallFilter { status: Some(status), ..tasks() };
        listed(filter, &|call| call.status == status).await;
    }
    let filter = CallFilter { run_id: Some("r1".into()), ..tasks() };
    listed(filter, &|call| call.run_id == "r1").await;
    let filter = CallFilter { before: Some(expected[2].id.clone()), ..tasks() };
    listed(filter, &|call| call.id < expected[2].id).await;
    let filter = CallFilter { since_ms: Some(NOW + 30), ..tasks() };
    listed(filter, &|call| call.created_ms >= NOW + 30).await;
    let none = CallFilter { tool_name: Some("other".into()), ..tasks() };
    listed(none, &|_| false).await;
}

pub async fn the_newest_record_of_a_kind_is_found(store: &dyn Store) {
    let fresh = call();
    put(store, &fresh).await;
    let newest = async |kind| store.last_record("p", &fresh.id, kind).await.unwrap();
    assert_eq!(newest(EventKind::Progress).await, None);
    for percent in [10, 20] {
        append(store, &fresh, record(EventKind::Progress).with("percent", percent)).await;
    }
    append(store, &fresh, record(EventKind::ReportIgnored)).await;
    let found = newest(EventKind::Progress).await.unwrap();
    assert_eq!(found.data["percent"], 20);
    assert_eq!(newest(EventKind::Requested).await.unwrap().kind, EventKind::Requested);
    assert_eq!(store.last_record("q", &fresh.id, EventKind::Progress).await.unwrap(), None);
}
