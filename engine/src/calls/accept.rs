//! Accepts a call: authorize, validate, reserve capacity, commit, then return the ticket. Nothing
//! is visible to callers before the commit, so a crash can never take back a ticket.
//!
//! A call that must wait is stored with a [`Hold`]; `queue_or_hold` in `dependents.rs` keeps it out
//! of the queue until an event releases it. `access_recheck.rs` checks the rules again for calls
//! that were accepted before.

mod access_recheck;
pub(crate) mod approval_request;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use futures::future::BoxFuture;
use futures::poll;
use serde_json::json;

use approval_request::{BatchCalls, enforce_unless_asked, request_approval};

use crate::calls::Calls;
use crate::calls::commit::{Commit, CommitKind};
use crate::calls::dependents::set_predecessor;
use crate::calls::limiter::{ConcurrencyCaps, Slot, SlotScope};
use crate::calls::observer::AttemptEnd;
use crate::calls::open_calls::{CapacityExceeded, OpenCall, Reservation, limit_error};
use crate::calls::rejoin::{PendingDelivery, request_digest};
use crate::calls::request::{
    CallRequest, build_idempotency_key, parse_unique_args, prepare_arguments, validate_request,
};
use crate::calls::speculative_read::{RunningSpeculation, Speculation, SpeculationResult};
use crate::domain::access_rules::{AccessDecision, Denial, RuleAction};
use crate::domain::call::elicitation::Elicitation;
use crate::domain::call::{Call, Hold, Origin, Status};
use crate::domain::caller::Caller;
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::tool::{Effect, Executor};
use crate::domain::utp::delegation::min_timeout_ms;
use crate::lifecycle::{self, Action, Event, Transition};
use crate::ports::core::from_store_error;
use crate::ports::store::approvals::NewApproval;
use crate::ports::store::undelivered::{RequestKind, UndeliveredRequest};
use crate::ports::store::{CreateCallResult, GroupMember, IdempotencyKey, NewCall};
use crate::registry::AccessRequest;
use crate::registry::authorize::enforce_decision;
use crate::registry::catalog::{Catalog, CatalogEntry};

/// Callback that receives a call which finished before its commit.
pub(crate) type OnFinished = Box<dyn FnOnce(&Arc<Call>) + Send>;

/// Context of a call that is one entry of a batch.
#[derive(Default)]
pub(crate) struct BatchMembership {
    /// Counts this call as pending, so that the store waits for it and commits the first calls of
    /// the batch together.
    pub(crate) group_member: Option<GroupMember>,
    /// Receives the call if it finishes before its commit, while that commit is in flight. The
    /// result must not be published yet: the commit may still fail.
    pub(crate) on_finished: Option<OnFinished>,
    /// The call that must end before this one starts.
    pub(crate) predecessor: Option<Arc<Call>>,
    /// Calls of the batch's entries so far.
    pub(crate) siblings: Option<BatchCalls>,
}

/// An accepted call. It is stored and will reach an outcome.
#[derive(Clone)]
pub struct Ticket {
    /// The call, in its state when the ticket was issued.
    pub call: Arc<Call>,
    /// True if the idempotency key was used before. `call` is the call it created then.
    pub replayed: bool,
    /// True if the request joined an earlier call: one whose answer was not delivered, or an equal
    /// one that waits for an approval.
    pub joined: bool,
    /// The open call, so that waiting on this ticket needs no lookup.
    pub(crate) open_call: Option<Arc<OpenCall>>,
    pub(crate) delivery: Option<PendingDelivery>,
}

impl Ticket {
    /// Returns the delivery of the answer, if a repeated request can join the call. Dropping the
    /// ticket and all clones of the delivery without marking it means that the requester is gone.
    pub fn delivery(&self) -> Option<&PendingDelivery> {
        self.delivery.as_ref()
    }
}

/// The capacity of a call that is being accepted.
struct Admission<'a> {
    reservation: Reservation<'a>,
    slot: Option<Slot>,
    scope: SlotScope,
    caps: ConcurrencyCaps,
    /// The clock's offset when the call's deadline was set.
    wall_offset_ms: i64,
}

