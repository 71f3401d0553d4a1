//! Legacy sessions that survive a restart of the server.
//!
//! A session id is a token: it holds the parameters of `initialize`, and a MAC over them and over
//! the caller. A server that does not know a session replays the handshake from its id, so nothing
//! about sessions is stored. The id grants no access: each request is authenticated by itself, and
//! for any other caller the id does not exist. ADR 0010 has the reasons.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::Stream;
use hmac::{Hmac, KeyInit, Mac};
use parking_lot::Mutex;
use rmcp::model::{
    ClientJsonRpcMessage, Implementation, InitializeRequestParams, ServerJsonRpcMessage,
};
use rmcp::transport::WorkerTransport;
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError, LocalSessionWorker,
};
use rmcp::transport::streamable_http_server::session::{
    RestoreOutcome, ServerSseMessage, SessionId, SessionManager, SessionState, SessionStore,
    SessionStoreError,
};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use toolcrib::Caller;
use toolcrib::domain::caller::AuthMethod;
use toolcrib::domain::fault::{Code, Error};

/// Maximum size of the parameters in a session id. Proxies commonly allow headers of 8 KiB. A
/// session with more parameters ends with the server's process.
const MAX_PARAMS_BYTES: usize = 3_000;

/// The key that authenticates session ids.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionKey([u8; 32]);

impl SessionKey {
    /// Returns the key with these bytes, which must be secret and random.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns a random key. Session ids are valid until the program ends.
    pub fn generate() -> Self {
        use sha2::Digest;
        // A generated secret has more than 256 random bits; its digest is a key of 32 bytes.
        Self(Sha256::digest(crate::auth::generate_secret()).into())
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SessionKey(…)")
    }
}

/// The content of a session id.
#[derive(Serialize, Deserialize)]
struct SessionToken {
    /// Makes each id unique and unpredictable.
    nonce: String,
    /// The parameters of `initialize`, unless they are too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    params: Option<InitializeRequestParams>,
}

impl SessionKey {
    /// Returns the id of a new session of this caller.
    fn issue(&self, caller: &Caller, params: Option<InitializeRequestParams>) -> String {
        let random = || ulid::Ulid::generate().random();
        let nonce = format!("{:x}{:x}", random(), random());
        // Icons and titles are omitted.
        let params = params.map(|mut params| {
            let client = params.client_info;
            params.client_info = Implementation::new(client.name, client.version);
            params.meta = None;
            params
        });
        let fits = |params: &InitializeRequestParams| {
            serde_json::to_vec(params).is_ok_and(|json| json.len() <= MAX_PARAMS_BYTES)
        };
        let token = SessionToken { nonce, params: params.filter(fits) };
        let content = serde_json::to_vec(&token).unwrap_or_default();
        let mac = self.mac(caller, &content).map(|mac| mac.finalize().into_bytes());
        let mac = URL_SAFE_NO_PAD.encode(mac.unwrap_or_default());
        format!("{}.{mac}", URL_SAFE_NO_PAD.encode(content))
    }

    /// Returns whether this is the id of a session of this caller.
    fn verifies(&self, caller: &Caller, session: &str) -> bool {
        let Some((content, mac)) = session.split_once('.') else { return false };
        let (content, mac) = (URL_SAFE_NO_PAD.decode(content), URL_SAFE_NO_PAD.decode(mac));
        match (content, mac) {
            (Ok(content), Ok(mac)) => {
                self.mac(caller, &content).is_some_and(|own| own.verify_slice(&mac).is_ok())
            }
            _ => false,
        }
    }

    /// Returns the MAC over a caller and the content of a session id. HMAC accepts keys of any
    /// length, so there always is one.
    fn mac(&self, caller: &Caller, content: &[u8]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        let method = match caller.auth_method {
            AuthMethod::Key => "key",
            AuthMethod::Local => "local",
            AuthMethod::Anonymous => "anonymous",
        };
        let roles = caller.roles.to_string();
        // The length before each field keeps the fields apart.
        let owner = caller.owner_name();
        for field in [&caller.project, &owner, roles.as_str(), method] {
            mac.update(&(field.len() as u64).to_be_bytes());
            mac.update(field.as_bytes());
        }
        mac.update(content);
        Some(mac)
    }
}

