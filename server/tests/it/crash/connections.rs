//! A thousand idle connections, two hundred event streams, and a connection that never completes
//! its request head.

use std::process::Command;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::process::{PATIENCE, Server, eventually};

const IDLE: usize = 1_000;
const LISTENING: usize = 200;

/// Raises the limit of open files: this process and its server each need a file descriptor for
/// every connection.
fn raise_file_limit() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let now: u64 = line.split_whitespace().nth(3).unwrap().parse().unwrap_or(u64::MAX);
    if now < 4_096 {
        let pid = std::process::id().to_string();
        let raised = Command::new("prlimit").args(["--pid", &pid, "--nofile=4096:"]).status();
        assert!(raised.unwrap().success(), "{now} open files are too few for this test");
    }
}

fn open_files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count()
}

/// Opens a connection, requests a path and reads until the response contains `until`.
async fn connect(server: &Server, path: &str, until: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut stream, until).await;
    stream
}

async fn read_until(stream: &mut TcpStream, until: &str) {
    let mut received = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&received).contains(until) {
            assert_ne!(stream.read_buf(&mut received).await.unwrap(), 0, "disconnected");
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect(until);
}

async fn connect_many(server: &Server, count: usize, path: &str, until: &str) -> Vec<TcpStream> {
    let connecting = (0..count).map(|_| connect(server, path, until));
    futures::stream::iter(connecting).buffer_unordered(50).collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_cost_only_file_descriptors() {
    raise_file_limit();
    let mut server = Server::new().with("LIMITS__REQUEST_HEADER_TIMEOUT_MS", 60_000);
    server.start().await;
    for _ in 0..10 {
        server.evaluated("1+1").await;
    }
    let before = open_files(&server);
    let idle = connect_many(&server, IDLE, "/livez", "ok").await;
    let mut listening = connect_many(&server, LISTENING, "/v1/events", "\r\n\r\n").await;
    let crowded = open_files(&server);
    assert!(crowded >= before + IDLE + LISTENING, "{before} to {crowded}");
    let began = Instant::now();
    for number in 0..20 {
        let call = server.evaluated(&format!("{number}+1")).await;
        assert_eq!(call["result"]["result"], json!(number + 1));
    }
    let took = began.elapsed() / 20;
    for stream in &mut listening {
        read_until(stream, "tool.call.finished").await;
    }
    drop((idle, listening));
    // The store may hold a few more: SQLite keeps the files of its readers open.
    let are_closed = async || (open_files(&server) <= before + 24).then_some(());
    eventually("the file descriptors are given back", PATIENCE, are_closed).await;
    let after = open_files(&server);
    eprintln!("file descriptors: {before}, {crowded}, {after}; a call in the crowd took {took:?}");
    server.evaluated("1+1").await;
    assert!(server.stop().await.success());
}

#[tokio::test]
async fn an_incomplete_request_head_is_disconnected_after_the_timeout() {
    let mut server = Server::new().with("LIMITS__REQUEST_HEADER_TIMEOUT_MS", 1_000);
    server.start().await;
    // The timeout also closes idle pooled connections, perhaps at the moment of their reuse.
    let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0);
    server.http = client.build().unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let began = Instant::now();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: 127.0").await.unwrap();
    let mut received = Vec::new();
    let reading = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut received));
    // Both an end of file and a reset are a disconnect.
    drop(reading.await.expect("still connected"));
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(900), "it was cut off after {took:?}");
    eprintln!("cut off after {took:?}");
    server.evaluated("1+1").await;
}
