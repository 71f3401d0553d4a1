//! UTP's part of the in-memory store: one lock over plain collections.

use std::collections::{BTreeMap, HashMap, HashSet};

use async_trait::async_trait;
use parking_lot::Mutex;

use super::super::utp::{
    InboxPutResult, PutCardResult, REPLACED_DEFINITION_GRACE_MS, TurnChange, UtpStore,
};
use super::super::{SaveResult, StoreError};
use crate::domain::tool::ToolDefinition;
use crate::domain::utp::card::TOOL_RESULT;
use crate::domain::utp::{Card, DeadLetter, InboxItem, OutboxMessage, StepCall, Turn, TurnStatus};

type ProjectScopedId = (String, String);

#[derive(Default)]
struct UtpMemoryState {
    /// Each definition with the time when it was replaced.
    versions: HashMap<(String, String, String), (ToolDefinition, Option<u64>)>,
    cards: HashMap<ProjectScopedId, Card>,
    turns: HashMap<ProjectScopedId, Turn>,
    number: u64,
    step_calls: BTreeMap<u64, StepCall>,
    inbox: BTreeMap<u64, (InboxItem, bool)>,
    outbox: BTreeMap<u64, OutboxMessage>,
    dead: BTreeMap<String, DeadLetter>,
}

/// Stores everything in memory.
#[derive(Default)]
pub(super) struct UtpMemoryStore(Mutex<UtpMemoryState>);

impl UtpMemoryStore {
    /// Stores a definition for the calls that use it.
    pub(super) fn put_definition(&self, tool: &ToolDefinition, at_ms: Option<u64>) {
        let project = tool.project.clone().unwrap_or_default();
        self.mark_replaced(&project, &tool.name, at_ms);
        let key = (project, tool.name.clone(), tool.version());
        self.0.lock().versions.insert(key, (tool.clone(), None));
    }

    /// Marks a tool's definitions as replaced: no new call uses them.
    pub(super) fn mark_replaced(&self, project: &str, name: &str, at_ms: Option<u64>) {
        let mut state = self.0.lock();
        let is_version = |key: &(String, String, String)| key.0 == project && key.1 == name;
        for (_, (_, replaced_ms)) in state.versions.iter_mut().filter(|(key, _)| is_version(key)) {
            *replaced_ms = replaced_ms.or(at_ms);
        }
    }

    /// Deletes definitions that were replaced before this time.
    pub(super) fn purge_replaced(&self, before_ms: u64) {
        let old = |at_ms: u64| at_ms + REPLACED_DEFINITION_GRACE_MS < before_ms;
        self.0.lock().versions.retain(|_, (_, replaced_ms)| !replaced_ms.is_some_and(old));
    }
}

impl UtpMemoryState {
    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    fn post(&mut self, messages: impl IntoIterator<Item = OutboxMessage>) {
        for message in messages {
            let number = self.next();
            self.outbox.insert(number, message);
        }
    }

    fn result_card(&self, project: &str, turn_id: &str, tool_call_id: &str) -> Option<&Card> {
        self.cards.values().find(|card| {
            card.project == project
                && card.kind == TOOL_RESULT
                && card.turn_id() == Some(turn_id)
                && card.tool_call_id.as_deref() == Some(tool_call_id)
        })
    }

    /// Adds the call, unless it is stored already.
    fn add_step_call(&mut self, step_call: StepCall) {
        let is_same = |existing: &StepCall| {
            (&existing.project, &existing.turn_id, &existing.tool_call_id)
                == (&step_call.project, &step_call.turn_id, &step_call.tool_call_id)
        };
        if !self.step_calls.values().any(is_same) {
            let number = self.next();
            self.step_calls.insert(number, step_call);
        }
    }

    /// Adds the item, unless the inbox already has the outcome of that call.
    fn put_into_inbox(&mut self, item: InboxItem) -> InboxPutResult {
        let existing = self.inbox.values().find(|(existing, _)| {
            (&existing.project, &existing.turn_id, &existing.tool_call_id)
                == (&item.project, &item.turn_id, &item.tool_call_id)
        });
        if let Some((existing, _)) = existing {
            return InboxPutResult::Duplicate(existing.inbox_id.clone());
        }
        let number = self.next();
        self.inbox.insert(number, (item, true));
        InboxPutResult::New
    }
}

