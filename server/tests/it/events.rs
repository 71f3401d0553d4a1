//! Events of a call, of a run and of the project: in order, complete, and resumable.

use serde_json::{Value, json};

use crate::support::api::{Api, offer};
use crate::support::sse::Event;
use crate::support::ws::Ws;
use crate::support::{PATIENCE, Server};

fn names(events: &[Event]) -> Vec<&str> {
    events.iter().map(|event| event.name.trim_start_matches("tool.call.")).collect()
}

#[tokio::test]
async fn the_event_stream_of_a_call_ends_with_the_call() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({ "n": 1 })).await;
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let requested = events.event().await;
    assert_eq!(requested.name, "tool.call.requested");
    assert_eq!(requested.data["type"], "tool.call.requested");
    assert_eq!(requested.data["tool_call_id"], json!(id));
    assert_eq!(requested.data["tool"], "a.tool");
    assert_eq!(requested.data["number"].as_u64(), requested.id);
    assert!(requested.data["at_ms"].is_u64() && requested.data["attempt"].is_u64());
    let request = client.take().await;
    assert_eq!(events.event().await.name, "tool.call.started");
    let event = events.event().await;
    assert_eq!((event.name.as_str(), &event.data["by"]), ("tool.call.taken", &json!("c1")));
    client.succeed(&request, json!("done")).await;
    let finished = events.event().await;
    assert_eq!(finished.name, "tool.call.finished");
    assert!(finished.data["latency_ms"].is_u64());
    assert_eq!(events.next().await, None, "the stream ends with the call");
}

#[tokio::test]
async fn progress_events_appear_immediately() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let request = client.take().await;
    events.wait_for("tool.call.taken").await;
    client
        .send(json!({
            "type": "tool_progress", "tool_call_id": id, "attempt": 1,
            "percent": 40.5, "message": "half way", "data": { "page": 2 }
        }))
        .await;
    let progress = events.event().await;
    assert_eq!(progress.name, "tool.call.progress");
    assert_eq!(progress.data["percent"], 40.5);
    assert_eq!(progress.data["message"], "half way");
    assert_eq!(progress.data["data"], json!({ "page": 2 }));
    let body = json!({ "client_id": "c1", "message": "by HTTP" });
    let answer = api.post(&format!("/internal/tool_calls/{id}/progress"), body).await.is(200);
    assert_eq!(answer, json!({ "ok": true }));
    assert_eq!(events.event().await.data["message"], "by HTTP");
    client.succeed(&request, json!(1)).await;
    assert_eq!(names(&events.rest().await), ["finished"]);
    let body = json!({ "message": "after the end" });
    let late = api.post(&format!("/internal/tool_calls/{id}/progress"), body).await;
    late.refused(409, "CONFLICT");
}

#[tokio::test]
async fn progress_events_are_stored_up_to_a_limit() {
    let server = Server::with(|config| config.limits.max_progress_events = 3).await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    for n in 0..6 {
        let body = json!({ "message": format!("{n}") });
        api.post(&format!("/internal/tool_calls/{id}/progress"), body).await.is(200);
    }
    api.succeed(&id, json!(1)).await;
    let history = api.history(&id).await;
    let stored = history.iter().filter(|name| *name == "tool.call.progress").count();
    assert_eq!(stored, 3, "{history:?}");
}

#[tokio::test]
async fn a_resumed_stream_has_no_gaps_or_repeats() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let path = format!("/v1/tool_calls/{id}/events");
    let mut seen: Vec<Event> = Vec::new();
    for n in 0..10 {
        let body = json!({ "message": format!("step {n}") });
        api.post(&format!("/internal/tool_calls/{id}/progress"), body).await.is(200);
        // Each iteration opens a new connection that resumes after the last seen event.
        let mut events = api.follow(&path, seen.last().and_then(|event| event.id)).await;
        let expected = if n == 0 { 2 } else { 1 };
        for _ in 0..expected {
            seen.push(events.event().await);
        }
    }
    api.succeed(&id, json!(1)).await;
    let mut events = api.follow(&path, seen.last().unwrap().id).await;
    seen.extend(events.rest().await);
    let mut at_once = api.follow(&path, None).await;
    assert_eq!(seen, at_once.rest().await, "as if it had been one connection");
    let steps: Vec<&str> = seen.iter().filter_map(|event| event.data["message"].as_str()).collect();
    let expected: Vec<String> = (0..10).map(|n| format!("step {n}")).collect();
    assert_eq!(steps, expected);
    let last = seen.last().unwrap().id.unwrap();
    let mut nothing = api.follow(&path, Some(last)).await;
    assert_eq!(nothing.next().await, None, "there are no more events");
    let mut by_query = api.follow(&format!("{path}?after={}", last - 1), None).await;
    assert_eq!(by_query.event().await.id, Some(last), "as a query parameter");
}

