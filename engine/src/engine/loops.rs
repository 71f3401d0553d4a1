//! Stored runs: start, read, list, cancel, resume, add messages, adopt.
//!
//! One task of this process (`driver`) drives each run that has not ended. Every change to a run,
//! by that task or by a caller, is decided under one lock and committed with its journal records
//! before it is visible.

mod conduct;
mod ears;
mod follow;
mod hold;
mod replay;

use serde::Serialize;
use std::sync::atomic::Ordering;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{CallQuery, Engine, unavailable};
use crate::bus::Topic;
use crate::call::{Call, Status};
use crate::caller::Caller;
use crate::fault::{Code, Error, Fault};
use crate::json::canonical;
use crate::run::{Asker, Entry, EntryKind, Run, RunStatus};
use crate::store::IdempotencyKey;
use crate::store::loops::RunFilter;
use crate::tool::hex;
use crate::turn::{self, Acting, Asking, Progress, Terms};

use hold::InHand;

pub use follow::{LiveNote, RunNews};
pub(crate) use hold::Loops;
pub use replay::{Difference, Replayed};

/// A request to start a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NewRun {
    pub model: String,
    pub messages: Vec<Value>,
    /// Names and patterns of the tools it may use; `None` means all that the caller may call.
    pub tools: Option<Vec<String>>,
    /// Additional fields of each request to the model.
    pub settings: Map<String, Value>,
    pub limits: turn::Limits,
    /// Policy for model requests; the engine's default if `None`.
    pub asking: Option<Asking>,
    pub acting: Acting,
    /// A label. Never used for decisions.
    pub user_id: Option<String>,
    #[serde(skip)]
    pub traceparent: Option<String>,
    #[serde(skip)]
    pub idempotency_key: Option<String>,
    /// True if the caller reads [`StartedRun::subscription`].
    #[serde(skip)]
    pub listens: bool,
}

/// An accepted run.
pub struct StartedRun {
    pub run: Run,
    /// True if the idempotency key was used before. `run` is the run it created then.
    pub replayed: bool,
    /// Stream of the run's deltas from its beginning. Empty unless the request subscribes.
    pub news: RunNews,
}

/// Filter for a list of runs.
#[derive(Debug, Clone, Default)]
pub struct RunQuery {
    pub status: Option<RunStatus>,
    pub model: Option<String>,
    pub since_ms: Option<u64>,
    /// Id of the last run of the previous page.
    pub before: Option<String>,
    pub limit: usize,
}

/// A page of runs, newest first.
#[derive(Debug)]
pub struct RunPage {
    pub runs: Vec<Run>,
    /// Cursor for the next page, if there is one.
    pub before: Option<String>,
}

impl Engine {
    /// Starts a run. When this returns the run is stored, and it is driven to its end even after a
    /// crash.
    pub async fn start_run(&self, caller: &Caller, new: NewRun) -> Result<StartedRun, Error> {
        self.check_run(caller, &new)?;
        let inner = &self.inner;
        let key = run_key(caller, &new);
        let now_ms = self.now_ms();
        let id = inner.minter.text(Run::PREFIX, now_ms);
        let terms = Terms {
            run_id: id.clone(),
            key: Some(id.clone()),
            tools: new.tools,
            settings: new.settings,
            limits: new.limits,
            asking: new.asking.unwrap_or_else(|| inner.asking.clone()),
            acting: new.acting,
            user_id: new.user_id,
            traceparent: new.traceparent,
            ..Terms::default()
        };
        let run = Run {
            id,
            project: caller.project.clone(),
            asker: Asker { keyed: self.has_key_of(caller), ..Asker::from(caller) },
            model: new.model,
            status: RunStatus::Running,
            terms,
            progress: Progress::default(),
            answer: None,
            error: None,
            said: Vec::new(),
            created_ms: now_ms,
            updated_ms: now_ms,
            ended_ms: None,
            version: 1,
        };
        let data = json!({ "model": run.model });
        let entry = Entry::new(EntryKind::Created, now_ms, data).adding(new.messages);
        let starting = inner.clone().take_run(run, key, entry, new.listens);
        inner.surely(starting).await
    }

    /// Returns one run.
    pub async fn loop_run(&self, caller: &Caller, run_id: &str) -> Result<Run, Error> {
        let found = self.inner.store.loops().loop_run(&caller.project, run_id).await;
        found.map_err(unavailable)?.ok_or_else(|| no_run(run_id))
    }

    /// Checks that this caller may make calls under this run id. Refused if a run with this id
    /// exists and belongs to another agent.
    pub async fn check_run_name(&self, caller: &Caller, run_id: &str) -> Result<(), Error> {
        let found = self.inner.store.loops().loop_run(&caller.project, run_id).await;
        match found.map_err(unavailable)? {
            Some(run) if run.asker.agent != caller.agent => Err(not_own(&run)),
            _ => Ok(()),
        }
    }

