//! The source that runs the fixture tools.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolcrib::dialogue::Questions;
use toolcrib::directory::Others;
use toolcrib::engine::Registration;
use toolcrib::source::{Attempt, ProgressSink, Source, Started};
use toolcrib::{CallId, Caller, Code, Definition, Engine, Executor, Fault, Json, Progress};

use super::shelf;
use super::tools::{self, IMAGE, SOUND, form, object};

/// The fixture tools.
pub struct Fixtures {
    engine: OnceLock<Engine>,
    shelf: Arc<shelf::Fixtures>,
    running: Mutex<HashMap<CallId, CancellationToken>>,
}

impl Fixtures {
    /// Tools beside this shelf.
    pub fn new(shelf: Arc<shelf::Fixtures>) -> Self {
        Self { engine: OnceLock::new(), shelf, running: Mutex::default() }
    }

    /// One of the tools changes the list of tools while it is looked at.
    pub fn can_change_the_directory_of(&self, engine: Engine) {
        let _ = self.engine.set(engine);
    }

    async fn run(&self, attempt: &Attempt, progress: &ProgressSink) -> Result<Started, Fault> {
        let args = attempt.args.value();
        if let Some(asks) = asks(&attempt.tool, &args, attempt) {
            return Ok(Started::Asks(asks));
        }
        let wait = || tokio::time::sleep(Duration::from_millis(50));
        let result = match attempt.tool.as_str() {
            "test_simple_text" => text("This is a simple text response for testing."),
            "test_image_content" => {
                content(json!([{ "type": "image", "data": IMAGE, "mimeType": "image/png" }]))
            }
            "test_audio_content" => {
                content(json!([{ "type": "audio", "data": SOUND, "mimeType": "audio/wav" }]))
            }
            "test_embedded_resource" => content(json!([embedded()])),
            "test_multiple_content_types" => content(json!([
                { "type": "text", "text": "Multiple content types test:" },
                { "type": "image", "data": IMAGE, "mimeType": "image/png" },
                { "type": "resource", "resource": { "uri": "test://mixed-content-resource",
                    "mimeType": "application/json", "text": "{\"test\":\"data\",\"value\":123}" } },
            ])),
            "test_tool_with_logging" | "test_logging_tool" => {
                for said in ["started", "processing data", "completed"] {
                    progress(logged(&format!("Tool execution {said}")));
                    wait().await;
                }
                text("Logged")
            }
            "test_tool_with_progress" => {
                for percent in [0.0, 50.0, 100.0] {
                    let percent = Some(percent);
                    progress(Progress { percent, ..Progress::default() });
                    wait().await;
                }
                text("Progress was reported")
            }
            "test_error_handling" => {
                let mut result = text("This tool intentionally returns an error for testing");
                result["isError"] = true.into();
                result
            }
            "greet" => text(&format!("Hello, {}!", args["name"].as_str().unwrap_or_default())),
            "slow_compute" => self.slow(attempt, &args).await?,
            "failing_job" => return Err(Fault::runtime("the job failed").retryable(false)),
            "protocol_error_job" => {
                let fault = Fault::new(Code::Internal, "the crib itself failed");
                return Err(fault.retryable(false));
            }
            "test_trigger_tool_change" => self.change_tools().await?,
            "test_trigger_prompt_change" => {
                self.shelf.change_prompts();
                text("Changed")
            }
            _ => self.answered(attempt).await,
        };
        Ok(Started::Done(Ok(Json::of_value(&result))))
    }

    /// What was asked is known now.
    async fn answered(&self, attempt: &Attempt) -> Value {
        if attempt.tool == "test_tool_with_task" {
            // Long enough to become a task.
            tokio::time::sleep(Duration::from_millis(800)).await;
        }
        let answers = attempt.dialogue.as_ref().map(|dialogue| dialogue.answers.clone());
        let answers = Value::Object(answers.unwrap_or_default());
        let state = attempt.dialogue.as_ref().and_then(|dialogue| dialogue.note.as_deref());
        let state = state.map_or("no state", |_| "state-ok");
        text(&format!("Answered ({state}): {answers}"))
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

    /// Another tool each time.
    async fn change_tools(&self) -> Result<Value, Fault> {
        let Some(engine) = self.engine.get() else { return Ok(text("Not ready")) };
        let name = format!("test_dynamic_tool_{}", engine.directory_version());
        let schema = Json::of_value(&json!({ "type": "object" }));
        let tool = Definition {
            project: Some("default".to_owned()),
            executor: Executor::Client,
            name,
            input_schema: schema,
            ..tools::all().swap_remove(0)
        };
        let (client_id, others) = ("dynamic".to_owned(), Others::Withdraw);
        let registration = Registration { client_id, tools: vec![tool], others };
        let made = engine.register(&Caller::local("default"), registration).await;
        made.map_err(|error| Fault::runtime(error.to_string()))?;
        Ok(text("Changed"))
    }
}

/// What the tool has to ask before it can go on.
fn asks(tool: &str, args: &Value, attempt: &Attempt) -> Option<Questions> {
    let first = tools::questions(tool, args)?;
    let dialogue = attempt.dialogue.as_deref();
    let heard = |key: &String| dialogue.is_some_and(|dialogue| dialogue.answers.contains_key(key));
    let note = dialogue.and_then(|dialogue| dialogue.note.as_deref());
    if tool == "test_input_required_result_multi_round" && note == Some("first") {
        let fields = json!({ "color": { "type": "string" } });
        let step = form("Step 2: What is your favorite color?", fields, &["color"]);
        let asked = object(json!({ "step2": step }));
        return Some(Questions { asked, note: Some("second".to_owned()) });
    }
    if note == Some("second") || first.asked.keys().all(heard) {
        return None;
    }
    Some(first)
}

fn content(content: Value) -> Value {
    json!({ "content": content, "isError": false })
}

fn text(text: &str) -> Value {
    content(json!([{ "type": "text", "text": text }]))
}

fn embedded() -> Value {
    json!({ "type": "resource", "resource": {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    } })
}

fn logged(message: &str) -> Progress {
    let log = json!({ "log": { "level": "info", "logger": "fixtures", "data": message } });
    Progress { data: Some(log), ..Progress::default() }
}

#[async_trait]
impl Source for Fixtures {
    fn executor(&self) -> Executor {
        Executor::Mcp
    }

    fn list(&self) -> Vec<Definition> {
        tools::all()
    }

    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> Started {
        match self.run(&attempt, &progress).await {
            Ok(started) => started,
            Err(fault) => Started::Done(Err(fault)),
        }
    }

    fn cancel(&self, call_id: &CallId, _attempt: u32) {
        if let Some(canceled) = self.running.lock().remove(call_id) {
            canceled.cancel();
        }
    }

    fn settled(&self, call_id: &CallId, _attempt: u32) {
        self.running.lock().remove(call_id);
    }
}
