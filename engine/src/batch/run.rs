//! A batch under way: which entries run beside which, and on how many threads.

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

/// So many lanes are worth a task of their own, which another thread can run.
const WORTH_A_TASK: usize = 16;

/// The places of entries that go one after the other.
type Lane = Vec<usize>;

/// A lane, and what the store is told of its first call where that comes with others.
type Beginning = (Lane, Option<Coming>);

/// What became of an entry, and whether it had been asked before.
type Known = (State, bool);

/// The place of an entry's answer.
#[derive(Default)]
struct Slot {
    answer: Option<Answered>,
    /// It was made ready while its call was being stored: nobody may be told of it yet.
    ahead: bool,
}

/// What an entry leaves to those behind it in its lane.
enum Left {
    /// It has ended: time has passed.
    Ended,
    /// It goes on, and they come after it.
    GoesOn(Arc<Call>),
    Nothing,
}

/// An entry as it is answered; with its message and its text, unless these depend on the others.
pub(super) struct Answered {
    pub(super) settled: Settled,
    pub(super) message: Option<Json>,
    pub(super) text: Option<String>,
}

/// How an entry is written for who asked.
pub type Write = fn(&Settled) -> String;

/// A batch under way.
pub(super) struct Run {
    engine: Engine,
    caller: Caller,
    batch: Batch,
    read: Vec<Result<Entry, Misfit>>,
    /// The tool that each entry means.
    tools: Vec<Option<Arc<CatalogEntry>>>,
    width: usize,
    until_ms: u64,
    /// Lanes that have begun.
    begun: AtomicUsize,
    /// The last calls of lanes that go on after the wait. Each has a place; who has none comes
    /// behind one of them.
    going_on: Mutex<VecDeque<Arc<Call>>>,
    /// Bytes of the results so far.
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

    /// Runs all of it, and answers in the order of the entries.
    pub(super) async fn all(self: Arc<Self>) -> Vec<Answered> {
        let together = Together::default();
        let beginning = |(n, lane)| (lane, (n < self.width).then(|| together.expect()));
        let mut lanes: Vec<_> = self.lanes().into_iter().enumerate().map(beginning).collect();
        let mut others = JoinSet::new();
        // Where all have a place anyway, the threads share them. When nobody waits any more, the
        // tasks end with the set they are in.
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
                tracing::error!(%error, "a part of a batch");
            }
        }
        let answer = |(index, slot): (usize, &Mutex<Slot>)| {
            let Slot { answer, ahead } = std::mem::take(&mut *slot.lock());
            answer.filter(|_| !ahead).unwrap_or_else(|| self.answered(index, None))
        };
        self.answers.iter().enumerate().map(answer).collect()
    }

    /// An entry as it is answered; without a call when it could not be read.
    fn answered(&self, index: usize, known: Option<Known>) -> Answered {
        let settled = Settled::of(index, &self.read[index], known);
        let alone = self.batch.budget_tokens.is_none();
        let message = alone.then(|| settled.message(&settled.content()));
        let text = self.write.filter(|_| alone).map(|write| write(&settled));
        Answered { settled, message, text }
    }

    /// What runs side by side: the entries of a lane go one after the other.
    fn lanes(&self) -> Vec<Lane> {
        let in_order = |index: usize| match self.batch.mode {
            // With one place there is only one order that nobody wonders about.
            _ if self.width == 1 => true,
            Mode::Serial => true,
            Mode::Unordered => false,
            // What is not there is refused at once, and need not wait for its turn.
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
        // Boxed, because a lane is moved several times on its way to where it is run.
        let lanes = lanes.into_iter().map(|lane| Box::pin(self.clone().lane(lane)));
        let lanes: Vec<_> = lanes.collect();
        futures::stream::iter(lanes).buffer_unordered(self.width).collect::<()>().await;
    }

    async fn lane(self: Arc<Self>, (places, mut coming): Beginning) {
        // Those that have a place from the beginning begin even if nobody waits at all.
        let mut at_once = self.begun.fetch_add(1, Ordering::Relaxed) < self.width;
        let in_time = || self.engine.now_ms() < self.until_ms;
        // When the wait is over, whose place this was may go on: then it is taken.
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

    /// The call is stored: what was made ready for it holds, if anything was.
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
            // When the store cannot be asked, the ticket is still good.
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
