//! Agents over HTTP, MCP, batches and the command line, with a scripted model behind its wire
//! format.

pub mod crash;
mod tools;

use serde_json::{Value, json};
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply,
};

use crate::support::mcp::Mcp;
use crate::support::process::run_cli;
use crate::support::{Server, until};

/// Returns the first line of the system prompt, which tells the agents apart.
fn role(request: &RecordedRequest) -> String {
    let messages = request.messages();
    let first = &messages[0];
    let text = if first["role"] == "system" { first["content"].as_str() } else { None };
    text.unwrap_or("root").lines().next().unwrap_or_default().to_owned()
}

fn results(request: &RecordedRequest) -> Vec<String> {
    let messages = request.messages().iter().filter(|message| message["role"] == "tool");
    messages.map(|message| message["content"].as_str().unwrap_or_default().to_owned()).collect()
}

/// A reply that calls these agents.
fn calling(agents: &[&str]) -> ScriptedBehavior {
    let reply = agents.iter().enumerate().fold(ScriptedAnswer::text(""), |reply, (n, agent)| {
        let args = json!({ "instruction": format!("part {n}") }).to_string();
        reply.with_call(&format!("c{n}"), &format!("agent__{agent}"), args)
    });
    ScriptedBehavior::Reply(reply)
}

/// Every agent answers with its role and its task; the root calls `one` and `two`.
fn team(request: &RecordedRequest) -> ScriptedBehavior {
    let (role, results) = (role(request), results(request));
    match (role.as_str(), results.is_empty()) {
        ("root", true) => calling(&["one", "two"]),
        ("root", false) => text_reply(results.join(" | ")),
        ("typed", _) => text_reply(r#"{"verdict": "yes"}"#),
        _ => {
            let task = request.messages()[1]["content"].as_str().unwrap_or_default().to_owned();
            text_reply(format!("{role} did {task}"))
        }
    }
}

async fn start_with_model(model: &ScriptedModel, agents: Vec<Value>) -> Server {
    let url = model.url.clone();
    Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
        config.agents = agents;
    })
    .await
}

fn agent(instructions: &str) -> Value {
    json!({ "profile": { "instructions": instructions }, "driver": "loop" })
}

#[tokio::test]
async fn an_agent_is_defined_and_called_over_every_transport() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    let api = server.api();
    let defined = api.put("/v1/agents/one", agent("one")).await.is(200);
    assert_eq!((&defined["version"], &defined["tool"]), (&json!(1), &json!("agent.one")));
    // What a response shows can be sent back.
    assert_eq!(api.put("/v1/agents/one", defined).await.is(200)["version"], 1);

    let listed = api.get("/v1/tools/agent.one").await.is(200);
    assert_eq!(listed["source"], "server", "{listed}");
    let body = json!({ "run_id": "r", "args": { "instruction": "this" }, "wait_ms": 20_000 });
    let call = api.post("/v1/tools/agent.one/invoke?wait_ms=20000", body).await;
    let call = call.body;
    assert_eq!(call["result"]["answer"], "one did this", "{call}");

    let mcp = Mcp::modern(&api);
    let called = mcp.call("agent.one", json!({ "instruction": "that" })).await.result();
    assert!(called.to_string().contains("one did that"), "{called}");

    let batch = json!({ "tool_calls": [
        { "id": "a", "type": "function",
          "function": { "name": "agent__one", "arguments": "{\"instruction\":\"all\"}" } },
    ], "run_id": "r", "wait_ms": 20_000 });
    let answer = api.post("/v1/tool_calls", batch).await.is(200);
    assert!(answer.to_string().contains("one did all"), "{answer}");
}

