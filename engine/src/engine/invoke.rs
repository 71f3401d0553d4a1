//! Taking a call: who, what, may they, do the arguments fit, is there room; then the commit, then
//! the ticket. Nothing is told to anybody that a crash could take back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use futures::poll;
use serde_json::{Map, Value, json};

use super::ahead::{Ahead, Done, UnderWay};
use super::arguments::{check_args, check_numbers, ruled};
use super::behind::put_behind;
use super::catalog::{Catalog, Entry as Compiled, not_found};
use super::envelope::{check_envelope, idempotency_key};
use super::gate::{Caps, Line, Place, Slot};
use super::live::{Entry, Full};
use super::observing::Over;
use super::{Engine, Inner, measure, unavailable};
use crate::args;
use crate::call::{Asked, Call, Hold, Status, Target};
use crate::caller::Caller;
use crate::dialogue::Dialogue;
use crate::event::{Kind, Record};
use crate::fault::{Code, Error, Fault};
use crate::json::{Json, NotJson};
use crate::lifecycle::{self, Action, Event, Step};
use crate::policy::Decision;
use crate::store::{Coming, Created, IdempotencyKey, NewCall};
use crate::tool::Executor;

/// The envelope: what a caller asks for.
#[derive(Debug, Clone)]
pub struct Invocation {
    pub tool: String,
    pub args: Json,
    pub run_id: String,
    /// The caller's own id for this call.
    pub call_id: Option<String>,
    pub timeout_ms: Option<u64>,
    /// How many attempts may follow the first.
    pub retry: Option<u32>,
    pub idempotency_key: Option<String>,
    /// Only this client may execute it.
    pub client_id: Option<String>,
    /// A label; never used to decide anything.
    pub user_id: Option<String>,
    /// The trace it is asked in, as W3C's `traceparent`.
    pub traceparent: Option<String>,
    /// Answers to what the tool will ask, where the caller knows that already.
    pub answers: Option<Map<String, Value>>,
    /// The turn it is made in.
    pub turn: Option<Box<crate::utp::Route>>,
    /// Where to tell that it has ended.
    pub callback_url: Option<String>,
}

impl Invocation {
    /// A call of this tool with these arguments, as JSON text.
    pub fn new(tool: impl Into<String>, args: &str) -> Result<Self, NotJson> {
        Ok(Self::of(tool, Json::parse(args)?))
    }

    /// A call of this tool with these arguments.
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

/// Who is shown a call before it is stored.
pub(crate) type Shown = Box<dyn FnOnce(&Arc<Call>) + Send>;

/// What comes with a call that is one of several.
#[derive(Default)]
pub(crate) struct Among {
    /// The store is told of the others.
    pub(crate) coming: Option<Coming>,
    /// Is shown the call where it has ended before it is stored, while that is waited for. Nobody
    /// is told of it yet: it may still come to nothing.
    pub(crate) ahead: Option<Shown>,
    /// It begins when this one has ended.
    pub(crate) after: Option<Arc<Call>>,
}

/// An accepted call.
#[derive(Clone)]
pub struct Ticket {
    pub call: Arc<Call>,
    /// The idempotency key was used before: this is the call it made then.
    pub replayed: bool,
    /// Where the call's states are shown, so that who waits need not look for it again.
    pub(super) entry: Option<Arc<Entry>>,
}

impl Engine {
    /// Takes a call. The tool is named by its own name or by the one that models know it by
    /// ([`crate::names`]). When this returns, the call is stored and will reach an outcome.
    pub async fn invoke(&self, caller: &Caller, asked: Invocation) -> Result<Ticket, Error> {
        self.invoke_among(caller, asked, Among::default()).await
    }

    /// The same for one of several that come together.
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
        let tool = found.ok_or_else(|| not_found(&catalog, caller, &asked.tool))?;
        check_envelope(&asked, inner.limits.max_args_bytes)?;
        let args = asked.args.value();
        check_args(&tool, &args)?;
        check_numbers(&tool, &asked.args)?;
        check_client(&catalog, caller, &tool, asked.client_id.as_deref())?;
        if let Some(url) = &asked.callback_url {
            asked.callback_url = Some(inner.check_callback(caller, url)?);
        }
        let key = idempotency_key(caller, &asked);
        let mut call = inner.draft(&catalog, caller, &tool, asked, &args)?;
        if let Some(before) = &among.after {
            put_behind(&mut call, before);
        }
        let accepting = inner.clone().accept(call, key, among);
        inner.surely(accepting).await
    }
}

impl Inner {
    /// The call as it would be, before anything was decided about it.
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
        // The operator's word on this tool goes before the tool's own.
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
            // A tool service answers a call that it knows from memory: asking again is no use.
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

    /// The limits in parallel that an attempt on this target counts against.
    pub(super) fn caps(&self, project: &str, tool: &str) -> Caps {
        let of_tool = self.catalog().find(project, tool).and_then(|entry| {
            let over = self.policies.tools.get(tool).and_then(|o| o.policy.max_parallel);
            over.or(entry.definition.policy.max_parallel)
        });
        let of_project = self.policies.projects.get(project).and_then(|p| p.max_parallel);
        Caps { global: self.policies.global.max_parallel, project: of_project, tool: of_tool }
    }

