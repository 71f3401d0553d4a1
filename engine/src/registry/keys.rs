//! API keys, which identify callers. They can be changed while the server runs.

use serde_json::json;

use crate::domain::access_rules::{AccessRule, RuleAction, RuleVerdict, check_pattern};
use crate::domain::caller::{AuthMethod, Caller, LOCAL_AGENT, Role, RoleSet};
use crate::domain::directory::credential::{check_attribute_name, parse_network};
use crate::domain::directory::{ApiKey, DirectoryChange, KeyAttributes};
use crate::domain::fault::{Code, Error, Fault};
use crate::registry::credentials::secret_digest;
use crate::registry::{Admin, Catalog, Registry};

/// Maximum number of entries in a list of a key, such as its groups.
const MAX_LIST_LENGTH: usize = 64;

/// Maximum time that a key stays valid after its rotation.
const MAX_OVERLAP_MS: u64 = 31 * 24 * 3_600_000;

/// Time for which ended session tokens stay listed.
const TOKEN_RETENTION_MS: u64 = 7 * 24 * 3_600_000;

/// A request to create an API key.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// Project that the key gives access to.
    pub project: String,
    /// Agent that the key authenticates.
    pub agent: String,
    /// Roles that determine the agent's permissions.
    pub roles: RoleSet,
    /// Groups, user, environment and limits of the key's bearer.
    pub attributes: KeyAttributes,
    /// Time from which the key is no longer valid, in Unix milliseconds.
    pub expires_ms: Option<u64>,
    /// Patterns of the tools that the key's agent may call from the start.
    pub allow: Vec<String>,
    /// False if requests of the agent never join an earlier call.
    pub rejoin: bool,
}

impl NewKey {
    /// Returns a request for a key without attributes and without an end.
    pub fn new(
        project: impl Into<String>,
        agent: impl Into<String>,
        roles: impl Into<RoleSet>,
    ) -> Self {
        Self {
            project: project.into(),
            agent: agent.into(),
            roles: roles.into(),
            attributes: KeyAttributes::default(),
            expires_ms: None,
            allow: Vec::new(),
            rejoin: true,
        }
    }
}

/// A new key with its secret. The secret is returned only here; the store has its digest.
#[derive(Debug, Clone)]
pub struct CreatedKey {
    /// The stored key, without its secret.
    pub key: ApiKey,
    /// The secret that authenticates the agent.
    pub secret: String,
}

impl Registry {
    /// Requires the operator or an admin key. Used for keys, rules, upstreams and the audit log.
    pub(crate) fn require_operator(
        &self,
        caller: &Caller,
        project: Option<&str>,
    ) -> Result<(), Error> {
        if caller.auth_method != AuthMethod::Anonymous {
            return self.require_admin(caller, project);
        }
        let file = self.credentials.operator_token_file();
        let place = file.map_or_else(String::new, |file| format!(" (in {file})"));
        let message = format!(
            "this needs the operator token{place} or an admin key: send Authorization: Bearer TOKEN"
        );
        let fault = Fault::new(Code::Unauthenticated, message).without_side_effect();
        Err(fault.with_detail(json!({ "operator_token_file": file })).into())
    }

