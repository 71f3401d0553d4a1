//! Anthropic's messages API. Translates conversations and tools; the reply arrives as a stream of
//! blocks.

mod request;

use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use toolcrib::model::{Listener, Model, Piece, Prompt, Reply, Silence, Stopped, Wanted};

use super::http::{Assembly, Credential, Endpoint, Line};

/// The version of the API.
const VERSION: &str = "2023-06-01";

/// Default for `max_tokens`, which the API requires.
const MAX_TOKENS: u32 = 4_096;

/// A model behind the messages API.
pub struct Anthropic {
    line: Line,
}

impl Anthropic {
    /// Returns a model of this endpoint.
    pub fn at(endpoint: Endpoint) -> Self {
        Self { line: Line::to(endpoint) }
    }
}

#[async_trait]
impl Model for Anthropic {
    async fn reply(&self, prompt: &Prompt, listener: Listener<'_>) -> Result<Reply, Silence> {
        let most = self.line.endpoint.max_tokens.unwrap_or(MAX_TOKENS);
        let body = request::body(prompt, most).to_string().into_bytes();
        let mut headers = HeaderMap::new();
        headers.insert("anthropic-version", HeaderValue::from_static(VERSION));
        let credential = Credential::Header(HeaderName::from_static("x-api-key"));
        let answer = self.line.post("/messages", headers, credential, body).await?;
        let mut blocks = Blocks::new(&self.line);
        let discreet = self.line.discreet(listener);
        let listener = |piece| discreet.tell(piece);
        let reply = match answer.is_stream() {
            true => answer.events(blocks, &listener).await?,
            false => {
                blocks.take_message(&answer.json().await?, &listener)?;
                blocks.whole()?
            }
        };
        Ok(discreet.end(reply))
    }
}

/// Assembles a reply from its blocks.
struct Blocks<'l> {
    line: &'l Line,
    reply: Reply,
    /// From the index of a block to the index of its call.
    places: HashMap<u64, usize>,
    done: bool,
}

impl<'l> Blocks<'l> {
    fn new(line: &'l Line) -> Self {
        Self { line, reply: Reply::default(), places: HashMap::new(), done: false }
    }

    /// Reads a reply that arrived as one message.
    fn take_message(&mut self, message: &Value, listener: Listener<'_>) -> Result<(), Silence> {
        let blocks = message.get("content").and_then(Value::as_array);
        let blocks = blocks.ok_or_else(|| self.line.garbled())?;
        self.begin(message);
        for (n, block) in blocks.iter().enumerate() {
            self.open(n as u64, block, listener);
        }
        self.stop(message);
        Ok(())
    }

    fn begin(&mut self, message: &Value) {
        self.reply.model = message.get("model").and_then(Value::as_str).map(str::to_owned);
        self.count(message.get("usage"));
    }

    fn stop(&mut self, message: &Value) {
        if let Some(reason) = message.get("stop_reason").and_then(Value::as_str) {
            self.done = true;
            self.reply.stopped = match reason {
                "tool_use" => Stopped::ToolCalls,
                "max_tokens" | "model_context_window_exceeded" => Stopped::Length,
                "refusal" => Stopped::ContentFilter,
                _ => Stopped::Stop,
            };
        }
    }

    fn count(&mut self, usage: Option<&Value>) {
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

    fn open(&mut self, index: u64, block: &Value, listener: Listener<'_>) {
        let text = |field: &str| block.get(field).and_then(Value::as_str);
        match text("type") {
            Some("text") => self.say(text("text").unwrap_or_default(), listener),
            Some("tool_use") => {
                let (id, name) = (text("id").unwrap_or_default(), text("name").unwrap_or_default());
                let place = self.reply.calls.len();
                // In a stream, the input starts as an empty object and arrives in deltas.
                let given = block
                    .get("input")
                    .filter(|input| input.as_object().is_none_or(|o| !o.is_empty()));
                let arguments = given.map(Value::to_string).unwrap_or_default();
                self.places.insert(index, place);
                self.reply.calls.push(Wanted {
                    id: id.to_owned(),
                    name: name.to_owned(),
                    arguments: arguments.clone(),
                });
                let (id, name) = (Some(id.to_owned()), Some(name.to_owned()));
                listener(Piece::Call { index: place, id, name, arguments });
            }
            _ => {}
        }
    }

    fn say(&mut self, text: &str, listener: Listener<'_>) {
        if !text.is_empty() {
            self.reply.text.push_str(text);
            listener(Piece::Text(text.to_owned()));
        }
    }

    fn grow(&mut self, index: u64, delta: &Value, listener: Listener<'_>) {
        let text = |field: &str| delta.get(field).and_then(Value::as_str).unwrap_or_default();
        match delta.get("type").and_then(Value::as_str) {
            Some("text_delta") => self.say(text("text"), listener),
            Some("input_json_delta") => {
                let place = self.places.get(&index).copied();
                let call = place.and_then(|place| self.reply.calls.get_mut(place));
                let (Some(place), Some(call)) = (place, call) else { return };
                let arguments = text("partial_json").to_owned();
                call.arguments.push_str(&arguments);
                if !arguments.is_empty() {
                    listener(Piece::Call { index: place, id: None, name: None, arguments });
                }
            }
            _ => {}
        }
    }
}

impl Assembly for Blocks<'_> {
    fn take(&mut self, data: &str, listener: Listener<'_>) -> Result<bool, Silence> {
        let event: Value = serde_json::from_str(data).map_err(|_| self.line.garbled())?;
        let index = event.get("index").and_then(Value::as_u64).unwrap_or_default();
        let part = |name: &str| event.get(name).unwrap_or(&Value::Null);
        match event.get("type").and_then(Value::as_str) {
            Some("message_start") => self.begin(part("message")),
            Some("content_block_start") => self.open(index, part("content_block"), listener),
            Some("content_block_delta") => self.grow(index, part("delta"), listener),
            Some("message_delta") => {
                self.stop(part("delta"));
                self.count(event.get("usage"));
            }
            Some("message_stop") => {
                self.done = true;
                return Ok(true);
            }
            Some("error") => return Err(self.line.gave_up(part("error"))),
            // Pings, ends of blocks, and event types that were added later.
            _ => {}
        }
        Ok(false)
    }

    fn whole(mut self) -> Result<Reply, Silence> {
        if !self.done {
            return Err(self.line.cut());
        }
        for call in &mut self.reply.calls {
            if call.arguments.is_empty() {
                call.arguments.push_str("{}");
            }
        }
        Ok(self.reply)
    }
}
