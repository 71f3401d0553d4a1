//! Streams a run: its stored events in order, and its live deltas.

use std::sync::Arc;

use super::ears::Ear;
use super::hold::LiveRun;
use crate::bus::Topic;
use crate::caller::Caller;
use crate::engine::{Engine, unavailable};
use crate::fault::Error;
use crate::model::Piece;
use crate::run::{Happened, Noted, Trouble, without_doubles};
use crate::turn::Happening;

/// A live update of a run. It is streamed and never stored.
#[derive(Debug, Clone, PartialEq)]
pub enum LiveNote {
    /// A request to the model has started.
    Asking { step: u32, last: bool },
    /// More text of the reply.
    Text { step: u32, text: String },
    /// More of a tool call in the reply. The call is executed only once it is complete.
    Call { step: u32, index: usize, id: Option<String>, name: Option<String>, arguments: String },
    /// The request failed and its deltas are void. It is retried after `wait_ms`.
    AskingAgain { step: u32, retry: u32, wait_ms: u64, why: Trouble },
    /// The subscriber was too slow and deltas are missing here. The whole reply is stored.
    Missed { step: u32 },
}

impl LiveNote {
    /// Returns the step that the delta belongs to.
    pub fn step(&self) -> u32 {
        match self {
            Self::Asking { step, .. }
            | Self::Text { step, .. }
            | Self::Call { step, .. }
            | Self::AskingAgain { step, .. }
            | Self::Missed { step } => *step,
        }
    }

    pub(super) fn of(happening: &Happening<'_>) -> Option<Self> {
        Some(match happening {
            Happening::Asking { step, last } => Self::Asking { step: *step, last: *last },
            Happening::Piece { step, piece: Piece::Text(text) } => {
                Self::Text { step: *step, text: text.clone() }
            }
            Happening::Piece { step, piece: Piece::Call { index, id, name, arguments } } => {
                let (step, index, arguments) = (*step, *index, arguments.clone());
                Self::Call { step, index, id: id.clone(), name: name.clone(), arguments }
            }
            Happening::AskingAgain { step, retry, wait_ms, why } => Self::AskingAgain {
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
pub struct RunNews {
    ear: Option<Arc<Ear>>,
}

impl RunNews {
    pub(super) fn of(live: Option<&Arc<LiveRun>>) -> Self {
        Self { ear: live.map(|live| live.listen()) }
    }

    /// Returns the next delta. Never returns once there are no more: the run's stored events show
    /// its end. A subscriber that is too slow receives [`RunDelta::Lagged`] in place of the deltas
    /// it missed; the whole reply is stored.
    pub async fn next(&mut self) -> LiveNote {
        match &self.ear {
            Some(ear) => ear.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the next buffered delta, if there is one.
    pub fn take(&mut self) -> Option<LiveNote> {
        self.ear.as_ref()?.take()
    }
}

impl Engine {
    /// Subscribes to the deltas of a run from now on.
    pub fn listen_to_run(&self, caller: &Caller, run_id: &str) -> RunNews {
        RunNews::of(self.inner.loops.get(&caller.project, run_id).as_ref())
    }

    /// Returns true if this process drives the run and it has not ended.
    pub fn run_is_live(&self, caller: &Caller, run_id: &str) -> bool {
        let live = self.inner.loops.get(&caller.project, run_id);
        live.is_some_and(|live| !live.shown.lock().is_over())
    }

    /// Returns a run's whole journal, in order.
    pub async fn journal(&self, caller: &Caller, run_id: &str) -> Result<Vec<Noted>, Error> {
        let read = self.inner.store.loops().journal(&caller.project, run_id).await;
        read.map(without_doubles).map_err(unavailable)
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
    ) -> Result<Vec<Happened>, Error> {
        let inner = &self.inner;
        let (project, run) = (caller.project.clone(), run_id.to_owned());
        let mut news = inner.bus.listen(Topic::Run { project, run_id: run });
        let loops = inner.store.loops();
        loop {
            let live = self.run_is_live(caller, run_id);
            let over = !live && {
                let found = loops.loop_run(&caller.project, run_id).await.map_err(unavailable)?;
                found.is_some_and(|run| run.status.is_over())
            };
            let read = loops.happened(&caller.project, run_id, after, limit).await;
            let happened = read.map_err(unavailable)?;
            if !happened.is_empty() || over || inner.stopping.is_cancelled() {
                return Ok(happened);
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(inner.clock.now_ms() + 2_000) => {}
                () = inner.stopping.cancelled() => {}
            }
        }
    }
}
