//! Standing approvals: they end with their run, at their date, and for good, whatever the clock
//! does.

use std::sync::Arc;

use serde_json::json;
use toolcrib::approvals::{DecisionRequest, DecisionVerdict};
use toolcrib::calls::Until;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::call::approval::{ApprovalScope, StandingApproval, UNOBSERVED_RUN_MS};
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::run::RunStatus;
use toolcrib::maintenance::{claim_queued, standing_approvals};
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::runs::RunRequest;
use toolcrib::{Call, CallRequest, Caller, Engine, Fault, FnTool};

use crate::script::{Script, SingleModel};

const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: u64 = 3_600_000;

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn mail() -> FnTool {
    FnTool::new("mail.send", "Sends", |_: Nothing| async { Ok::<i64, Fault>(1) })
}

/// The caller whose calls wait.
fn caller() -> Caller {
    Caller::anonymous("default")
}

fn operator() -> Caller {
    Caller::operator("default")
}

async fn start(store: &Arc<MemoryStore>, clock: &ManualClock) -> Engine {
    let builder = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
    let engine = builder.tool(mail()).start().await.unwrap();
    ask(&engine).await;
    engine
}

async fn ask(engine: &Engine) {
    let mut rule = AccessRule::new("default", "mail", RuleVerdict::Ask);
    rule.tools = vec!["mail.send".into()];
    engine.admin().set_rule(&operator(), rule).await.unwrap();
}

async fn send(engine: &Engine, run_id: &str) -> Arc<Call> {
    let request =
        CallRequest { run_id: run_id.into(), ..CallRequest::new("mail.send", "{}").unwrap() };
    engine.calls().invoke(&caller(), request).await.unwrap().call.clone()
}

/// Approves the call and every equal one within the scope.
async fn approve(engine: &Engine, call: &Call, scope: ApprovalScope, until_ms: Option<u64>) {
    let decision = DecisionRequest {
        approval_id: call.pending_approval().unwrap().to_owned(),
        verdict: DecisionVerdict::Approve,
        reason: None,
        scope,
        until_ms,
        args: None,
    };
    let results = engine.approvals().decide(&operator(), vec![decision]).await.unwrap();
    assert!(results[0].is_ok(), "{results:?}");
}

async fn standing(engine: &Engine) -> Vec<StandingApproval> {
    engine.approvals().standing(&operator()).await.unwrap()
}

#[tokio::test]
async fn setting_the_clock_back_revives_no_standing_approval() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(START_MS));
    let engine = start(&store, &clock).await;
    let held = send(&engine, "r").await;
    approve(&engine, &held, ApprovalScope::Until, Some(START_MS + HOUR_MS)).await;
    assert!(!send(&engine, "r").await.waits_for_approval());
    clock.advance(HOUR_MS);
    assert_eq!(standing(&engine).await, []);
    clock.step_wall(-5 * HOUR_MS as i64);
    assert_eq!(standing(&engine).await, [], "an hour has passed");
    assert!(send(&engine, "r").await.waits_for_approval());
    standing_approvals::run_once(engine.approvals()).await;
    // Over a restart with a clock that is wrong from the beginning.
    let again = start(&store, &ManualClock::at(START_MS - 5 * HOUR_MS)).await;
    assert_eq!(standing(&again).await, []);
    assert!(send(&again, "other").await.waits_for_approval());
}

#[tokio::test]
async fn a_restart_in_the_past_gives_a_standing_approval_no_time_back() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(START_MS));
    let engine = start(&store, &clock).await;
    let held = send(&engine, "r").await;
    approve(&engine, &held, ApprovalScope::Until, Some(START_MS + HOUR_MS)).await;
    clock.advance(HOUR_MS / 2);
    standing_approvals::run_once(engine.approvals()).await;
    let clock = ManualClock::at(START_MS - 5 * HOUR_MS);
    let again = start(&store, &clock).await;
    assert_eq!(standing(&again).await.len(), 1);
    clock.advance(HOUR_MS / 2);
    assert_eq!(standing(&again).await, [], "the other half hour has passed");
}

