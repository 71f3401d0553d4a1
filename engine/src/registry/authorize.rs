//! Decides whether a caller may use a tool, and enforces the decision. A refusal states the rule
//! that caused it and is written to the audit log.
//!
//! The roles and the companion rule of `result.read` are decided here; the rules themselves are
//! evaluated by the pure functions of [`crate::domain::access_rules`].

use serde_json::json;

use super::catalog::{Catalog, RESULT_READ};
use crate::domain::access_rules::{self, AccessDecision};
use crate::domain::caller::{AuthMethod, Caller};
use crate::domain::fault::{Code, Error, Fault};
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;
use crate::registry::Registry;

impl Catalog {
    /// Decides whether the caller may call a tool with this name, even if no such tool exists.
    pub fn authorize(&self, caller: &Caller, tool: &str) -> AccessDecision {
        if !caller.may_invoke() {
            let role = caller.roles;
            return AccessDecision::Denied(format!("a key with the role {role} cannot call tools"));
        }
        if caller.is_exempt_from_rules() || caller.may_administer() {
            return AccessDecision::Allowed;
        }
        let rules = self.directory.rules.iter();
        if tool == RESULT_READ && self.shared_tools.contains_key(tool) {
            return access_rules::decide_companion(rules, &caller.project, &caller.agent, tool);
        }
        access_rules::decide(rules, &caller.project, &caller.agent, tool)
    }

    /// Returns true if a tool is listed for the caller. `result.read`, which is allowed along with
    /// any other tool, is listed only if a rule names it, so that a list shows exactly what the
    /// operator allowed.
    pub(crate) fn is_listed(&self, caller: &Caller, tool: &str) -> bool {
        if !self.authorize(caller, tool).is_allowed() {
            return false;
        }
        let (rules, agent) = (self.directory.rules.iter(), &caller.agent);
        tool != RESULT_READ
            || caller.is_exempt_from_rules()
            || caller.may_administer()
            || access_rules::decide(rules, &caller.project, agent, tool).is_allowed()
    }

    /// Decides whether the caller may record a call of this name that it executed itself. Only a
    /// rule that denies the name forbids it. No rule needs to allow the name, because Toolcrib
    /// executes nothing for it; whether such a tool exists is irrelevant.
    pub(crate) fn authorize_reported_call(&self, caller: &Caller, tool: &str) -> AccessDecision {
        if caller.may_invoke() && caller.auth_method == AuthMethod::Key && !caller.may_administer()
        {
            let rules = self.directory().rules.iter();
            let denied = access_rules::find_denial(rules, &caller.project, &caller.agent, tool);
            return denied.map_or(AccessDecision::Allowed, AccessDecision::Denied);
        }
        self.authorize(caller, tool)
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
        self.catalog().authorize(caller, name).is_allowed()
    }

    /// Checks that the caller may call the tool. A denial is audited and returned with its reason.
    pub(crate) async fn authorize_call(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &str,
    ) -> Result<(), Error> {
        self.enforce_decision(caller, tool, catalog.authorize(caller, tool)).await
    }

    pub(crate) async fn enforce_decision(
        &self,
        caller: &Caller,
        tool: &str,
        decision: AccessDecision,
    ) -> Result<(), Error> {
        let reason = match decision {
            AccessDecision::Allowed => {
                engine_metrics::count_allowed();
                return Ok(());
            }
            AccessDecision::Denied(reason) => reason,
        };
        self.audit_denial(caller, tool, &reason).await?;
        Err(denial_fault(caller, tool, &reason).into())
    }

    /// Writes a denial to the audit log.
    pub(crate) async fn audit_denial(
        &self,
        caller: &Caller,
        tool: &str,
        reason: &str,
    ) -> Result<(), Error> {
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => "deny").increment(1);
        let excerpt = excerpt_of_name(tool);
        let entry = self.audit_entry(caller, &caller.project, "call.denied", &excerpt, reason);
        self.core.store.append_audit_entry(entry).await.map_err(from_store_error)
    }
}

/// Returns the fault of a denied call.
pub(crate) fn denial_fault(caller: &Caller, tool: &str, reason: &str) -> Fault {
    let excerpt = excerpt_of_name(tool);
    let message = format!("agent \"{}\" may not call \"{excerpt}\": {reason}", caller.agent);
    let detail = json!({ "agent": caller.agent, "tool": excerpt, "rule": reason });
    Fault::new(Code::PermissionDenied, message).without_side_effect().with_detail(detail)
}

fn excerpt_of_name(tool: &str) -> String {
    tool.chars().take(128).collect()
}
