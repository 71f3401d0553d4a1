//! Counts usage against the limits of agents, users, tools and projects: the calls of the last
//! minute, and the open calls.
//!
//! Only members that have a limit are counted, so that a server without limits pays nothing. When
//! the limits change, the open calls are counted anew. Rate windows use the monotonic time; after a
//! start they are filled from the stored calls.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::call::Call;
use crate::domain::directory::usage_limits::{
    CallMembers, LimitKind, LimitMember, LimitValues, LimitsByKind, RATE_WINDOW_MS, RateWindow,
    UsageLimitSet,
};
use crate::domain::tool::Executor;

/// Number of members above which those without usage are removed.
const MIN_PRUNED_MEMBERS: usize = 1_024;

/// Time after which a call over the limit of open calls can be tried again. The end of an open call
/// cannot be foreseen.
const OPEN_RETRY_MS: u64 = 1_000;

type ByName<T> = HashMap<String, T, foldhash::fast::RandomState>;

/// A value of a limit that refuses calls. `max_parallel` is not one of them: it queues calls.
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

/// The members and limits that a new call was counted under, so that the count can be undone.
pub(super) struct CountedUsage {
    project: String,
    agent: String,
    user: Option<String>,
    tool: Option<String>,
    limits: LimitsByKind,
    at_ms: u64,
    generation: u64,
    /// True until the call is stored. A call that is not stored does not count against rates.
    returns_rate: bool,
}

impl CountedUsage {
    pub(super) fn keep_rate(&mut self) {
        self.returns_rate = false;
    }

    fn members(&self) -> CallMembers<'_> {
        CallMembers {
            project: &self.project,
            agent: &self.agent,
            user: self.user.as_deref(),
            tool: self.tool.as_deref(),
        }
    }
}

/// The usage of one member.
#[derive(Default)]
struct MemberUsage {
    /// Calls of the last minute; set if the rate of the member is or was limited.
    window: Option<RateWindow>,
    /// Open calls, if their number is limited.
    open: u32,
}

