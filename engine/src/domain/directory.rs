//! The directory: the slow-changing part of the store, with registered tools, clients, keys and
//! access rules. Pure data.
//!
//! It is small, so every node holds all of it in memory and reloads it when its version changes. A
//! change names the version it was decided on; if another writer committed first, the change is
//! decided again.

pub mod audit;
pub mod credential;
pub mod kill_switches;
pub mod usage_limits;

use kill_switches::{KillSwitch, SwitchKind};
use usage_limits::{LimitKind, UsageLimit};

use crate::domain::access_rules::{AccessRule, RuleSetChange, RuleSetVersion};
use crate::domain::agent::AgentEntry;
use crate::domain::json::Json;
use crate::domain::tool::ToolDefinition;

pub use audit::AuditEntry;
pub use credential::{ApiKey, KeyAttributes, SessionToken};

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

/// An explicitly created project. A project also exists if it has a key, a tool or an agent.
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
    /// The agents that Toolcrib can call or wake.
    pub roster: Vec<AgentEntry>,
    /// The registered clients, connected or not.
    pub clients: Vec<Client>,
    /// The tools that each client provides.
    pub offers: Vec<ToolOffer>,
    /// The API keys, including revoked ones.
    pub keys: Vec<ApiKey>,
    /// The session tokens, including expired and revoked ones of the last days.
    pub session_tokens: Vec<SessionToken>,
    /// The latest time of day that a process has recorded, in Unix milliseconds. Credentials that
    /// end are checked against no earlier time, so that setting the clock back extends none.
    pub latest_time_ms: u64,
    /// The access rules of all projects that are in force, by project and id.
    pub rules: Vec<AccessRule>,
    /// The present version of each project's rules.
    pub rule_versions: Vec<RuleSetVersion>,
    /// The upstreams added at run time.
    pub upstreams: Vec<Upstream>,
    /// The stored usage limits of all projects.
    pub limits: Vec<UsageLimit>,
    /// The kill switches that are set.
    pub switches: Vec<KillSwitch>,
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
    /// Adds the successor of a key, and ends the key itself.
    RotateKey {
        /// Id of the key that is replaced.
        id: String,
        /// Time from which it is no longer valid, in Unix milliseconds, unless it ends before.
        ends_ms: u64,
        /// The key that replaces it.
        successor: Box<ApiKey>,
    },
    /// Adds a session token.
    AddSessionToken(Box<SessionToken>),
    /// Revokes a session token; one that is already revoked stays unchanged.
    RevokeSessionToken {
        /// Id of the token, `st_…`.
        id: String,
        /// Time of revocation, in Unix milliseconds.
        at_ms: u64,
    },
    /// Marks the session tokens that have expired as revoked, and deletes those that were revoked
    /// long before.
    ExpireSessionTokens {
        /// The present time, in Unix milliseconds.
        at_ms: u64,
        /// Tokens revoked before this time are deleted, in Unix milliseconds.
        delete_before_ms: u64,
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
    /// Replaces the limit of the same member.
    PutLimit(UsageLimit),
    /// Removes the limit of a member.
    DropLimit {
        /// Id of the limit's project.
        project: String,
        /// Kind of the member.
        kind: LimitKind,
        /// Name of the member, or `*`.
        name: String,
    },
    /// Sets a kill switch, or replaces its reason.
    PutSwitch(KillSwitch),
    /// Removes a kill switch.
    DropSwitch {
        /// Id of the switch's project.
        project: String,
        /// Kind of the subject.
        kind: SwitchKind,
        /// Name of the subject, as stored.
        name: String,
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
