//! Tool services as separate programs: the Python example and `toolcrib utp serve`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::openapi::upstream::Upstream;
use crate::support::nats::{Nats, tool};
use crate::support::otlp::Endpoint;
use crate::support::until;

struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program and waits for an output line that begins with this word.
async fn start(mut command: Command, word: &'static str) -> ChildGuard {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let guard = ChildGuard(child);
    let found = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(out).lines();
        let found = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with(word));
        // Reads the remaining output, so that the program does not block.
        std::thread::spawn(move || lines.for_each(drop));
        found
    })
    .await
    .unwrap();
    assert!(found, "the program ended before it printed \"{word}\"");
    guard
}

/// Returns a Python with nats-py, which `./scripts/test` installs, and with the kit.
fn python() -> Command {
    let name = std::env::var("TOOLCRIB_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let mut command = Command::new(name);
    command.env("PYTHONPATH", repository("sdk/python/src")).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A tool service that appends to a file when its handler starts, and then works for a while.
const SLOW_SERVICE: &str = r#"
import asyncio, os
from toolcrib_sdk.utp import Service
service = Service(os.environ["NATS_URL"], ack_wait_s=2, target="slow")
@service.tool("bank.pay")
@service.tool("file.scan")
async def work(args, call):
    with open(os.environ["STARTED"], "a") as file:
        file.write(call.tool_call_id + "\n")
    await asyncio.sleep(args["seconds"])
    return {"done": True}
service.run()
"#;

#[test]
fn the_python_kit_passes_its_own_tests() {
    let mut command = python();
    command.args(["-m", "unittest", "discover", "-s"]).arg(repository("sdk/python/tests"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("Ran 0 tests"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_service_built_from_the_parts_executes_calls() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("text.count", "count", json!({}))).await.is(201);
    let mut command = python();
    command.arg(repository("sdk/python/tests/minimal_service.py")).env("NATS_URL", nats.url());
    let _service = start(command, "ready").await;
    let id = api.invoke("text.count", json!({ "text": "one two three" })).await;
    assert_eq!(api.finished(&id).await["result"], json!({ "words": 3 }));
    let id = api.invoke("text.count", json!({ "nothing": true })).await;
    let call = api.finished(&id).await;
    assert_eq!(
        (&call["status"], &call["error"]["code"]),
        (&json!("FAILED"), &json!("RUNTIME_ERROR"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_python_service_starts_only_repeatable_calls_again() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    for (name, effect) in [("bank.pay", "irreversible"), ("file.scan", "read")] {
        let more = json!({ "effect": effect });
        api.post("/projects/default/tools", tool(name, "slow", more)).await.is(201);
    }
    let folder = tempfile::tempdir().unwrap();
    let (script, started) = (folder.path().join("service.py"), folder.path().join("started"));
    std::fs::write(&script, SLOW_SERVICE).unwrap();
    let service = || {
        let mut command = python();
        command.arg(&script).env("NATS_URL", nats.url()).env("STARTED", &started);
        start(command, "ready")
    };
    let starts = |id: &str| {
        let text = std::fs::read_to_string(&started).unwrap_or_default();
        text.lines().filter(|line| *line == id).count()
    };
    let first = service().await;
    let pay = api.invoke("bank.pay", json!({ "seconds": 60 })).await;
    // Longer than the broker waits for an acknowledgement.
    let scan = api.invoke("file.scan", json!({ "seconds": 5 })).await;
    until("both handlers to start", || async { (starts(&pay) + starts(&scan) == 2).then_some(()) })
        .await;
    assert_eq!(api.finished(&scan).await["result"], json!({ "done": true }));
    assert_eq!(starts(&scan), 1, "heartbeats keep the command");
    let scan = api.invoke("file.scan", json!({ "seconds": 2 })).await;
    until("the handler to start", || async { (starts(&scan) == 1).then_some(()) }).await;
    drop(first);
    let _second = service().await;
    let call = api.finished(&pay).await;
    assert_eq!(
        (&call["status"], &call["error"]["code"]),
        (&json!("FAILED"), &json!("OUTCOME_UNKNOWN"))
    );
    let message = call["error"]["message"].as_str().unwrap();
    assert!(message.contains("a retry is not safe"), "{message}");
    assert_eq!(api.finished(&scan).await["status"], "SUCCEEDED");
    assert_eq!((starts(&pay), starts(&scan)), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_executes_calls() {
    let Some(mut nats) = Nats::start().await else { return };
    let file = repository("examples/python/utp_service.py");
    let lines = std::fs::read_to_string(&file).unwrap().lines().count();
    assert!(lines < 15, "a tool service in under 15 lines, not {lines}");
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("text.count", "count", json!({}))).await.is(201);
    let waiting = api.invoke("text.count", json!({ "text": "asked before it was there" })).await;
    let mut command = python();
    command.arg(&file).env("NATS_URL", nats.url());
    let _service = start(command, "ready").await;
    assert_eq!(api.finished(&waiting).await["result"], json!({ "words": 5 }));
    for n in 1..=10 {
        let id = api.invoke("text.count", json!({ "text": "w ".repeat(n) })).await;
        assert_eq!(api.finished(&id).await["result"], json!({ "words": n }));
    }
    let id = api.invoke("text.count", json!({ "nothing": true })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "FAILED");
    assert!(call["error"]["message"].as_str().unwrap().contains("KeyError"), "{call}");
    // The service survives malformed commands and a restart of the broker.
    let peer = nats.peer().await;
    peer.command("cg.v1r3.default.public.cmd.tool.count.run", b"{\"tool".to_vec()).await;
    let dead = until("a dead letter", || async {
        let dead_letters = api.get("/v1/dead_letters").await.is(200);
        dead_letters["dead_letters"].get(0).cloned()
    })
    .await;
    assert_eq!((&dead["reason"], &dead["payload"]), (&json!("malformed"), &json!("{\"tool")));
    // Numeric ids are accepted, and a report without a call becomes a dead letter.
    let odd = json!({ "tool_call_id": 5, "agent_turn_id": 6, "agent_id": 7, "turn_epoch": "8" });
    let subject = "cg.v1r3.default.public.cmd.tool.count.run";
    peer.command(subject, odd.to_string().into_bytes()).await;
    until("the report to become a dead letter", || async {
        let dead_letters = api.get("/v1/dead_letters?limit=1").await.is(200);
        (dead_letters["dead_letters"][0]["reason"] == "orphan").then_some(())
    })
    .await;
    nats.down();
    let id = api.invoke("text.count", json!({ "text": "while it was away" })).await;
    nats.up().await;
    assert_eq!(api.finished(&id).await["result"], json!({ "words": 4 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_executes_v1r4_calls() {
    let Some(nats) = Nats::start().await else { return };
    let file = repository("examples/python/utp_service.py");
    let url = nats.url();
    let server = crate::support::Server::with(|config| {
        config.nats.url = Some(url);
        config.nats.version = "v1r4".to_owned();
    })
    .await;
    let api = server.api();
    let target = json!({ "target_subject": "cmd.tool.count.run" });
    api.post("/projects/default/tools", tool("text.count", "count", target)).await.is(201);
    let waiting = api.invoke("text.count", json!({ "text": "identity is in headers" })).await;
    let mut command = python();
    command.arg(&file).env("NATS_URL", nats.url()).env("UTP_VERSION", "v1r4");
    let _service = start(command, "ready").await;
    assert_eq!(api.finished(&waiting).await["result"], json!({ "words": 4 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn utp_serve_executes_builtin_tools() {
    let Some(nats) = Nats::start().await else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    let data = tempfile::tempdir().unwrap();
    command.args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data.path()).current_dir(data.path());
    let _service = start(command, "serving").await;
    // A server without built-in tools sends calls of the tool to the service.
    let caller = crate::support::Server::with(|config| {
        config.nats.url = Some(nats.url());
        config.builtin.enabled = false;
    })
    .await;
    let api = caller.api();
    let sum = tool("calculation.eval", "crib", json!({}));
    api.post("/projects/default/tools", sum).await.is(201);
    let id = api.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert_eq!((&call["result"]["result"], &call["executor"]), (&json!(42), &json!("utp")));
    let id = api.invoke("calculation.eval", json!({ "expression": "1/0" })).await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["taken_by"]), (&json!("FAILED"), &json!("tool.toolcrib")));
    let id = api.invoke("calculation.eval", json!({ "wrong": 1 })).await;
    assert_eq!(api.finished(&id).await["error"]["code"], "BAD_REQUEST", "UTP's bad_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn utp_serve_says_that_it_cannot_read_cards_and_what_it_needs() {
    let Some(nats) = Nats::start().await else { return };
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data.path()).current_dir(data.path());
    command.env("TOOLCRIB_LOG__FORMAT", "text");
    command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let _service = ChildGuard(command.spawn().unwrap());
    let wait_for_line = |words: Vec<&'static str>| {
        let log = log.clone();
        async move {
            until(&format!("a line with {words:?}"), || async {
                let text = std::fs::read_to_string(&log).unwrap();
                let is_line = |line: &&str| words.iter().all(|word| line.contains(word));
                text.lines().find(is_line).map(str::to_owned)
            })
            .await
        }
    };
    // Before the first command: no server answers requests for cards.
    let subject = "cg.v1r3.default.public.rpc.sys.cards.get";
    let needs = "toolcrib serve --nats";
    wait_for_line(vec!["WARN", "cards cannot be read", subject, needs]).await;
    // A command of another project names the subject that it needs.
    let peer = nats.peer().await;
    let command = json!({
        "tool_call_id": "c", "agent_turn_id": "t", "turn_epoch": 1, "agent_id": "a",
        "tool_name": "calculation.eval", "after_execution": "suspend", "tool_call_card_id": "k",
    });
    let body = command.to_string().into_bytes();
    peer.command("cg.v1r3.shop.public.cmd.tool.crib.run", body).await;
    wait_for_line(vec!["WARN", "cg.v1r3.shop.public.rpc.sys.cards.get", needs]).await;
    // With a server, cards can be read.
    let server = nats.server().await;
    wait_for_line(vec!["INFO", "cards can be read"]).await;
    let api = server.api();
    let sum = tool("sum.work", "crib", json!({}));
    api.post("/projects/default/tools", sum).await.is(201);
    let id = api.invoke("sum.work", json!({})).await;
    assert_eq!(api.finished(&id).await["taken_by"], "tool.toolcrib");
}

/// Returns `toolcrib utp serve` on this data directory, with a secret that only it has.
fn utp_serve_command(
    nats: &Nats,
    upstream: &Upstream,
    data: &std::path::Path,
    more: &[&str],
) -> Command {
    let settings = format!(
        "[http]\nhosts = [\"http://{0}\"]\nallow_private = true\nallow_envs = [\"PETS_*\"]\n\
         [http.jina]\nsearch_url = \"http://{0}\"\n",
        upstream.address
    );
    let directory = data.parent().unwrap();
    std::fs::write(directory.join("toolcrib.toml"), settings).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(more).args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command
        .arg("--data-dir")
        .arg(data)
        .current_dir(directory)
        .env("PETS_TOKEN", "t0ken-of-the-service");
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn utp_serve_executes_http_tools() {
    let Some(nats) = Nats::start().await else { return };
    let upstream = Upstream::start().await;
    let server = nats.server().await;
    let api = server.api();
    let pets = json!({
        "parameters": { "type": "object", "properties": {
            "id": { "type": "integer" }, "site": { "type": "string" },
        }},
        "options": {
            "http": {
                "url": upstream.url("/pets/{id}"),
                "auth": [{ "type": "bearer", "env": "PETS_TOKEN" }],
            },
            "args": { "fixed": { "site": "{project_id}.{agent_turn_id}" } },
        },
    });
    api.post("/projects/default/tools", tool("pets.get", "crib", pets.clone())).await.is(201);
    let search = json!({ "options": { "jina": { "mode": "search" } }, "effect": "read" });
    api.post("/projects/default/tools", tool("web.search", "crib", search)).await.is(201);
    let data = server.config.data_dir.clone();
    let _service = start(utp_serve_command(&nats, &upstream, &data, &[]), "serving").await;
    let id = api.invoke("pets.get", json!({ "id": 7, "site": "mine" })).await;
    let call = api.finished(&id).await;
    assert_eq!(
        (&call["status"], &call["executor"]),
        (&json!("SUCCEEDED"), &json!("utp")),
        "{call}"
    );
    assert_eq!(call["result"]["path"], "/pets/7?site=default.run_1", "{call}");
    let request = upstream.last();
    assert_eq!(request.header("authorization"), Some("Bearer t0ken-of-the-service"));
    assert!(!call.to_string().contains("t0ken"), "{call}");
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.text;
    assert!(!cards.contains("t0ken") && cards.contains("tool_args_fixed_applied"), "{cards}");
    let id = api.invoke("web.search", json!({ "q": "crib" })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["result"]["path"], "/search?q=crib", "{call}");
    let id = api.invoke("web.search", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!(call["error"]["code"], "BAD_REQUEST", "UTP's bad_request: {call}");
    // The service uses the current definition of a changed tool.
    let mut moved = pets;
    moved["options"]["http"]["url"] = json!(upstream.url("/animals/{id}"));
    api.post("/projects/default/tools", tool("pets.get", "crib", moved)).await.is(201);
    let id = api.invoke("pets.get", json!({ "id": 8 })).await;
    let path = api.finished(&id).await["result"]["path"].clone();
    assert!(path.as_str().unwrap().starts_with("/animals/8"), "{path}");
    // Another project cannot call the tools of this project.
    let other = api.clone().project("other");
    api.post("/projects", json!({ "project_id": "other" })).await.is(201);
    other.post("/projects/other/tools", tool("pets.get", "crib", json!({}))).await.is(201);
    let id = other.invoke("pets.get", json!({ "id": 9 })).await;
    assert_eq!(other.finished(&id).await["error"]["code"], "NOT_FOUND", "UTP's not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn utp_serve_can_serve_one_projects_tools_to_all_projects() {
    let Some(nats) = Nats::start().await else { return };
    let upstream = Upstream::start().await;
    let shop = upstream.server().await;
    let api = shop.api();
    api.post("/projects", json!({ "project_id": "shop" })).await.is(201);
    let url = upstream.url("/pets/{id}");
    let pets = json!({ "tool_name": "pets.get", "options": { "http": { "url": url } } });
    let fixed = json!({
        "of": "{project_id}/{agent_turn_id}/{step_id}/{tool_call_id}/{agent_id}/{turn_epoch}",
    });
    let options = json!({ "http": { "url": upstream.url("/said") }, "args": { "fixed": fixed } });
    let ids_tool = json!({ "tool_name": "ids.say", "options": options });
    let removed = json!({ "tool_name": "ids.gone",
        "options": { "http": { "url": upstream.url("/status/404") } } });
    for tool in [pets, ids_tool, removed] {
        api.clone().project("shop").post("/projects/shop/tools", tool).await.is(201);
    }
    let data = shop.config.data_dir.clone();
    let _service =
        start(utp_serve_command(&nats, &upstream, &data, &["--project", "shop"]), "serving").await;
    // Another server knows only the subject of the service.
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("pets.get", "crib", json!({}))).await.is(201);
    let id = api.invoke("pets.get", json!({ "id": 7 })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["result"]["path"], "/pets/7", "{call}");
    // The service uses the ids of the original call.
    for name in ["ids.say", "ids.gone"] {
        api.post("/projects/default/tools", tool(name, "crib", json!({}))).await.is(201);
    }
    let id = api.invoke("ids.say", json!({})).await;
    let call = api.finished(&id).await;
    let step = id.replace("tc_", "step_");
    let expected = format!("/said?of=default%2Frun_1%2F{step}%2F{id}%2Fdefault%2F1");
    assert_eq!(call["result"]["path"], expected, "{call}");
    let id = api.invoke("ids.gone", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!(call["error"]["detail"]["tool_call_id"], id, "{call}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_spans_the_server_and_the_tool_service() {
    let Some(nats) = Nats::start().await else { return };
    let endpoint = Endpoint::start().await;
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data.path()).current_dir(data.path());
    command.env("TOOLCRIB_TELEMETRY__OTLP_ENDPOINT", &endpoint.url);
    command.env("TOOLCRIB_TELEMETRY__SERVICE_NAME", "the-tool-service");
    let mut service = start(command, "serving").await;
    let (url, otlp) = (nats.url(), endpoint.url.clone());
    let server = crate::support::Server::with(|config| {
        config.nats.url = Some(url);
        config.builtin.enabled = false;
        config.telemetry.otlp_endpoint = Some(otlp);
        config.telemetry.export_interval_ms = 20;
    })
    .await;
    let api = server.api();
    let sum = tool("calculation.eval", "crib", json!({}));
    api.post("/projects/default/tools", sum).await.is(201);
    let body = json!({ "run_id": "r", "args": { "expression": "6*7" } });
    let request = api
        .request(reqwest::Method::POST, "/v1/tools/calculation.eval/invoke?wait_ms=20000")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let call = api.send(request.json(&body)).await.is(202);
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    // On SIGTERM the service finishes, exports its spans and exits with success.
    let id = service.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let ended = until("the service to end", || {
        let ended = service.0.try_wait().unwrap();
        async move { ended }
    })
    .await;
    assert!(ended.success(), "{ended}");
    let spans = until("spans of both", || async {
        let spans = endpoint.spans();
        let both = ["the-tool-service", "toolcrib"];
        both.iter().all(|name| spans.iter().any(|s| s.service == *name)).then_some(spans)
    })
    .await;
    for span in &spans {
        assert_eq!(span.trace_id, "0af7651916cd43dd8448eb211c80319c", "{span:?}");
    }
    let server_spans: Vec<&str> = spans
        .iter()
        .filter(|span| span.service == "toolcrib")
        .map(|span| span.span_id.as_str())
        .collect();
    let service_spans = spans.iter().filter(|span| span.service == "the-tool-service");
    let children =
        service_spans.filter(|span| server_spans.contains(&span.parent_id.as_str())).count();
    assert_eq!(children, 1, "the span of the tool service is a child of the attempt: {spans:?}");
}

#[test]
fn utp_serve_rejects_an_invalid_target() {
    let data = tempfile::tempdir().unwrap();
    for target in ["a b", "a.b", "*", ""] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
        command.args(["utp", "serve", "--target", target, "--nats", "nats://127.0.0.1:1"]);
        let output = command.arg("--data-dir").arg(data.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{target}: {output:?}");
        assert!(output.stdout.is_empty(), "{target}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("NATS subject"), "{target}: {stderr}");
    }
}
