//! Tests of failures around a run: withdrawn tools, cancels midway, a time limit that passes during
//! a model request, and another caller of the same name.

use super::*;
use toolcrib::registry::{Credentials, NewKey};

fn counting_tool(name: &'static str, executions: &Arc<AtomicUsize>) -> FnTool {
    let executions = executions.clone();
    FnTool::new(name, "Adds", move |args: Add| {
        executions.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<i64, String>(args.a + args.b) }
    })
}

/// A tool that signals its start and never ends.
fn endless_tool(started: &Arc<tokio::sync::Notify>) -> FnTool {
    let started = started.clone();
    let endless_tool = FnTool::new("calc.wait", "Waits", move |_: Add| {
        started.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    endless_tool.effect(Effect::Idempotent)
}

fn contents(messages: &[Value]) -> Vec<String> {
    let results = messages.iter().filter(|message| message["role"] == "tool");
    results.map(|message| message["content"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn after_a_crash_a_missing_tool_does_not_lose_recorded_results() {
    let fixture = Fixture::new();
    let started = Arc::new(tokio::sync::Notify::new());
    let first = Arc::new(AtomicUsize::new(0));
    let calls = [("c1", "calc__first", SUM), ("c2", "calc__add", SUM), ("c3", "calc__wait", SUM)];
    let script = Script::default().calls(&calls);
    let builder = || Engine::builder().store(fixture.store.clone());
    let engine = builder()
        .models(Arc::new(SingleModel(Arc::new(script))))
        .tool(counting_tool("calc.first", &first))
        .tool(counting_tool("calc.add", &fixture.executions))
        .tool(endless_tool(&started))
        .start()
        .await
        .unwrap();
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    started.notified().await;
    engine.shut_down(Duration::ZERO).await;

    let wait = FnTool::new("calc.wait", "Waits", |_: Add| async { Ok::<i64, String>(7) });
    let script = Arc::new(Script::default().says("done"));
    let engine = builder()
        .models(Arc::new(SingleModel(script.clone())))
        .tool(counting_tool("calc.add", &fixture.executions))
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Succeeded);
    assert_eq!(contents(&script.request(0).messages), ["42", "42", "7"]);
    assert_eq!((first.load(Ordering::SeqCst), fixture.executions.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn calls_of_a_canceled_step_do_not_run_when_the_run_continues() {
    let fixture = Fixture::new();
    let started = Arc::new(tokio::sync::Notify::new());
    let calls = [("c1", "calc__wait", SUM), ("c2", "calc__add", SUM)];
    let script = Arc::new(Script::default().calls(&calls).says("Nothing was done."));
    let engine = Engine::builder()
        .store(fixture.store.clone())
        .models(Arc::new(SingleModel(script.clone())))
        .tool(counting_tool("calc.add", &fixture.executions))
        .tool(endless_tool(&started))
        .start()
        .await
        .unwrap();
    let id = engine.runs().start_run(&caller(), new_run("Pay both")).await.unwrap().run.id;
    started.notified().await;
    engine.runs().cancel_run(&caller(), &id, None).await.unwrap();
    let stop = vec![json!({ "role": "user", "content": "do not pay anything" })];
    engine.runs().add_run_messages(&caller(), &id, stop).await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Succeeded);
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 0, "the canceled call must not run");
    let prompt = script.request(1).messages;
    let results = contents(&prompt);
    assert!(
        results.len() == 2 && results.iter().all(|result| result.contains("CANCELED")),
        "{results:?}"
    );
    assert_eq!(prompt.last().unwrap()["content"], "do not pay anything");
}

/// A model that first fails this often, then hangs as long as the prompt has tools.
struct SlowModel {
    failures: AtomicUsize,
}

#[async_trait]
impl Model for SlowModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        _: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        if self.failures.load(Ordering::SeqCst) > 0 {
            self.failures.fetch_sub(1, Ordering::SeqCst);
            let fault = toolcrib::Fault::new(Code::UpstreamUnavailable, "the endpoint said 503");
            return Err(ModelError { fault, is_transient: true, retry_after: None });
        }
        if !prompt.tools.is_empty() {
            std::future::pending::<()>().await;
        }
        Ok(ModelReply { text: "There was no time.".into(), ..ModelReply::default() })
    }
}

#[tokio::test]
async fn a_time_limit_reached_during_a_model_request_is_not_a_failure() {
    // A retry is left; no retry is left; the last retry is in flight.
    for (retries, failures) in [(1, 0), (0, 0), (1, 1)] {
        let failures = AtomicUsize::new(failures);
        let engine = Fixture::new().engine(Arc::new(SlowModel { failures })).await;
        let mut new = new_run("Think!");
        new.limits.time_ms = 50;
        new.model_request_policy =
            new.model_request_policy.map(|policy| ModelRequestPolicy { retries, ..policy });
        let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
        let run = wait_for_end(&engine, &id).await;
        assert_eq!(run.status, RunStatus::Succeeded, "{retries}: {:?}", run.error);
        let answer = run.answer.unwrap();
        let ended_with = (answer.text.as_str(), answer.stop_reason);
        assert_eq!(ended_with, ("There was no time.", Some(StopReason::Time)), "{retries}");
    }
}

#[tokio::test]
async fn a_caller_of_the_same_name_but_a_lesser_role_cannot_continue_a_run() {
    let script = Script::default().says("Hello.").says("Again.");
    let engine = Fixture::new().engine(Arc::new(script)).await;
    let id = engine.runs().start_run(&caller(), new_run("Hello")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    let weaker = Caller { roles: Role::Agent.into(), auth_method: AuthMethod::Key, ..caller() };
    let more = vec![json!({ "role": "user", "content": "and now pay" })];
    let refused = engine.runs().add_run_messages(&weaker, &id, more.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let refused = engine.runs().resume_run(&weaker, &id).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    engine.runs().add_run_messages(&caller(), &id, more).await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "Again.");
}

#[tokio::test]
async fn repeated_call_ids_of_a_model_are_made_unique() {
    let identical_calls = [("call_1_1", "calc__add", SUM), ("call_1_1", "calc__add", SUM)];
    let script = Arc::new(Script::default().calls(&identical_calls).says("done"));
    let engine = Fixture::new().engine(script.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    let prompt = script.request(1).messages;
    let answered = prompt.iter().filter_map(|message| message["tool_call_id"].as_str());
    let ids: std::collections::HashSet<&str> = answered.collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
}

#[tokio::test]
async fn a_run_fails_when_its_api_key_is_revoked() {
    let fixture = Fixture::new();
    let (go, gate) = oneshot::channel();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("Again.");
    let requested = tokio::sync::Notify::new();
    let model = Arc::new(GatedModel { script, gates: Mutex::new(vec![gate]), requested });
    let engine = fixture.engine(model.clone()).await;
    let new_key = || NewKey::new("default", "ada", Role::Admin);
    let key = engine.admin().create_key(&caller(), new_key(), "x".repeat(40)).await.unwrap();
    let ada = engine
        .registry()
        .credentials()
        .authenticate(&Credentials::new(&"x".repeat(40)))
        .unwrap()
        .caller;
    let id = engine.runs().start_run(&ada, new_run("How much?")).await.unwrap().run.id;
    model.requested.notified().await;
    engine.admin().revoke_key(&caller(), &key.key.id).await.unwrap();
    go.send(()).unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    assert_eq!(run.error.unwrap().code, "UNAUTHENTICATED");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 0, "no call runs for a revoked key");
    engine.admin().create_key(&caller(), new_key(), "y".repeat(40)).await.unwrap();
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed, "another key of the agent does not replace it");
    // The holder of the other key resumes the run, which acts for that key from then on.
    let secret = "y".repeat(40);
    let credentials = Credentials::new(&secret);
    let ada = engine.registry().credentials().authenticate(&credentials).unwrap().caller;
    engine.runs().resume_run(&ada, &id).await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "Again.");
}

#[tokio::test]
async fn replays_count_toward_the_limit_of_open_runs() {
    let script = Script::default().says("Hello.").replies_with(|_| panic!("not asked"));
    let limits = toolcrib::EngineLimits { max_open_runs: 1, ..Default::default() };
    let (_go, gate) = oneshot::channel();
    let requested = tokio::sync::Notify::new();
    let gates = Mutex::new(Vec::new());
    let model = Arc::new(GatedModel { script, gates, requested });
    let builder = Engine::builder().limits(limits).models(Arc::new(SingleModel(model.clone())));
    let engine = builder.start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("Hello")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    model.requested.notified().await;
    model.gates.lock().push(gate);
    let (replaying, run_id) = (engine.clone(), id.clone());
    let replay = tokio::spawn(async move {
        let sink = toolcrib::runs::agent_loop::ignore_events;
        replaying.runs().replay_run(&caller(), &run_id, None, &sink).await
    });
    model.requested.notified().await;
    let refused = engine.runs().start_run(&caller(), new_run("Hello")).await.err().unwrap();
    assert_eq!(refused.code(), Code::Overloaded);
    assert_eq!(
        engine.runs().check_replay(&caller(), &id).await.unwrap_err().code(),
        Code::Overloaded
    );
    replay.abort();
    let _ = replay.await;
    engine.runs().check_replay(&caller(), &id).await.unwrap();
}
