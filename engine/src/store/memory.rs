//! An in-memory store: for embedding without durability, for tests and for the simulation.
//!
//! It is deliberately simple: one lock over plain maps. It keeps everything until it is purged.

mod directory;
mod grants;
mod loops;
mod upstreams;
mod utp;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;

use super::{
    CallFilter, Created, DeliveryFilter, EventScope, IdempotencyKey, NewCall, Open, Purged, Run,
    Saved, Store, StoreError,
};
use crate::call::Call;
use crate::delivery::{Delivery, KEPT_TRIES, Try};
use crate::directory::{AuditEntry, Change, Directory};
use crate::event::{Event, Kind, Record};
use crate::id::CallId;

#[derive(Default)]
struct State {
    places: u64,
    numbers: u64,
    calls: BTreeMap<u64, Call>,
    by_id: HashMap<CallId, u64>,
    events: BTreeMap<u64, Event>,
    keys: HashMap<(String, String, String), (CallId, String)>,
    runs: BTreeMap<(String, String), Run>,
    deliveries: BTreeMap<CallId, (Delivery, Vec<Try>)>,
    directory: Directory,
    /// The tools of the projects themselves.
    own: Vec<crate::tool::Definition>,
    /// The tools of upstreams, each with its upstream's name.
    brought: Vec<(String, crate::tool::Definition)>,
    audit: Vec<AuditEntry>,
    loops: loops::Loops,
    grants: grants::Grants,
}

/// Stores everything in memory.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    utp: utp::Utp,
}

impl State {
    fn call(&self, project: &str, id: &CallId) -> Option<&Call> {
        let call = self.by_id.get(id).and_then(|place| self.calls.get(place));
        call.filter(|call| call.project == project)
    }

    fn record(&mut self, call: &Call, records: Vec<Record>) {
        for record in records {
            self.numbers += 1;
            let (call_id, run_id) = (call.id.clone(), call.run_id.clone());
            let (number, asked_as) = (self.numbers, call.asked.call_id.clone());
            let event = Event { number, call_id, run_id, asked_as, record };
            self.events.insert(self.numbers, event);
        }
    }

    fn known(&self, project: &str, key: &IdempotencyKey) -> Option<Created> {
        let place = (project.to_owned(), key.agent.clone(), key.key.clone());
        let (id, fingerprint) = self.keys.get(&place)?;
        if *fingerprint != key.fingerprint {
            return Some(Created::Mismatch(id.clone()));
        }
        let call = self.by_id.get(id).and_then(|place| self.calls.get(place))?;
        Some(Created::Replayed(Box::new(call.clone())))
    }

    fn purge_runs(&mut self, before_ms: u64, limit: usize) -> usize {
        let Self { runs, calls, .. } = self;
        let mut left = limit;
        runs.retain(|(project, run_id), run| {
            let mine = |call: &Call| call.project == *project && call.run_id == *run_id;
            let goes = left > 0 && run.updated_ms < before_ms && !calls.values().any(mine);
            left -= usize::from(goes);
            !goes
        });
        limit - left
    }

