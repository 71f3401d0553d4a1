//! The concurrency limiter: it bounds the number of attempts in flight and queues the calls that
//! wait for a slot.
//!
//! Five limits apply together: engine, project, tool, agent and user. They count the attempts in
//! flight, wherever these run. Calls that the caller or an agent executes, and those of the tools
//! that hand work to agents, count against none of them. A call that waits for an absent client
//! does not count against the limits of the engine and its project: for these two the client queue
//! takes a permit when it hands the work to a client, so an absent client cannot use up the slots
//! of its project. Calls queue per project and tool, and those of agents and users with a limit in
//! queues of their own; free slots go round-robin over the queues, so a busy tool or agent does not
//! starve the others. All of this is in memory only: after a restart the queues, and the slots of
//! attempts still in flight, are rebuilt from the store.

pub mod key_counts;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::calls::limiter::key_counts::KeyCounts;
use crate::domain::directory::usage_limits::LimitMember;
use crate::domain::id::CallId;

/// A tool of a project: the key of the tool's slots, and the first part of a `QueueId`.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    pub project: String,
    pub tool: String,
}

/// The agent and the user of a call, each only if the number of its attempts in flight is limited.
#[derive(Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlotMembers {
    pub agent: Option<LimitMember>,
    pub user: Option<LimitMember>,
}

impl SlotMembers {
    fn iter(&self) -> impl Iterator<Item = &LimitMember> {
        self.agent.iter().chain(&self.user)
    }
}

/// The counters that the slot of an attempt increments: those of its tool and of the members with a
/// limit, and if it is shared also those of its project and the engine. Every call clones its scope
/// several times, hence the `Arc`.
#[derive(Debug, Clone)]
pub(crate) struct SlotScope {
    pub queue: Arc<QueueKey>,
    /// Set if a limit of the agent or the user applies.
    pub members: Option<Arc<SlotMembers>>,
    /// True if the slot counts against the limits of the engine and the project too.
    pub is_shared: bool,
}

impl SlotScope {
    fn queue_id(&self) -> QueueId {
        (self.queue.clone(), self.members.clone())
    }
}

/// Identifies a queue: its project and tool, and the members with a limit.
type QueueId = (Arc<QueueKey>, Option<Arc<SlotMembers>>);

/// Maximum numbers of slots in use of the engine, a project, a tool and the members. `None` sets no
/// limit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ConcurrencyCaps {
    pub global: Option<u32>,
    pub project: Option<u32>,
    pub tool: Option<u32>,
    pub agent: Option<u32>,
    pub user: Option<u32>,
}

#[derive(Default)]
struct LimiterState {
    global: u32,
    projects: KeyCounts<String>,
    tools: KeyCounts<Arc<QueueKey>>,
    members: KeyCounts<LimitMember>,
    /// Queued calls, each queue in order of arrival.
    queues: BTreeMap<QueueId, BTreeMap<u64, QueuedCall>>,
    /// The queue and the position in it of each queued call.
    positions: HashMap<CallId, (QueueId, u64)>,
    last_position: u64,
    /// The queue that was served last.
    last_served: Option<QueueId>,
    /// True during recovery, while attempts in flight from before the start are not all counted.
    is_recovering: bool,
    /// True if the client queue holds work back because no permit was free.
    has_blocked_deliveries: bool,
}

struct QueuedCall {
    call_id: CallId,
    scope: SlotScope,
    /// Limits at the time the call was queued. They apply if the tool no longer exists.
    caps: ConcurrencyCaps,
}

/// Counts slots in use and holds the queues.
#[derive(Default)]
pub(crate) struct ConcurrencyLimiter {
    state: Mutex<LimiterState>,
    capacity_changed: Notify,
}

/// A slot in use. Dropping it releases the slot.
pub(crate) struct Slot {
    limiter: Arc<ConcurrencyLimiter>,
    scope: SlotScope,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.limiter.state.lock();
        state.release(&self.scope);
        if !state.positions.is_empty() || state.has_blocked_deliveries {
            self.limiter.capacity_changed.notify_one();
        }
    }
}

