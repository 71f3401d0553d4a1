//! Publishes commands to the broker. One task publishes all queued commands and receives the
//! acknowledgements. It publishes a command again until the broker acknowledges it or the call has
//! ended. The broker drops duplicates that it remembers. Before the task publishes a command again
//! that the broker may have forgotten, it searches the stream for the command.

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
use toolcrib::domain::derived;
use toolcrib::domain::utp::subject;
use toolcrib::ports::source::Attempt;
use toolcrib_protocol::utp::{NatsConnection, wire};

/// Maximum number of commands in flight.
const MAX_IN_FLIGHT: usize = 1_024;
/// Time that new commands wait for the acknowledgement of those in flight, to be sent as one batch.
const BATCH_WINDOW: Duration = Duration::from_millis(2);
/// Number of queued commands that are sent without waiting.
const BATCH_SIZE: usize = 24;
/// Maximum number of commands taken from the queue at once.
const MAX_DRAIN: usize = 256;
/// Time to wait for an acknowledgement before a command is published again.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks for commands to publish again.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Safety margin before the end of the broker's duplicate window, and for clock differences.
const MARGIN_MS: u64 = 20_000;
/// Delay before a failed search is repeated.
const SEARCH_AGAIN: Duration = Duration::from_millis(500);
/// Maximum size of a message with prefetched cards.
const MAX_PREFETCH_BYTES: usize = 262_144;
/// Size from which a card is not prefetched.
const MAX_PREFETCHED_CARD_BYTES: usize = 65_536;

/// Commands that are not acknowledged yet.
pub(super) type UnacknowledgedCommands = Arc<Mutex<HashSet<(CallId, u32)>>>;

/// A command to publish.
pub(super) struct OutgoingCommand {
    attempt: Attempt,
    subject: String,
    /// The encoded message, or `None` if it was published before and must be encoded again.
    encoded: Option<(HeaderMap, Vec<u8>)>,
    publish_attempts: u32,
    /// `true` if the broker may already have it, from this process or an earlier one.
    may_be_published: bool,
}

impl OutgoingCommand {
    /// Encodes a command. Returns `None` if the attempt has no command, and an error if it cannot
    /// be encoded.
    pub(super) fn new(version: &str, attempt: Attempt) -> Result<Option<Self>, String> {
        let Some(command) = &attempt.command else { return Ok(None) };
        let (subject, headers, payload) = wire::encode_command(version, &attempt, command)?;
        let (encoded, may_be_published) = (Some((headers, payload)), attempt.redelivered);
        Ok(Some(Self { subject, encoded, attempt, publish_attempts: 0, may_be_published }))
    }

    pub(super) fn attempt_key(&self) -> (CallId, u32) {
        (self.attempt.call_id.clone(), self.attempt.number)
    }

    fn message_id(&self) -> String {
        format!("cmd-{}-{}", self.attempt.call_id, self.attempt.number)
    }

    fn take_encoded(&mut self, version: &str) -> Option<(HeaderMap, Vec<u8>)> {
        if let Some(encoded) = self.encoded.take() {
            return Some(encoded);
        }
        let command = self.attempt.command.as_ref()?;
        let (_, headers, payload) = wire::encode_command(version, &self.attempt, command).ok()?;
        Some((headers, payload))
    }

    fn created_ms(&self) -> u64 {
        self.attempt.command.as_ref().map_or(0, |command| command.call.created_ms)
    }

    /// Returns `true` if the command may be published already and the broker no longer detects
    /// duplicates of it.
    fn is_past_duplicate_window(&self, now_ms: u64, duplicate_window_ms: u64) -> bool {
        self.may_be_published
            && now_ms.saturating_sub(self.created_ms()) + MARGIN_MS > duplicate_window_ms
    }

    /// Returns the command's card and the inbox of the follower that receives it in advance.
    fn card(&self, nats: &NatsConnection) -> Option<(Arc<str>, Box<RawValue>)> {
        let target = subject::parse(&self.subject)?.target;
        let inbox = nats.followers().sole_inbox(&self.attempt.project, target)?;
        let command = self.attempt.command.as_ref()?;
        let card = derived::call_card(&command.call, Some(&command.binding));
        let text = serde_json::value::to_raw_value(&wire::WireCard::new(&card)).ok()?;
        (text.get().len() < MAX_PREFETCHED_CARD_BYTES).then_some((inbox, text))
    }
}

