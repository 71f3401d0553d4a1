//! The five tools that hand work to agents, called over HTTP, over MCP and by a model in the loop.

use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::Caller;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib_bench::model::{RecordedRequest, ScriptedBehavior, ScriptedModel, text_reply};

use super::{agent, results, role, start_with_model};
use crate::support::mcp::Mcp;
use crate::support::{Server, until};

/// The calls: each tool with its arguments, and a text in its result.
fn cases(suffix: &str) -> Vec<(&'static str, Value, &'static str)> {
    let task = json!({ "target_strategy": "new", "target_ref": "one", "instruction": "this" });
    let question = json!({ "expert_profile": "one", "question": "this" });
    let launched = json!({ "profile_name": "one", "instruction": "this" });
    let provisioned = json!({ "action": "create", "agent_id": format!("new_{suffix}"),
        "profile": { "instructions": "x" } });
    vec![
        ("delegate_async", task.clone(), "accepted"),
        ("launch_principal", launched, "accepted"),
        ("ask_expert", question, "one did this"),
        ("fork_join", json!({ "tasks": [task.clone(), task] }), "one did this"),
        ("provision_agent", provisioned, "accepted"),
    ]
}

/// The root calls the tool that its message names; every other agent answers with its task.
fn reply(request: &RecordedRequest) -> ScriptedBehavior {
    let (role, results) = (role(request), results(request));
    let messages = request.messages();
    match (role.as_str(), results.is_empty()) {
        ("root", true) => {
            let name = messages[0]["content"].as_str().unwrap().to_owned();
            let (_, args, _) = cases("loop").into_iter().find(|case| case.0 == name).unwrap();
            toolcrib_bench::model::tool_call_reply("c1", &name, &args)
        }
        // The notice of a task that was handed on follows as a message of its own.
        ("root", false) => {
            let rest = messages.iter().filter(|message| message["role"] == "user").skip(1);
            let late = rest.filter_map(|message| message["content"].as_str());
            text_reply(format!("{} {}", results.join(" "), late.collect::<Vec<_>>().join(" ")))
        }
        _ => {
            let task = messages[1]["content"].as_str().unwrap_or_default().to_owned();
            text_reply(format!("{role} did {task}"))
        }
    }
}

async fn start() -> (Server, ScriptedModel) {
    let model = ScriptedModel::start_with_script(reply).await.unwrap();
    let server = start_with_model(&model, vec![]).await;
    server.api().put("/v1/agents/one", agent("one")).await.is(200);
    (server, model)
}

/// Waits until an agent was called this often and every call has succeeded.
async fn wait_for_calls(server: &Server, count: usize) {
    let api = server.api();
    until("the calls of the agent", || async {
        let listed = api.get("/v1/tool_calls?tool_name=agent.one&limit=100").await.is(200);
        let calls = listed["tool_calls"].as_array().unwrap().clone();
        let done = calls.iter().filter(|call| call["status"] == "SUCCEEDED").count();
        (done == count && calls.len() == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_tools_work_over_http() {
    let (server, _model) = start().await;
    for (tool, args, expected) in cases("http") {
        let path = format!("/v1/tools/{tool}/invoke?wait_ms=20000");
        let call = server.api().post(&path, json!({ "run_id": "r", "args": args })).await.body;
        assert_eq!(call["status"], "SUCCEEDED", "{tool}: {call}");
        assert!(call["result"].to_string().contains(expected), "{tool}: {call}");
    }
    server.api().get("/v1/agents/new_http").await.is(200);
    wait_for_calls(&server, 5).await;
}

#[tokio::test]
async fn the_tools_work_over_mcp() {
    let (server, _model) = start().await;
    let mcp = Mcp::modern(&server.api());
    for (tool, args, expected) in cases("mcp") {
        let result = mcp.call(tool, args).await.result();
        assert!(result.to_string().contains(expected), "{tool}: {result}");
        assert_ne!(result["isError"], true, "{tool}: {result}");
    }
    server.api().get("/v1/agents/new_mcp").await.is(200);
    wait_for_calls(&server, 5).await;
}

#[tokio::test]
async fn the_tools_work_in_the_loop() {
    let (server, _model) = start().await;
    for (tool, _, expected) in cases("loop") {
        let body = json!({ "messages": [{ "role": "user", "content": tool }], "wait_ms": 20_000 });
        let run = server.api().post("/v1/runs", body).await.body;
        assert_eq!(run["status"], "SUCCEEDED", "{tool}: {run}");
        let answer = run["answer"].as_str().unwrap();
        assert!(answer.contains(expected), "{tool}: {answer}");
        if tool != "provision_agent" {
            assert!(answer.contains("one did this"), "the run has the notice of {tool}: {answer}");
        }
    }
    server.api().get("/v1/agents/new_loop").await.is(200);
    wait_for_calls(&server, 5).await;
}

#[tokio::test]
async fn the_deadline_of_a_join_counts_from_its_approval() {
    let (server, _model) = start().await;
    let mut rule = AccessRule::new("default", "fork", RuleVerdict::Ask);
    rule.tools = vec!["fork_join".to_owned()];
    server.engine.admin().set_rule(&Caller::operator("default"), rule).await.unwrap();
    let task = json!({ "target_strategy": "new", "target_ref": "one", "instruction": "this" });
    let body = json!({ "run_id": "r", "args": { "tasks": [task], "deadline_seconds": 4 } });
    let ticket = server.api().post("/v1/tools/fork_join/invoke", body).await.is(202);
    assert_eq!(ticket["hold"], "approval", "{ticket}");
    // The whole time of the join passes before the decision.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let decision = json!({ "approval_id": ticket["approval_id"], "verdict": "approve" });
    let body = json!({ "decisions": [decision] });
    server.operator().post("/v1/approvals/decide", body).await.is(200);
    let path = format!("/v1/tool_calls/{}?wait_ms=20000", ticket["tool_call_id"].as_str().unwrap());
    let call = server.api().get(&path).await.is(200);
    assert_eq!(
        (&call["status"], &call["result"]["status"]),
        (&json!("SUCCEEDED"), &json!("success"))
    );
}
