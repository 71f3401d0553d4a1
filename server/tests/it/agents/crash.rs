//! The real binary is killed while trees of agents work: each child has exactly one outcome, no run
//! is started twice, and budgets add up.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply,
};

use super::{calling, results, role};
use crate::support::process::{PATIENCE, Server, eventually, text};

const TREES: usize = 6;
const KILLS: usize = 3;

/// The root calls a, b and c; a and b call leaf; c fails. Each leaf calculates once.
fn reply(request: &RecordedRequest) -> ScriptedBehavior {
    let (role, results) = (role(request), results(request));
    match (role.as_str(), results.len()) {
        ("root", 0) => calling(&["a", "b", "c"]),
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

async fn get(server: &Server, path: &str) -> Value {
    server.http.get(server.url(path)).send().await.unwrap().json().await.unwrap()
}

fn nodes(node: &Value) -> Vec<&Value> {
    let children = node["children"].as_array().unwrap().iter();
    std::iter::once(node).chain(children.flat_map(nodes)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trees_killed_at_random_have_one_outcome_per_child() {
    let model = ScriptedModel::start_with_script(reply).await.unwrap();
    let mut server = Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    server.start().await;
    for (id, tokens) in [("a", 2_000), ("b", 2_000), ("c", 2_000), ("leaf", 500)] {
        let body = json!({ "driver": "loop", "profile": {
            "instructions": id, "limits": { "tokens": tokens } } });
        let request = server.http.put(server.url(&format!("/v1/agents/{id}"))).json(&body);
        assert!(request.send().await.unwrap().status().is_success());
    }
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
        eventually("requests", PATIENCE, async || (model.requests().len() >= enough).then_some(()))
            .await;
        server.kill();
        server.start().await;
    }
    for id in &ids {
        let run = get(&server, &format!("/v1/runs/{id}?wait_ms=30000")).await;
        assert_eq!(run["answer"], "root done", "{run}\n{}", server.log());
        let tree = get(&server, &format!("/v1/runs/{id}/tree")).await;
        assert_eq!((&tree["run_count"], &tree["open_count"]), (&json!(6), &json!(0)), "{tree}");
        let mut calls = BTreeSet::new();
        let mut agents = BTreeMap::<String, usize>::new();
        for node in nodes(&tree).into_iter().skip(1) {
            let ticket = text(node, "tool_call_id");
            assert!(calls.insert(ticket.clone()), "a call has two runs: {tree}");
            let agent = text(node, "agent_id");
            let expected = if agent == "c" { "FAILED" } else { "SUCCEEDED" };
            *agents.entry(agent).or_default() += 1;
            let call = get(&server, &format!("/v1/tool_calls/{ticket}")).await;
            assert_eq!((&call["status"], &node["status"]), (&json!(expected), &json!(expected)));
            assert_eq!(node["reserved"], json!({ "calls": null, "tokens": null }), "{node}");
            assert!(
                node["budget"]["tokens"].as_u64().unwrap()
                    >= node["total"]["tokens"].as_u64().unwrap()
            );
        }
        let counts: Vec<usize> = agents.values().copied().collect();
        assert_eq!(counts, [1, 1, 1, 2], "{tree}");
    }
    server.stop().await;
}
