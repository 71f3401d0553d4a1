//! Drives one run: step after step, each committed before the next.
//!
//! A reply of the model is committed before any of its tool calls is executed, so it is never
//! requested again. The calls have idempotency keys made of the run, the step and their position,
//! so none is made twice.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::OwnedMutexGuard;

use crate::calls::batch::BatchEntryResult;
use crate::domain::caller::Caller;
use crate::domain::directory::audit::RequestOrigin;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::model_reply::ModelReply;
use crate::domain::run::handoff::{ActiveAgent, Handoff};
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::{Conversation, FinalAnswer};
use crate::domain::run::{JournalKind, JournalRecord, Run, RunError, RunStatus};
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;
use crate::ports::model::ResolvedModel;
use crate::ports::store::runs::CreateRunResult;
use crate::ports::store::undelivered::UndeliveredRequest;
use crate::ports::store::{IdempotencyKey, SaveResult};
use crate::registry::audit;
use crate::runs::Runs;
use crate::runs::active::{ActiveRun, ActiveRunState, RunGuard, StartedRun, run_not_found};
use crate::runs::agent_loop::{AgentLoop, LoopEvent, StepOutcome};
use crate::runs::finish::deliverable_card;
use crate::runs::subscribers::{RunDelta, RunSubscription};

/// Drives a run until it has ended, the server shuts down, or another process takes it over.
pub(crate) async fn drive_run(engine: Arc<Runs>, active_run: Arc<ActiveRun>) {
    let origin = RequestOrigin {
        transport: Some("run".to_owned()),
        request_id: Some(active_run.state.lock().await.run.id.clone()),
        peer: None,
    };
    audit::with_origin(origin, drive_until_released(engine, active_run)).await;
}

async fn drive_until_released(engine: Arc<Runs>, active_run: Arc<ActiveRun>) {
    let runs = engine.clone();
    loop {
        let state = active_run.state.lock().await;
        if state.is_released {
            return;
        }
        if state.run.status.is_terminal() {
            drop(state);
            if release_run(&engine, &active_run).await {
                return;
            }
            continue;
        }
        drop(state);
        let driver_guard = active_run.driver_lock.lock().await;
        let driven = tokio::select! {
            biased;
            () = runs.core.shutdown.cancelled() => return,
            // An interrupt makes the loop read the state again: the task that cancels a run commits
            // the cancellation itself, and `check_is_on` finds a kill switch.
            () = active_run.interrupt.notified() => Ok(()),
            driven = AssertUnwindSafe(resume_driver(&engine, &active_run)).catch_unwind() => {
                driven.unwrap_or_else(|_| Err(Error::Internal("a run panicked".into())))
            }
        };
        drop(driver_guard);
        let Err(error) = driven else { continue };
        if engine.core.is_draining() {
            return;
        }
        match &error {
            // Toolcrib lacks capacity; the run itself has not failed. It continues after a delay.
            Error::Refused { fault, retry_after_ms }
                if matches!(
                    fault.code,
                    Code::Overloaded | Code::RateLimited | Code::OutcomeUnknown
                ) =>
            {
                let wait_ms = retry_after_ms.unwrap_or(1_000);
                tokio::select! {
                    () = runs.core.clock.sleep_until(runs.core.clock.now_ms() + wait_ms) => {}
                    () = active_run.interrupt.notified() => {}
                    () = runs.core.shutdown.cancelled() => return,
                }
            }
            _ => fail_run(&engine, &active_run, into_fault(error)).await,
        }
    }
}

/// Releases a run that has ended. Returns false if it was reopened in the meantime.
async fn release_run(engine: &Arc<Runs>, active_run: &Arc<ActiveRun>) -> bool {
    let mut state = active_run.state.lock().await;
    if !state.run.status.is_terminal() {
        return false;
    }
    state.is_released = true;
    let key = (state.run.project.clone(), state.run.id.clone());
    engine.active_runs.by_id.lock().remove(&key);
    true
}

