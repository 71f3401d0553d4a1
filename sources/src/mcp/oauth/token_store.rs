//! The state of a sign-in: credentials that must survive a restart, and pending sign-ins that live
//! in memory only.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use rmcp::transport::auth::{
    AuthError, CredentialStore, StateStore, StoredAuthorizationState, StoredCredentials,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::now_ms;
use super::super::settings::McpServerSettings;

/// Lifetime of a sign-in link.
pub(super) const SIGN_IN_MS: u64 = 10 * 60 * 1_000;

/// Maximum number of pending sign-ins of one upstream.
const MAX_PENDING_SIGN_INS: usize = 16;

/// A token is renewed this long before it expires.
const EARLY_MS: u64 = 30_000;

/// Toolcrib's registration as a client of an issuer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ClientRegistration {
    pub(super) issuer: String,
    pub(super) client_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) client_secret: Option<String>,
    pub(super) redirect_uri: String,
}

/// The stored credential of an upstream.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct UpstreamCredential {
    /// URL of the upstream: a credential for one URL is never sent to another.
    pub(super) url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) client: Option<ClientRegistration>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) credentials: Option<StoredCredentials>,
    /// Every scope that was ever requested. If the upstream requires only scopes among them, the
    /// authorization has failed and is not repeated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "asked")]
    pub(super) requested_scopes: Vec<String>,
}

/// An access token.
#[derive(Clone)]
pub(super) struct AccessToken {
    pub(super) value: Arc<str>,
    /// Time at which to renew it, or `None` if the issuer does not state its lifetime.
    pub(super) renew_ms: Option<u64>,
    /// `true` once the upstream has accepted it.
    accepted: Arc<AtomicBool>,
}

impl AccessToken {
    pub(super) fn from_credentials(credentials: &StoredCredentials) -> Option<Self> {
        let response = serde_json::to_value(credentials.token_response.as_ref()?).ok()?;
        let value: Arc<str> = response["access_token"].as_str()?.into();
        let received_ms = credentials.token_received_at.unwrap_or_default().saturating_mul(1_000);
        let lives_ms = response["expires_in"].as_u64().map(|seconds| seconds.saturating_mul(1_000));
        // A short-lived token is used for half of its lifetime.
        let renew_ms = lives_ms.map(|ms| received_ms.saturating_add(ms - EARLY_MS.min(ms / 2)));
        Some(Self { value, renew_ms, accepted: Arc::default() })
    }

    pub(super) fn was_accepted(&self) -> bool {
        self.accepted.load(Ordering::Relaxed)
    }

    pub(super) fn mark_accepted(&self) {
        self.accepted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.renew_ms.is_none_or(|at_ms| now_ms() < at_ms)
    }
}

/// Returns the secrets in credentials, for redaction.
pub(super) fn secrets(credentials: &StoredCredentials) -> Vec<String> {
    let response = serde_json::to_value(&credentials.token_response).unwrap_or_default();
    let text = |key: &str| response[key].as_str().map(str::to_owned);
    ["access_token", "refresh_token", "id_token"].into_iter().filter_map(text).collect()
}

/// Returns `true` if a new token can be obtained without a person.
pub(super) fn can_refresh(credentials: &StoredCredentials) -> bool {
    let response = serde_json::to_value(&credentials.token_response).unwrap_or_default();
    response["refresh_token"].is_string()
}

/// The credentials that `rmcp` works on. `rmcp` writes them only here; the authorizer persists
/// them.
#[derive(Clone, Default)]
pub(super) struct CachedCredentials(Arc<Mutex<Option<StoredCredentials>>>);

impl CachedCredentials {
    pub(super) fn get(&self) -> Option<StoredCredentials> {
        self.0.lock().clone()
    }

    pub(super) fn set(&self, credentials: Option<StoredCredentials>) {
        *self.0.lock() = credentials;
    }
}

#[async_trait]
impl CredentialStore for CachedCredentials {
    async fn load(&self) -> Result<Option<StoredCredentials>, AuthError> {
        Ok(self.get())
    }

    async fn save(&self, credentials: StoredCredentials) -> Result<(), AuthError> {
        self.set(Some(credentials));
        Ok(())
    }

    async fn clear(&self) -> Result<(), AuthError> {
        self.set(None);
        Ok(())
    }
}

/// Pending sign-ins by their state parameter, which is unguessable, valid once and short-lived.
#[derive(Clone, Default)]
pub(super) struct PendingSignIns(Arc<Mutex<HashMap<String, StoredAuthorizationState>>>);

fn is_recent(state: &StoredAuthorizationState) -> bool {
    now_ms() < state.created_at * 1_000 + SIGN_IN_MS
}

