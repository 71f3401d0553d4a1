//! Starts the run of a called agent, or finds it again after a crash.

use std::sync::Arc;

use serde_json::json;

use super::budget::{ChildReservation, TreeKey};
use super::messages::{agent_messages, resolve_box};
use super::run_id_for;
use crate::domain::agent::{AGENT_TOOL_PREFIX, AgentDefinition, AgentDriver};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::options::{RunLimits, RunOptions};
use crate::domain::run::progress::RunProgress;
use crate::domain::run::{
    JournalKind, JournalRecord, Run, RunBudget, RunLineage, RunOwner, RunStatus,
};
use crate::domain::utp::MAX_DEPTH;
use crate::ports::source::{Attempt, StartResult};
use crate::runs::Runs;

/// The work that an agent was called for, and its place in the tree.
struct AgentTask {
    agent: AgentDefinition,
    call: Arc<Call>,
    /// The open run that made the call.
    parent: Option<Run>,
}

impl AgentTask {
    fn key(&self, run_id: &str) -> TreeKey {
        let root = match &self.parent {
            Some(parent) => root_of(parent).to_owned(),
            None => run_id.to_owned(),
        };
        (self.call.project.clone(), root)
    }

    /// Returns the agents above the run, from the first to the caller.
    fn ancestors(&self) -> Vec<String> {
        let lineage = self.parent.as_ref().and_then(|parent| parent.lineage.as_deref());
        let mut ancestors: Vec<String> = match (lineage, &self.call.origin.route) {
            (Some(lineage), _) => lineage.ancestors.clone(),
            (None, Some(_)) => vec![self.call.origin.agent.clone()],
            (None, None) => Vec::new(),
        };
        ancestors.extend(lineage.map(|lineage| lineage.agent_id.clone()));
        ancestors
    }

    /// Returns the depth of the caller, and the largest that its runs may have.
    fn caller_depth(&self) -> (u32, u32) {
        let lineage = self.parent.as_ref().and_then(|parent| parent.lineage.as_deref());
        match (lineage, &self.call.origin.route) {
            (Some(lineage), _) => (lineage.depth, lineage.max_depth),
            (None, Some(route)) => (route.depth, MAX_DEPTH),
            (None, None) => (0, MAX_DEPTH),
        }
    }

    /// Decides the place of the run in its tree, without its budget.
    fn lineage(&self, attempt: u32, root_run_id: String) -> Result<RunLineage, Fault> {
        let AgentDefinition { agent_id, profile, .. } = &self.agent;
        let ancestors = self.ancestors();
        if ancestors.contains(agent_id) {
            let chain = ancestors.join(" → ");
            let message = format!(
                "agent \"{agent_id}\" would wait for itself ({chain} → {agent_id}); do this part \
                 of the task without it"
            );
            return Err(refusal(Code::Conflict, message));
        }
        let (above, max_depth) = self.caller_depth();
        let depth = above + 1;
        if depth > max_depth {
            let message = format!(
                "agent \"{agent_id}\" would be at depth {depth}, and the maximum here is \
                 {max_depth}; do the task without calling another agent"
            );
            return Err(refusal(Code::Conflict, message));
        }
        let own_max = profile.limits.depth.map_or(MAX_DEPTH, |below| depth.saturating_add(below));
        Ok(RunLineage {
            agent_id: agent_id.clone(),
            agent_version: self.agent.version,
            call_id: self.call.id.clone(),
            attempt,
            parent_run_id: self.parent.as_ref().map(|parent| parent.id.clone()),
            root_run_id,
            depth,
            max_depth: max_depth.min(own_max),
            ancestors,
            on_parent_end: self.agent.on_parent_end,
            budget: RunBudget::default(),
            result_fields: profile.result_fields.clone(),
        })
    }
}

/// Returns the first run of a run's tree.
pub(crate) fn root_of(run: &Run) -> &str {
    run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id)
}

