//! The end of an agent's run: its result is the outcome of the call, and the agents that it called
//! are canceled or continue.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::run_id_for;
use crate::domain::agent::{OnParentEnd, ResultField};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::run::{Run, RunLineage, RunStatus};
use crate::domain::tool::Executor;
use crate::lifecycle::{Event, split_warning};
use crate::ports::core::from_store_error;
use crate::runs::Runs;
use crate::utp::trees::OpenChild;

/// Reason of the cancellation of a call whose caller has ended.
const PARENT_ENDED: &str = "the run that called this agent has ended";

/// Returns the result of the call that an ended run answers.
pub(super) fn agent_result(run: &Run) -> Result<Json, Fault> {
    let agent = run.lineage.as_ref().map_or("", |lineage| lineage.agent_id.as_str());
    let with_run = |fault: Fault| {
        let detail = json!({ "run_id": run.id, "agent_id": agent });
        let fault = Fault { detail: fault.detail.or(Some(detail)), ..fault }.retryable(false);
        match run.progress.is_harmless() {
            true => fault.without_side_effect(),
            false => fault,
        }
    };
    match run.status {
        RunStatus::Succeeded => {
            let fields = run.lineage.as_ref().map_or(&[][..], |lineage| &lineage.result_fields);
            let answer = run.answer.as_ref().map_or("", |answer| answer.text.as_str());
            let ended_by = run.answer.as_ref().and_then(|answer| answer.terminated_by.as_ref());
            let typed = ended_by.and_then(|call| call.result_fields.as_ref()?.as_object());
            if !fields.is_empty() {
                let result = match typed {
                    Some(typed) => check_result_fields(agent, typed, fields)
                        .map(|()| Json::from_value(&Value::Object(typed.clone()))),
                    None => read_result_fields(agent, answer, fields),
                };
                return result.map_err(with_run);
            }
            let mut data = json!({ "answer": answer, "run_id": run.id });
            if let Some(limit) = run.answer.as_ref().and_then(|answer| answer.stop_reason) {
                data["limit_reached"] = limit.as_str().into();
            }
            Ok(Json::from_value(&data))
        }
        RunStatus::Canceled => {
            let message = format!("the run of agent \"{agent}\" was canceled");
            Err(with_run(Fault::new(Code::Canceled, message)))
        }
        _ => {
            let fault = run.error.clone().map(Fault::from);
            let fault = fault.unwrap_or_else(|| Fault::new(Code::RuntimeError, "no reason given"));
            let (reason, _) = split_warning(&fault.message);
            let message = format!("agent \"{agent}\" failed: {reason}");
            Err(with_run(Fault { message, ..fault }))
        }
    }
}

/// Reads the fields of a result from an agent's answer.
fn read_result_fields(agent: &str, answer: &str, fields: &[ResultField]) -> Result<Json, Fault> {
    let names = || fields.iter().map(|field| field.name.as_str()).collect::<Vec<_>>().join(", ");
    let Some(Value::Object(all)) = find_json_object(answer) else {
        let excerpt: String = answer.chars().take(200).collect();
        let message = format!(
            "the answer of agent \"{agent}\" is no JSON object with the fields {}; it begins: \
             {excerpt}",
            names()
        );
        return Err(Fault::new(Code::ValidationError, message));
    };
    check_result_fields(agent, &all, fields)?;
    Ok(Json::from_value(&Value::Object(all)))
}

/// Checks the values of an agent's result.
fn check_result_fields(
    agent: &str,
    all: &Map<String, Value>,
    fields: &[ResultField],
) -> Result<(), Fault> {
    for field in fields {
        let problem = match (all.get(&field.name), field.kind.as_deref()) {
            (None, _) if field.required => "is missing".to_owned(),
            (Some(value), Some(kind)) if !has_type(value, kind) => format!("is not of type {kind}"),
            _ => continue,
        };
        let message = format!(
            "the result of agent \"{agent}\" does not match its result fields: {} {problem}",
            field.name
        );
        let detail = json!({ "pointer": format!("/{}", field.name) });
        return Err(Fault::new(Code::ValidationError, message).with_detail(detail));
    }
    Ok(())
}

/// Returns the JSON object that a text consists of, also in a code block or after other text.
fn find_json_object(text: &str) -> Option<Value> {
    let trimmed = text.trim();
    if let Ok(value) = serde_json::from_str(trimmed) {
        return Some(value);
    }
    let (start, end) = (trimmed.find('{')?, trimmed.rfind('}')?);
    serde_json::from_str(trimmed.get(start..=end)?).ok()
}

fn has_type(value: &Value, kind: &str) -> bool {
    match kind {
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0)
        }
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        _ => true,
    }
}

/// Checks the answer and the typed values with which a model ends its run, so that it can correct
/// them.
pub(crate) fn check_finish(
    run: &Run,
    answer: &str,
    values: Option<&Map<String, Value>>,
) -> Result<(), Fault> {
    let Some(lineage) = run.lineage.as_ref().filter(|lineage| !lineage.result_fields.is_empty())
    else {
        return Ok(());
    };
    let (agent, fields) = (lineage.agent_id.as_str(), &lineage.result_fields);
    match values {
        Some(values) => check_result_fields(agent, values, fields),
        None => read_result_fields(agent, answer, fields).map(drop),
    }
}

