//! Tests of replayed runs: the model receives the recorded messages in their order.

use super::*;
use toolcrib::runs::ReplayReport;

async fn replay(engine: &Engine, id: &str) -> ReplayReport {
    engine
        .runs()
        .replay_run(&caller(), id, None, &toolcrib::runs::agent_loop::ignore_events)
        .await
        .unwrap()
}

fn steps(replayed: &ReplayReport) -> Vec<u32> {
    replayed.differences.iter().map(|difference| difference.step).collect()
}

#[tokio::test]
async fn a_replay_runs_no_tools_and_reports_differences_of_the_model() {
    let fixture = Fixture::new();
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
    let engine = fixture.engine(script.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    let sink = toolcrib::runs::agent_loop::ignore_events;
    let report = engine.runs().replay_run(&caller(), &id, None, &sink).await.unwrap();
    assert_eq!((report.answer.as_str(), report.differences.len()), ("It is 42.", 0));
    assert_eq!(script.request(3).messages[2]["content"], "42", "the recorded result");
    let other = engine.runs().replay_run(&caller(), &id, None, &sink).await.unwrap();
    assert_eq!(
        other.differences.iter().map(|difference| difference.step).collect::<Vec<_>>(),
        [1, 2]
    );
    assert_eq!((other.unrecorded_calls, other.recorded_answer), (1, Some("It is 42.".into())));
    assert_eq!(
        fixture.executions.load(Ordering::SeqCst),
        1,
        "the tool ran once, in the recorded run"
    );
}

#[tokio::test]
async fn a_replay_includes_later_user_messages() {
    let fixture = Fixture::new();
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
    let engine = fixture.engine(script.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    wait_for_end(&engine, &id).await;
    let thanks = vec![json!({ "role": "user", "content": "Thanks!" })];
    engine.runs().add_run_messages(&caller(), &id, thanks).await.unwrap();
    wait_for_end(&engine, &id).await;
    let report = replay(&engine, &id).await;
    assert_eq!((report.differences.as_slice(), report.steps), (&[][..], 3));
    assert_eq!(report.answer, "You are welcome.");
    assert_eq!(script.request(5).messages.last().unwrap()["content"], "Thanks!");

    let other = replay(&engine, &id).await;
    assert_eq!(steps(&other), [1, 2, 3, 3], "{:?}", other.differences);
    assert_eq!(other.differences[1].now, None, "there was no second answer");
    assert_eq!(other.differences[3].recorded, None, "there was no such step");
    assert_eq!(other.answer, "You are welcome.");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_replay_delivers_late_results_late() {
    let (go, released) = oneshot::channel::<()>();
    let released = Mutex::new(Some(released));
    let job = FnTool::new("job.start", "Takes long", move |_: Add| {
        let released = released.lock().take();
        async move {
            released.unwrap().await.map_err(|error| error.to_string())?;
            Ok::<&str, String>("the report")
        }
    });
    let go = Mutex::new(Some(go));
    let script = Script::default()
        .calls(&[("c1", "job__start", SUM)])
        .replies_with(move |_| {
            go.lock().take().unwrap().send(()).unwrap();
            Ok(ModelReply { text: "I wait.".into(), ..ModelReply::default() })
        })
        .says("Here it is.")
        .calls(&[("x1", "job__start", SUM)])
        .says("I wait.")
        .says("Here it is.");
    let script = Arc::new(script);
    let builder = Engine::builder().models(Arc::new(SingleModel(script.clone())));
    let job = job.effect(Effect::Idempotent).background();
    let engine = builder.tool(job).start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("A report, please")).await.unwrap().run.id;
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "Here it is.");
    let report = replay(&engine, &id).await;
    assert_eq!((report.differences.as_slice(), report.unrecorded_calls), (&[][..], 0));
    let prompt = script.request(5).messages;
    let late = prompt.last().unwrap()["content"].as_str().unwrap();
    assert!(late.contains("called as x1, has come:\nthe report"), "{late}");
}

#[tokio::test]
async fn a_replay_repeats_the_closing_request_after_a_limit() {
    let fixture = Fixture::new();
    let failing = FnTool::new("calc.fail", "Fails", |_: Add| async {
        Err::<i64, _>(toolcrib::Fault::new(Code::RuntimeError, "no"))
    });
    let script = Script::default()
        .calls(&[("c1", "calc__fail", SUM)])
        .says("It could not be done.")
        .calls(&[("x1", "calc__fail", SUM)])
        .says("It could not be done.");
    let script = Arc::new(script);
    let builder = Engine::builder().store(fixture.store.clone());
    let builder = builder.models(Arc::new(SingleModel(script.clone()))).tool(failing);
    let engine = builder.start().await.unwrap();
    let mut new = new_run("?");
    new.limits.failures = 1;
    let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
    assert_eq!(
        wait_for_end(&engine, &id).await.answer.unwrap().stop_reason,
        Some(StopReason::Failures)
    );
    let report = replay(&engine, &id).await;
    assert_eq!(report.differences, []);
    assert_eq!(script.request(3).messages[3], script.request(1).messages[3]);
    assert!(script.request(3).tools.is_empty(), "the closing request offers no tools");
}

/// A script that says these lines twice: for the recording and for the replay.
fn script_for_two_passes(lines: impl Fn(Script) -> Script) -> Arc<Script> {
    Arc::new(lines(lines(Script::default())))
}

#[tokio::test]
async fn in_a_replay_refused_calls_do_not_count_toward_limits() {
    let fixture = Fixture::new();
    let unknown = [("c1", "calc__one", SUM), ("c2", "calc__two", SUM)];
    let script = script_for_two_passes(|script| {
        script.calls(&unknown).calls(&[("c3", "calc__add", SUM)]).says("It is 42.")
    });
    let engine = fixture.engine(script).await;
    let mut new = new_run("How much?");
    new.limits.calls = 2;
    let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().stop_reason, None);
    assert_eq!(replay(&engine, &id).await.differences, []);

    let arguments: Vec<String> = (0..6).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let ids = ["c0", "c1", "c2", "c3", "c4", "c5"];
    let call = |(id, arguments)| (id, "calc__add", arguments);
    let many: Vec<(&str, &str, &str)> =
        ids.into_iter().zip(arguments.iter().map(String::as_str)).map(call).collect();
    let script =
        script_for_two_passes(|script| script.calls(&many).calls(&many[4..]).says("All of them."));
    let engine = Fixture::new().engine(script).await;
    let mut new = new_run("How much?");
    (new.limits.calls_per_step, new.limits.calls) = (2, 5);
    let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!((run.progress.calls, run.answer.unwrap().stop_reason), (4, None));
    let report = replay(&engine, &id).await;
    assert_eq!((report.differences.as_slice(), report.answer.as_str()), (&[][..], "All of them."));
}

#[tokio::test]
async fn a_replay_resets_the_counters_where_the_run_was_resumed() {
    let call_arguments = |n: usize| format!("{{\"a\":{n},\"b\":0}}");
    let steps = |script: Script, from: usize, to: usize| {
        (from..to).fold(script, |script, n| script.calls(&[("c", "calc__add", &call_arguments(n))]))
    };
    let script = steps(Script::default(), 0, 2).fails(false, None);
    let script = steps(steps(script, 2, 4).says("Four."), 0, 4).says("Four.");
    let engine = Fixture::new().engine(Arc::new(script)).await;
    let mut new = new_run("How much?");
    new.limits.steps = 3;
    let id = engine.runs().start_run(&caller(), new).await.unwrap().run.id;
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Failed);
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!((run.progress.steps, run.answer.unwrap().stop_reason), (5, None));
    let report = replay(&engine, &id).await;
    assert_eq!((report.differences.as_slice(), report.answer.as_str()), (&[][..], "Four."));
}
