//! API keys and access rules: they identify callers and decide which tools a caller may call. Both
//! can be changed while the server runs.

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::domain::access_rules::{AccessRule, RuleVerdict, check_pattern};
use crate::domain::caller::{AuthMethod, Caller, DEFAULT_PROJECT, Role};
use crate::domain::directory::{ApiKey, AuditEntry, DirectoryChange};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::ports::core::from_store_error;
use crate::registry::{Admin, Registry};

/// A request to create an API key.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// Project that the key gives access to.
    pub project: String,
    /// Agent that the key authenticates.
    pub agent: String,
    /// Role that determines the agent's permissions.
    pub role: Role,
    /// Patterns of the tools that the key's agent may call from the start.
    pub allow: Vec<String>,
    /// False if requests of the agent never join an earlier call.
    pub rejoin: bool,
}

/// A new key with its secret. The secret is returned only here; the store has its digest.
#[derive(Debug, Clone)]
pub struct CreatedKey {
    /// The stored key, without its secret.
    pub key: ApiKey,
    /// The secret that authenticates the agent.
    pub secret: String,
}

/// Returns the SHA-256 digest of a secret, the only form in which it is stored.
pub fn secret_digest(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

/// The operator token of this server, as the registry knows it.
#[derive(Debug, Clone)]
pub struct OperatorCredential {
    digest: String,
    token_file: String,
}

impl OperatorCredential {
    /// Creates the credential of a token. `token_file` is the file that holds the token; refusals
    /// name it to callers without credentials.
    pub fn new(token: &str, token_file: impl Into<String>) -> Self {
        Self { digest: secret_digest(token), token_file: token_file.into() }
    }

    /// Compares a digest with the token's in constant time.
    fn matches(&self, digest: &str) -> bool {
        let (own, other) = (self.digest.as_bytes(), digest.as_bytes());
        let differences = own.iter().zip(other).fold(0, |bits, (a, b)| bits | (a ^ b));
        own.len() == other.len() && std::hint::black_box(differences) == 0
    }
}

impl Registry {
    /// Returns the caller that a secret authenticates. The whole secret is hashed and the digest
    /// looked up, so the time this takes reveals nothing about how much of a guess was right.
    pub fn authenticate(&self, secret: &str) -> Option<Caller> {
        let (catalog, digest) = (self.catalog(), secret_digest(secret));
        if self.operator.as_ref().is_some_and(|operator| operator.matches(&digest)) {
            return Some(Caller::operator(DEFAULT_PROJECT));
        }
        let Some(key) = catalog.key(&digest) else {
            return self.authenticator.as_ref()?.authenticate(secret);
        };
        let caller = Caller::new(&key.project, &key.agent, key.role, AuthMethod::Key);
        Some(caller.with_credential(Some(key.id.clone())))
    }

    /// Returns true if callers must present an API key or a token.
    pub fn has_keys(&self) -> bool {
        self.authenticator.is_some() || self.catalog().has_keys()
    }

    /// Returns true if an active key authenticates this caller.
    pub(crate) fn has_active_key(&self, caller: &Caller) -> bool {
        self.catalog().has_active_key(caller)
    }

    /// Requires the operator or a key with the admin role, for what decides who may do what: keys,
    /// rules, upstreams, and the audit log of all that.
    pub(crate) fn require_operator(
        &self,
        caller: &Caller,
        project: Option<&str>,
    ) -> Result<(), Error> {
        if caller.auth_method != AuthMethod::Anonymous {
            return self.require_admin(caller, project);
        }
        let file = self.operator.as_ref().map(|operator| operator.token_file.as_str());
        let place = file.map_or_else(String::new, |file| format!(" (in {file})"));
        let message = format!(
            "this needs the operator token{place} or an admin key: send Authorization: Bearer TOKEN"
        );
        let fault = Fault::new(Code::Unauthenticated, message).without_side_effect();
        Err(fault.with_detail(json!({ "operator_token_file": file })).into())
    }

    /// Requires full access to a project. A key with the admin role has it for its own project; a
    /// caller without a key, for all of them.
    pub(crate) fn require_admin(
        &self,
        caller: &Caller,
        project: Option<&str>,
    ) -> Result<(), Error> {
        let is_own_project = project.is_none_or(|project| project == caller.project);
        if caller.may_administer() && (is_own_project || caller.spans_projects()) {
            return Ok(());
        }
        let message = if caller.may_administer() {
            format!("this key administers project \"{}\" only", caller.project)
        } else {
            format!("a key with the role {} cannot do this", caller.roles)
        };
        Err(Error::refused(Code::PermissionDenied, message))
    }
}

impl Registry {
    pub(crate) fn audit_entry(
        &self,
        caller: &Caller,
        project: &str,
        action: &str,
        subject: &str,
        reason: &str,
    ) -> AuditEntry {
        AuditEntry {
            at_ms: self.core.clock.wall_ms(),
            project: project.to_owned(),
            agent: caller.agent.clone(),
            action: action.to_owned(),
            subject: subject.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

impl Admin {
    /// Creates a key. `secret` holds at least 32 random bytes in a printable form.
    pub async fn create_key(
        &self,
        caller: &Caller,
        new: NewKey,
        secret: String,
    ) -> Result<CreatedKey, Error> {
        self.registry.require_operator(caller, Some(&new.project))?;
        check_identifier("project", &new.project)?;
        check_identifier("agent", &new.agent)?;
        if new.agent.contains('*') || new.project.contains('*') {
            // In a rule, `*` stands for every agent, so no agent can have it in its name.
            return Err(invalid("a key's agent and project cannot have a * in them".to_owned()));
        }
        for pattern in &new.allow {
            check_pattern(pattern).map_err(invalid)?;
        }
        let now_ms = self.core.clock.wall_ms();
        let key = ApiKey {
            id: self.core.id_generator.next_id("key_", now_ms),
            digest: secret_digest(&secret),
            project: new.project.clone(),
            agent: new.agent.clone(),
            role: new.role,
            created_ms: now_ms,
            revoked_ms: None,
            rejoin: new.rejoin,
        };
        for pattern in new.allow {
            let (project, agent) = (new.project.clone(), new.agent.clone());
            let rule = AccessRule { project, agent, pattern, verdict: RuleVerdict::Allow };
            self.set_rule(caller, rule).await?;
        }
        let entry = self.registry.audit_entry(
            caller,
            &key.project,
            "key.created",
            &key.id,
            new.role.as_str(),
        );
        self.registry
            .change_directory(|_| Ok((DirectoryChange::AddKey(key.clone()), Some(entry.clone()))))
            .await?;
        Ok(CreatedKey { key, secret })
    }

    /// Returns the keys of the caller's project, or of all projects for the local operator.
    pub fn keys(&self, caller: &Caller) -> Result<Vec<ApiKey>, Error> {
        self.registry.require_operator(caller, None)?;
        let catalog = self.registry.catalog();
        let keys = catalog.directory().keys.iter();
        let all = caller.spans_projects();
        Ok(keys.filter(|key| all || key.project == caller.project).cloned().collect())
    }

    /// Revokes a key.
    pub async fn revoke_key(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        let existing = self.keys(caller)?.into_iter().find(|key| key.id == id);
        let Some(key) = existing else {
            let message = format!("there is no key \"{id}\"");
            return Err(Error::not_found(message, "toolcrib keys ls lists the keys"));
        };
        let at_ms = self.core.clock.wall_ms();
        let entry =
            self.registry.audit_entry(caller, &key.project, "key.revoked", id, key.role.as_str());
        let change = DirectoryChange::RevokeKey { id: id.to_owned(), at_ms };
        self.registry.change_directory(|_| Ok((change.clone(), Some(entry.clone())))).await
    }

    /// Allows or denies tools to an agent.
    pub async fn set_rule(&self, caller: &Caller, rule: AccessRule) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(&rule.project))?;
        check_pattern(&rule.pattern).map_err(invalid)?;
        check_identifier("agent", &rule.agent)?;
        if rule.agent.contains('*') && rule.agent != "*" {
            // Agent names are not patterns, so such a rule would match no agent.
            return Err(invalid("agent must be the name of one agent, or * for all".to_owned()));
        }
        let description = format!("{} {} for {}", rule.verdict.as_str(), rule.pattern, rule.agent);
        let entry = self.registry.audit_entry(
            caller,
            &rule.project,
            "rule.set",
            &rule.pattern,
            &description,
        );
        self.registry
            .change_directory(|_| Ok((DirectoryChange::PutRule(rule.clone()), Some(entry.clone()))))
            .await
    }

    /// Removes a rule.
    pub async fn remove_rule(
        &self,
        caller: &Caller,
        project: &str,
        agent: &str,
        pattern: &str,
    ) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(project))?;
        let entry = self.registry.audit_entry(caller, project, "rule.removed", pattern, agent);
        self.registry
            .change_directory(|catalog| {
                let is_it = |r: &&AccessRule| {
                    r.project == project && r.agent == agent && r.pattern == pattern
                };
                if catalog.directory().rules.iter().find(is_it).is_none() {
                    let message = format!("agent \"{agent}\" has no rule on \"{pattern}\"");
                    return Err(Error::not_found(message, "toolcrib rules lists the rules"));
                }
                let change = DirectoryChange::DropRule {
                    project: project.to_owned(),
                    agent: agent.to_owned(),
                    pattern: pattern.to_owned(),
                };
                Ok((change, Some(entry.clone())))
            })
            .await
    }

    /// Returns the rules of the caller's project.
    pub fn rules(&self, caller: &Caller) -> Result<Vec<AccessRule>, Error> {
        self.registry.require_operator(caller, None)?;
        let catalog = self.registry.catalog();
        let rules = catalog.directory().rules.iter();
        Ok(rules.filter(|rule| rule.project == caller.project).cloned().collect())
    }

    /// Returns denied requests and administrative changes, newest first.
    pub async fn audit_log(&self, caller: &Caller, limit: usize) -> Result<Vec<AuditEntry>, Error> {
        self.registry.require_operator(caller, None)?;
        let project = Some(caller.project.clone());
        self.core.store.audit_log(project, limit).await.map_err(from_store_error)
    }
}

fn invalid(message: String) -> Error {
    Error::refused(Code::ValidationError, message)
}

/// Checks the name of a project or an agent: short, visible ASCII, no spaces.
pub(crate) fn check_identifier(field: &str, word: &str) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.@:*".contains(c);
    if (1..=64).contains(&word.len()) && word.chars().all(plain) {
        return Ok(());
    }
    Err(invalid(format!("{field} must be 1 to 64 letters, digits, '_', '-', '.', '@' or ':'")))
}
