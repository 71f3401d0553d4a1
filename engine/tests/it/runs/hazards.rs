//! Tests of failures around a run: withdrawn tools, cancels midway, a time limit that passes during
//! a model request, and another caller of the same name.

use super::*;
use toolcrib::engine::NewKey;

fn counted(name: &'static str, made: &Arc<AtomicUsize>) -> FnTool {
    let made = made.clone();
    FnTool::new(name, "Adds", move |args: Add| {
        made.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<i64, String>(args.a + args.b) }
    })
}

/// A tool that signals its start and never ends.
fn endless(began: &Arc<tokio::sync::Notify>) -> FnTool {
    let began = began.clone();
    let endless = FnTool::new("calc.wait", "Waits", move |_: Add| {
        began.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    endless.effect(Effect::Idempotent)
}

fn contents(messages: &[Value]) -> Vec<String> {
    let told = messages.iter().filter(|message| message["role"] == "tool");
    told.map(|message| message["content"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_tool_that_is_gone_after_a_crash_costs_no_other_call_its_result() {
    let site = Site::new();
    let began = Arc::new(tokio::sync::Notify::new());
    let first = Arc::new(AtomicUsize::new(0));
    let calls = [("c1", "calc__first", SUM), ("c2", "calc__add", SUM), ("c3", "calc__wait", SUM)];
    let script = Script::default().calls(&calls);
    let builder = || Engine::builder().store(site.store.clone());
    let engine = builder()
        .models(Arc::new(Only(Arc::new(script))))
        .tool(counted("calc.first", &first))
        .tool(counted("calc.add", &site.made))
        .tool(endless(&began))
        .start()
        .await
        .unwrap();
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    began.notified().await;
    engine.shut_down(Duration::ZERO).await;

    let wait = FnTool::new("calc.wait", "Waits", |_: Add| async { Ok::<i64, String>(7) });
    let script = Arc::new(Script::default().says("done"));
    let engine = builder()
        .models(Arc::new(Only(script.clone())))
        .tool(counted("calc.add", &site.made))
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    assert_eq!(ended(&engine, &id).await.status, RunStatus::Succeeded);
    assert_eq!(contents(&script.asked(0).messages), ["42", "42", "7"]);
    assert_eq!((first.load(Ordering::SeqCst), site.made.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn what_a_cancel_prevented_is_not_made_when_the_user_speaks_again() {
    let site = Site::new();
    let began = Arc::new(tokio::sync::Notify::new());
    let calls = [("c1", "calc__wait", SUM), ("c2", "calc__add", SUM)];
    let script = Arc::new(Script::default().calls(&calls).says("Nothing was done."));
    let engine = Engine::builder()
        .store(site.store.clone())
        .models(Arc::new(Only(script.clone())))
        .tool(counted("calc.add", &site.made))
        .tool(endless(&began))
        .start()
        .await
        .unwrap();
    let id = engine.start_run(&me(), new_run("Pay both")).await.unwrap().run.id;
    began.notified().await;
    engine.cancel_run(&me(), &id, None).await.unwrap();
    let stop = vec![json!({ "role": "user", "content": "do not pay anything" })];
    engine.add_run_messages(&me(), &id, stop).await.unwrap();
    assert_eq!(ended(&engine, &id).await.status, RunStatus::Succeeded);
    assert_eq!(site.made.load(Ordering::SeqCst), 0, "nobody wanted it any more");
    let asked = script.asked(1).messages;
    let told = contents(&asked);
    assert!(told.len() == 2 && told.iter().all(|told| told.contains("CANCELED")), "{told:?}");
    assert_eq!(asked.last().unwrap()["content"], "do not pay anything");
}

/// A model that first fails this often, then hangs as long as the prompt has tools.
struct Ponders {
    failures: AtomicUsize,
}

#[async_trait]
impl Model for Ponders {
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
async fn time_that_is_over_in_the_middle_of_a_request_is_a_limit_and_no_failure() {
    // A retry is left; no retry is left; the last retry is in flight.
    for (retries, failures) in [(1, 0), (0, 0), (1, 1)] {
        let failures = AtomicUsize::new(failures);
        let engine = Site::new().engine(Arc::new(Ponders { failures })).await;
        let mut new = new_run("Think!");
        new.limits.time_ms = 50;
        new.model_request_policy =
            new.model_request_policy.map(|asking| ModelRequestPolicy { retries, ..asking });
        let id = engine.start_run(&me(), new).await.unwrap().run.id;
        let run = ended(&engine, &id).await;
        assert_eq!(run.status, RunStatus::Succeeded, "{retries}: {:?}", run.error);
        let answer = run.answer.unwrap();
        let told = (answer.text.as_str(), answer.stop_reason);
        assert_eq!(told, ("There was no time.", Some(StopReason::Time)), "{retries}");
    }
}

#[tokio::test]
async fn the_name_of_the_starter_is_not_enough_to_go_on_with_its_run() {
    let script = Script::default().says("Hello.").says("Again.");
    let engine = Site::new().engine(Arc::new(script)).await;
    let id = engine.start_run(&me(), new_run("Hello")).await.unwrap().run.id;
    ended(&engine, &id).await;
    let weaker = Caller { role: Role::Agent, auth_method: AuthMethod::Key, ..me() };
    let more = vec![json!({ "role": "user", "content": "and now pay" })];
    let refused = engine.add_run_messages(&weaker, &id, more.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let refused = engine.resume_run(&weaker, &id).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    engine.add_run_messages(&me(), &id, more).await.unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "Again.");
}

#[tokio::test]
async fn ids_that_a_model_repeats_are_told_apart_whatever_they_are() {
    let same = [("call_1_1", "calc__add", SUM), ("call_1_1", "calc__add", SUM)];
    let script = Arc::new(Script::default().calls(&same).says("done"));
    let engine = Site::new().engine(script.clone()).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    ended(&engine, &id).await;
    let asked = script.asked(1).messages;
    let answered = asked.iter().filter_map(|message| message["tool_call_id"].as_str());
    let ids: std::collections::HashSet<&str> = answered.collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
}

#[tokio::test]
async fn a_run_ends_with_the_key_that_it_acts_for() {
    let site = Site::new();
    let (go, waits) = oneshot::channel();
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("Again.");
    let asked = tokio::sync::Notify::new();
    let model = Arc::new(Gated { script, waiting: Mutex::new(vec![waits]), asked });
    let engine = site.engine(model.clone()).await;
    let new_key = || NewKey {
        project: "default".into(),
        agent: "ada".into(),
        role: Role::Admin,
        allow: Vec::new(),
    };
    let key = engine.create_key(&me(), new_key(), "x".repeat(40)).await.unwrap();
    let ada = engine.authenticate(&"x".repeat(40)).unwrap();
    let id = engine.start_run(&ada, new_run("How much?")).await.unwrap().run.id;
    model.asked.notified().await;
    engine.revoke_key(&me(), &key.key.id).await.unwrap();
    go.send(()).unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    assert_eq!(run.error.unwrap().code, "UNAUTHENTICATED");
    assert_eq!(site.made.load(Ordering::SeqCst), 0, "nothing is done for a revoked key");
    engine.create_key(&me(), new_key(), "y".repeat(40)).await.unwrap();
    engine.resume_run(&me(), &id).await.unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "Again.");
}

#[tokio::test]
async fn replays_count_among_the_runs_that_are_open() {
    let script = Script::default().says("Hello.").line(|_| panic!("not asked"));
    let limits = toolcrib::EngineLimits { max_open_runs: 1, ..Default::default() };
    let (_go, waits) = oneshot::channel();
    let asked = tokio::sync::Notify::new();
    let waiting = Mutex::new(Vec::new());
    let model = Arc::new(Gated { script, waiting, asked });
    let builder = Engine::builder().limits(limits).models(Arc::new(Only(model.clone())));
    let engine = builder.start().await.unwrap();
    let id = engine.start_run(&me(), new_run("Hello")).await.unwrap().run.id;
    ended(&engine, &id).await;
    model.asked.notified().await;
    model.waiting.lock().push(waits);
    let (playing, played) = (engine.clone(), id.clone());
    let replay = tokio::spawn(async move {
        let quiet = toolcrib::runs::agent_loop::ignore_events;
        playing.replay_run(&me(), &played, None, &quiet).await
    });
    model.asked.notified().await;
    let refused = engine.start_run(&me(), new_run("Hello")).await.err().unwrap();
    assert_eq!(refused.code(), Code::Overloaded);
    assert_eq!(engine.check_replay(&me(), &id).await.unwrap_err().code(), Code::Overloaded);
    replay.abort();
    let _ = replay.await;
    engine.check_replay(&me(), &id).await.unwrap();
}
