//! OpenAI's Responses API. Translates conversations and tools; the reply arrives as a stream of
//! items.

mod request;
use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::HeaderMap;
use serde_json::Value;
use toolcrib::domain::model_reply::{FinishReason, ModelReply, ToolCallRequest};
use toolcrib::ports::model::{Delta, DeltaListener, Model, ModelError, ModelRequest};

use crate::models::endpoint_client::{EndpointClient, KeyHeader, ModelEndpoint, ReplyAssembler};

/// A model behind the Responses API.
pub struct ResponsesModel {
    client: EndpointClient,
}

impl ResponsesModel {
    /// Returns a model of this endpoint.
    pub fn new(endpoint: ModelEndpoint) -> Self {
        Self { client: EndpointClient::new(endpoint) }
    }
}

#[async_trait]
impl Model for ResponsesModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let endpoint = &self.client.endpoint;
        let body = request::build_body(prompt, endpoint.max_tokens, endpoint.native_tool_search);
        let body = body.to_string().into_bytes();
        let headers = HeaderMap::new();
        let answer = self.client.post("/responses", headers, KeyHeader::Bearer, body).await?;
        let search = prompt.tool_search.as_deref();
        let mut items = ResponseAssembler::new(&self.client, search);
        let redactor = self.client.key_redactor(listener);
        let listener = |delta| redactor.push(delta);
        let reply = match answer.is_stream() {
            true => answer.read_events(items, &listener).await?,
            false => {
                items.push_response(&answer.read_json().await?, &listener)?;
                items.finish()?
            }
        };
        Ok(redactor.finish(reply))
    }
}

/// Assembles a reply from its items.
struct ResponseAssembler<'l> {
    client: &'l EndpointClient,
    /// Name of the tool search.
    search: Option<&'l str>,
    reply: ModelReply,
    /// From the index of an output item to the index of its call.
    call_index_by_item: HashMap<u64, usize>,
    is_complete: bool,
}

impl<'l> ResponseAssembler<'l> {
    fn new(client: &'l EndpointClient, search: Option<&'l str>) -> Self {
        let (reply, call_index_by_item) = (ModelReply::default(), HashMap::new());
        Self { client, search, reply, call_index_by_item, is_complete: false }
    }

    /// Reads a reply that arrived as one document.
    fn push_response(
        &mut self,
        response: &Value,
        listener: DeltaListener<'_>,
    ) -> Result<(), ModelError> {
        let items = response.get("output").and_then(Value::as_array);
        let items = items.ok_or_else(|| self.client.malformed_error())?;
        for (n, item) in items.iter().enumerate() {
            for part in item["content"].as_array().into_iter().flatten() {
                let text = part["text"].as_str().or(part["refusal"].as_str());
                self.push_text(text.unwrap_or_default(), listener);
            }
            self.end_item(n as u64, item, listener);
        }
        self.end_response(response)
    }

    fn push_text(&mut self, text: &str, listener: DeltaListener<'_>) {
        if !text.is_empty() {
            self.reply.text.push_str(text);
            listener(Delta::Text(text.to_owned()));
        }
    }

    fn start_item(&mut self, index: u64, item: &Value, listener: DeltaListener<'_>) {
        let text = |field: &str| item[field].as_str().unwrap_or_default().to_owned();
        let name = match item["type"].as_str() {
            Some("function_call") => text("name"),
            Some("tool_search_call") => self.search.unwrap_or_default().to_owned(),
            _ => return,
        };
        let call_index = self.reply.calls.len();
        let id = text("call_id");
        self.call_index_by_item.insert(index, call_index);
        let arguments = String::new();
        self.reply.calls.push(ToolCallRequest { id: id.clone(), name: name.clone(), arguments });
        let (id, name, arguments) = (Some(id), Some(name), String::new());
        listener(Delta::Call { index: call_index, id, name, arguments });
    }

    fn push_arguments(&mut self, index: u64, arguments: &str, listener: DeltaListener<'_>) {
        let Some(call_index) = self.call_index_by_item.get(&index).copied() else { return };
        let Some(call) = self.reply.calls.get_mut(call_index) else { return };
        call.arguments.push_str(arguments);
        let (id, name, arguments) = (None, None, arguments.to_owned());
        listener(Delta::Call { index: call_index, id, name, arguments });
    }

    /// Completes an item. The arguments of a search arrive only here, as an object.
    fn end_item(&mut self, index: u64, item: &Value, listener: DeltaListener<'_>) {
        if !self.call_index_by_item.contains_key(&index) {
            self.start_item(index, item, listener);
        }
        let Some(call_index) = self.call_index_by_item.get(&index).copied() else { return };
        let arguments = match &item["arguments"] {
            Value::Null => return,
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let received = self.reply.calls.get(call_index).map_or("", |call| &call.arguments);
        let missing = arguments.strip_prefix(received).unwrap_or_default().to_owned();
        if !missing.is_empty() {
            self.push_arguments(index, &missing, listener);
        }
        if let (Some(call), Some(id)) =
            (self.reply.calls.get_mut(call_index), item["call_id"].as_str())
        {
            id.clone_into(&mut call.id);
        }
    }

    fn end_response(&mut self, response: &Value) -> Result<(), ModelError> {
        if let Some(error) = response.get("error").filter(|error| !error.is_null()) {
            return Err(self.client.stream_error(error));
        }
        self.is_complete = true;
        self.reply.model = response["model"].as_str().map(str::to_owned);
        let tokens = |name: &str| response["usage"][name].as_u64().unwrap_or_default();
        self.reply.usage.prompt_tokens = tokens("input_tokens");
        self.reply.usage.completion_tokens = tokens("output_tokens");
        self.reply.finish_reason = match response["incomplete_details"]["reason"].as_str() {
            Some("content_filter") => FinishReason::ContentFilter,
            Some(_) => FinishReason::Length,
            None if self.reply.calls.is_empty() => FinishReason::Stop,
            None => FinishReason::ToolCalls,
        };
        Ok(())
    }
}

impl ReplyAssembler for ResponseAssembler<'_> {
    fn push_event(&mut self, data: &str, listener: DeltaListener<'_>) -> Result<bool, ModelError> {
        if data.trim() == "[DONE]" {
            return Ok(true);
        }
        let event: Value = serde_json::from_str(data).map_err(|_| self.client.malformed_error())?;
        let index = event["output_index"].as_u64().unwrap_or_default();
        let delta = event["delta"].as_str().unwrap_or_default();
        match event["type"].as_str() {
            Some("response.output_text.delta" | "response.refusal.delta") => {
                self.push_text(delta, listener);
            }
            Some("response.output_item.added") => self.start_item(index, &event["item"], listener),
            Some("response.function_call_arguments.delta") => {
                self.push_arguments(index, delta, listener);
            }
            Some("response.output_item.done") => self.end_item(index, &event["item"], listener),
            Some("response.completed" | "response.incomplete" | "response.failed") => {
                self.end_response(&event["response"])?;
                return Ok(true);
            }
            Some("error") => return Err(self.client.stream_error(&event)),
            // Other items, and event types that were added later.
            _ => {}
        }
        Ok(false)
    }

    fn finish(mut self) -> Result<ModelReply, ModelError> {
        if !self.is_complete {
            return Err(self.client.truncated_error());
        }
        for call in self.reply.calls.iter_mut().filter(|call| call.arguments.is_empty()) {
            call.arguments.push_str("{}");
        }
        Ok(self.reply)
    }
}
