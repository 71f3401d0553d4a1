//! Keys and session tokens against the clock: their ends are final, whatever the clock does and
//! however often the process restarts.

use std::sync::Arc;

use serde_json::json;
use toolcrib::domain::directory::credential::CredentialStatus;
use toolcrib::domain::run::RunStatus;
use toolcrib::maintenance::{credential_expiry, revocations};
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::MemoryStore;
use toolcrib::registry::rules::parse_rule;
use toolcrib::registry::{Credentials, NewKey, NewSessionToken};
use toolcrib::runs::RunRequest;
use toolcrib::{CallId, CallRequest, Caller, Code, Engine, Fault, FnTool, Role};

use crate::script::{Script, SingleModel};

const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: i64 = 3_600_000;

struct Node {
    clock: ManualClock,
    engine: Engine,
}

impl Node {
    async fn start(store: &Arc<MemoryStore>, at_ms: u64) -> Self {
        let clock = ManualClock::at(at_ms);
        let builder = Engine::builder().store(store.clone()).clock(Arc::new(clock.clone()));
        let engine = builder.tool(payment()).build_idle().await.unwrap();
        Self { clock, engine }
    }

    /// Makes a call that waits for an approval.
    async fn hold_call(&self, secret: &str) -> CallId {
        hold_call(&self.engine, secret).await
    }

    /// Returns the reason why a call ended; `None` while it waits.
    async fn end_of(&self, id: &CallId) -> Option<String> {
        revocations::run_once(self.engine.calls()).await;
        let call = self.engine.calls().call(&Caller::local("default"), id).await.unwrap();
        let outcome = call.outcome.as_ref()?;
        let fault = outcome.error.clone().unwrap();
        assert_eq!(fault.code, Code::PermissionDenied, "{fault}");
        Some(fault.message)
    }

    fn is_valid(&self, secret: &str) -> bool {
        self.engine.registry().credentials().authenticate(&Credentials::new(secret)).is_ok()
    }

    async fn create_key(&self, agent: &str, role: Role, expires_ms: Option<u64>) -> String {
        let new = NewKey { expires_ms, ..NewKey::new("default", agent, role) };
        let secret = format!("{agent:x>40}");
        let admin = self.engine.admin();
        admin.create_key(&Caller::local("default"), new, secret.clone()).await.unwrap();
        secret
    }