#[tokio::test]
async fn the_event_stream_of_a_run_covers_all_its_calls() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let begin = |run: &'static str| {
        let api = api.clone();
        async move { api.invoke_with("a.tool", json!({ "run_id": run, "args": {} })).await }
    };
    let first = begin("run_a").await;
    begin("run_b").await;
    let mut events = api.follow("/v1/runs/run_a/events", None).await;
    assert_eq!(events.event().await.data["tool_call_id"], json!(first), "from its first event on");
    api.succeed(&first, json!(1)).await;
    assert_eq!(events.event().await.name, "tool.call.started");
    let finished = events.event().await;
    assert_eq!(finished.name, "tool.call.finished");
    // The stream of a run does not end: the next call appears on it.
    let second = begin("run_a").await;
    let requested = events.event().await;
    assert_eq!(requested.data["tool_call_id"], json!(second));
    let mut resumed = api.follow("/v1/runs/run_a/events", finished.id).await;
    assert_eq!(resumed.event().await, requested, "no gap, no repeat");
}

#[tokio::test]
async fn the_event_stream_of_a_project_starts_now() {
    let server = Server::start().await;
    let api = server.api();
    let old = api.invoke("calculation.eval", json!({ "expression": "1" })).await;
    api.finished(&old).await;
    let mut events = api.follow("/v1/events", None).await;
    let new = api.invoke("calculation.eval", json!({ "expression": "2" })).await;
    let first = events.event().await;
    assert_eq!(first.data["tool_call_id"], json!(new), "no earlier events");
    assert_eq!(first.name, "tool.call.requested");
    let mut all = api.follow("/v1/events?after=0", None).await;
    assert_eq!(
        all.event().await.data["tool_call_id"],
        json!(old),
        "`after` includes earlier events"
    );
}

#[tokio::test]
async fn an_invalid_last_event_id_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let id = api.invoke("calculation.eval", json!({ "expression": "1" })).await;
    api.finished(&id).await;
    let path = format!("/v1/tool_calls/{id}/events");
    let request = api.request(reqwest::Method::GET, &path).header("last-event-id", "soon");
    api.send(request).await.refused(400, "BAD_REQUEST");
    let mut far = api.follow(&path, Some(u64::MAX)).await;
    assert_eq!(far.rest().await, Vec::<Event>::new());
    let unknown = "/v1/tool_calls/tc_01ARZ3NDEKTSV4RRFFQ69G5FAV/events";
    api.get(unknown).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn event_numbers_increase_across_concurrent_calls() {
    let server = Server::start().await;
    let api = server.api();
    let calls = (0..40).map(|n| {
        let api = api.clone();
        async move {
            let args = json!({ "expression": format!("{n}+1") });
            let id = api.invoke("calculation.eval", args).await;
            api.finished(&id).await
        }
    });
    let calls: Vec<Value> = futures::future::join_all(calls).await;
    assert!(calls.iter().all(|call| call["status"] == "SUCCEEDED"));
    let mut events = api.follow("/v1/runs/run_1/events", None).await;
    let mut numbers = Vec::new();
    for _ in 0..120 {
        numbers.push(events.event().await.id.unwrap());
    }
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
}

/// The fields of every event, followed by the additional fields of each kind.
const COMMON_FIELDS: [&str; 6] = ["number", "type", "tool_call_id", "run_id", "at_ms", "attempt"];
const FIELDS_BY_KIND: [(&str, &[&str]); 8] = [
    ("requested", &["tool", "args_bytes"]),
    ("started", &["tool"]),
    ("taken", &["by"]),
    ("retrying", &["tool", "code", "message", "duration_ms", "next_attempt_at_ms"]),
    ("fallback", &["from", "to", "code", "message", "duration_ms", "args_bytes"]),
    ("finished", &["tool", "latency_ms", "queue_ms", "result_bytes"]),
    ("failed", &["tool", "latency_ms", "queue_ms", "code"]),
    ("canceled", &["tool", "latency_ms", "queue_ms", "by"]),
];

