//! The real binary is killed while trees of agents work: each child has exactly one outcome, no run
//! is started twice, and budgets add up.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply,
};

use super::{calling, results, role};
use crate::support::process::{PATIENCE, Server, eventually, text};

const TREES: usize = 100;
const KILLS: usize = 6;
const WORKER_TOKENS: u64 = 60;

/// The root calls a, b, c and w; a and b call leaf; c fails; a worker drives w. Each leaf
/// calculates once. The root answers with the number of notices that it has.
fn reply(request: &RecordedRequest) -> ScriptedBehavior {
    let (role, results) = (role(request), results(request));
    match (role.as_str(), results.len()) {
        ("root", 0) => calling(&["a", "b", "c", "w"]),
        ("root", count) => text_reply(format!("{count} notices")),
        ("a" | "b", 0) => calling(&["leaf"]),
        ("leaf", 0) => {
            let args = r#"{"expression":"6*7"}"#;
            let call = ScriptedAnswer::text("").with_call("s", "calculation__eval", args);
            ScriptedBehavior::Reply(call)
        }
        ("c", _) => ScriptedBehavior::Refuse(400, None, json!({ "error": { "message": "no" } })),
        _ => text_reply(format!("{role} done")),
    }
}

/// Drives the agent w over HTTP, while the server is killed and started again.
async fn drive_worker(http: reqwest::Client, url: String) {
    let mut leases = 0_u64;
    loop {
        let found = http.get(format!("{url}/inbox?wait_ms=1000&limit=50")).send().await;
        let inbox: Value = match found {
            Ok(response) => response.json().await.unwrap_or_default(),
            Err(_) => {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                continue;
            }
        };
        for item in inbox["items"].as_array().into_iter().flatten() {
            if item["message_type"] == "turn" {
                leases += 1;
                let turn_id = text(&item["payload"], "agent_turn_id");
                finish_turn(&http, &url, &turn_id, &format!("lease{leases}")).await;
            } else {
                let body = json!({ "inbox_ids": [item["inbox_id"]] });
                let _ = http.post(format!("{url}/inbox/ack")).json(&body).send().await;
            }
        }
    }
}

