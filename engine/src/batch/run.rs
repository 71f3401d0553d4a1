//! Executes a batch: plans which entries run concurrently and spreads them over worker threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::json;
use tokio::task::JoinSet;

use super::{Batch, Mode, Settled, State};
use crate::call::Call;
use crate::caller::Caller;
use crate::dialect::{Entry, Misfit};
use crate::engine::{Among, CatalogEntry, Engine, Invocation};
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use crate::store::{Coming, Together};
use crate::tool::Effect;

/// Minimum number of lanes that justify a separate task, which another worker thread can run.
const WORTH_A_TASK: usize = 16;

/// Indexes of entries that run one after another.
type Lane = Vec<usize>;

/// A lane, with the commit-group membership of its first call if that call is committed together
/// with others.
type Beginning = (Lane, Option<Coming>);

/// The state of an entry, and whether it replays an earlier call.
type Known = (State, bool);

/// Holds the answer to one entry.
#[derive(Default)]
struct Slot {
    answer: Option<Answered>,
    /// True if the answer was prepared while the call was still being stored. It must not be
    /// returned before the commit.
    ahead: bool,
}

/// The effect of an entry on the later entries of its lane.
enum Left {
    /// The call has ended, so time has passed.
    Ended,
    /// The call is still open; the next entry is stored behind it.
    GoesOn(Arc<Call>),
    Nothing,
}

/// The answer to an entry, with its message and its rendered text unless these depend on the other
/// entries.
pub(super) struct Answered {
    pub(super) settled: Settled,
    pub(super) message: Option<Json>,
    pub(super) text: Option<String>,
}

/// Renders an entry in the form that the caller requested.
pub type Write = fn(&Settled) -> String;

/// A batch in execution.
pub(super) struct Run {
    engine: Engine,
    caller: Caller,
    batch: Batch,
    read: Vec<Result<Entry, Misfit>>,
    /// The tool that each entry names, if it exists.
    tools: Vec<Option<Arc<CatalogEntry>>>,
    width: usize,
    until_ms: u64,
    /// Number of lanes that have started.
    begun: AtomicUsize,
    /// The last calls of lanes that are still open after the wait. Each occupies a concurrency
    /// slot; an entry without a slot is stored behind one of them.
    going_on: Mutex<VecDeque<Arc<Call>>>,
    /// Total size of the results so far.
    bytes: AtomicUsize,
    write: Option<Write>,
    answers: Vec<Mutex<Slot>>,
}

impl Run {
    pub(super) fn new(
        engine: &Engine,
        caller: &Caller,
        batch: Batch,
        read: Vec<Result<Entry, Misfit>>,
        write: Option<Write>,
    ) -> Self {
        let (limits, catalog) = (engine.limits(), engine.inner.catalog());
        let tool = |entry: &Entry| catalog.named(caller, &entry.name);
        let wait_ms = batch.wait_ms.unwrap_or(limits.max_wait_ms).min(limits.max_wait_ms);
        Self {
            width: batch.max_parallel.unwrap_or(limits.max_batch_parallel),
            until_ms: engine.now_ms() + wait_ms,
            engine: engine.clone(),
            caller: caller.clone(),
            batch,
            tools: read.iter().map(|entry| entry.as_ref().ok().and_then(tool)).collect(),
            answers: read.iter().map(|_| Mutex::default()).collect(),
            read,
            begun: AtomicUsize::new(0),
            going_on: Mutex::default(),
            bytes: AtomicUsize::new(0),
            write,
        }
    }

    /// Runs the batch and returns the answers in the order of the entries.
    pub(super) async fn all(self: Arc<Self>) -> Vec<Answered> {
        let together = Together::default();
        let beginning = |(n, lane)| (lane, (n < self.width).then(|| together.expect()));
        let mut lanes: Vec<_> = self.lanes().into_iter().enumerate().map(beginning).collect();
        let mut others = JoinSet::new();
        // If every lane has a concurrency slot, the worker threads share them. If the caller
        // disconnects, dropping the set aborts its tasks.
        if lanes.len() <= self.width {
            let threads = tokio::runtime::Handle::current().metrics().num_workers();
            let tasks = threads.min(lanes.len() / WORTH_A_TASK).max(1);
            let each = lanes.len().div_ceil(tasks);
            while lanes.len() > each {
                others.spawn(self.clone().some(lanes.split_off(lanes.len() - each)));
            }
        }
        self.clone().some(lanes).await;
        while let Some(done) = others.join_next().await {
            if let Err(error) = done {
                tracing::error!(%error, "a task of a batch failed");
            }
        }
        let answer = |(index, slot): (usize, &Mutex<Slot>)| {
            let Slot { answer, ahead } = std::mem::take(&mut *slot.lock());
            answer.filter(|_| !ahead).unwrap_or_else(|| self.answered(index, None))
        };
        self.answers.iter().enumerate().map(answer).collect()
    }

    /// Builds the answer to an entry; a parse error becomes its answer, without a call.
    fn answered(&self, index: usize, known: Option<Known>) -> Answered {
        let settled = Settled::of(index, &self.read[index], known);
        let alone = self.batch.budget_tokens.is_none();
        let message = alone.then(|| settled.message(&settled.content()));
        let text = self.write.filter(|_| alone).map(|write| write(&settled));
        Answered { settled, message, text }
    }

