//! T6: a call that ends the server each time it is executed. After three crashes it has failed,
//! whatever its number of retries is, and no other call is affected.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::extract::Request;
use serde_json::json;

use crate::support::process::{PATIENCE, Server, check, text};

/// A stub of Open-Meteo that kills the server which asks it.
async fn start_killer(victim: Arc<AtomicU32>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().fallback(async move |_: Request| {
        let pid = victim.load(Ordering::SeqCst).to_string();
        Command::new("kill").args(["-9", &pid]).status().unwrap();
        std::future::pending::<()>().await;
    });
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_crashes_the_server_ends_after_three_crashes() {
    let victim = Arc::new(AtomicU32::new(0));
    let killer = start_killer(victim.clone()).await;
    let mut server = Server::new()
        .with("BUILTIN__WEATHER__GEOCODING_URL", &killer)
        .with("BUILTIN__WEATHER__FORECAST_URL", &killer)
        .with("POLICY__BACKOFF__INITIAL_MS", 50)
        .with("POLICY__BACKOFF__MAX_MS", 50);
    server.start().await;
    victim.store(server.pid(), Ordering::SeqCst);
    server.register("client", "probe.parked", "irreversible").await;
    let parked = server.ticket("probe.parked", json!({ "run_id": "r", "args": {} })).await;
    let args = json!({ "query": "weather in Oslo" });
    let body = json!({ "run_id": "r", "args": args, "retry": 9, "timeout_ms": 120_000 });
    let poison = match server.invoking("weather.query", &body).send().await {
        Ok(answer) => Some(text(&answer.json().await.unwrap(), "tool_call_id")),
        Err(_) => None,
    };
    let mut crashes = 0;
    loop {
        server.ended(PATIENCE).await;
        crashes += 1;
        server.start().await;
        victim.store(server.pid(), Ordering::SeqCst);
        let url = server.url("/v1/tool_calls?tool_name=weather.query&status=FAILED");
        let failed = async {
            let answer = server.http.get(&url).send().await.ok()?;
            let listed: serde_json::Value = answer.json().await.ok()?;
            listed["tool_calls"].get(0).cloned()
        };
        if let Some(call) = failed.await {
            if let Some(poison) = &poison {
                assert_eq!(text(&call, "tool_call_id"), *poison);
            }
            assert_eq!(
                (&call["attempt"], &call["error"]["code"]),
                (&json!(3), &json!("OUTCOME_UNKNOWN")),
                "{call}"
            );
            break;
        }
        assert!(crashes < 3, "the call is executed again after {crashes} crashes");
    }
    assert_eq!(crashes, 3);
    // The others go on at their usual speed.
    let began = Instant::now();
    for _ in 0..20 {
        server.evaluated("6*7").await;
    }
    let took = began.elapsed() / 20;
    assert!(took < Duration::from_millis(500), "a call took {took:?}");
    assert_eq!(text(&server.poll_requests("client", 1).await[0], "tool_call_id"), parked);
    server.submit(&parked, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    eprintln!("quarantined after {crashes} crashes; then {took:?} per call");
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}
