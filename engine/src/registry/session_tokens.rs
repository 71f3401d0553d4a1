//! Session tokens: credentials for a browser, an MCP client or a child process. A token narrows the
//! key that it was made from: another user or session only if the key may assert it, fewer tools,
//! fewer roles, an earlier end.

use crate::domain::access_rules::check_pattern;
use crate::domain::caller::{AuthMethod, Caller};
use crate::domain::directory::credential::{
    AssertableAttribute, SessionTokenAttributes, check_attribute_name, is_pattern_within,
};
use crate::domain::directory::{ApiKey, DirectoryChange, SessionToken};
use crate::domain::fault::{Code, Error};
use crate::registry::credentials::secret_digest;
use crate::registry::keys::{check_list, invalid};
use crate::registry::{Admin, Catalog};

/// Maximum lifetime of a session token.
pub const MAX_SESSION_TOKEN_TTL_MS: u64 = 31 * 24 * 3_600_000;

/// Maximum number of valid session tokens of one key.
const MAX_TOKENS_PER_KEY: usize = 10_000;

/// A request to make a session token.
#[derive(Debug, Clone, Default)]
pub struct NewSessionToken {
    /// Restrictions of the token.
    pub attributes: SessionTokenAttributes,
    /// Time until the token ends, in milliseconds. It ends with its key at the latest.
    pub ttl_ms: u64,
}

/// A new session token with its secret. The secret is returned only here.
#[derive(Debug, Clone)]
pub struct CreatedSessionToken {
    /// The stored token, without its secret.
    pub token: SessionToken,
    /// The secret that authenticates its bearer.
    pub secret: String,
}

impl Admin {
    /// Makes a session token from the caller's key. `secret` holds at least 32 random bytes in a
    /// printable form.
    pub async fn create_session_token(
        &self,
        caller: &Caller,
        new: NewSessionToken,
        secret: String,
    ) -> Result<CreatedSessionToken, Error> {
        check_request(&new)?;
        let now_ms = self.registry.credentials.now_ms();
        let key = own_key(&self.registry.catalog(), caller)?;
        let mut token = SessionToken {
            id: self.core.id_generator.next_id(SessionToken::PREFIX, now_ms),
            digest: secret_digest(&secret),
            key_id: key.id,
            project: key.project,
            attributes: new.attributes,
            created_ms: now_ms,
            expires_ms: now_ms.saturating_add(new.ttl_ms),
            revoked_ms: None,
        };
        if let Some(session) = &caller.attributes.session {
            // The session that the request asserted is the session of the token.
            token.attributes.session.get_or_insert_with(|| session.clone());
        }
        if let Some(user) = &caller.attributes.user {
            token.attributes.user.get_or_insert_with(|| user.clone());
        }
        token.expires_ms = key.expires_ms.map_or(token.expires_ms, |ms| ms.min(token.expires_ms));
        let reason = format!("from {}", token.key_id);
        let entry = self.registry.audit_entry(
            caller,
            &token.project,
            "session_token.created",
            &token.id,
            &reason,
        );
        self.registry
            .change_directory(|catalog| {
                // The key may have been revoked since.
                let key = own_key(catalog, caller)?;
                check_within_key(caller, &key, &token.attributes)?;
                let tokens = catalog.directory().session_tokens.iter();
                let open = tokens.filter(|t| t.key_id == key.id && t.revoked_ms.is_none());
                if open.count() >= MAX_TOKENS_PER_KEY {
                    let message =
                        format!("the key has {MAX_TOKENS_PER_KEY} session tokens; revoke some");
                    return Err(Error::refused(Code::Conflict, message));
                }
                let change = DirectoryChange::AddSessionToken(Box::new(token.clone()));
                Ok((change, Some(entry.clone())))
            })
            .await?;
        Ok(CreatedSessionToken { token, secret })
    }

    /// Returns the session tokens that the caller may see: those of its key, or of its project if
    /// it administers or audits that; all of them for the local operator.
    pub fn session_tokens(&self, caller: &Caller) -> Result<Vec<SessionToken>, Error> {
        let catalog = self.registry.catalog();
        let tokens = catalog.directory().session_tokens.iter();
        if caller.auth_method == AuthMethod::Anonymous {
            self.registry.require_operator(caller, None)?;
        }
        let (own, all) = (caller.attributes.credential.as_deref(), caller.spans_projects());
        let is_visible = |token: &&SessionToken| {
            let is_own = own == Some(token.key_id.as_str()) || own == Some(token.id.as_str());
            all || token.project == caller.project && (caller.may_audit() || is_own)
        };
        Ok(tokens.filter(is_visible).cloned().collect())
    }

