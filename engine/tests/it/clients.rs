//! Tests of clients and their work items: limits that survive a restart and change with a
//! registration, and delivery only to the client that owns an item.

use std::sync::Arc;
use std::time::Duration;

use toolcrib::calls::{AttemptReport, EventQuery};
use toolcrib::clients::ConnectOptions;
use toolcrib::clients::{ClientMessage, ClientSession, Redelivery, Transport, WorkItem};
use toolcrib::domain::directory::UnlistedTools;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::Code;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::Fallback;
use toolcrib::maintenance::claim_queued;
use toolcrib::ports::store::MemoryStore;
use toolcrib::registry::ClientRegistration;
use toolcrib::{
    AttemptProgress, Call, CallId, CallRequest, Caller, Effect, Engine, EngineLimits, Fault, Json,
    Status, ToolDefinition,
};

use crate::support::client_tool;

fn caller() -> Caller {
    Caller::local("default")
}

/// A tool with a limit on concurrent calls.
fn limited_tool(max_parallel: Option<u32>) -> ToolDefinition {
    let policy = ExecutionPolicyPatch { max_parallel, ..ExecutionPolicyPatch::default() };
    ToolDefinition { policy, ..client_tool("x.one", Effect::Idempotent) }
}

async fn register(engine: &Engine, client_id: &str, tools: Vec<ToolDefinition>) {
    let (client_id, others) = (client_id.to_owned(), UnlistedTools::Withdraw);
    let registration = ClientRegistration { client_id, tools, unlisted_tools: others };
    engine.registry().register(&caller(), registration).await.unwrap();
}

async fn invoke(engine: &Engine, tool: &str, client_id: Option<&str>) -> CallId {
    let mut request = CallRequest::new(tool, "{}").unwrap();
    (request.client_id, request.retry) = (client_id.map(str::to_owned), Some(0));
    engine.calls().invoke(&caller(), request).await.unwrap().call.id.clone()
}

async fn connect(engine: &Engine, client_id: &str) -> ClientSession {
    let (window, redelivery, transport) = (10, Redelivery::ReversibleOnly, Transport::Streaming);
    let options = ConnectOptions { client_id: client_id.into(), window, redelivery, transport };
    engine.clients().connect(&caller(), options).await.unwrap()
}

async fn next_work_item(session: &mut ClientSession) -> WorkItem {
    let message = tokio::time::timeout(Duration::from_secs(30), session.next()).await;
    let Ok(Some(ClientMessage::Execute(request))) = message else { panic!("{message:?}") };
    request
}

async fn acknowledge(engine: &Engine, id: &CallId, client_id: &str) -> Result<Arc<Call>, Code> {
    engine
        .calls()
        .acknowledge_call(&caller(), id, client_id, None)
        .await
        .map_err(|error| error.code())
}

async fn report(
    engine: &Engine,
    id: &CallId,
    client_id: Option<&str>,
    result: Result<Json, Fault>,
) -> Result<Arc<Call>, Code> {
    let report = AttemptReport { attempt: None, client_id: client_id.map(str::to_owned), result };
    engine.calls().report(&caller(), id, report).await.map_err(|error| error.code())
}

/// Waits until the client queue is idle: separate tasks assign its items.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_call_in_flight_keeps_its_slot_across_a_restart() {
    let store = Arc::new(MemoryStore::default());
    let before = Engine::builder().store(store.clone()).build_idle().await.unwrap();
    register(&before, "c1", vec![limited_tool(Some(1))]).await;
    let first = invoke(&before, "x.one", None).await;
    let second = invoke(&before, "x.one", None).await;
    let mut session = connect(&before, "c1").await;
    assert_eq!(next_work_item(&mut session).await.call_id, first);
    acknowledge(&before, &first, "c1").await.unwrap();
    let after = Engine::builder().store(store).build_idle().await.unwrap();
    assert_eq!(after.calls().recover().await.unwrap(), 2);
    assert_eq!(claim_queued::run_once(after.calls()).await, 0, "the only slot is taken");
    let third = invoke(&after, "x.one", None).await;
    assert_eq!(after.calls().queued_call_count(), 2);
    assert_eq!(after.calls().call(&caller(), &first).await.unwrap().status, Status::Running);
    settle().await;
    report(&after, &first, Some("c1"), Ok(Json::empty_object())).await.unwrap();
    let mut session = connect(&after, "c1").await;
    for id in [second, third] {
        assert_eq!(claim_queued::run_once(after.calls()).await, 1, "one at a time");
        assert_eq!(next_work_item(&mut session).await.call_id, id);
        report(&after, &id, Some("c1"), Ok(Json::empty_object())).await.unwrap();
    }
}

