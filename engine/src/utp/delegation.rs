//! The tools that hand work to agents: `delegate_async`, `launch_principal`, `ask_expert`,
//! `fork_join` and `provision_agent`.
//!
//! Each handed-over task is a call of the tool `agent.ID`: durable, with a deadline, a permission
//! check and exactly one outcome. A tool of this module only makes such calls and waits for them.
//! Their idempotency keys derive from the call that makes them, so a tool that is delivered again
//! after a crash finds the same calls, and nothing is handed over twice.

mod definitions;
mod join;
mod provision;
mod source;
mod worker_source;
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::calls::request::CallRequest;
use crate::calls::{CallQuery, Calls, Dispatcher, Ticket};
use crate::domain::agent::agent_tool_name;
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::derived;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::domain::utp::delegation::depth_fault;
use crate::domain::utp::{MAX_DEPTH, Route, StepCall, trace};
use crate::ports::core::{Core, from_store_error};
use crate::registry::{AgentRoster, Registry};
use crate::utp::Utp;

use definitions::{DelegateArgs, TargetStrategy};

pub(crate) use source::{DelegationHandle, DelegationSource};
pub(crate) use worker_source::{TurnStart, WorkerSource};

/// Number of earlier exchanges with an agent that `reuse` and `clone` pass on.
const MAX_EXCHANGES: usize = 10;
/// Maximum number of agents that a refusal lists.
const MAX_LISTED_AGENTS: usize = 20;

/// Hands work to agents.
pub(crate) struct Delegation {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) roster: AgentRoster,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) utp: Arc<Utp>,
}

/// A task for one agent.
#[derive(Debug, Clone)]
struct DelegatedTask {
    /// Position among the tasks of its call.
    index: usize,
    agent_id: String,
    instruction: String,
    context: Option<Value>,
    context_box_id: Option<String>,
    /// Time limit of its call in milliseconds; `None` for the agent's own. Always the same for a
    /// task, because a call that is made again must be the same request.
    timeout_ms: Option<u64>,
    /// True if the caller continues without the outcome.
    is_detached: bool,
    /// Run that receives the outcome of a detached task as a late result.
    receiving_run_id: Option<String>,
}

impl Delegation {
    pub(crate) fn new(utp: &Arc<Utp>) -> Self {
        Self {
            core: utp.core.clone(),
            registry: utp.registry.clone(),
            roster: AgentRoster { core: utp.core.clone(), registry: utp.registry.clone() },
            dispatcher: utp.dispatcher.clone(),
            calls: utp.calls.clone(),
            utp: utp.clone(),
        }
    }

    /// Returns the task for an agent. Refuses an agent that the caller cannot hand work to.
    async fn resolve_task(
        &self,
        call: &Call,
        index: usize,
        args: DelegateArgs,
    ) -> Result<DelegatedTask, Fault> {
        let caller = call.caller();
        let agent_id = args.target_ref.trim().to_owned();
        self.require_callable(&caller, &agent_id)?;
        let context = match args.target_strategy {
            TargetStrategy::New => None,
            TargetStrategy::Reuse | TargetStrategy::Clone => {
                self.load_exchanges(&caller, call, &agent_id).await?
            }
        };
        Ok(DelegatedTask {
            index,
            agent_id,
            instruction: args.instruction,
            context,
            context_box_id: args.context_box_id,
            timeout_ms: None,
            is_detached: false,
            receiving_run_id: None,
        })
    }

    /// Checks that there is such an agent, and that the caller may call it. The refusal is the same
    /// in both cases and lists the agents that the caller may call.
    fn require_callable(&self, caller: &Caller, agent_id: &str) -> Result<(), Fault> {
        let catalog = self.registry.catalog();
        let name = agent_tool_name(agent_id);
        let exists = catalog.find(&caller.project, &name).is_some();
        if exists && catalog.may_call(caller, &name) {
            return Ok(());
        }
        let prefix = agent_tool_name("");
        let tools = self.registry.tools(caller);
        let agents: Vec<&str> = tools
            .iter()
            .filter_map(|entry| entry.definition.name.strip_prefix(&prefix))
            .take(MAX_LISTED_AGENTS)
            .collect();
        let excerpt: String = agent_id.chars().take(80).collect();
        let listed = match agents.is_empty() {
            true => "this project has no agents; an operator defines them with \
                     PUT /v1/agents/{agent_id}"
                .to_owned(),
            false => format!("the agents are: {}", agents.join(", ")),
        };
        let message = format!("there is no agent \"{excerpt}\"; {listed}");
        let fault = Fault::new(Code::NotFound, message).without_side_effect();
        Err(fault.with_detail(json!({ "agents": agents })))
    }

