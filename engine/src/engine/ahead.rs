//! Reads begin before their ticket is stored.
//!
//! What only reads may be done for nothing, or twice: so it need not wait for the commit that its
//! caller waits for. What is over by then is stored as what it came to, in one commit instead of
//! two; what is not goes on after it. Nobody is told of anything before the commit, as ever.

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

/// How far a read is before its ticket is stored.
pub(super) enum Ahead {
    /// It may not begin before.
    Waits,
    /// It is not over.
    UnderWay(UnderWay),
    /// It is over.
    Over(Done),
}

/// How a read went, and what it said meanwhile.
pub(super) struct Done {
    result: Result<crate::Json, crate::Fault>,
    said: Vec<Progress>,
}

/// A read that goes on once its ticket is stored.
pub(super) struct UnderWay {
    attempt: BoxFuture<'static, Started>,
    held: Arc<Held>,
}

/// Progress that cannot be written down yet, because its call cannot be found.
#[derive(Default)]
struct Held(Mutex<Option<Vec<Progress>>>);

impl Inner {
    /// Begins the attempt of a call that is about to be stored as claimed, where it may.
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

    /// What follows from a read that is over; the call comes back where nothing does.
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
        // It is one state, the first that is stored.
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

    /// The ticket is stored: the read goes on.
    pub(super) fn go_on(self: &Arc<Self>, call: &Arc<Call>, read: UnderWay) {
        let said = read.held.0.lock().take().unwrap_or_default();
        said.into_iter().for_each(|progress| self.note_progress_soon(call, progress));
        let (inner, call) = (self.clone(), call.clone());
        self.attempts.spawn(async move { inner.take_back(&call, read.attempt.await).await });
    }
}
