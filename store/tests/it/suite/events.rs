//! Events: numbered across the whole store in commit order, read by scope and page.

use serde_json::json as value;
use toolcrib::domain::call::Status;
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::ports::store::{EventScope, Store};

use crate::support::{
    NOW, append, call, call_of, creating, ended, found, history, of_call, of_project, of_run,
    on_threads, put, record, requested, running, saving,
};

fn numbers(events: &[CallEvent]) -> Vec<u64> {
    events.iter().map(|event| event.number).collect()
}

fn kinds(events: &[CallEvent]) -> Vec<EventKind> {
    events.iter().map(|event| event.record.kind).collect()
}

fn are_increasing(numbers: &[u64]) -> bool {
    numbers.first().is_none_or(|first| *first > 0)
        && numbers.windows(2).all(|pair| pair[0] < pair[1])
}

pub async fn numbers_increase_across_calls_in_commit_order(store: &dyn Store) {
    let (one, two) = (call(), call());
    put(store, &one).await;
    put(store, &two).await;
    store
        .append_records(
            "p",
            &one.id,
            vec![record(EventKind::Progress), record(EventKind::ReportIgnored)],
        )
        .await
        .unwrap();
    saving(store, &running(&two), vec![record(EventKind::Started)]).await.unwrap();
    append(store, &one, record(EventKind::Recovered)).await;
    let all = history(store, of_project("p")).await;
    assert!(are_increasing(&numbers(&all)), "{all:?}");
    let events_read: Vec<_> = all.iter().map(|e| (e.call_id.clone(), e.record.kind)).collect();
    let expected = [
        (&one, EventKind::Requested),
        (&two, EventKind::Requested),
        (&one, EventKind::Progress),
        (&one, EventKind::ReportIgnored),
        (&two, EventKind::Started),
        (&one, EventKind::Recovered),
    ];
    assert_eq!(events_read, expected.map(|(call, kind)| (call.id.clone(), kind)));
}

pub async fn every_event_kind_is_read_back_with_its_data(store: &dyn Store) {
    let mut requested_call = call_of("p", "r-77", "a");
    requested_call.origin.caller_call_id = Some("call \"7\"".into());
    let records: Vec<EventRecord> = (1..)
        .zip(EventKind::ALL)
        .map(|(n, kind)| {
            EventRecord::new(kind, NOW + n, n as u32)
                .with("why", "es ging schief 🦀 \"so\" \u{0}")
                .with("nested", value!({ "a": [1, 2.5, null, true], "": {} }))
                .with("bytes", u64::MAX)
        })
        .collect();
    creating(store, &requested_call, records.clone(), None).await.unwrap();
    let events_read = history(store, of_call(&requested_call)).await;
    assert_eq!(events_read, history(store, of_run("p", "r-77")).await);
    assert_eq!(events_read, history(store, of_project("p")).await);
    let belongs_to_call = |event: &CallEvent| {
        (event.call_id.clone(), event.run_id.clone(), event.caller_call_id.clone())
            == (
                requested_call.id.clone(),
                requested_call.run_id.clone(),
                requested_call.origin.caller_call_id.clone(),
            )
    };
    assert!(events_read.iter().all(belongs_to_call), "{events_read:?}");
    assert_eq!(events_read.into_iter().map(|event| event.record).collect::<Vec<_>>(), records);
}

pub async fn a_call_has_only_its_own_events(store: &dyn Store) {
    let (one, two) = (call(), call());
    put(store, &one).await;
    put(store, &two).await;
    append(store, &one, record(EventKind::Progress)).await;
    append(store, &two, record(EventKind::ReportIgnored)).await;
    let events_read = history(store, of_call(&one)).await;
    assert_eq!(kinds(&events_read), [EventKind::Requested, EventKind::Progress]);
    assert_eq!(history(store, of_call(&call())).await, []);
}

pub async fn a_run_has_the_events_of_its_calls_in_its_project(store: &dyn Store) {
    let own_calls = [call_of("p", "r", "a"), call_of("p", "r", "b")];
    let others = [call_of("p", "r2", "a"), call_of("q", "r", "a")];
    for call in own_calls.iter().chain(&others) {
        put(store, call).await;
    }
    for call in others.iter().chain(&own_calls) {
        append(store, call, record(EventKind::Progress)).await;
    }
    let events_read = history(store, of_run("p", "r")).await;
    assert!(are_increasing(&numbers(&events_read)));
    let call_ids: Vec<_> = events_read.iter().map(|event| event.call_id.clone()).collect();
    let [one, two] = own_calls.map(|call| call.id);
    assert_eq!(call_ids, [one.clone(), two.clone(), one, two]);
    assert_eq!(history(store, of_run("p", "nobody's")).await, []);
}

