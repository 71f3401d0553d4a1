//! Executes calls of agents that external workers drive: each call hands a turn to the agent.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;

use crate::domain::agent::agent_tool_name;
use crate::domain::call::Call;
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::domain::utp::TurnLineage;
use crate::ports::source::{Attempt, StartResult};
use crate::utp::{EnqueueRequest, Utp};

/// Delay before the next attempt to hand over a turn that could not be stored.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Hands the calls of agents to the workers that drive them.
pub(crate) struct WorkerSource {
    utp: Weak<Utp>,
    /// Project of each attempt that was handed over.
    attempts: Mutex<HashMap<(CallId, u32), String>>,
}

impl WorkerSource {
    pub(crate) fn new(utp: &Arc<Utp>) -> Self {
        Self { utp: Arc::downgrade(utp), attempts: Mutex::default() }
    }
}

/// The part of a turn that comes from its place in the tree.
#[derive(Debug, Default)]
pub(crate) struct TurnStart {
    pub(crate) lineage: TurnLineage,
    /// Box of cards of the caller.
    pub(crate) context_box_id: Option<String>,
}

/// Reads the task from the arguments of a call of an agent.
fn read_task(attempt: &Attempt, start: TurnStart) -> EnqueueRequest {
    let args = attempt.args.to_value();
    let text = |name: &str| args[name].as_str().map(str::to_owned);
    let prefix = agent_tool_name("");
    EnqueueRequest {
        agent_id: attempt.tool.strip_prefix(&prefix).unwrap_or(&attempt.tool).to_owned(),
        instruction: text("instruction").unwrap_or_default(),
        context: args.get("context").filter(|context| **context != Value::Null).cloned(),
        context_box_id: text("context_box_id").or(start.context_box_id),
        lineage: start.lineage,
    }
}

/// Hands the turn over. Repeats that while the store is unavailable.
async fn enqueue(utp: &Utp, call: &Call, task: &EnqueueRequest) -> StartResult {
    loop {
        let error = match utp.enqueue_turn(call, task.clone()).await {
            Ok(_) => return StartResult::Accepted,
            Err(Error::Refused { fault, .. }) if fault.code != Code::Overloaded => {
                return StartResult::Finished(Err(fault.retryable(false)));
            }
            Err(error) => error,
        };
        tracing::warn!(call = %call.id, %error, "turn not handed over; will retry");
        tokio::select! {
            () = tokio::time::sleep(RETRY_DELAY) => {}
            () = utp.core.shutdown.cancelled() => return StartResult::Accepted,
        }
        if utp.dispatcher.open_calls.get(&call.id).is_none() {
            return StartResult::Accepted;
        }
    }
}

impl WorkerSource {
    /// Hands the turn of an attempt over. Its result arrives when the turn has ended.
    pub(crate) async fn start_turn(&self, attempt: Attempt, start: TurnStart) -> StartResult {
        // If the engine is gone, the next process starts the attempt again.
        let Some(utp) = self.utp.upgrade() else { return StartResult::Accepted };
        let Some(entry) = utp.dispatcher.open_calls.get(&attempt.call_id) else {
            return StartResult::Accepted;
        };
        let key = (attempt.call_id.clone(), attempt.number);
        self.attempts.lock().insert(key, attempt.project.clone());
        enqueue(&utp, &entry.call(), &read_task(&attempt, start)).await
    }

    /// Stops the turn of an attempt whose call has ended, in the background.
    pub(crate) fn stop_turn(&self, call_id: &CallId, attempt: u32) {
        let project = self.attempts.lock().get(&(call_id.clone(), attempt)).cloned();
        let (Some(project), Some(utp)) = (project, self.utp.upgrade()) else { return };
        let (tasks, call_id) = (utp.core.tasks.clone(), call_id.clone());
        tasks.spawn(async move { utp.stop_delegated_turn(&project, &call_id, attempt).await });
    }

    /// Forgets an attempt that is no longer in flight.
    pub(crate) fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        self.attempts.lock().remove(&(call_id.clone(), attempt));
    }
}
