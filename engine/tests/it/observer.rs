//! Tests of the observer: it receives every ended attempt, even one that its process did not
//! survive, and every ended call, after the commit.

use std::sync::Arc;
use toolcrib::calls::Until;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::fault::Code;
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::domain::trace::{SpanIds, TraceParent};
use toolcrib::ports::observer::{EndedAttempt, EndedCall, Observer};
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool, ToolContext};

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

#[derive(Default)]
struct Observations {
    attempts: Vec<(u32, Option<Code>, TraceParent)>,
    ends: Vec<(String, Option<String>, TraceParent)>,
}

#[derive(Default)]
struct RecordingObserver(Mutex<Observations>);

impl Observer for RecordingObserver {
    fn is_sampled(&self, ids: &SpanIds) -> bool {
        ids.parent.is_some_and(|parent| parent.is_sampled())
    }

    fn attempt_ended(&self, attempted: &EndedAttempt<'_>) {
        let number = attempted.call.attempt;
        let began_ms = attempted.call.attempt_dispatched_ms.unwrap();
        assert!(began_ms <= attempted.ended_ms);
        let span = attempted.ids.attempt(number, true);
        self.0.lock().attempts.push((number, attempted.failed, span));
    }

    fn call_ended(&self, ended: &EndedCall<'_>) {
        let status = ended.call.status.as_str().to_owned();
        let span = ended.ids.call(true);
        self.0.lock().ends.push((status, (ended.description)(), span));
    }
}

fn request() -> CallRequest {
    let traceparent = Some(TRACEPARENT.to_owned());
    CallRequest { traceparent, ..CallRequest::new("t.read", "{}").unwrap() }
}

fn short_backoff() -> ExecutionPolicyPatch {
    let backoff = Backoff { initial_ms: 1, ..Backoff::default() };
    ExecutionPolicyPatch { backoff: Some(backoff), ..ExecutionPolicyPatch::default() }
}

#[tokio::test]
async fn attempts_and_end_are_observed_and_the_trace_is_propagated() {
    let passed = Arc::new(Mutex::new(Vec::new()));
    let passed_to_tool = passed.clone();
    let flaky =
        FnTool::with_context("t.read", "Fails once", move |_: Nothing, context: ToolContext| {
            passed_to_tool.lock().push(context.traceparent.unwrap());
            async move { if context.attempt < 2 { Err(Fault::unreachable("gone")) } else { Ok(1) } }
        });
    let observer = Arc::new(RecordingObserver::default());
    let tool = flaky.effect(Effect::Read).policy(short_backoff());
    let engine = Engine::builder().tool(tool).observer(observer.clone()).start().await.unwrap();
    let caller = Caller::local("default");
    let ticket = engine.calls().invoke(&caller, request()).await.unwrap();
    engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap();
    engine.shut_down(std::time::Duration::from_secs(10)).await;
    let observed = observer.0.lock();
    let attempts: Vec<_> = observed.attempts.iter().map(|(n, code, _)| (*n, *code)).collect();
    assert_eq!(attempts, [(1, Some(Code::UpstreamUnavailable)), (2, None)]);
    let attempt_spans: Vec<TraceParent> =
        observed.attempts.iter().map(|(.., span)| *span).collect();
    assert_eq!(*passed.lock(), attempt_spans, "each attempt receives its own span");
    let traceparent = engine.calls().call_traceparent(&ticket.call);
    let ends: Vec<_> =
        observed.ends.iter().map(|(s, about, _)| (s.as_str(), about.as_deref())).collect();
    assert_eq!(ends, [("SUCCEEDED", Some("Fails once"))]);
    assert_eq!(Some(observed.ends[0].2), traceparent);
    assert_eq!(traceparent.unwrap().trace_id_text(), "0af7651916cd43dd8448eb211c80319c");
}

#[tokio::test]
async fn an_attempt_lost_in_a_crash_is_observed_after_the_restart() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let hangs = FnTool::new("t.read", "Hangs", |_: Nothing| async {
        std::future::pending::<Result<(), Fault>>().await
    });
    let first = Engine::builder().store(store.clone()).tool(hangs.effect(Effect::Read));
    let first = first.start().await.unwrap();
    let caller = Caller::local("default");
    let ticket = first.calls().invoke(&caller, request()).await.unwrap();
    first.shut_down(std::time::Duration::ZERO).await;
    let works = FnTool::new("t.read", "Works", |_: Nothing| async { Ok::<_, Fault>(1) });
    let observer = Arc::new(RecordingObserver::default());
    let second =
        Engine::builder().store(store).tool(works.effect(Effect::Read).policy(short_backoff()));
    let second = second.observer(observer.clone()).start().await.unwrap();
    second.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap();
    second.shut_down(std::time::Duration::from_secs(10)).await;
    let observed = observer.0.lock();
    let attempts: Vec<_> = observed.attempts.iter().map(|(n, code, _)| (*n, *code)).collect();
    assert_eq!(attempts, [(1, Some(Code::OutcomeUnknown)), (2, None)]);
    assert_eq!(observed.ends.len(), 1);
}
