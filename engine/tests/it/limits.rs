//! Usage limits: calls per minute, open calls and parallel calls of agents, users, tools and
//! projects; across restarts and changes of the time of day.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::calls::{Batch, Until};
use toolcrib::domain::caller::{AuthMethod, CallerAttributes, Role};
use toolcrib::domain::directory::usage_limits::{ConfiguredLimit, LimitKind, LimitValues};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::maintenance::{claim_queued, deadlines};
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::core::ExecutionPolicies;
use toolcrib::ports::store::MemoryStore;
use toolcrib::{Call, CallRequest, Caller, Effect, Engine, Fault, FnTool, Json, Status};

const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: i64 = 3_600_000;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

struct Node {
    clock: ManualClock,
    store: Arc<MemoryStore>,
    engine: Engine,
}

impl Node {
    async fn start() -> Self {
        Self::on(Arc::default(), ManualClock::at(START_MS), Vec::new()).await
    }

    async fn on(store: Arc<MemoryStore>, clock: ManualClock, limits: Vec<ConfiguredLimit>) -> Self {
        let quick =
            FnTool::new("t.quick", "Ends at once", |_: Nothing| async { Ok::<_, Fault>(1) })
                .effect(Effect::Read);
        let stuck = FnTool::new("t.stuck", "Never ends", |_: Nothing| async {
            std::future::pending::<Result<u32, Fault>>().await
        });
        let policies = ExecutionPolicies { limits, ..ExecutionPolicies::default() };
        let builder = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
        let builder = builder.tool(quick).tool(stuck).policies(policies);
        let engine = builder.build_idle().await.unwrap();
        engine.calls().restore_rates().await.unwrap();
        engine.calls().recover().await.unwrap();
        Self { clock, store, engine }
    }

    /// Stops without a shutdown, and starts again on the same store.
    async fn crash(self, now_ms: u64) -> Self {
        Self::on(self.store, ManualClock::at(now_ms), Vec::new()).await
    }

    async fn limit(&self, kind: LimitKind, name: &str, values: LimitValues) {
        let admin = Caller::local("default");
        self.engine.admin().set_limit(&admin, kind, name, values).await.unwrap();
    }

    async fn call(&self, caller: &Caller, tool: &str) -> Result<Arc<Call>, Error> {
        let request = CallRequest::new(tool, "{}").unwrap();
        self.engine.calls().invoke(caller, request).await.map(|ticket| ticket.call)
    }

    /// Makes calls until one is refused. Returns their number and the refusal.
    async fn exhaust(&self, caller: &Caller, tool: &str) -> (usize, Fault, u64) {
        for count in 0..1_000 {
            match self.call(caller, tool).await {
                Ok(_) => {}
                Err(Error::Refused { fault, retry_after_ms }) => {
                    return (count, fault, retry_after_ms.unwrap());
                }
                Err(error) => panic!("{error}"),
            }
        }
        panic!("no limit applies");
    }
}

fn agent(name: &str) -> Caller {
    Caller::new("default", name, Role::Admin, AuthMethod::Local)
}

fn user(agent_name: &str, user: &str) -> Caller {
    let attributes = CallerAttributes { user: Some(user.into()), ..CallerAttributes::default() };
    Caller { attributes: Arc::new(attributes), ..agent(agent_name) }
}

fn per_minute(limit: u32) -> LimitValues {
    LimitValues { per_minute: Some(limit), ..LimitValues::default() }
}

fn max_open(limit: u32) -> LimitValues {
    LimitValues { max_open: Some(limit), ..LimitValues::default() }
}

fn max_parallel(limit: u32) -> LimitValues {
    LimitValues { max_parallel: Some(limit), ..LimitValues::default() }
}

#[tokio::test]
async fn calls_over_the_rate_are_refused_until_the_window_moves_on() {
    let node = Node::start().await;
    node.limit(LimitKind::Agent, "ada", per_minute(3)).await;
    let (count, fault, retry_after_ms) = node.exhaust(&agent("ada"), "t.quick").await;
    assert_eq!((count, fault.code), (3, Code::RateLimited));
    assert!(fault.message.contains("agent \"ada\" may make 3 calls per minute"), "{fault}");
    let seconds = retry_after_ms.div_ceil(1_000);
    assert!(fault.message.ends_with(&format!("retry after {seconds} s")), "{fault}");
    assert_eq!(fault.detail.as_ref().unwrap()["limit"]["per_minute"], 3);
    assert!(node.call(&agent("bob"), "t.quick").await.is_ok(), "another agent has no limit");
    node.clock.advance(retry_after_ms - 1);
    assert!(node.call(&agent("ada"), "t.quick").await.is_err());
    node.clock.advance(1);
    assert!(node.call(&agent("ada"), "t.quick").await.is_ok());
}

