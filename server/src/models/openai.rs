//! OpenAI's chat completions, as most endpoints speak them, always asked for as a stream.

use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::HeaderMap;
use serde_json::{Map, Value, json};
use toolcrib::model::{Listener, Model, Piece, Prompt, Reply, Silence, Stopped, Usage, Wanted};

use super::http::{Answer, Assembly, Credential, Endpoint, Line};

/// Where a choice has its answer when that does not come in pieces.
const WHOLE: &str = "message";

/// A model behind chat completions.
pub struct OpenAi {
    line: Line,
}

impl OpenAi {
    /// Asks at this endpoint.
    pub fn at(endpoint: Endpoint) -> Self {
        Self { line: Line::to(endpoint) }
    }

    fn request(&self, prompt: &Prompt) -> Vec<u8> {
        let mut body = prompt.settings.clone();
        let limited = ["max_tokens", "max_completion_tokens"].iter().any(|k| body.contains_key(*k));
        if let (Some(most), false) = (self.line.endpoint.max_tokens, limited) {
            body.insert("max_tokens".into(), most.into());
        }
        if prompt.tools.is_empty() {
            // Endpoints refuse words about tools that are not there.
            body.remove("tool_choice");
            body.remove("parallel_tool_calls");
        } else {
            body.insert("tools".into(), prompt.tools.clone().into());
        }
        body.insert("model".into(), prompt.model.clone().into());
        body.insert("messages".into(), prompt.messages.clone().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({ "include_usage": true }));
        body.remove("n");
        Value::Object(body).to_string().into_bytes()
    }
}

#[async_trait]
impl Model for OpenAi {
    async fn reply(&self, prompt: &Prompt, listener: Listener<'_>) -> Result<Reply, Silence> {
        let body = self.request(prompt);
        let path = "/chat/completions";
        let answer = self.line.post(path, HeaderMap::new(), Credential::Bearer, body).await?;
        if answer.is_stream() {
            let assembly = Chunks::new(&self.line);
            return answer.events(assembly, listener).await;
        }
        whole(&self.line, answer, listener).await
    }
}

/// An endpoint that does not stream answers all at once.
async fn whole(line: &Line, answer: Answer<'_>, listener: Listener<'_>) -> Result<Reply, Silence> {
    let body = answer.json().await?;
    let mut chunks = Chunks::new(line);
    chunks.take_chunk(&body, WHOLE, listener)?;
    chunks.whole()
}

/// Chunks that become an answer.
struct Chunks<'l> {
    line: &'l Line,
    reply: Reply,
    /// From the number that the endpoint gives a call to its place.
    places: HashMap<u64, usize>,
    /// The model said why it stopped, or the endpoint that this is all.
    done: bool,
    stopped: Option<Stopped>,
}

impl<'l> Chunks<'l> {
    fn new(line: &'l Line) -> Self {
        let (reply, places) = (Reply::default(), HashMap::new());
        Self { line, reply, places, done: false, stopped: None }
    }