    fn in_scope(&self, event: &Event, scope: &EventScope) -> bool {
        let call = || self.by_id.get(&event.call_id).and_then(|place| self.calls.get(place));
        match scope {
            EventScope::Call { project, id } => {
                event.call_id == *id && call().is_some_and(|call| call.project == *project)
            }
            EventScope::Run { project, run_id } => {
                call().is_some_and(|call| call.project == *project && call.run_id == *run_id)
            }
            EventScope::Project(project) => call().is_some_and(|call| call.project == *project),
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn create(&self, new: NewCall) -> Result<Created, StoreError> {
        let mut state = self.state.lock();
        if let Some(key) = &new.key {
            if let Some(known) = state.known(&new.call.project, key) {
                return Ok(known);
            }
            let place = (new.call.project.clone(), key.agent.clone(), key.key.clone());
            state.keys.insert(place, (new.call.id.clone(), key.fingerprint.clone()));
        }
        state.places += 1;
        let place = state.places;
        state.by_id.insert(new.call.id.clone(), place);
        state.record(&new.call, new.records);
        if let Some(delivery) = Delivery::of(&new.call) {
            state.deliveries.insert(new.call.id.clone(), (delivery, Vec::new()));
        }
        state.calls.insert(place, Arc::unwrap_or_clone(new.call));
        Ok(Created::New)
    }

    async fn used(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<Created>, StoreError> {
        Ok(self.state.lock().known(project, key))
    }

    async fn save(&self, call: Arc<Call>, records: Vec<Record>) -> Result<Saved, StoreError> {
        let mut state = self.state.lock();
        let Some(place) = state.by_id.get(&call.id).copied() else { return Ok(Saved::Stale) };
        let follows =
            |stored: &Call| stored.project == call.project && stored.version + 1 == call.version;
        if !state.calls.get(&place).is_some_and(follows) {
            return Ok(Saved::Stale);
        }
        state.record(&call, records);
        if let Some(ended_ms) = call.completed_ms
            && let Some((delivery, _)) = state.deliveries.get_mut(&call.id)
            && let Some(due) = delivery.made_due(ended_ms)
        {
            *delivery = due;
        }
        state.calls.insert(place, Arc::unwrap_or_clone(call));
        Ok(Saved::Yes)
    }

    async fn append(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<Record>,
    ) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        if let Some(call) = state.call(project, id).cloned() {
            state.record(&call, records);
        }
        Ok(())
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        Ok(self.state.lock().call(project, id).cloned())
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let state = self.state.lock();
        let fits = |call: &Call| {
            call.project == filter.project
                && filter.run_id.as_ref().is_none_or(|run| *run == call.run_id)
                && filter.tool_name.as_ref().is_none_or(|tool| *tool == call.tool_name)
                && filter.status.is_none_or(|status| status == call.status)
                && (!filter.background || call.asked.background)
                && filter.since_ms.is_none_or(|since| call.created_ms >= since)
        };
        let older = |call: &Call| filter.before.as_ref().is_none_or(|before| call.id < *before);
        let mut all: Vec<&Call> =
            state.calls.values().filter(|call| older(call) && fits(call)).collect();
        all.sort_by(|a, b| b.id.cmp(&a.id));
        let mut bytes = 0;
        let wanted = all.into_iter().take(filter.limit).take_while(|call| {
            let wanted = !filter.is_enough(bytes);
            bytes += call.bytes();
            wanted
        });
        Ok(wanted.cloned().collect())
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<Open>, StoreError> {
        let state = self.state.lock();
        let open = state.calls.range(after.saturating_add(1)..);
        let open = open.filter(|(_, call)| !call.status.is_terminal());
        Ok(open
            .take(limit)
            .map(|(place, call)| Open { place: *place, call: call.clone() })
            .collect())
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError> {
        let state = self.state.lock();
        let later = state.events.range(after.saturating_add(1)..).map(|(_, event)| event);
        Ok(later.filter(|event| state.in_scope(event, &scope)).take(limit).cloned().collect())
    }

    async fn newest_event(&self, scope: EventScope) -> Result<u64, StoreError> {
        let state = self.state.lock();
        let newest = state.events.values().rev().find(|event| state.in_scope(event, &scope));
        Ok(newest.map_or(0, |event| event.number))
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let place = (project.to_owned(), run_id.to_owned());
        Ok(self.state.lock().runs.get(&place).cloned())
    }

    async fn put_run(&self, run: Run) -> Result<(), StoreError> {
        let place = (run.project.clone(), run.run_id.clone());
        self.state.lock().runs.insert(place, run);
        Ok(())
    }

    async fn newest_record(
        &self,
        project: &str,
        id: &CallId,
        kind: Kind,
    ) -> Result<Option<Record>, StoreError> {
        let state = self.state.lock();
        let scope = EventScope::Call { project: project.to_owned(), id: id.clone() };
        let mut newest_first = state.events.values().rev();
        let found =
            newest_first.find(|event| event.record.kind == kind && state.in_scope(event, &scope));
        Ok(found.map(|event| event.record.clone()))
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        let state = self.state.lock();
        let place = |delivery: &Delivery| Some((delivery.due_ms?, delivery.call_id.clone()));
        let mut pending: Vec<&Delivery> = state.deliveries.values().map(|(one, _)| one).collect();
        pending.retain(|delivery| place(delivery).is_some_and(|at| Some(at) > after));
        pending.sort_by_key(|delivery| place(delivery));
        Ok(pending.into_iter().take(limit).cloned().collect())
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        let state = self.state.lock();
        let fits = |delivery: &&Delivery| {
            delivery.project == filter.project
                && filter.status.is_none_or(|status| status == delivery.status)
                && filter.before.as_ref().is_none_or(|before| delivery.call_id < *before)
        };
        let newest_first = state.deliveries.values().rev().map(|(delivery, _)| delivery);
        Ok(newest_first.filter(fits).take(filter.limit).cloned().collect())
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, StoreError> {
        let state = self.state.lock();
        let found = state.deliveries.get(id);
        Ok(found.filter(|(delivery, _)| delivery.project == project).cloned())
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<Try>,
    ) -> Result<Saved, StoreError> {
        let mut state = self.state.lock();
        let known = state.deliveries.get_mut(&delivery.call_id);
        let Some((stored, tries)) = known.filter(|(stored, _)| {
            stored.project == delivery.project && stored.version + 1 == delivery.version
        }) else {
            return Ok(Saved::Stale);
        };
        *stored = delivery;
        tries.extend(tried);
        let over = tries.len().saturating_sub(KEPT_TRIES as usize);
        tries.drain(..over);
        Ok(Saved::Yes)
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<Purged, StoreError> {
        let mut state = self.state.lock();
        let old: Vec<(u64, CallId)> = state
            .calls
            .iter()
            .filter(|(_, call)| call.completed_ms.is_some_and(|at| at < ended_before_ms))
            .take(limit)
            .map(|(place, call)| (*place, call.id.clone()))
            .collect();
        for (place, id) in &old {
            state.calls.remove(place);
            state.by_id.remove(id);
            state.events.retain(|_, event| event.call_id != *id);
            state.keys.retain(|_, (call, _)| call != id);
            state.deliveries.remove(id);
        }
        let oldest = state.calls.values().map(|call| call.created_ms).min();
        self.utp.forget(oldest.unwrap_or(u64::MAX).min(ended_before_ms));
        let runs = state.purge_runs(ended_before_ms, limit);
        let loops = state.purge_loops(ended_before_ms, limit);
        let mut left = limit;
        state.audit.retain(|entry| {
            let goes = entry.at_ms < ended_before_ms && left > 0;
            left -= usize::from(goes);
            !goes
        });
        let calls = old.len();
        let most = calls.max(runs).max(loops).max(limit - left);
        Ok(Purged { calls, more: most == limit })
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        Ok(self.state.lock().directory.version)
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        let state = self.state.lock();
        let mut directory = state.directory.clone();
        directory.tools.extend(state.own.iter().cloned());
        directory.tools.extend(state.brought.iter().map(|(_, tool)| tool.clone()));
        Ok(directory)
    }

    async fn change(
        &self,
        change: Change,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<Saved, StoreError> {
        let mut state = self.state.lock();
        if state.directory.version != decided_on {
            return Ok(Saved::Stale);
        }
        state.directory.version += 1;
        let at_ms = audit.as_ref().map(|entry| entry.at_ms);
        match &change {
            Change::PutTools(tools) => {
                tools.iter().for_each(|tool| self.utp.remember(tool, at_ms));
            }
            Change::DropTool { project, name } => self.utp.retire(project, name, at_ms),
            _ => {}
        }
        state.apply(change);
        state.audit.extend(audit);
        Ok(Saved::Yes)
    }

    async fn audit(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.state.lock().audit.push(entry);
        Ok(())
    }

    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let state = self.state.lock();
        let about = |entry: &&AuditEntry| project.as_ref().is_none_or(|p| *p == entry.project);
        Ok(state.audit.iter().rev().filter(about).take(limit).cloned().collect())
    }

    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn utp(&self) -> &dyn super::utp::UtpStore {
        &self.utp
    }

    fn loops(&self) -> &dyn super::loops::LoopStore {
        self
    }

    fn grants(&self) -> &dyn super::grants::GrantStore {
        self
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        Ok(0)
    }
}

impl State {
    fn apply(&mut self, change: Change) {
        let named = |known: &crate::tool::Definition, project: Option<&str>, name: &str| {
            known.project.as_deref() == project && known.name == name
        };
        match change {
            Change::PutTools(tools) => {
                for tool in tools {
                    self.own.retain(|known| !named(known, tool.project.as_deref(), &tool.name));
                    self.own.push(tool);
                }
            }
            Change::DropTool { project, name } => {
                self.own.retain(|known| !named(known, Some(&project), &name));
            }
            Change::PutUpstream(_)
            | Change::DropUpstream { .. }
            | Change::SetUpstreamTools { .. } => self.change_upstream(change),
            other => directory::apply(&mut self.directory, other),
        }
    }
}
