//! Starts the run of a called agent, or finds it again after a crash.

use std::sync::Arc;

use serde_json::json;

use super::messages::{agent_messages, resolve_box};
use super::run_id_for;
use super::task::AgentTask;
use crate::domain::call::Call;
use crate::domain::derived;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::options::{RunLimits, RunOptions};
use crate::domain::run::{JournalKind, JournalRecord, Run, RunBudget, RunLineage, RunOwner};
use crate::ports::core::Core;
use crate::ports::source::{Attempt, StartResult};
use crate::runs::Runs;

/// Returns the id of the first run or turn of a run's tree.
pub(crate) fn root_of(run: &Run) -> &str {
    run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id)
}

fn into_fault(error: Error) -> Fault {
    match error {
        // A refusal started nothing. A store or an engine that is not available may have begun.
        Error::Refused { fault, .. } => match fault.code {
            Code::Overloaded | Code::UpstreamUnavailable => fault.retryable(false),
            code if code.leaves_outcome_open() => fault.retryable(false),
            _ => fault.without_side_effect().retryable(false),
        },
        Error::Internal(source) => {
            tracing::error!(error = %source, "an agent's run did not start");
            Fault::new(Code::Internal, "internal error; see the server's log").retryable(false)
        }
    }
}

/// Returns the result of an attempt that did not start. If the engine shuts down, the next process
/// starts the attempt again.
pub(super) fn into_result(core: &Core, error: Error) -> StartResult {
    match error.code() == Code::Overloaded && core.is_draining() {
        true => StartResult::Accepted,
        false => StartResult::Finished(Err(into_fault(error))),
    }
}

impl AgentTask {
    /// Returns the place of the run in its tree.
    fn run_lineage(&self, attempt: u32, run_id: &str, budget: RunBudget) -> RunLineage {
        RunLineage {
            agent_id: self.agent.agent_id.clone(),
            agent_version: self.agent.version,
            call_id: self.call.id.clone(),
            attempt,
            parent_run_id: self.above.run_id.clone(),
            parent_turn_id: self.above.turn.as_ref().map(|turn| turn.turn_id.clone()),
            root_run_id: self.tree_key(run_id).1,
            depth: self.depth,
            max_depth: self.above.max_depth_below(&self.agent, self.depth),
            ancestors: self.above.ancestors.clone(),
            on_parent_end: self.agent.on_parent_end,
            budget,
            result_fields: self.agent.profile.result_fields.clone(),
        }
    }
}

impl Runs {
    /// Starts the run of an attempt. Its result arrives when the run has ended.
    pub(super) async fn start_agent(self: &Arc<Self>, attempt: Attempt) -> StartResult {
        match self.try_start_agent(&attempt).await {
            Ok(None) => StartResult::Accepted,
            Ok(Some(ended)) => StartResult::Finished(super::end::agent_result(&ended)),
            Err(error) => into_result(&self.core, error),
        }
    }

    /// Starts the run of an attempt, or resumes it. Returns it if it has ended already.
    async fn try_start_agent(self: &Arc<Self>, attempt: &Attempt) -> Result<Option<Run>, Error> {
        let run_id = run_id_for(&attempt.call_id);
        if attempt.redelivered
            && let Some(run) = self.utp.trees.load_run(&attempt.project, &run_id).await?
        {
            if run.status.is_terminal() {
                return Ok(Some(run));
            }
            self.utp.trees.load_tree(&run.project, root_of(&run)).await?;
            drop(self.lock_run(&run.project, &run.id).await?);
            return Ok(None);
        }
        // The call may have ended in the meantime; then there is nothing to do.
        let Some(entry) = self.dispatcher.open_calls.get(&attempt.call_id) else {
            return Ok(None);
        };
        let task = self.build_task(entry.call(), attempt).await?;
        self.check_run_capacity()?;
        let budget = self.reserve_budget(&task, &run_id).await?;
        let lineage = task.run_lineage(attempt.number, &run_id, budget);
        match self.create_agent_run(&task, run_id.clone(), lineage, attempt).await {
            Ok(run) => {
                // The parent may have ended while the run was created.
                self.reconcile_agent_run(&run).await?;
                Ok(None)
            }
            Err(error) => {
                self.release_budget(&task, &run_id);
                Err(error)
            }
        }
    }

    async fn create_agent_run(
        self: &Arc<Self>,
        task: &AgentTask,
        run_id: String,
        lineage: RunLineage,
        attempt: &Attempt,
    ) -> Result<Run, Error> {
        let AgentTask { agent, call, above, .. } = task;
        let parent = above.run.as_ref();
        let context_box_id = resolve_box(&self.utp, call, above).await?;
        let messages = agent_messages(&self.utp, agent, call, context_box_id.as_deref()).await?;
        let model = agent.profile.model.clone();
        let model = model.or_else(|| parent.map(|parent| parent.model.clone()));
        let model = model.or_else(|| self.models().names().into_iter().next());
        let now_ms = self.core.wall_ms();
        let data = json!({
            "model": model, "agent_id": agent.agent_id, "agent_version": agent.version,
            "tool_call_id": call.id, "parent_run_id": lineage.parent_run_id,
        });
        let owner = self.agent_run_owner(call, parent);
        let options = self.agent_run_options(task, &run_id, &lineage, attempt);
        let run = Run {
            lineage: Some(Box::new(lineage)),
            context_box_id,
            ..Run::start(&call.project, owner, model.unwrap_or_default(), options, now_ms)
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
        let caller = call.caller();
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
        let profile = &task.agent.profile;
        // The settings of the agent, not those of the caller that owns the run.
        let (tool_mode, pinned_tools) = self.tool_modes.resolve(
            &task.agent.agent_id,
            profile.tool_mode,
            profile.pinned_tools.as_deref(),
        );
        RunOptions {
            run_id: run_id.to_owned(),
            idempotency_prefix: Some(run_id.to_owned()),
            tools: profile.tools.clone(),
            tool_mode: Some(tool_mode),
            pinned_tools: Some(pinned_tools.to_vec()),
            limits: RunLimits {
                steps: limits.steps.unwrap_or(default.steps),
                calls: calls.unwrap_or(default.calls),
                tokens: lineage.budget.tokens.unwrap_or(default.tokens),
                time_ms: limits.ms.unwrap_or(default.time_ms).min(remaining_ms),
                ..default
            },
            model_request_policy: self.model_request_policy.clone(),
            user_id: task.call.origin.user_id.clone(),
            traceparent: Some(match &attempt.traceparent {
                Some(traceparent) => traceparent.to_string(),
                None => derived::call_traceparent(&task.call),
            }),
            depth: lineage.depth,
            ..RunOptions::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::fault::SideEffect;

    #[test]
    fn a_start_with_an_unknown_outcome_may_have_an_effect() {
        for (code, expected) in [
            (Code::OutcomeUnknown, SideEffect::Possible),
            (Code::Internal, SideEffect::Possible),
            (Code::ValidationError, SideEffect::None),
            (Code::PermissionDenied, SideEffect::None),
        ] {
            let fault = into_fault(Error::refused(code, "x"));
            assert_eq!((fault.side_effect, fault.retryable), (expected, false), "{code:?}");
        }
        let internal = into_fault(Error::Internal("x".into()));
        assert_eq!(internal.side_effect, SideEffect::Possible);
    }
}
