//! Authenticates callers: by the operator token, an API key, a session token, or the token of an
//! external issuer. The credentials decide who the caller is; headers add a user and a session only
//! if the credentials permit that.
//!
//! A refusal never says which check failed, so that a stolen or guessed secret reveals nothing; the
//! audit log does ([`crate::registry::sign_ins`]).

use core::net::IpAddr;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use crate::domain::caller::{
    AuthMethod, AuthenticatedCaller, Authenticator, Caller, CallerAttributes, DEFAULT_PROJECT,
    Role, RoleSet,
};
use crate::domain::directory::credential::{
    AssertableAttribute, CredentialStatus, check_attribute_name, networks_contain, parse_network,
};
use crate::domain::directory::{ApiKey, Directory, SessionToken};
use crate::domain::fault::{Code, Error};
use crate::domain::id::hex;
use crate::ports::core::{Core, from_store_error};
use crate::registry::SharedCatalog;
use crate::registry::sign_ins::{RefusedCredential, SignInLog};

/// Time between two records of the time of day, while credentials have an end.
const TIME_RECORD_INTERVAL_MS: u64 = 10_000;

/// Returns the SHA-256 digest of a secret, the only form in which it is stored.
pub fn secret_digest(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

/// The operator token of this server, as the registry knows it.
#[derive(Debug, Clone)]
pub struct OperatorCredential {
    digest: String,
    token_file: String,
}

impl OperatorCredential {
    /// Creates the credential of a token. `token_file` is the file that holds the token; refusals
    /// name it to callers without credentials.
    pub fn new(token: &str, token_file: impl Into<String>) -> Self {
        Self { digest: secret_digest(token), token_file: token_file.into() }
    }

    /// Compares a digest with the token's in constant time.
    fn matches(&self, digest: &str) -> bool {
        let (own, other) = (self.digest.as_bytes(), digest.as_bytes());
        let differences = own.iter().zip(other).fold(0, |bits, (a, b)| bits | (a ^ b));
        own.len() == other.len() && std::hint::black_box(differences) == 0
    }
}

/// The credentials of a request, and where it comes from.
#[derive(Debug, Clone, Copy, Default)]
pub struct Credentials<'a> {
    /// Secret of a key, a session token or the operator token, or the token of an issuer.
    pub secret: &'a str,
    /// User that the request asserts.
    pub user: Option<&'a str>,
    /// Session that the request asserts.
    pub session: Option<&'a str>,
    /// Address of the connection's other end, if there is a connection.
    pub peer: Option<IpAddr>,
}

impl<'a> Credentials<'a> {
    /// Returns credentials that assert nothing and come from no connection.
    pub fn new(secret: &'a str) -> Self {
        Self { secret, ..Self::default() }
    }

    fn asserted(&self, attribute: AssertableAttribute) -> Option<&'a str> {
        match attribute {
            AssertableAttribute::User => self.user,
            AssertableAttribute::Session => self.session,
        }
    }
}

/// A key with what authentication needs of it, prepared.
struct KeyRecord {
    key: ApiKey,
    attributes: Arc<CallerAttributes>,
    /// The parsed networks. One that cannot be parsed is left out, so that it contains no address.
    networks: Vec<IpNet>,
}

impl KeyRecord {
    fn new(key: &ApiKey) -> Self {
        let networks = key.attributes.networks.iter().filter_map(|text| parse_network(text).ok());
        Self {
            networks: networks.collect(),
            attributes: Arc::new(key.caller_attributes()),
            key: key.clone(),
        }
    }

    /// Checks that the key is valid now and at this address. An unknown address is in no network.
    fn check(&self, now_ms: u64, peer: Option<IpAddr>) -> Result<(), &'static str> {
        match self.key.status(now_ms) {
            CredentialStatus::Active => {}
            CredentialStatus::Expired => return Err("the key has expired"),
            CredentialStatus::Revoked => return Err("the key was revoked"),
        }
        let is_within = || peer.is_some_and(|address| networks_contain(&self.networks, address));
        match self.key.attributes.networks.is_empty() || is_within() {
            true => Ok(()),
            false => Err("the key is not valid from this address"),
        }
    }
}

