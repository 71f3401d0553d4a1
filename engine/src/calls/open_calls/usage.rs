//! Counts usage against the limits of agents, users, tools and projects: the calls of the last
//! minute, and the open calls.
//!
//! Only members that have a limit are counted, so that a server without limits pays nothing. When
//! the limits change, the open calls are counted anew. Rate windows use the clock that never jumps;
//! after a start they are filled from the stored calls.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::call::Call;
use crate::domain::directory::usage_limits::{
    CallMembers, LimitMember, LimitValues, RATE_WINDOW_MS, RateWindow, UsageLimitSet,
};
use crate::domain::tool::Executor;

/// Number of windows above which those without calls are removed.
const MIN_PRUNED_WINDOWS: usize = 1_024;

/// Time after which a call over the limit of open calls can be tried again. The end of an open call
/// cannot be foreseen.
const OPEN_RETRY_MS: u64 = 1_000;

type ByMember<T> = HashMap<LimitMember, T, foldhash::fast::RandomState>;

/// The values of a limit that refuse calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitQuota {
    PerMinute(u32),
    MaxOpen(u32),
}

impl LimitQuota {
    /// Returns the name of the field that sets the value.
    pub(crate) fn field(self) -> &'static str {
        match self {
            Self::PerMinute(_) => "per_minute",
            Self::MaxOpen(_) => "max_open",
        }
    }

    pub(crate) fn value(self) -> u32 {
        match self {
            Self::PerMinute(value) | Self::MaxOpen(value) => value,
        }
    }
}

/// The limit that refuses a call.
#[derive(Debug)]
pub(crate) struct LimitExceeded {
    pub(crate) member: LimitMember,
    pub(crate) quota: LimitQuota,
    pub(crate) retry_after_ms: u64,
}

/// The state of one limit that applies to a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitStatus {
    /// The member that the limit counts.
    pub member: LimitMember,
    /// The value of the limit.
    pub quota: u32,
    /// Length of the window in seconds; `None` for a limit on open calls.
    pub window_s: Option<u64>,
    /// Number of calls that the limit permits now.
    pub remaining: u32,
    /// Time in seconds until it permits one more; `None` if that cannot be foreseen or nothing is
    /// counted.
    pub reset_s: Option<u64>,
}

/// The usage that a call was counted with when it was accepted.
pub(super) struct CountedUsage {
    limited: Vec<(LimitMember, LimitValues)>,
    at_ms: u64,
    generation: u64,
    /// False once the call is stored: it counts against rates from then on.
    returns_rate: bool,
}

impl CountedUsage {
    pub(super) fn keep_rate(&mut self) {
        self.returns_rate = false;
    }
}

/// Usage by member.
#[derive(Default)]
pub(super) struct UsageCounts {
    limits: Arc<UsageLimitSet>,
    windows: ByMember<RateWindow>,
    open: ByMember<u32>,
    /// Number of windows at which idle ones are removed.
    prune_at: usize,
    /// Increased when the open calls are counted anew.
    generation: u64,
}

impl UsageCounts {
    pub(super) fn limits(&self) -> &Arc<UsageLimitSet> {
        &self.limits
    }

    /// Counts a new call, unless a limit refuses it. Returns `None` if no limit applies.
    pub(super) fn count_new(
        &mut self,
        members: &CallMembers<'_>,
        now_ms: u64,
    ) -> Result<Option<Box<CountedUsage>>, Box<LimitExceeded>> {
        let limited = self.limits.of_members(members);
        if limited.is_empty() {
            return Ok(None);
        }
        for (member, values) in &limited {
            if let Some((quota, retry_after_ms)) = self.find_exceeded(member, *values, now_ms) {
                let member = member.clone();
                return Err(Box::new(LimitExceeded { member, quota, retry_after_ms }));
            }
        }
        for (member, values) in &limited {
            if values.per_minute.is_some() {
                self.window(member, now_ms).record(now_ms, now_ms);
            }
            self.count_open(member, *values);
        }
        let (generation, returns_rate) = (self.generation, true);
        Ok(Some(Box::new(CountedUsage { limited, at_ms: now_ms, generation, returns_rate })))
    }

    fn find_exceeded(
        &mut self,
        member: &LimitMember,
        values: LimitValues,
        now_ms: u64,
    ) -> Option<(LimitQuota, u64)> {
        if let Some(limit) = values.per_minute {
            let window = self.windows.get_mut(member);
            let wait_ms = window.map_or(0, |window| window.wait_ms(limit, now_ms));
            if wait_ms > 0 {
                return Some((LimitQuota::PerMinute(limit), wait_ms));
            }
        }
        let limit = values.max_open?;
        let open = self.open.get(member).copied().unwrap_or(0);
        (open >= limit).then_some((LimitQuota::MaxOpen(limit), OPEN_RETRY_MS))
    }

