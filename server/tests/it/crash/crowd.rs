//! A thousand connections that say nothing, two hundred that listen, and one that never finishes
//! its first sentence.

use std::process::Command;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::process::{PATIENCE, Server, eventually};

const IDLE: usize = 1_000;
const LISTENING: usize = 200;

/// This process and its server each need a file descriptor for every connection.
fn permit_files() {
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

/// A connection that asked for a path and has read as far as `until`.
async fn connected(server: &Server, path: &str, until: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut stream, until).await;
    stream
}

async fn read_until(stream: &mut TcpStream, until: &str) {
    let mut heard = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&heard).contains(until) {
            assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0, "hung up on");
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect(until);
}

async fn many(server: &Server, count: usize, path: &str, until: &str) -> Vec<TcpStream> {
    let connecting = (0..count).map(|_| connected(server, path, until));
    futures::stream::iter(connecting).buffer_unordered(50).collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_costs_file_descriptors_and_nothing_else() {
    permit_files();
    let mut server = Server::new().with("LIMITS__REQUEST_HEADER_TIMEOUT_MS", 60_000);
    server.start().await;
    for _ in 0..10 {
        server.evaluated("1+1").await;
    }
    let before = open_files(&server);
    let idle = many(&server, IDLE, "/livez", "ok").await;
    let mut listening = many(&server, LISTENING, "/v1/events", "\r\n\r\n").await;
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
    // A few may be the store's: SQLite keeps what its readers opened for the next ones.
    let gone = async || (open_files(&server) <= before + 24).then_some(());
    eventually("the file descriptors are given back", PATIENCE, gone).await;
    let after = open_files(&server);
    eprintln!("file descriptors: {before}, {crowded}, {after}; a call in the crowd took {took:?}");
    server.evaluated("1+1").await;
    assert!(server.stop().await.success());
}

#[tokio::test]
async fn who_does_not_finish_a_sentence_is_hung_up_on() {
    let mut server = Server::new().with("LIMITS__REQUEST_HEADER_TIMEOUT_MS", 1_000);
    server.start().await;
    // A connection that is kept is hung up on as well, perhaps in the moment it is used again.
    let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0);
    server.http = client.build().unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let began = Instant::now();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: 127.0").await.unwrap();
    let mut heard = Vec::new();
    let reading = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut heard));
    // An end or a reset: both are hanging up.
    drop(reading.await.expect("still connected"));
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(900), "it was cut off after {took:?}");
    eprintln!("cut off after {took:?}");
    server.evaluated("1+1").await;
}
