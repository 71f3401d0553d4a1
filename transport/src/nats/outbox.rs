//! Publishes the messages of the outbox: wakeups, turn events, and commands that are retried.
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
const NO_STREAM_ATTEMPTS: u32 = 5;
/// Delay before a publisher that panicked is restarted.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Publishes for as long as the future is polled. The publisher restarts after a panic; until then
/// `/readyz` reports it as down.
pub(super) async fn run_publisher(engine: Engine, nats: NatsConnection) {
    let down = || nats.set_outbox_healthy(false);
    supervise(down, || publish_loop(engine.clone(), nats.clone())).await;
}

async fn supervise<F: Future<Output = ()>>(down: impl Fn(), start: impl Fn() -> F) {
    loop {
        let ended = AssertUnwindSafe(start()).catch_unwind().await;
        down();
        tracing::error!(panicked = ended.is_err(), "the outbox publisher stopped; restarting it");
        tokio::time::sleep(RESTART_DELAY).await;
    }
}

async fn publish_loop(engine: Engine, nats: NatsConnection) {
    let mut wake = engine.utp().outbox().subscribe();
    let mut outbox = OutboxPublisher { engine, nats, retries: HashMap::new() };
    loop {
        if !outbox.nats.is_connected() {
            // The broker was disconnected and rejected nothing, so the backoff starts over.
            outbox.retries.clear();
        }
        outbox.nats.wait_until_connected().await;
        // Done even if the outbox is empty: a tool service may need the streams first.
        if let Err(error) = outbox.nats.ensure_streams().await {
            tracing::debug!(%error, "the streams do not exist yet");
        }
        match outbox.publish_pending().await {
            Ok(0) => {
                outbox.nats.set_outbox_healthy(true);
                tokio::select! {
                    () = wake.wait_for_wake() => {}
                    () = tokio::time::sleep(OUTBOX_POLL_INTERVAL) => {}
                }
            }
            Ok(_) => outbox.nats.set_outbox_healthy(true),
            Err(error) => {
                tracing::warn!(%error, "the outbox could not be published; retrying");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

struct OutboxPublisher {
    engine: Engine,
    nats: NatsConnection,
    /// Messages that the broker did not accept, by id.
    retries: HashMap<String, PublishRetry>,
}

struct PublishRetry {
    attempts: u32,
    due_at: Instant,
}

impl OutboxPublisher {
    /// Publishes every due message, and removes an expired one without publishing it. Returns the
    /// number of messages that left the outbox.
    async fn publish_pending(&mut self) -> anyhow::Result<usize> {
        let (mut after, mut removed) = (0, 0);
        loop {
            let messages = self.engine.utp().outbox().messages(after, OUTBOX_PAGE_SIZE).await?;
            let Some((last, _)) = messages.last() else { break };
            after = *last;
            removed += self.publish_page(&messages).await?;
            if messages.len() < OUTBOX_PAGE_SIZE || !self.nats.is_connected() {
                break;
            }
        }
        Ok(removed)
    }

    async fn publish_page(&mut self, messages: &[(u64, OutboxMessage)]) -> anyhow::Result<usize> {
        let (now_ms, now) = (self.engine.now_ms(), Instant::now());
        let due = |message: &&OutboxMessage| {
            self.retries.get(&message.id).is_none_or(|wait| wait.due_at <= now)
        };
        let due: Vec<&OutboxMessage> =
            messages.iter().map(|(_, message)| message).filter(due).collect();
        let nats = &self.nats;
        let sending = due.iter().map(|message| async move {
            if message.expires_ms <= now_ms {
                return Ok(());
            }
            // A panic while sending one message does not affect the others.
            let sent = AssertUnwindSafe(publish_message(nats, message)).catch_unwind().await;
            sent.unwrap_or_else(|_| {
                Err(NatsPublishError::Invalid("it cannot be written".to_owned()))
            })
        });
        let outcomes = futures::future::join_all(sending).await;
        let mut removed = Vec::with_capacity(due.len());
        for (message, outcome) in due.into_iter().zip(outcomes) {
            let Err(error) = outcome else {
                removed.push(message.id.clone());
                continue;
            };
            match self.record_failure(message, &error) {
                Some(reason) => {
                    tracing::warn!(letter = message.id, reason, %error, "became a dead letter");
                    self.dead_letter(message, reason, &error).await?;
                    removed.push(message.id.clone());
                }
                None => tracing::debug!(letter = message.id, %error, "will be published again"),
            }
        }
        for id in &removed {
            self.retries.remove(id);
        }
        self.engine.utp().outbox().remove(&removed).await?;
        Ok(removed.len())
    }

    /// Records a failed attempt. Returns the reason if the message can never be published, or
    /// `None` after scheduling the next attempt.
    fn record_failure(
        &mut self,
        message: &OutboxMessage,
        error: &NatsPublishError,
    ) -> Option<&'static str> {
        let waits = PublishRetry { attempts: 0, due_at: Instant::now() };
        let waits = self.retries.entry(message.id.clone()).or_insert(waits);
        waits.due_at =
            Instant::now() + MAX_BACKOFF.min(FIRST_BACKOFF * (1 << waits.attempts.min(8)));
        waits.attempts += 1;
        match error {
            NatsPublishError::TooLarge => Some("too_large"),
            NatsPublishError::Invalid(_) => Some("unpublishable"),
            NatsPublishError::NoStream if waits.attempts >= NO_STREAM_ATTEMPTS => Some("no_stream"),
            NatsPublishError::NoStream | NatsPublishError::Retryable(_) => None,
        }
    }

    async fn dead_letter(
        &self,
        message: &OutboxMessage,
        reason: &str,
        error: &NatsPublishError,
    ) -> anyhow::Result<()> {
        let subject = format!("cg.{}.{}", self.nats.version(), message.subject);
        let parts = subject::parse(&subject);
        let publishable = parts.filter(|parts| matches!(parts.category, "cmd" | "evt"));
        // The subject does not say which project the message belongs to, so it is dropped.
        let Some(parts) = publishable else { return Ok(()) };
        let command = (parts.category, parts.component) == ("cmd", "tool");
        let text = |(name, value): &(String, String)| (name.clone(), value.as_str().into());
        let dead = UnprocessableMessage {
            kind: if command { "command" } else { "letter" },
            reason: reason.to_owned(),
            message: error.to_string(),
            headers: message.headers.iter().map(text).collect(),
            payload: message.payload.to_string(),
            subject: subject.clone(),
            is_truncated: false,
        };
        self.engine.utp().dead_letters().save(parts.project, dead).await?;
        Ok(())
    }
}

async fn publish_message(
    nats: &NatsConnection,
    message: &OutboxMessage,
) -> Result<(), NatsPublishError> {
    let subject = format!("cg.{}.{}", nats.version(), message.subject);
    if subject::parse(&subject).is_none() || !subject.split('.').all(is_token) {
        return Err(NatsPublishError::Invalid(format!(
            "\"{subject}\" is not a subject of this server"
        )));
    }
    let (headers, payload) = wire::encode_outbox_message(nats.version(), message);
    nats.publish(subject, headers, payload.to_string().into_bytes(), &message.id).await
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
        let start = || async {
            if starts.fetch_add(1, Ordering::Relaxed) == 0 {
                panic!("an unexpected message");
            }
            running.lock().take().into_iter().for_each(|running| running.send(()).unwrap());
            std::future::pending().await
        };
        tokio::select! {
            () = supervise(down, start) => unreachable!(),
            started = is_running => started.unwrap(),
        }
        assert_eq!((failures.into_inner(), starts.into_inner()), (1, 2));
    }
}
