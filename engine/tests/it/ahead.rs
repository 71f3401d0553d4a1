//! Tests of speculative reads (started before their ticket is stored) and of callers that
//! disconnect during the commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Notify;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::engine::EventQuery;
use toolcrib::{
    AttemptProgress, CallRequest, Caller, Effect, Engine, EngineLimits, Fault, FnTool, Status,
    ToolContext,
};

use crate::support::{Chance, FlakyStore};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn ask(tool: &str) -> CallRequest {
    CallRequest::new(tool, "{}").unwrap()
}

fn caller() -> Caller {
    Caller::local("default")
}

async fn kinds(engine: &Engine, id: &toolcrib::CallId) -> Vec<EventKind> {
    let query = EventQuery::Call(id.clone());
    let events = engine.events(&caller(), &query, 0, 100).await.unwrap();
    events.into_iter().map(|event| event.record.kind).collect()
}

/// A tool that counts how often it runs.
fn counting(name: &str, effect: Effect, ran: &Arc<AtomicU32>) -> FnTool {
    let ran = ran.clone();
    FnTool::new(name, "Counts", move |_: Nothing| {
        let ran = ran.clone();
        async move { Ok::<u32, Fault>(ran.fetch_add(1, Ordering::SeqCst) + 1) }
    })
    .effect(effect)
}

#[tokio::test]
async fn a_read_that_is_over_at_once_is_stored_as_what_it_came_to() {
    let ran = Arc::new(AtomicU32::new(0));
    let engine =
        Engine::builder().tool(counting("t.read", Effect::Read, &ran)).start().await.unwrap();
    let ticket = engine.invoke(&caller(), ask("t.read")).await.unwrap();
    assert_eq!(ticket.call.status, Status::Succeeded);
    assert_eq!(ticket.call.version, 1, "one commit");
    assert_eq!(engine.open_call_count(), 0);
    let stored = engine.call(&caller(), &ticket.call.id).await.unwrap();
    assert_eq!(*stored, *ticket.call);
    let told = [EventKind::Requested, EventKind::Started, EventKind::Finished];
    assert_eq!(kinds(&engine, &stored.id).await, told);
}

#[tokio::test]
async fn what_changes_the_world_is_stored_before_it_begins() {
    for effect in [Effect::Idempotent, Effect::Irreversible] {
        let ran = Arc::new(AtomicU32::new(0));
        let store = FlakyStore::new(Chance::of(1));
        let tool = counting("t.write", effect, &ran);
        let engine = Engine::builder().store(store.clone()).tool(tool).start().await.unwrap();
        store.fail(100);
        assert!(engine.invoke(&caller(), ask("t.write")).await.is_err());
        assert_eq!(ran.load(Ordering::SeqCst), 0, "nothing ran that is not stored");
    }
}

#[tokio::test]
async fn a_read_whose_ticket_cannot_be_stored_is_stopped() {
    let store = FlakyStore::new(Chance::of(1));
    let stopped = Arc::new(Notify::new());
    let tool = {
        let stopped = stopped.clone();
        FnTool::with_context("t.read", "Waits", move |_: Nothing, context: ToolContext| {
            let stopped = stopped.clone();
            // Notifies from another task, because this one is dropped.
            tokio::spawn(async move {
                context.canceled.cancelled().await;
                stopped.notify_one();
            });
            std::future::pending::<Result<u32, Fault>>()
        })
        .effect(Effect::Read)
    };
    let engine = Engine::builder().store(store.clone()).tool(tool).start().await.unwrap();
    store.fail(100);
    assert!(engine.invoke(&caller(), ask("t.read")).await.is_err());
    stopped.notified().await;
    assert_eq!(engine.open_call_count(), 0);
}

#[tokio::test]
async fn progress_that_is_told_before_the_ticket_is_stored_is_kept() {
    let go = Arc::new(Notify::new());
    let slow = {
        let go = go.clone();
        FnTool::with_context("t.slow", "Waits", move |_: Nothing, context: ToolContext| {
            let go = go.clone();
            async move {
                context.report_progress(AttemptProgress {
                    percent: Some(10.0),
                    ..AttemptProgress::default()
                });
                go.notified().await;
                Ok::<u32, Fault>(1)
            }
        })
    };
    let quick = FnTool::with_context("t.quick", "Does not", |_: Nothing, context: ToolContext| {
        context.report_progress(AttemptProgress {
            message: Some("half".into()),
            ..AttemptProgress::default()
        });
        async { Ok::<u32, Fault>(1) }
    });
    let builder = Engine::builder().tool(slow.effect(Effect::Read));
    let engine = builder.tool(quick.effect(Effect::Read)).start().await.unwrap();
    let quick = engine.invoke(&caller(), ask("t.quick")).await.unwrap();
    let told = [EventKind::Requested, EventKind::Started, EventKind::Progress, EventKind::Finished];
    assert_eq!(kinds(&engine, &quick.call.id).await, told);

    let slow = engine.invoke(&caller(), ask("t.slow")).await.unwrap();
    assert_eq!(slow.call.status, Status::Running);
    let query = EventQuery::Call(slow.call.id.clone());
    let mut told = engine.events(&caller(), &query, 0, 100).await.unwrap();
    while told.last().unwrap().record.kind != EventKind::Progress {
        let after = told.last().unwrap().number;
        told.extend(engine.events(&caller(), &query, after, 100).await.unwrap());
    }
    go.notify_one();
    let ended = engine.wait_until_finished(&caller(), &slow.call.id).await.unwrap();
    assert_eq!(ended.status, Status::Succeeded);
}

