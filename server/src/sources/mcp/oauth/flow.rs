//! The steps of OAuth in the order in which an upstream needs them: discover the issuer, register,
//! authorize, exchange, refresh. `rmcp` performs each step; this module chooses the issuer and the
//! client identity.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rmcp::transport::JwtSigningAlgorithm;
use rmcp::transport::auth::{
    AuthError, AuthorizationManager, AuthorizationRequest, AuthorizationSession,
    ClientCredentialsConfig, OAuthClientConfig,
};

use super::super::environment::Filled;
use super::super::now_ms;
use super::kept::{self, Grant, Registered, SIGN_IN_MS, Token};
use super::web::Watched;
use super::{Algorithm, GrantKind, Inner, Pass, Refusal, SignIn};

/// Client name that the issuer shows to the person who signs in.
const CLIENT_NAME: &str = "Toolcrib";

/// A discovered issuer.
struct Found {
    manager: AuthorizationManager,
    issuer: String,
    /// `true` if it reads client metadata from a URL of Toolcrib.
    reads_clients: bool,
}

fn trouble(error: AuthError) -> Refusal {
    Refusal::Trouble(error.to_string())
}

impl Pass {
    /// Loads the stored credential, once.
    pub(super) async fn load(&self, inner: &mut Inner) {
        if self.loaded.load(Ordering::Acquire) {
            return;
        }
        let (project, name) = (&self.of.project, &self.of.name);
        match self.ledger.grant(project, name).await {
            Ok(text) => {
                let grant = text.and_then(|text| serde_json::from_str::<Grant>(&text).ok());
                // Ignores a credential for another URL or another client.
                let ours = grant.filter(|grant| self.is_ours(grant)).unwrap_or_default();
                self.wallet.set(ours.credentials.clone());
                let token = ours.credentials.as_ref().and_then(Token::of);
                // It was stored because it was valid once.
                token.iter().for_each(Token::is_taken);
                *self.current.lock() = token;
                inner.grant = ours;
                self.loaded.store(true, Ordering::Release);
            }
            Err(why) => self.fails(&why),
        }
    }

    fn is_ours(&self, grant: &Grant) -> bool {
        let Ok(filled) = Filled::of(&self.of) else { return false };
        let client = grant.client.as_ref().map(|client| &client.client_id);
        let same = filled.client_id.is_none() || filled.client_id.as_ref() == client;
        grant.url == filled.url && same
    }

    /// Stores the token that was just issued.
    async fn keep(&self, inner: &mut Inner) -> Result<Token, Refusal> {
        let credentials = self.wallet.get();
        let token = credentials.as_ref().and_then(Token::of);
        inner.grant.credentials = credentials;
        inner.grant.url = self.url()?;
        self.write(inner).await;
        let lost = || Refusal::Trouble("its issuer gave no token".to_owned());
        let token = token.ok_or_else(lost)?;
        *self.current.lock() = Some(token.clone());
        *self.wanted.lock() = None;
        self.forgive();
        Ok(token)
    }

    async fn write(&self, inner: &Inner) {
        let machine = self.oauth.grant == GrantKind::ClientCredentials;
        // With client credentials a new token can be obtained at any time. Only the issuer must be
        // stored, because it has received the secret.
        let credentials = inner.grant.credentials.clone().filter(|_| !machine);
        let Grant { url, client, asked, .. } = &inner.grant;
        let (url, client, asked) = (url.clone(), client.clone(), asked.clone());
        let kept = Grant { url, client, credentials, asked };
        let text = serde_json::to_string(&kept).ok();
        if let Err(why) = self.ledger.keep_grant(&self.of.project, &self.of.name, text).await {
            tracing::warn!(upstream = self.of.name, why, "cannot store its credential");
        }
    }

    /// Discovers the issuer of tokens for this upstream.
    async fn discover(&self, inner: &Inner, header: Option<&str>) -> Result<Found, Refusal> {
        let url = self.url()?;
        let made = match self.of.guarded {
            true => {
                let web = Watched::new(self.outbound.clone()).map_err(Refusal::Trouble)?;
                AuthorizationManager::new_with_oauth_http_client(url, Arc::new(web)).await
            }
            false => AuthorizationManager::new_allowing_private_addresses(url).await,
        };
        let mut manager = made.map_err(trouble)?;
        manager.set_credential_store(self.wallet.clone());
        manager.set_state_store(self.pending.clone());
        let found = manager.resolve_metadata_from_challenge(header).await.map_err(trouble)?;
        if !found.source.is_discovered() {
            let why = "it does not let us in (HTTP 401), and names nobody who gives tokens; if it \
                       takes a key, give it as a header";
            return Err(Refusal::Trouble(why.to_owned()));
        }
        let ends = [&found.metadata.authorization_endpoint, &found.metadata.token_endpoint];
        let ends = ends.into_iter().chain(&found.metadata.registration_endpoint);
        if let Some(bad) = ends.into_iter().find(|end| !kept::is_sound(end, &self.of)) {
            let shown: String = bad.chars().take(200).collect();
            let why = format!("its issuer names an address that is not used: {shown}");
            return Err(Refusal::Trouble(why));
        }
        let issuer = found.metadata.issuer.clone().unwrap_or_default();
        self.check_issuer(&issuer, inner)?;
        let extra = &found.metadata.additional_fields;
        let reads_clients = kept::flag(extra, "client_id_metadata_document_supported");
        manager.set_metadata(found.metadata);
        Ok(Found { manager, issuer, reads_clients })
    }

