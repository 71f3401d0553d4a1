//! The tree of a run: the agents that it called, and those that they called.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use toolcrib::domain::fault::Fault;
use toolcrib::domain::run::RunBudget;
use toolcrib::runs::{RunTree, RunTreeNode, TreeUsage};
use utoipa::ToSchema;

use super::super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, NamePath};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wire::FaultBody;

/// The tree below a run.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunTreeBody {
    /// First run of the whole tree, which may be above this one.
    root_run_id: String,
    /// Number of runs in this tree.
    run_count: usize,
    /// Number of those that have not ended.
    open_count: usize,
    #[serde(flatten)]
    node: RunNodeBody,
}

/// One run of a tree.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunNodeBody {
    run_id: String,
    /// The agent that was called; null for a run that no call of an agent started.
    agent_id: Option<String>,
    agent_version: Option<u64>,
    status: &'static str,
    model: String,
    /// Number of agents above it.
    depth: u32,
    /// The call whose outcome the end of the run is.
    tool_call_id: Option<String>,
    parent_run_id: Option<String>,
    /// `cancel` or `detach`.
    on_parent_end: Option<&'static str>,
    context_box_id: Option<String>,
    /// W3C `traceparent`: all runs of a tree have the same trace.
    traceparent: Option<String>,
    /// The part of its caller's budget that it has reserved; a missing part is shared.
    budget: Option<RunBudgetBody>,
    /// The parts of its own budget that open runs below it have reserved.
    reserved: RunBudgetBody,
    /// Usage of the run itself.
    usage: TreeUsageBody,
    /// Usage of the run and everything below it.
    total: TreeUsageBody,
    answer: Option<String>,
    limit_reached: Option<&'static str>,
    error: Option<FaultBody>,
    created_at_ms: u64,
    completed_at_ms: Option<u64>,
    /// The runs of the agents that it called.
    #[schema(no_recursion)]
    children: Vec<RunNodeBody>,
}

/// Parts of a budget.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunBudgetBody {
    calls: Option<u64>,
    tokens: Option<u64>,
}

impl From<RunBudget> for RunBudgetBody {
    fn from(budget: RunBudget) -> Self {
        Self { calls: budget.calls, tokens: budget.tokens }
    }
}

/// Usage of a run or of a tree.
#[derive(Serialize, ToSchema)]
pub(crate) struct TreeUsageBody {
    steps: u64,
    calls: u64,
    tokens: u64,
}

impl From<TreeUsage> for TreeUsageBody {
    fn from(usage: TreeUsage) -> Self {
        Self { steps: usage.steps, calls: usage.calls, tokens: usage.tokens }
    }
}

impl From<RunTreeNode> for RunNodeBody {
    fn from(node: RunTreeNode) -> Self {
        let RunTreeNode { run, usage, total, reserved, children } = node;
        let lineage = run.lineage.as_deref();
        Self {
            agent_id: lineage.map(|lineage| lineage.agent_id.clone()),
            agent_version: lineage.map(|lineage| lineage.agent_version),
            status: run.status.as_str(),
            depth: lineage.map_or(0, |lineage| lineage.depth),
            tool_call_id: lineage.map(|lineage| lineage.call_id.to_string()),
            parent_run_id: lineage.and_then(|lineage| lineage.parent_run_id.clone()),
            on_parent_end: lineage.map(|lineage| lineage.on_parent_end.as_str()),
            context_box_id: run.context_box_id.clone(),
            traceparent: run.options.traceparent.clone(),
            budget: lineage.map(|lineage| lineage.budget.into()),
            reserved: reserved.into(),
            usage: usage.into(),
            total: total.into(),
            answer: run.answer.as_ref().map(|answer| answer.text.clone()),
            limit_reached: run
                .answer
                .as_ref()
                .and_then(|answer| Some(answer.stop_reason?.as_str())),
            error: run.error.clone().map(|error| FaultBody::from(&Fault::from(error))),
            created_at_ms: run.created_ms,
            completed_at_ms: run.ended_ms,
            children: children.into_iter().map(Self::from).collect(),
            run_id: run.id,
            model: run.model,
        }
    }
}

impl From<RunTree> for RunTreeBody {
    fn from(tree: RunTree) -> Self {
        Self {
            root_run_id: tree.root_run_id,
            run_count: tree.run_count,
            open_count: tree.open_count,
            node: tree.node.into(),
        }
    }
}

/// Returns a run with all runs below it: the agents that it called, and those that they called.
#[utoipa::path(get, path = "/v1/runs/{run_id}/tree", tag = "runs",
    params(("run_id" = String, Path, description = "The run")),
    responses((status = 200, body = RunTreeBody), (status = 404, body = ProblemDetails)))]
pub(crate) async fn show_tree(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
) -> Result<Json<RunTreeBody>, ApiError> {
    Ok(Json(state.engine.runs().trees().find_tree(&caller, &run_id).await?.into()))
}
