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

use super::super::now_ms;
use super::{AuthorizationError, Authorizer, AuthorizerState, SignInLink};
use crate::mcp::oauth::guarded_http::GuardedOauthClient;
use crate::mcp::oauth::token_store::{
    self, AccessToken, ClientRegistration, SIGN_IN_MS, UpstreamCredential,
};
use crate::mcp::settings::oauth::{GrantKind, SigningAlgorithm};
use crate::mcp::settings::resolved::ResolvedSettings;

/// Client name that the issuer shows to the person who signs in.
const CLIENT_NAME: &str = "Toolcrib";

/// A discovered issuer.
struct DiscoveredIssuer {
    manager: AuthorizationManager,
    issuer: String,
    /// `true` if it reads client metadata from a URL of Toolcrib.
    reads_client_metadata: bool,
}

fn auth_failure(error: AuthError) -> AuthorizationError {
    AuthorizationError::Failed(error.to_string())
}

impl Authorizer {
    /// Loads the stored credential, once.
    pub(super) async fn load_once(&self, inner: &mut AuthorizerState) {
        if self.loaded.load(Ordering::Acquire) {
            return;
        }
        let (project, name) = (&self.settings.project, &self.settings.name);
        match self.registry.credential(project, name).await {
            Ok(text) => {
                let grant =
                    text.and_then(|text| serde_json::from_str::<UpstreamCredential>(&text).ok());
                // Ignores a credential for another URL or another client.
                let credential =
                    grant.filter(|grant| self.matches_settings(grant)).unwrap_or_default();
                self.credentials.set(credential.credentials.clone());
                let token = credential.credentials.as_ref().and_then(AccessToken::from_credentials);
                // A stored token counts as accepted, because it was valid once.
                token.iter().for_each(AccessToken::mark_accepted);
                *self.current_token.lock() = token;
                inner.credential = credential;
                self.loaded.store(true, Ordering::Release);
            }
            Err(reason) => self.record_failure(&reason),
        }
    }

    fn matches_settings(&self, grant: &UpstreamCredential) -> bool {
        let Ok(resolved) = ResolvedSettings::resolve(&self.settings) else { return false };
        let client = grant.client.as_ref().map(|client| &client.client_id);
        let is_same = resolved.client_id.is_none() || resolved.client_id.as_ref() == client;
        grant.url == resolved.url && is_same
    }

    /// Stores the token that was just issued.
    async fn store_token(
        &self,
        inner: &mut AuthorizerState,
    ) -> Result<AccessToken, AuthorizationError> {
        let credentials = self.credentials.get();
        let token = credentials.as_ref().and_then(AccessToken::from_credentials);
        inner.credential.credentials = credentials;
        inner.credential.url = self.url()?;
        self.persist_credential(inner).await;
        let lost = || AuthorizationError::Failed("its issuer gave no token".to_owned());
        let token = token.ok_or_else(lost)?;
        *self.current_token.lock() = Some(token.clone());
        *self.sign_in_link.lock() = None;
        self.clear_failure();
        Ok(token)
    }

    async fn persist_credential(&self, inner: &AuthorizerState) {
        let machine = self.oauth.grant == GrantKind::ClientCredentials;
        // With client credentials a new token can be obtained at any time. Only the issuer must be
        // stored, because it has received the secret.
        let credentials = inner.credential.credentials.clone().filter(|_| !machine);
        let UpstreamCredential { url, client, requested_scopes, .. } = &inner.credential;
        let (url, client, requested_scopes) =
            (url.clone(), client.clone(), requested_scopes.clone());
        let stored = UpstreamCredential { url, client, credentials, requested_scopes };
        let text = serde_json::to_string(&stored).ok();
        if let Err(reason) =
            self.registry.set_credential(&self.settings.project, &self.settings.name, text).await
        {
            tracing::warn!(
                upstream = self.settings.name,
                why = reason,
                "cannot store its credential"
            );
        }
    }

