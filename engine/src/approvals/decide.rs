//! Takes decisions: checks each, and commits all of them with their calls at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::json;

use super::{Approvals, approval_not_found};
use crate::approvals::replacement::Replacement;
use crate::calls::commit::AdvanceOutcome;
use crate::calls::commit::together::JointEvent;
use crate::domain::call::Call;
use crate::domain::call::approval::{
    Approval, ApprovalDecision, ApprovalScope, ApprovalStatus, MAX_DECISIONS, MAX_REASON_BYTES,
    StandingApproval, UNOBSERVED_RUN_MS,
};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::lifecycle::Event;
use crate::lifecycle::approvals::ApprovalVerdict;
use crate::ports::core::from_store_error;

/// The longest time that a standing approval may hold: 366 days.
const MAX_STANDING_MS: u64 = 366 * 24 * 60 * 60 * 1_000;

/// The verdict of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecisionVerdict {
    /// The call is executed.
    Approve,
    /// The call fails.
    Reject,
}

/// A decision about one approval.
#[derive(Debug, Clone)]
pub struct DecisionRequest {
    /// Id of the approval.
    pub approval_id: String,
    /// Approve or reject. A later decision with another verdict is refused.
    pub verdict: DecisionVerdict,
    /// Reason of the decision; the model sees the reason of a rejection.
    pub reason: Option<String>,
    /// The calls that an approval covers.
    pub scope: ApprovalScope,
    /// End of a standing approval, in Unix milliseconds; set exactly for [`ApprovalScope::Until`].
    pub until_ms: Option<u64>,
    /// Other arguments to execute.
    pub args: Option<Json>,
}

/// A decided approval.
#[derive(Debug)]
pub struct DecisionResult {
    /// The approval after the decision.
    pub approval: Approval,
    /// The call after the decision.
    pub call: Arc<Call>,
    /// True if the same decision was made before.
    pub is_repeated: bool,
}

/// A new decision that passed its checks and is ready to commit.
struct CheckedDecision {
    index: usize,
    approval: Approval,
    decision: ApprovalDecision,
    joint: JointEvent,
}

impl Approvals {
    /// Takes decisions, all in one commit. Refuses the request as a whole if it is malformed or the
    /// caller may not decide at all. Otherwise each decision has its own result, in order: an
    /// unknown approval, one that was decided otherwise, or one that this caller may not decide
    /// does not affect the others.
    pub async fn decide(
        &self,
        caller: &Caller,
        requests: Vec<DecisionRequest>,
    ) -> Result<Vec<Result<DecisionResult, Error>>, Error> {
        self.require_approver(caller)?;
        check_requests(&requests, self.registry.credentials.now_ms())?;
        let ids = requests.iter().map(|request| request.approval_id.clone()).collect();
        let found = self.core.store.approvals().approvals_by_id(&caller.project, ids).await;
        let found = found.map_err(from_store_error)?;
        let mut found: HashMap<String, Approval> =
            found.into_iter().map(|approval| (approval.id.clone(), approval)).collect();
        let mut results: Vec<Option<Result<DecisionResult, Error>>> = Vec::new();
        results.resize_with(requests.len(), || None);
        let mut checked = Vec::with_capacity(requests.len());
        for (index, request) in requests.into_iter().enumerate() {
            let approval = found.remove(&request.approval_id);
            let approval = approval.ok_or_else(|| approval_not_found(&request.approval_id));
            let prepared = match approval {
                Ok(approval) => self.prepare(caller, index, approval, request).await,
                Err(error) => Err(error),
            };
            match prepared {
                Ok(PreparedDecision::New(one)) => checked.push(*one),
                Ok(PreparedDecision::Repeated(result)) => results[index] = Some(Ok(*result)),
                Err(error) => results[index] = Some(Err(error)),
            }
        }
        for (index, result) in self.commit(caller, checked).await? {
            results[index] = Some(result);
        }
        Ok(results.into_iter().flatten().collect())
    }

    async fn prepare(
        &self,
        caller: &Caller,
        index: usize,
        approval: Approval,
        request: DecisionRequest,
    ) -> Result<PreparedDecision, Error> {
        self.check_decider(caller, &approval, &approval.request.approvers)?;
        if approval.status != ApprovalStatus::Pending {
            return self.repeated(caller, approval, &request).await;
        }
        let now_ms = self.core.wall_ms();
        let mut decision = ApprovalDecision {
            at_ms: now_ms,
            by: Some(caller.agent.clone()),
            user: caller.attributes.user.clone(),
            reason: request.reason.clone(),
            scope: request.scope,
            until_ms: request.until_ms,
            standing_id: None,
            replaced_by: None,
        };
        let replacement = match request.args {
            Some(args) => Some(self.build_replacement(caller, &approval, args).await?),
            None => None,
        };
        decision.replaced_by = replacement.as_ref().map(|new| new.call.id.clone());
        let standing = self.build_standing(&approval, &decision, replacement.as_ref()).await?;
        decision.standing_id = standing.as_ref().map(|standing| standing.id.clone());
        let verdict = match (request.verdict, &replacement) {
            (DecisionVerdict::Reject, _) => ApprovalVerdict::Reject,
            (DecisionVerdict::Approve, None) => ApprovalVerdict::Approve,
            (DecisionVerdict::Approve, Some(new)) => {
                ApprovalVerdict::Replace { deadline_ms: new.call.deadline_ms }
            }
        };
        let approval_id = approval.id.clone();
        let event =
            Event::ApprovalDecided { approval_id, verdict, decision: Box::new(decision.clone()) };
        let joint = JointEvent {
            call_id: approval.call_id.clone(),
            event,
            replacement: replacement.map(|new| new.call),
            audit: self.audit_decision(caller, &approval, verdict, &decision),
            standing,
        };
        Ok(PreparedDecision::New(Box::new(CheckedDecision { index, approval, decision, joint })))
    }