    /// Checks that a client secret is sent to one issuer only, whichever the upstream names later.
    fn check_issuer(&self, issuer: &str, inner: &Inner) -> Result<(), Refusal> {
        let same = |a: &str, b: &str| a.trim_end_matches('/') == b.trim_end_matches('/');
        if let Some(only) = self.oauth.issuer.as_deref().filter(|only| !same(only, issuer)) {
            let why = format!("it names the issuer {issuer}, and only {only} is believed");
            return Err(Refusal::Trouble(why));
        }
        let secret = self.oauth.client_secret.is_some() || self.oauth.private_key.is_some();
        let before = inner.grant.client.as_ref().map(|client| client.issuer.as_str());
        let other = before.filter(|before| secret && !same(before, issuer));
        if let Some(before) = other.filter(|_| self.oauth.issuer.is_none()) {
            let name = &self.of.name;
            return Err(Refusal::Trouble(format!(
                "it names the issuer {issuer} in place of {before}, which is not shown our secret; \
                 if that is right, set oauth.issuer, or forget the old one (toolcrib mcp sign-out \
                 {name})"
            )));
        }
        Ok(())
    }

    /// Returns the client to authorize as: the configured one, the one registered before, or a new
    /// registration.
    async fn client(
        &self,
        inner: &Inner,
        found: &mut Found,
        scopes: &[String],
    ) -> Result<Registered, Refusal> {
        let (issuer, redirect_uri) = (found.issuer.clone(), self.redirect());
        let filled = Filled::of(&self.of).map_err(Refusal::Trouble)?;
        if let Some(client_id) = filled.client_id {
            let client_secret = filled.client_secret;
            return Ok(Registered { issuer, client_id, client_secret, redirect_uri });
        }
        let before = inner.grant.client.clone();
        let known = |it: &Registered| it.issuer == issuer && it.redirect_uri == redirect_uri;
        if let Some(before) = before.filter(known) {
            return Ok(before);
        }
        if let Some(client_id) = self.client_metadata_url().filter(|_| found.reads_clients) {
            return Ok(Registered { issuer, client_id, client_secret: None, redirect_uri });
        }
        let local = ["http://127.0.0.1", "http://localhost", "http://[::1]"];
        if !local.iter().any(|place| redirect_uri.starts_with(place)) {
            // A registration defaults to a native application on a person's machine.
            let mut kind = OAuthClientConfig::new("", &redirect_uri);
            kind.application_type = Some("web".to_owned());
            found.manager.configure_client(kind).map_err(trouble)?;
        }
        let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
        let made = found.manager.register_client(CLIENT_NAME, &redirect_uri, &scopes).await;
        let OAuthClientConfig { client_id, client_secret, .. } = made.map_err(trouble)?;
        Ok(Registered { issuer, client_id, client_secret, redirect_uri })
    }

    /// Returns the scopes to request: the configured ones or those the upstream requires, plus
    /// those granted and requested before.
    async fn scopes(&self, inner: &Inner, found: &Found, more: &[String]) -> Vec<String> {
        let mut scopes = self.oauth.scopes.clone();
        if scopes.is_empty() && more.is_empty() {
            scopes = found.manager.select_initial_scopes(&[]).await;
        }
        let granted = inner.grant.credentials.as_ref().map(|known| known.granted_scopes.clone());
        if !more.is_empty() {
            scopes.extend(granted.unwrap_or_default());
            scopes.extend(inner.grant.asked.iter().cloned());
            scopes.extend(more.iter().cloned());
        }
        let mut seen = std::collections::HashSet::new();
        scopes.retain(|scope| seen.insert(scope.clone()));
        scopes
    }