    /// Discovers the issuer of tokens for this upstream.
    async fn discover_issuer(
        &self,
        inner: &AuthorizerState,
        header: Option<&str>,
    ) -> Result<DiscoveredIssuer, AuthorizationError> {
        let url = self.url()?;
        let created = match self.settings.guarded {
            true => {
                let web = GuardedOauthClient::new(self.outbound.clone())
                    .map_err(AuthorizationError::Failed)?;
                AuthorizationManager::new_with_oauth_http_client(url, Arc::new(web)).await
            }
            false => AuthorizationManager::new_allowing_private_addresses(url).await,
        };
        let mut manager = created.map_err(auth_failure)?;
        manager.set_credential_store(self.credentials.clone());
        manager.set_state_store(self.pending_sign_ins.clone());
        let found = manager.resolve_metadata_from_challenge(header).await.map_err(auth_failure)?;
        if !found.source.is_discovered() {
            let reason = "it refused the request (HTTP 401) and names no authorization server; if \
                          it accepts a key, give it as a header";
            return Err(AuthorizationError::Failed(reason.to_owned()));
        }
        let ends = [&found.metadata.authorization_endpoint, &found.metadata.token_endpoint];
        let ends = ends.into_iter().chain(&found.metadata.registration_endpoint);
        if let Some(bad) =
            ends.into_iter().find(|end| !token_store::is_safe_endpoint(end, &self.settings))
        {
            let excerpt: String = bad.chars().take(200).collect();
            let reason = format!("its issuer names an address that is not allowed: {excerpt}");
            return Err(AuthorizationError::Failed(reason));
        }
        let issuer = found.metadata.issuer.clone().unwrap_or_default();
        self.check_issuer(&issuer, inner)?;
        let extra = &found.metadata.additional_fields;
        let reads_clients =
            token_store::metadata_flag(extra, "client_id_metadata_document_supported");
        manager.set_metadata(found.metadata);
        Ok(DiscoveredIssuer { manager, issuer, reads_client_metadata: reads_clients })
    }

    /// Checks that a client secret is sent to one issuer only, whichever the upstream names later.
    fn check_issuer(
        &self,
        issuer: &str,
        inner: &AuthorizerState,
    ) -> Result<(), AuthorizationError> {
        let is_same = |a: &str, b: &str| a.trim_end_matches('/') == b.trim_end_matches('/');
        if let Some(only) = self.oauth.issuer.as_deref().filter(|only| !is_same(only, issuer)) {
            let reason = format!("it names the issuer {issuer}, but only {only} is trusted");
            return Err(AuthorizationError::Failed(reason));
        }
        let secret = self.oauth.client_secret.is_some() || self.oauth.private_key.is_some();
        let before = inner.credential.client.as_ref().map(|client| client.issuer.as_str());
        let other = before.filter(|before| secret && !is_same(before, issuer));
        if let Some(before) = other.filter(|_| self.oauth.issuer.is_none()) {
            let name = &self.settings.name;
            return Err(AuthorizationError::Failed(format!(
                "it names the issuer {issuer} in place of {before}, so the client secret is not \
                 sent; if that is right, set oauth.issuer, or delete the old credential (toolcrib \
                 mcp sign-out {name})"
            )));
        }
        Ok(())
    }

    /// Returns the client to authorize as: the configured one, the one registered before, or a new
    /// registration.
    async fn resolve_client(
        &self,
        inner: &AuthorizerState,
        found: &mut DiscoveredIssuer,
        scopes: &[String],
    ) -> Result<ClientRegistration, AuthorizationError> {
        let (issuer, redirect_uri) = (found.issuer.clone(), self.redirect_uri());
        let resolved =
            ResolvedSettings::resolve(&self.settings).map_err(AuthorizationError::Failed)?;
        if let Some(client_id) = resolved.client_id {
            let client_secret = resolved.client_secret;
            return Ok(ClientRegistration { issuer, client_id, client_secret, redirect_uri });
        }
        let before = inner.credential.client.clone();
        let is_reusable =
            |it: &ClientRegistration| it.issuer == issuer && it.redirect_uri == redirect_uri;
        if let Some(before) = before.filter(is_reusable) {
            return Ok(before);
        }
        if let Some(client_id) = self.client_metadata_url().filter(|_| found.reads_client_metadata)
        {
            return Ok(ClientRegistration { issuer, client_id, client_secret: None, redirect_uri });
        }
        let local = ["http://127.0.0.1", "http://localhost", "http://[::1]"];
        if !local.iter().any(|prefix| redirect_uri.starts_with(prefix)) {
            // A registration defaults to a native application on a person's machine.
            let mut kind = OAuthClientConfig::new("", &redirect_uri);
            kind.application_type = Some("web".to_owned());
            found.manager.configure_client(kind).map_err(auth_failure)?;
        }
        let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
        let created = found.manager.register_client(CLIENT_NAME, &redirect_uri, &scopes).await;
        let OAuthClientConfig { client_id, client_secret, .. } = created.map_err(auth_failure)?;
        Ok(ClientRegistration { issuer, client_id, client_secret, redirect_uri })
    }

