//! The part of the store port that UTP needs: cards, turns, inboxes, the outbox and dead letters.
//! Each method is atomic.

use async_trait::async_trait;
use tokio::sync::watch;

use super::{Saved, StoreError};
use crate::tool::Definition;
use crate::utp::{Card, DeadLetter, InboxItem, Letter, Route, Turn, Waiting};

/// Result of writing a card.
#[derive(Debug, Clone, PartialEq)]
pub enum CardPut {
    New,
    /// An identical card is already stored.
    Same,
    /// Another card has this id, or the call has another result.
    Other(Box<Card>),
}

/// Result of putting an item into an inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivered {
    New,
    /// The call's outcome is already in the inbox, under this id.
    Known(String),
}

/// The changes that belong in the same commit as a new state of a turn.
#[derive(Debug, Clone, Default)]
pub struct TurnChange {
    /// The calls of a new step.
    pub waiting: Vec<Waiting>,
    /// Ids of the inbox items that the agent acknowledges with this change.
    pub taken: Vec<String>,
    pub inbox: Vec<InboxItem>,
    pub letters: Vec<Letter>,
}

/// A report that a tool service wrote into the shared tables and that is not processed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenReport {
    /// Its position in the order of arrival.
    pub number: u64,
    pub project: String,
    pub inbox_id: String,
    pub agent_id: String,
    /// The call it is about, as the row states.
    pub correlation_id: Option<String>,
    pub depth: u32,
    pub traceparent: String,
    pub source_agent_id: Option<String>,
    /// The report itself, as JSON.
    pub payload: String,
}

/// The disposition of a report from the shared tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judged {
    /// The report was applied, or was a duplicate.
    Taken,
    /// The report was too late: it was recorded and had no effect.
    Late,
    /// The report is invalid.
    Refused,
}

/// Time after the replacement of a definition in which a call made with it may still be stored.
pub const REPLACED_FOR_MS: u64 = 60_000;

/// Stores cards, turns and inboxes.
#[async_trait]
pub trait UtpStore: Send + Sync {
    /// Returns the tables that tool services access, or `None` if only this program has access.
    fn shared(&self) -> Option<&dyn SharedTables> {
        None
    }

    /// Returns an older definition of a project's tool.
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<Definition>, StoreError>;

    /// Writes a card. A call of a turn has at most one `tool.result`.
    async fn put_card(&self, card: Card) -> Result<CardPut, StoreError>;

    /// Returns one card of a project.
    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError>;

    /// Returns the `tool.result` of a call of a turn.
    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError>;

    /// Returns one turn of a project.
    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError>;

    /// Saves a turn whose stored version is exactly one lower (a new turn has version 1).
    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<Saved, StoreError>;

    /// Returns running turns whose lease has expired.
    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError>;

    /// Returns the calls of a turn's step.
    async fn waiting(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<Waiting>, StoreError>;

    /// Returns one call of a turn; without a turn, the newest call with this id in any turn.
    async fn waiting_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<Waiting>, StoreError>;

    /// Returns calls of turns whose outcome is in no inbox yet, oldest first, after this one.
    async fn undelivered(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Waiting)>, StoreError>;

    /// Puts an outcome into an inbox, marks its call as delivered, and adds the message to the
    /// outbox, all in one commit.
    async fn deliver(
        &self,
        item: InboxItem,
        result_card_id: &str,
        letter: Option<Letter>,
    ) -> Result<Delivered, StoreError>;

    /// Returns an agent's unread items, in the order of arrival.
    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError>;

    /// Acknowledges items. Returns the number that were still unread.
    async fn take_from_inbox(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError>;

    /// Returns each agent's oldest unread item with its number, if it arrived before this time;
    /// oldest first, after this number.
    async fn waiting_agents(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError>;

    /// Adds messages to the outbox.
    async fn post(&self, letters: Vec<Letter>) -> Result<(), StoreError>;

    /// Returns messages to publish, oldest first, after this one.
    async fn outbox(&self, after: u64, limit: usize) -> Result<Vec<(u64, Letter)>, StoreError>;

    /// Removes messages that were published or have expired.
    async fn posted(&self, ids: &[String]) -> Result<(), StoreError>;

    /// Stores a dead letter, or the result of redriving it.
    async fn bury(&self, letter: DeadLetter) -> Result<(), StoreError>;

    /// Returns dead letters of a project, newest first, older than this one.
    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// Returns one dead letter.
    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError>;

    /// Deletes up to `limit` records that are older than this and no longer needed, and definitions
    /// that no call can refer to.
    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError>;
}

/// Cards and inboxes that tool services read and write directly.
#[async_trait]
pub trait SharedTables: Send + Sync {
    /// Returns a watch that changes when a tool service may have written a report.
    fn news(&self) -> watch::Receiver<u64>;

    /// Writes a command's card, and the record that it was sent, to the tables that tool services
    /// read.
    async fn show_command(
        &self,
        card: Card,
        route: &Route,
        traceparent: &str,
    ) -> Result<(), StoreError>;

    /// Returns unprocessed reports after this one, in order.
    async fn written_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<WrittenReport>, StoreError>;

    /// Records the disposition of a report.
    async fn judged(&self, number: u64, judged: Judged) -> Result<(), StoreError>;
}