/// The credentials of one version of the directory, by the digests of their secrets.
#[derive(Default)]
pub(super) struct CredentialIndex {
    keys: HashMap<String, KeyRecord>,
    key_digests: HashMap<String, String>,
    tokens: HashMap<String, SessionToken>,
}

impl CredentialIndex {
    pub(super) fn new(directory: &Directory) -> Self {
        let keys = directory.keys.iter();
        let tokens = directory.session_tokens.iter();
        Self {
            key_digests: keys.clone().map(|key| (key.id.clone(), key.digest.clone())).collect(),
            keys: keys.map(|key| (key.digest.clone(), KeyRecord::new(key))).collect(),
            tokens: tokens.map(|token| (token.digest.clone(), token.clone())).collect(),
        }
    }

    fn key_by_id(&self, id: &str) -> Option<&KeyRecord> {
        self.keys.get(self.key_digests.get(id)?)
    }

    /// Returns the bearer of a key or session token, the attributes that it may assert, and the end
    /// of the credentials. `None` if no key or token has this digest.
    fn find_bearer(
        &self,
        digest: &str,
        now_ms: u64,
        peer: Option<IpAddr>,
    ) -> Option<Result<Bearer, RefusedCredential>> {
        if let Some(record) = self.keys.get(digest) {
            let key = &record.key;
            let refused = |reason| RefusedCredential::new(key, &key.id, reason);
            return Some(record.check(now_ms, peer).map_err(refused).map(|()| Bearer {
                caller: caller_of(key, key.roles, record.attributes.clone()),
                may_assert: key.attributes.may_assert.clone(),
                expires_ms: key.expires_ms,
            }));
        }
        let token = self.tokens.get(digest)?;
        let record = self.key_by_id(&token.key_id)?;
        let key = &record.key;
        let refused = |reason| RefusedCredential::new(key, &token.id, reason);
        let checked = match token.status(now_ms) {
            CredentialStatus::Active => record.check(now_ms, peer),
            CredentialStatus::Expired => Err("the session token has expired"),
            CredentialStatus::Revoked => Err("the session token was revoked"),
        };
        Some(checked.map_err(refused).map(|()| Bearer {
            caller: caller_of(
                key,
                key.session_token_roles(),
                Arc::new(token.caller_attributes(key)),
            ),
            // A token is for one user and one session; only its key asserts others.
            may_assert: Vec::new(),
            expires_ms: Some(
                key.expires_ms.map_or(token.expires_ms, |ms| ms.min(token.expires_ms)),
            ),
        }))
    }

    /// Returns true if work that this caller began may go on for it: a valid key has its agent name
    /// and all its roles, and acts for its user or may assert one. A session token that was revoked
    /// ends its work; one that expired does not, because the work was accepted before.
    pub(super) fn has_active_key(&self, caller: &Caller, now_ms: u64) -> bool {
        if caller.auth_method != AuthMethod::Key {
            return false;
        }
        let credential = caller.attributes.credential.as_deref();
        let is_it = |token: &&SessionToken| Some(token.id.as_str()) == credential;
        let token = credential
            .filter(|id| id.starts_with(SessionToken::PREFIX))
            .and_then(|_| self.tokens.values().find(is_it));
        if token.is_some_and(|token| token.status(now_ms) == CredentialStatus::Revoked) {
            return false;
        }
        let is_token = credential.is_some_and(|id| id.starts_with(SessionToken::PREFIX));
        self.keys.values().any(|record| {
            let key = &record.key;
            let roles = if is_token { key.session_token_roles() } else { key.roles };
            let user = caller.attributes.user.as_deref();
            let acts_for_user =
                user == key.attributes.user.as_deref() || key.may_assert(AssertableAttribute::User);
            key.is_active(now_ms)
                && key.project == caller.project
                && key.agent == caller.agent
                && caller.roles.is_subset(roles)
                && acts_for_user
        })
    }