pub async fn a_project_has_the_events_of_its_calls(store: &dyn Store) {
    let (own_call, other) = (call_of("p", "r", "a"), call_of("q", "r", "a"));
    put(store, &own_call).await;
    put(store, &other).await;
    append(store, &other, record(EventKind::Progress)).await;
    append(store, &own_call, record(EventKind::ReportIgnored)).await;
    let events_read = history(store, of_project("p")).await;
    assert_eq!(kinds(&events_read), [EventKind::Requested, EventKind::ReportIgnored]);
    assert!(events_read.iter().all(|event| event.call_id == own_call.id));
    assert_eq!(history(store, of_project("nobody's")).await, []);
}

pub async fn pages_give_every_event_once(store: &dyn Store) {
    let (own_call, other) = (call_of("p", "r", "a"), call_of("q", "r", "a"));
    put(store, &own_call).await;
    put(store, &other).await;
    for n in 0..10 {
        append(store, &own_call, record(EventKind::Progress).with("n", n)).await;
        append(store, &other, record(EventKind::Progress)).await;
    }
    for scope in [of_call(&own_call), of_run("p", "r"), of_project("p")] {
        let (mut seen, mut after) = (vec![], 0);
        loop {
            let page = store.events(scope.clone(), after, 3).await.unwrap();
            let Some(last) = page.last() else { break };
            after = last.number;
            seen.extend(page);
        }
        assert_eq!(seen, history(store, scope.clone()).await, "{scope:?}");
        assert_eq!(seen.len(), 11, "{scope:?}");
    }
}

/// Programs that use a single run put all their calls into it.
pub async fn events_of_a_run_with_many_calls_are_read_in_pages(store: &dyn Store) {
    let calls: Vec<_> =
        (0..5_300).map(|n| call_of("p", if n % 53 == 7 { "other" } else { "big" }, "a")).collect();
    let all = calls.iter().enumerate().map(|(n, call)| {
        // Most records equal those of the engine, which are implied and have no row.
        let plain = EventRecord::new(EventKind::Requested, call.created_ms, 0);
        let plain = plain.with("tool", "a").with("args_bytes", call.target.args.text().len());
        creating(store, call, vec![if n % 9 == 0 { requested() } else { plain }], None)
    });
    futures::future::try_join_all(all).await.unwrap();
    for call in calls.iter().step_by(100) {
        append(store, call, record(EventKind::Progress)).await;
    }
    let events_read = store.events(of_project("p"), 0, usize::MAX).await.unwrap();
    let (big, other): (Vec<CallEvent>, Vec<CallEvent>) =
        events_read.into_iter().partition(|event| event.run_id == "big");
    assert!(big.len() > 5_200 && other.len() >= 100);
    for (run_id, expected) in [("big", big), ("other", other)] {
        let (mut seen, mut after) = (vec![], 0);
        loop {
            let page = store.events(of_run("p", run_id), after, 700).await.unwrap();
            assert!(page.len() <= 700);
            let Some(last) = page.last() else { break };
            after = last.number;
            seen.extend(page);
        }
        assert_eq!(seen, expected, "{run_id}");
    }
}

pub async fn a_page_starts_after_a_number_and_ends_at_its_limit(store: &dyn Store) {
    let requested_call = call();
    put(store, &requested_call).await;
    for _ in 0..5 {
        append(store, &requested_call, record(EventKind::Progress)).await;
    }
    let all = history(store, of_call(&requested_call)).await;
    for scope in [of_call(&requested_call), of_run("p", "run"), of_project("p")] {
        let page = async |after, limit| store.events(scope.clone(), after, limit).await.unwrap();
        assert_eq!(page(0, 2).await, all[..2], "{scope:?}");
        assert_eq!(page(all[1].number, 2).await, all[2..4], "{scope:?}");
        assert_eq!(page(all[4].number, 100).await, all[5..], "{scope:?}");
        assert_eq!(page(all[5].number, 100).await, [], "{scope:?}");
        assert_eq!(page(u64::MAX, 100).await, [], "{scope:?}");
        assert_eq!(page(0, 0).await, [], "{scope:?}");
        assert_eq!(page(0, usize::MAX).await, all, "{scope:?}");
    }
}

