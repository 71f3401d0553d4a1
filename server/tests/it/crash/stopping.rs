//! SIGTERM: the server rejects new calls, finishes running ones, and open streams do not keep it
//! running.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::Request;
use futures::{SinkExt, StreamExt};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use crate::support::process::{PATIENCE, Server, check, eventually};

/// A stub of Open-Meteo that answers once released, so that a test controls the duration of a call.
struct WeatherStub {
    url: String,
    requests: Arc<AtomicUsize>,
    release: CancellationToken,
}

impl WeatherStub {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (requests, release) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
        let weather = Self { url, requests, release };
        let (requests, release) = (weather.requests.clone(), weather.release.clone());
        let router = axum::Router::new().fallback(async move |request: Request| {
            requests.fetch_add(1, Ordering::Relaxed);
            release.cancelled().await;
            Json(match request.uri().path() {
                "/v1/search" => json!({ "results": [
                    { "name": "Oslo", "latitude": 59.9, "longitude": 10.7, "country": "Norway" }
                ] }),
                _ => json!({
                    "timezone": "Europe/Oslo",
                    "current_units": { "temperature_2m": "°C" },
                    "current": {
                        "time": "2026-01-01T12:00", "temperature_2m": -3.5, "weather_code": 0
                    },
                }),
            })
        });
        tokio::spawn(async move { axum::serve(listener, router).await });
        weather
    }

    /// Starts a server that uses this stub.
    async fn server(&self, drain_ms: u64) -> Server {
        let mut server = Server::new()
            .with("BUILTIN__WEATHER__GEOCODING_URL", &self.url)
            .with("BUILTIN__WEATHER__FORECAST_URL", &self.url)
            .with("BUILTIN__WEATHER__TIMEOUT_MS", 30_000)
            .with("SHUTDOWN__DRAIN_MS", drain_ms);
        server.start().await;
        server
    }

    async fn wait_for_requests(&self, times: usize) {
        let enough = async || (self.requests.load(Ordering::Relaxed) >= times).then_some(());
        eventually("calls are running", PATIENCE, enough).await;
    }
}

fn weather_request() -> Value {
    json!({ "run_id": "run_stop", "args": { "query": "weather in Oslo" }, "timeout_ms": 60_000 })
}

/// Opens one stream of each kind; each task ends with its stream.
async fn open_streams(server: &Server) -> Vec<(&'static str, JoinHandle<()>)> {
    server.register("idle", "probe.idle", "read").await;
    let mut open = Vec::new();
    for path in ["/v1/events", "/v1/runs/run_stop/events", "/internal/ingress/sse?client_id=idle"] {
        let answer = server.http.get(server.url(path)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let mut chunks = answer.bytes_stream();
        let read_on = async move { while let Some(Ok(_)) = chunks.next().await {} };
        open.push((path, tokio::spawn(read_on)));
    }
    let address = server.url("/internal/ingress/ws").replace("http://", "ws://");
    let (mut socket, _) = tokio_tungstenite::connect_async(address).await.unwrap();
    let hello = json!({ "type": "hello", "client_id": "idle" }).to_string();
    socket.send(Message::text(hello)).await.unwrap();
    assert!(socket.next().await.unwrap().unwrap().into_text().unwrap().contains("hello_ack"));
    open.push(("ws", tokio::spawn(async move { while let Some(Ok(_)) = socket.next().await {} })));
    let poll = server.url("/internal/ingress/poll?client_id=idle&wait_ms=60000");
    let polling = server.http.get(poll).send();
    open.push(("poll", tokio::spawn(async move { drop(polling.await) })));
    open
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_finishes_running_calls_and_rejects_new_ones() {
    let weather = WeatherStub::start().await;
    let mut server = weather.server(30_000).await;
    let waiting: Vec<_> = (0..20)
        .map(|_| server.invoking("weather.query", &weather_request()).query(&[("wait_ms", 30_000)]))
        .map(|request| tokio::spawn(request.send()))
        .collect();
    weather.wait_for_requests(20).await;
    let open = open_streams(&server).await;
    server.signal("TERM");
    assert_new_calls_are_rejected(&server).await;
    assert_eq!(server.get("/livez").await, StatusCode::OK, "reads still work");
    weather.release.cancel();
    let released = Instant::now();
    for request in waiting {
        let answer = request.await.unwrap().unwrap().json::<Value>().await.unwrap();
        assert_eq!(answer["status"], "SUCCEEDED", "{answer}");
        assert_eq!(answer["result"]["temperature"], json!(-3.5));
    }
    let status = server.ended(Duration::from_secs(5)).await;
    let took = released.elapsed();
    assert!(status.success(), "{status}");
    assert!(took < Duration::from_millis(1_900), "it took {took:?} after the last call");
    eprintln!("20 calls finished, 5 streams open: ended {} ms later", took.as_millis());
    for (stream, reading) in open {
        let ended = tokio::time::timeout(Duration::from_secs(1), reading).await;
        assert!(ended.is_ok(), "{stream} is still open");
    }
    let stored = check(&server.data_dir());
    assert_eq!((stored.open, stored.count("SUCCEEDED")), (0, stored.calls.len()));
}

/// Asserts that new calls are rejected at once, with a time to retry.
async fn assert_new_calls_are_rejected(server: &Server) {
    let http = Client::builder().no_proxy().pool_max_idle_per_host(0);
    let http = http.timeout(Duration::from_secs(2)).build().unwrap();
    let url = server.url("/v1/tools/calculation.eval/invoke");
    let body = json!({ "run_id": "run_stop", "args": { "expression": "1+1" } });
    let rejected = async || {
        let answer = match http.post(&url).json(&body).send().await {
            Ok(answer) => answer,
            Err(error) => {
                assert!(error.is_connect(), "a new caller waits without an answer: {error:?}");
                return Some(());
            }
        };
        match answer.status() {
            // The server has not handled the signal yet.
            StatusCode::ACCEPTED => None,
            StatusCode::SERVICE_UNAVAILABLE => {
                assert!(answer.headers().contains_key("retry-after"));
                Some(())
            }
            other => panic!("answered {other}"),
        }
    };
    eventually("new calls are refused", PATIENCE, rejected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_exceeds_the_drain_time_is_retried_by_the_next_start() {
    let weather = WeatherStub::start().await;
    let mut server = weather.server(300).await;
    let id = server.ticket("weather.query", weather_request()).await;
    weather.wait_for_requests(1).await;
    server.signal("TERM");
    let signaled = Instant::now();
    let status = server.ended(Duration::from_secs(5)).await;
    assert!(status.success(), "{status}");
    eprintln!("ended {} ms after SIGTERM with a limit of 300", signaled.elapsed().as_millis());
    assert_eq!(check(&server.data_dir()).open, 1);
    weather.release.cancel();
    server.start().await;
    let call = server.call(&id, 10_000).await;
    assert_eq!((&call["status"], &call["attempt"]), (&json!("SUCCEEDED"), &json!(2)), "{call}");
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}
