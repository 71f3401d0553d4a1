//! Kill switches: new calls are refused, open ones end, and running work is canceled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use toolcrib::calls::Until;
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::directory::kill_switches::SwitchKind;
use toolcrib::domain::fault::Code;
use toolcrib::ports::store::MemoryStore;
use toolcrib::registry::rules::parse_rule;
use toolcrib::{Call, CallRequest, Caller, Effect, Engine, Fault, FnTool, Status};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Counts the attempts that run, until they are dropped.
struct CountOnDrop(Arc<AtomicU32>);

impl CountOnDrop {
    fn new(running: &Arc<AtomicU32>) -> Self {
        running.fetch_add(1, Ordering::SeqCst);
        Self(running.clone())
    }
}

impl Drop for CountOnDrop {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until this many attempts run.
async fn until_running(running: &Arc<AtomicU32>, count: u32) {
    let reached = async {
        while running.load(Ordering::SeqCst) != count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), reached).await.unwrap();
}

fn stuck(name: &str, effect: Effect, running_attempts: &Arc<AtomicU32>) -> FnTool {
    let running_attempts = running_attempts.clone();
    FnTool::new(name, "Never ends", move |_: Nothing| {
        let guard = CountOnDrop::new(&running_attempts);
        async move {
            let _guard = guard;
            std::future::pending::<Result<u32, Fault>>().await
        }
    })
    .effect(effect)
}

async fn engine(store: Arc<MemoryStore>, running_attempts: &Arc<AtomicU32>) -> Engine {
    let builder = Engine::builder().store(store);
    let builder = builder.tool(stuck("mail.send", Effect::Irreversible, running_attempts));
    let builder = builder.tool(stuck("mail.list", Effect::Read, running_attempts));
    let quick = FnTool::new("calc.one", "One", |_: Nothing| async { Ok::<_, Fault>(1) });
    builder.tool(quick.effect(Effect::Read)).start().await.unwrap()
}

fn admin() -> Caller {
    Caller::local("default")
}

fn agent(name: &str) -> Caller {
    Caller::new("default", name, Role::Admin, AuthMethod::Local)
}

async fn invoke(engine: &Engine, caller: &Caller, tool: &str) -> Arc<Call> {
    let request = CallRequest::new(tool, "{}").unwrap();
    engine.calls().invoke(caller, request).await.unwrap().call
}

async fn refusal(engine: &Engine, caller: &Caller, tool: &str) -> Option<(Code, String)> {
    let request = CallRequest::new(tool, "{}").unwrap();
    let error = engine.calls().invoke(caller, request).await.err()?;
    Some((error.code(), error.to_string()))
}

async fn ended(engine: &Engine, call: &Call) -> (Status, Fault) {
    let until = Until::EndedWithin(5_000);
    let call = engine.calls().wait(&admin(), &call.id, until).await.unwrap();
    assert!(call.status.is_terminal(), "{:?}", call.status);
    (call.status, call.outcome.clone().unwrap().error.unwrap())
}

