//! In-memory index of the standing approvals, by their ids, and of the calls that wait for an
//! approval, by a digest of caller, run, tool and arguments. Both are rebuilt at the start.

use std::collections::HashMap;

use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};

use crate::domain::call::Call;
use crate::domain::call::approval::{ApprovalRequester, StandingApproval};
use crate::domain::id::{CallId, hex};

/// The standing approvals and the waiting calls.
#[derive(Default)]
pub(crate) struct ApprovalIndex {
    standing: RwLock<HashMap<String, StandingApproval>>,
    waiting: Mutex<HashMap<String, Vec<CallId>>>,
}

impl ApprovalIndex {
    /// Adds a standing approval, or replaces the one with its id.
    pub(crate) fn put_standing(&self, standing: StandingApproval) {
        self.standing.write().insert(standing.id.clone(), standing);
    }

    /// Removes a standing approval that has ended.
    pub(crate) fn remove_standing(&self, id: &str) {
        self.standing.write().remove(id);
    }

    /// Returns the standing approvals that cover a call with this digest, ended ones too.
    pub(crate) fn find_standing(
        &self,
        project: &str,
        requester: &ApprovalRequester,
        run_id: &str,
        digest: &str,
    ) -> Vec<StandingApproval> {
        let standing = self.standing.read();
        let of_project = standing.values().filter(|approval| approval.project == project);
        let covering = of_project.filter(|approval| approval.covers(requester, run_id, digest));
        covering.cloned().collect()
    }

    /// Returns all standing approvals.
    pub(crate) fn all_standing(&self) -> Vec<StandingApproval> {
        self.standing.read().values().cloned().collect()
    }

    /// Returns the standing approval with this id, even if it is no longer active.
    pub(crate) fn standing(&self, id: &str) -> Option<StandingApproval> {
        self.standing.read().get(id).cloned()
    }

    /// Returns the standing approvals of a project, active or not, oldest first.
    pub(crate) fn standing_of(&self, project: &str) -> Vec<StandingApproval> {
        let standing = self.standing.read();
        let of_project = standing.values().filter(|approval| approval.project == project);
        let mut of_project: Vec<StandingApproval> = of_project.cloned().collect();
        of_project.sort_by(|a, b| a.id.cmp(&b.id));
        of_project
    }

    /// Records the present state of a call: equal calls join it while it waits for an approval.
    pub(crate) fn update_waiting(&self, call: &Call) {
        let key = equality_key(call);
        let mut waiting = self.waiting.lock();
        let ids = waiting.entry(key.clone()).or_default();
        ids.retain(|id| *id != call.id);
        if call.waits_for_approval() {
            ids.push(call.id.clone());
        }
        if ids.is_empty() {
            waiting.remove(&key);
        }
    }

    /// Returns every call that waits for an approval.
    pub(crate) fn waiting_calls(&self) -> Vec<CallId> {
        self.waiting.lock().values().flatten().cloned().collect()
    }

    /// Returns the waiting calls that equal this one, in the order of their last updates.
    pub(crate) fn equal_calls(&self, call: &Call) -> Vec<CallId> {
        self.waiting.lock().get(&equality_key(call)).cloned().unwrap_or_default()
    }
}

/// Computes the digest by which calls are equal: of caller, run, tool and requested arguments.
fn equality_key(call: &Call) -> String {
    let (origin, attributes) = (&call.origin, &call.origin.attributes);
    let args = call.args.canonical_text();
    // An absent attribute differs from an empty one.
    let optional =
        |text: &Option<String>| text.clone().map_or_else(String::new, |t| format!("={t}"));
    let (user, session) = (optional(&attributes.user), optional(&attributes.session));
    let environment = optional(&attributes.environment);
    let mut hash = Sha256::new();
    for part in [
        call.project.as_str(),
        &origin.agent,
        origin.auth_method.as_str(),
        &user,
        &session,
        &environment,
        &call.run_id,
        &call.tool_name,
        &args,
    ] {
        // The length keeps the parts apart.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}
