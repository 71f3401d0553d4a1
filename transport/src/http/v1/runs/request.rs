//! Request bodies of runs. Fields are parsed one by one, so that an error names the invalid field.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::run::options::{ExecutionOptions, RunLimits};
use toolcrib::ports::model::ModelResolver;
use toolcrib::runs::RunRequest;
use utoipa::ToSchema;

use crate::http::extract::{find_unknown_fields, refuse_unknown_fields};

/// A conversation to run, and the options of the run.
#[derive(Deserialize, ToSchema)]
pub(crate) struct RunBody {
    /// The model (default: the first that `GET /v1/models` lists).
    #[schema(value_type = Option<String>)]
    model: Option<Value>,
    /// The conversation so far, in OpenAI's chat format.
    #[schema(value_type = Vec<Object>)]
    messages: Option<Value>,
    /// Names and patterns (`weather.*`) of the tools that the run may use (default: all that the
    /// caller may call).
    #[schema(value_type = Option<Vec<String>>)]
    tools: Option<Value>,
    /// Tool definitions that the model receives: `auto` (all of them up to a threshold, else
    /// `search`), `all`, `search` (the pinned ones, those that the run has used or found, and a
    /// tool search) or `pinned` (default: the agent's setting).
    #[schema(value_type = Option<String>)]
    tool_mode: Option<Value>,
    /// Names and patterns of the tools that every request offers in the modes `search` and `pinned`
    /// (default: the agent's setting).
    #[schema(value_type = Option<Vec<String>>)]
    pinned_tools: Option<Value>,
    /// Execution of the calls.
    #[schema(value_type = Option<PolicyBody>)]
    policy: Option<Value>,
    /// Limits of the run.
    #[schema(value_type = Option<LimitsBody>)]
    limits: Option<Value>,
    /// Further fields of each request to the model: `temperature`, `max_tokens`, ….
    #[schema(value_type = Option<Object>)]
    settings: Option<Value>,
    /// True to receive the run's events as a stream.
    #[schema(value_type = Option<bool>)]
    stream: Option<Value>,
    /// Maximum time to wait for the end of the run, in milliseconds.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<Value>,
    /// A label.
    #[schema(value_type = Option<String>)]
    user_id: Option<Value>,
    /// Box of cards that gives the run, and the agents that it calls, their context.
    #[schema(value_type = Option<String>)]
    context_box_id: Option<Value>,
    /// The same as the header `Idempotency-Key`.
    #[schema(value_type = Option<String>)]
    idempotency_key: Option<Value>,
    /// False if the request never joins an earlier identical run whose answer was not delivered
    /// (default: true).
    #[schema(value_type = Option<bool>)]
    rejoin: Option<Value>,
}

/// Execution of the calls of a run.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct PolicyBody {
    /// `parallel` (default: read-only tools run concurrently), `serial` or `unordered`.
    mode: Option<String>,
    max_parallel: Option<u32>,
    /// Time limit of each call in milliseconds (default: that of its tool).
    timeout_ms: Option<u64>,
    /// Time limit of each attempt of a call in milliseconds.
    attempt_timeout_ms: Option<u64>,
    /// Maximum number of retries of each call.
    max_retries: Option<u32>,
    /// Maximum time the model waits for the calls of one step, in milliseconds. Results that take
    /// longer are delivered to it later.
    wait_ms: Option<u64>,
    /// Maximum number of tokens of all results of one step together (default: 8000).
    result_tokens: Option<u32>,
}

/// Limits of a run.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct LimitsBody {
    /// Maximum number of model responses (default: 32).
    steps: Option<u32>,
    /// Maximum number of tool calls (default: 256).
    calls: Option<u32>,
    /// Maximum number of calls in one model response (default: 64).
    calls_per_step: Option<u32>,
    /// Maximum number of tokens of all requests and responses (default: 1,000,000).
    tokens: Option<u64>,
    /// Maximum working time in milliseconds (default: 600,000).
    time_ms: Option<u64>,
    /// Maximum number of times the same call may return the same result (default: 3; 0 =
    /// unlimited).
    repeats: Option<u32>,
    /// Maximum number of consecutive steps in which every call fails (default: 4; 0 = unlimited).
    failures: Option<u32>,
}

fn invalid_field(field: &str, message: &str) -> Error {
    let fault =
        Fault::new(Code::ValidationError, format!("{field} {message}")).without_side_effect();
    fault.with_detail(json!({ "pointer": format!("/{field}") })).into()
}

