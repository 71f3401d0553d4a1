//! Executes a batch: plans which entries run concurrently and spreads them over worker threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::json;
use tokio::task::JoinSet;

use super::{Batch, BatchEntryResult, BatchEntryState, BatchMode};
use crate::calls::accept::BatchMembership;
use crate::calls::accept::approval_request::BatchCalls;
use crate::calls::rejoin::PendingDelivery;
use crate::calls::request::CallRequest;
use crate::calls::{Calls, Ticket, Until};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor};
use crate::domain::utp::AfterExecution;
use crate::model_formats::{CallParseError, ParsedToolCall};
use crate::ports::store::{CommitGroup, GroupMember};
use crate::registry::audit;
use crate::registry::catalog::CatalogEntry;

/// Minimum number of lanes that justify a separate task, which another worker thread can run.
const MIN_LANES_PER_TASK: usize = 16;

/// Indexes of entries that run one after another.
type EntryLane = Vec<usize>;

/// A lane, with the commit-group membership of its first call if that call is committed together
/// with others.
type LaneStart = (EntryLane, Option<GroupMember>);

/// The state of an entry, and whether it replays or joins an earlier call.
pub(super) struct EntryResolution {
    pub(super) state: BatchEntryState,
    pub(super) replayed: bool,
    pub(super) joined: bool,
}

impl From<BatchEntryState> for EntryResolution {
    fn from(state: BatchEntryState) -> Self {
        Self { state, replayed: false, joined: false }
    }
}

/// Holds the answer to one entry.
#[derive(Default)]
struct AnswerSlot {
    answer: Option<RenderedEntry>,
    /// True if the answer was prepared while the call was still being stored. It must not be
    /// returned before the commit.
    is_uncommitted: bool,
}

/// The effect of an entry on the later entries of its lane.
enum LaneContinuation {
    /// The call has ended. After the batch's wait, the next entry starts only if the batch defers
    /// entries that have not started.
    Ended,
    /// The call is still open when the wait is over: it is the predecessor of the next entry.
    Predecessor(Arc<Call>),
    /// The entry was refused, or its call runs in the background or waits for an approval: the next
    /// entry does not depend on it.
    Unaffected,
}

/// The answer to an entry, with its message and its rendered text. With a token budget these depend
/// on the other entries, and are absent here.
pub(super) struct RenderedEntry {
    pub(super) result: BatchEntryResult,
    pub(super) message: Option<Json>,
    pub(super) text: Option<String>,
}

/// Renders an entry as the caller requested it.
pub type EntryRenderer = fn(&BatchEntryResult) -> String;

/// A batch in execution.
pub(super) struct BatchExecution {
    calls: Arc<Calls>,
    caller: Caller,
    batch: Batch,
    parsed: Vec<Result<ParsedToolCall, CallParseError>>,
    /// The tool that each entry names, if it exists.
    tools: Vec<Option<Arc<CatalogEntry>>>,
    max_parallel: usize,
    wait_deadline_ms: u64,
    /// Time until which entries over a rate limit wait.
    limit_deadline_ms: u64,
    /// Number of lanes that have started.
    started_lanes: AtomicUsize,
    /// The last call of each lane, if it is still open after the wait. Each occupies one of the
    /// batch's `max_parallel` slots; a lane that starts later waits for the end of one of them.
    open_predecessors: Mutex<VecDeque<Arc<Call>>>,
    /// The calls of the entries so far.
    entry_calls: BatchCalls,
    /// The entries whose calls wait for an approval.
    awaiting_approval: Mutex<Vec<(usize, Ticket)>>,
    /// Total size of the results so far.
    result_bytes: AtomicUsize,
    renderer: Option<EntryRenderer>,
    answers: Vec<Mutex<AnswerSlot>>,
    /// The deliveries of the entries so far. Dropped with the batch, they mark its requester as
    /// gone.
    deliveries: Mutex<Vec<PendingDelivery>>,
}

