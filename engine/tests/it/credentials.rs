//! Keys and session tokens against the clock: their ends are final, whatever the clock does and
//! however often the process restarts.

use std::sync::Arc;

use toolcrib::domain::directory::credential::CredentialStatus;
use toolcrib::maintenance::credential_expiry;
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::MemoryStore;
use toolcrib::registry::{Credentials, NewKey, NewSessionToken};
use toolcrib::{Caller, Engine, Role};

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
        let engine = builder.build_idle().await.unwrap();
        Self { clock, engine }
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
