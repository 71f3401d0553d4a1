//! The tool service side of UTP: takes commands, reads their cards, runs the tool, reports the
//! result.
//!
//! ```no_run
//! use serde_json::json;
//! use toolcrib_sources::utp::host::ToolHost;
//!
//! # async fn run() -> anyhow::Result<()> {
//! ToolHost::connect("nats://127.0.0.1:4222").await?
//!     .with_tool("text.count", |job| async move {
//!         let text = job.args["text"].as_str().unwrap_or_default();
//!         Ok(json!({ "words": text.split_whitespace().count() }))
//!     })
//!     .serve("count", std::future::pending())
//!     .await
//! # }
//! ```
//!
//! A command that takes long is acknowledged as in progress, so that the broker does not redeliver
//! it to another process. A redelivered command is answered with its stored result if there is one.
//! If a process that died may have started it, it runs again only if its effect allows a second
//! run. A command that can be neither executed nor answered becomes a dead letter.

mod batched_rpc;
mod coalescer;
mod command;
mod prefetched_cards;
mod server_client;
mod server_reachability;
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Subscriber;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use command::{CommandError, ReceivedCommand};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::id::hex;
use toolcrib::domain::utp::card::{error_as_result, error_json};
use toolcrib::domain::utp::{Route, ToolStatus};
use toolcrib_protocol::utp::DEFAULT_VERSION;
use toolcrib_protocol::utp::nats_connection::{NatsConnection, NatsEndpoint};

use crate::utp::host::batched_rpc::HostRpcClient;
use crate::utp::host::prefetched_cards::PrefetchedCards;
use crate::utp::host::server_client::{CardArguments, ReportOutcome, ServerClient};
use crate::utp::host::server_reachability::ServerReachability;

/// Time the broker waits for an acknowledgement before it redelivers a command.
const ACK_WAIT: Duration = Duration::from_secs(30);
/// Delay before the broker redelivers a command that could not be answered.
const REDELIVERY_DELAY: Duration = Duration::from_secs(2);
/// Duration below which a tool finishes without an acknowledgement of its call to the server.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(20);
/// Time the broker holds a pull request for commands.
const PULL_EXPIRY: Duration = Duration::from_secs(5);
/// Default number of commands that run concurrently.
const DEFAULT_CONCURRENCY: usize = 64;

/// A command to execute.
#[derive(Debug, Clone)]
pub struct ToolJob {
    pub tool_name: String,
    pub args: Value,
    pub project: String,
    pub agent_id: String,
    pub turn_id: String,
    pub tool_call_id: String,
    /// The trace that the call belongs to, as a W3C `traceparent`.
    pub traceparent: String,
    /// Deadline of the call, if known.
    pub deadline_ms: Option<u64>,
    /// The turn and the step that made the call.
    pub route: Route,
}

/// The result of a job.
#[derive(Debug, Clone)]
pub struct ToolJobResult {
    pub status: ToolStatus,
    pub result: Value,
    /// Required unless the status is success.
    pub error: Option<Fault>,
}

impl ToolJobResult {
    /// Returns a successful result.
    pub fn success(result: Value) -> Self {
        Self { status: ToolStatus::Success, result, error: None }
    }

    /// Returns a failed result.
    pub fn failed(fault: Fault) -> Self {
        let result = error_as_result(&error_json(&fault, "tool"));
        Self { status: ToolStatus::Failed, result, error: Some(fault) }
    }
}

impl From<Result<Value, Fault>> for ToolJobResult {
    fn from(result: Result<Value, Fault>) -> Self {
        match result {
            Ok(result) => Self::success(result),
            Err(fault) => Self::failed(fault),
        }
    }
}

type ToolHandler = Arc<dyn Fn(ToolJob) -> BoxFuture<'static, ToolJobResult> + Send + Sync>;

/// A tool service.
pub struct ToolHost {
    connection: NatsConnection,
    tools: HashMap<String, ToolHandler>,
    fallback: Option<ToolHandler>,
    name: String,
    max_concurrency: usize,
    ack_wait: Duration,
    server_check_project: Option<String>,
}

