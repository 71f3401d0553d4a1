//! Tools as Rust functions: the [`Tool`] trait, [`FnTool`], and the source that runs them.
//!
//! The schemas come from the argument and return types, so the schema that a model sees and the
//! arguments that the function accepts cannot diverge. A panic in a function fails that call, never
//! the process.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use foldhash::fast::RandomState;
use futures::FutureExt;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::domain::caller::{AuthMethod, CallerAttributes};
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::tool::{Effect, Executor, Fallback, Risk, ToolDefinition};
use crate::domain::trace::TraceParent;
use crate::domain::utp::{AfterExecution, Binding};
use crate::ports::source::{Attempt, AttemptProgress, ProgressSink, Source, StartResult};

/// The part of a call that its tool can see.
#[derive(Clone)]
pub struct ToolContext {
    /// Id of the call being executed.
    pub call_id: CallId,
    /// Project that the call belongs to.
    pub project: String,
    /// Run that the call belongs to.
    pub run_id: String,
    /// Agent that made the call.
    pub agent: String,
    /// Method that authenticated the agent.
    pub auth_method: AuthMethod,
    /// User, session and other attributes of the agent.
    pub attributes: Arc<CallerAttributes>,
    /// Number of the attempt within the call, from 1.
    pub attempt: u32,
    /// Deadline of the call, in Unix milliseconds.
    pub deadline_ms: u64,
    /// The span of the attempt. Requests that the tool sends join the trace if they carry it in the
    /// `traceparent` header.
    pub traceparent: Option<TraceParent>,
    /// Fires when the call was canceled or its deadline passed.
    pub canceled: CancellationToken,
    progress: ProgressSink,
}

impl ToolContext {
    /// Reports progress; the call's event stream shows it.
    pub fn report_progress(&self, progress: AttemptProgress) {
        (self.progress)(progress);
    }
}

/// A tool that runs in this process.
#[async_trait]
pub trait Tool: Send + Sync + 'static {
    /// Returns the tool's definition.
    fn definition(&self) -> ToolDefinition;

    /// Runs the tool on arguments that match its schema.
    async fn call(&self, args: Json, context: ToolContext) -> Result<Json, Fault>;
}

type ToolFuture = Pin<Box<dyn Future<Output = Result<Json, Fault>> + Send>>;
type ToolBody = Box<dyn Fn(Json, ToolContext) -> ToolFuture + Send + Sync>;

/// A tool made from a typed async function.
pub struct FnTool {
    definition: ToolDefinition,
    body: ToolBody,
}

impl FnTool {
    /// Creates a tool whose schemas are those of the function's argument and return types.
    pub fn new<A, R, E, F, Fut>(name: &str, description: &str, function: F) -> Self
    where
        A: DeserializeOwned + JsonSchema,
        R: Serialize + JsonSchema,
        E: Into<Fault>,
        F: Fn(A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
    {
        Self::with_context(name, description, move |args: A, _| function(args))
    }

    /// Creates a tool from a function that also takes the call's context.
    pub fn with_context<A, R, E, F, Fut>(name: &str, description: &str, function: F) -> Self
    where
        A: DeserializeOwned + JsonSchema,
        R: Serialize + JsonSchema,
        E: Into<Fault>,
        F: Fn(A, ToolContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
    {
        let body: ToolBody = Box::new(move |args, context| match parse_args(&args) {
            Ok(args) => {
                let answer = function(args, context);
                Box::pin(async move { to_json(&answer.await.map_err(Into::into)?) })
            }
            Err(fault) => Box::pin(async move { Err(fault) }),
        });
        let output = schemars::schema_for!(R).to_value();
        let says_something = |schema: &Value| {
            schema
                .as_object()
                .is_some_and(|map| map.keys().any(|key| key != "$schema" && key != "title"))
        };
        let definition = ToolDefinition {
            project: None,
            name: name.to_owned(),
            description: description.to_owned(),
            executor: Executor::BUILTIN,
            input_schema: Json::from_value(&schemars::schema_for!(A).to_value()),
            output_schema: says_something(&output).then(|| Json::from_value(&output)),
            timeout_ms: 30_000,
            background: false,
            effect: Effect::default(),
            risk: Risk::default(),
            policy: ExecutionPolicyPatch::default(),
            fallback: Vec::new(),
            metadata: None,
            binding: None,
        };
        Self { definition, body }
    }

    /// Sets the tool's side effect.
    pub fn effect(mut self, effect: Effect) -> Self {
        self.definition.effect = effect;
        self
    }

    /// Sets the tool's risk.
    pub fn risk(mut self, risk: Risk) -> Self {
        self.definition.risk = risk;
        self
    }

    /// Sets the default timeout of a call.
    pub fn timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.definition.timeout_ms = timeout_ms;
        self
    }

    /// Sets the time limit of each attempt of a call. By default, each attempt that may still
    /// follow gets an equal part of the remaining time.
    pub fn attempt_timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.definition.policy.attempt_timeout_ms = Some(timeout_ms);
        self
    }

