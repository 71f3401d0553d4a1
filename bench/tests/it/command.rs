//! Starts the program as it is used: as a benchmark without a program to measure, and as each of
//! the child processes of a benchmark.

use std::process::Command;
use std::time::{Duration, Instant};

use toolcrib_bench::load;
use toolcrib_bench::processes::{self, ChildProcess};

const LIMIT: Duration = Duration::from_secs(60);

fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_toolcrib-bench"))
}

fn free_address() -> String {
    format!("127.0.0.1:{}", processes::free_port().unwrap())
}

#[test]
fn a_missing_program_is_reported_with_the_build_command() {
    let output = bench().args(["--quick", "--toolcrib", "/nonexistent"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr_text = String::from_utf8(output.stderr).unwrap();
    assert!(stderr_text.starts_with("error: there is no program /nonexistent"), "{stderr_text}");
    assert!(stderr_text.contains("cargo build --release -p toolcrib-server"), "{stderr_text}");
}

#[test]
fn with_json_a_failure_is_one_json_object_on_stderr() {
    let output = bench().args(["--json", "--toolcrib", "/nonexistent"]).output().unwrap();
    let stderr_text: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(
        stderr_text["error"]["message"].as_str().unwrap().contains("/nonexistent"),
        "{stderr_text}"
    );
    assert_eq!(stderr_text["exit"], 1);
}

#[tokio::test]
async fn the_baseline_answers_calls() {
    let dir = tempfile::tempdir().unwrap();
    let addr = free_address();
    let mut command = bench();
    command.args(["baseline", "--listen", &addr, "--dir"]).arg(dir.path());
    let _server = ChildProcess::start(&mut command).unwrap();
    let path = processes::call_path(toolcrib_bench::baseline::TOOL);
    let body = processes::CALL_BODY;
    load::time_to_first_success(&addr, Instant::now(), &path, body, None, LIMIT).await.unwrap();
}

#[tokio::test]
async fn fill_store_creates_the_requested_number_of_calls() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = bench();
    command.args(["fill-store", "--count", "120", "--data-dir"]).arg(dir.path());
    ChildProcess::start(&mut command).unwrap().wait().await.unwrap();
    let store = rusqlite::Connection::open(dir.path().join("toolcrib.db")).unwrap();
    let count = |sql| store.query_row(sql, [], |row| row.get::<_, u32>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM tool_calls"), 120);
    assert_eq!(count("SELECT count(DISTINCT run_id) FROM tool_calls"), 2);
}

#[tokio::test]
async fn the_mcp_server_listens() {
    let addr = free_address();
    let mut command = bench();
    command.args(["mcp-server", "--listen", &addr]);
    let _server = ChildProcess::start(&mut command).unwrap();
    processes::wait_until_listening(&addr, LIMIT).await.unwrap();
}
