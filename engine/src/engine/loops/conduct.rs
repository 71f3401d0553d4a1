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

use super::LiveNote;
use super::hold::LiveRun;
use crate::batch::Settled;
use crate::caller::Caller;
use crate::engine::{Engine, unavailable};
use crate::fault::{Code, Error, Fault};
use crate::model::{Chosen, Reply};
use crate::run::{Entry, EntryKind, Run, RunStatus, Trouble};
use crate::turn::{FinalAnswer, Happening, Loop, Next, Talk, Terms};

/// Drives a run until it has ended, the server shuts down, or another process takes it over.
pub(super) async fn conduct(engine: Engine, live: Arc<LiveRun>) {
    let inner = engine.inner.clone();
    loop {
        let state = live.state.lock().await;
        if state.gone {
            return;
        }
        if state.run.status.is_over() {
            drop(state);
            if leave(&engine, &live).await {
                return;
            }
            continue;
        }
        drop(state);
        let driving = live.driving.lock().await;
        let driven = tokio::select! {
            biased;
            () = inner.stopping.cancelled() => return,
            // The task that cancels the run commits the cancellation.
            () = live.stop.notified() => Ok(()),
            driven = AssertUnwindSafe(carry_on(&engine, &live)).catch_unwind() => {
                driven.unwrap_or_else(|_| Err(Error::Internal("a run panicked".into())))
            }
        };
        drop(driving);
        let Err(error) = driven else { continue };
        if engine.is_draining() {
            return;
        }
        match &error {
            // Toolcrib lacks capacity; the run itself has not failed. It continues after a delay.
            Error::Refused { fault, retry_after_ms }
                if matches!(fault.code, Code::Overloaded | Code::RateLimited) =>
            {
                let wait_ms = retry_after_ms.unwrap_or(1_000);
                tokio::select! {
                    () = inner.clock.sleep_until(inner.clock.now_ms() + wait_ms) => {}
                    () = live.stop.notified() => {}
                    () = inner.stopping.cancelled() => return,
                }
            }
            _ => fail(&engine, &live, told(error)).await,
        }
    }
}

/// Releases a run that has ended. Returns false if it was reopened in the meantime.
async fn leave(engine: &Engine, live: &Arc<LiveRun>) -> bool {
    let mut state = live.state.lock().await;
    if !state.run.status.is_over() {
        return false;
    }
    state.gone = true;
    let place = (state.run.project.clone(), state.run.id.clone());
    engine.inner.loops.live.lock().remove(&place);
    true
}

