//! Approvals: shows the calls that wait for a person, takes decisions, and revokes standing
//! approvals.
//!
//! A decision and the release of its call are one commit, and so are all decisions of one request.
//! The caller that made a call never decides about it, whatever its roles and transport.
//!
//! `calls/accept/approval_request.rs` requests the approval of a new call, and
//! `calls/accept/access_recheck.rs` checks it again when the call is dispatched.

mod decide;
pub(crate) mod replacement;
pub mod webhook;
use std::sync::Arc;

use crate::calls::{Calls, Dispatcher};
use crate::domain::access_rules::{AccessDecision, RuleAction, pattern_matches};
use crate::domain::call::approval::{Approval, ApprovalStatus, StandingApproval};
use crate::domain::caller::{AuthMethod, Caller, CallerAttributes, Role};
use crate::domain::fault::{Code, Error, Fault};
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::approvals::ApprovalFilter;
use crate::registry::{AccessRequest, Registry};

pub use decide::{DecisionRequest, DecisionResult, DecisionVerdict};

/// Shows and decides approvals.
pub struct Approvals {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
}

/// Filter for a list of approvals.
#[derive(Debug, Clone, Default)]
pub struct ApprovalQuery {
    /// Current status; `None` selects all statuses.
    pub status: Option<ApprovalStatus>,
    /// Name of the tool.
    pub tool: Option<String>,
    /// Id of the last approval of the previous page.
    pub before: Option<String>,
    /// Maximum number of approvals on the page, clamped to 1 to 1,000.
    pub limit: usize,
}

/// A page of approvals, newest first.
#[derive(Debug)]
pub struct ApprovalPage {
    /// The approvals that match the query.
    pub approvals: Vec<Approval>,
    /// Cursor for the next page, if there is one.
    pub next_before: Option<String>,
}

impl Approvals {
    /// Loads the standing approvals of the store.
    pub(crate) async fn load(&self) -> Result<(), Error> {
        let now_ms = self.registry.credentials.now_ms();
        let listed = self.core.store.approvals().standing_approvals(now_ms).await;
        let listed = listed.map_err(from_store_error)?.into_iter();
        for standing in listed.map(StandingApproval::normalized) {
            if standing.is_active(now_ms) {
                self.dispatcher.approval_index.put_standing(standing);
            }
        }
        Ok(())
    }

    /// Ends standing approvals that have expired or whose run has ended, durably, and removes them
    /// and the revoked ones from memory. Records the time, so that setting the clock back makes
    /// none valid again.
    pub(crate) async fn end_standing(&self) -> Result<(), Error> {
        let index = &self.dispatcher.approval_index;
        let all = index.all_standing();
        if all.is_empty() {
            return Ok(());
        }
        for standing in all {
            if self.dispatcher.is_standing_active(&standing).await? {
                continue;
            }
            if standing.revoked_ms.is_none() {
                self.store_standing_end(standing.clone()).await?;
            }
            index.remove_standing(&standing.id);
        }
        self.registry.credentials.record_time_if_due().await
    }

    async fn store_standing_end(&self, standing: StandingApproval) -> Result<(), Error> {
        let now_ms = self.registry.credentials.now_ms();
        let end = match standing.is_active(now_ms) {
            true => "its run has ended",
            false => "it has expired",
        };
        let reason = format!("{} for agent {}: {end}", standing.tool, standing.requester.agent);
        let server = Caller::new(&standing.project, "toolcrib", Role::Admin, AuthMethod::Local);
        let (project, action) = (&standing.project, "standing_approval.expired");
        let audit = self.registry.audit_entry(&server, project, action, &standing.id, &reason);
        let expires_ms = standing.expires_ms.min(now_ms);
        let ended = StandingApproval { revoked_ms: Some(now_ms), expires_ms, ..standing };
        let stored = self.core.store.approvals().put_standing_approval(ended, audit).await;
        stored.map_err(from_store_error)
    }

    /// Requires a caller that sees approvals: all of its project, or those of its own calls.
    pub fn require_reader(&self, caller: &Caller) -> Result<(), Error> {
        match sees_all(caller) {
            true => Ok(()),
            false => require_agent(caller).map(|_| ()),
        }
    }

