//! Tests of runs across a restart: no call or model request is repeated, and a sleeping run wakes.

use super::*;

#[tokio::test]
async fn after_a_restart_nothing_is_done_twice_and_nothing_is_asked_twice() {
    let site = Site::new();
    // The first process requests, calls, and stops while the model processes the result.
    let (never, turn) = oneshot::channel();
    let (first_turn, open) = oneshot::channel();
    first_turn.send(()).unwrap();
    let gated = Arc::new(Gated {
        script: Script::default().calls(&[("c1", "calc__add", SUM)]),
        waiting: Mutex::new(vec![turn, open]),
        asked: tokio::sync::Notify::new(),
    });
    let engine = site.engine(gated.clone()).await;
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    gated.asked.notified().await;
    gated.asked.notified().await;
    engine.shut_down(Duration::ZERO).await;
    drop(never);
    assert_eq!(site.made.load(Ordering::SeqCst), 1);
    let stored = engine.find_run(&me(), &id).await.unwrap();
    assert_eq!((stored.status, stored.progress.steps), (RunStatus::Running, 1));

    let script = Arc::new(Script::default().says("It is 42."));
    let engine = site.engine(script.clone()).await;
    let run = ended(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "It is 42.");
    assert_eq!(site.made.load(Ordering::SeqCst), 1, "the call was finished");
    let asked = script.asked(0);
    assert_eq!(asked.model, "the-endpoints-name");
    assert_eq!(asked.messages.len(), 3, "with the stored answer and result");
}

#[tokio::test]
async fn an_answer_that_was_stored_is_acted_on_and_its_finished_calls_are_not_repeated() {
    let site = Site::new();
    let began = Arc::new(tokio::sync::Notify::new());
    // One of the answer's two calls has finished when the process stops.
    let begins = began.clone();
    let wait = FnTool::new("calc.wait", "Waits", move |_: Add| {
        begins.notify_one();
        async {
            std::future::pending::<()>().await;
            Ok::<i64, String>(1)
        }
    });
    let made = site.made.clone();
    let add = move || {
        let made = made.clone();
        FnTool::new("calc.add", "Adds", move |args: Add| {
            made.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<i64, String>(args.a + args.b) }
        })
    };
    let script = Script::default().calls(&[("c1", "calc__add", SUM), ("c2", "calc__wait", SUM)]);
    let builder = || Engine::builder().store(site.store.clone());
    let engine = builder()
        .models(Arc::new(Only(Arc::new(script))))
        .tool(add())
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    // The second call starts after the first has ended.
    began.notified().await;
    engine.shut_down(Duration::ZERO).await;

    let wait = FnTool::new("calc.wait", "Waits", |_: Add| async { Ok::<i64, String>(7) });
    let script = Arc::new(Script::default().says("done"));
    let engine = builder()
        .models(Arc::new(Only(script.clone())))
        .tool(add())
        .tool(wait.effect(Effect::Idempotent))
        .start()
        .await
        .unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "done");
    assert_eq!(site.made.load(Ordering::SeqCst), 1);
    let told = script.asked(0).messages;
    assert_eq!((&told[2]["content"], &told[3]["content"]), (&json!("42"), &json!("7")));
    let query = toolcrib::engine::CallQuery { run_id: Some(id), ..Default::default() };
    let query = toolcrib::engine::CallQuery { limit: 10, ..query };
    assert_eq!(engine.calls(&me(), query).await.unwrap().calls.len(), 2, "no call is made anew");
}

#[tokio::test]
async fn a_run_that_waits_only_for_a_late_result_sleeps_through_a_restart_and_is_woken() {
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
    let models = Arc::new(Only(Arc::new(script)));
    let engine = builder().models(models).tool(job(None)).start().await.unwrap();
    let id = engine.start_run(&me(), new_run("A report, please")).await.unwrap().run.id;
    let mut after = 0;
    loop {
        let happened = engine.run_events(&me(), &id, after, 100).await.unwrap();
        after = happened.last().unwrap().number();
        let waits = |happened: &RunEvent| match happened {
            RunEvent::Run(noted) => noted.record.kind == JournalKind::Waiting,
            RunEvent::Call(_) => false,
        };
        if happened.iter().any(waits) {
            break;
        }
    }
    assert_eq!(engine.find_run(&me(), &id).await.unwrap().status, RunStatus::Waiting);
    engine.shut_down(Duration::ZERO).await;

    let (go, gone) = oneshot::channel();
    let script = Arc::new(Script::default().says("Here is the report."));
    let models = Arc::new(Only(script.clone()));
    let engine = builder().models(models).tool(job(Some(gone))).start().await.unwrap();
    go.send(()).unwrap();
    let run = ended(&engine, &id).await;
    assert_eq!(run.answer.unwrap().text, "Here is the report.");
    let told = script.asked(0).messages;
    let late = told.last().unwrap()["content"].as_str().unwrap().to_owned();
    assert!(late.contains("called as c1, has come:\nthe report"), "{late}");
    let kinds: Vec<&str> = engine
        .run_journal(&me(), &id)
        .await
        .unwrap()
        .iter()
        .map(|noted| noted.record.kind.as_str())
        .collect();
    assert!(kinds.contains(&"run.late"), "{kinds:?}");
}

