//! Changes of the system time, and suspended machines: stored times follow the time of day, and
//! deadlines, retries, waits and leases keep the time that they have left.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::approvals::{DecisionRequest, DecisionVerdict};
use toolcrib::calls::Until;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::call::Hold;
use toolcrib::domain::call::approval::ApprovalScope;
use toolcrib::maintenance::{deadlines, dispatch, purge};
use toolcrib::ports::clock::{Clock, ManualClock};
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::{Call, CallId, CallRequest, Caller, Effect, Engine, Fault, FnTool, Status};

const START_MS: u64 = 1_700_000_000_000;
const TIMEOUT_MS: u64 = 30_000;
const HOUR_MS: i64 = 3_600_000;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn stuck_tool() -> FnTool {
    FnTool::new("t.stuck", "Never ends", |_: Nothing| async {
        std::future::pending::<Result<u32, Fault>>().await
    })
    .effect(Effect::Irreversible)
    .timeout_ms(TIMEOUT_MS)
}

fn failing_tool() -> FnTool {
    FnTool::new("t.failing", "Fails", |_: Nothing| async {
        Err::<u32, _>(Fault::runtime("not yet").retryable(true))
    })
    .effect(Effect::Read)
    .timeout_ms(TIMEOUT_MS)
}

struct Node {
    clock: ManualClock,
    store: Arc<MemoryStore>,
    engine: Engine,
}

impl Node {
    async fn start(store: Arc<MemoryStore>, at_ms: u64) -> Self {
        let clock = ManualClock::at(at_ms);
        let builder = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
        let engine = builder.tool(stuck_tool()).tool(failing_tool()).build_idle().await.unwrap();
        Self { clock, store, engine }
    }

    async fn invoke(&self, tool: &str) -> CallId {
        let request = CallRequest::new(tool, "{}").unwrap();
        self.engine.calls().invoke(&caller(), request).await.unwrap().call.id.clone()
    }

    async fn call(&self, id: &CallId) -> Arc<Call> {
        self.engine.calls().call(&caller(), id).await.unwrap()
    }

    async fn stored(&self, id: &CallId) -> Call {
        self.store.call("default", id).await.unwrap().unwrap()
    }

    async fn run_timers(&self) {
        deadlines::run_once(self.engine.calls()).await;
    }
}

fn caller() -> Caller {
    Caller::local("default")
}

fn stepped(ms: u64, step_ms: i64) -> u64 {
    ms.saturating_add_signed(step_ms)
}

#[tokio::test]
async fn a_step_of_the_clock_neither_ends_nor_extends_a_call() {
    for step_ms in [HOUR_MS, -HOUR_MS] {
        let node = Node::start(Arc::default(), START_MS).await;
        let id = node.invoke("t.stuck").await;
        node.clock.advance(10_000);
        node.clock.step_wall(step_ms);
        node.run_timers().await;
        assert_eq!(node.call(&id).await.status, Status::Running, "{step_ms}");
        // The time left is stored: a restart does not change it either.
        let deadline_ms = stepped(START_MS + TIMEOUT_MS, step_ms);
        assert_eq!(node.stored(&id).await.deadline_ms, deadline_ms, "{step_ms}");
        node.clock.advance(TIMEOUT_MS - 10_000 - 1);
        node.run_timers().await;
        assert_eq!(node.call(&id).await.status, Status::Running, "{step_ms}");
        node.clock.advance(1);
        node.run_timers().await;
        let call = node.call(&id).await;
        assert_eq!(call.status, Status::Timeout, "{step_ms}");
        assert_eq!(call.created_ms, START_MS, "a time of the past stays");
        // By the new time of day, and never before the call was created.
        assert_eq!(call.completed_ms, Some(deadline_ms.max(START_MS)), "{step_ms}");
    }
}

/// A call may change before its new deadline is stored.
#[tokio::test]
async fn a_call_that_ends_right_after_a_step_leaves_no_timer() {
    for step_ms in [HOUR_MS, -HOUR_MS] {
        let node = Node::start(Arc::default(), START_MS).await;
        let id = node.invoke("t.stuck").await;
        node.clock.step_wall(step_ms);
        node.engine.calls().cancel(&caller(), &id, None).await.unwrap();
        let call = node.stored(&id).await;
        assert_eq!(call.status, Status::Canceled);
        assert_eq!(call.completed_ms, Some(stepped(START_MS, step_ms).max(START_MS)));
        node.clock.advance(TIMEOUT_MS * 2);
        assert_eq!(deadlines::run_once(node.engine.calls()).await, 0, "no timer is left");
    }
}

