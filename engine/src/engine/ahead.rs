//! Starts read-only attempts before their call is committed (ADR 0006).
//!
//! A read has no side effect, so it may run in vain or twice and need not wait for the commit that
//! its caller waits for. A read that finishes by then is stored together with its outcome, in one
//! commit instead of two; one that is still running continues after the commit. As always, nothing
//! is visible to callers before the commit.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::{Inner, measure};
use crate::call::Call;
use crate::event::Record;
use crate::function::Progress;
use crate::lifecycle::{self, Event, Step};
use crate::source::{ProgressSink, Started};
use crate::tool::{Effect, Executor};

/// State of a read-only attempt before its call is committed.
pub(super) enum Ahead {
    /// The attempt must not start before the commit.
    Waits,
    /// The attempt is running.
    UnderWay(UnderWay),
    /// The attempt has finished.
    Over(Done),
}

/// Result of a finished read, and the progress it reported.
pub(super) struct Done {
    result: Result<crate::Json, crate::Fault>,
    said: Vec<Progress>,
}

/// A running read that continues once its call is committed.
pub(super) struct UnderWay {
    attempt: BoxFuture<'static, Started>,
    held: Arc<Held>,
}

/// Progress that cannot be stored yet because its call is not in the store.
#[derive(Default)]
struct Held(Mutex<Option<Vec<Progress>>>);

impl Inner {
    /// Starts the attempt of a call that is about to be committed as claimed, if it is eligible.
    pub(super) fn begin_ahead(self: &Arc<Self>, call: &Arc<Call>) -> Ahead {
        let target = &call.target;
        if target.effect != Effect::Read || target.executor != Executor::Builtin {
            return Ahead::Waits;
        }
        let Some(source) = self.sources.get(&target.executor).cloned() else { return Ahead::Waits };
        let held = Arc::new(Held(Mutex::new(Some(Vec::new()))));
        let sink = self.held_sink(call, &held);
        let attempt = self.attempt(call, false);
        let starting = source.clone();
        let mut attempt = async move { starting.start(attempt, sink).await }.boxed();
        match (&mut attempt).now_or_never() {
            None => Ahead::UnderWay(UnderWay { attempt, held }),
            Some(Started::Parked | Started::Asks(_) | Started::GoesOn { .. }) => Ahead::Waits,
            Some(Started::Done(result)) => {
                measure::attempted(target.executor, result.is_ok());
                source.settled(&call.id, call.attempt);
                let said = held.0.lock().take().unwrap_or_default();
                Ahead::Over(Done { result, said })
            }
        }
    }

    /// Applies the result of a finished read to its call. Returns the call unchanged if `step`
    /// refuses the result.
    pub(super) fn over(&self, call: Call, done: Done) -> Result<Step, Box<Call>> {
        let result = self.checked(&call, done.result);
        let (attempt, version, now_ms) = (call.attempt, call.version, self.clock.now_ms());
        let event = Event::Report { attempt: Some(attempt), by: None, result };
        let mut step = match lifecycle::step_on(call, &event, now_ms) {
            Ok(step) => step,
            Err(refused) => return Err(Box::new(refused.0)),
        };
        if !done.said.is_empty() {
            let said = done.said.into_iter();
            let said = said.map(|p| p.record(now_ms, attempt).about_task(&step.call));
            let said: Vec<Record> = said.collect();
            step.records.splice(0..0, said);
        }
        // The call is stored once, in this state, so it keeps the version of a first commit.
        step.call.version = version;
        Ok(step)
    }

    fn held_sink(self: &Arc<Self>, call: &Arc<Call>, held: &Arc<Held>) -> ProgressSink {
        let (inner, call, held) = (self.clone(), call.clone(), held.clone());
        let most = self.limits.max_progress_events as usize;
        Arc::new(move |progress: Progress| {
            if let Some(held) = held.0.lock().as_mut() {
                if held.len() < most {
                    held.push(progress);
                }
                return;
            }
            inner.note_progress_soon(&call, progress);
        })
    }

    /// Continues the read after its call has been committed.
    pub(super) fn go_on(self: &Arc<Self>, call: &Arc<Call>, read: UnderWay) {
        let said = read.held.0.lock().take().unwrap_or_default();
        said.into_iter().for_each(|progress| self.note_progress_soon(call, progress));
        let (inner, call) = (self.clone(), call.clone());
        self.attempts.spawn(async move { inner.take_back(&call, read.attempt.await).await });
    }
}
