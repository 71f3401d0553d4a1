//! Anthropic's messages API. Translates conversations and tools; the reply arrives as a stream of
//! blocks.

mod request;
use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use toolcrib::domain::model_reply::{FinishReason, ModelReply, ToolCallRequest};
use toolcrib::ports::model::{Delta, DeltaListener, Model, ModelError, ModelRequest};

use crate::models::endpoint_client::{EndpointClient, KeyHeader, ModelEndpoint, ReplyAssembler};

/// The version of the API.
const VERSION: &str = "2023-06-01";

/// The beta feature of deferred tools and references to them, for endpoints on which the feature is
/// not generally available.
const TOOL_SEARCH_BETA: &str = "advanced-tool-use-2025-11-20";

/// Default for `max_tokens`, which the API requires.
const MAX_TOKENS: u32 = 4_096;

/// A model behind the messages API.
pub struct AnthropicModel {
    client: EndpointClient,
}

impl AnthropicModel {
    /// Returns a model of this endpoint.
    pub fn new(endpoint: ModelEndpoint) -> Self {
        Self { client: EndpointClient::new(endpoint) }
    }
}

#[async_trait]
impl Model for AnthropicModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let max_tokens = self.client.endpoint.max_tokens.unwrap_or(MAX_TOKENS);
        let native_search = self.client.endpoint.native_tool_search;
        let body = request::build_body(prompt, max_tokens, native_search).to_string().into_bytes();
        let mut headers = HeaderMap::new();
        headers.insert("anthropic-version", HeaderValue::from_static(VERSION));
        if native_search && !prompt.found_tools.is_empty() {
            headers.insert("anthropic-beta", HeaderValue::from_static(TOOL_SEARCH_BETA));
        }
        let credential = KeyHeader::Header(HeaderName::from_static("x-api-key"));
        let answer = self.client.post("/messages", headers, credential, body).await?;
        let mut blocks = AnthropicReplyAssembler::new(&self.client);
        let redactor = self.client.key_redactor(listener);
        let listener = |delta| redactor.push(delta);
        let reply = match answer.is_stream() {
            true => answer.read_events(blocks, &listener).await?,
            false => {
                blocks.push_message(&answer.read_json().await?, &listener)?;
                blocks.finish()?
            }
        };
        Ok(redactor.finish(reply))
    }
}

/// Assembles a reply from its blocks.
struct AnthropicReplyAssembler<'l> {
    client: &'l EndpointClient,
    reply: ModelReply,
    /// From the index of a block to the index of its call.
    call_index_by_block: HashMap<u64, usize>,
    is_complete: bool,
}

impl<'l> AnthropicReplyAssembler<'l> {
    fn new(client: &'l EndpointClient) -> Self {
        Self {
            client,
            reply: ModelReply::default(),
            call_index_by_block: HashMap::new(),
            is_complete: false,
        }
    }

    /// Reads a reply that arrived as one message.
    fn push_message(
        &mut self,
        message: &Value,
        listener: DeltaListener<'_>,
    ) -> Result<(), ModelError> {
        let blocks = message.get("content").and_then(Value::as_array);
        let blocks = blocks.ok_or_else(|| self.client.malformed_error())?;
        self.start_message(message);
        for (n, block) in blocks.iter().enumerate() {
            self.start_block(n as u64, block, listener);
        }
        self.record_stop_reason(message);
        Ok(())
    }

    fn start_message(&mut self, message: &Value) {
        self.reply.model = message.get("model").and_then(Value::as_str).map(str::to_owned);
        self.record_usage(message.get("usage"));
    }

    fn record_stop_reason(&mut self, message: &Value) {
        if let Some(reason) = message.get("stop_reason").and_then(Value::as_str) {
            self.is_complete = true;
            self.reply.finish_reason = match reason {
                "tool_use" => FinishReason::ToolCalls,
                "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
                "refusal" => FinishReason::ContentFilter,
                _ => FinishReason::Stop,
            };
        }
    }

