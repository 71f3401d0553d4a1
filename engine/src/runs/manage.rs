//! Stored runs: start, read, list, cancel, resume, add messages, adopt.
//!
//! One task of this process (`driver`) drives each run that has not ended. Every change to a run,
//! by that task or by a caller, is decided under one lock and committed with its journal records
//! before it is visible.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::domain::access_rules::RuleAction;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::domain::json::canonicalize;
use crate::domain::run::options::{ExecutionOptions, ModelRequestPolicy, RunLimits, RunOptions};
use crate::domain::run::{JournalKind, JournalRecord, Run, RunOwner, RunStatus};
use crate::domain::tool::tool_mode::ToolMode;
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::store::IdempotencyKey;
use crate::ports::store::runs::RunFilter;
use crate::runs::active::{RunGuard, StartedRun};
use crate::runs::rejoin::{join_earlier_run, undelivered_request};
use crate::runs::run_context::{not_run_owner, require_run_owner};
use crate::runs::{Runs, agent_loop, agents};

/// User message that resumes a run which ended with an answer after all of its calls had failed.
const RETRY_MESSAGE: &str = "Try again: the tools that failed may work now.";

/// Maximum time to wait until a conversation that was stopped has stored its record.
const CONVERSATION_STOP_MS: u64 = 10_000;

/// A request to start a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RunRequest {
    /// Name of the model, 1 to 255 bytes.
    pub model: String,
    /// First messages of the conversation.
    pub messages: Vec<Value>,
    /// Names and patterns of the tools it may use; `None` means all that the caller may call.
    pub tools: Option<Vec<String>>,
    /// Selects the tool definitions that the model receives; `None` means the agent's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_mode: Option<ToolMode>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`; `None` means the agent's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_tools: Option<Vec<String>>,
    /// Additional fields of each request to the model.
    pub settings: Map<String, Value>,
    /// Limits on steps, calls, tokens and time.
    pub limits: RunLimits,
    /// Policy for model requests; the engine's default if `None`.
    #[serde(rename = "asking")]
    pub model_request_policy: Option<ModelRequestPolicy>,
    /// Options for executing the model's tool calls.
    #[serde(rename = "acting")]
    pub execution_options: ExecutionOptions,
    /// A label. Never used for decisions.
    pub user_id: Option<String>,
    /// Box of cards that gives the run, and the agents that it calls, their context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_box_id: Option<String>,
    /// Trace context of the request, a W3C `traceparent`.
    #[serde(skip)]
    pub traceparent: Option<String>,
    /// Key under which a repeated request returns the first run, 1 to 255 bytes.
    #[serde(skip)]
    pub idempotency_key: Option<String>,
    /// True if the caller reads [`StartedRun::subscription`].
    #[serde(skip)]
    pub subscribes: bool,
    /// True if the request joins an earlier identical run whose answer was not delivered, and if a
    /// later one may join this run ([`StartedRun::delivery`]).
    #[serde(skip)]
    pub rejoin: bool,
}

/// Filter for a list of runs.
#[derive(Debug, Clone, Default)]
pub struct RunQuery {
    /// Current status of the runs.
    pub status: Option<RunStatus>,
    /// Model name from the request.
    pub model: Option<String>,
    /// Earliest creation time, in Unix milliseconds.
    pub since_ms: Option<u64>,
    /// Id of the last run of the previous page.
    pub before: Option<String>,
    /// Maximum number of runs on the page, clamped to 1 to 200.
    pub limit: usize,
}

/// A page of runs, newest first.
#[derive(Debug)]
pub struct RunPage {
    /// The runs that match the query.
    pub runs: Vec<Run>,
    /// Cursor for the next page, if there is one.
    pub next_before: Option<String>,
}