/// Leases a turn, calls a tool in it and finishes it. A request whose response is lost is repeated.
async fn finish_turn(http: &reqwest::Client, url: &str, turn_id: &str, request_id: &str) {
    let post = async |path: String, body: Value| loop {
        match http.post(format!("{url}{path}")).json(&body).send().await {
            Ok(response) if response.status().is_server_error() => {}
            Ok(response) => {
                if let Ok(body) = response.json::<Value>().await {
                    return body;
                }
            }
            Err(_) => {}
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    let lease = json!({ "agent_turn_id": turn_id, "request_id": request_id });
    let leased = post("/turns".to_owned(), lease).await;
    // The turn may have ended in the meantime.
    let Some(epoch) = leased["turn_epoch"].as_u64().filter(|_| leased["status"] == "running")
    else {
        return;
    };
    let turn = format!("/turns/{turn_id}");
    let call = json!({ "tool_call_id": "c1", "tool_name": "calculation.eval",
        "arguments": { "expression": "6*7" } });
    let step = json!({ "turn_epoch": epoch, "step_id": "s1", "calls": [call], "tokens": 20 });
    let sent = post(format!("{turn}/dispatch"), step).await;
    if sent["status"] != "suspended" {
        return;
    }
    let resume = json!({ "turn_epoch": epoch, "wait_ms": 2_000, "request_id": "resume1" });
    let epoch = loop {
        let resumed = post(format!("{turn}/resume"), resume.clone()).await;
        match resumed["turn_epoch"].as_u64() {
            Some(epoch) if resumed["status"] == "running" => break epoch,
            _ if resumed["detail"]["waiting"].is_null() && resumed["results"].is_null() => return,
            _ => {}
        }
    };
    let card_id = format!("dlv_{turn_id}");
    let card = json!({
        "card_id": card_id, "type": "task.deliverable", "author_id": "w", "metadata": {},
        "content": { "__type__": "JsonContent", "data": { "answer": "w done" } },
    });
    let cards = format!("{}/v1/cards", url.trim_end_matches("/v1/agents/w"));
    while !http.post(&cards).json(&card).send().await.is_ok_and(|r| r.status().is_success()) {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let finish = json!({
        "turn_epoch": epoch, "deliverable_card_id": card_id, "tokens": WORKER_TOKENS,
    });
    post(format!("{turn}/finish"), finish).await;
}

async fn get(server: &Server, path: &str) -> Value {
    server.http.get(server.url(path)).send().await.unwrap().json().await.unwrap()
}

fn nodes(node: &Value) -> Vec<&Value> {
    let children = node["children"].as_array().unwrap().iter();
    std::iter::once(node).chain(children.flat_map(nodes)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trees_killed_at_random_have_one_outcome_per_child() {
    check_killed_trees(Server::new()).await;
}

/// Checks the runs and turns of an ended tree, and returns the number of each agent's.
async fn check_nodes(server: &Server, tree: &Value) -> BTreeMap<String, usize> {
    let mut calls = BTreeSet::new();
    let mut agents = BTreeMap::<String, usize>::new();
    for node in nodes(tree).into_iter().skip(1) {
        let ticket = text(node, "tool_call_id");
        assert!(calls.insert(ticket.clone()), "a call has two runs: {tree}");
        let agent = text(node, "agent_id");
        let expected = if agent == "c" { "FAILED" } else { "SUCCEEDED" };
        *agents.entry(agent).or_default() += 1;
        let call = get(server, &format!("/v1/tool_calls/{ticket}")).await;
        assert_eq!(call["status"], expected, "{call}");
        if node["agent_turn_id"].is_string() {
            assert_eq!(node["status"], "finished", "{node}");
            assert!(node["deliverable_card_id"].is_string(), "{node}");
            let usage = json!({ "steps": 0, "calls": 1, "tokens": WORKER_TOKENS });
            assert_eq!(node["usage"], usage, "each call of the worker counts once");
        } else {
            assert_eq!(node["status"], expected, "{node}");
        }
        assert_eq!(node["reserved"], json!({ "calls": null, "tokens": null }), "{node}");
        assert!(
            node["budget"]["tokens"].as_u64().unwrap() >= node["total"]["tokens"].as_u64().unwrap()
        );
    }
    agents
}

/// Kills a server while trees work, and checks what they left.
pub async fn check_killed_trees(server: Server) {
    let model = ScriptedModel::start_with_script(reply).await.unwrap();
    let mut server = server.with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    // A restart takes a part of each deadline, and on a busy machine more than three seconds.
    let settings = "[tools.\"calculation.eval\".policy]\ndefault_timeout_ms = 60000\n";
    std::fs::write(server.directory.path().join("toolcrib.toml"), settings).unwrap();
    server.start().await;
    for (id, tokens) in [("a", 2_000), ("b", 2_000), ("c", 2_000), ("leaf", 500)] {
        let body = json!({ "driver": "loop", "profile": {
            "instructions": id, "limits": { "tokens": tokens } } });
        let request = server.http.put(server.url(&format!("/v1/agents/{id}"))).json(&body);
        assert!(request.send().await.unwrap().status().is_success());
    }
    let body = json!({ "driver": "worker", "worker_target": "w", "profile": {
        "instructions": "w", "limits": { "tokens": 500 } } });
    let request = server.http.put(server.url("/v1/agents/w")).json(&body);
    assert!(request.send().await.unwrap().status().is_success());
    let worker = drive_worker(server.http.clone(), server.url("/v1/agents/w"));
    let worker = tokio::spawn(worker);
    let mut ids = Vec::new();
    for _ in 0..TREES {
        let body = json!({ "messages": [{ "role": "user", "content": "go" }],
            "limits": { "tokens": 10_000 } });
        let request = server.http.post(server.url("/v1/runs")).json(&body);
        let run: Value = request.send().await.unwrap().json().await.unwrap();
        ids.push(text(&run, "run_id"));
    }
    for n in 1..=KILLS {
        // A tree has about 11 requests.
        let enough = n * TREES * 11 / (KILLS + 2);
        eventually("requests", PATIENCE * 4, async || {
            (model.requests().len() >= enough).then_some(())
        })
        .await;
        server.kill();
        server.start().await;
    }
    for id in &ids {
        let run = eventually("the end of a tree", PATIENCE * 4, async || {
            let run = get(&server, &format!("/v1/runs/{id}?wait_ms=10000")).await;
            (run["answer"] != Value::Null).then_some(run)
        })
        .await;
        assert_eq!(run["answer"], "4 notices", "{run}\n{}", server.log());
        let calls = get(&server, &format!("/v1/tool_calls?run_id={id}&tool_name=agent.w")).await;
        let calls = calls["tool_calls"].as_array().unwrap().clone();
        let outcomes: Vec<&str> = calls.iter().filter_map(|call| call["status"].as_str()).collect();
        assert_eq!(outcomes, ["SUCCEEDED"], "{calls:?}");
        let tree = get(&server, &format!("/v1/runs/{id}/tree")).await;
        assert_eq!((&tree["run_count"], &tree["open_count"]), (&json!(6), &json!(0)), "{tree}");
        let agents = check_nodes(&server, &tree).await;
        let counts: Vec<usize> = agents.values().copied().collect();
        assert_eq!(counts, [1, 1, 1, 2, 1], "{tree}");
    }
    let unread = get(&server, "/v1/agents/w/inbox").await;
    assert_eq!(unread["items"], json!([]), "no turn is left");
    let open = get(&server, "/v1/tool_calls?status=RUNNING").await;
    assert_eq!(open["tool_calls"], json!([]), "no call is left");
    worker.abort();
    server.stop().await;
}
