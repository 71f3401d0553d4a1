//! Decides whether a caller may use a tool, and enforces the decision. A refusal states the rule
//! that caused it and is written to the audit log.
//!
//! This module decides about roles, the limits of credentials, and the companion tools
//! `result.read` and `run.finish`; `catalog/rule_index.rs` evaluates the rules themselves.
//! `calls/accept.rs` asks when a call arrives, and `calls/accept/access_recheck.rs` asks again
//! before it starts. `call_access.rs` decides which callers may read or cancel a call.

use std::sync::Arc;

use serde_json::json;

use super::catalog::{Catalog, CatalogEntry, RESULT_READ, RUN_FINISH};
use crate::domain::access_rules::{self, AccessDecision, Denial, RuleAction};
use crate::domain::agent::agent_tool_name;
use crate::domain::caller::{AuthMethod, Caller};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::run::handoff::HANDOFF_TOOL_PREFIX;
use crate::domain::tool::Executor;
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;
use crate::registry::Registry;
use crate::registry::catalog::rule_index::ProjectRuleIndex;
use crate::registry::catalog::rule_index::compiled_rule::{
    RuleArguments, RuleCheck, RuleInput, ToolProperties,
};

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
    /// Decides whether the caller may do this with a tool of this name, even if no such tool
    /// exists. Roles decide about everything but `list`, `invoke`, `read` and `cancel`; rules that
    /// deny hold for them too.
    pub fn authorize(
        &self,
        caller: &Caller,
        action: RuleAction,
        request: &AccessRequest<'_>,
    ) -> AccessDecision {
        let found = match request.entry {
            Some(_) => None,
            None => self.find(&caller.project, request.tool),
        };
        let properties = match request.entry.or(found.as_deref()) {
            Some(entry) => ToolProperties::Known(entry),
            None => ToolProperties::Unknown,
        };
        let decision = self.authorize_with(caller, action, request, properties);
        match properties {
            ToolProperties::Known(entry) if entry.definition.executor == Executor::HANDOFF => {
                self.restrict_handoff(caller, action, request, decision)
            }
            _ => decision,
        }
    }

    /// Applies the rules that deny or ask about an agent to a handoff to it: otherwise a handoff
    /// would bypass a rule on `agent.ID`.
    fn restrict_handoff(
        &self,
        caller: &Caller,
        action: RuleAction,
        request: &AccessRequest<'_>,
        decision: AccessDecision,
    ) -> AccessDecision {
        let Some(agent_id) = request.tool.strip_prefix(HANDOFF_TOOL_PREFIX) else {
            return decision;
        };
        let name = agent_tool_name(agent_id);
        let found = self.find(&caller.project, &name);
        let properties = found.as_deref().map_or(ToolProperties::Unknown, ToolProperties::Known);
        let of_agent = AccessRequest { run_id: request.run_id, ..AccessRequest::named(&name) };
        let agent = self.authorize_without_arguments(caller, action, &of_agent, properties);
        match (&decision, &agent) {
            (AccessDecision::Denied(_), _) => decision,
            (_, AccessDecision::Denied(denial)) if denial.rule_id.is_some() => agent,
            (AccessDecision::Allowed, AccessDecision::Ask(_)) => agent,
            _ => decision,
        }
    }

    pub(crate) fn authorize_with(
        &self,
        caller: &Caller,
        action: RuleAction,
        request: &AccessRequest<'_>,
        properties: ToolProperties<'_>,
    ) -> AccessDecision {
        let input = self.rule_input(caller, action, request, properties);
        let rules = self.rules.project(&caller.project).map(AsRef::as_ref);
        decide(rules, input, self.is_companion(request.tool))
    }

    /// Decides about a subject that never has arguments. A condition on arguments fails: a rule
    /// that denies or asks then applies, and one that allows does not.
    pub(super) fn authorize_without_arguments(
        &self,
        caller: &Caller,
        action: RuleAction,
        request: &AccessRequest<'_>,
        properties: ToolProperties<'_>,
    ) -> AccessDecision {
        let input = RuleInput {
            args: RuleArguments::Absent,
            ..self.rule_input(caller, action, request, properties)
        };
        let rules = self.rules.project(&caller.project).map(AsRef::as_ref);
        decide(rules, input, false)
    }

    /// Returns true if the tool is a companion of all others: a caller that may call any tool may
    /// call this one too.
    pub(crate) fn is_companion(&self, tool: &str) -> bool {
        matches!(tool, RESULT_READ | RUN_FINISH) && self.shared_tools.contains_key(tool)
    }

    pub(crate) fn rule_input<'a>(
        &self,
        caller: &'a Caller,
        action: RuleAction,
        request: &AccessRequest<'a>,
        properties: ToolProperties<'a>,
    ) -> RuleInput<'a> {
        let now_ms = match request.now_ms {
            0 if self.rules.uses_now(&caller.project) => {
                self.clock.as_ref().map_or(0, |clock| clock.wall_ms())
            }
            now_ms => now_ms,
        };
        let &AccessRequest { tool, args, run_id, .. } = request;
        let args = args.map_or(RuleArguments::NotYetKnown, RuleArguments::Known);
        RuleInput { caller, action, tool, properties, args, run_id, now_ms }
    }

    /// Returns true if the decision about a call in this project can depend on its arguments.
    pub(crate) fn decides_by_arguments(&self, project: &str) -> bool {
        self.rules.uses_args(project)
    }

    /// Returns true if a tool is listed for the caller. `result.read`, which is allowed along with
    /// any other tool, is listed only if a rule names it, so that a list shows exactly what the
    /// operator allowed; lists for models add it, because digests refer to it. The tools that hand
    /// work to agents are listed in projects with agents.
    pub(crate) fn is_listed(&self, caller: &Caller, entry: &CatalogEntry) -> bool {
        if entry.definition.executor == Executor::INTERNAL && !self.has_agents(&caller.project) {
            return false;
        }
        !self.authorize(caller, RuleAction::List, &AccessRequest::of(entry)).is_denied()
    }

    /// Returns true if a project has an agent that can be called.
    fn has_agents(&self, project: &str) -> bool {
        let mut roster = self.directory().roster.iter();
        roster.any(|entry| entry.project == project && entry.definition.is_some())
    }

    /// Returns true if the caller may call the tool, with or without an approval.
    pub(crate) fn may_call(&self, caller: &Caller, tool: &str) -> bool {
        !self.authorize(caller, RuleAction::Invoke, &AccessRequest::named(tool)).is_denied()
    }

    /// Decides whether the caller may record a call of this name that it executed itself. Only a
    /// rule that denies the name forbids it. No rule needs to allow the name, because Toolcrib
    /// executes nothing for it; whether such a tool exists is irrelevant.
    pub(crate) fn authorize_reported_call(
        &self,
        caller: &Caller,
        tool: &str,
        args: Option<&Json>,
    ) -> AccessDecision {
        let request = AccessRequest { args, ..AccessRequest::named(tool) };
        match self.authorize_with(caller, RuleAction::Invoke, &request, ToolProperties::None) {
            AccessDecision::Denied(Denial { rule_id: None, .. }) if caller.may_invoke() => {
                AccessDecision::Allowed
            }
            AccessDecision::Ask(_) => AccessDecision::Allowed,
            decision => decision,
        }
    }
}

