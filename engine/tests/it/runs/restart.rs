//! Tests of runs across a restart: no call or model request is repeated, and a sleeping run wakes.

use super::*;

#[tokio::test]
async fn after_a_restart_no_call_and_no_model_request_is_repeated() {
    let fixture = Fixture::new();
    // The first process requests, calls, and stops while the model processes the result.
    let (never, gate) = oneshot::channel();
    let (open_gate, open) = oneshot::channel();
    open_gate.send(()).unwrap();
    let gated = Arc::new(GatedModel {
        script: Script::default().calls(&[("c1", "calc__add", SUM)]),
        gates: Mutex::new(vec![gate, open]),
        requested: tokio::sync::Notify::new(),
    });
    let engine = fixture.engine(gated.clone()).await;
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    gated.requested.notified().await;
    gated.requested.notified().await;
    engine.shut_down(Duration::ZERO).await;
    drop(never);
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1);
    let stored = engine.runs().find_run(&caller(), &id).await.unwrap();
    assert_eq!((stored.status, stored.progress.steps), (RunStatus::Running, 1));

    let script = Arc::new(Script::default().says("It is 42."));
    let engine = fixture.engine(script.clone()).await;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "It is 42.");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1, "the finished call is not repeated");
    let request = script.request(0);
    assert_eq!(request.model, "the-endpoints-name");
    assert_eq!(request.messages.len(), 3, "the stored reply and result are included");
}

#[tokio::test]
async fn a_stored_reply_is_executed_after_a_restart_without_repeating_calls() {
    let fixture = Fixture::new();
    let started = Arc::new(tokio::sync::Notify::new());
    // One of the answer's two calls has finished when the process stops.
    let signal = started.clone();
    let wait = FnTool::new("calc.wait", "Waits", move |_: Add| {
        signal.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    let executions = fixture.executions.clone();
    let add = move || {
        let executions = executions.clone();
        FnTool::new("calc.add", "Adds", move |args: Add| {
            executions.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<i64, String>(args.a + args.b) }
        })
    };
    let script = Script::default().calls(&[("c1", "calc__add", SUM), ("c2", "calc__wait", SUM)]);
    let builder = || Engine::builder().store(fixture.store.clone());
    let engine = builder()
        .models(Arc::new(SingleModel(Arc::new(script))))
        .tool(add())
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    // The second call starts after the first has ended.
    started.notified().await;
    engine.shut_down(Duration::ZERO).await;

    let wait = FnTool::new("calc.wait", "Waits", |_: Add| async { Ok::<i64, String>(7) });
    let script = Arc::new(Script::default().says("done"));
    let engine = builder()
        .models(Arc::new(SingleModel(script.clone())))
        .tool(add())
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "done");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1);
    let prompt = script.request(0).messages;
    assert_eq!((&prompt[2]["content"], &prompt[3]["content"]), (&json!("42"), &json!("7")));
    let query = toolcrib::calls::CallQuery { run_id: Some(id), ..Default::default() };
    let query = toolcrib::calls::CallQuery { limit: 10, ..query };
    assert_eq!(
        engine.calls().calls(&caller(), query).await.unwrap().calls.len(),
        2,
        "no new call is created"
    );
}

#[tokio::test]
async fn a_run_waiting_for_a_late_result_resumes_after_a_restart() {
    let store: Arc<MemoryStore> = Arc::default();
    let job = |result: Option<oneshot::Receiver<()>>| {
        let result = Mutex::new(result);
        let tool = FnTool::new("job.start", "Takes long", move |_: Add| {
            let result = result.lock().take();
            async move {
                match result {
                    Some(result) => result.await.map_err(|error| error.to_string())?,
                    None => std::future::pending().await,
                }
                Ok::<&str, String>("the report")
            }
        });
        tool.effect(Effect::Idempotent).background()
    };
    let script = Script::default().calls(&[("c1", "job__start", SUM)]).says("I wait.");
    let builder = || Engine::builder().store(store.clone());
    let models = Arc::new(SingleModel(Arc::new(script)));
    let engine = builder().models(models).tool(job(None)).start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("A report, please")).await.unwrap().run.id;
    let mut after = 0;
    loop {
        let events = engine.runs().streams().events(&caller(), &id, after, 100).await.unwrap();
        after = events.last().unwrap().number();
        let waits = |event: &RunEvent| match event {
            RunEvent::Run(entry) => entry.record.kind == JournalKind::Waiting,
            RunEvent::Call(_) => false,
        };
        if events.iter().any(waits) {
            break;
        }
    }
    assert_eq!(engine.runs().find_run(&caller(), &id).await.unwrap().status, RunStatus::Waiting);
    engine.shut_down(Duration::ZERO).await;

    let (go, released) = oneshot::channel();
    let script = Arc::new(Script::default().says("Here is the report."));
    let models = Arc::new(SingleModel(script.clone()));
    let engine = builder().models(models).tool(job(Some(released))).start().await.unwrap();
    go.send(()).unwrap();
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "Here is the report.");
    let prompt = script.request(0).messages;
    let late = prompt.last().unwrap()["content"].as_str().unwrap().to_owned();
    assert!(late.contains("called as c1, has come:\nthe report"), "{late}");
    let kinds: Vec<&str> = engine
        .runs()
        .streams()
        .journal(&caller(), &id)
        .await
        .unwrap()
        .iter()
        .map(|entry| entry.record.kind.as_str())
        .collect();
    assert!(kinds.contains(&"run.late"), "{kinds:?}");
}