    /// The alternates that could take this call: there, allowed, and with fitting arguments.
    fn alternates(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Compiled,
        args: &Value,
        call: &Call,
    ) -> Vec<Target> {
        let over = self.policies.tools.get(&tool.definition.name).map(|over| &over.fallback);
        let named = over.filter(|list| !list.is_empty()).unwrap_or(&tool.definition.fallback);
        let mut targets = Vec::new();
        for alternate in named {
            let allowed = catalog.decide(caller, &alternate.tool) == Decision::Allowed;
            let found = catalog.find(&caller.project, &alternate.tool).filter(|_| allowed);
            let Some(other) = found else { continue };
            let mut mapped = args::mapped(alternate.args.as_ref(), args);
            if let Some(rules) = &other.rules {
                mapped = rules.applied(&mapped, &args::Vars::of(call)).args;
            }
            if other.input.problems(&mapped).is_empty() {
                targets.push(target(&other, Json::of_value(&mapped)));
            }
        }
        targets
    }

    /// Commits the call, already claimed when a place is free, and starts it.
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
            Err(why) => return Box::pin(self.known_or_full(&call.project, key, why)).await,
        };
        let requested = Record::new(Kind::Requested, call.created_ms, 0)
            .with("tool", call.tool_name.as_str())
            .with("args_bytes", call.target.args.text().len())
            .about_task(&call);
        let mut slot = self.place_at_once(&call, &place, &caps);
        let (call, mut records, action) = claimed(call, &slot, &self.node, requested);
        let mut call = Arc::new(call);
        // A key may mean that all this has been done: then nothing is done before it is known.
        let begun = match action {
            Some(Action::Start) if key.is_none() => self.begin_ahead(&call),
            _ => Ahead::Waits,
        };
        let mut follows = match begun {
            Ahead::Over(done) => {
                let (ended, follows) = self.after_the_end(call, done, action, &mut records);
                call = ended;
                if let Follows::AfterTheEnd { .. } = follows {
                    // The attempt is over: its place is free while the commit is waited for.
                    slot = None;
                }
                follows
            }
            Ahead::UnderWay(read) => Follows::GoesOn(read),
            Ahead::Waits => Follows::Begins(action),
        };
        let new = NewCall { call: call.clone(), records, key, coming: among.coming };
        let mut creating = self.store.create(new);
        // The first look at it sends the call on its way.
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
            // It never was among the live ones: its room is free again, and nobody can know of it.
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

    /// The call after an attempt that is over before it is stored.
    fn after_the_end(
        &self,
        call: Arc<Call>,
        done: Done,
        action: Option<Action>,
        records: &mut Vec<Record>,
    ) -> (Arc<Call>, Follows) {
        // Who is told of the attempt looks at the call as it was, which takes a copy.
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

    /// What was asked before under this key is answered also when nothing new is taken.
    async fn known_or_full(
        &self,
        project: &str,
        key: Option<IdempotencyKey>,
        why: Full,
    ) -> Result<Ticket, Error> {
        let Some(key) = key else { return Err(full(why)) };
        let used = self.store.used(project, &key).await.map_err(unavailable)?;
        used.and_then(|used| self.known_before(used)).unwrap_or_else(|| Err(full(why)))
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

    /// The call did not come to be: its attempt need not go on.
    fn stop_attempt(&self, call: &Call) {
        if let Some(source) = self.sources.get(&call.target.executor) {
            source.cancel(&call.id, call.attempt);
        }
    }

    pub(super) fn place(&self, call: &Call) -> (Place, Caps) {
        // What callers run themselves takes nobody's place. No tool has this name.
        let line =
            |tool: &str| Arc::new(Line { project: call.project.clone(), tool: tool.to_owned() });
        if call.target.executor == Executor::Caller {
            return (Place { line: line("(caller)"), local: false }, Caps::default());
        }
        let (tool, local) = (&call.target.tool, !call.target.executor.parks());
        (Place { line: line(tool), local }, self.caps(&call.project, tool))
    }
}

/// What is to be done once the call is stored.
enum Follows {
    /// Its first attempt, or standing in line.
    Begins(Option<Action>),
    /// Its first attempt has begun.
    GoesOn(UnderWay),
    /// What follows from its first attempt, which is over.
    AfterTheEnd { actions: Vec<Action>, before: Option<Arc<Call>>, over: Option<Over> },
}

/// The fast path: with a place, the call is claimed in the same commit that creates it.
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
    // It is one state, the first that is stored.
    let version = call.version;
    match lifecycle::step_on(call, &claim, now_ms) {
        Ok(step) => {
            records.extend(step.records);
            (Call { version, ..step.call }, records, step.actions.into_iter().next())
        }
        Err(refused) => (refused.0, records, None),
    }
}

fn target(tool: &Compiled, args: Json) -> Target {
    Target {
        tool: tool.definition.name.clone(),
        version: tool.version.clone(),
        executor: tool.definition.executor,
        effect: tool.definition.effect,
        args,
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

/// A call can be pinned to a client only where that client offers the tool.
fn check_client(
    catalog: &Catalog,
    caller: &Caller,
    tool: &Compiled,
    client_id: Option<&str>,
) -> Result<(), Error> {
    let Some(client_id) = client_id else { return Ok(()) };
    let name = &tool.definition.name;
    if catalog.offered_by(&caller.project, name).iter().any(|id| id == client_id) {
        return Ok(());
    }
    let message = format!("client \"{client_id}\" does not offer \"{name}\"");
    let fault = Fault::new(Code::ValidationError, message).not_happened();
    Err(fault.with_detail(json!({ "pointer": "/client_id" })).into())
}
