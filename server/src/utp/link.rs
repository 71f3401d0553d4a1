//! The connection to NATS: made in the background, kept, and made again. Streams are created when
//! they are missing, so a broker that lost everything is set up like a new one.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::stream::{Config as StreamConfig, RetentionPolicy, StorageType};
use async_nats::jetstream::{self, message::PublishMessage};
use async_nats::{Client, ConnectOptions, HeaderMap};
use futures::StreamExt;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::follow::Followers;
use super::wire;

/// How long a publish may take before it is tried again.
const ACK_PATIENCE: Duration = Duration::from_secs(5);
/// For how long the broker remembers what it was sent. It keeps these ids in memory, so a day of
/// them would be too many; what is older than this is looked for before it is published again.
const REMEMBERS: Duration = Duration::from_secs(120);
/// How long commands are kept.
pub const DAY: Duration = Duration::from_secs(86_400);

/// Why something was not published.
#[derive(Debug, thiserror::Error)]
pub enum NotPublished {
    /// As long as the broker's limit is what it is, it never will be.
    #[error("it is over the broker's limit for a message (max_payload)")]
    TooLarge,
    /// The streams are there, and none of them takes its subject.
    #[error("no stream takes its subject")]
    NoStream,
    /// It can never be.
    #[error("{0}")]
    Never(String),
    /// It can be tried again.
    #[error("{0}")]
    Later(String),
}

impl From<PublishError> for NotPublished {
    fn from(error: PublishError) -> Self {
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => Self::TooLarge,
            PublishErrorKind::StreamNotFound => Self::NoStream,
            _ => Self::Later(error.to_string()),
        }
    }
}

/// Where to connect to.
#[derive(Debug, Clone)]
pub struct Address {
    pub url: String,
    /// A file with NATS credentials.
    pub credentials: Option<std::path::PathBuf>,
    /// The version of the protocol: a part of every subject.
    pub version: String,
}

/// A connection. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    client: Client,
    jetstream: jetstream::Context,
    version: Arc<str>,
    came_up: Arc<Notify>,
    streams_known: Arc<AtomicBool>,
    /// How long the stream of commands, whoever made it, remembers ids.
    remembers_ms: Arc<AtomicU64>,
    followers: Arc<Followers>,
    /// Whoever publishes the outbox fell over, and has not come round since.
    outbox_down: Arc<AtomicBool>,
}

