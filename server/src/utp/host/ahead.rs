//! Cards that the server sends before the commands that name them, which saves a request per
//! command.
//!
//! The cache is only an optimization. A card is used while it is fresh. After that, and for a
//! redelivered command, the host requests the card, because the server may reply that the call has
//! ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Message;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::together::Asker;
use crate::utp::follow::FOLLOWS;

/// Time for which a prefetched card is valid.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum total size of cached cards in bytes.
const MOST: usize = 16 << 20;
/// Maximum number of subject prefixes for which the last request is remembered.
const PLACES: usize = 10_000;

struct Kept {
    card: Value,
    came: Instant,
}

#[derive(Default)]
struct Known {
    cards: HashMap<String, Kept>,
    /// In order of arrival, with their sizes.
    order: VecDeque<(Instant, String, usize)>,
    bytes: usize,
}

/// The cache of prefetched cards.
pub(super) struct Ahead {
    asker: Asker,
    target: String,
    /// The subject on which cards arrive.
    pub(super) inbox: String,
    known: Mutex<Known>,
    /// The time of the last request for prefetching, by subject prefix.
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

    /// Stores the cards of a message, and evicts stale cards and those over the size limit.
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

    /// Removes and returns a card, if it is cached and fresh.
    pub(super) fn take(&self, card_id: &str) -> Option<Value> {
        let kept = self.known.lock().cards.remove(card_id)?;
        (kept.came.elapsed() < FRESH).then_some(kept.card)
    }

    /// Requests the cards of a subject prefix in advance, unless that was requested recently.
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
            // If the server does not support prefetching, the host requests each card.
            if let Err(error) = client.publish_with_headers(subject, headers, body.into()).await {
                tracing::debug!(%error, "requesting prefetched cards failed");
            }
        });
    }
}
