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

use audit::denial_log::DenialLog;
use parking_lot::RwLock;
use search::SearchIndexes;

use crate::domain::caller::Authenticator;
use crate::ports::core::Core;

pub use authorize::AccessRequest;
pub use catalog::{
    Catalog, CatalogEntry, ClientRegistration, RESULT_READ, RUN_FINISH, compile_definitions,
};
pub use credentials::{CredentialVerifier, Credentials, OperatorCredential};
pub use keys::{CreatedKey, NewKey};
pub use model_tool_names::{hashed_name_for_model, name_for_model, names_for_model};
pub use projects::{ParsedAgent, check_array_items, parse_agent, parse_agent_definition};
pub use search::ToolMatch;
pub use session_tokens::{CreatedSessionToken, MAX_SESSION_TOKEN_TTL_MS, NewSessionToken};

/// The directory in memory, and the only writer of the stored one.
pub struct Registry {
    pub(crate) core: Arc<Core>,
    catalog: Arc<SharedCatalog>,
    pub(crate) credentials: CredentialVerifier,
    search_indexes: SearchIndexes,
    denials: Arc<DenialLog>,
    /// Serializes directory changes made by this process.
    directory_lock: tokio::sync::Mutex<()>,
    /// Time at which this process learned of the present directory, in Unix milliseconds.
    directory_changed_ms: AtomicU64,
    /// Set if metrics must, or must not, carry the names of projects' tools. By default only the
    /// operator and admin keys see them.
    pub(crate) tool_names_in_metrics: Option<bool>,
    /// Set once, when the parts that use the registry exist.
    listeners: OnceLock<Vec<Arc<dyn DirectoryListener>>>,
}

/// The catalog in force. Each change of the directory replaces it as a whole.
struct SharedCatalog(RwLock<Arc<Catalog>>);

impl SharedCatalog {
    fn load(&self) -> Arc<Catalog> {
        self.0.read().clone()
    }

    fn replace(&self, next: Arc<Catalog>) {
        *self.0.write() = next;
    }
}

/// Projects and the tools that they define, on top of the registry.
pub struct Projects {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

/// The agents of projects: their roster, and the versions of their definitions, on top of the
/// registry.
pub struct AgentRoster {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

/// The MCP servers that tools are imported from, on top of the registry.
pub struct Upstreams {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

/// Administration of keys, access rules, limits and kill switches, on top of the registry.
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
        let catalog = Arc::new(SharedCatalog(RwLock::new(Arc::new(catalog))));
        let credentials =
            CredentialVerifier::new(core.clone(), catalog.clone(), authenticator, operator);
        Self {
            core,
            catalog,
            credentials,
            search_indexes: SearchIndexes::default(),
            denials: Arc::default(),
            directory_lock: tokio::sync::Mutex::new(()),
            directory_changed_ms: AtomicU64::default(),
            tool_names_in_metrics,
            listeners: OnceLock::new(),
        }
    }

    /// Returns the part that authenticates callers.
    pub fn credentials(&self) -> &CredentialVerifier {
        &self.credentials
    }

    /// Registers the parts that follow directory changes. Later calls have no effect.
    pub(crate) fn set_listeners(&self, listeners: Vec<Arc<dyn DirectoryListener>>) {
        let _ = self.listeners.set(listeners);
    }

    fn listeners(&self) -> &[Arc<dyn DirectoryListener>] {
        self.listeners.get().map_or(&[], Vec::as_slice)
    }
}
