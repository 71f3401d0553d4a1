//! Usage limits: the number of calls that an agent, a user, a tool or a project may make per
//! minute, have open, and run at the same time. Pure.
//!
//! A limit belongs to a project and names one member of a kind, or `*`, whose values apply to each
//! member that has none of its own. Limits of the configuration hold in every project, in addition
//! to the stored ones: the stricter value applies.

use std::collections::HashMap;
use std::str::FromStr;

use crate::domain::call::Call;
use crate::domain::caller::Caller;

/// Name that stands for each member of a kind. Its values apply where the member has none.
pub const EVERY_MEMBER: &str = "*";

/// The kind of member that a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LimitKind {
    /// The agent that makes the call.
    Agent,
    /// The user that the agent acts for, from its credentials.
    User,
    /// The tool.
    Tool,
    /// The project.
    Project,
}

impl LimitKind {
    /// Every kind, in the order in which they are checked.
    pub const ALL: [Self; 4] = [Self::Agent, Self::User, Self::Tool, Self::Project];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::User => "user",
            Self::Tool => "tool",
            Self::Project => "project",
        }
    }
}

impl FromStr for LimitKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// The values of a limit; an absent value sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitValues {
    /// Maximum number of calls accepted in any 60 seconds.
    pub per_minute: Option<u32>,
    /// Maximum number of calls without an outcome.
    pub max_open: Option<u32>,
    /// Maximum number of attempts in flight. Further calls are queued.
    pub max_parallel: Option<u32>,
}

impl LimitValues {
    /// Returns true if no value is set.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Returns these values; those that are absent are taken from `defaults`.
    pub fn or(self, defaults: Self) -> Self {
        Self {
            per_minute: self.per_minute.or(defaults.per_minute),
            max_open: self.max_open.or(defaults.max_open),
            max_parallel: self.max_parallel.or(defaults.max_parallel),
        }
    }

    /// Returns the lower of each pair of values.
    pub fn stricter(self, other: Self) -> Self {
        Self {
            per_minute: stricter(self.per_minute, other.per_minute),
            max_open: stricter(self.max_open, other.max_open),
            max_parallel: stricter(self.max_parallel, other.max_parallel),
        }
    }
}

/// Returns the lower of two limits; an absent one sets no limit.
pub fn stricter(one: Option<u32>, other: Option<u32>) -> Option<u32> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// A stored limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageLimit {
    /// Project that the limit belongs to. For a limit of the kind project, the same as `name`.
    pub project: String,
    /// Kind of the member.
    pub kind: LimitKind,
    /// Name of the member, or `*` for each member without a value of its own.
    pub name: String,
    /// The values.
    pub values: LimitValues,
    /// Time of the last change, in Unix milliseconds.
    pub updated_ms: u64,
}

/// A limit of the configuration. It holds in every project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredLimit {
    /// Kind of the member.
    pub kind: LimitKind,
    /// Name of the member, or `*` for each member without a value of its own.
    pub name: String,
    /// The values.
    pub values: LimitValues,
}

/// A member of a kind in a project: the subject that usage is counted for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LimitMember {
    /// Kind of the member.
    pub kind: LimitKind,
    /// Project of the member.
    pub project: String,
    /// Name of the member.
    pub name: String,
}

impl LimitMember {
    /// Describes the member in a message: `agent "ada"`.
    pub fn describe(&self) -> String {
        format!("{} \"{}\"", self.kind.as_str(), self.name)
    }
}

/// The names by which the limits of one call are found.
#[derive(Debug, Clone, Copy)]
pub struct CallMembers<'a> {
    /// Project of the call.
    pub project: &'a str,
    /// Agent of the call.
    pub agent: &'a str,
    /// User that the agent acts for.
    pub user: Option<&'a str>,
    /// Requested tool; `None` if there is no particular one.
    pub tool: Option<&'a str>,
}

impl<'a> CallMembers<'a> {
    /// Returns the members of a request by this caller.
    pub fn of_request(caller: &'a Caller, tool: Option<&'a str>) -> Self {
        let user = caller.attributes.user.as_deref();
        Self { project: &caller.project, agent: &caller.agent, user, tool }
    }

    /// Returns the name of the member of this kind, if the call has one.
    pub fn name(&self, kind: LimitKind) -> Option<&'a str> {
        match kind {
            LimitKind::Agent => Some(self.agent),
            LimitKind::User => self.user,
            LimitKind::Tool => self.tool,
            LimitKind::Project => Some(self.project),
        }
    }
}

impl<'a> From<&'a Call> for CallMembers<'a> {
    fn from(call: &'a Call) -> Self {
        Self {
            project: &call.project,
            agent: &call.origin.agent,
            user: call.origin.attributes.user.as_deref(),
            tool: Some(&call.tool_name),
        }
    }
}

type ValuesByName = HashMap<String, LimitValues, foldhash::fast::RandomState>;

/// The limits of one kind.
#[derive(Debug, Clone, Default, PartialEq)]
struct KindLimits {
    by_project: HashMap<String, ValuesByName, foldhash::fast::RandomState>,
    configured: ValuesByName,
}

