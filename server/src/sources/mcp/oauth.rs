//! Access tokens for one upstream: the token to send, the time to renew it, and the cases in which
//! a person must sign in.
//!
//! `rmcp` implements the protocol: discovery of the issuer, registration, the authorization code
//! and its exchange, and refresh. This module decides the rest: storage of tokens, timing of each
//! step, the link that a person sees. It ensures that a secret is sent only to the issuer it
//! belongs to.

mod flow;
mod kept;
mod settings;
mod web;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use rmcp::transport::auth::{AuthorizationManager, WWWAuthenticateParams};

use super::environment::Filled;
use super::settings::McpSettings;
use super::{Ledger, now_ms};
use crate::outbound::Outbound;
use kept::{Grant, Pending, Token, Wallet};

pub use settings::{Algorithm, GrantKind, McpOauth};

/// The URL at which a browser reaches this server, as far as it is known.
pub type Base = Arc<RwLock<String>>;

/// Path of the redirect URI, below the server's URL.
const CALLBACK_PATH: &str = "/oauth/callback";

/// Path of Toolcrib's client metadata, below the server's URL.
const CLIENT_PATH: &str = "/oauth/client.json";

/// A link that a person must open to sign in.
#[derive(Clone, PartialEq, Eq)]
pub struct SignIn {
    pub url: String,
    pub expires_ms: u64,
}

/// The authorization status of an upstream, without any token.
pub struct PassShown {
    pub grant: GrantKind,
    pub signed_in: bool,
    pub issuer: Option<String>,
    pub scopes: Vec<String>,
    /// Link that a person must open, if one is needed.
    pub sign_in: Option<SignIn>,
}

/// The reason why there is no token.
enum Refusal {
    /// A person must sign in.
    Person,
    /// An error that may be temporary.
    Trouble(String),
}

/// A response with which an upstream refuses a request for lack of authorization.
pub(super) struct Challenge {
    /// `true` if the token is valid but does not permit the request.
    pub(super) forbidden: bool,
    pub(super) header: Option<String>,
}

#[derive(Default)]
struct Inner {
    grant: Grant,
    /// Knows the issuer and Toolcrib's registration there.
    manager: Option<AuthorizationManager>,
}

/// Obtains and renews the access tokens of one upstream.
pub struct Pass {
    of: McpSettings,
    oauth: McpOauth,
    ledger: Arc<dyn Ledger>,
    outbound: Arc<Outbound>,
    base: Base,
    wallet: Wallet,
    pending: Pending,
    loaded: AtomicBool,
    current: Mutex<Option<Token>>,
    wanted: Mutex<Option<SignIn>>,
    failed: Mutex<Option<String>>,
    inner: tokio::sync::Mutex<Inner>,
}

impl Pass {
    /// Creates an authorizer for an upstream over HTTP, unless the operator configured an
    /// `Authorization` header.
    pub(super) fn of(
        settings: &McpSettings,
        ledger: &Arc<dyn Ledger>,
        outbound: &Arc<Outbound>,
        base: &Base,
    ) -> Option<Arc<Self>> {
        let given = settings.headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
        if settings.url.is_none() || given {
            return None;
        }
        Some(Arc::new(Self {
            of: settings.clone(),
            oauth: settings.oauth.clone().unwrap_or_default(),
            ledger: ledger.clone(),
            outbound: outbound.clone(),
            base: base.clone(),
            wallet: Wallet::default(),
            pending: Pending::default(),
            loaded: AtomicBool::new(false),
            current: Mutex::default(),
            wanted: Mutex::default(),
            failed: Mutex::default(),
            inner: tokio::sync::Mutex::default(),
        }))
    }

    /// Returns the token to send now, after renewing it if it is about to expire. Returns `None` if
    /// no token is known to be needed.
    pub(super) async fn token(&self) -> Option<Arc<str>> {
        let known = self.current.lock().clone();
        match known {
            Some(token) if token.is_fresh() => return Some(token.value),
            None if self.loaded.load(Ordering::Acquire) => return None,
            _ => {}
        }
        let mut inner = self.inner.lock().await;
        self.load(&mut inner).await;
        let known = self.current.lock().clone()?;
        if known.is_fresh() {
            return Some(known.value);
        }
        match self.renew(&mut inner).await {
            Ok(token) => Some(token.value),
            Err(Refusal::Person) => {
                *self.current.lock() = None;
                None
            }
            // The upstream may still accept an expired token.
            Err(Refusal::Trouble(why)) => {
                self.fails(&why);
                Some(known.value)
            }
        }
    }

    /// Records that the upstream accepted the token.
    pub(super) fn taken(&self, sent: Option<&str>) {
        let known = self.current.lock();
        if let Some(token) = known.as_ref().filter(|token| Some(&*token.value) == sent) {
            token.is_taken();
        }
    }