impl PendingSignIns {
    pub(super) fn has(&self, state: &str) -> bool {
        self.0.lock().get(state).is_some_and(is_recent)
    }

    pub(super) fn forget(&self, state: &str) {
        self.0.lock().remove(state);
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[async_trait]
impl StateStore for PendingSignIns {
    async fn save(&self, csrf: &str, state: StoredAuthorizationState) -> Result<(), AuthError> {
        let mut pending = self.0.lock();
        pending.retain(|_, state| is_recent(state));
        if pending.len() >= MAX_PENDING_SIGN_INS {
            let oldest = pending.iter().min_by_key(|(_, state)| state.created_at);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                pending.remove(&oldest);
            }
        }
        pending.insert(csrf.to_owned(), state);
        Ok(())
    }

    async fn load(&self, csrf: &str) -> Result<Option<StoredAuthorizationState>, AuthError> {
        Ok(self.0.lock().get(csrf).filter(|state| is_recent(state)).cloned())
    }

    async fn delete(&self, csrf: &str) -> Result<(), AuthError> {
        self.forget(csrf);
        Ok(())
    }
}

/// Splits a space-separated list of scopes.
pub(super) fn split_scopes(scopes: &str) -> Vec<String> {
    scopes.split_whitespace().map(str::to_owned).collect()
}

/// Returns a query parameter of a URL.
pub(super) fn query_param(url: &str, name: &str) -> Option<String> {
    let url = reqwest::Url::parse(url).ok()?;
    let found = url.query_pairs().find(|(key, _)| key == name);
    found.map(|(_, value)| value.into_owned())
}

/// Returns `true` if an issuer's endpoint is fit for a browser and for secrets: an HTTP URL that is
/// at least as secure as the upstream's own.
pub(super) fn is_safe_endpoint(end: &str, settings: &McpServerSettings) -> bool {
    let safe = settings.url.as_ref().is_some_and(|url| url.starts_with("https:"));
    match reqwest::Url::parse(end) {
        Ok(end) => end.has_host() && (end.scheme() == "https" || end.scheme() == "http" && !safe),
        Err(_) => false,
    }
}

/// Returns a boolean field of an issuer's metadata, `false` if absent.
pub(super) fn metadata_flag(fields: &HashMap<String, Value>, name: &str) -> bool {
    fields.get(name).and_then(Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state(created_at: u64) -> StoredAuthorizationState {
        let state = json!({ "pkce_verifier": "v", "csrf_token": "s", "created_at": created_at,
            "expected_issuer": null, "require_issuer": false, "requested_scopes": [] });
        serde_json::from_value(state).unwrap()
    }

    #[tokio::test]
    async fn pending_sign_ins_expire_and_are_bounded() {
        let pending = PendingSignIns::default();
        let now = now_ms() / 1_000;
        pending.save("new", state(now)).await.unwrap();
        pending.save("old", state(now - SIGN_IN_MS / 1_000)).await.unwrap();
        assert!(pending.has("new") && !pending.has("old") && !pending.has(""));
        assert!(pending.load("old").await.unwrap().is_none());
        for n in 0..100 {
            pending.save(&format!("{n}"), state(now + 1)).await.unwrap();
        }
        assert!(!pending.has("new"), "the number of pending sign-ins is limited");
    }

    #[test]
    fn issuer_endpoints_must_be_https_or_loopback() {
        let settings_with =
            |url: &str| McpServerSettings { url: Some(url.into()), ..McpServerSettings::default() };
        assert!(is_safe_endpoint(
            "https://issuer.example/token",
            &settings_with("https://a.example/mcp")
        ));
        assert!(!is_safe_endpoint(
            "http://issuer.example/token",
            &settings_with("https://a.example/mcp")
        ));
        assert!(is_safe_endpoint(
            "http://127.0.0.1:9/token",
            &settings_with("http://127.0.0.1:8/mcp")
        ));
        for odd in ["javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "", "token"] {
            assert!(!is_safe_endpoint(odd, &settings_with("http://127.0.0.1:8/mcp")), "{odd}");
        }
    }

    #[test]
    fn an_expiring_token_is_not_fresh() {
        let token_with_expiry = |expires: Value| {
            let credentials = json!({ "client_id": "c", "token_received_at": now_ms() / 1_000,
                "token_response": { "access_token": "abc", "token_type": "bearer",
                    "expires_in": expires } });
            AccessToken::from_credentials(&serde_json::from_value(credentials).unwrap()).unwrap()
        };
        assert!(token_with_expiry(json!(3_600)).is_fresh());
        assert!(token_with_expiry(Value::Null).is_fresh());
        assert!(!token_with_expiry(json!(0)).is_fresh());
    }
}