fn into_fault(error: Error) -> Fault {
    match error {
        Error::Refused { fault, .. } => fault,
        Error::Internal(source) => {
            tracing::error!(error = %source, "a run failed");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}

/// Commits the failure of a run. The conversation is preserved, so the run can be resumed.
async fn fail_run(engine: &Arc<Runs>, active_run: &Arc<ActiveRun>, fault: Fault) {
    let state = active_run.state.clone().lock_owned().await;
    if state.is_released || state.run.status.is_terminal() {
        return;
    }
    let error = RunError::from(&fault);
    let failed = engine.clone().commit_run(active_run.clone(), state, move |run, now_ms| {
        (run.status, run.ended_ms) = (RunStatus::Failed, Some(now_ms));
        run.error = Some(error.clone());
        vec![JournalRecord::new(JournalKind::Failed, now_ms, json!({ "error": error }))]
    });
    if let Err(error) = engine.dispatcher.detach_on_drop(failed).await {
        tracing::warn!(%error, "could not store the failure of a run");
        let runs = engine;
        tokio::select! {
            () = runs.core.clock.sleep_until(runs.core.clock.now_ms() + 1_000) => {}
            () = runs.core.shutdown.cancelled() => {}
        }
    }
}

/// Loop events recorded since the last commit.
#[derive(Default)]
struct UncommittedEvents {
    calls: Vec<Value>,
    late_results: Vec<Value>,
}

async fn resume_driver(engine: &Arc<Runs>, active_run: &Arc<ActiveRun>) -> Result<(), Error> {
    let (run, initial_messages) = {
        let mut state = active_run.state.lock().await;
        (state.run.clone(), state.initial_messages.take())
    };
    let root = run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id);
    let tree_position = (run.project.clone(), root.clone(), run.id.clone());
    let active_model = run.options.active_agent.as_ref().and_then(|agent| agent.model.as_ref());
    let chosen = find_model(engine, active_model.unwrap_or(&run.model))?;
    let messages = match initial_messages {
        Some(messages) => messages,
        None => {
            let journal = engine.core.store.runs().journal(&run.project, &run.id).await;
            let journal = journal.map_err(from_store_error)?;
            journal.into_iter().flat_map(|entry| entry.record.messages).collect()
        }
    };
    let caller = run.caller();
    let options = RunOptions { model: chosen.name, ..run.options };
    let uncommitted = Mutex::new(UncommittedEvents::default());
    let event_sink = |event: LoopEvent<'_>| record_loop_event(active_run, &uncommitted, &event);
    let mut agent_loop = AgentLoop::with_available_tools(
        engine,
        &caller,
        chosen.model.as_ref(),
        &options,
        &event_sink,
    )?
    .for_stored_run();
    agent_loop.lineage = run.lineage.as_deref();
    let conversation = Conversation { messages, progress: run.progress };
    let journaled_count = conversation.messages.len();
    let waits = run.status == RunStatus::Waiting && run.queued_messages.is_empty();
    let (caller, keyed) = (caller.clone(), run.owner.keyed);
    let driven = RunDriver {
        engine,
        caller,
        acts_for_key: keyed,
        active_run,
        agent_loop,
        conversation,
        journaled_count,
        added_count: 0,
        uncommitted: &uncommitted,
        tree_position,
    };
    driven.run_to_end(waits).await
}

fn find_model(engine: &Arc<Runs>, name: &str) -> Result<ResolvedModel, Error> {
    let models = engine.models();
    models.find(name).ok_or_else(|| {
        let names = models.names();
        let available = match names.is_empty() {
            true => "none is configured".to_owned(),
            false => format!("there are: {}", names.join(", ")),
        };
        let message = format!("there is no model \"{name}\"; {available}");
        Error::refused(Code::UpstreamUnavailable, message)
    })
}

/// Publishes a loop event to subscribers, or records it for the next journal commit.
fn record_loop_event(
    active_run: &ActiveRun,
    uncommitted: &Mutex<UncommittedEvents>,
    event: &LoopEvent<'_>,
) {
    match event {
        LoopEvent::CallAnswered { result, .. } => {
            uncommitted.lock().calls.push(call_answer_json(result))
        }
        LoopEvent::ToolsFound { call, tools, .. } => uncommitted.lock().calls.push(json!({
            "call_id": call.id, "tool_call_id": null, "name": call.name, "status": "SUCCEEDED",
            "ok": true, "digested": false, "error": null, "tools": tools,
        })),
        LoopEvent::LateResult { call, after_execution, .. } => {
            uncommitted.lock().late_results.push(json!({
                "call_id": call.call_id, "tool_call_id": call.tool_call_id, "name": call.name,
                "after_execution": after_execution,
            }))
        }
        other => {
            if let Some(delta) = RunDelta::from_loop_event(other) {
                active_run.publish(delta);
            }
        }
    }
}

fn call_answer_json(result: &BatchEntryResult) -> Value {
    let call = result.call();
    let mut body = json!({
        "call_id": result.call_id,
        "tool_call_id": call.map(|call| call.id.as_str()),
        "name": result.name,
        "status": call.map_or("REFUSED", |call| call.status.as_str()),
        "ok": result.ok(),
        "digested": result.is_digested,
        "error": result.error().map(RunError::from),
    });
    if let Some(after_execution) = result.after_execution() {
        body["after_execution"] = after_execution.as_str().into();
    }
    if let Some(approval_id) = call.and_then(|call| call.pending_approval()) {
        body["approval_id"] = approval_id.into();
    }
    body
}

/// A run that this task drives.
struct RunDriver<'a> {
    engine: &'a Arc<Runs>,
    caller: Caller,
    /// True if the run acts for an API key, which may be revoked.
    acts_for_key: bool,
    active_run: &'a Arc<ActiveRun>,
    agent_loop: AgentLoop<'a>,
    conversation: Conversation,
    /// Number of messages in the journal.
    journaled_count: usize,
    /// Number of user messages that are in the conversation but not yet in the journal.
    added_count: usize,
    uncommitted: &'a Mutex<UncommittedEvents>,
    /// Project, first run of the tree, and id of the run.
    tree_position: (String, String, String),
}

