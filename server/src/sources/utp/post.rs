//! Publishes commands to the broker. One task publishes all queued commands and receives the
//! acknowledgements. It publishes a command again until the broker acknowledges it or the call has
//! ended. The broker drops duplicates that it remembers; a command that it may have forgotten is
//! searched in the stream first.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message};
use futures::StreamExt;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::MissedTickBehavior;
use toolcrib::CallId;
use toolcrib::source::Attempt;
use toolcrib::utp::{card, subject};

use crate::utp::{Link, wire};

/// Maximum number of commands in flight.
const ON_THEIR_WAY: usize = 1_024;
/// Time that new commands wait for the acknowledgement of those in flight, to be sent as one batch;
/// and the number of queued commands that are sent without waiting.
const TOGETHER: Duration = Duration::from_millis(2);
const ENOUGH: usize = 24;
/// Maximum number of commands taken from the queue at once.
const MANY: usize = 256;
/// Time to wait for an acknowledgement before a command is published again.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between checks for commands to publish again.
const LOOK: Duration = Duration::from_millis(100);
/// Safety margin before the end of the broker's duplicate window, and for clock differences.
const MARGIN_MS: u64 = 20_000;
/// Delay before a failed search is repeated.
const SEARCH_AGAIN: Duration = Duration::from_millis(500);
/// Maximum size of a message with prefetched cards, and the size from which a card is not
/// prefetched.
const AHEAD_BYTES: usize = 262_144;
const LARGE: usize = 65_536;

/// Commands that are not acknowledged yet.
pub(super) type Waiting = Arc<Mutex<HashSet<(CallId, u32)>>>;

/// A command to publish.
pub(super) struct Outgoing {
    attempt: Attempt,
    subject: String,
    /// The encoded message, or `None` if it was published before and must be encoded again.
    written: Option<(HeaderMap, Vec<u8>)>,
    tries: u32,
    /// `true` if the broker may already have it, from this process or an earlier one.
    perhaps_there: bool,
}

impl Outgoing {
    /// Encodes a command. Returns `None` if the attempt has no command, and an error if it cannot
    /// be encoded.
    pub(super) fn new(version: &str, attempt: Attempt) -> Result<Option<Self>, String> {
        let Some(command) = &attempt.command else { return Ok(None) };
        let (subject, headers, payload) = wire::command(version, &attempt, command)?;
        let (written, perhaps_there) = (Some((headers, payload)), attempt.again);
        Ok(Some(Self { subject, written, attempt, tries: 0, perhaps_there }))
    }

    pub(super) fn place(&self) -> (CallId, u32) {
        (self.attempt.call_id.clone(), self.attempt.number)
    }

    fn id(&self) -> String {
        format!("cmd-{}-{}", self.attempt.call_id, self.attempt.number)
    }

    fn written(&mut self, version: &str) -> Option<(HeaderMap, Vec<u8>)> {
        if let Some(written) = self.written.take() {
            return Some(written);
        }
        let command = self.attempt.command.as_ref()?;
        let (_, headers, payload) = wire::command(version, &self.attempt, command).ok()?;
        Some((headers, payload))
    }

    fn created_ms(&self) -> u64 {
        self.attempt.command.as_ref().map_or(0, |command| command.call.created_ms)
    }

    /// Returns `true` if the command may be published already and the broker no longer detects
    /// duplicates of it.
    fn is_doubtful(&self, now_ms: u64, remembers_ms: u64) -> bool {
        self.perhaps_there && now_ms.saturating_sub(self.created_ms()) + MARGIN_MS > remembers_ms
    }

    /// Returns the command's card and the inbox of the follower that receives it in advance.
    fn card(&self, link: &Link) -> Option<(Arc<str>, Box<RawValue>)> {
        let target = subject::parse(&self.subject)?.target;
        let inbox = link.followers().of(&self.attempt.project, target)?;
        let command = self.attempt.command.as_ref()?;
        let card = card::of_call(&command.call, Some(&command.binding));
        let text = serde_json::value::to_raw_value(&wire::CardBody::of(&card)).ok()?;
        (text.get().len() < LARGE).then_some((inbox, text))
    }
}