/// Returns the steps whose answers are in the journal, in its order.
async fn answered(engine: &Engine, run_id: &str) -> Vec<u64> {
    let journal = engine.run_journal(&me(), run_id).await.unwrap();
    let answers = journal.iter().filter(|noted| noted.record.kind == JournalKind::Replied);
    answers.map(|noted| noted.record.data["step"].as_u64().unwrap()).collect()
}

/// A tool that never ends its first call, and adds in the others.
fn once_endless(began: &Arc<tokio::sync::Notify>) -> FnTool {
    let (began, first) = (began.clone(), Mutex::new(true));
    let add = FnTool::new("calc.add", "Adds", move |args: Add| {
        let first = std::mem::take(&mut *first.lock());
        let began = began.clone();
        async move {
            if first {
                began.notify_one();
                std::future::pending::<()>().await;
            }
            Ok::<i64, String>(args.a + args.b)
        }
    });
    add.effect(Effect::Idempotent)
}

/// The replies of a model in a replay.
fn played_again(script: Script) -> Script {
    script.calls(&[("x1", "calc__add", SUM)]).says("done")
}

#[tokio::test]
async fn a_stored_answer_that_is_taken_up_is_written_down_once() {
    let began = Arc::new(tokio::sync::Notify::new());
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).says("done");
    let models = Arc::new(Only(Arc::new(played_again(script))));
    let builder = Engine::builder().models(models).tool(once_endless(&began));
    let engine = builder.start().await.unwrap();
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    began.notified().await;
    engine.cancel_run(&me(), &id, None).await.unwrap();
    engine.resume_run(&me(), &id).await.unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "done");
    assert_eq!(answered(&engine, &id).await, [1, 2]);
    let quiet = toolcrib::runs::agent_loop::ignore_events;
    let replayed = engine.replay_run(&me(), &id, None, &quiet).await.unwrap();
    assert_eq!(replayed.differences, [], "it went the same way");
}

#[tokio::test]
async fn a_journal_that_has_an_answer_twice_is_read_as_if_it_had_it_once() {
    let store: Arc<MemoryStore> = Arc::default();
    let began = Arc::new(tokio::sync::Notify::new());
    let builder = |script: Script| {
        let models = Arc::new(Only(Arc::new(script)));
        Engine::builder().store(store.clone()).models(models)
    };
    let first = builder(Script::default().calls(&[("c1", "calc__add", SUM)]));
    let engine = first.tool(once_endless(&began)).start().await.unwrap();
    let id = engine.start_run(&me(), new_run("How much?")).await.unwrap().run.id;
    began.notified().await;
    engine.shut_down(Duration::ZERO).await;
    // As an older server wrote it.
    let journal = store.runs().journal("default", &id).await.unwrap();
    let twice = journal.last().unwrap().record.clone();
    assert_eq!(twice.kind, JournalKind::Replied);
    let mut run = engine.find_run(&me(), &id).await.unwrap();
    run.version += 1;
    let twice = toolcrib::domain::run::JournalRecord { messages: Vec::new(), ..twice };
    store.runs().save_run(run, vec![twice]).await.unwrap();

    let second = builder(played_again(Script::default().says("done")));
    let add =
        FnTool::new(
            "calc.add",
            "Adds",
            |args: Add| async move { Ok::<i64, String>(args.a + args.b) },
        );
    let engine = second.tool(add.effect(Effect::Idempotent)).start().await.unwrap();
    assert_eq!(ended(&engine, &id).await.answer.unwrap().text, "done");
    assert_eq!(answered(&engine, &id).await, [1, 2]);
    let quiet = toolcrib::runs::agent_loop::ignore_events;
    let replayed = engine.replay_run(&me(), &id, None, &quiet).await.unwrap();
    assert_eq!((replayed.differences.as_slice(), replayed.unrecorded_calls), (&[][..], 0));
}
