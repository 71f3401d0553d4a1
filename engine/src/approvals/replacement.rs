//! Builds the call that a person approves with other arguments, in place of the one that waits.

use super::Approvals;
use crate::calls::accept::approval_request::{enforce_unless_asked, rule_binding};
use crate::calls::accept::decide_call;
use crate::calls::request::{CallRequest, validate_request};
use crate::domain::call::approval::{Approval, CallApproval};
use crate::domain::call::{Call, Hold};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;

/// A new call in place of one that waits.
pub(crate) struct Replacement {
    pub(crate) call: Call,
    /// Id of the rule that asks about the other arguments, and the digest of the approval; `None`
    /// if no rule asks.
    pub(crate) binding: Option<(String, String)>,
}

impl Approvals {
    /// Builds a call of the same tool and caller with other arguments. They must match the schema,
    /// and the rules must not deny them. The decision approves them, so the decider must also be an
    /// approver of the rule that asks about the new arguments.
    pub(crate) async fn build_replacement(
        &self,
        decider: &Caller,
        approval: &Approval,
        args: Json,
    ) -> Result<Replacement, Error> {
        let replaced = self.dispatcher.find_project_call(decider, &approval.call_id).await?;
        let Some(Hold::Approval { remaining_ms, .. }) = replaced.hold else {
            let message = format!("call \"{}\" does not wait for an approval", replaced.id);
            return Err(Fault::new(Code::Conflict, message).without_side_effect().into());
        };
        let caller = replaced.caller();
        let catalog = self.registry.catalog();
        let mut request = CallRequest {
            run_id: replaced.run_id.clone(),
            timeout_ms: Some(remaining_ms.max(1)),
            attempt_timeout_ms: replaced.attempt_timeout_ms,
            input_timeout_ms: Some(replaced.input_timeout_ms),
            client_id: replaced.origin.client_id.clone(),
            user_id: replaced.origin.user_id.clone(),
            traceparent: replaced.origin.traceparent.clone(),
            meta: replaced.origin.meta.clone(),
            ..CallRequest::of(approval.request.tool.clone(), args)
        };
        let found = catalog.find(&caller.project, &approval.request.tool);
        if let Some(tool) = &found {
            self.calls.prepare_schemas(&catalog, &caller, tool).await;
        }
        let tool = validate_request(&self.dispatcher, &catalog, &caller, found, &mut request)?;
        let mut call = self.calls.build_call(&catalog, &caller, &tool, request)?;
        call.max_retries = replaced.max_retries;
        // The requester waits for the replaced call, which takes over the outcome.
        call.origin.background = false;
        call.origin.replaces = Some(replaced.id.clone());
        let access = decide_call(&catalog, &caller, &call);
        let ask = enforce_unless_asked(&self.registry, &caller, &call, access).await?;
        let mut binding = None;
        if let Some(ask) = ask {
            self.check_decider(decider, approval, &ask.approvers)?;
            let digest = rule_binding(&catalog, &call, &call.target, &ask);
            call.approval = Some(Box::new(CallApproval {
                id: approval.id.clone(),
                digest: digest.clone(),
                is_granted: true,
                is_used: false,
                standing_id: None,
                replaced_by: None,
            }));
            binding = Some((ask.rule_id, digest));
        }
        Ok(Replacement { call, binding })
    }
}