#[tokio::test]
async fn a_run_calls_agents_and_shows_its_tree() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let configured = |id: &str| json!({ "agent_id": id, "profile": { "instructions": id } });
    let server = start_with_model(&model, vec![configured("one"), configured("two")]).await;
    let api = server.api();
    let body = json!({ "messages": [{ "role": "user", "content": "go" }], "wait_ms": 30_000 });
    let run = api.post("/v1/runs", body).await.is(200);
    let answer = run["answer"].as_str().unwrap();
    assert!(answer.contains("one did part 0") && answer.contains("two did part 1"), "{run}");
    let id = run["run_id"].as_str().unwrap();
    let tree = api.get(&format!("/v1/runs/{id}/tree")).await.is(200);
    assert_eq!((&tree["run_count"], &tree["open_count"]), (&json!(3), &json!(0)), "{tree}");
    let mut agents: Vec<&str> = tree["children"]
        .as_array()
        .unwrap()
        .iter()
        .map(|child| child["agent_id"].as_str().unwrap())
        .collect();
    agents.sort_unstable();
    assert_eq!(agents, ["one", "two"]);
    assert_eq!(tree["total"]["tokens"], 15 * 4, "{tree}");
    let (shown, _) = run_cli(&server, &["runs", "tree", id]).await;
    assert!(shown.contains("one") && shown.contains("two"), "{shown}");
    api.get("/v1/runs/run_none/tree").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_tree_shows_the_turns_of_workers() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    let api = server.api();
    api.put("/v1/agents/one", agent("one")).await.is(200);
    let worker = json!({ "driver": "worker", "worker_target": "w", "profile": {
        "instructions": "two", "limits": { "calls": 1, "tokens": 900 } } });
    api.put("/v1/agents/two", worker).await.is(200);
    let body = json!({ "messages": [{ "role": "user", "content": "go" }] });
    let run = api.post("/v1/runs", body).await.is(202);
    let id = run["run_id"].as_str().unwrap();
    let inbox = api.get("/v1/agents/two/inbox?wait_ms=20000").await.is(200);
    let payload = &inbox["items"][0]["payload"];
    let turn_id = payload["agent_turn_id"].as_str().unwrap();
    let leased = api.post("/v1/agents/two/turns", json!({ "agent_turn_id": turn_id })).await;
    let leased = leased.is(201);
    assert_eq!(leased["delegation"]["budget"], json!({ "calls": 1, "tokens": 900 }));

    let call = |id: &str| {
        json!({ "tool_call_id": id, "tool_name": "calculation.eval",
            "arguments": { "expression": "6*7" } })
    };
    let path = format!("/v1/agents/two/turns/{turn_id}");
    let step = json!({ "turn_epoch": leased["turn_epoch"], "calls": [call("c1"), call("c2")] });
    let sent = api.post(&format!("{path}/dispatch"), step).await.is(200);
    assert_eq!(sent["delegation"]["usage"], json!({ "calls": 1, "tokens": 0 }), "{sent}");
    let resume = json!({ "turn_epoch": sent["turn_epoch"], "wait_ms": 20_000 });
    let resumed = api.post(&format!("{path}/resume"), resume).await.is(200);
    assert_eq!(resumed["results"][0]["status"], "success", "{resumed}");
    let refused = &resumed["results"][1];
    assert_eq!(refused["status"], "failed", "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert_eq!(message, "not done: the limit of 1 tool calls is reached");

    let tree = api.get(&format!("/v1/runs/{id}/tree")).await.is(200);
    let turn_of = |tree: &Value| {
        let children = tree["children"].as_array().unwrap().clone();
        children.into_iter().find(|child| child["agent_turn_id"].is_string()).unwrap()
    };
    let turn = turn_of(&tree);
    assert_eq!((&turn["agent_id"], &turn["status"]), (&json!("two"), &json!("running")), "{tree}");
    assert_eq!(turn["tool_call_id"], payload["call_id"]);
    assert_eq!(turn["parent_id"], id);
    let finish = json!({ "turn_epoch": resumed["turn_epoch"], "reason": "ok", "tokens": 70 });
    let ended = api.post(&format!("{path}/finish"), finish).await.is(200);
    api.get(&format!("/v1/runs/{id}?wait_ms=20000")).await.is(200);
    let tree = api.get(&format!("/v1/runs/{id}/tree")).await.is(200);
    assert_eq!((&tree["run_count"], &tree["turn_count"]), (&json!(2), &json!(1)), "{tree}");
    let turn = turn_of(&tree);
    assert_eq!(turn["status"], "finished");
    assert_eq!(turn["deliverable_card_id"], ended["deliverable_card_id"]);
    assert_eq!(turn["usage"], json!({ "steps": 0, "calls": 1, "tokens": 70 }));
    assert!(turn["completed_at_ms"].as_u64() >= turn["created_at_ms"].as_u64(), "{turn}");
    assert_eq!(tree["total"]["tokens"], 15 * 3 + 70, "{tree}");
    let (shown, notes) = run_cli(&server, &["runs", "tree", id]).await;
    // The two agents are called in parallel, so either may start first.
    assert!(shown.contains(&format!("─ {turn_id} two (worker) finished")), "{shown}");
    assert!(notes.contains("2 runs, 1 turn of a worker, 0 open"), "{notes}");
}