    /// Returns the earlier exchanges of the caller with an agent in the same run, oldest first.
    async fn load_exchanges(
        &self,
        caller: &Caller,
        call: &Call,
        agent_id: &str,
    ) -> Result<Option<Value>, Fault> {
        let query = CallQuery {
            run_id: Some(call.run_id.clone()),
            tool_name: Some(agent_tool_name(agent_id)),
            status: Some(Status::Succeeded),
            before: Some(call.id.clone()),
            limit: MAX_EXCHANGES,
            ..CallQuery::default()
        };
        let page = self.calls.calls(caller, query).await.map_err(into_fault)?;
        let exchanges: Vec<Value> = page
            .calls
            .iter()
            .rev()
            // Later exchanges do not count, so the list is the same if the call is delivered again.
            .filter(|earlier| earlier.completed_ms.is_some_and(|at_ms| at_ms <= call.created_ms))
            .map(|earlier| {
                let outcome = earlier.outcome.as_ref();
                let data = outcome.and_then(|outcome| outcome.data.as_ref());
                let args = earlier.args.to_value();
                json!({
                    "instruction": args["instruction"],
                    "result": data.map_or(Value::Null, Json::to_value),
                })
            })
            .collect();
        Ok((!exchanges.is_empty()).then(|| json!({ "earlier_exchanges": exchanges })))
    }

    /// Makes the call of an agent for a task. The same task again returns the same call.
    async fn invoke_agent(&self, call: &Call, task: &DelegatedTask) -> Result<Ticket, Error> {
        let route = Route::for_call(call);
        if route.depth + 1 >= MAX_DEPTH {
            return Err(depth_fault().into());
        }
        let mut args = json!({ "instruction": task.instruction });
        if let Some(context) = &task.context {
            args["context"] = context.clone();
        }
        if let Some(box_id) = &task.context_box_id {
            args["context_box_id"] = box_id.as_str().into();
        }
        let mut request = CallRequest::of(agent_tool_name(&task.agent_id), Json::from_value(&args));
        let index = task.index;
        let parent = derived::call_traceparent(call);
        request.run_id = call.run_id.clone();
        request.call_id = call.origin.caller_call_id.as_ref().map(|id| {
            let prefix: String = id.chars().take(60).collect();
            format!("{prefix}-{index}")
        });
        request.user_id = call.origin.user_id.clone();
        request.idempotency_key = Some(format!("internal:{}:{index}", call.id));
        request.traceparent = Some(trace::child_traceparent(&parent, call.id.as_str()));
        request.timeout_ms = task.timeout_ms;
        let agent = self.registry.find_agent_definition(&call.project, &task.agent_id);
        request.max_timeout_ms = agent.and_then(|agent| agent.profile.limits.ms);
        request.route = Some(Box::new(Route {
            tool_call_id: format!("{}-{index}", route.tool_call_id),
            context_box_id: task.context_box_id.clone().or(route.context_box_id.clone()),
            joined_by: match task.is_detached {
                true => task.receiving_run_id.clone(),
                false => Some(call.id.to_string()),
            },
            is_detached: task.is_detached,
            ..route
        }));
        self.calls.invoke(&call.caller(), request).await
    }

