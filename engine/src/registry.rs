//! The directory of a project: tools, clients, keys, access rules, agents and upstreams; search
//! over the tools; and the decision whether a caller may use one.

pub mod audit;
pub(crate) mod authorize;
pub(crate) mod call_access;
pub(crate) mod catalog;
pub(crate) mod credentials;
pub(crate) mod keys;
pub(crate) mod limits;
pub(crate) mod model_tool_names;
pub(crate) mod model_tools;
pub(crate) mod projects;
pub mod rules;
pub(crate) mod search;
pub(crate) mod session_tokens;
pub(crate) mod sign_ins;
pub(crate) mod switches;
pub(crate) mod upstreams;
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use search::SearchIndexes;
use sign_ins::SignInLog;

use crate::domain::caller::Authenticator;
use crate::ports::core::Core;

pub use authorize::AccessRequest;
pub use catalog::{
    Catalog, CatalogEntry, ClientRegistration, RESULT_READ, RUN_FINISH, compile_definitions,
};
pub use credentials::{Credentials, OperatorCredential};
pub use keys::{CreatedKey, NewKey};
pub use model_tool_names::name_for_model;
pub use projects::{check_array_items, parse_agent_definition};
pub use search::ToolMatch;
pub use session_tokens::{CreatedSessionToken, MAX_SESSION_TOKEN_TTL_MS, NewSessionToken};

/// The directory in memory, and the only writer of the stored one.
pub struct Registry {
    pub(crate) core: Arc<Core>,
    catalog: RwLock<Arc<Catalog>>,
    search_indexes: SearchIndexes,
    /// Authenticates callers that have no API key.
    authenticator: Option<Arc<dyn Authenticator>>,
    /// Authenticates the operator; `None` if this server has no operator token.
    operator: Option<OperatorCredential>,
    /// Milliseconds by which credentials take the time to be ahead of the clock, because a process
    /// recorded a later time before.
    time_floor_ms: AtomicU64,
    /// Time of day that this process recorded last, in Unix milliseconds.
    recorded_time_ms: AtomicU64,
    sign_ins: SignInLog,
    /// Serializes directory changes made by this process.
    directory_lock: tokio::sync::Mutex<()>,
    /// Set if metrics must, or must not, carry the names of projects' tools. By default only the
    /// operator and admin keys see them.
    tool_names_in_metrics: Option<bool>,
    /// Set once, when the parts that use the registry exist.
    listeners: OnceLock<Vec<Arc<dyn DirectoryListener>>>,
}

/// Administration of keys, access rules and upstreams, on top of the registry.
pub struct Admin {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

/// A part of the engine that keeps state derived from the directory.
pub(crate) trait DirectoryListener: Send + Sync {
    /// The directory has changed; the catalog already shows it.
    fn directory_changed(&self) {}

    /// A client offers these tools from now on.
    fn client_tools_changed(&self, _project: &str, _client_id: &str, _tools: &HashSet<String>) {}
}

impl Registry {
    /// Creates the registry with the tools of the sources; projects' tools come from the store.
    pub(crate) fn new(
        core: Arc<Core>,
        shared_tools: Catalog,
        authenticator: Option<Arc<dyn Authenticator>>,
        operator: Option<OperatorCredential>,
        tool_names_in_metrics: Option<bool>,
    ) -> Self {
        let catalog = shared_tools.with_settings(core.clock.clone(), &core.policies);
        Self {
            core,
            catalog: RwLock::new(Arc::new(catalog)),
            search_indexes: SearchIndexes::default(),
            authenticator,
            operator,
            time_floor_ms: AtomicU64::default(),
            recorded_time_ms: AtomicU64::default(),
            sign_ins: SignInLog::default(),
            directory_lock: tokio::sync::Mutex::new(()),
            tool_names_in_metrics,
            listeners: OnceLock::new(),
        }
    }

    /// Registers the parts that follow directory changes. Later calls have no effect.
    pub(crate) fn set_listeners(&self, listeners: Vec<Arc<dyn DirectoryListener>>) {
        let _ = self.listeners.set(listeners);
    }

    fn listeners(&self) -> &[Arc<dyn DirectoryListener>] {
        self.listeners.get().map_or(&[], Vec::as_slice)
    }
}