#[async_trait]
impl UtpStore for UtpMemoryStore {
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<ToolDefinition>, StoreError> {
        let key = (project.to_owned(), tool.to_owned(), version.to_owned());
        Ok(self.0.lock().versions.get(&key).map(|(tool, _)| tool.clone()))
    }

    async fn put_card(&self, card: Card) -> Result<PutCardResult, StoreError> {
        let mut state = self.0.lock();
        let key = (card.project.clone(), card.card_id.clone());
        let by_id = state.cards.get(&key);
        let by_call = || {
            let (turn, id) = (card.turn_id()?, card.tool_call_id.as_deref()?);
            state.result_card(&card.project, turn, id).filter(|_| card.kind == TOOL_RESULT)
        };
        if let Some(existing) = by_id.or_else(by_call) {
            return Ok(match existing.equals_ignoring_time(&card) {
                true => PutCardResult::Identical,
                false => PutCardResult::Conflict(Box::new(existing.clone())),
            });
        }
        state.cards.insert(key, card);
        Ok(PutCardResult::New)
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let key = (project.to_owned(), card_id.to_owned());
        Ok(self.0.lock().cards.get(&key).cloned())
    }

    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError> {
        Ok(self.0.lock().result_card(project, turn_id, tool_call_id).cloned())
    }

    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError> {
        let key = (project.to_owned(), turn_id.to_owned());
        Ok(self.0.lock().turns.get(&key).cloned())
    }