/// Searches the stream for these commands. Sends those that are missing back for publication.
async fn search(
    link: Link,
    waiting: Waiting,
    back: UnboundedSender<Outgoing>,
    subject: String,
    mut some: Vec<Outgoing>,
) {
    loop {
        some.retain(|outgoing| waiting.lock().contains(&outgoing.place()));
        let Some(oldest_ms) = some.iter().map(Outgoing::created_ms).min() else { return };
        let ids = some.iter().map(Outgoing::id).collect();
        let since_ms = oldest_ms.saturating_sub(MARGIN_MS);
        let error = match link.published(&subject, since_ms, &ids).await {
            Ok(found) => {
                for mut outgoing in some {
                    if found.contains(&outgoing.id()) {
                        waiting.lock().remove(&outgoing.place());
                        continue;
                    }
                    outgoing.perhaps_there = false;
                    // Fails only when the server shuts down.
                    let _ = back.send(outgoing);
                }
                return;
            }
            Err(error) => error,
        };
        tracing::debug!(%error, subject, "the search for published commands will be repeated");
        tokio::select! {
            () = tokio::time::sleep(SEARCH_AGAIN) => {}
            () = back.closed() => return,
        }
    }
}

struct Sent {
    outgoing: Outgoing,
    again: Instant,
}

async fn until(held: Option<(u64, tokio::time::Instant)>) {
    if let Some((_, until)) = held {
        tokio::time::sleep_until(until).await;
    }
}

/// The broker's acknowledgement of a message.
#[derive(Deserialize)]
struct Ack {
    #[serde(default)]
    seq: Option<u64>,
}

pub(super) struct Post {
    link: Link,
    waiting: Waiting,
    /// Subject prefix of acknowledgements, followed by the number of the message.
    inbox: String,
    sent: HashMap<u64, Sent>,
    number: u64,
    /// The acknowledgement that new commands wait for, and the end of that wait.
    held: Option<(u64, tokio::time::Instant)>,
}

impl Post {
    pub(super) fn new(link: Link, waiting: Waiting) -> Self {
        let inbox = link.client().new_inbox();
        Self { link, waiting, inbox, sent: HashMap::new(), number: 0, held: None }
    }

    /// Publishes until the queue is closed.
    pub(super) async fn run(mut self, mut line: UnboundedReceiver<Outgoing>) {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut some = Vec::with_capacity(MANY);
        let (back, mut not_there) = unbounded_channel();
        loop {
            let acks = self.link.client().subscribe(format!("{}.*", self.inbox)).await;
            let Ok(mut acks) = acks else {
                tokio::time::sleep(LOOK).await;
                continue;
            };
            loop {
                tokio::select! {
                    biased;
                    ack = acks.next() => match ack {
                        Some(ack) => self.acknowledged(&ack),
                        None => break,
                    },
                    count = line.recv_many(&mut some, MANY), if self.takes(line.len()) => {
                        if count == 0 {
                            return;
                        }
                        self.publish(&mut some, &back).await;
                    }
                    Some(outgoing) = not_there.recv() => {
                        some.push(outgoing);
                        self.publish(&mut some, &back).await;
                    }
                    () = until(self.held), if self.held.is_some() => self.held = None,
                    _ = look.tick(), if !self.sent.is_empty() => {
                        some.extend(self.overdue());
                        if !some.is_empty() {
                            self.publish(&mut some, &back).await;
                        }
                    }
                }
            }
        }
    }

    /// Returns `true` if queued commands can be sent: none is awaited, or there are enough for a
    /// batch.
    fn takes(&self, waiting: usize) -> bool {
        let room = self.sent.len() < ON_THEIR_WAY;
        room && (self.held.is_none() || waiting >= ENOUGH)
    }

    fn acknowledged(&mut self, ack: &Message) {
        let number = ack.subject.rsplit('.').next().and_then(|number| number.parse().ok());
        if self.held.is_some_and(|(last, _)| number.is_some_and(|number| number >= last)) {
            self.held = None;
        }
        let Some(sent) = number.and_then(|number: u64| self.sent.remove(&number)) else { return };
        let taken = ack.status.is_none()
            && serde_json::from_slice::<Ack>(&ack.payload).is_ok_and(|ack| ack.seq.is_some());
        if taken {
            self.waiting.lock().remove(&sent.outgoing.place());
            return;
        }
        let why = String::from_utf8_lossy(&ack.payload);
        tracing::debug!(command = sent.outgoing.id(), %why, "will be published again");
        self.link.forget_streams();
        self.later(sent.outgoing);
    }

