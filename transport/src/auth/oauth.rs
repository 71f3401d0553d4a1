//! OAuth: accepts access tokens (JWTs) of an issuer that the operator trusts, in addition to
//! Toolcrib's API keys.
//!
//! A token is valid only if the issuer signed it, it names this server as its audience (`aud`), and
//! it has not expired. Its claims determine the project, the agent, the roles, the groups, the
//! user, the session, the environment and the tools; the access rules of the project apply as they
//! do for a key. A claim of the wrong form makes the token invalid. The issuer's keys are fetched
//! at startup, then every few minutes, and when a token names an unknown key.

use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use parking_lot::RwLock;
use serde_json::{Map, Value};
use tokio::sync::Notify;
use toolcrib::domain::access_rules::check_pattern;
use toolcrib::domain::caller::{AuthMethod, AuthenticatedCaller, Authenticator};
use toolcrib::domain::directory::credential::check_attribute_name;
use toolcrib::{Caller, CallerAttributes, RoleSet};

use crate::auth::settings::OauthSettings;

/// Interval at which the issuer's keys are fetched.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);

/// Minimum interval between two fetches.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum size of a key set in bytes.
const MAX_JWKS_BYTES: usize = 1 << 20;

/// Time that the clocks of the issuer and of this server may differ, in seconds.
const LEEWAY_S: u64 = 60;

/// Asymmetric signature algorithms. Those with a shared secret are excluded, so that only the
/// issuer can sign.
const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];

/// Authenticates tokens of the issuer.
pub struct JwtAuthenticator {
    settings: OauthSettings,
    keys: RwLock<JwkSet>,
    refresh_requested: Notify,
}

impl JwtAuthenticator {
    /// Fetches the issuer's keys and refreshes them in the background. If the issuer is
    /// unreachable, the fetch is retried and its tokens are refused until it succeeds.
    pub async fn start(settings: OauthSettings) -> anyhow::Result<Arc<Self>> {
        let keys = JwkSet { keys: Vec::new() };
        let oauth =
            Arc::new(Self { settings, keys: RwLock::new(keys), refresh_requested: Notify::new() });
        let client = reqwest::Client::builder()
            .timeout(Duration::from_secs(10))
            .redirect(reqwest::redirect::Policy::limited(3))
            .build()
            .context("no HTTP client for the issuer's keys")?;
        match oauth.fetch_keys(&client).await {
            Ok(keys) => *oauth.keys.write() = keys,
            // A missing file is a configuration error; a server may come back.
            Err(error) if oauth.settings.jwks_file.is_some() => return Err(error),
            Err(error) => tracing::warn!(%error, "the issuer's keys cannot be read yet"),
        }
        tokio::spawn(refresh_keys_periodically(Arc::downgrade(&oauth), client));
        Ok(oauth)
    }

    async fn fetch_keys(&self, client: &reqwest::Client) -> anyhow::Result<JwkSet> {
        let text = match (&self.settings.jwks_file, &self.settings.jwks_url) {
            (Some(path), _) => tokio::task::spawn_blocking({
                let path = path.clone();
                move || std::fs::read_to_string(&path)
            })
            .await?
            .with_context(|| format!("cannot read {}", path.display()))?,
            (None, Some(url)) => {
                let answer = client.get(url).send().await?.error_for_status()?;
                let bytes = answer.bytes().await?;
                if bytes.len() > MAX_JWKS_BYTES {
                    bail!("{url} is over {MAX_JWKS_BYTES} bytes");
                }
                String::from_utf8(bytes.into())?
            }
            (None, None) => bail!("neither jwks_file nor jwks_url is set"),
        };
        serde_json::from_str(&text).context("the issuer's keys are not a JWK set")
    }

    /// Returns the key that a token names, or the only key if the token names none.
    fn find_key(&self, kid: Option<&str>) -> Option<Jwk> {
        let keys = self.keys.read();
        match kid {
            Some(kid) => keys.find(kid).cloned(),
            None => keys.keys.first().filter(|_| keys.keys.len() == 1).cloned(),
        }
    }

    fn verify(&self, token: &str) -> Option<Map<String, Value>> {
        let header = decode_header(token).ok()?;
        if !ALGORITHMS.contains(&header.alg) {
            return None;
        }
        let Some(jwk) = self.find_key(header.kid.as_deref()) else {
            self.refresh_requested.notify_one();
            return None;
        };
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        let mut rules = Validation::new(header.alg);
        rules.set_issuer(&[&self.settings.issuer]);
        rules.set_audience(&[&self.settings.resource]);
        rules.set_required_spec_claims(&["exp", "iss", "aud"]);
        rules.validate_nbf = true;
        rules.leeway = LEEWAY_S;
        decode::<Map<String, Value>>(token, &key, &rules).ok().map(|token| token.claims)
    }
}