    /// Requires the operator or a key with the role auditor or admin. Used for reading keys, rules
    /// and the audit log.
    pub(crate) fn require_auditor(&self, caller: &Caller) -> Result<(), Error> {
        match caller.auth_method != AuthMethod::Anonymous && caller.may_audit() {
            true => Ok(()),
            false => self.require_operator(caller, None),
        }
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
            return self.check_action(caller, RuleAction::Administer, "");
        }
        let message = if caller.may_administer() {
            format!("this key administers project \"{}\" only", caller.project)
        } else {
            format!("a key with the role {} cannot do this", caller.roles)
        };
        Err(Error::refused(Code::PermissionDenied, message))
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
        let now_ms = self.registry.credentials.now_ms();
        check_new_key(&new, now_ms)?;
        self.check_first_key(&self.registry.catalog(), &new)?;
        let key = ApiKey {
            id: self.core.id_generator.next_id("key_", now_ms),
            digest: secret_digest(&secret),
            project: new.project.clone(),
            agent: new.agent.clone(),
            roles: new.roles,
            attributes: new.attributes.clone(),
            created_ms: now_ms,
            expires_ms: new.expires_ms,
            revoked_ms: None,
            rejoin: new.rejoin,
        };
        for pattern in &new.allow {
            let rule = AccessRule::short(&new.project, &new.agent, pattern, RuleVerdict::Allow);
            self.set_rule(caller, rule).await?;
        }
        let roles = key.roles.to_string();
        let entry = self.registry.audit_entry(caller, &key.project, "key.created", &key.id, &roles);
        self.registry
            .change_directory(|catalog| {
                self.check_first_key(catalog, &new)?;
                Ok((DirectoryChange::AddKey(key.clone()), Some(entry.clone())))
            })
            .await?;
        Ok(CreatedKey { key, secret })
    }

    /// Requires that the first key administers and has no end. From the first key on every request
    /// needs one, so any other first key would leave no caller that can make more.
    fn check_first_key(&self, catalog: &Catalog, new: &NewKey) -> Result<(), Error> {
        let now_ms = self.registry.credentials.now_ms();
        let is_first = !self.registry.credentials.accepts_issuer_tokens()
            && catalog.credentials.active_keys(now_ms).next().is_none();
        if !is_first || new.roles.contains(Role::Admin) && new.expires_ms.is_none() {
            return Ok(());
        }
        let command = "toolcrib keys create --agent operator --role admin";
        let problem = match new.roles.contains(Role::Admin) {
            true => "must not expire",
            false => "must have the role admin",
        };
        let message = format!(
            "the first key {problem}: from then on every request needs a key, and only an admin \
             key can make others. Run this first: {command}"
        );
        let fault = Fault::new(Code::Conflict, message).without_side_effect();
        Err(fault.with_detail(json!({ "fix": command })).into())
    }

    /// Returns the keys of the caller's project, or of all projects for the local operator.
    pub fn keys(&self, caller: &Caller) -> Result<Vec<ApiKey>, Error> {
        self.registry.require_auditor(caller)?;
        let catalog = self.registry.catalog();
        let keys = catalog.directory().keys.iter();
        let all = caller.spans_projects();
        Ok(keys.filter(|key| all || key.project == caller.project).cloned().collect())
    }

    fn find_key(&self, caller: &Caller, id: &str) -> Result<ApiKey, Error> {
        self.registry.require_operator(caller, None)?;
        let existing = self.keys(caller)?.into_iter().find(|key| key.id == id);
        existing.ok_or_else(|| {
            let excerpt: String = id.chars().take(80).collect();
            let message = format!("there is no key \"{excerpt}\"");
            Error::not_found(message, "toolcrib keys ls lists the keys")
        })
    }

    /// Replaces a key by one with the same rights and a new secret. The old one stays valid for
    /// `overlap_ms`, and so do the session tokens that were made from it.
    pub async fn rotate_key(
        &self,
        caller: &Caller,
        id: &str,
        overlap_ms: u64,
        secret: String,
    ) -> Result<CreatedKey, Error> {
        let old = self.find_key(caller, id)?;
        if overlap_ms > MAX_OVERLAP_MS {
            let most_s = MAX_OVERLAP_MS / 1_000;
            return Err(invalid(format!("overlap_s must be from 0 to {most_s} (31 days)")));
        }
        let now_ms = self.registry.credentials.now_ms();
        let key = ApiKey {
            id: self.core.id_generator.next_id("key_", now_ms),
            digest: secret_digest(&secret),
            attributes: KeyAttributes { rotated_from: Some(old.id.clone()), ..old.attributes },
            created_ms: now_ms,
            ..old
        };
        let reason = format!("replaced by {}, overlap {} s", key.id, overlap_ms / 1_000);
        let entry = self.registry.audit_entry(caller, &key.project, "key.rotated", id, &reason);
        self.registry
            .change_directory(|catalog| {
                let is_active = |key: &ApiKey| key.id == id && key.is_active(now_ms);
                if !catalog.directory().keys.iter().any(is_active) {
                    let message = format!("\"{id}\" is no longer valid; create a new key");
                    return Err(Error::refused(Code::Conflict, message));
                }
                let change = DirectoryChange::RotateKey {
                    id: id.to_owned(),
                    ends_ms: now_ms.saturating_add(overlap_ms),
                    successor: Box::new(key.clone()),
                };
                Ok((change, Some(entry.clone())))
            })
            .await?;
        Ok(CreatedKey { key, secret })
    }

    /// Revokes a key, and with it its session tokens. Refuses to revoke the last admin key while
    /// other keys are valid: no key could then administer the server.
    pub async fn revoke_key(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        let key = self.find_key(caller, id)?;
        let at_ms = self.registry.credentials.now_ms();
        let roles = key.roles.to_string();
        let entry = self.registry.audit_entry(caller, &key.project, "key.revoked", id, &roles);
        let change = DirectoryChange::RevokeKey { id: id.to_owned(), at_ms };
        self.registry
            .change_directory(|catalog| {
                let others = catalog.credentials.active_keys(at_ms).filter(|other| other.id != id);
                let has_others = others.count() > 0;
                let is_admin = key.is_active(at_ms) && key.roles.contains(Role::Admin);
                if is_admin && has_others && !self.registry.credentials.has_admin_key(Some(id)) {
                    let command = format!("toolcrib keys rotate {id} --overlap 0");
                    let message = format!(
                        "this is the last admin key, and other keys are valid: replace it \
                         ({command}), make another admin key first, or revoke the others first"
                    );
                    let fault = Fault::new(Code::Conflict, message).without_side_effect();
                    return Err(fault.with_detail(json!({ "fix": command })).into());
                }
                Ok((change.clone(), Some(entry.clone())))
            })
            .await
    }

    /// Marks keys and session tokens that have expired as revoked, and records the time of day
    /// while any credentials have an end.
    pub(crate) async fn expire_credentials(&self) -> Result<(), Error> {
        let (catalog, now_ms) = (self.registry.catalog(), self.registry.credentials.now_ms());
        let directory = catalog.directory();
        let open_keys = || directory.keys.iter().filter(|key| key.revoked_ms.is_none());
        let has_end =
            open_keys().any(|k| k.expires_ms.is_some()) || !directory.session_tokens.is_empty();
        if !has_end {
            return Ok(());
        }
        for key in open_keys().filter(|key| key.expires_ms.is_some_and(|ms| now_ms >= ms)) {
            let system = Caller::new(&key.project, LOCAL_AGENT, Role::Admin, AuthMethod::Local);
            let entry =
                self.registry.audit_entry(&system, &key.project, "key.expired", &key.id, "");
            let change = DirectoryChange::RevokeKey { id: key.id.clone(), at_ms: now_ms };
            self.registry.change_directory(|_| Ok((change.clone(), Some(entry.clone())))).await?;
        }
        let delete_before_ms = now_ms.saturating_sub(TOKEN_RETENTION_MS);
        let is_due = |token: &crate::domain::directory::SessionToken| match token.revoked_ms {
            None => now_ms >= token.expires_ms,
            Some(revoked_ms) => revoked_ms < delete_before_ms,
        };
        if directory.session_tokens.iter().any(is_due) {
            let change = DirectoryChange::ExpireSessionTokens { at_ms: now_ms, delete_before_ms };
            self.registry.change_directory(|_| Ok((change.clone(), None))).await?;
        }
        self.registry.credentials.record_time_if_due().await
    }
}

