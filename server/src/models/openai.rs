//! OpenAI's chat completions, as most endpoints speak them, always asked for as a stream.

use std::borrow::Cow;
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
        let discreet = self.line.discreet(listener);
        let listener = |piece| discreet.tell(piece);
        let reply = match answer.is_stream() {
            true => answer.events(Chunks::new(&self.line), &listener).await?,
            false => whole(&self.line, answer, &listener).await?,
        };
        Ok(discreet.end(reply))
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
    /// What is known of each call of the answer beside what it says.
    forming: Vec<Forming>,
    /// From the number that the endpoint gives a call to its place.
    places: HashMap<u64, usize>,
    /// The model said why it stopped, or the endpoint that this is all.
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
        for said in ["content", "refusal"].iter().filter_map(|field| words(delta.get(*field))) {
            self.reply.text.push_str(&said);
            listener(Piece::Text(said));
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        let calls = calls.map_or(&[][..], Vec::as_slice);
        for (n, call) in calls.iter().enumerate() {
            let piece = Fragment::of(call);
            // What has a name and no number, and comes beside another, is a call of its own.
            let beside = n > 0 && piece.index.is_none() && piece.name.is_some();
            let known = if whole || beside { None } else { self.known(&piece) };
            self.take_call(&piece, known, listener);
        }
    }

    /// Takes a piece of this call, or of a new one.
    fn take_call(&mut self, piece: &Fragment<'_>, known: Option<usize>, listener: Listener<'_>) {
        let fresh = known.is_none();
        let place = known.unwrap_or_else(|| self.begin(piece));
        let Some((call, forming)) =
            self.reply.calls.get_mut(place).zip(self.forming.get_mut(place))
        else {
            return;
        };
        // An id that comes after the first piece goes before one that was made up.
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

    /// The call that a piece goes on with; none where it begins one. Endpoints differ: some number
    /// every call 0, some give no numbers, some give all calls one id or none, some say the name
    /// with every piece.
    fn known(&self, piece: &Fragment<'_>) -> Option<usize> {
        let place = match piece.index {
            Some(index) => self.places.get(&index).copied()?,
            None => self.reply.calls.len().checked_sub(1)?,
        };
        let (call, forming) = (self.reply.calls.get(place)?, self.forming.get(place)?);
        // An id that was not there before is a new call.
        let other_id = !forming.made_up && piece.id.is_some_and(|id| id != call.id);
        // A name again is the same call, unless it is another one, or more arguments come though
        // all of them are there.
        let named = piece.name.is_some_and(|name| {
            let more = !piece.arguments.trim().is_empty();
            !call.name.is_empty() && (name != call.name || (more && forming.nesting.is_whole()))
        });
        (!other_id && !named).then_some(place)
    }

    /// Begins a call with this piece.
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

/// A piece of a call.
struct Fragment<'a> {
    /// The number that the endpoint gives the call.
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
            // Some endpoints give them as what they stand for.
            Some(other) => Cow::Owned(other.to_string()),
        };
        Self { index, id: text(piece.get("id")), name: text(field("name")), arguments }
    }
}

/// A call that may not be whole yet.
struct Forming {
    /// Its id is of our own making: the endpoint has given none so far.
    made_up: bool,
    nesting: Nesting,
}

/// How deep in an object the arguments are, read piece by piece: each is looked at once.
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

    /// Whether what was opened is closed.
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

/// What is said: a text, or the texts among several parts.
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