    /// Handles a refused token, and returns one to try instead. If it returns `None`,
    /// [`Authorizer::pending_sign_in`] or [`Authorizer::problem`] says what to do.
    pub(super) async fn refused(
        &self,
        sent: Option<&str>,
        challenge: Challenge,
    ) -> Option<Arc<str>> {
        let mut inner = self.inner.lock().await;
        self.load(&mut inner).await;
        let known = self.current.lock().clone();
        if let Some(token) = known.as_ref().filter(|token| Some(&*token.value) != sent) {
            // Another request has replaced the token in the meantime.
            return Some(token.value.clone());
        }
        let header = challenge.header.as_deref();
        let outcome = match challenge.forbidden {
            true => self.step_up(&mut inner, header).await,
            false => {
                // Renewal does not help a token that was never accepted.
                let useless = known.as_ref().is_some_and(|token| !token.was_taken());
                self.again(&mut inner, header, useless).await
            }
        };
        match outcome {
            Ok(token) => Some(token.value),
            Err(Refusal::Person) => None,
            Err(Refusal::Trouble(why)) => {
                self.fails(&why);
                None
            }
        }
    }

    /// Obtains a new token after the upstream refused the old one as unknown or expired.
    async fn again(
        &self,
        inner: &mut Inner,
        header: Option<&str>,
        useless: bool,
    ) -> Result<Token, Refusal> {
        let machine = self.oauth.grant == GrantKind::ClientCredentials;
        if machine && useless {
            let why = "it refuses the token that its own issuer gave us";
            return Err(Refusal::Trouble(why.to_owned()));
        }
        if machine {
            return self.exchange(inner, header, &[]).await;
        }
        if !useless {
            match self.renew(inner).await {
                Err(Refusal::Person) => {}
                other => return other,
            }
        }
        if self.is_shut() {
            // A sign-in is already pending.
            return Err(Refusal::Person);
        }
        self.wallet.set(None);
        *self.current.lock() = None;
        self.begin(inner, header, &[]).await?;
        Err(Refusal::Person)
    }

    /// Requests more scopes. Does not repeat scopes that were requested before, which would loop.
    async fn step_up(&self, inner: &mut Inner, header: Option<&str>) -> Result<Token, Refusal> {
        let trouble = |why: String| Err(Refusal::Trouble(why));
        let url = self.url()?;
        let said = reqwest::Url::parse(&url).ok().zip(header);
        let said = said.map(|(url, header)| WWWAuthenticateParams::parse(header, &url));
        let Some(said) = said.filter(WWWAuthenticateParams::is_insufficient_scope) else {
            return trouble("it does not let us do this (HTTP 403)".to_owned());
        };
        let needed = kept::split(said.scope.as_deref().unwrap_or_default());
        if needed.iter().all(|scope| inner.grant.asked.contains(scope)) {
            return trouble(format!(
                "it wants the scope \"{}\", which was asked for already",
                needed.join(" ")
            ));
        }
        match self.oauth.grant {
            GrantKind::ClientCredentials => self.exchange(inner, header, &needed).await,
            GrantKind::AuthorizationCode => {
                self.begin(inner, header, &needed).await?;
                Err(Refusal::Person)
            }
        }
    }

    /// Returns the link that a person must open, if one is needed.
    pub fn sign_in(&self) -> Option<SignIn> {
        self.wanted.lock().clone()
    }

    /// Returns `true` if nothing can be done before a person has signed in.
    pub(super) fn is_shut(&self) -> bool {
        self.wanted.lock().is_some() && self.current.lock().is_none()
    }

    /// Returns the error for which there is no token, unless only a sign-in is missing.
    pub(super) fn problem(&self) -> Option<String> {
        self.failed.lock().clone()
    }

    fn fails(&self, why: &str) {
        let why: String = self.clean(why).chars().take(500).collect();
        *self.failed.lock() = Some(why);
    }

    /// Clears the recorded failure.
    pub(super) fn forgive(&self) {
        *self.failed.lock() = None;
    }

    /// Returns the authorization status, for display.
    pub(super) fn shown(&self) -> PassShown {
        let known = self.wallet.get();
        PassShown {
            grant: self.oauth.grant,
            signed_in: self.current.lock().is_some(),
            issuer: known.as_ref().and_then(|known| known.issuer.clone()),
            scopes: known.map(|known| known.granted_scopes).unwrap_or_default(),
            sign_in: self.sign_in().filter(|wanted| now_ms() < wanted.expires_ms),
        }
    }

    /// Redacts tokens and the client secret from a text.
    pub(super) fn clean(&self, text: &str) -> String {
        let mut text = text.to_owned();
        let secrets = self.wallet.get().as_ref().map(kept::secrets).unwrap_or_default();
        for secret in secrets.iter().filter(|secret| secret.len() >= 6) {
            text = text.replace(secret.as_str(), "[token]");
        }
        match Filled::of(&self.of) {
            Ok(filled) => filled.clean(&text),
            Err(_) => text,
        }
    }

    /// Returns the upstream's URL with its variables expanded.
    fn url(&self) -> Result<String, Refusal> {
        Filled::of(&self.of).map(|filled| filled.url).map_err(Refusal::Trouble)
    }

    fn redirect(&self) -> String {
        format!("{}{CALLBACK_PATH}", self.base.read())
    }

    /// Returns the URL at which the issuer can read Toolcrib's client metadata, if there is one.
    fn client_metadata_url(&self) -> Option<String> {
        let ours = format!("{}{CLIENT_PATH}", self.base.read());
        let ours = Some(ours).filter(|url| url.starts_with("https://"));
        self.oauth.client_metadata_url.clone().or(ours)
    }
}
