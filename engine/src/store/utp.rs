//! The part of the store port that UTP needs: cards, turns, inboxes, what is to be published, and
//! what could not be taken. Each method is atomic.

use async_trait::async_trait;
use tokio::sync::watch;

use super::{Saved, StoreError};
use crate::tool::Definition;
use crate::utp::{Card, DeadLetter, InboxItem, Letter, Route, Turn, Waiting};

/// What writing a card came to.
#[derive(Debug, Clone, PartialEq)]
pub enum CardPut {
    New,
    /// It is there already, word for word.
    Same,
    /// The id is taken by another card, or the call has another result.
    Other(Box<Card>),
}

/// What putting something into an inbox came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivered {
    New,
    /// The call's outcome is there already, under this id.
    Known(String),
}

/// A new state of a turn, with what belongs into the same commit.
#[derive(Debug, Clone, Default)]
pub struct TurnChange {
    /// The calls of a new step.
    pub waiting: Vec<Waiting>,
    /// What the agent has taken out of its inbox by this.
    pub taken: Vec<String>,
    pub inbox: Vec<InboxItem>,
    pub letters: Vec<Letter>,
}

/// A report that a tool service wrote into the store itself. Nobody has judged it yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenReport {
    /// Its place in the order they came.
    pub number: u64,
    pub project: String,
    pub inbox_id: String,
    pub agent_id: String,
    /// The call it is about, as the row has it.
    pub correlation_id: Option<String>,
    pub depth: u32,
    pub traceparent: String,
    pub source_agent_id: Option<String>,
    /// The report itself, as JSON.
    pub payload: String,
}

/// What became of a report that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judged {
    /// It was taken, or said what was known.
    Taken,
    /// It came too late: it is written down, and changed nothing.
    Late,
    /// It cannot be taken.
    Refused,
}

/// How long after a definition was replaced a call may still be stored that was made with it.
pub const REPLACED_FOR_MS: u64 = 60_000;

/// Where cards, turns and inboxes are kept.
#[async_trait]
pub trait UtpStore: Send + Sync {
    /// The same tables as tool services see them; none where only this program has them.
    fn shared(&self) -> Option<&dyn SharedTables> {
        None
    }

    /// An older definition of a project's tool.
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<Definition>, StoreError>;

    /// Writes a card. There is at most one `tool.result` for a call of a turn.
    async fn put_card(&self, card: Card) -> Result<CardPut, StoreError>;

    /// One card of a project.
    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError>;

    /// The `tool.result` that was written for a call of a turn.
    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError>;

    /// One turn of a project.
    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError>;

    /// Saves a turn whose stored version is exactly one below (a new one has version 1).
    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<Saved, StoreError>;

    /// Turns whose lease ran out while they were running.
    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError>;

    /// The calls of a turn's step.
    async fn waiting(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<Waiting>, StoreError>;

    /// One call of a turn; without the turn, the newest call that has this id in any.
    async fn waiting_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<Waiting>, StoreError>;

    /// Calls of turns whose outcome has not been put into an inbox, oldest first, after this one.
    async fn undelivered(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Waiting)>, StoreError>;

    /// Puts an outcome into an inbox, marks its call as in, and keeps the letter, all or nothing.
    async fn deliver(
        &self,
        item: InboxItem,
        result_card_id: &str,
        letter: Option<Letter>,
    ) -> Result<Delivered, StoreError>;

    /// What waits for an agent, in the order it came.
    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError>;

    /// The agent has taken these. Answers with how many were still waiting.
    async fn take_from_inbox(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError>;

    /// The oldest thing that waits for each agent since before this, with its number; oldest
    /// first, after this number.
    async fn waiting_agents(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError>;

    /// Keeps letters that are to be published.
    async fn post(&self, letters: Vec<Letter>) -> Result<(), StoreError>;

    /// Letters that are to be published, oldest first, after this one.
    async fn outbox(&self, after: u64, limit: usize) -> Result<Vec<(u64, Letter)>, StoreError>;

    /// These have been published, or nobody needs them any more.
    async fn posted(&self, ids: &[String]) -> Result<(), StoreError>;

    /// Keeps a message that could not be taken, or what became of it.
    async fn bury(&self, letter: DeadLetter) -> Result<(), StoreError>;

    /// Dead letters of a project, newest first, older than this one.
    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// One of them.
    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError>;

    /// Deletes up to `limit` of what is older than this and of no more use; also definitions that
    /// no call can refer to any more.
    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError>;
}

/// A store whose cards and inboxes tool services read and write themselves.
#[async_trait]
pub trait SharedTables: Send + Sync {
    /// Changes when somebody may have written a report.
    fn news(&self) -> watch::Receiver<u64>;

    /// Puts a command's card, and that it was sent, where tool services look for it.
    async fn show_command(
        &self,
        card: Card,
        route: &Route,
        traceparent: &str,
    ) -> Result<(), StoreError>;

    /// Reports that were written and have not been judged, in order, after this.
    async fn written_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<WrittenReport>, StoreError>;

    /// Writes down what became of one of them.
    async fn judged(&self, number: u64, judged: Judged) -> Result<(), StoreError>;
}