    /// Makes its calls background tasks: a batch or an agent loop does not wait for them.
    pub fn background(mut self) -> Self {
        self.definition.background = true;
        self
    }

    /// Sets the tool's execution limits.
    pub fn policy(mut self, policy: ExecutionPolicyPatch) -> Self {
        let attempt_timeout_ms = self.definition.policy.attempt_timeout_ms;
        self.definition.policy = policy;
        self.definition.policy.attempt_timeout_ms =
            self.definition.policy.attempt_timeout_ms.or(attempt_timeout_ms);
        self
    }

    /// Sets the effect of a result on the run or turn that made the call. By default the run
    /// continues.
    pub fn after_execution(mut self, after_execution: AfterExecution) -> Self {
        self.definition.binding = Some(Binding {
            target_subject: None,
            after_execution,
            options: Json::empty_object(),
            parameters: None,
        });
        self
    }

    /// Sets the fallbacks, used when the tool certainly had no effect.
    pub fn fallback(mut self, fallbacks: Vec<Fallback>) -> Self {
        self.definition.fallback = fallbacks;
        self
    }
}

fn parse_args<A: DeserializeOwned>(args: &Json) -> Result<A, Fault> {
    serde_json::from_str(args.text()).map_err(|error| {
        Fault::new(Code::ValidationError, format!("the arguments cannot be read: {error}"))
            .without_side_effect()
    })
}

fn to_json<R: Serialize>(answer: &R) -> Result<Json, Fault> {
    Json::from_serialize(answer)
        .map_err(|error| Fault::runtime(format!("the result is not JSON: {error}")))
}

#[async_trait]
impl Tool for FnTool {
    fn definition(&self) -> ToolDefinition {
        self.definition.clone()
    }

    async fn call(&self, args: Json, context: ToolContext) -> Result<Json, Fault> {
        (self.body)(args, context).await
    }
}

/// The source of the tools that run in this process.
#[derive(Default)]
pub struct BuiltinSource {
    tools: HashMap<String, Arc<dyn Tool>, RandomState>,
    running: Mutex<HashMap<(CallId, u32), CancellationToken, RandomState>>,
}

impl BuiltinSource {
    /// Creates a source of these tools.
    pub fn new(tools: impl IntoIterator<Item = Arc<dyn Tool>>) -> Self {
        let tools = tools.into_iter().map(|tool| (tool.definition().name, tool)).collect();
        Self { tools, running: Mutex::default() }
    }
}

#[async_trait]
impl Source for BuiltinSource {
    fn executor(&self) -> Executor {
        Executor::BUILTIN
    }

    fn list(&self) -> Vec<ToolDefinition> {
        let mut tools: Vec<_> = self.tools.values().map(|tool| tool.definition()).collect();
        tools.sort_by(|a, b| a.name.cmp(&b.name));
        tools
    }

    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> StartResult {
        let Some(tool) = self.tools.get(&attempt.tool) else {
            let message = format!("this server has no built-in tool \"{}\"", attempt.tool);
            let fault = Fault::new(Code::ToolNotFound, message).without_side_effect();
            return StartResult::Finished(Err(fault));
        };
        let canceled = CancellationToken::new();
        let key = (attempt.call_id.clone(), attempt.number);
        self.running.lock().insert(key, canceled.clone());
        let context = ToolContext {
            call_id: attempt.call_id,
            project: attempt.project,
            run_id: attempt.run_id,
            agent: attempt.agent,
            auth_method: attempt.auth_method,
            attributes: attempt.attributes,
            attempt: attempt.number,
            deadline_ms: attempt.deadline_ms,
            traceparent: attempt.traceparent,
            canceled: canceled.clone(),
            progress,
        };
        let run = AssertUnwindSafe(async { tool.call(attempt.args, context).await });
        let result = tokio::select! {
            biased;
            result = run.catch_unwind() => result.unwrap_or_else(|panic| {
                Err(Fault::runtime(format!("the tool panicked: {}", panic_message(&*panic))))
            }),
            () = canceled.cancelled() => Err(Fault::new(Code::Canceled, "canceled")),
        };
        StartResult::Finished(result)
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(canceled) = self.running.lock().remove(&(call_id.clone(), attempt)) {
            canceled.cancel();
        }
    }

    fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        self.running.lock().remove(&(call_id.clone(), attempt));
    }
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