/// Returns the parameters of `initialize` that a session id holds.
fn params_of(session: &str) -> Option<InitializeRequestParams> {
    let (content, _) = session.split_once('.')?;
    let content = URL_SAFE_NO_PAD.decode(content).ok()?;
    serde_json::from_slice::<SessionToken>(&content).ok()?.params
}

tokio::task_local! {
    /// The id of the session that the current request creates.
    static NEW_SESSION: SessionId;
}

/// The legacy sessions: rmcp's sessions in memory, with ids from which they can be restored.
pub(super) struct RestorableSessions {
    open: LocalSessionManager,
    key: SessionKey,
    /// The project of each open session.
    projects: Mutex<HashMap<String, String>>,
    closed: Mutex<ClosedSessions>,
    restoring: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    limit: usize,
}

impl RestorableSessions {
    /// Returns the sessions of one transport, at most `limit` at a time.
    pub(super) fn new(key: SessionKey, limit: usize) -> Self {
        let mut open = LocalSessionManager::default();
        // `call_stream` writes the events that tell an MCP client how to resume.
        open.session_config.sse_retry = None;
        let (projects, closed, restoring) = Default::default();
        Self { open, key, projects, closed, restoring, limit }
    }

    /// Refuses the id of a session that does not exist, was closed, or belongs to another caller.
    /// Refuses one that has to be restored over the limit of sessions.
    pub(super) async fn check_session(&self, session: &str, caller: &Caller) -> Result<(), Error> {
        let is_closed = self.closed.lock().ids.contains(session);
        if is_closed || !self.key.verifies(caller, session) {
            let message = "there is no such session; initialize again";
            return Err(Error::refused(Code::NotFound, message));
        }
        if !self.is_open(session).await {
            self.check_capacity(caller).await?;
            self.projects.lock().insert(session.to_owned(), caller.project.clone());
        }
        Ok(())
    }

    /// Returns the lock under which this session is restored, or `None` if it is open. While the
    /// session is restored it already counts as open for rmcp, but takes no requests yet.
    pub(super) async fn restoring(&self, session: &str) -> Option<Arc<tokio::sync::Mutex<()>>> {
        let is_open = self.is_open(session).await;
        let mut restoring = self.restoring.lock();
        match restoring.get(session) {
            Some(lock) => Some(lock.clone()),
            None if is_open => None,
            None => Some(restoring.entry(session.to_owned()).or_default().clone()),
        }
    }

    /// Removes the lock of a session that is restored.
    pub(super) fn end_restoring(&self, session: &str) {
        self.restoring.lock().remove(session);
    }

    /// Returns whether rmcp has this session in memory.
    pub(super) async fn is_open(&self, session: &str) -> bool {
        self.open.sessions.read().await.contains_key(session)
    }

    /// Refuses a session over the limit. One project may use at most half of all sessions, so that
    /// it leaves capacity for the others.
    async fn check_capacity(&self, caller: &Caller) -> Result<(), Error> {
        let sessions = self.open.sessions.read().await;
        let mut projects = self.projects.lock();
        if projects.len() > sessions.len() * 2 {
            projects.retain(|id, _| sessions.contains_key(id.as_str()));
        }
        let of_project = projects.iter().filter(|(id, project)| {
            **project == caller.project && sessions.contains_key(id.as_str())
        });
        let too_many = match () {
            () if sessions.len() >= self.limit => "too many MCP sessions are open",
            () if of_project.count() >= (self.limit / 2).max(1) => {
                "the project has too many MCP sessions"
            }
            () => return Ok(()),
        };
        Err(Error::retry_later(Code::Overloaded, too_many, 1_000))
    }

