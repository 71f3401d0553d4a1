//! Tests of stored runs: restart, sleep, wakeup, cancel and resume.

mod hazards;
mod news;
mod replays;
mod restart;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::run::{JournalKind, Run, RunEvent, RunStatus};
use toolcrib::engine::{RunDelta, RunQuery, RunRequest};
use toolcrib::ports::model::{DeltaListener, Model, ModelError, ModelReply, ModelRequest};
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::runs::agent_loop::{ModelRequestPolicy, StopReason};
use toolcrib::{Caller, Code, Effect, Engine, FnTool, Status};

use crate::script::{Only, Script};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Add {
    a: i64,
    b: i64,
}

const SUM: &str = r#"{"a":20,"b":22}"#;

fn me() -> Caller {
    Caller::local("default")
}

/// An engine over a store that outlives it, with a tool that counts its executions.
struct Site {
    store: Arc<MemoryStore>,
    made: Arc<AtomicUsize>,
}

impl Site {
    fn new() -> Self {
        Self { store: Arc::default(), made: Arc::default() }
    }

    async fn engine(&self, model: Arc<dyn Model>) -> Engine {
        let made = self.made.clone();
        let add = FnTool::new("calc.add", "Adds two integers", move |args: Add| {
            made.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<i64, String>(args.a + args.b) }
        });
        let builder = Engine::builder().store(self.store.clone()).models(Arc::new(Only(model)));
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

async fn ended(engine: &Engine, run_id: &str) -> Run {
    engine.wait_for_run(&me(), run_id, 30_000).await.unwrap()
}

async fn messages(engine: &Engine, run_id: &str) -> Vec<Value> {
    let journal = engine.run_journal(&me(), run_id).await.unwrap();
    journal.into_iter().flat_map(|noted| noted.record.messages).collect()
}

/// A model that waits before each reply until the test sends a message.
struct Gated {
    script: Script,
    waiting: Mutex<Vec<oneshot::Receiver<()>>>,
    asked: tokio::sync::Notify,
}

#[async_trait]
impl Model for Gated {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let turn = self.waiting.lock().pop();
        self.asked.notify_one();
        if let Some(turn) = turn {
            // If the test dropped the sender, the reply never comes.
            if turn.await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        self.script.reply(prompt, listener).await
    }
}

#[tokio::test]
async fn a_run_is_stored_step_by_step_to_its_answer() {
    let site = Site::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("It is 42.");
    let engine = site.engine(Arc::new(script)).await;
    let new = RunRequest { subscribes: true, ..new_run("How much?") };
    let mut started = engine.start_run(&me(), new).await.unwrap();
    let id = started.run.id.clone();
    assert!(id.starts_with("run_") && started.run.status == RunStatus::Running);
    let run = ended(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Succeeded);
    assert_eq!(run.answer.unwrap().text, "It is 42.");
    assert_eq!((run.progress.steps, run.progress.calls), (2, 1));
    let said = messages(&engine, &id).await;
    let roles: Vec<&str> = said.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    assert_eq!(said[2]["content"], "42");
    let mut live = Vec::new();
    while let Some(note) = started.subscription.try_next() {
        live.push(note);
    }
    assert!(live.contains(&RunDelta::RequestStarted { step: 1, last: false }), "{live:?}");
    assert!(live.contains(&RunDelta::Text { step: 2, text: "It is 42.".into() }), "{live:?}");
}

#[tokio::test]
async fn what_happens_in_a_run_and_to_its_calls_is_one_story() {
    let site = Site::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("It is 42.");
    let engine = site.engine(Arc::new(script)).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    let (mut after, mut story) = (0, Vec::new());
    loop {
        let happened = engine.run_events(&me(), &id, after, 2).await.unwrap();
        let Some(last) = happened.last() else { break };
        after = last.number();
        story.extend(happened.into_iter().map(|happened| match happened {
            RunEvent::Run(noted) => noted.record.kind.as_str(),
            RunEvent::Call(event) => event.record.kind.as_str(),
        }));
    }
    assert_eq!(
        story,
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
async fn a_model_that_is_down_fails_the_run_which_goes_on_when_resumed() {
    let site = Site::new();
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .fails(true, None)
        .fails(true, None)
        .says("Back again: 42.");
    let engine = site.engine(Arc::new(script)).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    let run = ended(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    let error = run.error.unwrap();
    assert_eq!(error.code, "UPSTREAM_UNAVAILABLE");
    assert!(error.message.contains("asked 2 times"), "{error:?}");
    assert_eq!(messages(&engine, &id).await.len(), 3, "everything so far is kept");
    engine.resume_run(&me(), &id).await.unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "Back again: 42.");
    assert_eq!(site.made.load(Ordering::SeqCst), 1);
    let again = engine.resume_run(&me(), &id).await.unwrap_err();
    assert_eq!(again.code(), Code::Conflict);

    let unknown = RunRequest { model: "nobody".into(), ..new_run("?") };
    let id = engine.start_run(&me(), unknown).await.unwrap().run.id;
    let error = ended(&engine, &id).await.error.unwrap();
    assert_eq!(error.code, "UPSTREAM_UNAVAILABLE");
    assert!(error.message.contains("there are: scripted"), "{error:?}");
}

#[tokio::test]
async fn the_user_speaks_again_and_the_run_goes_on() {
    let site = Site::new();
    let script = Arc::new(Script::default().says("Hello.").says("It is Tuesday."));
    let engine = site.engine(script.clone()).await;
    let id = engine.start_run(&me(), new_run("Hi")).await.unwrap().run.id;
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "Hello.");
    let more = vec![json!({ "role": "user", "content": "Which day is it?" })];
    let run = engine.add_run_messages(&me(), &id, more).await.unwrap();
    assert_eq!(run.status, RunStatus::Running);
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "It is Tuesday.");
    let told = script.asked(1).messages;
    let texts: Vec<&Value> = told.iter().map(|message| &message["content"]).collect();
    assert_eq!(texts, ["Hi", "Hello.", "Which day is it?"]);
    let nonsense = engine.add_run_messages(&me(), &id, vec![json!("hi")]).await.unwrap_err();
    assert_eq!(nonsense.code(), Code::ValidationError);
}

#[tokio::test]
async fn who_speaks_while_the_model_answers_is_heard() {
    let site = Site::new();
    let (go, turn) = oneshot::channel();
    let gated = Arc::new(Gated {
        script: Script::default().says("First.").says("Second."),
        waiting: Mutex::new(vec![turn]),
        asked: tokio::sync::Notify::new(),
    });
    let engine = site.engine(gated.clone()).await;
    let id = engine.start_run(&me(), new_run("one")).await.unwrap().run.id;
    gated.asked.notified().await;
    let more = vec![json!({ "role": "user", "content": "two" })];
    engine.add_run_messages(&me(), &id, more).await.unwrap();
    go.send(()).unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "Second.");
    let told = gated.script.asked(1).messages;
    let texts: Vec<&Value> = told.iter().map(|message| &message["content"]).collect();
    assert_eq!(texts, ["one", "First.", "two"]);
}

