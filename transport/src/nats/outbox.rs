//! Publishes the messages of the outbox: wakeups, events of turns, and commands that are retried.
//!
//! Messages are published in the order in which they were stored, and none waits for another: if
//! the broker rejects a message for now, it is retried later while the messages after it proceed. A
//! message that can never be published becomes a dead letter, so it cannot fill up the outbox.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt;
use toolcrib::Engine;
use toolcrib::domain::utp::{OutboxMessage, is_token, subject};
use toolcrib::utp::UnprocessableMessage;
use toolcrib_protocol::utp::nats_connection::NatsPublishError;
use toolcrib_protocol::utp::{NatsConnection, wire};

/// Maximum number of messages that are published concurrently.
const OUTBOX_PAGE_SIZE: usize = 256;
/// Time to wait for a wake signal before checking for messages that are due for a retry.
const OUTBOX_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Delay before the second attempt to publish a message. It doubles with each further attempt.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Attempts after which a message without a stream becomes a dead letter. The streams of Toolcrib
/// exist by then, so no stream will ever take the message.
const NO_STREAM_TRIES: u32 = 5;
/// Delay before a publisher that panicked is restarted.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Publishes for as long as the future is polled. The publisher restarts after a panic; until then
/// `/readyz` reports it as down.
pub(super) async fn run_publisher(engine: Engine, nats: NatsConnection) {
    let down = || nats.set_outbox_healthy(false);
    supervise(down, || publish_loop(engine.clone(), nats.clone())).await;
}

async fn supervise<F: Future<Output = ()>>(down: impl Fn(), begin: impl Fn() -> F) {
    loop {
        let ended = AssertUnwindSafe(begin()).catch_unwind().await;
        down();
        tracing::error!(panicked = ended.is_err(), "the outbox publisher stopped; restarting it");
        tokio::time::sleep(RESTART_DELAY).await;
    }
}

