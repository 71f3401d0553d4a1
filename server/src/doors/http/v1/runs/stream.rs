//! The event stream of a run over SSE. Stored events of the run and its calls carry their number as
//! the message id. Deltas of the model's output come between them, without an id.
//!
//! A client that reconnects with `Last-Event-ID` gets all stored events after that one, and of the
//! response in progress only the deltas from then on.

use std::collections::VecDeque;
use std::pin::Pin;

use axum::http::HeaderMap;
use axum::response::sse::Event as Message;
use futures::stream;
use serde_json::{Map, Value, json};
use toolcrib::engine::{LiveNote, RunNews};
use toolcrib::fault::Error;
use toolcrib::run::{EntryKind, Happened, Noted};
use toolcrib::{Caller, Engine};

use super::super::super::wire::event_text;
use super::super::events::{Messages, sent};
use crate::auth::Standing;

/// Number of events read from the store per page.
const PAGE: usize = 200;

/// Maximum number of deltas buffered here; further deltas stay in the subscription.
const HELD: usize = 256;

type Reading = Pin<Box<dyn Future<Output = Result<Vec<Happened>, Error>> + Send>>;

struct Following {
    engine: Engine,
    caller: Caller,
    standing: Standing,
    run_id: String,
    after: u64,
    page: VecDeque<Happened>,
    news: RunNews,
    /// Deltas that were received but belong after a stored event that was not yet sent.
    held: VecDeque<LiveNote>,
    order: Order,
    reading: Option<Reading>,
}

/// The position of the stream within the run.
struct Order {
    /// Step of the last model response sent; `None` if the stream started in the middle of the run.
    step: Option<u32>,
    /// True while the results of that step's calls are still to be sent.
    open: bool,
}

impl Order {
    /// Returns true if deltas of this step can be sent now.
    fn has_reached(&self, step: u32) -> bool {
        self.step.is_none_or(|told| !self.open && told + 1 >= step)
    }

    fn pass(&mut self, noted: &Noted) {
        let data = &noted.entry.data;
        if noted.entry.kind == EntryKind::Replied {
            self.step = data["step"].as_u64().map(|step| step as u32);
            self.open = data["calls"].as_array().is_some_and(|calls| !calls.is_empty());
        } else {
            self.open = false;
        }
    }
}

/// Streams a run until it ends. A run id that only groups calls has no end, and neither has its
/// stream.
pub(crate) fn follow(
    engine: Engine,
    caller: Caller,
    headers: &HeaderMap,
    run_id: String,
    after: u64,
    news: RunNews,
) -> Messages {
    let standing = Standing::new(&caller, headers);
    // The run's first journal entry precedes all deltas.
    let order = Order { step: (after == 0).then_some(0), open: after == 0 };
    let (page, held) = (VecDeque::new(), VecDeque::new());
    let reading = None;
    let following =
        Following { engine, caller, standing, run_id, after, page, news, held, order, reading };
    sent(stream::unfold(following, async |mut following| {
        let message = following.next().await?;
        Some((Ok(message), following))
    }))
}

impl Following {
    /// Returns the next message. The stream ends when the run has ended, when the key was revoked,
    /// or when the store is unavailable (the client reconnects and continues where it was).
    async fn next(&mut self) -> Option<Message> {
        self.standing.check(&self.engine).ok()?;
        loop {
            while self.held.len() < HELD
                && let Some(note) = self.news.take()
            {
                self.held.push_back(note);
            }
            if let Some(note) = self.due() {
                return Some(live_message(&self.run_id, &note));
            }
            if let Some(happened) = self.page.pop_front() {
                self.after = happened.number();
                if let Happened::Run(noted) = &happened {
                    self.order.pass(noted);
                }
                return Some(kept_message(&happened));
            }
            let reading = self.reading.get_or_insert_with(|| {
                let (engine, caller) = (self.engine.clone(), self.caller.clone());
                let (run_id, after) = (self.run_id.clone(), self.after);
                Box::pin(async move { engine.run_events(&caller, &run_id, after, PAGE).await })
            });
            tokio::select! {
                biased;
                note = self.news.next(), if self.held.len() < HELD => self.held.push_back(note),
                read = reading => {
                    self.reading = None;
                    self.page = read.ok()?.into();
                    if self.page.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Takes the next delta that can be sent: in its place, or at the latest before the complete
    /// response.
    fn due(&mut self) -> Option<LiveNote> {
        let step = self.held.front()?.step();
        let whole_is_next = match self.page.front() {
            Some(Happened::Run(noted)) if noted.entry.kind == EntryKind::Replied => {
                noted.entry.data["step"].as_u64().is_some_and(|whole| whole >= u64::from(step))
            }
            _ => false,
        };
        let none_before = self.page.is_empty() && self.order.has_reached(step);
        if whole_is_next || none_before { self.held.pop_front() } else { None }
    }
}

fn live_message(run_id: &str, note: &LiveNote) -> Message {
    let (name, mut data) = match note {
        LiveNote::Asking { step, last } => ("run.asking", json!({ "step": step, "last": last })),
        LiveNote::Text { step, text } => ("run.text", json!({ "step": step, "text": text })),
        LiveNote::Call { step, index, id, name, arguments } => (
            "run.call",
            json!({
                "step": step, "index": index, "call_id": id, "name": name, "arguments": arguments,
            }),
        ),
        LiveNote::AskingAgain { step, retry, wait_ms, why } => (
            "run.asking_again",
            json!({ "step": step, "retry": retry, "wait_ms": wait_ms, "error": why }),
        ),
        LiveNote::Missed { step } => ("run.missed", json!({ "step": step })),
    };
    data["type"] = name.into();
    data["run_id"] = run_id.into();
    Message::default().event(name).data(data.to_string())
}

fn kept_message(happened: &Happened) -> Message {
    let (number, name, text) = match happened {
        Happened::Call(event) => (event.number, event.record.kind.as_str(), event_text(event)),
        Happened::Run(noted) => (noted.number, noted.entry.kind.as_str(), entry_text(noted)),
    };
    Message::default().id(number.to_string()).event(name).data(text)
}

/// Serializes a journal entry as the data of an SSE message.
fn entry_text(noted: &Noted) -> String {
    let mut body = Map::new();
    body.insert("number".into(), noted.number.into());
    body.insert("type".into(), noted.entry.kind.as_str().into());
    body.insert("run_id".into(), noted.run_id.clone().into());
    body.insert("at_ms".into(), noted.entry.at_ms.into());
    if let Value::Object(data) = &noted.entry.data {
        body.extend(data.clone());
    }
    Value::Object(body).to_string()
}
