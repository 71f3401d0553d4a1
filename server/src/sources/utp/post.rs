//! The way of commands to the broker: one task for all of them, which publishes what waits and
//! takes the acknowledgements. What is not acknowledged is published again until it is, or until
//! its call has ended; the broker drops what it has.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message};
use futures::StreamExt;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::MissedTickBehavior;
use toolcrib::CallId;
use toolcrib::source::Attempt;
use toolcrib::utp::{card, subject};

use crate::utp::{Link, wire};

/// Commands that are on their way to the broker at once.
const ON_THEIR_WAY: usize = 1_024;
/// How long what comes waits for the acknowledgement of what is out, to go together; and how many
/// do not wait.
const TOGETHER: Duration = Duration::from_millis(2);
const ENOUGH: usize = 24;
/// Most that are taken out of the line in one go.
const MANY: usize = 256;
/// How long an acknowledgement is waited for before the command is published again.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked for what has to be published again.
const LOOK: Duration = Duration::from_millis(100);
/// Most that is sent beforehand in one message, and a card that is too large to be.
const AHEAD_BYTES: usize = 262_144;
const LARGE: usize = 65_536;

/// What is not acknowledged yet.
pub(super) type Waiting = Arc<Mutex<HashSet<(CallId, u32)>>>;

/// A command on its way.
pub(super) struct Outgoing {
    attempt: Attempt,
    subject: String,
    /// What it says; none when it was published before and has to be written again.
    written: Option<(HeaderMap, Vec<u8>)>,
    tries: u32,
}

impl Outgoing {
    /// None when it cannot be a command; why, otherwise.
    pub(super) fn new(version: &str, attempt: Attempt) -> Result<Option<Self>, String> {
        let Some(command) = &attempt.command else { return Ok(None) };
        let (subject, headers, payload) = wire::command(version, &attempt, command)?;
        Ok(Some(Self { subject, written: Some((headers, payload)), attempt, tries: 0 }))
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

    /// Who is sent its card beforehand, and the card.
    fn card(&self, link: &Link) -> Option<(Arc<str>, Box<RawValue>)> {
        let target = subject::parse(&self.subject)?.target;
        let inbox = link.followers().of(&self.attempt.project, target)?;
        let command = self.attempt.command.as_ref()?;
        let card = card::of_call(&command.call, Some(&command.binding));
        let text = serde_json::value::to_raw_value(&wire::CardBody::of(&card)).ok()?;
        (text.get().len() < LARGE).then_some((inbox, text))
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

/// The broker's word on a message.
#[derive(Deserialize)]
struct Ack {
    #[serde(default)]
    seq: Option<u64>,
}

pub(super) struct Post {
    link: Link,
    waiting: Waiting,
    /// Where acknowledgements come; behind it is the number of the message.
    inbox: String,
    sent: HashMap<u64, Sent>,
    number: u64,
    /// Those who come wait for this acknowledgement, and until when at most.
    held: Option<(u64, tokio::time::Instant)>,
}

impl Post {
    pub(super) fn new(link: Link, waiting: Waiting) -> Self {
        let inbox = link.client().new_inbox();
        Self { link, waiting, inbox, sent: HashMap::new(), number: 0, held: None }
    }

    /// Publishes until there is nobody any more who could have something to publish.
    pub(super) async fn run(mut self, mut line: UnboundedReceiver<Outgoing>) {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut some = Vec::with_capacity(MANY);
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
                        self.publish(&mut some).await;
                    }
                    () = until(self.held), if self.held.is_some() => self.held = None,
                    _ = look.tick(), if !self.sent.is_empty() => {
                        some.extend(self.overdue());
                        if !some.is_empty() {
                            self.publish(&mut some).await;
                        }
                    }
                }
            }
        }
    }

    /// Whether those who wait can go: when nothing is out, or there are enough of them.
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

    /// Kept until its time comes again.
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

    async fn publish(&mut self, some: &mut Vec<Outgoing>) {
        self.link.up().await;
        if let Err(error) = self.link.ensure_streams().await {
            tracing::debug!(%error, "the streams are not there yet");
            return some.drain(..).for_each(|outgoing| self.later(outgoing));
        }
        {
            // Whose call has ended meanwhile is not wanted any more.
            let waiting = self.waiting.lock();
            some.retain(|outgoing| waiting.contains(&outgoing.place()));
        }
        self.send_cards(some).await;
        for mut outgoing in some.drain(..) {
            let Some((mut headers, payload)) = outgoing.written(self.link.version()) else {
                continue;
            };
            headers.insert(async_nats::header::NATS_MESSAGE_ID, outgoing.id());
            let subject = outgoing.subject.clone();
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

    /// Before the commands, so that they are there when a command is.
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
        // Whom it does not reach asks.
        let sent = self.link.client().publish(inbox.to_owned(), body.into()).await;
        if let Err(error) = sent {
            tracing::debug!(%error, "cards were not sent beforehand");
        }
    }
}