    /// Creates the sign-in link that a person must open.
    pub(super) async fn begin(
        &self,
        inner: &mut Inner,
        header: Option<&str>,
        more: &[String],
    ) -> Result<(), Refusal> {
        let mut found = self.discover(inner, header).await?;
        let scopes = self.scopes(inner, &found, more).await;
        let client = self.client(inner, &mut found, &scopes).await?;
        if inner.grant.client.as_ref().is_some_and(|before| before.issuer != client.issuer) {
            // A sign-in that was started with another issuer cannot be completed here.
            self.pending.clear();
            inner.grant.asked.clear();
        }
        let mut asking = AuthorizationRequest::new(&client.redirect_uri)
            .with_preregistered_client(&client.client_id)
            .with_scopes(scopes)
            .with_initial_scope_selection();
        asking.client_secret.clone_from(&client.client_secret);
        let session = AuthorizationSession::new(found.manager, asking).await;
        let session = session.map_err(|(_, error)| trouble(error))?;
        let asked = kept::query(&session.auth_url, "scope").unwrap_or_default();
        for scope in kept::split(&asked) {
            if !inner.grant.asked.contains(&scope) {
                inner.grant.asked.push(scope);
            }
        }
        self.want(session.auth_url);
        inner.manager = Some(session.auth_manager);
        inner.grant.client = Some(client);
        inner.grant.credentials = self.wallet.get();
        inner.grant.url = self.url()?;
        self.write(inner).await;
        Ok(())
    }

    fn want(&self, url: String) {
        *self.wanted.lock() = Some(SignIn { url, expires_ms: now_ms() + SIGN_IN_MS });
    }

    /// Replaces a sign-in link that was used or has expired.
    pub(in super::super) async fn readdress(&self) {
        let inner = self.inner.lock().await;
        self.readdressed(&inner).await;
    }

    async fn readdressed(&self, inner: &Inner) {
        let Some(manager) = inner.manager.as_ref().filter(|_| self.wanted.lock().is_some()) else {
            return;
        };
        let scopes: Vec<&str> = inner.grant.asked.iter().map(String::as_str).collect();
        match manager.get_authorization_url(&scopes).await {
            Ok(url) => self.want(url),
            Err(error) => self.fails(&error.to_string()),
        }
    }

    /// Starts a new sign-in, even if there was one before.
    pub(in super::super) async fn sign_in_anew(&self) -> Result<(), String> {
        if self.oauth.grant == GrantKind::ClientCredentials {
            return Err("it needs no sign-in: oauth.grant is client_credentials".to_owned());
        }
        let mut inner = self.inner.lock().await;
        self.load(&mut inner).await;
        match self.begin(&mut inner, None, &[]).await {
            Ok(()) | Err(Refusal::Person) => Ok(()),
            Err(Refusal::Trouble(why)) => Err(self.clean(&why)),
        }
    }

    /// Returns `true` if this upstream waits for a redirect with this state parameter.
    pub(in super::super) fn expects(&self, state: &str) -> bool {
        self.pending.has(state)
    }

    /// Completes a sign-in with the code from the browser's redirect.
    pub(in super::super) async fn finish(
        &self,
        state: &str,
        code: &str,
        issuer: Option<&str>,
    ) -> Result<(), String> {
        let mut inner = self.inner.lock().await;
        let Some(manager) = inner.manager.as_ref().filter(|_| self.pending.has(state)) else {
            return Err("this sign-in is over; begin another".to_owned());
        };
        let exchanged = manager.exchange_code_for_token_with_issuer(code, state, issuer).await;
        let kept = match exchanged {
            Ok(_) => self.keep(&mut inner).await,
            Err(error) => Err(trouble(error)),
        };
        match kept {
            Ok(_) | Err(Refusal::Person) => Ok(()),
            Err(Refusal::Trouble(why)) => {
                let why = self.clean(&why).replace(code, "[code]");
                self.fails(&format!("the sign-in failed: {why}"));
                if !self.pending.has(state) {
                    self.readdressed(&inner).await;
                }
                Err(why)
            }
        }
    }

    /// Handles a redirect without a code: the sign-in was declined.
    pub(in super::super) async fn declined(&self, state: &str, why: &str) {
        self.pending.forget(state);
        self.fails(&format!("the sign-in was refused: {why}"));
        self.readdress().await;
    }

    /// Deletes every token, and the registration with the issuer.
    pub(in super::super) async fn sign_out(&self) -> Result<(), String> {
        let mut inner = self.inner.lock().await;
        self.ledger.keep_grant(&self.of.project, &self.of.name, None).await?;
        self.wallet.set(None);
        self.pending.clear();
        self.forgive();
        *self.current.lock() = None;
        *self.wanted.lock() = None;
        *inner = Inner::default();
        self.loaded.store(true, Ordering::Release);
        Ok(())
    }

