//! The agent loop and the OpenAI form: a run waits for a person and goes on.

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply};

use super::Fixture;
use crate::support::{Server, until};

async fn start_with_model(
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Fixture, ScriptedModel) {
    start_with_wait(300, replies).await
}

/// Starts a server that waits this long for the calls of a step.
async fn start_with_wait(
    max_wait_ms: u64,
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Fixture, ScriptedModel) {
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
        config.limits.max_wait_ms = max_wait_ms;
    })
    .await;
    (Fixture::on(server).await, model)
}

fn send_mail() -> ScriptedBehavior {
    tool_call_reply("call_0", "mail__send", &json!({ "to": "ada" }))
}

async fn pending(fixture: &Fixture) -> String {
    until("an approval", || async {
        let list = fixture.operator.get("/v1/approvals?status=pending").await.is(200);
        list["approvals"][0]["approval_id"].as_str().map(str::to_owned)
    })
    .await
}

async fn until_run(fixture: &Fixture, id: &str, status: &str) -> Value {
    until(&format!("the run to be {status}"), || async {
        let run = fixture.api.get(&format!("/v1/runs/{id}")).await.is(200);
        (run["status"] == status).then_some(run)
    })
    .await
}

#[tokio::test]
async fn a_run_waits_for_the_person_and_goes_on_after_a_restart() {
    let replies = [send_mail(), text_reply("I asked."), text_reply("It was sent.")];
    let (fixture, model) = start_with_model(replies).await;
    let question = json!({ "messages": [{ "role": "user", "content": "Send it" }] });
    let run = fixture.api.post("/v1/runs", question).await;
    let id = run.body["run_id"].as_str().unwrap_or_else(|| panic!("{:?}", run.body)).to_owned();
    until_run(&fixture, &id, "WAITING").await;
    let content = model.requests()[1].last_content();
    assert!(content.contains("approval"), "the model knows why: {content}");
    let server = fixture.server.restart().await;
    let (api, operator) = (server.api(), server.operator());
    let fixture = Fixture { server, api, operator };
    until_run(&fixture, &id, "WAITING").await;
    let approval = pending(&fixture).await;
    fixture.approve(&approval).await;
    fixture.execute(json!("sent to ada")).await;
    let run = until_run(&fixture, &id, "SUCCEEDED").await;
    assert_eq!(run["answer"], "It was sent.", "{run}");
    assert!(model.requests()[2].last_content().contains("sent to ada"));
}

#[tokio::test]
async fn a_rejection_reaches_the_model() {
    let replies = [send_mail(), text_reply("I asked."), text_reply("I may not.")];
    let (fixture, model) = start_with_model(replies).await;
    let question = json!({ "messages": [{ "role": "user", "content": "Send it" }] });
    let run = fixture.api.post("/v1/runs", question).await;
    let id = run.body["run_id"].as_str().unwrap().to_owned();
    let approval = pending(&fixture).await;
    until_run(&fixture, &id, "WAITING").await;
    let decision = json!({ "approval_id": approval, "verdict": "reject", "reason": "not to ada" });
    fixture.decide(decision).await;
    until_run(&fixture, &id, "SUCCEEDED").await;
    let content = model.requests()[2].last_content();
    assert!(content.contains("not to ada"), "{content}");
}

#[tokio::test]
async fn a_chat_completion_goes_on_within_its_wait_and_names_the_approval_otherwise() {
    let question = |wait_ms: u64| {
        json!({
            "model": "large-1", "messages": [{ "role": "user", "content": "Send it" }],
            "toolcrib": { "wait_ms": wait_ms },
        })
    };
    let replies = [send_mail(), text_reply("It was sent.")];
    let (fixture, _model) = start_with_wait(60_000, replies).await;
    let (api, body) = (fixture.api.clone(), question(30_000));
    let chat = tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) });
    let approval = pending(&fixture).await;
    fixture.approve(&approval).await;
    fixture.execute(json!("sent")).await;
    let answer = chat.await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "It was sent.", "{answer}");
    let (fixture, _model) = start_with_model([send_mail(), text_reply("It waits.")]).await;
    let open = fixture.api.post("/v1/chat/completions", question(200)).await.is(200);
    assert_eq!(open["choices"][0]["message"]["content"], "It waits.", "{open}");
    let waiting = pending(&fixture).await;
    assert_eq!(open["toolcrib"]["tool_calls"][0]["approval_id"], json!(waiting), "{open}");
}
