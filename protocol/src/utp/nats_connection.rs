//! The connection to NATS: established in the background, held open, and re-established after a
//! failure. Missing streams are created, so a broker that lost its data is set up like a new one.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream;
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Config as StreamConfig, RetentionPolicy, StorageType, Stream};
use async_nats::{Client, ConnectOptions, HeaderMap};
use futures::StreamExt;
use tokio::sync::futures::Notified;
use tokio::sync::{Mutex, Notify};

use super::wire;
use crate::utp::card_followers::CardFollowers;

/// Timeout of a publish before it is retried.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the broker remembers message ids. It holds them in memory, so a full day would be
/// too many; before an older command is published again, the stream is searched for its id.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// Time for which commands are stored.
pub const DAY: Duration = Duration::from_secs(86_400);

/// The reason why a message was not published.
#[derive(Debug, thiserror::Error)]
pub enum NatsPublishError {
    /// The message is larger than the broker accepts; a retry fails until that limit changes.
    #[error("it is over the broker's limit for a message (max_payload)")]
    TooLarge,
    /// The streams exist, but none of them takes the subject.
    #[error("no stream accepts its subject")]
    NoStream,
    /// The message can never be published.
    #[error("{0}")]
    Invalid(String),
    /// Publishing can be retried.
    #[error("{0}")]
    Retryable(String),
}

impl From<PublishError> for NatsPublishError {
    fn from(error: PublishError) -> Self {
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => Self::TooLarge,
            PublishErrorKind::StreamNotFound => Self::NoStream,
            _ => Self::Retryable(error.to_string()),
        }
    }
}

/// The address of a NATS broker.
#[derive(Debug, Clone)]
pub struct NatsEndpoint {
    pub url: String,
    /// Path of a NATS credentials file.
    pub credentials: Option<std::path::PathBuf>,
    /// The protocol version, which is part of every subject.
    pub version: String,
}

/// A connection to NATS. Cheap to clone.
#[derive(Clone)]
pub struct NatsConnection {
    client: Client,
    jetstream: jetstream::Context,
    version: Arc<str>,
    on_connected: Arc<Notify>,
    are_streams_ready: Arc<AtomicBool>,
    /// Held while the streams are checked: several tasks need them at the start, and one check is
    /// enough.
    stream_check: Arc<Mutex<()>>,
    /// The duplicate window of the command stream, which another program may have created.
    duplicate_window_ms: Arc<AtomicU64>,
    followers: Arc<CardFollowers>,
    /// True if the outbox publisher has stopped and not yet recovered.
    outbox_down: Arc<AtomicBool>,
}

impl NatsConnection {
    /// Connects. If the broker is unavailable, connection attempts continue in the background.
    pub async fn connect(address: &NatsEndpoint, name: &str) -> anyhow::Result<Self> {
        let (on_connected, are_streams_ready) =
            (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (up, streams_ready) = (on_connected.clone(), are_streams_ready.clone());
        let was_up = Arc::new(AtomicBool::new(false));
        let mut options = ConnectOptions::new()
            .name(name)
            .retry_on_initial_connect()
            .max_reconnects(None)
            .reconnect_delay_callback(|attempts| {
                Duration::from_millis((50 * attempts.min(20) as u64).min(1_000))
            })
            .request_timeout(Some(Duration::from_secs(10)))
            .client_capacity(8_192)
            .subscription_capacity(262_144)
            .event_callback(move |event| {
                let (up, streams_ready, was_up) =
                    (up.clone(), streams_ready.clone(), was_up.clone());
                async move {
                    match event {
                        async_nats::Event::Connected => {
                            tracing::info!("connected to NATS");
                            if was_up.swap(true, Ordering::AcqRel) {
                                metrics::counter!("toolcrib_bus_reconnects_total").increment(1);
                            }
                            up.notify_waiters();
                        }
                        async_nats::Event::Disconnected => {
                            tracing::warn!("disconnected from NATS; publishing waits");
                            streams_ready.store(false, Ordering::Release);
                        }
                        other => tracing::debug!(event = %other, "NATS"),
                    }
                }
            });
        if let Some(path) = &address.credentials {
            options = options.credentials_file(path).await?;
        }
        let urls: Vec<&str> = address.url.split(',').map(str::trim).collect();
        let client = options.connect(urls).await?;
        let mut jetstream = jetstream::new(client.clone());
        jetstream.set_timeout(ACK_TIMEOUT);
        let version = address.version.as_str().into();
        Ok(Self {
            client,
            jetstream,
            version,
            on_connected,
            are_streams_ready,
            stream_check: Arc::default(),
            duplicate_window_ms: Arc::default(),
            followers: Arc::default(),
            outbox_down: Arc::default(),
        })
    }

    /// Returns the NATS client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the protocol version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns whether the broker is connected.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Returns a future that completes at the next reconnect.
    pub fn wait_for_reconnect(&self) -> Notified<'_> {
        self.on_connected.notified()
    }