impl Catalog {
    /// Decides about a name that is no tool of the catalog.
    pub(crate) fn authorize_name(
        &self,
        caller: &Caller,
        action: RuleAction,
        name: &str,
    ) -> AccessDecision {
        let request = AccessRequest::named(name);
        self.authorize_without_arguments(caller, action, &request, ToolProperties::None)
    }

    /// Decides about a prompt or the resources of an upstream, named `NAME.prompt` and
    /// `NAME.resources`. They cannot wait for a person, so that a rule that asks refuses them.
    fn authorize_passthrough(
        &self,
        caller: &Caller,
        action: RuleAction,
        name: &str,
    ) -> Result<(), Denial> {
        let upstream = name.split_once('.').map_or(name, |(upstream, _)| upstream);
        let properties = ToolProperties::Passthrough { upstream, risk: self.operator_risk(name) };
        let request = AccessRequest::named(name);
        match self.authorize_without_arguments(caller, action, &request, properties) {
            AccessDecision::Allowed => Ok(()),
            AccessDecision::Ask(ask) => {
                let reason = format!("{}, which a prompt or resource cannot wait for", ask.reason);
                Err(Denial { rule_id: Some(ask.rule_id), reason })
            }
            AccessDecision::Denied(denial) => Err(denial),
        }
    }
}

/// Decides a request by the given rules, for the caller and for every caller that handed the work
/// to it. A denial takes precedence over an approval that is needed, and that over a permission.
pub(crate) fn decide(
    rules: Option<&ProjectRuleIndex>,
    input: RuleInput<'_>,
    is_companion: bool,
) -> AccessDecision {
    let own = decide_alone(rules, input, is_companion);
    let Some(above) = input.caller.caller_above().filter(|_| !own.is_denied()) else { return own };
    let by_above = decide(rules, RuleInput { caller: &above, ..input }, is_companion);
    match (&own, &by_above) {
        (AccessDecision::Ask(_), AccessDecision::Allowed | AccessDecision::Ask(_)) => own,
        _ => by_above,
    }
}

