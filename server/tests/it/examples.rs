//! Runs the Python examples and the commands of the README, unchanged, against a real server.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::receiver::KEY;

fn example(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/python").join(name)
}

/// A child process that is killed at the end of the test.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn python(server: &Server, file: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(example(file)).env("TOOLCRIB_SERVER", format!("http://{}", server.address));
    command.env_remove("TOOLCRIB_KEY");
    command
}

async fn toolcrib(server: &Server, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(["--server", &format!("http://{}", server.address)]).args(args);
    command.env_remove("TOOLCRIB_KEY").env("NO_COLOR", "1");
    let output = run(command).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Starts the provider and waits until its tool is registered.
async fn start_provider(server: &Server) -> ChildGuard {
    let mut command = python(server, "provider.py");
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let guard = ChildGuard(child);
    for _ in 0..600 {
        if server.api().get("/v1/tools/demo.greet").await.status == 200 {
            return guard;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the provider did not register");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_examples_run_unchanged() {
    let lines = std::fs::read_to_string(example("provider.py")).unwrap().lines().count();
    assert!(lines < 30, "a provider in under 30 lines, not {lines}");
    let server = Server::start().await;
    let _provider = start_provider(&server).await;
    let mut agent = python(&server, "agent.py");
    agent.args(["demo.greet", r#"{"name": "Ada"}"#]);
    let output = run(agent).await;
    let output_text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output_text.trim(), r#"demo.greet -> {"greeting": "Hello, Ada!"}"#);
    let output = run(python(&server, "agent.py")).await;
    let output_text = String::from_utf8(output.stdout).unwrap();
    let output_text: Vec<&str> = output_text.lines().collect();
    assert_eq!(output_text.len(), 3, "{output_text:?}");
    assert!(output_text[0].contains("236.81"), "{output_text:?}");
    assert!(output_text[1].contains("Laser distance meter"), "{output_text:?}");
    assert!(
        output_text[2].contains("failed: calculation.eval: VALIDATION_ERROR"),
        "{output_text:?}"
    );
}

/// Turning keys on stops the provider with a message that says what to do, and with a key it goes
/// on as the same client.
#[tokio::test(flavor = "multi_thread")]
async fn the_python_provider_explains_that_it_needs_a_key() {
    let server = Server::start().await;
    drop(start_provider(&server).await);
    let key = server.keyed("default", "demo", "provider", &[]).await;
    let caller = server.keyed("default", "ada", "agent", &["*"]).await;
    let refused = run(python(&server, "provider.py")).await;
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "no traceback: {text}");
    assert!(text.contains("HTTP Error 401"), "{text}");
    assert!(text.contains("this server needs a key"), "{text}");
    assert!(text.contains("toolcrib keys create"), "{text}");
    let mut command = python(&server, "provider.py");
    command.env("TOOLCRIB_KEY", key.secret().unwrap());
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _provider = ChildGuard(child);
    let id = caller.invoke("demo.greet", json!({ "name": "Ada" })).await;
    assert_eq!(caller.finished(&id).await["result"]["greeting"], "Hello, Ada!");
}

/// Waits for the next line of a child process.
async fn next_line(lines: &mut tokio::sync::mpsc::UnboundedReceiver<String>) -> String {
    crate::support::soon("a line of the example", lines.recv()).await.expect("it ended")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_receiver_accepts_only_signed_webhooks() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("signing.key");
    std::fs::write(&file, KEY).unwrap();
    let server = Server::with(|config| {
        config.webhooks.signing_key_file = Some(file);
        config.webhooks.allow_hosts = vec!["127.0.0.1".into()];
    })
    .await;
    let mut command = python(&server, "receiver.py");
    command.arg("0").env("TOOLCRIB_WEBHOOK_SIGNING_KEY", KEY).stdout(Stdio::piped());
    let mut child = ChildGuard(command.spawn().unwrap());
    let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
    let out = BufReader::new(child.0.stdout.take().unwrap());
    std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|l| sender.send(l)));
    let first = next_line(&mut lines).await;
    let url = first.strip_prefix("listening on ").unwrap().to_owned();
    let forged = reqwest::Client::builder().no_proxy().build().unwrap().post(&url);
    let now = jiff::Timestamp::now().as_second();
    let forged = forged.header("webhook-id", "msg_1").header("webhook-timestamp", now);
    let forged = forged.header("webhook-signature", "v1,AAAA").body("{}").send().await.unwrap();
    assert_eq!(forged.status(), 401);
    let body = json!({ "run_id": "r", "call_id": "sum-1", "callback_url": url,
        "args": { "expression": "6*7" } });
    let id = server.api().invoke_with("calculation.eval", body).await;
    let line = next_line(&mut lines).await;
    assert_eq!(line, r#"task.completed sum-1 {"result": 42, "text": "42"}"#);
    let path = format!("/v1/tool_calls/{id}/deliveries");
    crate::support::until("the delivery to be stored", || async {
        let list = server.api().get(&path).await.is(200);
        (list["deliveries"][0]["log"][0]["status_code"] == 204).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_readme_work() {
    let server = Server::start().await;
    let (code, out, err) =
        toolcrib(&server, &["call", "calculation.eval", "expression=2*21"]).await;
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["result"], 42);
    assert!(err.contains("SUCCEEDED"), "{err}");
    let (code, _, err) = toolcrib(&server, &["call", "calculation.eval", "expression=1/0"]).await;
    assert_eq!(code, Some(5), "a tool that failed: {err}");
    let (code, _, err) = toolcrib(&server, &["call", "calculation.evil", "expression=1"]).await;
    assert_ne!(code, Some(0));
    assert!(err.contains("did you mean \"calculation.eval\"?"), "{err}");
    let (code, out, _) = toolcrib(&server, &["--json", "tools"]).await;
    assert_eq!(code, Some(0));
    assert!(out.contains("weather.query") && serde_json::from_str::<Value>(&out).is_ok(), "{out}");
    let (code, out, _) = toolcrib(&server, &["calls", "--status", "failed"]).await;
    assert_eq!(code, Some(0));
    assert!(out.contains("calculation.eval") && out.contains("VALIDATION_ERROR"), "{out}");
    let (code, _, err) = toolcrib(&server, &["calls", "get", "tc_nothing"]).await;
    assert_ne!(code, Some(0));
    assert!(err.contains("there is no call"), "{err}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_call_of_the_example_stays_open_across_a_restart() {
    let server = Server::start().await;
    let first_provider = start_provider(&server).await;
    let body = json!({ "run_id": "r", "args": { "name": "Grace", "seconds": 20 } });
    let ticket = server.api().post("/v1/tools/demo.greet/invoke", body).await.is(202);
    let id = ticket["tool_call_id"].as_str().unwrap().to_owned();
    drop(first_provider);
    let server = server.restart().await;
    let _provider = start_provider(&server).await;
    let call = server.api().get(&format!("/v1/tool_calls/{id}")).await.is(200);
    // The call is open, whether or not the killed provider had acknowledged it: the greeting takes
    // far longer than this test.
    assert!(["PENDING", "RUNNING"].contains(&call["status"].as_str().unwrap()), "{call}");
}
