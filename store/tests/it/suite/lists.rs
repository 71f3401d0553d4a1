//! Lists of calls: newest first, by filter and page, and the open calls.

use std::collections::HashSet;

use serde_json::json;
use toolcrib::domain::call::{Call, Hold, Status};
use toolcrib::domain::id::CallId;
use toolcrib::domain::json::Json;
use toolcrib::ports::store::{CallFilter, Store};

use crate::support::{
    NOW, call, call_at, call_of, ended, ids, ids_of, put, put_with_status, read, running, save,
};

fn filter_of(project: &str) -> CallFilter {
    CallFilter { project: project.into(), limit: 1_000, ..CallFilter::default() }
}

pub async fn the_newest_call_is_first(store: &dyn Store) {
    // By creation time, regardless of the order of their commits.
    let calls = [call_at(NOW), call_at(NOW + 500), call_at(NOW + 100)];
    for call in &calls {
        put(store, call).await;
    }
    save(store, &running(&calls[0])).await;
    let [first, second, third] = calls.map(|call| call.id);
    assert_eq!(ids_of(store, "p").await, [second, third, first]);
    let listed = store.calls(filter_of("p")).await.unwrap();
    assert_eq!(listed[2], read(store, &listed[2]).await);
}

/// Creates calls of every status in two projects, two runs and two tools, one second apart.
async fn put_assorted(store: &dyn Store) -> Vec<Call> {
    let mut calls = vec![];
    for status in Status::ALL {
        for project in ["p", "q"] {
            for (run, tool) in [("r1", "a"), ("r1", "b"), ("r2", "a"), ("r2", "b")] {
                let dated = call_at(NOW + 1_000 * calls.len() as u64);
                let (id, created_ms) = (dated.id, dated.created_ms);
                let fresh = Call { id, created_ms, ..call_of(project, run, tool) };
                calls.push(put_with_status(store, &fresh, status).await);
            }
        }
    }
    calls
}

pub async fn every_combination_of_filters_returns_the_matching_calls(store: &dyn Store) {
    let calls = put_assorted(store).await;
    let statuses = Status::ALL.map(Some).into_iter().chain([None]);
    let mut seen = 0;
    for status in statuses {
        for run_id in [None, Some("r1"), Some("r2"), Some("r9")] {
            for tool_name in [None, Some("a"), Some("z")] {
                for since_ms in [None, Some(NOW + 20_000), Some(NOW + 90_000)] {
                    let fits = |call: &&Call| {
                        call.project == "p"
                            && status.is_none_or(|status| call.status == status)
                            && run_id.is_none_or(|run| call.run_id == run)
                            && tool_name.is_none_or(|tool| call.tool_name == tool)
                            && since_ms.is_none_or(|since| call.created_ms >= since)
                    };
                    let fitting = calls.iter().rev().filter(fits);
                    let expected: Vec<CallId> = fitting.map(|call| call.id.clone()).collect();
                    let (run_id, tool_name) = (run_id.map(Into::into), tool_name.map(Into::into));
                    let filter =
                        CallFilter { run_id, tool_name, status, since_ms, ..filter_of("p") };
                    let context = format!("{filter:?}");
                    assert_eq!(ids(store, filter).await, expected, "{context}");
                    seen += expected.len();
                }
            }
        }
    }
    assert!(seen > 100, "the filters must find something to mean anything: {seen}");
}

/// Reads the whole list in pages while more calls arrive between them.
async fn read_pages(
    store: &dyn Store,
    filter: CallFilter,
    next_call: impl Fn() -> (Call, Status),
) -> Vec<CallId> {
    let (mut seen, mut before) = (vec![], None);
    loop {
        let page = ids(store, CallFilter { before: before.clone(), ..filter.clone() }).await;
        let Some(last) = page.last() else { return seen };
        before = Some(last.clone());
        assert!(page.len() <= filter.limit);
        seen.extend(page);
        for _ in 0..3 {
            let (call, status) = next_call();
            put_with_status(store, &call, status).await;
        }
    }
}

