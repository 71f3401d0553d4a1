//! Tests of the ends of runs: results that terminate a run, that suspend it, and `run.finish`.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::calls::Until;
use toolcrib::domain::run::options::{ExecutionOptions, RunOptions};
use toolcrib::domain::run::progress::{Conversation, FinalAnswer};
use toolcrib::domain::run::{JournalKind, Run, RunStatus};
use toolcrib::domain::utp::AfterExecution;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::runs::RunRequest;
use toolcrib::runs::agent_loop::StepOutcome;
use toolcrib::{Caller, Engine, Fault, FnTool};

use crate::script::{Script, SingleModel};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Any {
    #[serde(default)]
    result: Value,
}

/// Returns its argument.
fn echo(name: &str) -> FnTool {
    FnTool::new(
        name,
        "Returns its argument",
        |args: Any| async move { Ok::<Value, Fault>(args.result) },
    )
}

fn caller() -> Caller {
    Caller::local("default")
}

fn builder(model: Arc<Script>) -> toolcrib::engine::EngineBuilder {
    let broken = FnTool::new("desk.broken", "Fails", |_: Any| async {
        Err::<Value, Fault>(Fault::runtime("the drawer is stuck").retryable(false))
    });
    Engine::builder()
        .models(Arc::new(SingleModel(model)))
        .tool(echo("desk.look"))
        .tool(echo("desk.close").after_execution(AfterExecution::Terminate))
        .tool(echo("desk.later").background())
        .tool(broken.after_execution(AfterExecution::Terminate))
        .with_run_finish_tool()
}

fn new_run() -> RunRequest {
    let messages = vec![json!({ "role": "user", "content": "Close the desk" })];
    RunRequest { model: "scripted".into(), messages, ..RunRequest::default() }
}

async fn run_to_end(engine: &Engine) -> Run {
    let started = engine.runs().start_run(&caller(), new_run()).await.unwrap();
    engine.runs().wait_for_run(&caller(), &started.run.id, 30_000).await.unwrap()
}

async fn answer_of(script: Script) -> (FinalAnswer, Conversation) {
    let engine = builder(Arc::default()).start().await.unwrap();
    let mut conversation = Conversation::from_user_text("Close the desk");
    let options = RunOptions::new("scripted", "run_1");
    let runs = engine.runs();
    let next = runs.run_agent_loop(&caller(), &script, &options, &mut conversation).await.unwrap();
    match next {
        StepOutcome::Answered(answer) => (answer, conversation),
        other => panic!("{other:?}"),
    }
}

fn control(word: &str) -> String {
    json!({ "result": { "n": 1, "__cg_control": { "after_execution": word } } }).to_string()
}