/// Returns the steps whose answers are in the journal, in its order.
async fn answered_steps(engine: &Engine, run_id: &str) -> Vec<u64> {
    let journal = engine.runs().streams().journal(&caller(), run_id).await.unwrap();
    let answers = journal.iter().filter(|entry| entry.record.kind == JournalKind::Replied);
    answers.map(|entry| entry.record.data["step"].as_u64().unwrap()).collect()
}

/// A tool that never ends its first call, and adds in the others.
fn endless_first_call(started: &Arc<tokio::sync::Notify>) -> FnTool {
    let (started, first) = (started.clone(), Mutex::new(true));
    let add = FnTool::new("calc.add", "Adds", move |args: Add| {
        let first = std::mem::take(&mut *first.lock());
        let started = started.clone();
        async move {
            if first {
                started.notify_one();
                std::future::pending::<()>().await;
            }
            Ok::<i64, String>(args.a + args.b)
        }
    });
    add.effect(Effect::Idempotent)
}

/// The replies of a model in a replay.
fn replay_lines(script: Script) -> Script {
    script.calls(&[("x1", "calc__add", SUM)]).says("done")
}

#[tokio::test]
async fn a_resumed_reply_is_in_the_journal_once() {
    let started = Arc::new(tokio::sync::Notify::new());
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("done");
    let models = Arc::new(SingleModel(Arc::new(replay_lines(script))));
    let builder = Engine::builder().models(models).tool(endless_first_call(&started));
    let engine = builder.start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    started.notified().await;
    engine.runs().cancel_run(&caller(), &id, None).await.unwrap();
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "done");
    assert_eq!(answered_steps(&engine, &id).await, [1, 2]);
    let sink = toolcrib::runs::agent_loop::ignore_events;
    let replayed = engine.runs().replay_run(&caller(), &id, None, &sink).await.unwrap();
    assert_eq!(replayed.differences, [], "the replay does not differ");
}

#[tokio::test]
async fn a_duplicate_reply_in_the_journal_is_read_once() {
    let store: Arc<MemoryStore> = Arc::default();
    let started = Arc::new(tokio::sync::Notify::new());
    let builder = |script: Script| {
        let models = Arc::new(SingleModel(Arc::new(script)));
        Engine::builder().store(store.clone()).models(models)
    };
    let first = builder(Script::default().calls(&[("c1", "calc__add", SUM)]));
    let engine = first.tool(endless_first_call(&started)).start().await.unwrap();
    let id = engine.runs().start_run(&caller(), new_run("How much?")).await.unwrap().run.id;
    started.notified().await;
    engine.shut_down(Duration::ZERO).await;
    // As an older server wrote it.
    let journal = store.runs().journal("default", &id).await.unwrap();
    let duplicate = journal.last().unwrap().record.clone();
    assert_eq!(duplicate.kind, JournalKind::Replied);
    let mut run = engine.runs().find_run(&caller(), &id).await.unwrap();
    run.version += 1;
    let duplicate = toolcrib::domain::run::JournalRecord { messages: Vec::new(), ..duplicate };
    store.runs().save_run(run, vec![duplicate]).await.unwrap();

    let second = builder(replay_lines(Script::default().says("done")));
    let add =
        FnTool::new(
            "calc.add",
            "Adds",
            |args: Add| async move { Ok::<i64, String>(args.a + args.b) },
        );
    let engine = second.tool(add.effect(Effect::Idempotent)).start().await.unwrap();
    assert_eq!(wait_for_end(&engine, &id).await.answer.unwrap().text, "done");
    assert_eq!(answered_steps(&engine, &id).await, [1, 2]);
    let sink = toolcrib::runs::agent_loop::ignore_events;
    let replayed = engine.runs().replay_run(&caller(), &id, None, &sink).await.unwrap();
    assert_eq!((replayed.differences.as_slice(), replayed.unrecorded_calls), (&[][..], 0));
}
