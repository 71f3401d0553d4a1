//! Accepts a call: authorize, validate, reserve capacity, commit, then return the ticket. Nothing
//! is visible to callers before the commit, so a crash can never take back a ticket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use futures::poll;
use serde_json::{Map, Value, json};

use crate::calls::dependents::set_predecessor;
use crate::calls::limiter::Slot;
use crate::calls::open_calls::{CapacityExceeded, OpenCall};
use crate::calls::route::build_target;
use crate::calls::speculative_read::{RunningSpeculation, Speculation, SpeculationResult};
use crate::calls::validate_args::apply_argument_rules;
use crate::calls::validate_request::build_idempotency_key;
use crate::domain::call::{Call, Hold, Origin, Status};
use crate::domain::caller::Caller;
use crate::domain::elicitation::Elicitation;
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::{Json, JsonError};
use crate::domain::tool::Executor;
use crate::engine::{Core, Engine, from_store_error};
use crate::lifecycle::{self, Action, Event, Transition};
use crate::ports::store::{CreateCallResult, GroupMember, IdempotencyKey, NewCall};
use crate::registry::catalog::{Catalog, CatalogEntry as Compiled};
use crate::telemetry::engine_metrics;
use crate::telemetry::observer::AttemptEnd;

/// A request to run one tool.
#[derive(Debug, Clone)]
pub struct CallRequest {
    pub tool: String,
    pub args: Json,
    pub run_id: String,
    /// The caller's own id for this call.
    pub call_id: Option<String>,
    pub timeout_ms: Option<u64>,
    /// Maximum number of attempts after the first.
    pub retry: Option<u32>,
    pub idempotency_key: Option<String>,
    /// The only client that may execute the call.
    pub client_id: Option<String>,
    /// A label. Never used for decisions.
    pub user_id: Option<String>,
    /// Trace context of the request, a W3C `traceparent`.
    pub traceparent: Option<String>,
    /// Answers to the tool's elicitation, if the caller knows them in advance.
    pub answers: Option<Map<String, Value>>,
    /// The UTP turn that the call is made in.
    pub route: Option<Box<crate::domain::utp::Route>>,
    /// URL that receives a webhook when the call has ended.
    pub callback_url: Option<String>,
}

impl CallRequest {
    /// Builds a request from arguments as JSON text.
    pub fn new(tool: impl Into<String>, args: &str) -> Result<Self, JsonError> {
        Ok(Self::of(tool, Json::parse(args)?))
    }

    /// Builds a request from parsed arguments.
    pub fn of(tool: impl Into<String>, args: Json) -> Self {
        Self {
            tool: tool.into(),
            args,
            run_id: "run_default".to_owned(),
            call_id: None,
            timeout_ms: None,
            retry: None,
            idempotency_key: None,
            client_id: None,
            user_id: None,
            traceparent: None,
            route: None,
            callback_url: None,
            answers: None,
        }
    }
}

/// Callback that receives a call which finished before its commit.
pub(crate) type OnFinished = Box<dyn FnOnce(&Arc<Call>) + Send>;

/// Context of a call that is one entry of a batch.
#[derive(Default)]
pub(crate) struct BatchMembership {
    /// Announces the other entries to the store, for a group commit.
    pub(crate) group_member: Option<GroupMember>,
    /// Receives the call if it finishes before its commit, while that commit is in flight. The
    /// result must not be published yet: the commit may still fail.
    pub(crate) on_finished: Option<OnFinished>,
    /// The call that must end before this one starts.
    pub(crate) predecessor: Option<Arc<Call>>,
}

/// An accepted call. It is stored and will reach an outcome.
#[derive(Clone)]
pub struct Ticket {
    pub call: Arc<Call>,
    /// True if the idempotency key was used before. `call` is the call it created then.
    pub replayed: bool,
    /// The open call, so that waiting on this ticket needs no lookup.
    pub(crate) open_call: Option<Arc<OpenCall>>,
}

impl Engine {
    /// Accepts a call. The request has the tool's exact name or the name that models use
    /// ([`crate::model_tool_names`]). When this returns, the call is stored and will reach an
    /// outcome.
    pub async fn invoke(&self, caller: &Caller, asked: CallRequest) -> Result<Ticket, Error> {
        self.invoke_in_batch(caller, asked, BatchMembership::default()).await
    }

