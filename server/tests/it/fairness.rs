//! No client, project or schema keeps others from being served.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::api::offer;
use crate::support::process;
use crate::support::ws::Ws;
use crate::support::{Api, Server, soon, until};

/// A registration of 30 tools in 8.5 KB whose patterns take 500 MiB and 20 seconds to compile.
fn costly_registration() -> Value {
    let tool = |n: usize| {
        let field = |f: usize| (format!("f{f}"), json!({ "pattern": format!("{f}{n}\\PL{{60}}") }));
        let fields: serde_json::Map<_, _> = (0..6).map(field).collect();
        json!({ "name": format!("t{n}"), "schema": { "properties": fields } })
    };
    json!({ "client_id": "c1", "tools": (0..30).map(tool).collect::<Vec<_>>() })
}

fn url(api: &Api, path: &str) -> String {
    format!("http://{}{path}", api.address)
}

/// Returns the resident memory of a process in KiB.
fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_registration_of_costly_schemas_is_refused_quickly() {
    let server = process::Server::ready().await;
    let registration = costly_registration();
    assert!(registration.to_string().len() < 10_000);
    let before = resident_kib(server.pid());
    let began = Instant::now();
    let url = server.url("/internal/tools/register");
    let answer = server.http.post(url).json(&registration).send().await.unwrap();
    let took = began.elapsed();
    assert_eq!(answer.status(), 422);
    let body: Value = answer.json().await.unwrap();
    let text = body["detail"].as_str().unwrap();
    assert!(text.starts_with("t") && text.contains("32 MiB when compiled"), "{text}");
    assert!(took < Duration::from_secs(3), "refused after {took:?}");
    let more = resident_kib(server.pid()).saturating_sub(before);
    assert!(more < 150 * 1024, "{more} KiB more after the refusal");
}

#[tokio::test]
async fn an_import_skips_costly_schemas_and_other_calls_go_on() {
    let server = Server::start().await;
    let api = server.api();
    let field = |n: usize| {
        json!({ "name": format!("f{n}"), "in": "query",
            "schema": { "type": "string", "pattern": format!("{n}\\PL{{60}}") } })
    };
    let operation = |n: usize| {
        json!({ "operationId": format!("op{n}"),
        "parameters": (0..10).map(|f| field(n * 10 + f)).collect::<Vec<_>>(),
        "responses": { "200": { "description": "ok" } } })
    };
    let paths: serde_json::Map<_, _> =
        (0..3).map(|n| (format!("/p{n}"), json!({ "get": operation(n) }))).collect();
    let document = json!({ "openapi": "3.1.0", "info": { "title": "t", "version": "1" },
        "servers": [{ "url": "https://example.com" }], "paths": paths });
    let importing = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/projects/default/tools/import", document).await })
    };
    let mut slowest = Duration::ZERO;
    while !importing.is_finished() {
        let began = Instant::now();
        assert_eq!(api.get("/livez").await.status, 200);
        slowest = slowest.max(began.elapsed());
    }
    let report = importing.await.unwrap().is(201);
    let skipped = report["skipped"].as_array().unwrap();
    assert_eq!((report["imported"].as_array().unwrap().len(), skipped.len()), (1, 2), "{report}");
    let reason = skipped[0]["reason"].as_str().unwrap();
    assert!(reason.contains("op1") && reason.contains("32 MiB when compiled"), "{reason}");
    assert!(slowest < Duration::from_millis(500), "another request took {slowest:?}");
}