    /// Returns a page of the project's runs, newest first.
    pub async fn loop_runs(&self, caller: &Caller, query: RunQuery) -> Result<RunPage, Error> {
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
        let mut runs = self.inner.store.loops().loop_runs(filter).await.map_err(unavailable)?;
        let more = runs.len() > limit;
        runs.truncate(limit);
        let before = runs.last().filter(|_| more).map(|last| last.id.clone());
        Ok(RunPage { runs, before })
    }

    /// Cancels a run and its open calls. Fails with a conflict if the run ended otherwise.
    pub async fn cancel_run(
        &self,
        caller: &Caller,
        run_id: &str,
        reason: Option<String>,
    ) -> Result<Run, Error> {
        require_runs(caller)?;
        let run = self.loop_run(caller, run_id).await?;
        if run.status.is_over() {
            return over(run, RunStatus::Canceled);
        }
        let InHand { live, state } = self.inner.in_hand(&caller.project, run_id).await?;
        if state.run.status.is_over() {
            return over(state.run.clone(), RunStatus::Canceled);
        }
        live.stop.notify_one();
        // Once the driver has stopped, every call it started is queued for the store ahead of this
        // commit, so the cancellation below misses none.
        let stopped = live.clone();
        let _stopped = stopped.driving.lock().await;
        let by = caller.agent.clone();
        let canceled = self.inner.clone().commit(live, state, move |run, now_ms| {
            run.status = RunStatus::Canceled;
            run.ended_ms = Some(now_ms);
            // Calls that the last reply requested and that have not started must not start later.
            run.progress.canceled = run.progress.reply.is_some();
            let data = json!({ "by": by, "reason": reason });
            vec![Entry::new(EntryKind::Canceled, now_ms, data)]
        });
        let run = self.inner.surely(canceled).await?;
        let own = |call: &Call| call.asked.agent == run.asker.agent;
        self.cancel_open(caller, &run.id, "its run was canceled", own).await;
        Ok(run)
    }

    /// Adds user messages to a run. They go to the model with the next request; a run that has
    /// ended continues.
    pub async fn say_to_run(
        &self,
        caller: &Caller,
        run_id: &str,
        messages: Vec<Value>,
    ) -> Result<Run, Error> {
        require_runs(caller)?;
        turn::check_messages(&messages)?;
        self.check_open()?;
        require_own(caller, &self.loop_run(caller, run_id).await?)?;
        let InHand { live, state } = self.inner.in_hand(&caller.project, run_id).await?;
        let spoken = live.clone();
        let said = self.inner.clone().commit(live, state, move |run, now_ms| {
            go_on(run);
            run.said.extend(messages.iter().cloned());
            vec![Entry::new(EntryKind::Said, now_ms, json!({ "messages": messages }))]
        });
        let run = self.inner.surely(said).await?;
        spoken.said.notify_one();
        Ok(run)
    }

    /// Resumes a failed or canceled run from its last stored step.
    pub async fn resume_run(&self, caller: &Caller, run_id: &str) -> Result<Run, Error> {
        require_runs(caller)?;
        self.check_open()?;
        let run = self.loop_run(caller, run_id).await?;
        require_own(caller, &run)?;
        if !run.status.is_over() {
            return Ok(run);
        }
        if run.status == RunStatus::Succeeded {
            let message = "this run has its answer; POST …/messages says more to it";
            let detail = json!({ "status": run.status.as_str() });
            return Err(Fault::new(Code::Conflict, message).with_detail(detail).into());
        }
        let InHand { live, state } = self.inner.in_hand(&caller.project, run_id).await?;
        let resumed = self.inner.clone().commit(live, state, move |run, now_ms| {
            go_on(run);
            vec![Entry::new(EntryKind::Resumed, now_ms, json!({}))]
        });
        self.inner.surely(resumed).await
    }

    /// Waits until a run has ended, at most `wait_ms`, and returns it.
    pub async fn wait_run(
        &self,
        caller: &Caller,
        run_id: &str,
        wait_ms: u64,
    ) -> Result<Run, Error> {
        let inner = &self.inner;
        let (project, run) = (caller.project.clone(), run_id.to_owned());
        let mut news = inner.bus.listen(Topic::Run { project, run_id: run });
        let until_ms = self.now_ms() + wait_ms.min(inner.limits.max_wait_ms);
        loop {
            let now_ms = self.now_ms();
            let enough = now_ms >= until_ms || inner.stopping.is_cancelled();
            // While this process drives the run, it has not ended, and the store need not be read
            // at each wake-up.
            if enough || !self.run_is_live(caller, run_id) {
                let run = self.loop_run(caller, run_id).await?;
                if enough || run.status.is_over() {
                    return Ok(run);
                }
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(until_ms.min(now_ms + 2_000)) => {}
                () = inner.stopping.cancelled() => {}
            }
        }
    }