impl KindLimits {
    fn is_empty(&self) -> bool {
        self.by_project.is_empty() && self.configured.is_empty()
    }
}

fn find_values(values: &ValuesByName, name: &str) -> LimitValues {
    let exact = values.get(name).copied().unwrap_or_default();
    if exact.per_minute.is_some() && exact.max_open.is_some() && exact.max_parallel.is_some() {
        return exact;
    }
    exact.or(values.get(EVERY_MEMBER).copied().unwrap_or_default())
}

/// All limits in force, indexed by member.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UsageLimitSet {
    kinds: [KindLimits; 4],
    has_limits: bool,
    limits_caller_concurrency: bool,
}

impl UsageLimitSet {
    /// Builds the index.
    pub fn new(stored: &[UsageLimit], configured: &[ConfiguredLimit]) -> Self {
        let mut kinds: [KindLimits; 4] = Default::default();
        for limit in stored {
            // A limit of the kind project is found by its name alone, under no project. No project
            // is named `*`.
            let project = if limit.kind == LimitKind::Project { "" } else { &limit.project };
            let by_name = kinds[limit.kind as usize].by_project.entry(project.to_owned());
            by_name.or_default().insert(limit.name.clone(), limit.values);
        }
        for limit in configured {
            kinds[limit.kind as usize].configured.insert(limit.name.clone(), limit.values);
        }
        let values_of = |kind: LimitKind| {
            let kind = &kinds[kind as usize];
            kind.by_project.values().flat_map(HashMap::values).chain(kind.configured.values())
        };
        let mut caller_values = [LimitKind::Agent, LimitKind::User].into_iter().flat_map(values_of);
        let limits_caller_concurrency = caller_values.any(|values| values.max_parallel.is_some());
        let has_limits = !kinds.iter().all(KindLimits::is_empty);
        Self { kinds, has_limits, limits_caller_concurrency }
    }

    /// Returns true if there is no limit.
    pub fn is_empty(&self) -> bool {
        !self.has_limits
    }

    /// Returns true if the attempts in flight of an agent or a user are limited.
    pub fn limits_caller_concurrency(&self) -> bool {
        self.limits_caller_concurrency
    }

    /// Returns the values for one member.
    pub fn find(&self, kind: LimitKind, project: &str, name: &str) -> LimitValues {
        let limits = &self.kinds[kind as usize];
        let project = if kind == LimitKind::Project { "" } else { project };
        let stored = limits.by_project.get(project).map(|values| find_values(values, name));
        let stored = stored.unwrap_or_default();
        match limits.configured.is_empty() {
            true => stored,
            false => stored.stricter(find_values(&limits.configured, name)),
        }
    }

    /// Returns the values that apply to each member of a call, by kind. Empty values stand for no
    /// limit and for no such member.
    pub fn of_members(&self, members: &CallMembers<'_>) -> LimitsByKind {
        let mut all = LimitsByKind::default();
        for kind in LimitKind::ALL {
            if let Some(name) = members.name(kind)
                && !self.kinds[kind as usize].is_empty()
            {
                all[kind as usize] = self.find(kind, members.project, name);
            }
        }
        all
    }
}

/// The values for one member of each kind, in the order of [`LimitKind::ALL`].
pub type LimitsByKind = [LimitValues; 4];

/// Length of the window of a rate limit.
pub const RATE_WINDOW_MS: u64 = 60_000;

/// Length of one slot of the window.
const SLOT_MS: u64 = 500;

/// Number of slots: those of a whole window, and the one in progress.
const SLOTS: usize = (RATE_WINDOW_MS / SLOT_MS) as usize + 1;

/// Counts events in a sliding window of one minute, in slots of half a second. An event counts
/// until its whole slot is older than the window, so that no 60 seconds have more than the limit.
#[derive(Debug, Clone)]
pub struct RateWindow {
    counts: Box<[u32; SLOTS]>,
    /// Number of the slot in progress: the time divided by the length of a slot.
    newest: u64,
    total: u32,
}

impl RateWindow {
    /// Creates an empty window.
    pub fn at(now_ms: u64) -> Self {
        Self { counts: Box::new([0; SLOTS]), newest: now_ms / SLOT_MS, total: 0 }
    }

    fn advance(&mut self, now_ms: u64) {
        let slot = now_ms / SLOT_MS;
        if slot.saturating_sub(self.newest) >= SLOTS as u64 {
            (*self.counts, self.total) = ([0; SLOTS], 0);
            self.newest = slot;
        }
        while self.newest < slot {
            self.newest += 1;
            let count = &mut self.counts[(self.newest % SLOTS as u64) as usize];
            self.total -= std::mem::take(count);
        }
    }

    /// Returns the number of events in the window that ends now.
    pub fn count(&mut self, now_ms: u64) -> u32 {
        self.advance(now_ms);
        self.total
    }

