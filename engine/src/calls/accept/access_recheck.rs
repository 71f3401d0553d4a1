//! Checks the access rules again before an attempt starts, when a client acknowledges an attempt,
//! after a restart, and when the rules change: a call that has become forbidden ends, one that
//! needs an approval waits for it, and a call that no longer needs one is queued. `accept.rs` has
//! the first check.

use std::borrow::Cow;
use std::sync::Arc;

use crate::calls::Dispatcher;
use crate::calls::accept::approval_request::{RequiredApproval, build_approval, rule_binding};
use crate::calls::request::{ExecutedArguments, fit_to_schema};
use crate::domain::access_rules::{AccessDecision, AskDecision, Denial, RuleAction};
use crate::domain::call::{Call, Hold, Status, Target};
use crate::domain::fault::{Error, Fault};
use crate::domain::tool::Executor;
use crate::lifecycle::Event;
use crate::ports::engine_metrics;
use crate::registry::AccessRequest;
use crate::registry::authorize::{audit_ended_call, denial_fault};
use crate::registry::catalog::{Catalog, CatalogEntry};

impl Dispatcher {
    /// Checks a call that has not started to run against the present rules. Returns true if it must
    /// not start: it has ended, or waits for an approval.
    pub(crate) async fn stop_if_not_allowed(self: &Arc<Self>, call: &Call) -> bool {
        let caller = call.caller();
        let is_waiting = call.status == Status::Pending
            && call.target.executor != Executor::CALLER
            && call.replaced_by().is_none();
        if !is_waiting {
            return false;
        }
        let catalog = self.registry.catalog();
        if let Err(end) = self.registry.credentials.check_work(&caller) {
            let denial = Denial::without_rule(end.to_string());
            return self.end_denied(call, &call.target.tool, denial).await;
        }
        if caller.is_exempt_from_rules() {
            return false;
        }
        // The target is another tool if the call has fallen back to one.
        if call.tool_name != call.target.tool {
            let requested = AccessRequest { run_id: Some(&call.run_id), ..named(&call.tool_name) };
            let decision = catalog.authorize(&caller, RuleAction::Invoke, &requested);
            if let AccessDecision::Denied(denial) = decision {
                return self.end_denied(call, &call.tool_name, denial).await;
            }
        }
        let entry = catalog.find(&call.project, &call.target.tool);
        let request = AccessRequest {
            entry: entry.as_deref(),
            args: Some(&call.target.args),
            run_id: Some(&call.run_id),
            now_ms: self.core.wall_ms(),
            ..named(&call.target.tool)
        };
        match catalog.authorize(&caller, RuleAction::Invoke, &request) {
            AccessDecision::Allowed => {
                if let Some(approval_id) = call.pending_approval() {
                    let event = Event::ApprovalWaived { approval_id: approval_id.to_owned() };
                    self.advance_with_retry(&call.project, &call.id, event).await;
                }
                false
            }
            AccessDecision::Ask(ask) => {
                self.hold_unless_approved(call, &catalog, entry.as_deref(), *ask).await
            }
            AccessDecision::Denied(denial) => {
                self.end_denied(call, &call.target.tool, denial).await
            }
        }
    }

    async fn end_denied(self: &Arc<Self>, call: &Call, tool: &str, denial: Denial) -> bool {
        let caller = call.caller();
        let event = Event::PermissionRevoked { fault: denial_fault(&caller, tool, &denial) };
        // The call may have started to run, or have ended, in the meantime: then nothing is denied.
        if self.advance_with_retry(&call.project, &call.id, event).await {
            engine_metrics::count_denied();
            let audited = audit_ended_call(&self.registry, &caller, tool, &denial.reason).await;
            if let Err(error) = audited {
                tracing::warn!(%error, "a denial was not audited");
            }
        }
        true
    }