    /// Accepts a call that is one entry of a batch.
    pub(crate) async fn invoke_in_batch(
        &self,
        caller: &Caller,
        mut asked: CallRequest,
        among: BatchMembership,
    ) -> Result<Ticket, Error> {
        let inner = &self.core;
        if inner.draining.load(Ordering::Acquire) {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        let catalog = inner.catalog();
        let found = catalog.resolve(caller, &asked.tool);
        if let Some(tool) = found.as_ref().filter(|tool| tool.definition.name != asked.tool) {
            asked.tool.clone_from(&tool.definition.name);
        }
        inner.authorize_call(&catalog, caller, &asked.tool).await?;
        let args = asked.args.to_value();
        let fitting = inner.validate_request(&catalog, caller, found, &mut asked, &args);
        let key = build_idempotency_key(caller, &asked);
        let drafted =
            fitting.and_then(|tool| inner.build_call(&catalog, caller, &tool, asked, &args));
        let mut call = match drafted {
            Ok(call) => call,
            Err(why) => return Box::pin(inner.replay_or(&caller.project, key, why)).await,
        };
        if let Some(before) = &among.predecessor {
            set_predecessor(&mut call, before);
        }
        let accepting = inner.clone().commit_call(call, key, among);
        inner.detach_on_drop(accepting).await
    }
}

impl Core {
    /// Builds the call in its initial state.
    pub(crate) fn build_call(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Arc<Compiled>,
        asked: CallRequest,
        args: &Value,
    ) -> Result<Call, Error> {
        let now_ms = self.clock.now_ms();
        let definition = &tool.definition;
        let policy = self.resolve_policy(&caller.project, tool);
        // The operator's timeout for this tool takes precedence over the definition's.
        let over = self.policies.tools.get(&definition.name);
        let over_ms = over.and_then(|over| over.policy.default_timeout_ms);
        let timeout_ms = asked.timeout_ms.or(over_ms).unwrap_or(definition.timeout_ms);
        let mut call = Call {
            id: self.id_generator.next_call_id(now_ms),
            project: caller.project.clone(),
            run_id: asked.run_id,
            tool_name: definition.name.clone(),
            target: build_target(tool, asked.args.clone()),
            args: asked.args,
            fallbacks: Vec::new(),
            origin: Origin {
                agent: caller.agent.clone(),
                caller_call_id: asked.call_id,
                client_id: asked.client_id,
                user_id: asked.user_id,
                idempotency_key: asked.idempotency_key,
                traceparent: asked.traceparent,
                background: definition.background,
                route: asked.route,
                callback_url: asked.callback_url,
                predecessor: None,
            },
            // A tool service answers a repeated call from its memory, so a retry has no effect.
            max_retries: match definition.executor {
                Executor::Utp => 0,
                _ => asked.retry.unwrap_or(policy.max_retries),
            },
            backoff: policy.backoff,
            status: Status::Pending,
            hold: Some(Hold::Queue),
            attempt: 0,
            target_attempts: 0,
            acknowledged_by: None,
            elicitation: asked
                .answers
                .map(|answers| Box::new(Elicitation { answers, ..Elicitation::default() })),
            failed_attempt: None,
            node: None,
            created_ms: now_ms,
            deadline_ms: now_ms + timeout_ms,
            started_ms: None,
            attempt_dispatched_ms: None,
            completed_ms: None,
            outcome: None,
            version: 1,
        };
        if let Some(rules) = &tool.rules {
            call.target.args = apply_argument_rules(tool, rules, args, &mut call)?;
        }
        call.fallbacks = self.resolve_fallbacks(catalog, caller, tool, args, &call);
        Ok(call)
    }

    pub(crate) fn resolve_policy(
        &self,
        project: &str,
        tool: &Compiled,
    ) -> crate::domain::retry::ExecutionPolicy {
        let mut policy = self.policies.global.clone();
        if let Some(patch) = self.policies.projects.get(project) {
            policy = policy.with_patch(patch);
        }
        policy = policy.with_patch(&tool.definition.policy);
        if let Some(over) = self.policies.tools.get(&tool.definition.name) {
            let own_limit = policy.max_parallel;
            policy = policy.with_patch(&over.policy);
            policy.max_parallel = policy.max_parallel.or(own_limit);
        }
        policy
    }

