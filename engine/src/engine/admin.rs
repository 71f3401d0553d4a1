//! Keys and rules: who is who, and who may call what. Changeable while the crib runs.

use sha2::{Digest, Sha256};

use super::{Engine, Inner, unavailable};
use crate::caller::{Caller, Role, Trust};
use crate::directory::{AuditEntry, Change, Key};
use crate::fault::{Code, Error};
use crate::policy::{Rule, Verdict, check_pattern};
use crate::tool::hex;

/// A key to make.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub project: String,
    pub agent: String,
    pub role: Role,
    /// What its agent may call from the start.
    pub allow: Vec<String>,
}

/// A new key with its secret, which is shown this once.
#[derive(Debug, Clone)]
pub struct ShownKey {
    pub key: Key,
    pub secret: String,
}

/// What is kept of a secret.
pub fn digest(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

impl Engine {
    /// Who a secret belongs to. The whole secret is hashed and the hash looked up, so how long
    /// this takes says nothing about how much of a guess was right.
    pub fn authenticate(&self, secret: &str) -> Option<Caller> {
        let catalog = self.inner.catalog();
        let Some(key) = catalog.key(&digest(secret)) else {
            return self.inner.recognise.as_ref()?.recognise(secret);
        };
        Some(Caller {
            project: key.project.clone(),
            agent: key.agent.clone(),
            role: key.role,
            trust: Trust::Key,
        })
    }

    /// Whether anybody ever needs a key, or a token, here.
    pub fn has_keys(&self) -> bool {
        self.inner.recognise.is_some() || self.inner.catalog().has_keys()
    }

    /// Whether this caller is one that a key stands for.
    pub(super) fn has_key_of(&self, caller: &Caller) -> bool {
        self.inner.catalog().has_key_of(caller)
    }

    /// Makes a key. `secret` is 32 random bytes or more, in some printable form.
    pub async fn create_key(
        &self,
        caller: &Caller,
        new: NewKey,
        secret: String,
    ) -> Result<ShownKey, Error> {
        self.require_admin(caller, Some(&new.project))?;
        check_word("project", &new.project)?;
        check_word("agent", &new.agent)?;
        if new.agent.contains('*') || new.project.contains('*') {
            // In a rule, * is every agent: no agent may be called so.
            return Err(invalid("a key's agent and project cannot have a * in them".to_owned()));
        }
        let inner = &self.inner;
        for pattern in &new.allow {
            check_pattern(pattern).map_err(invalid)?;
        }
        let now_ms = inner.clock.now_ms();
        let key = Key {
            id: inner.minter.text("key_", now_ms),
            digest: digest(&secret),
            project: new.project.clone(),
            agent: new.agent.clone(),
            role: new.role,
            created_ms: now_ms,
            revoked_ms: None,
        };
        for pattern in new.allow {
            let (project, agent) = (new.project.clone(), new.agent.clone());
            let rule = Rule { project, agent, pattern, verdict: Verdict::Allow };
            self.set_rule(caller, rule).await?;
        }
        let entry = inner.entry(caller, &key.project, "key.created", &key.id, new.role.as_str());
        inner.change(|_| Ok((Change::AddKey(key.clone()), Some(entry.clone())))).await?;
        Ok(ShownKey { key, secret })
    }

    /// The keys of the caller's project; of all projects for the operator at the machine.
    pub fn keys(&self, caller: &Caller) -> Result<Vec<Key>, Error> {
        self.require_admin(caller, None)?;
        let catalog = self.inner.catalog();
        let keys = catalog.directory().keys.iter();
        let all = caller.trust == Trust::Local;
        Ok(keys.filter(|key| all || key.project == caller.project).cloned().collect())
    }

    /// Makes a key useless.
    pub async fn revoke_key(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        let known = self.keys(caller)?.into_iter().find(|key| key.id == id);
        let Some(key) = known else {
            return Err(Error::refused(Code::NotFound, format!("there is no key \"{id}\"")));
        };
        let inner = &self.inner;
        let at_ms = inner.clock.now_ms();
        let entry = inner.entry(caller, &key.project, "key.revoked", id, key.role.as_str());
        let change = Change::RevokeKey { id: id.to_owned(), at_ms };
        inner.change(|_| Ok((change.clone(), Some(entry.clone())))).await
    }

    /// Allows or denies tools to an agent.
    pub async fn set_rule(&self, caller: &Caller, rule: Rule) -> Result<(), Error> {
        self.require_admin(caller, Some(&rule.project))?;
        check_pattern(&rule.pattern).map_err(invalid)?;
        check_word("agent", &rule.agent)?;
        if rule.agent.contains('*') && rule.agent != "*" {
            // Names of agents are not patterns: such a rule would hold for nobody.
            return Err(invalid("agent must be the name of one agent, or * for all".to_owned()));
        }
        let inner = &self.inner;
        let what = format!("{} {} for {}", rule.verdict.as_str(), rule.pattern, rule.agent);
        let entry = inner.entry(caller, &rule.project, "rule.set", &rule.pattern, &what);
        inner.change(|_| Ok((Change::PutRule(rule.clone()), Some(entry.clone())))).await
    }

    /// Takes a rule back.
    pub async fn remove_rule(
        &self,
        caller: &Caller,
        project: &str,
        agent: &str,
        pattern: &str,
    ) -> Result<(), Error> {
        self.require_admin(caller, Some(project))?;
        let inner = &self.inner;
        let entry = inner.entry(caller, project, "rule.removed", pattern, agent);
        inner
            .change(|catalog| {
                let is_it =
                    |r: &&Rule| r.project == project && r.agent == agent && r.pattern == pattern;
                if catalog.directory().rules.iter().find(is_it).is_none() {
                    let message = format!("agent \"{agent}\" has no rule on \"{pattern}\"");
                    return Err(Error::refused(Code::NotFound, message));
                }
                let change = Change::DropRule {
                    project: project.to_owned(),
                    agent: agent.to_owned(),
                    pattern: pattern.to_owned(),
                };
                Ok((change, Some(entry.clone())))
            })
            .await
    }

    /// The rules of the caller's project.
    pub fn rules(&self, caller: &Caller) -> Result<Vec<Rule>, Error> {
        self.require_admin(caller, None)?;
        let catalog = self.inner.catalog();
        let rules = catalog.directory().rules.iter();
        Ok(rules.filter(|rule| rule.project == caller.project).cloned().collect())
    }

    /// What was denied and what was changed, newest first.
    pub async fn audit_log(&self, caller: &Caller, limit: usize) -> Result<Vec<AuditEntry>, Error> {
        self.require_admin(caller, None)?;
        let project = Some(caller.project.clone());
        self.inner.store.audit_log(project, limit).await.map_err(unavailable)
    }

    /// An admin's key rules its own project; only the operator at the machine rules them all.
    pub(super) fn require_admin(
        &self,
        caller: &Caller,
        project: Option<&str>,
    ) -> Result<(), Error> {
        let own = project.is_none_or(|project| project == caller.project);
        if caller.may_administer() && (own || caller.trust == Trust::Local) {
            return Ok(());
        }
        let message = if caller.may_administer() {
            format!("this key administers project \"{}\" only", caller.project)
        } else {
            format!("a key with the role {} cannot do this", caller.role.as_str())
        };
        Err(Error::refused(Code::PermissionDenied, message))
    }
}

impl Inner {
    pub(super) fn entry(
        &self,
        caller: &Caller,
        project: &str,
        action: &str,
        subject: &str,
        reason: &str,
    ) -> AuditEntry {
        AuditEntry {
            at_ms: self.clock.now_ms(),
            project: project.to_owned(),
            agent: caller.agent.clone(),
            action: action.to_owned(),
            subject: subject.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

fn invalid(message: String) -> Error {
    Error::refused(Code::ValidationError, message)
}

/// Names of projects and agents: short, visible, no spaces.
pub(super) fn check_word(field: &str, word: &str) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.@:*".contains(c);
    if (1..=64).contains(&word.len()) && word.chars().all(plain) {
        return Ok(());
    }
    Err(invalid(format!("{field} must be 1 to 64 letters, digits, '_', '-', '.', '@' or ':'")))
}
