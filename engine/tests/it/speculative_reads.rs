//! Tests of speculative reads (started before their ticket is stored) and of callers that
//! disconnect during the commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use toolcrib::calls::Until;

use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Notify;
use toolcrib::calls::EventQuery;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::{
    AttemptProgress, CallRequest, Caller, Effect, Engine, EngineLimits, Fault, FnTool, Status,
    ToolContext,
};

use crate::support::{FlakyStore, SeededRng};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn call_request(tool: &str) -> CallRequest {
    CallRequest::new(tool, "{}").unwrap()
}

fn caller() -> Caller {
    Caller::local("default")
}

async fn kinds(engine: &Engine, id: &toolcrib::CallId) -> Vec<EventKind> {
    let query = EventQuery::Call(id.clone());
    let events = engine.calls().events(&caller(), &query, 0, 100).await.unwrap();
    events.into_iter().map(|event| event.record.kind).collect()
}

/// A tool that counts how often it runs.
fn counting_tool(name: &str, effect: Effect, ran: &Arc<AtomicU32>) -> FnTool {
    let ran = ran.clone();
    FnTool::new(name, "Counts", move |_: Nothing| {
        let ran = ran.clone();
        async move { Ok::<u32, Fault>(ran.fetch_add(1, Ordering::SeqCst) + 1) }
    })
    .effect(effect)
}

#[tokio::test]
async fn a_read_that_ends_before_its_commit_is_stored_in_one_commit() {
    let ran = Arc::new(AtomicU32::new(0));
    let engine =
        Engine::builder().tool(counting_tool("t.read", Effect::Read, &ran)).start().await.unwrap();
    let ticket = engine.calls().invoke(&caller(), call_request("t.read")).await.unwrap();
    assert_eq!(ticket.call.status, Status::Succeeded);
    assert_eq!(ticket.call.version, 1, "one commit");
    assert_eq!(engine.calls().open_call_count(), 0);
    let stored = engine.calls().call(&caller(), &ticket.call.id).await.unwrap();
    assert_eq!(*stored, *ticket.call);
    let events = [EventKind::Requested, EventKind::Started, EventKind::Finished];
    assert_eq!(kinds(&engine, &stored.id).await, events);
}

#[tokio::test]
async fn a_call_with_side_effects_starts_only_after_its_commit() {
    for effect in [Effect::Idempotent, Effect::Irreversible] {
        let ran = Arc::new(AtomicU32::new(0));
        let store = FlakyStore::new(SeededRng::new(1));
        let tool = counting_tool("t.write", effect, &ran);
        let engine = Engine::builder().store(store.clone()).tool(tool).start().await.unwrap();
        store.fail(100);
        assert!(engine.calls().invoke(&caller(), call_request("t.write")).await.is_err());
        assert_eq!(ran.load(Ordering::SeqCst), 0, "an uncommitted call must not run");
    }
}

#[tokio::test]
async fn a_speculative_read_is_canceled_when_its_commit_fails() {
    let store = FlakyStore::new(SeededRng::new(1));
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
    assert!(engine.calls().invoke(&caller(), call_request("t.read")).await.is_err());
    stopped.notified().await;
    assert_eq!(engine.calls().open_call_count(), 0);
}

#[tokio::test]
async fn progress_reported_before_the_commit_is_stored() {
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
    let quick = engine.calls().invoke(&caller(), call_request("t.quick")).await.unwrap();
    let events =
        [EventKind::Requested, EventKind::Started, EventKind::Progress, EventKind::Finished];
    assert_eq!(kinds(&engine, &quick.call.id).await, events);

    let slow = engine.calls().invoke(&caller(), call_request("t.slow")).await.unwrap();
    assert_eq!(slow.call.status, Status::Running);
    let query = EventQuery::Call(slow.call.id.clone());
    let mut events = engine.calls().events(&caller(), &query, 0, 100).await.unwrap();
    while events.last().unwrap().record.kind != EventKind::Progress {
        let after = events.last().unwrap().number;
        events.extend(engine.calls().events(&caller(), &query, after, 100).await.unwrap());
    }
    go.notify_one();
    let ended = engine.calls().wait(&caller(), &slow.call.id, Until::Ended).await.unwrap();
    assert_eq!(ended.status, Status::Succeeded);
}