impl Runs {
    /// Starts a run. When this returns the run is stored, and it is driven to its end even after a
    /// crash.
    pub async fn start_run(
        self: &Arc<Self>,
        caller: &Caller,
        new: RunRequest,
    ) -> Result<StartedRun, Error> {
        self.validate_run_request(caller, &new)?;
        let key = run_idempotency_key(caller, &new);
        let now_ms = self.core.wall_ms();
        let id = self.core.id_generator.next_id(Run::PREFIX, now_ms);
        let undelivered = match new.rejoin && key.is_none() {
            true => {
                let (core, fingerprint) = (&self.core, run_fingerprint(&new));
                undelivered_request(core, &self.registry, caller, &id, "run", &fingerprint)
            }
            false => None,
        };
        if let Some(request) = &undelivered
            && let Some(joined) = join_earlier_run(self, request, new.subscribes).await?
        {
            return Ok(joined);
        }
        let new_trace = || self.calls.start_trace(now_ms).to_string();
        let options = RunOptions {
            run_id: id.clone(),
            idempotency_prefix: Some(id.clone()),
            tools: new.tools,
            tool_mode: new.tool_mode,
            pinned_tools: new.pinned_tools,
            settings: new.settings,
            limits: new.limits,
            model_request_policy: new
                .model_request_policy
                .unwrap_or_else(|| self.model_request_policy.clone()),
            execution_options: new.execution_options,
            user_id: new.user_id,
            traceparent: Some(new.traceparent.unwrap_or_else(new_trace)),
            ..RunOptions::default()
        };
        let keyed = self.registry.credentials.has_active_key(caller);
        let owner = RunOwner { keyed, ..RunOwner::from(caller) };
        let run = Run {
            context_box_id: new.context_box_id,
            ..Run::start(&caller.project, owner, new.model, options, now_ms)
        };
        let mut messages = new.messages;
        if let Some(box_id) = &run.context_box_id {
            messages.insert(0, agents::box_message(&self.utp, caller, box_id).await?);
        }
        let data = json!({ "model": run.model });
        let entry = JournalRecord::new(JournalKind::Created, now_ms, data).with_messages(messages);
        let starting = self.clone().create_run(run, key, undelivered, entry, new.subscribes);
        self.dispatcher.detach_on_drop(starting).await
    }

    /// Returns one run.
    pub async fn find_run(&self, caller: &Caller, run_id: &str) -> Result<Run, Error> {
        self.streams.find_run(caller, run_id).await
    }

    /// Returns a page of the project's runs that the caller may read, newest first. A page may be
    /// short; its cursor continues where it ended.
    pub async fn list_runs(&self, caller: &Caller, mut query: RunQuery) -> Result<RunPage, Error> {
        let catalog = self.registry.catalog();
        loop {
            let mut page = self.list_project_runs(caller, query.clone()).await?;
            page.runs.retain(|run| catalog.may_access_run(caller, RuleAction::Read, run));
            if !page.runs.is_empty() || page.next_before.is_none() {
                return Ok(page);
            }
            query.before = page.next_before;
        }
    }

    async fn list_project_runs(&self, caller: &Caller, query: RunQuery) -> Result<RunPage, Error> {
        let limit = query.limit.clamp(1, 200);
        let filter = RunFilter {
            project: caller.project.clone(),
            status: query.status,
            model: query.model,
            since_ms: query.since_ms,
            before: query.before,
            // One more than requested shows whether there is another page.
            limit: limit + 1,
        };
        // Before the store: a conversation that ends in between has stored its record by then.
        let catalog = self.registry.catalog();
        let is_readable = |run: &Run| catalog.may_access_run(caller, RuleAction::Read, run);
        let open = self.active_runs.conversation_runs(&caller.project, is_readable);
        let mut runs =
            self.core.store.runs().list_runs(filter.clone()).await.map_err(from_store_error)?;
        let more_stored = runs.len() > limit;
        // Those below the stored runs of this page belong to a later one.
        let first_later = runs.last().filter(|_| more_stored).map(|last| last.id.clone());
        add_conversations(&mut runs, open, &filter, first_later.as_deref());
        let more = more_stored || runs.len() > limit;
        runs.truncate(limit);
        let last = runs.last().map(|last| last.id.clone()).or(first_later);
        Ok(RunPage { runs, next_before: last.filter(|_| more) })
    }

