//! Batches: all the calls of tools that a model asked for at once.
//!
//! A batch is not a thing of its own. Every entry is a call, taken, stored and settled by itself
//! through [`Engine::invoke`], and one that is refused or fails takes no other with it. What the
//! batch adds is which of them run side by side, one wait for all, and answers in the form in which
//! each was asked for.
//!
//! An entry is begun only while somebody waits for the batch. What was begun goes on whatever
//! happens, and is answered with its ticket when it did not end in time. What was not begun is
//! answered so, and is not begun later: nobody would know of it after a crash. The same batch with
//! the same idempotency key takes up where this one was left.

mod answer;
mod shares;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use serde_json::json;

use crate::call::Call;
use crate::caller::Caller;
use crate::dialect::{self, Entry};
use crate::engine::{Engine, Invocation};
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use crate::tool::Effect;

pub use answer::{BatchAnswer, Settled, State, pending};
pub(crate) use shares::divided;

/// The longest idempotency key of a batch: the keys of its entries are a little longer.
pub const MAX_KEY_BYTES: usize = 240;

/// Which entries run side by side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// One after the other: the next begins when the one before has ended.
    #[default]
    Serial,
    /// Tools that only read side by side; the others one after the other, beside them.
    Parallel,
    /// All side by side, in no order.
    Unordered,
}

/// Calls of tools, asked for at once.
#[derive(Debug, Clone)]
pub struct Batch {
    pub run_id: String,
    /// Each in any form that [`crate::dialect`] reads.
    pub entries: Vec<Json>,
    pub mode: Mode,
    /// How many may be under way at the same time; unless said, as many as the limits permit.
    pub max_parallel: Option<usize>,
    /// How many tokens the messages may have together; unless said, as many as they have.
    pub budget_tokens: Option<usize>,
    /// How long to wait for all of them; unless said, as long as the limits permit.
    pub wait_ms: Option<u64>,
    /// Each entry that has no key of its own gets one made of this and its place.
    pub idempotency_key: Option<String>,
    /// A label; never used to decide anything.
    pub user_id: Option<String>,
    /// The trace it is asked in, as W3C's `traceparent`.
    pub traceparent: Option<String>,
    /// Who is told of the end of each call.
    pub callback_url: Option<String>,
}

impl Batch {
    /// These entries, one after the other.
    pub fn new(run_id: impl Into<String>, entries: Vec<Json>) -> Self {
        Self {
            run_id: run_id.into(),
            entries,
            mode: Mode::default(),
            max_parallel: None,
            budget_tokens: None,
            wait_ms: None,
            idempotency_key: None,
            user_id: None,
            traceparent: None,
            callback_url: None,
        }
    }
}

