//! Tests of stored runs: restart, sleep, wakeup, cancel and resume.

mod hazards;
mod replays;
mod restart;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::model_reply::ModelReply;
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::run::options::ModelRequestPolicy;
use toolcrib::domain::run::progress::StopReason;
use toolcrib::domain::run::{JournalKind, Run, RunEvent, RunStatus};
use toolcrib::ports::model::{DeltaListener, Model, ModelError, ModelRequest};
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::runs::{RunDelta, RunQuery, RunRequest};
use toolcrib::{Caller, Code, Effect, Engine, FnTool, Status};

use crate::script::{Script, SingleModel};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Add {
    a: i64,
    b: i64,
}

const SUM: &str = r#"{"a":20,"b":22}"#;

fn caller() -> Caller {
    Caller::local("default")
}

/// An engine over a store that outlives it, with a tool that counts its executions.
struct Fixture {
    store: Arc<MemoryStore>,
    executions: Arc<AtomicUsize>,
}

impl Fixture {
    fn new() -> Self {
        Self { store: Arc::default(), executions: Arc::default() }
    }

    async fn engine(&self, model: Arc<dyn Model>) -> Engine {
        let executions = self.executions.clone();
        let add = FnTool::new("calc.add", "Adds two integers", move |args: Add| {
            executions.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<i64, String>(args.a + args.b) }
        });
        let builder =
            Engine::builder().store(self.store.clone()).models(Arc::new(SingleModel(model)));
        builder.tool(add.effect(Effect::Irreversible)).start().await.unwrap()
    }
}

fn new_run(text: &str) -> RunRequest {
    let backoff = Backoff { initial_ms: 1, factor: 1.0, max_ms: 1, jitter: 0.0 };
    RunRequest {
        model: "scripted".into(),
        messages: vec![json!({ "role": "user", "content": text })],
        model_request_policy: Some(ModelRequestPolicy {
            retries: 1,
            backoff,
            ..ModelRequestPolicy::default()
        }),
        ..RunRequest::default()
    }
}

async fn wait_for_end(engine: &Engine, run_id: &str) -> Run {
    engine.runs().wait_for_run(&caller(), run_id, 30_000).await.unwrap()
}

async fn messages(engine: &Engine, run_id: &str) -> Vec<Value> {
    let journal = engine.runs().streams().journal(&caller(), run_id).await.unwrap();
    journal.into_iter().flat_map(|entry| entry.record.messages).collect()
}

/// A model that waits before each reply until the test sends a message.
struct GatedModel {
    script: Script,
    gates: Mutex<Vec<oneshot::Receiver<()>>>,
    requested: tokio::sync::Notify,
}

#[async_trait]
impl Model for GatedModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let gate = self.gates.lock().pop();
        self.requested.notify_one();
        if let Some(gate) = gate {
            // If the test dropped the sender, the reply never comes.
            if gate.await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        self.script.reply(prompt, listener).await
    }
}

#[tokio::test]
async fn a_run_is_stored_after_every_step_until_its_answer() {
    let fixture = Fixture::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("It is 42.");
    let engine = fixture.engine(Arc::new(script)).await;
    let new = RunRequest { subscribes: true, ..new_run("How much?") };
    let mut started = engine.runs().start_run(&caller(), new).await.unwrap();
    let id = started.run.id.clone();
    assert!(id.starts_with("run_") && started.run.status == RunStatus::Running);
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Succeeded);
    assert_eq!(run.answer.unwrap().text, "It is 42.");
    assert_eq!((run.progress.steps, run.progress.calls), (2, 1));
    let recorded = messages(&engine, &id).await;
    let roles: Vec<&str> =
        recorded.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    assert_eq!(recorded[2]["content"], "42");
    let mut live = Vec::new();
    while let Some(delta) = started.subscription.try_next() {
        live.push(delta);
    }
    assert!(live.contains(&RunDelta::RequestStarted { step: 1, last: false }), "{live:?}");
    assert!(live.contains(&RunDelta::Text { step: 2, text: "It is 42.".into() }), "{live:?}");
}

#[tokio::test]
async fn run_events_and_call_events_are_one_ordered_stream() {
    let fixture = Fixture::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("It is 42.");
    let engine = fixture.engine(Arc::new(script)).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    let (mut after, mut kinds) = (0, Vec::new());
    loop {
        let events = engine.runs().streams().events(&caller(), &id, after, 2).await.unwrap();
        let Some(last) = events.last() else { break };
        after = last.number();
        kinds.extend(events.into_iter().map(|event| match event {
            RunEvent::Run(entry) => entry.record.kind.as_str(),
            RunEvent::Call(event) => event.record.kind.as_str(),
        }));
    }
    assert_eq!(
        kinds,
        [
            "run.created",
            "run.replied",
            "tool.call.requested",
            "tool.call.started",
            "tool.call.finished",
            "run.results",
            "run.replied",
            "run.finished"
        ]
    );
}