impl Calls {
    /// Accepts a call. The request has the tool's exact name or the name that models use
    /// ([`crate::registry::name_for_model`]). When this returns, the call is stored and will reach
    /// an outcome.
    ///
    /// The future is boxed here, so that it is compiled with this crate's optimization settings,
    /// and not again in the crate that awaits it.
    pub fn invoke<'a>(
        self: &'a Arc<Self>,
        caller: &'a Caller,
        request: CallRequest,
    ) -> BoxFuture<'a, Result<Ticket, Error>> {
        Box::pin(self.invoke_in_batch(caller, request, BatchMembership::default()))
    }

    /// Accepts a call that is one entry of a batch.
    pub(crate) async fn invoke_in_batch(
        self: &Arc<Self>,
        caller: &Caller,
        mut request: CallRequest,
        membership: BatchMembership,
    ) -> Result<Ticket, Error> {
        if self.core.draining.load(Ordering::Acquire) {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        let catalog = self.registry.catalog();
        let found = catalog.resolve(caller, &request.tool);
        if let Some(tool) = found.as_ref().filter(|tool| tool.definition.name != request.tool) {
            request.tool.clone_from(&tool.definition.name);
        }
        // First, so that a denied caller learns nothing about the tool.
        let decision = self.authorize_unvalidated(&catalog, caller, &request).await?;
        if found.is_none() {
            self.refuse_denied_model_name(&catalog, caller, &request).await?;
        }
        if let Some(tool) = &found {
            self.prepare_schemas(&catalog, caller, tool).await;
        }
        let validated = validate_request(&self.dispatcher, &catalog, caller, found, &mut request);
        let validated = validated.and_then(|tool| check_is_on(&catalog, caller, tool));
        let key = build_idempotency_key(caller, &request);
        let may_rejoin = request.rejoin && key.is_none();
        let joins_waiting = request.joins_waiting && catalog.allows_rejoin(caller);
        let drafted = validated.and_then(|tool| {
            let call = self.build_call(&catalog, caller, &tool, request)?;
            let joins_waiting = joins_waiting && self.tool_allows_rejoin(caller, &tool);
            let is_candidate = may_rejoin && tool.definition.effect != Effect::Read;
            let undelivered = is_candidate
                .then(|| self.undelivered_request(&catalog, caller, &tool, &call))
                .flatten();
            Ok((call, undelivered, joins_waiting))
        });
        let (mut call, undelivered, joins_waiting) = match drafted {
            Ok(drafted) => drafted,
            Err(error) => return Box::pin(self.replay_or(&caller.project, key, error)).await,
        };
        let decision = match catalog.decides_by_arguments(&call.project) {
            true => decide_call(&catalog, caller, &call),
            false => decision,
        };
        let ask = enforce_unless_asked(&self.registry, caller, &call, decision).await?;
        if let Some(before) = &membership.predecessor {
            set_predecessor(&mut call, before);
        }
        if let Some(request) = &undelivered
            && let Some(ticket) = self.join_earlier_call(&request.digest, &call.project).await?
        {
            return Ok(ticket);
        }
        let mut approval = None;
        // A call that waits for its predecessor is checked again when the predecessor has ended.
        if let Some(ask) = ask
            && call.hold == Some(Hold::Queue)
        {
            let siblings = membership.siblings.as_ref();
            let joined = match joins_waiting {
                true => self.join_waiting_call(&call, key.as_ref(), siblings).await?,
                false => None,
            };
            if let Some(ticket) = joined {
                return Ok(ticket);
            }
            approval = request_approval(&self.dispatcher, &catalog, caller, &mut call, ask).await?;
        }
        let accepting = self.clone().commit_call(call, key, undelivered, approval, membership);
        self.dispatcher.detach_on_drop(accepting).await
    }
}

/// Refuses a call of a caller or a tool that is switched off.
fn check_is_on(
    catalog: &Catalog,
    caller: &Caller,
    tool: Arc<CatalogEntry>,
) -> Result<Arc<CatalogEntry>, Error> {
    if catalog.switches().is_empty() {
        return Ok(tool);
    }
    catalog.check_caller_is_on(caller)?;
    let definition = &tool.definition;
    let switches = catalog.switches();
    match switches.find_for_tool(&caller.project, &definition.name, definition.executor) {
        Some(switch) => Err(switch.to_fault().into()),
        None => Ok(tool),
    }
}

/// Decides about a call whose arguments are validated.
pub(crate) fn decide_call(catalog: &Catalog, caller: &Caller, call: &Call) -> AccessDecision {
    let request = AccessRequest {
        args: Some(&call.target.args),
        run_id: Some(&call.run_id),
        now_ms: call.created_ms,
        ..AccessRequest::named(&call.tool_name)
    };
    catalog.authorize(caller, RuleAction::Invoke, &request)
}