fn told(error: Error) -> Fault {
    match error {
        Error::Refused { fault, .. } => fault,
        Error::Internal(source) => {
            tracing::error!(error = %source, "a run failed");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}

/// Commits the failure of a run. The conversation is preserved, so the run can be resumed.
async fn fail(engine: &Engine, live: &Arc<LiveRun>, fault: Fault) {
    let state = live.state.clone().lock_owned().await;
    if state.gone || state.run.status.is_over() {
        return;
    }
    let trouble = Trouble::from(&fault);
    let failed = engine.inner.clone().commit(live.clone(), state, move |run, now_ms| {
        (run.status, run.ended_ms) = (RunStatus::Failed, Some(now_ms));
        run.error = Some(trouble.clone());
        vec![Entry::new(EntryKind::Failed, now_ms, json!({ "error": trouble }))]
    });
    if let Err(error) = engine.inner.surely(failed).await {
        tracing::warn!(%error, "could not store the failure of a run");
        let inner = &engine.inner;
        tokio::select! {
            () = inner.clock.sleep_until(inner.clock.now_ms() + 1_000) => {}
            () = inner.stopping.cancelled() => {}
        }
    }
}

/// Loop events recorded since the last commit.
#[derive(Default)]
struct Seen {
    calls: Vec<Value>,
    late: Vec<Value>,
}

async fn carry_on(engine: &Engine, live: &Arc<LiveRun>) -> Result<(), Error> {
    let (run, beginning) = {
        let mut state = live.state.lock().await;
        (state.run.clone(), state.beginning.take())
    };
    let chosen = chosen(engine, &run.model)?;
    let messages = match beginning {
        Some(messages) => messages,
        None => {
            let journal = engine.inner.store.loops().journal(&run.project, &run.id).await;
            let journal = journal.map_err(unavailable)?;
            journal.into_iter().flat_map(|noted| noted.entry.messages).collect()
        }
    };
    let caller = run.caller();
    let terms = Terms { model: chosen.name, ..run.terms };
    let seen = Mutex::new(Seen::default());
    let watch = |happening: Happening<'_>| noted(live, &seen, &happening);
    let turns = Loop::lenient(engine, &caller, chosen.model.as_ref(), &terms, &watch)?;
    let talk = Talk { messages, progress: run.progress };
    let kept = talk.messages.len();
    let waits = run.status == RunStatus::Waiting && run.said.is_empty();
    let (caller, keyed) = (caller.clone(), run.asker.keyed);
    let driven = Driven { engine, caller, keyed, live, turns, talk, kept, said: 0, seen: &seen };
    driven.until_the_end(waits).await
}

fn chosen(engine: &Engine, name: &str) -> Result<Chosen, Error> {
    let models = engine.models();
    models.find(name).ok_or_else(|| {
        let known = models.names();
        let known = match known.is_empty() {
            true => "none is configured".to_owned(),
            false => format!("there are: {}", known.join(", ")),
        };
        let message = format!("there is no model \"{name}\"; {known}");
        Error::refused(Code::UpstreamUnavailable, message)
    })
}

/// Publishes a loop event to subscribers, or records it for the next journal commit.
fn noted(live: &LiveRun, seen: &Mutex<Seen>, happening: &Happening<'_>) {
    match happening {
        Happening::Settled { settled, .. } => seen.lock().calls.push(settled_value(settled)),
        Happening::Late { call, .. } => seen.lock().late.push(json!({
            "call_id": call.call_id, "tool_call_id": call.tool_call_id, "name": call.name,
        })),
        other => {
            if let Some(note) = LiveNote::of(other) {
                live.tell(note);
            }
        }
    }
}

fn settled_value(settled: &Settled) -> Value {
    let call = settled.call();
    json!({
        "call_id": settled.call_id,
        "tool_call_id": call.map(|call| call.id.as_str()),
        "name": settled.name,
        "status": call.map_or("REFUSED", |call| call.status.as_str()),
        "ok": settled.ok(),
        "digested": settled.digested,
        "error": settled.error().map(Trouble::from),
    })
}

/// A run that this task drives.
struct Driven<'a> {
    engine: &'a Engine,
    caller: Caller,
    /// True if the run acts for an API key, which may be revoked.
    keyed: bool,
    live: &'a Arc<LiveRun>,
    turns: Loop<'a>,
    talk: Talk,
    /// Number of messages in the journal.
    kept: usize,
    /// Number of user messages that are in the conversation but not yet in the journal.
    said: usize,
    seen: &'a Mutex<Seen>,
}

impl Driven<'_> {
    async fn until_the_end(mut self, mut waits: bool) -> Result<(), Error> {
        loop {
            if waits {
                self.sleep().await?;
                self.keep(None, None).await?;
            }
            self.take_said().await;
            self.check_standing()?;
            // A reply that was pending before is already in the journal.
            let is_new = self.talk.progress.reply.is_none();
            self.turns.ask(&mut self.talk).await?;
            let progress = &self.talk.progress;
            let reply = progress.reply.clone().unwrap_or_default();
            let acts = !reply.calls.is_empty() && progress.closing.is_none();
            if acts && is_new {
                let data = replied(&self.talk, &reply);
                self.keep(Some((EntryKind::Replied, data)), None).await?;
            }
            self.check_standing()?;
            let next = self.turns.act(&mut self.talk).await?;
            waits = false;
            match next {
                Next::GoesOn | Next::HandedBack(_) => {
                    let calls = std::mem::take(&mut self.seen.lock().calls);
                    let data = json!({ "step": self.talk.progress.steps, "calls": calls });
                    self.keep(Some((EntryKind::Results, data)), None).await?;
                }
                Next::Sleeps => {
                    let data = replied(&self.talk, &reply);
                    let what = Some((EntryKind::Replied, data));
                    let run = self.keep(what, Some(Turned::Waits)).await?;
                    waits = run.status == RunStatus::Waiting;
                }
                Next::Answered(answer) => {
                    let data = replied(&self.talk, &reply);
                    let turned = Some(Turned::Answered(answer));
                    let run = self.keep(Some((EntryKind::Replied, data)), turned).await?;
                    if run.status.is_over() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Fails if the API key that the run acts for was revoked.
    fn check_standing(&self) -> Result<(), Error> {
        if !self.keyed || self.engine.has_key_of(&self.caller) {
            return Ok(());
        }
        let message = format!(
            "the key of agent \"{}\", which this run acts for, was revoked",
            self.caller.agent
        );
        Err(Error::refused(Code::Unauthenticated, message))
    }

    /// Waits until a late result arrives or the user adds a message.
    async fn sleep(&mut self) -> Result<(), Error> {
        loop {
            tokio::select! {
                slept = self.turns.sleep(&mut self.talk) => return slept,
                () = self.live.said.notified() => {
                    if self.live.state.lock().await.run.said.len() > self.said {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Adds queued user messages to the conversation, for the next request to the model.
    async fn take_said(&mut self) {
        if self.talk.progress.reply.is_some() {
            return;
        }
        let state = self.live.state.lock().await;
        let new = state.run.said[self.said..].to_vec();
        if !new.is_empty() {
            self.said = state.run.said.len();
            self.talk.say(new);
        }
    }

    /// Commits the progress of the run.
    async fn keep(
        &mut self,
        what: Option<(EntryKind, Value)>,
        turned: Option<Turned>,
    ) -> Result<Run, Error> {
        let messages = self.talk.messages[self.kept..].to_vec();
        let (progress, said) = (self.talk.progress.clone(), self.said);
        let late = std::mem::take(&mut self.seen.lock().late);
        let state = self.live.state.clone().lock_owned().await;
        if state.gone || state.run.status.is_over() {
            // The run was canceled in the meantime.
            return Ok(state.run.clone());
        }
        let inner = self.engine.inner.clone();
        let kept = inner.clone().commit(self.live.clone(), state, move |run, now_ms| {
            run.progress = progress;
            run.said.drain(..said);
            run.status = RunStatus::Running;
            let late = late.into_iter().map(|data| Entry::new(EntryKind::Late, now_ms, data));
            let mut entries: Vec<Entry> = late.collect();
            entries.extend(what.map(|(kind, data)| Entry::new(kind, now_ms, data)));
            if let Some(last) = entries.last_mut() {
                last.messages = messages;
            }
            // A message added in the meantime has no reply yet, so the run must not end or wait.
            if let Some(turned) = turned.filter(|_| run.said.is_empty()) {
                entries.push(turned.apply(run, now_ms));
            }
            entries
        });
        let run = inner.surely(kept).await?;
        (self.kept, self.said) = (self.talk.messages.len(), 0);
        Ok(run)
    }
}

/// Change of a run's status at the end of a step.
enum Turned {
    Waits,
    Answered(FinalAnswer),
}

impl Turned {
    fn apply(self, run: &mut Run, now_ms: u64) -> Entry {
        match self {
            Self::Waits => {
                run.status = RunStatus::Waiting;
                let calls: Vec<Value> = run
                    .progress
                    .awaited
                    .iter()
                    .map(|call| json!({ "tool_call_id": call.tool_call_id, "name": call.name }))
                    .collect();
                Entry::new(EntryKind::Waiting, now_ms, json!({ "calls": calls }))
            }
            Self::Answered(answer) => {
                (run.status, run.ended_ms) = (RunStatus::Succeeded, Some(now_ms));
                let data = json!({
                    "answer": answer.text, "limit": answer.closing, "stopped": answer.stopped,
                    "usage": run.progress.usage, "steps": run.progress.steps,
                    "calls": run.progress.calls,
                });
                run.answer = Some(answer);
                Entry::new(EntryKind::Finished, now_ms, data)
            }
        }
    }
}

fn replied(talk: &Talk, reply: &Reply) -> Value {
    let mut data = serde_json::to_value(reply).unwrap_or_default();
    data["step"] = talk.progress.steps.into();
    data
}
