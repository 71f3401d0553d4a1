//! Runs the load generator against the baseline and checks what the baseline has stored. The tests
//! assert counts and never times: the machine that runs tests is not the one that measures.

use std::path::Path;
use std::time::{Duration, Instant};

use toolcrib_bench::load::http::{self, Connection};
use toolcrib_bench::{baseline, load, processes};

const PATH: &str = "/v1/tools/bench.noop/invoke?wait_ms=30000";
const BODY: &str = r#"{"run_id":"run_1","args":{"n":1}}"#;

async fn start(dir: &Path) -> String {
    let addr = format!("127.0.0.1:{}", processes::free_port().unwrap());
    let listener = tokio::net::TcpListener::bind(&addr).await.unwrap();
    let dir = dir.to_owned();
    tokio::spawn(async move { baseline::serve(listener, &dir, None).await });
    addr
}

/// Returns the number of rows in the file, and the number of complete ones among them.
fn rows(dir: &Path) -> (u32, u32) {
    let connection = rusqlite::Connection::open(dir.join(baseline::DATABASE)).unwrap();
    connection
        .query_row(
            "SELECT count(*), count(*) FILTER (
                 WHERE status = 'SUCCEEDED' AND result = '{}' AND completed_at IS NOT NULL
                 AND run_id = 'run_1' AND tool_name = 'bench.noop' AND args = '{\"n\":1}'
             ) FROM tool_calls",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_counted_call_is_stored_in_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let addr = start(dir.path()).await;
    let give_up = Duration::from_secs(60);
    load::time_to_first_success(&addr, Instant::now(), PATH, BODY, None, give_up).await.unwrap();
    let mut expected = 1;

    // The loop is bounded by time, so it runs again until it has made a hundred calls.
    let mut calls = 0;
    while calls < 100 {
        let time = Duration::from_millis(200);
        let sample = load::closed_loop(&addr, 8, time, PATH, BODY, None).await.unwrap();
        assert_eq!(sample.errors, 0);
        assert!(sample.count >= 8, "each worker makes at least one call");
        assert!(sample.p50_us <= sample.p90_us && sample.p90_us <= sample.p99_us);
        assert!(sample.p99_us <= sample.max_us && sample.max_us <= sample.elapsed_us);
        calls += u32::try_from(sample.count).unwrap();
    }
    expected += calls;
    assert_eq!(rows(dir.path()), (expected, expected));

    let burst = load::burst(&addr, 100, 3, PATH, BODY, None).await.unwrap();
    assert_eq!((burst.n, burst.count, burst.errors), (100, 300, 0));
    assert_eq!(burst.rounds_us.len(), 3);
    expected += 300;
    assert_eq!(rows(dir.path()), (expected, expected));

    let sample = load::get_latencies(&addr, "/healthz", 20, None).await.unwrap();
    assert_eq!((sample.count, sample.errors), (20, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_can_be_read_by_its_ticket() {
    let dir = tempfile::tempdir().unwrap();
    let addr = start(dir.path()).await;
    let mut connection = Connection::open(&addr).await.unwrap();

    let request = http::post(&addr, "/v1/tools/bench.noop/invoke", BODY, Some("ignored"));
    let answer = connection.round_trip(&request).await.unwrap();
    assert_eq!(answer.status, 202);
    let ticket: serde_json::Value = serde_json::from_slice(answer.body).unwrap();
    assert_eq!(ticket["status"], "RUNNING");
    let id = ticket["tool_call_id"].as_str().unwrap();
    assert!(id.starts_with("tc_"));

    let request = http::get(&addr, &format!("/v1/tool_calls/{id}?wait_ms=30000"), None);
    let answer = connection.round_trip(&request).await.unwrap();
    assert!(answer.has_succeeded());
    let call: serde_json::Value = serde_json::from_slice(answer.body).unwrap();
    assert_eq!(call["tool_call_id"], id);
    assert_eq!(call["args"], serde_json::json!({"n": 1}));
    assert_eq!(call["result"], serde_json::json!({}));
    assert_eq!(call["error"], serde_json::Value::Null);
    assert!(call["completed_at"].is_string());
    assert_eq!(rows(dir.path()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_requests_are_counted_as_errors() {
    let dir = tempfile::tempdir().unwrap();
    let addr = start(dir.path()).await;
    let burst = load::burst(&addr, 4, 1, PATH, "no json", None).await.unwrap();
    assert_eq!((burst.count, burst.errors), (0, 4));
    let path = "/v1/tools/other/invoke?wait_ms=1";
    let burst = load::burst(&addr, 4, 1, path, BODY, None).await.unwrap();
    assert_eq!((burst.count, burst.errors), (0, 4));
    let sample = load::get_latencies(&addr, "/v1/tool_calls/tc_none", 3, None).await.unwrap();
    assert_eq!((sample.count, sample.errors), (0, 3));
    assert_eq!(rows(dir.path()), (0, 0));
}

#[tokio::test]
async fn waiting_for_a_missing_server_times_out() {
    let addr = format!("127.0.0.1:{}", processes::free_port().unwrap());
    let give_up = Duration::from_millis(50);
    let error = load::time_to_first_success(&addr, Instant::now(), PATH, BODY, None, give_up)
        .await
        .unwrap_err();
    assert!(error.to_string().contains(&addr));
    let time = Duration::from_millis(10);
    assert!(load::closed_loop(&addr, 1, time, PATH, BODY, None).await.is_err());
}

#[tokio::test]
async fn the_otlp_sink_counts_received_trace_bytes() {
    let sink = toolcrib_bench::otlp_sink::OtlpSink::start().await.unwrap();
    let addr = sink.url.strip_prefix("http://").unwrap();
    for (path, body) in [("/v1/traces", "12345"), ("/v1/metrics", "123"), ("/v1/traces", "1")] {
        let mut connection = Connection::open(addr).await.unwrap();
        let answer = connection.round_trip(&http::post(addr, path, body, None)).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    assert_eq!(sink.trace_bytes(), 6);
}
