//! Handoffs: another agent continues a run.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply, tool_call_reply};

use super::{question, run_to_end, start_with_model};
use crate::support::{Api, Server, until};

pub(super) async fn start_with_agents(
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Server, toolcrib_bench::model::ScriptedModel) {
    let (server, model) = start_with_model(replies).await;
    define(&server.api(), "billing", json!({ "tools": ["calculation.*"] })).await;
    define(&server.api(), "triage", json!({ "tools": ["handoff.*"] })).await;
    (server, model)
}

async fn define(api: &Api, agent_id: &str, profile: Value) {
    let mut profile = profile;
    profile["instructions"] = format!("You are {agent_id}.").into();
    profile["model"] = "large-1".into();
    let body = json!({ "profile": profile, "driver": "loop" });
    let reply = api.put(&format!("/v1/agents/{agent_id}"), body).await;
    assert!(reply.status.is_success(), "{}", reply.text);
}

fn front_desk_question() -> Value {
    let messages = json!([
        { "role": "system", "content": "You are the front desk." },
        { "role": "user", "content": "Hello" },
        { "role": "assistant", "content": "Hello. What is it?" },
        { "role": "user", "content": "My invoice is wrong." },
    ]);
    json!({ "model": "large-1", "messages": messages })
}

fn contents(messages: &[Value]) -> Vec<&str> {
    messages.iter().filter_map(|message| message["content"].as_str()).collect()
}

#[tokio::test]
async fn another_agent_continues_the_run() {
    let hand = json!({ "reason": "an invoice" });
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &hand),
        tool_call_reply("c2", "calculation__eval", &json!({ "expression": "6*7" })),
        text_reply("It is 42."),
    ])
    .await;
    let api = server.api();
    let run = run_to_end(&api, front_desk_question()).await;
    assert_eq!(
        (&run["status"], &run["answer"]),
        (&json!("SUCCEEDED"), &json!("It is 42.")),
        "{run}"
    );
    assert_eq!((&run["active_agent"], &run["step_count"]), (&json!("billing"), &json!(3)));
    let requests = model.requests();
    let first = requests[0].tool_names();
    assert!(first.contains(&"transfer_to_billing".to_owned()), "{first:?}");
    // The other agent has its own instructions and tools, and the conversation.
    let names = requests[1].tool_names();
    assert_eq!(names, ["calculation__eval", "result__read", "run__finish"]);
    let texts = contents(requests[1].messages());
    assert_eq!(texts[0], "You are billing.");
    assert!(!texts.contains(&"You are the front desk."), "{texts:?}");
    assert!(texts.contains(&"My invoice is wrong."), "{texts:?}");
    assert_eq!(
        *texts.last().unwrap(),
        "default hands this conversation over to you, billing. Reason: an invoice"
    );
    assert!(texts.contains(&r#"{"assistant":"billing"}"#), "{texts:?}");
    // The record of the handoff.
    let path = format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap());
    let handoff = api.follow(&path, None).await.wait_for("run.handoff").await.data;
    let record = (&handoff["from"], &handoff["to"], &handoff["reason"], &handoff["messages"]);
    assert_eq!(record, (&json!("default"), &json!("billing"), &json!("an invoice"), &json!("all")));
    assert_eq!((&handoff["passed"], &handoff["version"]), (&json!(4), &json!(1)), "{handoff}");
    // The handoff is a call of the same run.
    assert_eq!(run["calls"][0]["tool_name"], "handoff.to_billing");
    assert_eq!(run["calls"].as_array().unwrap().len(), 2);
    let tools = api.get("/v1/tools").await.is(200).to_string();
    assert!(!tools.contains("handoff.to_"), "{tools}");
}

#[tokio::test]
async fn a_handoff_selects_the_messages_that_it_passes_on() {
    for (hand, passed, seen) in [
        (json!({ "messages": "last_n", "n": 1 }), 1, vec!["My invoice is wrong."]),
        (json!({ "messages": "none", "reason": "an invoice" }), 0, vec![]),
    ] {
        let (server, model) = start_with_agents([
            tool_call_reply("c1", "handoff__to_billing", &hand),
            text_reply("Done."),
        ])
        .await;
        let api = server.api();
        let run = run_to_end(&api, front_desk_question()).await;
        assert_eq!(run["answer"], "Done.", "{run}");
        let requests = model.requests();
        let texts = contents(requests[1].messages());
        let users: Vec<&str> = ["Hello", "Hello. What is it?", "My invoice is wrong."]
            .into_iter()
            .filter(|text| texts.contains(text))
            .collect();
        assert_eq!(users, seen, "{texts:?}");
        assert!(texts.last().unwrap().contains("to you, billing."), "{texts:?}");
        let path = format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap());
        let handoff = api.follow(&path, None).await.wait_for("run.handoff").await.data;
        assert_eq!(handoff["passed"], passed);
    }
}