/// Usage by member.
#[derive(Default)]
pub(super) struct UsageCounts {
    limits: Arc<UsageLimitSet>,
    /// By kind, project and name: lookups need no allocated key.
    kinds: [ByName<ByName<MemberUsage>>; 4],
    member_count: usize,
    /// Number of members at which idle ones are removed.
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
        let limits = self.limits.of_members(members);
        if limits.iter().all(|values| values.is_empty()) {
            return Ok(None);
        }
        for (kind, name, values) in limited(members, &limits) {
            if let Some((quota, retry_after_ms)) = self
                .find(kind, members.project, name)
                .and_then(|usage| usage.find_exceeded(values, now_ms))
            {
                let (project, name) = (members.project.to_owned(), name.to_owned());
                let member = LimitMember { kind, project, name };
                return Err(Box::new(LimitExceeded { member, quota, retry_after_ms }));
            }
        }
        for (kind, name, values) in limited(members, &limits) {
            self.update((kind, members.project, name), now_ms, |usage| {
                if values.per_minute.is_some() {
                    usage.window(now_ms).record(now_ms, now_ms);
                }
                usage.open += u32::from(values.max_open.is_some());
            });
        }
        Ok(Some(Box::new(CountedUsage {
            project: members.project.to_owned(),
            agent: members.agent.to_owned(),
            user: members.user.map(str::to_owned),
            tool: members.tool.map(str::to_owned),
            limits,
            at_ms: now_ms,
            generation: self.generation,
            returns_rate: true,
        })))
    }

    fn find(&mut self, kind: LimitKind, project: &str, name: &str) -> Option<&mut MemberUsage> {
        self.kinds[kind as usize].get_mut(project)?.get_mut(name)
    }

    /// Changes the usage of a member. Only a new member allocates a key.
    fn update(
        &mut self,
        (kind, project, name): (LimitKind, &str, &str),
        now_ms: u64,
        change: impl FnOnce(&mut MemberUsage),
    ) {
        if let Some(usage) = self.find(kind, project, name) {
            return change(usage);
        }
        self.prune(now_ms);
        self.member_count += 1;
        let of_project = self.kinds[kind as usize].entry(project.to_owned()).or_default();
        change(of_project.entry(name.to_owned()).or_default());
    }

    /// Removes members without usage if there are many.
    fn prune(&mut self, now_ms: u64) {
        if self.member_count < self.prune_at.max(MIN_PRUNED_MEMBERS) {
            return;
        }
        for of_project in self.kinds.iter_mut().flat_map(HashMap::values_mut) {
            of_project.retain(|_, usage| !usage.is_idle(now_ms));
        }
        let members = self.kinds.iter().flat_map(HashMap::values);
        self.member_count = members.map(HashMap::len).sum();
        self.prune_at = self.member_count * 2;
    }

    /// Takes back the usage of a call that never became an open call.
    pub(super) fn return_usage(&mut self, counted: &CountedUsage) {
        let members = counted.members();
        let counts_open = counted.generation == self.generation;
        for (kind, name, values) in limited(&members, &counted.limits) {
            let Some(usage) = self.find(kind, members.project, name) else { continue };
            if counted.returns_rate
                && values.per_minute.is_some()
                && let Some(window) = &mut usage.window
            {
                window.remove(counted.at_ms);
            }
            if counts_open && values.max_open.is_some() {
                usage.open = usage.open.saturating_sub(1);
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
        let members = CallMembers::from(call);
        let limits = self.limits.of_members(&members);
        for (kind, name, values) in limited(&members, &limits) {
            if values.max_open.is_some() {
                // The time is used only to prune; at 0, members with a count in their window stay.
                self.update((kind, members.project, name), 0, |usage| usage.open += 1);
            }
        }
    }

    /// Subtracts an open call that has ended.
    pub(super) fn remove_open_call(&mut self, call: &Call) {
        if self.limits.is_empty() || !counts(call) {
            return;
        }
        let members = CallMembers::from(call);
        let limits = self.limits.of_members(&members);
        for (kind, name, values) in limited(&members, &limits) {
            if values.max_open.is_some()
                && let Some(usage) = self.find(kind, members.project, name)
            {
                usage.open = usage.open.saturating_sub(1);
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
        let members = self.kinds.iter_mut().flat_map(HashMap::values_mut);
        members.flat_map(HashMap::values_mut).for_each(|usage| usage.open = 0);
        open_calls.for_each(|call| self.add_open_call(&call, None));
    }

    /// Adds a call that was accepted before the engine started to the rate windows.
    pub(super) fn restore_rate(&mut self, members: &CallMembers<'_>, at_ms: u64, now_ms: u64) {
        let limits = self.limits.of_members(members);
        for (kind, name, values) in limited(members, &limits) {
            if values.per_minute.is_some() {
                self.update((kind, members.project, name), now_ms, |usage| {
                    usage.window(now_ms).record(at_ms, now_ms);
                });
            }
        }
    }

    /// Returns the state of every limit that applies to these kinds of members.
    pub(super) fn statuses(
        &mut self,
        members: &CallMembers<'_>,
        kinds: &[LimitKind],
        now_ms: u64,
    ) -> Vec<LimitStatus> {
        let mut statuses = Vec::new();
        let limits = self.limits.of_members(members);
        for (kind, name, values) in limited(members, &limits) {
            if !kinds.contains(&kind) {
                continue;
            }
            let (project, owned) = (members.project.to_owned(), name.to_owned());
            let member = LimitMember { kind, project, name: owned };
            let usage = self.find(kind, members.project, name);
            let open = usage.as_ref().map_or(0, |usage| usage.open);
            let window = usage.and_then(|usage| usage.window.as_mut());
            if let Some(quota) = values.per_minute {
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
                let remaining = quota.saturating_sub(open);
                let (window_s, reset_s) = (None, None);
                statuses.push(LimitStatus { member, quota, window_s, remaining, reset_s });
            }
        }
        statuses
    }
}

impl MemberUsage {
    fn window(&mut self, now_ms: u64) -> &mut RateWindow {
        self.window.get_or_insert_with(|| RateWindow::at(now_ms))
    }

    fn find_exceeded(&mut self, values: LimitValues, now_ms: u64) -> Option<(LimitQuota, u64)> {
        if let (Some(limit), Some(window)) = (values.per_minute, &mut self.window) {
            let wait_ms = window.wait_ms(limit, now_ms);
            if wait_ms > 0 {
                return Some((LimitQuota::PerMinute(limit), wait_ms));
            }
        }
        let limit = values.max_open?;
        (self.open >= limit).then_some((LimitQuota::MaxOpen(limit), OPEN_RETRY_MS))
    }

    fn is_idle(&mut self, now_ms: u64) -> bool {
        let window = self.window.as_mut();
        self.open == 0 && window.is_none_or(|window| window.count(now_ms) == 0)
    }
}

/// Iterates over the members of a call that have a limit.
fn limited<'a>(
    members: &'a CallMembers<'_>,
    limits: &'a LimitsByKind,
) -> impl Iterator<Item = (LimitKind, &'a str, LimitValues)> {
    LimitKind::ALL.into_iter().zip(limits).filter_map(|(kind, values)| {
        let name = members.name(kind).filter(|_| !values.is_empty())?;
        Some((kind, name, *values))
    })
}

/// Returns true if limits apply to a call. Those that their callers execute are only recorded.
pub(super) fn counts(call: &Call) -> bool {
    call.target.executor != Executor::CALLER
}
