//! UTP's part of the in-memory store: one lock over plain collections.

use std::collections::{BTreeMap, HashMap, HashSet};

use async_trait::async_trait;
use parking_lot::Mutex;

use super::super::utp::{CardPut, Delivered, REPLACED_FOR_MS, TurnChange, UtpStore};
use super::super::{Saved, StoreError};
use crate::tool::Definition;
use crate::utp::card::TOOL_RESULT;
use crate::utp::{Card, DeadLetter, InboxItem, Letter, Turn, TurnStatus, Waiting};

type Place = (String, String);

#[derive(Default)]
struct State {
    /// Each definition with the time when it was replaced.
    versions: HashMap<(String, String, String), (Definition, Option<u64>)>,
    cards: HashMap<Place, Card>,
    turns: HashMap<Place, Turn>,
    number: u64,
    waiting: BTreeMap<u64, Waiting>,
    inbox: BTreeMap<u64, (InboxItem, bool)>,
    outbox: BTreeMap<u64, Letter>,
    dead: BTreeMap<String, DeadLetter>,
}

/// Stores everything in memory.
#[derive(Default)]
pub(super) struct Utp(Mutex<State>);

impl Utp {
    /// Stores a definition for the calls that use it.
    pub(super) fn remember(&self, tool: &Definition, at_ms: Option<u64>) {
        let project = tool.project.clone().unwrap_or_default();
        self.retire(&project, &tool.name, at_ms);
        let place = (project, tool.name.clone(), tool.version());
        self.0.lock().versions.insert(place, (tool.clone(), None));
    }

    /// Marks a tool's definitions as replaced: no new call uses them.
    pub(super) fn retire(&self, project: &str, name: &str, at_ms: Option<u64>) {
        let mut state = self.0.lock();
        let mine = |place: &(String, String, String)| place.0 == project && place.1 == name;
        for (_, (_, replaced_ms)) in state.versions.iter_mut().filter(|(place, _)| mine(place)) {
            *replaced_ms = replaced_ms.or(at_ms);
        }
    }

    /// Deletes definitions that were replaced before this time.
    pub(super) fn forget(&self, before_ms: u64) {
        let old = |at_ms: u64| at_ms + REPLACED_FOR_MS < before_ms;
        self.0.lock().versions.retain(|_, (_, replaced_ms)| !replaced_ms.is_some_and(old));
    }
}