impl LimiterState {
    fn has_capacity(&self, scope: &SlotScope, caps: &ConcurrencyCaps) -> bool {
        let is_below = |used: u32, cap: Option<u32>| cap.is_none_or(|cap| used < cap);
        // Most tools and projects have no limit, which saves the lookup.
        let has_tool_slot =
            caps.tool.is_none_or(|cap| !self.is_recovering && self.tools.get(&scope.queue) < cap);
        let has_project_slot =
            || caps.project.is_none_or(|cap| self.projects.get(&scope.queue.project) < cap);
        has_tool_slot
            && self.members_have_capacity(scope, caps)
            && (!scope.is_shared || is_below(self.global, caps.global) && has_project_slot())
    }

    fn members_have_capacity(&self, scope: &SlotScope, caps: &ConcurrencyCaps) -> bool {
        let Some(members) = &scope.members else { return true };
        let below = |member: &Option<LimitMember>, cap: Option<u32>| match (member, cap) {
            (Some(member), Some(cap)) => !self.is_recovering && self.members.get(member) < cap,
            _ => true,
        };
        below(&members.agent, caps.agent) && below(&members.user, caps.user)
    }

    fn acquire(&mut self, scope: &SlotScope) {
        if scope.is_shared {
            self.global += 1;
            self.projects.increment(&scope.queue.project);
        }
        self.tools.increment(&scope.queue);
        for member in scope.members.iter().flat_map(|members| members.iter()) {
            self.members.increment(member);
        }
    }

    fn release(&mut self, scope: &SlotScope) {
        if scope.is_shared {
            self.global = self.global.saturating_sub(1);
            self.projects.decrement(&scope.queue.project);
        }
        self.tools.decrement(&scope.queue);
        for member in scope.members.iter().flat_map(|members| members.iter()) {
            self.members.decrement(member);
        }
    }

    fn remove_at(&mut self, queue: &QueueId, position: u64) -> Option<QueuedCall> {
        let queued_call = self.queues.get_mut(queue)?.remove(&position);
        if self.queues.get(queue).is_some_and(BTreeMap::is_empty) {
            self.queues.remove(queue);
        }
        queued_call
    }
}

impl Slot {
    /// Counts the slot for these members from now on, after the limits have changed.
    pub(crate) fn set_members(&mut self, members: Option<Arc<SlotMembers>>) {
        if self.scope.members != members {
            let mut state = self.limiter.state.lock();
            state.release(&self.scope);
            self.scope.members = members;
            state.acquire(&self.scope);
        }
    }
}

impl ConcurrencyLimiter {
    /// Acquires a slot if one is free and no call is queued before this one.
    pub(crate) fn try_acquire(
        self: &Arc<Self>,
        scope: &SlotScope,
        caps: &ConcurrencyCaps,
    ) -> Option<Slot> {
        let mut state = self.state.lock();
        let has_queue = !state.queues.is_empty() && state.queues.contains_key(&scope.queue_id());
        if has_queue || !state.has_capacity(scope, caps) {
            return None;
        }
        state.acquire(scope);
        Some(Slot { limiter: self.clone(), scope: scope.clone() })
    }

    /// Acquires a slot for an attempt that is already in flight, regardless of the limits.
    pub(crate) fn force_acquire(self: &Arc<Self>, scope: SlotScope) -> Slot {
        self.state.lock().acquire(&scope);
        Slot { limiter: self.clone(), scope }
    }

    /// Acquires a slot for work that the client queue hands to a client. If none is free, the next
    /// released slot wakes `claim_queued`, which lets the client queue try again.
    pub(crate) fn try_acquire_delivery(
        self: &Arc<Self>,
        scope: &SlotScope,
        caps: &ConcurrencyCaps,
    ) -> Option<Slot> {
        let mut state = self.state.lock();
        if !state.has_capacity(scope, caps) {
            state.has_blocked_deliveries = true;
            return None;
        }
        state.acquire(scope);
        Some(Slot { limiter: self.clone(), scope: scope.clone() })
    }