    /// Waits until the broker is connected.
    pub async fn wait_until_connected(&self) {
        while !self.is_connected() {
            // Polled as well, so that a missed event costs only a short delay.
            let _ = tokio::time::timeout(Duration::from_millis(500), self.on_connected.notified())
                .await;
        }
    }

    /// Returns the tool services that receive cards in advance.
    pub fn followers(&self) -> &CardFollowers {
        &self.followers
    }

    /// Records whether the outbox is being published.
    pub fn set_outbox_healthy(&self, well: bool) {
        self.outbox_down.store(!well, Ordering::Release);
    }

    /// Returns true if the outbox is not being published although the broker is connected.
    pub fn is_outbox_down(&self) -> bool {
        self.outbox_down.load(Ordering::Acquire)
    }

    /// Makes the next publish check the streams again.
    pub fn invalidate_streams(&self) {
        self.are_streams_ready.store(false, Ordering::Release);
    }

    /// Returns the name of the command stream.
    pub fn command_stream(&self) -> String {
        format!("cg_cmd_{}", self.version)
    }

    /// Returns the pattern of the commands to the system whose subjects have no suffix.
    pub fn short_system_subject(&self) -> String {
        format!("cg.{}.*.*.cmd.sys.*", self.version)
    }

    /// Lets an existing stream of commands store those to the system without a suffix as well. A
    /// stream that cannot be changed stays as it is.
    async fn add_short_system_subject(&self, stream: &Stream) {
        let (info, subject) = (stream.cached_info(), self.short_system_subject());
        if stores_subject(&info.config.subjects, &subject) {
            return;
        }
        let mut config = info.config.clone();
        config.subjects.push(subject);
        match self.jetstream.update_stream(&config).await {
            Ok(updated) => tracing::debug!(stream = updated.config.name, "subject added"),
            Err(error) => tracing::warn!(
                %error,
                stream = config.name,
                "the stream does not store commands to the system without a suffix"
            ),
        }
    }

