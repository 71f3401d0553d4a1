//! The concurrency limiter: it bounds the number of attempts in flight and queues the calls that
//! wait for a slot.
//!
//! Three limits apply together: engine, project and tool. The first two count attempts that run in
//! this process; a tool's limit also counts work that is handed to a client, so an absent client
//! cannot use up the slots of its project. Calls queue per project and tool, and free slots go
//! round-robin over the queues, so a busy tool does not starve the others. All of this is in memory
//! only: after a restart the queues, and the slots of attempts still in flight, are rebuilt from
//! the store.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::counts::Counts;
use crate::id::CallId;

/// Key of a queue: a project and a tool.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Line {
    pub project: String,
    pub tool: String,
}

/// The limits that an attempt counts against. Every call has one and clones it several times, hence
/// the `Arc`.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub line: Arc<Line>,
    /// True if the attempt runs in this process.
    pub local: bool,
}

/// The limits that apply to a slot scope.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Caps {
    pub global: Option<u32>,
    pub project: Option<u32>,
    pub tool: Option<u32>,
}

#[derive(Default)]
struct State {
    global: u32,
    projects: Counts<String>,
    tools: Counts<Arc<Line>>,
    /// Queued calls, each queue in order of arrival.
    lines: BTreeMap<Arc<Line>, BTreeMap<u64, Waiting>>,
    /// The queue and the position in it of each queued call.
    standing: HashMap<CallId, (Arc<Line>, u64)>,
    came: u64,
    /// The queue that was served last.
    served: Option<Arc<Line>>,
    /// True during recovery, while attempts in flight from before the start are not all counted.
    uncounted: bool,
}

struct Waiting {
    call_id: CallId,
    place: Place,
    /// Limits at the time the call was queued. They apply if the tool no longer exists.
    caps: Caps,
}

/// Counts slots in use and holds the queues.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    freed: Notify,
}

/// A slot in use. Dropping it releases the slot.
pub(crate) struct Slot {
    gate: Arc<Gate>,
    place: Place,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        state.leave(&self.place);
        if !state.standing.is_empty() {
            self.gate.freed.notify_one();
        }
    }
}

impl State {
    fn fits(&self, place: &Place, caps: &Caps) -> bool {
        let below = |used: u32, cap: Option<u32>| cap.is_none_or(|cap| used < cap);
        // Most tools and projects have no limit, which saves the lookup.
        let tool = caps.tool.is_none_or(|cap| !self.uncounted && self.tools.of(&place.line) < cap);
        let project = || caps.project.is_none_or(|cap| self.projects.of(&place.line.project) < cap);
        tool && (!place.local || below(self.global, caps.global) && project())
    }

    fn enter(&mut self, place: &Place) {
        if place.local {
            self.global += 1;
            self.projects.raise(&place.line.project);
        }
        self.tools.raise(&place.line);
    }

    fn leave(&mut self, place: &Place) {
        if place.local {
            self.global = self.global.saturating_sub(1);
            self.projects.lower(&place.line.project);
        }
        self.tools.lower(&place.line);
    }
}

impl State {
    fn step_out(&mut self, line: &Line, at: u64) -> Option<Waiting> {
        let waiting = self.lines.get_mut(line)?.remove(&at);
        if self.lines.get(line).is_some_and(BTreeMap::is_empty) {
            self.lines.remove(line);
        }
        waiting
    }
}

impl Gate {
    /// Acquires a slot if one is free and no call is queued for the same tool.
    pub(crate) fn try_enter(self: &Arc<Self>, place: &Place, caps: &Caps) -> Option<Slot> {
        let mut state = self.state.lock();
        let in_line = !state.lines.is_empty() && state.lines.contains_key(&place.line);
        if in_line || !state.fits(place, caps) {
            return None;
        }
        state.enter(place);
        Some(Slot { gate: self.clone(), place: place.clone() })
    }