    /// Hands a task over and returns at once. The outcome goes to the calling run, or else to the
    /// inbox of the calling agent.
    async fn delegate(&self, call: &Call, args: DelegateArgs) -> Result<Json, Fault> {
        let mut task = self.resolve_task(call, 0, args).await?;
        task.is_detached = true;
        if call.origin.route.is_none() {
            let run = self.utp.find_calling_run(call).await.map_err(into_fault)?;
            task.receiving_run_id = run.map(|run| run.id);
        }
        // No call was made, as far as that is known.
        let refuse = |error: Error| match into_fault(error) {
            fault if fault.code.leaves_outcome_open() => fault,
            fault => fault.without_side_effect(),
        };
        let ticket = self.invoke_agent(call, &task).await.map_err(refuse)?;
        self.follow_detached(call, &ticket.call).await.map_err(into_fault)?;
        let child = &ticket.call.id;
        Ok(Json::from_value(&json!({
            "status": "accepted",
            "agent_id": task.agent_id,
            "agent_turn_id": crate::utp::turns::delegated::turn_id_of(child, 1),
            "turn_epoch": 1,
            "call_id": child.as_str(),
            "context_box_id": task.context_box_id,
        })))
    }

    /// Records a detached call of a turn, so that its outcome reaches the inbox after any crash.
    async fn follow_detached(&self, call: &Call, child: &Arc<Call>) -> Result<(), Error> {
        let Some(route) = child.origin.route.as_deref() else { return Ok(()) };
        if call.origin.route.is_none() || !self.utp.uses_inbox(child) {
            return Ok(());
        }
        let step_call = StepCall {
            project: child.project.clone(),
            agent_id: route.agent_id.clone(),
            turn_id: route.turn_id.clone(),
            epoch: route.epoch,
            // A step of its own: the step of the turn does not wait for the outcome.
            step_id: format!("{}-detached", route.step_id),
            tool_call_id: route.tool_call_id.clone(),
            tool_name: child.tool_name.clone(),
            call_id: Some(child.id.to_string()),
            result_card_id: None,
            inbox_id: None,
        };
        let stored = self.core.store.utp().add_step_call(step_call).await;
        stored.map_err(from_store_error)?;
        let now = self.utp.cards.find_call(&child.project, &child.id).await?;
        match now.filter(|child| child.status.is_terminal()) {
            Some(ended) => self.utp.deliver_to_inbox(&ended).await,
            None => Ok(()),
        }
    }
}

impl Delegation {
    /// Cancels the open calls of agents whose join, or whose calling run or turn, has ended.
    /// Returns their number.
    pub(crate) async fn cancel_orphaned_tasks(&self) -> Result<usize, Error> {
        let (mut count, mut parents) = (0, HashMap::new());
        for entry in self.dispatcher.open_calls.all() {
            let task = entry.call();
            let reason = match self.has_join_ended(&task).await? {
                true => "the call that joins it has ended",
                false if self.is_orphaned(&task, &mut parents).await? => {
                    "the caller of this agent has ended"
                }
                false => continue,
            };
            let reason = Some(reason.to_owned());
            count += usize::from(self.calls.cancel(&task.caller(), &task.id, reason).await.is_ok());
        }
        Ok(count)
    }

    async fn has_join_ended(&self, task: &Call) -> Result<bool, Error> {
        let join = task.origin.route.as_deref().and_then(|route| route.joined_by.as_ref());
        let Some(join) = join.and_then(|id| id.parse::<CallId>().ok()) else { return Ok(false) };
        let found = self.utp.cards.find_call(&task.project, &join).await?;
        Ok(found.is_some_and(|join| join.status.is_terminal()))
    }

    /// Returns true if a call is that of an agent whose calling run or turn has ended, and which
    /// does not continue without it. `parents` caches for each caller if it has ended.
    async fn is_orphaned(
        &self,
        task: &Call,
        parents: &mut HashMap<(String, String, String), bool>,
    ) -> Result<bool, Error> {
        if task.target.executor != Executor::AGENT || self.utp.outlives_caller(task) {
            return Ok(false);
        }
        let agent = Route::for_call(task).agent_id;
        let key = (task.project.clone(), task.run_id.clone(), agent);
        if let Some(has_ended) = parents.get(&key) {
            return Ok(*has_ended);
        }
        let has_ended = match self.utp.find_calling_turn(task).await? {
            Some(turn) => turn.status.is_terminal(),
            None => {
                let run = self.utp.find_calling_run(task).await?;
                run.is_some_and(|run| run.status.is_terminal())
            }
        };
        parents.insert(key, has_ended);
        Ok(has_ended)
    }
}

/// Returns the fault of a refusal, or the one of an internal failure.
fn into_fault(error: Error) -> Fault {
    match error {
        Error::Refused { fault, .. } => fault.retryable(false),
        Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}