    async fn tree_turns(
        &self,
        project: &str,
        root_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Turn>, StoreError> {
        let state = self.0.lock();
        let mut found: Vec<Turn> = state
            .turns
            .values()
            .filter(|turn| {
                turn.project == project
                    && turn.tree_root_id() == Some(root_id)
                    && after.as_ref().is_none_or(|after| turn.turn_id > *after)
            })
            .cloned()
            .collect();
        found.sort_by(|a, b| a.turn_id.cmp(&b.turn_id));
        found.truncate(limit);
        Ok(found)
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<SaveResult, StoreError> {
        let mut state = self.0.lock();
        let key = (turn.project.clone(), turn.turn_id.clone());
        let stored = state.turns.get(&key).map_or(0, |existing| existing.version);
        if stored + 1 != turn.version {
            return Ok(SaveResult::Conflict);
        }
        change.step_calls.into_iter().for_each(|step_call| state.add_step_call(step_call));
        let is_acknowledged = |item: &InboxItem| {
            (&item.project, &item.agent_id) == (&turn.project, &turn.agent_id)
                && change.acknowledged_inbox_ids.contains(&item.inbox_id)
        };
        state
            .inbox
            .values_mut()
            .filter(|(item, _)| is_acknowledged(item))
            .for_each(|row| row.1 = false);
        for item in change.inbox {
            state.put_into_inbox(item);
        }
        state.post(change.outbox);
        state.turns.insert(key, turn);
        Ok(SaveResult::Saved)
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let state = self.0.lock();
        let over =
            |turn: &&Turn| turn.status == TurnStatus::Running && turn.lease_until_ms <= now_ms;
        Ok(state.turns.values().filter(over).take(limit).cloned().collect())
    }

    async fn step_calls(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<StepCall>, StoreError> {
        let state = self.0.lock();
        let in_step =
            |w: &&StepCall| w.project == project && w.turn_id == turn_id && w.step_id == step_id;
        Ok(state.step_calls.values().filter(in_step).cloned().collect())
    }

    async fn step_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<StepCall>, StoreError> {
        let state = self.0.lock();
        let is_it = |w: &&StepCall| {
            w.project == project
                && w.tool_call_id == tool_call_id
                && turn_id.is_none_or(|turn_id| w.turn_id == turn_id)
        };
        Ok(state.step_calls.values().rev().find(is_it).cloned())
    }

    async fn add_step_call(&self, step_call: StepCall) -> Result<(), StoreError> {
        self.0.lock().add_step_call(step_call);
        Ok(())
    }

    async fn undelivered_step_calls(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, StepCall)>, StoreError> {
        let state = self.0.lock();
        let later = state.step_calls.range(after.saturating_add(1)..);
        let open = later.filter(|(_, w)| w.inbox_id.is_none() && w.call_id.is_some());
        Ok(open.take(limit).map(|(number, w)| (*number, w.clone())).collect())
    }

    async fn deliver_to_inbox(
        &self,
        item: InboxItem,
        result_card_id: &str,
        message: Option<OutboxMessage>,
    ) -> Result<InboxPutResult, StoreError> {
        let mut state = self.0.lock();
        let (project, turn_id) = (item.project.clone(), item.turn_id.clone());
        let (tool_call_id, inbox_id) = (item.tool_call_id.clone(), item.inbox_id.clone());
        let delivered = state.put_into_inbox(item);
        for w in state.step_calls.values_mut() {
            let same = (&w.project, &w.turn_id, &w.tool_call_id);
            if same == (&project, &turn_id, &tool_call_id) && w.inbox_id.is_none() {
                w.result_card_id = Some(result_card_id.to_owned());
                w.inbox_id = Some(inbox_id.clone());
            }
        }
        if delivered == InboxPutResult::New {
            state.post(message);
        }
        Ok(delivered)
    }

    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError> {
        let state = self.0.lock();
        let is_open = |row: &&(InboxItem, bool)| {
            row.1 && row.0.project == project && row.0.agent_id == agent_id
        };
        let rows = state.inbox.values().filter(is_open).take(limit);
        Ok(rows.map(|(item, _)| item.clone()).collect())
    }

    async fn acknowledge_inbox_items(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        _now_ms: u64,
    ) -> Result<usize, StoreError> {
        let mut state = self.0.lock();
        let ids: HashSet<&String> = inbox_ids.iter().collect();
        let mut count = 0;
        for (item, open) in state.inbox.values_mut() {
            let belongs_to_agent = item.project == project && item.agent_id == agent_id;
            if belongs_to_agent && *open && ids.contains(&item.inbox_id) {
                *open = false;
                count += 1;
            }
        }
        Ok(count)
    }

    async fn agents_with_unread_items(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError> {
        let state = self.0.lock();
        let mut seen = HashSet::new();
        let open = state.inbox.iter().filter(|(_, (_, open))| *open);
        let first = open.filter(|(_, (item, _))| seen.insert((&item.project, &item.agent_id)));
        let due =
            first.filter(|(number, (item, _))| **number > after && item.created_ms < before_ms);
        Ok(due.take(limit).map(|(number, (item, _))| (*number, item.clone())).collect())
    }

    async fn append_to_outbox(&self, messages: Vec<OutboxMessage>) -> Result<(), StoreError> {
        self.0.lock().post(messages);
        Ok(())
    }

    async fn outbox(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, OutboxMessage)>, StoreError> {
        let state = self.0.lock();
        let messages = state.outbox.range(after + 1..).take(limit);
        Ok(messages.map(|(number, message)| (*number, message.clone())).collect())
    }

    async fn remove_from_outbox(&self, ids: &[String]) -> Result<(), StoreError> {
        self.0.lock().outbox.retain(|_, message| !ids.contains(&message.id));
        Ok(())
    }

    async fn save_dead_letter(&self, dead_letter: DeadLetter) -> Result<(), StoreError> {
        self.0.lock().dead.insert(dead_letter.id.clone(), dead_letter);
        Ok(())
    }

    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let state = self.0.lock();
        let fits = |dead_letter: &&DeadLetter| {
            dead_letter.project == project
                && before.is_none_or(|before| dead_letter.id.as_str() < before)
        };
        Ok(state.dead.values().rev().filter(fits).take(limit).cloned().collect())
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let state = self.0.lock();
        Ok(state.dead.get(id).filter(|dead_letter| dead_letter.project == project).cloned())
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        let mut state = self.0.lock();
        let mut count = 0;
        let mut should_purge = |old: bool| {
            let is_purged = old && count < limit;
            count += usize::from(is_purged);
            is_purged
        };
        state.cards.retain(|_, card| !should_purge(card.created_ms < before_ms));
        // Also deletes unread items: their calls and cards are gone by now.
        state.inbox.retain(|_, (item, _)| !should_purge(item.created_ms < before_ms));
        state.dead.retain(|_, dead_letter| !should_purge(dead_letter.created_ms < before_ms));
        let old: HashSet<ProjectScopedId> = state
            .turns
            .iter()
            .filter(|(_, turn)| turn.updated_ms < before_ms && should_purge(true))
            .map(|(key, _)| key.clone())
            .collect();
        state.turns.retain(|key, _| !old.contains(key));
        state.step_calls.retain(|_, w| !old.contains(&(w.project.clone(), w.turn_id.clone())));
        Ok(count)
    }
}