impl BatchExecution {
    pub(super) fn new(
        calls: &Arc<Calls>,
        caller: &Caller,
        batch: Batch,
        parsed: Vec<Result<ParsedToolCall, CallParseError>>,
        renderer: Option<EntryRenderer>,
    ) -> Self {
        let (limits, catalog) = (&calls.core.limits, calls.registry.catalog());
        let tool = |entry: &ParsedToolCall| catalog.resolve(caller, &entry.name);
        let wait_ms = batch.wait_ms.unwrap_or(limits.max_wait_ms).min(limits.max_wait_ms);
        Self {
            max_parallel: batch.max_parallel.unwrap_or(limits.max_batch_parallel),
            wait_deadline_ms: calls.core.now_ms() + wait_ms,
            limit_deadline_ms: limit_deadline_ms(calls, &batch),
            calls: calls.clone(),
            caller: caller.clone(),
            batch,
            tools: parsed.iter().map(|entry| entry.as_ref().ok().and_then(tool)).collect(),
            answers: parsed.iter().map(|_| Mutex::default()).collect(),
            parsed,
            started_lanes: AtomicUsize::new(0),
            open_predecessors: Mutex::default(),
            entry_calls: BatchCalls::default(),
            awaiting_approval: Mutex::default(),
            result_bytes: AtomicUsize::new(0),
            renderer,
            deliveries: Mutex::default(),
        }
    }

    /// Runs the batch and returns the answers in the order of the entries.
    pub(super) async fn run(self: Arc<Self>) -> (Vec<RenderedEntry>, Vec<PendingDelivery>) {
        let commit_group = CommitGroup::default();
        let with_member =
            |(n, lane)| (lane, (n < self.max_parallel).then(|| commit_group.add_member()));
        let mut lanes: Vec<_> =
            self.plan_lanes().into_iter().enumerate().map(with_member).collect();
        let mut tasks = JoinSet::new();
        // If every lane has a slot, the worker threads divide the lanes among them. If the caller
        // disconnects, dropping the set aborts its tasks.
        if lanes.len() <= self.max_parallel {
            let threads = tokio::runtime::Handle::current().metrics().num_workers();
            let task_count = threads.min(lanes.len() / MIN_LANES_PER_TASK).max(1);
            let lanes_per_task = lanes.len().div_ceil(task_count);
            while lanes.len() > lanes_per_task {
                let last_lanes = lanes.split_off(lanes.len() - lanes_per_task);
                let running = self.clone().run_lanes(last_lanes);
                tasks.spawn(audit::with_origin(audit::current_origin(), running));
            }
        }
        self.clone().run_lanes(lanes).await;
        while let Some(joined) = tasks.join_next().await {
            if let Err(error) = joined {
                tracing::error!(%error, "a task of a batch failed");
            }
        }
        let awaiting = std::mem::take(&mut *self.awaiting_approval.lock());
        let waits = awaiting.into_iter().map(|(index, ticket)| self.wait_for_entry(index, ticket));
        futures::future::join_all(waits).await;
        let answer = |(index, slot): (usize, &Mutex<AnswerSlot>)| {
            let AnswerSlot { answer, is_uncommitted } = std::mem::take(&mut *slot.lock());
            answer.filter(|_| !is_uncommitted).unwrap_or_else(|| self.render_entry(index, None))
        };
        let answers = self.answers.iter().enumerate().map(answer).collect();
        (answers, std::mem::take(&mut *self.deliveries.lock()))
    }

    /// Builds the answer to an entry. An entry that could not be parsed has no call, and its parse
    /// error is the answer; without a resolution, the answer is an internal error.
    fn render_entry(&self, index: usize, resolution: Option<EntryResolution>) -> RenderedEntry {
        let entry = BatchEntryResult::new(index, &self.parsed[index], resolution);
        let is_independent = self.batch.budget_tokens.is_none();
        let message = is_independent.then(|| entry.message(&entry.content()));
        let text = self.renderer.filter(|_| is_independent).map(|render| render(&entry));
        RenderedEntry { result: entry, message, text }
    }

