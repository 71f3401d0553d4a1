//! OpenAI's chat completions API, which most endpoints implement, always requested as a stream.

use std::borrow::Cow;
use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::HeaderMap;
use serde_json::{Map, Value, json};
use toolcrib::domain::model_reply::{FinishReason, ModelReply, TokenUsage, ToolCallRequest};
use toolcrib::model_formats::MEDIA_MESSAGE_PREFIX;
use toolcrib::ports::model::{Delta, DeltaListener, Model, ModelError, ModelRequest};

use crate::models::endpoint_client::{
    EndpointClient, KeyHeader, ModelEndpoint, ModelResponse, ReplyAssembler,
};

/// The field of a choice that holds a complete, unstreamed reply.
const MESSAGE_FIELD: &str = "message";

/// A model behind the chat completions API.
pub struct OpenAiModel {
    client: EndpointClient,
}

impl OpenAiModel {
    /// Returns a model of this endpoint.
    pub fn new(endpoint: ModelEndpoint) -> Self {
        Self { client: EndpointClient::new(endpoint) }
    }

    fn request(&self, prompt: &ModelRequest) -> Vec<u8> {
        let mut body = prompt.settings.clone();
        let limited = ["max_tokens", "max_completion_tokens"].iter().any(|k| body.contains_key(*k));
        if let (Some(max_tokens), false) = (self.client.endpoint.max_tokens, limited) {
            body.insert("max_tokens".into(), max_tokens.into());
        }
        if prompt.tools.is_empty() {
            // Endpoints refuse tool settings in a request without tools.
            body.remove("tool_choice");
            body.remove("parallel_tool_calls");
        } else {
            body.remove("tools");
        }
        body.insert("model".into(), prompt.model.clone().into());
        body.insert("messages".into(), prompt.chat_messages().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({ "include_usage": true }));
        body.remove("n");
        let mut text = Value::Object(body).to_string();
        if !prompt.tools.is_empty() {
            // The tools are JSON texts already, which many requests share.
            let tools: Vec<&str> = prompt.tools.iter().map(|tool| tool.text()).collect();
            text.truncate(text.len() - 1);
            text.push_str(&format!(",\"tools\":[{}]}}", tools.join(",")));
        }
        text.into_bytes()
    }
}

#[async_trait]
impl Model for OpenAiModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let path = "/chat/completions";
        let post =
            async |body| self.client.post(path, HeaderMap::new(), KeyHeader::Bearer, body).await;
        let answer = match (post(self.request(prompt)).await, without_tool_media(prompt)) {
            // A model without vision refuses images of tools; the texts of the results remain.
            (Err(error), Some(text_only)) if is_refused_request(&error) => {
                post(self.request(&text_only)).await?
            }
            (answer, _) => answer?,
        };
        let redactor = self.client.key_redactor(listener);
        let listener = |delta| redactor.push(delta);
        let reply = match answer.is_stream() {
            true => answer.read_events(OpenAiReplyAssembler::new(&self.client), &listener).await?,
            false => read_complete_reply(&self.client, answer, &listener).await?,
        };
        Ok(redactor.finish(reply))
    }
}

/// Returns whether an endpoint refused the request itself.
fn is_refused_request(error: &ModelError) -> bool {
    let status = error.fault.detail.as_ref().map(|detail| &detail["http_status"]);
    status.is_some_and(|status| *status == 400 || *status == 415 || *status == 422)
}

/// Returns the request without the messages that carry media of tool results; `None` if it has
/// none.
fn without_tool_media(prompt: &ModelRequest) -> Option<ModelRequest> {
    let carries_media = |message: &Value| {
        let text = message["content"][0]["text"].as_str();
        message["role"] == "user" && text.is_some_and(|text| text.starts_with(MEDIA_MESSAGE_PREFIX))
    };
    if !prompt.messages.iter().any(carries_media) {
        return None;
    }
    let mut text_only = prompt.clone();
    text_only.messages.retain(|message| !carries_media(message));
    Some(text_only)
}

/// Reads the reply of an endpoint that does not stream.
async fn read_complete_reply(
    client: &EndpointClient,
    answer: ModelResponse<'_>,
    listener: DeltaListener<'_>,
) -> Result<ModelReply, ModelError> {
    let body = answer.read_json().await?;
    let mut chunks = OpenAiReplyAssembler::new(client);
    chunks.push_chunk(&body, MESSAGE_FIELD, listener)?;
    chunks.finish()
}

/// Assembles a reply from its chunks.
struct OpenAiReplyAssembler<'l> {
    client: &'l EndpointClient,
    reply: ModelReply,
    /// The state of each call in the reply, by its index.
    partial_calls: Vec<PartialToolCall>,
    /// From the endpoint's index of a call to its index in the reply.
    call_index_by_number: HashMap<u64, usize>,
    /// True once the model reported a finish reason, or the endpoint the end of the stream.
    is_complete: bool,
    finish_reason: Option<FinishReason>,
}