#[tokio::test]
async fn a_switched_off_tool_refuses_new_calls_and_ends_running_ones() {
    let running_attempts = Arc::new(AtomicU32::new(0));
    let engine = engine(Arc::default(), &running_attempts).await;
    let running = invoke(&engine, &agent("ada"), "mail.send").await;
    let reading = invoke(&engine, &agent("ada"), "mail.list").await;
    until_running(&running_attempts, 2).await;
    let switched = std::time::Instant::now();
    let reason = "wrong receivers";
    engine.admin().set_switch(&admin(), SwitchKind::Tool, "mail.*", reason).await.unwrap();
    let (status, fault) = ended(&engine, &running).await;
    assert_eq!((status, fault.code), (Status::Failed, Code::OutcomeUnknown));
    assert!(fault.message.contains(reason), "{fault}");
    assert!(fault.message.contains("may have taken effect"), "{fault}");
    let (status, fault) = ended(&engine, &reading).await;
    assert_eq!((status, fault.code), (Status::Failed, Code::PermissionDenied));
    assert!(switched.elapsed() < Duration::from_secs(1), "{:?}", switched.elapsed());
    let (code, message) = refusal(&engine, &agent("ada"), "mail.send").await.unwrap();
    assert_eq!(code, Code::PermissionDenied);
    assert!(message.contains("tool \"mail.*\" is switched off: wrong receivers"), "{message}");
    assert!(refusal(&engine, &agent("ada"), "calc.one").await.is_none());
    // The attempts are stopped at their source.
    until_running(&running_attempts, 0).await;
    let tool = engine.registry().tool(&admin(), "mail.send").unwrap();
    let availability = engine.calls().tool_availability("default", &tool.definition);
    assert!(availability.problem.unwrap().contains(reason));
    engine.admin().remove_switch(&admin(), SwitchKind::Tool, "mail.*").await.unwrap();
    invoke(&engine, &agent("ada"), "mail.send").await;
    let log = engine.admin().audit_log(&admin(), None, 10).await.unwrap();
    let entries = log.iter().map(|row| &row.entry);
    let actions = entries.map(|entry| (entry.action.as_str(), entry.reason.as_str()));
    let actions: Vec<_> = actions.take(2).collect();
    assert_eq!(actions, [("switch.removed", ""), ("switch.set", reason)]);
    assert_eq!(log[1].entry.subject, "tool mail.*");
}

#[tokio::test]
async fn agents_sources_and_projects_are_switched_off_too() {
    let running_attempts = Arc::default();
    let engine = engine(Arc::default(), &running_attempts).await;
    let (ada, bob) = (agent("ada"), agent("bob"));
    let of_ada = invoke(&engine, &ada, "mail.list").await;
    let of_bob = invoke(&engine, &bob, "mail.list").await;
    engine.admin().set_switch(&admin(), SwitchKind::Agent, "ada", "key leaked").await.unwrap();
    assert!(ended(&engine, &of_ada).await.1.message.contains("agent \"ada\" is switched off"));
    assert!(refusal(&engine, &ada, "calc.one").await.unwrap().1.contains("key leaked"));
    assert!(refusal(&engine, &bob, "calc.one").await.is_none());
    assert_eq!(engine.calls().call(&admin(), &of_bob.id).await.unwrap().status, Status::Running);
    engine.admin().set_switch(&admin(), SwitchKind::Source, "builtin", "broken").await.unwrap();
    assert!(ended(&engine, &of_bob).await.1.message.contains("source \"builtin\""));
    assert!(refusal(&engine, &bob, "calc.one").await.is_some());
    engine.admin().remove_switch(&admin(), SwitchKind::Source, "builtin").await.unwrap();
    let (kind, operator) = (SwitchKind::Project, admin());
    engine.admin().set_switch(&operator, kind, "default", "audit").await.unwrap();
    assert!(refusal(&engine, &bob, "calc.one").await.unwrap().1.contains("project \"default\""));
    let elsewhere = Caller { project: "p".into(), ..agent("ada") };
    assert!(refusal(&engine, &elsewhere, "calc.one").await.is_none(), "another project is on");
    let kinds: Vec<_> =
        engine.admin().switches(&admin()).unwrap().iter().map(|s| s.kind.as_str()).collect();
    assert_eq!(kinds, ["agent", "project"]);
}

