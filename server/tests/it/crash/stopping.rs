//! SIGTERM: no more calls are taken, what runs may finish, nobody's open stream keeps the process.

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

/// Somebody who answers as Open-Meteo does, once released: so a call runs as long as a test wants.
struct Weather {
    url: String,
    asked: Arc<AtomicUsize>,
    release: CancellationToken,
}

impl Weather {
    async fn starts() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (asked, release) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
        let weather = Self { url, asked, release };
        let (asked, release) = (weather.asked.clone(), weather.release.clone());
        let router = axum::Router::new().fallback(async move |request: Request| {
            asked.fetch_add(1, Ordering::Relaxed);
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

    /// A server that asks here.
    async fn server(&self, drain_ms: u64) -> Server {
        let mut server = Server::new()
            .with("BUILTIN__WEATHER__GEOCODING_URL", &self.url)
            .with("BUILTIN__WEATHER__FORECAST_URL", &self.url)
            .with("BUILTIN__WEATHER__TIMEOUT_MS", 30_000)
            .with("SHUTDOWN__DRAIN_MS", drain_ms);
        server.start().await;
        server
    }

    async fn was_asked(&self, times: usize) {
        let enough = async || (self.asked.load(Ordering::Relaxed) >= times).then_some(());
        eventually("calls are running", PATIENCE, enough).await;
    }
}

fn question() -> Value {
    json!({ "run_id": "run_stop", "args": { "query": "weather in Oslo" }, "timeout_ms": 60_000 })
}

/// Opens one of each kind of stream; each task ends when its stream does.
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
    let asked = server.http.get(poll).send();
    open.push(("poll", tokio::spawn(async move { drop(asked.await) })));
    open
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn told_to_stop_it_finishes_what_runs_and_takes_no_more() {
    let weather = Weather::starts().await;
    let mut server = weather.server(30_000).await;
    let waiting: Vec<_> = (0..20)
        .map(|_| server.invoking("weather.query", &question()).query(&[("wait_ms", 30_000)]))
        .map(|asked| tokio::spawn(asked.send()))
        .collect();
    weather.was_asked(20).await;
    let open = open_streams(&server).await;
    server.signal("TERM");
    refuses_new_calls(&server).await;
    assert_eq!(server.get("/livez").await, StatusCode::OK, "what runs can still be looked at");
    weather.release.cancel();
    let released = Instant::now();
    for asked in waiting {
        let answer = asked.await.unwrap().unwrap().json::<Value>().await.unwrap();
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

/// A caller who comes now is told at once to come back later.
async fn refuses_new_calls(server: &Server) {
    let http = Client::builder().no_proxy().pool_max_idle_per_host(0);
    let http = http.timeout(Duration::from_secs(2)).build().unwrap();
    let url = server.url("/v1/tools/calculation.eval/invoke");
    let body = json!({ "run_id": "run_stop", "args": { "expression": "1+1" } });
    let refused = async || {
        let answer = match http.post(&url).json(&body).send().await {
            Ok(answer) => answer,
            Err(error) => {
                assert!(error.is_connect(), "a new caller waits without an answer: {error:?}");
                return Some(());
            }
        };
        match answer.status() {
            // The signal has not been seen yet.
            StatusCode::ACCEPTED => None,
            StatusCode::SERVICE_UNAVAILABLE => {
                assert!(answer.headers().contains_key("retry-after"));
                Some(())
            }
            other => panic!("answered {other}"),
        }
    };
    eventually("new calls are refused", PATIENCE, refused).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_finish_in_time_is_settled_by_the_next_start() {
    let weather = Weather::starts().await;
    let mut server = weather.server(300).await;
    let id = server.ticket("weather.query", question()).await;
    weather.was_asked(1).await;
    server.signal("TERM");
    let told = Instant::now();
    let status = server.ended(Duration::from_secs(5)).await;
    assert!(status.success(), "{status}");
    eprintln!("ended {} ms after SIGTERM with a limit of 300", told.elapsed().as_millis());
    assert_eq!(check(&server.data_dir()).open, 1);
    weather.release.cancel();
    server.start().await;
    let call = server.call(&id, 10_000).await;
    assert_eq!((&call["status"], &call["attempt"]), (&json!("SUCCEEDED"), &json!(2)), "{call}");
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}