    /// Returns a page of approvals, newest first. A caller that may neither decide nor audit sees
    /// those of its own calls.
    pub async fn list(&self, caller: &Caller, query: ApprovalQuery) -> Result<ApprovalPage, Error> {
        let agent = match sees_all(caller) {
            true => None,
            false => Some(require_agent(caller)?),
        };
        let limit = query.limit.clamp(1, 1_000);
        let filter = ApprovalFilter {
            project: caller.project.clone(),
            status: query.status,
            agent,
            tool: query.tool,
            before: query.before,
            // One more than requested shows whether there is another page.
            limit: limit + 1,
        };
        let listed = self.core.store.approvals().list_approvals(filter).await;
        let mut approvals = listed.map_err(from_store_error)?;
        let more = approvals.len() > limit;
        approvals.truncate(limit);
        let next_before = approvals.last().filter(|_| more).map(|last| last.id.clone());
        approvals.retain(|approval| sees_all(caller) || is_own(caller, approval));
        Ok(ApprovalPage { approvals, next_before })
    }

    /// Returns one approval.
    pub async fn approval(&self, caller: &Caller, id: &str) -> Result<Approval, Error> {
        let found = self.core.store.approvals().approval(&caller.project, id).await;
        let found = found.map_err(from_store_error)?;
        let visible = found.filter(|approval| sees_all(caller) || is_own(caller, approval));
        visible.ok_or_else(|| approval_not_found(id))
    }

    /// Returns the link to an approval.
    pub fn link(&self, id: &str) -> String {
        self.core.approval_settings.link(id)
    }

    /// Returns the number of calls that wait for an approval.
    pub fn pending_count(&self) -> usize {
        let states = self.dispatcher.open_calls.count_by_state();
        states.iter().find(|(state, _)| *state == "approval").map_or(0, |(_, count)| *count)
    }

    /// Returns the active standing approvals of the caller's project, oldest first.
    pub async fn standing(&self, caller: &Caller) -> Result<Vec<StandingApproval>, Error> {
        self.require_reader(caller)?;
        let mut active = Vec::new();
        for standing in self.dispatcher.approval_index.standing_of(&caller.project) {
            let is_own = standing.requester.agent == caller.agent;
            let is_visible = sees_all(caller) || is_own;
            if is_visible && self.dispatcher.is_standing_active(&standing).await? {
                active.push(standing);
            }
        }
        Ok(active)
    }

