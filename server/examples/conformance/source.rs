//! The source of the conformance server: the upstream MCP server, and the local tools.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolcrib::domain::call::elicitation::ElicitationRequest;
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib::{AttemptProgress, CallId, Code, Executor, Fault, Json, ToolDefinition};
use toolcrib_sources::mcp::McpSource;

use super::tools::{self, SUITE};

/// Dispatches attempts to the upstream or to the local tools.
pub struct Tools {
    behind: Arc<McpSource>,
    own_tools: Vec<String>,
    running: Mutex<HashMap<CallId, CancellationToken>>,
}

impl Tools {
    /// Creates the source with this upstream.
    pub fn new(behind: Arc<McpSource>) -> Self {
        let own_tools = tools::own_tools().into_iter().map(|tool| tool.name).collect();
        Self { behind, own_tools, running: Mutex::default() }
    }

    async fn run(&self, attempt: &Attempt, progress: &ProgressSink) -> Result<StartResult, Fault> {
        let args = attempt.args.to_value();
        let name = attempt.tool.strip_prefix(SUITE).and_then(|rest| rest.strip_prefix('.'));
        let name = name.unwrap_or_default();
        if let Some(asks) = asks(name, &args, attempt) {
            return Ok(StartResult::NeedsInput(asks));
        }
        let result = match name {
            "test_tool_with_logging" | "test_logging_tool" => {
                for message in ["started", "processing data", "completed"] {
                    progress(logged(&format!("Tool execution {message}")));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                text("Logged")
            }
            "slow_compute" => self.slow(attempt, &args).await?,
            "failing_job" => return Err(Fault::runtime("the job failed").retryable(false)),
            "protocol_error_job" => {
                let fault = Fault::new(Code::Internal, "Toolcrib itself failed");
                return Err(fault.retryable(false));
            }
            _ => answered(name, attempt).await,
        };
        Ok(StartResult::Finished(Ok(Json::from_value(&result))))
    }

    async fn slow(&self, attempt: &Attempt, args: &Value) -> Result<Value, Fault> {
        let canceled = CancellationToken::new();
        self.running.lock().insert(attempt.call_id.clone(), canceled.clone());
        let seconds = args["seconds"].as_f64().unwrap_or(1.0).clamp(0.0, 100.0);
        tokio::select! {
            () = canceled.cancelled() => Err(Fault::new(Code::Canceled, "canceled")),
            () = tokio::time::sleep(Duration::from_secs_f64(seconds)) => {
                Ok(text(&format!("Computed for {seconds} s: {}", args["label"])))
            }
        }
    }
}

/// Returns the result of a tool once its requests are answered.
async fn answered(name: &str, attempt: &Attempt) -> Value {
    if name == "test_tool_with_task" {
        // Long enough to become a task.
        tokio::time::sleep(Duration::from_millis(800)).await;
    }
    let answers = attempt.elicitation.as_ref().map(|elicitation| elicitation.answers.clone());
    text(&format!("Answered: {}", Value::Object(answers.unwrap_or_default())))
}

/// Returns the input requests of a tool that are not all answered yet.
fn asks(tool: &str, args: &Value, attempt: &Attempt) -> Option<ElicitationRequest> {
    let questions = tools::questions(tool, args)?;
    let elicitation = attempt.elicitation.as_deref();
    let is_answered =
        |key: &String| elicitation.is_some_and(|elicitation| elicitation.answers.contains_key(key));
    let open = !questions.keys().all(is_answered);
    open.then(|| ElicitationRequest { questions, source_state: Some("first".to_owned()) })
}

fn text(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": false })
}

fn logged(message: &str) -> AttemptProgress {
    let log = json!({ "log": { "level": "info", "logger": "fixtures", "data": message } });
    AttemptProgress { data: Some(log), ..AttemptProgress::default() }
}

#[async_trait]
impl Source for Tools {
    fn executor(&self) -> Executor {
        Executor::MCP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        tools::own_tools()
    }

    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> StartResult {
        if !self.own_tools.contains(&attempt.tool) {
            return self.behind.start(attempt, progress).await;
        }
        match self.run(&attempt, &progress).await {
            Ok(started) => started,
            Err(fault) => StartResult::Finished(Err(fault)),
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.behind.cancel(call_id, attempt);
        if let Some(canceled) = self.running.lock().remove(call_id) {
            canceled.cancel();
        }
    }

    fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        self.behind.release_attempt(call_id, attempt);
        self.running.lock().remove(call_id);
    }
}
