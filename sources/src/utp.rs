//! The source of tools that a tool service executes: publishes commands on JetStream.
//!
//! A call is committed before its attempt starts here, and stays open until its report arrives. The
//! open calls are therefore the outbox of commands: if a crash prevents a publication, the next
//! process starts the attempt again. While the broker is unavailable a command waits, until its
//! call has ended. The broker and the tool service both identify a command by the call's id, so a
//! command published twice is executed once. If a command is older than the broker's duplicate
//! window, Toolcrib searches the stream for it before it publishes the command again.

mod command_publisher;
pub mod host;
use async_trait::async_trait;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_util::sync::{CancellationToken, DropGuard};
use toolcrib::CallId;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::ports::source::{Attempt, ProgressSink, Source, SourceHealth, StartResult};
use toolcrib_protocol::utp::{DEFAULT_VERSION, NatsConnection};

use crate::utp::command_publisher::{CommandPublisher, OutgoingCommand, UnacknowledgedCommands};

/// Publishes commands for tool services.
pub struct UtpSource {
    nats: Option<NatsConnection>,
    unacknowledged: UnacknowledgedCommands,
    queue: UnboundedSender<OutgoingCommand>,
    _stop_on_drop: DropGuard,
}

impl UtpSource {
    /// Creates the source for this connection. Without one, calls wait until their deadline.
    pub fn new(nats: Option<NatsConnection>) -> Self {
        let (unacknowledged, stop) = (UnacknowledgedCommands::default(), CancellationToken::new());
        let (queue, commands) = unbounded_channel();
        if let Some(nats) = nats.clone() {
            let (post, stop) = (CommandPublisher::new(nats, unacknowledged.clone()), stop.clone());
            tokio::spawn(async move { stop.run_until_cancelled(post.run(commands)).await });
        }
        Self { nats, unacknowledged, queue, _stop_on_drop: stop.drop_guard() }
    }

    fn drop_command(&self, call_id: &CallId, attempt: u32) {
        self.unacknowledged.lock().remove(&(call_id.clone(), attempt));
    }
}

#[async_trait]
impl Source for UtpSource {
    fn executor(&self) -> Executor {
        Executor::UTP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        // A tool service has acknowledged the command and works on it: do not send it again.
        if attempt.redelivered && attempt.acknowledged_by.is_some() {
            return StartResult::Accepted;
        }
        let version = self.nats.as_ref().map_or(DEFAULT_VERSION, NatsConnection::version);
        match OutgoingCommand::new(version, attempt) {
            Ok(Some(outgoing)) if self.nats.is_some() => {
                self.unacknowledged.lock().insert(outgoing.attempt_key());
                // Fails only when the server shuts down; the next process publishes the command.
                let _ = self.queue.send(outgoing);
                StartResult::Accepted
            }
            Ok(_) => StartResult::Accepted,
            Err(reason) => {
                let fault = Fault::new(Code::ValidationError, reason).without_side_effect();
                StartResult::Finished(Err(fault))
            }
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.drop_command(call_id, attempt);
    }

    fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        self.drop_command(call_id, attempt);
    }

    fn unavailable_reason(&self, _project: &str, _tool: &str) -> Option<String> {
        // Without NATS, tool services take their commands from the shared tables.
        let nats = self.nats.as_ref()?;
        (!nats.is_connected()).then(|| "NATS does not answer".to_owned())
    }

    fn health(&self) -> Option<SourceHealth> {
        let nats = self.nats.as_ref()?;
        let waiting = self.unacknowledged.lock().len();
        metrics::gauge!("toolcrib_utp_commands_waiting").set(waiting as f64);
        let describe_outage =
            || format!("NATS does not answer; {waiting} commands wait, everything else works");
        let describe_outbox =
            || "wakeups and events are not published; see the server's log".to_owned();
        let problem = match (nats.is_connected(), nats.is_outbox_down()) {
            (false, _) => Some(describe_outage()),
            (true, true) => Some(describe_outbox()),
            (true, false) => None,
        };
        Some(SourceHealth { name: "nats", problem })
    }
}
