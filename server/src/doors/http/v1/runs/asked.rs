//! What a run is asked for, field by field, so that nonsense is answered by its name.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use toolcrib::engine::NewRun;
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::model::Models;
use toolcrib::turn::{Acting, Limits};
use utoipa::ToSchema;

/// A conversation, and how it is carried on.
#[derive(Deserialize, ToSchema)]
pub(crate) struct RunBody {
    /// The model; unless said, the first that `GET /v1/models` lists.
    #[schema(value_type = Option<String>)]
    model: Option<Value>,
    /// The conversation so far, in OpenAI's chat form.
    #[schema(value_type = Vec<Object>)]
    messages: Option<Value>,
    /// Names and patterns (`weather.*`) of the tools it may use; unless said, all that the caller
    /// may call.
    #[schema(value_type = Option<Vec<String>>)]
    tools: Option<Value>,
    /// How calls are executed.
    #[schema(value_type = Option<PolicyBody>)]
    policy: Option<Value>,
    /// How far it may go.
    #[schema(value_type = Option<LimitsBody>)]
    limits: Option<Value>,
    /// What else goes into each request to the model: `temperature`, `max_tokens`, ….
    #[schema(value_type = Option<Object>)]
    settings: Option<Value>,
    /// Whether the answer is the run's events, as they happen.
    #[schema(value_type = Option<bool>)]
    stream: Option<Value>,
    /// Wait so long for its end.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<Value>,
    /// A label.
    #[schema(value_type = Option<String>)]
    user_id: Option<Value>,
    /// The same as the header `Idempotency-Key`.
    #[schema(value_type = Option<String>)]
    idempotency_key: Option<Value>,
}

/// How the calls of a run are executed.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct PolicyBody {
    /// `parallel` (unless said: those that only read side by side), `serial` or `unordered`.
    mode: Option<String>,
    max_parallel: Option<u32>,
    /// How long each call has; unless said, as long as its tool says.
    timeout_ms: Option<u64>,
    /// How many attempts may follow the first of each call.
    max_retries: Option<u32>,
    /// How long the model is kept waiting for its calls; what takes longer comes late.
    wait_ms: Option<u64>,
    /// How many tokens the results of one answer may have together: 8000 unless said.
    result_tokens: Option<u32>,
}

/// How far a run may go.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used; the engine's own type is read")]
pub(crate) struct LimitsBody {
    /// Answers of the model: 32 unless said.
    steps: Option<u32>,
    /// Calls of tools: 256 unless said.
    calls: Option<u32>,
    /// Calls in one answer: 64 unless said.
    calls_per_step: Option<u32>,
    /// Tokens of all requests and answers: 1,000,000 unless said.
    tokens: Option<u64>,
    /// How long it works: 600,000 unless said.
    time_ms: Option<u64>,
    /// How often the same call may have the same result: 3 unless said; 0 = any number.
    repeats: Option<u32>,
    /// Steps in a row in which every call fails: 4 unless said; 0 = any number.
    failures: Option<u32>,
}

fn invalid(field: &str, what: &str) -> Error {
    let fault = Fault::new(Code::ValidationError, format!("{field} {what}")).not_happened();
    fault.with_detail(json!({ "pointer": format!("/{field}") })).into()
}

/// A field of the body; null is the same as nothing.
fn field<T: DeserializeOwned>(
    name: &str,
    value: Option<&Value>,
    what: &str,
) -> Result<Option<T>, Error> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    let read = serde_path_to_error::deserialize(value.clone());
    read.map(Some).map_err(|error| {
        if !what.is_empty() {
            return invalid(name, what);
        }
        // Which of the fields in it: they are not told apart by what is wrong with them.
        let path = error.path().to_string();
        let place = if path == "." { name.to_owned() } else { format!("{name}/{path}") };
        invalid(&place.replace('.', "/"), &format!("cannot be read: {}", error.inner()))
    })
}

impl RunBody {
    pub(super) fn stream(&self) -> Result<bool, Error> {
        let stream = field("stream", self.stream.as_ref(), "must be true or false")?;
        Ok(stream.unwrap_or(false))
    }

    pub(super) fn wait_ms(&self) -> Result<Option<u64>, Error> {
        field("wait_ms", self.wait_ms.as_ref(), "must be a number of milliseconds")
    }

    pub(super) fn idempotency_key(&self) -> Result<Option<String>, Error> {
        field("idempotency_key", self.idempotency_key.as_ref(), "must be a text")
    }

    pub(super) fn read(&self, models: &dyn Models) -> Result<NewRun, Error> {
        let model = field("model", self.model.as_ref(), "must be a text")?;
        let model = model.or_else(|| models.names().into_iter().next());
        let list = "must be a list of messages";
        let messages: Option<Vec<Value>> = field("messages", self.messages.as_ref(), list)?;
        let tools = "must be a list of names and patterns of tools";
        let settings: Option<Map<String, Value>> =
            field("settings", self.settings.as_ref(), "must be an object")?;
        let settings = settings.unwrap_or_default();
        // These are the run's own to say.
        for taken in ["model", "messages", "tools", "stream", "stream_options", "n"] {
            if settings.contains_key(taken) {
                return Err(invalid(&format!("settings/{taken}"), "cannot be set here"));
            }
        }
        let limits: Option<Limits> = field("limits", self.limits.as_ref(), "")?;
        let acting: Option<Acting> = field("policy", self.policy.as_ref(), "")?;
        Ok(NewRun {
            model: model.ok_or_else(|| invalid("model", "is missing"))?,
            messages: messages.ok_or_else(|| invalid("messages", "is missing"))?,
            tools: field("tools", self.tools.as_ref(), tools)?,
            settings,
            limits: limits.unwrap_or_default(),
            acting: acting.unwrap_or_default(),
            user_id: field("user_id", self.user_id.as_ref(), "must be a text")?,
            ..NewRun::default()
        })
    }
}

/// What the user says.
#[derive(Deserialize, ToSchema)]
pub(crate) struct MessagesBody {
    /// In OpenAI's chat form.
    #[schema(value_type = Vec<Object>)]
    messages: Option<Value>,
    /// Wait so long for the run's end.
    #[schema(value_type = Option<u64>)]
    wait_ms: Option<Value>,
}

impl MessagesBody {
    pub(super) fn wait_ms(&self) -> Result<Option<u64>, Error> {
        field("wait_ms", self.wait_ms.as_ref(), "must be a number of milliseconds")
    }

    pub(super) fn messages(&self) -> Result<Vec<Value>, Error> {
        let messages = field("messages", self.messages.as_ref(), "must be a list of messages")?;
        messages.ok_or_else(|| invalid("messages", "is missing"))
    }
}