async fn publish_loop(engine: Engine, nats: NatsConnection) {
    let mut news = engine.utp().subscribe_outbox();
    let mut outbox = OutboxPublisher { engine, link: nats, retries: HashMap::new() };
    loop {
        if !outbox.link.is_connected() {
            // The broker was disconnected and rejected nothing, so the backoff starts over.
            outbox.retries.clear();
        }
        outbox.link.wait_until_connected().await;
        // Done even if the outbox is empty: a tool service may need the streams first.
        if let Err(error) = outbox.link.ensure_streams().await {
            tracing::debug!(%error, "the streams do not exist yet");
        }
        match outbox.publish_pending().await {
            Ok(0) => {
                outbox.link.set_outbox_healthy(true);
                tokio::select! {
                    () = news.wait_for_wake() => {}
                    () = tokio::time::sleep(OUTBOX_POLL_INTERVAL) => {}
                }
            }
            Ok(_) => outbox.link.set_outbox_healthy(true),
            Err(error) => {
                tracing::warn!(%error, "the outbox could not be published; retrying");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

struct OutboxPublisher {
    engine: Engine,
    link: NatsConnection,
    /// Messages that the broker did not accept, by id.
    retries: HashMap<String, PublishRetry>,
}

struct PublishRetry {
    tries: u32,
    due_at: Instant,
}

impl OutboxPublisher {
    /// Publishes every due message. Returns the number of messages that left the outbox.
    async fn publish_pending(&mut self) -> anyhow::Result<usize> {
        let (mut after, mut gone) = (0, 0);
        loop {
            let letters = self.engine.utp().outbox(after, OUTBOX_PAGE_SIZE).await?;
            let Some((last, _)) = letters.last() else { break };
            after = *last;
            gone += self.publish_page(&letters).await?;
            if letters.len() < OUTBOX_PAGE_SIZE || !self.link.is_connected() {
                break;
            }
        }
        Ok(gone)
    }

    async fn publish_page(&mut self, letters: &[(u64, OutboxMessage)]) -> anyhow::Result<usize> {
        let (now_ms, now) = (self.engine.now_ms(), Instant::now());
        let due = |letter: &&OutboxMessage| {
            self.retries.get(&letter.id).is_none_or(|wait| wait.due_at <= now)
        };
        let due: Vec<&OutboxMessage> =
            letters.iter().map(|(_, letter)| letter).filter(due).collect();
        let nats = &self.link;
        let sending = due.iter().map(|letter| async move {
            if letter.expires_ms <= now_ms {
                return Ok(());
            }
            // A panic while sending one message does not affect the others.
            let sent = AssertUnwindSafe(publish_message(nats, letter)).catch_unwind().await;
            sent.unwrap_or_else(|_| {
                Err(NatsPublishError::Invalid("it cannot be written".to_owned()))
            })
        });
        let came_to = futures::future::join_all(sending).await;
        let mut gone = Vec::with_capacity(due.len());
        for (letter, came_to) in due.into_iter().zip(came_to) {
            let Err(error) = came_to else {
                gone.push(letter.id.clone());
                continue;
            };
            match self.record_failure(letter, &error) {
                Some(reason) => {
                    tracing::warn!(letter = letter.id, reason, %error, "became a dead letter");
                    self.dead_letter(letter, reason, &error).await?;
                    gone.push(letter.id.clone());
                }
                None => tracing::debug!(letter = letter.id, %error, "will be published again"),
            }
        }
        for id in &gone {
            self.retries.remove(id);
        }
        self.engine.utp().remove_from_outbox(&gone).await?;
        Ok(gone.len())
    }

    /// Records a failed attempt. Returns the reason if the message can never be published, or
    /// `None` after scheduling the next attempt.
    fn record_failure(
        &mut self,
        letter: &OutboxMessage,
        error: &NatsPublishError,
    ) -> Option<&'static str> {
        let waits = PublishRetry { tries: 0, due_at: Instant::now() };
        let waits = self.retries.entry(letter.id.clone()).or_insert(waits);
        waits.due_at = Instant::now() + MAX_BACKOFF.min(FIRST_BACKOFF * (1 << waits.tries.min(8)));
        waits.tries += 1;
        match error {
            NatsPublishError::TooLarge => Some("too_large"),
            NatsPublishError::Invalid(_) => Some("unpublishable"),
            NatsPublishError::NoStream if waits.tries >= NO_STREAM_TRIES => Some("no_stream"),
            NatsPublishError::NoStream | NatsPublishError::Retryable(_) => None,
        }
    }

    async fn dead_letter(
        &self,
        letter: &OutboxMessage,
        reason: &str,
        error: &NatsPublishError,
    ) -> anyhow::Result<()> {
        let subject = format!("cg.{}.{}", self.link.version(), letter.subject);
        let parts = subject::parse(&subject);
        let ours = parts.filter(|parts| matches!(parts.category, "cmd" | "evt"));
        // The subject does not say which project the message belongs to, so it is dropped.
        let Some(parts) = ours else { return Ok(()) };
        let command = (parts.category, parts.component) == ("cmd", "tool");
        let text = |(name, value): &(String, String)| (name.clone(), value.as_str().into());
        let dead = UnprocessableMessage {
            kind: if command { "command" } else { "letter" },
            reason: reason.to_owned(),
            message: error.to_string(),
            headers: letter.headers.iter().map(text).collect(),
            payload: letter.payload.to_string(),
            subject: subject.clone(),
            is_truncated: false,
        };
        self.engine.utp().dead_letter(parts.project, dead).await?;
        Ok(())
    }
}

async fn publish_message(
    nats: &NatsConnection,
    letter: &OutboxMessage,
) -> Result<(), NatsPublishError> {
    let subject = format!("cg.{}.{}", nats.version(), letter.subject);
    if subject::parse(&subject).is_none() || !subject.split('.').all(is_token) {
        return Err(NatsPublishError::Invalid(format!("\"{subject}\" is no subject of ours")));
    }
    let (headers, payload) = wire::encode_outbox_message(nats.version(), letter);
    nats.publish(subject, headers, payload.to_string().into_bytes(), &letter.id).await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_panicked_publisher_is_restarted_and_reported() {
        let (failures, starts) = (AtomicU32::new(0), AtomicU32::new(0));
        let (running, is_running) = tokio::sync::oneshot::channel();
        let running = parking_lot::Mutex::new(Some(running));
        let down = || {
            failures.fetch_add(1, Ordering::Relaxed);
        };
        let begin = || async {
            if starts.fetch_add(1, Ordering::Relaxed) == 0 {
                panic!("a letter that nobody thought of");
            }
            running.lock().take().into_iter().for_each(|running| running.send(()).unwrap());
            std::future::pending().await
        };
        tokio::select! {
            () = supervise(down, begin) => unreachable!(),
            started = is_running => started.unwrap(),
        }
        assert_eq!((failures.into_inner(), starts.into_inner()), (1, 2));
    }
}
