//! The credentials of one version of the directory: finds the bearer of a secret, and decides if
//! work that a caller began may go on.

use core::net::IpAddr;
use std::collections::HashMap;
use std::sync::Arc;

use ipnet::IpNet;

use crate::domain::caller::{AuthMethod, Caller, CallerAttributes, RoleSet};
use crate::domain::directory::credential::{
    AssertableAttribute, CredentialStatus, networks_contain, parse_network,
};
use crate::domain::directory::{ApiKey, Directory, SessionToken};
use crate::registry::sign_ins::RefusedCredential;

/// A key with what authentication needs of it, prepared.
struct KeyRecord {
    key: ApiKey,
    attributes: Arc<CallerAttributes>,
    /// The parsed networks. A network that cannot be parsed is omitted: it contains no address.
    networks: Vec<IpNet>,
}

impl KeyRecord {
    fn new(key: &ApiKey) -> Self {
        let networks = key.attributes.networks.iter().filter_map(|text| parse_network(text).ok());
        Self {
            networks: networks.collect(),
            attributes: Arc::new(key.caller_attributes()),
            key: key.clone(),
        }
    }

    /// Checks that the key is valid now and at this address. An unknown address is in no network.
    fn check(&self, now_ms: u64, peer: Option<IpAddr>) -> Result<(), &'static str> {
        match self.key.status(now_ms) {
            CredentialStatus::Active => {}
            CredentialStatus::Expired => return Err("the key has expired"),
            CredentialStatus::Revoked => return Err("the key was revoked"),
        }
        let is_within = || peer.is_some_and(|address| networks_contain(&self.networks, address));
        match self.key.attributes.networks.is_empty() || is_within() {
            true => Ok(()),
            false => Err("the key is not valid from this address"),
        }
    }
}

/// The credentials of one version of the directory, by the digests of their secrets.
#[derive(Default)]
pub(in crate::registry) struct CredentialIndex {
    keys: HashMap<String, KeyRecord>,
    key_digests: HashMap<String, String>,
    /// Ids of the keys that replaced others in a rotation, by the ids of the replaced ones.
    successors: HashMap<String, String>,
    tokens: HashMap<String, SessionToken>,
    token_digests: HashMap<String, String>,
}

impl CredentialIndex {
    pub(in crate::registry) fn new(directory: &Directory) -> Self {
        let keys = directory.keys.iter();
        let tokens = directory.session_tokens.iter();
        let replaced = |key: &ApiKey| Some((key.attributes.rotated_from.clone()?, key.id.clone()));
        Self {
            key_digests: keys.clone().map(|key| (key.id.clone(), key.digest.clone())).collect(),
            successors: keys.clone().filter_map(replaced).collect(),
            token_digests: tokens.clone().map(|t| (t.id.clone(), t.digest.clone())).collect(),
            keys: keys.map(|key| (key.digest.clone(), KeyRecord::new(key))).collect(),
            tokens: tokens.map(|token| (token.digest.clone(), token.clone())).collect(),
        }
    }

    fn key_by_id(&self, id: &str) -> Option<&KeyRecord> {
        self.keys.get(self.key_digests.get(id)?)
    }

    fn token_by_id(&self, id: &str) -> Option<&SessionToken> {
        self.tokens.get(self.token_digests.get(id)?)
    }

    /// Returns the key with this id, or the one that the session token with this id was made from.
    pub(super) fn key_of_credential(&self, id: &str) -> Option<&ApiKey> {
        let key_id = match id.starts_with(SessionToken::PREFIX) {
            true => self.token_by_id(id)?.key_id.as_str(),
            false => id,
        };
        self.key_by_id(key_id).map(|record| &record.key)
    }

    /// Returns the bearer of a key or session token, the attributes that it may assert, and the end
    /// of the credentials. `None` if no key or token has this digest.
    pub(super) fn find_bearer(
        &self,
        digest: &str,
        now_ms: u64,
        peer: Option<IpAddr>,
    ) -> Option<Result<Bearer, RefusedCredential>> {
        if let Some(record) = self.keys.get(digest) {
            let key = &record.key;
            let refused = |reason| RefusedCredential::new(key, &key.id, reason);
            return Some(record.check(now_ms, peer).map_err(refused).map(|()| Bearer {
                caller: caller_of(key, key.roles, record.attributes.clone()),
                may_assert: key.attributes.may_assert.clone(),
                expires_ms: key.expires_ms,
            }));
        }
        let token = self.tokens.get(digest)?;
        let record = self.key_by_id(&token.key_id)?;
        let key = &record.key;
        let refused = |reason| RefusedCredential::new(key, &token.id, reason);
        let checked = match token.status(now_ms) {
            CredentialStatus::Active => record.check(now_ms, peer),
            CredentialStatus::Expired => Err("the session token has expired"),
            CredentialStatus::Revoked => Err("the session token was revoked"),
        };
        Some(checked.map_err(refused).map(|()| Bearer {
            caller: caller_of(
                key,
                key.session_token_roles(),
                Arc::new(token.caller_attributes(key)),
            ),
            // A token is for one user and one session; only its key asserts others.
            may_assert: Vec::new(),
            expires_ms: Some(
                key.expires_ms.map_or(token.expires_ms, |ms| ms.min(token.expires_ms)),
            ),
        }))
    }

