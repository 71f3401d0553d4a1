//! Accepts a call: authorize, validate, reserve capacity, commit, then return the ticket. Nothing
//! is visible to callers before the commit, so a crash can never take back a ticket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use futures::poll;
use serde_json::{Map, Value, json};

use super::ahead::{Ahead, Done, UnderWay};
use super::arguments::ruled;
use super::behind::put_behind;
use super::catalog::{Catalog, Entry as Compiled};
use super::envelope::idempotency_key;
use super::gate::Slot;
use super::live::{Entry, Full};
use super::observing::Over;
use super::target::target;
use super::{Engine, Inner, measure, unavailable};
use crate::call::{Asked, Call, Hold, Status};
use crate::caller::Caller;
use crate::dialogue::Dialogue;
use crate::event::{Kind, Record};
use crate::fault::{Code, Error, Fault};
use crate::json::{Json, NotJson};
use crate::lifecycle::{self, Action, Event, Step};
use crate::store::{Coming, Created, IdempotencyKey, NewCall};
use crate::tool::Executor;

/// A request to run one tool.
#[derive(Debug, Clone)]
pub struct Invocation {
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
    pub turn: Option<Box<crate::utp::Route>>,
    /// URL that receives a webhook when the call has ended.
    pub callback_url: Option<String>,
}

impl Invocation {
    /// Builds a request from arguments as JSON text.
    pub fn new(tool: impl Into<String>, args: &str) -> Result<Self, NotJson> {
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
            turn: None,
            callback_url: None,
            answers: None,
        }
    }
}

/// Callback that receives a call which finished before its commit.
pub(crate) type Shown = Box<dyn FnOnce(&Arc<Call>) + Send>;

/// Context of a call that is one entry of a batch.
#[derive(Default)]
pub(crate) struct Among {
    /// Announces the other entries to the store, for a group commit.
    pub(crate) coming: Option<Coming>,
    /// Receives the call if it finishes before its commit, while that commit is in flight. The
    /// result must not be published yet: the commit may still fail.
    pub(crate) ahead: Option<Shown>,
    /// The call that must end before this one starts.
    pub(crate) after: Option<Arc<Call>>,
}

/// An accepted call. It is stored and will reach an outcome.
#[derive(Clone)]
pub struct Ticket {
    pub call: Arc<Call>,
    /// True if the idempotency key was used before. `call` is the call it created then.
    pub replayed: bool,
    /// The open call, so that waiting on this ticket needs no lookup.
    pub(super) entry: Option<Arc<Entry>>,
}

impl Engine {
    /// Accepts a call. The request has the tool's exact name or the name that models use
    /// ([`crate::model_tool_names`]). When this returns, the call is stored and will reach an
    /// outcome.
    pub async fn invoke(&self, caller: &Caller, asked: Invocation) -> Result<Ticket, Error> {
        self.invoke_among(caller, asked, Among::default()).await
    }

    /// Accepts a call that is one entry of a batch.
    pub(crate) async fn invoke_among(
        &self,
        caller: &Caller,
        mut asked: Invocation,
        among: Among,
    ) -> Result<Ticket, Error> {
        let inner = &self.inner;
        if inner.draining.load(Ordering::Acquire) {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::later(Code::Overloaded, message, 1_000));
        }
        let catalog = inner.catalog();
        let found = catalog.named(caller, &asked.tool);
        if let Some(tool) = found.as_ref().filter(|tool| tool.definition.name != asked.tool) {
            asked.tool.clone_from(&tool.definition.name);
        }
        inner.check_permission(&catalog, caller, &asked.tool).await?;
        let args = asked.args.value();
        let fitting = inner.fitting(&catalog, caller, found, &mut asked, &args);
        let key = idempotency_key(caller, &asked);
        let drafted = fitting.and_then(|tool| inner.draft(&catalog, caller, &tool, asked, &args));
        let mut call = match drafted {
            Ok(call) => call,
            Err(why) => return Box::pin(inner.known_or(&caller.project, key, why)).await,
        };
        if let Some(before) = &among.after {
            put_behind(&mut call, before);
        }
        let accepting = inner.clone().accept(call, key, among);
        inner.surely(accepting).await
    }
}

