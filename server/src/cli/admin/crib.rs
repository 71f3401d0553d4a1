//! The target of an administrative command: a data directory or a server. Both respond in the form
//! of HTTP v1, so that the output does not depend on the target.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::directory::{AuditEntry, Key};
use toolcrib::engine::NewKey;
use toolcrib::policy::{Rule, Verdict};
use toolcrib::{Caller, Engine, Role};

use crate::cli::client::{Ask, Client};
use crate::cli::failure::{Failure, exit};
use crate::cli::{Context, Place};
use crate::config::Config;

/// A key to create.
pub struct KeyWanted {
    pub agent: String,
    pub role: Role,
    pub allow: Vec<String>,
}

pub enum Crib {
    Local { engine: Engine, caller: Caller, config: Box<Config> },
    Remote { client: Client, project: Option<String> },
}

impl Crib {
    /// Opens the target for a change. Creates the data directory if it does not exist.
    pub async fn to_change(context: &Context, place: &Place) -> Result<Self, Failure> {
        Self::open(context, place, true).await
    }

    /// Opens a target that must exist: a mistyped directory must not become a new store.
    pub async fn to_look(context: &Context, place: &Place) -> Result<Self, Failure> {
        Self::open(context, place, false).await
    }

    async fn open(context: &Context, place: &Place, make: bool) -> Result<Self, Failure> {
        let server_named = context.global.server.is_some();
        if context.server_typed && place.is_named() {
            return Err(Failure::usage("--server and --data-dir exclude each other"));
        }
        if server_named && !place.is_named() {
            let project = context.global.project.clone();
            return Ok(Self::Remote { client: context.client()?, project });
        }
        let config = context.config(None, place)?;
        let kept = config.kept()?;
        if !make && !kept.may_be_there() {
            let message = format!("there is nothing at {} yet", kept.shown());
            let hint = "name the place with --data-dir DIR or --config FILE, a server with \
                        --server URL, or start the server once";
            return Err(Failure::new(exit::FAILURE, "NOT_FOUND", message).hint(hint));
        }
        let engine = crate::assemble::operator(&config).await?;
        let caller = Caller::local(context.project());
        Ok(Self::Local { engine, caller, config: Box::new(config) })
    }

    pub async fn create_key(&self, wanted: KeyWanted) -> Result<Value, Failure> {
        let KeyWanted { agent, role, mut allow } = wanted;
        match self {
            Self::Remote { client, project } => {
                let body = json!({
                    "agent": agent, "project": project, "role": role.as_str(), "allow": allow,
                });
                client.ask(Ask::post(&["v1", "keys"], body)).await
            }
            Self::Local { engine, caller, config } => {
                if role == Role::Agent {
                    allow.extend(config.auth.default_allow.iter().cloned());
                }
                let first = !engine.has_keys();
                let project = caller.project.clone();
                let new = NewKey { project, agent, role, allow: allow.clone() };
                let shown = engine.create_key(caller, new, crate::auth::new_secret()).await?;
                let mut made = key_body(&shown.key);
                made["key"] = shown.secret.into();
                made["allow"] = allow.into();
                made["first"] = first.into();
                Ok(made)
            }
        }
    }

    pub async fn keys(&self) -> Result<Value, Failure> {
        match self {
            Self::Remote { client, .. } => client.ask(Ask::get(&["v1", "keys"])).await,
            Self::Local { engine, caller, .. } => {
                let keys: Vec<Value> = engine.keys(caller)?.iter().map(key_body).collect();
                Ok(json!({ "keys": keys }))
            }
        }
    }

    pub async fn revoke_key(&self, id: &str) -> Result<(), Failure> {
        match self {
            Self::Remote { client, .. } => {
                client.ask(Ask::new(Method::DELETE, &["v1", "keys", id])).await.map(|_| ())
            }
            Self::Local { engine, caller, .. } => Ok(engine.revoke_key(caller, id).await?),
        }
    }

    pub async fn set_rule(
        &self,
        agent: &str,
        pattern: &str,
        verdict: Verdict,
    ) -> Result<Value, Failure> {
        let body = json!({"agent": agent, "pattern": pattern, "verdict": verdict.as_str()});
        match self {
            Self::Remote { client, .. } => {
                client.ask(Ask::new(Method::PUT, &["v1", "rules"]).body(body)).await
            }
            Self::Local { engine, caller, .. } => {
                let project = caller.project.clone();
                let (agent, pattern) = (agent.to_owned(), pattern.to_owned());
                engine.set_rule(caller, Rule { project, agent, pattern, verdict }).await?;
                Ok(body)
            }
        }
    }

    pub async fn remove_rule(&self, agent: &str, pattern: &str) -> Result<(), Failure> {
        match self {
            Self::Remote { client, .. } => {
                let ask = Ask::new(Method::DELETE, &["v1", "rules"])
                    .query("agent", Some(agent))
                    .query("pattern", Some(pattern));
                client.ask(ask).await.map(|_| ())
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.remove_rule(caller, &caller.project, agent, pattern).await?)
            }
        }
    }

    pub async fn rules(&self) -> Result<Value, Failure> {
        match self {
            Self::Remote { client, .. } => client.ask(Ask::get(&["v1", "rules"])).await,
            Self::Local { engine, caller, .. } => {
                let rules: Vec<Value> = engine.rules(caller)?.iter().map(rule_body).collect();
                Ok(json!({ "rules": rules }))
            }
        }
    }

    pub async fn audit(&self, limit: u32) -> Result<Value, Failure> {
        match self {
            Self::Remote { client, .. } => {
                client.ask(Ask::get(&["v1", "audit"]).query("limit", Some(limit))).await
            }
            Self::Local { engine, caller, .. } => {
                let log = engine.audit_log(caller, limit as usize).await?;
                let log: Vec<Value> = log.iter().map(entry_body).collect();
                Ok(json!({ "audit": log }))
            }
        }
    }
}

fn key_body(key: &Key) -> Value {
    json!({
        "id": key.id,
        "project": key.project,
        "agent": key.agent,
        "role": key.role.as_str(),
        "created_at": key.created_ms / 1_000,
        "created_at_ms": key.created_ms,
        "revoked_at_ms": key.revoked_ms,
    })
}

fn rule_body(rule: &Rule) -> Value {
    json!({"agent": rule.agent, "pattern": rule.pattern, "verdict": rule.verdict.as_str()})
}

fn entry_body(entry: &AuditEntry) -> Value {
    json!({
        "at_ms": entry.at_ms,
        "agent": entry.agent,
        "action": entry.action,
        "subject": entry.subject,
        "reason": entry.reason,
    })
}
