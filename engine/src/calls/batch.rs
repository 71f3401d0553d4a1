//! Batches: all tool calls that a model requests in one message.
//!
//! A batch is not stored as a unit. Every entry that parses is a call, accepted in the same way as
//! by [`Calls::invoke`], and an entry that is refused or fails does not affect the others. The
//! batch adds three things: a plan of which entries run concurrently, one wait for all of them, and
//! an answer to each entry in the format of its request.
//!
//! A call that has started runs to completion. If it has not ended when the wait is over, its
//! answer is its ticket. An entry that has not started by then is stored with the call that it
//! waits for as its predecessor, and is answered with its ticket too: it starts when the
//! predecessor has ended, also after a restart. If the caller disconnects during the wait, no
//! further entry is started; the same batch with the same idempotency key resumes there.

mod answer;
mod execution;
mod shorten;

use std::sync::Arc;

use execution::BatchExecution;
use futures::future::BoxFuture;
use serde_json::json;

use crate::calls::Calls;
use crate::calls::request::check_callback_url;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::model_formats;
use crate::registry::authorize::authorize_call;

pub(crate) use answer::render_within_budget;
pub use answer::{BatchAnswer, BatchEntryResult, BatchEntryState, pending_notice};
pub use execution::EntryRenderer;

/// Maximum length of a batch's idempotency key, in bytes. The keys derived for its entries are
/// slightly longer.
pub const MAX_KEY_BYTES: usize = 240;

/// Selects the entries of a batch that run concurrently.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BatchMode {
    /// One after another: each entry starts when the one before it has ended. An entry whose call
    /// runs in the background or waits for an approval does not hold up the next one.
    #[default]
    Serial,
    /// Calls of read-only tools and of agents run concurrently; the others run one after another,
    /// alongside them.
    Parallel,
    /// All entries run concurrently, in no particular order.
    Unordered,
}

/// Tool calls requested together.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Id of the run that the calls belong to.
    pub run_id: String,
    /// The entries, each in any format that [`crate::model_formats`] parses.
    pub entries: Vec<Json>,
    /// Order in which the entries run.
    pub mode: BatchMode,
    /// Maximum number of entries in flight at the same time, not counting calls that run in the
    /// background or wait for an approval. Defaults to the engine's limit.
    pub max_parallel: Option<usize>,
    /// Maximum number of tokens of all messages together. Unlimited by default.
    pub budget_tokens: Option<usize>,
    /// Maximum time to wait for all entries. Defaults to the engine's limit, which also caps it.
    pub wait_ms: Option<u64>,
    /// Idempotency key of the batch. An entry without its own key gets one derived from this key
    /// and the entry's index.
    pub idempotency_key: Option<String>,
    /// Idempotency key of each entry, in the order of the entries. Takes precedence over keys
    /// derived from the batch's key.
    pub entry_keys: Vec<String>,
    /// Timeout of each entry that sets none itself.
    pub timeout_ms: Option<u64>,
    /// Time limit of each attempt, for entries that set none themselves.
    pub attempt_timeout_ms: Option<u64>,
    /// Number of retries of each entry that sets none itself, where the tool's executor permits
    /// retries.
    pub retry: Option<u32>,
    /// A label; never used for a decision.
    pub user_id: Option<String>,
    /// W3C `traceparent` of the trace that the batch belongs to.
    pub traceparent: Option<String>,
    /// Number of agents above the caller in a chain of agents.
    pub depth: u32,
    /// Webhook URL that is notified when each call ends, unless the entry has its own.
    pub callback_url: Option<String>,
    /// If true, entries that have not started when the wait is over are stored and answered with a
    /// ticket: each starts when its predecessor has ended. If false, they are answered with a fault
    /// and never start.
    pub defer_unstarted: bool,
    /// Time that an entry over a rate limit waits until it is accepted. `None` refuses it at once.
    pub limit_wait_ms: Option<u64>,
    /// True if an entry joins an earlier identical call whose answer was not delivered
    /// ([`crate::CallRequest::rejoin`]). Entries of one batch never join each other.
    pub rejoin: bool,
    /// False: no entry joins an equal call that waits for its approval
    /// ([`crate::CallRequest::joins_waiting`]).
    pub joins_waiting: bool,
}

impl Batch {
    /// Creates a batch that runs these entries one after another.
    pub fn new(run_id: impl Into<String>, entries: Vec<Json>) -> Self {
        Self {
            run_id: run_id.into(),
            entries,
            mode: BatchMode::default(),
            max_parallel: None,
            budget_tokens: None,
            wait_ms: None,
            idempotency_key: None,
            entry_keys: Vec::new(),
            timeout_ms: None,
            attempt_timeout_ms: None,
            retry: None,
            user_id: None,
            traceparent: None,
            depth: 0,
            callback_url: None,
            defer_unstarted: true,
            limit_wait_ms: None,
            rejoin: false,
            joins_waiting: true,
        }
    }
}

