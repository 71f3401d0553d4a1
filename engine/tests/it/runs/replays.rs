//! Tests of replayed runs: the model receives the recorded messages in their order.

use super::*;
use toolcrib::engine::ReplayReport;

async fn played(engine: &Engine, id: &str) -> ReplayReport {
    engine.replay_run(&me(), id, None, &toolcrib::runs::agent_loop::ignore_events).await.unwrap()
}

fn steps(replayed: &ReplayReport) -> Vec<u32> {
    replayed.differences.iter().map(|one| one.step).collect()
}

#[tokio::test]
async fn a_replay_touches_nothing_and_says_where_the_model_went_another_way() {
    let site = Site::new();
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .says("It is 42.")
        // The same reply again.
        .calls(&[("x", "calc__add", SUM)])
        .says("It is 42.")
        // A different reply.
        .calls(&[("y", "calc__add", r#"{"a":1,"b":1}"#)])
        .says("I do not know.");
    let script = Arc::new(script);
    let engine = site.engine(script.clone()).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    ended(&engine, &id).await;
    let quiet = toolcrib::runs::agent_loop::ignore_events;
    let same = engine.replay_run(&me(), &id, None, &quiet).await.unwrap();
    assert_eq!((same.answer.as_str(), same.differences.len()), ("It is 42.", 0));
    assert_eq!(script.asked(3).messages[2]["content"], "42", "the recorded result");
    let other = engine.replay_run(&me(), &id, None, &quiet).await.unwrap();
    assert_eq!(other.differences.iter().map(|one| one.step).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((other.unrecorded_calls, other.recorded_answer), (1, Some("It is 42.".into())));
    assert_eq!(site.made.load(Ordering::SeqCst), 1, "the world was touched once");
}

#[tokio::test]
async fn what_the_user_said_later_is_said_again() {
    let site = Site::new();
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .says("It is 42.")
        .says("You are welcome.")
        // Again.
        .calls(&[("x1", "calc__add", SUM)])
        .says("It is 42.")
        .says("You are welcome.")
        // Once more, with an immediate answer and an extra call at the end.
        .says("No idea.")
        .calls(&[("y1", "calc__add", SUM)])
        .says("You are welcome.");
    let script = Arc::new(script);
    let engine = site.engine(script.clone()).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    ended(&engine, &id).await;
    let thanks = vec![json!({ "role": "user", "content": "Thanks!" })];
    engine.add_run_messages(&me(), &id, thanks).await.unwrap();
    ended(&engine, &id).await;
    let same = played(&engine, &id).await;
    assert_eq!((same.differences.as_slice(), same.steps), (&[][..], 3));
    assert_eq!(same.answer, "You are welcome.");
    assert_eq!(script.asked(5).messages.last().unwrap()["content"], "Thanks!");

    let other = played(&engine, &id).await;
    assert_eq!(steps(&other), [1, 2, 3, 3], "{:?}", other.differences);
    assert_eq!(other.differences[1].now, None, "there was no second answer");
    assert_eq!(other.differences[3].recorded, None, "there was no such step");
    assert_eq!(other.answer, "You are welcome.");
    assert_eq!(site.made.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn what_came_late_comes_late_again() {
    let (go, gone) = oneshot::channel::<()>();
    let gone = Mutex::new(Some(gone));
    let job = FnTool::new("job.start", "Takes long", move |_: Add| {
        let gone = gone.lock().take();
        async move {
            gone.unwrap().await.map_err(|error| error.to_string())?;
            Ok::<&str, String>("the report")
        }
    });
    let go = Mutex::new(Some(go));
    let script = Script::default()
        .calls(&[("c1", "job__start", SUM)])
        .line(move |_| {
            go.lock().take().unwrap().send(()).unwrap();
            Ok(ModelReply { text: "I wait.".into(), ..ModelReply::default() })
        })
        .says("Here it is.")
        .calls(&[("x1", "job__start", SUM)])
        .says("I wait.")
        .says("Here it is.");
    let script = Arc::new(script);
    let builder = Engine::builder().models(Arc::new(Only(script.clone())));
    let job = job.effect(Effect::Idempotent).background();
    let engine = builder.tool(job).start().await.unwrap();
    let id = engine.start_run(&me(), new_run("A report, please")).await.unwrap().run.id;
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "Here it is.");
    let same = played(&engine, &id).await;
    assert_eq!((same.differences.as_slice(), same.unrecorded_calls), (&[][..], 0));
    let told = script.asked(5).messages;
    let late = told.last().unwrap()["content"].as_str().unwrap();
    assert!(late.contains("called as x1, has come:\nthe report"), "{late}");
}

#[tokio::test]
async fn what_was_closed_is_closed_again() {
    let site = Site::new();
    let failing = FnTool::new("calc.fail", "Fails", |_: Add| async {
        Err::<i64, _>(toolcrib::Fault::new(Code::RuntimeError, "no"))
    });
    let script = Script::default()
        .calls(&[("c1", "calc__fail", SUM)])
        .says("It could not be done.")
        .calls(&[("x1", "calc__fail", SUM)])
        .says("It could not be done.");
    let script = Arc::new(script);
    let builder = Engine::builder().store(site.store.clone());
    let builder = builder.models(Arc::new(Only(script.clone()))).tool(failing);
    let engine = builder.start().await.unwrap();
    let mut new = new_run("?");
    new.limits.failures = 1;
    let id = engine.start_run(&me(), new).await.unwrap().run.id;
    assert_eq!(ended(&engine, &id).await.answer.unwrap().stop_reason, Some(StopReason::Failures));
    let same = played(&engine, &id).await;
    assert_eq!(same.differences, []);
    assert_eq!(script.asked(3).messages[3], script.asked(1).messages[3]);
    assert!(script.asked(3).tools.is_empty(), "it is asked for its last word");
}

/// A script that says these lines twice: for the recording and for the replay.
fn twice(lines: impl Fn(Script) -> Script) -> Arc<Script> {
    Arc::new(lines(lines(Script::default())))
}

#[tokio::test]
async fn calls_that_were_not_made_count_for_no_limit_when_they_are_played_again() {
    let site = Site::new();
    let unknown = [("c1", "calc__one", SUM), ("c2", "calc__two", SUM)];
    let script =
        twice(|script| script.calls(&unknown).calls(&[("c3", "calc__add", SUM)]).says("It is 42."));
    let engine = site.engine(script).await;
    let mut new = new_run("How much?");
    new.limits.calls = 2;
    let id = engine.start_run(&me(), new).await.unwrap().run.id;
    assert_eq!(ended(&engine, &id).await.answer.unwrap().stop_reason, None);
    assert_eq!(played(&engine, &id).await.differences, []);

    let arguments: Vec<String> = (0..6).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let ids = ["c0", "c1", "c2", "c3", "c4", "c5"];
    let call = |(id, arguments)| (id, "calc__add", arguments);
    let many: Vec<(&str, &str, &str)> =
        ids.into_iter().zip(arguments.iter().map(String::as_str)).map(call).collect();
    let script = twice(|script| script.calls(&many).calls(&many[4..]).says("All of them."));
    let engine = Site::new().engine(script).await;
    let mut new = new_run("How much?");
    (new.limits.calls_per_step, new.limits.calls) = (2, 5);
    let id = engine.start_run(&me(), new).await.unwrap().run.id;
    let run = ended(&engine, &id).await;
    assert_eq!((run.progress.calls, run.answer.unwrap().stop_reason), (4, None));
    let same = played(&engine, &id).await;
    assert_eq!((same.differences.as_slice(), same.answer.as_str()), (&[][..], "All of them."));
}

#[tokio::test]
async fn what_was_counted_anew_when_a_run_was_resumed_is_counted_anew_again() {
    let one = |n: usize| format!("{{\"a\":{n},\"b\":0}}");
    let steps = |script: Script, from: usize, to: usize| {
        (from..to).fold(script, |script, n| script.calls(&[("c", "calc__add", &one(n))]))
    };
    let script = steps(Script::default(), 0, 2).fails(false, None);
    let script = steps(steps(script, 2, 4).says("Four."), 0, 4).says("Four.");
    let engine = Site::new().engine(Arc::new(script)).await;
    let mut new = new_run("How much?");
    new.limits.steps = 3;
    let id = engine.start_run(&me(), new).await.unwrap().run.id;
    assert_eq!(ended(&engine, &id).await.status, RunStatus::Failed);
    engine.resume_run(&me(), &id).await.unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!((run.progress.steps, run.answer.unwrap().stop_reason), (5, None));
    let same = played(&engine, &id).await;
    assert_eq!((same.differences.as_slice(), same.answer.as_str()), (&[][..], "Four."));
}
