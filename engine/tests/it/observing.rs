//! Tests of the observer: it receives every ended attempt, even one that its process did not
//! survive, and every ended call, after the commit.

use std::sync::Arc;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::fault::Code;
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::domain::trace::{SpanIds, TraceParent};
use toolcrib::ports::observer::{EndedAttempt, EndedCall, Observer};
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool, ToolContext};

const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

#[derive(Default)]
struct Heard {
    attempts: Vec<(u32, Option<Code>, TraceParent)>,
    ends: Vec<(String, Option<String>, TraceParent)>,
}

#[derive(Default)]
struct Ear(Mutex<Heard>);

impl Observer for Ear {
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

fn asked() -> CallRequest {
    let traceparent = Some(GIVEN.to_owned());
    CallRequest { traceparent, ..CallRequest::new("t.read", "{}").unwrap() }
}

fn quick() -> ExecutionPolicyPatch {
    let backoff = Backoff { initial_ms: 1, ..Backoff::default() };
    ExecutionPolicyPatch { backoff: Some(backoff), ..ExecutionPolicyPatch::default() }
}

#[tokio::test]
async fn every_attempt_and_the_end_is_heard_and_the_trace_is_handed_on() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = told.clone();
    let flaky =
        FnTool::with_context("t.read", "Fails once", move |_: Nothing, context: ToolContext| {
            telling.lock().push(context.traceparent.unwrap());
            async move { if context.attempt < 2 { Err(Fault::unreachable("gone")) } else { Ok(1) } }
        });
    let ear = Arc::new(Ear::default());
    let tool = flaky.effect(Effect::Read).policy(quick());
    let engine = Engine::builder().tool(tool).observer(ear.clone()).start().await.unwrap();
    let caller = Caller::local("default");
    let ticket = engine.invoke(&caller, asked()).await.unwrap();
    engine.wait_until_finished(&caller, &ticket.call.id).await.unwrap();
    engine.shut_down(std::time::Duration::from_secs(10)).await;
    let heard = ear.0.lock();
    let attempts: Vec<_> = heard.attempts.iter().map(|(n, code, _)| (*n, *code)).collect();
    assert_eq!(attempts, [(1, Some(Code::UpstreamUnavailable)), (2, None)]);
    let handed_on: Vec<TraceParent> = heard.attempts.iter().map(|(.., span)| *span).collect();
    assert_eq!(*told.lock(), handed_on, "below the span of each attempt");
    let own = engine.call_traceparent(&ticket.call);
    let ends: Vec<_> =
        heard.ends.iter().map(|(s, about, _)| (s.as_str(), about.as_deref())).collect();
    assert_eq!(ends, [("SUCCEEDED", Some("Fails once"))]);
    assert_eq!(Some(heard.ends[0].2), own);
    assert_eq!(own.unwrap().trace_id_text(), "0af7651916cd43dd8448eb211c80319c");
}

#[tokio::test]
async fn an_attempt_that_its_process_did_not_survive_is_heard_by_the_next() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let hangs = FnTool::new("t.read", "Hangs", |_: Nothing| async {
        std::future::pending::<Result<(), Fault>>().await
    });
    let first = Engine::builder().store(store.clone()).tool(hangs.effect(Effect::Read));
    let first = first.start().await.unwrap();
    let caller = Caller::local("default");
    let ticket = first.invoke(&caller, asked()).await.unwrap();
    first.shut_down(std::time::Duration::ZERO).await;
    let works = FnTool::new("t.read", "Works", |_: Nothing| async { Ok::<_, Fault>(1) });
    let ear = Arc::new(Ear::default());
    let second = Engine::builder().store(store).tool(works.effect(Effect::Read).policy(quick()));
    let second = second.observer(ear.clone()).start().await.unwrap();
    second.wait_until_finished(&caller, &ticket.call.id).await.unwrap();
    second.shut_down(std::time::Duration::from_secs(10)).await;
    let heard = ear.0.lock();
    let attempts: Vec<_> = heard.attempts.iter().map(|(n, code, _)| (*n, *code)).collect();
    assert_eq!(attempts, [(1, Some(Code::OutcomeUnknown)), (2, None)]);
    assert_eq!(heard.ends.len(), 1);
}
