//! The end of a run: the tool `run.finish`, with which a model ends its run, and the card that
//! holds the run's answer.

use std::sync::Weak;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::domain::fault::{Code, Fault};
use crate::domain::id::hex;
use crate::domain::run::Run;
use crate::domain::tool::{Effect, Risk};
use crate::domain::utp::card::{Card, TASK_DELIVERABLE, into_map};
use crate::domain::utp::{AfterExecution, trace};
use crate::ports::fn_tool::{FnTool, ToolContext};
use crate::registry::catalog::RUN_FINISH;
use crate::runs::Runs;
use crate::runs::agents::check_finish;
use crate::runs::read_result::RunsHandle;

#[derive(Debug, Deserialize, JsonSchema)]
struct RunFinishArgs {
    /// The complete final answer
    answer: String,
    /// Values of the result fields, if some were requested
    #[serde(default)]
    result_fields: Option<Map<String, Value>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RunFinishOutput {
    answer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_fields: Option<Map<String, Value>>,
    /// Ends the run
    #[serde(rename = "__cg_control")]
    control: RunControl,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RunControl {
    after_execution: &'static str,
}

/// Builds the tool `run.finish`.
///
/// Only a result of it ends the run, by its control field: the definition itself does not, so that
/// a model can correct a call that was refused or failed.
pub(crate) fn run_finish_tool(handle: RunsHandle) -> FnTool {
    let description = "Ends the run with this answer. Call it instead of answering in text when \
                       nothing is left to do.";
    let function = move |args: RunFinishArgs, context: ToolContext| {
        let runs = handle.get().and_then(Weak::upgrade);
        async move { finish_run(runs.as_deref(), args, &context).await }
    };
    FnTool::with_context(RUN_FINISH, description, function)
        .effect(Effect::Read)
        .risk(Risk::Low)
        .timeout_ms(10_000)
}

async fn finish_run(
    runs: Option<&Runs>,
    args: RunFinishArgs,
    context: &ToolContext,
) -> Result<RunFinishOutput, Fault> {
    if args.answer.trim().is_empty() && args.result_fields.is_none() {
        let message = "answer: there is none; give the final answer, or the result_fields";
        return Err(Fault::new(Code::ValidationError, message).without_side_effect());
    }
    if let Some(runs) = runs {
        // A conversation of OpenAI's API is no stored run, and declares no result fields.
        let run = runs.core.store.runs().run(&context.project, &context.run_id).await;
        let unread = |_| Fault::new(Code::Overloaded, "the run cannot be read; try again");
        if let Some(run) = run.map_err(unread)? {
            check_finish(&run, &args.answer, args.result_fields.as_ref())?;
        }
    }
    let after_execution = AfterExecution::Terminate.as_str();
    Ok(RunFinishOutput {
        answer: args.answer,
        result_fields: args.result_fields,
        control: RunControl { after_execution },
    })
}

/// Builds the card with the answer of a run that no result terminated. A run that is continued may
/// end again with another answer, so the id depends on the answer.
pub(crate) fn deliverable_card(run: &Run, steps: u32, answer: &str, now_ms: u64) -> Card {
    let seed = json!([run.project, run.id, steps, answer]).to_string();
    let trace_id = run.options.traceparent.as_deref().and_then(trace::parse).map(|(id, _)| id);
    Card {
        card_id: format!("deliverable_{}", hex(&Sha256::digest(seed.as_bytes())[..16])),
        project: run.project.clone(),
        kind: TASK_DELIVERABLE.to_owned(),
        content: into_map(json!({ "__type__": "TextContent", "text": answer })),
        created_ms: now_ms,
        author_id: run.owner.agent.clone(),
        metadata: into_map(json!({ "agent_turn_id": run.id, "trace_id": trace_id })),
        tool_calls: None,
        tool_call_id: None,
        ttl_seconds: None,
    }
}