pub(crate) fn invalid(message: String) -> Error {
    Error::refused(Code::ValidationError, message)
}

/// Checks a list of a request. An empty one is refused: it could be read as nothing or as all.
pub(super) fn check_list<T>(field: &str, list: &[T]) -> Result<(), Error> {
    match list.len() {
        0 => Err(invalid(format!("{field} must not be an empty list; leave it out for no limit"))),
        1..=MAX_LIST_LENGTH => Ok(()),
        _ => Err(invalid(format!("{field} must have at most {MAX_LIST_LENGTH} entries"))),
    }
}

fn check_new_key(new: &NewKey, now_ms: u64) -> Result<(), Error> {
    check_identifier("project", &new.project)?;
    check_identifier("agent", &new.agent)?;
    if new.agent.contains('*') || new.project.contains('*') {
        // In a rule, `*` stands for every agent, so no agent can have it in its name.
        return Err(invalid("a key's agent and project cannot have a * in them".to_owned()));
    }
    if new.roles.is_empty() {
        return Err(invalid("roles must name at least one role".to_owned()));
    }
    let KeyAttributes { groups, user, environment, tools, networks, .. } = &new.attributes;
    if groups.len() > MAX_LIST_LENGTH || networks.len() > MAX_LIST_LENGTH {
        let message = format!("groups and networks have at most {MAX_LIST_LENGTH} entries each");
        return Err(invalid(message));
    }
    let names = groups.iter().map(|group| ("groups", group));
    let names = names.chain(user.iter().map(|user| ("user", user)));
    for (field, name) in names.chain(environment.iter().map(|name| ("environment", name))) {
        check_attribute_name(field, name).map_err(invalid)?;
    }
    tools.as_ref().map_or(Ok(()), |tools| check_list("tools", tools))?;
    for pattern in new.allow.iter().chain(tools.iter().flatten()) {
        check_pattern(pattern).map_err(invalid)?;
    }
    for network in networks {
        parse_network(network).map_err(invalid)?;
    }
    match new.expires_ms {
        Some(expires_ms) if expires_ms <= now_ms => {
            Err(invalid("expires_at must be in the future".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Checks the name of a project or an agent: short, visible ASCII, no spaces.
pub(crate) fn check_identifier(field: &str, word: &str) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.@:*".contains(c);
    if (1..=64).contains(&word.len()) && word.chars().all(plain) {
        return Ok(());
    }
    Err(invalid(format!("{field} must be 1 to 64 letters, digits, '_', '-', '.', '@' or ':'")))
}
