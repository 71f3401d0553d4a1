//! Authorizes calls. A refusal states the rule that caused it and is written to the audit log.

use serde_json::json;

use super::catalog::Catalog;
use crate::domain::access_rules::AccessDecision;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::engine::{Core, from_store_error};
use crate::telemetry::engine_metrics;

impl Core {
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
        let AccessDecision::Denied(reason) = decision else {
            engine_metrics::count_allowed();
            return Ok(());
        };
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => "deny").increment(1);
        let shown: String = tool.chars().take(128).collect();
        let entry = self.audit_entry(caller, &caller.project, "call.denied", &shown, &reason);
        self.store.append_audit_entry(entry).await.map_err(from_store_error)?;
        let message = format!("agent \"{}\" may not call \"{shown}\": {reason}", caller.agent);
        let detail = json!({ "agent": caller.agent, "tool": shown, "rule": reason });
        Err(Fault::new(Code::PermissionDenied, message)
            .without_side_effect()
            .with_detail(detail)
            .into())
    }
}