    /// Cancels a run and its open calls. Fails with a conflict if the run ended otherwise.
    pub async fn cancel_run(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        reason: Option<String>,
    ) -> Result<Run, Error> {
        require_run_access(caller)?;
        let run = self.find_run(caller, run_id).await?;
        if !self.registry.catalog().may_access_run(caller, RuleAction::Cancel, &run) {
            return Err(not_run_owner(&run));
        }
        if run.status.is_terminal() {
            return require_end_status(run, RunStatus::Canceled);
        }
        if run.options.is_conversation
            && self.active_runs.conversation(&caller.project, run_id).is_some()
        {
            return self.stop_conversations(caller, run_id, reason).await;
        }
        self.stop_run(caller, run_id, reason).await
    }

    /// Stops the conversations in progress under a run id, and cancels their open calls. Their
    /// requests are answered with an error.
    async fn stop_conversations(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        reason: Option<String>,
    ) -> Result<Run, Error> {
        let by = &caller.agent;
        let because = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let fault = Fault::new(Code::Canceled, format!("the run was canceled by {by}{because}"))
            .with_detail(json!({ "by": by, "reason": reason }));
        for open in self.active_runs.conversations_of(&caller.project, run_id) {
            open.stop(fault.clone());
        }
        // Once the record is stored, the conversation makes no more calls: none is missed below.
        let run = self.wait_for_run(caller, run_id, CONVERSATION_STOP_MS).await?;
        if run.status.is_terminal() && run.status != RunStatus::Canceled {
            return require_end_status(run, RunStatus::Canceled);
        }
        let by_owner =
            |call: &Call| call.origin.agent == run.owner.agent && !self.is_detached_agent(call);
        self.calls.cancel_open_calls(caller, run_id, "its run was canceled", by_owner).await;
        Ok(run)
    }

    /// Refuses a change of a run while a conversation is in progress under its id.
    pub(crate) fn require_no_conversation(
        &self,
        caller: &Caller,
        run_id: &str,
    ) -> Result<(), Error> {
        if self.active_runs.conversation(&caller.project, run_id).is_none() {
            return Ok(());
        }
        let message = "a chat completion or response is in progress under this run; wait for its \
                       end, or cancel the run";
        Err(Error::refused(Code::Conflict, message))
    }

    /// Cancels a run and its open calls, without a check of the caller's rights.
    pub(crate) async fn stop_run(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        reason: Option<String>,
    ) -> Result<Run, Error> {
        let RunGuard { active_run, state } = self.lock_run(&caller.project, run_id).await?;
        if state.run.status.is_terminal() {
            return require_end_status(state.run.clone(), RunStatus::Canceled);
        }
        active_run.interrupt.notify_one();
        // Once the driver has stopped, every call it started is queued for the store ahead of this
        // commit, so the cancellation below misses none.
        let driver = active_run.clone();
        let _driver_stopped = driver.driver_lock.lock().await;
        let by = caller.agent.clone();
        let canceled = self.clone().commit_run(active_run, state, move |run, now_ms| {
            run.status = RunStatus::Canceled;
            run.ended_ms = Some(now_ms);
            // Calls that the last reply requested and that have not started must not start later.
            run.progress.canceled = run.progress.pending_reply.is_some();
            let data = json!({ "by": by, "reason": reason });
            vec![JournalRecord::new(JournalKind::Canceled, now_ms, data)]
        });
        let run = self.dispatcher.detach_on_drop(canceled).await?;
        let by_owner =
            |call: &Call| call.origin.agent == run.owner.agent && !self.is_detached_agent(call);
        self.calls.cancel_open_calls(caller, &run.id, "its run was canceled", by_owner).await;
        Ok(run)
    }

    /// Adds user messages to a run. They go to the model with the next request; a run that has
    /// ended continues.
    pub async fn add_run_messages(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        messages: Vec<Value>,
    ) -> Result<Run, Error> {
        require_run_access(caller)?;
        agent_loop::check_messages(&messages)?;
        self.check_run_capacity()?;
        require_run_owner(caller, &self.find_run(caller, run_id).await?)?;
        self.require_no_conversation(caller, run_id)?;
        let RunGuard { active_run, state } = self.lock_run(&caller.project, run_id).await?;
        let (notified_run, caller) = (active_run.clone(), caller.clone());
        let commit = self.clone().commit_run(active_run, state, move |run, now_ms| {
            reopen_run(run, &caller);
            run.queued_messages.extend(messages.iter().cloned());
            vec![JournalRecord::new(
                JournalKind::UserMessage,
                now_ms,
                json!({ "messages": messages }),
            )]
        });
        let run = self.dispatcher.detach_on_drop(commit).await?;
        notified_run.message_added.notify_one();
        Ok(run)
    }