    fn window(&mut self, member: &LimitMember, now_ms: u64) -> &mut RateWindow {
        if !self.windows.contains_key(member) {
            if self.windows.len() >= self.prune_at.max(MIN_PRUNED_WINDOWS) {
                self.windows.retain(|_, window| window.count(now_ms) > 0);
                self.prune_at = self.windows.len() * 2;
            }
            self.windows.insert(member.clone(), RateWindow::at(now_ms));
        }
        self.windows.entry(member.clone()).or_insert_with(|| RateWindow::at(now_ms))
    }

    fn count_open(&mut self, member: &LimitMember, values: LimitValues) {
        if values.max_open.is_some() {
            *self.open.entry(member.clone()).or_default() += 1;
        }
    }

    fn discount_open(&mut self, member: &LimitMember) {
        if let Some(count) = self.open.get_mut(member) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.open.remove(member);
            }
        }
    }

    /// Takes back the usage of a call that ended or failed before it was among the open calls.
    pub(super) fn return_usage(&mut self, counted: &CountedUsage) {
        for (member, values) in &counted.limited {
            if counted.returns_rate
                && values.per_minute.is_some()
                && let Some(window) = self.windows.get_mut(member)
            {
                window.remove(counted.at_ms);
            }
            if counted.generation == self.generation && values.max_open.is_some() {
                self.discount_open(member);
            }
        }
    }

    /// Counts a call that becomes an open call. One that was counted before, by the present limits,
    /// is not counted again.
    pub(super) fn add_open_call(&mut self, call: &Call, counted: Option<&CountedUsage>) {
        let is_counted = counted.is_some_and(|counted| counted.generation == self.generation);
        if is_counted || !counts(call) || self.limits.is_empty() {
            return;
        }
        for (member, values) in self.limits.clone().of_members(&call.into()) {
            self.count_open(&member, values);
        }
    }

    /// Discounts a call that was open and has ended.
    pub(super) fn remove_open_call(&mut self, call: &Call) {
        if self.limits.is_empty() || !counts(call) {
            return;
        }
        for (member, values) in self.limits.clone().of_members(&call.into()) {
            if values.max_open.is_some() {
                self.discount_open(&member);
            }
        }
    }

    /// Replaces the limits and counts the open calls by them. Rate windows stay: a limit that is
    /// removed and set again permits nothing more.
    pub(super) fn set_limits<'a>(
        &mut self,
        limits: Arc<UsageLimitSet>,
        open_calls: impl Iterator<Item = Arc<Call>> + 'a,
    ) {
        self.limits = limits;
        self.generation += 1;
        self.open.clear();
        open_calls.for_each(|call| self.add_open_call(&call, None));
    }

    /// Adds a call that was accepted before the start.
    pub(super) fn restore_rate(&mut self, members: &CallMembers<'_>, at_ms: u64, now_ms: u64) {
        for (member, values) in self.limits.clone().of_members(members) {
            if values.per_minute.is_some() {
                self.window(&member, now_ms).record(at_ms, now_ms);
            }
        }
    }

    /// Returns the state of every limit that applies.
    pub(super) fn statuses(&mut self, members: &CallMembers<'_>, now_ms: u64) -> Vec<LimitStatus> {
        let mut statuses = Vec::new();
        for (member, values) in self.limits.clone().of_members(members) {
            if let Some(quota) = values.per_minute {
                let window = self.windows.get_mut(&member);
                let (used, wait_ms) = window.map_or((0, None), |window| {
                    let used = window.count(now_ms);
                    (used, (used > 0).then(|| window.wait_ms(used.min(quota), now_ms)))
                });
                statuses.push(LimitStatus {
                    member: member.clone(),
                    quota,
                    window_s: Some(RATE_WINDOW_MS / 1_000),
                    remaining: quota.saturating_sub(used),
                    reset_s: wait_ms.map(|ms| ms.div_ceil(1_000)),
                });
            }
            if let Some(quota) = values.max_open {
                let used = self.open.get(&member).copied().unwrap_or(0);
                let remaining = quota.saturating_sub(used);
                statuses.push(LimitStatus {
                    member,
                    quota,
                    window_s: None,
                    remaining,
                    reset_s: None,
                });
            }
        }
        statuses
    }
}

/// Returns true if limits apply to a call. Those that their callers execute are only recorded.
pub(super) fn counts(call: &Call) -> bool {
    call.target.executor != Executor::CALLER
}