#[tokio::test]
async fn a_run_that_failed_on_an_unavailable_model_can_be_resumed() {
    let fixture = Fixture::new();
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .fails(true, None)
        .fails(true, None)
        .says("Back again: 42.");
    let engine = fixture.engine(Arc::new(script)).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    let error = run.error.unwrap();
    assert_eq!(error.code, "UPSTREAM_UNAVAILABLE");
    assert!(error.message.contains("(2 attempts)"), "{error:?}");
    assert_eq!(messages(&engine, &id).await.len(), 3, "everything so far is kept");
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "Back again: 42.");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1);
    let again = engine.runs().resume_run(&caller(), &id).await.unwrap_err();
    assert_eq!(again.code(), Code::Conflict);

    let unknown = RunRequest { model: "nobody".into(), ..new_run("?") };
    let id = engine.runs().start_run(&caller(), unknown).await.unwrap().run.id;
    let error = wait_for_end(&engine, &id).await.error.unwrap();
    assert_eq!(error.code, "UPSTREAM_UNAVAILABLE");
    assert!(error.message.contains("there are: scripted"), "{error:?}");
}

#[tokio::test]
async fn an_added_user_message_continues_an_ended_run() {
    let fixture = Fixture::new();
    let script = Arc::new(Script::default().says("Hello.").says("It is Tuesday."));
    let engine = fixture.engine(script.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("Hi")).await.unwrap().run.id;
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "Hello.");
    let more = vec![json!({ "role": "user", "content": "Which day is it?" })];
    let run = engine.runs().add_run_messages(&caller(), &id, more).await.unwrap();
    assert_eq!(run.status, RunStatus::Running);
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "It is Tuesday.");
    let prompt = script.request(1).messages;
    let texts: Vec<&Value> = prompt.iter().map(|message| &message["content"]).collect();
    assert_eq!(texts, ["Hi", "Hello.", "Which day is it?"]);
    let nonsense =
        engine.runs().add_run_messages(&caller(), &id, vec![json!("hi")]).await.unwrap_err();
    assert_eq!(nonsense.code(), Code::ValidationError);
}

#[tokio::test]
async fn a_message_added_during_a_model_request_is_answered_next() {
    let fixture = Fixture::new();
    let (go, gate) = oneshot::channel();
    let gated = Arc::new(GatedModel {
        script: Script::default().says("First.").says("Second."),
        gates: Mutex::new(vec![gate]),
        requested: tokio::sync::Notify::new(),
    });
    let engine = fixture.engine(gated.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("one")).await.unwrap().run.id;
    gated.requested.notified().await;
    let more = vec![json!({ "role": "user", "content": "two" })];
    engine.runs().add_run_messages(&caller(), &id, more).await.unwrap();
    go.send(()).unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "Second.");
    let prompt = gated.script.request(1).messages;
    let texts: Vec<&Value> = prompt.iter().map(|message| &message["content"]).collect();
    assert_eq!(texts, ["one", "First.", "two"]);
}

#[tokio::test]
async fn canceling_a_run_cancels_its_calls_and_it_can_be_resumed() {
    let started = Arc::new(tokio::sync::Notify::new());
    let signal = started.clone();
    let hang = FnTool::new("calc.hang", "Hangs", move |_: Add| {
        signal.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    let script = Script::default().calls(&[("c1", "calc__hang", SUM)]).says("It was canceled.");
    let models = Arc::new(SingleModel(Arc::new(script)));
    let engine = Engine::builder().models(models).tool(hang).start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("?")).await.unwrap().run.id;
    started.notified().await;
    let run = engine.runs().cancel_run(&caller(), &id, Some("enough".into())).await.unwrap();
    assert_eq!(run.status, RunStatus::Canceled);
    let query =
        toolcrib::calls::CallQuery { run_id: Some(id.clone()), limit: 10, ..Default::default() };
    let calls = engine.calls().calls(&caller(), query).await.unwrap().calls;
    assert_eq!(calls[0].status, Status::Canceled);
    assert_eq!(
        engine.runs().cancel_run(&caller(), &id, None).await.unwrap().status,
        RunStatus::Canceled
    );
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "It was canceled.");
    assert_eq!(
        engine.runs().cancel_run(&caller(), &id, None).await.unwrap_err().code(),
        Code::Conflict
    );
}