    /// Resumes a failed or canceled run from its last stored step.
    pub async fn resume_run(self: &Arc<Self>, caller: &Caller, run_id: &str) -> Result<Run, Error> {
        require_run_access(caller)?;
        self.registry.catalog().check_caller_is_on(caller)?;
        self.check_run_capacity()?;
        let run = self.find_run(caller, run_id).await?;
        require_run_owner(caller, &run)?;
        if !run.status.is_terminal() {
            return Ok(run);
        }
        if run.status == RunStatus::Succeeded {
            let message = "this run has its answer; add a message with POST …/messages";
            let detail = json!({ "status": run.status.as_str() });
            return Err(Fault::new(Code::Conflict, message).with_detail(detail).into());
        }
        let RunGuard { active_run, state } = self.lock_run(&caller.project, run_id).await?;
        let caller = caller.clone();
        let resumed = self.clone().commit_run(active_run, state, move |run, now_ms| {
            let has_answer = run.answer.is_some();
            reopen_run(run, &caller);
            if has_answer {
                run.queued_messages.push(json!({ "role": "user", "content": RETRY_MESSAGE }));
            }
            vec![JournalRecord::new(JournalKind::Resumed, now_ms, json!({}))]
        });
        self.dispatcher.detach_on_drop(resumed).await
    }

