//! Requests an approval for a new call whose rules ask for one, or joins the request to an equal
//! call that already waits.
//!
//! `Call::approval` has the state of the approval, and the hold `approval` keeps the call from
//! starting; both are committed with the call. `access_recheck.rs` requests approvals later in the
//! life of a call.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use crate::calls::accept::Ticket;
use crate::calls::commit::together::request_audit_entry;
use crate::calls::{Calls, Dispatcher};
use crate::domain::access_rules::{AccessDecision, AskDecision};
use crate::domain::call::approval::{
    Approval, ApprovalRequest, ApprovalRequester, ApprovalStatus, ApprovalWebhook, CallApproval,
    PreviousApproval, StandingApproval, binding_digest, find_changes,
};
use crate::domain::call::{Call, Target};
use crate::domain::caller::Caller;
use crate::domain::event::EventRecord;
use crate::domain::fault::Error;
use crate::domain::id::CallId;
use crate::lifecycle::approvals::hold_for_approval;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::IdempotencyKey;
use crate::ports::store::approvals::NewApproval;
use crate::registry::Registry;
use crate::registry::authorize::enforce_decision;
use crate::registry::catalog::Catalog;

/// Interval at which a request checks if the calls of the previous process are loaded.
const RECOVERY_POLL: Duration = Duration::from_millis(5);

/// The calls that the entries of one batch made or joined. Two entries of a batch never join each
/// other.
pub(crate) type BatchCalls = Arc<Mutex<Vec<CallId>>>;

/// The approval that a call needs, before it is requested.
pub(crate) struct RequiredApproval {
    pub(crate) ask: AskDecision,
    pub(crate) digest: String,
}

/// Refuses a call that the rules deny. If a rule asks for an approval, returns its ask; the call is
/// then to be held for the approval.
pub(crate) async fn enforce_unless_asked(
    registry: &Registry,
    caller: &Caller,
    call: &Call,
    decision: AccessDecision,
) -> Result<Option<AskDecision>, Error> {
    let ask = match &decision {
        AccessDecision::Ask(ask) => Some((**ask).clone()),
        AccessDecision::Allowed | AccessDecision::Denied(_) => None,
    };
    enforce_decision(registry, caller, &call.tool_name, decision).await?;
    Ok(ask)
}

/// Holds a new call for the approval that its rule asks for. Returns the approval to store with the
/// call, and the record of it; `None` if a standing approval releases the call.
pub(crate) async fn request_approval(
    dispatcher: &Dispatcher,
    catalog: &Catalog,
    caller: &Caller,
    call: &mut Call,
    ask: AskDecision,
) -> Result<Option<(Box<NewApproval>, EventRecord)>, Error> {
    let digest = rule_binding(catalog, call, &call.target, &ask);
    let required = RequiredApproval { ask, digest };
    let requester = ApprovalRequester::new(caller);
    let now_ms = call.created_ms;
    let index = &dispatcher.approval_index;
    for standing in index.find_standing(&call.project, &requester, &call.run_id, &required.digest) {
        if dispatcher.is_standing_active(&standing).await? {
            call.approval = Some(Box::new(CallApproval::from_standing(&standing)));
            return Ok(None);
        }
    }
    let approval = build_approval(&dispatcher.core, call, &call.target, required, now_ms).await?;
    let remaining_ms = call.deadline_ms.saturating_sub(now_ms);
    let record = hold_for_approval(call, &approval, remaining_ms, now_ms);
    let audit = request_audit_entry(&dispatcher.registry, caller, &approval);
    Ok(Some((Box::new(NewApproval { approval, audit }), record)))
}

impl Dispatcher {
    /// Returns true if a standing approval has not ended: it is neither revoked nor expired, and a
    /// run that it ends with goes on. Setting the clock back makes none valid again.
    pub(crate) async fn is_standing_active(
        &self,
        standing: &StandingApproval,
    ) -> Result<bool, Error> {
        if !standing.is_active(self.registry.credentials.now_ms()) {
            return Ok(false);
        }
        let Some(run_id) = standing.run_id.as_deref().filter(|_| standing.ends_with_run) else {
            return Ok(true);
        };
        let run = self.core.store.runs().run(&standing.project, run_id).await;
        // A run that is no longer stored has ended before.
        Ok(run.map_err(from_store_error)?.is_some_and(|run| !run.status.is_terminal()))
    }
}

