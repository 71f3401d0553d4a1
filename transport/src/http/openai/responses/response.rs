//! Responses of the Responses API: complete, and as a stream of events.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::Error;
use toolcrib::domain::model_reply::{FinishReason, TokenUsage, ToolCallRequest};
use toolcrib::runs::SavedConversation;
use toolcrib::{Caller, Engine};

use super::super::live::{ConversationResult, ConversationUpdate, Requester, StreamEvent};
use crate::http::openai::error::OpenAiError;

/// The engine and the caller that a response is saved for.
pub(super) struct ResponseTarget {
    pub(super) engine: Engine,
    pub(super) caller: Caller,
}

/// Builds the response, and saves its conversation if requested.
pub(super) struct ResponseBuilder {
    id: String,
    created: i64,
    /// Fields of the request that the response echoes.
    echoed_fields: Map<String, Value>,
    pub(super) store: bool,
    /// True if the first message is the request's instructions, which apply to this response only.
    pub(super) has_instructions: bool,
}

impl ResponseBuilder {
    pub(super) fn new(model: &str, request: &Map<String, Value>) -> Self {
        let field_or = |name: &str, default: Value| {
            request.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default)
        };
        let repeated = json!({
            "model": model,
            "instructions": field_or("instructions", Value::Null),
            "max_output_tokens": field_or("max_output_tokens", Value::Null),
            "metadata": field_or("metadata", json!({})),
            "parallel_tool_calls": field_or("parallel_tool_calls", true.into()),
            "previous_response_id": field_or("previous_response_id", Value::Null),
            "reasoning": field_or("reasoning", json!({ "effort": null, "summary": null })),
            "store": field_or("store", true.into()),
            "temperature": field_or("temperature", 1.0.into()),
            "text": field_or("text", json!({ "format": { "type": "text" } })),
            "tool_choice": field_or("tool_choice", "auto".into()),
            "tools": field_or("tools", json!([])),
            "top_p": field_or("top_p", 1.0.into()),
            "truncation": field_or("truncation", "disabled".into()),
            "user": field_or("user", Value::Null),
        });
        let echoed_fields = repeated.as_object().cloned().unwrap_or_default();
        let id = format!("resp_{}", ulid::Ulid::generate());
        let created = Timestamp::now().as_second();
        Self { id, created, echoed_fields, store: true, has_instructions: false }
    }

    fn build(&self, status: &str, output: Vec<Value>) -> Value {
        let mut response = self.echoed_fields.clone();
        let fields = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": null, "incomplete_details": null, "output": output, "usage": null,
        });
        response.extend(fields.as_object().cloned().unwrap_or_default());
        Value::Object(response)
    }

    fn build_final(
        &self,
        ending: &ConversationResult,
        output: Vec<Value>,
        metadata: Value,
    ) -> Value {
        let (status, reason) = match ending.finish_reason {
            FinishReason::Length => ("incomplete", Some("max_output_tokens")),
            FinishReason::ContentFilter => ("incomplete", Some("content_filter")),
            FinishReason::Stop | FinishReason::ToolCalls => ("completed", None),
        };
        let mut response = self.build(status, output);
        if let Some(reason) = reason {
            response["incomplete_details"] = json!({ "reason": reason });
        }
        response["usage"] = usage(ending.usage);
        response["toolcrib"] = metadata;
        response
    }

    /// Saves the conversation, so that a later request can continue from it.
    async fn save_conversation(
        &self,
        target: &ResponseTarget,
        ending: &ConversationResult,
    ) -> Result<(), Error> {
        if !self.store {
            return Ok(());
        }
        let mut messages = ending.conversation.messages.clone();
        if self.has_instructions && !messages.is_empty() {
            messages.remove(0);
        }
        let thread = SavedConversation {
            messages,
            pending_calls: ending.conversation.pending_calls.clone(),
        };
        let conversations = target.engine.runs().conversations();
        conversations.save(&target.caller, &self.id, &thread).await
    }
}

