//! The target of an administrative command: a data directory or a server. Both respond in the form
//! of HTTP v1, so that the output does not depend on the target.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::directory::{ApiKey, AuditEntry};
use toolcrib::registry::NewKey;
use toolcrib::{Caller, Engine, Role};

use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::{CommandContext, StorageArgs};
use crate::config::Config;

/// A key to create.
pub struct KeyRequest {
    pub agent: String,
    pub role: Role,
    pub allow: Vec<String>,
    pub rejoin: bool,
}

pub enum AdminTarget {
    Local { engine: Engine, caller: Caller, config: Box<Config> },
    Remote { client: ApiClient, project: Option<String> },
}

impl AdminTarget {
    /// Opens the target for a change. Creates the data directory if it does not exist.
    pub async fn open_or_create(
        context: &CommandContext,
        storage: &StorageArgs,
    ) -> Result<Self, CommandFailure> {
        Self::open(context, storage, true).await
    }

    /// Opens a target that must exist: a mistyped directory must not become a new store.
    pub async fn open_existing(
        context: &CommandContext,
        storage: &StorageArgs,
    ) -> Result<Self, CommandFailure> {
        Self::open(context, storage, false).await
    }

    async fn open(
        context: &CommandContext,
        storage: &StorageArgs,
        make: bool,
    ) -> Result<Self, CommandFailure> {
        let has_server = context.global.server.is_some();
        if context.server_from_flag && storage.is_set() {
            return Err(CommandFailure::usage("--server and --data-dir exclude each other"));
        }
        if has_server && !storage.is_set() {
            let project = context.global.project.clone();
            return Ok(Self::Remote { client: context.client()?, project });
        }
        let config = context.config(None, storage)?;
        let location = config.store_location()?;
        if !make && !location.may_exist() {
            let message = format!("there is nothing at {} yet", location.redacted());
            let hint = "name the directory with --data-dir DIR or --config FILE, a server with \
                        --server URL, or start the server once";
            return Err(CommandFailure::new(exit::FAILURE, "NOT_FOUND", message).hint(hint));
        }
        let engine = crate::bootstrap::open_admin_engine(&config).await?;
        let caller = Caller::local(context.project());
        Ok(Self::Local { engine, caller, config: Box::new(config) })
    }

    pub async fn create_key(&self, request: KeyRequest) -> Result<Value, CommandFailure> {
        let KeyRequest { agent, role, mut allow, rejoin } = request;
        match self {
            Self::Remote { client, project } => {
                let body = json!({
                    "agent": agent, "project": project, "role": role.as_str(), "allow": allow,
                    "rejoin": rejoin,
                });
                client.request_json(ApiRequest::post(&["v1", "keys"], body)).await
            }
            Self::Local { engine, caller, config } => {
                if role == Role::Agent {
                    allow.extend(config.auth.default_allow.iter().cloned());
                }
                let first = !engine.registry().has_keys();
                let project = caller.project.clone();
                let new = NewKey { project, agent, role, allow: allow.clone(), rejoin };
                let issued = engine
                    .admin()
                    .create_key(caller, new, toolcrib_transport::auth::generate_secret())
                    .await?;
                let mut created = key_body(&issued.key);
                created["key"] = issued.secret.into();
                created["allow"] = allow.into();
                created["first"] = first.into();
                Ok(created)
            }
        }
    }

    pub async fn keys(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "keys"])).await
            }
            Self::Local { engine, caller, .. } => {
                let keys: Vec<Value> = engine.admin().keys(caller)?.iter().map(key_body).collect();
                Ok(json!({ "keys": keys }))
            }
        }
    }

    pub async fn revoke_key(&self, id: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client, .. } => client
                .request_json(ApiRequest::new(Method::DELETE, &["v1", "keys", id]))
                .await
                .map(|_| ()),
            Self::Local { engine, caller, .. } => Ok(engine.admin().revoke_key(caller, id).await?),
        }
    }

    pub async fn set_rule(
        &self,
        agent: &str,
        pattern: &str,
        verdict: RuleVerdict,
    ) -> Result<Value, CommandFailure> {
        let body = json!({"agent": agent, "pattern": pattern, "verdict": verdict.as_str()});
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::new(Method::PUT, &["v1", "rules"]).body(body)).await
            }
            Self::Local { engine, caller, .. } => {
                let project = caller.project.clone();
                let (agent, pattern) = (agent.to_owned(), pattern.to_owned());
                engine
                    .admin()
                    .set_rule(caller, AccessRule { project, agent, pattern, verdict })
                    .await?;
                Ok(body)
            }
        }
    }

    pub async fn remove_rule(&self, agent: &str, pattern: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let ask = ApiRequest::new(Method::DELETE, &["v1", "rules"])
                    .query("agent", Some(agent))
                    .query("pattern", Some(pattern));
                client.request_json(ask).await.map(|_| ())
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.admin().remove_rule(caller, &caller.project, agent, pattern).await?)
            }
        }
    }

    pub async fn rules(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "rules"])).await
            }
            Self::Local { engine, caller, .. } => {
                let rules: Vec<Value> =
                    engine.admin().rules(caller)?.iter().map(rule_body).collect();
                Ok(json!({ "rules": rules }))
            }
        }
    }

    pub async fn audit(&self, limit: u32) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client
                    .request_json(ApiRequest::get(&["v1", "audit"]).query("limit", Some(limit)))
                    .await
            }
            Self::Local { engine, caller, .. } => {
                let log = engine.admin().audit_log(caller, limit as usize).await?;
                let log: Vec<Value> = log.iter().map(audit_entry_body).collect();
                Ok(json!({ "audit": log }))
            }
        }
    }
}

fn key_body(key: &ApiKey) -> Value {
    json!({
        "id": key.id,
        "project": key.project,
        "agent": key.agent,
        "role": key.role.as_str(),
        "created_at": key.created_ms / 1_000,
        "created_at_ms": key.created_ms,
        "revoked_at_ms": key.revoked_ms,
        "rejoin": key.rejoin,
    })
}

fn rule_body(rule: &AccessRule) -> Value {
    json!({"agent": rule.agent, "pattern": rule.pattern, "verdict": rule.verdict.as_str()})
}

fn audit_entry_body(entry: &AuditEntry) -> Value {
    json!({
        "at_ms": entry.at_ms,
        "agent": entry.agent,
        "action": entry.action,
        "subject": entry.subject,
        "reason": entry.reason,
    })
}