    fn audit_decision(
        &self,
        caller: &Caller,
        approval: &Approval,
        verdict: ApprovalVerdict,
        decision: &ApprovalDecision,
    ) -> Vec<crate::domain::directory::AuditEntry> {
        let mut text = match verdict {
            ApprovalVerdict::Approve => "approved".to_owned(),
            ApprovalVerdict::Reject => "rejected".to_owned(),
            ApprovalVerdict::Replace { .. } => "approved with other arguments".to_owned(),
        };
        text.push_str(&format!(" {} of call {}", approval.request.tool, approval.call_id));
        if let Some(reason) = &decision.reason {
            text.push_str(&format!(": {reason}"));
        }
        let (project, id) = (&approval.project, &approval.id);
        let entry = |action, subject: &str, text: &str| {
            self.registry.audit_entry(caller, project, action, subject, text)
        };
        let mut entries = vec![entry("approval.decided", id, &text)];
        if let Some(standing) = &decision.standing_id {
            let scope = decision.scope.as_str();
            let text = format!("{} for approval {id}, scope {scope}", approval.request.tool);
            entries.push(entry("standing_approval.granted", standing, &text));
        }
        entries
    }

    async fn build_standing(
        &self,
        approval: &Approval,
        decision: &ApprovalDecision,
        replacement: Option<&Replacement>,
    ) -> Result<Option<StandingApproval>, Error> {
        if decision.scope == ApprovalScope::Once {
            return Ok(None);
        }
        let request = &approval.request;
        // Other arguments that no rule asks about need no standing approval.
        let (args, digest, rule_id) = match replacement {
            Some(Replacement { call, binding: Some((rule_id, digest)) }) => {
                (call.target.args.clone(), digest.clone(), rule_id.clone())
            }
            Some(_) => return Ok(None),
            None => (request.args.clone(), request.digest.clone(), request.rule_id.clone()),
        };
        let run_id = (decision.scope == ApprovalScope::Run).then(|| request.run_id.clone());
        let ends_with_run = match &run_id {
            Some(run_id) => {
                let run = self.core.store.runs().run(&approval.project, run_id).await;
                run.map_err(from_store_error)?.is_some()
            }
            None => false,
        };
        let is_unobserved = run_id.is_some() && !ends_with_run;
        let longest_ms = if is_unobserved { UNOBSERVED_RUN_MS } else { MAX_STANDING_MS };
        let now_ms = self.registry.credentials.now_ms();
        let limit_ms = now_ms.saturating_add(longest_ms);
        Ok(Some(StandingApproval {
            id: self.core.id_generator.next_id("sap_", now_ms),
            project: approval.project.clone(),
            approval_id: approval.id.clone(),
            tool: request.tool.clone(),
            args,
            digest,
            rule_id,
            requester: request.requester.clone(),
            scope: decision.scope,
            run_id,
            ends_with_run,
            expires_ms: decision.until_ms.unwrap_or(limit_ms).min(limit_ms),
            granted_by: decision.by.clone().unwrap_or_default(),
            granted_ms: now_ms,
            revoked_ms: None,
            revoked_by: None,
        }))
    }

    /// Answers a decision about an approval that is no longer pending. The same verdict with the
    /// same scope and without other arguments has the same result; everything else is a conflict.
    async fn repeated(
        &self,
        caller: &Caller,
        approval: Approval,
        request: &DecisionRequest,
    ) -> Result<PreparedDecision, Error> {
        let same = match request.verdict {
            DecisionVerdict::Approve => ApprovalStatus::Approved,
            DecisionVerdict::Reject => ApprovalStatus::Rejected,
        };
        let scope = approval.decision.as_ref().map(|decision| decision.scope);
        let is_same = approval.status == same
            && (same == ApprovalStatus::Rejected || scope == Some(request.scope))
            && request.args.is_none();
        if !is_same {
            return Err(already_decided(&approval));
        }
        let id = &approval.call_id;
        let call = self.dispatcher.find_project_call(caller, id).await?;
        let result = DecisionResult { approval, call, is_repeated: true };
        Ok(PreparedDecision::Repeated(Box::new(result)))
    }