    fn take_chunk(
        &mut self,
        chunk: &Value,
        part: &str,
        listener: Listener<'_>,
    ) -> Result<(), Silence> {
        let chunk = chunk.as_object().ok_or_else(|| self.line.garbled())?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(self.line.gave_up(error));
        }
        if let Some(usage) = chunk.get("usage").and_then(Value::as_object) {
            self.reply.usage = usage_of(usage);
        }
        if let (None, Some(model)) = (&self.reply.model, text(chunk.get("model"))) {
            self.reply.model = Some(model.to_owned());
        }
        let choices = chunk.get("choices").and_then(Value::as_array);
        // Nobody asks for more than one; what comes beside the first is not looked at.
        let first = choices.and_then(|choices| {
            choices.iter().find(|choice| choice.get("index").is_none_or(|index| index == 0))
        });
        let Some(choice) = first else { return Ok(()) };
        if let Some(delta) = choice.get(part).and_then(Value::as_object) {
            self.take_delta(delta, part == WHOLE, listener);
        }
        if let Some(reason) = text(choice.get("finish_reason")) {
            self.done = true;
            self.stopped = Some(match reason {
                "length" => Stopped::Length,
                "content_filter" => Stopped::ContentFilter,
                _ => Stopped::Stop,
            });
        }
        Ok(())
    }

    fn take_delta(&mut self, delta: &Map<String, Value>, whole: bool, listener: Listener<'_>) {
        // What a model says when it will not answer is its answer.
        for said in ["content", "refusal"].iter().filter_map(|field| text(delta.get(*field))) {
            self.reply.text.push_str(said);
            listener(Piece::Text(said.to_owned()));
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        for (n, call) in calls.into_iter().flatten().enumerate() {
            let index = call.get("index").and_then(Value::as_u64);
            self.take_call(call, index.or(whole.then_some(n as u64)), listener);
        }
    }

    fn take_call(&mut self, piece: &Value, index: Option<u64>, listener: Listener<'_>) {
        let id = text(piece.get("id"));
        let function = piece.get("function");
        let field = |name: &str| function.and_then(|function| function.get(name));
        let name = text(field("name"));
        let arguments = match field("arguments") {
            Some(Value::String(text)) => text.clone(),
            None | Some(Value::Null) => String::new(),
            // Some endpoints give them as what they stand for.
            Some(other) => other.to_string(),
        };
        let (place, fresh) = self.place(index, id);
        let Some(call) = self.reply.calls.get_mut(place) else { return };
        if let Some(name) = name.filter(|_| fresh || call.name.is_empty()) {
            name.clone_into(&mut call.name);
        }
        call.arguments.push_str(&arguments);
        listener(Piece::Call {
            index: place,
            id: fresh.then(|| call.id.clone()),
            name: fresh.then(|| call.name.clone()),
            arguments,
        });
    }

    /// The call that a piece belongs to, and whether it begins with it. Endpoints differ: some
    /// number every call 0, some give no numbers. An id that was not there before is a new call.
    fn place(&mut self, index: Option<u64>, id: Option<&str>) -> (usize, bool) {
        let known = match index {
            Some(index) => self.places.get(&index).copied(),
            None => self.reply.calls.len().checked_sub(1),
        };
        if let Some(place) = known {
            let same = match (id, self.reply.calls.get(place)) {
                (Some(id), Some(call)) => call.id == id,
                // Without a number and without an id there is nothing to tell two calls by but
                // that pieces of one have no name again.
                _ => true,
            };
            if same {
                return (place, false);
            }
        }
        let place = self.reply.calls.len();
        let id = id.map_or_else(|| format!("call_{}", ulid::Ulid::generate()), str::to_owned);
        self.reply.calls.push(Wanted { id, ..Wanted::default() });
        if let Some(index) = index {
            self.places.insert(index, place);
        }
        (place, true)
    }
}

impl Assembly for Chunks<'_> {
    fn take(&mut self, data: &str, listener: Listener<'_>) -> Result<bool, Silence> {
        if data.trim() == "[DONE]" {
            self.done = true;
            return Ok(true);
        }
        let chunk: Value = serde_json::from_str(data).map_err(|_| self.line.garbled())?;
        self.take_chunk(&chunk, "delta", listener)?;
        Ok(false)
    }

    fn whole(mut self) -> Result<Reply, Silence> {
        if !self.done {
            return Err(self.line.cut());
        }
        let calls = !self.reply.calls.is_empty();
        self.reply.stopped = match self.stopped.unwrap_or_default() {
            Stopped::Stop if calls => Stopped::ToolCalls,
            stopped => stopped,
        };
        Ok(self.reply)
    }
}

fn text(value: Option<&Value>) -> Option<&str> {
    value.and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn usage_of(usage: &Map<String, Value>) -> Usage {
    let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default();
    Usage { prompt_tokens: number("prompt_tokens"), completion_tokens: number("completion_tokens") }
}