    /// Returns the scopes to request: the configured ones, or, if none is configured, those that
    /// the upstream requires at first. With `more` scopes that a challenge names, adds these and
    /// the scopes that were granted and requested before.
    async fn select_scopes(
        &self,
        inner: &AuthorizerState,
        found: &DiscoveredIssuer,
        more: &[String],
    ) -> Vec<String> {
        let mut scopes = self.oauth.scopes.clone();
        if scopes.is_empty() && more.is_empty() {
            scopes = found.manager.select_initial_scopes(&[]).await;
        }
        let granted = inner
            .credential
            .credentials
            .as_ref()
            .map(|credentials| credentials.granted_scopes.clone());
        if !more.is_empty() {
            scopes.extend(granted.unwrap_or_default());
            scopes.extend(inner.credential.requested_scopes.iter().cloned());
            scopes.extend(more.iter().cloned());
        }
        let mut seen = std::collections::HashSet::new();
        scopes.retain(|scope| seen.insert(scope.clone()));
        scopes
    }

    /// Creates the sign-in link that a person must open.
    pub(super) async fn begin_sign_in(
        &self,
        inner: &mut AuthorizerState,
        header: Option<&str>,
        more: &[String],
    ) -> Result<(), AuthorizationError> {
        let mut found = self.discover_issuer(inner, header).await?;
        let scopes = self.select_scopes(inner, &found, more).await;
        let client = self.resolve_client(inner, &mut found, &scopes).await?;
        if inner.credential.client.as_ref().is_some_and(|before| before.issuer != client.issuer) {
            // A sign-in that was started with another issuer cannot be completed here.
            self.pending_sign_ins.clear();
            inner.credential.requested_scopes.clear();
        }
        let mut request = AuthorizationRequest::new(&client.redirect_uri)
            .with_preregistered_client(&client.client_id)
            .with_scopes(scopes)
            .with_initial_scope_selection();
        request.client_secret.clone_from(&client.client_secret);
        let session = AuthorizationSession::new(found.manager, request).await;
        let session = session.map_err(|(_, error)| auth_failure(error))?;
        let requested = token_store::query_param(&session.auth_url, "scope").unwrap_or_default();
        for scope in token_store::split_scopes(&requested) {
            if !inner.credential.requested_scopes.contains(&scope) {
                inner.credential.requested_scopes.push(scope);
            }
        }
        self.set_sign_in_link(session.auth_url);
        inner.manager = Some(session.auth_manager);
        inner.credential.client = Some(client);
        inner.credential.credentials = self.credentials.get();
        inner.credential.url = self.url()?;
        self.persist_credential(inner).await;
        Ok(())
    }

    fn set_sign_in_link(&self, url: String) {
        *self.sign_in_link.lock() = Some(SignInLink { url, expires_ms: now_ms() + SIGN_IN_MS });
    }

    /// Replaces a sign-in link that was used or has expired.
    pub(in super::super) async fn renew_sign_in_link(&self) {
        let inner = self.state.lock().await;
        self.renew_sign_in_link_locked(&inner).await;
    }

    async fn renew_sign_in_link_locked(&self, inner: &AuthorizerState) {
        let Some(manager) = inner.manager.as_ref().filter(|_| self.sign_in_link.lock().is_some())
        else {
            return;
        };
        let scopes: Vec<&str> =
            inner.credential.requested_scopes.iter().map(String::as_str).collect();
        match manager.get_authorization_url(&scopes).await {
            Ok(url) => self.set_sign_in_link(url),
            Err(error) => self.record_failure(&error.to_string()),
        }
    }

