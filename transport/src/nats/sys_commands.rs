//! Commands to the system itself (`cmd.sys.…`). Toolcrib serves none of them; each becomes a dead
//! letter, so that its sender's operator sees that it was not executed.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use futures::StreamExt;
use toolcrib::Engine;
use toolcrib::domain::utp::RESERVED_NAMES;
use toolcrib::domain::utp::subject::{self, Subject};
use toolcrib::utp::UnprocessableMessage;
use toolcrib_protocol::utp::{NatsConnection, wire};

/// Maximum number of commands that one request to the broker returns.
const PULL_BATCH_SIZE: usize = 64;
/// Time the broker holds a request for commands.
const PULL_EXPIRY: Duration = Duration::from_secs(5);
/// Delay before a failed consumer is opened again, and before a command whose dead letter could not
/// be stored is redelivered.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Consumes commands for as long as the future is polled.
pub(super) async fn run_consumer(engine: Engine, nats: NatsConnection) {
    loop {
        nats.wait_until_connected().await;
        if let Err(error) = consume_commands(&engine, &nats).await {
            tracing::warn!(%error, "commands to the system cannot be received; retrying");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

/// Consumes commands until the connection breaks. The consumer is durable: commands that arrive
/// while no server runs wait for the next one.
async fn consume_commands(engine: &Engine, nats: &NatsConnection) -> Result<(), async_nats::Error> {
    // A request that was sent over a broken connection is not answered over the next one.
    let mut reconnected = std::pin::pin!(nats.wait_for_reconnect());
    reconnected.as_mut().enable();
    nats.ensure_streams().await?;
    let name = format!("toolcrib_sys_cmd_{}", nats.version());
    let config = pull::Config {
        durable_name: Some(name.clone()),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        max_deliver: -1,
        // As narrow as the subjects of the stream, which have a third part after `cmd`.
        filter_subject: format!("cg.{}.*.*.cmd.sys.*.>", nats.version()),
        ..pull::Config::default()
    };
    let stream = nats.jetstream().get_stream(nats.command_stream()).await?;
    let consumer: PullConsumer = stream.get_or_create_consumer(&name, config).await?;
    loop {
        let request = consumer.batch().max_messages(PULL_BATCH_SIZE).expires(PULL_EXPIRY);
        let mut commands = request.messages().await?;
        loop {
            let command = tokio::select! {
                command = commands.next() => command,
                () = &mut reconnected => return Ok(()),
            };
            match command {
                Some(command) => store_dead_letter(engine, &command?).await?,
                None => break,
            }
        }
    }
}

/// Stores a command as a dead letter and acknowledges it.
async fn store_dead_letter(engine: &Engine, command: &Message) -> Result<(), async_nats::Error> {
    let Some(parts) = subject::parse(&command.subject) else {
        return command.ack_with(AckKind::Term).await;
    };
    let (reason, message) = describe_refusal(&parts);
    let dead_letter = UnprocessableMessage {
        kind: "command",
        reason: reason.to_owned(),
        message,
        subject: command.subject.to_string(),
        headers: wire::header_map(command.headers.as_ref()),
        payload: String::from_utf8_lossy(&command.payload).into_owned(),
        is_truncated: false,
    };
    match engine.utp().dead_letter(parts.project, dead_letter).await {
        Ok(stored) => {
            tracing::warn!(
                subject = command.subject.as_str(),
                dead_letter = stored.id,
                "a command to the system became a dead letter"
            );
            command.ack().await
        }
        Err(error) => {
            tracing::warn!(%error, "a dead letter was not stored; retrying");
            command.ack_with(AckKind::Nak(Some(RETRY_DELAY))).await
        }
    }
}

/// Returns the reason why a command is not executed, as a code and in words.
fn describe_refusal(parts: &Subject<'_>) -> (&'static str, String) {
    let Subject { target, suffix, .. } = parts;
    let internal = suffix.strip_prefix("internal.").filter(|_| *target == "pmo");
    match internal.filter(|name| RESERVED_NAMES.contains(name)) {
        Some(name) => {
            let message = format!(
                "this server does not serve the internal tool {name}; the command was not executed"
            );
            ("not_served", message)
        }
        None => {
            let message =
                format!("there is no command cmd.sys.{target}.{suffix}; it was not executed");
            ("unknown_command", message)
        }
    }
}