    /// Schedules a command for another try, with backoff.
    fn later(&mut self, mut outgoing: Outgoing) {
        outgoing.tries += 1;
        let wait = Duration::from_millis(50 << outgoing.tries.min(5));
        self.keep(outgoing, wait);
    }

    fn keep(&mut self, outgoing: Outgoing, wait: Duration) -> u64 {
        self.number += 1;
        self.sent.insert(self.number, Sent { outgoing, again: Instant::now() + wait });
        self.number
    }

    fn overdue(&mut self) -> Vec<Outgoing> {
        let now = Instant::now();
        self.sent.extract_if(|_, sent| sent.again <= now).map(|(_, sent)| sent.outgoing).collect()
    }

    async fn publish(&mut self, some: &mut Vec<Outgoing>, back: &UnboundedSender<Outgoing>) {
        self.link.up().await;
        if let Err(error) = self.link.ensure_streams().await {
            tracing::debug!(%error, "the streams do not exist yet");
            return some.drain(..).for_each(|outgoing| self.later(outgoing));
        }
        {
            // Drops commands whose call has ended in the meantime.
            let waiting = self.waiting.lock();
            some.retain(|outgoing| waiting.contains(&outgoing.place()));
        }
        self.set_aside(some, back);
        self.send_cards(some).await;
        for mut outgoing in some.drain(..) {
            let Some((mut headers, payload)) = outgoing.written(self.link.version()) else {
                continue;
            };
            headers.insert(async_nats::header::NATS_MESSAGE_ID, outgoing.id());
            let subject = outgoing.subject.clone();
            outgoing.perhaps_there = true;
            let number = self.keep(outgoing, PATIENCE);
            self.held = Some((number, tokio::time::Instant::now() + TOGETHER));
            let reply = format!("{}.{number}", self.inbox);
            let client = self.link.client();
            let sent = client
                .publish_with_reply_and_headers(subject, reply, headers, payload.into())
                .await;
            let Err(error) = sent else { continue };
            if let Some(Sent { outgoing, .. }) = self.sent.remove(&number) {
                tracing::debug!(command = outgoing.id(), %error, "will be published again");
                self.later(outgoing);
            }
        }
    }

    /// Searches for commands that the broker may have forgotten, while the others are published.
    fn set_aside(&self, some: &mut Vec<Outgoing>, back: &UnboundedSender<Outgoing>) {
        let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
        let remembers_ms = self.link.remembers_ms();
        let mut doubtful: HashMap<String, Vec<Outgoing>> = HashMap::new();
        for outgoing in some.extract_if(.., |one| one.is_doubtful(now_ms, remembers_ms)) {
            doubtful.entry(outgoing.subject.clone()).or_default().push(outgoing);
        }
        for (subject, some) in doubtful {
            let (link, waiting) = (self.link.clone(), self.waiting.clone());
            tokio::spawn(search(link, waiting, back.clone(), subject, some));
        }
    }

    /// Sends the cards before the commands, so that they arrive first.
    async fn send_cards(&self, some: &[Outgoing]) {
        let mut ahead: HashMap<Arc<str>, (Vec<Box<RawValue>>, usize)> = HashMap::new();
        for outgoing in some {
            let Some((inbox, card)) = outgoing.card(&self.link) else { continue };
            let (cards, bytes) = ahead.entry(inbox.clone()).or_default();
            *bytes += card.get().len();
            cards.push(card);
            if *bytes > AHEAD_BYTES {
                let cards = std::mem::take(cards);
                *bytes = 0;
                self.send_ahead(&inbox, &cards).await;
            }
        }
        for (inbox, (cards, _)) in ahead {
            self.send_ahead(&inbox, &cards).await;
        }
    }

    async fn send_ahead(&self, inbox: &str, cards: &[Box<RawValue>]) {
        let Ok(body) = serde_json::to_vec(&wire::CardsAhead { cards }) else { return };
        // Best effort: a follower without the card requests it.
        let sent = self.link.client().publish(inbox.to_owned(), body.into()).await;
        if let Err(error) = sent {
            tracing::debug!(%error, "cards were not sent in advance");
        }
    }
}