    /// Returns the active keys.
    pub(super) fn active_keys(&self, now_ms: u64) -> impl Iterator<Item = &ApiKey> {
        self.keys.values().map(|record| &record.key).filter(move |key| key.is_active(now_ms))
    }
}

fn caller_of(key: &ApiKey, roles: RoleSet, attributes: Arc<CallerAttributes>) -> Caller {
    let (project, agent) = (key.project.clone(), key.agent.clone());
    Caller { project, agent, roles, auth_method: AuthMethod::Key, attributes }
}

/// The bearer of valid credentials.
struct Bearer {
    caller: Caller,
    may_assert: Vec<AssertableAttribute>,
    expires_ms: Option<u64>,
}

/// Verifies the credentials of callers, and keeps the time that their ends are compared with.
pub struct CredentialVerifier {
    core: Arc<Core>,
    catalog: Arc<SharedCatalog>,
    /// Authenticates callers that have no API key.
    authenticator: Option<Arc<dyn Authenticator>>,
    /// Authenticates the operator; `None` if this server has no operator token.
    operator: Option<OperatorCredential>,
    /// Milliseconds by which credentials take the time to be ahead of the clock, because a process
    /// recorded a later time before.
    time_floor_ms: AtomicU64,
    /// Time of day that this process recorded last, in Unix milliseconds.
    recorded_time_ms: AtomicU64,
    sign_ins: SignInLog,
}

impl CredentialVerifier {
    pub(super) fn new(
        core: Arc<Core>,
        catalog: Arc<SharedCatalog>,
        authenticator: Option<Arc<dyn Authenticator>>,
        operator: Option<OperatorCredential>,
    ) -> Self {
        Self {
            core,
            catalog,
            authenticator,
            operator,
            time_floor_ms: AtomicU64::default(),
            recorded_time_ms: AtomicU64::default(),
            sign_ins: SignInLog::default(),
        }
    }

    /// Returns the caller that these credentials authenticate. The whole secret is hashed and the
    /// digest looked up, so the time this takes reveals nothing about how much of a guess was
    /// right.
    pub fn authenticate(
        &self,
        credentials: &Credentials<'_>,
    ) -> Result<AuthenticatedCaller, Error> {
        let bearer = self.find_bearer(credentials).map_err(|refused| {
            self.sign_ins.record_refused(&self.core, credentials.peer, &refused);
            invalid_credentials()
        })?;
        let authenticated = assert_attributes(bearer, credentials)?;
        self.sign_ins.record_first_use(&self.core, &authenticated.caller);
        Ok(authenticated)
    }

    /// Returns the caller that the credentials of an open stream or wait authenticate now. Unlike
    /// [`authenticate`](Self::authenticate), this is no sign-in for the audit log.
    pub fn authenticate_again(
        &self,
        credentials: &Credentials<'_>,
    ) -> Result<AuthenticatedCaller, Error> {
        let bearer = self.find_bearer(credentials).map_err(|_| invalid_credentials())?;
        assert_attributes(bearer, credentials)
    }

    fn find_bearer(&self, credentials: &Credentials<'_>) -> Result<Bearer, RefusedCredential> {
        let (catalog, digest) = (self.catalog.load(), secret_digest(credentials.secret));
        if self.operator.as_ref().is_some_and(|operator| operator.matches(&digest)) {
            return Ok(Bearer {
                caller: Caller::operator(DEFAULT_PROJECT),
                may_assert: AssertableAttribute::ALL.into(),
                expires_ms: None,
            });
        }
        let now_ms = self.now_ms();
        if let Some(found) = catalog.credentials.find_bearer(&digest, now_ms, credentials.peer) {
            return found;
        }
        let external = self.authenticator.as_ref().and_then(|a| a.authenticate(credentials.secret));
        let AuthenticatedCaller { caller, expires_ms } =
            external.ok_or_else(RefusedCredential::unknown)?;
        if expires_ms.is_some_and(|expires_ms| now_ms >= expires_ms) {
            let (project, agent) = (caller.project, caller.agent);
            let reason = "the token of the issuer has expired";
            return Err(RefusedCredential { project, agent, id: String::new(), reason });
        }
        Ok(Bearer { caller, may_assert: Vec::new(), expires_ms })
    }