#[tokio::test]
async fn a_canceled_run_and_its_calls_end_and_it_can_be_taken_up_again() {
    let started = Arc::new(tokio::sync::Notify::new());
    let begun = started.clone();
    let hang = FnTool::new("calc.hang", "Hangs", move |_: Add| {
        begun.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    let script = Script::default().calls(&[("c1", "calc__hang", SUM)]).says("It was canceled.");
    let models = Arc::new(Only(Arc::new(script)));
    let engine = Engine::builder().models(models).tool(hang).start().await.unwrap();
    let id = engine.start_run(&me(), new_run("?")).await.unwrap().run.id;
    started.notified().await;
    let run = engine.cancel_run(&me(), &id, Some("enough".into())).await.unwrap();
    assert_eq!(run.status, RunStatus::Canceled);
    let query =
        toolcrib::engine::CallQuery { run_id: Some(id.clone()), limit: 10, ..Default::default() };
    let calls = engine.calls(&me(), query).await.unwrap().calls;
    assert_eq!(calls[0].status, Status::Canceled);
    assert_eq!(engine.cancel_run(&me(), &id, None).await.unwrap().status, RunStatus::Canceled);
    engine.resume_run(&me(), &id).await.unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "It was canceled.");
    assert_eq!(engine.cancel_run(&me(), &id, None).await.unwrap_err().code(), Code::Conflict);
}

#[tokio::test]
async fn a_key_makes_one_run_and_projects_do_not_see_each_others() {
    let site = Site::new();
    let engine = site.engine(Arc::new(Script::default().says("once"))).await;
    let keyed = || RunRequest { idempotency_key: Some("k".into()), ..new_run("hi") };
    let first = engine.start_run(&me(), keyed()).await.unwrap();
    let second = engine.start_run(&me(), keyed()).await.unwrap();
    assert!(second.replayed && second.run.id == first.run.id);
    let other = RunRequest { idempotency_key: Some("k".into()), ..new_run("something else") };
    let refused = engine.start_run(&me(), other).await.err().unwrap();
    assert_eq!(refused.code(), Code::IdempotencyMismatch);
    let id = first.run.id;
    ended(&engine, &id).await;
    let stranger = Caller::local("other");
    assert_eq!(engine.find_run(&stranger, &id).await.unwrap_err().code(), Code::NotFound);
    let more = vec![json!({ "role": "user", "content": "x" })];
    let refused = engine.add_run_messages(&stranger, &id, more).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let query = || RunQuery { limit: 10, ..RunQuery::default() };
    assert!(engine.list_runs(&stranger, query()).await.unwrap().runs.is_empty());
    assert_eq!(engine.list_runs(&me(), query()).await.unwrap().runs.len(), 1);
}

#[tokio::test]
async fn only_who_started_a_run_and_an_admin_may_go_on_with_it() {
    let site = Site::new();
    let engine = site.engine(Arc::new(Script::default().says("one").says("two"))).await;
    let id = engine.start_run(&me(), new_run("hi")).await.unwrap().run.id;
    ended(&engine, &id).await;
    let other =
        Caller { agent: "eve".into(), role: Role::Agent, auth_method: AuthMethod::Key, ..me() };
    let more = || vec![json!({ "role": "user", "content": "Send me the money." })];
    let refused = engine.add_run_messages(&other, &id, more()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let refused = engine.resume_run(&other, &id).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let admin = Caller { role: Role::Admin, ..other };
    engine.add_run_messages(&admin, &id, more()).await.unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "two");
}

#[tokio::test]
async fn nonsense_is_refused_by_its_name_and_nothing_is_stored() {
    let site = Site::new();
    let engine = site.engine(Arc::new(Script::default())).await;
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
        let error = engine.start_run(&me(), new).await.err().unwrap();
        assert_eq!(error.code(), Code::ValidationError, "{field}");
        assert!(error.to_string().contains(field), "{error}");
    }
    let query = RunQuery { limit: 10, ..RunQuery::default() };
    assert!(engine.list_runs(&me(), query).await.unwrap().runs.is_empty());
}

/// A model that panics.
struct Broken;

#[async_trait]
impl Model for Broken {
    async fn reply(
        &self,
        _: &ModelRequest,
        _: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        panic!("this model is broken")
    }
}

#[tokio::test]
async fn a_model_that_breaks_down_fails_its_run_and_nothing_else() {
    let site = Site::new();
    let engine = site.engine(Arc::new(Broken)).await;
    let id = engine.start_run(&me(), new_run("?")).await.unwrap().run.id;
    let run = ended(&engine, &id).await;
    assert_eq!((run.status, run.error.unwrap().code.as_str()), (RunStatus::Failed, "INTERNAL"));
}

#[tokio::test]
async fn limits_of_a_run_end_it_with_an_answer() {
    let site = Site::new();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("Only this far.");
    let engine = site.engine(Arc::new(script)).await;
    let mut new = new_run("?");
    new.limits.steps = 1;
    let id = engine.start_run(&me(), new).await.unwrap().run.id;
    let answer = ended(&engine, &id).await.answer.unwrap();
    assert_eq!(
        (answer.text.as_str(), answer.stop_reason),
        ("Only this far.", Some(StopReason::Steps))
    );
}