impl Calls {
    /// Runs a batch and returns when all entries have ended or the wait is over.
    ///
    /// Refuses the whole batch if it is invalid, if the server is shutting down, or if the caller
    /// may not call tools. An entry that is denied, unknown or invalid is answered with a fault.
    ///
    /// ```
    /// use toolcrib::calls::{Batch, BatchMode};
    /// use toolcrib::{Caller, Effect, Engine, FnTool, Json};
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
    /// // In the OpenAI format; the arguments of the second call are not valid JSON.
    /// let calls = [r#"{\"a\":20,\"b\":22}"#, r#"{\"a\":20,"#].map(|arguments| {
    ///     format!(r#"{{"id":"call_0","type":"function",
    ///         "function":{{"name":"calc__add","arguments":"{arguments}"}}}}"#)
    /// });
    /// let entries = calls.iter().map(|call| Json::parse(call)).collect::<Result<_, _>>()?;
    /// let batch = Batch { mode: BatchMode::Parallel, ..Batch::new("run_1", entries) };
    /// let answer = engine.calls().run_batch(&Caller::local("default"), batch).await?;
    /// assert_eq!(
    ///     answer.messages[0].text(),
    ///     r#"{"role":"tool","tool_call_id":"call_0","content":"42"}"#
    /// );
    /// assert!(answer.messages[1].text().contains("not JSON"));
    /// # Ok(()) }
    /// ```
    pub fn run_batch<'a>(
        self: &'a Arc<Self>,
        caller: &'a Caller,
        batch: Batch,
    ) -> BoxFuture<'a, Result<BatchAnswer, Error>> {
        self.run_batch_with_renderer(caller, batch, None)
    }

    /// Runs a batch and renders each result with `renderer`.
    ///
    /// The rendering overlaps with the commit of the calls if possible, so that it adds no
    /// latency. The future is boxed here, so that it is compiled with this crate's optimization
    /// settings, and not again in the crate that awaits it.
    pub fn run_batch_with_renderer<'a>(
        self: &'a Arc<Self>,
        caller: &'a Caller,
        batch: Batch,
        renderer: Option<EntryRenderer>,
    ) -> BoxFuture<'a, Result<BatchAnswer, Error>> {
        Box::pin(self.run_and_render(caller, batch, renderer))
    }

    async fn run_and_render(
        self: &Arc<Self>,
        caller: &Caller,
        batch: Batch,
        renderer: Option<EntryRenderer>,
    ) -> Result<BatchAnswer, Error> {
        self.validate_batch(&batch)?;
        if let Some(url) = &batch.callback_url {
            check_callback_url(&self.core, caller, url)?;
        }
        let parsed: Vec<_> = batch.entries.iter().map(model_formats::parse).collect();
        if !caller.may_invoke() {
            // Every entry would be refused for the same reason, so the whole batch is.
            let first = parsed.iter().flatten().next().map_or("", |entry| entry.name.as_str());
            authorize_call(&self.registry, &self.registry.catalog(), caller, first).await?;
        }
        let budget = batch.budget_tokens;
        let execution = Arc::new(BatchExecution::new(self, caller, batch, parsed, renderer));
        let (answers, deliveries) = execution.run().await;
        let answer = BatchAnswer::assemble(answers, budget, renderer).await?;
        Ok(BatchAnswer { deliveries, ..answer })
    }

    fn validate_batch(&self, batch: &Batch) -> Result<(), Error> {
        let limits = &self.core.limits;
        let refused = |field: &str, message: String| {
            let detail = json!({ "pointer": format!("/{field}") });
            let fault = Fault::new(Code::ValidationError, message).without_side_effect();
            Err(Error::from(fault.with_detail(detail)))
        };
        if self.core.is_draining() {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        let (count, max) = (batch.entries.len(), limits.max_batch_entries);
        if count == 0 || count > max {
            let message = format!("tool_calls must be 1 to {max} entries, and are {count}");
            return refused("tool_calls", message);
        }
        let max = limits.max_batch_parallel;
        if batch.max_parallel.is_some_and(|width| width == 0 || width > max) {
            return refused("max_parallel", format!("max_parallel must be from 1 to {max}"));
        }
        if batch.budget_tokens == Some(0) {
            return refused("budget_tokens", "budget_tokens must be at least 1".into());
        }
        let labels = [
            ("run_id", Some(&batch.run_id), 255),
            ("user_id", batch.user_id.as_ref(), 255),
            ("idempotency_key", batch.idempotency_key.as_ref(), MAX_KEY_BYTES),
        ];
        for (field, label, max) in labels {
            let fits = |label: &String| {
                (1..=max).contains(&label.len()) && !label.chars().any(char::is_control)
            };
            if label.is_some_and(|label| !fits(label)) {
                let message = format!("{field} must be 1 to {max} bytes, no control characters");
                return refused(field, message);
            }
        }
        Ok(())
    }
}