    /// Decides if work that a caller with a key or session token began may go on: waiting calls and
    /// runs. It may while the key is valid, or after a rotation the key that replaced it. A revoked
    /// key or token ends its own work and no other, whatever other keys the agent has. A token that
    /// expired ends nothing, because its work was accepted before and its key is valid still.
    pub(in crate::registry) fn check_work(
        &self,
        caller: &Caller,
        now_ms: u64,
    ) -> Result<(), WorkEnd> {
        let credential = caller.attributes.credential.as_deref();
        if let Some(token) = credential.and_then(|id| self.token_by_id(id)) {
            return match token.status(now_ms) {
                CredentialStatus::Revoked => Err(WorkEnd::new("session token", &token.id, true)),
                CredentialStatus::Active | CredentialStatus::Expired => {
                    self.check_key(&token.key_id, now_ms)
                }
            };
        }
        if let Some(id) = credential.filter(|id| self.key_digests.contains_key(*id)) {
            return self.check_key(id, now_ms);
        }
        // The work is older than the ids of credentials, or its token is no longer stored.
        match self.has_equal_key(caller, now_ms) {
            true => Ok(()),
            false => Err(WorkEnd::new("key", &format!("of agent \"{}\"", caller.agent), false)),
        }
    }

    /// Checks that a key is valid, or has expired and is replaced by one for which this is true.
    fn check_key(&self, id: &str, now_ms: u64) -> Result<(), WorkEnd> {
        let mut id = id;
        // Each key replaces at most one, so the steps are bounded by the number of keys.
        for _ in 0..=self.successors.len() {
            let status = self.key_by_id(id).map(|record| record.key.status(now_ms));
            match status {
                Some(CredentialStatus::Active) => return Ok(()),
                Some(CredentialStatus::Revoked) => return Err(WorkEnd::new("key", id, true)),
                Some(CredentialStatus::Expired) | None => match self.successors.get(id) {
                    Some(successor) => id = successor,
                    None => break,
                },
            }
        }
        Err(WorkEnd::new("key", id, false))
    }

    /// Returns true if a valid key has the caller's agent name and all its roles, and acts for its
    /// user or may assert one.
    fn has_equal_key(&self, caller: &Caller, now_ms: u64) -> bool {
        let credential = caller.attributes.credential.as_deref();
        let is_token = credential.is_some_and(|id| id.starts_with(SessionToken::PREFIX));
        self.keys.values().any(|record| {
            let key = &record.key;
            let roles = if is_token { key.session_token_roles() } else { key.roles };
            let user = caller.attributes.user.as_deref();
            let acts_for_user =
                user == key.attributes.user.as_deref() || key.may_assert(AssertableAttribute::User);
            key.is_active(now_ms)
                && key.project == caller.project
                && key.agent == caller.agent
                && caller.roles.is_subset(roles)
                && acts_for_user
        })
    }

    /// Returns the active keys.
    pub(in crate::registry) fn active_keys(&self, now_ms: u64) -> impl Iterator<Item = &ApiKey> {
        self.keys.values().map(|record| &record.key).filter(move |key| key.is_active(now_ms))
    }
}

fn caller_of(key: &ApiKey, roles: RoleSet, attributes: Arc<CallerAttributes>) -> Caller {
    let (project, agent) = (key.project.clone(), key.agent.clone());
    Caller { project, agent, roles, auth_method: AuthMethod::Key, attributes }
}

/// The bearer of valid credentials.
pub(super) struct Bearer {
    pub(super) caller: Caller,
    pub(super) may_assert: Vec<AssertableAttribute>,
    pub(super) expires_ms: Option<u64>,
}

/// The reason why work may not go on: the end of the credentials that it was begun with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkEnd(String);

impl WorkEnd {
    fn new(kind: &str, id: &str, is_revoked: bool) -> Self {
        let end = if is_revoked { "was revoked" } else { "has expired" };
        Self(format!("the {kind} {id} {end}"))
    }
}

impl std::fmt::Display for WorkEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
