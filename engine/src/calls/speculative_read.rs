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

use crate::calls::Dispatcher;
use crate::domain::call::Call;
use crate::domain::event::EventRecord;
use crate::domain::tool::Effect;
use crate::lifecycle::{self, Event, Transition};
use crate::ports::engine_metrics;
use crate::ports::source::{AttemptProgress, ProgressSink, StartResult};

/// State of a read-only attempt before its call is committed.
pub(crate) enum Speculation {
    /// The attempt runs after the commit: the tool is not eligible, or its source started the
    /// attempt and did not finish it with a result. A read can run again without harm.
    NotUsed,
    /// The attempt is running.
    Running(RunningSpeculation),
    /// The attempt has finished.
    Finished(SpeculationResult),
}

/// Result of a finished read, and the progress it reported.
pub(crate) struct SpeculationResult {
    result: Result<crate::Json, crate::Fault>,
    progress: Vec<AttemptProgress>,
}

/// A running read that continues once its call is committed.
pub(crate) struct RunningSpeculation {
    attempt: BoxFuture<'static, StartResult>,
    progress: Arc<ProgressBuffer>,
}

/// Progress that cannot be stored yet because its call is not in the store.
#[derive(Default)]
struct ProgressBuffer(Mutex<Option<Vec<AttemptProgress>>>);

impl Dispatcher {
    /// Starts the attempt of a call that is about to be committed as claimed, if it is eligible.
    pub(crate) fn start_speculation(self: &Arc<Self>, call: &Arc<Call>) -> Speculation {
        let target = &call.target;
        if target.effect != Effect::Read || !target.traits.speculative_reads {
            return Speculation::NotUsed;
        }
        let Some(source) = self.sources.get(&target.executor).cloned() else {
            return Speculation::NotUsed;
        };
        let buffer = Arc::new(ProgressBuffer(Mutex::new(Some(Vec::new()))));
        let sink = self.buffering_progress_sink(call, &buffer);
        let attempt = self.build_attempt(call, false);
        let starting = source.clone();
        let mut attempt = async move { starting.start(attempt, sink).await }.boxed();
        match (&mut attempt).now_or_never() {
            None => Speculation::Running(RunningSpeculation { attempt, progress: buffer }),
            Some(
                StartResult::Accepted | StartResult::NeedsInput(_) | StartResult::Detached { .. },
            ) => Speculation::NotUsed,
            Some(StartResult::Finished(result)) => {
                engine_metrics::count_attempt(target.executor, result.is_ok());
                source.release_attempt(&call.id, call.attempt);
                let progress = buffer.0.lock().take().unwrap_or_default();
                Speculation::Finished(SpeculationResult { result, progress })
            }
        }
    }

    /// Applies the result of a finished read to its call. Returns the call unchanged if `step`
    /// refuses the result.
    pub(crate) fn apply_speculation(
        &self,
        call: Call,
        speculation: SpeculationResult,
    ) -> Result<Transition, Box<Call>> {
        let result = self.validate_result(&call, speculation.result);
        let (attempt, version, now_ms) = (call.attempt, call.version, self.core.clock.wall_ms());
        let event = Event::Report { attempt: Some(attempt), by: None, result };
        let mut step = match lifecycle::step_owned(call, &event, now_ms) {
            Ok(step) => step,
            Err(refused) => return Err(Box::new(refused.0)),
        };
        if !speculation.progress.is_empty() {
            let records = speculation.progress.into_iter();
            let records = records.map(|p| p.into_record(now_ms, attempt).with_task_ids(&step.call));
            let records: Vec<EventRecord> = records.collect();
            step.records.splice(0..0, records);
        }
        // The call is stored once, in this state, so it keeps the version of a first commit.
        step.call.version = version;
        Ok(step)
    }

    fn buffering_progress_sink(
        self: &Arc<Self>,
        call: &Arc<Call>,
        buffer: &Arc<ProgressBuffer>,
    ) -> ProgressSink {
        let (dispatcher, call, buffer) = (self.clone(), call.clone(), buffer.clone());
        let max = self.core.limits.max_progress_events as usize;
        Arc::new(move |progress: AttemptProgress| {
            if let Some(buffer) = buffer.0.lock().as_mut() {
                if buffer.len() < max {
                    buffer.push(progress);
                }
                return;
            }
            dispatcher.spawn_progress_record(&call, progress);
        })
    }

    /// Continues the read after its call has been committed.
    pub(crate) fn continue_speculation(
        self: &Arc<Self>,
        call: &Arc<Call>,
        read: RunningSpeculation,
    ) {
        let buffered = read.progress.0.lock().take().unwrap_or_default();
        buffered.into_iter().for_each(|progress| self.spawn_progress_record(call, progress));
        let (dispatcher, call) = (self.clone(), call.clone());
        self.attempts
            .spawn(async move { dispatcher.handle_started(&call, read.attempt.await).await });
    }
}
