//! No room on the disk: nothing is acknowledged that is not stored, everything else goes on, and
//! when there is room again so do the calls.
//!
//! Twice: with the system's limit on the length of files, which holds for root and for everybody
//! else; and on a small disk of its own, where the system lets us mount one (in a namespace that
//! goes away with the server).

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::process::{Server, check, eventually};

const DISK_MIB: u64 = 64;
/// More than the log's own length, which the server makes at the start.
const FILE_LIMIT: u64 = 21 << 20;

/// A disk that can be made full and empty again.
enum Disk {
    Small,
    Limited,
}

impl Disk {
    /// Where the server's data is, seen from here.
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

    fn make_room(&self, server: &Server) {
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
async fn files_that_cannot_grow_are_a_503_and_nothing_is_lost() {
    // The signal that comes with the limit would end the process; a full disk sends none.
    let server = Server::new().through(&["sh", "-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
    without_room(server, Disk::Limited).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_a_503_and_nothing_is_lost() {
    let server = Server::new();
    let place = server.directory.path().join("disk");
    std::fs::create_dir(&place).unwrap();
    let mount = format!("mount -t tmpfs -o size={DISK_MIB}m none '{}'", place.display());
    let permitted = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).output();
    if !permitted.is_ok_and(|ran| ran.status.success()) {
        eprintln!("no disk may be mounted here; the test with limited files stands for this one");
        return;
    }
    let script = format!("{mount} && exec \"$0\" \"$@\"");
    let server = server.keeping_data_in(&place).through(&["unshare", "-rm", "sh", "-c", &script]);
    without_room(server, Disk::Small).await;
}

async fn without_room(mut server: Server, disk: Disk) {
    server.start().await;
    server.register("client", "probe.parked", "irreversible").await;
    let eval = json!({ "run_id": "run_full", "args": { "expression": "6*7" } });
    let done = server.evaluated("6*7").await;
    let parked = server.ticket("probe.parked", parked(10)).await;
    disk.fill(&server);

    let mut acked = vec![parked.clone()];
    // First much at a time, then little: until there is no room for either.
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
    assert_eq!(server.call(&parked, 0).await["status"], "PENDING", "nothing happened");
    assert_eq!(server.get("/livez").await, StatusCode::OK);
    assert_eq!(server.get("/v1/tool_calls?limit=5").await, StatusCode::OK);
    assert_eq!(server.call(done["tool_call_id"].as_str().unwrap(), 0).await, done);

    disk.make_room(&server);
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
        assert_eq!(
            (&call["status"], &call["hold"]["reason"]),
            (&json!("PENDING"), &json!("parked"))
        );
    }
    let stored = check(&disk.data(&server));
    assert_eq!(stored.open, acked.len() - 1, "what was refused did not happen");
    assert!(acked.iter().all(|id| stored.calls.contains_key(id)));
    assert!(server.stop().await.success());
}

fn parked(bytes: usize) -> Value {
    let args = json!({ "bytes": "x".repeat(bytes) });
    json!({ "run_id": "run_full", "args": args, "timeout_ms": 600_000 })
}

/// Calls with so many bytes until one is refused. Answers with the tickets that were given.
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
