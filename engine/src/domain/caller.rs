//! The caller: the requester of an operation. A transport builds it from credentials, never from a
//! request's body; it is the first argument of every engine operation. Pure.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The project that always exists.
pub const DEFAULT_PROJECT: &str = "default";

/// One purpose of a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Calls tools.
    Agent,
    /// Provides tools and reports results.
    Provider,
    /// Decides about calls that wait for an approval.
    Approver,
    /// Reads calls, rules and the audit log; changes nothing.
    Auditor,
    /// Operates the server; may do everything.
    Admin,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 5] =
        [Self::Agent, Self::Provider, Self::Approver, Self::Auditor, Self::Admin];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Provider => "provider",
            Self::Approver => "approver",
            Self::Auditor => "auditor",
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

/// The roles of a credential. Written as names in a fixed order with commas, such as
/// `agent,approver`, so that equal sets have equal texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RoleSet(u8);

impl RoleSet {
    /// Returns true if the set has this role.
    pub fn contains(self, role: Role) -> bool {
        self.0 & (1 << role as u8) != 0
    }

    /// Returns true if every role of this set is in the other one.
    pub fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns true if the set has no role.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the roles in their fixed order.
    pub fn iter(self) -> impl Iterator<Item = Role> {
        Role::ALL.into_iter().filter(move |role| self.contains(*role))
    }
}

impl FromIterator<Role> for RoleSet {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        Self(roles.into_iter().fold(0, |bits, role| bits | 1 << role as u8))
    }
}

impl From<Role> for RoleSet {
    fn from(role: Role) -> Self {
        [role].into_iter().collect()
    }
}

impl fmt::Display for RoleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, role) in self.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "," })?;
            f.write_str(role.as_str())?;
        }
        Ok(())
    }
}

impl FromStr for RoleSet {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        text.split(',').map(Role::from_str).collect()
    }
}

/// The method that authenticated the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuthMethod {
    /// A key: the project's rules decide which tools it may call.
    Key,
    /// The embedding program, a command on the data directory, or the bearer of the operator token:
    /// may call and administer everything.
    #[default]
    Local,
    /// None: the server has no keys. May call everything that no rule denies, but administers
    /// nothing, because any local user and any page in a browser can send such a request.
    Anonymous,
}

impl AuthMethod {
    /// Every method.
    pub const ALL: [Self; 3] = [Self::Key, Self::Local, Self::Anonymous];

    /// Returns the name under which calls store the method.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Local => "local",
            Self::Anonymous => "anonymous",
        }
    }

    /// Returns the method with this name.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.as_str() == text)
    }
}

/// Authenticates callers by credentials other than Toolcrib's keys, such as an issuer's tokens.
pub trait Authenticator: Send + Sync + 'static {
    /// Returns the bearer of this token, or `None` if the token is not valid.
    fn authenticate(&self, token: &str) -> Option<AuthenticatedCaller>;
}

/// A caller with the end of its credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthenticatedCaller {
    /// The bearer of the credentials.
    pub caller: Caller,
    /// Time from which the credentials are no longer valid, in Unix milliseconds.
    pub expires_ms: Option<u64>,
}

/// Agent name of local callers.
pub const LOCAL_AGENT: &str = "default";

/// The attributes of a caller that access rules can match, beside its agent and roles. They come
/// from the credentials, and from headers only if the credentials permit that. Stored with each
/// call and run, so that a later decision uses the same attributes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallerAttributes {
    /// Groups of the agent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// User that the agent acts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Session that the credentials assert. Without one the run is the session, and rules that
    /// allow never match it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Environment of the agent, such as `production`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// Patterns of the tools that the credentials are limited to; `None` sets no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Id of the key or session token, `key_…` or `st_…`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// Caller that handed the work to this one, a worker. The access rules apply to both, so a
    /// worker never does what its caller may not do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_behalf_of: Option<Box<DelegatingCaller>>,
}

/// A caller that handed work to an agent, as the calls of that work store it. Its own attributes
/// name the caller above it, so that every call has its whole chain of callers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct DelegatingCaller {
    /// Agent name of the caller.
    pub agent: String,
    /// The caller's [`RoleSet`] as text.
    pub roles: String,
    /// Name of the caller's [`AuthMethod`].
    pub auth_method: String,
    /// Attributes of the caller.
    #[serde(default, skip_serializing_if = "CallerAttributes::is_empty")]
    pub attributes: CallerAttributes,
}

impl From<&Caller> for DelegatingCaller {
    fn from(caller: &Caller) -> Self {
        Self {
            agent: caller.agent.clone(),
            roles: caller.roles.to_string(),
            auth_method: caller.auth_method.as_str().to_owned(),
            attributes: (*caller.attributes).clone(),
        }
    }
}

impl DelegatingCaller {
    /// Returns the caller. Roles that cannot be read permit nothing.
    pub fn caller(&self, project: &str) -> Caller {
        Caller {
            project: project.to_owned(),
            agent: self.agent.clone(),
            roles: self.roles.parse().unwrap_or_default(),
            auth_method: AuthMethod::parse(&self.auth_method).unwrap_or(AuthMethod::Key),
            attributes: Arc::new(self.attributes.clone()),
        }
    }
}