impl ToolHost {
    /// Connects to a broker, with the default protocol version.
    pub async fn connect(url: &str) -> anyhow::Result<Self> {
        let address = NatsEndpoint {
            url: url.to_owned(),
            credentials: None,
            version: DEFAULT_VERSION.to_owned(),
        };
        Ok(Self::with_connection(NatsConnection::connect(&address, "toolcrib tool service").await?))
    }

    /// Uses an existing connection.
    pub fn with_connection(connection: NatsConnection) -> Self {
        Self {
            connection,
            tools: HashMap::new(),
            fallback: None,
            name: "tool.rust".to_owned(),
            max_concurrency: DEFAULT_CONCURRENCY,
            ack_wait: ACK_WAIT,
            server_check_project: None,
        }
    }

    /// Adds a tool.
    pub fn with_tool<F, Fut>(mut self, name: &str, run: F) -> Self
    where
        F: Fn(ToolJob) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Value, Fault>> + Send + 'static,
    {
        let run = move |job: ToolJob| {
            let running = run(job);
            async move { ToolJobResult::from(running.await) }.boxed()
        };
        self.tools.insert(name.to_owned(), Arc::new(run));
        self
    }

    /// Sets the handler of every tool that has none itself. It may return any of the five statuses.
    pub fn with_fallback<F, Fut>(mut self, run: F) -> Self
    where
        F: Fn(ToolJob) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ToolJobResult> + Send + 'static,
    {
        self.fallback = Some(Arc::new(move |job: ToolJob| run(job).boxed()));
        self
    }