    /// Plans the lanes. Lanes run concurrently; the entries of one lane run one after another.
    fn plan_lanes(&self) -> Vec<EntryLane> {
        let in_order = |index: usize| match self.batch.mode {
            // With a single slot, running the entries in their order is the least surprising
            // choice.
            _ if self.max_parallel == 1 => true,
            BatchMode::Serial => true,
            BatchMode::Unordered => false,
            // An unknown tool is refused at once and need not wait for its predecessors.
            // Agents work side by side: each has a run of its own.
            BatchMode::Parallel => self.tools[index].as_ref().is_some_and(|tool| {
                tool.definition.effect != Effect::Read
                    && tool.definition.executor != Executor::AGENT
            }),
        };
        let (mut ordered, mut lanes) = (EntryLane::new(), Vec::new());
        for (index, entry) in self.parsed.iter().enumerate() {
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

    async fn run_lanes(self: Arc<Self>, lanes: Vec<LaneStart>) {
        // Boxed because a lane is moved several times before it runs.
        let lanes = lanes.into_iter().map(|lane| Box::pin(self.clone().run_lane(lane)));
        let lanes: Vec<_> = lanes.collect();
        futures::stream::iter(lanes).buffer_unordered(self.max_parallel).collect::<()>().await;
    }

    async fn run_lane(self: Arc<Self>, (indexes, mut member): LaneStart) {
        // A lane that gets a slot at the beginning starts even if the caller does not wait at all.
        let mut starts_regardless =
            self.started_lanes.fetch_add(1, Ordering::Relaxed) < self.max_parallel;
        let is_within_wait = || self.calls.core.now_ms() < self.wait_deadline_ms;
        // After the wait, the last call of the lane that had this slot may still be open. This lane
        // then waits for its end.
        let mut predecessor = match starts_regardless || is_within_wait() {
            true => None,
            false => self.open_predecessors.lock().pop_front(),
        };
        for index in indexes {
            let Ok(entry) = &self.parsed[index] else { continue };
            let may_start_now = predecessor.is_none() && (starts_regardless || is_within_wait());
            if !may_start_now && !self.batch.defer_unstarted {
                let refused = BatchEntryState::Refused(not_started_fault());
                self.record_answer(index, refused.into(), false);
                continue;
            }
            match self.run_entry(index, entry, member.take(), predecessor.clone()).await {
                LaneContinuation::Ended => starts_regardless = false,
                LaneContinuation::Predecessor(call) => predecessor = Some(call),
                LaneContinuation::Unaffected => {}
            }
        }
        self.open_predecessors.lock().extend(predecessor);
    }

    fn record_answer(&self, index: usize, resolution: EntryResolution, is_uncommitted: bool) {
        let answer = Some(self.render_entry(index, Some(resolution)));
        *self.answers[index].lock() = AnswerSlot { answer, is_uncommitted };
    }

    /// Returns whether an answer was prepared for the call, and marks it valid now that the call is
    /// stored.
    fn confirm_committed(&self, index: usize) -> bool {
        std::mem::take(&mut self.answers[index].lock().is_uncommitted)
    }

    async fn run_entry(
        self: &Arc<Self>,
        index: usize,
        entry: &ParsedToolCall,
        member: Option<GroupMember>,
        predecessor: Option<Arc<Call>>,
    ) -> LaneContinuation {
        let ticket = match self.accept_entry(index, entry, member, predecessor).await {
            Ok(ticket) => ticket,
            Err(error) => {
                let refused = BatchEntryState::Refused(fault_from_error(error));
                self.record_answer(index, refused.into(), false);
                return LaneContinuation::Unaffected;
            }
        };
        self.deliveries.lock().extend(ticket.delivery.clone());
        if self.confirm_committed(index) {
            return LaneContinuation::Ended;
        }
        if ticket.call.waits_for_approval() {
            // The other entries go on while a person decides.
            self.awaiting_approval.lock().push((index, ticket));
            return LaneContinuation::Unaffected;
        }
        self.wait_for_entry(index, ticket).await
    }

    /// Waits for the call of an entry, and records its answer.
    async fn wait_for_entry(&self, index: usize, ticket: Ticket) -> LaneContinuation {
        let mut call = ticket.call.clone();
        if !call.status.is_terminal() && !call.origin.background {
            let remaining_ms = self.wait_deadline_ms.saturating_sub(self.calls.core.now_ms());
            // If the store is unavailable, the ticket remains valid.
            call = self
                .calls
                .wait(&self.caller, &ticket, Until::EndedWithin(remaining_ms))
                .await
                .unwrap_or(call);
        }
        let continuation = match (call.status.is_terminal(), call.origin.background) {
            (true, _) => LaneContinuation::Ended,
            (false, _) if call.waits_for_approval() => LaneContinuation::Unaffected,
            (false, true) => LaneContinuation::Unaffected,
            (false, false) => LaneContinuation::Predecessor(call.clone()),
        };
        let state = if call.status.is_terminal() {
            self.ended_state(call)
        } else {
            BatchEntryState::Open(call)
        };
        let (replayed, joined) = (ticket.replayed, ticket.joined);
        self.record_answer(index, EntryResolution { state, replayed, joined }, false);
        continuation
    }

    /// Accepts the call of an entry. If a rate limit refuses it, waits as the batch permits.
    async fn accept_entry(
        self: &Arc<Self>,
        index: usize,
        entry: &ParsedToolCall,
        mut member: Option<GroupMember>,
        predecessor: Option<Arc<Call>>,
    ) -> Result<Ticket, Error> {
        loop {
            let request = self.build_call_request(index, entry);
            let execution = self.clone();
            let on_finished = move |call: &Arc<Call>| {
                execution.record_answer(index, execution.ended_state(call.clone()).into(), true)
            };
            let membership = BatchMembership {
                group_member: member.take(),
                on_finished: Some(Box::new(on_finished)),
                predecessor: predecessor.clone(),
                siblings: Some(self.entry_calls.clone()),
            };
            let error = match self.calls.invoke_in_batch(&self.caller, request, membership).await {
                Err(error) if error.code() == Code::RateLimited => error,
                other => return other,
            };
            let Error::Refused { retry_after_ms: Some(wait_ms), .. } = error else {
                return Err(error);
            };
            let core = &self.calls.core;
            let retry_ms = core.now_ms().saturating_add(wait_ms);
            if retry_ms > self.limit_deadline_ms {
                return Err(error);
            }
            tokio::select! {
                () = core.clock.sleep_until(retry_ms) => {}
                () = core.shutdown.cancelled() => return Err(error),
            }
        }
    }

    fn build_call_request(&self, index: usize, entry: &ParsedToolCall) -> CallRequest {
        let batch = &self.batch;
        let name = self.tools[index].as_ref().map_or(&entry.name, |tool| &tool.definition.name);
        let executor = self.tools[index].as_ref().map(|tool| tool.definition.executor);
        let can_retry =
            executor.is_none_or(|e| self.calls.dispatcher.targets.source_traits(e).retries);
        let derive_key = || batch.idempotency_key.as_ref().map(|key| format!("{key}/{index}"));
        let batch_key = || batch.entry_keys.get(index).cloned().or_else(derive_key);
        CallRequest {
            run_id: batch.run_id.clone(),
            call_id: entry.id.clone(),
            timeout_ms: entry.timeout_ms.or(batch.timeout_ms),
            attempt_timeout_ms: entry.attempt_timeout_ms.or(batch.attempt_timeout_ms),
            input_timeout_ms: entry.input_timeout_ms,
            retry: entry.retry.or(batch.retry.filter(|_| can_retry)),
            idempotency_key: entry.idempotency_key.clone().or_else(batch_key),
            user_id: batch.user_id.clone(),
            traceparent: batch.traceparent.clone(),
            depth: batch.depth,
            callback_url: entry.callback_url.clone().or_else(|| batch.callback_url.clone()),
            rejoin: batch.rejoin,
            joins_waiting: batch.joins_waiting,
            ..CallRequest::of(name.clone(), entry.args.clone())
        }
    }

    /// Returns the state of an entry whose call has ended: without the result if the results of the
    /// batch would together exceed the size limit.
    fn ended_state(&self, call: Arc<Call>) -> BatchEntryState {
        let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
        let size = data.map_or(0, |data| data.text().len());
        let before = self.result_bytes.fetch_add(size, Ordering::Relaxed);
        if before + size <= self.calls.core.limits.max_batch_bytes {
            return BatchEntryState::Ended { call, omitted_bytes: None };
        }
        self.result_bytes.fetch_sub(size, Ordering::Relaxed);
        let mut without_result = (*call).clone();
        // A result can override `after_execution` of its tool's definition, and is dropped here.
        without_result.target.after_execution = AfterExecution::from_call(&call);
        if let Some(outcome) = &mut without_result.outcome {
            outcome.data = None;
        }
        BatchEntryState::Ended { call: Arc::new(without_result), omitted_bytes: Some(size) }
    }
}

fn limit_deadline_ms(calls: &Calls, batch: &Batch) -> u64 {
    batch.limit_wait_ms.map_or(0, |wait_ms| calls.core.now_ms().saturating_add(wait_ms))
}

fn not_started_fault() -> Fault {
    let message = "not started: the wait ended before this call could start. Nothing was done, and \
                   it will not be done later; call it again if it is still needed";
    Fault::new(Code::Canceled, message).without_side_effect().retryable(true)
}

/// Converts a refusal to the fault of an entry.
fn fault_from_error(error: Error) -> Fault {
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
