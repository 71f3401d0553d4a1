//! Tool services as other programs: the Python example, and the crib's own tools served to others.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::openapi::upstream::Upstream;
use crate::support::nats::{Nats, tool};
use crate::support::otlp::Endpoint;
use crate::support::until;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program and waits for a line that begins with a word.
async fn start(mut command: Command, word: &'static str) -> Running {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let running = Running(child);
    let found = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(out).lines();
        let found = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with(word));
        // Who prints must be read, or it stops.
        std::thread::spawn(move || lines.for_each(drop));
        found
    })
    .await
    .unwrap();
    assert!(found, "it ended before it said \"{word}\"");
    running
}

/// A Python that has nats-py: `./scripts/test` makes one.
fn python() -> Command {
    Command::new(std::env::var("TOOLCRIB_TEST_PYTHON").unwrap_or_else(|_| "python3".into()))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_serves_calls() {
    let Some(mut nats) = Nats::start().await else { return };
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/python/utp_service.py");
    let lines = std::fs::read_to_string(&file).unwrap().lines().count();
    assert!(lines < 60, "a tool service in under 60 lines, not {lines}");
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
    // Neither nonsense nor a broker that goes away and comes back is its end.
    let hand = nats.hand().await;
    hand.command("cg.v1r3.default.public.cmd.tool.count.run", b"{\"tool".to_vec()).await;
    let dead = until("what nobody can read to be kept", || async {
        let letters = api.get("/v1/dead_letters").await.is(200);
        letters["dead_letters"].get(0).cloned()
    })
    .await;
    assert_eq!((&dead["reason"], &dead["payload"]), (&json!("malformed"), &json!("{\"tool")));
    // Numbers are as good as texts, and what nobody asked for is nobody's.
    let odd = json!({ "tool_call_id": 5, "agent_turn_id": 6, "agent_id": 7, "turn_epoch": "8" });
    let subject = "cg.v1r3.default.public.cmd.tool.count.run";
    hand.command(subject, odd.to_string().into_bytes()).await;
    until("its report to be kept", || async {
        let letters = api.get("/v1/dead_letters?limit=1").await.is(200);
        (letters["dead_letters"][0]["reason"] == "orphan").then_some(())
    })
    .await;
    nats.down();
    let id = api.invoke("text.count", json!({ "text": "while it was away" })).await;
    nats.up().await;
    assert_eq!(api.finished(&id).await["result"], json!({ "words": 4 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_serves_calls_of_the_later_version() {
    let Some(nats) = Nats::start().await else { return };
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/python/utp_service.py");
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
async fn the_cribs_own_tools_are_served_to_others() {
    let Some(nats) = Nats::start().await else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    let data = tempfile::tempdir().unwrap();
    command.args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data.path()).current_dir(data.path());
    let _service = start(command, "serving").await;
    // A crib without tools of its own sends the calls of a tool of that name to the other.
    let without = crate::support::Server::with(|config| {
        config.nats.url = Some(nats.url());
        config.builtin.enabled = false;
    })
    .await;
    let api = without.api();
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

/// `toolcrib utp serve` on this data directory, with a secret that only it has.
fn serving(nats: &Nats, upstream: &Upstream, data: &std::path::Path, more: &[&str]) -> Command {
    let settings = format!(
        "[http]\nhosts = [\"http://{0}\"]\nallow_private = true\n\
         [http.jina]\nsearch_url = \"http://{0}\"\n",
        upstream.address
    );
    let here = data.parent().unwrap();
    std::fs::write(here.join("toolcrib.toml"), settings).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    command.args(more).args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data).current_dir(here).env("PETS_TOKEN", "t0ken-of-the-service");
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_are_http_apis_are_served_to_others_too() {
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
    let _service = start(serving(&nats, &upstream, &data, &[]), "serving").await;
    let id = api.invoke("pets.get", json!({ "id": 7, "site": "mine" })).await;
    let call = api.finished(&id).await;
    assert_eq!(
        (&call["status"], &call["executor"]),
        (&json!("SUCCEEDED"), &json!("utp")),
        "{call}"
    );
    assert_eq!(call["result"]["path"], "/pets/7?site=default.run_1", "{call}");
    let asked = upstream.last();
    assert_eq!(asked.header("authorization"), Some("Bearer t0ken-of-the-service"));
    assert!(!call.to_string().contains("t0ken"), "{call}");
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.text;
    assert!(!cards.contains("t0ken") && cards.contains("tool_args_fixed_applied"), "{cards}");
    let id = api.invoke("web.search", json!({ "q": "crib" })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["result"]["path"], "/search?q=crib", "{call}");
    let id = api.invoke("web.search", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!(call["error"]["code"], "BAD_REQUEST", "UTP's bad_request: {call}");
    // A definition that changed meanwhile is used as it is now, one that is gone is not.
    let mut moved = pets;
    moved["options"]["http"]["url"] = json!(upstream.url("/animals/{id}"));
    api.post("/projects/default/tools", tool("pets.get", "crib", moved)).await.is(201);
    let id = api.invoke("pets.get", json!({ "id": 8 })).await;
    let path = api.finished(&id).await["result"]["path"].clone();
    assert!(path.as_str().unwrap().starts_with("/animals/8"), "{path}");
    // Another project has its own tools: it does not reach this one's.
    let other = api.clone().project("other");
    api.post("/projects", json!({ "project_id": "other" })).await.is(201);
    other.post("/projects/other/tools", tool("pets.get", "crib", json!({}))).await.is(201);
    let id = other.invoke("pets.get", json!({ "id": 9 })).await;
    assert_eq!(other.finished(&id).await["error"]["code"], "NOT_FOUND", "UTP's not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_projects_tools_can_be_served_to_everybody() {
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
    let said = json!({ "tool_name": "ids.say", "options": options });
    let gone = json!({ "tool_name": "ids.gone",
        "options": { "http": { "url": upstream.url("/status/404") } } });
    for tool in [pets, said, gone] {
        api.clone().project("shop").post("/projects/shop/tools", tool).await.is(201);
    }
    let data = shop.config.data_dir.clone();
    let _service = start(serving(&nats, &upstream, &data, &["--project", "shop"]), "serving").await;
    // Another crib, with nothing but a subject to send commands to.
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("pets.get", "crib", json!({}))).await.is(201);
    let id = api.invoke("pets.get", json!({ "id": 7 })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["result"]["path"], "/pets/7", "{call}");
    // What it says about a call is what whoever made the call knows it by.
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
async fn one_trace_goes_from_the_agent_through_the_tool_service() {
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
    // Told to stop, it finishes, sends what it has, and ends well.
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
    let outer: Vec<&str> = spans
        .iter()
        .filter(|span| span.service == "toolcrib")
        .map(|span| span.span_id.as_str())
        .collect();
    let inner = spans.iter().filter(|span| span.service == "the-tool-service");
    let below = inner.filter(|span| outer.contains(&span.parent_id.as_str())).count();
    assert_eq!(below, 1, "what the tool service does is below the attempt: {spans:?}");
}

#[test]
fn a_target_that_can_be_none_is_refused_before_anything_is_served() {
    let data = tempfile::tempdir().unwrap();
    for target in ["a b", "a.b", "*", ""] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
        command.args(["utp", "serve", "--target", target, "--nats", "nats://127.0.0.1:1"]);
        let said = command.arg("--data-dir").arg(data.path()).output().unwrap();
        assert_eq!(said.status.code(), Some(2), "{target}: {said:?}");
        assert!(said.stdout.is_empty(), "{target}: {said:?}");
        let why = String::from_utf8_lossy(&said.stderr);
        assert!(why.contains("NATS subject"), "{target}: {why}");
    }
}