    /// Adopts every run that has not ended and that this process does not drive. Returns their
    /// number.
    pub async fn take_up_runs(&self) -> Result<usize, Error> {
        let (mut after, mut count) = (None, 0);
        loop {
            let page = self.inner.store.loops().open_loops(after, 200).await;
            let page = page.map_err(unavailable)?;
            let Some(last) = page.last() else { break };
            after = Some((last.project.clone(), last.id.clone()));
            for run in page {
                if self.inner.loops.get(&run.project, &run.id).is_none() {
                    count += 1;
                    drop(self.inner.in_hand(&run.project, &run.id).await?);
                }
            }
        }
        if count > 0 {
            tracing::info!(count, "adopted open runs");
        }
        Ok(count)
    }

    /// Returns the number of runs that have not ended.
    pub fn open_runs(&self) -> usize {
        self.inner.loops.len()
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.is_draining() {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::later(Code::Overloaded, message, 1_000));
        }
        let loops = &self.inner.loops;
        let open = loops.len() + loops.replays.load(Ordering::Relaxed);
        if open >= self.inner.limits.max_open_runs {
            let message = "too many runs are open; nothing was done, a retry is safe";
            return Err(Error::later(Code::Overloaded, message, 1_000));
        }
        Ok(())
    }

    fn check_run(&self, caller: &Caller, new: &NewRun) -> Result<(), Error> {
        require_runs(caller)?;
        self.check_open()?;
        let named = (1..=255).contains(&new.model.len());
        if !named || new.model.chars().any(char::is_control) {
            return Err(invalid("model", "must be 1 to 255 bytes, no control characters"));
        }
        turn::check_messages(&new.messages)?;
        if let Some((field, what)) = new.limits.problem() {
            return Err(invalid(&format!("limits/{field}"), &what));
        }
        if let Some((field, what)) = new.acting.problem(&self.inner.limits) {
            return Err(invalid(&format!("policy/{field}"), &what));
        }
        for (field, word) in [("user_id", &new.user_id), ("idempotency_key", &new.idempotency_key)]
        {
            if word.as_ref().is_some_and(|word| !(1..=255).contains(&word.len())) {
                return Err(invalid(field, "must be 1 to 255 bytes"));
            }
        }
        turn::check_tools(self, caller, new.tools.as_deref().unwrap_or_default())
    }

    /// Cancels the open calls of a run that `own` selects. Other callers may have used the same run
    /// id; their calls are not the run's.
    pub(super) async fn cancel_open(
        &self,
        caller: &Caller,
        run_id: &str,
        why: &str,
        own: impl Fn(&Call) -> bool,
    ) {
        for status in [Status::Pending, Status::Running] {
            let (run_id, status) = (Some(run_id.to_owned()), Some(status));
            let mut query = CallQuery { run_id, status, limit: 200, ..CallQuery::default() };
            loop {
                let Ok(page) = self.calls(caller, query.clone()).await else { break };
                for call in page.calls.iter().filter(|call| own(call)) {
                    let reason = Some(why.to_owned());
                    if let Err(error) = self.cancel(caller, &call.id, reason).await {
                        tracing::debug!(%error, call = %call.id, "call not canceled");
                    }
                }
                query.before = page.before;
                if query.before.is_none() {
                    break;
                }
            }
        }
    }
}

/// Reopens a run that has ended and resets the usage that counts against its limits.
fn go_on(run: &mut Run) {
    (run.status, run.ended_ms) = (RunStatus::Running, None);
    (run.answer, run.error) = (None, None);
    run.progress.count_anew();
}

fn run_key(caller: &Caller, new: &NewRun) -> Option<IdempotencyKey> {
    let key = new.idempotency_key.clone()?;
    let request = serde_json::to_string(new).unwrap_or_default();
    let fingerprint = hex(&Sha256::digest(canonical(&request).as_bytes()));
    Some(IdempotencyKey { agent: caller.agent.clone(), key, fingerprint })
}

fn require_runs(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = format!("a key with the role {} has no runs", caller.role.as_str());
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Requires that the caller owns the run. A run acts with the rights of its owner, so a caller with
/// other rights must not steer it, not even under the same agent name.
fn require_own(caller: &Caller, run: &Run) -> Result<(), Error> {
    if caller.may_administer() || run.asker.is(caller) {
        return Ok(());
    }
    Err(not_own(run))
}

fn not_own(run: &Run) -> Error {
    let message =
        format!("this run acts for agent \"{}\", and only it may go on with it", run.asker.agent);
    Error::refused(Code::PermissionDenied, message)
}

fn over(run: Run, wanted: RunStatus) -> Result<Run, Error> {
    if run.status == wanted {
        return Ok(run);
    }
    let message = format!("this run is over already: {}", run.status.as_str());
    let detail = json!({ "status": run.status.as_str() });
    Err(Fault::new(Code::Conflict, message).with_detail(detail).into())
}

pub(super) fn no_run(run_id: &str) -> Error {
    let shown: String = run_id.chars().take(80).collect();
    Error::refused(Code::NotFound, format!("there is no run \"{shown}\""))
}

fn invalid(field: &str, what: &str) -> Error {
    let fault = Fault::new(Code::ValidationError, format!("{field} {what}")).not_happened();
    fault.with_detail(json!({ "pointer": format!("/{field}") })).into()
}