    /// Sets the sender name in reports and result cards.
    pub fn with_sender(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Sets the number of commands that run concurrently.
    pub fn with_max_concurrency(mut self, max_concurrency: usize) -> Self {
        self.max_concurrency = max_concurrency.max(1);
        self
    }

    /// Makes [`Self::serve`] check at its start that a server answers for this project, and log
    /// what is missing until one does.
    pub fn with_server_check(mut self, project: &str) -> Self {
        self.server_check_project = Some(project.to_owned());
        self
    }

    /// Sets the time the broker waits for a heartbeat before it redelivers a command.
    pub fn with_ack_wait(mut self, ack_wait: Duration) -> Self {
        self.ack_wait = ack_wait;
        self
    }

    /// Serves the commands for a target until `stop` completes, then finishes the commands already
    /// received.
    pub async fn serve(self, target: &str, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        if !toolcrib::domain::utp::is_token(target) {
            anyhow::bail!("\"{target}\" cannot be part of a NATS subject");
        }
        let rpc_client = HostRpcClient {
            connection: self.connection.clone(),
            sender: self.name.clone(),
            reachability: ServerReachability::default(),
        };
        let project = self.server_check_project;
        let server_check = project.map(|project| {
            let rpc = rpc_client.clone();
            AbortOnDropHandle::new(tokio::spawn(async move { rpc.wait_for_server(&project).await }))
        });
        let serving = Arc::new(CommandHandler {
            prefetched: PrefetchedCards::new(rpc_client.clone(), target),
            server: ServerClient::new(rpc_client),
            tools: self.tools,
            fallback: self.fallback,
            running: Mutex::default(),
            returned_unstarted: Mutex::default(),
            ack_wait: self.ack_wait,
            canceled: CancellationToken::new(),
        });
        // If the caller drops this future, running commands are canceled.
        let _dropped = serving.canceled.clone().drop_guard();
        let (permits, tasks) = (Arc::new(Semaphore::new(self.max_concurrency)), TaskTracker::new());
        let stopping = CancellationToken::new();
        let taking = async {
            while !stopping.is_cancelled() {
                let consumed = consume_commands(
                    &self.connection,
                    target,
                    &serving,
                    &permits,
                    &tasks,
                    &stopping,
                )
                .await;
                if let Err(error) = consumed {
                    tracing::warn!(%error, "commands cannot be received; retrying");
                }
                let pause = tokio::time::sleep(Duration::from_millis(200));
                stopping.run_until_cancelled(pause).await;
            }
        };
        let stop = async {
            stop.await;
            stopping.cancel();
        };
        tokio::join!(taking, stop);
        drop(server_check);
        tasks.close();
        tasks.wait().await;
        let _ = self.connection.client().flush().await;
        Ok(())
    }
}

/// Opens the consumer of a target's commands and the subscription for prefetched cards.
async fn open_consumer(
    nats: &NatsConnection,
    target: &str,
    serving: &CommandHandler,
) -> anyhow::Result<(PullConsumer, Subscriber)> {
    nats.wait_until_connected().await;
    nats.ensure_streams().await?;
    let safe: String =
        target.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let mut name = format!("tool_{safe}_cmd_{}", nats.version());
    let stream = nats.jetstream().get_stream(nats.command_stream()).await?;
    let subject_prefix = format!("cg.{}.*.*.cmd.tool.{target}.", nats.version());
    let config = |name: &str| pull::Config {
        durable_name: Some(name.to_owned()),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        ack_wait: serving.ack_wait,
        // Redelivery is unlimited: an unavailable server returns, and an unusable command becomes a
        // dead letter.
        max_deliver: -1,
        filter_subject: format!("{subject_prefix}>"),
        max_ack_pending: 10_000,
        ..pull::Config::default()
    };
    let mut consumer: PullConsumer = stream.get_or_create_consumer(&name, config(&name)).await?;
    if !consumer.cached_info().config.filter_subject.starts_with(&subject_prefix) {
        // Another target maps to the same consumer name, which allows fewer characters. A hash
        // makes the name unique.
        name = format!("{name}_{}", &hex(&Sha256::digest(target.as_bytes()))[..8]);
        consumer = stream.get_or_create_consumer(&name, config(&name)).await?;
    }
    Ok((consumer, nats.client().subscribe(serving.prefetched.inbox.clone()).await?))
}

/// Takes commands until the connection breaks or `stopping` is canceled. It pulls no more commands
/// than there are free permits: other processes that serve the target take the rest, and a command
/// that waited here would look to them like one that had started.
async fn consume_commands(
    nats: &NatsConnection,
    target: &str,
    serving: &Arc<CommandHandler>,
    permits: &Arc<Semaphore>,
    tasks: &TaskTracker,
    stopping: &CancellationToken,
) -> anyhow::Result<()> {
    let opened = stopping.run_until_cancelled(open_consumer(nats, target, serving)).await;
    let Some(opened) = opened else { return Ok(()) };
    let (consumer, mut cards) = opened?;
    // Commands that were requested over a broken connection do not arrive over the next one.
    let mut again = std::pin::pin!(nats.wait_for_reconnect());
    again.as_mut().enable();
    while !stopping.is_cancelled() {
        let free = serving.await_collecting_cards(&mut cards, acquire_free_permits(permits));
        let Some(free) = stopping.run_until_cancelled(free).await else { break };
        let mut free = free?;
        let pull = consumer.batch().max_messages(free.num_permits()).expires(PULL_EXPIRY);
        let mut commands = pull.messages().await?;
        // This process starts every command that it has received, even while stopping.
        loop {
            let message = tokio::select! {
                biased;
                message = serving.await_collecting_cards(&mut cards, commands.next()) => message,
                () = stopping.cancelled() => commands.next().now_or_never().flatten(),
                () = &mut again => return Ok(()),
            };
            let Some(message) = message.transpose().map_err(anyhow::Error::from_boxed)? else {
                break;
            };
            let Some(permit) = free.split(1) else { break };
            // Boxed, because the future of a command is large and spawning moves it.
            tasks.spawn(Box::pin(serving.clone().handle_until_dropped(message, permit)));
        }
    }
    Ok(())
}

/// Waits for a free permit and returns all free permits.
async fn acquire_free_permits(
    permits: &Arc<Semaphore>,
) -> Result<OwnedSemaphorePermit, AcquireError> {
    let mut free = permits.clone().acquire_owned().await?;
    let more = u32::try_from(permits.available_permits()).unwrap_or(u32::MAX);
    if let Ok(more) = permits.clone().try_acquire_many_owned(more) {
        free.merge(more);
    }
    Ok(free)
}

struct CommandHandler {
    prefetched: Arc<PrefetchedCards>,
    server: ServerClient,
    tools: HashMap<String, ToolHandler>,
    fallback: Option<ToolHandler>,
    /// Calls that run in this process; a redelivery of one is ignored.
    running: Mutex<HashSet<(String, String, String)>>,
    /// Calls that this process returned without starting, with the delivery count.
    returned_unstarted: Mutex<HashMap<(String, String, String), i64>>,
    ack_wait: Duration,
    canceled: CancellationToken,
}

impl CommandHandler {
    /// Awaits a future and stores the cards that arrive meanwhile. Cards are polled first, so that
    /// a card sent before a command is present when the command is handled.
    async fn await_collecting_cards<T>(
        &self,
        cards: &mut Subscriber,
        future: impl Future<Output = T>,
    ) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                Some(sent) = cards.next() => self.prefetched.store(&sent),
                output = &mut future => return output,
            }
        }
    }

    async fn handle_until_dropped(self: Arc<Self>, message: Message, permit: OwnedSemaphorePermit) {
        self.canceled.run_until_cancelled(self.handle(&message)).await;
        drop(permit);
    }

    async fn handle(&self, message: &Message) {
        let deliveries = message.info().map_or(1, |info| info.delivered);
        let command = match ReceivedCommand::parse(message) {
            Ok(command) => command,
            Err(reason) => return self.dead_letter(message, &reason).await,
        };
        if !self.running.lock().insert(command.call_key()) {
            return;
        }
        let working = self.execute(&command, deliveries);
        let outcome = self.with_heartbeats(message, working).await;
        self.running.lock().remove(&command.call_key());
        match outcome {
            ReportOutcome::Accepted => acknowledge(message, AckKind::Ack).await,
            // The server has recorded the report, and redelivery would change nothing.
            ReportOutcome::Rejected(reason) => {
                tracing::warn!(call = command.tool_call_id, why = reason, "the report was refused");
                acknowledge(message, AckKind::Ack).await;
            }
            ReportOutcome::NoReply => {
                acknowledge(message, AckKind::Nak(Some(REDELIVERY_DELAY))).await
            }
        }
    }

    /// Sends heartbeats until the work is done.
    async fn with_heartbeats<T>(&self, message: &Message, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(self.ack_wait / 3) => {
                    if let Err(error) = message.ack_with(AckKind::Progress).await {
                        tracing::debug!(%error, "a heartbeat was not sent");
                    }
                }
            }
        }
    }

    async fn execute(&self, command: &ReceivedCommand, deliveries: i64) -> ReportOutcome {
        let prepared = match command.validate() {
            Ok(()) => self.load_arguments(command, deliveries).await,
            Err(error) => Err(error),
        };
        let (answer, meta) = match prepared {
            Ok(CardArguments {
                tool_name,
                args,
                meta,
                is_call_ended: ended,
                is_announced: looked,
            }) => {
                let again = deliveries > 1 && !self.was_returned(command, deliveries);
                if again && let Some(outcome) = self.server.report_stored_result(command).await {
                    return outcome;
                }
                let answer = match (ended, again && command.is_irreversible()) {
                    (true, _) => not_started_result(&tool_name),
                    (false, true) => ToolJobResult::failed(unknown_outcome_fault(&tool_name)),
                    (false, false) => {
                        let running = self.run(command, &tool_name, args, &meta);
                        if looked {
                            running.await
                        } else {
                            self.run_and_announce(command, running).await
                        }
                    }
                };
                (answer, meta)
            }
            Err(CommandError::ServerUnavailable) => {
                self.returned_unstarted.lock().insert(command.call_key(), deliveries);
                return ReportOutcome::NoReply;
            }
            Err(CommandError::Rejected(answer)) => (*answer, Value::Null),
        };
        self.server.report(command, answer, &meta).await
    }

    /// Returns the arguments of a command: from a prefetched card, or from the server.
    async fn load_arguments(
        &self,
        command: &ReceivedCommand,
        deliveries: i64,
    ) -> Result<CardArguments, CommandError> {
        self.prefetched.request_prefetch(&ServerClient::subject_prefix(command));
        let card_id = command.card_id.as_deref().unwrap_or_default();
        match self.prefetched.take(card_id).filter(|_| deliveries == 1) {
            Some(card) => ServerClient::parse_card(command, card, false),
            None => self.server.load_arguments(command).await,
        }
    }

    /// Runs the tool, and after a delay acknowledges the call to the server. A request for the
    /// call's card is the acknowledgement, so for a slow tool the host requests the card while the
    /// tool runs.
    async fn run_and_announce<T>(
        &self,
        command: &ReceivedCommand,
        running: impl Future<Output = T>,
    ) -> T {
        let mut running = std::pin::pin!(running);
        tokio::select! {
            done = &mut running => done,
            () = tokio::time::sleep(ANNOUNCE_AFTER) => {
                let (done, _) = tokio::join!(running, self.server.announce_start(command));
                done
            }
        }
    }

    /// Returns true if this process had the previous delivery and returned it without starting.
    fn was_returned(&self, command: &ReceivedCommand, deliveries: i64) -> bool {
        self.returned_unstarted.lock().remove(&command.call_key()) == Some(deliveries - 1)
    }

    async fn run(
        &self,
        command: &ReceivedCommand,
        tool_name: &str,
        args: Value,
        meta: &Value,
    ) -> ToolJobResult {
        let Some(run) = self.tools.get(tool_name).or(self.fallback.as_ref()) else {
            let message = format!("there is no tool \"{tool_name}\" here");
            return ToolJobResult::failed(
                Fault::new(Code::NotFound, message).without_side_effect(),
            );
        };
        let job = command.to_job(tool_name, args, meta);
        // Also catches a panic of the handler before its first await.
        let running = async move { run(job).await };
        match std::panic::AssertUnwindSafe(running).catch_unwind().await {
            Ok(answer) => answer,
            Err(_) => ToolJobResult::failed(Fault::runtime(format!("{tool_name} panicked"))),
        }
    }

    async fn dead_letter(&self, message: &Message, reason: &str) {
        let subject = message.subject.as_str();
        let kind = match self.server.dead_letter(message, reason).await {
            ReportOutcome::Accepted => {
                tracing::warn!(subject, why = reason, "a command became a dead letter");
                AckKind::Term
            }
            // The dead letter is not stored, and redelivery would change nothing.
            ReportOutcome::Rejected(refused) => {
                tracing::error!(subject, why = reason, refused, "a command was dropped");
                AckKind::Term
            }
            ReportOutcome::NoReply => AckKind::Nak(Some(REDELIVERY_DELAY)),
        };
        acknowledge(message, kind).await;
    }
}

fn unknown_outcome_fault(tool_name: &str) -> Fault {
    let message = format!(
        "{tool_name} was started before and its result is unknown: it may have taken effect and \
         was not started again"
    );
    Fault::new(Code::OutcomeUnknown, message)
}

/// Returns the result for a call that has already ended by timeout or cancellation. Its effect is
/// no longer expected, so the tool does not run.
fn not_started_result(tool_name: &str) -> ToolJobResult {
    let message = format!("{tool_name} was not started: its call has ended");
    let fault = Fault::new(Code::Canceled, message).without_side_effect();
    ToolJobResult { status: ToolStatus::Canceled, ..ToolJobResult::failed(fault) }
}

async fn acknowledge(message: &Message, kind: AckKind) {
    if let Err(error) = message.ack_with(kind).await {
        tracing::debug!(%error, "an acknowledgement was not sent");
    }
}
