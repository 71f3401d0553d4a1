//! OpenAI's chat completions API, which most endpoints implement, always requested as a stream.

use std::borrow::Cow;
use std::collections::HashMap;

use async_trait::async_trait;
use reqwest::header::HeaderMap;
use serde_json::{Map, Value, json};
use toolcrib::model::{Listener, Model, Piece, Prompt, Reply, Silence, Stopped, Usage, Wanted};

use super::http::{Answer, Assembly, Credential, Endpoint, Line};

/// The field of a choice that holds a complete, unstreamed reply.
const WHOLE: &str = "message";

/// A model behind the chat completions API.
pub struct OpenAi {
    line: Line,
}

impl OpenAi {
    /// Returns a model of this endpoint.
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
            // Endpoints refuse tool settings in a request without tools.
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
        let discreet = self.line.discreet(listener);
        let listener = |piece| discreet.tell(piece);
        let reply = match answer.is_stream() {
            true => answer.events(Chunks::new(&self.line), &listener).await?,
            false => whole(&self.line, answer, &listener).await?,
        };
        Ok(discreet.end(reply))
    }
}

/// Reads the reply of an endpoint that does not stream.
async fn whole(line: &Line, answer: Answer<'_>, listener: Listener<'_>) -> Result<Reply, Silence> {
    let body = answer.json().await?;
    let mut chunks = Chunks::new(line);
    chunks.take_chunk(&body, WHOLE, listener)?;
    chunks.whole()
}

/// Assembles a reply from its chunks.
struct Chunks<'l> {
    line: &'l Line,
    reply: Reply,
    /// The state of each call in the reply, by its index.
    forming: Vec<Forming>,
    /// From the endpoint's index of a call to its index in the reply.
    places: HashMap<u64, usize>,
    /// True once the model reported a finish reason, or the endpoint the end of the stream.
    done: bool,
    stopped: Option<Stopped>,
}

impl<'l> Chunks<'l> {
    fn new(line: &'l Line) -> Self {
        let (reply, places) = (Reply::default(), HashMap::new());
        Self { line, reply, forming: Vec::new(), places, done: false, stopped: None }
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
        // Requests ask for a single choice; any others are ignored.
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
        // The text of a refusal is the model's reply.
        for said in ["content", "refusal"].iter().filter_map(|field| words(delta.get(*field))) {
            self.reply.text.push_str(&said);
            listener(Piece::Text(said));
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        let calls = calls.map_or(&[][..], Vec::as_slice);
        for (n, call) in calls.iter().enumerate() {
            let piece = Fragment::of(call);
            // A fragment with a name and without an index, after another one in the same chunk,
            // starts a new call.
            let beside = n > 0 && piece.index.is_none() && piece.name.is_some();
            let known = if whole || beside { None } else { self.known(&piece) };
            self.take_call(&piece, known, listener);
        }
    }

    /// Adds a fragment to this call, or to a new one.
    fn take_call(&mut self, piece: &Fragment<'_>, known: Option<usize>, listener: Listener<'_>) {
        let fresh = known.is_none();
        let place = known.unwrap_or_else(|| self.begin(piece));
        let Some((call, forming)) =
            self.reply.calls.get_mut(place).zip(self.forming.get_mut(place))
        else {
            return;
        };
        // An id that arrives after the first fragment replaces a generated one.
        let late = piece.id.filter(|_| forming.made_up && !fresh);
        if let Some(id) = late {
            id.clone_into(&mut call.id);
            forming.made_up = false;
        }
        if let Some(name) = piece.name.filter(|_| call.name.is_empty()) {
            name.clone_into(&mut call.name);
        }
        call.arguments.push_str(&piece.arguments);
        forming.nesting.read(&piece.arguments);
        listener(Piece::Call {
            index: place,
            id: (fresh || late.is_some()).then(|| call.id.clone()),
            name: fresh.then(|| call.name.clone()),
            arguments: piece.arguments.to_string(),
        });
    }

    /// Returns the call that a fragment continues, or `None` if it starts a new one. Endpoints
    /// differ: some give every call the index 0, some omit the index, some give all calls the same
    /// id or none, some repeat the name in every fragment.
    fn known(&self, piece: &Fragment<'_>) -> Option<usize> {
        let place = match piece.index {
            Some(index) => self.places.get(&index).copied()?,
            None => self.reply.calls.len().checked_sub(1)?,
        };
        let (call, forming) = (self.reply.calls.get(place)?, self.forming.get(place)?);
        // A different id starts a new call.
        let other_id = !forming.made_up && piece.id.is_some_and(|id| id != call.id);
        // A repeated name continues the call, unless the name differs or more arguments arrive
        // after the arguments are complete.
        let named = piece.name.is_some_and(|name| {
            let more = !piece.arguments.trim().is_empty();
            !call.name.is_empty() && (name != call.name || (more && forming.nesting.is_whole()))
        });
        (!other_id && !named).then_some(place)
    }

    /// Starts a call with this fragment.
    fn begin(&mut self, piece: &Fragment<'_>) -> usize {
        let place = self.reply.calls.len();
        let made_up = || format!("call_{}", ulid::Ulid::generate());
        let id = piece.id.map_or_else(made_up, str::to_owned);
        self.reply.calls.push(Wanted { id, ..Wanted::default() });
        self.forming.push(Forming { made_up: piece.id.is_none(), nesting: Nesting::default() });
        if let Some(index) = piece.index {
            self.places.insert(index, place);
        }
        place
    }
}

/// A fragment of a tool call.
struct Fragment<'a> {
    /// The endpoint's index of the call.
    index: Option<u64>,
    id: Option<&'a str>,
    name: Option<&'a str>,
    arguments: Cow<'a, str>,
}