    /// Returns true if the client queue was refused a slot since the last call of this method.
    pub(crate) fn take_blocked_deliveries(&self) -> bool {
        std::mem::take(&mut self.state.lock().has_blocked_deliveries)
    }

    /// Withholds the slots of tools, agents and users that have a limit until the attempts in
    /// flight are counted.
    pub(crate) fn begin_recovery(&self) {
        self.state.lock().is_recovering = true;
    }

    /// Ends the recovery: every attempt in flight from before the start has its slot.
    pub(crate) fn end_recovery(&self) {
        self.state.lock().is_recovering = false;
        self.recheck_queues();
    }

    /// Wakes `claim_queued` after the limits may have changed: a queued call may fit now.
    pub(crate) fn recheck_queues(&self) {
        if !self.state.lock().positions.is_empty() {
            self.capacity_changed.notify_one();
        }
    }

    /// Queues a call, unless it is queued already.
    pub(crate) fn enqueue(&self, call_id: CallId, scope: SlotScope, caps: ConcurrencyCaps) {
        let mut state = self.state.lock();
        if !state.positions.contains_key(&call_id) {
            state.last_position += 1;
            let (position, queue) = (state.last_position, scope.queue_id());
            state.positions.insert(call_id.clone(), (queue.clone(), position));
            state
                .queues
                .entry(queue)
                .or_default()
                .insert(position, QueuedCall { call_id, scope, caps });
        }
        drop(state);
        self.capacity_changed.notify_one();
    }

    /// Moves a queued call to the queue of these members, at the same position.
    pub(crate) fn set_queued_members(&self, call_id: &CallId, members: Option<Arc<SlotMembers>>) {
        let state = &mut *self.state.lock();
        let Some((queue, position)) = state.positions.get(call_id).cloned() else { return };
        if queue.1 == members {
            return;
        }
        if let Some(mut queued) = state.remove_at(&queue, position) {
            queued.scope.members = members;
            let queue = queued.scope.queue_id();
            state.positions.insert(call_id.clone(), (queue.clone(), position));
            state.queues.entry(queue).or_default().insert(position, queued);
        }
    }

    /// Removes a call that has ended from its queue. Otherwise the queue would hold every canceled
    /// call until a slot becomes free.
    pub(crate) fn dequeue(&self, call_id: &CallId) {
        let mut state = self.state.lock();
        let Some((queue, position)) = state.positions.remove(call_id) else { return };
        state.remove_at(&queue, position);
    }

    /// Takes the next queued call that fits, and acquires its slot. Uses the present limits of the
    /// tool if it still exists.
    pub(crate) fn pop_ready(
        self: &Arc<Self>,
        current_caps: impl Fn(&SlotScope) -> Option<ConcurrencyCaps>,
    ) -> Option<(CallId, Slot)> {
        let mut state = self.state.lock();
        let last_served = state.last_served.clone();
        let fits = |state: &LimiterState, key: &QueueId| {
            let head = state.queues.get(key).and_then(BTreeMap::first_key_value);
            head.is_some_and(|(_, head)| {
                state.has_capacity(&head.scope, &current_caps(&head.scope).unwrap_or(head.caps))
            })
        };
        let mut keys = state.queues.keys();
        let next_key = keys
            .find(|key| last_served.as_ref().is_none_or(|last| *key > last) && fits(&state, key));
        let chosen =
            next_key.or_else(|| state.queues.keys().find(|key| fits(&state, key))).cloned()?;
        let (position, _) = state.queues.get(&chosen)?.first_key_value()?;
        let position = *position;
        let queued_call = state.remove_at(&chosen, position)?;
        state.positions.remove(&queued_call.call_id);
        state.acquire(&queued_call.scope);
        state.last_served = Some(chosen);
        drop(state);
        Some((queued_call.call_id, Slot { limiter: self.clone(), scope: queued_call.scope }))
    }

    /// Waits until a slot may be free or a call was queued; for `claim_queued`.
    pub(crate) async fn wait_for_capacity(&self) {
        self.capacity_changed.notified().await;
    }