#[tokio::test]
async fn a_run_continues_with_the_agent_after_a_restart_and_hands_back() {
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_triage", &json!({})),
        text_reply("Triage here."),
        tool_call_reply("c2", "transfer_to_billing", &json!({})),
        text_reply("Billing here."),
    ])
    .await;
    let run = run_to_end(&server.api(), question("Hi")).await;
    assert_eq!(run["active_agent"], "triage", "{run}");
    let server = server.restart().await;
    let more =
        json!({ "messages": [{ "role": "user", "content": "And now?" }], "wait_ms": 30_000 });
    let path = format!("/v1/runs/{}/messages", run["run_id"].as_str().unwrap());
    let run = server.api().post(&path, more).await.is(200);
    assert_eq!(
        (&run["answer"], &run["active_agent"]),
        (&json!("Billing here."), &json!("billing"))
    );
    let requests = model.requests();
    assert_eq!(contents(requests[2].messages())[0], "You are triage.");
    let names = requests[2].tool_names();
    assert!(names.contains(&"transfer_to_billing".to_owned()), "{names:?}");
    assert!(!names.contains(&"transfer_to_triage".to_owned()), "not to itself: {names:?}");
    assert_eq!(contents(requests[3].messages())[0], "You are billing.");
}

/// Checks that a handoff that is not offered is an unknown tool, and that the run says so.
fn check_refused(run: &Value, text: &str) {
    let note = "\n\n[The only tool call failed: transfer_to_billing: TOOL_NOT_FOUND";
    let answer = run["answer"].as_str().unwrap();
    assert!(answer.starts_with(&format!("{text}{note}")), "{run}");
    assert_eq!((&run["status"], run.get("active_agent")), (&json!("FAILED"), None), "{run}");
}

#[tokio::test]
async fn rules_apply_to_handoffs() {
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &json!({})),
        text_reply("I cannot."),
    ])
    .await;
    let ada = server.keyed("default", "ada", "agent", &["calculation.*"]).await;
    let run = run_to_end(&ada, question("Hi")).await;
    check_refused(&run, "I cannot.");
    let names = model.requests()[0].tool_names();
    assert!(!names.contains(&"transfer_to_billing".to_owned()), "{names:?}");
}

#[tokio::test]
async fn a_rule_or_switch_on_an_agent_holds_for_handoffs_to_it() {
    let hand_off = || tool_call_reply("c1", "transfer_to_billing", &json!({}));
    let (server, _model) = start_with_agents([
        hand_off(),
        text_reply("I cannot."),
        hand_off(),
        text_reply("I may not."),
        hand_off(),
        // The second one is needed if the decision comes after the reply.
        text_reply("Rejected."),
        text_reply("Rejected later."),
    ])
    .await;
    let (api, operator) = (server.api(), server.operator());
    let deny = json!({ "verdict": "deny", "tools": ["agent.billing"] });
    operator.put("/v1/rules/no-billing", deny).await.is(200);
    let run = run_to_end(&api, question("Hi")).await;
    check_refused(&run, "I cannot.");
    operator.delete("/v1/rules/no-billing").await.is(204);
    let off = json!({ "reason": "wrong invoices" });
    operator.put("/v1/switches/agent/billing", off).await.is(200);
    let invoked = json!({ "run_id": "r", "args": { "instruction": "x" } });
    let refused = api.post("/v1/tools/agent.billing/invoke", invoked).await;
    let refused = refused.refused(403, "PERMISSION_DENIED");
    assert!(refused.to_string().contains("wrong invoices"), "{refused}");
    let run = run_to_end(&api, question("Hi")).await;
    assert_eq!((&run["answer"], run.get("active_agent")), (&json!("I may not."), None), "{run}");
    operator.delete("/v1/switches/agent/billing").await.is(204);
    let ask = json!({ "verdict": "ask", "tools": ["agent.billing"] });
    operator.put("/v1/rules/ask-billing", ask).await.is(200);
    let started = api.post("/v1/runs", question("Hi")).await.is(202);
    let pending = until("the handoff to wait", || async {
        let list = operator.get("/v1/approvals?status=pending").await.is(200);
        list["approvals"].as_array().unwrap().first().cloned()
    })
    .await;
    assert_eq!(pending["tool_name"], "handoff.to_billing");
    let decision = json!({ "approval_id": pending["approval_id"], "verdict": "reject" });
    operator.post("/v1/approvals/decide", json!({ "decisions": [decision] })).await.is(200);
    let path = format!("/v1/runs/{}?wait_ms=30000", started["run_id"].as_str().unwrap());
    let run = api.get(&path).await.is(200);
    assert_eq!((&run["status"], run.get("active_agent")), (&json!("SUCCEEDED"), None), "{run}");
    assert_eq!(run["failed_call_count"], 1, "{run}");
}