impl CallerAttributes {
    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the callers that handed the work down, from the nearest to the first.
    pub fn callers_above(&self) -> impl Iterator<Item = &DelegatingCaller> {
        std::iter::successors(self.on_behalf_of.as_deref(), |&caller| {
            caller.attributes.on_behalf_of.as_deref()
        })
    }
}

/// The authenticated requester of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Id of the project that the credentials belong to.
    pub project: String,
    /// The name the key was created for. For a provider, the owner of its clients.
    pub agent: String,
    /// Roles of the credentials, which decide the permitted operations.
    pub roles: RoleSet,
    /// Method that authenticated the caller.
    pub auth_method: AuthMethod,
    /// Attributes that access rules can match.
    pub attributes: Arc<CallerAttributes>,
}

impl Caller {
    /// Returns the embedding program as a caller.
    pub fn local(project: impl Into<String>) -> Self {
        Self::new(project, LOCAL_AGENT, Role::Admin, AuthMethod::Local)
    }

    /// Returns a caller without attributes.
    pub fn new(
        project: impl Into<String>,
        agent: impl Into<String>,
        roles: impl Into<RoleSet>,
        auth_method: AuthMethod,
    ) -> Self {
        let (project, agent, roles) = (project.into(), agent.into(), roles.into());
        Self { project, agent, roles, auth_method, attributes: Arc::default() }
    }

    /// Returns the caller with the id of the key or token that authenticated it.
    pub fn with_credential(mut self, credential: Option<String>) -> Self {
        Arc::make_mut(&mut self.attributes).credential = credential;
        self
    }

    /// Returns this worker as it acts in work that another caller has handed to it: for the user,
    /// in the session and in the environment of that caller, unless it asserts its own.
    pub fn on_behalf_of(mut self, above: &Caller) -> Self {
        let own = Arc::make_mut(&mut self.attributes);
        let CallerAttributes { user, session, environment, .. } = &*above.attributes;
        own.user = own.user.take().or_else(|| user.clone());
        own.session = own.session.take().or_else(|| session.clone());
        own.environment = own.environment.take().or_else(|| environment.clone());
        own.on_behalf_of = Some(Box::new(above.into()));
        self
    }

    /// Returns the caller that handed the work to this one.
    pub fn caller_above(&self) -> Option<Caller> {
        self.attributes.on_behalf_of.as_deref().map(|above| above.caller(&self.project))
    }

    /// Returns the bearer of the operator token as a caller.
    pub fn operator(project: impl Into<String>) -> Self {
        Self { agent: "operator".into(), ..Self::local(project) }
    }

    /// Returns a caller without credentials, which a server accepts while it has no keys.
    pub fn anonymous(project: impl Into<String>) -> Self {
        Self { auth_method: AuthMethod::Anonymous, ..Self::local(project) }
    }

    /// Returns true if the access rules do not concern this caller: it is the operator or the
    /// embedding program, and so is every caller that handed the work to it.
    pub fn is_exempt_from_rules(&self) -> bool {
        let is_local = |above: &DelegatingCaller| above.auth_method == AuthMethod::Local.as_str();
        self.auth_method == AuthMethod::Local && self.attributes.callers_above().all(is_local)
    }

    /// Returns true if this caller may do only what a rule allows. Rules that deny or ask hold for
    /// other callers as well.
    pub fn needs_allowing_rule(&self) -> bool {
        self.auth_method == AuthMethod::Key && !self.may_administer()
    }

    /// Returns true if this caller may use every project, and not only its own.
    pub fn spans_projects(&self) -> bool {
        self.auth_method != AuthMethod::Key
    }

    /// Returns true if this caller may call tools.
    pub fn may_invoke(&self) -> bool {
        self.roles.contains(Role::Agent) || self.may_administer()
    }

    /// Returns true if this caller may provide tools and report results.
    pub fn may_provide(&self) -> bool {
        self.roles.contains(Role::Provider) || self.may_administer()
    }

    /// Returns true if this caller may see and decide approvals.
    pub fn may_approve(&self) -> bool {
        self.roles.contains(Role::Approver) || self.may_administer()
    }

    /// Returns true if this caller may read keys, rules and the audit log.
    pub fn may_audit(&self) -> bool {
        self.roles.contains(Role::Auditor) || self.may_administer()
    }

    /// Returns true if this caller may read every call of its project, and not only its own.
    pub fn may_read_all_calls(&self) -> bool {
        self.may_audit() || self.may_approve()
    }

    /// Returns the name under which this caller stores what belongs to it alone, such as
    /// idempotency keys: its agent name, followed by the user and the session that it acts for, so
    /// that two users of one key never share anything.
    pub fn owner_name(&self) -> String {
        let CallerAttributes { user, session, .. } = &*self.attributes;
        if user.is_none() && session.is_none() {
            return self.agent.clone();
        }
        // No name contains a control character.
        let text = |name: &Option<String>| name.clone().unwrap_or_default();
        format!("{}\u{1f}{}\u{1f}{}", self.agent, text(user), text(session))
    }

    /// Returns true if this caller has access to everything in its project. Keys, rules, upstreams
    /// and the audit log additionally require that it is not anonymous.
    pub fn may_administer(&self) -> bool {
        self.roles.contains(Role::Admin)
    }
}
