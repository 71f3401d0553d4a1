//! Following a run: what is stored of it, in order, and what it says while it goes on.

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

/// Something that is told while it happens, and not kept.
#[derive(Debug, Clone, PartialEq)]
pub enum LiveNote {
    /// The model is asked.
    Asking { step: u32, last: bool },
    /// More of its answer.
    Text { step: u32, text: String },
    /// More of a call in its answer, which is not executed before all of it is there.
    Call { step: u32, index: usize, id: Option<String>, name: Option<String>, arguments: String },
    /// There was no answer, and what was told of it is void; it is asked again after a wait.
    AskingAgain { step: u32, retry: u32, wait_ms: u64, why: Trouble },
    /// Who listens was too slow: here are pieces missing. The whole answer is kept.
    Missed { step: u32 },
}

impl LiveNote {
    /// The step that it is about.
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

/// What a run says while it goes on.
pub struct RunNews {
    ear: Option<Arc<Ear>>,
}

impl RunNews {
    pub(super) fn of(live: Option<&Arc<LiveRun>>) -> Self {
        Self { ear: live.map(|live| live.listen()) }
    }

    /// The next thing it says. Never returns where it says nothing more: what is kept of the run
    /// tells that. Who is too slow misses some, and is told [`LiveNote::Missed`] in their place;
    /// the whole answer is kept.
    pub async fn next(&mut self) -> LiveNote {
        match &self.ear {
            Some(ear) => ear.next().await,
            None => std::future::pending().await,
        }
    }

    /// What it has said and nobody has taken yet.
    pub fn take(&mut self) -> Option<LiveNote> {
        self.ear.as_ref()?.take()
    }
}

impl Engine {
    /// Listens to what a run says while it goes on, from now on.
    pub fn listen_to_run(&self, caller: &Caller, run_id: &str) -> RunNews {
        RunNews::of(self.inner.loops.get(&caller.project, run_id).as_ref())
    }

    /// Whether a run is in hand, that is, not over.
    pub fn run_is_live(&self, caller: &Caller, run_id: &str) -> bool {
        let live = self.inner.loops.get(&caller.project, run_id);
        live.is_some_and(|live| !live.shown.lock().is_over())
    }

    /// A run's whole journal, in order.
    pub async fn journal(&self, caller: &Caller, run_id: &str) -> Result<Vec<Noted>, Error> {
        let read = self.inner.store.loops().journal(&caller.project, run_id).await;
        read.map(without_doubles).map_err(unavailable)
    }

    /// What happened in a run and to its calls after this number, waiting until there is
    /// something. Empty when there can be no more: the run is over, or the engine is being shut
    /// down. A run that is only a name that calls are grouped by is never over.
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
