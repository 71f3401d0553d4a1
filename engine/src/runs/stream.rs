//! Streams a run: its stored events in order, and its live deltas.

use std::sync::Arc;

use crate::calls::Calls;
use crate::domain::access_rules::RuleAction;
use crate::domain::call::Status;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::RunProgress;
use crate::domain::run::{JournalEntry, Run, RunEvent, dedup_replies};
use crate::ports::bus::Topic;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::CallFilter;
use crate::registry::Registry;
use crate::runs::active::{ActiveRuns, OpenConversation, run_not_found};
use crate::runs::agent_loop::LoopEvent;
use crate::runs::run_context::not_run_owner;
use crate::runs::subscribers::{RunDelta, RunSubscription};

/// The stored events and the live deltas of runs.
pub struct RunStreams {
    core: Arc<Core>,
    registry: Arc<Registry>,
    calls: Arc<Calls>,
    pub(crate) active_runs: Arc<ActiveRuns>,
}

/// A conversation of OpenAI's API in progress. Its run is listed, shown and followed until this is
/// dropped, which happens after its record is stored.
pub struct ActiveConversation {
    core: Arc<Core>,
    registry: Arc<Registry>,
    active_runs: Arc<ActiveRuns>,
    key: (String, String),
    open: Arc<OpenConversation>,
}

impl ActiveConversation {
    /// Publishes an event of the agent loop to those who follow the run.
    pub fn publish(&self, event: &LoopEvent<'_>) {
        if let Some(delta) = RunDelta::from_loop_event(event) {
            self.open.publish(delta);
        }
    }

    /// Updates the run as it is shown: after a step, or when another agent continues.
    pub fn update(&self, progress: &RunProgress, options: &RunOptions) {
        let now_ms = self.core.wall_ms();
        self.open.update(|run| {
            run.progress = progress.clone();
            run.options.active_agent.clone_from(&options.active_agent);
            run.updated_ms = now_ms;
        });
        self.open.stop_if_switched_off(self.registry.catalog().switches());
    }

    /// Stops the conversation with this reason.
    pub fn stop(&self, reason: Fault) {
        self.open.stop(reason);
    }

    /// Waits until the conversation is to stop: its run was canceled, or its agent or project is
    /// switched off. Returns the reason.
    pub async fn wait_for_stop(&self) -> Error {
        self.open.wait_for_stop().await.into()
    }
}

impl Drop for ActiveConversation {
    fn drop(&mut self) {
        {
            let mut conversations = self.active_runs.conversations.lock();
            if let Some(open) = conversations.get_mut(&self.key) {
                open.retain(|open| !Arc::ptr_eq(open, &self.open));
                if open.is_empty() {
                    conversations.remove(&self.key);
                }
            }
        }
        let (project, run_id) = self.key.clone();
        self.core.bus.wake(&Topic::Run { project, run_id });
    }
}

impl RunStreams {
    pub(crate) fn new(calls: &Arc<Calls>) -> Self {
        Self {
            core: calls.core.clone(),
            registry: calls.registry.clone(),
            calls: calls.clone(),
            active_runs: Arc::default(),
        }
    }

    /// Returns one run. A run that the caller may not read is answered exactly as one that does not
    /// exist.
    pub(super) async fn find_run(&self, caller: &Caller, run_id: &str) -> Result<Run, Error> {
        // Before the store: a conversation that ends in between has stored its record by then.
        let open = self.active_runs.conversation(&caller.project, run_id);
        let found = self.core.store.runs().run(&caller.project, run_id).await;
        let found = match (found.map_err(from_store_error)?, open) {
            // A run that was started with the run API keeps its own record.
            (Some(run), _) if !run.options.is_conversation => Some(run),
            (Some(run), Some(open)) => Some(Run { created_ms: run.created_ms, ..open.run() }),
            (None, Some(open)) => Some(open.run()),
            (found, None) => found,
        };
        let catalog = self.registry.catalog();
        let is_readable = |run: &Run| catalog.may_access_run(caller, RuleAction::Read, run);
        found.filter(is_readable).ok_or_else(|| run_not_found(run_id))
    }

    /// Registers a conversation in progress under the run id of its options.
    ///
    /// # Errors
    ///
    /// The conversation is refused if a run with this id acts for another agent, user or session.
    pub async fn register_conversation(
        &self,
        caller: &Caller,
        model: &str,
        options: &RunOptions,
    ) -> Result<ActiveConversation, Error> {
        let stored = self.core.store.runs().run(&caller.project, &options.run_id).await;
        let stored = stored.map_err(from_store_error)?;
        let check_owner = |run: &Run| match run.caller().owner_name() == caller.owner_name() {
            true => Ok(()),
            false => Err(not_run_owner(run)),
        };
        stored.as_ref().map_or(Ok(()), check_owner)?;
        let keyed = self.registry.credentials.has_active_key(caller);
        let mut run = Run::for_conversation(caller, keyed, model, options, self.core.wall_ms());
        run.options.is_conversation = stored.is_none_or(|run| run.options.is_conversation);
        let key = (run.project.clone(), run.id.clone());
        let open = OpenConversation::new(run);
        {
            let mut conversations = self.active_runs.conversations.lock();
            let others = conversations.entry(key.clone()).or_default();
            // An owner that chose the same id at the same moment was not stored above.
            others.iter().try_for_each(|other| check_owner(&other.run()))?;
            others.push(open.clone());
        }
        Ok(ActiveConversation {
            core: self.core.clone(),
            registry: self.registry.clone(),
            active_runs: self.active_runs.clone(),
            key,
            open,
        })
    }