    /// Returns the number of queued calls.
    pub(crate) fn queued_count(&self) -> usize {
        self.state.lock().positions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::directory::usage_limits::LimitKind;
    use crate::domain::id::IdGenerator;

    fn slot_scope(project: &str, tool: &str) -> SlotScope {
        let queue = Arc::new(QueueKey { project: project.into(), tool: tool.into() });
        SlotScope { queue, members: None, is_shared: true }
    }

    #[test]
    fn global_project_and_tool_limits_are_enforced() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps {
            global: Some(3),
            project: Some(2),
            tool: Some(1),
            ..ConcurrencyCaps::default()
        };
        let a = limiter.try_acquire(&slot_scope("p", "a"), &caps);
        assert!(a.is_some());
        assert!(limiter.try_acquire(&slot_scope("p", "a"), &caps).is_none(), "the tool's limit");
        let b = limiter.try_acquire(&slot_scope("p", "b"), &caps);
        assert!(b.is_some());
        assert!(limiter.try_acquire(&slot_scope("p", "c"), &caps).is_none(), "the project's limit");
        let c = limiter.try_acquire(&slot_scope("q", "a"), &caps);
        assert!(c.is_some());
        assert!(limiter.try_acquire(&slot_scope("r", "a"), &caps).is_none(), "the engine's limit");
        let parked = SlotScope { is_shared: false, ..slot_scope("p", "c") };
        assert!(
            limiter.try_acquire(&parked, &caps).is_some(),
            "work for a client takes a shared slot when it is handed over"
        );
        drop((a, b, c));
        assert!(limiter.try_acquire(&slot_scope("p", "a"), &caps).is_some());
    }