    /// Starts a new sign-in, even if there was one before.
    pub(in super::super) async fn restart_sign_in(&self) -> Result<(), String> {
        if self.oauth.grant == GrantKind::ClientCredentials {
            return Err("it needs no sign-in: oauth.grant is client_credentials".to_owned());
        }
        let mut inner = self.state.lock().await;
        self.load_once(&mut inner).await;
        match self.begin_sign_in(&mut inner, None, &[]).await {
            Ok(()) | Err(AuthorizationError::SignInRequired) => Ok(()),
            Err(AuthorizationError::Failed(reason)) => Err(self.redact(&reason)),
        }
    }

    /// Returns `true` if this upstream waits for a redirect with this state parameter.
    pub(in super::super) fn expects_state(&self, state: &str) -> bool {
        self.pending_sign_ins.has(state)
    }

    /// Completes a sign-in with the code from the browser's redirect.
    pub(in super::super) async fn complete_sign_in(
        &self,
        state: &str,
        code: &str,
        issuer: Option<&str>,
    ) -> Result<(), String> {
        let mut inner = self.state.lock().await;
        let Some(manager) = inner.manager.as_ref().filter(|_| self.pending_sign_ins.has(state))
        else {
            return Err("this sign-in has expired; start another one".to_owned());
        };
        let exchanged = manager.exchange_code_for_token_with_issuer(code, state, issuer).await;
        let stored = match exchanged {
            Ok(_) => self.store_token(&mut inner).await,
            Err(error) => Err(auth_failure(error)),
        };
        match stored {
            Ok(_) | Err(AuthorizationError::SignInRequired) => Ok(()),
            Err(AuthorizationError::Failed(reason)) => {
                let reason = self.redact(&reason).replace(code, "[code]");
                self.record_failure(&format!("the sign-in failed: {reason}"));
                if !self.pending_sign_ins.has(state) {
                    self.renew_sign_in_link_locked(&inner).await;
                }
                Err(reason)
            }
        }
    }

    /// Handles a redirect without a code: the sign-in was declined.
    pub(in super::super) async fn decline_sign_in(&self, state: &str, reason: &str) {
        self.pending_sign_ins.forget(state);
        self.record_failure(&format!("the sign-in was refused: {reason}"));
        self.renew_sign_in_link().await;
    }

    /// Deletes every token, and the registration with the issuer.
    pub(in super::super) async fn sign_out(&self) -> Result<(), String> {
        let mut inner = self.state.lock().await;
        self.registry.set_credential(&self.settings.project, &self.settings.name, None).await?;
        self.credentials.set(None);
        self.pending_sign_ins.clear();
        self.clear_failure();
        *self.current_token.lock() = None;
        *self.sign_in_link.lock() = None;
        *inner = AuthorizerState::default();
        self.loaded.store(true, Ordering::Release);
        Ok(())
    }

    /// Obtains a new token without a person.
    pub(super) async fn renew_token(
        &self,
        inner: &mut AuthorizerState,
    ) -> Result<AccessToken, AuthorizationError> {
        if self.oauth.grant == GrantKind::ClientCredentials {
            return self.exchange_client_credentials(inner, None, &[]).await;
        }
        if !self.credentials.get().as_ref().is_some_and(token_store::can_refresh) {
            return Err(AuthorizationError::SignInRequired);
        }
        self.restore_client(inner).await?;
        let Some(manager) = &inner.manager else { return Err(AuthorizationError::SignInRequired) };
        match manager.refresh_token().await {
            Ok(_) => self.store_token(inner).await,
            Err(AuthError::AuthorizationRequired | AuthError::TokenRefreshRejected(_)) => {
                Err(AuthorizationError::SignInRequired)
            }
            Err(error) => Err(auth_failure(error)),
        }
    }