impl Calls {
    /// Decides about a request whose arguments are not validated. Refuses it if no arguments can
    /// make it allowed.
    async fn authorize_unvalidated(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        request: &CallRequest,
    ) -> Result<AccessDecision, Error> {
        let access =
            AccessRequest { run_id: Some(&request.run_id), ..AccessRequest::named(&request.tool) };
        let decision = catalog.authorize(caller, RuleAction::Invoke, &access);
        if decision.is_denied() {
            enforce_decision(&self.registry, caller, &request.tool, decision.clone()).await?;
        }
        Ok(decision)
    }

    /// Refuses a name that models use, if it resolves to no tool that the caller may call and a
    /// rule denies the tool that it stands for. Otherwise the denial would look like a mistake in
    /// the name, without its rule and without an entry of the audit log. The existence of the tool
    /// makes no difference.
    async fn refuse_denied_model_name(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        request: &CallRequest,
    ) -> Result<(), Error> {
        let name = request.tool.replace("__", ".").replace("--", "/");
        if name == request.tool {
            return Ok(());
        }
        let access = AccessRequest { run_id: Some(&request.run_id), ..AccessRequest::named(&name) };
        match catalog.authorize(caller, RuleAction::Invoke, &access) {
            decision @ AccessDecision::Denied(Denial { rule_id: Some(_), .. }) => {
                enforce_decision(&self.registry, caller, &name, decision).await
            }
            _ => Ok(()),
        }
    }

    /// Compiles the schemas that accepting a call of this tool needs, if they are not compiled.
    pub(crate) async fn prepare_schemas(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Arc<CatalogEntry>,
    ) {
        let names =
            self.dispatcher.targets.fallbacks_of(tool).iter().map(|fallback| &fallback.tool);
        let fallbacks = names.filter_map(|name| catalog.find(&caller.project, name));
        for entry in std::iter::once(tool.clone()).chain(fallbacks) {
            // Usually the schema is compiled; then nothing is boxed.
            if !entry.input_schema.is_ready() {
                Box::pin(entry.prepare_input()).await;
            }
        }
    }

    /// Builds the call in its initial state, with the arguments to execute.
    pub(crate) fn build_call(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Arc<CatalogEntry>,
        request: CallRequest,
    ) -> Result<Call, Error> {
        let args = parse_unique_args(&request.tool, &request.args)?;
        let now_ms = self.core.clock.wall_ms();
        let definition = &tool.definition;
        let policy = self.core.policies.resolve(&caller.project, &tool.definition);
        // The operator's timeout for this tool takes precedence over the definition's.
        let tool_override = self.core.policies.tools.get(&definition.name);
        let override_ms = tool_override.and_then(|tool| tool.policy.default_timeout_ms);
        let timeout_ms = request.timeout_ms.or(override_ms).unwrap_or(definition.timeout_ms);
        let timeout_ms = match definition.executor {
            Executor::INTERNAL => timeout_ms.max(min_timeout_ms(&definition.name, &args)),
            _ => timeout_ms.min(request.max_timeout_ms.unwrap_or(u64::MAX)),
        };
        let target = self.dispatcher.targets.build_target(tool, request.args.clone());
        let mut call = Call {
            id: self.core.id_generator.next_call_id(now_ms),
            project: caller.project.clone(),
            run_id: request.run_id,
            tool_name: definition.name.clone(),
            args: request.args,
            fallbacks: Vec::new(),
            origin: Origin {
                caller_call_id: request.call_id,
                client_id: request.client_id,
                user_id: request.user_id,
                idempotency_key: request.idempotency_key,
                traceparent: request.traceparent,
                depth: request.depth,
                background: definition.background,
                route: request.route,
                callback_url: request.callback_url,
                meta: request.meta,
                ..Origin::from_caller(caller)
            },
            max_retries: match target.traits.retries {
                true => request.retry.unwrap_or(policy.max_retries),
                false => 0,
            },
            target,
            backoff: policy.backoff,
            attempt_timeout_ms: request.attempt_timeout_ms.or(policy.attempt_timeout_ms),
            input_timeout_ms: request.input_timeout_ms.unwrap_or(policy.input_timeout_ms),
            status: Status::Pending,
            hold: Some(Hold::Queue),
            attempt: 0,
            target_attempts: 0,
            acknowledged_by: None,
            elicitation: request
                .answers
                .map(|answers| Box::new(Elicitation { answers, ..Elicitation::default() })),
            approval: None,
            failed_attempt: None,
            lost_attempts: 0,
            node: None,
            created_ms: now_ms,
            deadline_ms: now_ms + timeout_ms,
            attempt_deadline_ms: None,
            started_ms: None,
            attempt_dispatched_ms: None,
            completed_ms: None,
            outcome: None,
            version: 1,
        };
        prepare_arguments(tool, &args, &mut call, self.core.limits.max_args_bytes)?;
        call.fallbacks =
            self.dispatcher.targets.resolve_fallbacks(catalog, caller, tool, &args, &call);
        Ok(call)
    }

