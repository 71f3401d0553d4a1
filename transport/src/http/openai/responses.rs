//! OpenAI's Responses API, in its basic form: input, tools, `function_call_output`, streaming, and
//! continuation of a previous response (`previous_response_id`).

mod items;
mod response;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::registry::name_for_model;
use toolcrib::runs::SavedConversation;
use utoipa::ToSchema;

use super::super::HttpState;
use super::conversation::{ConversationRequest, Input, open_conversation};
use super::fields::RequestFields;
use crate::http::openai::error::{OpenAiError, OpenAiErrorBody, invalid_field};
use crate::http::openai::responses::response::{ResponseBuilder, ResponseTarget};

/// Fields that are not forwarded to the model.
const UNFORWARDED_RESPONSE_FIELDS: [&str; 8] = [
    "metadata",
    "include",
    "truncation",
    "stream_options",
    "background",
    "max_tool_calls",
    "top_logprobs",
    "context_management",
];

/// A request for a response, in OpenAI's format.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct ResponsesBody {
    /// A model of `GET /v1/models`, or another one of the configured endpoint.
    model: String,
    /// A text, or items: messages, `function_call`, `function_call_output`.
    #[schema(value_type = Object)]
    input: Value,
    /// The system message.
    instructions: Option<String>,
    /// The caller's own functions; their calls are returned.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// The response to continue from.
    previous_response_id: Option<String>,
    /// True (default) to store this response, so that a later request can continue from it.
    store: Option<bool>,
    /// True to receive the response as server-sent events.
    stream: Option<bool>,
    /// Options for Toolcrib, as in chat completions.
    #[schema(value_type = Option<Object>)]
    toolcrib: Option<Value>,
}

/// Creates a response, as chat completions do, in the format of OpenAI's Responses API.
#[utoipa::path(post, path = "/v1/responses", tag = "models",
    request_body = ResponsesBody,
    responses(
        (status = 200, description = "A `response`, or its events as server-sent events",
            content((Object = "application/json"), (String = "text/event-stream"))),
        (status = 400, body = OpenAiErrorBody), (status = 401, body = OpenAiErrorBody),
        (status = 403, body = OpenAiErrorBody), (status = 404, body = OpenAiErrorBody),
        (status = 503, body = OpenAiErrorBody)
    ))]
pub(super) async fn create_response(
    State(state): State<HttpState>,
    request: Request,
) -> Result<Response, OpenAiError> {
    let mut conversation_request =
        ConversationRequest::from_request(&state, request, "responses").await?;
    let fields = &mut conversation_request.fields;
    let model = fields.required_text("model")?;
    let mut builder = ResponseBuilder::new(&model, &fields.0);
    let input = fields.take("input").ok_or_else(|| invalid_field("input", "is missing"))?;
    let messages = items::to_messages(input)?;
    let instructions = fields.text("instructions")?;
    let tools = items::to_chat_tools(fields.list("tools")?.unwrap_or_default())?;
    let stream = fields.flag("stream")?;
    builder.store = fields.take("store").is_none_or(|store| store != false);
    builder.has_instructions = instructions.is_some();
    let extras = fields.toolcrib_options()?;
    let previous = fields.text("previous_response_id")?;
    translate_settings(fields)?;
    let before = match previous {
        None => SavedConversation::default(),
        Some(id) => state
            .engine
            .runs()
            .conversations()
            .load(&conversation_request.caller, &id)
            .await?
            .ok_or_else(|| response_not_found(&id))?,
    };
    let model_input = Input { instructions, messages, tools };
    let target = ResponseTarget {
        engine: state.engine.clone(),
        caller: conversation_request.caller.clone(),
    };
    let requester = Box::pin(open_conversation(
        &state,
        conversation_request,
        &model,
        before,
        model_input,
        extras,
    ))
    .await?;
    if stream {
        return response::stream_response(requester, builder, target).await;
    }
    response::full_response(requester, builder, target).await
}

fn response_not_found(id: &str) -> OpenAiError {
    let excerpt: String = id.chars().filter(|c| !c.is_control()).take(80).collect();
    let detail = json!({ "pointer": "/previous_response_id",
        "code": "previous_response_not_found" });
    let message = format!("there is no response \"{excerpt}\" to continue from");
    Fault::new(Code::NotFound, message).without_side_effect().with_detail(detail).into()
}

/// Translates the settings of this API into those of chat completions.
fn translate_settings(fields: &mut RequestFields) -> Result<(), OpenAiError> {
    if fields.0.get("background") == Some(&Value::Bool(true)) {
        return Err(invalid_field(
            "background",
            "is not supported: POST /v1/runs runs in the background",
        ));
    }
    for unknown in ["conversation", "prompt"] {
        if fields.take(unknown).is_some() {
            return Err(invalid_field(unknown, "is not supported"));
        }
    }
    for name in UNFORWARDED_RESPONSE_FIELDS {
        fields.take(name);
    }
    if let Some(max_tokens) = fields.take("max_output_tokens") {
        fields.0.insert("max_completion_tokens".into(), max_tokens);
    }
    if let Some(effort) =
        fields.take("reasoning").and_then(|mut r| r.get_mut("effort").map(Value::take))
    {
        fields.0.insert("reasoning_effort".into(), effort);
    }
    if let Some(text) = fields.take("text") {
        if let Some(format) = text.get("format").and_then(response_format) {
            fields.0.insert("response_format".into(), format);
        }
        if let Some(verbosity) = text.get("verbosity").filter(|verbosity| !verbosity.is_null()) {
            fields.0.insert("verbosity".into(), verbosity.clone());
        }
    }
    if let Some(Value::Object(choice)) = fields.0.get("tool_choice") {
        let name = choice.get("name").and_then(Value::as_str);
        let Some(name) = name.filter(|_| choice.get("type") == Some(&json!("function"))) else {
            return Err(invalid_field("tool_choice", "must be auto, none, required or a function"));
        };
        let choice = json!({ "type": "function", "function": { "name": name_for_model(name) } });
        fields.0.insert("tool_choice".into(), choice);
    }
    Ok(())
}

fn response_format(format: &Value) -> Option<Value> {
    match format.get("type").and_then(Value::as_str) {
        Some("json_schema") => {
            let mut inner: Map<String, Value> = format.as_object()?.clone();
            inner.remove("type");
            Some(json!({ "type": "json_schema", "json_schema": inner }))
        }
        Some("json_object") => Some(json!({ "type": "json_object" })),
        _ => None,
    }
}