#[tokio::test]
async fn progress_events_beyond_the_limit_are_dropped() {
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
    let ticket = engine.calls().invoke(&caller(), call_request("t.chatty")).await.unwrap();
    let events = [
        EventKind::Requested,
        EventKind::Started,
        EventKind::Progress,
        EventKind::Progress,
        EventKind::Progress,
        EventKind::Finished,
    ];
    assert_eq!(kinds(&engine, &ticket.call.id).await, events);
}

#[tokio::test]
async fn a_failed_speculative_read_is_retried() {
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
    let ticket = engine.calls().invoke(&caller(), call_request("t.read")).await.unwrap();
    let ended = engine.calls().wait(&caller(), &ticket.call.id, Until::Ended).await.unwrap();
    assert_eq!((ended.status, ended.attempt), (Status::Succeeded, 2));
    assert_eq!(ran.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_repeated_idempotency_key_does_not_run_the_tool_again() {
    let ran = Arc::new(AtomicU32::new(0));
    let engine =
        Engine::builder().tool(counting_tool("t.read", Effect::Read, &ran)).start().await.unwrap();
    for _ in 0..3 {
        let request = CallRequest { idempotency_key: Some("k".into()), ..call_request("t.read") };
        let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
        engine.calls().wait(&caller(), &ticket.call.id, Until::Ended).await.unwrap();
    }
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_repeated_idempotency_key_is_replayed_at_the_open_call_limit() {
    let hang = FnTool::new("t.hang", "Never ends", |_: Nothing| {
        std::future::pending::<Result<u32, Fault>>()
    });
    let limits = EngineLimits { max_open_calls: 1, ..EngineLimits::default() };
    let engine = Engine::builder().limits(limits).tool(hang).start().await.unwrap();
    let request = || CallRequest { idempotency_key: Some("k".into()), ..call_request("t.hang") };
    let first = engine.calls().invoke(&caller(), request()).await.unwrap();
    assert!(
        engine.calls().invoke(&caller(), call_request("t.hang")).await.is_err(),
        "at the limit of open calls"
    );
    let again = engine.calls().invoke(&caller(), request()).await.unwrap();
    assert!(again.replayed);
    assert_eq!(again.call.id, first.call.id);
}

/// Polls a future until the store has committed its request, then drops it.
async fn drop_during_commit<F: Future>(store: &FlakyStore, operation: F) {
    let gate = store.reply_gate.write().await;
    let mut operation = Box::pin(operation);
    for _ in 0..10 {
        assert!(futures::poll!(&mut operation).is_pending());
        tokio::task::yield_now().await;
    }
    drop(operation);
    drop(gate);
}

#[tokio::test]
async fn a_disconnect_during_the_commit_leaves_a_call_that_ends() {
    let ran = Arc::new(AtomicU32::new(0));
    let store = FlakyStore::new(SeededRng::new(1));
    let tool = counting_tool("t.write", Effect::Irreversible, &ran);
    let engine = Engine::builder().store(store.clone()).tool(tool).start().await.unwrap();
    let request = CallRequest { run_id: "run_gone".into(), ..call_request("t.write") };
    drop_during_commit(&store, engine.calls().invoke(&caller(), request)).await;
    let query = EventQuery::Run("run_gone".into());
    let mut events = engine.calls().events(&caller(), &query, 0, 100).await.unwrap();
    while events.last().unwrap().record.kind != EventKind::Finished {
        let after = events.last().unwrap().number;
        events.extend(engine.calls().events(&caller(), &query, after, 100).await.unwrap());
    }
    assert_eq!(ran.load(Ordering::SeqCst), 1);
    assert_eq!(engine.calls().open_call_count(), 0);
}

#[tokio::test]
async fn a_disconnect_during_a_cancel_still_cancels_the_call() {
    let store = FlakyStore::new(SeededRng::new(1));
    let hang = FnTool::new("t.hang", "Never ends", |_: Nothing| {
        std::future::pending::<Result<u32, Fault>>()
    });
    let engine = Engine::builder().store(store.clone()).tool(hang).start().await.unwrap();
    let ticket = engine.calls().invoke(&caller(), call_request("t.hang")).await.unwrap();
    let canceler = caller();
    drop_during_commit(&store, engine.calls().cancel(&canceler, &ticket.call.id, None)).await;
    let ended = engine.calls().wait(&caller(), &ticket.call.id, Until::Ended).await.unwrap();
    assert_eq!(ended.status, Status::Canceled);
    assert_eq!(engine.calls().open_call_count(), 0, "the call is no longer in memory");
}
