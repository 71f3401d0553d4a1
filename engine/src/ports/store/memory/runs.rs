//! Runs and their journals in memory.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;

use super::{MemoryState, MemoryStore};
use crate::domain::run::{JournalEntry, JournalRecord, Run, RunEvent};
use crate::ports::store::runs::{CreateRunResult, RunFilter, RunStore};
use crate::ports::store::undelivered::UndeliveredRequest;
use crate::ports::store::{EventScope, IdempotencyKey, SaveResult, StoreError};

/// A project and the id of a run.
type RunKey = (String, String);

#[derive(Default)]
pub(super) struct MemoryRuns {
    runs: BTreeMap<RunKey, Run>,
    journal: BTreeMap<u64, (String, JournalEntry)>,
    keys: HashMap<(String, String, String), (RunKey, String)>,
}

impl MemoryRuns {
    /// Returns every run, ordered by project and id.
    pub(super) fn all(&self) -> impl Iterator<Item = &Run> {
        self.runs.values()
    }
}

fn run_key(run: &Run) -> RunKey {
    (run.project.clone(), run.id.clone())
}

impl MemoryState {
    fn append_journal(&mut self, run: &Run, entries: Vec<JournalRecord>) {
        for entry in entries {
            self.last_number += 1;
            let journal_entry =
                JournalEntry { number: self.last_number, run_id: run.id.clone(), record: entry };
            self.runs.journal.insert(self.last_number, (run.project.clone(), journal_entry));
        }
    }

    pub(super) fn purge_ended_runs(&mut self, before_ms: u64, limit: usize) -> usize {
        let MemoryRuns { runs, journal, keys } = &mut self.runs;
        let old = |run: &&Run| run.ended_ms.is_some_and(|at_ms| at_ms < before_ms);
        let old: Vec<RunKey> = runs.values().filter(old).take(limit).map(run_key).collect();
        let count = old.len();
        for key in old {
            runs.remove(&key);
            journal.retain(|_, (project, entry)| {
                (project.as_str(), entry.run_id.as_str()) != (key.0.as_str(), key.1.as_str())
            });
            keys.retain(|_, (owner, _)| *owner != key);
        }
        count
    }
}

#[async_trait]
impl RunStore for MemoryStore {
    async fn create_run(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<JournalRecord>,
        undelivered: Option<UndeliveredRequest>,
    ) -> Result<CreateRunResult, StoreError> {
        let mut state = self.state.lock();
        if let Some(key) = key {
            let name = (run.project.clone(), key.agent, key.key);
            if let Some((existing, fingerprint)) = state.runs.keys.get(&name) {
                let is_same = *fingerprint == key.fingerprint;
                return Ok(match state.runs.runs.get(existing).filter(|_| is_same) {
                    Some(run) => CreateRunResult::Replayed(Box::new(run.clone())),
                    None => CreateRunResult::Mismatch(existing.1.clone()),
                });
            }
            state.runs.keys.insert(name, (run_key(&run), key.fingerprint));
        }
        state.append_journal(&run, entries);
        state.runs.runs.insert(run_key(&run), run);
        state.undelivered.extend(undelivered.map(|request| (request.id.clone(), request)));
        Ok(CreateRunResult::New)
    }

    async fn save_run(
        &self,
        run: Run,
        entries: Vec<JournalRecord>,
    ) -> Result<SaveResult, StoreError> {
        let mut state = self.state.lock();
        let stored = state.runs.runs.get(&run_key(&run));
        if stored.is_none_or(|stored| stored.version + 1 != run.version) {
            return Ok(SaveResult::Conflict);
        }
        state.append_journal(&run, entries);
        state.runs.runs.insert(run_key(&run), run);
        Ok(SaveResult::Saved)
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let key = (project.to_owned(), run_id.to_owned());
        Ok(self.state.lock().runs.runs.get(&key).cloned())
    }

    async fn list_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError> {
        let state = self.state.lock();
        let fits = |run: &&Run| {
            run.project == filter.project
                && filter.status.is_none_or(|status| status == run.status)
                && filter.model.as_ref().is_none_or(|model| *model == run.model)
                && filter.since_ms.is_none_or(|since| run.created_ms >= since)
                && filter.before.as_ref().is_none_or(|before| run.id < *before)
        };
        let newest_first = state.runs.runs.values().rev();
        Ok(newest_first.filter(fits).take(filter.limit).cloned().collect())
    }

    async fn list_open_runs(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let state = self.state.lock();
        let later = state.runs.runs.iter().filter(|(key, _)| Some(*key) > after.as_ref());
        let open = later.map(|(_, run)| run).filter(|run| !run.status.is_terminal());
        Ok(open.take(limit).cloned().collect())
    }

    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<JournalEntry>, StoreError> {
        let state = self.state.lock();
        let all = state.runs.journal.values();
        let entries = all.filter(|(owner, entry)| owner == project && entry.run_id == run_id);
        Ok(entries.map(|(_, entry)| entry.clone()).collect())
    }

    async fn run_events(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, StoreError> {
        let state = self.state.lock();
        let (owner, run) = (project.to_owned(), run_id.to_owned());
        let scope = EventScope::Run { project: owner, run_id: run };
        let events = state.events.range(after.saturating_add(1)..).map(|(_, event)| event);
        let calls = events.filter(|event| state.in_scope(event, &scope)).take(limit);
        let entries = state.runs.journal.range(after.saturating_add(1)..);
        let entries = entries.map(|(_, (owner, entry))| (owner, entry));
        let entries = entries.filter(|(owner, entry)| *owner == project && entry.run_id == run_id);
        let entries = entries.take(limit).map(|(_, entry)| RunEvent::Run(entry.clone()));
        let mut all: Vec<RunEvent> =
            calls.map(|event| RunEvent::Call(event.clone())).chain(entries).collect();
        all.sort_by_key(RunEvent::number);
        all.truncate(limit);
        Ok(all)
    }
}