fn refusal(code: Code, message: String) -> Fault {
    Fault::new(code, message).without_side_effect().retryable(false)
}

fn into_fault(error: Error) -> Fault {
    match error {
        Error::Refused { fault, .. } => fault.retryable(false),
        Error::Internal(source) => {
            tracing::error!(error = %source, "an agent's run did not start");
            Fault::new(Code::Internal, "internal error; see the server's log").retryable(false)
        }
    }
}

impl Runs {
    /// Starts the run of an attempt. Its result arrives when the run has ended.
    pub(super) async fn start_agent(self: &Arc<Self>, attempt: Attempt) -> StartResult {
        match self.try_start_agent(&attempt).await {
            Ok(None) => StartResult::Accepted,
            Ok(Some(ended)) => StartResult::Finished(super::end::agent_result(&ended)),
            Err(error) => StartResult::Finished(Err(into_fault(error))),
        }
    }

    /// Starts the run of an attempt, or resumes it. Returns it if it has ended already.
    async fn try_start_agent(self: &Arc<Self>, attempt: &Attempt) -> Result<Option<Run>, Error> {
        let run_id = run_id_for(&attempt.call_id);
        if attempt.redelivered
            && let Some(run) = self.trees.load_run(&attempt.project, &run_id).await?
        {
            if run.status.is_terminal() {
                return Ok(Some(run));
            }
            self.trees.load_tree(&run.project, root_of(&run)).await?;
            drop(self.lock_run(&run.project, &run.id).await?);
            return Ok(None);
        }
        // The call may have ended in the meantime; then there is nothing to do.
        let Some(entry) = self.dispatcher.open_calls.get(&attempt.call_id) else {
            return Ok(None);
        };
        let task = self.build_task(entry.call(), attempt).await?;
        self.check_run_capacity()?;
        let key = task.key(&run_id);
        self.trees.load_tree(&key.0, &key.1).await?;
        let mut lineage = task.lineage(attempt.number, key.1.clone())?;
        lineage.budget = self.trees.budgets.reserve(
            &key,
            &ChildReservation {
                run_id: &run_id,
                parent_run_id: lineage.parent_run_id.as_deref(),
                call_id: &attempt.call_id,
                limits: &task.agent.profile.limits,
                on_parent_end: lineage.on_parent_end,
                max_children: self.core.limits.max_child_runs,
            },
        )?;
        let created = self.create_agent_run(&task, run_id.clone(), lineage, attempt).await;
        match created {
            Ok(run) => {
                // The parent may have ended while the run was created.
                if let Some(parent) = &task.parent
                    && !self.is_run_open(&parent.project, &parent.id)
                {
                    self.reconcile_agent_run(&run).await?;
                }
                Ok(None)
            }
            Err(error) => {
                self.trees.budgets.discard(&key, &run_id);
                Err(error)
            }
        }
    }

    /// Returns true if this process drives the run and it has not ended.
    fn is_run_open(&self, project: &str, run_id: &str) -> bool {
        let active = self.active_runs.get(project, run_id);
        active.is_some_and(|active| !active.status.lock().is_terminal())
    }

    async fn build_task(&self, call: Arc<Call>, attempt: &Attempt) -> Result<AgentTask, Error> {
        let agent_id = attempt.tool.strip_prefix(AGENT_TOOL_PREFIX).unwrap_or(&attempt.tool);
        let found = self.registry.find_agent_definition(&attempt.project, agent_id);
        let agent = found.ok_or_else(|| {
            refusal(Code::NotFound, format!("agent \"{agent_id}\" was removed meanwhile"))
        })?;
        if agent.driver == AgentDriver::Worker {
            let message = format!("agent \"{agent_id}\" is driven by a worker, not by the loop");
            return Err(refusal(Code::UpstreamUnavailable, message).into());
        }
        let parent = self.trees.load_run(&attempt.project, &attempt.run_id).await?;
        // The run id comes from the request. Only the owner of a run may spend its rights and budget.
        let caller = requesting_caller(&call);
        let parent =
            parent.filter(|parent| !parent.status.is_terminal() && parent.owner.matches(&caller));
        Ok(AgentTask { agent, call, parent })
    }

