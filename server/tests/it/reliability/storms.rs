//! T44 and T45: everything at the same time. A service that fails for all callers gets no more
//! attempts than the policy allows, spread over time; deadlines that fall on one instant, and
//! requests that wait for one call, are served without keeping others from being served.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::Request;
use futures::StreamExt;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolcrib_sources::mcp::McpServerSettings;

use super::by_form;
use crate::support::api::offer;
use crate::support::mcp::Mcp;
use crate::support::process::{PATIENCE, Server, check, eventually, text};
use crate::support::upstream::Http;
use crate::support::{self, until};

/// Longest acceptable response of another request during a storm, on a busy machine.
const RESPONSIVE: Duration = Duration::from_secs(1);

/// Evaluates expressions until the token is cancelled. Returns the longest time of one, and their
/// number.
async fn measure_others(
    http: reqwest::Client,
    url: String,
    stopped: CancellationToken,
) -> (Duration, usize) {
    let (mut longest, mut count) = (Duration::ZERO, 0);
    let body = json!({ "run_id": "other", "args": { "expression": "6*7" }, "wait_ms": 20_000 });
    while !stopped.is_cancelled() {
        let began = Instant::now();
        let answer = http.post(&url).json(&body).send().await.unwrap();
        let call: Value = answer.json().await.unwrap();
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        (longest, count) = (longest.max(began.elapsed()), count + 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (longest, count)
}

/// Starts to measure. The token ends the measurement.
fn start_measuring(
    server: &Server,
) -> (CancellationToken, tokio::task::JoinHandle<(Duration, usize)>) {
    let stopped = CancellationToken::new();
    let url = server.url("/v1/tools/calculation.eval/invoke");
    (stopped.clone(), tokio::spawn(measure_others(server.http.clone(), url, stopped)))
}

/// Returns the times that a call waited for its retries, from its events.
async fn retry_waits_ms(server: &Server, id: &str) -> Vec<u64> {
    let url = server.url(&format!("/v1/tool_calls/{id}/events"));
    let events = server.http.get(url).send().await.unwrap().text().await.unwrap();
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.map(|data| data.parse::<Value>().unwrap());
    let waits = events.filter_map(|event| {
        event["next_attempt_at_ms"].as_u64()?.checked_sub(event["at_ms"].as_u64()?)
    });
    waits.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_service_gets_a_bounded_number_of_attempts_spread_over_time() {
    let calls = by_form(150, 1_000);
    let arrivals: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().fallback({
        let arrivals = arrivals.clone();
        async move |_: Request| {
            arrivals.lock().unwrap().push(Instant::now());
            StatusCode::SERVICE_UNAVAILABLE
        }
    });
    tokio::spawn(async move { axum::serve(listener, router).await });
    let mut server = Server::new()
        .with("BUILTIN__WEATHER__GEOCODING_URL", &service)
        .with("BUILTIN__WEATHER__FORECAST_URL", &service)
        .with("POLICY__MAX_RETRIES", 2)
        .with("POLICY__BACKOFF__INITIAL_MS", 1_000)
        .with("POLICY__BACKOFF__FACTOR", 1.0)
        .with("POLICY__BACKOFF__JITTER", 1.0);
    server.start().await;
    let (stopped, others) = start_measuring(&server);
    let body = json!({ "run_id": "storm", "args": { "query": "weather in Oslo" },
        "timeout_ms": 120_000 });
    let tickets = (0..calls).map(|_| server.ticket("weather.query", body.clone()));
    let ids: Vec<String> = futures::stream::iter(tickets).buffer_unordered(64).collect().await;
    for id in &ids {
        let call = server.call(id, 30_000).await;
        assert_eq!((&call["status"], &call["attempt"]), (&json!("FAILED"), &json!(3)), "{call}");
        assert_eq!(call["error"]["code"], "UPSTREAM_UNAVAILABLE", "{call}");
    }
    stopped.cancel();
    let (longest, count) = others.await.unwrap();
    let arrivals = arrivals.lock().unwrap().clone();
    assert_eq!(arrivals.len(), calls * 3, "one request per attempt");
    let mut waits = Vec::new();
    for id in ids.iter().step_by(calls / 50) {
        waits.extend(retry_waits_ms(&server, id).await);
    }
    waits.sort_unstable();
    // Most waits differ by more than the duration of an attempt: the retries do not come together.
    let (low, high) = (waits[waits.len() / 10], waits[waits.len() * 9 / 10]);
    assert!(waits.len() >= 100 && high - low > 500, "waits from {low} to {high} ms");
    assert!(longest < RESPONSIVE, "another call took {longest:?}");
    eprintln!(
        "{calls} calls, {} attempts; eight of ten waits from {low} to {high} ms; {count} other calls \
         took up to {longest:?}",
        arrivals.len()
    );
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_at_the_same_instant_end_their_calls_together() {
    let calls = by_form(1_000, 10_000);
    let lead = Duration::from_secs(by_form(6, 40));
    let mut server = Server::ready().await;
    server.register("absent", "probe.absent", "read").await;
    let now_ms = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64;
    let due_ms = now_ms() + lead.as_millis() as u64;
    let tickets = (0..calls).map(|_| async {
        let timeout_ms = due_ms.saturating_sub(now_ms());
        assert!(timeout_ms > 0, "{calls} calls took longer than {lead:?}");
        let body = json!({ "run_id": "r", "args": {}, "timeout_ms": timeout_ms });
        server.ticket("probe.absent", body).await
    });
    let ids: Vec<String> = futures::stream::iter(tickets).buffer_unordered(64).collect().await;
    let (stopped, others) = start_measuring(&server);
    let last_ended_ms = eventually("every call has timed out", lead + PATIENCE, || async {
        let url = server.url("/v1/tool_calls?status=PENDING&limit=1");
        let listed: Value = server.http.get(url).send().await.unwrap().json().await.unwrap();
        listed["tool_calls"].as_array().unwrap().is_empty().then(now_ms)
    })
    .await;
    stopped.cancel();
    let (longest, _) = others.await.unwrap();
    let mut latest_ms = 0;
    for id in ids.iter().step_by(calls / 100) {
        let call = server.call(id, 0).await;
        assert_eq!(call["status"], "TIMEOUT", "{call}");
        latest_ms = latest_ms.max(call["completed_at_ms"].as_u64().unwrap());
    }
    assert!(latest_ms >= due_ms && last_ended_ms < due_ms + 5_000, "{last_ended_ms} {due_ms}");
    assert!(longest < RESPONSIVE, "another call took {longest:?}");
    eprintln!(
        "{calls} deadlines: all ended {} ms later; other calls took up to {longest:?}",
        last_ended_ms.saturating_sub(due_ms)
    );
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!((stored.open, stored.count("TIMEOUT")), (0, calls));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_that_wait_for_one_call_are_answered_together() {
    let waiters = by_form(400, 4_000);
    let mut server = Server::ready().await;
    server.register("client", "probe.parked", "read").await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 120_000 });
    let id = server.ticket("probe.parked", body).await;
    let path = server.url(&format!("/v1/tool_calls/{id}?wait_ms=60000"));
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let waiting: Vec<_> = (0..waiters)
        .map(|_| {
            let request = http.get(&path).send();
            tokio::spawn(async move {
                let call: Value = request.await.unwrap().json().await.unwrap();
                (call["status"].clone(), Instant::now())
            })
        })
        .collect();
    eventually("all requests wait", PATIENCE * 2, || async {
        let metrics = server.http.get(server.url("/metrics")).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        let open = metrics.lines().find_map(|line| line.strip_prefix("toolcrib_streams_open "));
        open.is_some_and(|open| open == waiters.to_string()).then_some(())
    })
    .await;
    let (stopped, others) = start_measuring(&server);
    let submitted = Instant::now();
    server.submit(&id, json!({ "status": "SUCCEEDED", "result": "for all" })).await;
    let mut times = Vec::new();
    for waiter in waiting {
        let (status, at) = waiter.await.unwrap();
        assert_eq!(status, "SUCCEEDED");
        times.push(at.saturating_duration_since(submitted));
    }
    stopped.cancel();
    let (longest, _) = others.await.unwrap();
    times.sort();
    let p99 = times[times.len() * 99 / 100];
    eprintln!("{waiters} waiters answered, p99 {p99:?}; other calls took up to {longest:?}");
    assert!(p99 < Duration::from_secs(by_form(1, 4)), "p99 is {p99:?}");
    assert_eq!(text(&server.call(&id, 0).await, "result"), "for all");
    assert!(server.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_for_a_tool_list_fetch_it_once_from_the_upstream() {
    let upstream = Http::start().await;
    let settings = McpServerSettings {
        name: "fixture".into(),
        url: Some(upstream.url()),
        ..McpServerSettings::default()
    };
    let server = support::Server::with(|config| config.mcp = vec![settings]).await;
    let operator = server.operator();
    let is_ready = async || {
        let reply = operator.get("/v1/sources/mcp/fixture").await;
        (reply.body["state"] == "ready").then_some(())
    };
    until("the upstream is ready", is_ready).await;
    let fetched = || upstream.fixture.shared.list_requests.load(Ordering::SeqCst);
    let before = fetched();
    let list_all = async |times: usize| {
        let api = server.api();
        let lists = (0..times).map(|_| async {
            let listed = Mcp::modern(&api).ask("tools/list", json!({})).await.result();
            listed.to_string().contains("fixture.echo")
                || listed.to_string().contains("fixture__echo")
        });
        let listed: Vec<bool> = futures::future::join_all(lists).await;
        assert!(listed.iter().all(|has_it| *has_it));
    };
    list_all(200).await;
    assert_eq!(fetched(), before, "a list of an MCP client needs no request to the upstream");
    // A change that is announced many times at once is fetched at most twice: what was announced
    // during a fetch needs another one.
    for _ in 0..50 {
        upstream.fixture.change();
    }
    until("the new description", || async {
        let tool = operator.get("/v1/tools/fixture.echo").await.is(200);
        (tool["description"] == "Says it back, twice").then_some(())
    })
    .await;
    list_all(100).await;
    let after = fetched() - before;
    eprintln!("50 announcements and 300 lists: {after} requests to the upstream");
    assert!((1..=4).contains(&after), "{after} requests to the upstream");
    server.api().register("c1", json!([offer("another.tool")])).await;
}