    /// Acquires a slot for an attempt that is already in flight, regardless of the limits.
    pub(crate) fn enter(self: &Arc<Self>, place: Place) -> Slot {
        self.state.lock().enter(&place);
        Slot { gate: self.clone(), place }
    }

    /// Withholds slots of tools that have a limit until the attempts in flight are counted.
    pub(crate) fn begin_counting(&self) {
        self.state.lock().uncounted = true;
    }

    /// Ends the recovery: every attempt in flight from before the start has its slot.
    pub(crate) fn end_counting(&self) {
        self.state.lock().uncounted = false;
        self.look_again();
    }

    /// Wakes the dispatcher after the limits may have changed: a queued call may fit now.
    pub(crate) fn look_again(&self) {
        if !self.state.lock().standing.is_empty() {
            self.freed.notify_one();
        }
    }

    /// Queues a call, unless it is queued already.
    pub(crate) fn wait(&self, call_id: CallId, place: Place, caps: Caps) {
        let mut state = self.state.lock();
        if !state.standing.contains_key(&call_id) {
            state.came += 1;
            let (at, line) = (state.came, place.line.clone());
            state.standing.insert(call_id.clone(), (line.clone(), at));
            state.lines.entry(line).or_default().insert(at, Waiting { call_id, place, caps });
        }
        drop(state);
        self.freed.notify_one();
    }

    /// Removes a call that has ended from its queue. Otherwise the queue would hold every canceled
    /// call until a slot becomes free.
    pub(crate) fn give_up(&self, call_id: &CallId) {
        let mut state = self.state.lock();
        let Some((line, at)) = state.standing.remove(call_id) else { return };
        state.step_out(&line, at);
    }

    /// Takes the next queued call that fits, and acquires its slot. Uses the present limits of the
    /// tool if it still exists.
    pub(crate) fn next(
        self: &Arc<Self>,
        now: impl Fn(&Line) -> Option<Caps>,
    ) -> Option<(CallId, Slot)> {
        let mut state = self.state.lock();
        let after = state.served.clone();
        let fits = |state: &State, key: &Arc<Line>| {
            let head = state.lines.get(key).and_then(BTreeMap::first_key_value);
            head.is_some_and(|(_, head)| state.fits(&head.place, &now(key).unwrap_or(head.caps)))
        };
        let mut keys = state.lines.keys();
        let later = keys.find(|key| after.as_ref().is_none_or(|a| *key > a) && fits(&state, key));
        let chosen = later.or_else(|| state.lines.keys().find(|key| fits(&state, key))).cloned()?;
        let (at, _) = state.lines.get(&chosen)?.first_key_value()?;
        let at = *at;
        let waiting = state.step_out(&chosen, at)?;
        state.standing.remove(&waiting.call_id);
        state.enter(&waiting.place);
        state.served = Some(chosen);
        drop(state);
        Some((waiting.call_id, Slot { gate: self.clone(), place: waiting.place }))
    }

    /// Waits until a slot may be free or a call was queued.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Returns the number of queued calls.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().standing.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Minter;

    fn place(project: &str, tool: &str) -> Place {
        let line = Arc::new(Line { project: project.into(), tool: tool.into() });
        Place { line, local: true }
    }

    #[test]
    fn all_three_limits_hold() {
        let gate = Arc::new(Gate::default());
        let caps = Caps { global: Some(3), project: Some(2), tool: Some(1) };
        let a = gate.try_enter(&place("p", "a"), &caps);
        assert!(a.is_some());
        assert!(gate.try_enter(&place("p", "a"), &caps).is_none(), "the tool's limit");
        let b = gate.try_enter(&place("p", "b"), &caps);
        assert!(b.is_some());
        assert!(gate.try_enter(&place("p", "c"), &caps).is_none(), "the project's limit");
        let c = gate.try_enter(&place("q", "a"), &caps);
        assert!(c.is_some());
        assert!(gate.try_enter(&place("r", "a"), &caps).is_none(), "the engine's limit");
        let parked = Place { local: false, ..place("p", "c") };
        assert!(gate.try_enter(&parked, &caps).is_some(), "parked work takes no local place");
        drop((a, b, c));
        assert!(gate.try_enter(&place("p", "a"), &caps).is_some());
    }

