//! Authorizes calls. A refusal states the rule that caused it and is written to the audit log.

use serde_json::json;

use super::catalog::Catalog;
use super::{Inner, measure, unavailable};
use crate::caller::Caller;
use crate::fault::{Code, Error, Fault};
use crate::policy::Decision;

impl Inner {
    /// Checks that the caller may call the tool. A denial is audited and returned with its reason.
    pub(crate) async fn check_permission(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &str,
    ) -> Result<(), Error> {
        self.permitted(caller, tool, catalog.decide(caller, tool)).await
    }

    pub(super) async fn permitted(
        &self,
        caller: &Caller,
        tool: &str,
        decision: Decision,
    ) -> Result<(), Error> {
        let Decision::Denied(reason) = decision else {
            measure::allowed();
            return Ok(());
        };
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => "deny").increment(1);
        let shown: String = tool.chars().take(128).collect();
        let entry = self.entry(caller, &caller.project, "call.denied", &shown, &reason);
        self.store.audit(entry).await.map_err(unavailable)?;
        let message = format!("agent \"{}\" may not call \"{shown}\": {reason}", caller.agent);
        let detail = json!({ "agent": caller.agent, "tool": shown, "rule": reason });
        Err(Fault::new(Code::PermissionDenied, message).not_happened().with_detail(detail).into())
    }
}