impl Runs {
    /// Acts on the committed end of a run: reports the result of its call, and cancels the agents
    /// that it called, except those that continue without it ([`OnParentEnd`]).
    pub(crate) fn handle_run_end(self: &Arc<Self>, run: &Run) {
        let children = self.utp.trees.budgets.open_children(run);
        self.utp.trees.budgets.drop_if_ended(run);
        if run.lineage.is_some() {
            let (runs, run) = (self.clone(), run.clone());
            self.core.tasks.spawn(async move { runs.report_agent_result(&run).await });
        }
        if run.progress.calls > 0 {
            // Cancel the agents that the run called and that have not started yet.
            let (utp, run) = (self.utp.clone(), run.clone());
            self.core.tasks.spawn(async move {
                let is_own = |call: &Call| call.origin.agent == run.owner.agent;
                utp.cancel_called_agents(&run.project, &run.id, is_own).await;
            });
        }
        for child in children {
            if child.on_parent_end == OnParentEnd::Cancel {
                self.spawn_child_cancel(&run.project, child);
            }
        }
    }

    /// Reports the end of an agent's run as the outcome of its call, unless the call has ended.
    async fn report_agent_result(self: &Arc<Self>, run: &Run) {
        let Some(RunLineage { call_id, attempt, .. }) = run.lineage.as_deref() else { return };
        let Some(entry) = self.dispatcher.open_calls.get(call_id) else { return };
        let call = entry.call();
        if call.status.is_terminal() || call.attempt != *attempt {
            return;
        }
        let event = if run.status == RunStatus::Canceled {
            let reason = Some("the run of the agent was canceled".to_owned());
            Event::Cancel { by: run.owner.agent.clone(), reason }
        } else {
            self.dispatcher.prepare_output_schema(&call).await;
            let result = self.dispatcher.validate_result(&call, agent_result(run));
            Event::Report { attempt: Some(*attempt), by: None, result }
        };
        self.dispatcher.advance_with_retry(&run.project, call_id, event).await;
    }

    /// Cancels the call of an open child, if it is open, and stops the child's run.
    fn spawn_child_cancel(self: &Arc<Self>, project: &str, child: OpenChild) {
        let (runs, project) = (self.clone(), project.to_owned());
        self.core.tasks.spawn(async move {
            if runs.dispatcher.open_calls.get(&child.call_id).is_some() {
                let reason = Some(PARENT_ENDED.to_owned());
                let event = Event::Cancel { by: "toolcrib".to_owned(), reason };
                runs.dispatcher.advance_with_retry(&project, &child.call_id, event).await;
            }
            // The end of the call stops the run too. Stop it here as well, in case the call had
            // ended before.
            runs.stop_child_run(&project, &child.run_id, PARENT_ENDED).await;
        });
    }

    /// Stops the run of a call that has ended, in the background.
    pub(super) fn stop_agent(self: &Arc<Self>, call_id: &CallId) {
        let run_id = run_id_for(call_id);
        let Some(project) = self.utp.trees.budgets.project_of(&run_id) else { return };
        let runs = self.clone();
        self.core.tasks.spawn(async move {
            runs.stop_child_run(&project, &run_id, "the call of the agent has ended").await;
        });
    }

    async fn stop_child_run(self: &Arc<Self>, project: &str, run_id: &str, reason: &str) {
        let caller = Caller { agent: "toolcrib".to_owned(), ..Caller::local(project) };
        let stopped = self.stop_run(&caller, run_id, Some(reason.to_owned())).await;
        if let Err(error) = stopped
            && !matches!(error.code(), Code::Conflict | Code::NotFound)
        {
            tracing::warn!(%error, run_id, "an agent's run was not stopped");
        }
    }

    /// Returns true if a call is that of an agent that continues after its caller's end.
    pub(crate) fn is_detached_agent(&self, call: &Call) -> bool {
        if call.target.executor != Executor::AGENT {
            return false;
        }
        match self.active_runs.get(&call.project, &run_id_for(&call.id)) {
            Some(active) => active.on_parent_end == Some(OnParentEnd::Detach),
            // A worker drives the agent, or it has not started.
            None => self.utp.outlives_caller(call),
        }
    }

    /// Returns true if the run or turn that called an agent's run has ended.
    async fn has_parent_ended(&self, run: &Run) -> Result<bool, Error> {
        let Some(lineage) = run.lineage.as_deref() else { return Ok(false) };
        if let Some(turn_id) = &lineage.parent_turn_id {
            let turn = self.utp.find_turn(&run.project, turn_id).await?;
            return Ok(turn.is_none_or(|turn| turn.status.is_terminal()));
        }
        let Some(parent_id) = &lineage.parent_run_id else { return Ok(false) };
        let parent = self.core.store.runs().run(&run.project, parent_id).await;
        let parent = parent.map_err(from_store_error)?;
        Ok(parent.is_none_or(|parent| parent.status.is_terminal()))
    }

    /// Ends agents' runs whose call or whose parent ended while no process could act on it.
    pub(crate) async fn reconcile_agent_run(self: &Arc<Self>, run: &Run) -> Result<(), Error> {
        let Some(lineage) = run.lineage.as_deref() else { return Ok(()) };
        if self.dispatcher.open_calls.get(&lineage.call_id).is_none() {
            let call = self.core.store.call(&run.project, &lineage.call_id).await;
            let call = call.map_err(from_store_error)?;
            if call.is_none_or(|call| call.status.is_terminal()) {
                self.stop_agent(&lineage.call_id);
                return Ok(());
            }
        }
        if lineage.on_parent_end == OnParentEnd::Cancel && self.has_parent_ended(run).await? {
            let child = OpenChild {
                run_id: run.id.clone(),
                call_id: lineage.call_id.clone(),
                on_parent_end: lineage.on_parent_end,
            };
            self.spawn_child_cancel(&run.project, child);
        }
        Ok(())
    }
}
