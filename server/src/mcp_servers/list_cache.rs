//! A short-lived cache of the resource, template and prompt lists of upstreams. Many requests need
//! them, and reading one resource requires knowing which upstream has it. An upstream that does not
//! answer delays requests by the timeout once, and then counts as empty for a while.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{Prompt, Resource, ResourceTemplate};
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::Instant;
use toolcrib_sources::mcp::{McpSource, UpstreamChange, pagination};

/// Maximum time an upstream may take to return a list. A slower one is omitted.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time a list stays cached, unless the upstream reports a change.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// Time an upstream that timed out is not queried again.
const UNRESPONSIVE_TTL: Duration = Duration::from_secs(60);

type UpstreamKey = (String, String);

/// The cached list of one upstream.
struct CachedList<T> {
    list: Arc<Vec<T>>,
    expires_at: Instant,
}

/// The cached lists of one kind.
struct ListCache<T> {
    method: &'static str,
    entries: Mutex<HashMap<UpstreamKey, CachedList<T>>>,
}

impl<T> ListCache<T> {
    fn new(method: &'static str) -> Self {
        Self { method, entries: Mutex::default() }
    }

    fn invalidate(&self, key: &UpstreamKey) {
        self.entries.lock().remove(key);
    }

    fn evict_expired(&self, now: Instant) {
        self.entries.lock().retain(|_, cached| cached.expires_at > now);
    }

    /// Returns the list of one upstream, from the cache or freshly fetched.
    async fn get_or_fetch(
        &self,
        upstreams: &McpSource,
        key: UpstreamKey,
        request: impl Future<Output = Result<Vec<T>, ServiceError>>,
    ) -> Arc<Vec<T>> {
        if let Some(cached) = self.entries.lock().get(&key) {
            return cached.list.clone();
        }
        let (list, ttl) = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Ok(Ok(list)) => (list, Some(CACHE_TTL)),
            Ok(Err(ServiceError::McpError(_))) => (Vec::new(), Some(CACHE_TTL)),
            Ok(Err(_)) => (Vec::new(), None),
            Err(_) => (Vec::new(), Some(UNRESPONSIVE_TTL)),
        };
        let reason = format!("it does not answer {}", self.method);
        match ttl == Some(UNRESPONSIVE_TTL) {
            true => upstreams.report_problem(&key.0, &key.1, &reason),
            false => upstreams.clear_problem(&key.0, &key.1, &reason),
        }
        let list = Arc::new(list);
        if let Some(time) = ttl {
            let cached = CachedList { list: list.clone(), expires_at: Instant::now() + time };
            self.entries.lock().insert(key, cached);
        }
        list
    }
}

/// All cached lists.
pub(super) struct UpstreamLists {
    upstreams: Arc<McpSource>,
    changes: Mutex<broadcast::Receiver<(UpstreamKey, UpstreamChange)>>,
    resources: ListCache<Resource>,
    templates: ListCache<ResourceTemplate>,
    prompts: ListCache<Prompt>,
}

impl UpstreamLists {
    pub(super) fn new(upstreams: Arc<McpSource>) -> Self {
        Self {
            changes: Mutex::new(upstreams.subscribe_changes()),
            upstreams,
            resources: ListCache::new("resources/list"),
            templates: ListCache::new("resources/templates/list"),
            prompts: ListCache::new("prompts/list"),
        }
    }

    /// Drops the entries that have expired or that an upstream reported as changed.
    fn apply_changes(&self) {
        let mut changes = self.changes.lock();
        let mut now = Instant::now();
        loop {
            match changes.try_recv() {
                Ok((key, UpstreamChange::ResourceList)) => {
                    self.resources.invalidate(&key);
                    self.templates.invalidate(&key);
                }
                Ok((key, UpstreamChange::PromptList)) => self.prompts.invalidate(&key),
                Ok((_, UpstreamChange::ResourceContent(_) | UpstreamChange::Log(_))) => {}
                // Some changes were missed, so every entry expires.
                Err(TryRecvError::Lagged(_)) => now += UNRESPONSIVE_TTL + CACHE_TTL,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        self.resources.evict_expired(now);
        self.templates.evict_expired(now);
        self.prompts.evict_expired(now);
    }

    pub(super) async fn resources(
        &self,
        key: UpstreamKey,
        peer: &Peer<RoleClient>,
    ) -> Arc<Vec<Resource>> {
        self.apply_changes();
        self.resources.get_or_fetch(&self.upstreams, key, pagination::resources(peer)).await
    }

    pub(super) async fn resource_templates(
        &self,
        key: UpstreamKey,
        peer: &Peer<RoleClient>,
    ) -> Arc<Vec<ResourceTemplate>> {
        self.apply_changes();
        self.templates
            .get_or_fetch(&self.upstreams, key, pagination::resource_templates(peer))
            .await
    }

    pub(super) async fn prompts(
        &self,
        key: UpstreamKey,
        peer: &Peer<RoleClient>,
    ) -> Arc<Vec<Prompt>> {
        self.apply_changes();
        self.prompts.get_or_fetch(&self.upstreams, key, pagination::prompts(peer)).await
    }
}