    /// Runs a request that creates a session with these parameters.
    pub(super) async fn create<F: Future>(
        &self,
        caller: &Caller,
        params: Option<InitializeRequestParams>,
        handling: F,
    ) -> Result<F::Output, Error> {
        self.check_capacity(caller).await?;
        let session = self.key.issue(caller, params);
        self.projects.lock().insert(session.clone(), caller.project.clone());
        Ok(NEW_SESSION.scope(session.into(), handling).await)
    }
}

impl SessionManager for RestorableSessions {
    type Error = LocalSessionManagerError;
    type Transport = WorkerTransport<LocalSessionWorker>;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        if let Ok(session) = NEW_SESSION.try_with(SessionId::clone)
            && let RestoreOutcome::Restored(transport) =
                self.open.restore_session(session.clone()).await?
        {
            return Ok((session, transport));
        }
        self.open.create_session().await
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        self.open.initialize_session(id, message).await
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.open.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.open.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.open.create_stream(id, message).await
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), Self::Error> {
        self.open.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.open.create_standalone_stream(id).await
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.open.resume(id, last_event_id).await
    }

    async fn restore_session(
        &self,
        id: SessionId,
    ) -> Result<RestoreOutcome<Self::Transport>, Self::Error> {
        self.open.restore_session(id).await
    }
}

/// Restores each session from its id, so nothing is stored. A deleted session counts as closed.
#[async_trait]
impl SessionStore for RestorableSessions {
    async fn load(&self, session: &str) -> Result<Option<SessionState>, SessionStoreError> {
        Ok(params_of(session).map(SessionState::new))
    }

    async fn store(&self, _session: &str, _state: &SessionState) -> Result<(), SessionStoreError> {
        Ok(())
    }

    async fn delete(&self, session: &str) -> Result<(), SessionStoreError> {
        self.closed.lock().insert(session, self.limit);
        Ok(())
    }
}

/// The sessions that MCP clients closed most recently. A session that was closed before these can
/// be restored again, but only by its own caller.
#[derive(Default)]
struct ClosedSessions {
    ids: HashSet<Arc<str>>,
    order: VecDeque<Arc<str>>,
}

impl ClosedSessions {
    fn insert(&mut self, session: &str, limit: usize) {
        let session: Arc<str> = session.into();
        if self.ids.insert(session.clone()) {
            self.order.push_back(session);
        }
        while self.order.len() > limit.max(1) {
            if let Some(oldest) = self.order.pop_front() {
                self.ids.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rmcp::model::ClientCapabilities;

    use super::*;

    fn params(name: &str) -> InitializeRequestParams {
        let client = Implementation::new(name, "1").with_title("A title that is not needed");
        InitializeRequestParams::new(ClientCapabilities::default(), client)
    }

    #[test]
    fn a_session_id_is_valid_for_its_caller_and_key_alone() {
        let key = SessionKey::new([7; 32]);
        let ada = Caller::local("acme");
        let session = key.issue(&ada, Some(params("test")));
        assert!(key.verifies(&ada, &session));
        assert!(!key.verifies(&Caller::local("other"), &session));
        assert!(!SessionKey::new([8; 32]).verifies(&ada, &session));
        let forged = session.replacen(['a', 'b', 'c', 'd', 'e'], "f", 1);
        assert!(forged == session || !key.verifies(&ada, &forged));
        for wrong in ["", ".", "a.b", "é.é"] {
            assert!(!key.verifies(&ada, wrong), "{wrong}");
        }
        let restored = params_of(&session).unwrap();
        assert_eq!(restored.client_info.name, "test");
        assert_eq!(restored.client_info.title, None);
        assert_ne!(session, key.issue(&ada, Some(params("test"))));
    }

    #[test]
    fn long_parameters_are_left_out_of_the_session_id() {
        let key = SessionKey::generate();
        let ada = Caller::local("acme");
        let session = key.issue(&ada, Some(params(&"x".repeat(MAX_PARAMS_BYTES))));
        assert!(key.verifies(&ada, &session) && session.len() < 200, "{session}");
        assert!(params_of(&session).is_none());
    }
}