#[tokio::test]
async fn new_calls_have_the_time_of_day_after_a_step() {
    let node = Node::start(Arc::default(), START_MS).await;
    node.clock.step_wall(-HOUR_MS);
    let id = node.invoke("t.stuck").await;
    let now_ms = stepped(START_MS, -HOUR_MS);
    let call = node.call(&id).await;
    assert_eq!((call.created_ms, call.started_ms), (now_ms, Some(now_ms)));
    assert_eq!(call.deadline_ms, now_ms + TIMEOUT_MS);
    assert_eq!(node.engine.now_ms(), now_ms);
    node.clock.advance(TIMEOUT_MS);
    node.run_timers().await;
    assert_eq!(node.call(&id).await.status, Status::Timeout);
}

#[tokio::test]
async fn a_retry_is_due_at_its_time_although_the_clock_is_stepped() {
    for step_ms in [HOUR_MS, -HOUR_MS] {
        let node = Node::start(Arc::default(), START_MS).await;
        let id = node.invoke("t.failing").await;
        while node.call(&id).await.status == Status::Running {
            tokio::task::yield_now().await;
        }
        let Some(Hold::Retry { at_ms }) = node.call(&id).await.hold else { panic!() };
        node.clock.step_wall(step_ms);
        node.clock.advance(at_ms - START_MS - 1);
        node.run_timers().await;
        assert_eq!(dispatch::run_once(node.engine.calls()).await, 0, "{step_ms}: not due");
        node.clock.advance(1);
        node.run_timers().await;
        assert_eq!(dispatch::run_once(node.engine.calls()).await, 1, "{step_ms}: due");
    }
}

#[tokio::test]
async fn a_wait_lasts_as_long_as_asked_although_the_clock_is_stepped() {
    for step_ms in [HOUR_MS, -HOUR_MS] {
        let node = Node::start(Arc::default(), START_MS).await;
        let id = node.invoke("t.stuck").await;
        let (caller, calls) = (caller(), node.engine.calls());
        let mut wait = std::pin::pin!(calls.wait(&caller, &id, Until::EndedWithin(1_000)));
        assert!(futures::poll!(&mut wait).is_pending());
        node.clock.step_wall(step_ms);
        node.clock.advance(999);
        assert!(futures::poll!(&mut wait).is_pending(), "{step_ms}");
        node.clock.advance(1);
        assert_eq!(wait.await.unwrap().status, Status::Running, "{step_ms}");
    }
}

#[tokio::test]
async fn a_time_of_day_in_the_future_purges_nothing() {
    let node = Node::start(Arc::default(), START_MS).await;
    let id = node.invoke("t.stuck").await;
    node.engine.calls().cancel(&caller(), &id, None).await.unwrap();
    node.clock.step_wall(HOUR_MS * 24 * 365);
    assert_eq!(purge::run_once(node.engine.calls(), HOUR_MS as u64).await.unwrap(), 0);
    assert!(node.clock.wall_ms() > START_MS + HOUR_MS as u64);
}

/// A call that waits for an approval, until an hour after the start.
async fn waiting_call(node: &Node) -> CallId {
    let mut rule = AccessRule::new("default", "stuck", RuleVerdict::Ask);
    rule.tools = vec!["t.stuck".into()];
    rule.expires_in_ms = Some(HOUR_MS as u64);
    let operator = Caller::operator("default");
    node.engine.admin().set_rule(&operator, rule).await.unwrap();
    let request = CallRequest::new("t.stuck", "{}").unwrap();
    let ticket = node.engine.calls().invoke(&Caller::anonymous("default"), request).await.unwrap();
    assert!(ticket.call.waits_for_approval());
    ticket.call.id.clone()
}

#[tokio::test]
async fn no_step_of_the_clock_extends_an_approval() {
    // A step back: the wait ends when its time has passed.
    let node = Node::start(Arc::default(), START_MS).await;
    let id = waiting_call(&node).await;
    node.clock.step_wall(-10 * HOUR_MS);
    node.run_timers().await;
    assert!(node.call(&id).await.waits_for_approval());
    node.clock.advance(HOUR_MS as u64);
    node.run_timers().await;
    assert_eq!(node.call(&id).await.status, Status::Failed);

    // A step forward, or a suspended machine: the wait ends at its time of day.
    let node = Node::start(Arc::default(), START_MS).await;
    let id = waiting_call(&node).await;
    let approval = node.call(&id).await.pending_approval().unwrap().to_owned();
    node.clock.step_wall(HOUR_MS);
    let decision = DecisionRequest {
        approval_id: approval,
        verdict: DecisionVerdict::Approve,
        reason: None,
        scope: ApprovalScope::Once,
        until_ms: None,
        args: None,
    };
    let operator = Caller::operator("default");
    let results = node.engine.approvals().decide(&operator, vec![decision]).await.unwrap();
    assert!(results[0].is_err(), "{results:?}");
    node.run_timers().await;
    let call = node.call(&id).await;
    let fault = call.outcome.as_ref().unwrap().error.as_ref().unwrap();
    assert!(fault.message.starts_with("approval expired"), "{}", fault.message);
}