/// Parses a field of the body; null counts as absent.
fn parse_field<T: DeserializeOwned>(
    name: &str,
    value: Option<&Value>,
    expected: &str,
) -> Result<Option<T>, Error> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    let read = serde_path_to_error::deserialize(value.clone());
    read.map(Some).map_err(|error| {
        if !expected.is_empty() {
            return invalid_field(name, expected);
        }
        // Names the nested field as well: serde's message alone does not identify it.
        let path = error.path().to_string();
        let field = if path == "." { name.to_owned() } else { format!("{name}/{path}") };
        invalid_field(&field.replace('.', "/"), &format!("cannot be read: {}", error.inner()))
    })
}

impl RunBody {
    pub(super) fn stream(&self) -> Result<bool, Error> {
        let stream = parse_field("stream", self.stream.as_ref(), "must be true or false")?;
        Ok(stream.unwrap_or(false))
    }

    pub(super) fn rejoin(&self) -> Result<bool, Error> {
        let rejoin = parse_field("rejoin", self.rejoin.as_ref(), "must be true or false")?;
        Ok(rejoin.unwrap_or(true))
    }

    pub(super) fn wait_ms(&self) -> Result<Option<u64>, Error> {
        parse_field("wait_ms", self.wait_ms.as_ref(), "must be a number of milliseconds")
    }

    pub(super) fn idempotency_key(&self) -> Result<Option<String>, Error> {
        parse_field("idempotency_key", self.idempotency_key.as_ref(), "must be a text")
    }

    /// Refuses unknown fields of the nested objects.
    fn check_nested_fields(&self) -> Result<(), Error> {
        let mut unknown = Vec::new();
        if let Some(limits) = &self.limits {
            unknown.extend(find_unknown_fields::<RunLimits>(limits, "/limits"));
        }
        if let Some(policy) = &self.policy {
            unknown.extend(find_unknown_fields::<ExecutionOptions>(policy, "/policy"));
        }
        refuse_unknown_fields(&unknown)
    }

    pub(super) fn to_new_run(&self, models: &dyn ModelResolver) -> Result<RunRequest, Error> {
        self.check_nested_fields()?;
        let model = parse_field("model", self.model.as_ref(), "must be a text")?;
        let model = model.or_else(|| models.names().into_iter().next());
        let list = "must be a list of messages";
        let messages: Option<Vec<Value>> = parse_field("messages", self.messages.as_ref(), list)?;
        let tools = "must be a list of names and patterns of tools";
        let settings: Option<Map<String, Value>> =
            parse_field("settings", self.settings.as_ref(), "must be an object")?;
        let settings = settings.unwrap_or_default();
        // The run sets these fields itself.
        for reserved in ["model", "messages", "tools", "stream", "stream_options", "n"] {
            if settings.contains_key(reserved) {
                return Err(invalid_field(&format!("settings/{reserved}"), "cannot be set here"));
            }
        }
        let limits: Option<RunLimits> = parse_field("limits", self.limits.as_ref(), "")?;
        let acting: Option<ExecutionOptions> = parse_field("policy", self.policy.as_ref(), "")?;
        Ok(RunRequest {
            model: model.ok_or_else(|| invalid_field("model", "is missing"))?,
            messages: messages.ok_or_else(|| invalid_field("messages", "is missing"))?,
            tools: parse_field("tools", self.tools.as_ref(), tools)?,
            tool_mode: parse_field(
                "tool_mode",
                self.tool_mode.as_ref(),
                "must be auto, all, search or pinned",
            )?,
            pinned_tools: parse_field("pinned_tools", self.pinned_tools.as_ref(), tools)?,
            settings,
            limits: limits.unwrap_or_default(),
            execution_options: acting.unwrap_or_default(),
            user_id: parse_field("user_id", self.user_id.as_ref(), "must be a text")?,
            context_box_id: parse_field(
                "context_box_id",
                self.context_box_id.as_ref(),
                "must be a text",
            )?,
            ..RunRequest::default()
        })
    }
}

/// User messages to add to a run.
#[derive(Deserialize, ToSchema)]
pub(crate) struct MessagesBody {
    /// Messages in OpenAI's chat format.
    #[schema(value_type = Vec<Object>)]
    messages: Option<Value>,
    /// Maximum time to wait for the end of the run, in milliseconds.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<Value>,
}

impl MessagesBody {
    pub(super) fn wait_ms(&self) -> Result<Option<u64>, Error> {
        parse_field("wait_ms", self.wait_ms.as_ref(), "must be a number of milliseconds")
    }

    pub(super) fn messages(&self) -> Result<Vec<Value>, Error> {
        let messages =
            parse_field("messages", self.messages.as_ref(), "must be a list of messages")?;
        messages.ok_or_else(|| invalid_field("messages", "is missing"))
    }
}
