//! Commands to the system itself (`cmd.sys.…`). Those for the protocol's internal tools
//! (`cmd.sys.pmo.internal.<tool>`) become calls; every other command, and each that cannot be
//! answered, becomes a dead letter, so that its sender's operator sees that it was not executed.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use serde_json::{Map, Value};
use toolcrib::Engine;
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::utp::RESERVED_NAMES;
use toolcrib::domain::utp::subject::{self, Subject};
use toolcrib::domain::utp::trace;
use toolcrib::registry::audit;
use toolcrib::utp::{CommandReceipt, InternalCommand, UnprocessableMessage};
use toolcrib_protocol::utp::NatsConnection;
use toolcrib_protocol::utp::nats_connection::stores_subject;
use toolcrib_protocol::utp::wire::{self, UtpHeaders};

/// Maximum number of commands that one request to the broker returns, and that are processed
/// concurrently.
const PULL_BATCH_SIZE: usize = 64;
/// Time the broker holds a request for commands.
const PULL_EXPIRY: Duration = Duration::from_secs(5);
/// Delay before a failed consumer is opened again, and before a command that could not be stored is
/// redelivered.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Delay before a stream without the subject of a consumer is read again, unless the connection
/// breaks before.
const SUBJECT_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Consumes commands for as long as the future is polled.
pub(super) async fn run_consumer(engine: Engine, nats: NatsConnection) {
    // As narrow as the subjects of the stream: a third part follows `cmd`, or nothing.
    let with_suffix = CommandFilter {
        name: format!("toolcrib_sys_cmd_{}", nats.version()),
        subject: format!("cg.{}.*.*.cmd.sys.*.>", nats.version()),
    };
    let short = CommandFilter {
        name: format!("toolcrib_sys_cmd_short_{}", nats.version()),
        subject: nats.short_system_subject(),
    };
    tokio::join!(
        run_filtered_consumer(&engine, &nats, with_suffix),
        run_filtered_consumer(&engine, &nats, short)
    );
}

/// A durable consumer of commands to the system.
struct CommandFilter {
    name: String,
    subject: String,
}