#[tokio::test]
async fn a_switch_survives_a_crash_and_ends_calls_that_were_open_then() {
    let (store, running_attempts) = (Arc::<MemoryStore>::default(), Arc::default());
    let first = engine(store.clone(), &running_attempts).await;
    let tool = crate::support::client_tool("x.one", Effect::Irreversible);
    let registration = toolcrib::registry::ClientRegistration {
        client_id: "c1".into(),
        tools: vec![tool],
        unlisted_tools: toolcrib::domain::directory::UnlistedTools::Withdraw,
    };
    first.registry().register(&admin(), registration).await.unwrap();
    let waiting = invoke(&first, &agent("ada"), "x.one").await;
    // Another process sets the switch, and this one is gone before it notices.
    let builder = Engine::builder().store(store.clone());
    let command = builder.build_idle().await.unwrap();
    drop(first);
    command.admin().set_switch(&admin(), SwitchKind::Source, "client", "unplugged").await.unwrap();
    let second = engine(store, &running_attempts).await;
    let (status, fault) = ended(&second, &waiting).await;
    assert_eq!((status, fault.code), (Status::Failed, Code::PermissionDenied));
    assert!(fault.message.contains("unplugged"), "{fault}");
    assert!(refusal(&second, &agent("ada"), "x.one").await.is_some());
}

#[tokio::test]
async fn a_repeated_request_is_answered_although_its_tool_is_off() {
    let engine = engine(Arc::default(), &Arc::default()).await;
    let mut request = CallRequest::new("calc.one", "{}").unwrap();
    request.idempotency_key = Some("k".into());
    let first = engine.calls().invoke(&agent("ada"), request.clone()).await.unwrap();
    engine.admin().set_switch(&admin(), SwitchKind::Tool, "calc.one", "wrong").await.unwrap();
    let again = engine.calls().invoke(&agent("ada"), request).await.unwrap();
    assert!(again.replayed && again.call.id == first.call.id);
}

#[tokio::test]
async fn invalid_switches_are_refused() {
    let engine = engine(Arc::default(), &Arc::default()).await;
    let set = async |caller: &Caller, kind, name: &str, reason: &str| {
        engine.admin().set_switch(caller, kind, name, reason).await.err().map(|e| e.code())
    };
    let invalid = Some(Code::ValidationError);
    assert_eq!(set(&admin(), SwitchKind::Tool, "mail.send", " ").await, invalid, "no reason");
    assert_eq!(set(&admin(), SwitchKind::Tool, "not a name", "why").await, invalid);
    assert_eq!(set(&admin(), SwitchKind::Agent, "a*", "why").await, invalid, "no pattern");
    let agent_key = Caller::new("default", "ada", Role::Agent, AuthMethod::Key);
    let denied = set(&agent_key, SwitchKind::Tool, "mail.send", "why").await;
    assert_eq!(denied, Some(Code::PermissionDenied));
    let anonymous = Caller::anonymous("default");
    let denied = set(&anonymous, SwitchKind::Tool, "mail.send", "why").await;
    assert_eq!(denied, Some(Code::Unauthenticated));
    let removed = engine.admin().remove_switch(&admin(), SwitchKind::Tool, "mail.send").await;
    assert_eq!(removed.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_call_that_waits_for_an_approval_ends_too() {
    let engine = engine(Arc::default(), &Arc::default()).await;
    for (id, rule) in [
        ("all", json!({ "verdict": "allow" })),
        ("mail", json!({ "verdict": "ask", "tools": ["mail.send"] })),
    ] {
        let rule = parse_rule("default", Some(id), &rule, "").unwrap();
        engine.admin().set_rule(&admin(), rule).await.unwrap();
    }
    let ada = Caller::new("default", "ada", Role::Agent, AuthMethod::Key);
    let held = invoke(&engine, &ada, "mail.send").await;
    assert_eq!(held.hold.map(|hold| hold.as_str()), Some("approval"));
    assert_eq!(engine.approvals().pending_count(), 1);
    engine.admin().set_switch(&admin(), SwitchKind::Tool, "mail.send", "closed").await.unwrap();
    let (status, fault) = ended(&engine, &held).await;
    assert_eq!((status, fault.code), (Status::Failed, Code::PermissionDenied));
    assert!(fault.message.contains("closed"), "{fault}");
    assert_eq!(engine.approvals().pending_count(), 0, "there is nothing left to approve");
}