/// Decides a request by the given rules, without regard to the callers above the caller.
fn decide_alone(
    rules: Option<&ProjectRuleIndex>,
    input: RuleInput<'_>,
    is_companion: bool,
) -> AccessDecision {
    let RuleInput { caller, action, tool, .. } = input;
    let is_use = matches!(action, RuleAction::List | RuleAction::Invoke);
    if is_use && !caller.may_invoke() {
        let role = caller.roles;
        return AccessDecision::Denied(Denial::without_rule(format!(
            "a key with the role {role} cannot call tools"
        )));
    }
    if caller.auth_method == AuthMethod::Local {
        return AccessDecision::Allowed;
    }
    if is_use && !is_companion && !is_within_credentials(caller, tool) {
        let reason = "the caller's credentials are limited to other tools";
        return AccessDecision::Denied(Denial::without_rule(reason));
    }
    let Some(rules) = rules else { return decide_without_rule(caller, action) };
    let check = RuleCheck::new(input);
    if let Some((decision, _)) = rules.decide(&check) {
        return decision;
    }
    if action == RuleAction::Invoke && is_companion && rules.allows_any(caller) {
        return AccessDecision::Allowed;
    }
    decide_without_rule(caller, action)
}

/// Returns true if the caller's credentials are not limited to other tools.
fn is_within_credentials(caller: &Caller, tool: &str) -> bool {
    let limit = caller.attributes.tools.as_ref();
    limit.is_none_or(|patterns| patterns.iter().any(|p| access_rules::pattern_matches(p, tool)))
}

/// Returns the decision that holds if no rule matches.
fn decide_without_rule(caller: &Caller, action: RuleAction) -> AccessDecision {
    let needs_rule = match action {
        RuleAction::List | RuleAction::Invoke => caller.needs_allowing_rule(),
        RuleAction::Read => caller.needs_allowing_rule() && !caller.may_read_all_calls(),
        RuleAction::Cancel => caller.needs_allowing_rule(),
        // The roles have decided.
        RuleAction::Approve | RuleAction::Register | RuleAction::Administer => false,
    };
    if !needs_rule {
        return AccessDecision::Allowed;
    }
    AccessDecision::Denied(Denial::without_rule(format!(
        "no rule of project \"{}\" allows it to agent \"{}\"",
        caller.project, caller.agent
    )))
}

impl Registry {
    /// Returns true if `/metrics` shows the names of projects' tools to this caller. By default
    /// they are for the operator and admin keys: one project must not learn another's tools.
    pub fn shows_tool_names(&self, caller: Option<&Caller>) -> bool {
        self.tool_names_in_metrics.unwrap_or_else(|| {
            caller.is_some_and(|caller| {
                caller.may_administer() && caller.auth_method != AuthMethod::Anonymous
            })
        })
    }

    /// Returns true if decisions about this caller can change with the time alone.
    pub fn decides_by_time(&self, caller: &Caller) -> bool {
        !caller.is_exempt_from_rules() && self.catalog().rules.uses_now(&caller.project)
    }

    /// Returns true if the access rules allow the caller to use a prompt or the resources of an
    /// upstream, named `NAME.prompt` and `NAME.resources`.
    pub fn may_use_passthrough(&self, caller: &Caller, name: &str) -> bool {
        self.catalog().authorize_passthrough(caller, RuleAction::Invoke, name).is_ok()
    }

    /// Returns true if lists show the caller a prompt or the resources of an upstream.
    pub fn may_list_passthrough(&self, caller: &Caller, name: &str) -> bool {
        let is_listed = |action| self.catalog().authorize_passthrough(caller, action, name).is_ok();
        is_listed(RuleAction::List) && is_listed(RuleAction::Invoke)
    }

    /// Checks that the caller may use a prompt or the resources of an upstream. A denial is
    /// audited; it is answered as an unknown name is.
    pub async fn check_passthrough_use(&self, caller: &Caller, name: &str) -> Result<bool, Error> {
        match self.catalog().authorize_passthrough(caller, RuleAction::Invoke, name) {
            Ok(()) => Ok(true),
            Err(denial) => {
                engine_metrics::count_denied();
                audit_denial(self, caller, name, &denial.reason).await?;
                Ok(false)
            }
        }
    }