    /// Returns the time that the ends of credentials are compared with, in Unix milliseconds. It is
    /// the time of day, but never goes back, not even over a restart: setting the clock back makes
    /// no credentials valid again.
    pub fn now_ms(&self) -> u64 {
        let floor_ms = self.time_floor_ms.load(Ordering::Relaxed);
        self.core.wall_ms().max(self.core.now_ms().saturating_add(floor_ms))
    }

    /// Takes the time that this or another process recorded as the earliest present time.
    pub(crate) fn raise_time_floor(&self, recorded_ms: u64) {
        let ahead_ms = recorded_ms.saturating_sub(self.core.now_ms());
        self.time_floor_ms.fetch_max(ahead_ms, Ordering::Relaxed);
    }

    /// Records the time of day now and then, as the clock counts it: a jump of the clock is not
    /// recorded, because it may be a mistake.
    pub(crate) async fn record_time_if_due(&self) -> Result<(), Error> {
        let floor_ms = self.time_floor_ms.load(Ordering::Relaxed);
        let now_ms = self.core.now_ms().saturating_add(floor_ms);
        let recorded_ms = self.recorded_time_ms.load(Ordering::Relaxed);
        if now_ms < recorded_ms.saturating_add(TIME_RECORD_INTERVAL_MS) {
            return Ok(());
        }
        self.core.store.record_time(now_ms).await.map_err(from_store_error)?;
        self.recorded_time_ms.store(now_ms, Ordering::Relaxed);
        Ok(())
    }

    /// Returns true if an issuer's tokens authenticate callers too.
    pub(super) fn accepts_issuer_tokens(&self) -> bool {
        self.authenticator.is_some()
    }

    /// Returns the file that holds the operator token; `None` if this server has no such token.
    pub(super) fn operator_token_file(&self) -> Option<&str> {
        self.operator.as_ref().map(|operator| operator.token_file.as_str())
    }

    /// Returns true if callers must present an API key or a token.
    pub fn has_keys(&self) -> bool {
        self.accepts_issuer_tokens() || self.catalog.load().has_keys()
    }

    /// Returns true if an active key authenticates this caller, or stands for it after a rotation.
    pub(crate) fn has_active_key(&self, caller: &Caller) -> bool {
        self.catalog.load().credentials.has_active_key(caller, self.now_ms())
    }

    /// Returns true if a key with the admin role is valid, or an issuer's tokens may have it.
    pub(crate) fn has_admin_key(&self, except: Option<&str>) -> bool {
        let catalog = self.catalog.load();
        let is_admin = |key: &ApiKey| key.roles.contains(Role::Admin) && Some(&*key.id) != except;
        self.accepts_issuer_tokens() || catalog.credentials.active_keys(self.now_ms()).any(is_admin)
    }
}

fn invalid_credentials() -> Error {
    let message = "these credentials are not valid: the key or token is unknown, has expired or was \
                   revoked, or it may not be used from your address";
    Error::refused(Code::Unauthenticated, message)
}

/// Adds the asserted attributes to the caller.
fn assert_attributes(
    bearer: Bearer,
    credentials: &Credentials<'_>,
) -> Result<AuthenticatedCaller, Error> {
    let Bearer { mut caller, may_assert, expires_ms } = bearer;
    for attribute in AssertableAttribute::ALL {
        let Some(value) = credentials.asserted(attribute) else { continue };
        let header = attribute.header();
        if !may_assert.contains(&attribute) {
            let message = format!(
                "{header} is only accepted from a key that may assert it; toolcrib keys create \
                 --may-assert {} makes one",
                attribute.as_str()
            );
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        check_attribute_name(header, value)
            .map_err(|message| Error::refused(Code::BadRequest, message))?;
        let attributes = Arc::make_mut(&mut caller.attributes);
        match attribute {
            AssertableAttribute::User => attributes.user = Some(value.to_owned()),
            AssertableAttribute::Session => attributes.session = Some(value.to_owned()),
        }
    }
    Ok(AuthenticatedCaller { caller, expires_ms })
}
