//! Batches: all the calls of tools that a model asked for at once.
//!
//! A batch is not a thing of its own. Every entry is a call, taken, stored and settled by itself
//! through [`Engine::invoke`], and one that is refused or fails takes no other with it. What the
//! batch adds is which of them run side by side, one wait for all, and answers in the form in which
//! each was asked for.
//!
//! What was begun goes on whatever happens, and is answered with its ticket when it did not end in
//! time. What has not begun by then is stored behind what goes on, and answered with its ticket
//! too: its turn comes when the call before it has ended, also after a restart. Nothing is begun
//! for who does not wait to be told of it; the same batch with the same idempotency key takes up
//! where such a one was left.

mod answer;
mod run;
mod shares;
mod short;

use std::sync::Arc;

use serde_json::json;

use crate::caller::Caller;
use crate::dialect;
use crate::engine::Engine;
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use run::Run;

pub(crate) use answer::within;
pub use answer::{BatchAnswer, Settled, State, pending};
pub use run::Write;
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
    /// Or the key of each entry, in their order.
    pub keys: Vec<String>,
    /// How long each entry has that says nothing itself.
    pub timeout_ms: Option<u64>,
    /// How many attempts may follow the first of each entry that says nothing itself.
    pub retry: Option<u32>,
    /// A label; never used to decide anything.
    pub user_id: Option<String>,
    /// The trace it is asked in, as W3C's `traceparent`.
    pub traceparent: Option<String>,
    /// Who is told of the end of each call.
    pub callback_url: Option<String>,
    /// What has not begun when the wait is over is begun later, each when the one before it has
    /// ended; it has its ticket. Otherwise it is answered as a failure and is never begun.
    pub later: bool,
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
            keys: Vec::new(),
            timeout_ms: None,
            retry: None,
            user_id: None,
            traceparent: None,
            callback_url: None,
            later: true,
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
        self.batch_written(caller, batch, None).await
    }

    /// The same, with each result written as `write` does: as far as can be while the calls are
    /// stored, so that nobody waits for it.
    pub async fn batch_written(
        &self,
        caller: &Caller,
        batch: Batch,
        write: Option<Write>,
    ) -> Result<BatchAnswer, Error> {
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
        let budget = batch.budget_tokens;
        let run = Arc::new(Run::new(self, caller, batch, read, write));
        BatchAnswer::of(run.all().await, budget, write).await
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
}