    fn record_usage(&mut self, usage: Option<&Value>) {
        let Some(usage) = usage else { return };
        let number = |name: &str| usage.get(name).and_then(Value::as_u64);
        // The API counts tokens read from or written to a cache separately.
        let cached = ["cache_read_input_tokens", "cache_creation_input_tokens"];
        let cached: u64 = cached.iter().filter_map(|name| number(name)).sum();
        if let Some(tokens) = number("input_tokens") {
            self.reply.usage.prompt_tokens = tokens + cached;
        }
        if let Some(tokens) = number("output_tokens") {
            self.reply.usage.completion_tokens = tokens;
        }
    }

    fn start_block(&mut self, index: u64, block: &Value, listener: DeltaListener<'_>) {
        let text = |field: &str| block.get(field).and_then(Value::as_str);
        match text("type") {
            Some("text") => self.push_text(text("text").unwrap_or_default(), listener),
            Some("tool_use") => {
                let (id, name) = (text("id").unwrap_or_default(), text("name").unwrap_or_default());
                let call_index = self.reply.calls.len();
                // In a stream, the input starts as an empty object and arrives in deltas.
                let initial_input = block
                    .get("input")
                    .filter(|input| input.as_object().is_none_or(|o| !o.is_empty()));
                let arguments = initial_input.map(Value::to_string).unwrap_or_default();
                self.call_index_by_block.insert(index, call_index);
                self.reply.calls.push(ToolCallRequest {
                    id: id.to_owned(),
                    name: name.to_owned(),
                    arguments: arguments.clone(),
                });
                let (id, name) = (Some(id.to_owned()), Some(name.to_owned()));
                listener(Delta::Call { index: call_index, id, name, arguments });
            }
            _ => {}
        }
    }

    fn push_text(&mut self, text: &str, listener: DeltaListener<'_>) {
        if !text.is_empty() {
            self.reply.text.push_str(text);
            listener(Delta::Text(text.to_owned()));
        }
    }

    fn push_delta(&mut self, index: u64, delta: &Value, listener: DeltaListener<'_>) {
        let text = |field: &str| delta.get(field).and_then(Value::as_str).unwrap_or_default();
        match delta.get("type").and_then(Value::as_str) {
            Some("text_delta") => self.push_text(text("text"), listener),
            Some("input_json_delta") => {
                let call_index = self.call_index_by_block.get(&index).copied();
                let call = call_index.and_then(|call_index| self.reply.calls.get_mut(call_index));
                let (Some(call_index), Some(call)) = (call_index, call) else { return };
                let arguments = text("partial_json").to_owned();
                call.arguments.push_str(&arguments);
                if !arguments.is_empty() {
                    listener(Delta::Call { index: call_index, id: None, name: None, arguments });
                }
            }
            _ => {}
        }
    }
}

impl ReplyAssembler for AnthropicReplyAssembler<'_> {
    fn push_event(&mut self, data: &str, listener: DeltaListener<'_>) -> Result<bool, ModelError> {
        let event: Value = serde_json::from_str(data).map_err(|_| self.client.malformed_error())?;
        let index = event.get("index").and_then(Value::as_u64).unwrap_or_default();
        let part = |name: &str| event.get(name).unwrap_or(&Value::Null);
        match event.get("type").and_then(Value::as_str) {
            Some("message_start") => self.start_message(part("message")),
            Some("content_block_start") => self.start_block(index, part("content_block"), listener),
            Some("content_block_delta") => self.push_delta(index, part("delta"), listener),
            Some("message_delta") => {
                self.record_stop_reason(part("delta"));
                self.record_usage(event.get("usage"));
            }
            Some("message_stop") => {
                self.is_complete = true;
                return Ok(true);
            }
            Some("error") => return Err(self.client.stream_error(part("error"))),
            // Pings, ends of blocks, and event types that were added later.
            _ => {}
        }
        Ok(false)
    }

    fn finish(mut self) -> Result<ModelReply, ModelError> {
        if !self.is_complete {
            return Err(self.client.truncated_error());
        }
        for call in &mut self.reply.calls {
            if call.arguments.is_empty() {
                call.arguments.push_str("{}");
            }
        }
        Ok(self.reply)
    }
}