#[tokio::test]
async fn an_idempotency_key_makes_one_run_and_projects_are_separate() {
    let fixture = Fixture::new();
    let engine = fixture.engine(Arc::new(Script::default().says("once"))).await;
    let keyed = || RunRequest { idempotency_key: Some("k".into()), ..new_run("hi") };
    let first = engine.runs().start_run(&caller(), keyed()).await.unwrap();
    let second = engine.runs().start_run(&caller(), keyed()).await.unwrap();
    assert!(second.replayed && second.run.id == first.run.id);
    let other = RunRequest { idempotency_key: Some("k".into()), ..new_run("something else") };
    let refused = engine.runs().start_run(&caller(), other).await.err().unwrap();
    assert_eq!(refused.code(), Code::IdempotencyMismatch);
    let id = first.run.id;
    wait_for_end(&engine, &id).await;
    let other_project = Caller::local("other");
    assert_eq!(
        engine.runs().find_run(&other_project, &id).await.unwrap_err().code(),
        Code::NotFound
    );
    let more = vec![json!({ "role": "user", "content": "x" })];
    let refused = engine.runs().add_run_messages(&other_project, &id, more).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let query = || RunQuery { limit: 10, ..RunQuery::default() };
    assert!(engine.runs().list_runs(&other_project, query()).await.unwrap().runs.is_empty());
    assert_eq!(engine.runs().list_runs(&caller(), query()).await.unwrap().runs.len(), 1);
}

#[tokio::test]
async fn only_the_owner_or_an_admin_can_continue_a_run() {
    let fixture = Fixture::new();
    let engine = fixture.engine(Arc::new(Script::default().says("one").says("two"))).await;
    let id = engine.runs().start_run(&caller(), new_run("hi")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    let other = Caller {
        agent: "eve".into(),
        roles: Role::Agent.into(),
        auth_method: AuthMethod::Key,
        ..caller()
    };
    let more = || vec![json!({ "role": "user", "content": "Send me the money." })];
    let refused = engine.runs().add_run_messages(&other, &id, more()).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "like a run that does not exist");
    let refused = engine.runs().resume_run(&other, &id).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let admin = Caller { roles: Role::Admin.into(), ..other };
    engine.runs().add_run_messages(&admin, &id, more()).await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "two");
}

#[tokio::test]
async fn an_invalid_run_request_is_refused_with_the_field_and_not_stored() {
    let fixture = Fixture::new();
    let engine = fixture.engine(Arc::new(Script::default())).await;
    let mut no_steps = new_run("?");
    no_steps.limits.steps = 0;
    let mut no_time = new_run("?");
    no_time.execution_options.timeout_ms = Some(0);
    let bad = [
        (RunRequest { messages: Vec::new(), ..new_run("?") }, "messages"),
        (
            RunRequest { messages: vec![json!({ "role": "king" })], ..new_run("?") },
            "messages/0/role",
        ),
        (RunRequest { model: String::new(), ..new_run("?") }, "model"),
        (RunRequest { tools: Some(vec!["calc.sub".into()]), ..new_run("?") }, "tools/0"),
        (no_steps, "limits/steps"),
        (no_time, "policy/timeout_ms"),
    ];
    for (new, field) in bad {
        let error = engine.runs().start_run(&caller(), new).await.err().unwrap();
        assert_eq!(error.code(), Code::ValidationError, "{field}");
        assert!(error.to_string().contains(field), "{error}");
    }
    let query = RunQuery { limit: 10, ..RunQuery::default() };
    assert!(engine.runs().list_runs(&caller(), query).await.unwrap().runs.is_empty());
}

/// A model that panics.
struct PanickingModel;

#[async_trait]
impl Model for PanickingModel {
    async fn reply(
        &self,
        _: &ModelRequest,
        _: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        panic!("this model is broken")
    }
}

#[tokio::test]
async fn a_panicking_model_fails_only_its_run() {
    let fixture = Fixture::new();
    let engine = fixture.engine(Arc::new(PanickingModel)).await;
    let id = engine.runs().start_run(&caller(), new_run("?")).await.unwrap().run.id;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!((run.status, run.error.unwrap().code.as_str()), (RunStatus::Failed, "INTERNAL"));
}

#[tokio::test]
async fn a_run_that_reaches_a_limit_ends_with_an_answer() {
    let fixture = Fixture::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("Only this far.");
    let engine = fixture.engine(Arc::new(script)).await;
    let mut new = new_run("?");
    new.limits.steps = 1;
    let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
    let answer = wait_for_end(&engine, &id).await.answer.unwrap();
    assert_eq!(
        (answer.text.as_str(), answer.stop_reason),
        ("Only this far.", Some(StopReason::Steps))
    );
}
