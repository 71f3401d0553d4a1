//! Credentials of callers: API keys and the session tokens that are made from them. Both are stored
//! without their secrets. Pure.

use core::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::domain::access_rules::pattern_matches;
use crate::domain::caller::{CallerAttributes, Role, RoleSet};

/// Maximum length of the names of a user, a session, a group or an environment.
const MAX_NAME_LENGTH: usize = 128;

/// An attribute of a caller that a request may assert by a header, if its credentials permit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AssertableAttribute {
    /// The user that the agent acts for: `X-Toolcrib-User`.
    User,
    /// The session of that user: `X-Toolcrib-Session`.
    Session,
}

impl AssertableAttribute {
    /// Every assertable attribute.
    pub const ALL: [Self; 2] = [Self::User, Self::Session];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Session => "session",
        }
    }

    /// Returns the name of the header that asserts it.
    pub fn header(self) -> &'static str {
        match self {
            Self::User => "X-Toolcrib-User",
            Self::Session => "X-Toolcrib-Session",
        }
    }
}

impl FromStr for AssertableAttribute {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|attribute| attribute.as_str() == text).ok_or(())
    }
}

/// The form in which MCP clients see the names of tools. Both forms can be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolNameForm {
    /// Names that every model API accepts: `calculation__eval`.
    #[default]
    Model,
    /// Toolcrib's own names: `calculation.eval`.
    Dotted,
}

impl ToolNameForm {
    /// Every form.
    pub const ALL: [Self; 2] = [Self::Model, Self::Dotted];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dotted => "dotted",
        }
    }
}

impl FromStr for ToolNameForm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|form| form.as_str() == text).ok_or(())
    }
}

/// Preferences of a key's bearer as an MCP client. The URL of a request takes precedence over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct McpPreferences {
    /// Form of the names of tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub names: Option<ToolNameForm>,
    /// Time that `tools/call` waits for a result, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

impl McpPreferences {
    /// Returns true if nothing is preferred.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The attributes of a key that no query filters by. Stored as JSON, so a new attribute is a field
/// here and needs no migration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyAttributes {
    /// Groups of the agent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// User that the agent acts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Environment of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// Patterns of the tools that the key is limited to; `None` sets no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Networks in CIDR notation that the key may be used from; empty for no limit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    /// Attributes that requests with the key may assert by headers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub may_assert: Vec<AssertableAttribute>,
    /// Id of the key that this one replaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotated_from: Option<String>,
    /// Preferences of the bearer as an MCP client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Box<McpPreferences>>,
}

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
    /// Roles of the bearer of the key.
    pub roles: RoleSet,
    /// Groups, user, environment and limits of the bearer; new attributes go there.
    pub attributes: KeyAttributes,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
    /// Time from which the key is no longer valid, in Unix milliseconds; `None` for a key without
    /// an end. A rotation sets it to the end of the overlap.
    pub expires_ms: Option<u64>,
    /// Time of revocation, in Unix milliseconds; `None` if it is not revoked. A key that has
    /// expired is revoked within a second, so that no change of the clock makes it valid again.
    pub revoked_ms: Option<u64>,
    /// False if requests of its agent, with any key, never join an earlier call.
    pub rejoin: bool,
}

impl ApiKey {
    /// Returns true if the key is valid at this time.
    pub fn is_active(&self, now_ms: u64) -> bool {
        self.status(now_ms) == CredentialStatus::Active
    }

    /// Returns the status of the key at this time.
    pub fn status(&self, now_ms: u64) -> CredentialStatus {
        CredentialStatus::at(now_ms, self.revoked_ms, self.expires_ms)
    }

    /// Returns true if requests with this key may assert the attribute.
    pub fn may_assert(&self, attribute: AssertableAttribute) -> bool {
        self.attributes.may_assert.contains(&attribute)
    }

    /// Returns the attributes of the key's bearer.
    pub fn caller_attributes(&self) -> CallerAttributes {
        let KeyAttributes { groups, user, environment, tools, .. } = self.attributes.clone();
        let credential = Some(self.id.clone());
        let none = CallerAttributes::default();
        CallerAttributes { groups, user, environment, tools, credential, ..none }
    }

    /// Returns the roles of session tokens that are made from this key. A token calls tools if the
    /// key may, and provides tools if the key has that role; it never approves, audits or
    /// administers.
    pub fn session_token_roles(&self) -> RoleSet {
        let invokes = self.roles.contains(Role::Agent) || self.roles.contains(Role::Admin);
        let provides = self.roles.contains(Role::Provider);
        let roles = [(Role::Agent, invokes), (Role::Provider, provides)];
        roles.into_iter().filter(|(_, has)| *has).map(|(role, _)| role).collect()
    }
}

/// Status of a key or a session token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CredentialStatus {
    /// Valid.
    Active,
    /// Past its end.
    Expired,
    /// Withdrawn before its end.
    Revoked,
}

impl CredentialStatus {
    /// Returns the status at this time. A revocation at or after the end only made the expiry
    /// durable.
    fn at(now_ms: u64, revoked_ms: Option<u64>, expires_ms: Option<u64>) -> Self {
        match (revoked_ms, expires_ms) {
            (Some(revoked), Some(expires)) if revoked >= expires => Self::Expired,
            (Some(_), _) => Self::Revoked,
            (None, Some(expires)) if now_ms >= expires => Self::Expired,
            (None, _) => Self::Active,
        }
    }

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

/// The restrictions of a session token. Stored as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionTokenAttributes {
    /// User that the bearer acts for; `None` leaves the key's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Session of the bearer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Environment that the request named. It is the key's, which the bearer has in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// Patterns of the tools that the token is limited to; `None` leaves the key's limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
}

