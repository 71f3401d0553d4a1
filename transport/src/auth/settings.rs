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
    /// The claim with one role: `agent`, `provider`, `approver`, `auditor` or `admin`.
    pub role_claim: String,
    /// The claim with several roles, as a list or as one text with spaces. Takes precedence over
    /// `role_claim`. If unset, no claim is read.
    pub roles_claim: Option<String>,
    /// The role of tokens without these claims.
    pub default_role: String,
    /// The claim with the groups of the agent, as a list or as one text with spaces. If unset, the
    /// agent has no groups.
    pub groups_claim: Option<String>,
    /// The claim that names the user that the agent acts for. If unset, there is none.
    pub user_claim: Option<String>,
    /// The claim that names the session, such as `sid`. If unset, no session is asserted.
    pub session_claim: Option<String>,
    /// The claim that names the environment. If unset, there is none.
    pub environment_claim: Option<String>,
    /// The claim with the patterns of the tools that the token is limited to, as a list or as one
    /// text with spaces. If unset, the token sets no limit.
    pub tools_claim: Option<String>,
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
            roles_claim: None,
            default_role: "agent".into(),
            groups_claim: None,
            user_claim: None,
            session_claim: None,
            environment_claim: None,
            tools_claim: None,
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
            InvalidSetting::new(
                "auth.oauth.default_role",
                "must be agent, provider, approver, auditor or admin",
            )
        })
    }
}