    /// Commits the call, already claimed if a slot is free, and starts it.
    pub(crate) async fn commit_call(
        self: Arc<Self>,
        call: Call,
        key: Option<IdempotencyKey>,
        undelivered: Option<UndeliveredRequest>,
        approval: Option<(Box<NewApproval>, EventRecord)>,
        membership: BatchMembership,
    ) -> Result<Ticket, Error> {
        let wall_offset_ms = self.core.clock.wall_offset_ms();
        self.dispatcher.record_clock_step(wall_offset_ms).await;
        let (scope, caps) = self.dispatcher.slot_limits.resolve_slot_scope(&call);
        let (limits, now_ms) = (&self.core.limits, self.core.now_ms());
        let reserved = self.dispatcher.open_calls.reserve(&call, &scope.queue, limits, now_ms);
        let mut reservation = match reserved {
            Ok(reservation) => reservation,
            Err(exceeded) => {
                let error = capacity_error(exceeded);
                return Box::pin(self.replay_or(&call.project, key, error)).await;
            }
        };
        let (approval, held) = approval.unzip();
        let requested = requested_record(&call);
        let mut slot = self.dispatcher.try_acquire_slot(&call, &scope, &caps);
        let (call, mut records, action) = claim_new_call(call, &slot, &self.core.node, requested);
        records.extend(held);
        if let Some(siblings) = &membership.siblings {
            siblings.lock().push(call.id.clone());
        }
        let mut call = Arc::new(call);
        // With an idempotency key the call may have been made before. Nothing starts until the
        // store has answered that.
        let speculation = match action {
            Some(Action::Start) if key.is_none() => self.dispatcher.start_speculation(&call),
            _ => Speculation::NotUsed,
        };
        let post_commit = match speculation {
            Speculation::Finished(done) => {
                let (ended, post_commit) =
                    self.apply_finished_speculation(call, done, action, &mut records);
                call = ended;
                if let PostCommit::ApplyFinished { .. } = post_commit {
                    // The attempt has finished, so its slot is free while the commit is in flight.
                    slot = None;
                }
                post_commit
            }
            Speculation::Running(read) => PostCommit::ContinueSpeculation(read),
            Speculation::NotUsed => PostCommit::Start(action),
        };
        let new = NewCall {
            call: call.clone(),
            records,
            key,
            undelivered: undelivered.clone(),
            approval,
            group_member: membership.group_member,
        };
        let mut creating = self.core.store.create_call(new);
        // The first poll hands the call to the store.
        let created = match (poll!(&mut creating), membership.on_finished) {
            (Poll::Ready(created), _) => created,
            (Poll::Pending, Some(on_finished)) if call.status.is_terminal() => {
                on_finished(&call);
                creating.await
            }
            (Poll::Pending, _) => creating.await,
        };
        if let (Err(_), PostCommit::ContinueSpeculation(_)) = (&created, &post_commit) {
            self.cancel_speculation(&call);
        }
        if let Some(answer) = self.replayed_ticket(created.map_err(from_store_error)?) {
            return answer;
        }
        reservation.keep_rate();
        let admission = Admission { reservation, slot, scope, caps, wall_offset_ms };
        let delivery = undelivered.map(|request| self.rejoin.add_waiting(request));
        let ticket = self.start_committed(call, post_commit, admission).await;
        Ok(Ticket { delivery, ..ticket })
    }

    /// Returns the undelivered request of a call that a repeated request may join.
    fn undelivered_request(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &CatalogEntry,
        call: &Call,
    ) -> Option<UndeliveredRequest> {
        let policy = self.core.policies.resolve(&caller.project, &tool.definition);
        if !policy.rejoin || policy.rejoin_window_ms == 0 || !catalog.allows_rejoin(caller) {
            return None;
        }
        let args = call.args.canonical_text();
        let digest = request_digest(caller, "call", &[&call.run_id, &call.tool_name, &args]);
        Some(UndeliveredRequest {
            id: call.id.to_string(),
            digest,
            kind: RequestKind::Call,
            project: call.project.clone(),
            expires_ms: call.created_ms.saturating_add(policy.rejoin_window_ms),
        })
    }

