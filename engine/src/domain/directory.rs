//! The directory: the slow-changing part of the store, with registered tools, clients, keys and
//! access rules. Pure data.
//!
//! It is small, so every node holds all of it in memory and reloads it when its version changes. A
//! change names the version it was decided on; if another writer committed first, the change is
//! decided again.

use crate::domain::access_rules::AccessRule;
use crate::domain::caller::Role;
use crate::domain::json::Json;
use crate::domain::tool::ToolDefinition;
use crate::domain::utp::AgentEntry;

/// An API key without its secret: only the digest is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// `key_…`: identifies the key and grants nothing.
    pub id: String,
    /// SHA-256 of the secret, in hexadecimal.
    pub digest: String,
    pub project: String,
    pub agent: String,
    pub role: Role,
    pub created_ms: u64,
    pub revoked_ms: Option<u64>,
}

/// A program that provides tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    pub project: String,
    pub client_id: String,
    /// The agent name of the key that registered it first.
    pub owner: String,
    pub registered_ms: u64,
}

/// Records that a client provides a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ToolOffer {
    pub project: String,
    pub tool: String,
    pub client_id: String,
}

/// An explicitly created project. A project also exists if it has a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    pub id: String,
    pub title: String,
    pub created_ms: u64,
}

/// A server whose tools Toolcrib imports, added at run time.
#[derive(Debug, Clone, PartialEq)]
pub struct Upstream {
    pub project: String,
    /// Prefix of its tools' names.
    pub name: String,
    /// The kind of source that connects to it: `mcp`.
    pub kind: String,
    /// Settings for that source; no other component reads them.
    pub settings: Json,
    pub added_ms: u64,
}

/// The whole directory at one version.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    pub version: u64,
    /// The tools of clients, projects and upstreams.
    pub tools: Vec<ToolDefinition>,
    pub projects: Vec<Project>,
    /// The agents that Toolcrib can wake.
    pub roster: Vec<AgentEntry>,
    pub clients: Vec<Client>,
    pub offers: Vec<ToolOffer>,
    pub keys: Vec<ApiKey>,
    pub rules: Vec<AccessRule>,
    pub upstreams: Vec<Upstream>,
}

/// One change to the directory.
#[derive(Debug, Clone, PartialEq)]
pub enum DirectoryChange {
    /// Registers a client's tools; each definition is added or replaces the one of the same name.
    Register {
        client: Client,
        tools: Vec<ToolDefinition>,
        unlisted_tools: UnlistedTools,
    },
    /// Withdraws one tool of a client; a tool that no client provides is removed.
    Withdraw {
        project: String,
        client_id: String,
        tool: String,
    },
    /// Removes a client and all its tools.
    DropClient {
        project: String,
        client_id: String,
    },
    AddProject(Project),
    /// Sets tools of the project itself; earlier definitions stay available to the calls that used
    /// them.
    PutTools(Vec<ToolDefinition>),
    DropTool {
        project: String,
        name: String,
    },
    /// Replaces the agent's entry.
    PutAgent(AgentEntry),
    DropAgent {
        project: String,
        agent_id: String,
    },
    AddKey(ApiKey),
    RevokeKey {
        id: String,
        at_ms: u64,
    },
    /// Replaces the rule on the same agent and pattern.
    PutRule(AccessRule),
    DropRule {
        project: String,
        agent: String,
        pattern: String,
    },
    /// Replaces the upstream's entry; its tools stay.
    PutUpstream(Box<Upstream>),
    /// Removes the upstream and all its tools.
    DropUpstream {
        project: String,
        name: String,
    },
    /// Replaces all tools of an upstream.
    SetUpstreamTools {
        project: String,
        upstream: String,
        tools: Vec<ToolDefinition>,
    },
}

/// The treatment of tools that a client registered before and does not list now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnlistedTools {
    Keep,
    Withdraw,
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    pub at_ms: u64,
    pub project: String,
    pub agent: String,
    /// `call.denied`, `key.created`, `key.revoked`, `rule.set`, `rule.removed`.
    pub action: String,
    /// The subject of the action: a tool, a key's id, a pattern.
    pub subject: String,
    pub reason: String,
}