impl<'l> OpenAiReplyAssembler<'l> {
    fn new(client: &'l EndpointClient) -> Self {
        let (reply, call_index_by_number) = (ModelReply::default(), HashMap::new());
        Self {
            client,
            reply,
            partial_calls: Vec::new(),
            call_index_by_number,
            is_complete: false,
            finish_reason: None,
        }
    }

    fn push_chunk(
        &mut self,
        chunk: &Value,
        part: &str,
        listener: DeltaListener<'_>,
    ) -> Result<(), ModelError> {
        let chunk = chunk.as_object().ok_or_else(|| self.client.malformed_error())?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(self.client.stream_error(error));
        }
        if let Some(usage) = chunk.get("usage").and_then(Value::as_object) {
            self.reply.usage = parse_usage(usage);
        }
        if let (None, Some(model)) = (&self.reply.model, non_empty_str(chunk.get("model"))) {
            self.reply.model = Some(model.to_owned());
        }
        let choices = chunk.get("choices").and_then(Value::as_array);
        // Requests ask for a single choice; any others are ignored.
        let first = choices.and_then(|choices| {
            choices.iter().find(|choice| choice.get("index").is_none_or(|index| index == 0))
        });
        let Some(choice) = first else { return Ok(()) };
        if let Some(delta) = choice.get(part).and_then(Value::as_object) {
            self.push_delta(delta, part == MESSAGE_FIELD, listener);
        }
        if let Some(reason) = non_empty_str(choice.get("finish_reason")) {
            self.is_complete = true;
            self.finish_reason = Some(match reason {
                "length" => FinishReason::Length,
                "content_filter" => FinishReason::ContentFilter,
                _ => FinishReason::Stop,
            });
        }
        Ok(())
    }

    fn push_delta(&mut self, delta: &Map<String, Value>, whole: bool, listener: DeltaListener<'_>) {
        // The text of a refusal is the model's reply.
        for text in
            ["content", "refusal"].iter().filter_map(|field| content_text(delta.get(*field)))
        {
            self.reply.text.push_str(&text);
            listener(Delta::Text(text));
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        let calls = calls.map_or(&[][..], Vec::as_slice);
        for (n, call) in calls.iter().enumerate() {
            let fragment = ToolCallFragment::parse(call);
            // A fragment with a name and without an index, after another one in the same chunk,
            // starts a new call.
            let starts_sibling_call = n > 0 && fragment.index.is_none() && fragment.name.is_some();
            let existing =
                if whole || starts_sibling_call { None } else { self.find_call(&fragment) };
            self.push_call_fragment(&fragment, existing, listener);
        }
    }

    /// Adds a fragment to this call, or to a new one.
    fn push_call_fragment(
        &mut self,
        fragment: &ToolCallFragment<'_>,
        existing: Option<usize>,
        listener: DeltaListener<'_>,
    ) {
        let fresh = existing.is_none();
        let call_index = existing.unwrap_or_else(|| self.start_call(fragment));
        let Some((call, forming)) =
            self.reply.calls.get_mut(call_index).zip(self.partial_calls.get_mut(call_index))
        else {
            return;
        };
        // An id that arrives after the first fragment replaces a generated one.
        let late = fragment.id.filter(|_| forming.has_generated_id && !fresh);
        if let Some(id) = late {
            id.clone_into(&mut call.id);
            forming.has_generated_id = false;
        }
        if let Some(name) = fragment.name.filter(|_| call.name.is_empty()) {
            name.clone_into(&mut call.name);
        }
        call.arguments.push_str(&fragment.arguments);
        forming.nesting.push(&fragment.arguments);
        listener(Delta::Call {
            index: call_index,
            id: (fresh || late.is_some()).then(|| call.id.clone()),
            name: fresh.then(|| call.name.clone()),
            arguments: fragment.arguments.to_string(),
        });
    }

    /// Returns the call that a fragment continues, or `None` if it starts a new one. Endpoints
    /// differ: some give every call the index 0, some omit the index, some give all calls the same
    /// id or none, some repeat the name in every fragment.
    fn find_call(&self, fragment: &ToolCallFragment<'_>) -> Option<usize> {
        let call_index = match fragment.index {
            Some(index) => self.call_index_by_number.get(&index).copied()?,
            None => self.reply.calls.len().checked_sub(1)?,
        };
        let (call, forming) =
            (self.reply.calls.get(call_index)?, self.partial_calls.get(call_index)?);
        // A different id starts a new call.
        let other_id = !forming.has_generated_id && fragment.id.is_some_and(|id| id != call.id);
        // A repeated name continues the call, unless the name differs or more arguments arrive
        // after the arguments are complete.
        let starts_new_call = fragment.name.is_some_and(|name| {
            let more = !fragment.arguments.trim().is_empty();
            !call.name.is_empty() && (name != call.name || (more && forming.nesting.is_closed()))
        });
        (!other_id && !starts_new_call).then_some(call_index)
    }

    /// Starts a call with this fragment.
    fn start_call(&mut self, fragment: &ToolCallFragment<'_>) -> usize {
        let call_index = self.reply.calls.len();
        let generate_id = || format!("call_{}", ulid::Ulid::generate());
        let id = fragment.id.map_or_else(generate_id, str::to_owned);
        self.reply.calls.push(ToolCallRequest { id, ..ToolCallRequest::default() });
        self.partial_calls.push(PartialToolCall {
            has_generated_id: fragment.id.is_none(),
            nesting: JsonNesting::default(),
        });
        if let Some(index) = fragment.index {
            self.call_index_by_number.insert(index, call_index);
        }
        call_index
    }
}