    async fn create_agent_run(
        self: &Arc<Self>,
        task: &AgentTask,
        run_id: String,
        lineage: RunLineage,
        attempt: &Attempt,
    ) -> Result<Run, Error> {
        let AgentTask { agent, call, parent } = task;
        let context_box_id = resolve_box(&self.utp, call, parent.as_ref()).await?;
        let messages = agent_messages(&self.utp, agent, call, context_box_id.as_deref()).await?;
        let model = agent.profile.model.clone();
        let model = model.or_else(|| parent.as_ref().map(|parent| parent.model.clone()));
        let model = model.or_else(|| self.models().names().into_iter().next());
        let now_ms = self.core.wall_ms();
        let data = json!({
            "model": model, "agent_id": agent.agent_id, "agent_version": agent.version,
            "tool_call_id": call.id, "parent_run_id": lineage.parent_run_id,
        });
        let run = Run {
            owner: self.agent_run_owner(call, parent.as_ref()),
            options: self.agent_run_options(task, &run_id, &lineage, attempt),
            id: run_id,
            project: call.project.clone(),
            model: model.unwrap_or_default(),
            status: RunStatus::Running,
            progress: RunProgress::default(),
            answer: None,
            error: None,
            deliverable_card_id: None,
            queued_messages: Vec::new(),
            created_ms: now_ms,
            updated_ms: now_ms,
            ended_ms: None,
            version: 1,
            lineage: Some(Box::new(lineage)),
            context_box_id,
        };
        let entry = JournalRecord::new(JournalKind::Created, now_ms, data).with_messages(messages);
        let creating = self.clone().create_run(run, None, None, entry, false);
        self.dispatcher.detach_on_drop(creating).await.map(|started| started.run)
    }

    /// Returns the owner of an agent's run: it acts with the rights of its caller.
    fn agent_run_owner(&self, call: &Call, parent: Option<&Run>) -> RunOwner {
        if let Some(parent) = parent {
            return parent.owner.clone();
        }
        let caller = requesting_caller(call);
        RunOwner {
            keyed: self.registry.credentials.has_active_key(&caller),
            ..RunOwner::from(&caller)
        }
    }

    fn agent_run_options(
        &self,
        task: &AgentTask,
        run_id: &str,
        lineage: &RunLineage,
        attempt: &Attempt,
    ) -> RunOptions {
        let (limits, default) = (&task.agent.profile.limits, RunLimits::default());
        let remaining_ms = attempt.deadline_ms.saturating_sub(self.core.wall_ms()).max(1);
        let calls = lineage.budget.calls.and_then(|calls| u32::try_from(calls).ok());
        RunOptions {
            run_id: run_id.to_owned(),
            idempotency_prefix: Some(run_id.to_owned()),
            tools: task.agent.profile.tools.clone(),
            limits: RunLimits {
                steps: limits.steps.unwrap_or(default.steps),
                calls: calls.unwrap_or(default.calls),
                tokens: lineage.budget.tokens.unwrap_or(default.tokens),
                time_ms: limits.ms.unwrap_or(default.time_ms).min(remaining_ms),
                ..default
            },
            model_request_policy: self.model_request_policy.clone(),
            user_id: task.call.origin.user_id.clone(),
            traceparent: attempt.traceparent.as_ref().map(ToString::to_string),
            ..RunOptions::default()
        }
    }
}

/// Returns the caller that made a call.
fn requesting_caller(call: &Call) -> Caller {
    let origin = &call.origin;
    let caller = Caller::new(&call.project, &origin.agent, origin.roles, origin.auth_method);
    Caller { attributes: origin.attributes.clone(), ..caller }
}