impl Engine {
    /// Runs a batch, and answers when all of it has ended or the wait is over.
    ///
    /// Only a batch that makes no sense as a whole is refused; an entry that is denied, unknown or
    /// invalid is answered as a failure of its own.
    ///
    /// ```
    /// use toolcrib::{Batch, Caller, Effect, Engine, FnTool, Json, batch};
    ///
    /// #[derive(serde::Deserialize, schemars::JsonSchema)]
    /// struct Add { a: i64, b: i64 }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let add = FnTool::new("calc.add", "Adds two integers", |args: Add| async move {
    ///     Ok::<i64, String>(args.a + args.b)
    /// });
    /// let engine = Engine::builder().tool(add.effect(Effect::Read)).start().await?;
    /// // As OpenAI's models write them; the second has arguments that are not JSON.
    /// let calls = [r#"{\"a\":20,\"b\":22}"#, r#"{\"a\":20,"#].map(|arguments| {
    ///     format!(r#"{{"id":"call_0","type":"function",
    ///         "function":{{"name":"calc__add","arguments":"{arguments}"}}}}"#)
    /// });
    /// let entries = calls.iter().map(|call| Json::parse(call)).collect::<Result<_, _>>()?;
    /// let batch = Batch { mode: batch::Mode::Parallel, ..Batch::new("run_1", entries) };
    /// let answer = engine.batch(&Caller::local("default"), batch).await?;
    /// assert_eq!(
    ///     answer.messages[0].text(),
    ///     r#"{"role":"tool","tool_call_id":"call_0","content":"42"}"#
    /// );
    /// assert!(answer.messages[1].text().contains("not JSON"));
    /// # Ok(()) }
    /// ```
    pub async fn batch(&self, caller: &Caller, batch: Batch) -> Result<BatchAnswer, Error> {
        self.check(&batch)?;
        if let Some(url) = &batch.callback_url {
            self.inner.check_callback(caller, url)?;
        }
        let read: Vec<_> = batch.entries.iter().map(dialect::parse).collect();
        if !caller.may_invoke() {
            // No entry could be anything else, so this is the answer to the whole.
            let first = read.iter().flatten().next().map_or("", |entry| entry.name.as_str());
            self.inner.check_permission(&self.inner.catalog(), caller, first).await?;
        }
        let limits = self.limits();
        let width = batch.max_parallel.unwrap_or(limits.max_batch_parallel);
        let wait_ms = batch.wait_ms.unwrap_or(limits.max_wait_ms).min(limits.max_wait_ms);
        let lanes = self.lanes(caller, &batch, width, &read);
        let run = Run {
            engine: self,
            caller,
            batch: &batch,
            width,
            until_ms: self.now_ms() + wait_ms,
            begun: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        };
        let lanes: Vec<_> = lanes.into_iter().map(|lane| run.lane(lane)).collect();
        let done = futures::stream::iter(lanes).buffer_unordered(width).collect::<Vec<_>>().await;
        let mut states: Vec<Option<(State, bool)>> = read.iter().map(|_| None).collect();
        for (index, state, replayed) in done.into_iter().flatten() {
            states[index] = Some((state, replayed));
        }
        let settled = read.into_iter().zip(states).enumerate();
        let results = settled.map(|(index, (read, state))| Settled::of(index, read, state));
        BatchAnswer::of(results.collect(), batch.budget_tokens).await
    }

    fn check(&self, batch: &Batch) -> Result<(), Error> {
        let limits = self.limits();
        let refused = |field: &str, message: String| {
            let detail = json!({ "pointer": format!("/{field}") });
            let fault = Fault::new(Code::ValidationError, message).not_happened();
            Err(Error::from(fault.with_detail(detail)))
        };
        if self.is_draining() {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::later(Code::Overloaded, message, 1_000));
        }
        let (count, most) = (batch.entries.len(), limits.max_batch_entries);
        if count == 0 || count > most {
            let message = format!("tool_calls must be 1 to {most} entries, and are {count}");
            return refused("tool_calls", message);
        }
        let most = limits.max_batch_parallel;
        if batch.max_parallel.is_some_and(|width| width == 0 || width > most) {
            return refused("max_parallel", format!("max_parallel must be from 1 to {most}"));
        }
        if batch.budget_tokens == Some(0) {
            return refused("budget_tokens", "budget_tokens must be at least 1".into());
        }
        let words = [
            ("run_id", Some(&batch.run_id), 255),
            ("user_id", batch.user_id.as_ref(), 255),
            ("idempotency_key", batch.idempotency_key.as_ref(), MAX_KEY_BYTES),
        ];
        for (field, word, most) in words {
            let fits = |word: &String| {
                (1..=most).contains(&word.len()) && !word.chars().any(char::is_control)
            };
            if word.is_some_and(|word| !fits(word)) {
                let message = format!("{field} must be 1 to {most} bytes, no control characters");
                return refused(field, message);
            }
        }
        Ok(())
    }

    /// What runs side by side: the entries of a lane go one after the other.
    fn lanes<'a>(
        &self,
        caller: &Caller,
        batch: &Batch,
        width: usize,
        read: &'a [Result<Entry, dialect::Misfit>],
    ) -> Vec<Vec<(usize, &'a Entry)>> {
        let fit = read.iter().enumerate();
        let fit = fit.filter_map(|(index, entry)| entry.as_ref().ok().map(|entry| (index, entry)));
        let catalog = self.inner.catalog();
        let in_order = |entry: &Entry| match batch.mode {
            // With one place there is only one order that nobody wonders about.
            _ if width == 1 => true,
            Mode::Serial => true,
            Mode::Unordered => false,
            // What is not there is refused at once, and need not wait for its turn.
            Mode::Parallel => catalog
                .named(caller, &entry.name)
                .is_some_and(|tool| tool.definition.effect != Effect::Read),
        };
        let (ordered, free): (Vec<_>, Vec<_>) = fit.partition(|(_, entry)| in_order(entry));
        let mut lanes: Vec<_> = free.into_iter().map(|entry| vec![entry]).collect();
        if !ordered.is_empty() {
            lanes.insert(0, ordered);
        }
        lanes
    }
}