#[tokio::test]
async fn a_standing_approval_for_a_run_of_the_caller_ends_after_a_day() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(START_MS));
    let engine = start(&store, &clock).await;
    let held = send(&engine, "r").await;
    approve(&engine, &held, ApprovalScope::Run, None).await;
    let granted = standing(&engine).await;
    assert_eq!((granted[0].scope, granted[0].ends_with_run), (ApprovalScope::Run, false));
    clock.advance(UNOBSERVED_RUN_MS - 1);
    assert!(!send(&engine, "r").await.waits_for_approval());
    clock.advance(1);
    assert!(send(&engine, "r").await.waits_for_approval());
}

#[tokio::test]
async fn a_standing_approval_for_a_run_ends_with_the_run() {
    let store = Arc::new(MemoryStore::default());
    let script = Script::default().calls(&[("c1", "mail__send", "{}")]).says("I wait.");
    let script = script.calls(&[("c2", "mail__send", "{}")]).says("Sent twice.");
    let builder = Engine::builder().store(store.clone());
    let builder = builder.models(Arc::new(SingleModel(Arc::new(script))));
    let engine = builder.tool(mail()).start().await.unwrap();
    ask(&engine).await;
    let messages = vec![json!({ "role": "user", "content": "Send." })];
    let request = RunRequest { model: "scripted".into(), messages, ..RunRequest::default() };
    let run = engine.runs().start_run(&caller(), request).await.unwrap().run;
    while engine.runs().find_run(&caller(), &run.id).await.unwrap().status != RunStatus::Waiting {
        tokio::task::yield_now().await;
    }
    let query = toolcrib::approvals::ApprovalQuery { limit: 10, ..Default::default() };
    let listed = engine.approvals().list(&operator(), query).await.unwrap().approvals;
    let held = engine.calls().call(&operator(), &listed[0].call_id).await.unwrap();
    approve(&engine, &held, ApprovalScope::Run, None).await;
    assert!(standing(&engine).await[0].ends_with_run);
    let ended = engine.runs().wait_for_run(&caller(), &run.id, 30_000).await.unwrap();
    assert_eq!(ended.answer.unwrap().text, "Sent twice.", "the second call needed no decision");
    assert_eq!(standing(&engine).await, [], "the run has ended");
    assert!(send(&engine, &run.id).await.waits_for_approval());
    standing_approvals::run_once(engine.approvals()).await;
    let stored = store.approvals().standing_approvals(0).await.unwrap();
    assert!(stored.iter().all(|one| one.revoked_ms.is_some()), "it ended durably: {stored:?}");
    let audit = engine.admin().audit_log(&operator(), None, 100).await.unwrap();
    let ends = audit.iter().filter(|row| row.entry.action == "standing_approval.expired");
    let reasons: Vec<&str> = ends.map(|row| row.entry.reason.as_str()).collect();
    assert!(reasons.len() == 1 && reasons[0].contains("run has ended"), "{reasons:?}");
}

#[tokio::test]
async fn a_call_that_a_standing_approval_released_asks_again_if_it_ends_before_the_start() {
    let (store, clock) = (Arc::new(MemoryStore::default()), ManualClock::at(START_MS));
    let builder = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
    let slow = FnTool::new("mail.send", "Sends", |_: Nothing| async {
        std::future::pending::<Result<i64, Fault>>().await
    });
    let engine = builder
        .tool(slow.policy(ExecutionPolicyPatch { max_parallel: Some(1), ..Default::default() }))
        .start()
        .await
        .unwrap();
    ask(&engine).await;
    let held = send(&engine, "r").await;
    approve(&engine, &held, ApprovalScope::Until, Some(START_MS + HOUR_MS)).await;
    let queued = send(&engine, "r").await;
    assert!(!queued.waits_for_approval() && !queued.status.is_terminal());
    clock.advance(HOUR_MS);
    engine.calls().cancel(&operator(), &held.id, None).await.unwrap();
    claim_queued::run_once(engine.calls()).await;
    let until = Until::EndedWithin(1);
    engine.calls().wait(&operator(), &queued.id, until).await.unwrap();
    let call = engine.calls().call(&operator(), &queued.id).await.unwrap();
    assert!(call.waits_for_approval() || call.status.is_terminal(), "{:?}", call.hold);
    assert_ne!(call.attempt, 2);
}