    /// Revokes a standing approval. Calls that it has released and that have not started ask again.
    pub async fn revoke_standing(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<StandingApproval, Error> {
        self.require_approver(caller)?;
        let now_ms = self.registry.credentials.now_ms();
        let found = self.dispatcher.approval_index.standing(id);
        let found = found
            .filter(|standing| standing.project == caller.project && standing.is_active(now_ms));
        let Some(standing) = found else {
            let message = format!("there is no active standing approval \"{id}\"");
            return Err(Error::not_found(message, "toolcrib approvals standing lists them"));
        };
        let (revoked_ms, revoked_by) = (Some(now_ms), Some(caller.agent.clone()));
        let revoked = StandingApproval { revoked_ms, revoked_by, ..standing };
        let reason = format!("{} for agent {}", revoked.tool, revoked.requester.agent);
        let action = "standing_approval.revoked";
        let audit = self.registry.audit_entry(caller, &caller.project, action, id, &reason);
        let store = self.core.store.approvals();
        store.put_standing_approval(revoked.clone(), audit).await.map_err(from_store_error)?;
        self.dispatcher.approval_index.remove_standing(id);
        Ok(revoked)
    }

    /// Requires a caller that may decide about calls of others.
    pub(crate) fn require_approver(&self, caller: &Caller) -> Result<(), Error> {
        if caller.auth_method == AuthMethod::Anonymous {
            // The refusal names the operator token.
            self.registry.require_operator(caller, None)?;
        }
        if caller.roles.contains(Role::Approver) || caller.may_administer() {
            return Ok(());
        }
        let message = format!("a key with the role {} cannot decide approvals", caller.roles);
        Err(Error::refused(Code::PermissionDenied, message))
    }

    /// Checks that the caller may decide about this approval: it did not make the call, the rule
    /// permits it to decide, and no rule denies it. A refusal is audited.
    pub(crate) fn check_decider(
        &self,
        caller: &Caller,
        approval: &Approval,
        approvers: &[String],
    ) -> Result<(), Error> {
        let refused = |message: String| {
            let (project, action) = (&caller.project, "approve.denied");
            let registry = &self.registry;
            let entry = registry.audit_entry(caller, project, action, &approval.id, &message);
            registry.record_denial_later(entry);
            let fault = Fault::new(Code::PermissionDenied, message).without_side_effect();
            Err(Error::from(fault))
        };
        if is_requester(caller, approval) {
            let agent = &approval.request.requester.agent;
            return refused(format!(
                "agent \"{agent}\" made this call, and no caller decides about its own"
            ));
        }
        // The operator can change the rules, so a list of approvers does not bind the operator.
        let is_operator = caller.auth_method == AuthMethod::Local;
        if !is_operator && !is_listed_approver(caller, approvers) {
            return refused(format!(
                "rule \"{}\" lets only these decide: {}",
                approval.request.rule_id,
                approvers.join(", ")
            ));
        }
        let request = AccessRequest {
            args: Some(&approval.request.args),
            run_id: Some(&approval.request.run_id),
            now_ms: self.core.wall_ms(),
            ..AccessRequest::named(&approval.request.tool)
        };
        let catalog = self.registry.catalog();
        match catalog.authorize(caller, RuleAction::Approve, &request) {
            // The role permits decisions; only a deny rule revokes that permission.
            AccessDecision::Denied(denial) if denial.rule_id.is_some() => refused(denial.reason),
            _ => Ok(()),
        }
    }
}

/// Returns true if the caller sees every approval of its project.
fn sees_all(caller: &Caller) -> bool {
    let roles = caller.roles;
    roles.contains(Role::Approver) || roles.contains(Role::Auditor) || caller.may_administer()
}

/// Returns the agent name of a caller that makes calls.
fn require_agent(caller: &Caller) -> Result<String, Error> {
    if caller.may_invoke() {
        return Ok(caller.agent.clone());
    }
    let message = format!("a key with the role {} cannot read approvals", caller.roles);
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Returns true if the approval is about a call that this caller made.
fn is_own(caller: &Caller, approval: &Approval) -> bool {
    let (requester, own) = (&approval.request.requester, &caller.attributes);
    let same = |own: &Option<String>, other: &Option<String>| own.is_none() || own == other;
    caller.may_invoke()
        && requester.agent == caller.agent
        && same(&own.user, &requester.attributes.user)
        && same(&own.session, &requester.attributes.session)
}

/// Returns true if the caller is a party that made the call: the same agent, user or credential as
/// its requester, or as a caller that handed the work to the requester.
fn is_requester(caller: &Caller, approval: &Approval) -> bool {
    let (requester, own) = (&approval.request.requester, &caller.attributes);
    let same = |own: &Option<String>, other: &Option<String>| own.is_some() && own == other;
    let is_party = |agent: &str, attributes: &CallerAttributes| {
        agent == caller.agent
            || same(&own.user, &attributes.user)
            || same(&own.credential, &attributes.credential)
    };
    is_party(&requester.agent, &requester.attributes)
        || requester.attributes.callers_above().any(|c| is_party(&c.agent, &c.attributes))
}

/// Returns true if the caller is among the approvers of a rule; an empty list names all.
fn is_listed_approver(caller: &Caller, approvers: &[String]) -> bool {
    let names = std::iter::once(&caller.agent)
        .chain(&caller.attributes.groups)
        .chain(&caller.attributes.user);
    let names: Vec<&String> = names.collect();
    let matches = |pattern: &String| names.iter().any(|name| pattern_matches(pattern, name));
    approvers.is_empty() || approvers.iter().any(matches)
}

pub(crate) fn approval_not_found(id: &str) -> Error {
    let excerpt: String = id.chars().take(64).collect();
    let hint = "check the id: toolcrib approvals lists approvals";
    Error::not_found(format!("there is no approval \"{excerpt}\""), hint)
}
