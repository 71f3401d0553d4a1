//! The real binary as a process, on a free loopback port with its own directory: tests start, kill,
//! stop and restart it. A checker verifies the data that it leaves on disk.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use reqwest::{Client, RequestBuilder, StatusCode};
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The binary under test.
pub const TOOLCRIB: &str = env!("CARGO_BIN_EXE_toolcrib");

/// Maximum duration of a start, a stop or a first answer on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Repeats `look` until it returns a value; fails with `what` after the limit.
pub async fn eventually<T, F>(description: &str, limit: Duration, mut look: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let began = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(began.elapsed() < limit, "{description}: not within {limit:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns a free port outside the range that the system assigns to outgoing connections.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let offset = (std::process::id() % 2_000) as u16 * 8;
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (offset + step) % 18_000;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A data directory, and the server process that runs on it, if any.
pub struct Server {
    pub directory: TempDir,
    pub port: u16,
    environment: Vec<(String, String)>,
    wrapper: Vec<String>,
    data_dir: Option<PathBuf>,
    child: Option<Child>,
    pub http: Client,
}

impl Server {
    /// Reserves a directory and a port without starting a process.
    pub fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            port: free_port(),
            environment: Vec::new(),
            wrapper: Vec::new(),
            data_dir: None,
            child: None,
            http: Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().unwrap(),
        }
    }

    /// Starts a server and waits until it is ready.
    pub async fn ready() -> Self {
        let mut server = Self::new();
        server.start().await;
        server
    }

    /// Adds a setting, as an environment variable without its prefix: `SHUTDOWN__DRAIN_MS`.
    pub fn with(mut self, setting: &str, value: impl ToString) -> Self {
        self.environment.push((format!("TOOLCRIB_{setting}"), value.to_string()));
        self
    }

    /// Adds any other environment variable.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets a wrapper that replaces itself with the server: `sh -c '…; exec "$0" "$@"'`.
    pub fn through(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(ToString::to_string).collect();
        self
    }

    /// Sets or removes the wrapper of the next start.
    pub fn set_wrapper(&mut self, wrapper: Vec<String>) {
        self.wrapper = wrapper;
    }

    /// Sets the data directory; the default is `data` in the server's directory.
    pub fn with_data_dir(mut self, data_dir: &Path) -> Self {
        self.data_dir = Some(data_dir.to_owned());
        self
    }

    pub fn data_dir(&self) -> PathBuf {
        self.data_dir.clone().unwrap_or_else(|| self.directory.path().join("data"))
    }

    pub fn database(&self) -> PathBuf {
        self.data_dir().join("toolcrib.db")
    }

    /// Returns a command of the binary on this data directory, without inherited settings.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut words = self.wrapper.iter().map(String::as_str).chain([TOOLCRIB]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(arguments).arg("--data-dir").arg(self.data_dir());
        command.current_dir(self.directory.path());
        let is_setting = |name: &str| name.starts_with("TOOLCRIB_") || name.starts_with("OTEL_");
        for (name, _) in std::env::vars().filter(|(name, _)| is_setting(name)) {
            command.env_remove(name);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.env("TOOLCRIB_QUIET", "1").stdin(Stdio::null());
        command
    }

    /// Starts the process without waiting for readiness.
    pub fn spawn(&mut self) {
        self.spawn_on(&format!("127.0.0.1:{}", self.port));
    }

    /// Starts the process on another address.
    pub fn spawn_on(&mut self, listen: &str) {
        assert!(self.child.is_none(), "it runs already");
        let log = File::options().create(true).append(true).open(self.log_file()).unwrap();
        let mut command = self.command(&["serve", "--listen", listen]);
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        self.child = Some(child);
    }

    /// Starts the process and waits until it is ready. Returns the duration.
    pub async fn start(&mut self) -> Duration {
        let began = Instant::now();
        self.spawn();
        let url = self.url("/readyz");
        loop {
            let answer = self.http.get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return began.elapsed();
            }
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            let waited = began.elapsed();
            assert!(ended.is_none(), "the server ended: {ended:?}\n{}", self.log());
            assert!(waited < PATIENCE, "not ready after {waited:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until the server is ready. Returns false if its process ended before.
    pub async fn is_ready(&mut self) -> bool {
        let (began, url) = (Instant::now(), self.url("/readyz"));
        loop {
            if self.has_ended() {
                return false;
            }
            let answer = self.http.get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return true;
            }
            assert!(began.elapsed() < PATIENCE, "not ready after {PATIENCE:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Returns true if the process has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some())
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// Sends SIGTERM and waits for the end of the process.
    pub async fn stop(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.ended(PATIENCE).await
    }

    /// Waits for the end of the process.
    pub async fn ended(&mut self, limit: Duration) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        let log = self.log_file();
        let began = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if began.elapsed() > limit {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it did not end within {limit:?}\n{}", tail(&log));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    fn log_file(&self) -> PathBuf {
        self.directory.path().join("server.log")
    }

    /// Returns the last lines of the log.
    pub fn log(&self) -> String {
        tail(&self.log_file())
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn invoking(&self, tool: &str, body: &Value) -> RequestBuilder {
        self.http.post(self.url(&format!("/v1/tools/{tool}/invoke"))).json(body)
    }

    /// Invokes a tool and asserts status 202.
    pub async fn invoke(&self, tool: &str, body: Value) -> Value {
        let answer = self.invoking(tool, &body).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::ACCEPTED, "{body}");
        body
    }

    /// Invokes a tool. Returns the id of the call.
    pub async fn ticket(&self, tool: &str, body: Value) -> String {
        text(&self.invoke(tool, body).await, "tool_call_id")
    }

    /// Evaluates an expression and asserts success.
    pub async fn evaluated(&self, expression: &str) -> Value {
        let args = json!({ "expression": expression });
        let body = json!({ "run_id": "run_eval", "args": args, "wait_ms": 10_000 });
        let call = self.invoke("calculation.eval", body).await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        call
    }

    /// Returns a call once it has ended or the wait is over.
    pub async fn call(&self, id: &str, wait_ms: u64) -> Value {
        let url = self.url(&format!("/v1/tool_calls/{id}?wait_ms={wait_ms}"));
        let answer = self.http.get(url).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{id}: {body}");
        body
    }

    pub async fn get(&self, path: &str) -> StatusCode {
        self.http.get(self.url(path)).send().await.unwrap().status()
    }

    /// Posts a body and asserts status 200.
    pub async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.http.post(self.url(path)).json(&body).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{path}: {body}");
        body
    }

    /// Registers one tool with this effect.
    pub async fn register(&self, client_id: &str, tool: &str, effect: &str) {
        let tools = json!([{ "name": tool, "schema": {"type": "object"}, "effect": effect }]);
        let body = json!({ "client_id": client_id, "tools": tools });
        self.post("/internal/tools/register", body).await;
    }

    /// Polls once and acknowledges the requests.
    pub async fn poll(&self, client_id: &str, max: usize, wait_ms: u64) -> Vec<Value> {
        let query = format!("client_id={client_id}&max={max}&wait_ms={wait_ms}");
        let answer = self.http.get(self.url(&format!("/internal/ingress/poll?{query}")));
        let body = answer.send().await.unwrap().json::<Value>().await.unwrap();
        body["requests"].as_array().unwrap_or_else(|| panic!("{body}")).clone()
    }

    /// Polls until this many requests have been acknowledged.
    pub async fn poll_requests(&self, client_id: &str, count: usize) -> Vec<Value> {
        let mut requests = Vec::new();
        while requests.len() < count {
            let polled = self.poll(client_id, count - requests.len(), 10_000).await;
            assert!(!polled.is_empty(), "{} of {count} came", requests.len());
            requests.extend(polled);
        }
        requests
    }

    pub async fn submit(&self, id: &str, body: Value) -> Value {
        self.post(&format!("/internal/tool_calls/{id}/submit"), body).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("the server's log ends with:\n{}", self.log());
        }
    }
}

fn tail(path: &Path) -> String {
    let log = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Returns the operator token of the server with this data directory.
pub fn operator_token(data_dir: &Path) -> String {
    let file = data_dir.join("operator.token");
    let token =
        std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    token.trim().to_owned()
}

/// Returns a text field.
pub fn text(body: &Value, field: &str) -> String {
    body[field].as_str().unwrap_or_else(|| panic!("no {field} in {body}")).to_owned()
}

/// Contents of a consistent database.
#[derive(Debug, Default)]
pub struct Stored {
    /// The status of every call.
    pub calls: HashMap<String, String>,
    pub open: usize,
    pub events: usize,
}

impl Stored {
    /// Returns the number of calls with this status.
    pub fn count(&self, status: &str) -> usize {
        self.calls.values().filter(|stored| *stored == status).count()
    }
}

/// Reads a copy of the database in this directory. Fails if it is inconsistent.
pub fn check(data_dir: &Path) -> Stored {
    let copy = tempfile::tempdir().unwrap();
    for name in ["toolcrib.db", "toolcrib.db-wal"] {
        if data_dir.join(name).exists() {
            std::fs::copy(data_dir.join(name), copy.path().join(name)).unwrap();
        }
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let database = Connection::open_with_flags(copy.path().join("toolcrib.db"), flags).unwrap();
    let verdict: String =
        database.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(verdict, "ok");
    assert_no_rows(&database, "SELECT tool_call_id FROM tool_calls WHERE version < 1");
    assert_no_rows(&database, "SELECT tool_call_id FROM tool_calls WHERE started_ms < created_ms");
    assert_no_rows(
        &database,
        "SELECT tool_call_id FROM tool_calls WHERE completed_ms < started_ms",
    );
    assert_no_rows(
        &database,
        "SELECT tool_call_id FROM tool_calls WHERE completed_ms < created_ms",
    );
    assert_no_rows(
        &database,
        "SELECT tool_call_id FROM tool_calls WHERE deadline_ms <= created_ms",
    );
    assert_no_rows(
        &database,
        "SELECT tool_call_id FROM tool_calls WHERE status = 'TIMEOUT' AND completed_ms < deadline_ms",
    );
    assert_no_rows(&database, "SELECT number FROM events GROUP BY number HAVING count(*) > 1");
    assert_no_rows(
        &database,
        "SELECT number FROM events WHERE place NOT IN (SELECT place FROM tool_calls)",
    );
    assert_no_rows(
        &database,
        "SELECT key FROM idempotency_keys WHERE place NOT IN (SELECT place FROM tool_calls)",
    );
    assert_no_rows(
        &database,
        "SELECT tool_call_id FROM tool_calls GROUP BY tool_call_id HAVING count(*) > 1",
    );
    for table in ["tasks", "deliveries", "tries"] {
        let query = "WHERE place NOT IN (SELECT place FROM tool_calls)";
        assert_no_rows(&database, &format!("SELECT place FROM {table} {query}"));
    }
    assert_no_rows(
        &database,
        "SELECT call_id FROM deliveries JOIN tool_calls USING (place) \
         WHERE (deliveries.status = 'waiting') <> (completed_ms IS NULL)",
    );
    check_events(&database)
}

/// Fails if the query returns a row.
fn assert_no_rows(database: &Connection, query: &str) {
    let mut select = database.prepare(query).unwrap();
    let mut rows = select.query([]).unwrap();
    if let Some(row) = rows.next().unwrap() {
        panic!("{query}: {:?}", row.get::<_, rusqlite::types::Value>(0).unwrap());
    }
}

fn parse_implied_events(list: &str) -> Vec<(i64, String)> {
    let events = list.split(',').filter_map(|entry| {
        let kinds =
            [('r', "tool.call.requested"), ('s', "tool.call.started"), ('f', "tool.call.finished")];
        let strip_kind = |(suffix, kind): (char, _)| Some((entry.strip_suffix(suffix)?, kind));
        kinds.into_iter().find_map(strip_kind)
    });
    events.map(|(number, kind)| (number.parse().unwrap(), kind.to_owned())).collect()
}

/// Asserts that the events of each call begin with the request, contain exactly one end that
/// matches the status, and after the end contain only late reports.
fn check_events(database: &Connection) -> Stored {
    let mut events_by_call: HashMap<i64, Vec<(i64, String)>> = HashMap::new();
    let mut stored = Stored::default();
    let mut select =
        database.prepare("SELECT place, number, kind FROM events ORDER BY number").unwrap();
    let mut rows = select.query([]).unwrap();
    while let Some(row) = rows.next().unwrap() {
        let event = (row.get(1).unwrap(), row.get(2).unwrap());
        events_by_call.entry(row.get(0).unwrap()).or_default().push(event);
        stored.events += 1;
    }
    let mut select =
        database.prepare("SELECT place, tool_call_id, status, events FROM tool_calls").unwrap();
    let mut rows = select.query([]).unwrap();
    while let Some(row) = rows.next().unwrap() {
        let (id, status): (String, String) = (row.get(1).unwrap(), row.get(2).unwrap());
        let mut events = events_by_call.remove(&row.get(0).unwrap()).unwrap_or_default();
        let list: String = row.get(3).unwrap();
        // An implied event has a letter after its number and no row of its own.
        let implied = parse_implied_events(&list);
        stored.events += implied.len();
        events.extend(implied);
        events.sort();
        let numbers: String = events.iter().map(|(number, _)| format!("{number},")).collect();
        assert_eq!(list.replace(['r', 's', 'f'], ""), numbers, "{id} names other events");
        let kinds: Vec<&str> =
            events.iter().filter_map(|(_, kind)| kind.strip_prefix("tool.call.")).collect();
        assert_eq!(kinds.first(), Some(&"requested"), "{id}: {kinds:?}");
        let ended = |kind: &&&str| matches!(**kind, "finished" | "failed" | "timeout" | "canceled");
        let ends: Vec<&&str> = kinds.iter().filter(ended).collect();
        let expected: &[&str] = match status.as_str() {
            "SUCCEEDED" => &["finished"],
            "FAILED" => &["failed"],
            "TIMEOUT" => &["timeout"],
            "CANCELED" => &["canceled"],
            _ => &[],
        };
        assert!(ends.iter().map(|kind| **kind).eq(expected.iter().copied()), "{id}: {kinds:?}");
        let after = kinds.iter().skip_while(|kind| !ended(kind)).skip(1);
        assert!(after.into_iter().all(|kind| *kind == "late"), "{id}: {kinds:?}");
        stored.open += usize::from(expected.is_empty());
        stored.calls.insert(id, status);
    }
    stored
}

/// Runs a command against this server. Returns its standard output and standard error.
pub async fn run_cli(server: &super::Server, words: &[&str]) -> (String, String) {
    let mut command = Command::new(TOOLCRIB);
    command.args(["--server", &format!("http://{}", server.address)]).args(words);
    command.env_remove("TOOLCRIB_KEY");
    let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success(), "{stderr}");
    (String::from_utf8(ran.stdout).unwrap(), stderr)
}
