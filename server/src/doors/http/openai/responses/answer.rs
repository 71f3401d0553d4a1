//! Responses of the Responses API: complete, and as a stream of events.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use toolcrib::engine::Thread;
use toolcrib::fault::Error;
use toolcrib::model::{Stopped, Usage, Wanted};
use toolcrib::{Caller, Engine};

use super::super::conversation::{Conversation, Ending, Leash, News, Told, begun, marked};
use super::super::refusal::Refusal;

/// Builds the response, and saves its conversation if requested.
pub(super) struct Form {
    id: String,
    created: i64,
    /// Fields of the request that the response echoes.
    repeated: Map<String, Value>,
    pub(super) kept: bool,
    /// True if the first message is the request's instructions, which apply to this response only.
    pub(super) instructed: bool,
}

impl Form {
    pub(super) fn new(model: &str, asked: &Map<String, Value>) -> Self {
        let given = |name: &str, usual: Value| {
            asked.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(usual)
        };
        let repeated = json!({
            "model": model,
            "instructions": given("instructions", Value::Null),
            "max_output_tokens": given("max_output_tokens", Value::Null),
            "metadata": given("metadata", json!({})),
            "parallel_tool_calls": given("parallel_tool_calls", true.into()),
            "previous_response_id": given("previous_response_id", Value::Null),
            "reasoning": given("reasoning", json!({ "effort": null, "summary": null })),
            "store": given("store", true.into()),
            "temperature": given("temperature", 1.0.into()),
            "text": given("text", json!({ "format": { "type": "text" } })),
            "tool_choice": given("tool_choice", "auto".into()),
            "tools": given("tools", json!([])),
            "top_p": given("top_p", 1.0.into()),
            "truncation": given("truncation", "disabled".into()),
            "user": given("user", Value::Null),
        });
        let repeated = repeated.as_object().cloned().unwrap_or_default();
        let id = format!("resp_{}", ulid::Ulid::generate());
        let created = Timestamp::now().as_second();
        Self { id, created, repeated, kept: true, instructed: false }
    }

    fn response(&self, status: &str, output: Vec<Value>) -> Value {
        let mut response = self.repeated.clone();
        let own = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": null, "incomplete_details": null, "output": output, "usage": null,
        });
        response.extend(own.as_object().cloned().unwrap_or_default());
        Value::Object(response)
    }

    fn ended(&self, ending: &Ending, output: Vec<Value>) -> Value {
        let (status, why) = match ending.stopped {
            Stopped::Length => ("incomplete", Some("max_output_tokens")),
            Stopped::ContentFilter => ("incomplete", Some("content_filter")),
            Stopped::Stop | Stopped::ToolCalls => ("completed", None),
        };
        let mut response = self.response(status, output);
        if let Some(reason) = why {
            response["incomplete_details"] = json!({ "reason": reason });
        }
        response["usage"] = usage(ending.usage);
        response["toolcrib"] = ending.about.clone();
        response
    }

    /// Saves the conversation, so that a later request can continue from it.
    async fn keep(&self, engine: &Engine, caller: &Caller, ending: &Ending) -> Result<(), Error> {
        if !self.kept {
            return Ok(());
        }
        let mut messages = ending.thread.messages.clone();
        if self.instructed && !messages.is_empty() {
            messages.remove(0);
        }
        let thread = Thread { messages, awaited: ending.thread.awaited.clone() };
        engine.keep_thread(caller, &self.id, &thread).await
    }
}

fn usage(usage: Usage) -> Value {
    let (input, output) = (usage.prompt_tokens, usage.completion_tokens);
    json!({
        "input_tokens": input, "input_tokens_details": { "cached_tokens": 0 },
        "output_tokens": output, "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": input.saturating_add(output),
    })
}

