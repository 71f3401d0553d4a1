//! Decides whether a caller may use a tool, and enforces the decision. A refusal states the rule
//! that caused it and is written to the audit log.
//!
//! The roles and the companion rule of `result.read` are decided here; the rules themselves are
//! evaluated by the pure functions of [`crate::domain::access_rules`].

use serde_json::json;

use super::catalog::{Catalog, CatalogEntry, RESULT_READ};
use crate::domain::access_rules::{
    self, AccessDecision, AccessRule, AskDecision, Denial, RuleAction, RuleVerdict,
};
use crate::domain::caller::{AuthMethod, Caller};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::engine_metrics;
use crate::ports::core::from_store_error;
use crate::registry::Registry;

/// The object of an access check.
#[derive(Debug, Clone, Copy)]
pub struct AccessRequest<'a> {
    /// Name of the tool, even if no such tool exists.
    pub tool: &'a str,
    /// The tool. `None` looks it up.
    pub entry: Option<&'a CatalogEntry>,
    /// The validated arguments with their defaults; `None` while they are not known. Conditions on
    /// arguments then count as met if the rule allows or asks, and as not met if it denies.
    pub args: Option<&'a Json>,
    /// The run, which is the session of a caller that asserts none.
    pub run_id: Option<&'a str>,
    /// Time of the request, in Unix milliseconds; 0 reads the clock.
    pub now_ms: u64,
}

impl<'a> AccessRequest<'a> {
    /// Returns a request that has only the name of a tool.
    pub fn named(tool: &'a str) -> Self {
        Self { tool, entry: None, args: None, run_id: None, now_ms: 0 }
    }

    /// Returns a request for a tool of the catalog.
    pub fn of(entry: &'a CatalogEntry) -> Self {
        Self { entry: Some(entry), ..Self::named(&entry.definition.name) }
    }
}

impl Catalog {
    /// Decides whether the caller may do this with a tool of this name, even if no such tool exists.
    pub fn authorize(
        &self,
        caller: &Caller,
        action: RuleAction,
        request: &AccessRequest<'_>,
    ) -> AccessDecision {
        if action == RuleAction::Invoke && !caller.may_invoke() {
            let role = caller.roles;
            return AccessDecision::Denied(Denial::without_rule(format!(
                "a key with the role {role} cannot call tools"
            )));
        }
        if caller.is_exempt_from_rules() {
            return AccessDecision::Allowed;
        }
        let decision = self.evaluate(caller, action, request.tool);
        let is_companion =
            request.tool == RESULT_READ && self.shared_tools.contains_key(request.tool);
        if let AccessDecision::Denied(Denial { rule_id: None, .. }) = decision
            && action == RuleAction::Invoke
            && is_companion
            && self.allows_any(caller)
        {
            return AccessDecision::Allowed;
        }
        decision
    }

