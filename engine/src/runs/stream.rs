//! Streams a run: its stored events in order, and its live deltas.

use crate::domain::call::Status;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error};
use crate::domain::run::{JournalEntry, RunEvent, dedup_replies};
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::store::CallFilter;
use crate::runs::Runs;
use crate::runs::subscribers::RunSubscription;

impl Runs {
    /// Subscribes to the deltas of a run from now on. A run that the caller may not read has none.
    pub async fn subscribe_run(
        &self,
        caller: &Caller,
        run_id: &str,
    ) -> Result<RunSubscription, Error> {
        let is_readable = self.is_run_readable(caller, run_id).await?;
        let active = self.active_runs.get(&caller.project, run_id).filter(|_| is_readable);
        Ok(RunSubscription::new(active.map(|active| active.subscribe())))
    }

    async fn is_run_readable(&self, caller: &Caller, run_id: &str) -> Result<bool, Error> {
        match self.find_run(caller, run_id).await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Code::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns true if this process drives the run and it has not ended.
    pub fn is_run_active(&self, caller: &Caller, run_id: &str) -> bool {
        let active_run = self.active_runs.get(&caller.project, run_id);
        active_run.is_some_and(|active_run| !active_run.status.lock().is_terminal())
    }

    /// Returns a run's whole journal, in order.
    pub async fn run_journal(
        &self,
        caller: &Caller,
        run_id: &str,
    ) -> Result<Vec<JournalEntry>, Error> {
        self.find_run(caller, run_id).await?;
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
        self.read_run_events(caller, run_id, after, limit, /*ends_when_idle*/ false).await
    }

    /// Returns events as [`Runs::run_events`] does. A run id that only groups calls ends too: when
    /// it has no open call, and no conversation of OpenAI's API is in progress under it.
    pub async fn run_events_until_idle(
        &self,
        caller: &Caller,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, Error> {
        self.read_run_events(caller, run_id, after, limit, /*ends_when_idle*/ true).await
    }

    async fn read_run_events(
        &self,
        caller: &Caller,
        run_id: &str,
        mut after: u64,
        limit: usize,
        ends_when_idle: bool,
    ) -> Result<Vec<RunEvent>, Error> {
        let (project, run) = (caller.project.clone(), run_id.to_owned());
        let mut listener = self.core.bus.listen(Topic::Run { project, run_id: run });
        let loops = self.core.store.runs();
        let catalog = self.registry.catalog();
        let is_readable =
            catalog.may_read_all_calls(caller) || self.is_run_readable(caller, run_id).await?;
        loop {
            let active_run = self.is_run_active(caller, run_id);
            let found = match is_readable && !active_run {
                true => loops.run(&caller.project, run_id).await.map_err(from_store_error)?,
                false => None,
            };
            let has_ended = match found {
                Some(run) => run.status.is_terminal(),
                // To a caller that may not read a run, it is a run id that groups calls.
                None => {
                    ends_when_idle && !active_run && self.is_idle(&caller.project, run_id).await?
                }
            };
            let read = loops.run_events(&caller.project, run_id, after, limit).await;
            let mut events = read.map_err(from_store_error)?;
            let last = events.last().map(RunEvent::number);
            events.retain(|event| is_readable || matches!(event, RunEvent::Call(_)));
            let call_of = |event: &RunEvent| match event {
                RunEvent::Run(_) => None,
                RunEvent::Call(event) => Some(event.call_id.clone()),
            };
            self.calls.retain_readable(caller, &mut events, call_of).await?;
            if let Some(last) = last.filter(|_| events.is_empty()) {
                after = last;
                continue;
            }
            if !events.is_empty() || has_ended || self.core.shutdown.is_cancelled() {
                return Ok(events);
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(self.core.clock.now_ms() + 2_000) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Returns whether a run id has neither an open call nor a conversation in progress.
    async fn is_idle(&self, project: &str, run_id: &str) -> Result<bool, Error> {
        if self.conversations.has_active(project, run_id) {
            return Ok(false);
        }
        for status in [Status::Pending, Status::Running] {
            let filter = CallFilter {
                project: project.to_owned(),
                run_id: Some(run_id.to_owned()),
                status: Some(status),
                limit: 1,
                ..CallFilter::default()
            };
            if !self.core.store.calls(filter).await.map_err(from_store_error)?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
