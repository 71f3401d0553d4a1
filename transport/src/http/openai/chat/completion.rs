//! Chat completion responses: complete, and as a stream of chunks.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use jiff::Timestamp;
use serde_json::{Value, json};
use toolcrib::domain::model_reply::{FinishReason, TokenUsage, ToolCallRequest};

use super::super::live::{ConversationResult, ConversationUpdate, Requester, StreamEvent};
use crate::http::openai::error::OpenAiError;

/// Format of the response.
pub(super) struct CompletionFormat {
    /// The model name, as requested.
    pub(super) model: String,
    pub(super) with_usage: bool,
}

/// Builds the complete response.
pub(super) fn full_response(
    ending: &ConversationResult,
    format: &CompletionFormat,
    metadata: Value,
) -> Response {
    let calls: Vec<Value> = ending.calls.iter().map(tool_call_json).collect();
    let content = (calls.is_empty() || !ending.text.is_empty()).then_some(&ending.text);
    let mut message =
        json!({ "role": "assistant", "content": content, "refusal": null, "annotations": [] });
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    let choice = json!({ "index": 0, "message": message, "logprobs": null,
        "finish_reason": finish_reason(ending) });
    let body = json!({
        "id": new_id(), "object": "chat.completion", "created": Timestamp::now().as_second(),
        "model": format.model, "choices": [choice], "usage": usage(ending.usage),
        "toolcrib": metadata,
    });
    Json(&body).into_response()
}

fn new_id() -> String {
    format!("chatcmpl-{}", ulid::Ulid::generate())
}

fn tool_call_json(call: &ToolCallRequest) -> Value {
    let function = json!({ "name": call.name, "arguments": call.arguments });
    json!({ "id": call.id, "type": "function", "function": function })
}

fn finish_reason(ending: &ConversationResult) -> &'static str {
    match ending.finish_reason {
        FinishReason::Length => "length",
        FinishReason::ContentFilter => "content_filter",
        _ if !ending.calls.is_empty() => "tool_calls",
        FinishReason::Stop | FinishReason::ToolCalls => "stop",
    }
}

fn usage(usage: TokenUsage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens, usage.completion_tokens);
    json!({ "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt.saturating_add(completion) })
}

/// Builds the chunks of a streamed response.
struct ChunkWriter {
    id: String,
    created: i64,
    format: CompletionFormat,
    /// `has_text` is true once text was sent; `new_step` is true if a step started since then.
    has_text: bool,
    new_step: bool,
}

impl ChunkWriter {
    fn chunk(&self, choices: &Value) -> Value {
        json!({ "id": self.id, "object": "chat.completion.chunk", "created": self.created,
            "model": self.format.model, "choices": choices })
    }

    fn delta(&self, delta: &Value, reason: Option<&str>) -> Event {
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null,
            "finish_reason": reason });
        Event::default().data(self.chunk(&json!([choice])).to_string())
    }

    /// Returns the first chunk. It says if the request joined a conversation, because the metadata
    /// at the end is sent only on request.
    fn first_chunk(&self, joined: bool) -> Event {
        let choice = json!({ "index": 0, "delta": { "role": "assistant", "content": "" },
            "logprobs": null, "finish_reason": null });
        let mut chunk = self.chunk(&json!([choice]));
        if joined {
            chunk["toolcrib"] = json!({ "joined": true });
        }
        Event::default().data(chunk.to_string())
    }

    fn on_event(&mut self, event: StreamEvent) -> Option<Event> {
        let text = match event {
            StreamEvent::StepStarted => {
                self.new_step = true;
                return None;
            }
            StreamEvent::ModelReplied => return None,
            StreamEvent::TextDelta(text) => text,
        };
        // Texts before and after a call become two paragraphs.
        let apart = self.has_text && std::mem::take(&mut self.new_step);
        (self.has_text, self.new_step) = (true, false);
        let text = if apart { format!("\n\n{text}") } else { text };
        Some(self.delta(&json!({ "content": text }), None))
    }

    fn final_chunks(&self, ending: &ConversationResult, metadata: Value) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, requested) in ending.calls.iter().enumerate() {
            let mut call = tool_call_json(requested);
            call["index"] = index.into();
            events.push(self.delta(&json!({ "tool_calls": [call] }), None));
        }
        events.push(self.delta(&json!({}), Some(finish_reason(ending))));
        if self.format.with_usage {
            let mut last = self.chunk(&json!([]));
            last["usage"] = usage(ending.usage);
            last["toolcrib"] = metadata;
            events.push(Event::default().data(last.to_string()));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }
}

/// Streams the response. Sends nothing until the model has responded, so that an unavailable model
/// is an error with its HTTP status and not a broken stream.
pub(super) async fn stream_response(
    mut requester: Requester,
    format: CompletionFormat,
) -> Result<Response, OpenAiError> {
    let (id, created) = (new_id(), Timestamp::now().as_second());
    let mut chunks = ChunkWriter { id, created, format, has_text: false, new_step: false };
    let mut begin = vec![chunks.first_chunk(requester.joined)];
    let mut has_ended = false;
    loop {
        match requester.next().await {
            Some(ConversationUpdate::Event(event)) => {
                // A first reply proves that the model is available, and its calls may take long.
                let replied = event == StreamEvent::ModelReplied;
                begin.extend(chunks.on_event(event));
                if replied || begin.len() > 1 {
                    break;
                }
            }
            Some(ConversationUpdate::Finished(end)) => match &*end {
                Ok(ending) => {
                    begin.extend(chunks.final_chunks(ending, requester.metadata(ending)));
                    has_ended = true;
                    break;
                }
                Err(broken) => return Ok(requester.response_head().complete(broken.to_response())),
            },
            None => break,
        }
    }
    let head = requester.response_head();
    let state = (!has_ended).then_some((requester, chunks));
    let rest = stream::unfold(state, async |state| {
        let (mut requester, mut chunks) = state?;
        loop {
            let (events, has_ended): (Vec<Event>, bool) = match requester.next().await? {
                ConversationUpdate::Event(event) => {
                    (chunks.on_event(event).into_iter().collect(), false)
                }
                ConversationUpdate::Finished(end) => match &*end {
                    Ok(ending) => (chunks.final_chunks(ending, requester.metadata(ending)), true),
                    Err(broken) => {
                        let body = OpenAiError(broken.to_error()).log_internal().body().1;
                        let text = serde_json::to_string(&body).unwrap_or_default();
                        (vec![Event::default().data(text)], true)
                    }
                },
            };
            if !events.is_empty() {
                return Some((events, (!has_ended).then_some((requester, chunks))));
            }
        }
    });
    let events = futures::StreamExt::flat_map(
        futures::StreamExt::chain(stream::iter([begin]), rest),
        |events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)),
    );
    let alive = KeepAlive::new().interval(Duration::from_secs(15));
    Ok(head.complete(Sse::new(events).keep_alive(alive).into_response()))
}
