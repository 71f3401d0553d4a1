//! Joins a repeated request for a run with the earlier one whose answer was not delivered.
//!
//! A run is stored and driven by itself, so the new requester only follows it. `conversations`
//! joins the requests of OpenAI's API.

use crate::calls::rejoin::request_digest;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::retry::ExecutionPolicy;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::undelivered::{RequestKind, UndeliveredRequest};
use crate::registry::Registry;
use crate::runs::Runs;
use crate::runs::active::StartedRun;
use crate::runs::subscribers::RunSubscription;

/// Returns the undelivered request of a run or conversation, or `None` if a repeated request must
/// not join it. `api` keeps requests of different APIs apart.
pub(super) fn undelivered_request(
    core: &Core,
    registry: &Registry,
    caller: &Caller,
    id: &str,
    api: &str,
    request: &str,
) -> Option<UndeliveredRequest> {
    let policy = project_policy(core, caller);
    let is_off = !policy.rejoin || policy.rejoin_window_ms == 0;
    if is_off || !registry.catalog().allows_rejoin(caller) {
        return None;
    }
    Some(UndeliveredRequest {
        id: id.to_owned(),
        digest: request_digest(caller, api, &[request]),
        kind: RequestKind::Run,
        project: caller.project.clone(),
        expires_ms: core.now_ms().saturating_add(policy.rejoin_window_ms),
    })
}

/// Returns the execution policy of the caller's project.
pub(super) fn project_policy(core: &Core, caller: &Caller) -> ExecutionPolicy {
    let policies = &core.policies;
    let project = policies.projects.get(&caller.project);
    project.map_or_else(|| policies.global.clone(), |patch| policies.global.with_patch(patch))
}

/// Returns an earlier run of the same request whose requester is gone.
pub(super) async fn join_earlier_run(
    runs: &Runs,
    request: &UndeliveredRequest,
    subscribes: bool,
) -> Result<Option<StartedRun>, Error> {
    while let Some(delivery) = runs.calls.rejoin.take_over(&request.digest) {
        let found = runs.core.store.runs().run(&request.project, delivery.id()).await;
        let Some(run) = found.map_err(from_store_error)? else {
            delivery.mark_delivered();
            continue;
        };
        delivery.record_join();
        let active = runs.active_runs.get(&run.project, &run.id).filter(|_| subscribes);
        let subscription = RunSubscription::new(active.map(|active| active.subscribe()));
        let delivery = Some(delivery);
        return Ok(Some(StartedRun { run, replayed: false, joined: true, delivery, subscription }));
    }
    Ok(None)
}