    #[test]
    fn free_slots_are_given_to_the_queues_in_turn() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps { global: Some(1), ..ConcurrencyCaps::default() };
        let busy = limiter.try_acquire(&slot_scope("p", "busy"), &caps);
        let id_generator = IdGenerator::default();
        for (n, tool) in ["a", "a", "a", "b", "c"].into_iter().enumerate() {
            limiter.enqueue(id_generator.next_call_id(n as u64), slot_scope("p", tool), caps);
        }
        assert!(limiter.pop_ready(|_| None).is_none());
        drop(busy);
        let mut order = Vec::new();
        while let Some((_, slot)) = limiter.pop_ready(|_| None) {
            order.push(slot.scope.queue.tool.clone());
        }
        assert_eq!(order, ["a", "b", "c", "a", "a"]);
        assert_eq!(limiter.queued_count(), 0);
    }

    #[test]
    fn a_dequeued_call_leaves_no_entry() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps { tool: Some(1), ..ConcurrencyCaps::default() };
        let busy = limiter.try_acquire(&slot_scope("p", "a"), &caps);
        let id_generator = IdGenerator::default();
        let ids: Vec<CallId> = (0..10).map(|n| id_generator.next_call_id(n)).collect();
        for id in ids.iter().chain(&ids) {
            limiter.enqueue(id.clone(), slot_scope("p", "a"), caps);
        }
        assert_eq!(limiter.queued_count(), 10, "each call is queued once");
        for id in ids.iter().filter(|id| **id != ids[4]) {
            limiter.dequeue(id);
        }
        limiter.dequeue(&ids[0]);
        let stored_entries = |limiter: &ConcurrencyLimiter| {
            limiter.state.lock().queues.values().map(BTreeMap::len).sum()
        };
        assert_eq!((limiter.queued_count(), stored_entries(&limiter)), (1, 1));
        drop(busy);
        assert_eq!(limiter.pop_ready(|_| None).map(|(id, _)| id), Some(ids[4].clone()));
        assert_eq!((limiter.queued_count(), stored_entries(&limiter)), (0, 0));
    }

    #[test]
    fn queued_calls_are_started_by_the_current_limits() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = |max| ConcurrencyCaps { tool: max, ..ConcurrencyCaps::default() };
        let first = limiter.try_acquire(&slot_scope("p", "a"), &caps(Some(1)));
        let id_generator = IdGenerator::default();
        let ids: Vec<CallId> = (0..4).map(|n| id_generator.next_call_id(n)).collect();
        for id in &ids {
            limiter.enqueue(id.clone(), slot_scope("p", "a"), caps(Some(1)));
        }
        assert!(
            limiter.pop_ready(|_| None).is_none(),
            "without a current limit the stored one applies"
        );
        let second = limiter.pop_ready(|_| Some(caps(Some(2))));
        assert_eq!(second.as_ref().map(|(id, _)| id), Some(&ids[0]));
        assert!(limiter.pop_ready(|_| Some(caps(Some(2)))).is_none());
        drop(first);
        assert!(limiter.pop_ready(|_| Some(caps(Some(1)))).is_none(), "lowered again");
        assert_eq!(limiter.pop_ready(|_| Some(caps(None))).map(|(id, _)| id), Some(ids[1].clone()));
    }

    #[test]
    fn recovered_attempts_are_counted_before_new_ones_start() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps { tool: Some(2), ..ConcurrencyCaps::default() };
        limiter.begin_recovery();
        assert!(limiter.try_acquire(&slot_scope("p", "a"), &caps).is_none());
        assert!(
            limiter.try_acquire(&slot_scope("p", "b"), &ConcurrencyCaps::default()).is_some(),
            "a tool without a limit is not held back"
        );
        let recovered: Vec<Slot> =
            (0..3).map(|_| limiter.force_acquire(slot_scope("p", "a"))).collect();
        limiter.end_recovery();
        assert!(limiter.try_acquire(&slot_scope("p", "a"), &caps).is_none());
        drop(recovered);
        assert!(limiter.try_acquire(&slot_scope("p", "a"), &caps).is_some());
    }

    fn member_scope(tool: &str, agent: &str) -> SlotScope {
        let (kind, project) = (LimitKind::Agent, "p".to_owned());
        let agent = Some(LimitMember { kind, project, name: agent.into() });
        let members = Some(Arc::new(SlotMembers { agent, user: None }));
        SlotScope { members, ..slot_scope("p", tool) }
    }

    #[test]
    fn an_agent_at_its_limit_does_not_hold_up_the_others() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps { agent: Some(1), ..ConcurrencyCaps::default() };
        let first = limiter.try_acquire(&member_scope("a", "ada"), &caps);
        assert!(first.is_some());
        assert!(limiter.try_acquire(&member_scope("b", "ada"), &caps).is_none(), "over all tools");
        let id_generator = IdGenerator::default();
        let ids: Vec<CallId> = (0..3).map(|n| id_generator.next_call_id(n)).collect();
        limiter.enqueue(ids[0].clone(), member_scope("a", "ada"), caps);
        limiter.enqueue(ids[1].clone(), member_scope("a", "bob"), caps);
        let popped = limiter.pop_ready(|_| Some(caps));
        assert_eq!(popped.as_ref().map(|(id, _)| id), Some(&ids[1]), "bob is not behind ada");
        assert!(limiter.pop_ready(|_| Some(caps)).is_none());
        drop(first);
        assert_eq!(limiter.pop_ready(|_| Some(caps)).map(|(id, _)| id), Some(ids[0].clone()));
    }

    #[test]
    fn slots_and_queues_follow_a_new_limit() {
        let limiter = Arc::new(ConcurrencyLimiter::default());
        let caps = ConcurrencyCaps { agent: Some(1), ..ConcurrencyCaps::default() };
        let mut running = limiter.try_acquire(&slot_scope("p", "a"), &caps).unwrap();
        let id = IdGenerator::default().next_call_id(1);
        limiter.enqueue(id.clone(), slot_scope("p", "a"), caps);
        running.set_members(member_scope("a", "ada").members);
        limiter.set_queued_members(&id, member_scope("a", "ada").members);
        assert!(limiter.pop_ready(|_| Some(caps)).is_none(), "the running call counts");
        running.set_members(None);
        assert_eq!(limiter.pop_ready(|_| Some(caps)).map(|(id, _)| id), Some(id));
        drop(running);
        assert_eq!(
            limiter.state.lock().members.get(
                &member_scope("a", "ada").members.as_ref().and_then(|m| m.agent.clone()).unwrap()
            ),
            0
        );
    }
}