fn usage(usage: TokenUsage) -> Value {
    let (input, output) = (usage.prompt_tokens, usage.completion_tokens);
    json!({
        "input_tokens": input, "input_tokens_details": { "cached_tokens": 0 },
        "output_tokens": output, "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": input.saturating_add(output),
    })
}

fn message_item(id: &str, status: &str, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.map(text_part).into_iter().collect();
    json!({ "id": id, "type": "message", "status": status, "role": "assistant",
        "content": content })
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn function_call_item(id: &str, status: &str, call: &ToolCallRequest, arguments: &str) -> Value {
    json!({ "id": id, "type": "function_call", "status": status, "call_id": call.id,
        "name": call.name, "arguments": arguments })
}

fn new_id(kind: &str) -> String {
    format!("{kind}_{}", ulid::Ulid::generate())
}

/// Builds the complete response.
pub(super) async fn full_response(
    mut requester: Requester,
    builder: ResponseBuilder,
    target: ResponseTarget,
) -> Result<Response, OpenAiError> {
    let end = requester.wait_for_end().await?;
    let ending = match &*end {
        Ok(ending) => ending,
        Err(broken) => return Ok(requester.response_head().complete(broken.to_response())),
    };
    builder.save_conversation(&target, ending).await?;
    let messages =
        ending.texts.iter().map(|text| message_item(&new_id("msg"), "completed", Some(text)));
    let calls = ending.calls.iter();
    let calls =
        calls.map(|call| function_call_item(&new_id("fc"), "completed", call, &call.arguments));
    let output = messages.chain(calls).collect();
    let body = builder.build_final(ending, output, requester.metadata(ending));
    Ok(requester.response_head().complete(Json(body).into_response()))
}

/// Builds the events of a streamed response.
struct ResponseEventWriter {
    builder: ResponseBuilder,
    number: u64,
    /// Completed items.
    output: Vec<Value>,
    /// Id and text of the message in progress.
    open_message: Option<(String, String)>,
    out: Vec<Event>,
}

impl ResponseEventWriter {
    fn push(&mut self, kind: &str, mut body: Value) {
        body["type"] = kind.into();
        body["sequence_number"] = self.number.into();
        self.number += 1;
        self.out.push(Event::default().event(kind).data(body.to_string()));
    }

    fn begin(&mut self) {
        let response = self.builder.build("in_progress", Vec::new());
        self.push("response.created", json!({ "response": response }));
        self.push("response.in_progress", json!({ "response": response }));
    }

    fn on_event(&mut self, event: StreamEvent) {
        let text = match event {
            StreamEvent::StepStarted => return self.close_message(),
            StreamEvent::ModelReplied => return,
            StreamEvent::TextDelta(text) => text,
        };
        let index = self.output.len();
        if self.open_message.is_none() {
            let id = new_id("msg");
            let item = message_item(&id, "in_progress", None);
            self.push("response.output_item.added", json!({ "output_index": index, "item": item }));
            self.push(
                "response.content_part.added",
                json!({ "item_id": id,
                "output_index": index, "content_index": 0, "part": text_part("") }),
            );
            self.open_message = Some((id, String::new()));
        }
        let Some((id, content)) = &mut self.open_message else { return };
        content.push_str(&text);
        let delta = json!({ "item_id": id, "output_index": index, "content_index": 0,
            "delta": text, "logprobs": [] });
        self.push("response.output_text.delta", delta);
    }

    /// Completes the message in progress.
    fn close_message(&mut self) {
        let Some((id, content)) = self.open_message.take() else { return };
        let index = self.output.len();
        self.push(
            "response.output_text.done",
            json!({ "item_id": id, "output_index": index,
            "content_index": 0, "text": content, "logprobs": [] }),
        );
        self.push(
            "response.content_part.done",
            json!({ "item_id": id, "output_index": index,
            "content_index": 0, "part": text_part(&content) }),
        );
        self.finish_item(message_item(&id, "completed", Some(&content)));
    }

    fn finish_item(&mut self, item: Value) {
        let index = self.output.len();
        self.push("response.output_item.done", json!({ "output_index": index, "item": item }));
        self.output.push(item);
    }

    fn finish(&mut self, ending: &ConversationResult, metadata: Value) {
        self.close_message();
        for call in &ending.calls {
            let (id, index) = (new_id("fc"), self.output.len());
            let item = function_call_item(&id, "in_progress", call, "");
            self.push("response.output_item.added", json!({ "output_index": index, "item": item }));
            self.push(
                "response.function_call_arguments.delta",
                json!({ "item_id": id,
                "output_index": index, "delta": call.arguments }),
            );
            self.push(
                "response.function_call_arguments.done",
                json!({ "item_id": id,
                "output_index": index, "name": call.name, "arguments": call.arguments }),
            );
            self.finish_item(function_call_item(&id, "completed", call, &call.arguments));
        }
        let response = self.builder.build_final(ending, self.output.clone(), metadata);
        let kind = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        self.push(kind, json!({ "response": response }));
    }

    fn fail(&mut self, error: Error) {
        self.close_message();
        let body = OpenAiError(error).log_internal().body().1;
        let error = json!(body.error);
        let mut response = self.builder.build("failed", self.output.clone());
        response["error"] = json!({ "code": "server_error", "message": error["message"] });
        self.push(
            "error",
            json!({ "code": error["code"], "message": error["message"],
            "param": error["param"] }),
        );
        self.push("response.failed", json!({ "response": response }));
    }

    fn drain(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.out)
    }
}

