//! The caller: the requester of an operation. A transport builds it from credentials, never from a
//! request's body; it is the first argument of every engine operation. Pure.

use std::str::FromStr;

/// The purpose of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Calls tools.
    Agent,
    /// Provides tools and reports results.
    Provider,
    /// Operates the server; may do everything.
    Admin,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Agent, Self::Provider, Self::Admin];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Provider => "provider",
            Self::Admin => "admin",
        }
    }
}

impl FromStr for Role {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|role| role.as_str() == text).ok_or(())
    }
}

/// The method that authenticated the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthMethod {
    /// A key: the project's rules decide which tools it may call.
    Key,
    /// The embedding program, a command on the data directory, or the bearer of the operator token:
    /// may call and administer everything.
    Local,
    /// None: the server has no keys. May call everything, but administers nothing, because any
    /// local user and any page in a browser can send such a request.
    Anonymous,
}

/// Authenticates callers by credentials other than Toolcrib's keys, such as an issuer's tokens.
pub trait Authenticator: Send + Sync + 'static {
    /// Returns the bearer of this token, or `None` if the token is not valid.
    fn authenticate(&self, token: &str) -> Option<Caller>;
}

/// Agent name of local callers.
pub const LOCAL_AGENT: &str = "default";

/// The authenticated requester of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Id of the project that the credentials belong to.
    pub project: String,
    /// The name the key was created for. For a provider, the owner of its clients.
    pub agent: String,
    /// Role of the credentials, which decides the permitted operations.
    pub role: Role,
    /// Method that authenticated the caller.
    pub auth_method: AuthMethod,
    /// Id of the API key that authenticated the caller. Its calls wait only as long as the key is
    /// active.
    pub key_id: Option<String>,
}

impl Caller {
    /// Returns the embedding program as a caller.
    pub fn local(project: impl Into<String>) -> Self {
        let (agent, role, auth_method) = (LOCAL_AGENT.into(), Role::Admin, AuthMethod::Local);
        Self { project: project.into(), agent, role, auth_method, key_id: None }
    }

    /// Returns the bearer of the operator token as a caller.
    pub fn operator(project: impl Into<String>) -> Self {
        Self { agent: "operator".into(), ..Self::local(project) }
    }

    /// Returns a caller without credentials, which a server accepts while it has no keys.
    pub fn anonymous(project: impl Into<String>) -> Self {
        Self { auth_method: AuthMethod::Anonymous, ..Self::local(project) }
    }

    /// Returns true if the access rules do not concern this caller: it has no key.
    pub fn is_exempt_from_rules(&self) -> bool {
        self.auth_method != AuthMethod::Key
    }

    /// Returns true if this caller may use every project, and not only its own.
    pub fn spans_projects(&self) -> bool {
        self.auth_method != AuthMethod::Key
    }

    /// Returns true if this caller may call tools.
    pub fn may_invoke(&self) -> bool {
        matches!(self.role, Role::Agent | Role::Admin)
    }

    /// Returns true if this caller may provide tools and report results.
    pub fn may_provide(&self) -> bool {
        matches!(self.role, Role::Provider | Role::Admin)
    }

    /// Returns true if this caller has access to everything in its project. Keys, rules, upstreams
    /// and the audit log additionally require that it is not anonymous.
    pub fn may_administer(&self) -> bool {
        self.role == Role::Admin
    }
}