impl<'a> Fragment<'a> {
    fn of(piece: &'a Value) -> Self {
        let index = piece.get("index").and_then(Value::as_u64);
        let function = piece.get("function");
        let field = |name: &str| function.and_then(|function| function.get(name));
        let arguments = match field("arguments") {
            Some(Value::String(text)) => Cow::Borrowed(text.as_str()),
            None | Some(Value::Null) => Cow::default(),
            // Some endpoints send the arguments as a JSON value rather than as text.
            Some(other) => Cow::Owned(other.to_string()),
        };
        Self { index, id: text(piece.get("id")), name: text(field("name")), arguments }
    }
}

/// The state of a call that may be incomplete.
struct Forming {
    /// True while the endpoint has sent no id and Toolcrib has generated one.
    made_up: bool,
    nesting: Nesting,
}

/// Tracks the nesting depth of arguments across fragments. Each byte is read once.
#[derive(Default)]
struct Nesting {
    begun: bool,
    depth: usize,
    in_text: bool,
    escaped: bool,
}

impl Nesting {
    fn read(&mut self, arguments: &str) {
        for byte in arguments.bytes() {
            match byte {
                _ if std::mem::take(&mut self.escaped) => {}
                b'\\' if self.in_text => self.escaped = true,
                b'"' => self.in_text = !self.in_text,
                b'{' | b'[' if !self.in_text => (self.begun, self.depth) = (true, self.depth + 1),
                b'}' | b']' if !self.in_text => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// Returns true if everything that was opened is closed.
    fn is_whole(&self) -> bool {
        self.begun && self.depth == 0 && !self.in_text
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

/// Returns the text of a content: a string, or the text parts of a list.
fn words(value: Option<&Value>) -> Option<String> {
    let said = match value? {
        Value::Array(parts) => {
            let says = |part: &&Value| {
                let kind = part.get("type").and_then(Value::as_str);
                matches!(kind, None | Some("text" | "output_text"))
            };
            parts.iter().filter(says).filter_map(|part| text(part.get("text"))).collect()
        }
        other => text(Some(other))?.to_owned(),
    };
    Some(said).filter(|said| !said.is_empty())
}

fn text(value: Option<&Value>) -> Option<&str> {
    value.and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn usage_of(usage: &Map<String, Value>) -> Usage {
    let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default();
    Usage { prompt_tokens: number("prompt_tokens"), completion_tokens: number("completion_tokens") }
}