/// A fragment of a tool call.
struct ToolCallFragment<'a> {
    /// The endpoint's index of the call.
    index: Option<u64>,
    id: Option<&'a str>,
    name: Option<&'a str>,
    arguments: Cow<'a, str>,
}

impl<'a> ToolCallFragment<'a> {
    fn parse(fragment: &'a Value) -> Self {
        let index = fragment.get("index").and_then(Value::as_u64);
        let function = fragment.get("function");
        let field = |name: &str| function.and_then(|function| function.get(name));
        let arguments = match field("arguments") {
            Some(Value::String(text)) => Cow::Borrowed(text.as_str()),
            None | Some(Value::Null) => Cow::default(),
            // Some endpoints send the arguments as a JSON value rather than as text.
            Some(other) => Cow::Owned(other.to_string()),
        };
        Self {
            index,
            id: non_empty_str(fragment.get("id")),
            name: non_empty_str(field("name")),
            arguments,
        }
    }
}

/// The state of a call that may be incomplete.
struct PartialToolCall {
    /// True while the endpoint has sent no id and Toolcrib has generated one.
    has_generated_id: bool,
    nesting: JsonNesting,
}

/// Tracks the nesting depth of arguments across fragments. Each byte is read once.
#[derive(Default)]
struct JsonNesting {
    is_started: bool,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonNesting {
    fn push(&mut self, arguments: &str) {
        for byte in arguments.bytes() {
            match byte {
                _ if std::mem::take(&mut self.escaped) => {}
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => {
                    (self.is_started, self.depth) = (true, self.depth + 1)
                }
                b'}' | b']' if !self.in_string => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// Returns true if everything that was opened is closed.
    fn is_closed(&self) -> bool {
        self.is_started && self.depth == 0 && !self.in_string
    }
}

impl ReplyAssembler for OpenAiReplyAssembler<'_> {
    fn push_event(&mut self, data: &str, listener: DeltaListener<'_>) -> Result<bool, ModelError> {
        if data.trim() == "[DONE]" {
            self.is_complete = true;
            return Ok(true);
        }
        let chunk: Value = serde_json::from_str(data).map_err(|_| self.client.malformed_error())?;
        self.push_chunk(&chunk, "delta", listener)?;
        Ok(false)
    }

    fn finish(mut self) -> Result<ModelReply, ModelError> {
        if !self.is_complete {
            return Err(self.client.truncated_error());
        }
        let calls = !self.reply.calls.is_empty();
        self.reply.finish_reason = match self.finish_reason.unwrap_or_default() {
            FinishReason::Stop if calls => FinishReason::ToolCalls,
            stopped => stopped,
        };
        Ok(self.reply)
    }
}

/// Returns the text of a content: a string, or the text parts of a list.
fn content_text(value: Option<&Value>) -> Option<String> {
    let text = match value? {
        Value::Array(parts) => {
            let says = |part: &&Value| {
                let kind = part.get("type").and_then(Value::as_str);
                matches!(kind, None | Some("text" | "output_text"))
            };
            parts.iter().filter(says).filter_map(|part| non_empty_str(part.get("text"))).collect()
        }
        other => non_empty_str(Some(other))?.to_owned(),
    };
    Some(text).filter(|text| !text.is_empty())
}

fn non_empty_str(value: Option<&Value>) -> Option<&str> {
    value.and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn parse_usage(usage: &Map<String, Value>) -> TokenUsage {
    let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default();
    TokenUsage {
        prompt_tokens: number("prompt_tokens"),
        completion_tokens: number("completion_tokens"),
    }
}