    /// Creates the streams that are missing.
    pub async fn ensure_streams(&self) -> Result<(), NatsPublishError> {
        if self.are_streams_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        let _checking = self.stream_check.lock().await;
        if self.are_streams_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        let version = &self.version;
        let streams = [
            (self.command_stream(), format!("cg.{version}.*.*.cmd.*.*.>"), DAY),
            (format!("cg_evt_{version}"), format!("cg.{version}.*.*.evt.*.*.>"), 7 * DAY),
        ];
        for (name, subject, max_age) in streams {
            let mut config = stream_config(name, subject, max_age);
            if config.name == self.command_stream() {
                config.subjects.push(self.short_system_subject());
            }
            let stream = self.jetstream.get_or_create_stream(config).await;
            let stream = stream
                .map_err(|error| NatsPublishError::Retryable(format!("no stream: {error}")))?;
            if stream.cached_info().config.name == self.command_stream() {
                self.add_short_system_subject(&stream).await;
            }
            let config = &stream.cached_info().config;
            if config.name == self.command_stream() {
                let remembers_ms = config.duplicate_window.as_millis() as u64;
                self.duplicate_window_ms.store(remembers_ms, Ordering::Release);
            }
        }
        self.are_streams_ready.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the time for which the broker drops a command with a known id.
    pub fn duplicate_window_ms(&self) -> u64 {
        self.duplicate_window_ms.load(Ordering::Acquire)
    }

    /// Returns those of these ids that belong to commands published on a subject since `since_ms`.
    pub async fn find_published_ids(
        &self,
        subject: &str,
        since_ms: u64,
        ids: &HashSet<String>,
    ) -> Result<HashSet<String>, async_nats::Error> {
        let start_time = async_nats::datetime::from_nanos(i128::from(since_ms) * 1_000_000)?;
        let config = OrderedConfig {
            filter_subject: subject.to_owned(),
            deliver_policy: DeliverPolicy::ByStartTime { start_time },
            headers_only: true,
            ..OrderedConfig::default()
        };
        let stream = self.jetstream.get_stream(self.command_stream()).await?;
        let consumer = stream.create_consumer(config).await?;
        let mut found = HashSet::new();
        let mut pending = consumer.cached_info().num_pending;
        let mut messages = consumer.messages().await?;
        while pending > 0 && found.len() < ids.len() {
            let next = tokio::time::timeout(ACK_TIMEOUT, messages.next()).await?;
            let message = next.ok_or("the stream of commands has ended")??;
            pending = message.info()?.pending;
            let headers = message.headers.as_ref();
            let id = headers.and_then(|headers| headers.get(NATS_MESSAGE_ID));
            found.extend(id.and_then(|id| ids.get(id.as_str())).cloned());
        }
        Ok(found)
    }

    /// Returns the JetStream context.
    pub fn jetstream(&self) -> &jetstream::Context {
        &self.jetstream
    }

    /// Publishes to a stream. On success the broker has stored the message. The broker drops a
    /// message whose id it has seen within the duplicate window.
    pub async fn publish(
        &self,
        subject: String,
        mut headers: HeaderMap,
        payload: Vec<u8>,
        id: &str,
    ) -> Result<(), NatsPublishError> {
        self.ensure_streams().await?;
        if !wire::set_header(&mut headers, NATS_MESSAGE_ID, id) {
            return Err(NatsPublishError::Invalid("its id has a line break in it".to_owned()));
        }
        let message = PublishMessage::build().payload(payload.into()).headers(headers);
        let sent = async { self.jetstream.send_publish(subject, message).await?.await };
        match tokio::time::timeout(ACK_TIMEOUT, sent).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                self.invalidate_streams();
                Err(error.into())
            }
            Err(_) => Err(NatsPublishError::Retryable("the broker did not answer".to_owned())),
        }
    }
}

/// Returns the configuration of Toolcrib's streams.
pub fn stream_config(name: String, subject: String, max_age: Duration) -> StreamConfig {
    StreamConfig {
        name,
        subjects: vec![subject],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: 1,
        max_age,
        duplicate_window: DUPLICATE_WINDOW,
        ..StreamConfig::default()
    }
}

/// Returns true if a stream with these subjects stores every message of a subject, which may have
/// wildcards.
pub fn stores_subject(stream_subjects: &[String], subject: &str) -> bool {
    stream_subjects.iter().any(|pattern| covers_subject(pattern, subject))
}

fn covers_subject(pattern: &str, subject: &str) -> bool {
    let (mut pattern, mut subject) = (pattern.split('.'), subject.split('.'));
    loop {
        match (pattern.next(), subject.next()) {
            (None, None) => return true,
            (Some(">"), Some(_)) => return true,
            (Some("*"), Some(token)) if token != ">" => {}
            (Some(same), Some(token)) if same == token => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_stores_the_subjects_that_its_own_cover() {
        let short = "cg.v1r3.*.*.cmd.sys.*";
        for (pattern, is_stored) in [
            (short, true),
            ("cg.v1r3.*.*.cmd.*.*", true),
            ("cg.v1r3.>", true),
            (">", true),
            ("cg.v1r3.*.*.cmd.*.*.>", false),
            ("cg.v1r3.*.*.cmd.sys.judge", false),
            ("cg.v1r3.*.public.cmd.sys.*", false),
            ("cg.v1r3.*.*.cmd.sys", false),
            ("cg.v1r4.>", false),
        ] {
            assert_eq!(stores_subject(&[pattern.to_owned()], short), is_stored, "{pattern}");
        }
        assert!(!stores_subject(&["a.*".to_owned()], "a.>"));
        assert!(!stores_subject(&[], short));
    }
}
