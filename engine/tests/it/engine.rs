//! Tests of the engine as an embedding program uses it: in memory, with typed functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use toolcrib::calls::Until;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toolcrib::calls::{CallQuery, EventQuery};
use toolcrib::domain::call::Hold;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::Code;
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::domain::tool::Fallback;
use toolcrib::domain::tool::args::{ArgumentMapping, ArgumentSource as Comes};
use toolcrib::maintenance::{claim_queued, deadlines, purge};
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::core::ExecutionPolicies;
use toolcrib::ports::store::{MemoryStore, RunToolDefinitions, Store};
use toolcrib::{
    AttemptProgress, Call, CallRequest, Caller, Effect, Engine, EngineLimits, Fault, FnTool,
    Status, ToolContext,
};

use crate::support::{FlakyStore, SeededRng};

#[derive(Deserialize, JsonSchema)]
struct Add {
    a: i64,
    b: i64,
}

#[derive(Serialize, JsonSchema)]
struct Sum {
    sum: i64,
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn adder() -> FnTool {
    FnTool::new("calc.add", "Adds two integers", |args: Add| async move {
        Ok::<_, Fault>(Sum { sum: args.a + args.b })
    })
}

async fn call(engine: &Engine, tool: &str, args: &str) -> Arc<Call> {
    let caller = Caller::local("default");
    let ticket =
        engine.calls().invoke(&caller, CallRequest::new(tool, args).unwrap()).await.unwrap();
    engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap()
}

fn fault(call: &Call) -> &Fault {
    call.outcome.as_ref().unwrap().error.as_ref().unwrap()
}

#[tokio::test]
async fn a_typed_function_is_a_tool() {
    let engine = Engine::builder().tool(adder()).start().await.unwrap();
    let call = call(&engine, "calc.add", r#"{"a": 20, "b": 22}"#).await;
    assert_eq!(call.status, Status::Succeeded);
    assert_eq!(call.outcome.as_ref().unwrap().data.as_ref().unwrap().text(), r#"{"sum":42}"#);
    let tool = engine.registry().tool(&Caller::local("default"), "calc.add").unwrap();
    let schema = tool.definition.input_schema.to_value();
    assert_eq!(schema["required"], serde_json::json!(["a", "b"]));
    assert!(tool.definition.output_schema.is_some());
    engine.shut_down(std::time::Duration::from_secs(1)).await;
}

#[tokio::test]
async fn invalid_arguments_are_refused_before_anything_is_stored() {
    let engine = Engine::builder().tool(adder()).start().await.unwrap();
    let caller = Caller::local("default");
    let request = CallRequest::new("calc.add", r#"{"a": "x"}"#).unwrap();
    let error = engine.calls().invoke(&caller, request).await.err().unwrap();
    assert_eq!(error.code(), Code::ValidationError);
    let toolcrib::Error::Refused { fault, .. } = error else { panic!() };
    assert_eq!(fault.detail.unwrap()["problems"].as_array().unwrap().len(), 2);
    let page =
        engine.calls().calls(&caller, CallQuery { limit: 10, ..Default::default() }).await.unwrap();
    assert!(page.calls.is_empty());
}

#[tokio::test]
async fn a_panicking_tool_fails_its_call_only() {
    let broken = FnTool::new("t.panic", "Breaks", |_: Nothing| async {
        if true {
            panic!("out of cheese");
        }
        Ok::<_, Fault>(1)
    });
    let engine = Engine::builder().tool(broken).tool(adder()).start().await.unwrap();
    let broken = call(&engine, "t.panic", "{}").await;
    assert_eq!((broken.status, fault(&broken).code), (Status::Failed, Code::RuntimeError));
    assert!(fault(&broken).message.contains("out of cheese"));
    assert_eq!(call(&engine, "calc.add", r#"{"a":1,"b":1}"#).await.status, Status::Succeeded);
}

#[tokio::test]
async fn a_read_tool_is_retried_and_an_irreversible_one_is_not() {
    let executions = Arc::new(AtomicU32::new(0));
    let flaky = |name: &str, effect| {
        let executions = executions.clone();
        FnTool::new(name, "Fails twice", move |_: Nothing| {
            let n = executions.fetch_add(1, Ordering::SeqCst);
            async move { if n < 2 { Err(Fault::runtime("not yet")) } else { Ok(n) } }
        })
        .effect(effect)
    };
    let policies = ExecutionPolicies {
        global: toolcrib::domain::retry::ExecutionPolicy {
            backoff: Backoff { initial_ms: 1, ..Backoff::default() },
            ..Default::default()
        },
        ..ExecutionPolicies::default()
    };
    let engine = Engine::builder()
        .tool(flaky("t.read", Effect::Read))
        .tool(flaky("t.once", Effect::Irreversible))
        .policies(policies)
        .start()
        .await
        .unwrap();
    let read = call(&engine, "t.read", "{}").await;
    let metrics = read.outcome.as_ref().unwrap().metrics;
    assert_eq!((read.status, metrics.attempts, metrics.retries), (Status::Succeeded, 3, 2));
    executions.store(0, Ordering::SeqCst);
    let once = call(&engine, "t.once", "{}").await;
    assert_eq!((once.status, once.attempt), (Status::Failed, 1));
}

#[tokio::test]
async fn a_fallback_takes_over_with_mapped_arguments() {
    let unreachable = FnTool::new("t.gone", "Never there", |_: Add| async {
        Err::<Sum, _>(Fault::unreachable("no route"))
    })
    .policy(ExecutionPolicyPatch { max_retries: Some(0), ..ExecutionPolicyPatch::default() })
    .fallback(vec![Fallback {
        tool: "calc.add".into(),
        args: Some(ArgumentMapping::from([
            ("a".to_owned(), Comes::Pointer("/b".into())),
            ("b".to_owned(), Comes::Value(100.into())),
        ])),
    }]);
    let engine = Engine::builder().tool(unreachable).tool(adder()).start().await.unwrap();
    let call = call(&engine, "t.gone", r#"{"a":1,"b":2}"#).await;
    assert_eq!(call.outcome.as_ref().unwrap().data.as_ref().unwrap().text(), r#"{"sum":102}"#);
    assert_eq!((call.tool_name.as_str(), call.target.tool.as_str()), ("t.gone", "calc.add"));
}

#[tokio::test]
async fn calls_beyond_max_parallel_wait_in_the_queue() {
    let running = Arc::new(AtomicU32::new(0));
    let peak = Arc::new(AtomicU32::new(0));
    let tool = {
        let (running, peak) = (running.clone(), peak.clone());
        FnTool::new("t.slow", "Counts who runs", move |_: Nothing| {
            let (running, peak) = (running.clone(), peak.clone());
            async move {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                peak.fetch_max(now, Ordering::SeqCst);
                tokio::task::yield_now().await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Fault>(now)
            }
        })
        .policy(ExecutionPolicyPatch { max_parallel: Some(2), ..ExecutionPolicyPatch::default() })
    };
    let engine = Engine::builder().tool(tool).start().await.unwrap();
    let calls = (0..50).map(|_| call(&engine, "t.slow", "{}"));
    for call in futures::future::join_all(calls).await {
        assert_eq!(call.status, Status::Succeeded);
    }
    assert_eq!(peak.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_call_beyond_the_open_call_limit_is_refused_with_retry_after() {
    let stuck = FnTool::new("t.stuck", "Never ends", |_: Nothing| async {
        std::future::pending::<Result<u32, Fault>>().await
    });
    let limits = EngineLimits { max_open_calls: 3, ..EngineLimits::default() };
    let engine = Engine::builder().tool(stuck).limits(limits).start().await.unwrap();
    let caller = Caller::local("default");
    for _ in 0..3 {
        engine.calls().invoke(&caller, CallRequest::new("t.stuck", "{}").unwrap()).await.unwrap();
    }
    let refused =
        engine.calls().invoke(&caller, CallRequest::new("t.stuck", "{}").unwrap()).await.err();
    let Some(toolcrib::Error::Refused { fault, retry_after_ms }) = refused else { panic!() };
    assert_eq!((fault.code, retry_after_ms.is_some()), (Code::Overloaded, true));
}

#[tokio::test]
async fn deadlines_retries_and_retention_use_the_engines_clock() {
    let clock = ManualClock::at(1_700_000_000_000);
    let stuck = FnTool::new("t.stuck", "Never ends", |_: Nothing| async {
        std::future::pending::<Result<u32, Fault>>().await
    })
    .timeout_ms(5_000);
    let failing = FnTool::new("t.failing", "Always fails", |_: Nothing| async {
        Err::<u32, _>(Fault::unreachable("no"))
    });
    let engine = Engine::builder().clock(Arc::new(clock.clone())).tool(stuck).tool(failing);
    let engine = engine.build_idle().await.unwrap();
    let caller = Caller::local("default");
    let request = CallRequest::new("t.stuck", "{}").unwrap();
    let stuck = engine.calls().invoke(&caller, request).await.unwrap().call.id.clone();
    let request = CallRequest::new("t.failing", "{}").unwrap();
    let failing = engine.calls().invoke(&caller, request).await.unwrap().call.id.clone();
    while engine.calls().call(&caller, &failing).await.unwrap().status == Status::Running {
        tokio::task::yield_now().await;
    }
    let waiting = engine.calls().call(&caller, &failing).await.unwrap();
    assert!(matches!(waiting.hold, Some(Hold::Retry { .. })), "{waiting:?}");
    assert_eq!(deadlines::run_once(engine.calls()).await, 0, "nothing is due yet");
    clock.advance(5_000);
    deadlines::run_once(engine.calls()).await;
    assert_eq!(engine.calls().call(&caller, &stuck).await.unwrap().status, Status::Timeout);
    assert_eq!(claim_queued::run_once(engine.calls()).await, 1, "the retry is due");
    assert_eq!(purge::run_once(engine.calls(), 1_000).await.unwrap(), 0, "too young");
    clock.advance(1_001);
    assert_eq!(purge::run_once(engine.calls(), 1_000).await.unwrap(), 1);
    assert_eq!(engine.calls().call(&caller, &stuck).await.err().unwrap().code(), Code::NotFound);
}

#[tokio::test]
async fn shutdown_does_not_wait_for_a_store_that_cannot_write() {
    let clock = ManualClock::at(1_700_000_000_000);
    let store = FlakyStore::new(SeededRng::new(1));
    let stuck = FnTool::new("t.stuck", "Never ends", |_: Nothing| async {
        std::future::pending::<Result<u32, Fault>>().await
    });
    let engine = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
    let engine = engine.tool(stuck.timeout_ms(5_000)).build_idle().await.unwrap();
    let request = CallRequest::new("t.stuck", "{}").unwrap();
    engine.calls().invoke(&Caller::local("default"), request).await.unwrap();
    store.fail(100);
    clock.advance(5_000);
    let sweep = tokio::spawn({
        let engine = engine.clone();
        async move { deadlines::run_once(engine.calls()).await }
    });
    engine.shut_down(std::time::Duration::ZERO).await;
    // A call that is overdue and cannot be stored is left to the next start.
    let swept = tokio::time::timeout(std::time::Duration::from_secs(60), sweep).await;
    assert_eq!(swept.unwrap().unwrap(), 1);
}

#[tokio::test]
async fn old_runs_without_calls_are_purged_in_one_pass() {
    let store = Arc::new(MemoryStore::default());
    let run = |n: u32| RunToolDefinitions {
        project: "default".to_owned(),
        run_id: format!("run_{n}"),
        tool_definitions: Json::parse("[]").unwrap(),
        updated_ms: 1,
    };
    for n in 0..450 {
        store.put_run_tool_definitions(run(n)).await.unwrap();
    }
    let engine = Engine::builder().store(store.clone()).build_idle().await.unwrap();
    purge::run_once(engine.calls(), 1_000).await.unwrap();
    for n in 0..450 {
        assert!(
            store.run_tool_definitions("default", &format!("run_{n}")).await.unwrap().is_none(),
            "{n}"
        );
    }
}

#[tokio::test]
async fn cancellation_reaches_the_function_and_progress_is_stored() {
    let seen = Arc::new(tokio::sync::Notify::new());
    let tool = {
        let seen = seen.clone();
        FnTool::with_context("t.long", "Waits", move |_: Nothing, context: ToolContext| {
            let seen = seen.clone();
            async move {
                context.report_progress(AttemptProgress {
                    percent: Some(50.0),
                    ..AttemptProgress::default()
                });
                tokio::spawn(async move {
                    context.canceled.cancelled().await;
                    seen.notify_one();
                });
                std::future::pending::<Result<u32, Fault>>().await
            }
        })
    };
    let engine = Engine::builder().tool(tool).start().await.unwrap();
    let caller = Caller::local("default");
    let request = CallRequest::new("t.long", "{}").unwrap();
    let id = engine.calls().invoke(&caller, request).await.unwrap().call.id.clone();
    let query = EventQuery::Call(id.clone());
    let mut after = 0;
    'progress: loop {
        for event in engine.calls().events(&caller, &query, after, 10).await.unwrap() {
            after = event.number;
            if event.record.kind == EventKind::Progress {
                assert_eq!(event.record.data["percent"], 50.0);
                break 'progress;
            }
        }
    }
    let canceled =
        engine.calls().cancel(&caller, &id, Some("changed my mind".into())).await.unwrap();
    assert_eq!(canceled.status, Status::Canceled);
    assert!(fault(&canceled).message.contains("changed my mind"));
    seen.notified().await;
}

#[tokio::test]
async fn projects_do_not_see_each_others_calls() {
    let engine = Engine::builder().tool(adder()).start().await.unwrap();
    let (owner, other) = (Caller::local("here"), Caller::local("there"));
    let request = CallRequest::new("calc.add", r#"{"a":1,"b":1}"#).unwrap();
    let id = engine.calls().invoke(&owner, request).await.unwrap().call.id.clone();
    engine.calls().wait(&owner, &id, Until::Ended).await.unwrap();
    assert_eq!(engine.calls().call(&other, &id).await.err().unwrap().code(), Code::NotFound);
    assert_eq!(
        engine.calls().cancel(&other, &id, None).await.err().unwrap().code(),
        Code::NotFound
    );
    let page =
        engine.calls().calls(&other, CallQuery { limit: 10, ..Default::default() }).await.unwrap();
    assert!(page.calls.is_empty());
}

/// A state is stored a moment before it is visible. A reader that learns of the end in between and
/// then reads the call must not see the previous state.
#[tokio::test]
async fn a_read_after_an_event_returns_the_state_of_that_event() {
    let store = FlakyStore::new(SeededRng::new(1));
    let hang = FnTool::new("t.hang", "Never ends", |_: Nothing| {
        std::future::pending::<Result<u32, Fault>>()
    });
    let engine = Engine::builder().store(store.clone()).tool(hang).start().await.unwrap();
    let caller = Caller::local("default");
    let request = CallRequest::new("t.hang", "{}").unwrap();
    let id = engine.calls().invoke(&caller, request).await.unwrap().call.id.clone();
    let gate = store.reply_gate.write().await;
    let canceling = engine.calls().cancel(&caller, &id, None);
    let by_event = async {
        let query = EventQuery::Call(id.clone());
        let mut after = 0;
        loop {
            let events = engine.calls().events(&caller, &query, after, 10).await.unwrap();
            after = events.last().unwrap().number;
            if events.last().unwrap().record.kind == EventKind::Canceled {
                return engine.calls().call(&caller, &id).await.unwrap().status;
            }
        }
    };
    let by_list = async {
        let canceled =
            CallQuery { limit: 10, status: Some(Status::Canceled), ..Default::default() };
        while engine.calls().calls(&caller, canceled.clone()).await.unwrap().calls.is_empty() {
            tokio::task::yield_now().await;
        }
        engine.calls().call(&caller, &id).await.unwrap().status
    };
    let answered = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(gate);
    };
    let (canceled, event, list, ()) = tokio::join!(canceling, by_event, by_list, answered);
    assert_eq!(canceled.unwrap().status, Status::Canceled);
    assert_eq!((event, list), (Status::Canceled, Status::Canceled));
}