pub async fn appending_to_an_unknown_call_has_no_effect(store: &dyn Store) {
    let (stored, unknown) = (call(), call());
    put(store, &stored).await;
    append(store, &unknown, record(EventKind::ReportIgnored)).await;
    assert_eq!(history(store, of_call(&unknown)).await, []);
    assert_eq!(found(store, &unknown).await, None);
    assert_eq!(kinds(&history(store, of_project("p")).await), [EventKind::Requested]);
}

pub async fn the_last_event_number_of_a_call_is_that_of_its_newest_event(store: &dyn Store) {
    let (requested_call, later) = (call(), call());
    let newest = async |scope: EventScope| store.last_event_number(scope).await.unwrap();
    assert_eq!(newest(of_call(&requested_call)).await, 0);
    assert_eq!(newest(of_project("p")).await, 0);
    put(store, &requested_call).await;
    append(store, &requested_call, record(EventKind::Progress)).await;
    let last = history(store, of_call(&requested_call)).await[1].number;
    put(store, &later).await;
    assert_eq!(newest(of_call(&requested_call)).await, last);
    assert_eq!(newest(of_call(&call())).await, 0);
}

/// For a run or a project, a number above the newest in scope is valid as well: what matters is
/// what a subscriber sees that starts from it.
pub async fn reading_after_the_last_number_returns_only_later_events(store: &dyn Store) {
    let (own_call, other) = (call_of("p", "r", "a"), call_of("q", "r", "a"));
    put(store, &own_call).await;
    put(store, &other).await;
    for scope in [of_call(&own_call), of_run("p", "r"), of_project("p")] {
        let from = store.last_event_number(scope.clone()).await.unwrap();
        assert_eq!(store.events(scope.clone(), from, 100).await.unwrap(), []);
        append(store, &other, record(EventKind::Progress)).await;
        append(store, &own_call, record(EventKind::ReportIgnored)).await;
        let later_events = store.events(scope.clone(), from, 100).await.unwrap();
        assert_eq!(kinds(&later_events), [EventKind::ReportIgnored], "{scope:?}");
    }
}

pub async fn records_of_one_commit_have_consecutive_numbers(store: &dyn Store) {
    on_threads(4, async |_| {
        for _ in 0..10 {
            let records =
                vec![requested(), record(EventKind::Started), record(EventKind::Finished)];
            creating(store, &call(), records, None).await.unwrap();
        }
    });
    let all = history(store, of_project("p")).await;
    assert!(are_increasing(&numbers(&all)));
    assert_eq!(all.len(), 120);
    for commit in all.chunks(3) {
        assert_eq!(kinds(commit), [EventKind::Requested, EventKind::Started, EventKind::Finished]);
        assert!(commit.iter().all(|event| event.call_id == commit[0].call_id));
    }
}

/// A call as the engine first stores it: its row implies its first two records.
fn accepted(run: &str) -> (toolcrib::Call, Vec<EventRecord>) {
    let running_call = running(&call_of("p", run, "weather.query"));
    let running_call = toolcrib::Call { version: 1, ..running_call };
    let requested = EventRecord::new(EventKind::Requested, running_call.created_ms, 0)
        .with("tool", "weather.query")
        .with("args_bytes", running_call.target.args.text().len());
    let started = EventRecord::new(EventKind::Started, running_call.started_ms.unwrap(), 1);
    (running_call, vec![requested, started.with("tool", "weather.query")])
}

