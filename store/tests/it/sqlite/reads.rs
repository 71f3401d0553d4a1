//! A page of a list is read through an index: the cost of a read does not grow with the size of the
//! database.
//!
//! The cost is measured in bytes read from the file, not in time: Linux counts them per thread, and
//! here one dedicated thread does all reads.

use toolcrib::domain::call::{Call, Status};
use toolcrib::ports::store::{CallFilter, EventScope, Store};
use toolcrib_store::SqliteStore;

use crate::support::{
    NOW, call_at, call_of, creating, database_in, ended, ids, json, key, of_call, of_project,
    of_run, requested, running,
};

const CALLS: u64 = 10_000;
const PAGE: usize = 20;
/// Far below the size of the table, far above that of a page of it.
const BUDGET: u64 = 1 << 20;

/// Returns one of many finished calls, with a few open and failed ones among them.
fn nth_call(n: u64) -> Call {
    let dated = call_at(NOW + n * 1_000);
    let (project, run) = (if n % 500 == 7 { "small" } else { "p" }, format!("run-{}", n / 50));
    let tool = if n % 100 == 3 { "rare.tool" } else { "weather.query" };
    let mut call =
        Call { id: dated.id, created_ms: dated.created_ms, ..call_of(project, &run, tool) };
    call.args = json(&format!("\"{}\"", "x".repeat(2_000)));
    call.target.args = call.args.clone();
    let status = match n % 400 {
        0 => return call,
        1 => Status::Running,
        2 => Status::Failed,
        3 => Status::Timeout,
        4 => Status::Canceled,
        _ => Status::Succeeded,
    };
    let done = match status {
        Status::Running => running(&call),
        _ => ended(&call, status, call.created_ms + 5),
    };
    Call { version: 1, ..done }
}

async fn fill(store: &SqliteStore) -> Vec<Call> {
    let calls: Vec<Call> = (0..CALLS).map(nth_call).collect();
    for some in calls.chunks(1_000) {
        let creates = some.iter().map(|call| {
            let key = Some(key("ada", call.id.as_str(), "f"));
            creating(store, call, vec![requested()], key)
        });
        futures::future::join_all(creates)
            .await
            .into_iter()
            .for_each(|created| drop(created.unwrap()));
    }
    calls
}

/// Returns the number of bytes that the reading thread has read so far.
async fn bytes_read() -> u64 {
    let read = || {
        let counts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        let count = counts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
        count.parse().unwrap()
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

async fn within_budget<T>(query: &str, reading: impl Future<Output = T>) -> T {
    let before = bytes_read().await;
    let seen = reading.await;
    let bytes = bytes_read().await - before;
    assert!(bytes < BUDGET, "{query} read {bytes} bytes");
    seen
}

/// Runs a test with one thread for all reads.
fn with_one_reader(test: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.max_blocking_threads(1).build().unwrap().block_on(test);
}

fn filters() -> Vec<CallFilter> {
    let page = || CallFilter { project: "p".into(), limit: PAGE, ..CallFilter::default() };
    let (run, tool) = (Some("run-100".to_owned()), Some("weather.query".to_owned()));
    let rare = Some("rare.tool".to_owned());
    let mut filters = vec![
        page(),
        CallFilter { project: "small".into(), ..page() },
        CallFilter { project: "nobody's".into(), ..page() },
        CallFilter { run_id: run.clone(), ..page() },
        CallFilter { run_id: run.clone(), tool_name: tool.clone(), ..page() },
        CallFilter { run_id: run.clone(), status: Some(Status::Failed), ..page() },
        CallFilter { run_id: run, status: Some(Status::Pending), ..page() },
        CallFilter { tool_name: tool.clone(), ..page() },
        CallFilter { tool_name: rare.clone(), ..page() },
        CallFilter { tool_name: rare, status: Some(Status::Timeout), ..page() },
        CallFilter { tool_name: tool, status: Some(Status::Canceled), ..page() },
        CallFilter { tool_name: Some("no.tool".into()), ..page() },
        CallFilter { since_ms: Some(NOW + 5_000_000), ..page() },
        CallFilter { since_ms: Some(NOW + (CALLS - 5) * 1_000), ..page() },
        CallFilter { since_ms: Some(NOW + CALLS * 2_000), ..page() },
    ];
    filters.extend(Status::ALL.map(|status| CallFilter { status: Some(status), ..page() }));
    filters
}

#[test]
fn every_list_page_reads_only_a_small_part_of_a_large_table() {
    with_one_reader(async {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        let store = SqliteStore::open(&path).unwrap();
        let calls = fill(&store).await;
        assert!(std::fs::metadata(&path).unwrap().len() > 20 * BUDGET);
        for filter in filters() {
            let newest = within_budget(&format!("{filter:?}"), ids(&store, filter.clone())).await;
            // The same from the middle of the list.
            let before = Some(calls[calls.len() / 2].id.clone());
            let middle = CallFilter { before, ..filter.clone() };
            let older = within_budget(&format!("{middle:?}"), ids(&store, middle)).await;
            let fits = |call: &&Call| {
                call.project == filter.project
                    && filter.run_id.as_ref().is_none_or(|run| call.run_id == *run)
                    && filter.tool_name.as_ref().is_none_or(|tool| call.tool_name == *tool)
                    && filter.status.is_none_or(|status| call.status == status)
                    && filter.since_ms.is_none_or(|since| call.created_ms >= since)
            };
            let fitting = |calls: &[Call]| calls.iter().filter(fits).count().min(PAGE);
            assert_eq!(newest.len(), fitting(&calls), "{filter:?}");
            assert_eq!(older.len(), fitting(&calls[..calls.len() / 2]), "{filter:?}");
        }
    });
}

#[test]
fn a_call_and_its_events_are_read_without_a_table_scan() {
    with_one_reader(async {
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&database_in(&directory)).unwrap();
        let calls = fill(&store).await;
        let last = calls.iter().rfind(|call| call.project == "p").unwrap();
        let by_id = store.call(&last.project, &last.id);
        assert!(within_budget("a call", by_id).await.unwrap().is_some());
        let scopes = [of_call(last), of_run("p", &last.run_id), of_project("p")];
        let newest = store.last_event_number(of_project("p")).await.unwrap();
        for scope in scopes {
            let read = async |scope: EventScope, after| {
                let query = format!("events after {after} of {scope:?}");
                within_budget(&query, store.events(scope, after, PAGE)).await.unwrap()
            };
            assert!(!read(scope.clone(), 0).await.is_empty());
            assert!(!read(scope.clone(), newest - 1).await.is_empty(), "{scope:?}");
            assert!(read(scope.clone(), newest).await.is_empty());
            let query = format!("the newest event of {scope:?}");
            assert!(within_budget(&query, store.last_event_number(scope)).await.unwrap() > 0);
        }
        let open = within_budget("open calls", store.open_calls(0, PAGE)).await.unwrap();
        assert_eq!(open.len(), PAGE);
    });
}
