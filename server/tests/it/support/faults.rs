//! Faults of the operating system, injected into the server with strace: a kill at a system call,
//! and flushes that fail.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::process::Server;

/// Returns true if this system lets strace trace a program. Tests that need it are skipped
/// otherwise.
pub fn can_trace() -> bool {
    let traced = Command::new("strace").args(["-qq", "-o", "/dev/null", "true"]).output();
    let possible = traced.is_ok_and(|ran| ran.status.success());
    if !possible {
        eprintln!("skipped: strace cannot trace programs here");
    }
    possible
}

/// Returns the wrapper with which a thread of the server that begins this system call for the
/// `count`-th time is killed, and the process with it. strace counts per thread, so the server runs
/// on one worker thread if its worker makes the call.
pub fn kill_at(syscall: &str, count: usize) -> Vec<String> {
    let (trace, inject) =
        (format!("trace={syscall}"), format!("inject={syscall}:signal=KILL:when={count}"));
    let words = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", &trace];
    words.into_iter().chain(["-e", &inject]).map(str::to_owned).collect()
}

/// Makes flushes of a running server fail with EIO: those of `when`, or all of them until the
/// process ends. Returns false if that is not possible here.
pub async fn fail_flushes(server: &Server, when: Option<&str>) -> bool {
    let when = when.map(|when| format!(":when={when}")).unwrap_or_default();
    inject(server, "fsync,fdatasync", &format!("error=EIO{when}")).await
}

/// Kills a running server when one of its threads begins this system call for the `count`-th time
/// from now on. Returns false if that is not possible here.
pub async fn arm_kill(server: &Server, syscall: &str, count: usize) -> bool {
    inject(server, syscall, &format!("signal=KILL:when={count}")).await
}

/// Attaches strace to a server and injects a fault into these system calls.
async fn inject(server: &Server, syscalls: &str, fault: &str) -> bool {
    let log = server.directory.path().join("strace.log");
    let pid = server.pid().to_string();
    let (trace, inject) = (format!("trace={syscalls}"), format!("inject={syscalls}:{fault}"));
    let mut strace = Command::new("strace");
    strace.args(["-f", "-p", &pid, "-e", &trace, "-e", &inject, "-o"]).arg(&log);
    let Ok(mut strace) = strace.stdin(Stdio::null()).stderr(Stdio::null()).spawn() else {
        return false;
    };
    let tasks = format!("/proc/{pid}/task");
    let is_traced = || {
        let mut tasks = std::fs::read_dir(&tasks).unwrap().flatten();
        tasks.all(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
            tracer.is_none_or(|pid| pid.trim() != "0")
        })
    };
    while !is_traced() {
        if strace.try_wait().unwrap().is_some() {
            eprintln!("skipped: strace cannot trace the server here");
            return false;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    true
}