    async fn sweep(&self) {
        credential_expiry::run_once(self.engine.admin()).await;
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn payment() -> FnTool {
    FnTool::new("pay.send", "Pays", |_: Nothing| async { Ok::<i64, Fault>(1) })
}

fn caller_of(engine: &Engine, secret: &str) -> Caller {
    engine.registry().credentials().authenticate(&Credentials::new(secret)).unwrap().caller
}

/// Sets rules that allow every tool and ask about payments.
async fn ask_about_payments(engine: &Engine) {
    for (id, rule) in [
        ("all", json!({ "verdict": "allow" })),
        ("ask", json!({ "verdict": "ask", "tools": ["pay.*"] })),
    ] {
        let rule = parse_rule("default", Some(id), &rule, "").unwrap();
        engine.admin().set_rule(&Caller::local("default"), rule).await.unwrap();
    }
}

async fn hold_call(engine: &Engine, secret: &str) -> CallId {
    let caller = caller_of(engine, secret);
    let request = CallRequest::new("pay.send", "{}").unwrap();
    let ticket = engine.calls().invoke(&caller, request).await.unwrap();
    assert!(ticket.call.waits_for_approval());
    ticket.call.id.clone()
}

async fn key_id(engine: &Engine, secret: &str) -> String {
    caller_of(engine, secret).attributes.credential.clone().unwrap()
}

/// Returns a node with a key and a session token that both end in an hour.
async fn node_with_credentials(store: &Arc<MemoryStore>) -> (Node, String, String) {
    let node = Node::start(store, START_MS).await;
    node.create_key("operator", Role::Admin, None).await;
    let key = node.create_key("ada", Role::Agent, Some(START_MS + HOUR_MS as u64)).await;
    let caller =
        node.engine.registry().credentials().authenticate(&Credentials::new(&key)).unwrap().caller;
    let new = NewSessionToken { ttl_ms: 10 * HOUR_MS as u64, ..NewSessionToken::default() };
    let token = "token".repeat(10);
    let created = node.engine.admin().create_session_token(&caller, new, token.clone()).await;
    assert_eq!(created.unwrap().token.expires_ms, START_MS + HOUR_MS as u64, "ends with its key");
    assert!(node.is_valid(&key) && node.is_valid(&token));
    (node, key, token)
}

#[tokio::test]
async fn setting_the_clock_back_extends_no_credentials() {
    let store = Arc::new(MemoryStore::default());
    let (node, key, token) = node_with_credentials(&store).await;
    node.clock.step_wall(-5 * HOUR_MS);
    node.clock.advance(HOUR_MS as u64 - 1);
    assert!(node.is_valid(&key) && node.is_valid(&token));
    node.clock.advance(1);
    assert!(!node.is_valid(&key) && !node.is_valid(&token), "an hour has passed");
}

#[tokio::test]
async fn credentials_that_expired_stay_expired_after_a_restart_in_the_past() {
    let store = Arc::new(MemoryStore::default());
    let (node, key, token) = node_with_credentials(&store).await;
    node.clock.advance(HOUR_MS as u64);
    node.sweep().await;
    assert!(!node.is_valid(&key));
    let again = Node::start(&store, START_MS - HOUR_MS as u64).await;
    assert!(!again.is_valid(&key) && !again.is_valid(&token));
    let keys = again.engine.admin().keys(&Caller::local("default")).unwrap();
    let ada = keys.iter().find(|key| key.agent == "ada").unwrap();
    assert_eq!(ada.status(START_MS), CredentialStatus::Expired);
}

#[tokio::test]
async fn a_restart_in_the_past_does_not_give_back_the_time_that_has_passed() {
    let store = Arc::new(MemoryStore::default());
    let (node, key, token) = node_with_credentials(&store).await;
    node.clock.advance(HOUR_MS as u64 / 2);
    node.sweep().await;
    let again = Node::start(&store, START_MS - 5 * HOUR_MS as u64).await;
    assert!(again.is_valid(&key) && again.is_valid(&token));
    again.clock.advance(HOUR_MS as u64 / 2);
    assert!(!again.is_valid(&key) && !again.is_valid(&token), "the other half hour has passed");
}

#[tokio::test]
async fn a_jump_of_the_clock_forward_ends_credentials_for_good() {
    let store = Arc::new(MemoryStore::default());
    let (node, key, token) = node_with_credentials(&store).await;
    node.clock.step_wall(2 * HOUR_MS);
    assert!(!node.is_valid(&key) && !node.is_valid(&token));
    node.sweep().await;
    node.clock.step_wall(-2 * HOUR_MS);
    assert!(!node.is_valid(&key) && !node.is_valid(&token));
    // The jump is not recorded: new credentials have their full time.
    let fresh = node.create_key("bob", Role::Agent, Some(START_MS + 60_000)).await;
    assert!(node.is_valid(&fresh));
    let again = Node::start(&store, START_MS + 1_000).await;
    assert!(again.is_valid(&fresh));
}

#[tokio::test]
async fn held_calls_of_an_expired_key_end_with_that_reason() {
    let store = Arc::new(MemoryStore::default());
    let (node, key, _) = node_with_credentials(&store).await;
    ask_about_payments(&node.engine).await;
    let id = node.hold_call(&key).await;
    node.clock.advance(HOUR_MS as u64);
    node.sweep().await;
    let end = node.end_of(&id).await.unwrap();
    assert!(end.contains("has expired") && !end.contains("revoked"), "{end}");
}

#[tokio::test]
async fn a_rotation_ends_no_held_calls_and_the_revocation_of_the_successor_does() {
    let store = Arc::new(MemoryStore::default());
    let node = Node::start(&store, START_MS).await;
    let operator = Caller::local("default");
    node.create_key("operator", Role::Admin, None).await;
    let key = node.create_key("ada", Role::Agent, None).await;
    ask_about_payments(&node.engine).await;
    let id = node.hold_call(&key).await;
    let old = key_id(&node.engine, &key).await;
    let admin = node.engine.admin();
    let new = admin.rotate_key(&operator, &old, 60_000, "n".repeat(40)).await.unwrap().key;
    assert_eq!(node.end_of(&id).await, None);
    node.clock.advance(60_000);
    node.sweep().await;
    assert!(!node.is_valid(&key), "the overlap is over");
    assert_eq!(node.end_of(&id).await, None, "the new key stands for the old one");
    admin.revoke_key(&operator, &new.id).await.unwrap();
    let end = node.end_of(&id).await.unwrap();
    assert!(end.contains(&new.id) && end.contains("was revoked"), "{end}");
}

#[tokio::test]
async fn held_calls_of_a_token_outlive_its_end_but_not_its_revocation() {
    let store = Arc::new(MemoryStore::default());
    let node = Node::start(&store, START_MS).await;
    node.create_key("operator", Role::Admin, None).await;
    let key = node.create_key("ada", Role::Agent, None).await;
    ask_about_payments(&node.engine).await;
    let caller = caller_of(&node.engine, &key);
    let mint = async |secret: String| {
        let new = NewSessionToken { ttl_ms: 60_000, ..NewSessionToken::default() };
        let created = node.engine.admin().create_session_token(&caller, new, secret).await;
        created.unwrap()
    };
    let (short, revoked) = (mint("a".repeat(40)).await, mint("b".repeat(40)).await);
    let of_short = node.hold_call(&short.secret).await;
    let request =
        CallRequest { run_id: "other".into(), ..CallRequest::new("pay.send", "{}").unwrap() };
    let of_revoked = caller_of(&node.engine, &revoked.secret);
    let of_revoked =
        node.engine.calls().invoke(&of_revoked, request).await.unwrap().call.id.clone();
    node.engine.admin().revoke_session_token(&caller, &revoked.token.id).await.unwrap();
    let end = node.end_of(&of_revoked).await.unwrap();
    assert!(end.contains(&revoked.token.id) && end.contains("was revoked"), "{end}");
    node.clock.advance(60_000);
    node.sweep().await;
    assert!(!node.is_valid(&short.secret));
    assert_eq!(node.end_of(&of_short).await, None, "its key is valid");
}

#[tokio::test]
async fn a_run_ends_with_its_key_although_the_agent_has_another_key() {
    let script = Script::default().calls(&[("c1", "pay__send", "{}")]);
    let script = script.says("I wait for the approval.").says("Paid.");
    let builder = Engine::builder().models(Arc::new(SingleModel(Arc::new(script))));
    let engine = builder.tool(payment()).start().await.unwrap();
    let operator = Caller::local("default");
    let create = async |agent: &str, role: Role, secret: &str| {
        let new = NewKey::new("default", agent, role);
        engine.admin().create_key(&operator, new, secret.repeat(40)).await.unwrap()
    };
    create("operator", Role::Admin, "o").await;
    let (stolen, _other) =
        (create("ada", Role::Agent, "a").await, create("ada", Role::Agent, "b").await);
    ask_about_payments(&engine).await;
    let messages = vec![json!({ "role": "user", "content": "Pay." })];
    let request = RunRequest { model: "scripted".into(), messages, ..RunRequest::default() };
    let caller = caller_of(&engine, &stolen.secret);
    let run = engine.runs().start_run(&caller, request).await.unwrap().run;
    while engine.runs().find_run(&caller, &run.id).await.unwrap().status != RunStatus::Waiting {
        tokio::task::yield_now().await;
    }
    engine.admin().revoke_key(&operator, &stolen.key.id).await.unwrap();
    let ended = engine.runs().wait_for_run(&operator, &run.id, 30_000).await.unwrap();
    assert_eq!(ended.status, RunStatus::Failed, "{:?}", ended.answer);
    let message = ended.error.unwrap().message;
    assert!(message.contains(&stolen.key.id) && message.contains("was revoked"), "{message}");
}