    fn tool_allows_rejoin(&self, caller: &Caller, tool: &CatalogEntry) -> bool {
        self.core.policies.resolve(&caller.project, &tool.definition).rejoin
    }

    /// Returns the ticket of an earlier call with this digest whose requester is gone.
    async fn join_earlier_call(
        &self,
        digest: &str,
        project: &str,
    ) -> Result<Option<Ticket>, Error> {
        while let Some(delivery) = self.rejoin.take_over(digest) {
            let found = match delivery.id().parse::<CallId>() {
                Ok(id) => self.find_stored_call(project, &id).await?,
                Err(_) => None,
            };
            let Some((call, open_call)) = found else {
                delivery.mark_delivered();
                continue;
            };
            if call.status == Status::Canceled && call.started_ms.is_none() {
                // It was canceled before an executor began, so the request starts anew.
                delivery.mark_delivered();
                continue;
            }
            delivery.record_join();
            let delivery = Some(delivery);
            return Ok(Some(Ticket { call, replayed: false, joined: true, open_call, delivery }));
        }
        Ok(None)
    }

    async fn find_stored_call(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Arc<Call>, Option<Arc<OpenCall>>)>, Error> {
        if let Some(open) = self.dispatcher.open_calls.get(id) {
            return Ok(Some((open.call(), Some(open))));
        }
        let stored = self.core.store.call(project, id).await.map_err(from_store_error)?;
        Ok(stored.map(|call| (Arc::new(call), None)))
    }

    /// Continues a committed call: starts or queues its first attempt, or finishes a call that
    /// ended before its commit.
    async fn start_committed(
        &self,
        call: Arc<Call>,
        mut post_commit: PostCommit,
        admission: Admission<'_>,
    ) -> Ticket {
        let (before, attempt_end) = match &mut post_commit {
            PostCommit::ApplyFinished { before, attempt_end, .. } => {
                (before.take(), attempt_end.take())
            }
            _ => (None, None),
        };
        let (before, at_ms) = (before.as_deref(), self.core.wall_ms());
        let accepted = Commit::new(&call, CommitKind::Accepted, before, attempt_end, at_ms);
        if call.status.is_terminal() {
            // The call was never in `open_calls`: its reservation is released on return, and no
            // listener can know its id.
            self.dispatcher.after_commit(accepted, None).await;
            return Ticket {
                call,
                replayed: false,
                joined: false,
                open_call: None,
                delivery: None,
            };
        }
        let Admission { reservation, slot, scope, caps, wall_offset_ms } = admission;
        let entry = OpenCall::new(call.clone(), slot, wall_offset_ms);
        reservation.commit(entry.clone());
        let actions = match &mut post_commit {
            PostCommit::Start(action) => action.take().into_iter().collect(),
            PostCommit::ApplyFinished { actions, .. } => std::mem::take(actions),
            PostCommit::ContinueSpeculation(_) => Vec::new(),
        };
        let started = !actions.is_empty();
        self.dispatcher.after_commit(accepted, Some((&entry, &actions))).await;
        match post_commit {
            PostCommit::Start(_) if !started => self.dispatcher.queue_or_hold(&call, scope, caps),
            PostCommit::ContinueSpeculation(read) => {
                self.dispatcher.continue_speculation(&call, read);
            }
            _ => {}
        }
        // A kill switch that was set after `check_is_on` ended the open calls before this one was
        // among them.
        self.dispatcher.end_if_switched_off(&entry).await;
        Ticket { call, replayed: false, joined: false, open_call: Some(entry), delivery: None }
    }

    /// Applies an attempt that finished before its call was committed.
    fn apply_finished_speculation(
        &self,
        call: Arc<Call>,
        speculation: SpeculationResult,
        action: Option<Action>,
        records: &mut Vec<EventRecord>,
    ) -> (Arc<Call>, PostCommit) {
        // The observer needs the state before the attempt, which costs a copy.
        let before = self.dispatcher.telemetry.is_sampled(&call).then(|| call.clone());
        match self.dispatcher.apply_speculation(Arc::unwrap_or_clone(call), speculation) {
            Ok(Transition { call, records: new_records, actions, .. }) => {
                let attempt_end = before.as_ref().and_then(|before| {
                    self.dispatcher.telemetry.detect_attempt_end(before, &call, &new_records)
                });
                records.extend(new_records);
                (Arc::new(call), PostCommit::ApplyFinished { actions, before, attempt_end })
            }
            Err(unchanged) => (Arc::from(unchanged), PostCommit::Start(action)),
        }
    }