    /// Holds a call for an approval, unless it has one for exactly its present form. Returns true
    /// if the call must not start.
    async fn hold_unless_approved(
        self: &Arc<Self>,
        call: &Call,
        catalog: &Catalog,
        entry: Option<&CatalogEntry>,
        ask: AskDecision,
    ) -> bool {
        // A call in another state is checked when it is dispatched.
        if !matches!(call.hold, Some(Hold::Queue | Hold::Retry { .. } | Hold::Approval { .. })) {
            return false;
        }
        let target = match self.present_target(call, entry).await {
            Ok(target) => target,
            Err(fault) => {
                let event = Event::PermissionRevoked { fault };
                self.advance_with_retry(&call.project, &call.id, event).await;
                return true;
            }
        };
        let digest = rule_binding(catalog, call, target.as_ref().unwrap_or(&call.target), &ask);
        let now_ms = self.core.wall_ms();
        if let Some(approval) = call.approval.as_ref().filter(|own| own.digest == digest) {
            let holds = match approval.standing_id.as_deref() {
                Some(id) => self.is_standing_id_active(id).await,
                None => Ok(approval.is_granted || call.waits_for_approval()),
            };
            match holds {
                Ok(true) => return false,
                Ok(false) => {}
                // The call is queued still, and the next dispatch asks again.
                Err(error) => {
                    tracing::warn!(call = %call.id, %error, "an approval could not be read");
                    self.requeue_later(call);
                    return true;
                }
            }
        }
        let required = RequiredApproval { ask, digest };
        let held_target = target.as_ref().unwrap_or(&call.target);
        match build_approval(&self.core, call, held_target, required, now_ms).await {
            Ok(approval) => {
                let (approval, target) = (Box::new(approval), target.map(Box::new));
                let event = Event::ApprovalRequired { approval, target };
                self.advance_with_retry(&call.project, &call.id, event).await;
            }
            // The call is queued still, and the next dispatch asks again.
            Err(error) => {
                tracing::warn!(call = %call.id, %error, "an approval could not be requested");
                self.requeue_later(call);
            }
        }
        true
    }

    /// Returns true if the standing approval with this id has not ended.
    async fn is_standing_id_active(&self, id: &str) -> Result<bool, Error> {
        match self.approval_index.standing(id) {
            Some(standing) => self.is_standing_active(&standing).await,
            None => Ok(false),
        }
    }

    /// Returns the target in the tool's present form, if the tool has changed since the call was
    /// accepted.
    async fn present_target(
        &self,
        call: &Call,
        entry: Option<&CatalogEntry>,
    ) -> Result<Option<Target>, Fault> {
        let Some(entry) = entry.filter(|entry| entry.version != call.target.version) else {
            return Ok(None);
        };
        if !entry.input_schema.is_ready() {
            entry.prepare_input().await;
        }
        let args = call.target.args.clone();
        let value = Cow::Owned(args.to_value());
        let given = ExecutedArguments { args, value };
        match fit_to_schema(entry, given, &[], self.core.limits.max_args_bytes) {
            Ok(args) => Ok(Some(self.targets.build_target(entry, args))),
            Err(Error::Refused { fault, .. }) => Err(fault),
            Err(error @ Error::Internal(_)) => Err(Fault::runtime(error.to_string())),
        }
    }

    /// Queues a call again after a moment.
    fn requeue_later(self: &Arc<Self>, call: &Call) {
        let (dispatcher, id) = (self.clone(), call.id.clone());
        self.core.tasks.spawn(async move {
            let again_ms = dispatcher.core.now_ms() + 1_000;
            tokio::select! {
                () = dispatcher.core.clock.sleep_until(again_ms) => {}
                () = dispatcher.core.shutdown.cancelled() => return,
            }
            if let Some(entry) = dispatcher.open_calls.get(&id) {
                let call = entry.call();
                if matches!(call.hold, Some(Hold::Queue | Hold::Retry { .. })) {
                    dispatcher.enqueue_call(&call);
                }
            }
        });
    }
}

fn named(tool: &str) -> AccessRequest<'_> {
    AccessRequest::named(tool)
}
