//! Tasks: a call seen through the extension `io.modelcontextprotocol/tasks`. The task id is the
//! call id, and the engine holds all of its state, so a task survives a restart.
//!
//! A tool that failed or timed out is a `completed` task with an error result, because the model
//! should read a tool's failure. `failed` is for faults of Toolcrib.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{DetailedTask, InputResponses, JsonObject, Task, TaskPayload, TaskStatus};
use serde_json::{Value, json};
use toolcrib::CallId;
use toolcrib::Engine;
use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::fault::Code;

use super::elicitation;
use crate::mcp::request::{CallerView, McpClientInfo, ProtocolRevision};
use crate::mcp::state::McpTransportState;
use crate::mcp::tool_result::{self, ResultFormat};

/// Poll interval that tasks recommend to MCP clients.
const POLL_INTERVAL_MS: u64 = 1_000;

/// Returns the call as a task, without its outcome.
pub(crate) fn to_task(shared: &McpTransportState, call: &Call) -> Task {
    let time = |ms: u64| {
        let timestamp = jiff::Timestamp::from_millisecond(ms as i64).unwrap_or_default();
        timestamp.to_string()
    };
    let updated_ms = call.completed_ms.or(call.started_ms).unwrap_or(call.created_ms);
    let mut task =
        Task::new(call.id.as_str(), task_status(call), time(call.created_ms), time(updated_ms))
            .with_poll_interval_ms(POLL_INTERVAL_MS)
            .with_status_message(status_message(&shared.engine, call));
    // A finished call is stored for this time.
    task.ttl_ms = shared.settings.retention_ms;
    task
}

fn task_status(call: &Call) -> TaskStatus {
    let code = call.outcome.as_ref().and_then(|o| o.error.as_ref()).map(|fault| fault.code);
    match (call.status, code) {
        (Status::Pending, _) if call.waits_for_approval() => TaskStatus::InputRequired,
        (Status::Pending | Status::Running, _) => TaskStatus::Working,
        (Status::Canceled, _) => TaskStatus::Cancelled,
        (Status::Failed, Some(Code::Internal)) => TaskStatus::Failed,
        (Status::Succeeded | Status::Failed | Status::Timeout, _) => TaskStatus::Completed,
    }
}

fn status_message(engine: &Engine, call: &Call) -> String {
    let fault = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
    match (call.status, fault) {
        (_, Some(fault)) => fault.to_string(),
        (Status::Pending, _) => {
            let reason = call.hold.map_or("queue", |hold| hold.as_str());
            let waits = format!("{} waits ({reason})", call.target.tool);
            let questions = call.elicitation.as_ref().filter(|_| call.waits_for_input());
            let answer = match questions {
                Some(elicitation) => format!(
                    "; it asks {}; POST /v1/tool_calls/{}/answer answers its questions",
                    tool_result::question_texts(&elicitation.unanswered),
                    call.id
                ),
                None => String::new(),
            };
            match engine.calls().describe_hold(call) {
                Some(detail) => format!("{waits}: {detail}{answer}"),
                None => waits + &answer,
            }
        }
        (Status::Running, _) => format!("{} is being executed", call.target.tool),
        _ => format!("{} is done", call.target.tool),
    }
}

/// Returns the task with its payload, as the response to `tasks/get`.
///
/// # Errors
/// There is no such task, or the engine refuses the request.
pub(crate) async fn get_task(
    shared: &McpTransportState,
    view: &CallerView,
    client: &McpClientInfo,
    task_id: &str,
) -> Result<DetailedTask, ErrorData> {
    let call = &find_call(shared, view, task_id).await?;
    let questions = match call.waits_for_approval() {
        true => elicitation::approval_requests(shared, call, &client.capabilities),
        false => elicitation::answerable_requests(call, &client.capabilities),
    };
    let payload = match task_status(call) {
        TaskStatus::Cancelled => TaskPayload::Cancelled,
        TaskStatus::Failed => TaskPayload::Failed { error: failure_payload(call) },
        TaskStatus::Completed => {
            TaskPayload::Completed { result: result_payload(shared, view, client, call).await }
        }
        _ if !questions.is_empty() || call.waits_for_approval() => {
            TaskPayload::InputRequired { input_requests: questions }
        }
        _ => TaskPayload::Working,
    };
    Ok(DetailedTask::new(to_task(shared, call), payload))
}

/// Submits the answers of `tasks/update`.
pub(crate) async fn update_task(
    shared: &McpTransportState,
    view: &CallerView,
    task_id: &str,
    responses: InputResponses,
) -> Result<(), ErrorData> {
    let call = find_call(shared, view, task_id).await?;
    let answers = elicitation::parse_answers(responses)?;
    if answers.is_empty() {
        return Ok(());
    }
    elicitation::submit_answers(shared, view, &call.id, answers).await
}

/// Cancels the call of a task. A task that has ended stays unchanged.
pub(crate) async fn cancel_task(
    shared: &McpTransportState,
    view: &CallerView,
    task_id: &str,
) -> Result<(), ErrorData> {
    let call = find_call(shared, view, task_id).await?;
    if call.status.is_terminal() {
        return Ok(());
    }
    match shared.engine.calls().cancel(&view.caller, &call.id, None).await {
        // The call may have ended meanwhile; the MCP client sees its outcome when it polls.
        Ok(_) => Ok(()),
        Err(error) if error.code() == Code::Conflict => Ok(()),
        Err(error) => Err(tool_result::protocol_error(error)),
    }
}

fn failure_payload(call: &Call) -> JsonObject {
    let fault = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
    let message = fault.map_or_else(String::new, |fault| fault.message.clone());
    into_object(json!({ "code": -32603, "message": message }))
}

async fn result_payload(
    shared: &McpTransportState,
    view: &CallerView,
    client: &McpClientInfo,
    call: &Arc<Call>,
) -> JsonObject {
    let tool = shared.engine.registry().tool(&view.caller, &call.tool_name).ok();
    let names = shared.name_form(view, None);
    let format =
        ResultFormat::new(tool.as_ref(), ProtocolRevision::Modern, names).for_client(client);
    let result = tool_result::ended_call_result(call, &format, shared.settings.result_tokens).await;
    into_object(serde_json::to_value(result).unwrap_or_default())
}

fn into_object(value: Value) -> JsonObject {
    match value {
        Value::Object(object) => object,
        _ => JsonObject::new(),
    }
}

/// Finds the call of a task id. A call that the caller may not see counts as missing.
async fn find_call(
    shared: &McpTransportState,
    view: &CallerView,
    task_id: &str,
) -> Result<Arc<Call>, ErrorData> {
    let excerpt: String = task_id.chars().take(80).collect();
    let unknown = || ErrorData::invalid_params(format!("there is no task \"{excerpt}\""), None);
    let id: CallId = task_id.parse().map_err(|_| unknown())?;
    shared.engine.calls().call(&view.caller, &id).await.map_err(|error| match error.code() {
        Code::NotFound => unknown(),
        _ => tool_result::protocol_error(error),
    })
}