impl State {
    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    fn post(&mut self, letters: impl IntoIterator<Item = Letter>) {
        for letter in letters {
            let number = self.next();
            self.outbox.insert(number, letter);
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

    /// Adds the item, unless the inbox already has the outcome of that call.
    fn put_into_inbox(&mut self, item: InboxItem) -> Delivered {
        let known = self.inbox.values().find(|(known, _)| {
            (&known.project, &known.turn_id, &known.tool_call_id)
                == (&item.project, &item.turn_id, &item.tool_call_id)
        });
        if let Some((known, _)) = known {
            return Delivered::Known(known.inbox_id.clone());
        }
        let number = self.next();
        self.inbox.insert(number, (item, true));
        Delivered::New
    }
}

#[async_trait]
impl UtpStore for Utp {
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<Definition>, StoreError> {
        let place = (project.to_owned(), tool.to_owned(), version.to_owned());
        Ok(self.0.lock().versions.get(&place).map(|(tool, _)| tool.clone()))
    }

    async fn put_card(&self, card: Card) -> Result<CardPut, StoreError> {
        let mut state = self.0.lock();
        let place = (card.project.clone(), card.card_id.clone());
        let by_id = state.cards.get(&place);
        let by_call = || {
            let (turn, id) = (card.turn_id()?, card.tool_call_id.as_deref()?);
            state.result_card(&card.project, turn, id).filter(|_| card.kind == TOOL_RESULT)
        };
        if let Some(known) = by_id.or_else(by_call) {
            return Ok(match known.says_the_same(&card) {
                true => CardPut::Same,
                false => CardPut::Other(Box::new(known.clone())),
            });
        }
        state.cards.insert(place, card);
        Ok(CardPut::New)
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let place = (project.to_owned(), card_id.to_owned());
        Ok(self.0.lock().cards.get(&place).cloned())
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
        let place = (project.to_owned(), turn_id.to_owned());
        Ok(self.0.lock().turns.get(&place).cloned())
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<Saved, StoreError> {
        let mut state = self.0.lock();
        let place = (turn.project.clone(), turn.turn_id.clone());
        let stored = state.turns.get(&place).map_or(0, |known| known.version);
        if stored + 1 != turn.version {
            return Ok(Saved::Stale);
        }
        for waiting in change.waiting {
            let same = |known: &Waiting| {
                (&known.project, &known.turn_id, &known.tool_call_id)
                    == (&waiting.project, &waiting.turn_id, &waiting.tool_call_id)
            };
            if !state.waiting.values().any(same) {
                let number = state.next();
                state.waiting.insert(number, waiting);
            }
        }
        let gone = |item: &InboxItem| {
            (&item.project, &item.agent_id) == (&turn.project, &turn.agent_id)
                && change.taken.contains(&item.inbox_id)
        };
        state.inbox.values_mut().filter(|(item, _)| gone(item)).for_each(|row| row.1 = false);
        for item in change.inbox {
            state.put_into_inbox(item);
        }
        state.post(change.letters);
        state.turns.insert(place, turn);
        Ok(Saved::Yes)
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let state = self.0.lock();
        let over =
            |turn: &&Turn| turn.status == TurnStatus::Running && turn.lease_until_ms <= now_ms;
        Ok(state.turns.values().filter(over).take(limit).cloned().collect())
    }

    async fn waiting(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<Waiting>, StoreError> {
        let state = self.0.lock();
        let mine =
            |w: &&Waiting| w.project == project && w.turn_id == turn_id && w.step_id == step_id;
        Ok(state.waiting.values().filter(mine).cloned().collect())
    }

    async fn waiting_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<Waiting>, StoreError> {
        let state = self.0.lock();
        let is_it = |w: &&Waiting| {
            w.project == project
                && w.tool_call_id == tool_call_id
                && turn_id.is_none_or(|turn_id| w.turn_id == turn_id)
        };
        Ok(state.waiting.values().rev().find(is_it).cloned())
    }

    async fn undelivered(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Waiting)>, StoreError> {
        let state = self.0.lock();
        let later = state.waiting.range(after.saturating_add(1)..);
        let open = later.filter(|(_, w)| w.inbox_id.is_none() && w.call_id.is_some());
        Ok(open.take(limit).map(|(number, w)| (*number, w.clone())).collect())
    }

    async fn deliver(
        &self,
        item: InboxItem,
        result_card_id: &str,
        letter: Option<Letter>,
    ) -> Result<Delivered, StoreError> {
        let mut state = self.0.lock();
        let (project, turn_id) = (item.project.clone(), item.turn_id.clone());
        let (tool_call_id, inbox_id) = (item.tool_call_id.clone(), item.inbox_id.clone());
        let delivered = state.put_into_inbox(item);
        for w in state.waiting.values_mut() {
            let same = (&w.project, &w.turn_id, &w.tool_call_id);
            if same == (&project, &turn_id, &tool_call_id) && w.inbox_id.is_none() {
                w.result_card_id = Some(result_card_id.to_owned());
                w.inbox_id = Some(inbox_id.clone());
            }
        }
        if delivered == Delivered::New {
            state.post(letter);
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
        let mine = |row: &&(InboxItem, bool)| {
            row.1 && row.0.project == project && row.0.agent_id == agent_id
        };
        let rows = state.inbox.values().filter(mine).take(limit);
        Ok(rows.map(|(item, _)| item.clone()).collect())
    }

    async fn take_from_inbox(
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
            let mine = item.project == project && item.agent_id == agent_id;
            if mine && *open && ids.contains(&item.inbox_id) {
                *open = false;
                count += 1;
            }
        }
        Ok(count)
    }

    async fn waiting_agents(
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

    async fn post(&self, letters: Vec<Letter>) -> Result<(), StoreError> {
        self.0.lock().post(letters);
        Ok(())
    }

    async fn outbox(&self, after: u64, limit: usize) -> Result<Vec<(u64, Letter)>, StoreError> {
        let state = self.0.lock();
        let letters = state.outbox.range(after + 1..).take(limit);
        Ok(letters.map(|(number, letter)| (*number, letter.clone())).collect())
    }

    async fn posted(&self, ids: &[String]) -> Result<(), StoreError> {
        self.0.lock().outbox.retain(|_, letter| !ids.contains(&letter.id));
        Ok(())
    }

    async fn bury(&self, letter: DeadLetter) -> Result<(), StoreError> {
        self.0.lock().dead.insert(letter.id.clone(), letter);
        Ok(())
    }

    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let state = self.0.lock();
        let fits = |letter: &&DeadLetter| {
            letter.project == project && before.is_none_or(|before| letter.id.as_str() < before)
        };
        Ok(state.dead.values().rev().filter(fits).take(limit).cloned().collect())
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let state = self.0.lock();
        Ok(state.dead.get(id).filter(|letter| letter.project == project).cloned())
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        let mut state = self.0.lock();
        let mut count = 0;
        let mut goes = |old: bool| {
            let goes = old && count < limit;
            count += usize::from(goes);
            goes
        };
        state.cards.retain(|_, card| !goes(card.created_ms < before_ms));
        // Also deletes unread items: their calls and cards are gone by now.
        state.inbox.retain(|_, (item, _)| !goes(item.created_ms < before_ms));
        state.dead.retain(|_, letter| !goes(letter.created_ms < before_ms));
        let old: HashSet<Place> = state
            .turns
            .iter()
            .filter(|(_, turn)| turn.updated_ms < before_ms && goes(true))
            .map(|(place, _)| place.clone())
            .collect();
        state.turns.retain(|place, _| !old.contains(place));
        state.waiting.retain(|_, w| !old.contains(&(w.project.clone(), w.turn_id.clone())));
        Ok(count)
    }
}