impl Link {
    /// Connects; when the broker is away, goes on trying in the background.
    pub async fn connect(address: &Address, name: &str) -> anyhow::Result<Self> {
        let (came_up, streams_known) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (up, known) = (came_up.clone(), streams_known.clone());
        let was_up = Arc::new(AtomicBool::new(false));
        let mut options = ConnectOptions::new()
            .name(name)
            .retry_on_initial_connect()
            .max_reconnects(None)
            .reconnect_delay_callback(|tries| {
                Duration::from_millis((50 * tries.min(20) as u64).min(1_000))
            })
            .request_timeout(Some(Duration::from_secs(10)))
            .client_capacity(8_192)
            .subscription_capacity(262_144)
            .event_callback(move |event| {
                let (up, known, was_up) = (up.clone(), known.clone(), was_up.clone());
                async move {
                    match event {
                        async_nats::Event::Connected => {
                            tracing::info!("NATS is there");
                            if was_up.swap(true, Ordering::AcqRel) {
                                metrics::counter!("toolcrib_bus_reconnects_total").increment(1);
                            }
                            up.notify_waiters();
                        }
                        async_nats::Event::Disconnected => {
                            tracing::warn!("NATS is away; what is to be published waits");
                            known.store(false, Ordering::Release);
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
        jetstream.set_timeout(ACK_PATIENCE);
        let version = address.version.as_str().into();
        Ok(Self {
            client,
            jetstream,
            version,
            came_up,
            streams_known,
            remembers_ms: Arc::default(),
            followers: Arc::default(),
            outbox_down: Arc::default(),
        })
    }

    /// The connection itself.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The version of the protocol.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether the broker answers.
    pub fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Returns when the connection is made again.
    pub fn connected_again(&self) -> Notified<'_> {
        self.came_up.notified()
    }

    /// Returns when the broker is there.
    pub async fn up(&self) {
        while !self.is_up() {
            // Looked at again in any case: a missed event costs a moment and nothing else.
            let _ = tokio::time::timeout(Duration::from_millis(500), self.came_up.notified()).await;
        }
    }

    /// Who is sent cards beforehand.
    pub fn followers(&self) -> &Followers {
        &self.followers
    }

    /// What is in the outbox is being published, or not.
    pub fn publishes(&self, well: bool) {
        self.outbox_down.store(!well, Ordering::Release);
    }

    /// Whether what is in the outbox is not being published although the broker is there.
    pub fn outbox_is_down(&self) -> bool {
        self.outbox_down.load(Ordering::Acquire)
    }

    /// The streams have to be looked for again.
    pub fn forget_streams(&self) {
        self.streams_known.store(false, Ordering::Release);
    }

    /// The name of the stream of commands.
    pub fn command_stream(&self) -> String {
        format!("cg_cmd_{}", self.version)
    }

    /// Creates what is missing.
    pub async fn ensure_streams(&self) -> Result<(), NotPublished> {
        if self.streams_known.load(Ordering::Acquire) {
            return Ok(());
        }
        let version = &self.version;
        let streams = [
            (self.command_stream(), format!("cg.{version}.*.*.cmd.*.*.>"), DAY),
            (format!("cg_evt_{version}"), format!("cg.{version}.*.*.evt.*.*.>"), 7 * DAY),
        ];
        for (name, subject, max_age) in streams {
            let made = self.jetstream.get_or_create_stream(stream(name, subject, max_age)).await;
            let made = made.map_err(|error| NotPublished::Later(format!("no stream: {error}")))?;
            let config = &made.cached_info().config;
            if config.name == self.command_stream() {
                let remembers_ms = config.duplicate_window.as_millis() as u64;
                self.remembers_ms.store(remembers_ms, Ordering::Release);
            }
        }
        self.streams_known.store(true, Ordering::Release);
        Ok(())
    }

    /// For how long the broker drops a command that it has.
    pub fn remembers_ms(&self) -> u64 {
        self.remembers_ms.load(Ordering::Acquire)
    }

    /// Which of these ids the commands have that were published on a subject since then.
    pub async fn published(
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
        let mut left = consumer.cached_info().num_pending;
        let mut messages = consumer.messages().await?;
        while left > 0 && found.len() < ids.len() {
            let next = tokio::time::timeout(ACK_PATIENCE, messages.next()).await?;
            let message = next.ok_or("the stream of commands has ended")??;
            left = message.info()?.pending;
            let headers = message.headers.as_ref();
            let id = headers.and_then(|headers| headers.get(NATS_MESSAGE_ID));
            found.extend(id.and_then(|id| ids.get(id.as_str())).cloned());
        }
        Ok(found)
    }

    /// JetStream itself.
    pub fn jetstream(&self) -> &jetstream::Context {
        &self.jetstream
    }

    /// Publishes on a stream; when this returns well, the broker has it. The broker drops what it
    /// has seen under the same id.
    pub async fn publish(
        &self,
        subject: String,
        mut headers: HeaderMap,
        payload: Vec<u8>,
        id: &str,
    ) -> Result<(), NotPublished> {
        self.ensure_streams().await?;
        if !wire::set(&mut headers, NATS_MESSAGE_ID, id) {
            return Err(NotPublished::Never("its id has a line break in it".to_owned()));
        }
        let message = PublishMessage::build().payload(payload.into()).headers(headers);
        let sent = async { self.jetstream.send_publish(subject, message).await?.await };
        match tokio::time::timeout(ACK_PATIENCE, sent).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(why)) => {
                self.forget_streams();
                Err(why.into())
            }
            Err(_) => Err(NotPublished::Later("the broker did not answer".to_owned())),
        }
    }
}

/// The settings of our streams.
pub fn stream(name: String, subject: String, max_age: Duration) -> StreamConfig {
    StreamConfig {
        name,
        subjects: vec![subject],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: 1,
        max_age,
        duplicate_window: REMEMBERS,
        ..StreamConfig::default()
    }
}