impl Calls {
    /// Returns the ticket of an equal call of the same caller that waits for its approval. The
    /// idempotency key of the request leads to that call from then on. If the key was used before,
    /// returns `None`: it leads to the call of its first request.
    pub(crate) async fn join_waiting_call(
        &self,
        call: &Call,
        key: Option<&IdempotencyKey>,
        siblings: Option<&BatchCalls>,
    ) -> Result<Option<Ticket>, Error> {
        self.wait_for_adopted_calls().await;
        let Some(ticket) = self.find_waiting_call(call, siblings) else { return Ok(None) };
        if let Some(key) = key {
            let store = self.core.store.approvals();
            let added =
                store.add_idempotency_key(&call.project, key.clone(), &ticket.call.id).await;
            if !added.map_err(from_store_error)? {
                return Ok(None);
            }
        }
        if let Some(siblings) = siblings {
            siblings.lock().push(ticket.call.id.clone());
        }
        metrics::counter!("toolcrib_rejoined_total", "kind" => "approval").increment(1);
        Ok(Some(ticket))
    }

    /// Waits until this process has loaded the calls that the previous one left open. An agent
    /// repeats its calls as soon as the server is back, so the equal call may be one of them.
    async fn wait_for_adopted_calls(&self) {
        while self.dispatcher.is_recovering.load(Ordering::Acquire) {
            tokio::select! {
                () = tokio::time::sleep(RECOVERY_POLL) => {}
                () = self.core.shutdown.cancelled() => return,
            }
        }
    }

    fn find_waiting_call(&self, call: &Call, siblings: Option<&BatchCalls>) -> Option<Ticket> {
        let open_calls = &self.dispatcher.open_calls;
        for id in self.dispatcher.approval_index.equal_calls(call) {
            let is_sibling = siblings.is_some_and(|calls| calls.lock().contains(&id));
            let Some(open) = open_calls.get(&id).filter(|_| !is_sibling) else { continue };
            let found = open.call();
            if !found.waits_for_approval() {
                continue;
            }
            let open_call = Some(open);
            let (replayed, joined, delivery) = (false, true, None);
            return Some(Ticket { call: found, replayed, joined, open_call, delivery });
        }
        None
    }
}

/// Returns the digest that an approval of this target is bound to.
pub(crate) fn rule_binding(
    catalog: &Catalog,
    call: &Call,
    target: &Target,
    ask: &AskDecision,
) -> String {
    let mut rules = catalog.directory().rules.iter();
    let rule = rules.find(|rule| rule.project == call.project && rule.id == ask.rule_id);
    let content = rule.and_then(|rule| serde_json::to_string(rule).ok()).unwrap_or_default();
    binding_digest(target, &ask.rule_id, &content)
}

/// Builds the approval of a call for this target, with the difference to the last approved call
/// of the tool.
pub(crate) async fn build_approval(
    core: &Core,
    call: &Call,
    target: &Target,
    required: RequiredApproval,
    now_ms: u64,
) -> Result<Approval, Error> {
    let RequiredApproval { ask, digest } = required;
    let store = core.store.approvals();
    let last = store.last_approved(&call.project, &target.tool).await;
    let previous = last.map_err(from_store_error)?.map(|last| PreviousApproval {
        changes: find_changes(&last.request.args, &target.args),
        approval_id: last.id,
        call_id: last.call_id,
    });
    let settings = &core.approval_settings;
    let sends_webhook = settings.webhook_url.is_some() && core.webhook_sender.is_some();
    let requester = ApprovalRequester {
        agent: call.origin.agent.clone(),
        attributes: (*call.origin.attributes).clone(),
    };
    let unused = call.approval.as_ref().filter(|approval| !approval.is_used);
    Ok(Approval {
        id: core.id_generator.next_id("apr_", now_ms),
        project: call.project.clone(),
        call_id: call.id.clone(),
        request: ApprovalRequest {
            run_id: call.run_id.clone(),
            tool: target.tool.clone(),
            version: target.version.clone(),
            args: target.args.clone(),
            digest,
            rule_id: ask.rule_id,
            reason: ask.reason,
            requester,
            approvers: ask.approvers,
            previous,
            supersedes: unused.map(|approval| approval.id.clone()),
        },
        created_ms: now_ms,
        expires_ms: now_ms
            .saturating_add(ask.expires_in_ms.unwrap_or(settings.expires_in_ms).max(1)),
        status: ApprovalStatus::Pending,
        decision: None,
        webhook: ApprovalWebhook { due_ms: sends_webhook.then_some(now_ms), tries: 0 },
    })
}
