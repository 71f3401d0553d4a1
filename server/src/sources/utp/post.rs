//! The way of commands to the broker: one task for all of them, which publishes what waits and
//! takes the acknowledgements. What is not acknowledged is published again until it is, or until
//! its call has ended; the broker drops what it has, and what it may have forgotten is looked for.

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
/// How long before the broker forgets a command it is not relied on to know it; and by how much
/// its clock may be another.
const MARGIN_MS: u64 = 20_000;
/// How long after a search in vain the next is tried.
const SEARCH_AGAIN: Duration = Duration::from_millis(500);
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
    /// The broker may have it already: it was sent before, by this process or one before it.
    perhaps_there: bool,
}

impl Outgoing {
    /// None when it cannot be a command; why, otherwise.
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

    /// Whether it may be there, and the broker not know it any more.
    fn is_doubtful(&self, now_ms: u64, remembers_ms: u64) -> bool {
        self.perhaps_there && now_ms.saturating_sub(self.created_ms()) + MARGIN_MS > remembers_ms
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

/// Looks whether the broker has these. Those that it has not come back, to be published.
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
                    // Nobody takes it only when the server is going down.
                    let _ = back.send(outgoing);
                }
                return;
            }
            Err(error) => error,
        };
        tracing::debug!(%error, subject, "commands that may be there will be looked for again");
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

    async fn publish(&mut self, some: &mut Vec<Outgoing>, back: &UnboundedSender<Outgoing>) {
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

    /// What the broker may have and not know any more is looked for first, while others go out.
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
