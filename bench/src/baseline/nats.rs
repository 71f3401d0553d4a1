//! The NATS baseline: the minimum that a durable call over NATS needs. It makes the two flushes of
//! the baseline server and between them sends one JetStream command to another process, which
//! replies with a message and acknowledges. It has no cards, no identity, no fencing and no inbox:
//! any cost above it is Toolcrib's, the rest is the cost of the broker and the disk.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use async_nats::jetstream::consumer::pull;
use futures::{FutureExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use toolcrib_protocol::utp::nats_connection::{DAY, NatsEndpoint, stream_config};
use toolcrib_protocol::utp::{DEFAULT_VERSION, NatsConnection, wire};

use super::BaselineTool;

const STREAM: &str = "bench_bare";
const SUBJECT: &str = "bench_bare.default.public.cmd.bench.run";
/// The header with the subject for the reply.
const REPLY_TO_HEADER: &str = "CG-Answer";

async fn connect(url: &str) -> anyhow::Result<NatsConnection> {
    let version = DEFAULT_VERSION.to_owned();
    let address = NatsEndpoint { url: url.to_owned(), credentials: None, version };
    NatsConnection::connect(&address, "bench").await
}

async fn ensure_stream(
    nats: &NatsConnection,
) -> anyhow::Result<async_nats::jetstream::stream::Stream> {
    nats.wait_until_connected().await;
    let config = stream_config(STREAM.to_owned(), format!("{STREAM}.>"), DAY);
    Ok(nats.jetstream().get_or_create_stream(config).await?)
}

/// Waiters for a message, by its number.
type PendingReplies = Arc<Mutex<HashMap<u64, oneshot::Sender<()>>>>;

/// Wakes the waiter of each message that arrives under a subject.
async fn listen_for_replies(
    nats: &NatsConnection,
    subject: &str,
) -> anyhow::Result<PendingReplies> {
    let waiting = PendingReplies::default();
    let mut replies = nats.client().subscribe(format!("{subject}.*")).await?;
    let woken = waiting.clone();
    tokio::spawn(async move {
        while let Some(message) = replies.next().await {
            let number = message.subject.rsplit('.').next().and_then(|text| text.parse().ok());
            let waits = number.and_then(|number: u64| woken.lock().remove(&number));
            if let Some(waits) = waits {
                let _ = waits.send(());
            }
        }
    });
    Ok(waiting)
}

/// Returns a tool that the other process executes.
///
/// # Errors
///
/// When NATS cannot be reached.
pub async fn remote_tool(url: &str) -> anyhow::Result<BaselineTool> {
    let nats = connect(url).await?;
    ensure_stream(&nats).await?;
    let inbox = nats.client().new_inbox();
    let (acks, answers) = (format!("{inbox}.ack"), format!("{inbox}.answer"));
    let (acked, answered) =
        (listen_for_replies(&nats, &acks).await?, listen_for_replies(&nats, &answers).await?);
    let numbers = Arc::new(AtomicU64::new(0));
    Ok(Arc::new(move || {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let (ack, answer) = (oneshot::channel(), oneshot::channel());
        acked.lock().insert(number, ack.0);
        answered.lock().insert(number, answer.0);
        let mut headers = wire::base_headers(DEFAULT_VERSION, "dict", "");
        headers.insert(REPLY_TO_HEADER, format!("{answers}.{number}"));
        headers.insert(async_nats::header::NATS_MESSAGE_ID, format!("{inbox}-{number}"));
        let reply = format!("{acks}.{number}");
        let (client, payload) = (nats.client().clone(), vec![b'x'; 300].into());
        async move {
            let sent = client.publish_with_reply_and_headers(SUBJECT, reply, headers, payload);
            let _ = sent.await;
            let _ = tokio::join!(ack.1, answer.1);
        }
        .boxed()
    }))
}

/// Runs the other process until it is killed.
///
/// # Errors
///
/// When NATS cannot be reached, or a command is malformed.
pub async fn run_service(url: &str) -> anyhow::Result<()> {
    let nats = connect(url).await?;
    let config = pull::Config {
        durable_name: Some("bare".to_owned()),
        max_ack_pending: 10_000,
        ..pull::Config::default()
    };
    let consumer = ensure_stream(&nats).await?.get_or_create_consumer("bare", config).await?;
    let mut commands = consumer.stream().max_messages_per_batch(256).messages().await?;
    while let Some(command) = commands.next().await {
        let command = command?;
        let headers = command.headers.as_ref().context("a command without headers")?;
        let answer = headers.get(REPLY_TO_HEADER).context("a command without an answer")?;
        nats.client().publish(answer.as_str().to_owned(), "{}".into()).await?;
        command.ack().await.map_err(anyhow::Error::from_boxed)?;
    }
    Ok(())
}