    /// Revokes a session token: one of the caller's key, one of its project if it administers that,
    /// or the caller's own token.
    pub async fn revoke_session_token(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        let found = self.session_tokens(caller)?.into_iter().find(|token| token.id == id);
        let own = caller.attributes.credential.as_deref();
        let may_revoke = |token: &SessionToken| {
            caller.may_administer()
                || own == Some(token.key_id.as_str())
                || own == Some(token.id.as_str())
        };
        let Some(token) = found else {
            let excerpt: String = id.chars().take(80).collect();
            let message = format!("there is no session token \"{excerpt}\"");
            return Err(Error::not_found(message, "GET /v1/session_tokens lists the tokens"));
        };
        if !may_revoke(&token) {
            let message = format!("a key with the role {} cannot revoke tokens", caller.roles);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let at_ms = self.registry.credentials.now_ms();
        let entry = self.registry.audit_entry(
            caller,
            &token.project,
            "session_token.revoked",
            id,
            &format!("from {}", token.key_id),
        );
        let change = DirectoryChange::RevokeSessionToken { id: id.to_owned(), at_ms };
        self.registry.change_directory(|_| Ok((change.clone(), Some(entry.clone())))).await
    }
}

/// Returns the key that the caller authenticated with.
fn own_key(catalog: &Catalog, caller: &Caller) -> Result<ApiKey, Error> {
    let refused = |message: &str| Error::refused(Code::PermissionDenied, message);
    let credential = caller.attributes.credential.as_deref();
    let is_key = caller.auth_method == AuthMethod::Key && credential.is_some();
    if !is_key {
        return Err(refused(
            "a session token is made from a key: send the request with a key, which toolcrib keys \
             create makes",
        ));
    }
    if credential.is_some_and(|id| id.starts_with(SessionToken::PREFIX)) {
        return Err(refused("a session token cannot make session tokens; use the key"));
    }
    let keys = catalog.directory().keys.iter();
    let key = keys.filter(|key| key.revoked_ms.is_none()).find(|key| Some(&*key.id) == credential);
    let key = key.cloned().ok_or_else(|| {
        Error::refused(Code::Unauthenticated, "the key of this request was revoked")
    })?;
    if key.session_token_roles().is_empty() {
        let message = format!(
            "a session token has the roles agent and provider of its key, and this key has only {}",
            key.roles
        );
        return Err(refused(&message));
    }
    Ok(key)
}

fn check_request(new: &NewSessionToken) -> Result<(), Error> {
    let SessionTokenAttributes { user, session, environment, tools } = &new.attributes;
    for (field, name) in [("user", user), ("session", session), ("environment", environment)] {
        if let Some(name) = name {
            check_attribute_name(field, name).map_err(invalid)?;
        }
    }
    if let Some(tools) = tools {
        check_list("tools", tools)?;
        tools.iter().try_for_each(|pattern| check_pattern(pattern)).map_err(invalid)?;
    }
    if !(1_000..=MAX_SESSION_TOKEN_TTL_MS).contains(&new.ttl_ms) {
        let most_s = MAX_SESSION_TOKEN_TTL_MS / 1_000;
        return Err(invalid(format!("ttl_s must be from 1 to {most_s} (31 days)")));
    }
    Ok(())
}

/// Refuses a token that would have rights or attributes beyond those of its key.
fn check_within_key(
    caller: &Caller,
    key: &ApiKey,
    wanted: &SessionTokenAttributes,
) -> Result<(), Error> {
    let refused = |message: String| Err(Error::refused(Code::PermissionDenied, message));
    let own = &caller.attributes;
    for (attribute, name, present) in [
        (AssertableAttribute::User, &wanted.user, &own.user),
        (AssertableAttribute::Session, &wanted.session, &own.session),
    ] {
        if name.is_some() && name != present && !key.may_assert(attribute) {
            let word = attribute.as_str();
            return refused(format!(
                "this key may not assert a {word}, so a token of it cannot have another {word}; \
                 toolcrib keys create --may-assert {word} makes a key that may"
            ));
        }
    }
    let environment = &key.attributes.environment;
    if wanted.environment.is_some() && wanted.environment != *environment {
        // Rules that allow may name an environment, so another one could give more rights.
        return refused(match environment {
            Some(own) => format!("the key is for the environment \"{own}\"; so is its token"),
            None => "the key has no environment, so its token cannot have one".to_owned(),
        });
    }
    let limits = key.attributes.tools.as_deref();
    let outside = limits.and_then(|limits| {
        wanted.tools.iter().flatten().find(|pattern| !is_pattern_within(pattern, limits))
    });
    match outside {
        Some(pattern) => {
            refused(format!("\"{pattern}\" is not within the tools that the key is limited to"))
        }
        None => Ok(()),
    }
}