    /// Refuses to register tools that a rule denies to this provider. The denial is audited.
    pub(crate) async fn check_registration_rules(
        &self,
        caller: &Caller,
        tools: &[Arc<CatalogEntry>],
    ) -> Result<(), Error> {
        let catalog = self.catalog();
        for entry in tools {
            let request = AccessRequest::of(entry);
            let decision = catalog.authorize(caller, RuleAction::Register, &request);
            let AccessDecision::Denied(Denial { rule_id, reason }) = decision else { continue };
            let tool = &entry.definition.name;
            let audited = self.audit_entry(caller, &caller.project, "tool.denied", tool, &reason);
            self.record_denial(audited).await?;
            let agent = &caller.agent;
            let message = format!("agent \"{agent}\" may not register \"{tool}\": {reason}");
            let detail = json!({
                "agent": agent, "tool": tool, "rule_id": rule_id, "reason": reason,
            });
            let fault = Fault::new(Code::PermissionDenied, message).with_detail(detail);
            return Err(fault.without_side_effect().into());
        }
        Ok(())
    }

    /// Refuses an operation that the caller's role permits and a rule denies. The denial is
    /// audited.
    pub(crate) fn check_action(
        &self,
        caller: &Caller,
        action: RuleAction,
        name: &str,
    ) -> Result<(), Error> {
        match self.catalog().authorize_name(caller, action, name) {
            AccessDecision::Denied(Denial { rule_id, reason }) => {
                let (agent, word) = (&caller.agent, action.as_str());
                let (project, kind) = (&caller.project, format!("{word}.denied"));
                self.record_denial_later(self.audit_entry(caller, project, &kind, name, &reason));
                let message = format!("agent \"{agent}\" may not {word}: {reason}");
                let detail = json!({ "agent": agent, "rule_id": rule_id, "reason": reason });
                let fault = Fault::new(Code::PermissionDenied, message).with_detail(detail);
                Err(fault.without_side_effect().into())
            }
            AccessDecision::Allowed | AccessDecision::Ask(_) => Ok(()),
        }
    }
}

/// Checks that the caller may call the tool. A denial is audited and returned with its reason.
pub(crate) async fn authorize_call(
    registry: &Registry,
    catalog: &Catalog,
    caller: &Caller,
    tool: &str,
) -> Result<(), Error> {
    let request = AccessRequest::named(tool);
    let decision = catalog.authorize(caller, RuleAction::Invoke, &request);
    enforce_decision(registry, caller, tool, decision).await
}

/// Refuses a denied call, after the denial is written to the audit log. Counts the decision.
pub(crate) async fn enforce_decision(
    registry: &Registry,
    caller: &Caller,
    tool: &str,
    decision: AccessDecision,
) -> Result<(), Error> {
    let denial = match decision {
        AccessDecision::Allowed => {
            engine_metrics::count_allowed();
            return Ok(());
        }
        // The call is stored and waits for the approval.
        AccessDecision::Ask(_) => {
            engine_metrics::count_asked();
            return Ok(());
        }
        AccessDecision::Denied(denial) => denial,
    };
    engine_metrics::count_denied();
    audit_denial(registry, caller, tool, &denial.reason).await?;
    Err(denial_fault(caller, tool, &denial).into())
}

/// Writes the denial of a request to the audit log.
async fn audit_denial(
    registry: &Registry,
    caller: &Caller,
    tool: &str,
    reason: &str,
) -> Result<(), Error> {
    let excerpt = excerpt_of_name(tool);
    let entry = registry.audit_entry(caller, &caller.project, "call.denied", &excerpt, reason);
    registry.record_denial(entry).await
}

/// Writes to the audit log that a stored call ended because it is denied now. Each such call has
/// its entry.
pub(crate) async fn audit_ended_call(
    registry: &Registry,
    caller: &Caller,
    tool: &str,
    reason: &str,
) -> Result<(), Error> {
    let excerpt = excerpt_of_name(tool);
    let entry = registry.audit_entry(caller, &caller.project, "call.denied", &excerpt, reason);
    registry.core.store.append_audit_entry(entry).await.map_err(from_store_error)
}

/// Returns the fault of a denied call.
pub(crate) fn denial_fault(caller: &Caller, tool: &str, denial: &Denial) -> Fault {
    let excerpt = excerpt_of_name(tool);
    let message =
        format!("agent \"{}\" may not call \"{excerpt}\": {}", caller.agent, denial.reason);
    let detail = json!({
        "agent": caller.agent, "tool": excerpt, "rule": denial.reason, "rule_id": denial.rule_id,
        "reason": denial.reason,
    });
    Fault::new(Code::PermissionDenied, message).without_side_effect().with_detail(detail)
}

fn excerpt_of_name(tool: &str) -> String {
    tool.chars().take(128).collect()
}