/// Calls `database.query` in a project of its own.
async fn query(api: &Api, project: &str, sql: &str) -> (Value, Duration) {
    let began = Instant::now();
    let url = url(api, "/v1/tools/database.query/invoke?wait_ms=20000");
    let request = reqwest::Client::new().post(url).header("x-toolcrib-project", project);
    let body = json!({ "run_id": "run_1", "args": { "sql": sql } });
    let answer = request.json(&body).send().await.unwrap();
    let call = answer.json().await.unwrap();
    (call, began.elapsed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_queries_of_one_project_do_not_delay_another() {
    let server = Server::with(|config| config.builtin.database.timeout_ms = 4_000).await;
    let api = server.api();
    query(&api, "b", "SELECT 1").await;
    let endless =
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
    let queries: Vec<_> = (0..8)
        .map(|_| {
            let api = api.clone();
            tokio::spawn(async move { query(&api, "a", endless).await })
        })
        .collect();
    until("the endless queries run", || async {
        let open = server.engine.calls().open_calls_by_state();
        open.into_iter().any(|(state, count)| state == "running" && count >= 8).then_some(())
    })
    .await;
    let (call, took) = query(&api, "b", "SELECT 1").await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert!(took < Duration::from_secs(1), "SELECT 1 of another project took {took:?}");
    for query in queries {
        let (call, took) = query.await.unwrap();
        assert_eq!(call["outcome"]["error"]["code"], "TIMEOUT", "{call}");
        assert!(took < Duration::from_secs(8), "an endless query is stopped: {took:?}");
    }
}

#[tokio::test]
async fn streams_are_limited_and_health_checks_are_always_answered() {
    let server = Server::with(|config| {
        config.limits.max_connections = 10;
        config.limits.max_streams_per_caller = 5;
    })
    .await;
    let api = server.api();
    let open = async || {
        let answer = reqwest::Client::new().get(url(&api, "/v1/events")).send().await.unwrap();
        (answer.status().as_u16(), answer)
    };
    let mut streams = Vec::new();
    for _ in 0..5 {
        let (status, stream) = open().await;
        assert_eq!(status, 200);
        streams.push(stream);
    }
    let (status, refused) = open().await;
    assert_eq!((status, refused.headers()["retry-after"].to_str().unwrap()), (429, "5"));
    let text = refused.text().await.unwrap();
    assert!(text.contains("limits.max_streams_per_caller"), "{text}");
    assert!(Ws::open(&api).await.is_err(), "a WebSocket is a stream too");
    api.get("/v1/tools").await.is(200);
    // Idle connections use up the rest.
    let mut idle = Vec::new();
    let tools = async || {
        let answer = reqwest::Client::new().get(url(&api, "/v1/tools")).send().await.unwrap();
        (answer.status().as_u16(), answer.headers().get("retry-after").cloned())
    };
    let refused = loop {
        idle.push(TcpStream::connect(&server.address).await.unwrap());
        assert!(idle.len() < 50, "the limit is not enforced");
        match tools().await {
            (503, after) => break after,
            (status, _) => assert_eq!(status, 200),
        }
    };
    assert_eq!(refused.unwrap(), "1");
    for path in ["/livez", "/readyz"] {
        let answer = reqwest::Client::new().get(url(&api, path)).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 200, "{path}");
    }
    drop((streams, idle));
    until("a stream is free", || async { (open().await.0 == 200).then_some(()) }).await;
}

#[tokio::test]
async fn long_polls_count_as_streams_and_leave_connections_for_others() {
    let server = Server::with(|config| {
        config.limits.max_connections = 20;
        config.limits.max_streams_per_caller = 6;
    })
    .await;
    let api = server.api();
    api.register("c1", json!([offer("probe.parked")])).await;
    let id = api.invoke("probe.parked", json!({})).await;
    api.register("idle", json!([offer("probe.idle")])).await;
    let paths = [
        "/internal/ingress/poll?client_id=idle&wait_ms=60000".to_owned(),
        format!("/v1/tool_calls/{id}?wait_ms=60000"),
        format!("/v1/tasks/{id}?wait=60s"),
        // An encoded name is the same parameter.
        format!("/v1/tool_calls/{id}?%77ait_ms=60000"),
        "/v1/agents/ada/inbox?wait_ms=60000".to_owned(),
    ];
    let mut waiting = tokio::task::JoinSet::new();
    for path in paths.iter().chain(&paths[..1]) {
        let request = reqwest::Client::new().get(url(&api, path)).send();
        waiting.spawn(async move { request.await.map(|answer| answer.status().as_u16()) });
    }
    // Each of them would wait: the limit of the caller is reached, and it stays so.
    let refused = async || {
        let path = format!("/v1/tool_calls/{id}?wait_ms=1");
        let answer = reqwest::Client::new().get(url(&api, &path)).send().await.unwrap();
        (answer.status().as_u16() == 429).then_some(answer)
    };
    let answer = until("the limit is reached", refused).await;
    assert_eq!(answer.headers()["retry-after"], "5");
    let text = answer.text().await.unwrap();
    assert!(text.contains("limits.max_streams_per_caller"), "{text}");
    for path in &paths {
        let answer = reqwest::Client::new().get(url(&api, path)).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 429, "{path}");
    }
    assert!(waiting.try_join_next().is_none(), "no earlier wait was disturbed");
    // A request that does not wait is answered, and so are calls that wait for their outcome.
    assert_eq!(api.call(&id).await["status"], "PENDING");
    let args = json!({ "run_id": "r", "args": { "expression": "1+1" }, "wait_ms": 10_000 });
    let call = api.post("/v1/tools/calculation.eval/invoke", args).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    let metrics = api.get("/metrics").await.text;
    assert!(metrics.contains("toolcrib_streams_refused_total{limit=\"caller\"}"), "{metrics}");
    waiting.abort_all();
    let admitted = async || refused().await.is_none().then_some(());
    until("the waits have given their permits back", admitted).await;
}