fn message(id: &str, status: &str, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.map(part).into_iter().collect();
    json!({ "id": id, "type": "message", "status": status, "role": "assistant",
        "content": content })
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn function_call(id: &str, status: &str, call: &Wanted, arguments: &str) -> Value {
    json!({ "id": id, "type": "function_call", "status": status, "call_id": call.id,
        "name": call.name, "arguments": arguments })
}

fn fresh(kind: &str) -> String {
    format!("{kind}_{}", ulid::Ulid::generate())
}

/// Builds the complete response.
pub(super) async fn whole(conversation: Conversation, form: Form) -> Result<Response, Refusal> {
    let (engine, caller) = (conversation.engine.clone(), conversation.caller.clone());
    let run_id = conversation.terms.run_id.clone();
    let ending = match Box::pin(conversation.held(&|_| {})).await {
        Ok(ending) => ending,
        Err(broken) => return Ok(broken.into_response()),
    };
    form.keep(&engine, &caller, &ending).await?;
    let said = ending.texts.iter().map(|text| message(&fresh("msg"), "completed", Some(text)));
    let calls = ending.calls.iter();
    let calls = calls.map(|call| function_call(&fresh("fc"), "completed", call, &call.arguments));
    let output = said.chain(calls).collect();
    Ok(marked(Json(form.ended(&ending, output)).into_response(), &run_id))
}

/// Builds the events of a streamed response.
struct Events {
    form: Form,
    number: u64,
    /// Completed items.
    output: Vec<Value>,
    /// Id and text of the message in progress.
    open: Option<(String, String)>,
    out: Vec<Event>,
}

impl Events {
    fn push(&mut self, kind: &str, mut body: Value) {
        body["type"] = kind.into();
        body["sequence_number"] = self.number.into();
        self.number += 1;
        self.out.push(Event::default().event(kind).data(body.to_string()));
    }

    fn begin(&mut self) {
        let response = self.form.response("in_progress", Vec::new());
        self.push("response.created", json!({ "response": response }));
        self.push("response.in_progress", json!({ "response": response }));
    }

    fn news(&mut self, news: News) {
        let text = match news {
            News::Step => return self.close(),
            News::Replied => return,
            News::Text(text) => text,
        };
        let index = self.output.len();
        if self.open.is_none() {
            let id = fresh("msg");
            let item = message(&id, "in_progress", None);
            self.push("response.output_item.added", json!({ "output_index": index, "item": item }));
            self.push(
                "response.content_part.added",
                json!({ "item_id": id,
                "output_index": index, "content_index": 0, "part": part("") }),
            );
            self.open = Some((id, String::new()));
        }
        let Some((id, said)) = &mut self.open else { return };
        said.push_str(&text);
        let delta = json!({ "item_id": id, "output_index": index, "content_index": 0,
            "delta": text, "logprobs": [] });
        self.push("response.output_text.delta", delta);
    }

    /// Completes the message in progress.
    fn close(&mut self) {
        let Some((id, said)) = self.open.take() else { return };
        let index = self.output.len();
        self.push(
            "response.output_text.done",
            json!({ "item_id": id, "output_index": index,
            "content_index": 0, "text": said, "logprobs": [] }),
        );
        self.push(
            "response.content_part.done",
            json!({ "item_id": id, "output_index": index,
            "content_index": 0, "part": part(&said) }),
        );
        self.done(message(&id, "completed", Some(&said)));
    }

    fn done(&mut self, item: Value) {
        let index = self.output.len();
        self.push("response.output_item.done", json!({ "output_index": index, "item": item }));
        self.output.push(item);
    }

    fn end(&mut self, ending: &Ending) {
        self.close();
        for call in &ending.calls {
            let (id, index) = (fresh("fc"), self.output.len());
            let begun = function_call(&id, "in_progress", call, "");
            self.push(
                "response.output_item.added",
                json!({ "output_index": index, "item": begun }),
            );
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
            self.done(function_call(&id, "completed", call, &call.arguments));
        }
        let response = self.form.ended(ending, self.output.clone());
        let kind = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        self.push(kind, json!({ "response": response }));
    }

    fn fail(&mut self, error: Error) {
        self.close();
        let body = Refusal(error).logged().body().1;
        let error = json!(body.error);
        let mut response = self.form.response("failed", self.output.clone());
        response["error"] = json!({ "code": "server_error", "message": error["message"] });
        self.push(
            "error",
            json!({ "code": error["code"], "message": error["message"],
            "param": error["param"] }),
        );
        self.push("response.failed", json!({ "response": response }));
    }

    fn taken(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.out)
    }
}

/// State of a streamed response.
struct Going {
    told: tokio::sync::mpsc::UnboundedReceiver<Told>,
    events: Events,
    engine: Engine,
    caller: Caller,
    _leash: Leash,
}

impl Going {
    /// Returns the next events, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Vec<Event>> {
        loop {
            match self.told.recv().await? {
                Told::News(news) => self.events.news(news),
                Told::End(ending) => {
                    let kept = match *ending {
                        Ok(ending) => {
                            let kept = self.events.form.keep(&self.engine, &self.caller, &ending);
                            kept.await.map(|()| ending)
                        }
                        Err(broken) => Err(broken.error),
                    };
                    match kept {
                        Ok(ending) => self.events.end(&ending),
                        Err(error) => self.events.fail(error),
                    }
                }
            }
            let events = self.events.taken();
            if !events.is_empty() {
                return Some(events);
            }
        }
    }
}

/// Streams the response. An unavailable model is an error with its HTTP status.
pub(super) async fn streamed(conversation: Conversation, form: Form) -> Result<Response, Refusal> {
    let (engine, caller) = (conversation.engine.clone(), conversation.caller.clone());
    let run_id = conversation.terms.run_id.clone();
    let (mut told, leash) = begun(conversation);
    let events = Events { form, number: 0, output: Vec::new(), open: None, out: Vec::new() };
    let first = loop {
        match told.recv().await {
            Some(Told::News(News::Step)) => {}
            Some(Told::End(ending)) => match *ending {
                Ok(ending) => break Some(Told::End(Box::new(Ok(ending)))),
                Err(broken) => return Ok(broken.into_response()),
            },
            other => break other,
        }
    };
    let mut going = Going { told, events, engine, caller, _leash: leash };
    going.events.begin();
    let mut begin = Vec::new();
    match first {
        Some(Told::News(news)) => going.events.news(news),
        Some(Told::End(ending)) => {
            if let Ok(ending) = *ending {
                going.events.form.keep(&going.engine, &going.caller, &ending).await?;
                going.events.end(&ending);
            }
        }
        None => {}
    }
    begin.extend(going.events.taken());
    let rest = stream::unfold(going, async |mut going| Some((going.next().await?, going)));
    let events = stream::iter([begin]).chain(rest);
    let events =
        events.flat_map(|events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)));
    let alive = KeepAlive::new().interval(Duration::from_secs(15));
    Ok(marked(Sse::new(events).keep_alive(alive).into_response(), &run_id))
}