/// A session token without its secret. It narrows the key that it was made from, and ends with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionToken {
    /// `st_…`: identifies the token and grants nothing.
    pub id: String,
    /// SHA-256 of the secret, in hexadecimal.
    pub digest: String,
    /// Id of the key that the token was made from.
    pub key_id: String,
    /// Id of the key's project.
    pub project: String,
    /// Restrictions of the token.
    pub attributes: SessionTokenAttributes,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
    /// Time from which the token is no longer valid, in Unix milliseconds.
    pub expires_ms: u64,
    /// Time of revocation, in Unix milliseconds; `None` if it is not revoked.
    pub revoked_ms: Option<u64>,
}

impl SessionToken {
    /// Prefix of every token id.
    pub const PREFIX: &'static str = "st_";

    /// Returns the status of the token at this time, apart from its key.
    pub fn status(&self, now_ms: u64) -> CredentialStatus {
        CredentialStatus::at(now_ms, self.revoked_ms, Some(self.expires_ms))
    }

    /// Returns the attributes of the token's bearer.
    pub fn caller_attributes(&self, key: &ApiKey) -> CallerAttributes {
        let (own, of_key) = (self.attributes.clone(), key.caller_attributes());
        CallerAttributes {
            groups: of_key.groups,
            user: own.user.or(of_key.user),
            session: own.session,
            environment: of_key.environment,
            tools: own.tools.or(of_key.tools),
            credential: Some(self.id.clone()),
            on_behalf_of: None,
        }
    }
}

/// Parses a network in CIDR notation; a plain address is a network of one address.
pub fn parse_network(text: &str) -> Result<IpNet, String> {
    let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.map_err(|_| {
        let excerpt: String = text.chars().take(64).collect();
        format!("\"{excerpt}\" is not a network such as 10.0.0.0/8 or 2001:db8::/32")
    })
}

/// Returns true if an address is in one of the networks. An IPv4 address that a dual-stack socket
/// shows as IPv6 counts as IPv4.
pub fn networks_contain(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// Checks the name of a user, a session, a group or an environment: visible ASCII without the
/// characters that lists, patterns and quoted texts use.
pub fn check_attribute_name(field: &str, name: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_graphic() && !",*\"\\".contains(c);
    if (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.chars().all(is_allowed) {
        return Ok(());
    }
    Err(format!(
        "{field} must be 1 to {MAX_NAME_LENGTH} visible ASCII characters without a space, comma, \
         star, quotation mark or backslash"
    ))
}

/// Returns true if every name that matches `pattern` matches one of the patterns in `limits`. A
/// star of the pattern must be covered by a star of the limit.
pub fn is_pattern_within(pattern: &str, limits: &[String]) -> bool {
    // As a text, a pattern contains its stars, and only the star of another pattern matches them.
    limits.iter().any(|limit| pattern_matches(limit, pattern))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn key(roles: &[Role]) -> ApiKey {
        ApiKey {
            id: "key_1".into(),
            digest: "d".into(),
            project: "p".into(),
            agent: "ada".into(),
            roles: roles.iter().copied().collect(),
            attributes: KeyAttributes::default(),
            created_ms: 1,
            expires_ms: None,
            revoked_ms: None,
            rejoin: true,
        }
    }

    #[test]
    fn a_pattern_is_within_a_limit_that_matches_all_its_names() {
        let limits = ["weather.*".to_owned(), "mail.send".to_owned()];
        for (pattern, within) in [
            ("weather.query", true),
            ("weather.*", true),
            ("weather.a*b", true),
            ("mail.send", true),
            ("mail.*", false),
            ("*", false),
            ("weather*", false),
            ("*.query", false),
        ] {
            assert_eq!(is_pattern_within(pattern, &limits), within, "{pattern}");
        }
    }

    #[test]
    fn networks_contain_addresses_of_their_family() {
        let networks: Vec<IpNet> =
            ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"].map(|n| parse_network(n).unwrap()).into();
        for (address, inside) in [
            ("10.255.0.1", true),
            ("11.0.0.1", false),
            ("::ffff:10.1.1.1", true),
            ("::ffff:11.1.1.1", false),
            ("2001:db8:1::1", true),
            ("2001:db9::1", false),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
        ] {
            assert_eq!(networks_contain(&networks, address.parse().unwrap()), inside, "{address}");
        }
        for wrong in ["", "10.0.0.0/33", "ten", "10.0.0.0/8/8", "10.0.0"] {
            assert!(parse_network(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_session_token_never_has_more_than_the_roles_agent_and_provider() {
        for (roles, expected) in [
            (&[Role::Agent][..], "agent"),
            (&[Role::Admin], "agent"),
            (&[Role::Provider], "provider"),
            (&[Role::Agent, Role::Provider, Role::Approver, Role::Admin], "agent,provider"),
            (&[Role::Approver, Role::Auditor], ""),
        ] {
            assert_eq!(key(roles).session_token_roles().to_string(), expected);
        }
    }

    #[test]
    fn a_credential_that_expired_stays_expired_when_it_is_revoked_for_that() {
        let expiring = ApiKey { expires_ms: Some(100), ..key(&[Role::Agent]) };
        assert_eq!(expiring.status(99), CredentialStatus::Active);
        assert_eq!(expiring.status(100), CredentialStatus::Expired);
        let ended = ApiKey { revoked_ms: Some(101), ..expiring.clone() };
        assert_eq!(ended.status(50), CredentialStatus::Expired);
        let revoked = ApiKey { revoked_ms: Some(99), ..expiring };
        assert_eq!(revoked.status(50), CredentialStatus::Revoked);
    }
}