    #[test]
    fn free_places_go_round_the_lines() {
        let gate = Arc::new(Gate::default());
        let caps = Caps { global: Some(1), ..Caps::default() };
        let busy = gate.try_enter(&place("p", "busy"), &caps);
        let minter = Minter::default();
        for (n, tool) in ["a", "a", "a", "b", "c"].into_iter().enumerate() {
            gate.wait(minter.call(n as u64), place("p", tool), caps);
        }
        assert!(gate.next(|_| None).is_none());
        drop(busy);
        let mut order = Vec::new();
        while let Some((_, slot)) = gate.next(|_| None) {
            order.push(slot.place.line.tool.clone());
        }
        assert_eq!(order, ["a", "b", "c", "a", "a"]);
        assert_eq!(gate.waiting(), 0);
    }

    #[test]
    fn who_gives_up_leaves_nothing_behind() {
        let gate = Arc::new(Gate::default());
        let caps = Caps { tool: Some(1), ..Caps::default() };
        let busy = gate.try_enter(&place("p", "a"), &caps);
        let minter = Minter::default();
        let ids: Vec<CallId> = (0..10).map(|n| minter.call(n)).collect();
        for id in ids.iter().chain(&ids) {
            gate.wait(id.clone(), place("p", "a"), caps);
        }
        assert_eq!(gate.waiting(), 10, "once each");
        for id in ids.iter().filter(|id| **id != ids[4]) {
            gate.give_up(id);
        }
        gate.give_up(&ids[0]);
        let standing = |gate: &Gate| gate.state.lock().lines.values().map(BTreeMap::len).sum();
        assert_eq!((gate.waiting(), standing(&gate)), (1, 1));
        drop(busy);
        assert_eq!(gate.next(|_| None).map(|(id, _)| id), Some(ids[4].clone()));
        assert_eq!((gate.waiting(), standing(&gate)), (0, 0));
    }

    #[test]
    fn a_line_moves_by_the_limits_of_now() {
        let gate = Arc::new(Gate::default());
        let caps = |most| Caps { tool: most, ..Caps::default() };
        let first = gate.try_enter(&place("p", "a"), &caps(Some(1)));
        let minter = Minter::default();
        let ids: Vec<CallId> = (0..4).map(|n| minter.call(n)).collect();
        for id in &ids {
            gate.wait(id.clone(), place("p", "a"), caps(Some(1)));
        }
        assert!(gate.next(|_| None).is_none(), "of a tool that is gone, the old one holds");
        let second = gate.next(|_| Some(caps(Some(2))));
        assert_eq!(second.as_ref().map(|(id, _)| id), Some(&ids[0]));
        assert!(gate.next(|_| Some(caps(Some(2)))).is_none());
        drop(first);
        assert!(gate.next(|_| Some(caps(Some(1)))).is_none(), "lowered again");
        assert_eq!(gate.next(|_| Some(caps(None))).map(|(id, _)| id), Some(ids[1].clone()));
    }

    #[test]
    fn what_is_out_already_is_counted_before_anybody_gets_in() {
        let gate = Arc::new(Gate::default());
        let caps = Caps { tool: Some(2), ..Caps::default() };
        gate.begin_counting();
        assert!(gate.try_enter(&place("p", "a"), &caps).is_none());
        assert!(gate.try_enter(&place("p", "b"), &Caps::default()).is_some(), "it has no limit");
        let out: Vec<Slot> = (0..3).map(|_| gate.enter(place("p", "a"))).collect();
        gate.end_counting();
        assert!(gate.try_enter(&place("p", "a"), &caps).is_none());
        drop(out);
        assert!(gate.try_enter(&place("p", "a"), &caps).is_some());
    }
}
