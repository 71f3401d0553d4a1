//! Access tokens for one upstream: the token to send, the time to renew it, and the cases in which
//! a person must sign in.
//!
//! `rmcp` implements the protocol: discovery of the issuer, registration, the authorization code
//! and its exchange, and refresh. This module decides the rest: storage of tokens, timing of each
//! step, the link that a person sees. It ensures that a secret is sent only to the issuer it
//! belongs to.

mod authorization_flow;
mod guarded_http;
mod token_store;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use rmcp::transport::auth::{AuthorizationManager, WWWAuthenticateParams};
use toolcrib_protocol::outbound::OutboundPolicy;

use super::now_ms;
use super::registry::UpstreamRegistry;
use super::settings::McpServerSettings;
use super::settings::oauth::{GrantKind, McpOauthSettings};
use crate::mcp::oauth::token_store::{
    AccessToken, CachedCredentials, PendingSignIns, UpstreamCredential,
};
use crate::mcp::settings::resolved::ResolvedSettings;

/// The URL at which a browser reaches this server, as far as it is known.
pub type SharedPublicBaseUrl = Arc<RwLock<String>>;

/// Path of the redirect URI, below the server's URL.
const CALLBACK_PATH: &str = "/oauth/callback";

/// Path of Toolcrib's client metadata, below the server's URL.
const CLIENT_PATH: &str = "/oauth/client.json";

/// A link that a person must open to sign in.
#[derive(Clone, PartialEq, Eq)]
pub struct SignInLink {
    pub url: String,
    pub expires_ms: u64,
}

/// The authorization status of an upstream, without any token.
pub struct AuthorizationStatus {
    pub grant: GrantKind,
    pub signed_in: bool,
    pub issuer: Option<String>,
    pub scopes: Vec<String>,
    /// Link that a person must open, if one is needed.
    pub sign_in: Option<SignInLink>,
}

/// The reason why there is no token.
enum AuthorizationError {
    /// A person must sign in.
    SignInRequired,
    /// An error that may be temporary.
    Failed(String),
}

/// A response with which an upstream refuses a request for lack of authorization.
pub(super) struct AuthChallenge {
    /// `true` if the token is valid but does not permit the request.
    pub(super) forbidden: bool,
    pub(super) header: Option<String>,
}

#[derive(Default)]
struct AuthorizerState {
    credential: UpstreamCredential,
    /// Knows the issuer and Toolcrib's registration there.
    manager: Option<AuthorizationManager>,
}

/// Obtains and renews the access tokens of one upstream.
pub struct Authorizer {
    settings: McpServerSettings,
    oauth: McpOauthSettings,
    registry: Arc<dyn UpstreamRegistry>,
    outbound: Arc<OutboundPolicy>,
    public_base_url: SharedPublicBaseUrl,
    credentials: CachedCredentials,
    pending_sign_ins: PendingSignIns,
    loaded: AtomicBool,
    current_token: Mutex<Option<AccessToken>>,
    sign_in_link: Mutex<Option<SignInLink>>,
    last_failure: Mutex<Option<String>>,
    state: tokio::sync::Mutex<AuthorizerState>,
}

impl Authorizer {
    /// Creates an authorizer for an upstream over HTTP, unless the operator configured an
    /// `Authorization` header.
    pub(super) fn for_server(
        settings: &McpServerSettings,
        registry: &Arc<dyn UpstreamRegistry>,
        outbound: &Arc<OutboundPolicy>,
        base: &SharedPublicBaseUrl,
    ) -> Option<Arc<Self>> {
        let has_header =
            settings.headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
        if settings.url.is_none() || has_header {
            return None;
        }
        Some(Arc::new(Self {
            settings: settings.clone(),
            oauth: settings.oauth.clone().unwrap_or_default(),
            registry: registry.clone(),
            outbound: outbound.clone(),
            public_base_url: base.clone(),
            credentials: CachedCredentials::default(),
            pending_sign_ins: PendingSignIns::default(),
            loaded: AtomicBool::new(false),
            current_token: Mutex::default(),
            sign_in_link: Mutex::default(),
            last_failure: Mutex::default(),
            state: tokio::sync::Mutex::default(),
        }))
    }