#[tokio::test]
async fn each_kind_counts_its_own_members() {
    let node = Node::start().await;
    node.limit(LimitKind::User, "*", per_minute(2)).await;
    node.limit(LimitKind::User, "vip", per_minute(4)).await;
    assert_eq!(node.exhaust(&user("ada", "uma"), "t.quick").await.0, 2);
    assert_eq!(node.exhaust(&user("bob", "uma"), "t.quick").await.0, 0, "the user, not the agent");
    assert_eq!(node.exhaust(&user("ada", "vip"), "t.quick").await.0, 4, "a value of its own");
    assert!(node.call(&agent("ada"), "t.quick").await.is_ok(), "no user, no limit of users");
    node.limit(LimitKind::Tool, "t.quick", per_minute(9)).await;
    let (count, fault, _) = node.exhaust(&agent("ada"), "t.quick").await;
    assert_eq!(count, 9, "counted from when it is set: {fault}");
    assert!(fault.message.contains("tool \"t.quick\""), "{fault}");
    node.limit(LimitKind::Project, "default", max_open(1)).await;
    assert!(node.call(&agent("ada"), "t.stuck").await.is_ok());
    let (count, fault, _) = node.exhaust(&agent("bob"), "t.stuck").await;
    assert_eq!(count, 0);
    assert!(fault.message.contains("project \"default\" may have 1 open calls"), "{fault}");
}

#[tokio::test]
async fn a_refused_replayed_or_failed_request_costs_nothing() {
    let node = Node::start().await;
    node.limit(LimitKind::Agent, "ada", per_minute(2)).await;
    let mut request = CallRequest::new("t.quick", "{}").unwrap();
    request.idempotency_key = Some("k".into());
    for _ in 0..5 {
        node.engine.calls().invoke(&agent("ada"), request.clone()).await.unwrap();
        let unknown = node.call(&agent("ada"), "t.unknown").await.unwrap_err();
        assert_eq!(unknown.code(), Code::ToolNotFound);
    }
    assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 1);
    // A repeated request is answered even over the limit: its outcome exists.
    assert!(node.engine.calls().invoke(&agent("ada"), request).await.unwrap().replayed);
}

#[tokio::test]
async fn counters_survive_a_crash() {
    let node = Node::start().await;
    node.limit(LimitKind::Agent, "ada", per_minute(3)).await;
    node.limit(LimitKind::User, "uma", max_open(2)).await;
    for _ in 0..2 {
        node.call(&agent("ada"), "t.quick").await.unwrap();
        node.call(&user("bob", "uma"), "t.stuck").await.unwrap();
    }
    let node = node.crash(START_MS + 20_000).await;
    assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 1);
    let node = node.crash(START_MS + 40_000).await;
    assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 0);
    let node = node.crash(START_MS + 61_000).await;
    assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 2, "the first two left the window");
}

#[tokio::test]
async fn open_calls_are_counted_after_a_crash_until_they_end() {
    let node = Node::start().await;
    let registered = crate::support::client_tool("x.one", Effect::Idempotent);
    let registration = toolcrib::registry::ClientRegistration {
        client_id: "c1".into(),
        tools: vec![registered],
        unlisted_tools: toolcrib::domain::directory::UnlistedTools::Withdraw,
    };
    let admin = Caller::local("default");
    node.engine.registry().register(&admin, registration).await.unwrap();
    node.limit(LimitKind::Agent, "ada", max_open(2)).await;
    let first = node.call(&agent("ada"), "x.one").await.unwrap();
    node.call(&agent("ada"), "x.one").await.unwrap();
    let node = node.crash(START_MS + 1_000).await;
    assert_eq!(node.exhaust(&agent("ada"), "x.one").await.0, 0);
    node.engine.calls().cancel(&admin, &first.id, None).await.unwrap();
    assert_eq!(node.exhaust(&agent("ada"), "x.one").await.0, 1);
    // A limit that is set while calls are open counts them.
    node.limit(LimitKind::Tool, "x.one", max_open(3)).await;
    node.engine.admin().remove_limit(&admin, LimitKind::Agent, "ada").await.unwrap();
    assert_eq!(node.exhaust(&agent("bob"), "x.one").await.0, 1);
}

#[tokio::test]
async fn a_change_of_the_system_time_permits_nothing_more() {
    for step_ms in [HOUR_MS, -HOUR_MS] {
        let node = Node::start().await;
        node.limit(LimitKind::Agent, "ada", per_minute(2)).await;
        node.exhaust(&agent("ada"), "t.quick").await;
        node.clock.step_wall(step_ms);
        assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 0, "{step_ms}");
        deadlines::run_once(node.engine.calls()).await;
        let node = node.crash(START_MS.saturating_add_signed(step_ms) + 30_000).await;
        assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 0, "{step_ms}, after a crash");
        let node = node.crash(START_MS.saturating_add_signed(step_ms) + 61_000).await;
        assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 2, "{step_ms}, a minute later");
    }
}

