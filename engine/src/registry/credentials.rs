//! Authenticates callers: by the operator token, an API key, a session token, or the token of an
//! external issuer. The credentials decide who the caller is; headers add a user and a session only
//! if the credentials permit that.
//!
//! A refusal never says which check failed, so that a stolen or guessed secret reveals nothing; the
//! audit log does ([`crate::registry::sign_ins`]).

mod index;

use core::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use index::Bearer;
use sha2::{Digest, Sha256};

use crate::domain::caller::{
    AuthMethod, AuthenticatedCaller, Authenticator, Caller, DEFAULT_PROJECT, Role,
};
use crate::domain::directory::ApiKey;
use crate::domain::directory::credential::{
    AssertableAttribute, McpPreferences, check_attribute_name,
};
use crate::domain::fault::{Code, Error};
use crate::domain::id::hex;
use crate::ports::core::{Core, from_store_error};
use crate::registry::SharedCatalog;
use crate::registry::sign_ins::{RefusedCredential, SignInLog};

pub(super) use index::CredentialIndex;
pub(crate) use index::WorkEnd;

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

/// Verifies the credentials of callers, and keeps the time that their ends are compared with.
pub struct CredentialVerifier {
    core: Arc<Core>,
    catalog: Arc<SharedCatalog>,
    /// Authenticates callers that have no API key.
    authenticator: Option<Arc<dyn Authenticator>>,
    /// Authenticates the operator; `None` if this server has no operator token.
    operator: Option<OperatorCredential>,
    /// Milliseconds to add to the clock's `now_ms` for the earliest possible present time: above 0
    /// if a process recorded a later time before.
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

    /// Returns true if the credentials of a caller are still valid, for work that goes on without a
    /// request. A token of an external issuer is valid until that work ends.
    pub fn is_credential_active(&self, caller: &Caller) -> bool {
        self.check_work(caller).is_ok()
    }

    /// Checks that work of a caller may go on without a request: its key or session token was not
    /// revoked, and its key has not expired. A caller without a key passes. The same must hold for
    /// every caller that handed the work to it.
    pub(crate) fn check_work(&self, caller: &Caller) -> Result<(), WorkEnd> {
        if let Some(above) = caller.caller_above() {
            self.check_work(&above)?;
        }
        if caller.auth_method != AuthMethod::Key || caller.attributes.credential.is_none() {
            return Ok(());
        }
        self.check_key_work(caller)
    }

    /// Checks that work which a caller began with a key may go on.
    pub(crate) fn check_key_work(&self, caller: &Caller) -> Result<(), WorkEnd> {
        self.catalog.load().credentials.check_work(caller, self.now_ms())
    }

    /// Returns the preferences of the caller's key as an MCP client. A caller without a key has
    /// none.
    pub fn mcp_preferences(&self, caller: &Caller) -> McpPreferences {
        let catalog = self.catalog.load();
        let credential = caller.attributes.credential.as_deref();
        let key = credential.and_then(|id| catalog.credentials.key_of_credential(id));
        key.and_then(|key| key.attributes.mcp.as_deref().copied()).unwrap_or_default()
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
        self.sign_ins.record_first_use(&self.core, &authenticated.caller, credentials.peer);
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

    /// Makes the time that this or another process recorded the earliest possible present time.
    pub(crate) fn raise_time_floor(&self, recorded_ms: u64) {
        let ahead_ms = recorded_ms.saturating_sub(self.core.now_ms());
        self.time_floor_ms.fetch_max(ahead_ms, Ordering::Relaxed);
    }

    /// Records the time every [`TIME_RECORD_INTERVAL_MS`]. Uses the monotonic time: a jump of the
    /// time of day is not recorded, because it may be a mistake.
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

    /// Returns true if the caller has a key, and work that it began with the key may go on.
    pub(crate) fn has_active_key(&self, caller: &Caller) -> bool {
        caller.auth_method == AuthMethod::Key && self.check_key_work(caller).is_ok()
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
