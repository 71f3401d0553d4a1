//! Operations on rules, at a server or on a data directory. Both respond in the form of HTTP v1.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::domain::access_rules::RuleVerdict;
use toolcrib::registry::rules::{self, starter_set};

use crate::cli::admin::target::AdminTarget;
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;

impl AdminTarget {
    /// Sets a rule of the short form.
    pub async fn set_short_rule(
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
                let rule = rules::parse_rule(&caller.project, None, &body, "")?;
                let written = rules::render_rule(&rule);
                engine.admin().set_rule(caller, rule).await?;
                Ok(written)
            }
        }
    }

    pub async fn put_rule(&self, id: &str, body: Value) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let request = ApiRequest::new(Method::PUT, &["v1", "rules", id]).body(body);
                client.request_json(request).await
            }
            Self::Local { engine, caller, .. } => {
                let rule = rules::parse_rule(&caller.project, Some(id), &body, "")?;
                let written = rules::render_rule(&rule);
                engine.admin().set_rule(caller, rule).await?;
                Ok(written)
            }
        }
    }

    /// Replaces all rules by those of a document.
    pub async fn replace_rules(
        &self,
        document: &Value,
        summary: &str,
    ) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let request = ApiRequest::new(Method::PUT, &["v1", "rules"]);
                client.request_json(request.body(document.clone())).await
            }
            Self::Local { engine, caller, .. } => {
                let set = rules::parse_rule_set(&caller.project, document)?;
                let admin = engine.admin();
                admin.replace_rules(caller, &caller.project, set, summary).await?;
                Ok(rules::render_rule_set(&admin.rules(caller)?))
            }
        }
    }

    /// Returns a starter set as a document.
    pub fn starter_document(name: &str) -> Option<Value> {
        let set = starter_set("", name)?;
        let rules: Vec<Value> = set.iter().map(rules::render_rule).collect();
        Some(json!({ "rules": rules }))
    }

    pub async fn remove_rule(&self, id: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let request = ApiRequest::new(Method::DELETE, &["v1", "rules", id]);
                client.request_json(request).await.map(|_| ())
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.admin().remove_rule_by_id(caller, &caller.project, id).await?)
            }
        }
    }

    pub async fn remove_short_rule(
        &self,
        agent: &str,
        pattern: &str,
    ) -> Result<(), CommandFailure> {
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
                Ok(rules::render_rule_set(&engine.admin().rules(caller)?))
            }
        }
    }

    pub async fn rule(&self, id: &str) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "rules", id])).await
            }
            Self::Local { engine, caller, .. } => {
                Ok(rules::render_rule(&engine.admin().rule(caller, id)?))
            }
        }
    }

    pub async fn rule_versions(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "rules", "versions"])).await
            }
            Self::Local { engine, caller, .. } => {
                Ok(rules::render_versions(&engine.admin().rule_versions(caller).await?))
            }
        }
    }

    pub async fn roll_back_rules(&self, version: u64) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let body = json!({ "version": version });
                client.request_json(ApiRequest::post(&["v1", "rules", "rollback"], body)).await
            }
            Self::Local { engine, caller, .. } => {
                let admin = engine.admin();
                admin.roll_back_rules(caller, &caller.project, version).await?;
                Ok(rules::render_rule_set(&admin.rules(caller)?))
            }
        }
    }

    pub async fn explain_rules(&self, body: Value) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::post(&["v1", "rules", "explain"], body)).await
            }
            Self::Local { engine, caller, .. } => {
                let request = rules::parse_explain_request(&body)?;
                let explanation = engine.admin().explain_rules(caller, request).await?;
                Ok(rules::render_explanation(&explanation))
            }
        }
    }

    pub async fn lint_rules(&self, body: Value) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::post(&["v1", "rules", "lint"], body)).await
            }
            Self::Local { engine, caller, .. } => {
                let proposed = rules::parse_lint_request(&caller.project, &body)?;
                let findings = engine.admin().lint_rules(caller, proposed).await?;
                Ok(rules::render_findings(&findings))
            }
        }
    }

    pub async fn rehearse_rules(&self, body: Value) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let request = ApiRequest::post(&["v1", "rules", "rehearse"], body);
                client.request_json(request.wait(std::time::Duration::from_secs(600))).await
            }
            Self::Local { engine, caller, .. } => {
                let (proposed, days) = rules::parse_rehearsal(&caller.project, &body)?;
                let rehearsal = engine.admin().rehearse_rules(caller, proposed, days).await?;
                Ok(rules::render_rehearsal(&rehearsal))
            }
        }
    }
}
