//! Runs and their journals in memory.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;

use super::{MemoryStore, State};
use crate::run::{Entry, Happened, Noted, Run};
use crate::store::loops::{LoopStore, RunCreated, RunFilter};
use crate::store::{EventScope, IdempotencyKey, Saved, StoreError};

/// A project and the id of a run.
type Place = (String, String);

#[derive(Default)]
pub(super) struct Loops {
    runs: BTreeMap<Place, Run>,
    journal: BTreeMap<u64, (String, Noted)>,
    keys: HashMap<(String, String, String), (Place, String)>,
}

fn place(run: &Run) -> Place {
    (run.project.clone(), run.id.clone())
}

impl State {
    fn note(&mut self, run: &Run, entries: Vec<Entry>) {
        for entry in entries {
            self.numbers += 1;
            let noted = Noted { number: self.numbers, run_id: run.id.clone(), entry };
            self.loops.journal.insert(self.numbers, (run.project.clone(), noted));
        }
    }

    pub(super) fn purge_loops(&mut self, before_ms: u64, limit: usize) -> usize {
        let Loops { runs, journal, keys } = &mut self.loops;
        let old = |run: &&Run| run.ended_ms.is_some_and(|at_ms| at_ms < before_ms);
        let old: Vec<Place> = runs.values().filter(old).take(limit).map(place).collect();
        let count = old.len();
        for gone in old {
            runs.remove(&gone);
            journal.retain(|_, (project, noted)| {
                (project.as_str(), noted.run_id.as_str()) != (gone.0.as_str(), gone.1.as_str())
            });
            keys.retain(|_, (kept, _)| *kept != gone);
        }
        count
    }
}

#[async_trait]
impl LoopStore for MemoryStore {
    async fn create_loop(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<Entry>,
    ) -> Result<RunCreated, StoreError> {
        let mut state = self.state.lock();
        if let Some(key) = key {
            let name = (run.project.clone(), key.agent, key.key);
            if let Some((known, fingerprint)) = state.loops.keys.get(&name) {
                let same = *fingerprint == key.fingerprint;
                return Ok(match state.loops.runs.get(known).filter(|_| same) {
                    Some(run) => RunCreated::Replayed(Box::new(run.clone())),
                    None => RunCreated::Mismatch(known.1.clone()),
                });
            }
            state.loops.keys.insert(name, (place(&run), key.fingerprint));
        }
        state.note(&run, entries);
        state.loops.runs.insert(place(&run), run);
        Ok(RunCreated::New)
    }

    async fn save_loop(&self, run: Run, entries: Vec<Entry>) -> Result<Saved, StoreError> {
        let mut state = self.state.lock();
        let stored = state.loops.runs.get(&place(&run));
        if stored.is_none_or(|stored| stored.version + 1 != run.version) {
            return Ok(Saved::Stale);
        }
        state.note(&run, entries);
        state.loops.runs.insert(place(&run), run);
        Ok(Saved::Yes)
    }

    async fn loop_run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let place = (project.to_owned(), run_id.to_owned());
        Ok(self.state.lock().loops.runs.get(&place).cloned())
    }

    async fn loop_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError> {
        let state = self.state.lock();
        let fits = |run: &&Run| {
            run.project == filter.project
                && filter.status.is_none_or(|status| status == run.status)
                && filter.model.as_ref().is_none_or(|model| *model == run.model)
                && filter.since_ms.is_none_or(|since| run.created_ms >= since)
                && filter.before.as_ref().is_none_or(|before| run.id < *before)
        };
        let newest_first = state.loops.runs.values().rev();
        Ok(newest_first.filter(fits).take(filter.limit).cloned().collect())
    }

    async fn open_loops(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let state = self.state.lock();
        let later = state.loops.runs.iter().filter(|(place, _)| Some(*place) > after.as_ref());
        let open = later.map(|(_, run)| run).filter(|run| !run.status.is_over());
        Ok(open.take(limit).cloned().collect())
    }

    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<Noted>, StoreError> {
        let state = self.state.lock();
        let all = state.loops.journal.values();
        let mine = all.filter(|(owner, noted)| owner == project && noted.run_id == run_id);
        Ok(mine.map(|(_, noted)| noted.clone()).collect())
    }

    async fn happened(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Happened>, StoreError> {
        let state = self.state.lock();
        let (owner, run) = (project.to_owned(), run_id.to_owned());
        let scope = EventScope::Run { project: owner, run_id: run };
        let events = state.events.range(after.saturating_add(1)..).map(|(_, event)| event);
        let calls = events.filter(|event| state.in_scope(event, &scope)).take(limit);
        let entries = state.loops.journal.range(after.saturating_add(1)..);
        let entries = entries.map(|(_, (owner, noted))| (owner, noted));
        let entries = entries.filter(|(owner, noted)| *owner == project && noted.run_id == run_id);
        let entries = entries.take(limit).map(|(_, noted)| Happened::Run(noted.clone()));
        let mut all: Vec<Happened> =
            calls.map(|event| Happened::Call(event.clone())).chain(entries).collect();
        all.sort_by_key(Happened::number);
        all.truncate(limit);
        Ok(all)
    }
}