    /// Restores the issuer and the client registration after a restart.
    async fn restore_client(&self, inner: &mut AuthorizerState) -> Result<(), AuthorizationError> {
        if inner.manager.is_some() {
            return Ok(());
        }
        let Some(client) = inner.credential.client.clone() else {
            return Err(AuthorizationError::SignInRequired);
        };
        let mut found = self.discover_issuer(inner, None).await?;
        if found.issuer != client.issuer {
            return Err(AuthorizationError::SignInRequired);
        }
        let resolved =
            ResolvedSettings::resolve(&self.settings).map_err(AuthorizationError::Failed)?;
        let mut config = OAuthClientConfig::new(&client.client_id, &client.redirect_uri);
        config.client_secret = resolved.client_secret.or(client.client_secret);
        found.manager.configure_client(config).map_err(auth_failure)?;
        inner.manager = Some(found.manager);
        Ok(())
    }

    /// Obtains a token with client credentials.
    pub(super) async fn exchange_client_credentials(
        &self,
        inner: &mut AuthorizerState,
        header: Option<&str>,
        more: &[String],
    ) -> Result<AccessToken, AuthorizationError> {
        let found = self.discover_issuer(inner, header).await?;
        let mut scopes = match (header, inner.credential.requested_scopes.is_empty()) {
            // The same scopes as last time, unless the upstream sent a challenge.
            (None, false) => inner.credential.requested_scopes.clone(),
            _ => self.select_scopes(inner, &found, more).await,
        };
        // `offline_access` requests a refresh token, which a client with credentials does not need.
        scopes.retain(|scope| scope != "offline_access");
        let (config, client_id) = self.client_credentials_config(&scopes)?;
        let mut manager = found.manager;
        manager.validate_client_credentials_metadata(&config).map_err(auth_failure)?;
        manager.configure_client_credentials(&config).map_err(auth_failure)?;
        // The future that `rmcp` 3.8.0 returns here is not `Send`: it holds a `dyn Fn` that encodes
        // URLs across an await. Awaiting it directly does not compile.
        let runtime = tokio::runtime::Handle::current();
        let exchanged = tokio::task::spawn_blocking(move || {
            runtime.block_on(manager.exchange_client_credentials(&config))
        });
        let exchanged =
            exchanged.await.map_err(|error| AuthorizationError::Failed(error.to_string()))?;
        exchanged.map_err(auth_failure)?;
        let (issuer, redirect_uri) = (found.issuer, String::new());
        inner.credential.client =
            Some(ClientRegistration { issuer, client_id, client_secret: None, redirect_uri });
        inner.credential.requested_scopes = scopes;
        self.store_token(inner).await
    }

    /// Returns the client credentials to send.
    fn client_credentials_config(
        &self,
        scopes: &[String],
    ) -> Result<(ClientCredentialsConfig, String), AuthorizationError> {
        let resolved =
            ResolvedSettings::resolve(&self.settings).map_err(AuthorizationError::Failed)?;
        let missing = || AuthorizationError::Failed("oauth has no client credentials".to_owned());
        let client_id = resolved.client_id.ok_or_else(missing)?;
        let (scopes, resource) = (scopes.to_vec(), Some(resolved.url));
        let used_client_id = client_id.clone();
        let config = match (resolved.client_secret, resolved.private_key) {
            (Some(client_secret), _) => {
                ClientCredentialsConfig::ClientSecret { client_id, client_secret, scopes, resource }
            }
            (None, Some(key)) => ClientCredentialsConfig::PrivateKeyJwt {
                client_id,
                // A key in an environment variable often has its line breaks escaped.
                signing_key: key.replace("\\n", "\n").into_bytes(),
                signing_algorithm: match self.oauth.algorithm.unwrap_or(SigningAlgorithm::ES256) {
                    SigningAlgorithm::ES256 => JwtSigningAlgorithm::ES256,
                    SigningAlgorithm::ES384 => JwtSigningAlgorithm::ES384,
                    SigningAlgorithm::RS256 => JwtSigningAlgorithm::RS256,
                    SigningAlgorithm::RS384 => JwtSigningAlgorithm::RS384,
                    SigningAlgorithm::RS512 => JwtSigningAlgorithm::RS512,
                },
                token_endpoint_audience: None,
                scopes,
                resource,
            },
            (None, None) => return Err(missing()),
        };
        Ok((config, used_client_id))
    }
}