#[tokio::test]
async fn calls_over_max_parallel_are_queued_and_do_not_hold_up_others() {
    let node = Node::start().await;
    node.limit(LimitKind::Agent, "ada", max_parallel(1)).await;
    let status = async |call: &Arc<Call>| {
        node.engine.calls().call(&agent("ada"), &call.id).await.unwrap().status
    };
    let first = node.call(&agent("ada"), "t.stuck").await.unwrap();
    let second = node.call(&agent("ada"), "t.stuck").await.unwrap();
    let other = node.call(&agent("bob"), "t.stuck").await.unwrap();
    claim_queued::run_once(node.engine.calls()).await;
    assert_eq!((status(&first).await, status(&other).await), (Status::Running, Status::Running));
    assert_eq!(status(&second).await, Status::Pending);
    node.engine.calls().cancel(&agent("ada"), &first.id, None).await.unwrap();
    claim_queued::run_once(node.engine.calls()).await;
    let until = Until::ChangedSince { version: second.version, within_ms: 10_000 };
    let second = node.engine.calls().wait(&agent("ada"), &second.id, until).await.unwrap();
    assert_eq!(second.status, Status::Running);
    // A limit that is set while calls run counts them.
    node.limit(LimitKind::Agent, "bob", max_parallel(1)).await;
    let queued = node.call(&agent("bob"), "t.stuck").await.unwrap();
    assert_eq!(queued.status, Status::Pending);
}

#[tokio::test]
async fn limits_of_the_configuration_hold_in_every_project() {
    let (kind, name) = (LimitKind::Agent, "*".to_owned());
    let limits = vec![ConfiguredLimit { kind, name, values: per_minute(2) }];
    let node = Node::on(Arc::default(), ManualClock::at(START_MS), limits).await;
    assert_eq!(node.exhaust(&agent("ada"), "t.quick").await.0, 2);
    let elsewhere = Caller { project: "p".into(), ..agent("ada") };
    assert_eq!(node.exhaust(&elsewhere, "t.quick").await.0, 2, "each project counts for itself");
    node.limit(LimitKind::Agent, "bob", per_minute(5)).await;
    assert_eq!(node.exhaust(&agent("bob"), "t.quick").await.0, 2, "the stricter one holds");
}

#[tokio::test]
async fn invalid_limits_are_refused() {
    let node = Node::start().await;
    let admin = Caller::local("default");
    let kinds = [(LimitKind::Agent, "a*"), (LimitKind::Tool, "no name"), (LimitKind::Project, "")];
    for (kind, name) in kinds {
        let set = node.engine.admin().set_limit(&admin, kind, name, per_minute(1)).await;
        assert_eq!(set.unwrap_err().code(), Code::ValidationError, "{name}");
    }
    for values in [LimitValues::default(), per_minute(0), max_open(u32::MAX)] {
        let set = node.engine.admin().set_limit(&admin, LimitKind::Agent, "ada", values).await;
        assert_eq!(set.unwrap_err().code(), Code::ValidationError, "{values:?}");
    }
    let key = Caller::new("default", "ops", Role::Admin, AuthMethod::Key);
    let other = node.engine.admin().set_limit(&key, LimitKind::Project, "p", per_minute(1)).await;
    assert_eq!(other.unwrap_err().code(), Code::PermissionDenied);
    let agent_key = Caller::new("default", "ada", Role::Agent, AuthMethod::Key);
    assert_eq!(node.engine.admin().limits(&agent_key).unwrap_err().code(), Code::PermissionDenied);
    let auditor = Caller::new("default", "eve", Role::Auditor, AuthMethod::Key);
    assert!(node.engine.admin().limits(&auditor).unwrap().is_empty());
    let set = node.engine.admin().set_limit(&auditor, LimitKind::Agent, "ada", per_minute(1)).await;
    assert_eq!(set.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn an_entry_of_a_batch_waits_for_a_rate_limit_if_the_batch_permits_it() {
    let node = Node::start().await;
    node.limit(LimitKind::Agent, "ada", per_minute(1)).await;
    let entry = |id: &str| {
        Json::parse(&format!(r#"{{"call_id":"{id}","name":"t.quick","args":{{}}}}"#)).unwrap()
    };
    let batch = |limit_wait_ms| Batch {
        limit_wait_ms,
        ..Batch::new("run_1", vec![entry("a"), entry("b")])
    };
    let answer = node.engine.calls().run_batch(&agent("ada"), batch(None)).await.unwrap();
    let refused = answer.results[1].error().unwrap();
    assert_eq!(refused.code, Code::RateLimited);
    assert!(answer.messages[1].text().contains("retry after 6"), "{}", answer.messages[1].text());
    let engine = node.engine.clone();
    let patient = batch(Some(150_000));
    let waiting =
        tokio::spawn(
            async move { engine.calls().run_batch(&agent("ada"), patient).await.unwrap() },
        );
    // Each entry needs a minute of its own.
    while !waiting.is_finished() {
        node.clock.advance(500);
        tokio::task::yield_now().await;
    }
    let answer = waiting.await.unwrap();
    assert!(answer.results.iter().all(|result| result.ok() == Some(true)));
}
