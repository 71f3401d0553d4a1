//! A full disk: the server acknowledges no call that it cannot store, keeps answering reads, and
//! accepts calls again as soon as there is space.
//!
//! There are two variants: with the system's limit on file sizes, which also applies to root; and
//! on a small file system of its own, if the system permits mounting one (in a namespace that ends
//! with the server).

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::process::{Server, check, eventually};

const DISK_MIB: u64 = 64;
/// More than the size of the WAL that the server preallocates at startup.
const FILE_LIMIT: u64 = 21 << 20;

/// A disk that a test can fill and free again.
enum Disk {
    Small,
    Limited,
}

impl Disk {
    /// Path of the server's data, as this process sees it.
    fn data(&self, server: &Server) -> PathBuf {
        match self {
            Self::Small => {
                let seen = format!("/proc/{}/root{}", server.pid(), server.data_dir().display());
                PathBuf::from(seen)
            }
            Self::Limited => server.data_dir(),
        }
    }

    fn fill(&self, server: &Server) {
        match self {
            Self::Small => {
                let mut ballast = File::create(self.data(server).join("ballast")).unwrap();
                let full = (0..DISK_MIB << 8).find_map(|_| ballast.write_all(&[1; 4_096]).err());
                assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
            }
            Self::Limited => limit_files(server, &FILE_LIMIT.to_string()),
        }
    }

    fn free_space(&self, server: &Server) {
        match self {
            Self::Small => std::fs::remove_file(self.data(server).join("ballast")).unwrap(),
            Self::Limited => limit_files(server, "unlimited"),
        }
    }
}

fn limit_files(server: &Server, limit: &str) {
    let (pid, limit) = (server.pid().to_string(), format!("--fsize={limit}:"));
    assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_size_limit_gives_503_and_loses_nothing() {
    // The signal SIGXFSZ would end the process; a full disk sends no signal.
    let server = Server::new().through(&["sh", "-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
    check_full_disk(server, Disk::Limited).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_gives_503_and_loses_nothing() {
    let server = Server::new();
    let mount_point = server.directory.path().join("disk");
    std::fs::create_dir(&mount_point).unwrap();
    let mount = format!("mount -t tmpfs -o size={DISK_MIB}m none '{}'", mount_point.display());
    let permitted = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).output();
    if !permitted.is_ok_and(|ran| ran.status.success()) {
        eprintln!("no disk may be mounted here; the test with limited files stands for this one");
        return;
    }
    let script = format!("{mount} && exec \"$0\" \"$@\"");
    let server =
        server.with_data_dir(&mount_point).through(&["unshare", "-rm", "sh", "-c", &script]);
    check_full_disk(server, Disk::Small).await;
}

async fn check_full_disk(mut server: Server, disk: Disk) {
    server.start().await;
    server.register("client", "probe.parked", "irreversible").await;
    let eval = json!({ "run_id": "run_full", "args": { "expression": "6*7" } });
    let done = server.evaluated("6*7").await;
    let parked = server.ticket("probe.parked", parked(10)).await;
    disk.fill(&server);

    let mut acked = vec![parked.clone()];
    // Large calls first, then small ones, until neither fits.
    for bytes in [200_000, 10] {
        acked.extend(calls_until_refused(&server, bytes).await);
    }
    for bytes in [10, 10, 200_000, 10] {
        let answer = server.invoking("probe.parked", &self::parked(bytes)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key("retry-after"));
    }
    let result = json!({ "status": "SUCCEEDED", "result": "x".repeat(100_000) });
    let submit = server.url(&format!("/internal/tool_calls/{parked}/submit"));
    let answer = server.http.post(&submit).json(&result).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(server.call(&parked, 0).await["status"], "PENDING", "the result was not stored");
    assert_eq!(server.get("/livez").await, StatusCode::OK);
    assert_eq!(server.get("/v1/tool_calls?limit=5").await, StatusCode::OK);
    assert_eq!(server.call(done["tool_call_id"].as_str().unwrap(), 0).await, done);

    disk.free_space(&server);
    let freed = Instant::now();
    let works = async || {
        let answer = server.invoking("calculation.eval", &eval).send().await.unwrap();
        (answer.status() == StatusCode::ACCEPTED).then_some(())
    };
    eventually("calls work again", Duration::from_secs(5), works).await;
    eprintln!("{} calls fitted; works {:?} after there was room", acked.len(), freed.elapsed());
    server.submit(&parked, result).await;
    assert_eq!(server.call(&parked, 0).await["status"], "SUCCEEDED");
    for id in &acked[1..] {
        let call = server.call(id, 0).await;
        assert_eq!((&call["status"], &call["hold"]), (&json!("PENDING"), &json!("parked")));
    }
    // A running server may move pages from the WAL to the database while both are copied.
    server.signal("STOP");
    let stored = check(&disk.data(&server));
    server.signal("CONT");
    assert_eq!(stored.open, acked.len() - 1, "rejected calls are not stored");
    assert!(acked.iter().all(|id| stored.calls.contains_key(id)));
    assert!(server.stop().await.success());
}

fn parked(bytes: usize) -> Value {
    let args = json!({ "bytes": "x".repeat(bytes) });
    json!({ "run_id": "run_full", "args": args, "timeout_ms": 600_000 })
}

/// Makes calls of this size until one is rejected. Returns the tickets of the accepted ones.
async fn calls_until_refused(server: &Server, bytes: usize) -> Vec<String> {
    let mut acked = Vec::new();
    loop {
        let answer = server.invoking("probe.parked", &parked(bytes)).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        match status {
            StatusCode::ACCEPTED => acked.push(body["tool_call_id"].as_str().unwrap().to_owned()),
            StatusCode::SERVICE_UNAVAILABLE => {
                assert_eq!(body["error"]["code"], "OVERLOADED", "{body}");
                return acked;
            }
            other => panic!("answered {other}: {body}"),
        }
        assert!(acked.len() < 1_000, "the disk is never full");
    }
}
