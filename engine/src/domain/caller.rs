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
    /// A loopback caller of a server without keys, or the embedding program: may call everything.
    Local,
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
}

impl Caller {
    /// Returns the embedding program as a caller, or any loopback caller while no key exists.
    pub fn local(project: impl Into<String>) -> Self {
        let (agent, role, auth_method) = (LOCAL_AGENT.into(), Role::Admin, AuthMethod::Local);
        Self { project: project.into(), agent, role, auth_method }
    }

    /// Returns true if this caller may call tools.
    pub fn may_invoke(&self) -> bool {
        matches!(self.role, Role::Agent | Role::Admin)
    }

    /// Returns true if this caller may provide tools and report results.
    pub fn may_provide(&self) -> bool {
        matches!(self.role, Role::Provider | Role::Admin)
    }

    /// Returns true if this caller may change keys and rules.
    pub fn may_administer(&self) -> bool {
        self.role == Role::Admin
    }
}