#[tokio::test]
async fn a_switch_on_the_agent_ends_the_run_during_a_model_request() {
    // The request to the model of the other agent never ends by itself.
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &json!({})),
        ScriptedBehavior::Stall(ScriptedAnswer::text("never"), 0),
    ])
    .await;
    let (api, operator) = (server.api(), server.operator());
    let started = api.post("/v1/runs", question("Hi")).await.is(202);
    let path = format!("/v1/runs/{}", started["run_id"].as_str().unwrap());
    until("the request of the other agent", || async {
        (model.requests().len() == 2).then_some(())
    })
    .await;
    // A switch on an agent that the run was not handed to changes nothing.
    let other = json!({ "reason": "unrelated" });
    operator.put("/v1/switches/agent/triage", other).await.is(200);
    assert_eq!(api.get(&path).await.is(200)["status"], "RUNNING");
    let switched = Instant::now();
    let off = json!({ "reason": "wrong invoices" });
    operator.put("/v1/switches/agent/billing", off).await.is(200);
    let run = api.get(&format!("{path}?wait_ms=30000")).await.is(200);
    assert!(switched.elapsed() < Duration::from_secs(1), "{:?}", switched.elapsed());
    assert_eq!((&run["status"], &run["active_agent"]), (&json!("FAILED"), &json!("billing")));
    assert!(run["error"]["message"].as_str().unwrap().contains("wrong invoices"), "{run}");
}

#[tokio::test]
async fn chat_completions_hand_off_too() {
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &json!({ "reason": "an invoice" })),
        text_reply("Billing here."),
    ])
    .await;
    let chat = server.api().post("/v1/chat/completions", front_desk_question()).await.is(200);
    assert_eq!(chat["choices"][0]["message"]["content"], "Billing here.");
    let handoff = &chat["toolcrib"]["handoffs"][0];
    assert_eq!((&handoff["to"], &handoff["reason"]), (&json!("billing"), &json!("an invoice")));
    assert_eq!(contents(model.requests()[1].messages())[0], "You are billing.");
}

/// Approves the handoff that waits for a decision.
async fn approve_handoff(server: &Server) {
    let operator = server.operator();
    let pending = until("the handoff to wait", || async {
        let list = operator.get("/v1/approvals?status=pending").await.is(200);
        list["approvals"].as_array().unwrap().first().cloned()
    })
    .await;
    let decision = json!({ "approval_id": pending["approval_id"], "verdict": "approve" });
    operator.post("/v1/approvals/decide", json!({ "decisions": [decision] })).await.is(200);
}

#[tokio::test]
async fn a_handoff_that_is_approved_late_takes_place() {
    let hand = json!({ "messages": "last_n", "n": 1, "reason": "an invoice" });
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &hand),
        text_reply("I wait."),
        text_reply("Billing here."),
    ])
    .await;
    let api = server.api();
    let ask = json!({ "verdict": "ask", "tools": ["handoff.*"] });
    server.operator().put("/v1/rules/ask", ask).await.is(200);
    let mut body = front_desk_question();
    body["policy"] = json!({ "wait_ms": 100 });
    let started = api.post("/v1/runs", body).await.is(202);
    let path = format!("/v1/runs/{}", started["run_id"].as_str().unwrap());
    until("the run to wait", || async {
        (api.get(&path).await.is(200)["status"] == "WAITING").then_some(())
    })
    .await;
    approve_handoff(&server).await;
    let run = api.get(&format!("{path}?wait_ms=30000")).await.is(200);
    assert_eq!(
        (&run["status"], &run["answer"], &run["active_agent"]),
        (&json!("SUCCEEDED"), &json!("Billing here."), &json!("billing")),
        "{run}"
    );
    let requests = model.requests();
    let texts = contents(requests[2].messages());
    assert_eq!(&texts[..2], ["You are billing.", "My invoice is wrong."], "{texts:?}");
    assert!(texts.iter().any(|text| text.ends_with(r#"{"assistant":"billing"}"#)), "{texts:?}");
    assert!(texts.last().unwrap().contains("to you, billing."), "{texts:?}");
    let mut events = api.follow(&format!("{path}/events"), None).await;
    let handoff = events.wait_for("run.handoff").await.data;
    assert_eq!((&handoff["to"], &handoff["passed"]), (&json!("billing"), &json!(3)), "{handoff}");
}

#[tokio::test]
async fn chat_completions_hand_off_after_a_late_approval_too() {
    let (server, model) = start_with_agents([
        tool_call_reply("c1", "transfer_to_billing", &json!({})),
        text_reply("I wait."),
        text_reply("Billing here."),
    ])
    .await;
    let ask = json!({ "verdict": "ask", "tools": ["handoff.*"] });
    server.operator().put("/v1/rules/ask", ask).await.is(200);
    let mut body = front_desk_question();
    body["toolcrib"] = json!({ "wait_ms": 30_000, "policy": { "wait_ms": 100 } });
    let (api, decided) = (server.api(), async {
        until("the second request", || async { (model.requests().len() == 2).then_some(()) }).await;
        approve_handoff(&server).await;
    });
    let (chat, ()) = tokio::join!(api.post("/v1/chat/completions", body), decided);
    let chat = chat.is(200);
    assert_eq!(chat["toolcrib"]["handoffs"][0]["to"], "billing", "{chat}");
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.ends_with("Billing here."), "{chat}");
    assert_eq!(contents(model.requests()[2].messages())[0], "You are billing.");
}