#[tokio::test]
async fn a_terminating_result_is_the_answer_without_another_request() {
    // The script panics at a second request.
    let script = Script::default().calls(&[
        ("c1", "desk__look", r#"{"result":1}"#),
        ("c2", "desk__close", r#"{"result":"Closed."}"#),
    ]);
    let (answer, conversation) = answer_of(script).await;
    let by = answer.terminated_by.unwrap();
    assert_eq!((answer.text.as_str(), by.name.as_str()), ("Closed.", "desk.close"));
    let roles: Vec<&str> =
        conversation.messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant"]);
}

#[tokio::test]
async fn a_result_overrides_its_definition() {
    let ends = Script::default().calls(&[("c1", "desk__look", &control(" terminate "))]);
    let (answer, _) = answer_of(ends).await;
    assert_eq!(answer.text, r#"{"n":1}"#, "the control field is no part of the answer");
    for (tool, word) in [("desk__close", "suspend"), ("desk__look", "stop")] {
        let continues = Script::default().calls(&[("c1", tool, &control(word))]).says("Go on.");
        let (answer, _) = answer_of(continues).await;
        assert_eq!((answer.text.as_str(), answer.terminated_by), ("Go on.", None), "{word}");
    }
}

#[tokio::test]
async fn calls_of_the_caller_beside_a_terminating_result_are_answered() {
    let engine = builder(Arc::default()).start().await.unwrap();
    let script = Script::default()
        .calls(&[("c1", "mine", "{}"), ("c2", "desk__close", r#"{"result":"Closed."}"#)])
        .says("It was closed.");
    let mine = json!({ "type": "function", "function": { "name": "mine" } });
    let options = RunOptions { caller_tools: vec![mine], ..RunOptions::new("scripted", "run_1") };
    let mut conversation = Conversation::from_user_text("Close the desk");
    let runs = engine.runs();
    let next = runs.run_agent_loop(&caller(), &script, &options, &mut conversation).await.unwrap();
    let StepOutcome::Answered(answer) = next else { panic!("{next:?}") };
    assert_eq!(answer.text, "Closed.");
    let mut messages = conversation.messages.iter();
    let mine = messages.find(|message| message["tool_call_id"] == "c1").unwrap();
    assert!(mine["content"].as_str().unwrap().contains("desk__close ended the run"), "{mine}");
    // The conversation can be continued: every call has its answer.
    conversation.add_user_messages(vec![json!({ "role": "user", "content": "Was it closed?" })]);
    let next = runs.run_agent_loop(&caller(), &script, &options, &mut conversation).await.unwrap();
    assert!(matches!(next, StepOutcome::Answered(answer) if answer.text == "It was closed."));
}

#[tokio::test]
async fn a_run_ends_with_the_card_of_the_terminating_result() {
    let script = Script::default().calls(&[("c1", "desk__close", r#"{"result":{"keys":2}}"#)]);
    let engine = builder(Arc::new(script)).start().await.unwrap();
    let run = run_to_end(&engine).await;
    assert_eq!(run.status, RunStatus::Succeeded, "{run:?}");
    assert_eq!(run.answer.as_ref().unwrap().text, r#"{"keys":2}"#);
    let card_id = run.deliverable_card_id.unwrap();
    let card = engine.utp().cards().card(&caller(), &card_id).await.unwrap();
    assert_eq!(card.content["result"], json!({ "keys": 2 }));
    assert_eq!(card.content["after_execution"], "terminate");
    let journal = engine.runs().streams().journal(&caller(), &run.id).await.unwrap();
    let kinds: Vec<JournalKind> = journal.iter().map(|entry| entry.record.kind).collect();
    let expected = [
        JournalKind::Created,
        JournalKind::Replied,
        JournalKind::ToolResults,
        JournalKind::Finished,
    ];
    assert_eq!(kinds, expected);
    assert_eq!(journal[2].record.data["calls"][0]["after_execution"], "terminate");
    assert_eq!(journal[3].record.data["deliverable_card_id"], card_id);
}

#[tokio::test]
async fn an_answer_in_text_is_a_deliverable_too() {
    let script = Script::default().says("It is closed.").says("It is open.");
    let engine = builder(Arc::new(script)).start().await.unwrap();
    let run = run_to_end(&engine).await;
    let first = run.deliverable_card_id.unwrap();
    let card = engine.utp().cards().card(&caller(), &first).await.unwrap();
    assert_eq!(
        (card.kind.as_str(), &card.content["text"]),
        ("task.deliverable", &json!("It is closed."))
    );
    assert_eq!(card.turn_id(), Some(run.id.as_str()));
    // The run continues and ends with another one; the first stays.
    let more = vec![json!({ "role": "user", "content": "Open it" })];
    let reopened = engine.runs().add_run_messages(&caller(), &run.id, more).await.unwrap();
    assert_eq!(reopened.deliverable_card_id, None);
    let run = engine.runs().wait_for_run(&caller(), &run.id, 30_000).await.unwrap();
    assert_ne!(run.deliverable_card_id.as_ref(), Some(&first));
    engine.utp().cards().card(&caller(), &first).await.unwrap();
}

#[tokio::test]
async fn a_terminating_call_that_fails_fails_the_run_which_can_be_resumed() {
    let script = Script::default().calls(&[("c1", "desk__broken", "{}")]).says("It is stuck.");
    let engine = builder(Arc::new(script)).start().await.unwrap();
    let run = run_to_end(&engine).await;
    assert_eq!((run.status, &run.answer), (RunStatus::Failed, &None), "{run:?}");
    let error = run.error.unwrap();
    assert!(error.message.contains("the drawer is stuck"), "{error:?}");
    assert!(run.deliverable_card_id.is_some());
    engine.runs().resume_run(&caller(), &run.id).await.unwrap();
    let run = engine.runs().wait_for_run(&caller(), &run.id, 30_000).await.unwrap();
    assert_eq!(run.answer.unwrap().text, "It is stuck.");
}

#[tokio::test]
async fn a_refused_call_of_a_terminating_tool_goes_back_to_the_model() {
    let script = Script::default().calls(&[("c1", "desk__close", r#"{"result":"#)]).calls(&[(
        "c2",
        "desk__close",
        r#"{"result":"Closed."}"#,
    )]);
    assert_eq!(answer_of(script).await.0.text, "Closed.");
}

#[tokio::test]
async fn a_late_terminating_result_ends_the_run_without_another_request() {
    let script = Arc::new(
        Script::default()
            .calls(&[("c1", "desk__later", &control("terminate"))])
            .says("I wait for it."),
    );
    let engine = builder(script.clone()).start().await.unwrap();
    let run = run_to_end(&engine).await;
    assert_eq!(run.status, RunStatus::Succeeded, "{run:?}");
    let answer = run.answer.unwrap();
    let text = answer.text.as_str();
    assert_eq!((text, answer.terminated_by.unwrap().name.as_str()), (r#"{"n":1}"#, "desk.later"));
    // The result may arrive before the second request, which is then not sent.
    assert!(run.progress.steps <= 2);
}

#[tokio::test]
async fn a_suspending_call_is_waited_for_beyond_the_wait_of_a_step() {
    let release = Arc::new(tokio::sync::Notify::new());
    let gate = release.clone();
    let slow = FnTool::new("desk.slow", "Waits", move |args: Any| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok::<Value, Fault>(args.result)
        }
    });
    let script = Arc::new(
        Script::default().calls(&[("c1", "desk__slow", r#"{"result":7}"#)]).says("It is 7."),
    );
    let limits = toolcrib::EngineLimits { max_wait_ms: 50, ..Default::default() };
    let engine = builder(script.clone())
        .tool(slow.after_execution(AfterExecution::Suspend))
        .limits(limits)
        .start()
        .await
        .unwrap();
    let started = engine.runs().start_run(&caller(), new_run()).await.unwrap();
    let id = started.run.id;
    let waiting = loop {
        let run = engine.runs().wait_for_run(&caller(), &id, 50).await.unwrap();
        assert!(!run.status.is_terminal(), "{run:?}");
        if run.status == RunStatus::Waiting {
            break run;
        }
    };
    assert!(waiting.progress.pending_calls[0].suspends);
    assert_eq!(waiting.progress.steps, 1, "no request while the call runs");
    release.notify_one();
    let call = &waiting.progress.pending_calls[0].tool_call_id;
    let call = engine.calls().call(&caller(), call).await.unwrap();
    assert!(!call.status.is_terminal());
    let run = loop {
        let run = engine.runs().wait_for_run(&caller(), &id, 50).await.unwrap();
        if run.status.is_terminal() {
            break run;
        }
    };
    assert_eq!(run.answer.unwrap().text, "It is 7.");
    let last = script.request(1).messages.last().unwrap().clone();
    assert!(last["content"].as_str().unwrap().contains("has come:\n7"), "{last}");
}

#[tokio::test]
async fn a_run_that_sets_its_own_wait_is_not_suspended() {
    let slow = FnTool::new("desk.slow", "Never ends", |_: Any| async {
        std::future::pending::<()>().await;
        Ok::<Value, Fault>(Value::Null)
    });
    let script = Script::default().calls(&[("c1", "desk__slow", "{}")]).calls(&[(
        "c2",
        "desk__close",
        r#"{"result":"Closed."}"#,
    )]);
    let engine = builder(Arc::new(script))
        .tool(slow.after_execution(AfterExecution::Suspend))
        .start()
        .await
        .unwrap();
    let execution_options = ExecutionOptions { wait_ms: Some(20), ..ExecutionOptions::default() };
    let request = RunRequest { execution_options, ..new_run() };
    let started = engine.runs().start_run(&caller(), request).await.unwrap();
    let run = engine.runs().wait_for_run(&caller(), &started.run.id, 30_000).await.unwrap();
    assert_eq!(run.answer.unwrap().text, "Closed.");
}

#[tokio::test]
async fn a_model_ends_its_run_with_run_finish() {
    let script = Arc::new(
        Script::default()
            .calls(&[("c1", "run__finish", r#"{"answer":" "}"#), ("c2", "run__finish", "{}")])
            .calls(&[("c3", "run__finish", r#"{"answer":"Done.","result_fields":{"keys":2}}"#)]),
    );
    let engine = builder(script.clone()).start().await.unwrap();
    let run = run_to_end(&engine).await;
    let answer = run.answer.unwrap();
    assert_eq!((run.status, answer.text.as_str()), (RunStatus::Succeeded, "Done."));
    let by = answer.terminated_by.unwrap();
    assert_eq!((by.name.as_str(), by.result_fields), ("run.finish", Some(json!({ "keys": 2 }))));
    let card = engine.utp().cards().card(&caller(), &by.card_id).await.unwrap();
    assert_eq!(card.content["result"]["answer"], "Done.");
    let corrected = script.request(1);
    let texts: Vec<&str> =
        corrected.messages.iter().filter_map(|message| message["content"].as_str()).collect();
    assert!(texts.iter().any(|text| text.contains("give the final answer")), "{texts:?}");
    // Runs offer it; lists of tools do not show it.
    let names: Vec<Value> =
        corrected.tools.iter().map(|tool| tool.to_value()["function"]["name"].clone()).collect();
    assert!(names.contains(&json!("run__finish")), "{names:?}");
    let listed = engine.registry().tools(&caller());
    assert!(listed.iter().all(|entry| entry.definition.name != "run.finish"));
}

#[tokio::test]
async fn only_a_stored_run_without_tools_is_offered_run_finish() {
    let script = Arc::new(Script::default().says("Hello.").says("Hello again."));
    let engine = builder(script.clone()).start().await.unwrap();
    let request = RunRequest { tools: Some(Vec::new()), ..new_run() };
    let started = engine.runs().start_run(&caller(), request).await.unwrap();
    engine.runs().wait_for_run(&caller(), &started.run.id, 30_000).await.unwrap();
    let offered = script.request(0).tools;
    assert_eq!(offered.len(), 1, "{offered:?}");
    assert_eq!(offered[0].to_value()["function"]["name"], "run__finish");
    // A caller that passes its conversation through gets no tool that it has not requested.
    let options = RunOptions { tools: Some(Vec::new()), ..RunOptions::new("scripted", "r") };
    let mut conversation = Conversation::from_user_text("Hello");
    let runs = engine.runs();
    runs.run_agent_loop(&caller(), script.as_ref(), &options, &mut conversation).await.unwrap();
    assert!(script.request(1).tools.is_empty());
}

#[tokio::test]
async fn a_run_whose_process_ended_after_the_terminating_result_ends_with_it() {
    let store = Arc::new(MemoryStore::default());
    let script = Script::default().calls(&[("c1", "desk__close", r#"{"result":"Closed."}"#)]);
    let engine = builder(Arc::new(script)).store(store.clone()).start().await.unwrap();
    let run = run_to_end(&engine).await;
    engine.shut_down(Duration::ZERO).await;
    // The run as it is stored between the result and the end.
    let mut open = store.runs().run("default", &run.id).await.unwrap().unwrap();
    let journal = store.runs().journal("default", &run.id).await.unwrap();
    open.id = "run_00000000000000000000000000".into();
    open.options.run_id.clone_from(&run.id);
    open.options.idempotency_prefix = Some(run.id.clone());
    (open.status, open.ended_ms, open.answer) = (RunStatus::Running, None, None);
    (open.deliverable_card_id, open.version) = (None, 1);
    open.progress.pending_reply = serde_json::from_value(journal[1].record.data.clone()).unwrap();
    (open.progress.steps, open.progress.calls) = (1, 0);
    let created = journal.into_iter().map(|entry| entry.record).take(1).collect();
    store.runs().create_run(open.clone(), None, created, None).await.unwrap();
    // A model that is requested again panics; the tool is gone, too.
    let engine = Engine::builder()
        .models(Arc::new(SingleModel(Arc::new(Script::default()))))
        .tool(echo("desk.look"))
        .store(store)
        .start()
        .await
        .unwrap();
    let ended = engine.runs().wait_for_run(&caller(), &open.id, 30_000).await.unwrap();
    assert_eq!(ended.status, RunStatus::Succeeded, "{ended:?}");
    assert_eq!(ended.answer.unwrap().text, "Closed.");
    assert_eq!(ended.deliverable_card_id, run.deliverable_card_id);
}

#[tokio::test]
async fn batches_and_calls_state_the_effect_of_each_result() {
    let engine = builder(Arc::default()).start().await.unwrap();
    let entry = |tool: &str, args: &str| {
        toolcrib::Json::parse(&format!(r#"{{"name":"{tool}","args":{args}}}"#)).unwrap()
    };
    let entries = vec![
        entry("desk.look", r#"{"result":1}"#),
        entry("desk.close", r#"{"result":1}"#),
        entry("desk.look", &control("terminate")),
        entry("desk.close", &control("suspend")),
        entry("desk.broken", "{}"),
        entry("desk.unknown", "{}"),
    ];
    let batch = toolcrib::Batch::new("run_1", entries);
    let answer = engine.calls().run_batch(&caller(), batch).await.unwrap();
    let effects: Vec<Option<AfterExecution>> =
        answer.results.iter().map(|entry| entry.after_execution()).collect();
    let (suspend, terminate) = (Some(AfterExecution::Suspend), Some(AfterExecution::Terminate));
    assert_eq!(effects, [suspend, terminate, terminate, suspend, terminate, None]);
    let mut request = toolcrib::CallRequest::new("desk.later", "{}").unwrap();
    request.run_id = "run_1".into();
    let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
    let ended = engine.calls().wait(&caller(), &ticket, Until::Ended).await.unwrap();
    assert_eq!(AfterExecution::from_call(&ended), suspend);
}
