//! Cards that the crib sends before the commands that name them, so that nobody has to ask.
//!
//! What is here is only a copy that saves a question. It is used while it is fresh; after that, and
//! for a command that was given before, the crib is asked: it may know that the call has ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Message;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::together::Asker;
use crate::utp::follow::FOLLOWS;

/// How long a card is good for.
const FRESH: Duration = Duration::from_secs(1);
/// Most bytes of cards that are kept.
const MOST: usize = 16 << 20;
/// Most places that are known to be followed.
const PLACES: usize = 10_000;

struct Kept {
    card: Value,
    came: Instant,
}

#[derive(Default)]
struct Known {
    cards: HashMap<String, Kept>,
    /// In the order they came, with their size.
    order: VecDeque<(Instant, String, usize)>,
    bytes: usize,
}

/// The cards that came.
pub(super) struct Ahead {
    asker: Asker,
    target: String,
    /// Where they come.
    pub(super) inbox: String,
    known: Mutex<Known>,
    /// When it was last said, to which project, that they are wanted.
    followed: Mutex<HashMap<String, Instant>>,
}

#[derive(Deserialize)]
struct Came {
    #[serde(default)]
    cards: Vec<Value>,
}

impl Ahead {
    pub(super) fn new(asker: Asker, target: &str) -> Arc<Self> {
        let inbox = asker.link.client().new_inbox();
        let target = target.to_owned();
        Arc::new(Self { asker, target, inbox, known: Mutex::default(), followed: Mutex::default() })
    }

    /// Keeps cards that came.
    pub(super) fn keep(&self, message: &Message) {
        let Ok(Came { cards }) = serde_json::from_slice(&message.payload) else { return };
        let size = message.payload.len() / cards.len().max(1);
        let (now, mut known) = (Instant::now(), self.known.lock());
        let known = &mut *known;
        for card in cards {
            let Some(id) = card["card_id"].as_str().map(str::to_owned) else { continue };
            known.order.push_back((now, id.clone(), size));
            known.bytes += size;
            known.cards.insert(id, Kept { card, came: now });
        }
        let stale = |(came, ..): &(Instant, String, usize)| came.elapsed() >= FRESH;
        while known.order.front().is_some_and(|first| known.bytes > MOST || stale(first)) {
            let Some((came, id, size)) = known.order.pop_front() else { break };
            known.bytes -= size;
            if known.cards.get(&id).is_some_and(|kept| kept.came == came) {
                known.cards.remove(&id);
            }
        }
    }

    /// A card, if it came and is fresh.
    pub(super) fn take(&self, card_id: &str) -> Option<Value> {
        let kept = self.known.lock().cards.remove(card_id)?;
        (kept.came.elapsed() < FRESH).then_some(kept.card)
    }

    /// Says that the cards of a place are wanted, from time to time.
    pub(super) fn follow(self: &Arc<Self>, place: &str) {
        {
            let (now, mut followed) = (Instant::now(), self.followed.lock());
            let recent = |said: &Instant| said.elapsed() < FOLLOWS / 3;
            if followed.get(place).is_some_and(recent) {
                return;
            }
            if followed.len() >= PLACES {
                followed.clear();
            }
            followed.insert(place.to_owned(), now);
        }
        let (ahead, place) = (self.clone(), place.to_owned());
        tokio::spawn(async move {
            let subject = format!("{place}.rpc.sys.cards.follow");
            let body = json!({ "target": ahead.target, "inbox": ahead.inbox }).to_string();
            let headers = ahead.asker.headers("");
            let client = ahead.asker.link.client();
            // A crib that does not know this is asked for each card.
            if let Err(error) = client.publish_with_headers(subject, headers, body.into()).await {
                tracing::debug!(%error, "cards are not followed");
            }
        });
    }
}