impl Authenticator for JwtAuthenticator {
    fn authenticate(&self, token: &str) -> Option<AuthenticatedCaller> {
        // An API key of Toolcrib contains no dots.
        if token.split('.').count() != 3 {
            return None;
        }
        let claims = self.verify(token)?;
        let end = claims.get("exp").and_then(Value::as_f64);
        let expires_ms = end.map(|end| ((end + LEEWAY_S as f64) * 1_000.0) as u64);
        let caller = read_caller(&self.settings, &claims)?;
        Some(AuthenticatedCaller { caller, expires_ms })
    }
}

/// Returns the caller that the claims name, or `None` if one of them has the wrong form: to ignore
/// it could give the bearer more rights than the issuer meant.
fn read_caller(settings: &OauthSettings, claims: &Map<String, Value>) -> Option<Caller> {
    let project = match claims.get(&settings.project_claim) {
        Some(project) => project.as_str()?.to_owned(),
        None => settings.default_project.clone()?,
    };
    let agent = claims.get(&settings.agent_claim)?.as_str()?.to_owned();
    let roles: RoleSet = match read_list(claims, &settings.roles_claim)? {
        Some(roles) => roles.iter().map(|role| role.parse().ok()).collect::<Option<_>>()?,
        None => match claims.get(&settings.role_claim) {
            Some(role) => RoleSet::from(role.as_str()?.parse::<toolcrib::Role>().ok()?),
            None => RoleSet::from(settings.default_role.parse::<toolcrib::Role>().ok()?),
        },
    };
    let plain = |word: &str| {
        (1..=64).contains(&word.len())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-.@:|".contains(c))
    };
    if !plain(&project) || !plain(&agent) || roles.is_empty() {
        return None;
    }
    let attributes = CallerAttributes {
        groups: read_list(claims, &settings.groups_claim)?.unwrap_or_default(),
        user: read_name(claims, &settings.user_claim)?,
        session: read_name(claims, &settings.session_claim)?,
        environment: read_name(claims, &settings.environment_claim)?,
        tools: read_list(claims, &settings.tools_claim)?,
        credential: None,
        on_behalf_of: None,
    };
    let is_name = |group: &String| check_attribute_name("groups", group).is_ok();
    let is_pattern = |pattern: &String| check_pattern(pattern).is_ok();
    if !attributes.groups.iter().all(is_name) || !attributes.tools.iter().flatten().all(is_pattern)
    {
        return None;
    }
    let caller = Caller::new(project, agent, roles, AuthMethod::Key);
    Some(Caller { attributes: Arc::new(attributes), ..caller })
}

/// Returns the name in a claim, `Some(None)` if the token has no such claim, or `None` if the claim
/// is not a name.
fn read_name(claims: &Map<String, Value>, claim: &Option<String>) -> Option<Option<String>> {
    let Some(value) = claim.as_ref().and_then(|claim| claims.get(claim)) else { return Some(None) };
    let name = value.as_str()?;
    check_attribute_name("claim", name).ok().map(|()| Some(name.to_owned()))
}

/// Returns the texts in a claim: a list, or one text with spaces between them, as OAuth writes
/// scopes.
fn read_list(claims: &Map<String, Value>, claim: &Option<String>) -> Option<Option<Vec<String>>> {
    let Some(value) = claim.as_ref().and_then(|claim| claims.get(claim)) else { return Some(None) };
    let texts = match value {
        Value::String(text) => text.split_whitespace().map(str::to_owned).collect(),
        Value::Array(list) => {
            list.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>()?
        }
        _ => return None,
    };
    Some(Some(texts))
}

/// Refreshes the keys for as long as the authenticator is in use.
async fn refresh_keys_periodically(oauth: Weak<JwtAuthenticator>, client: reqwest::Client) {
    loop {
        tokio::time::sleep(MIN_REFRESH_INTERVAL).await;
        let Some(oauth) = oauth.upgrade() else { return };
        let _ = tokio::time::timeout(
            REFRESH_INTERVAL - MIN_REFRESH_INTERVAL,
            oauth.refresh_requested.notified(),
        )
        .await;
        match oauth.fetch_keys(&client).await {
            Ok(keys) => *oauth.keys.write() = keys,
            Err(error) => tracing::warn!(%error, "cannot read the issuer's keys; using old ones"),
        }
    }
}
