//! The engine: a small front over its parts.
//!
//! Every call takes the same path. A transport builds a [`Caller`](crate::Caller) and a
//! [`CallRequest`](crate::CallRequest); [`Calls::invoke`] validates and commits the call and
//! returns a ticket; the dispatcher starts the attempt at its source; the attempt's report goes
//! through [`crate::lifecycle::step`], the only place that decides a status; then waiters are
//! woken. The store is the source of truth: everything held in memory can be rebuilt from it.

mod builder;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::approvals::Approvals;
use crate::calls::Calls;
use crate::clients::Clients;
use crate::domain::fault::Error;
use crate::ports::core::{Core, EngineLimits, from_store_error};
use crate::ports::source::SourceHealth;
use crate::registry::{Admin, AgentRoster, Projects, Registry, Upstreams};
use crate::runs::Runs;
use crate::utp::Utp;
use crate::utp::delegation::Delegation;
use crate::webhooks::Webhooks;

pub use builder::EngineBuilder;

/// The engine. Cloning is cheap; all clones share one state.
#[derive(Clone)]
pub struct Engine {
    /// One allocation, because a transport clones the engine several times per request: each
    /// reference count that it changes is contended by all threads.
    pub(crate) parts: Arc<EngineParts>,
}

/// The parts of an engine, in the order of the layers.
pub(crate) struct EngineParts {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) projects: Arc<Projects>,
    pub(crate) roster: Arc<AgentRoster>,
    pub(crate) upstreams: Arc<Upstreams>,
    pub(crate) admin: Arc<Admin>,
    pub(crate) clients: Arc<Clients>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) approvals: Arc<Approvals>,
    pub(crate) utp: Arc<Utp>,
    pub(crate) webhooks: Arc<Webhooks>,
    pub(crate) runs: Arc<Runs>,
    pub(crate) delegation: Arc<Delegation>,
}

impl Engine {
    /// Returns a builder for an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// Accepts, reports, cancels, reads and waits for calls.
    pub fn calls(&self) -> &Arc<Calls> {
        &self.parts.calls
    }

    /// Shows and decides approvals of calls.
    pub fn approvals(&self) -> &Arc<Approvals> {
        &self.parts.approvals
    }

    /// Connects programs that provide tools.
    pub fn clients(&self) -> &Arc<Clients> {
        &self.parts.clients
    }

    /// Finds tools and agents, and decides who may use them.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.parts.registry
    }

    /// Creates projects and defines their tools.
    pub fn projects(&self) -> &Arc<Projects> {
        &self.parts.projects
    }

    /// Defines the agents of projects, and lists them.
    pub fn roster(&self) -> &Arc<AgentRoster> {
        &self.parts.roster
    }

    /// Holds the MCP servers that tools are imported from.
    pub fn upstreams(&self) -> &Arc<Upstreams> {
        &self.parts.upstreams
    }

    /// Runs agents: the agent loop, stored runs and their contexts.
    pub fn runs(&self) -> &Arc<Runs> {
        &self.parts.runs
    }

    /// Serves tool services and agents that speak UTP.
    pub fn utp(&self) -> &Arc<Utp> {
        &self.parts.utp
    }

    /// Shows and repeats webhook deliveries.
    pub fn webhooks(&self) -> &Arc<Webhooks> {
        &self.parts.webhooks
    }

    /// Changes keys, access rules, limits and kill switches, and reads the audit log.
    pub fn admin(&self) -> &Arc<Admin> {
        &self.parts.admin
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> &EngineLimits {
        &self.parts.core.limits
    }

    /// Returns the time of day by the engine's clock, in Unix milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.parts.core.wall_ms()
    }

    /// Returns true if the engine is shutting down and accepts no more calls.
    pub fn is_draining(&self) -> bool {
        self.parts.core.is_draining()
    }

    /// Checks that the store can be read and written.
    pub async fn check_store(&self) -> Result<(), Error> {
        self.parts.core.store.check_health().await.map_err(from_store_error)
    }

    /// Returns the size of the store.
    pub async fn store_size_bytes(&self) -> Result<u64, Error> {
        self.parts.core.store.size_bytes().await.map_err(from_store_error)
    }

    /// Returns the health of each source's dependencies, ordered by name.
    pub fn sources_health(&self) -> Vec<SourceHealth> {
        let sources = self.parts.calls.dispatcher.sources.values();
        let mut health: Vec<_> = sources.filter_map(|source| source.health()).collect();
        health.sort_by_key(|health| health.name);
        health
    }

    /// Returns the reason once the store has failed for good, so that the process has to restart.
    pub async fn wait_for_store_failure(&self) -> String {
        self.parts.core.store.wait_for_failure().await
    }

    /// Stops accepting work and waits, at most `limit`, for attempts that run in this process. The
    /// next start finds and settles the calls that have not finished by then.
    pub async fn shut_down(&self, limit: std::time::Duration) {
        self.parts.core.draining.store(true, Ordering::Release);
        let attempts = &self.parts.calls.dispatcher.attempts;
        attempts.close();
        let _ = tokio::time::timeout(limit, attempts.wait()).await;
        self.parts.core.shutdown.cancel();
        self.parts.clients.client_queue.close();
        self.parts.core.tasks.close();
        self.parts.core.tasks.wait().await;
    }
}
