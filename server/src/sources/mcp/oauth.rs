//! Tokens for one upstream: which to send, when to get another, and when only a person can help.
//!
//! The protocol is `rmcp`'s: finding the issuer, registering, the code and its exchange, the
//! refresh. Here is what it leaves to us: where tokens are kept, when each step is taken, what the
//! person is shown, and that a secret goes to nobody but the issuer it is for.

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

/// Where a browser reaches this server, as far as that is known.
pub type Base = Arc<RwLock<String>>;

/// Where issuers send a person's browser back to, below the server's address.
const CALLBACK_PATH: &str = "/oauth/callback";

/// Where our client's own metadata is, below the server's address.
const CLIENT_PATH: &str = "/oauth/client.json";

/// An address that a person must open.
#[derive(Clone, PartialEq, Eq)]
pub struct SignIn {
    pub url: String,
    pub expires_ms: u64,
}

/// How it stands with an upstream's tokens; without any of them.
pub struct PassShown {
    pub grant: GrantKind,
    pub signed_in: bool,
    pub issuer: Option<String>,
    pub scopes: Vec<String>,
    /// What a person must open, where one is needed.
    pub sign_in: Option<SignIn>,
}

/// Why there is no token.
enum Refusal {
    /// Only a person can go on.
    Person,
    /// It may be well another time.
    Trouble(String),
}

/// An answer with which an upstream does not let us in.
pub(super) struct Challenge {
    /// Whether we are known, and may not do this.
    pub(super) forbidden: bool,
    pub(super) header: Option<String>,
}

#[derive(Default)]
struct Inner {
    grant: Grant,
    /// Knows the issuer and our client there.
    manager: Option<AuthorizationManager>,
}

/// What lets us in at one upstream.
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
    /// For an upstream over HTTP that is not given its token by the operator.
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

    /// The token to send now; another when its time is nearly over. None where none is known to be
    /// needed.
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
            // The upstream may be more generous than the clock.
            Err(Refusal::Trouble(why)) => {
                self.fails(&why);
                Some(known.value)
            }
        }
    }

    /// The upstream has taken what was sent.
    pub(super) fn taken(&self, sent: Option<&str>) {
        let known = self.current.lock();
        if let Some(token) = known.as_ref().filter(|token| Some(&*token.value) == sent) {
            token.is_taken();
        }
    }

    /// The upstream does not take what was sent. Gives what may be tried in its place; where that
    /// is nothing, [`Pass::sign_in`] or [`Pass::problem`] say what is to be done.
    pub(super) async fn refused(
        &self,
        sent: Option<&str>,
        challenge: Challenge,
    ) -> Option<Arc<str>> {
        let mut inner = self.inner.lock().await;
        self.load(&mut inner).await;
        let known = self.current.lock().clone();
        if let Some(token) = known.as_ref().filter(|token| Some(&*token.value) != sent) {
            // Another request has been through this meanwhile.
            return Some(token.value.clone());
        }
        let header = challenge.header.as_deref();
        let outcome = match challenge.forbidden {
            true => self.step_up(&mut inner, header).await,
            false => {
                // One that was never taken will not be better when it is renewed.
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

    /// What was sent is not known there, or not any more.
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
            // Somebody is asked already.
            return Err(Refusal::Person);
        }
        self.wallet.set(None);
        *self.current.lock() = None;
        self.begin(inner, header, &[]).await?;
        Err(Refusal::Person)
    }

    /// More rights are needed. What was asked for before is not asked for again: it would end where
    /// it began.
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

    /// What a person must open, where one is needed.
    pub fn sign_in(&self) -> Option<SignIn> {
        self.wanted.lock().clone()
    }

    /// Whether nothing can be done before a person has signed in.
    pub(super) fn is_shut(&self) -> bool {
        self.wanted.lock().is_some() && self.current.lock().is_none()
    }

    /// Why there is no token, where that is not for want of a person.
    pub(super) fn problem(&self) -> Option<String> {
        self.failed.lock().clone()
    }

    fn fails(&self, why: &str) {
        let why: String = self.clean(why).chars().take(500).collect();
        *self.failed.lock() = Some(why);
    }

    /// What went wrong before does not count any more.
    pub(super) fn forgive(&self) {
        *self.failed.lock() = None;
    }

    /// How it stands, for who may know.
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

    /// A text without tokens and without our client's secret.
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

    /// The address, with what it takes from the environment.
    fn url(&self) -> Result<String, Refusal> {
        Filled::of(&self.of).map(|filled| filled.url).map_err(Refusal::Trouble)
    }

    fn redirect(&self) -> String {
        format!("{}{CALLBACK_PATH}", self.base.read())
    }

    /// Where the issuer can read who we are, if it can.
    fn client_metadata_url(&self) -> Option<String> {
        let ours = format!("{}{CLIENT_PATH}", self.base.read());
        let ours = Some(ours).filter(|url| url.starts_with("https://"));
        self.oauth.client_metadata_url.clone().or(ours)
    }
}
