//! The slow-changing part of the store: tools that others registered, clients, keys and rules.
//!
//! It is small, so every node keeps all of it in memory and loads it again when its version
//! changed. A change names the version it was decided on; if somebody was faster, it is decided
//! again. Pure data.

use crate::caller::Role;
use crate::json::Json;
use crate::policy::Rule;
use crate::tool::Definition;
use crate::utp::Member;

/// A key, without its secret: only the digest is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// `key_…`: names the key without opening anything.
    pub id: String,
    /// SHA-256 of the secret, in hexadecimal.
    pub digest: String,
    pub project: String,
    pub agent: String,
    pub role: Role,
    pub created_ms: u64,
    pub revoked_ms: Option<u64>,
}

/// A program that offers tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    pub project: String,
    pub client_id: String,
    /// The agent name of the key that registered it first.
    pub owner: String,
    pub registered_ms: u64,
}

/// A client offers a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Offer {
    pub project: String,
    pub tool: String,
    pub client_id: String,
}

/// A tenant that was made on purpose. A project that has a key is there as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    pub id: String,
    pub title: String,
    pub created_ms: u64,
}

/// A server that tools are brought in from, added while the crib runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Upstream {
    pub project: String,
    /// The first part of its tools' names.
    pub name: String,
    /// Which source speaks with it: `mcp`.
    pub kind: String,
    /// What that source must know; nobody else reads it.
    pub settings: Json,
    pub added_ms: u64,
}

/// All of it, at one version.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    pub version: u64,
    /// Those that clients offer, and those of the projects themselves.
    pub tools: Vec<Definition>,
    pub projects: Vec<Project>,
    /// The agents that can be woken.
    pub roster: Vec<Member>,
    pub clients: Vec<Client>,
    pub offers: Vec<Offer>,
    pub keys: Vec<Key>,
    pub rules: Vec<Rule>,
    pub upstreams: Vec<Upstream>,
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A client offers these tools; each is put in or replaces the definition of its name.
    Register {
        client: Client,
        tools: Vec<Definition>,
        others: Others,
    },
    /// A client offers this tool no more; a tool nobody offers is gone.
    Withdraw {
        project: String,
        client_id: String,
        tool: String,
    },
    /// A client is forgotten, with all it offers.
    DropClient {
        project: String,
        client_id: String,
    },
    AddProject(Project),
    /// Tools of the project itself; what each was before is kept for the calls that used it.
    PutTools(Vec<Definition>),
    DropTool {
        project: String,
        name: String,
    },
    /// Replaces what was known of the agent.
    PutMember(Member),
    DropMember {
        project: String,
        agent_id: String,
    },
    AddKey(Key),
    RevokeKey {
        id: String,
        at_ms: u64,
    },
    /// Replaces a rule on the same agent and pattern.
    PutRule(Rule),
    DropRule {
        project: String,
        agent: String,
        pattern: String,
    },
    /// Replaces what was known of it; its tools stay.
    PutUpstream(Box<Upstream>),
    /// With all its tools.
    DropUpstream {
        project: String,
        name: String,
    },
    /// The tools of an upstream: these, and no others.
    SetUpstreamTools {
        project: String,
        upstream: String,
        tools: Vec<Definition>,
    },
}

/// What becomes of the tools a client offered before and does not name now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    Keep,
    Withdraw,
}

/// Something the operator may want to know later.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    pub at_ms: u64,
    pub project: String,
    pub agent: String,
    /// `call.denied`, `key.created`, `key.revoked`, `rule.set`, `rule.removed`.
    pub action: String,
    /// What it was about: a tool, a key's id, a pattern.
    pub subject: String,
    pub reason: String,
}