#[tokio::test]
async fn a_changed_limit_applies_to_queued_calls() {
    let engine = Engine::builder().start().await.unwrap();
    register(&engine, "c1", vec![limited_tool(Some(1))]).await;
    let mut session = connect(&engine, "c1").await;
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(invoke(&engine, "x.one", None).await);
    }
    assert_eq!(next_work_item(&mut session).await.call_id, ids[0]);
    assert_eq!(engine.calls().queued_call_count(), 5);
    register(&engine, "c1", vec![limited_tool(Some(3))]).await;
    for id in &ids[1..3] {
        assert_eq!(next_work_item(&mut session).await.call_id, *id);
    }
    assert_eq!(engine.calls().queued_call_count(), 3);
    // Lowered again: calls in flight continue, and no further call starts until they have ended.
    register(&engine, "c1", vec![limited_tool(Some(1))]).await;
    for id in &ids[..2] {
        report(&engine, id, None, Ok(Json::empty_object())).await.unwrap();
    }
    settle().await;
    assert_eq!(engine.calls().queued_call_count(), 3);
    report(&engine, &ids[2], None, Ok(Json::empty_object())).await.unwrap();
    assert_eq!(next_work_item(&mut session).await.call_id, ids[3]);
    register(&engine, "c1", vec![limited_tool(None)]).await;
    for id in &ids[4..] {
        assert_eq!(next_work_item(&mut session).await.call_id, *id);
    }
    engine.shut_down(Duration::ZERO).await;
}

#[tokio::test]
async fn a_pinned_call_falls_back_only_to_tools_of_its_client() {
    let engine = Engine::builder().start().await.unwrap();
    let fallback = vec![Fallback { tool: "x.alt".into(), args: None }];
    let main = ToolDefinition { fallback, ..client_tool("x.main", Effect::Read) };
    let alt = client_tool("x.alt", Effect::Read);
    register(&engine, "c2", vec![alt.clone()]).await;
    register(&engine, "c3", vec![main.clone()]).await;
    let mut session = connect(&engine, "c3").await;
    for (tools, falls_back) in [(vec![main.clone()], false), (vec![main, alt], true)] {
        register(&engine, "c3", tools).await;
        let id = invoke(&engine, "x.main", Some("c3")).await;
        assert_eq!(next_work_item(&mut session).await.tool, "x.main");
        let failed = Err(Fault::runtime("no").without_side_effect());
        let call = report(&engine, &id, Some("c3"), failed).await.unwrap();
        if falls_back {
            assert_eq!(next_work_item(&mut session).await.tool, "x.alt");
        } else {
            assert_eq!(call.status, Status::Failed);
        }
    }
    engine.shut_down(Duration::ZERO).await;
}

#[tokio::test]
async fn a_pinned_call_waits_until_its_client_offers_the_tool_again() {
    let engine = Engine::builder().start().await.unwrap();
    let tool = |name| client_tool(name, Effect::Read);
    register(&engine, "c1", vec![tool("x.one"), tool("x.two")]).await;
    register(&engine, "c2", vec![tool("x.one")]).await;
    let pinned = invoke(&engine, "x.one", Some("c1")).await;
    let other = invoke(&engine, "x.two", Some("c1")).await;
    register(&engine, "c1", vec![tool("x.two")]).await;
    settle().await;
    let mut session = connect(&engine, "c1").await;
    assert_eq!(next_work_item(&mut session).await.call_id, other, "the other call is not delayed");
    assert!(session.try_next().is_none());
    register(&engine, "c1", vec![tool("x.one"), tool("x.two")]).await;
    assert_eq!(next_work_item(&mut session).await.call_id, pinned);
    engine.shut_down(Duration::ZERO).await;
}

