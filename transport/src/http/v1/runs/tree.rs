//! The tree of a run: the agents that it called, and those that they called.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use toolcrib::domain::agent::OnParentEnd;
use toolcrib::domain::fault::Fault;
use toolcrib::domain::run::{Run, RunBudget};
use toolcrib::domain::utp::Turn;
use toolcrib::runs::{RunTree, RunTreeNode, TreeMember, TreeUsage};
use utoipa::ToSchema;

use super::super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, NamePath};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wire::FaultBody;

/// The tree below a run.
#[derive(Serialize, ToSchema)]
pub(crate) struct RunTreeBody {
    /// First run or turn of the whole tree, which may be above this run.
    root_run_id: String,
    /// Number of runs in this tree.
    run_count: usize,
    /// Number of turns in this tree: the work of agents that workers drive.
    turn_count: usize,
    /// Number of runs and turns that have not ended.
    open_count: usize,
    #[serde(flatten)]
    #[schema(value_type = RunNodeBody)]
    node: TreeNodeBody,
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
    /// The parts of its own budget that open runs and turns below it have reserved.
    reserved: RunBudgetBody,
    /// Usage of the run itself.
    usage: TreeUsageBody,
    /// Usage of the run and everything below it.
    total: TreeUsageBody,
    answer: Option<String>,
    /// The card with its deliverable.
    deliverable_card_id: Option<String>,
    limit_reached: Option<&'static str>,
    error: Option<FaultBody>,
    created_at_ms: u64,
    completed_at_ms: Option<u64>,
    /// The runs and turns of the agents that it called.
    children: Vec<TreeNodeBody>,
}

/// One turn of a tree: the work of an agent that a worker drives.
#[derive(Serialize, ToSchema)]
pub(crate) struct TurnNodeBody {
    agent_turn_id: String,
    /// The agent that was called.
    agent_id: String,
    /// `dispatched`, `running`, `suspended`, `expired`, `finished` or `stopped`.
    status: &'static str,
    /// Number of agents above it.
    depth: u32,
    /// The call whose outcome the end of the turn is.
    tool_call_id: Option<String>,
    /// The run or turn that made the call.
    parent_id: Option<String>,
    /// `cancel` or `detach`.
    on_parent_end: &'static str,
    context_box_id: Option<String>,
    /// W3C `traceparent`: all runs and turns of a tree have the same trace.
    traceparent: Option<String>,
    /// The part of its caller's budget that it has reserved; a missing part is shared.
    budget: RunBudgetBody,
    /// The parts of its own budget that open runs and turns below it have reserved.
    reserved: RunBudgetBody,
    /// Usage of the turn itself: its calls, and the tokens that its worker reported.
    usage: TreeUsageBody,
    /// Usage of the turn and everything below it.
    total: TreeUsageBody,
    /// The card with its deliverable.
    deliverable_card_id: Option<String>,
    /// The reason for its end.
    reason: Option<String>,
    created_at_ms: u64,
    completed_at_ms: Option<u64>,
    /// The runs and turns of the agents that it called.
    #[schema(no_recursion)]
    children: Vec<TreeNodeBody>,
}

/// A run, or a turn, which has `agent_turn_id` instead of `run_id`.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TreeNodeBody {
    #[schema(no_recursion)]
    Run(Box<RunNodeBody>),
    Turn(Box<TurnNodeBody>),
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

/// The parts of a node that runs and turns share.
struct NodeParts {
    usage: TreeUsageBody,
    total: TreeUsageBody,
    reserved: RunBudgetBody,
    children: Vec<TreeNodeBody>,
}

impl From<RunTreeNode> for TreeNodeBody {
    fn from(node: RunTreeNode) -> Self {
        let parts = NodeParts {
            usage: node.usage.into(),
            total: node.total.into(),
            reserved: node.reserved.into(),
            children: node.children.into_iter().map(Self::from).collect(),
        };
        match node.member {
            TreeMember::Run(run) => Self::Run(Box::new(RunNodeBody::new(*run, parts))),
            TreeMember::Turn(turn) => Self::Turn(Box::new(TurnNodeBody::new(*turn, parts))),
        }
    }
}

impl RunNodeBody {
    fn new(run: Run, parts: NodeParts) -> Self {
        let NodeParts { usage, total, reserved, children } = parts;
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
            reserved,
            usage,
            total,
            answer: run.answer.as_ref().map(|answer| answer.text.clone()),
            deliverable_card_id: run.deliverable_card_id.clone(),
            limit_reached: run
                .answer
                .as_ref()
                .and_then(|answer| Some(answer.stop_reason?.as_str())),
            error: run.error.clone().map(|error| FaultBody::from(&Fault::from(error))),
            created_at_ms: run.created_ms,
            completed_at_ms: run.ended_ms,
            children,
            run_id: run.id,
            model: run.model,
        }
    }
}

impl TurnNodeBody {
    fn new(turn: Turn, parts: NodeParts) -> Self {
        let NodeParts { usage, total, reserved, children } = parts;
        let delegation = turn.delegation.as_deref();
        let lineage = delegation.map(|delegation| delegation.lineage.clone()).unwrap_or_default();
        let on_parent_end = match lineage.outlives_parent {
            true => OnParentEnd::Detach,
            false => OnParentEnd::Cancel,
        };
        Self {
            status: turn.status.as_str(),
            depth: turn.depth,
            tool_call_id: delegation.map(|delegation| delegation.call_id.clone()),
            parent_id: lineage.parent_id,
            on_parent_end: on_parent_end.as_str(),
            budget: RunBudgetBody { calls: lineage.calls, tokens: lineage.tokens },
            reserved,
            usage,
            total,
            created_at_ms: turn.created_ms,
            // The end is the last change of a turn.
            completed_at_ms: turn.status.is_terminal().then_some(turn.updated_ms),
            children,
            agent_turn_id: turn.turn_id,
            agent_id: turn.agent_id,
            context_box_id: turn.context_box_id,
            traceparent: turn.traceparent,
            deliverable_card_id: turn.deliverable_card_id,
            reason: turn.reason,
        }
    }
}

impl From<RunTree> for RunTreeBody {
    fn from(tree: RunTree) -> Self {
        Self {
            root_run_id: tree.root_run_id,
            run_count: tree.run_count,
            turn_count: tree.turn_count,
            open_count: tree.open_count,
            node: tree.node.into(),
        }
    }
}

/// Returns a run with the runs and turns of the agents that it called, and theirs.
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
