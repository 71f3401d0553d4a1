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
use toolcrib_protocol::utp::card_followers::FOLLOW_TTL;

use crate::utp::host::batched_rpc::HostRpcClient;

/// Time for which a prefetched card is valid.
const CARD_TTL: Duration = Duration::from_secs(1);
/// Maximum total size of cached cards in bytes.
const MAX_CACHE_BYTES: usize = 16 << 20;
/// Maximum number of subject prefixes for which the last request is remembered.
const MAX_REQUESTED_PREFIXES: usize = 10_000;

struct PrefetchedCard {
    card: Value,
    received_at: Instant,
}

#[derive(Default)]
struct PrefetchCache {
    cards: HashMap<String, PrefetchedCard>,
    /// The time, id and size of each card, in order of arrival.
    order: VecDeque<(Instant, String, usize)>,
    bytes: usize,
}

/// The cache of prefetched cards.
pub(super) struct PrefetchedCards {
    rpc: HostRpcClient,
    target: String,
    /// The subject on which cards arrive.
    pub(super) inbox: String,
    cache: Mutex<PrefetchCache>,
    /// The time of the last request for prefetching, by subject prefix.
    last_requested: Mutex<HashMap<String, Instant>>,
}

#[derive(Deserialize)]
struct PrefetchMessage {
    #[serde(default)]
    cards: Vec<Value>,
}

impl PrefetchedCards {
    pub(super) fn new(rpc_client: HostRpcClient, target: &str) -> Arc<Self> {
        let inbox = rpc_client.connection.client().new_inbox();
        let target = target.to_owned();
        Arc::new(Self {
            rpc: rpc_client,
            target,
            inbox,
            cache: Mutex::default(),
            last_requested: Mutex::default(),
        })
    }

    /// Stores the cards of a message, and evicts stale cards and those over the size limit.
    pub(super) fn store(&self, message: &Message) {
        let Ok(PrefetchMessage { cards }) = serde_json::from_slice(&message.payload) else {
            return;
        };
        let size = message.payload.len() / cards.len().max(1);
        let (now, mut cache) = (Instant::now(), self.cache.lock());
        let cache = &mut *cache;
        for card in cards {
            let Some(id) = card["card_id"].as_str().map(str::to_owned) else { continue };
            cache.order.push_back((now, id.clone(), size));
            cache.bytes += size;
            cache.cards.insert(id, PrefetchedCard { card, received_at: now });
        }
        let stale =
            |(received_at, ..): &(Instant, String, usize)| received_at.elapsed() >= CARD_TTL;
        while cache.order.front().is_some_and(|first| cache.bytes > MAX_CACHE_BYTES || stale(first))
        {
            let Some((received_at, id, size)) = cache.order.pop_front() else { break };
            cache.bytes -= size;
            if cache.cards.get(&id).is_some_and(|prefetched| prefetched.received_at == received_at)
            {
                cache.cards.remove(&id);
            }
        }
    }

    /// Removes and returns a card, if it is cached and fresh.
    pub(super) fn take(&self, card_id: &str) -> Option<Value> {
        let prefetched = self.cache.lock().cards.remove(card_id)?;
        (prefetched.received_at.elapsed() < CARD_TTL).then_some(prefetched.card)
    }

    /// Requests the cards of a subject prefix in advance, unless that was requested recently.
    pub(super) fn request_prefetch(self: &Arc<Self>, prefix: &str) {
        {
            let (now, mut last_requested) = (Instant::now(), self.last_requested.lock());
            let recent = |requested_at: &Instant| requested_at.elapsed() < FOLLOW_TTL / 3;
            if last_requested.get(prefix).is_some_and(recent) {
                return;
            }
            if last_requested.len() >= MAX_REQUESTED_PREFIXES {
                last_requested.clear();
            }
            last_requested.insert(prefix.to_owned(), now);
        }
        let (prefetched, prefix) = (self.clone(), prefix.to_owned());
        tokio::spawn(async move {
            let subject = format!("{prefix}.rpc.sys.cards.follow");
            let body =
                json!({ "target": prefetched.target, "inbox": prefetched.inbox }).to_string();
            let headers = prefetched.rpc.headers("");
            let client = prefetched.rpc.connection.client();
            // If the server does not support prefetching, the host requests each card.
            if let Err(error) = client.publish_with_headers(subject, headers, body.into()).await {
                tracing::debug!(%error, "requesting prefetched cards failed");
            }
        });
    }
}