pub async fn pages_have_no_gaps_or_repeats_while_calls_arrive(store: &dyn Store) {
    let mut existing = vec![];
    for _ in 0..25 {
        let call = call();
        put(store, &call).await;
        existing.push(call.id);
    }
    existing.reverse();
    let filter = CallFilter { limit: 4, ..filter_of("p") };
    assert_eq!(read_pages(store, filter, || (call(), Status::Pending)).await, existing);
}

pub async fn filtered_pages_have_no_gaps_or_repeats_while_calls_arrive(store: &dyn Store) {
    let calls: Vec<Call> =
        put_assorted(store).await.into_iter().filter(|call| call.project == "p").collect();
    let filters = [
        CallFilter { run_id: Some("r1".into()), ..filter_of("p") },
        CallFilter { tool_name: Some("a".into()), ..filter_of("p") },
        CallFilter { status: Some(Status::Failed), ..filter_of("p") },
        CallFilter { status: Some(Status::Pending), ..filter_of("p") },
        CallFilter { tool_name: Some("b".into()), status: Some(Status::Timeout), ..filter_of("p") },
        CallFilter { since_ms: Some(NOW + 10_000), ..filter_of("p") },
    ];
    let existing: HashSet<CallId> = calls.into_iter().map(|call| call.id).collect();
    for filter in filters {
        let expected: Vec<CallId> = ids(store, filter.clone()).await;
        assert!(expected.len() > 1, "{filter:?}");
        let (run, tool) = (filter.run_id.clone(), filter.tool_name.clone());
        let next_call = || {
            let (run, tool) = (run.as_deref().unwrap_or("r1"), tool.as_deref().unwrap_or("a"));
            let created_ms = NOW + 100_000;
            let call = Call { created_ms, id: call_at(created_ms).id, ..call_of("p", run, tool) };
            (call, filter.status.unwrap_or(Status::Succeeded))
        };
        let page = CallFilter { limit: 1, ..filter.clone() };
        let seen = read_pages(store, page, next_call).await;
        assert_eq!(seen, expected, "{filter:?}");
        assert!(seen.iter().any(|id| existing.contains(id)));
    }
}

pub async fn a_call_moves_between_status_lists_with_its_status(store: &dyn Store) {
    let waiting = call();
    let with = |status| CallFilter { status: Some(status), ..filter_of("p") };
    let steps = [waiting.clone(), running(&waiting), {
        ended(&running(&waiting), Status::Failed, NOW + 50)
    }];
    put(store, &steps[0]).await;
    for (n, step) in steps.iter().enumerate() {
        if n > 0 {
            save(store, step).await;
        }
        for status in Status::ALL {
            let found = ids(store, with(status)).await;
            assert_eq!(found.len(), usize::from(status == step.status), "{status:?} at step {n}");
        }
    }
}

pub async fn the_since_filter_includes_its_boundary(store: &dyn Store) {
    for n in 0..5 {
        put(store, &call_at(NOW + n)).await;
    }
    let since = async |since_ms| ids(store, CallFilter { since_ms, ..filter_of("p") }).await.len();
    assert_eq!(since(None).await, 5);
    assert_eq!(since(Some(0)).await, 5);
    assert_eq!(since(Some(NOW)).await, 5);
    assert_eq!(since(Some(NOW + 2)).await, 3);
    assert_eq!(since(Some(NOW + 4)).await, 1);
    assert_eq!(since(Some(NOW + 5)).await, 0);
    assert_eq!(since(Some(NOW + 1_000_000)).await, 0);
    assert_eq!(since(Some(u64::MAX)).await, 0);
}

