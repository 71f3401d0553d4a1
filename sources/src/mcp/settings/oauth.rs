//! OAuth settings of an upstream: a person signs in once, or Toolcrib uses its own client
//! credentials.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// OAuth settings of an MCP server that is reached over HTTP. Without them, a person signs in to a
/// server that requires a token, and Toolcrib registers itself with the server's issuer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "McpOauth")]
pub struct McpOauthSettings {
    /// `authorization_code`: a person signs in once in a browser (`toolcrib mcp sign-in`).
    /// `client_credentials`: Toolcrib obtains tokens without a person.
    #[serde(skip_serializing_if = "is_usual")]
    pub grant: GrantKind,
    /// Id of a client that is already registered with the issuer. `${NAME}` is replaced from the
    /// server's environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Secret of that client. Write `${NAME}`, which is replaced from the server's environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_secret: Option<String>,
    /// With `client_credentials`, instead of a secret: a private key in PEM that signs the client
    /// assertion. Write `${NAME}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private_key: Option<String>,
    /// Signing algorithm of the private key: `ES256`, `ES384`, `RS256`, `RS384` or `RS512`.
    /// Default: `ES256`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<SigningAlgorithm>,
    /// Scopes to request. Default: those that the server requires.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<String>,
    /// The only issuer to trust, regardless of what the server names. Default: a client with a
    /// secret stays with the first issuer that the server names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    /// URL of the client's metadata (`https://…`), for issuers that accept it instead of a
    /// registration. Default: `upstreams.public_url` with `/oauth/client.json`, if that begins with
    /// `https://`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_metadata_url: Option<String>,
}

/// OAuth grant type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GrantKind {
    #[default]
    AuthorizationCode,
    ClientCredentials,
}

impl GrantKind {
    /// Returns the grant type as written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AuthorizationCode => "authorization_code",
            Self::ClientCredentials => "client_credentials",
        }
    }
}

/// Signing algorithm of a private key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Algorithm")]
pub enum SigningAlgorithm {
    ES256,
    ES384,
    RS256,
    RS384,
    RS512,
}

fn is_usual(kind: &GrantKind) -> bool {
    *kind == GrantKind::default()
}

/// Returns `true` if the text is a scope as defined by RFC 6749.
fn is_scope(text: &str) -> bool {
    let is_allowed = |byte: u8| matches!(byte, 0x21 | 0x23..=0x5b | 0x5d..=0x7e);
    !text.is_empty() && text.bytes().all(is_allowed)
}

impl McpOauthSettings {
    /// Checks the constraints that the types do not express. The error is a phrase that follows the
    /// name of the field.
    pub(super) fn check(&self) -> Result<(), String> {
        let invalid = |reason: &str| Err(reason.to_owned());
        let machine = self.grant == GrantKind::ClientCredentials;
        match (machine, &self.client_secret, &self.private_key) {
            (true, Some(_), None) | (true, None, Some(_)) if self.client_id.is_some() => {}
            (true, ..) => {
                return invalid(
                    "with client_credentials needs client_id, and either client_secret or \
                     private_key",
                );
            }
            (false, _, Some(_)) => {
                return invalid("has a private_key only with client_credentials");
            }
            (false, Some(_), None) if self.client_id.is_none() => {
                return invalid("has a client_secret only with a client_id");
            }
            (false, ..) => {}
        }
        if self.private_key.is_none() && self.algorithm.is_some() {
            return invalid("has an algorithm only with a private_key");
        }
        if !self.scopes.iter().all(|scope| is_scope(scope)) {
            return invalid("has an invalid scope: no spaces, quotes or backslashes");
        }
        let urls = [("issuer", &self.issuer), ("client_metadata_url", &self.client_metadata_url)];
        for (field, url) in urls {
            let parsed = url.as_deref().map(reqwest::Url::parse);
            if parsed.is_some_and(|url| !url.is_ok_and(|url| url.has_host())) {
                return invalid(&format!("has an {field} that is not a URL"));
            }
        }
        Ok(())
    }

    /// Returns the settings that may contain variables.
    pub(super) fn expandable_fields(&self) -> impl Iterator<Item = &String> {
        self.client_id.iter().chain(&self.client_secret).chain(&self.private_key)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check_oauth(oauth: serde_json::Value) -> Result<(), String> {
        serde_json::from_value::<McpOauthSettings>(oauth).unwrap().check()
    }

    #[test]
    fn client_credentials_require_an_id_and_a_secret_or_key() {
        let client_credentials = |more: serde_json::Value| {
            let mut oauth = json!({ "grant": "client_credentials" });
            oauth.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            check_oauth(oauth)
        };
        assert_eq!(
            client_credentials(json!({ "client_id": "a", "client_secret": "${S}" })),
            Ok(())
        );
        let key = json!({ "client_id": "a", "private_key": "${K}", "algorithm": "ES256" });
        assert_eq!(client_credentials(key), Ok(()));
        assert!(client_credentials(json!({})).unwrap_err().contains("client_id"));
        assert!(client_credentials(json!({ "client_id": "a" })).is_err());
        assert!(check_oauth(json!({ "client_secret": "x" })).is_err());
        assert!(check_oauth(json!({ "scopes": ["two words"] })).is_err());
        assert_eq!(check_oauth(json!({ "scopes": ["files:read"] })), Ok(()));
    }
}