/// State of a streamed response.
struct ResponseStream {
    requester: Requester,
    writer: ResponseEventWriter,
    target: ResponseTarget,
    has_ended: bool,
}

impl ResponseStream {
    /// Returns the next events, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Vec<Event>> {
        if self.has_ended {
            return None;
        }
        loop {
            let update = self.requester.next().await?;
            self.apply(update).await;
            let events = self.writer.drain();
            if !events.is_empty() {
                return Some(events);
            }
        }
    }

    async fn apply(&mut self, update: ConversationUpdate) {
        let end = match update {
            ConversationUpdate::Event(event) => return self.writer.on_event(event),
            ConversationUpdate::Finished(end) => end,
        };
        self.has_ended = true;
        match &*end {
            Ok(ending) => {
                let saved = self.writer.builder.save_conversation(&self.target, ending).await;
                match saved {
                    Ok(()) => self.writer.finish(ending, self.requester.metadata(ending)),
                    Err(error) => self.writer.fail(error),
                }
            }
            Err(broken) => self.writer.fail(broken.to_error()),
        }
    }
}

/// Streams the response. An unavailable model is an error with its HTTP status.
pub(super) async fn stream_response(
    mut requester: Requester,
    builder: ResponseBuilder,
    target: ResponseTarget,
) -> Result<Response, OpenAiError> {
    let writer = ResponseEventWriter {
        builder,
        number: 0,
        output: Vec::new(),
        open_message: None,
        out: Vec::new(),
    };
    let first = loop {
        match requester.next().await {
            Some(ConversationUpdate::Event(StreamEvent::StepStarted)) => {}
            Some(ConversationUpdate::Finished(end)) => {
                if let Err(broken) = &*end {
                    return Ok(requester.response_head().complete(broken.to_response()));
                }
                break Some(ConversationUpdate::Finished(end));
            }
            other => break other,
        }
    };
    let head = requester.response_head();
    let mut going = ResponseStream { requester, writer, target, has_ended: false };
    going.writer.begin();
    if let Some(update) = first {
        going.apply(update).await;
    }
    let begin = going.writer.drain();
    let rest = stream::unfold(going, async |mut going| Some((going.next().await?, going)));
    let events = stream::iter([begin]).chain(rest);
    let events =
        events.flat_map(|events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)));
    let alive = KeepAlive::new().interval(Duration::from_secs(15));
    Ok(head.complete(Sse::new(events).keep_alive(alive).into_response()))
}