    /// Commits the call, already claimed if a slot is free, and starts it.
    pub(crate) async fn commit_call(
        self: Arc<Self>,
        call: Call,
        key: Option<IdempotencyKey>,
        among: BatchMembership,
    ) -> Result<Ticket, Error> {
        let (all, each) = (self.limits.max_open_calls, self.limits.max_open_calls_per_project);
        let (place, caps) = self.resolve_slot_scope(&call);
        let room = match self.open_calls.reserve(&place.queue, all, each) {
            Ok(room) => room,
            Err(why) => {
                return Box::pin(self.replay_or(&call.project, key, capacity_error(why))).await;
            }
        };
        let requested = EventRecord::new(EventKind::Requested, call.created_ms, 0)
            .with("tool", call.tool_name.as_str())
            .with("args_bytes", call.target.args.text().len())
            .with_task_ids(&call);
        let mut slot = self.try_acquire_slot(&call, &place, &caps);
        let (call, mut records, action) = claim_new_call(call, &slot, &self.node, requested);
        let mut call = Arc::new(call);
        // With an idempotency key the call may have been made before. Nothing starts until the
        // store has answered that.
        let begun = match action {
            Some(Action::Start) if key.is_none() => self.start_speculation(&call),
            _ => Speculation::NotEligible,
        };
        let mut follows = match begun {
            Speculation::Finished(done) => {
                let (ended, follows) =
                    self.apply_finished_speculation(call, done, action, &mut records);
                call = ended;
                if let PostCommit::ApplyFinished { .. } = follows {
                    // The attempt has finished, so its slot is free while the commit is in flight.
                    slot = None;
                }
                follows
            }
            Speculation::Running(read) => PostCommit::ContinueSpeculation(read),
            Speculation::NotEligible => PostCommit::Start(action),
        };
        let new = NewCall { call: call.clone(), records, key, group_member: among.group_member };
        let mut creating = self.store.create_call(new);
        // The first poll hands the call to the store.
        let created = match (poll!(&mut creating), among.on_finished) {
            (Poll::Ready(created), _) => created,
            (Poll::Pending, Some(ahead)) if call.status.is_terminal() => {
                ahead(&call);
                creating.await
            }
            (Poll::Pending, _) => creating.await,
        };
        if let (Err(_), PostCommit::ContinueSpeculation(_)) = (&created, &follows) {
            self.cancel_speculation(&call);
        }
        if let Some(answer) = self.replayed_ticket(created.map_err(from_store_error)?) {
            return answer;
        }
        engine_metrics::count_accepted(&call);
        if let PostCommit::ApplyFinished { before, over, .. } = &mut follows {
            self.notify_observer(before.as_deref(), &call, over.take(), self.clock.now_ms());
        }
        if call.status.is_terminal() {
            // The call was never in `open_calls`: its reservation is released on return, and no
            // listener can know its id.
            engine_metrics::record_end(&call, || self.can_name_tool(&call));
            self.deliver_outcome(&call).await;
            if call.origin.callback_url.is_some() {
                self.webhook_queue.wake();
            }
            self.wake_run_and_project(&call);
            return Ok(Ticket { call, replayed: false, open_call: None });
        }
        room.commit();
        let entry = OpenCall::new(call.clone(), slot);
        self.open_calls.insert(entry.clone());
        self.wake_call_listeners(&call);
        match follows {
            PostCommit::Start(Some(action)) => self.perform_actions(&entry, &call, &[action]),
            PostCommit::Start(None) => self.queue_or_hold(&call, place, caps),
            PostCommit::ContinueSpeculation(read) => self.continue_speculation(&call, read),
            PostCommit::ApplyFinished { actions, .. } => {
                self.perform_actions(&entry, &call, &actions)
            }
        }
        Ok(Ticket { call, replayed: false, open_call: Some(entry) })
    }

    /// Applies an attempt that finished before its call was committed.
    fn apply_finished_speculation(
        &self,
        call: Arc<Call>,
        done: SpeculationResult,
        action: Option<Action>,
        records: &mut Vec<EventRecord>,
    ) -> (Arc<Call>, PostCommit) {
        // The observer needs the state before the attempt, which costs a copy.
        let before = self.is_sampled(&call).then(|| call.clone());
        match self.apply_speculation(Arc::unwrap_or_clone(call), done) {
            Ok(Transition { call, records: more, actions }) => {
                let over = before.as_ref();
                let over = over.and_then(|before| self.detect_attempt_end(before, &call, &more));
                records.extend(more);
                (Arc::new(call), PostCommit::ApplyFinished { actions, before, over })
            }
            Err(unchanged) => (Arc::from(unchanged), PostCommit::Start(action)),
        }
    }

    /// Returns the call made earlier under this key, even if the request would be refused now
    /// because capacity is exhausted or the tool has changed. A caller that repeats a request wants
    /// to know its outcome. Without such a call, returns the error `why`.
    async fn replay_or(
        &self,
        project: &str,
        key: Option<IdempotencyKey>,
        why: Error,
    ) -> Result<Ticket, Error> {
        let Some(key) = key else { return Err(why) };
        let used =
            self.store.find_by_idempotency_key(project, &key).await.map_err(from_store_error)?;
        used.and_then(|used| self.replayed_ticket(used)).unwrap_or(Err(why))
    }

    fn replayed_ticket(&self, created: CreateCallResult) -> Option<Result<Ticket, Error>> {
        match created {
            CreateCallResult::New => None,
            CreateCallResult::Replayed(known) => {
                metrics::counter!("toolcrib_idempotent_replays_total").increment(1);
                let entry = self.open_calls.get(&known.id);
                let call = entry.as_ref().map_or_else(|| Arc::new(*known), |entry| entry.call());
                Some(Ok(Ticket { call, replayed: true, open_call: entry }))
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
        if let Some(source) = self.sources.get(&call.target.executor) {
            source.cancel(&call.id, call.attempt);
        }
    }
}

/// Work to do once the call is committed.
enum PostCommit {
    /// Start the first attempt, or queue the call.
    Start(Option<Action>),
    /// Continue the first attempt, which is running.
    ContinueSpeculation(RunningSpeculation),
    /// Perform the actions that follow from the first attempt, which has finished.
    ApplyFinished { actions: Vec<Action>, before: Option<Arc<Call>>, over: Option<AttemptEnd> },
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
    }
}