impl RunDriver<'_> {
    async fn run_to_end(mut self, mut waits: bool) -> Result<(), Error> {
        loop {
            self.check_is_on()?;
            if waits {
                self.wait_for_input().await?;
                self.commit_progress(None, None).await?;
            }
            self.take_user_messages().await;
            self.check_key_active()?;
            self.check_budget();
            // A reply that was pending before is already in the journal.
            let is_new = self.conversation.progress.pending_reply.is_none();
            self.agent_loop.request_reply(&mut self.conversation).await?;
            let progress = &self.conversation.progress;
            let reply = progress.pending_reply.clone().unwrap_or_default();
            let acts = !reply.calls.is_empty() && progress.stop_reason.is_none();
            if acts && is_new {
                let data = reply_json(&self.conversation, &reply);
                self.commit_progress(Some((JournalKind::Replied, data)), None).await?;
            }
            self.check_key_active()?;
            let next = self.agent_loop.execute_reply(&mut self.conversation).await?;
            waits = false;
            match next {
                StepOutcome::Continue | StepOutcome::CallerToolCalls(_) => {
                    let record = self.step_record(&reply, true);
                    self.commit_progress(record, None).await?;
                }
                StepOutcome::HandedOff(handoff) => {
                    // A handoff by a late result has no reply.
                    let record = acts.then(|| self.step_record(&reply, true)).flatten();
                    let transition = Some(RunTransition::HandedOff(handoff));
                    self.commit_progress(record, transition).await?;
                    // The driver starts again, with the model and the tools of the other agent.
                    return Ok(());
                }
                StepOutcome::AwaitingResults | StepOutcome::Suspended => {
                    let record = self.step_record(&reply, acts);
                    let run = self.commit_progress(record, Some(RunTransition::Waiting)).await?;
                    waits = run.status == RunStatus::Waiting;
                }
                StepOutcome::Answered(answer) => {
                    // A late result that ends the run needs no reply.
                    let has_reply = acts || answer.terminated_by.is_none();
                    let record = has_reply.then(|| self.step_record(&reply, acts)).flatten();
                    let card_id = self.store_deliverable(&answer).await?;
                    let transition = Some(RunTransition::Answered(Box::new(answer), card_id));
                    let run = self.commit_progress(record, transition).await?;
                    if run.status.is_terminal() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Returns the journal record of a step: the results of its calls, or its reply.
    fn step_record(&self, reply: &ModelReply, acts: bool) -> Option<(JournalKind, Value)> {
        if !acts {
            return Some((JournalKind::Replied, reply_json(&self.conversation, reply)));
        }
        let calls = std::mem::take(&mut self.uncommitted.lock().calls);
        let data = json!({ "step": self.conversation.progress.steps, "calls": calls });
        Some((JournalKind::ToolResults, data))
    }

    /// Stores the card with the answer and returns its id. The commit that ends the run names the
    /// card. The result that terminated a run has its card already.
    async fn store_deliverable(&self, answer: &FinalAnswer) -> Result<String, Error> {
        if let Some(call) = &answer.terminated_by {
            return Ok(call.card_id.clone());
        }
        let (steps, now_ms) = (self.conversation.progress.steps, self.engine.core.wall_ms());
        let run = self.active_run.state.lock().await.run.clone();
        let card = deliverable_card(&run, steps, &answer.text, now_ms);
        let card_id = card.card_id.clone();
        self.engine.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        Ok(card_id)
    }

    /// Fails if the run's agent, its project, or the agent that the run was handed off to is
    /// switched off.
    fn check_is_on(&self) -> Result<(), Error> {
        let catalog = self.engine.registry.catalog();
        catalog.check_caller_is_on(&self.caller)?;
        let Some(agent) = self.agent_loop.active_agent() else { return Ok(()) };
        match catalog.switches().find_for_agent(&self.caller.project, agent) {
            Some(switch) => Err(switch.to_fault().into()),
            None => Ok(()),
        }
    }

    /// Makes the next model request the last one if the budget that the run shares with other
    /// agents is used up.
    fn check_budget(&mut self) {
        let (project, root, run_id) = &self.tree_position;
        self.conversation.progress.exhausted_budget =
            self.engine.utp.trees.budgets.exhausted(project, root, run_id);
    }

    /// Fails if the API key or session token that the run acts for was revoked, or the key has
    /// expired.
    fn check_key_active(&self) -> Result<(), Error> {
        if !self.acts_for_key {
            return Ok(());
        }
        self.engine.registry.credentials.check_key_work(&self.caller).map_err(|end| {
            let agent = &self.caller.agent;
            let message = format!("the run acts for agent \"{agent}\", and {end}");
            Error::refused(Code::Unauthenticated, message)
        })
    }

    /// Waits until a late result arrives or the user adds a message.
    async fn wait_for_input(&mut self) -> Result<(), Error> {
        loop {
            tokio::select! {
                arrived = self.agent_loop.wait_for_late_result(&mut self.conversation) => {
                    return arrived;
                }
                () = self.active_run.message_added.notified() => {
                    let state = self.active_run.state.lock().await;
                    if state.run.queued_messages.len() > self.added_count {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Adds queued user messages to the conversation, for the next request to the model.
    async fn take_user_messages(&mut self) {
        if self.conversation.progress.pending_reply.is_some() {
            return;
        }
        let state = self.active_run.state.lock().await;
        let new = state.run.queued_messages[self.added_count..].to_vec();
        if !new.is_empty() {
            self.added_count = state.run.queued_messages.len();
            self.conversation.add_user_messages(new);
        }
    }

    /// Commits the progress of the run.
    async fn commit_progress(
        &mut self,
        record: Option<(JournalKind, Value)>,
        transition: Option<RunTransition>,
    ) -> Result<Run, Error> {
        let messages = self.conversation.messages[self.journaled_count..].to_vec();
        let (progress, added_count) = (self.conversation.progress.clone(), self.added_count);
        let late = std::mem::take(&mut self.uncommitted.lock().late_results);
        let state = self.active_run.state.clone().lock_owned().await;
        if state.is_released || state.run.status.is_terminal() {
            // The run was canceled in the meantime.
            return Ok(state.run.clone());
        }
        let runs = self.engine.clone();
        let commit = runs.clone().commit_run(self.active_run.clone(), state, move |run, now_ms| {
            run.progress = progress;
            run.queued_messages.drain(..added_count);
            run.status = RunStatus::Running;
            let late = late
                .into_iter()
                .map(|data| JournalRecord::new(JournalKind::LateResult, now_ms, data));
            let mut entries: Vec<JournalRecord> = late.collect();
            entries.extend(record.map(|(kind, data)| JournalRecord::new(kind, now_ms, data)));
            let message_entry = entries.len().saturating_sub(1);
            // A message added in the meantime has no reply yet, so the run must not end or wait.
            let applies = |transition: &RunTransition| {
                run.queued_messages.is_empty() || matches!(transition, RunTransition::HandedOff(_))
            };
            if let Some(transition) = transition.filter(applies) {
                entries.push(transition.apply(run, now_ms));
            }
            if let Some(entry) = entries.get_mut(message_entry) {
                entry.messages = messages;
            }
            entries
        });
        let run = runs.dispatcher.detach_on_drop(commit).await?;
        (self.journaled_count, self.added_count) = (self.conversation.messages.len(), 0);
        Ok(run)
    }
}

/// Change of a run's status at the end of a step.
enum RunTransition {
    Waiting,
    /// Another agent continues the run.
    HandedOff(Box<(Handoff, ActiveAgent)>),
    /// The run ends with this answer, which the card with this id holds.
    Answered(Box<FinalAnswer>, String),
}

impl RunTransition {
    fn apply(self, run: &mut Run, now_ms: u64) -> JournalRecord {
        match self {
            Self::Waiting => {
                run.status = RunStatus::Waiting;
                let calls: Vec<Value> = run
                    .progress
                    .pending_calls
                    .iter()
                    .map(|call| json!({ "tool_call_id": call.tool_call_id, "name": call.name }))
                    .collect();
                JournalRecord::new(JournalKind::Waiting, now_ms, json!({ "calls": calls }))
            }
            Self::HandedOff(handoff) => {
                let (record, agent) = *handoff;
                let mut data = json!(record);
                data["step"] = run.progress.steps.into();
                data["model"] = agent.model.as_ref().unwrap_or(&run.model).as_str().into();
                run.options.active_agent = Some(Box::new(agent));
                JournalRecord::new(JournalKind::HandedOff, now_ms, data)
            }
            Self::Answered(mut answer, card_id) => {
                run.ended_ms = Some(now_ms);
                run.deliverable_card_id = Some(card_id.clone());
                let terminated_by = answer.terminated_by.clone();
                if let Some(error) = terminated_by.as_ref().and_then(|call| call.error.clone()) {
                    run.status = RunStatus::Failed;
                    run.error = Some(error.clone());
                    let data = json!({ "error": error, "deliverable_card_id": card_id,
                        "terminated_by": terminated_by });
                    return JournalRecord::new(JournalKind::Failed, now_ms, data);
                }
                let failure = run.progress.describe_total_failure();
                let failure = failure.filter(|_| terminated_by.is_none());
                (run.status, run.error) = match &failure {
                    None => (RunStatus::Succeeded, None),
                    Some(message) => {
                        let fault = Fault::new(Code::RuntimeError, message.clone());
                        let fault = fault.retryable(run.progress.is_harmless());
                        (RunStatus::Failed, Some(RunError::from(&fault)))
                    }
                };
                if let Some(message) = &failure {
                    answer.append_note(message, &run.options.settings);
                }
                let mut data = json!({
                    "answer": answer.text, "limit": answer.stop_reason, "stopped": answer.finish_reason,
                    "usage": run.progress.usage, "steps": run.progress.steps,
                    "calls": run.progress.calls, "deliverable_card_id": card_id,
                });
                if terminated_by.is_some() {
                    data["terminated_by"] = json!(terminated_by);
                }
                run.answer = Some(*answer);
                if let Some(error) = &run.error {
                    data["error"] = json!(error);
                    return JournalRecord::new(JournalKind::Failed, now_ms, data);
                }
                JournalRecord::new(JournalKind::Finished, now_ms, data)
            }
        }
    }
}

fn reply_json(conversation: &Conversation, reply: &ModelReply) -> Value {
    let mut data = serde_json::to_value(reply).unwrap_or_default();
    data["step"] = conversation.progress.steps.into();
    data
}

impl Runs {
    pub(crate) async fn create_run(
        self: Arc<Self>,
        run: Run,
        key: Option<IdempotencyKey>,
        undelivered: Option<UndeliveredRequest>,
        entry: JournalRecord,
        listens: bool,
    ) -> Result<StartedRun, Error> {
        // Registered before it is stored: the search for orphaned runs must not find it.
        let active_run = ActiveRun::new(run.clone());
        let mut state = active_run.state.clone().lock_owned().await;
        state.initial_messages = Some(entry.messages.clone());
        let run_key = (run.project.clone(), run.id.clone());
        self.active_runs.by_id.lock().insert(run_key.clone(), active_run.clone());
        let store = self.core.store.runs();
        let created = store.create_run(run.clone(), key, vec![entry], undelivered.clone()).await;
        if !matches!(created, Ok(CreateRunResult::New)) {
            state.is_released = true;
            self.active_runs.by_id.lock().remove(&run_key);
        }
        match created.map_err(from_store_error)? {
            CreateRunResult::New => {
                let subscription = RunSubscription::new(listens.then(|| active_run.subscribe()));
                let engine = self.clone();
                self.core.tasks.spawn(drive_run(engine, active_run));
                let delivery = undelivered.map(|request| self.calls.rejoin.add_waiting(request));
                Ok(StartedRun { run, replayed: false, joined: false, delivery, subscription })
            }
            CreateRunResult::Replayed(run) => {
                let active_run = self.active_runs.get(&run.project, &run.id);
                Ok(StartedRun {
                    run: *run,
                    replayed: true,
                    joined: false,
                    delivery: None,
                    subscription: RunSubscription::new(
                        active_run.filter(|_| listens).map(|active_run| active_run.subscribe()),
                    ),
                })
            }
            CreateRunResult::Mismatch(run_id) => {
                let message = "this idempotency key was used for another request";
                let fault = Fault::new(Code::IdempotencyMismatch, message).without_side_effect();
                Err(fault.with_detail(json!({ "run_id": run_id })).into())
            }
        }
    }

    /// Locks a run for a change. If this process does not drive it yet, loads it and starts a
    /// driver.
    pub(crate) async fn lock_run(
        self: &Arc<Self>,
        project: &str,
        run_id: &str,
    ) -> Result<RunGuard, Error> {
        let key = (project.to_owned(), run_id.to_owned());
        loop {
            if let Some(active_run) = self.active_runs.get(project, run_id) {
                let state = active_run.state.clone().lock_owned().await;
                if !state.is_released {
                    return Ok(RunGuard { active_run, state });
                }
                continue;
            }
            let load = || self.core.store.runs().run(project, run_id);
            let found = load().await.map_err(from_store_error)?;
            let active_run = ActiveRun::new(found.ok_or_else(|| run_not_found(run_id))?);
            // Locked before it is registered, so that the driver starts only after the change.
            let mut state = active_run.state.clone().lock_owned().await;
            {
                let mut all = self.active_runs.by_id.lock();
                if all.contains_key(&key) {
                    continue;
                }
                all.insert(key.clone(), active_run.clone());
            }
            let engine = self.clone();
            self.core.tasks.spawn(drive_run(engine, active_run.clone()));
            // Another task may have changed the run since it was loaded.
            match load().await {
                Ok(Some(run)) => {
                    active_run.set_committed(&run);
                    state.run = run;
                }
                other => {
                    state.is_released = true;
                    self.active_runs.by_id.lock().remove(&key);
                    return Err(other.map_or_else(from_store_error, |_| run_not_found(run_id)));
                }
            }
            return Ok(RunGuard { active_run, state });
        }
    }

    /// Commits a change of a run with its journal records, and wakes its listeners.
    pub(crate) async fn commit_run(
        self: Arc<Self>,
        active_run: Arc<ActiveRun>,
        mut state: OwnedMutexGuard<ActiveRunState>,
        change: impl FnOnce(&mut Run, u64) -> Vec<JournalRecord> + Send,
    ) -> Result<Run, Error> {
        let now_ms = self.core.clock.wall_ms();
        let mut next = state.run.clone();
        let entries = change(&mut next, now_ms);
        (next.version, next.updated_ms) = (next.version + 1, now_ms);
        let saved = self.core.store.runs().save_run(next.clone(), entries).await;
        if saved.map_err(from_store_error)? == SaveResult::Conflict {
            // Another process drives the run, so the state in memory is stale.
            state.is_released = true;
            let key = (next.project.clone(), next.id.clone());
            self.active_runs.by_id.lock().remove(&key);
            let message = "the run was changed by another process meanwhile; try again";
            return Err(Error::refused(Code::Conflict, message));
        }
        let has_ended = next.status.is_terminal() && !state.run.status.is_terminal();
        if has_ended {
            engine_metrics::count_run_end(next.status.as_str());
        }
        self.utp.trees.budgets.update(&next);
        active_run.set_committed(&next);
        state.run = next.clone();
        drop(state);
        let (project, run_id) = (next.project.clone(), next.id.clone());
        self.core.bus.wake(&Topic::Run { project, run_id });
        if has_ended {
            self.handle_run_end(&next);
        }
        Ok(next)
    }
}