    /// Returns the token to send now, after renewing it if it is about to expire. Returns `None` if
    /// no token is known to be needed, or if a person must sign in first.
    pub(super) async fn token(&self) -> Option<Arc<str>> {
        let current = self.current_token.lock().clone();
        match current {
            Some(token) if token.is_fresh() => return Some(token.value),
            None if self.loaded.load(Ordering::Acquire) => return None,
            _ => {}
        }
        let mut inner = self.state.lock().await;
        self.load_once(&mut inner).await;
        let current = self.current_token.lock().clone()?;
        if current.is_fresh() {
            return Some(current.value);
        }
        match self.renew_token(&mut inner).await {
            Ok(token) => Some(token.value),
            Err(AuthorizationError::SignInRequired) => {
                *self.current_token.lock() = None;
                None
            }
            // The upstream may still accept an expired token.
            Err(AuthorizationError::Failed(reason)) => {
                self.record_failure(&reason);
                Some(current.value)
            }
        }
    }

    /// Records that the upstream accepted the token.
    pub(super) fn record_accepted(&self, sent: Option<&str>) {
        let current = self.current_token.lock();
        if let Some(token) = current.as_ref().filter(|token| Some(&*token.value) == sent) {
            token.mark_accepted();
        }
    }

    /// Handles a refused token, and returns one to try instead. If it returns `None`,
    /// [`Authorizer::pending_sign_in`] or [`Authorizer::problem`] says what to do.
    pub(super) async fn replace_refused(
        &self,
        sent: Option<&str>,
        challenge: AuthChallenge,
    ) -> Option<Arc<str>> {
        let mut inner = self.state.lock().await;
        self.load_once(&mut inner).await;
        let current = self.current_token.lock().clone();
        if let Some(token) = current.as_ref().filter(|token| Some(&*token.value) != sent) {
            // Another request has replaced the token in the meantime.
            return Some(token.value.clone());
        }
        let header = challenge.header.as_deref();
        let outcome = match challenge.forbidden {
            true => self.step_up(&mut inner, header).await,
            false => {
                // Renewal does not help a token that was never accepted.
                let useless = current.as_ref().is_some_and(|token| !token.was_accepted());
                self.reauthorize(&mut inner, header, useless).await
            }
        };
        match outcome {
            Ok(token) => Some(token.value),
            Err(AuthorizationError::SignInRequired) => None,
            Err(AuthorizationError::Failed(reason)) => {
                self.record_failure(&reason);
                None
            }
        }
    }

    /// Obtains a new token after the upstream refused the old one as unknown or expired.
    async fn reauthorize(
        &self,
        inner: &mut AuthorizerState,
        header: Option<&str>,
        useless: bool,
    ) -> Result<AccessToken, AuthorizationError> {
        let machine = self.oauth.grant == GrantKind::ClientCredentials;
        if machine && useless {
            let reason = "it refused the token that its own issuer issued";
            return Err(AuthorizationError::Failed(reason.to_owned()));
        }
        if machine {
            return self.exchange_client_credentials(inner, header, &[]).await;
        }
        if !useless {
            match self.renew_token(inner).await {
                Err(AuthorizationError::SignInRequired) => {}
                other => return other,
            }
        }
        if self.needs_sign_in() {
            // A sign-in is already pending.
            return Err(AuthorizationError::SignInRequired);
        }
        self.credentials.set(None);
        *self.current_token.lock() = None;
        self.begin_sign_in(inner, header, &[]).await?;
        Err(AuthorizationError::SignInRequired)
    }