#[tokio::test]
async fn yaml_and_the_command_line_define_agents_in_versions() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    let api = server.api();
    let yaml = "profile:\n  instructions: typed\n  result_fields: [verdict]\ndriver: loop\n";
    let request = api.request(reqwest::Method::PUT, "/v1/agents/typed");
    let request = request.header("content-type", "application/yaml").body(yaml);
    let defined = api.send(request).await.is(200);
    assert_eq!(defined["profile"]["result_fields"][0]["name"], "verdict");
    let body = json!({ "run_id": "r", "args": { "instruction": "x" } });
    let call = api.post("/v1/tools/agent.typed/invoke?wait_ms=20000", body).await.body;
    assert_eq!(call["result"], json!({ "verdict": "yes" }), "{call}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("agents.yaml");
    let agents = "agents:\n- agent_id: typed\n  profile: {instructions: typed again}\n\
                  - agent_id: other\n  profile: {instructions: other}\n";
    std::fs::write(&file, agents).unwrap();
    let (_, notes) = run_cli(&server, &["agents", "apply", file.to_str().unwrap()]).await;
    assert!(notes.contains("agent typed is at version 2"), "{notes}");
    let (list, _) = run_cli(&server, &["agents"]).await;
    assert!(list.contains("other") && list.contains("typed again"), "{list}");
    let versions = api.get("/v1/agents/typed/versions").await.is(200);
    assert_eq!(versions["versions"][1]["version"], 1);
    run_cli(&server, &["agents", "rm", "other"]).await;
    api.get("/v1/agents/other").await.refused(404, "NOT_FOUND");
    api.get("/v1/tools/agent.other").await.refused(404, "TOOL_NOT_FOUND");
    for (body, field) in [
        (json!({ "driver": "loop", "profile": { "modle": "x" } }), "modle"),
        (json!({ "driver": "worker" }), "worker_target"),
    ] {
        let error = api.put("/v1/agents/bad", body).await.refused(422, "VALIDATION_ERROR");
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[tokio::test]
async fn a_file_means_the_same_over_http_and_in_a_data_directory() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let only_woken = json!({ "agent_id": "configured", "worker_target": "w" });
    let server = start_with_model(&model, vec![only_woken]).await;
    let configured = server.api().get("/v1/agents/configured").await.is(200);
    assert_eq!((&configured["tool"], &configured["driver"]), (&json!(null), &json!(null)));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("agents.yaml");
    let agents = "agents:\n- agent_id: woken\n  worker_target: w\n  allowed_tools: [calculation.*]\n\
                  - agent_id: called\n  driver: worker\n  worker_target: w\n";
    std::fs::write(&file, agents).unwrap();
    let (file, data) = (file.to_str().unwrap(), directory.path().join("data"));
    let url = format!("http://{}", server.address);
    let mut shown = Vec::new();
    for target in [["--server", url.as_str()], ["--data-dir", data.to_str().unwrap()]] {
        let run = async |words: &[&str]| {
            let mut command = std::process::Command::new(crate::support::process::TOOLCRIB);
            command.args(words).args(target).env_remove("TOOLCRIB_KEY");
            let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
            let stderr = String::from_utf8(ran.stderr).unwrap();
            assert!(ran.status.success(), "{stderr}");
            (String::from_utf8(ran.stdout).unwrap(), stderr)
        };
        let (_, notes) = run(&["agents", "apply", file]).await;
        assert!(notes.contains("agent woken is on the roster: it can be woken"), "{notes}");
        assert!(notes.contains("agent called is at version 1"), "{notes}");
        let mut woken: Value =
            serde_json::from_str(&run(&["agents", "show", "woken"]).await.0).unwrap();
        woken.as_object_mut().unwrap().remove("updated_at_ms");
        shown.push(woken);
    }
    assert_eq!(shown[0], shown[1]);
    assert_eq!((&shown[0]["tool"], &shown[0]["worker_target"]), (&json!(null), &json!("w")));
}

#[tokio::test]
async fn an_unknown_field_of_an_agent_that_is_only_woken_is_refused_on_every_way_in() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (file, config, data) = (path("agents.yaml"), path("agents.toml"), path("data"));
    let url = format!("http://{}", server.address);
    let refused = async |words: &[&str]| {
        let mut command = std::process::Command::new(crate::support::process::TOOLCRIB);
        command.args(words).env_remove("TOOLCRIB_KEY").current_dir(directory.path());
        let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        assert!(!ran.status.success(), "{words:?}");
        String::from_utf8(ran.stderr).unwrap()
    };
    let typo =
        ["did you mean `allowed_tools`?", "agents.toml: there is no setting agents.0.allowed_tool"];
    let unused = ["unknown field `wakeup_url`"; 2];
    for (yaml, toml, [expected, in_configuration]) in [
        ("allowed_tool: [a.*]", "allowed_tool = [\"a.*\"]", typo),
        ("wakeup_url: https://x", "wakeup_url = \"https://x\"", unused),
    ] {
        let agents = format!("agents:\n- agent_id: ada\n  worker_target: w\n  {yaml}\n");
        std::fs::write(&file, agents).unwrap();
        let agents = format!("[[agents]]\nagent_id = \"ada\"\nworker_target = \"w\"\n{toml}\n");
        std::fs::write(&config, agents).unwrap();
        for (words, expected) in [
            (["agents", "apply", &file, "--server", &url], expected),
            (["agents", "apply", &file, "--data-dir", &data], expected),
            (["serve", "--config", &config, "--data-dir", &data], in_configuration),
        ] {
            let message = refused(&words).await;
            assert!(message.contains(expected), "{words:?}: {message}");
        }
    }
    server.api().get("/v1/agents/ada").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn agents_are_called_under_rules_and_approvals() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    server.operator().put("/v1/agents/one", agent("one")).await.is(200);
    let ada = server.keyed("default", "ada", "agent", &["calculation.*"]).await;
    let body = json!({ "run_id": "r", "args": { "instruction": "x" } });
    ada.post("/v1/tools/agent.one/invoke", body.clone()).await.refused(403, "PERMISSION_DENIED");
    let rule = json!({ "verdict": "ask", "agents": ["bob"], "tools": ["agent.*"] });
    server.operator().put("/v1/rules/ask-agents", rule).await.is(200);
    let bob = server.keyed("default", "bob", "agent", &["agent.*"]).await;
    let ticket = bob.invoke("agent.one", json!({ "instruction": "x" })).await;
    let held = bob.until_status(&ticket, "PENDING").await;
    assert_eq!(held["hold"], "approval", "{held}");
    assert_eq!(model.requests().len(), 0, "nothing runs before the approval");
    let approval = held["approval_id"].as_str().unwrap();
    let decision = json!({ "decisions": [{ "approval_id": approval, "verdict": "approve" }] });
    let decided = server.operator().post("/v1/approvals/decide", decision).await;
    assert_eq!(decided.status, 200, "{}", decided.body);
    let call = bob.finished(&ticket).await;
    assert_eq!(call["result"]["answer"], "one did x", "{call}");
}

