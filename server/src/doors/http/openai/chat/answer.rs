//! Chat completion responses: complete, and as a stream of chunks.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use jiff::Timestamp;
use serde_json::{Value, json};
use toolcrib::model::{Stopped, Usage, Wanted};

use super::super::conversation::{Conversation, Ending, News, Told, begun, marked};
use super::super::refusal::Refusal;

/// Format of the response.
pub(super) struct Form {
    /// The model name, as requested.
    pub(super) model: String,
    pub(super) with_usage: bool,
}

/// Builds the complete response.
pub(super) fn whole(ending: &Ending, form: &Form) -> Response {
    let calls: Vec<Value> = ending.calls.iter().map(call).collect();
    let content = (calls.is_empty() || !ending.text.is_empty()).then_some(&ending.text);
    let mut message =
        json!({ "role": "assistant", "content": content, "refusal": null, "annotations": [] });
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    let choice = json!({ "index": 0, "message": message, "logprobs": null,
        "finish_reason": reason(ending) });
    let body = json!({
        "id": fresh_id(), "object": "chat.completion", "created": Timestamp::now().as_second(),
        "model": form.model, "choices": [choice], "usage": usage(ending.usage),
        "toolcrib": ending.about,
    });
    let run_id = ending.about["run_id"].as_str().unwrap_or_default();
    marked(Json(&body).into_response(), run_id)
}

fn fresh_id() -> String {
    format!("chatcmpl-{}", ulid::Ulid::generate())
}

fn call(call: &Wanted) -> Value {
    let function = json!({ "name": call.name, "arguments": call.arguments });
    json!({ "id": call.id, "type": "function", "function": function })
}

fn reason(ending: &Ending) -> &'static str {
    match ending.stopped {
        Stopped::Length => "length",
        Stopped::ContentFilter => "content_filter",
        _ if !ending.calls.is_empty() => "tool_calls",
        Stopped::Stop | Stopped::ToolCalls => "stop",
    }
}

fn usage(usage: Usage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens, usage.completion_tokens);
    json!({ "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt.saturating_add(completion) })
}

/// Builds the chunks of a streamed response.
struct Chunks {
    id: String,
    created: i64,
    form: Form,
    /// `has_text` is true once text was sent; `new_step` is true if a step started since then.
    spoke: bool,
    new_step: bool,
}

impl Chunks {
    fn chunk(&self, choices: &Value) -> Value {
        json!({ "id": self.id, "object": "chat.completion.chunk", "created": self.created,
            "model": self.form.model, "choices": choices })
    }

    fn delta(&self, delta: &Value, reason: Option<&str>) -> Event {
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null,
            "finish_reason": reason });
        Event::default().data(self.chunk(&json!([choice])).to_string())
    }

    fn first(&self) -> Event {
        self.delta(&json!({ "role": "assistant", "content": "" }), None)
    }

    fn news(&mut self, news: News) -> Option<Event> {
        let text = match news {
            News::Step => {
                self.new_step = true;
                return None;
            }
            News::Replied => return None,
            News::Text(text) => text,
        };
        // Texts before and after a call become two paragraphs.
        let apart = self.spoke && std::mem::take(&mut self.new_step);
        (self.spoke, self.new_step) = (true, false);
        let text = if apart { format!("\n\n{text}") } else { text };
        Some(self.delta(&json!({ "content": text }), None))
    }

    fn end(&self, ending: &Ending) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, wanted) in ending.calls.iter().enumerate() {
            let mut call = call(wanted);
            call["index"] = index.into();
            events.push(self.delta(&json!({ "tool_calls": [call] }), None));
        }
        events.push(self.delta(&json!({}), Some(reason(ending))));
        if self.form.with_usage {
            let mut last = self.chunk(&json!([]));
            last["usage"] = usage(ending.usage);
            last["toolcrib"] = ending.about.clone();
            events.push(Event::default().data(last.to_string()));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }
}

/// Streams the response. Sends nothing until the model has responded, so that an unavailable model
/// is an error with its HTTP status and not a broken stream.
pub(super) async fn streamed(conversation: Conversation, form: Form) -> Result<Response, Refusal> {
    let run_id = conversation.terms.run_id.clone();
    let (mut told, leash) = begun(conversation);
    let (id, created) = (fresh_id(), Timestamp::now().as_second());
    let mut chunks = Chunks { id, created, form, spoke: false, new_step: false };
    let mut begin = vec![chunks.first()];
    loop {
        match told.recv().await {
            Some(Told::News(news)) => {
                // A first reply proves that the model is available, and its calls may take long.
                let replied = news == News::Replied;
                begin.extend(chunks.news(news));
                if replied || begin.len() > 1 {
                    break;
                }
            }
            Some(Told::End(ending)) => match *ending {
                Ok(ending) => {
                    begin.extend(chunks.end(&ending));
                    break;
                }
                Err(broken) => return Ok(broken.into_response()),
            },
            None => break,
        }
    }
    let rest = stream::unfold((told, chunks, leash), async |(mut told, mut chunks, leash)| {
        loop {
            let events = match told.recv().await? {
                Told::News(news) => chunks.news(news).into_iter().collect(),
                Told::End(ending) => match *ending {
                    Ok(ending) => chunks.end(&ending),
                    Err(broken) => {
                        let body = Refusal(broken.error).logged().body().1;
                        let text = serde_json::to_string(&body).unwrap_or_default();
                        vec![Event::default().data(text)]
                    }
                },
            };
            if !events.is_empty() {
                return Some((events, (told, chunks, leash)));
            }
        }
    });
    let events = futures::StreamExt::flat_map(
        futures::StreamExt::chain(stream::iter([begin]), rest),
        |events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)),
    );
    let alive = KeepAlive::new().interval(Duration::from_secs(15));
    Ok(marked(Sse::new(events).keep_alive(alive).into_response(), &run_id))
}