    /// Obtains a new token without a person.
    pub(super) async fn renew(&self, inner: &mut Inner) -> Result<Token, Refusal> {
        if self.oauth.grant == GrantKind::ClientCredentials {
            return self.exchange(inner, None, &[]).await;
        }
        if !self.wallet.get().as_ref().is_some_and(kept::can_refresh) {
            return Err(Refusal::Person);
        }
        self.known_again(inner).await?;
        let Some(manager) = &inner.manager else { return Err(Refusal::Person) };
        match manager.refresh_token().await {
            Ok(_) => self.keep(inner).await,
            Err(AuthError::AuthorizationRequired | AuthError::TokenRefreshRejected(_)) => {
                Err(Refusal::Person)
            }
            Err(error) => Err(trouble(error)),
        }
    }

    /// Restores the issuer and the client registration after a restart.
    async fn known_again(&self, inner: &mut Inner) -> Result<(), Refusal> {
        if inner.manager.is_some() {
            return Ok(());
        }
        let Some(client) = inner.grant.client.clone() else { return Err(Refusal::Person) };
        let mut found = self.discover(inner, None).await?;
        if found.issuer != client.issuer {
            return Err(Refusal::Person);
        }
        let filled = Filled::of(&self.of).map_err(Refusal::Trouble)?;
        let mut config = OAuthClientConfig::new(&client.client_id, &client.redirect_uri);
        config.client_secret = filled.client_secret.or(client.client_secret);
        found.manager.configure_client(config).map_err(trouble)?;
        inner.manager = Some(found.manager);
        Ok(())
    }

    /// Obtains a token with client credentials.
    pub(super) async fn exchange(
        &self,
        inner: &mut Inner,
        header: Option<&str>,
        more: &[String],
    ) -> Result<Token, Refusal> {
        let found = self.discover(inner, header).await?;
        let mut scopes = match (header, inner.grant.asked.is_empty()) {
            // The same scopes as last time, unless the upstream sent a challenge.
            (None, false) => inner.grant.asked.clone(),
            _ => self.scopes(inner, &found, more).await,
        };
        // `offline_access` requests a refresh token, which a client with credentials does not need.
        scopes.retain(|scope| scope != "offline_access");
        let (config, client_id) = self.credentials(&scopes)?;
        let mut manager = found.manager;
        manager.validate_client_credentials_metadata(&config).map_err(trouble)?;
        manager.configure_client_credentials(&config).map_err(trouble)?;
        // The future that `rmcp` returns here is not `Send`.
        let runtime = tokio::runtime::Handle::current();
        let exchanged = tokio::task::spawn_blocking(move || {
            runtime.block_on(manager.exchange_client_credentials(&config))
        });
        let exchanged = exchanged.await.map_err(|error| Refusal::Trouble(error.to_string()))?;
        exchanged.map_err(trouble)?;
        let (issuer, redirect_uri) = (found.issuer, String::new());
        inner.grant.client =
            Some(Registered { issuer, client_id, client_secret: None, redirect_uri });
        inner.grant.asked = scopes;
        self.keep(inner).await
    }

    /// Returns the client credentials to send.
    fn credentials(&self, scopes: &[String]) -> Result<(ClientCredentialsConfig, String), Refusal> {
        let filled = Filled::of(&self.of).map_err(Refusal::Trouble)?;
        let missing = || Refusal::Trouble("oauth has nothing to show for us".to_owned());
        let client_id = filled.client_id.ok_or_else(missing)?;
        let (scopes, resource) = (scopes.to_vec(), Some(filled.url));
        let shown = client_id.clone();
        let config = match (filled.client_secret, filled.private_key) {
            (Some(client_secret), _) => {
                ClientCredentialsConfig::ClientSecret { client_id, client_secret, scopes, resource }
            }
            (None, Some(key)) => ClientCredentialsConfig::PrivateKeyJwt {
                client_id,
                // A key in an environment variable often has its line breaks escaped.
                signing_key: key.replace("\\n", "\n").into_bytes(),
                signing_algorithm: match self.oauth.algorithm.unwrap_or(Algorithm::ES256) {
                    Algorithm::ES256 => JwtSigningAlgorithm::ES256,
                    Algorithm::ES384 => JwtSigningAlgorithm::ES384,
                    Algorithm::RS256 => JwtSigningAlgorithm::RS256,
                    Algorithm::RS384 => JwtSigningAlgorithm::RS384,
                    Algorithm::RS512 => JwtSigningAlgorithm::RS512,
                },
                token_endpoint_audience: None,
                scopes,
                resource,
            },
            (None, None) => return Err(missing()),
        };
        Ok((config, shown))
    }
}
