//! Settings of OAuth: the trusted issuer and the meaning of its tokens' claims.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib_protocol::settings::InvalidSetting;

/// The trusted issuer and the meaning of its tokens' claims.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OauthSettings {
    /// The issuer, exactly as in the `iss` claim of its tokens.
    pub issuer: String,
    /// The URL of this server's MCP endpoint, as in the `aud` claim of a token for it:
    /// `https://crib.example.com/mcp`.
    pub resource: String,
    /// URL of the issuer's keys, as a JWK set.
    pub jwks_url: Option<String>,
    /// A file with the issuer's keys. Replaces `jwks_url`.
    pub jwks_file: Option<PathBuf>,
    /// The claim that names the project.
    pub project_claim: String,
    /// The project of tokens without that claim. If unset, such tokens are rejected.
    pub default_project: Option<String>,
    /// The claim that names the agent.
    pub agent_claim: String,
    /// The claim with the role: `agent`, `provider` or `admin`.
    pub role_claim: String,
    /// The role of tokens without that claim.
    pub default_role: String,
}

impl Default for OauthSettings {
    fn default() -> Self {
        Self {
            issuer: String::new(),
            resource: String::new(),
            jwks_url: None,
            jwks_file: None,
            project_claim: "toolcrib_project".into(),
            default_project: None,
            agent_claim: "sub".into(),
            role_claim: "toolcrib_role".into(),
            default_role: "agent".into(),
        }
    }
}

impl OauthSettings {
    /// Checks what the types alone cannot express.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let is_url = |text: &str| {
            let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(char::is_whitespace))
        };
        for (key, url) in
            [("auth.oauth.issuer", &self.issuer), ("auth.oauth.resource", &self.resource)]
        {
            if !is_url(url) {
                return Err(InvalidSetting::new(key, "must begin with https:// or http://"));
            }
        }
        match (&self.jwks_url, &self.jwks_file) {
            (Some(url), None) if is_url(url) => {}
            (None, Some(_)) => {}
            _ => {
                let reason = "set exactly one of auth.oauth.jwks_url and auth.oauth.jwks_file";
                return Err(InvalidSetting::new("auth.oauth", reason));
            }
        }
        self.default_role.parse::<toolcrib::Role>().map(|_| ()).map_err(|()| {
            InvalidSetting::new("auth.oauth.default_role", "must be agent, provider or admin")
        })
    }
}