async fn run_filtered_consumer(engine: &Engine, nats: &NatsConnection, filter: CommandFilter) {
    loop {
        nats.wait_until_connected().await;
        if let Err(error) = consume_commands(engine, nats, &filter).await {
            tracing::warn!(%error, "commands to the system cannot be received; retrying");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

/// Consumes commands until the connection breaks. The consumer is durable: commands that arrive
/// while no server runs wait for the next one.
async fn consume_commands(
    engine: &Engine,
    nats: &NatsConnection,
    filter: &CommandFilter,
) -> Result<(), async_nats::Error> {
    // A request that was sent over a broken connection is not answered over the next one.
    let mut reconnected = std::pin::pin!(nats.wait_for_reconnect());
    reconnected.as_mut().enable();
    nats.ensure_streams().await?;
    let stream = nats.jetstream().get_stream(nats.command_stream()).await?;
    let is_short = filter.subject == nats.short_system_subject();
    if is_short && !stores_subject(&stream.cached_info().config.subjects, &filter.subject) {
        // The stream could not be changed, as the log says. No consumer can be created until
        // an operator adds the subject.
        let _ = tokio::time::timeout(SUBJECT_CHECK_INTERVAL, reconnected).await;
        return Ok(());
    }
    let name = &filter.name;
    let config = pull::Config {
        durable_name: Some(name.clone()),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        max_deliver: -1,
        filter_subject: filter.subject.clone(),
        ..pull::Config::default()
    };
    let consumer: PullConsumer = stream.get_or_create_consumer(name, config).await?;
    loop {
        let request = consumer.batch().max_messages(PULL_BATCH_SIZE).expires(PULL_EXPIRY);
        let mut commands = request.messages().await?;
        // Commands do not wait for each other, so one slow commit holds up nothing.
        let mut running = FuturesUnordered::new();
        let mut is_received = false;
        while !is_received || !running.is_empty() {
            tokio::select! {
                command = commands.next(), if !is_received => match command {
                    Some(command) => running.push(process_received(engine.clone(), command)),
                    None => is_received = true,
                },
                Some(processed) = running.next() => processed?,
                () = &mut reconnected => return Ok(()),
            }
        }
    }
}

/// Processes a command, unless the broker reports an error in its place.
fn process_received(
    engine: Engine,
    received: Result<Message, async_nats::Error>,
) -> BoxFuture<'static, Result<(), async_nats::Error>> {
    Box::pin(async move { process_command(&engine, &received?).await })
}

/// Processes a command and acknowledges it. A command that could not be stored is delivered again.
async fn process_command(engine: &Engine, command: &Message) -> Result<(), async_nats::Error> {
    let Some(parts) = subject::parse_prefix(&command.subject) else {
        return command.ack_with(AckKind::Term).await;
    };
    let origin = RequestOrigin { transport: Some("nats".into()), ..Default::default() };
    let refusal = match audit::with_origin(origin, execute_command(engine, &parts, command)).await {
        Ok(None) => return command.ack().await,
        Ok(Some(refusal)) => refusal,
        Err(error) => {
            tracing::warn!(%error, "a command to the system was not stored; retrying");
            return command.ack_with(AckKind::Nak(Some(RETRY_DELAY))).await;
        }
    };
    store_dead_letter(engine, &parts, command, refusal).await
}

/// The reason why a command is not executed, as a code and in words.
type CommandRefusal = (&'static str, String);

/// Makes a call from a command for an internal tool. Returns the reason if the command becomes a
/// dead letter.
async fn execute_command(
    engine: &Engine,
    parts: &Subject<'_>,
    command: &Message,
) -> Result<Option<CommandRefusal>, toolcrib::Error> {
    let internal = parts.suffix.strip_prefix("internal.").filter(|_| parts.target == "pmo");
    let Some(tool) = internal.filter(|name| RESERVED_NAMES.contains(name)) else {
        return Ok(Some(unknown_command(parts)));
    };
    if let Err(error) = engine.projects().require_project(parts.project) {
        return Ok(Some(("malformed", format!("{tool} was not executed: {error}"))));
    }
    let parsed = match parse_command(parts, tool, command) {
        Ok(parsed) => parsed,
        Err(problem) => {
            return Ok(Some(("malformed", format!("{tool} was not executed: {problem}"))));
        }
    };
    let caller = super::caller(engine, parts.project, &parsed.agent_id, Role::Agent);
    match engine.utp().accept_command(&caller, parsed).await? {
        CommandReceipt::Accepted(call) => {
            tracing::debug!(call = %call.id, tool, "command accepted");
            Ok(None)
        }
        CommandReceipt::Rejected { fault, .. } => {
            tracing::debug!(tool, %fault, "command refused with a result");
            Ok(None)
        }
        CommandReceipt::Unanswerable { reason, message } => {
            Ok(Some((reason, format!("{tool} was not executed: {message}"))))
        }
    }
}

/// Parses a command. Fails if it lacks a field without which it cannot be answered.
fn parse_command(
    parts: &Subject<'_>,
    tool: &str,
    message: &Message,
) -> Result<InternalCommand, String> {
    let payload: Value = serde_json::from_slice(&message.payload)
        .map_err(|error| format!("the command is not JSON: {error}"))?;
    let Value::Object(fields) = payload else { return Err("a command is an object".into()) };
    let headers = UtpHeaders::from_message(message.headers.as_ref());
    for (name, part) in [("cg-project-id", parts.project), ("cg-channel-id", parts.channel)] {
        if headers.get(name).is_some_and(|value| value != part) {
            return Err(format!("the header {name} does not match the subject"));
        }
    }
    let field = |name: &str, in_header: &str| read_field(&fields, &headers, name, in_header);
    let needed = |name: &str, in_header: &str| {
        field(name, in_header).ok_or_else(|| format!("missing required field: {name}"))
    };
    let epoch = needed("turn_epoch", "cg-turn-epoch")?;
    let inline = ["args", "arguments", "result"].into_iter();
    Ok(InternalCommand {
        tool: tool.to_owned(),
        channel: parts.channel.to_owned(),
        agent_id: needed("agent_id", "cg-agent-id")?,
        turn_id: needed("agent_turn_id", "cg-turn-id")?,
        epoch: epoch.parse().map_err(|_| "turn_epoch is not a whole number".to_owned())?,
        tool_call_id: needed("tool_call_id", "cg-tool-call-id")?,
        step_id: field("step_id", "cg-step-id"),
        card_id: field("tool_call_card_id", ""),
        tool_name: field("tool_name", ""),
        after_execution: field("after_execution", ""),
        context_box_id: field("context_box_id", ""),
        inline_field: inline.into_iter().find(|name| fields.contains_key(*name)),
        depth: headers.get("cg-recursion-depth").map(str::to_owned),
        // An invalid trace header is no reason to leave a command unanswered.
        traceparent: headers.get("traceparent").and_then(trace::normalize),
        tracestate: headers
            .get("tracestate")
            .filter(|state| trace::is_valid_tracestate(state))
            .map(str::to_owned),
    })
}

/// Reads a field as text, from the payload or else from a header. A blank one counts as missing.
fn read_field(
    fields: &Map<String, Value>,
    headers: &UtpHeaders<'_>,
    name: &str,
    in_header: &str,
) -> Option<String> {
    let value = match fields.get(name) {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => headers.get(in_header).map(str::to_owned),
    };
    value.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn unknown_command(parts: &Subject<'_>) -> CommandRefusal {
    let Subject { target, suffix, .. } = parts;
    let suffix = match suffix.is_empty() {
        true => String::new(),
        false => format!(".{suffix}"),
    };
    let message = format!("there is no command cmd.sys.{target}{suffix}; it was not executed");
    ("unknown_command", message)
}

/// Stores a command as a dead letter and acknowledges it.
async fn store_dead_letter(
    engine: &Engine,
    parts: &Subject<'_>,
    command: &Message,
    (reason, message): CommandRefusal,
) -> Result<(), async_nats::Error> {
    let dead_letter = UnprocessableMessage {
        kind: "command",
        reason: reason.to_owned(),
        message,
        subject: command.subject.to_string(),
        headers: wire::header_map(command.headers.as_ref()),
        payload: String::from_utf8_lossy(&command.payload).into_owned(),
        is_truncated: false,
    };
    match engine.utp().dead_letters().save(parts.project, dead_letter).await {
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
