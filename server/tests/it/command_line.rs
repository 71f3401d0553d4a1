//! The command line as a newcomer uses it: the real binary, in a directory of its own, beside other
//! servers, in a narrow terminal.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::support::process::{PATIENCE, Server, TOOLCRIB, eventually, free_port};

/// Returns a command without settings of this process.
fn clean(program: &str, directory: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOOLCRIB_")) {
        command.env_remove(name);
    }
    command.current_dir(directory).env("NO_COLOR", "1").env_remove("COLUMNS").stdin(Stdio::null());
    command
}

async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

async fn toolcrib(directory: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = clean(TOOLCRIB, directory);
    command.args(arguments);
    texts(run(command).await)
}

fn texts(output: Output) -> (Option<i32>, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the commands that the README shows from this heading on.
fn readme_commands(heading: &str) -> Vec<String> {
    let text = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let section = text.split(heading).nth(1).unwrap().split("\n## ").next().unwrap();
    let lines = section.lines().filter_map(|line| line.strip_prefix("$ "));
    lines.map(str::to_owned).collect()
}

/// A server that another user started survives the README's `kill -9`, and the commands work on
/// another port without a change.
#[tokio::test(flavor = "multi_thread")]
async fn the_readme_kills_only_the_server_that_it_started() {
    let mut bystander = Server::ready().await;
    let port = free_port();
    let commands = readme_commands("### Provide a tool, and kill the server");
    assert!(commands.iter().any(|line| line.starts_with("kill -9")), "{commands:?}");
    let mut script = String::from("set -u\ntoolcrib serve & pid=$!\n");
    let tools_respond = "until toolcrib tools >/dev/null 2>&1; do sleep 0.05; done\n";
    let is_registered = "until toolcrib tools demo.greet >/dev/null 2>&1; do sleep 0.05; done\n";
    script.push_str(tools_respond);
    for line in &commands {
        script.push_str(&format!("{}\n", line.replace("seconds=8", "seconds=2")));
        match line {
            line if line.contains("provider.py") => script.push_str(is_registered),
            line if line.starts_with("toolcrib serve") => script.push_str(tools_respond),
            _ => {}
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let mut shell = clean("bash", &repository());
    let binary = Path::new(TOOLCRIB).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    shell.args(["-c", &script]).env("PATH", path).env("TOOLCRIB_QUIET", "1");
    shell.env("TOOLCRIB_DATA_DIR", directory.path().join("data"));
    shell.env("TOOLCRIB_LISTEN", format!("127.0.0.1:{port}"));
    shell.env("TOOLCRIB_SERVER", format!("http://127.0.0.1:{port}"));
    let (code, out, err) = texts(run(shell).await);
    assert_eq!(code, Some(0), "{script}\n{out}\n{err}");
    assert!(out.contains("Hello, Grace!"), "{out}\n{err}");
    assert!(err.contains("cannot reach http://127.0.0.1:"), "the killed server is gone: {err}");
    let alive = bystander.http.get(bystander.url("/healthz")).send().await.unwrap();
    assert_eq!(alive.status(), 200);
    bystander.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn options_of_the_server_work_without_serve() {
    let directory = tempfile::tempdir().unwrap();
    let listen = format!("127.0.0.1:{}", free_port());
    let mut command = clean(TOOLCRIB, directory.path());
    command.args(["--listen", &listen, "--data-dir", "elsewhere"]).env("TOOLCRIB_QUIET", "1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the server to respond", PATIENCE, || async {
        let (code, ..) = toolcrib(directory.path(), &["--server", &listen, "tools"]).await;
        (code == Some(0)).then_some(())
    })
    .await;
    assert!(directory.path().join("elsewhere").is_dir());
    child.kill().unwrap();
    child.wait().unwrap();
    let (code, _, err) = toolcrib(directory.path(), &["--listen", &listen, "calls"]).await;
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("--listen before the command is an option of the server"), "{err}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_use_the_configured_address() {
    let (mut one, mut other) = (Server::ready().await, Server::ready().await);
    let body = json!({ "run_id": "r", "args": { "expression": "1" } });
    let id = one.ticket("calculation.eval", body.clone()).await;
    let other_id = other.ticket("calculation.eval", body).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("toolcrib.toml");
    std::fs::write(&file, format!("listen = \"0.0.0.0:{}\"\n", one.port)).unwrap();
    let (code, out, err) = toolcrib(directory.path(), &["calls"]).await;
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains(&id) && !out.contains(&other_id), "{out}");

    let configured = |variable: &'static str, value: String| {
        let mut command = clean(TOOLCRIB, directory.path());
        command.arg("calls").env(variable, value);
        command
    };
    let listen = configured("TOOLCRIB_LISTEN", format!("127.0.0.1:{}", other.port));
    let server = configured("TOOLCRIB_SERVER", format!("127.0.0.1:{}", other.port));
    for command in [listen, server] {
        let (_, out, err) = texts(run(command).await);
        assert!(out.contains(&other_id) && !out.contains(&id), "{out}{err}");
    }
    let mut flag = configured("TOOLCRIB_SERVER", "http://127.0.0.1:1".to_owned());
    flag.args(["--server", &format!("127.0.0.1:{}", other.port)]);
    let (_, out, err) = texts(run(flag).await);
    assert!(out.contains(&other_id), "the flag comes first: {out}{err}");

    std::fs::write(&file, "listen = \"nowhere\"\n").unwrap();
    let (code, _, err) = toolcrib(directory.path(), &["calls"]).await;
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("listen: \"nowhere\" is not an address"), "{err}");
    one.kill();
    other.kill();
}

/// Runs a command in a terminal with this number of columns and returns its lines.
async fn in_terminal(columns: u16, directory: &Path, arguments: &[&str]) -> Vec<String> {
    const RUN_IN_TERMINAL: &str = "\
import fcntl, os, pty, struct, sys, termios
pid, fd = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('HHHH', 24, int(sys.argv[1]), 0, 0))
    os.execv(sys.argv[2], sys.argv[2:])
text = b''
try:
    while part := os.read(fd, 65536): text += part
except OSError: pass
sys.stdout.write(text.decode()); os.waitpid(pid, 0)
";
    let mut python = clean("python3", directory);
    python.args(["-c", RUN_IN_TERMINAL, &columns.to_string(), TOOLCRIB]).args(arguments);
    let (code, out, err) = texts(run(python).await);
    assert_eq!(code, Some(0), "{err}");
    out.replace('\r', "").lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_fit_a_narrow_terminal_and_ids_never_wrap() {
    let mut server = Server::ready().await;
    let tool = json!({ "name": "reports.quarterly.summary", "effect": "read",
        "description": "Summarizes the reports of all regions for one quarter of a year." });
    let registration = json!({ "client_id": "c", "tools": [tool] });
    let request = server.http.post(server.url("/internal/tools/register")).json(&registration);
    assert_eq!(request.send().await.unwrap().status(), 200);
    let failing = json!({ "run_id": "r", "args": { "expression": "1/0" } });
    let first = server.ticket("calculation.eval", failing).await;
    let waiting = json!({ "run_id": "r", "args": {} });
    let second = server.ticket("reports.quarterly.summary", waiting).await;
    let address = format!("127.0.0.1:{}", server.port);
    let directory = server.directory.path().to_owned();
    for columns in [60, 80, 100, 200] {
        for command in ["calls", "tools"] {
            let lines = in_terminal(columns, &directory, &["--server", &address, command]).await;
            for line in &lines {
                assert!(line.chars().count() <= columns.into(), "{columns}: {line:?}");
            }
            let ids: Vec<&str> = match command {
                "calls" => vec![&first, &second],
                _ => vec!["reports.quarterly.summary", "calculation.eval", "weather.query"],
            };
            for id in ids {
                assert!(lines.iter().any(|line| line.contains(id)), "{id} at {columns}: {lines:?}");
            }
        }
    }
    let lines = in_terminal(60, &directory, &["--server", &address, "calls"]).await;
    let note = "hidden: ";
    assert!(lines.iter().any(|line| line.starts_with(note)), "{lines:#?}");
    // A program reads every column, and each call is one line.
    let (_, out, _) = toolcrib(&directory, &["--server", &address, "calls"]).await;
    assert_eq!(out.lines().count(), 3, "{out}");
    assert!(out.contains("ATTEMPT") && out.contains("VALIDATION_ERROR"), "{out}");
    server.kill();
}

/// The HTTP API of this test is another server, which has nothing at the path.
#[tokio::test(flavor = "multi_thread")]
async fn hints_follow_the_cause() {
    let mut api_server = Server::ready().await;
    let address = format!("127.0.0.1:{}", api_server.port);
    let mut server = Server::new()
        .with("HTTP__HOSTS", format!("http://{address}"))
        .with("HTTP__ALLOW_HOSTS", "127.0.0.1");
    server.start().await;
    let directory = server.directory.path().to_owned();
    let document = json!({ "openapi": "3.1.0", "info": { "title": "t", "version": "1" },
        "servers": [{ "url": format!("http://{address}") }],
        "paths": { "/nowhere": { "get": { "operationId": "ask" } } } });
    std::fs::write(directory.join("api.json"), document.to_string()).unwrap();
    let own = format!("127.0.0.1:{}", server.port);
    let cli = |arguments: &[&str]| {
        let words: Vec<String> =
            ["--server", &own].iter().chain(arguments).map(ToString::to_string).collect();
        let directory = directory.clone();
        async move {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            toolcrib(&directory, &words).await
        }
    };
    let (code, out, err) = cli(&["tools", "import", "api.json", "--prefix", "api"]).await;
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("api.ask") && !err.contains("warning"), "{out}{err}");
    let (code, _, err) = cli(&["call", "api.ask"]).await;
    assert_eq!(code, Some(5), "{err}");
    assert!(err.contains("NOT_FOUND: HTTP 404 from"), "{err}");
    assert!(err.contains("hint:  the API has nothing there"), "{err}");
    assert!(!err.contains("keys ls"), "{err}");

    let (code, _, err) = cli(&["calls", "get", "tc_nothing"]).await;
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("hint:  check the id: toolcrib calls lists calls"), "{err}");
    let (_, _, err) = cli(&["keys", "revoke", "key_nothing"]).await;
    assert!(err.contains("hint:  toolcrib keys ls lists the keys"), "{err}");
    let (_, _, err) = cli(&["rules", "rm", "--agent", "a", "b"]).await;
    assert!(err.contains("hint:  toolcrib rules lists the rules"), "{err}");

    // An import that needs a setting says so at once.
    let elsewhere = document.to_string().replace(&address, "api.example:8443");
    std::fs::write(directory.join("other.json"), elsewhere).unwrap();
    let (code, _, err) = cli(&["tools", "import", "other.json", "--prefix", "other"]).await;
    assert_eq!(code, Some(0), "{err}");
    let setting = format!("set http.hosts = [\"http://{address}\", \"http://api.example:8443\"]");
    assert!(err.contains("warning: calls will be denied: ") && err.contains(&setting), "{err}");
    server.kill();
    api_server.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_say_that_the_client_of_a_tool_is_away() {
    let mut server = Server::ready().await;
    let tool = json!({ "name": "demo.greet", "effect": "read", "timeout_ms": 60_000 });
    let registration = json!({ "client_id": "client_demo", "tools": [tool] });
    let request = server.http.post(server.url("/internal/tools/register")).json(&registration);
    assert_eq!(request.send().await.unwrap().status(), 200);
    let directory = server.directory.path().to_owned();
    let address = format!("127.0.0.1:{}", server.port);
    let (_, out, err) = toolcrib(&directory, &["--server", &address, "tools"]).await;
    let line = out.lines().find(|line| line.starts_with("demo.greet")).unwrap();
    assert!(line.split_whitespace().any(|cell| cell == "no"), "{out}");
    assert!(err.contains("calls of an unavailable tool wait"), "{err}");
    let (_, out, _) = toolcrib(&directory, &["--server", &address, "tools", "demo.greet"]).await;
    let reason = "no client that offers demo.greet is connected; client_demo has not connected";
    assert!(out.contains(&format!("available  no: {reason}")), "{out}");
    assert!(out.contains("client_demo (away)"), "{out}");
    for (option, exit) in [("--wait=2s", 6), ("--no-wait", 0)] {
        let arguments = ["--server", &address, "call", "demo.greet", option];
        let (code, _, err) = toolcrib(&directory, &arguments).await;
        assert_eq!(code, Some(exit), "{err}");
        assert!(err.contains(&format!("waiting: {reason}")), "{err}");
    }
    server.kill();
}

