//! The directory: the slow-changing part of the store, with registered tools, clients, keys and
//! access rules. Pure data.
//!
//! It is small, so every node holds all of it in memory and reloads it when its version changes. A
//! change names the version it was decided on; if another writer committed first, the change is
//! decided again.

use crate::domain::access_rules::{AccessRule, RuleSetChange, RuleSetVersion};
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
    /// Id of the project that the key gives access to.
    pub project: String,
    /// Agent name that the bearer of the key acts under.
    pub agent: String,
    /// Role of the bearer of the key.
    pub role: Role,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
    /// Time of revocation, in Unix milliseconds; `None` while the key is valid.
    pub revoked_ms: Option<u64>,
    /// False if requests of its agent never join an earlier call.
    pub rejoin: bool,
}

/// A program that provides tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Id of the project that the client provides tools for.
    pub project: String,
    /// Id that the client chose; unique in the project.
    pub client_id: String,
    /// The agent name of the key that registered it first, or that adopted it.
    pub owner: String,
    /// Time of the first registration, in Unix milliseconds.
    pub registered_ms: u64,
}

/// Records that a client provides a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ToolOffer {
    /// Id of the project of the tool and the client.
    pub project: String,
    /// Name of the tool.
    pub tool: String,
    /// Id of the client that provides the tool.
    pub client_id: String,
}

/// An explicitly created project. A project also exists if it has a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    /// Unique id of the project.
    pub id: String,
    /// Title for people.
    pub title: String,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
}

/// A server whose tools Toolcrib imports, added at run time.
#[derive(Debug, Clone, PartialEq)]
pub struct Upstream {
    /// Id of the project that its tools belong to.
    pub project: String,
    /// Prefix of its tools' names.
    pub name: String,
    /// The kind of source that connects to it: `mcp`.
    pub kind: String,
    /// Settings for that source; no other component reads them.
    pub settings: Json,
    /// Time when it was added, in Unix milliseconds.
    pub added_ms: u64,
}

/// The whole directory at one version.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    /// Version number; every change increases it.
    pub version: u64,
    /// The tools of clients, projects and upstreams.
    pub tools: Vec<ToolDefinition>,
    /// The explicitly created projects.
    pub projects: Vec<Project>,
    /// The agents that Toolcrib can wake.
    pub roster: Vec<AgentEntry>,
    /// The registered clients, connected or not.
    pub clients: Vec<Client>,
    /// The tools that each client provides.
    pub offers: Vec<ToolOffer>,
    /// The API keys, including revoked ones.
    pub keys: Vec<ApiKey>,
    /// The access rules of all projects that are in force, by project and id.
    pub rules: Vec<AccessRule>,
    /// The present version of each project's rules.
    pub rule_versions: Vec<RuleSetVersion>,
    /// The upstreams added at run time.
    pub upstreams: Vec<Upstream>,
}

/// One change to the directory.
#[derive(Debug, Clone, PartialEq)]
pub enum DirectoryChange {
    /// Registers a client's tools; each definition is added or replaces the one of the same name.
    Register {
        /// The client that registers.
        client: Client,
        /// Definitions of the tools that the client provides.
        tools: Vec<ToolDefinition>,
        /// Treatment of the client's earlier tools that `tools` does not list.
        unlisted_tools: UnlistedTools,
    },
    /// Withdraws one tool of a client; a tool that no client provides is removed.
    Withdraw {
        /// Id of the client's project.
        project: String,
        /// Id of the client.
        client_id: String,
        /// Name of the withdrawn tool.
        tool: String,
    },
    /// Gives a client to another owner; its tools stay.
    SetClientOwner {
        /// Id of the client's project.
        project: String,
        /// Id of the client.
        client_id: String,
        /// Agent name of the owner from now on.
        owner: String,
    },
    /// Removes a client and all its tools.
    DropClient {
        /// Id of the client's project.
        project: String,
        /// Id of the client.
        client_id: String,
    },
    /// Adds a project, so that it exists even without a key.
    AddProject(Project),
    /// Sets tools of the project itself; earlier definitions stay available to the calls that used
    /// them.
    PutTools(Vec<ToolDefinition>),
    /// Removes a tool of the project itself; earlier calls keep the definition that they used.
    DropTool {
        /// Id of the tool's project.
        project: String,
        /// Name of the tool.
        name: String,
    },
    /// Replaces the agent's entry.
    PutAgent(AgentEntry),
    /// Removes an agent from the roster.
    DropAgent {
        /// Id of the agent's project.
        project: String,
        /// Id of the agent.
        agent_id: String,
    },
    /// Adds an API key.
    AddKey(ApiKey),
    /// Revokes an API key; a key that is already revoked stays unchanged.
    RevokeKey {
        /// Id of the key, `key_…`.
        id: String,
        /// Time of revocation, in Unix milliseconds.
        at_ms: u64,
    },
    /// Makes a new version of a project's rules.
    ChangeRules(Box<RuleSetChange>),
    /// Replaces the upstream's entry; its tools stay.
    PutUpstream(Box<Upstream>),
    /// Removes the upstream and all its tools.
    DropUpstream {
        /// Id of the upstream's project.
        project: String,
        /// Name of the upstream.
        name: String,
    },
    /// Replaces all tools of an upstream.
    SetUpstreamTools {
        /// Id of the upstream's project.
        project: String,
        /// Name of the upstream.
        upstream: String,
        /// Definitions of all its tools from now on.
        tools: Vec<ToolDefinition>,
    },
}

/// The treatment of tools that a client registered before and does not list now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnlistedTools {
    /// The client continues to provide them.
    Keep,
    /// The client no longer provides them.
    Withdraw,
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Time of the action, in Unix milliseconds.
    pub at_ms: u64,
    /// Id of the project that the action concerns.
    pub project: String,
    /// Agent name of the caller, or the name of the upstream that changed its tools.
    pub agent: String,
    /// The kind of change or decision: `call.denied`, `key.created`, `key.revoked`, `rule.set`,
    /// `rule.removed`, `client.adopted`, `tool.set`, `tool.removed`, `upstream.set`,
    /// `upstream.removed`, `upstream.tools`.
    pub action: String,
    /// The subject of the action: a tool, a key's id, a pattern.
    pub subject: String,
    /// Reason or details in words; may be empty.
    pub reason: String,
}