    /// Commits the decisions and returns the result of each.
    async fn commit(
        &self,
        caller: &Caller,
        checked: Vec<CheckedDecision>,
    ) -> Result<Vec<(usize, Result<DecisionResult, Error>)>, Error> {
        if checked.is_empty() {
            return Ok(Vec::new());
        }
        let (mut rest, mut events) = (Vec::new(), Vec::new());
        for CheckedDecision { index, approval, decision, joint } in checked {
            rest.push((index, approval, decision));
            events.push(joint);
        }
        let (dispatcher, project) = (self.dispatcher.clone(), caller.project.clone());
        let committing = async move { dispatcher.advance_together(&project, events).await };
        let outcomes = self.dispatcher.detach_on_drop(committing).await?;
        let mut results = Vec::with_capacity(rest.len());
        for ((index, approval, decision), outcome) in rest.into_iter().zip(outcomes) {
            results.push((index, self.settle(caller, approval, decision, outcome).await));
        }
        Ok(results)
    }

    async fn settle(
        &self,
        caller: &Caller,
        approval: Approval,
        decision: ApprovalDecision,
        outcome: Result<AdvanceOutcome, Error>,
    ) -> Result<DecisionResult, Error> {
        match outcome? {
            AdvanceOutcome::Committed(call) => {
                // An approved call is queued, and a replaced one waits for its replacement: only a
                // rejection ends the call.
                let is_rejected = call.status.is_terminal() && decision.replaced_by.is_none();
                let status = match is_rejected {
                    true => ApprovalStatus::Rejected,
                    false => ApprovalStatus::Approved,
                };
                let approval = Approval { status, decision: Some(decision), ..approval };
                Ok(DecisionResult { approval, call, is_repeated: false })
            }
            AdvanceOutcome::Duplicate(call) | AdvanceOutcome::Refused(call, _) => {
                let now_ms = self.core.wall_ms();
                if call.pending_approval() == Some(&approval.id) && now_ms >= approval.expires_ms {
                    let (project, id) = (&call.project, &call.id);
                    self.dispatcher.advance_with_retry(project, id, Event::Deadline).await;
                }
                // Another request has decided meanwhile, or the approval has expired.
                let stored = self.approval(caller, &approval.id).await?;
                Err(already_decided(&stored))
            }
        }
    }
}

/// The result of checking a decision.
enum PreparedDecision {
    /// To be committed.
    New(Box<CheckedDecision>),
    /// Made before: there is nothing to commit.
    Repeated(Box<DecisionResult>),
}

fn already_decided(approval: &Approval) -> Error {
    let status = approval.status.as_str();
    let decision = approval.decision.as_ref();
    let by = decision.and_then(|decision| decision.by.as_deref());
    let message = match by {
        Some(by) => format!("approval \"{}\" is {status} already, by {by}", approval.id),
        None => format!("approval \"{}\" is {status} already", approval.id),
    };
    let detail = json!({ "status": status, "tool_call_id": approval.call_id.as_str() });
    Fault::new(Code::Conflict, message).without_side_effect().with_detail(detail).into()
}

/// Refuses a request that is malformed as a whole.
fn check_requests(requests: &[DecisionRequest], now_ms: u64) -> Result<(), Error> {
    let invalid = |pointer: String, message: String| {
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(Error::from(fault.with_detail(json!({ "pointer": pointer }))))
    };
    let count = requests.len();
    if count == 0 || count > MAX_DECISIONS {
        let message = format!("decisions must be 1 to {MAX_DECISIONS}, and are {count}");
        return invalid("/decisions".to_owned(), message);
    }
    let mut seen = HashSet::new();
    for (index, request) in requests.iter().enumerate() {
        let at = |field: &str| format!("/decisions/{index}/{field}");
        if !seen.insert(&request.approval_id) {
            let message = format!("approval \"{}\" is decided twice", request.approval_id);
            return invalid(at("approval_id"), message);
        }
        if request.reason.as_ref().is_some_and(|reason| reason.len() > MAX_REASON_BYTES) {
            let message = format!("reason must have at most {MAX_REASON_BYTES} bytes");
            return invalid(at("reason"), message);
        }
        let is_rejection = request.verdict == DecisionVerdict::Reject;
        if is_rejection && request.args.is_some() {
            return invalid(at("args"), "a rejection has no args".to_owned());
        }
        if is_rejection && request.scope != ApprovalScope::Once {
            return invalid(at("scope"), "a rejection has the scope once".to_owned());
        }
        match (request.scope, request.until_ms) {
            (ApprovalScope::Until, None) => {
                return invalid(at("until"), "the scope until needs a date in until".to_owned());
            }
            (ApprovalScope::Until, Some(until_ms)) => {
                let latest_ms = now_ms.saturating_add(MAX_STANDING_MS);
                if until_ms <= now_ms || until_ms > latest_ms {
                    let message = "until must be in the future, at most 366 days ahead";
                    return invalid(at("until"), message.to_owned());
                }
            }
            (_, Some(_)) => {
                return invalid(at("until"), "until needs the scope until".to_owned());
            }
            (_, None) => {}
        }
    }
    Ok(())
}
