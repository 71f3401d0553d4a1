//! Streams a run: its stored events in order, and its live deltas.

use std::sync::Arc;

use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::run::{JournalEntry, RunEvent, Trouble, dedup_replies};
use crate::engine::{Engine, from_store_error};
use crate::ports::bus::Topic;
use crate::ports::model::Delta;
use crate::runs::active::ActiveRun;
use crate::runs::agent_loop::LoopEvent;
use crate::runs::subscribers::Subscriber;

/// A live update of a run. It is streamed and never stored.
#[derive(Debug, Clone, PartialEq)]
pub enum RunDelta {
    /// A request to the model has started.
    RequestStarted { step: u32, last: bool },
    /// More text of the reply.
    Text { step: u32, text: String },
    /// More of a tool call in the reply. The call is executed only once it is complete.
    ToolCall {
        step: u32,
        index: usize,
        id: Option<String>,
        name: Option<String>,
        arguments: String,
    },
    /// The request failed and its deltas are void. It is retried after `wait_ms`.
    RequestRetried { step: u32, retry: u32, wait_ms: u64, why: Trouble },
    /// The subscriber was too slow and deltas are missing here. The whole reply is stored.
    Lagged { step: u32 },
}

impl RunDelta {
    /// Returns the step that the delta belongs to.
    pub fn step(&self) -> u32 {
        match self {
            Self::RequestStarted { step, .. }
            | Self::Text { step, .. }
            | Self::ToolCall { step, .. }
            | Self::RequestRetried { step, .. }
            | Self::Lagged { step } => *step,
        }
    }

    pub(crate) fn from_loop_event(happening: &LoopEvent<'_>) -> Option<Self> {
        Some(match happening {
            LoopEvent::ModelRequested { step, last } => {
                Self::RequestStarted { step: *step, last: *last }
            }
            LoopEvent::ReplyDelta { step, piece: Delta::Text(text) } => {
                Self::Text { step: *step, text: text.clone() }
            }
            LoopEvent::ReplyDelta { step, piece: Delta::Call { index, id, name, arguments } } => {
                let (step, index, arguments) = (*step, *index, arguments.clone());
                Self::ToolCall { step, index, id: id.clone(), name: name.clone(), arguments }
            }
            LoopEvent::ModelRetryScheduled { step, retry, wait_ms, why } => Self::RequestRetried {
                step: *step,
                retry: *retry,
                wait_ms: *wait_ms,
                why: Trouble::from(*why),
            },
            _ => return None,
        })
    }
}

/// A subscription to the live deltas of a run.
pub struct RunSubscription {
    subscriber: Option<Arc<Subscriber>>,
}

impl RunSubscription {
    pub(crate) fn new(live: Option<&Arc<ActiveRun>>) -> Self {
        Self { subscriber: live.map(|live| live.subscribe()) }
    }

    /// Returns the next delta. Never returns once there are no more: the run's stored events show
    /// its end. A subscriber that is too slow receives [`RunDelta::Lagged`] in place of the deltas
    /// it missed; the whole reply is stored.
    pub async fn next(&mut self) -> RunDelta {
        match &self.subscriber {
            Some(ear) => ear.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the next buffered delta, if there is one.
    pub fn try_next(&mut self) -> Option<RunDelta> {
        self.subscriber.as_ref()?.try_next()
    }
}

impl Engine {
    /// Subscribes to the deltas of a run from now on.
    pub fn subscribe_run(&self, caller: &Caller, run_id: &str) -> RunSubscription {
        RunSubscription::new(self.core.active_runs.get(&caller.project, run_id).as_ref())
    }

    /// Returns true if this process drives the run and it has not ended.
    pub fn is_run_active(&self, caller: &Caller, run_id: &str) -> bool {
        let live = self.core.active_runs.get(&caller.project, run_id);
        live.is_some_and(|live| !live.status.lock().is_terminal())
    }

    /// Returns a run's whole journal, in order.
    pub async fn run_journal(
        &self,
        caller: &Caller,
        run_id: &str,
    ) -> Result<Vec<JournalEntry>, Error> {
        let read = self.core.store.runs().journal(&caller.project, run_id).await;
        read.map(dedup_replies).map_err(from_store_error)
    }

    /// Returns the events of a run and its calls after this number, and waits until there is one.
    /// Returns an empty list when there can be no more: the run has ended, or the engine is
    /// shutting down. A run id that only groups calls never ends.
    pub async fn run_events(
        &self,
        caller: &Caller,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, Error> {
        let inner = &self.core;
        let (project, run) = (caller.project.clone(), run_id.to_owned());
        let mut news = inner.bus.listen(Topic::Run { project, run_id: run });
        let loops = inner.store.runs();
        loop {
            let live = self.is_run_active(caller, run_id);
            let over = !live && {
                let found = loops.run(&caller.project, run_id).await.map_err(from_store_error)?;
                found.is_some_and(|run| run.status.is_terminal())
            };
            let read = loops.run_events(&caller.project, run_id, after, limit).await;
            let happened = read.map_err(from_store_error)?;
            if !happened.is_empty() || over || inner.shutdown.is_cancelled() {
                return Ok(happened);
            }
            tokio::select! {
                () = news.wait_for_wake() => {}
                () = inner.clock.sleep_until(inner.clock.now_ms() + 2_000) => {}
                () = inner.shutdown.cancelled() => {}
            }
        }
    }
}
