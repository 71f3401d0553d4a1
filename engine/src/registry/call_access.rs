//! Access to calls and runs: a caller reads and cancels its own; those of others only if its role
//! or a rule permits it. A call that the caller may not read is answered like one that does not
//! exist.

use super::authorize::AccessRequest;
use super::catalog::Catalog;
use super::catalog::rule_index::compiled_rule::ToolProperties;
use crate::domain::access_rules::RuleAction;
use crate::domain::call::Call;
use crate::domain::caller::{Caller, CallerAttributes};
use crate::domain::run::Run;

/// Returns true if the attributes of a call or run are those that the caller asserts. A caller that
/// acts for a user or in a session has access to the work of that user or session only.
fn has_same_attributes(caller: &CallerAttributes, owner: &CallerAttributes) -> bool {
    (caller.user.is_none() || caller.user == owner.user)
        && (caller.session.is_none() || caller.session == owner.session)
}

/// Returns true if the call is the caller's own.
pub(crate) fn is_own_call(caller: &Caller, call: &Call) -> bool {
    call.project == caller.project
        && call.origin.agent == caller.agent
        && has_same_attributes(&caller.attributes, &call.origin.attributes)
}

/// Returns true if the run acts for the caller.
fn is_own_run(caller: &Caller, run: &Run) -> bool {
    run.owner.agent == caller.agent
        && has_same_attributes(&caller.attributes, &run.owner.attributes)
}

impl Catalog {
    /// Returns true if the caller may read every call of its project, and so may every caller that
    /// handed the work to it.
    pub(crate) fn may_read_all_calls(&self, caller: &Caller) -> bool {
        if caller.caller_above().is_some_and(|above| !self.may_read_all_calls(&above)) {
            return false;
        }
        let rules = self.rules.project(&caller.project);
        caller.is_exempt_from_rules()
            || (!caller.needs_allowing_rule() || caller.may_read_all_calls())
                && rules.is_none_or(|rules| !rules.has_rules_on(RuleAction::Read))
    }

    /// Returns true if the caller may read the call: its state, result and events.
    pub(crate) fn may_read_call(&self, caller: &Caller, call: &Call) -> bool {
        is_own_call(caller, call) || self.may_access_call(caller, RuleAction::Read, call)
    }

    /// Returns true if the caller may cancel the call.
    pub(crate) fn may_cancel_call(&self, caller: &Caller, call: &Call) -> bool {
        is_own_call(caller, call) || self.may_access_call(caller, RuleAction::Cancel, call)
    }

    fn may_access_call(&self, caller: &Caller, action: RuleAction, call: &Call) -> bool {
        let request = AccessRequest {
            args: Some(&call.args),
            run_id: Some(&call.run_id),
            ..AccessRequest::named(&call.tool_name)
        };
        call.project == caller.project && self.authorize(caller, action, &request).is_allowed()
    }

    /// Returns true if the caller may do this with a run. A rule on single tools, on their
    /// properties or on arguments never allows access to a whole run. If such a rule denies or
    /// asks, it forbids the access: the run may contain calls that the rule is about.
    pub(crate) fn may_access_run(&self, caller: &Caller, action: RuleAction, run: &Run) -> bool {
        let request = AccessRequest { run_id: Some(&run.id), ..AccessRequest::named("") };
        run.project == caller.project
            && (is_own_run(caller, run)
                || self
                    .authorize_without_arguments(caller, action, &request, ToolProperties::WholeRun)
                    .is_allowed())
    }
}
