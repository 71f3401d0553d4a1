//! Who asks. Made from credentials by a door, never from a request's body; the first argument of
//! every operation of the engine. Pure.

use std::str::FromStr;

/// What a key is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Calls tools.
    Agent,
    /// Offers tools and reports results.
    Provider,
    /// Operates the crib: everything.
    Admin,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Agent, Self::Provider, Self::Admin];

    /// As written on the wire.
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

/// How the caller was recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// By a key: the project's rules decide what it may call.
    Key,
    /// A loopback caller of a crib without any keys, or the embedding program: everything.
    Local,
}

/// Whoever knows callers by something else than the crib's own keys: the tokens of an issuer.
pub trait Recognise: Send + Sync + 'static {
    /// Who bears this token; none when it is not a valid one.
    fn recognise(&self, token: &str) -> Option<Caller>;
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub project: String,
    /// The name the key was made for; for a provider, who owns its clients.
    pub agent: String,
    pub role: Role,
    pub trust: Trust,
}

impl Caller {
    /// The embedding program, or anybody on loopback where no key was ever made.
    pub fn local(project: impl Into<String>) -> Self {
        let (agent, role, trust) = ("default".into(), Role::Admin, Trust::Local);
        Self { project: project.into(), agent, role, trust }
    }

    /// Whether this caller may call tools.
    pub fn may_invoke(&self) -> bool {
        matches!(self.role, Role::Agent | Role::Admin)
    }

    /// Whether this caller may offer tools and report results.
    pub fn may_provide(&self) -> bool {
        matches!(self.role, Role::Provider | Role::Admin)
    }

    /// Whether this caller may change keys and rules.
    pub fn may_administer(&self) -> bool {
        self.role == Role::Admin
    }
}
