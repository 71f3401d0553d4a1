//! Runs: the agent loop, its driver and journal, and the context of a run.

pub(crate) mod active;
pub mod agent_loop;
pub(crate) mod agents;
pub(crate) mod caller_executed;
pub mod context;
pub(crate) mod conversations;
pub(crate) mod driver;
pub(crate) mod finish;
pub(crate) mod handoff;
pub(crate) mod manage;
pub(crate) mod read_result;
pub(crate) mod rejoin;
pub(crate) mod replay;
pub(crate) mod run_context;
pub(crate) mod stream;
pub(crate) mod subscribers;
use std::sync::Arc;

use active::ActiveRuns;

use crate::calls::{Calls, Dispatcher};
use crate::domain::run::options::ModelRequestPolicy;
use crate::domain::tool::tool_mode::ToolModeSettings;
use crate::ports::core::Core;
use crate::ports::model::ModelResolver;
pub use crate::ports::store::undelivered::UndeliveredRequest;
use crate::registry::Registry;
use crate::runs::context::ResultListener;
use crate::utp::Utp;

pub use active::StartedRun;
pub use agents::{RunTree, RunTreeNode, RunTrees, TreeMember, TreeUsage};
pub use caller_executed::{MAX_RECORDED, ReportedCall, ReportedResult};
pub use conversations::{
    ConversationCheckpoint, Conversations, EndedConversation, SavedConversation,
};
pub use manage::{RunPage, RunQuery, RunRequest};
pub use read_result::{CallResults, ResultForModel};
pub use replay::{ReplayDifference, ReplayReport};
pub use run_context::{CONTEXT_CALL_LIMITS, MessageFormat, RunContexts, RunToolSelection};
pub use stream::{ActiveConversation, RunStreams};
pub use subscribers::{RunDelta, RunSubscription};

/// Runs of agents: one stored agent loop each.
pub struct Runs {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) models: Arc<dyn ModelResolver>,
    /// Name of the model that summarizes long results.
    pub(crate) summary_model: Option<String>,
    pub(crate) model_request_policy: ModelRequestPolicy,
    /// Settings of the tool definitions that models receive.
    pub(crate) tool_modes: ToolModeSettings,
    /// Listeners for the results of every run.
    pub(crate) result_listeners: Vec<ResultListener>,
    pub(crate) active_runs: Arc<ActiveRuns>,
    pub(crate) streams: Arc<RunStreams>,
    pub(crate) trees: RunTrees,
    pub(crate) utp: Arc<Utp>,
    pub(crate) contexts: Arc<RunContexts>,
    pub(crate) results: CallResults,
    pub(crate) conversations: Conversations,
}

impl Runs {
    /// Returns the language models that are configured.
    pub fn models(&self) -> &Arc<dyn ModelResolver> {
        &self.models
    }

    /// Returns the events and deltas of runs.
    pub fn streams(&self) -> &RunStreams {
        &self.streams
    }

    /// Returns the trees that runs and the agents that they called form.
    pub fn trees(&self) -> &RunTrees {
        &self.trees
    }

    /// Returns the contexts of runs: their tools, their calls and the results.
    pub fn contexts(&self) -> &Arc<RunContexts> {
        &self.contexts
    }

    /// Returns the results of calls, in slices and as models receive them.
    pub fn results(&self) -> &CallResults {
        &self.results
    }

    /// Returns the conversations behind responses of OpenAI's API.
    pub fn conversations(&self) -> &Conversations {
        &self.conversations
    }

    /// Returns the default policy for model requests and their retries.
    pub fn model_request_policy(&self) -> &ModelRequestPolicy {
        &self.model_request_policy
    }
}
