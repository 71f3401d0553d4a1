//! UTP: reports of tool services, agents' inboxes, turns, cards and dead letters.

pub(crate) mod boxes;
pub(crate) mod cards;
pub(crate) mod commands;
pub(crate) mod dead_letters;
pub(crate) mod delegation;
pub(crate) mod inbox;
pub(crate) mod lineage;
pub(crate) mod outbox;
pub(crate) mod reports;
pub(crate) mod shared_tables;
pub(crate) mod trees;
pub(crate) mod turns;
pub(crate) mod wakeups;
use std::collections::HashMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use parking_lot::Mutex;

use crate::calls::{Calls, Dispatcher, EndedCallListener};
use crate::domain::call::Call;
use crate::domain::id::CallId;
use crate::ports::core::Core;
use crate::registry::Registry;

pub use crate::ports::store::utp::{ReportDisposition, SharedTableReport};
pub use boxes::Boxes;
pub use cards::Cards;
pub use commands::{CommandReceipt, InternalCommand};
pub use dead_letters::{DEAD_LETTER_REASONS, DeadLetters, UnprocessableMessage};
pub use outbox::Outbox;
pub use reports::{ReportReceipt, ReportRejection, ToolServiceReport};
pub use shared_tables::WrittenReports;
pub use turns::{
    DispatchRequest, DispatchedStep, EnqueueRequest, ResumedTurn, StepCallRequest, StepResult,
    TurnFinish, TurnLeaseRequest, TurnResume,
};

/// Reports of tool services, inboxes of agents, and turns.
pub struct Utp {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) cards: Arc<Cards>,
    pub(crate) boxes: Boxes,
    pub(crate) dead_letters: DeadLetters,
    pub(crate) outbox: Outbox,
    pub(crate) written_reports: WrittenReports,
    /// True if a publisher drains the outbox.
    pub(crate) publishes_outbox: bool,
    /// Trees of agents, with their budgets.
    pub(crate) trees: trees::AgentTrees,
    /// Agents that have to be woken by webhook.
    pub(crate) wakeups: wakeups::WebhookWakeups,
    /// Trace contexts of the reports that are being processed, by call.
    pub(crate) report_traceparents: Mutex<HashMap<CallId, String>>,
}

impl Utp {
    /// Returns the cards of calls and those that others wrote.
    pub fn cards(&self) -> &Arc<Cards> {
        &self.cards
    }

    /// Returns the boxes of cards.
    pub fn boxes(&self) -> &Boxes {
        &self.boxes
    }

    /// Returns the messages that could not be processed.
    pub fn dead_letters(&self) -> &DeadLetters {
        &self.dead_letters
    }

    /// Returns the messages that wait to be published.
    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Returns the reports that tool services write to tables of the store.
    pub fn written_reports(&self) -> &WrittenReports {
        &self.written_reports
    }
}

impl EndedCallListener for Utp {
    fn call_ended<'a>(&'a self, call: &'a Arc<Call>) -> Option<BoxFuture<'a, ()>> {
        self.uses_inbox(call).then(|| Box::pin(self.deliver_outcome(call)) as BoxFuture<'a, ()>)
    }
}