pub async fn extreme_limits_and_positions_are_accepted(store: &dyn Store) {
    for _ in 0..3 {
        put(store, &call()).await;
    }
    assert_eq!(ids(store, CallFilter { limit: usize::MAX, ..filter_of("p") }).await.len(), 3);
    for status in [Status::Pending, Status::Failed] {
        let all = CallFilter { limit: usize::MAX, status: Some(status), ..filter_of("p") };
        assert_eq!(ids(store, all).await.len(), if status == Status::Pending { 3 } else { 0 });
    }
    assert_eq!(ids(store, CallFilter { limit: 2, ..filter_of("p") }).await.len(), 2);
    assert_eq!(ids(store, CallFilter { limit: 0, ..filter_of("p") }).await.len(), 0);
    let before = |before| CallFilter { before: Some(CallId::min_at(before)), ..filter_of("p") };
    assert_eq!(ids(store, before(NOW + 1)).await.len(), 3);
    assert_eq!(ids(store, before(0)).await.len(), 0);
    assert_eq!(store.open_calls(0, usize::MAX).await.unwrap().len(), 3);
    assert_eq!(store.open_calls(u64::MAX, 10).await.unwrap().len(), 0);
}

pub async fn lists_contain_only_calls_of_their_project(store: &dyn Store) {
    put_assorted(store).await;
    for (project, other) in [("p", "q"), ("q", "p")] {
        let listed = store.calls(filter_of(project)).await.unwrap();
        assert_eq!(listed.len(), 24);
        assert!(listed.iter().all(|call| call.project == project));
        // An id from another project's list is only a point in time: it gives access to nothing.
        let newest = ids_of(store, other).await.swap_remove(0);
        let older =
            store.calls(CallFilter { before: Some(newest), ..filter_of(project) }).await.unwrap();
        assert!(older.iter().all(|call| call.project == project));
    }
    for unknown in ["", "P", "p ", "%", "*"] {
        assert_eq!(ids_of(store, unknown).await, [], "{unknown:?}");
    }
}

pub async fn a_list_stops_after_max_bytes(store: &dyn Store) {
    let mut calls = vec![];
    for n in 0..5 {
        let args = Json::from_value(&json!({ "text": "x".repeat(989) }));
        let fresh = Call { args, ..call_at(NOW + n) };
        calls.push(put_with_status(store, &fresh, Status::Canceled).await);
    }
    assert_eq!(calls[0].args.text().len(), 1_000);
    for (enough, count) in [(Some(1), 1), (Some(1_000), 1), (Some(2_001), 3), (None, 5)] {
        let filter = CallFilter { max_bytes: enough, ..filter_of("p") };
        let listed = store.calls(filter).await.unwrap();
        let newest: Vec<&CallId> = calls.iter().rev().take(count).map(|call| &call.id).collect();
        assert_eq!(listed.iter().map(|call| &call.id).collect::<Vec<_>>(), newest, "{enough:?}");
    }
}

pub async fn open_calls_are_read_in_order_and_in_pages(store: &dyn Store) {
    let mut expected = vec![];
    for n in 0..23 {
        let project = ["p", "q"][n % 2];
        let fresh = Call { project: project.into(), ..call() };
        let status = Status::ALL[n % 6];
        put_with_status(store, &fresh, status).await;
        if !status.is_terminal() {
            expected.push(fresh.id);
        }
    }
    let (mut seen, mut after) = (vec![], 0);
    loop {
        let page = store.open_calls(after, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.len() <= 2);
        after = last.position;
        seen.extend(page.into_iter().map(|open| open.call.id));
    }
    assert_eq!(seen, expected);
}

pub async fn ended_calls_are_not_open_calls(store: &dyn Store) {
    let retry = Call { hold: Some(Hold::Retry { at_ms: NOW + 9 }), ..call() };
    let parked = Call { hold: Some(Hold::Unacknowledged), ..call() };
    let done = call();
    for call in [&retry, &parked, &done] {
        put(store, call).await;
    }
    save(store, &ended(&done, Status::Canceled, NOW + 1)).await;
    let open: Vec<Call> =
        store.open_calls(0, 100).await.unwrap().into_iter().map(|open| open.call).collect();
    assert_eq!(open, [retry.clone(), parked]);
    save(store, &ended(&retry, Status::Timeout, NOW + 1)).await;
    assert_eq!(store.open_calls(0, 100).await.unwrap().len(), 1);
}