#[tokio::test]
async fn a_follower_that_stops_reading_is_disconnected() {
    let mut server = process::Server::new().with("LIMITS__WRITE_TIMEOUT_MS", 500);
    server.start().await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let address = format!("127.0.0.1:{}", server.port).parse().unwrap();
    let mut follower = socket.connect(address).await.unwrap();
    let request = "GET /v1/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    follower.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 16];
    follower.read_exact(&mut head).await.unwrap();
    assert!(head.starts_with(b"HTTP/1.1 200"));
    // Events fill the buffers of the kernel; then nothing is taken.
    soon("the follower is disconnected", async {
        loop {
            let body = json!({ "run_id": "r".repeat(200), "args": { "expression": "1" } });
            let calls = (0..50).map(|_| server.invoke("calculation.eval", body.clone()));
            futures::future::join_all(calls).await;
            let metrics = server.http.get(server.url("/metrics")).send().await.unwrap();
            let text = metrics.text().await.unwrap();
            if text.contains("toolcrib_connections_stalled_total 1") {
                assert!(text.contains("toolcrib_streams_open 0"), "{text}");
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn an_idle_websocket_takes_little_memory() {
    const MANY: u64 = 300;
    let server = process::Server::ready().await;
    let url = format!("ws://127.0.0.1:{}/internal/ingress/ws", server.port);
    let mut sockets = Vec::new();
    let mut connect = async |n: u64| {
        let (mut socket, _) = tokio_tungstenite::connect_async(&url).await.unwrap();
        let hello = json!({ "type": "hello", "client_id": format!("c{}", n % 20),
            "tools": [offer("a.tool")] });
        use futures::{SinkExt, StreamExt};
        socket.send(hello.to_string().into()).await.unwrap();
        soon("hello_ack", socket.next()).await.unwrap().unwrap();
        sockets.push(socket);
    };
    for n in 0..50 {
        connect(n).await;
    }
    let before = resident_kib(server.pid());
    for n in 0..MANY {
        connect(n).await;
    }
    let after = resident_kib(server.pid());
    let metrics = server.http.get(server.url("/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains(&format!("toolcrib_streams_open {}\n", MANY + 50)), "{metrics}");
    // Fewer bytes than before would mean that something else gave memory back meanwhile.
    assert!(after > before, "{before} KiB before, {after} KiB after");
    let each = (after - before) / MANY;
    assert!(each <= 40, "{each} KiB per idle WebSocket");
}
