//! The definitions of the tools that hand work to agents, and their arguments.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::tool::{Effect, Executor, Risk, ToolDefinition};
use crate::domain::utp::delegation::{
    DEFAULT_JOIN_SECONDS, JOIN_GRACE_MS, MAX_JOIN_SECONDS, MAX_JOIN_TASKS,
};

/// Selects the earlier work that the agent of a task continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TargetStrategy {
    /// The agent begins without earlier work.
    New,
    /// The agent continues from its earlier exchanges with the caller.
    Reuse,
    /// A copy of the agent continues from those exchanges.
    Clone,
}

/// Arguments of `delegate_async`, and one task of `fork_join`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct DelegateArgs {
    pub(super) target_strategy: TargetStrategy,
    pub(super) target_ref: String,
    pub(super) instruction: String,
    #[serde(default)]
    pub(super) context_box_id: Option<String>,
}

/// Arguments of `launch_principal`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct LaunchArgs {
    pub(super) profile_name: String,
    pub(super) instruction: String,
}

/// Arguments of `ask_expert`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct AskArgs {
    pub(super) expert_profile: String,
    pub(super) question: String,
    #[serde(default)]
    pub(super) include_history: bool,
}

/// The tasks that a join waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum JoinMode {
    /// All of them.
    #[default]
    All,
    /// The first that succeeds; the others are canceled.
    Any,
}

/// Arguments of `fork_join`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ForkJoinArgs {
    pub(super) tasks: Vec<DelegateArgs>,
    #[serde(default)]
    pub(super) fail_fast: bool,
    #[serde(default)]
    pub(super) deadline_seconds: Option<f64>,
    #[serde(default)]
    pub(super) join: JoinMode,
}

fn text(description: &str) -> Value {
    json!({ "type": "string", "minLength": 1, "description": description })
}

fn task_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "target_strategy": {
                "type": "string",
                "enum": ["new", "reuse", "clone"],
                "description": "new: the agent begins without earlier work; reuse: it continues \
                                from your earlier exchanges with it; clone: a copy of it does",
            },
            "target_ref": text("Id of the agent"),
            "instruction":
                text("The task, complete: the agent sees nothing of this conversation"),
            "context_box_id": {
                "type": ["string", "null"],
                "description": "A box of cards that the agent reads",
            },
        },
        "required": ["target_strategy", "target_ref", "instruction"],
        "additionalProperties": false,
    })
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

/// Returns the definitions of the five tools.
pub(super) fn definitions() -> Vec<ToolDefinition> {
    let wait_ms = DEFAULT_JOIN_SECONDS * 1_000 + JOIN_GRACE_MS;
    let instruction = "The task, complete: the agent sees nothing of this conversation";
    vec![
        define(
            "delegate_async",
            "Hands a task to another agent and returns at once with its call_id. The result of the \
             agent arrives later; do not wait for it.",
            task_schema(),
            60_000,
        ),
        define(
            "launch_principal",
            "Starts an agent on a task of its own and returns at once with its call_id.",
            object(
                json!({
                    "profile_name": text("Id of the agent"),
                    "instruction": text(instruction),
                }),
                &["profile_name", "instruction"],
            ),
            60_000,
        ),
        define(
            "ask_expert",
            "Asks an agent a question and waits for its answer.",
            object(
                json!({
                    "expert_profile": text("Id of the agent"),
                    "question": text("The question, complete: the agent sees nothing of this \
                                      conversation"),
                    "include_history": {
                        "type": "boolean",
                        "description": "Pass your earlier exchanges with this agent on",
                    },
                }),
                &["expert_profile", "question"],
            ),
            wait_ms,
        ),
        define(
            "fork_join",
            "Gives tasks to several agents at once and waits for all of them. At the deadline it \
             returns the results that are in, and cancels the rest.",
            fork_join_schema(),
            wait_ms,
        ),
        define(
            "provision_agent",
            "Defines an agent. A refusal is a result with status \"rejected\" and the reason.",
            provision_schema(),
            60_000,
        ),
    ]
}

fn fork_join_schema() -> Value {
    object(
        json!({
            "tasks": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_JOIN_TASKS,
                "items": task_schema(),
                "description": "One task per agent",
            },
            "fail_fast": {
                "type": ["boolean", "null"],
                "description": "End with the first failure, and cancel the other tasks",
            },
            "deadline_seconds": {
                "type": ["number", "null"],
                "exclusiveMinimum": 0,
                "maximum": MAX_JOIN_SECONDS,
                "description": "Time for all tasks together; default: 900",
            },
            "join": {
                "type": "string",
                "enum": ["all", "any"],
                "description": "all: wait for every task; any: for the first that succeeds",
            },
        }),
        &["tasks"],
    )
}

fn provision_schema() -> Value {
    let optional = |description: &str| json!({ "type": "string", "description": description });
    object(
        json!({
            "action": {
                "type": "string",
                "description": "ensure: define the agent unless it exists; create: define a new \
                                one; derive: define one from another agent",
            },
            "agent_id": optional("Id of the agent: letters, digits, '_' and '-'"),
            "derived_from": optional("For derive: id of the agent to start from"),
            "profile_name": optional("Id of an agent whose profile is the starting point"),
            "profile": {
                "type": "object",
                "description": "instructions, model, tools, tool_mode, pinned_tools, limits \
                                {steps, calls, tokens, ms, depth} and result_fields; what it \
                                omits comes from the starting point",
            },
            "worker_target": optional("Target of wakeups, if an external worker drives the agent"),
            "display_name": optional("Name for people"),
        }),
        // No field is required by the schema: the tool itself refuses a missing field, with a
        // message for the model.
        &[],
    )
}

fn define(name: &str, description: &str, schema: Value, timeout_ms: u64) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: name.to_owned(),
        description: description.to_owned(),
        executor: Executor::INTERNAL,
        input_schema: Json::from_value(&schema),
        output_schema: None,
        timeout_ms,
        background: false,
        effect: Effect::Irreversible,
        risk: Risk::Medium,
        policy: ExecutionPolicyPatch::default(),
        fallback: Vec::new(),
        metadata: None,
        binding: None,
    }
}