/// Searches the stream for these commands. Sends those that are missing back for publication.
async fn search_published(
    nats: NatsConnection,
    unacknowledged: UnacknowledgedCommands,
    requeue: UnboundedSender<OutgoingCommand>,
    subject: String,
    mut commands: Vec<OutgoingCommand>,
) {
    loop {
        commands.retain(|outgoing| unacknowledged.lock().contains(&outgoing.attempt_key()));
        let Some(oldest_ms) = commands.iter().map(OutgoingCommand::created_ms).min() else {
            return;
        };
        let ids = commands.iter().map(OutgoingCommand::message_id).collect();
        let since_ms = oldest_ms.saturating_sub(MARGIN_MS);
        let error = match nats.find_published_ids(&subject, since_ms, &ids).await {
            Ok(found) => {
                for mut outgoing in commands {
                    if found.contains(&outgoing.message_id()) {
                        unacknowledged.lock().remove(&outgoing.attempt_key());
                        continue;
                    }
                    outgoing.may_be_published = false;
                    // Fails only when the server shuts down.
                    let _ = requeue.send(outgoing);
                }
                return;
            }
            Err(error) => error,
        };
        tracing::debug!(%error, subject, "the search for published commands will be repeated");
        tokio::select! {
            () = tokio::time::sleep(SEARCH_AGAIN) => {}
            () = requeue.closed() => return,
        }
    }
}

struct InFlightCommand {
    outgoing: OutgoingCommand,
    retry_at: Instant,
}

async fn sleep_until_window_ends(window: Option<(u64, tokio::time::Instant)>) {
    if let Some((_, until)) = window {
        tokio::time::sleep_until(until).await;
    }
}

/// The broker's acknowledgement of a message.
#[derive(Deserialize)]
struct PublishAck {
    #[serde(default)]
    seq: Option<u64>,
}

pub(super) struct CommandPublisher {
    nats: NatsConnection,
    unacknowledged: UnacknowledgedCommands,
    /// Subject prefix of acknowledgements, followed by the number of the message.
    ack_inbox: String,
    in_flight: HashMap<u64, InFlightCommand>,
    last_number: u64,
    /// The acknowledgement that new commands wait for, and the end of that wait.
    batch_window: Option<(u64, tokio::time::Instant)>,
}

impl CommandPublisher {
    pub(super) fn new(nats: NatsConnection, unacknowledged: UnacknowledgedCommands) -> Self {
        let ack_inbox = nats.client().new_inbox();
        Self {
            nats,
            unacknowledged,
            ack_inbox,
            in_flight: HashMap::new(),
            last_number: 0,
            batch_window: None,
        }
    }

    /// Publishes until the queue is closed.
    pub(super) async fn run(mut self, mut queue: UnboundedReceiver<OutgoingCommand>) {
        let mut overdue_check = tokio::time::interval(OVERDUE_CHECK_INTERVAL);
        overdue_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut commands = Vec::with_capacity(MAX_DRAIN);
        let (requeue, mut unpublished) = unbounded_channel();
        loop {
            let acks = self.nats.client().subscribe(format!("{}.*", self.ack_inbox)).await;
            let Ok(mut acks) = acks else {
                tokio::time::sleep(OVERDUE_CHECK_INTERVAL).await;
                continue;
            };
            loop {
                tokio::select! {
                    biased;
                    ack = acks.next() => match ack {
                        Some(ack) => self.handle_ack(&ack),
                        None => break,
                    },
                    count = queue.recv_many(&mut commands, MAX_DRAIN),
                        if self.can_publish(queue.len()) =>
                    {
                        if count == 0 {
                            return;
                        }
                        self.publish(&mut commands, &requeue).await;
                    }
                    Some(outgoing) = unpublished.recv() => {
                        commands.push(outgoing);
                        self.publish(&mut commands, &requeue).await;
                    }
                    () = sleep_until_window_ends(self.batch_window),
                        if self.batch_window.is_some() =>
                    {
                        self.batch_window = None;
                    }
                    _ = overdue_check.tick(), if !self.in_flight.is_empty() => {
                        commands.extend(self.take_overdue());
                        if !commands.is_empty() {
                            self.publish(&mut commands, &requeue).await;
                        }
                    }
                }
            }
        }
    }

    /// Returns `true` if queued commands can be sent: fewer than the maximum are in flight, and
    /// they wait for no acknowledgement or are enough for a batch.
    fn can_publish(&self, queued: usize) -> bool {
        let has_capacity = self.in_flight.len() < MAX_IN_FLIGHT;
        has_capacity && (self.batch_window.is_none() || queued >= BATCH_SIZE)
    }

    fn handle_ack(&mut self, ack: &Message) {
        let number = ack.subject.rsplit('.').next().and_then(|number| number.parse().ok());
        if self.batch_window.is_some_and(|(last, _)| number.is_some_and(|number| number >= last)) {
            self.batch_window = None;
        }
        let Some(sent) = number.and_then(|number: u64| self.in_flight.remove(&number)) else {
            return;
        };
        let is_stored = ack.status.is_none()
            && serde_json::from_slice::<PublishAck>(&ack.payload)
                .is_ok_and(|ack| ack.seq.is_some());
        if is_stored {
            self.unacknowledged.lock().remove(&sent.outgoing.attempt_key());
            return;
        }
        let reason = String::from_utf8_lossy(&ack.payload);
        tracing::debug!(command = sent.outgoing.message_id(), why = %reason, "will be published again");
        self.nats.invalidate_streams();
        self.retry_later(sent.outgoing);
    }