#[tokio::test]
async fn of_too_much_progress_the_first_is_kept() {
    let chatty = FnTool::with_context("t.chatty", "Talks", |_: Nothing, context: ToolContext| {
        for n in 0..10_000 {
            context.report_progress(AttemptProgress {
                percent: Some(f64::from(n) / 100.0),
                ..AttemptProgress::default()
            });
        }
        async { Ok::<u32, Fault>(1) }
    });
    let limits = EngineLimits { max_progress_events: 3, ..EngineLimits::default() };
    let builder = Engine::builder().limits(limits).tool(chatty.effect(Effect::Read));
    let engine = builder.start().await.unwrap();
    let ticket = engine.invoke(&caller(), ask("t.chatty")).await.unwrap();
    let told = [
        EventKind::Requested,
        EventKind::Started,
        EventKind::Progress,
        EventKind::Progress,
        EventKind::Progress,
        EventKind::Finished,
    ];
    assert_eq!(kinds(&engine, &ticket.call.id).await, told);
}

#[tokio::test]
async fn a_read_that_fails_at_once_is_tried_again() {
    let ran = Arc::new(AtomicU32::new(0));
    let counted = ran.clone();
    let tool = FnTool::new("t.read", "Fails first", move |_: Nothing| {
        let first = counted.fetch_add(1, Ordering::SeqCst) == 0;
        async move { if first { Err(Fault::runtime("not yet").retryable(true)) } else { Ok(7_u32) } }
    });
    let backoff = Backoff { initial_ms: 1, ..Backoff::default() };
    let again = ExecutionPolicyPatch {
        max_retries: Some(2),
        backoff: Some(backoff),
        ..ExecutionPolicyPatch::default()
    };
    let tool = tool.effect(Effect::Read).policy(again);
    let engine = Engine::builder().tool(tool).start().await.unwrap();
    let ticket = engine.invoke(&caller(), ask("t.read")).await.unwrap();
    let ended = engine.wait_until_finished(&caller(), &ticket.call.id).await.unwrap();
    assert_eq!((ended.status, ended.attempt), (Status::Succeeded, 2));
    assert_eq!(ran.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_key_that_was_used_runs_nothing_again() {
    let ran = Arc::new(AtomicU32::new(0));
    let engine =
        Engine::builder().tool(counting("t.read", Effect::Read, &ran)).start().await.unwrap();
    for _ in 0..3 {
        let asked = CallRequest { idempotency_key: Some("k".into()), ..ask("t.read") };
        let ticket = engine.invoke(&caller(), asked).await.unwrap();
        engine.wait_until_finished(&caller(), &ticket.call.id).await.unwrap();
    }
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_key_that_was_used_is_answered_while_nothing_new_is_taken() {
    let hang = FnTool::new("t.hang", "Never ends", |_: Nothing| {
        std::future::pending::<Result<u32, Fault>>()
    });
    let limits = EngineLimits { max_open_calls: 1, ..EngineLimits::default() };
    let engine = Engine::builder().limits(limits).tool(hang).start().await.unwrap();
    let asked = || CallRequest { idempotency_key: Some("k".into()), ..ask("t.hang") };
    let first = engine.invoke(&caller(), asked()).await.unwrap();
    assert!(engine.invoke(&caller(), ask("t.hang")).await.is_err(), "there is no room");
    let again = engine.invoke(&caller(), asked()).await.unwrap();
    assert!(again.replayed);
    assert_eq!(again.call.id, first.call.id);
}

/// Polls a future until the store has committed its request, then drops it.
async fn hang_up<F: Future>(store: &FlakyStore, asking: F) {
    let held = store.answering.write().await;
    let mut asking = Box::pin(asking);
    for _ in 0..10 {
        assert!(futures::poll!(&mut asking).is_pending());
        tokio::task::yield_now().await;
    }
    drop(asking);
    drop(held);
}

#[tokio::test]
async fn who_hangs_up_while_the_ticket_is_stored_leaves_a_call_that_ends() {
    let ran = Arc::new(AtomicU32::new(0));
    let store = FlakyStore::new(Chance::of(1));
    let tool = counting("t.write", Effect::Irreversible, &ran);
    let engine = Engine::builder().store(store.clone()).tool(tool).start().await.unwrap();
    let asked = CallRequest { run_id: "run_gone".into(), ..ask("t.write") };
    hang_up(&store, engine.invoke(&caller(), asked)).await;
    let query = EventQuery::Run("run_gone".into());
    let mut told = engine.events(&caller(), &query, 0, 100).await.unwrap();
    while told.last().unwrap().record.kind != EventKind::Finished {
        let after = told.last().unwrap().number;
        told.extend(engine.events(&caller(), &query, after, 100).await.unwrap());
    }
    assert_eq!(ran.load(Ordering::SeqCst), 1);
    assert_eq!(engine.open_call_count(), 0);
}

#[tokio::test]
async fn who_hangs_up_while_a_cancel_is_stored_has_canceled() {
    let store = FlakyStore::new(Chance::of(1));
    let hang = FnTool::new("t.hang", "Never ends", |_: Nothing| {
        std::future::pending::<Result<u32, Fault>>()
    });
    let engine = Engine::builder().store(store.clone()).tool(hang).start().await.unwrap();
    let ticket = engine.invoke(&caller(), ask("t.hang")).await.unwrap();
    let who = caller();
    hang_up(&store, engine.cancel(&who, &ticket.call.id, None)).await;
    let ended = engine.wait_until_finished(&caller(), &ticket.call.id).await.unwrap();
    assert_eq!(ended.status, Status::Canceled);
    assert_eq!(engine.open_call_count(), 0, "and nothing of it is kept");
}