    /// Requests more scopes. Fails if all required scopes were requested before, because another
    /// request for them would loop.
    async fn step_up(
        &self,
        inner: &mut AuthorizerState,
        header: Option<&str>,
    ) -> Result<AccessToken, AuthorizationError> {
        let failed = |reason: String| Err(AuthorizationError::Failed(reason));
        let url = self.url()?;
        let challenge = reqwest::Url::parse(&url).ok().zip(header);
        let challenge = challenge.map(|(url, header)| WWWAuthenticateParams::parse(header, &url));
        let Some(challenge) = challenge.filter(WWWAuthenticateParams::is_insufficient_scope) else {
            return failed("it refused this operation (HTTP 403)".to_owned());
        };
        let needed = crate::mcp::oauth::token_store::split_scopes(
            challenge.scope.as_deref().unwrap_or_default(),
        );
        if needed.iter().all(|scope| inner.credential.requested_scopes.contains(scope)) {
            return failed(format!(
                "it requires the scope \"{}\", which was already requested",
                needed.join(" ")
            ));
        }
        match self.oauth.grant {
            GrantKind::ClientCredentials => {
                self.exchange_client_credentials(inner, header, &needed).await
            }
            GrantKind::AuthorizationCode => {
                self.begin_sign_in(inner, header, &needed).await?;
                Err(AuthorizationError::SignInRequired)
            }
        }
    }

    /// Returns the link that a person must open, if one is needed.
    pub fn pending_sign_in(&self) -> Option<SignInLink> {
        self.sign_in_link.lock().clone()
    }

    /// Returns `true` if nothing can be done before a person has signed in.
    pub(super) fn needs_sign_in(&self) -> bool {
        self.sign_in_link.lock().is_some() && self.current_token.lock().is_none()
    }

    /// Returns the error that explains why there is no token, unless only a sign-in is missing.
    pub(super) fn problem(&self) -> Option<String> {
        self.last_failure.lock().clone()
    }

    fn record_failure(&self, reason: &str) {
        let reason: String = self.redact(reason).chars().take(500).collect();
        *self.last_failure.lock() = Some(reason);
    }

    /// Clears the recorded failure.
    pub(super) fn clear_failure(&self) {
        *self.last_failure.lock() = None;
    }

    /// Returns the authorization status, for display.
    pub(super) fn status(&self) -> AuthorizationStatus {
        let credentials = self.credentials.get();
        AuthorizationStatus {
            grant: self.oauth.grant,
            signed_in: self.current_token.lock().is_some(),
            issuer: credentials.as_ref().and_then(|credentials| credentials.issuer.clone()),
            scopes: credentials.map(|credentials| credentials.granted_scopes).unwrap_or_default(),
            sign_in: self.pending_sign_in().filter(|link| now_ms() < link.expires_ms),
        }
    }

    /// Returns the tokens and client secrets of the current credentials.
    pub(super) fn tokens(&self) -> Vec<String> {
        let credentials = self.credentials.get();
        credentials.as_ref().map(crate::mcp::oauth::token_store::secrets).unwrap_or_default()
    }

    /// Redacts tokens and the client secret from a text.
    pub(super) fn redact(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in self.tokens().iter().filter(|secret| secret.len() >= 6) {
            text = text.replace(secret.as_str(), "[token]");
        }
        match ResolvedSettings::resolve(&self.settings) {
            Ok(resolved) => resolved.redact(&text),
            Err(_) => text,
        }
    }

    /// Returns the upstream's URL with its variables expanded.
    fn url(&self) -> Result<String, AuthorizationError> {
        ResolvedSettings::resolve(&self.settings)
            .map(|resolved| resolved.url)
            .map_err(AuthorizationError::Failed)
    }

    fn redirect_uri(&self) -> String {
        format!("{}{CALLBACK_PATH}", self.public_base_url.read())
    }

    /// Returns the URL at which the issuer can read Toolcrib's client metadata, if there is one.
    fn client_metadata_url(&self) -> Option<String> {
        let own_url = format!("{}{CLIENT_PATH}", self.public_base_url.read());
        let own_url = Some(own_url).filter(|url| url.starts_with("https://"));
        self.oauth.client_metadata_url.clone().or(own_url)
    }
}
