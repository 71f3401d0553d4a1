//! The source of the tools that hand work to agents.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use async_trait::async_trait;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::Delegation;
use super::definitions::{
    AskArgs, DelegateArgs, ForkJoinArgs, JoinMode, LaunchArgs, TargetStrategy, definitions,
};
use super::join::{Join, began_ms};
use crate::domain::call::Call;
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::{Executor, ToolDefinition};
use crate::domain::utp::delegation::join_ms;
use crate::lifecycle::Event;
use crate::ports::source::{Attempt, ProgressSink, Source, StartResult};

/// The part that the source acts through. Set once, when the engine is built.
pub(crate) type DelegationHandle = Arc<OnceLock<Weak<Delegation>>>;

/// Executes the tools that hand work to agents.
pub(crate) struct DelegationSource {
    handle: DelegationHandle,
    /// Joins that run in this process.
    joins: Arc<Mutex<HashMap<(CallId, u32), CancellationToken>>>,
}

impl DelegationSource {
    pub(crate) fn new(handle: DelegationHandle) -> Self {
        Self { handle, joins: Arc::default() }
    }

    /// Starts a join in the background. It reports its outcome itself.
    fn spawn_join(&self, delegation: Arc<Delegation>, call: Arc<Call>, work: JoinWork) {
        let (key, canceled) = ((call.id.clone(), call.attempt), CancellationToken::new());
        self.joins.lock().insert(key.clone(), canceled.clone());
        let (joins, tasks) = (self.joins.clone(), delegation.core.tasks.clone());
        tasks.spawn(async move {
            match work.build(&delegation, &call).await {
                Ok(join) => delegation.run_join(call, join, canceled).await,
                Err(fault) => {
                    let event = Event::Report {
                        attempt: Some(call.attempt),
                        by: Some("sys.pmo".to_owned()),
                        result: Err(fault),
                    };
                    delegation.dispatcher.advance_with_retry(&call.project, &call.id, event).await;
                }
            }
            joins.lock().remove(&key);
        });
    }
}

/// The arguments of a tool that waits for agents.
enum JoinWork {
    Fork(ForkJoinArgs),
    Question(AskArgs),
}

impl JoinWork {
    async fn build(self, delegation: &Delegation, call: &Call) -> Result<Join, Fault> {
        match self {
            Self::Fork(args) => delegation.build_fork(call, args).await,
            Self::Question(args) => {
                let task = DelegateArgs {
                    target_strategy: match args.include_history {
                        true => TargetStrategy::Clone,
                        false => TargetStrategy::New,
                    },
                    target_ref: args.expert_profile,
                    instruction: args.question,
                    context_box_id: None,
                };
                Ok(Join {
                    tasks: vec![delegation.resolve_task(call, 0, task).await?],
                    mode: JoinMode::All,
                    is_fail_fast: false,
                    deadline_ms: began_ms(call) + join_ms(None),
                    duration_ms: join_ms(None),
                    is_question: true,
                })
            }
        }
    }
}

fn parse_args<A: DeserializeOwned>(args: &Json) -> Result<A, Fault> {
    serde_json::from_str(args.text()).map_err(|error| {
        let message = format!("the arguments cannot be read: {error}");
        Fault::new(Code::ValidationError, message).without_side_effect()
    })
}

#[async_trait]
impl Source for DelegationSource {
    fn executor(&self) -> Executor {
        Executor::INTERNAL
    }

    fn list(&self) -> Vec<ToolDefinition> {
        definitions()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        let Some(delegation) = self.handle.get().and_then(Weak::upgrade) else {
            let fault = Fault::new(Code::Internal, "the engine is not built yet");
            return StartResult::Finished(Err(fault.without_side_effect()));
        };
        // A call that is no longer open has ended.
        let Some(entry) = delegation.dispatcher.open_calls.get(&attempt.call_id) else {
            return StartResult::Accepted;
        };
        let call = entry.call();
        let work = match attempt.tool.as_str() {
            "fork_join" => parse_args(&attempt.args).map(JoinWork::Fork),
            "ask_expert" => parse_args(&attempt.args).map(JoinWork::Question),
            _ => {
                let result = delegation.execute(&call, &attempt).await;
                let is_interrupted = result.is_err() && delegation.core.is_draining();
                // The next process delivers the call again.
                return match is_interrupted {
                    true => StartResult::Accepted,
                    false => StartResult::Finished(result),
                };
            }
        };
        match work {
            Ok(work) => {
                self.spawn_join(delegation, call, work);
                StartResult::Accepted
            }
            Err(fault) => StartResult::Finished(Err(fault)),
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(canceled) = self.joins.lock().remove(&(call_id.clone(), attempt)) {
            canceled.cancel();
        }
    }
}

impl Delegation {
    /// Executes a tool that waits for no agent.
    async fn execute(&self, call: &Call, attempt: &Attempt) -> Result<Json, Fault> {
        match attempt.tool.as_str() {
            "delegate_async" => self.delegate(call, parse_args(&attempt.args)?).await,
            "launch_principal" => {
                let args: LaunchArgs = parse_args(&attempt.args)?;
                let task = DelegateArgs {
                    target_strategy: TargetStrategy::New,
                    target_ref: args.profile_name,
                    instruction: args.instruction,
                    context_box_id: None,
                };
                self.delegate(call, task).await
            }
            "provision_agent" => self.provision(call, &attempt.args.to_value()).await,
            other => {
                let message = format!("this server has no internal tool \"{other}\"");
                Err(Fault::new(Code::ToolNotFound, message).without_side_effect())
            }
        }
    }
}