    /// Subscribes to the deltas of a run from now on. A run that the caller may not read has none.
    pub async fn subscribe(&self, caller: &Caller, run_id: &str) -> Result<RunSubscription, Error> {
        let is_readable = self.is_run_readable(caller, run_id).await?;
        if !is_readable {
            return Ok(RunSubscription::new(None));
        }
        let active = self.active_runs.get(&caller.project, run_id);
        Ok(match (active, self.active_runs.conversation(&caller.project, run_id)) {
            (Some(active), _) => RunSubscription::new(Some(active.subscribe())),
            (None, Some(open)) => open.subscribe(),
            (None, None) => RunSubscription::new(None),
        })
    }

    async fn is_run_readable(&self, caller: &Caller, run_id: &str) -> Result<bool, Error> {
        match self.find_run(caller, run_id).await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Code::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns a run's whole journal, in order.
    pub async fn journal(&self, caller: &Caller, run_id: &str) -> Result<Vec<JournalEntry>, Error> {
        self.find_run(caller, run_id).await?;
        let read = self.core.store.runs().journal(&caller.project, run_id).await;
        read.map(dedup_replies).map_err(from_store_error)
    }

    /// Returns the events of a run and its calls after this number, and waits until there is one.
    /// Returns an empty list when there can be no more: the run has ended, or the engine is
    /// shutting down. A run id that only groups calls never ends.
    pub async fn events(
        &self,
        caller: &Caller,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, Error> {
        self.read_events(caller, run_id, after, limit, /*ends_when_idle*/ false).await
    }

    /// Returns events as [`RunStreams::events`] does. A run id that only groups calls ends too:
    /// when it has no open call, and no conversation of OpenAI's API is in progress under it.
    pub async fn events_until_idle(
        &self,
        caller: &Caller,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, Error> {
        self.read_events(caller, run_id, after, limit, /*ends_when_idle*/ true).await
    }

    /// Returns the stored events of a run and its calls after this number, without waiting.
    pub async fn stored_events(
        &self,
        caller: &Caller,
        run_id: &str,
        mut after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, Error> {
        let is_readable = self.is_journal_readable(caller, run_id).await?;
        loop {
            match self.read_page(caller, run_id, after, limit, is_readable).await? {
                (events, Some(last)) if events.is_empty() => after = last,
                (events, _) => return Ok(events),
            }
        }
    }

    async fn is_journal_readable(&self, caller: &Caller, run_id: &str) -> Result<bool, Error> {
        let may_read_all = self.registry.catalog().may_read_all_calls(caller);
        Ok(may_read_all || self.is_run_readable(caller, run_id).await?)
    }

    /// Returns the stored events after this number that the caller may read, and the number of the
    /// last one with the others.
    async fn read_page(
        &self,
        caller: &Caller,
        run_id: &str,
        after: u64,
        limit: usize,
        is_readable: bool,
    ) -> Result<(Vec<RunEvent>, Option<u64>), Error> {
        let read = self.core.store.runs().run_events(&caller.project, run_id, after, limit).await;
        let mut events = read.map_err(from_store_error)?;
        let last = events.last().map(RunEvent::number);
        events.retain(|event| is_readable || matches!(event, RunEvent::Call(_)));
        let call_of = |event: &RunEvent| match event {
            RunEvent::Run(_) => None,
            RunEvent::Call(event) => Some(event.call_id.clone()),
        };
        self.calls.retain_readable(caller, &mut events, call_of).await?;
        Ok((events, last))
    }

    async fn read_events(
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
        let is_readable = self.is_journal_readable(caller, run_id).await?;
        loop {
            let active_run = self.active_runs.is_active(&caller.project, run_id);
            let found = match is_readable && !active_run {
                true => loops.run(&caller.project, run_id).await.map_err(from_store_error)?,
                false => None,
            };
            let has_ended = match found {
                Some(run) => run.status.is_terminal(),
                // There is no such run, or the caller may not read it: the id only groups calls.
                None => {
                    ends_when_idle && !active_run && self.is_idle(&caller.project, run_id).await?
                }
            };
            let (events, last) = self.read_page(caller, run_id, after, limit, is_readable).await?;
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
        if self.active_runs.conversation(project, run_id).is_some() {
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
