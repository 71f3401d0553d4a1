//! OpenAI's chat completions API.

mod completion;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use toolcrib::registry::name_for_model;
use toolcrib::runs::SavedConversation;
use utoipa::ToSchema;

use super::super::HttpState;
use super::conversation::{ConversationRequest, Input, open_conversation};
use super::fields::RequestFields;
use crate::http::openai::chat::completion::CompletionFormat;
use crate::http::openai::error::{OpenAiError, OpenAiErrorBody, invalid_field};

/// Fields that are not forwarded to the model: those that this transport handles itself, and those
/// that it does not support.
const UNFORWARDED_CHAT_FIELDS: [&str; 8] = [
    "functions",
    "function_call",
    "store",
    "metadata",
    "logprobs",
    "top_logprobs",
    "modalities",
    "audio",
];

/// A chat completion request, in OpenAI's format.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct ChatBody {
    /// A model of `GET /v1/models`, or another one of the configured endpoint.
    model: String,
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    /// The caller's own functions; their calls are returned.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// True to receive the response as server-sent events.
    stream: Option<bool>,
    /// Options for Toolcrib: `tools` (names and patterns of its tools to offer; default: all that
    /// the caller may call), `tool_mode` (`auto`, `all`, `search` or `pinned`), `pinned_tools`,
    /// `run_id`, `limits`, `policy`, `wait_ms`, `rejoin` (false: never join the conversation of an
    /// earlier identical request).
    #[schema(value_type = Option<Object>)]
    toolcrib: Option<Value>,
}

/// Creates a chat completion.
///
/// Toolcrib executes calls of its own tools and returns calls of the caller's functions. It
/// forwards all other fields (`temperature`, `max_tokens`, …) to the model.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "models",
    request_body = ChatBody,
    responses(
        (status = 200, description = "A `chat.completion`, or its chunks as server-sent events",
            content((Object = "application/json"), (String = "text/event-stream"))),
        (status = 400, body = OpenAiErrorBody), (status = 401, body = OpenAiErrorBody),
        (status = 403, body = OpenAiErrorBody), (status = 404, body = OpenAiErrorBody),
        (status = 503, body = OpenAiErrorBody)
    ))]
pub(super) async fn complete(
    State(state): State<HttpState>,
    request: Request,
) -> Result<Response, OpenAiError> {
    let mut conversation_request =
        ConversationRequest::from_request(&state, request, "chat").await?;
    let fields = &mut conversation_request.fields;
    let model = fields.required_text("model")?;
    let messages =
        fields.list("messages")?.ok_or_else(|| invalid_field("messages", "is missing"))?;
    let tools = fields.list("tools")?.unwrap_or_default();
    let stream = fields.flag("stream")?;
    let with_usage = fields.take("stream_options").is_some_and(|o| o["include_usage"] == true);
    let extras = fields.toolcrib_options()?;
    check_fields(fields)?;
    let input = Input { instructions: None, messages, tools };
    let format = CompletionFormat { model: model.clone(), with_usage };
    let before = SavedConversation::default();
    let mut requester =
        Box::pin(open_conversation(&state, conversation_request, &model, before, input, extras))
            .await?;
    if stream {
        return crate::http::openai::chat::completion::stream_response(requester, format).await;
    }
    let end = requester.wait_for_end().await?;
    let response = match &*end {
        Ok(ending) => {
            let metadata = requester.metadata(ending);
            crate::http::openai::chat::completion::full_response(ending, &format, metadata)
        }
        Err(broken) => broken.to_response(),
    };
    Ok(requester.response_head().complete(response))
}

fn check_fields(fields: &mut RequestFields) -> Result<(), OpenAiError> {
    if fields.take("n").is_some_and(|n| n != 1) {
        return Err(invalid_field("n", "must be 1: only one choice is supported"));
    }
    for old in ["functions", "function_call"] {
        if fields.take(old).is_some() {
            return Err(invalid_field(old, "is not supported: use tools and tool_choice"));
        }
    }
    for name in UNFORWARDED_CHAT_FIELDS {
        fields.take(name);
    }
    if let Some(choice) = fields.0.get_mut("tool_choice") {
        normalize_tool_choice(choice);
    }
    Ok(())
}

/// Accepts the original name of a Toolcrib tool in `tool_choice`, too.
fn normalize_tool_choice(choice: &mut Value) {
    let function = choice.get_mut("function").and_then(Value::as_object_mut);
    let name = |function: &Map<String, Value>| function.get("name")?.as_str().map(name_for_model);
    if let Some(function) = function
        && let Some(name) = name(function)
    {
        function.insert("name".into(), json!(name));
    }
}