    fn applicable<'a>(
        &'a self,
        caller: &'a Caller,
        action: RuleAction,
    ) -> impl Iterator<Item = &'a AccessRule> {
        self.directory.rules.iter().filter(move |rule| {
            let matches = |list: &[String], value: &str| {
                list.is_empty() || list.iter().any(|p| access_rules::pattern_matches(p, value))
            };
            rule.project == caller.project
                && matches(&rule.agents, &caller.agent)
                && rule.effective_actions().contains(&action)
                && (rule.when.is_none() || rule.verdict != RuleVerdict::Allow)
        })
    }

    fn evaluate(&self, caller: &Caller, action: RuleAction, tool: &str) -> AccessDecision {
        let about = |rule: &&AccessRule| {
            rule.tools.is_empty()
                || rule.tools.iter().any(|p| access_rules::pattern_matches(p, tool))
        };
        let project = &caller.project;
        match self.applicable(caller, action).filter(about).min_by_key(|rule| rule.verdict) {
            Some(rule) if rule.verdict == RuleVerdict::Deny => AccessDecision::Denied(Denial {
                rule_id: Some(rule.id.clone()),
                reason: format!("rule \"{}\" of project \"{project}\" denies it", rule.id),
            }),
            Some(rule) if rule.verdict == RuleVerdict::Ask => {
                AccessDecision::Ask(Box::new(AskDecision {
                    rule_id: rule.id.clone(),
                    reason: format!("rule \"{}\" requires an approval", rule.id),
                    approvers: rule.approvers.clone(),
                    expires_in_ms: rule.expires_in_ms,
                }))
            }
            Some(_) => AccessDecision::Allowed,
            None if !caller.needs_allowing_rule() => AccessDecision::Allowed,
            None => AccessDecision::Denied(Denial::without_rule(format!(
                "no rule of project \"{project}\" allows it to agent \"{}\"",
                caller.agent
            ))),
        }
    }

    fn allows_any(&self, caller: &Caller) -> bool {
        let mut rules = self.applicable(caller, RuleAction::Invoke);
        rules.any(|rule| rule.verdict == RuleVerdict::Allow)
    }

    /// Returns true if a tool is listed for the caller. `result.read`, which is allowed along with
    /// any other tool, is listed only if a rule names it, so that a list shows exactly what the
    /// operator allowed.
    pub(crate) fn is_listed(&self, caller: &Caller, entry: &CatalogEntry) -> bool {
        !self.authorize(caller, RuleAction::List, &AccessRequest::of(entry)).is_denied()
    }

    /// Returns true if the caller may call the tool, with or without an approval.
    pub(crate) fn may_call(&self, caller: &Caller, tool: &str) -> bool {
        !self.authorize(caller, RuleAction::Invoke, &AccessRequest::named(tool)).is_denied()
    }

    /// Decides whether the caller may record a call of this name that it executed itself. Only a
    /// rule that denies the name forbids it. No rule needs to allow the name, because Toolcrib
    /// executes nothing for it; whether such a tool exists is irrelevant.
    pub(crate) fn authorize_reported_call(&self, caller: &Caller, tool: &str) -> AccessDecision {
        let decision = self.authorize(caller, RuleAction::Invoke, &AccessRequest::named(tool));
        match decision {
            AccessDecision::Denied(Denial { rule_id: None, .. }) if caller.may_invoke() => {
                AccessDecision::Allowed
            }
            AccessDecision::Ask(_) => AccessDecision::Allowed,
            decision => decision,
        }
    }
}

impl Registry {
    /// Returns true if metrics record the names of projects' tools.
    pub(crate) fn records_tool_names(&self) -> bool {
        self.tool_names_in_metrics.unwrap_or(true)
    }

    /// Returns true if `/metrics` shows the names of projects' tools to this caller. By default
    /// they are for the operator and admin keys: one project must not learn another's tools.
    pub fn shows_tool_names(&self, caller: Option<&Caller>) -> bool {
        self.tool_names_in_metrics.unwrap_or_else(|| {
            caller.is_some_and(|caller| {
                caller.may_administer() && caller.auth_method != AuthMethod::Anonymous
            })
        })
    }

    /// Returns true if the access rules allow the caller to use this name, be it a tool or another
    /// feature of an upstream.
    pub fn is_allowed(&self, caller: &Caller, name: &str) -> bool {
        self.catalog().may_call(caller, name)
    }

    /// Checks that the caller may call the tool. A denial is audited and returned with its reason.
    pub(crate) async fn authorize_call(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &str,
    ) -> Result<(), Error> {
        let request = AccessRequest::named(tool);
        let decision = catalog.authorize(caller, RuleAction::Invoke, &request);
        self.enforce_decision(caller, tool, decision).await
    }

    pub(crate) async fn enforce_decision(
        &self,
        caller: &Caller,
        tool: &str,
        decision: AccessDecision,
    ) -> Result<(), Error> {
        let Denial { rule_id, reason } = match decision {
            AccessDecision::Allowed => {
                engine_metrics::count_allowed();
                return Ok(());
            }
            // The call is stored and waits for the approval.
            AccessDecision::Ask(_) => return Ok(()),
            AccessDecision::Denied(denial) => denial,
        };
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => "deny").increment(1);
        let excerpt: String = tool.chars().take(128).collect();
        let entry = self.audit_entry(caller, &caller.project, "call.denied", &excerpt, &reason);
        self.core.store.append_audit_entry(entry).await.map_err(from_store_error)?;
        let message = format!("agent \"{}\" may not call \"{excerpt}\": {reason}", caller.agent);
        let detail = json!({
            "agent": caller.agent, "tool": excerpt, "rule": reason, "rule_id": rule_id,
            "reason": reason,
        });
        Err(Fault::new(Code::PermissionDenied, message)
            .without_side_effect()
            .with_detail(detail)
            .into())
    }
}