/// A batch under way.
struct Run<'a> {
    engine: &'a Engine,
    caller: &'a Caller,
    batch: &'a Batch,
    width: usize,
    until_ms: u64,
    /// Lanes that have begun.
    begun: AtomicUsize,
    /// Bytes of the results so far.
    bytes: AtomicUsize,
}

impl Run<'_> {
    async fn lane(&self, entries: Vec<(usize, &Entry)>) -> Vec<(usize, State, bool)> {
        // Those that have a place from the beginning begin even if nobody waits at all.
        let mut at_once = self.begun.fetch_add(1, Ordering::Relaxed) < self.width;
        let mut blocked = false;
        let mut done = Vec::with_capacity(entries.len());
        for (index, entry) in entries {
            let in_time = at_once || self.engine.now_ms() < self.until_ms;
            if blocked || !in_time {
                done.push((index, State::Refused(not_begun()), false));
                continue;
            }
            let (state, replayed) = self.settle(index, entry).await;
            match &state {
                State::Refused(_) => {}
                State::Open(call) => blocked = !call.asked.background,
                State::Ended { .. } => at_once = false,
            }
            done.push((index, state, replayed));
        }
        done
    }

    async fn settle(&self, index: usize, entry: &Entry) -> (State, bool) {
        let asked = self.invocation(index, entry);
        let ticket = match self.engine.invoke(self.caller, asked).await {
            Ok(ticket) => ticket,
            Err(error) => return (State::Refused(told(error)), false),
        };
        let mut call = ticket.call.clone();
        if !call.status.is_terminal() && !call.asked.background {
            let left_ms = self.until_ms.saturating_sub(self.engine.now_ms());
            // When the store cannot be asked, the ticket is still good.
            call = self.engine.outcome(self.caller, &ticket, left_ms).await.unwrap_or(call);
        }
        let state = if call.status.is_terminal() { self.ended(call) } else { State::Open(call) };
        (state, ticket.replayed)
    }

    fn invocation(&self, index: usize, entry: &Entry) -> Invocation {
        let batch = self.batch;
        let of_batch = || batch.idempotency_key.as_ref().map(|key| format!("{key}/{index}"));
        Invocation {
            run_id: batch.run_id.clone(),
            call_id: entry.id.clone(),
            timeout_ms: entry.timeout_ms,
            retry: entry.retry,
            idempotency_key: entry.idempotency_key.clone().or_else(of_batch),
            user_id: batch.user_id.clone(),
            traceparent: batch.traceparent.clone(),
            callback_url: batch.callback_url.clone(),
            ..Invocation::of(entry.name.clone(), entry.args.clone())
        }
    }

    /// Keeps the result, unless those of this batch are too much together already.
    fn ended(&self, call: Arc<Call>) -> State {
        let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
        let size = data.map_or(0, |data| data.text().len());
        let before = self.bytes.fetch_add(size, Ordering::Relaxed);
        if before + size <= self.engine.limits().max_batch_bytes {
            return State::Ended { call, left_out_bytes: None };
        }
        self.bytes.fetch_sub(size, Ordering::Relaxed);
        let mut slim = (*call).clone();
        if let Some(outcome) = &mut slim.outcome {
            outcome.data = None;
        }
        State::Ended { call: Arc::new(slim), left_out_bytes: Some(size) }
    }
}

fn not_begun() -> Fault {
    let message = "not begun: the wait was over before its turn came. Nothing was done, and it \
                   will not be done later; ask for it again if it is still wanted";
    Fault::new(Code::Canceled, message).not_happened().retryable(true)
}

/// A refusal as the fault of an entry.
fn told(error: Error) -> Fault {
    match error {
        Error::Refused { fault, retry_after_ms: Some(ms) } if fault.detail.is_none() => {
            fault.with_detail(json!({ "retry_after_ms": ms }))
        }
        Error::Refused { fault, .. } => fault,
        Error::Internal(source) => {
            tracing::error!(error = %source, "an entry of a batch");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}