impl Inner {
    /// Builds the call in its initial state.
    pub(super) fn draft(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Arc<Compiled>,
        asked: Invocation,
        args: &Value,
    ) -> Result<Call, Error> {
        let now_ms = self.clock.now_ms();
        let definition = &tool.definition;
        let policy = self.policy_of(&caller.project, tool);
        // The operator's timeout for this tool takes precedence over the definition's.
        let over = self.policies.tools.get(&definition.name);
        let over_ms = over.and_then(|over| over.policy.default_timeout_ms);
        let timeout_ms = asked.timeout_ms.or(over_ms).unwrap_or(definition.timeout_ms);
        let mut call = Call {
            id: self.minter.call(now_ms),
            project: caller.project.clone(),
            run_id: asked.run_id,
            tool_name: definition.name.clone(),
            target: target(tool, asked.args.clone()),
            args: asked.args,
            alternates: Vec::new(),
            asked: Asked {
                agent: caller.agent.clone(),
                call_id: asked.call_id,
                client_id: asked.client_id,
                user_id: asked.user_id,
                idempotency_key: asked.idempotency_key,
                traceparent: asked.traceparent,
                background: definition.background,
                turn: asked.turn,
                callback_url: asked.callback_url,
                after: None,
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
            taken_by: None,
            dialogue: asked
                .answers
                .map(|answers| Box::new(Dialogue { answers, ..Dialogue::default() })),
            failed: None,
            node: None,
            created_ms: now_ms,
            deadline_ms: now_ms + timeout_ms,
            started_ms: None,
            attempt_ms: None,
            completed_ms: None,
            outcome: None,
            version: 1,
        };
        if let Some(rules) = &tool.rules {
            call.target.args = ruled(tool, rules, args, &mut call)?;
        }
        call.alternates = self.alternates(catalog, caller, tool, args, &call);
        Ok(call)
    }

    pub(super) fn policy_of(
        &self,
        project: &str,
        tool: &Compiled,
    ) -> crate::retry::ExecutionPolicy {
        let mut policy = self.policies.global.clone();
        if let Some(patch) = self.policies.projects.get(project) {
            policy = policy.overlaid(patch);
        }
        policy = policy.overlaid(&tool.definition.policy);
        if let Some(over) = self.policies.tools.get(&tool.definition.name) {
            let own_limit = policy.max_parallel;
            policy = policy.overlaid(&over.policy);
            policy.max_parallel = policy.max_parallel.or(own_limit);
        }
        policy
    }

    /// Commits the call, already claimed if a slot is free, and starts it.
    pub(super) async fn accept(
        self: Arc<Self>,
        call: Call,
        key: Option<IdempotencyKey>,
        among: Among,
    ) -> Result<Ticket, Error> {
        let (all, each) = (self.limits.max_open_calls, self.limits.max_open_calls_per_project);
        let (place, caps) = self.place(&call);
        let room = match self.live.room(&place.line, all, each) {
            Ok(room) => room,
            Err(why) => return Box::pin(self.known_or(&call.project, key, full(why))).await,
        };
        let requested = Record::new(Kind::Requested, call.created_ms, 0)
            .with("tool", call.tool_name.as_str())
            .with("args_bytes", call.target.args.text().len())
            .about_task(&call);
        let mut slot = self.place_at_once(&call, &place, &caps);
        let (call, mut records, action) = claimed(call, &slot, &self.node, requested);
        let mut call = Arc::new(call);
        // With an idempotency key the call may have been made before. Nothing starts until the
        // store has answered that.
        let begun = match action {
            Some(Action::Start) if key.is_none() => self.begin_ahead(&call),
            _ => Ahead::Waits,
        };
        let mut follows = match begun {
            Ahead::Over(done) => {
                let (ended, follows) = self.after_the_end(call, done, action, &mut records);
                call = ended;
                if let Follows::AfterTheEnd { .. } = follows {
                    // The attempt has finished, so its slot is free while the commit is in flight.
                    slot = None;
                }
                follows
            }
            Ahead::UnderWay(read) => Follows::GoesOn(read),
            Ahead::Waits => Follows::Begins(action),
        };
        let new = NewCall { call: call.clone(), records, key, coming: among.coming };
        let mut creating = self.store.create(new);
        // The first poll hands the call to the store.
        let created = match (poll!(&mut creating), among.ahead) {
            (Poll::Ready(created), _) => created,
            (Poll::Pending, Some(ahead)) if call.status.is_terminal() => {
                ahead(&call);
                creating.await
            }
            (Poll::Pending, _) => creating.await,
        };
        if let (Err(_), Follows::GoesOn(_)) = (&created, &follows) {
            self.stop_attempt(&call);
        }
        if let Some(answer) = self.known_before(created.map_err(unavailable)?) {
            return answer;
        }
        measure::accepted(&call);
        if let Follows::AfterTheEnd { before, over, .. } = &mut follows {
            self.tell_observer(before.as_deref(), &call, over.take(), self.clock.now_ms());
        }
        if call.status.is_terminal() {
            // The call was never in `open_calls`: its reservation is released on return, and no
            // listener can know its id.
            measure::ended(&call, || self.may_name(&call));
            self.ended(&call).await;
            if call.asked.callback_url.is_some() {
                self.notices.wake();
            }
            self.announce_around(&call);
            return Ok(Ticket { call, replayed: false, entry: None });
        }
        room.keep();
        let entry = Entry::new(call.clone(), slot);
        self.live.insert(entry.clone());
        self.announce(&call);
        match follows {
            Follows::Begins(Some(action)) => self.perform(&entry, &call, &[action]),
            Follows::Begins(None) => self.stand_by(&call, place, caps),
            Follows::GoesOn(read) => self.go_on(&call, read),
            Follows::AfterTheEnd { actions, .. } => self.perform(&entry, &call, &actions),
        }
        Ok(Ticket { call, replayed: false, entry: Some(entry) })
    }

    /// Applies an attempt that finished before its call was committed.
    fn after_the_end(
        &self,
        call: Arc<Call>,
        done: Done,
        action: Option<Action>,
        records: &mut Vec<Record>,
    ) -> (Arc<Call>, Follows) {
        // The observer needs the state before the attempt, which costs a copy.
        let before = self.is_recorded(&call).then(|| call.clone());
        match self.over(Arc::unwrap_or_clone(call), done) {
            Ok(Step { call, records: more, actions }) => {
                let over = before.as_ref();
                let over = over.and_then(|before| self.attempt_over(before, &call, &more));
                records.extend(more);
                (Arc::new(call), Follows::AfterTheEnd { actions, before, over })
            }
            Err(unchanged) => (Arc::from(unchanged), Follows::Begins(action)),
        }
    }

    /// Returns the call made earlier under this key, even if the request would be refused now
    /// because capacity is exhausted or the tool has changed. A caller that repeats a request wants
    /// to know its outcome. Without such a call, returns the error `why`.
    async fn known_or(
        &self,
        project: &str,
        key: Option<IdempotencyKey>,
        why: Error,
    ) -> Result<Ticket, Error> {
        let Some(key) = key else { return Err(why) };
        let used = self.store.used(project, &key).await.map_err(unavailable)?;
        used.and_then(|used| self.known_before(used)).unwrap_or(Err(why))
    }

    fn known_before(&self, created: Created) -> Option<Result<Ticket, Error>> {
        match created {
            Created::New => None,
            Created::Replayed(known) => {
                metrics::counter!("toolcrib_idempotent_replays_total").increment(1);
                let entry = self.live.get(&known.id);
                let call = entry.as_ref().map_or_else(|| Arc::new(*known), |entry| entry.call());
                Some(Ok(Ticket { call, replayed: true, entry }))
            }
            Created::Mismatch(id) => {
                let message = "this idempotency key was used for another request";
                let detail = json!({ "tool_call_id": id });
                let fault = Fault::new(Code::IdempotencyMismatch, message).with_detail(detail);
                Some(Err(fault.not_happened().into()))
            }
        }
    }

    /// Cancels the running attempt of a call whose commit failed.
    fn stop_attempt(&self, call: &Call) {
        if let Some(source) = self.sources.get(&call.target.executor) {
            source.cancel(&call.id, call.attempt);
        }
    }
}

/// Work to do once the call is committed.
enum Follows {
    /// Start the first attempt, or queue the call.
    Begins(Option<Action>),
    /// Continue the first attempt, which is running.
    GoesOn(UnderWay),
    /// Perform the actions that follow from the first attempt, which has finished.
    AfterTheEnd { actions: Vec<Action>, before: Option<Arc<Call>>, over: Option<Over> },
}

/// Claims a new call that has a slot, so that one commit both creates and claims it.
fn claimed(
    call: Call,
    slot: &Option<Slot>,
    node: &str,
    requested: Record,
) -> (Call, Vec<Record>, Option<Action>) {
    let mut records = vec![requested];
    if slot.is_none() {
        return (call, records, None);
    }
    let (claim, now_ms) = (Event::Claim { node: node.to_owned() }, call.created_ms);
    // The call is stored once, in this state, so it keeps the version of a first commit.
    let version = call.version;
    match lifecycle::step_on(call, &claim, now_ms) {
        Ok(step) => {
            records.extend(step.records);
            (Call { version, ..step.call }, records, step.actions.into_iter().next())
        }
        Err(refused) => (refused.0, records, None),
    }
}

fn full(full: Full) -> Error {
    match full {
        Full::Engine => {
            let message = "too many calls are open; nothing was done, a retry is safe";
            Error::later(Code::Overloaded, message, 1_000)
        }
        Full::Project => {
            let message = "too many calls of this project are open; a retry is safe";
            Error::later(Code::RateLimited, message, 1_000)
        }
    }
}