#[tokio::test]
async fn a_box_is_created_read_and_given_to_an_agent() {
    let model = ScriptedModel::start_with_script(team).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    let api = server.api();
    api.put("/v1/agents/one", agent("one")).await.is(200);
    let card = json!({ "card_id": "c1", "type": "agent.thought", "author_id": "me",
        "content": { "__type__": "TextContent", "text": "the answer is 7" }, "metadata": {} });
    api.post("/v1/cards", card).await.is(201);
    let made = api.post("/v1/boxes", json!({ "card_ids": ["c1"] })).await.is(201);
    let id = made["box_id"].as_str().unwrap();
    let shown = api.get(&format!("/v1/boxes/{id}")).await.is(200);
    assert_eq!(shown["card_ids"], json!(["c1"]));
    api.post("/v1/boxes", json!({ "card_ids": ["none"] })).await.refused(422, "VALIDATION_ERROR");
    api.get("/v1/boxes/none").await.refused(404, "NOT_FOUND");
    let other = server.operator().project("elsewhere");
    other.get(&format!("/v1/boxes/{id}")).await.refused(404, "NOT_FOUND");
    let args = json!({ "instruction": "look", "context_box_id": id });
    let ticket = api.invoke("agent.one", args).await;
    let call = api.finished(&ticket).await;
    assert!(call["result"]["answer"].as_str().unwrap().contains("the answer is 7"), "{call}");
}

#[tokio::test]
async fn a_canceled_run_cancels_its_whole_tree() {
    let model = ScriptedModel::start_with_script(|request| {
        match (role(request).as_str(), results(request).is_empty()) {
            ("root", true) => calling(&["one", "two"]),
            ("one", true) => calling(&["three"]),
            _ => ScriptedBehavior::Stall(ScriptedAnswer::text("never"), 0),
        }
    })
    .await
    .unwrap();
    let server = start_with_model(&model, vec![]).await;
    let api = server.api();
    for id in ["one", "two", "three"] {
        api.put(&format!("/v1/agents/{id}"), agent(id)).await.is(200);
    }
    let body = json!({ "messages": [{ "role": "user", "content": "go" }] });
    let run = api.post("/v1/runs", body).await.is(202);
    let path = format!("/v1/runs/{}/tree", run["run_id"].as_str().unwrap());
    until("all agents work", || async {
        let tree = api.get(&path).await.is(200);
        (tree["run_count"] == 4).then_some(())
    })
    .await;
    let cancel = format!("/v1/runs/{}/cancel", run["run_id"].as_str().unwrap());
    let began = std::time::Instant::now();
    api.post(&cancel, json!({})).await.is(200);
    until("all agents stopped", || async {
        let tree = api.get(&path).await.is(200);
        (tree["open_count"] == 0).then_some(())
    })
    .await;
    assert!(began.elapsed() < std::time::Duration::from_secs(1), "{:?}", began.elapsed());
}