#[tokio::test]
async fn each_event_kind_has_its_documented_fields() {
    let server = Server::start().await;
    let api = server.api();
    let backoff = json!({ "initial_ms": 1, "factor": 1.0, "max_ms": 1, "jitter": 0.0 });
    let more = json!({ "effect": "read", "fallback": [{ "tool": "b.tool" }],
        "policy": { "max_retries": 1, "backoff": backoff } });
    let tools = json!([crate::support::api::offer_with("a.tool", more), offer("b.tool")]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    let mut events = api.follow("/v1/events", None).await;
    let body = |run: &str| json!({ "run_id": run, "call_id": "call_7", "args": { "n": 1 } });
    // This call fails, is retried, fails again, and succeeds with its fallback.
    let first = api.invoke_with("a.tool", body("run_a")).await;
    for _ in 0..2 {
        let request = client.take().await;
        client.fail(&request, json!("not today")).await;
    }
    let request = client.take().await;
    client.succeed(&request, json!({ "ok": true })).await;
    let failing = api.invoke_with("b.tool", body("run_b")).await;
    let request = client.take().await;
    client.fail(&request, json!({ "message": "never", "retryable": false })).await;
    let canceled = api.invoke_with("b.tool", body("run_c")).await;
    client.take().await;
    api.until_status(&canceled, "RUNNING").await;
    api.post(&format!("/v1/tool_calls/{canceled}/cancel"), json!({})).await.is(200);
    let late = json!({ "run_id": "run_d", "call_id": "call_7", "args": {}, "timeout_ms": 1 });
    let late = api.invoke_with("b.tool", late).await;
    let runs = [(&first, "run_a"), (&failing, "run_b"), (&canceled, "run_c"), (&late, "run_d")];
    let mut seen = std::collections::BTreeSet::new();
    while !seen.contains("timeout") {
        let event = events.event().await;
        let data = event.data.as_object().unwrap();
        for name in COMMON_FIELDS {
            assert!(data.contains_key(name), "{name} in {data:?}");
        }
        assert_eq!(data["call_id"], "call_7", "the caller's own id");
        let (_, run) = runs.iter().find(|(id, _)| data["tool_call_id"] == id.as_str()).unwrap();
        assert_eq!(data["run_id"], *run);
        let kind = event.name.trim_start_matches("tool.call.").to_owned();
        let more_fields = FIELDS_BY_KIND.iter().find(|(name, _)| *name == kind);
        for name in more_fields.map_or(&["tool", "latency_ms", "queue_ms"][..], |(_, names)| names)
        {
            assert!(data.contains_key(*name), "{name} in {data:?}");
        }
        match kind.as_str() {
            "finished" => assert_eq!(data["result_bytes"], r#"{"ok":true}"#.len()),
            "requested" if **run != *"run_d" => {
                assert_eq!(data["args_bytes"], r#"{"n":1}"#.len());
            }
            _ => {}
        }
        seen.insert(kind);
    }
    let all: Vec<&str> = FIELDS_BY_KIND.iter().map(|(name, _)| *name).chain(["timeout"]).collect();
    assert!(all.iter().all(|name| seen.contains(*name)), "{seen:?}");
}

/// A subscriber may lose the stream before the first event.
#[tokio::test]
async fn a_project_stream_starts_with_the_current_event_id() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("b.tool")])).await;
    api.invoke_with("b.tool", json!({ "run_id": "r", "args": {} })).await;
    let mut stream = api.request(reqwest::Method::GET, "/v1/events").send().await.unwrap();
    let first = crate::support::soon("the beginning", stream.chunk()).await.unwrap().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    let start_id = first.strip_prefix("id: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
    drop(stream);
    let missed = api.invoke_with("b.tool", json!({ "run_id": "r", "args": {} })).await;
    let mut events = api.follow("/v1/events", start_id.parse().ok()).await;
    assert_eq!(events.event().await.data["tool_call_id"], json!(missed));
}

/// Reads the events of the project up to the last event of this call, and reconnects after every
/// `page` events, as a client on a bad line does. Returns their numbers.
async fn follow_until_finished(api: &Api, id: &str, page: usize) -> Vec<u64> {
    let mut numbers: Vec<u64> = Vec::new();
    loop {
        let mut events = api.follow("/v1/events?after=0", numbers.last().copied()).await;
        for _ in 0..page {
            let event = events.event().await;
            numbers.push(event.id.unwrap());
            if event.name == "tool.call.finished" && event.data["tool_call_id"] == id {
                return numbers;
            }
        }
    }
}

/// Eight callers make calls whose events are implied by their row and calls whose events have rows,
/// while four followers reconnect again and again. Every follower sees every event once, in order.
pub async fn check_that_followers_miss_nothing(api: &Api) {
    const CALLS: usize = 40;
    api.register("c1", json!([offer("a.tool"), offer("last.tool")])).await;
    let last = api.invoke("last.tool", json!({})).await;
    let callers = (0..8).map(|n| async move {
        for _ in 0..CALLS {
            if n % 2 == 0 {
                api.invoke("calculation.eval", json!({ "expression": "1+1" })).await;
            } else {
                let id = api.invoke("a.tool", json!({})).await;
                api.succeed(&id, json!(1)).await;
            }
        }
    });
    let calling = async {
        futures::future::join_all(callers).await;
        api.succeed(&last, json!("the last event")).await;
    };
    let followers = [7, 20, 33, 1_000].map(|page| follow_until_finished(api, &last, page));
    let work = futures::future::join(calling, futures::future::join_all(followers));
    let ((), followed) = tokio::time::timeout(PATIENCE * 2, work).await.unwrap();
    for numbers in followed {
        assert!(numbers.len() > 8 * CALLS * 2);
        let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
        assert_eq!(numbers, expected, "the store numbers its events without gaps");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_that_reconnect_see_every_event_once() {
    let server = Server::start().await;
    check_that_followers_miss_nothing(&server.api()).await;
}
