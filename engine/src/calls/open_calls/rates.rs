//! Rate limits across restarts and changes of the time of day, and their state for callers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::json;

use super::{LimitExceeded, LimitQuota, LimitStatus};
use crate::calls::{Calls, Dispatcher};
use crate::domain::caller::Caller;
use crate::domain::directory::usage_limits::{CallMembers, LimitKind, RATE_WINDOW_MS};
use crate::domain::fault::{Code, Error, Fault};
use crate::ports::core::from_store_error;

/// Maximum number of calls that are counted at a start.
const MAX_RESTORED: usize = 1_000_000;

impl Calls {
    /// Returns the state of every usage limit that applies to the caller and to these tools. Empty,
    /// at no cost, if there are no limits.
    pub fn limit_statuses<'a>(
        &self,
        caller: &Caller,
        tools: impl Iterator<Item = &'a str>,
    ) -> Vec<LimitStatus> {
        let catalog = self.registry.catalog();
        if catalog.limits().is_empty() {
            return Vec::new();
        }
        let (open_calls, now_ms) = (&self.dispatcher.open_calls, self.core.now_ms());
        let callers = [LimitKind::Agent, LimitKind::User, LimitKind::Project];
        let members = CallMembers::of_request(caller, None);
        let mut statuses = open_calls.limit_statuses(&members, &callers, now_ms);
        let mut seen = BTreeSet::new();
        for entry in tools.filter_map(|tool| catalog.resolve(caller, tool)) {
            let members = CallMembers::of_request(caller, Some(&entry.definition.name));
            if seen.insert(entry.definition.name.clone()) {
                statuses.extend(open_calls.limit_statuses(&members, &[LimitKind::Tool], now_ms));
            }
        }
        statuses
    }

    /// Counts the calls of the last minute against the rate limits. A started engine has done so
    /// before its first request.
    pub async fn restore_rates(&self) -> Result<(), Error> {
        if self.registry.catalog().limits().is_empty() {
            return Ok(());
        }
        let (now_ms, wall_ms) = (self.core.now_ms(), self.core.wall_ms());
        let since_ms = wall_ms.saturating_sub(RATE_WINDOW_MS);
        let accepted = self.core.store.usage().accepted_calls(since_ms, MAX_RESTORED).await;
        for call in accepted.map_err(from_store_error)? {
            let (agent, user) = (call.agent.as_str(), call.user.as_deref());
            let (project, tool) = (call.project.as_str(), Some(call.tool.as_str()));
            let members = CallMembers { project, agent, user, tool };
            let at_ms = self.core.clock.to_monotonic_ms(call.accepted_ms);
            self.dispatcher.open_calls.restore_rate(&members, at_ms, now_ms);
        }
        Ok(())
    }
}

impl Dispatcher {
    /// Records a change of the time of day since the last call of this method. A restart then
    /// counts the calls before it by the time that has really passed, so that the change permits
    /// nothing more.
    pub(crate) async fn record_clock_step(self: &Arc<Self>, wall_offset_ms: i64) {
        let known_ms = self.wall_offset_ms.load(Ordering::Relaxed);
        if known_ms == wall_offset_ms || self.registry.catalog().limits().is_empty() {
            return;
        }
        let known_ms = self.wall_offset_ms.swap(wall_offset_ms, Ordering::Relaxed);
        let by_ms = wall_offset_ms.saturating_sub(known_ms);
        if by_ms != 0
            && let Err(error) = self.core.store.usage().record_clock_step(by_ms).await
        {
            tracing::warn!(%error, "a change of the system time was not recorded; will retry");
            self.wall_offset_ms.store(known_ms, Ordering::Relaxed);
        }
    }
}

/// Returns the refusal of a call over a usage limit.
pub(crate) fn limit_error(exceeded: &LimitExceeded) -> Error {
    let LimitExceeded { member, quota, retry_after_ms } = exceeded;
    let (kind, field) = (member.kind.as_str(), quota.field());
    metrics::counter!("toolcrib_limit_refusals_total", "kind" => kind, "limit" => field)
        .increment(1);
    let (member_text, seconds) = (member.describe(), retry_after_ms.div_ceil(1_000).max(1));
    let rule = match quota {
        LimitQuota::PerMinute(limit) => format!("{member_text} may make {limit} calls per minute"),
        LimitQuota::MaxOpen(limit) => format!("{member_text} may have {limit} open calls"),
    };
    let message = format!("rate limit: {rule}; nothing was done, retry after {seconds} s");
    let mut limit = json!({ "kind": kind, "name": member.name });
    limit[field] = quota.value().into();
    let detail = json!({ "limit": limit, "retry_after_ms": retry_after_ms });
    let fault = Fault::new(Code::RateLimited, message).without_side_effect().with_detail(detail);
    Error::Refused { fault, retry_after_ms: Some(*retry_after_ms) }
}