    /// Schedules a command to be published again, with backoff.
    fn retry_later(&mut self, mut outgoing: OutgoingCommand) {
        outgoing.publish_attempts += 1;
        let wait = Duration::from_millis(50 << outgoing.publish_attempts.min(5));
        self.track(outgoing, wait);
    }

    fn track(&mut self, outgoing: OutgoingCommand, wait: Duration) -> u64 {
        self.last_number += 1;
        self.in_flight.insert(
            self.last_number,
            InFlightCommand { outgoing, retry_at: Instant::now() + wait },
        );
        self.last_number
    }

    fn take_overdue(&mut self) -> Vec<OutgoingCommand> {
        let now = Instant::now();
        self.in_flight
            .extract_if(|_, sent| sent.retry_at <= now)
            .map(|(_, sent)| sent.outgoing)
            .collect()
    }

    async fn publish(
        &mut self,
        commands: &mut Vec<OutgoingCommand>,
        requeue: &UnboundedSender<OutgoingCommand>,
    ) {
        self.nats.wait_until_connected().await;
        if let Err(error) = self.nats.ensure_streams().await {
            tracing::debug!(%error, "the streams do not exist yet");
            return commands.drain(..).for_each(|outgoing| self.retry_later(outgoing));
        }
        {
            // Drops commands whose call has ended in the meantime.
            let unacknowledged = self.unacknowledged.lock();
            commands.retain(|outgoing| unacknowledged.contains(&outgoing.attempt_key()));
        }
        self.divert_uncertain(commands, requeue);
        self.send_cards(commands).await;
        for mut outgoing in commands.drain(..) {
            let Some((mut headers, payload)) = outgoing.take_encoded(self.nats.version()) else {
                continue;
            };
            headers.insert(async_nats::header::NATS_MESSAGE_ID, outgoing.message_id());
            let subject = outgoing.subject.clone();
            outgoing.may_be_published = true;
            let number = self.track(outgoing, ACK_TIMEOUT);
            self.batch_window = Some((number, tokio::time::Instant::now() + BATCH_WINDOW));
            let reply = format!("{}.{number}", self.ack_inbox);
            let client = self.nats.client();
            let sent = client
                .publish_with_reply_and_headers(subject, reply, headers, payload.into())
                .await;
            let Err(error) = sent else { continue };
            if let Some(InFlightCommand { outgoing, .. }) = self.in_flight.remove(&number) {
                tracing::debug!(command = outgoing.message_id(), %error, "will be published again");
                self.retry_later(outgoing);
            }
        }
    }

    /// Searches for commands that the broker may have forgotten, while the others are published.
    fn divert_uncertain(
        &self,
        commands: &mut Vec<OutgoingCommand>,
        requeue: &UnboundedSender<OutgoingCommand>,
    ) {
        let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
        let duplicate_window_ms = self.nats.duplicate_window_ms();
        let mut doubtful: HashMap<String, Vec<OutgoingCommand>> = HashMap::new();
        for outgoing in commands
            .extract_if(.., |command| command.is_past_duplicate_window(now_ms, duplicate_window_ms))
        {
            doubtful.entry(outgoing.subject.clone()).or_default().push(outgoing);
        }
        for (subject, commands) in doubtful {
            let (nats, unacknowledged) = (self.nats.clone(), self.unacknowledged.clone());
            tokio::spawn(search_published(
                nats,
                unacknowledged,
                requeue.clone(),
                subject,
                commands,
            ));
        }
    }

    /// Sends the cards before the commands, so that they arrive first.
    async fn send_cards(&self, commands: &[OutgoingCommand]) {
        let mut cards_by_subject: HashMap<Arc<str>, (Vec<Box<RawValue>>, usize)> = HashMap::new();
        for outgoing in commands {
            let Some((inbox, card)) = outgoing.card(&self.nats) else { continue };
            let (cards, bytes) = cards_by_subject.entry(inbox.clone()).or_default();
            *bytes += card.get().len();
            cards.push(card);
            if *bytes > MAX_PREFETCH_BYTES {
                let cards = std::mem::take(cards);
                *bytes = 0;
                self.publish_cards(&inbox, &cards).await;
            }
        }
        for (inbox, (cards, _)) in cards_by_subject {
            self.publish_cards(&inbox, &cards).await;
        }
    }

    async fn publish_cards(&self, inbox: &str, cards: &[Box<RawValue>]) {
        let Ok(body) = serde_json::to_vec(&wire::PrefetchedCardsBody { cards }) else { return };
        // Best effort: a follower without the card requests it.
        let sent = self.nats.client().publish(inbox.to_owned(), body.into()).await;
        if let Err(error) = sent {
            tracing::debug!(%error, "cards were not sent in advance");
        }
    }
}
