//! The part of the store port that UTP needs: cards, turns, inboxes, the outbox and dead letters.
//! Each method is atomic.

use async_trait::async_trait;
use tokio::sync::watch;

use super::{SaveResult, StoreError};
use crate::domain::tool::ToolDefinition;
use crate::domain::utp::{
    Card, DeadLetter, ExecutionEdge, InboxItem, OutboxMessage, Route, StepCall, Turn,
};

/// Result of writing a card.
#[derive(Debug, Clone, PartialEq)]
pub enum PutCardResult {
    /// The card was stored.
    New,
    /// An identical card is already stored.
    Identical,
    /// Another card has this id, or the call has another result.
    Conflict(Box<Card>),
}

/// Result of putting an item into an inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InboxPutResult {
    /// The item was stored.
    New,
    /// The call's outcome is already in the inbox, under this id.
    Duplicate(String),
}

/// The changes that belong in the same commit as a new state of a turn.
#[derive(Debug, Clone, Default)]
pub struct TurnChange {
    /// The calls of a new step.
    pub step_calls: Vec<StepCall>,
    /// Ids of the inbox items that the agent acknowledges with this change.
    pub acknowledged_inbox_ids: Vec<String>,
    /// Items to put into inboxes.
    pub inbox: Vec<InboxItem>,
    /// Messages to publish after the commit.
    pub outbox: Vec<OutboxMessage>,
    /// Messages between agents, for the shared tables; a store without them ignores these.
    pub edges: Vec<ExecutionEdge>,
}

/// A report that a tool service wrote into the shared tables and that is not processed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTableReport {
    /// Its position in the order of arrival.
    pub number: u64,
    /// Project that the report belongs to.
    pub project: String,
    /// Id of the inbox row that holds the report.
    pub inbox_id: String,
    /// Agent that the report is addressed to.
    pub agent_id: String,
    /// The call it is about, as the row states.
    pub correlation_id: Option<String>,
    /// Nesting depth of agents that call agents.
    pub depth: u32,
    /// W3C `traceparent` of the report.
    pub traceparent: String,
    /// Id of the reporting service, if the row states it.
    pub source_agent_id: Option<String>,
    /// The report itself, as JSON.
    pub payload: String,
    /// Headers of the report, as names and values, with the parts of its identity that the row has
    /// in columns.
    pub headers: Vec<(String, String)>,
}

/// The disposition of a report from the shared tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportDisposition {
    /// The report was applied, or was a duplicate.
    Applied,
    /// The report was too late: it was recorded and had no effect.
    Late,
    /// The report is invalid.
    Rejected,
}

/// Time after the replacement of a definition in which a call made with it may still be stored.
pub const REPLACED_DEFINITION_GRACE_MS: u64 = 60_000;

/// Stores cards, turns and inboxes.
#[async_trait]
pub trait UtpStore: Send + Sync {
    /// Returns the tables that tool services access, or `None` if only this program has access.
    fn shared_tables(&self) -> Option<&dyn SharedTables> {
        None
    }

    /// Returns an older definition of a project's tool.
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<ToolDefinition>, StoreError>;

    /// Writes a card. A call of a turn has at most one `tool.result`.
    async fn put_card(&self, card: Card) -> Result<PutCardResult, StoreError>;

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

    /// Returns the turns that calls handed over in the tree with this first run or turn, ordered by
    /// id, after this one. A turn that begins a tree itself is not among them.
    async fn tree_turns(
        &self,
        project: &str,
        root_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Turn>, StoreError>;

    /// Saves a turn whose stored version is exactly one lower (a new turn has version 1).
    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<SaveResult, StoreError>;

    /// Returns running turns whose lease has expired.
    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError>;

    /// Returns the calls of a turn's step.
    async fn step_calls(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<StepCall>, StoreError>;

    /// Returns one call of a turn; without a turn, the newest call with this id in any turn.
    async fn step_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<StepCall>, StoreError>;

    /// Stores a call that an agent made by a command, in a turn that it keeps elsewhere. A call
    /// that is stored already stays as it is.
    async fn add_step_call(&self, step_call: StepCall) -> Result<(), StoreError>;

    /// Returns calls of turns whose outcome is in no inbox yet, oldest first, after this one.
    async fn undelivered_step_calls(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, StepCall)>, StoreError>;

    /// Puts an outcome into an inbox, marks its call as delivered, and adds the message to the
    /// outbox, all in one commit.
    async fn deliver_to_inbox(
        &self,
        item: InboxItem,
        result_card_id: &str,
        message: Option<OutboxMessage>,
    ) -> Result<InboxPutResult, StoreError>;

    /// Returns an agent's unread items, in the order of arrival.
    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError>;

    /// Acknowledges items. Returns the number that were still unread.
    async fn acknowledge_inbox_items(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError>;

    /// Returns each agent's oldest unread item with its number, if it arrived before this time;
    /// oldest first, after this number.
    async fn agents_with_unread_items(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError>;

    /// Adds messages to the outbox.
    async fn append_to_outbox(&self, messages: Vec<OutboxMessage>) -> Result<(), StoreError>;

    /// Returns messages to publish, oldest first, after this one.
    async fn outbox(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, OutboxMessage)>, StoreError>;

    /// Removes messages that were published or have expired.
    async fn remove_from_outbox(&self, ids: &[String]) -> Result<(), StoreError>;

    /// Stores a dead letter, or the result of redriving it.
    async fn save_dead_letter(&self, dead_letter: DeadLetter) -> Result<(), StoreError>;

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
    fn watch_reports(&self) -> watch::Receiver<u64>;

    /// Writes a command's card, and the record that it was sent, to the tables that tool services
    /// read.
    async fn write_command(
        &self,
        card: Card,
        route: &Route,
        traceparent: &str,
    ) -> Result<(), StoreError>;

    /// Returns unprocessed reports after this one, in order.
    async fn pending_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<SharedTableReport>, StoreError>;

    /// Records the disposition of a report.
    async fn record_disposition(
        &self,
        number: u64,
        disposition: ReportDisposition,
    ) -> Result<(), StoreError>;
}