    /// Adds an event that happened at `at_ms`. An event in the future counts as one of now, and one
    /// before the window is not counted.
    pub fn record(&mut self, at_ms: u64, now_ms: u64) {
        self.advance(now_ms);
        let slot = (at_ms / SLOT_MS).min(self.newest);
        if self.newest - slot < SLOTS as u64 {
            self.counts[(slot % SLOTS as u64) as usize] += 1;
            self.total += 1;
        }
    }

    /// Removes an event that was recorded at `at_ms`, unless it has left the window.
    pub fn remove(&mut self, at_ms: u64) {
        let slot = (at_ms / SLOT_MS).min(self.newest);
        let count = &mut self.counts[(slot % SLOTS as u64) as usize];
        if self.newest - slot < SLOTS as u64 && *count > 0 {
            *count -= 1;
            self.total -= 1;
        }
    }

    /// Returns the time until fewer than `limit` events are in the window; 0 if there are now.
    pub fn wait_ms(&mut self, limit: u32, now_ms: u64) -> u64 {
        self.advance(now_ms);
        let mut remaining = self.total;
        let oldest = self.newest.saturating_sub(SLOTS as u64 - 1);
        for slot in oldest..=self.newest {
            if remaining < limit {
                return (slot + SLOTS as u64 - 1).saturating_mul(SLOT_MS).saturating_sub(now_ms);
            }
            remaining -= self.counts[(slot % SLOTS as u64) as usize];
        }
        (self.newest + SLOTS as u64).saturating_mul(SLOT_MS).saturating_sub(now_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(kind: LimitKind, name: &str, values: LimitValues) -> UsageLimit {
        let project = if kind == LimitKind::Project { name } else { "p" };
        UsageLimit { project: project.into(), kind, name: name.into(), values, updated_ms: 0 }
    }

    fn per_minute(per_minute: u32) -> LimitValues {
        LimitValues { per_minute: Some(per_minute), ..LimitValues::default() }
    }

    #[test]
    fn a_members_own_value_comes_before_the_default_and_the_stricter_source_wins() {
        let open = LimitValues { max_open: Some(5), ..LimitValues::default() };
        let stored = [
            limit(LimitKind::Agent, "ada", open),
            limit(LimitKind::Agent, "*", per_minute(60)),
            limit(LimitKind::Project, "p", per_minute(100)),
        ];
        let (kind, name) = (LimitKind::Agent, "ada".to_owned());
        let configured = [ConfiguredLimit { kind, name, values: per_minute(40) }];
        let limits = UsageLimitSet::new(&stored, &configured);
        let agent = |project, name| limits.find(LimitKind::Agent, project, name);
        assert_eq!(agent("p", "ada"), LimitValues { per_minute: Some(40), ..open });
        assert_eq!(agent("p", "bob"), per_minute(60));
        assert_eq!(agent("q", "bob"), LimitValues::default());
        assert_eq!(agent("q", "ada"), per_minute(40), "the configuration holds everywhere");
        let members = CallMembers { project: "p", agent: "bob", user: None, tool: Some("t") };
        let none = LimitValues::default();
        assert_eq!(limits.of_members(&members), [per_minute(60), none, none, per_minute(100)]);
        assert_eq!(UsageLimitSet::new(&[], &[]).of_members(&members), [none; 4]);
    }

    #[test]
    fn no_minute_has_more_events_than_the_limit() {
        let (limit, mut window) = (10, RateWindow::at(1_000_000));
        let mut accepted: Vec<u64> = Vec::new();
        let mut now_ms = 1_000_000;
        for n in 0..20_000_u64 {
            now_ms += n * 7_919 % 97;
            let wait_ms = window.wait_ms(limit, now_ms);
            assert_eq!(wait_ms == 0, window.count(now_ms) < limit);
            if wait_ms == 0 {
                window.record(now_ms, now_ms);
                accepted.push(now_ms);
            } else {
                assert!(wait_ms <= RATE_WINDOW_MS + SLOT_MS);
                assert_eq!(window.clone().wait_ms(limit, now_ms + wait_ms), 0);
            }
        }
        assert!(accepted.len() > 100, "{}", accepted.len());
        for (n, first) in accepted.iter().enumerate() {
            let in_minute = accepted[n..].iter().take_while(|at| **at < first + RATE_WINDOW_MS);
            assert!(in_minute.count() <= limit as usize);
        }
    }

    #[test]
    fn removed_and_restored_events_count_as_they_should() {
        let mut window = RateWindow::at(0);
        let now_ms = 1_000_000;
        window.record(now_ms - 30_000, now_ms);
        window.record(now_ms - RATE_WINDOW_MS - 2 * SLOT_MS, now_ms);
        window.record(now_ms + 3_600_000, now_ms);
        assert_eq!(window.count(now_ms), 2, "too old; and a time in the future counts as now");
        window.remove(now_ms);
        assert_eq!(window.count(now_ms), 1);
        assert_eq!(window.wait_ms(1, now_ms), 30_000 + SLOT_MS);
        assert_eq!(window.count(now_ms + 31_000), 0);
    }
}