    /// Waits until a run has ended, at most `wait_ms` and the engine's limit, and returns it.
    pub async fn wait_for_run(
        &self,
        caller: &Caller,
        run_id: &str,
        wait_ms: u64,
    ) -> Result<Run, Error> {
        let (project, run) = (caller.project.clone(), run_id.to_owned());
        let mut listener = self.core.bus.listen(Topic::Run { project, run_id: run });
        let until_ms = self.core.now_ms() + wait_ms.min(self.core.limits.max_wait_ms);
        loop {
            let now_ms = self.core.now_ms();
            let enough = now_ms >= until_ms || self.core.shutdown.is_cancelled();
            // While this process drives the run, it has not ended, and the store need not be read
            // at each wakeup.
            if enough || !self.active_runs.is_active(&caller.project, run_id) {
                let run = self.find_run(caller, run_id).await?;
                if enough || run.status.is_terminal() {
                    return Ok(run);
                }
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(until_ms.min(now_ms + 2_000)) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Adopts every run that has not ended and that this process does not drive. Returns their
    /// number.
    pub async fn adopt_orphaned_runs(self: &Arc<Self>) -> Result<usize, Error> {
        let (mut after, mut count) = (None, 0);
        loop {
            let page = self.core.store.runs().list_open_runs(after, 200).await;
            let page = page.map_err(from_store_error)?;
            let Some(last) = page.last() else { break };
            after = Some((last.project.clone(), last.id.clone()));
            for run in page {
                self.utp.trees.restore_tree(&run.project, agents::root_of(&run)).await?;
                if self.active_runs.get(&run.project, &run.id).is_none() {
                    count += 1;
                    drop(self.lock_run(&run.project, &run.id).await?);
                }
                self.reconcile_agent_run(&run).await?;
            }
        }
        if count > 0 {
            tracing::info!(count, "adopted open runs");
        }
        Ok(count)
    }

    /// Returns the number of runs that this process drives, with the conversations in progress.
    pub fn open_run_count(&self) -> usize {
        self.active_runs.len() + self.active_runs.conversation_count()
    }

    /// Returns an error if the engine is draining or has reached its limit of open runs.
    pub fn check_run_capacity(&self) -> Result<(), Error> {
        if self.core.is_draining() {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        let loops = &self.active_runs;
        let open = loops.len() + loops.replays.load(Ordering::Relaxed);
        if open >= self.core.limits.max_open_runs {
            let message = "too many runs are open; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        Ok(())
    }

    fn validate_run_request(
        self: &Arc<Self>,
        caller: &Caller,
        new: &RunRequest,
    ) -> Result<(), Error> {
        require_run_access(caller)?;
        self.registry.catalog().check_caller_is_on(caller)?;
        self.check_run_capacity()?;
        let has_valid_length = (1..=255).contains(&new.model.len());
        if !has_valid_length || new.model.chars().any(char::is_control) {
            return Err(invalid("model", "must be 1 to 255 bytes, no control characters"));
        }
        agent_loop::check_messages(&new.messages)?;
        if let Some((field, problem)) = new.limits.invalid_field() {
            return Err(invalid(&format!("limits/{field}"), &problem));
        }
        let (parallel, wait_ms) =
            (self.core.limits.max_batch_parallel, self.core.limits.max_wait_ms);
        if let Some((field, problem)) = new.execution_options.invalid_field(parallel, wait_ms) {
            return Err(invalid(&format!("policy/{field}"), &problem));
        }
        for (field, word) in [("user_id", &new.user_id), ("idempotency_key", &new.idempotency_key)]
        {
            if word.as_ref().is_some_and(|word| !(1..=255).contains(&word.len())) {
                return Err(invalid(field, "must be 1 to 255 bytes"));
            }
        }
        agent_loop::check_pinned_tools(new.tool_mode, new.pinned_tools.as_deref())?;
        agent_loop::check_tool_patterns(self, caller, new.tools.as_deref().unwrap_or_default())
    }
}

/// Adds the conversations in progress that fit the filter to a list of stored runs, in place of the
/// records of earlier conversations with the same run id. Those up to the id `first_later` belong
/// to a later page.
fn add_conversations(
    runs: &mut Vec<Run>,
    open: Vec<Run>,
    filter: &RunFilter,
    first_later: Option<&str>,
) {
    for conversation in open {
        let stored = runs.iter().position(|run| run.id == conversation.id);
        if stored.is_some_and(|at| !runs[at].options.is_conversation) {
            continue;
        }
        let created_ms = match stored {
            Some(at) => runs.remove(at).created_ms,
            None => conversation.created_ms,
        };
        let fits = filter.status.is_none_or(|status| status == conversation.status)
            && filter.model.as_ref().is_none_or(|model| *model == conversation.model)
            && filter.since_ms.is_none_or(|since_ms| created_ms >= since_ms)
            && filter.before.as_ref().is_none_or(|before| conversation.id < *before)
            && first_later.is_none_or(|later| conversation.id.as_str() > later);
        if fits {
            runs.push(Run { created_ms, ..conversation });
        }
    }
    runs.sort_by(|a, b| b.id.cmp(&a.id));
}

/// Makes a run RUNNING again, also one that has ended, and restarts the usage that counts against
/// its limits. From here on a driver continues it, also if a conversation of OpenAI's API created
/// it.
fn reopen_run(run: &mut Run, caller: &Caller) {
    if run.status.is_terminal() {
        run.owner.renew_credential(caller);
    }
    run.options.is_conversation = false;
    (run.status, run.ended_ms) = (RunStatus::Running, None);
    (run.answer, run.error, run.deliverable_card_id) = (None, None, None);
    run.progress.reset_baseline();
}

fn run_idempotency_key(caller: &Caller, new: &RunRequest) -> Option<IdempotencyKey> {
    let key = new.idempotency_key.clone()?;
    let fingerprint = run_fingerprint(new);
    Some(IdempotencyKey { agent: caller.owner_name(), key, fingerprint })
}

fn run_fingerprint(new: &RunRequest) -> String {
    let request = serde_json::to_string(new).unwrap_or_default();
    hex(&Sha256::digest(canonicalize(&request).as_bytes()))
}

pub fn require_run_access(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = format!("a key with the role {} has no runs", caller.roles);
    Err(Error::refused(Code::PermissionDenied, message))
}

fn require_end_status(run: Run, expected: RunStatus) -> Result<Run, Error> {
    if run.status == expected {
        return Ok(run);
    }
    let message = format!("this run has already ended: {}", run.status.as_str());
    let detail = json!({ "status": run.status.as_str() });
    Err(Fault::new(Code::Conflict, message).with_detail(detail).into())
}

fn invalid(field: &str, problem: &str) -> Error {
    let fault =
        Fault::new(Code::ValidationError, format!("{field} {problem}")).without_side_effect();
    fault.with_detail(json!({ "pointer": format!("/{field}") })).into()
}