    /// Plans the lanes. Lanes run concurrently; the entries of one lane run one after another.
    fn lanes(&self) -> Vec<Lane> {
        let in_order = |index: usize| match self.batch.mode {
            // With a single slot, running the entries in their order is the least surprising
            // choice.
            _ if self.width == 1 => true,
            Mode::Serial => true,
            Mode::Unordered => false,
            // An unknown tool is refused at once and need not wait for its predecessors.
            Mode::Parallel => self.tools[index]
                .as_ref()
                .is_some_and(|tool| tool.definition.effect != Effect::Read),
        };
        let (mut ordered, mut lanes) = (Lane::new(), Vec::new());
        for (index, entry) in self.read.iter().enumerate() {
            match entry {
                Ok(_) if in_order(index) => ordered.push(index),
                Ok(_) => lanes.push(vec![index]),
                Err(_) => {}
            }
        }
        if !ordered.is_empty() {
            lanes.insert(0, ordered);
        }
        lanes
    }

    async fn some(self: Arc<Self>, lanes: Vec<Beginning>) {
        // Boxed because a lane is moved several times before it runs.
        let lanes = lanes.into_iter().map(|lane| Box::pin(self.clone().lane(lane)));
        let lanes: Vec<_> = lanes.collect();
        futures::stream::iter(lanes).buffer_unordered(self.width).collect::<()>().await;
    }

    async fn lane(self: Arc<Self>, (places, mut coming): Beginning) {
        // Lanes that get a slot at the beginning start even if the caller does not wait at all.
        let mut at_once = self.begun.fetch_add(1, Ordering::Relaxed) < self.width;
        let in_time = || self.engine.now_ms() < self.until_ms;
        // After the wait, the previous holder of this slot may still be open. This lane then queues
        // behind it.
        let mut before = match at_once || in_time() {
            true => None,
            false => self.going_on.lock().pop_front(),
        };
        for index in places {
            let Ok(entry) = &self.read[index] else { continue };
            let now = before.is_none() && (at_once || in_time());
            if !now && !self.batch.later {
                self.answer(index, (State::Refused(not_begun()), false), false);
                continue;
            }
            match self.settle(index, entry, coming.take(), before.clone()).await {
                Left::Ended => at_once = false,
                Left::GoesOn(call) => before = Some(call),
                Left::Nothing => {}
            }
        }
        self.going_on.lock().extend(before);
    }

    fn answer(&self, index: usize, known: Known, ahead: bool) {
        let answer = Some(self.answered(index, Some(known)));
        *self.answers[index].lock() = Slot { answer, ahead };
    }

    /// Returns whether an answer was prepared for the call, and marks it valid now that the call is
    /// stored.
    fn came_true(&self, index: usize) -> bool {
        std::mem::take(&mut self.answers[index].lock().ahead)
    }

    async fn settle(
        self: &Arc<Self>,
        index: usize,
        entry: &Entry,
        coming: Option<Coming>,
        after: Option<Arc<Call>>,
    ) -> Left {
        let asked = self.invocation(index, entry);
        let run = self.clone();
        let ahead =
            move |call: &Arc<Call>| run.answer(index, (run.ended(call.clone()), false), true);
        let among = Among { coming, ahead: Some(Box::new(ahead)), after };
        let ticket = match self.engine.invoke_among(&self.caller, asked, among).await {
            Ok(ticket) => ticket,
            Err(error) => {
                self.answer(index, (State::Refused(told(error)), false), false);
                return Left::Nothing;
            }
        };
        if self.came_true(index) {
            return Left::Ended;
        }
        let mut call = ticket.call.clone();
        if !call.status.is_terminal() && !call.asked.background {
            let left_ms = self.until_ms.saturating_sub(self.engine.now_ms());
            // If the store is unavailable, the ticket remains valid.
            call = self.engine.outcome(&self.caller, &ticket, left_ms).await.unwrap_or(call);
        }
        let left = match (call.status.is_terminal(), call.asked.background) {
            (true, _) => Left::Ended,
            (false, true) => Left::Nothing,
            (false, false) => Left::GoesOn(call.clone()),
        };
        let state = if call.status.is_terminal() { self.ended(call) } else { State::Open(call) };
        self.answer(index, (state, ticket.replayed), false);
        left
    }

    fn invocation(&self, index: usize, entry: &Entry) -> Invocation {
        let batch = &self.batch;
        let name = self.tools[index].as_ref().map_or(&entry.name, |tool| &tool.definition.name);
        let by_place = || batch.idempotency_key.as_ref().map(|key| format!("{key}/{index}"));
        let of_batch = || batch.keys.get(index).cloned().or_else(by_place);
        Invocation {
            run_id: batch.run_id.clone(),
            call_id: entry.id.clone(),
            timeout_ms: entry.timeout_ms.or(batch.timeout_ms),
            retry: entry.retry.or(batch.retry),
            idempotency_key: entry.idempotency_key.clone().or_else(of_batch),
            user_id: batch.user_id.clone(),
            traceparent: batch.traceparent.clone(),
            callback_url: entry.callback_url.clone().or_else(|| batch.callback_url.clone()),
            ..Invocation::of(name.clone(), entry.args.clone())
        }
    }

    /// Keeps the result in the answer unless the results of this batch exceed the size limit
    /// together.
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

/// Converts a refusal to the fault of an entry.
fn told(error: Error) -> Fault {
    match error {
        Error::Refused { fault, retry_after_ms: Some(ms) } if fault.detail.is_none() => {
            fault.with_detail(json!({ "retry_after_ms": ms }))
        }
        Error::Refused { fault, .. } => fault,
        Error::Internal(source) => {
            tracing::error!(error = %source, "an entry of a batch failed with an internal error");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}