pub async fn events_implied_by_the_call_row_are_read_like_stored_ones(store: &dyn Store) {
    let mut events_read = Vec::new();
    for n in 0..20 {
        let (mut running_call, mut records) = accepted(if n % 2 == 0 { "even" } else { "odd" });
        if n % 5 == 0 {
            // Finished when it was first stored.
            let ended_call = ended(&running_call, Status::Succeeded, running_call.created_ms + 4);
            let result = ended_call.outcome.as_ref().unwrap().data.as_ref().unwrap().text().len();
            let finished = EventRecord::new(EventKind::Finished, running_call.created_ms + 4, 1)
                .with("latency_ms", 4)
                .with("queue_ms", running_call.started_ms.unwrap() - running_call.created_ms)
                .with("tool", "weather.query")
                .with("result_bytes", result);
            records.push(finished);
            running_call = toolcrib::Call { version: 1, ..ended_call };
        }
        creating(store, &running_call, records.clone(), None).await.unwrap();
        events_read.extend(records.into_iter().map(|record| (running_call.clone(), record)));
        if n % 3 == 0 {
            append(store, &running_call, record(EventKind::Progress)).await;
            events_read.push((running_call, record(EventKind::Progress)));
        }
    }
    let all = history(store, of_project("p")).await;
    assert!(are_increasing(&numbers(&all)), "{all:?}");
    let expected = |run: Option<&str>| -> Vec<_> {
        let of_run =
            events_read.iter().filter(|(call, _)| run.is_none_or(|run| call.run_id == run));
        of_run.map(|(call, record)| (call.id.clone(), record.clone())).collect()
    };
    let seen = |events: &[CallEvent]| -> Vec<_> {
        events.iter().map(|event| (event.call_id.clone(), event.record.clone())).collect()
    };
    assert_eq!(seen(&all), expected(None));
    assert_eq!(seen(&history(store, of_run("p", "odd")).await), expected(Some("odd")));
    let first = &events_read[0].0;
    assert_eq!(history(store, of_call(first)).await.len(), 4);
    // Starting after every event, with pages of several sizes: no event is repeated or missing.
    for (n, event) in all.iter().enumerate() {
        for limit in [1, 2, 7] {
            let page = store.events(of_project("p"), event.number, limit).await.unwrap();
            let rest = &all[n + 1..];
            assert_eq!(seen(&page), seen(&rest[..rest.len().min(limit)]), "after {n}, {limit}");
        }
    }
    let newest = store.last_event_number(of_project("p")).await.unwrap();
    assert!(newest >= all.last().unwrap().number);
    assert!(history(store, of_project("q")).await.is_empty());
}

/// Callers commit while followers read page by page, as a stream of the project does. A page must
/// be one snapshot: if events that have rows and implied ones are read at two moments, a follower
/// continues after a number below which events appear later.
pub async fn followers_see_every_event_once_and_in_order_while_calls_end(store: &dyn Store) {
    const CALLERS: usize = 8;
    const CALLS: usize = 150;
    const FOLLOWERS: usize = 4;
    const EVENTS: usize = CALLERS * CALLS * 4;
    let seen = on_threads(CALLERS + FOLLOWERS, async |n| {
        if n < CALLERS {
            for _ in 0..CALLS {
                let (running_call, records) = accepted("followed");
                creating(store, &running_call, records, None).await.unwrap();
                append(store, &running_call, record(EventKind::Progress)).await;
                let ended_call =
                    ended(&running_call, Status::Succeeded, running_call.created_ms + 9);
                saving(store, &ended_call, vec![record(EventKind::Finished)]).await.unwrap();
            }
            return vec![];
        }
        let scope = if n % 2 == 0 { of_project("p") } else { of_run("p", "followed") };
        let mut seen: Vec<CallEvent> = Vec::new();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        // A gap would otherwise be waited for forever: the last event of the store ends the wait.
        while seen.len() < EVENTS && std::time::Instant::now() < deadline {
            let after = seen.last().map_or(0, |event| event.number);
            let page = store.events(scope.clone(), after, 20 + n).await.unwrap();
            if page.is_empty() && store.last_event_number(of_project("p")).await.unwrap() <= after {
                let all = store.events(scope.clone(), 0, EVENTS + 1).await.unwrap();
                if all.len() == EVENTS && all.last().is_some_and(|last| last.number <= after) {
                    break;
                }
            }
            seen.extend(page);
        }
        seen
    });
    let all = store.events(of_project("p"), 0, EVENTS + 1).await.unwrap();
    assert_eq!(all.len(), EVENTS);
    for followed in &seen[CALLERS..] {
        let read: std::collections::HashSet<u64> = numbers(followed).into_iter().collect();
        let missing = all.iter().filter(|event| !read.contains(&event.number)).count();
        assert_eq!(missing, 0, "events missing of {EVENTS}");
        assert_eq!(numbers(followed), numbers(&all));
    }
}