    /// Returns the call made earlier under this key, even if the request would be refused now
    /// because capacity is exhausted or the tool has changed. A repeated request must return the
    /// outcome of the first. Without such a call, returns `error`.
    async fn replay_or(
        &self,
        project: &str,
        key: Option<IdempotencyKey>,
        error: Error,
    ) -> Result<Ticket, Error> {
        let Some(key) = key else { return Err(error) };
        let used = self
            .core
            .store
            .find_by_idempotency_key(project, &key)
            .await
            .map_err(from_store_error)?;
        used.and_then(|used| self.replayed_ticket(used)).unwrap_or(Err(error))
    }

    fn replayed_ticket(&self, created: CreateCallResult) -> Option<Result<Ticket, Error>> {
        match created {
            CreateCallResult::New => None,
            CreateCallResult::Replayed(stored) => {
                metrics::counter!("toolcrib_idempotent_replays_total").increment(1);
                let entry = self.dispatcher.open_calls.get(&stored.id);
                let call = entry.as_ref().map_or_else(|| Arc::new(*stored), |entry| entry.call());
                let open_call = entry;
                Some(Ok(Ticket { call, replayed: true, joined: false, open_call, delivery: None }))
            }
            CreateCallResult::Mismatch(id) => {
                let message = "this idempotency key was used for another request";
                let detail = json!({ "tool_call_id": id });
                let fault = Fault::new(Code::IdempotencyMismatch, message).with_detail(detail);
                Some(Err(fault.without_side_effect().into()))
            }
        }
    }

    /// Cancels the running attempt of a call whose commit failed.
    fn cancel_speculation(&self, call: &Call) {
        if let Some(source) = self.dispatcher.sources.get(&call.target.executor) {
            source.cancel(&call.id, call.attempt);
        }
    }
}

/// Returns the first record of a call's history.
fn requested_record(call: &Call) -> EventRecord {
    let record = EventRecord::new(EventKind::Requested, call.created_ms, 0)
        .with("tool", call.tool_name.as_str())
        .with("args_bytes", call.target.args.text().len())
        .with_task_ids(call);
    let standing = call.approval.as_ref().and_then(|approval| approval.standing_id.as_deref());
    match standing {
        Some(id) => record.with("standing_approval_id", id),
        None => record,
    }
}

/// Work to do once the call is committed.
enum PostCommit {
    /// Start the first attempt, or queue the call.
    Start(Option<Action>),
    /// Continue the first attempt, which is running.
    ContinueSpeculation(RunningSpeculation),
    /// Perform the actions that follow from the first attempt, which has finished.
    ApplyFinished {
        actions: Vec<Action>,
        before: Option<Arc<Call>>,
        attempt_end: Option<AttemptEnd>,
    },
}

/// Claims a new call that has a slot, so that one commit both creates and claims it.
fn claim_new_call(
    call: Call,
    slot: &Option<Slot>,
    node: &str,
    requested: EventRecord,
) -> (Call, Vec<EventRecord>, Option<Action>) {
    let mut records = vec![requested];
    if slot.is_none() {
        return (call, records, None);
    }
    let (claim, now_ms) = (Event::Claim { node: node.to_owned() }, call.created_ms);
    // The call is stored once, in this state, so it keeps the version of a first commit.
    let version = call.version;
    match lifecycle::step_owned(call, &claim, now_ms) {
        Ok(step) => {
            records.extend(step.records);
            (Call { version, ..step.call }, records, step.actions.into_iter().next())
        }
        Err(refused) => (refused.0, records, None),
    }
}

fn capacity_error(full: CapacityExceeded) -> Error {
    match full {
        CapacityExceeded::Engine => {
            let message = "too many calls are open; nothing was done, a retry is safe";
            Error::retry_later(Code::Overloaded, message, 1_000)
        }
        CapacityExceeded::Project => {
            let message = "too many calls of this project are open; a retry is safe";
            Error::retry_later(Code::RateLimited, message, 1_000)
        }
        CapacityExceeded::Limit(exceeded) => limit_error(&exceeded),
    }
}