#[tokio::test]
async fn only_the_pinned_client_can_acknowledge_or_report_a_call() {
    let engine = Engine::builder().start().await.unwrap();
    for client_id in ["p1", "p2"] {
        register(&engine, client_id, vec![client_tool("x.one", Effect::Read)]).await;
    }
    let id = invoke(&engine, "x.one", Some("p1")).await;
    settle().await;
    assert_eq!(acknowledge(&engine, &id, "p2").await.err(), Some(Code::PermissionDenied));
    let impersonated = report(&engine, &id, Some("p2"), Ok(Json::empty_object())).await;
    assert_eq!(impersonated.err(), Some(Code::PermissionDenied));
    let progress = engine
        .calls()
        .report_progress(&caller(), &id, Some("p2"), None, AttemptProgress::default())
        .await;
    assert_eq!(progress.err().map(|error| error.code()), Some(Code::PermissionDenied));
    assert_eq!(engine.calls().call(&caller(), &id).await.unwrap().status, Status::Pending);
    let call = acknowledge(&engine, &id, "p1").await.unwrap();
    assert_eq!(call.acknowledged_by.as_deref(), Some("p1"));
    let call = report(&engine, &id, None, Ok(Json::empty_object())).await.unwrap();
    assert_eq!(call.status, Status::Succeeded, "a report without a client id is accepted");
    engine.shut_down(Duration::ZERO).await;
}

#[tokio::test]
async fn only_a_client_that_offers_the_tool_can_acknowledge_a_call() {
    let engine = Engine::builder().start().await.unwrap();
    register(&engine, "c1", vec![client_tool("x.one", Effect::Read)]).await;
    register(&engine, "c2", vec![client_tool("x.two", Effect::Read)]).await;
    let id = invoke(&engine, "x.one", None).await;
    settle().await;
    assert_eq!(acknowledge(&engine, &id, "ghost").await.err(), Some(Code::NotFound));
    assert_eq!(acknowledge(&engine, &id, "c2").await.err(), Some(Code::PermissionDenied));
    assert_eq!(engine.calls().call(&caller(), &id).await.unwrap().status, Status::Pending);
    let listed: Vec<String> = engine
        .clients()
        .clients(&caller())
        .unwrap()
        .into_iter()
        .map(|view| view.client_id)
        .collect();
    assert_eq!(listed, ["c1", "c2"]);
    // An item stays with the client that received it, even if the client stops providing the tool.
    let mut session = connect(&engine, "c1").await;
    assert_eq!(next_work_item(&mut session).await.call_id, id);
    register(&engine, "c1", vec![]).await;
    assert_eq!(acknowledge(&engine, &id, "c1").await.unwrap().status, Status::Running);
    assert_eq!(acknowledge(&engine, &id, "c1").await.unwrap().status, Status::Running);
    report(&engine, &id, Some("c1"), Ok(Json::empty_object())).await.unwrap();
    assert_eq!(
        acknowledge(&engine, &id, "c2").await.err(),
        Some(Code::Conflict),
        "the call has ended"
    );
    engine.shut_down(Duration::ZERO).await;
}

#[tokio::test]
async fn progress_events_before_a_restart_count_toward_the_limit() {
    let store = Arc::new(MemoryStore::default());
    let start = async || {
        let limits = EngineLimits { max_progress_events: 5, ..EngineLimits::default() };
        let engine =
            Engine::builder().store(store.clone()).limits(limits).build_idle().await.unwrap();
        engine.calls().recover().await.unwrap();
        engine
    };
    let mut engine = start().await;
    register(&engine, "c1", vec![client_tool("x.one", Effect::Read)]).await;
    let id = invoke(&engine, "x.one", None).await;
    for _ in 0..3 {
        for _ in 0..3 {
            engine
                .calls()
                .report_progress(&caller(), &id, None, None, AttemptProgress::default())
                .await
                .unwrap();
        }
        engine = start().await;
    }
    let events = engine.calls().events(&caller(), &EventQuery::Call(id), 0, 100).await.unwrap();
    assert_eq!(events.iter().filter(|event| event.record.kind == EventKind::Progress).count(), 5);
}

#[tokio::test]
async fn a_call_that_ends_before_it_is_queued_is_not_delivered() {
    let engine = Engine::builder().build_idle().await.unwrap();
    register(&engine, "c1", vec![client_tool("x.one", Effect::Read)]).await;
    // Its work item is on the way to the client queue when the call ends.
    let id = invoke(&engine, "x.one", None).await;
    engine.calls().cancel(&caller(), &id, None).await.unwrap();
    settle().await;
    let mut session = connect(&engine, "c1").await;
    assert!(session.try_next().is_none());
}