#[tokio::test]
async fn keys_ls_without_keys_says_who_may_do_what() {
    let server = Server::ready().await;
    let listed = server.command(&["keys", "ls"]).output().unwrap();
    let (code, out, err) = texts(listed);
    assert_eq!(code, Some(0), "{err}");
    let text = format!("{out}{err}");
    assert!(text.contains("may call tools"), "{text}");
    assert!(text.contains("administration needs the operator token"), "{text}");
    // The text is true: a caller without a key may call tools, and may not administer.
    server.evaluated("1+1").await;
    assert_eq!(server.get("/v1/keys").await, reqwest::StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_server_and_a_data_directory_exclude_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let server = format!("127.0.0.1:{}", free_port());
    for command in [
        &["mcp", "add", "files", "--", "true"][..],
        &["mcp", "ls"],
        &["mcp"],
        &["run", "Hi"],
        &["keys", "ls"],
        &["rules"],
    ] {
        for (flag, value) in [("--data-dir", "data"), ("--store", "sqlite:data.db")] {
            // Before the program that `mcp add` starts.
            let at = command.iter().position(|word| *word == "--").unwrap_or(command.len());
            let mut words = vec!["--server", server.as_str()];
            words.extend(&command[..at]);
            words.extend([flag, value]);
            words.extend(&command[at..]);
            let (code, out, err) = toolcrib(directory.path(), &words).await;
            assert_eq!(code, Some(2), "{words:?}: {out}{err}");
            assert!(err.contains(&format!("--server and {flag} exclude each other")), "{err}");
        }
    }
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 0, "nothing is created");
}

#[tokio::test]
async fn mcp_ls_shows_what_a_running_server_refuses() {
    let server = Server::ready().await;
    let directory = tempfile::tempdir().unwrap();
    let settings = format!("listen = \"127.0.0.1:{}\"", server.port);
    std::fs::write(directory.path().join("toolcrib.toml"), settings).unwrap();
    // The server refuses the name of the project, which has nothing to do with the connection.
    let project = "x".repeat(300);
    let (code, out, err) =
        toolcrib(directory.path(), &["mcp", "ls", "--project", project.as_str()]).await;
    assert_ne!(code, Some(0), "{out}{err}");
    assert!(!err.contains("no server") && !err.contains("stored configuration"), "{err}");
    assert!(err.contains("X-Toolcrib-Project must be"), "{err}");
    assert!(!directory.path().join("toolcrib-data").exists(), "no data directory is created");
}
