//! The tool service side of UTP: takes commands, reads their cards, runs the tool, reports the
//! result.
//!
//! ```no_run
//! use serde_json::json;
//! use toolcrib_server::utp::Host;
//!
//! # async fn run() -> anyhow::Result<()> {
//! Host::connect("nats://127.0.0.1:4222").await?
//!     .tool("text.count", |job| async move {
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

mod ahead;
mod bundle;
mod command;
mod crib;
mod together;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Subscriber;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolcrib::fault::{Code, Fault};
use toolcrib::tool::hex;
use toolcrib::utp::card::{error_of, mirrored};
use toolcrib::utp::{Route, ToolStatus};

use super::DEFAULT_VERSION;
use super::link::{Address, Link};
use ahead::Ahead;
use command::{Command, Trouble};
use crib::{Asked, Crib, Told};
use together::Asker;

/// Time the broker waits for an acknowledgement before it redelivers a command.
const ACK_WAIT: Duration = Duration::from_secs(30);
/// Delay before the broker redelivers a command that could not be answered.
const GIVE_AGAIN: Duration = Duration::from_secs(2);
/// Duration below which a tool finishes without an announcement that its call was taken.
const SAY_AFTER: Duration = Duration::from_millis(20);
/// Time the broker holds a pull request for commands.
const ASKED_FOR: Duration = Duration::from_secs(5);
/// Default number of commands that run concurrently.
const AT_ONCE: usize = 64;

/// A command to execute.
#[derive(Debug, Clone)]
pub struct Job {
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
pub struct Answer {
    pub status: ToolStatus,
    pub result: Value,
    /// Required unless the status is success.
    pub error: Option<Fault>,
}

impl Answer {
    /// Returns a successful result.
    pub fn success(result: Value) -> Self {
        Self { status: ToolStatus::Success, result, error: None }
    }

    /// Returns a failed result.
    pub fn failed(fault: Fault) -> Self {
        let result = mirrored(&error_of(&fault, "tool"));
        Self { status: ToolStatus::Failed, result, error: Some(fault) }
    }
}

impl From<Result<Value, Fault>> for Answer {
    fn from(result: Result<Value, Fault>) -> Self {
        match result {
            Ok(result) => Self::success(result),
            Err(fault) => Self::failed(fault),
        }
    }
}

type Run = Arc<dyn Fn(Job) -> BoxFuture<'static, Answer> + Send + Sync>;

/// A tool service.
pub struct Host {
    link: Link,
    tools: HashMap<String, Run>,
    any: Option<Run>,
    name: String,
    at_once: usize,
    ack_wait: Duration,
}

impl Host {
    /// Connects to a broker, with the default protocol version.
    pub async fn connect(url: &str) -> anyhow::Result<Self> {
        let address =
            Address { url: url.to_owned(), credentials: None, version: DEFAULT_VERSION.to_owned() };
        Ok(Self::over(Link::connect(&address, "toolcrib tool service").await?))
    }

    /// Uses an existing connection.
    pub fn over(link: Link) -> Self {
        Self {
            link,
            tools: HashMap::new(),
            any: None,
            name: "tool.rust".to_owned(),
            at_once: AT_ONCE,
            ack_wait: ACK_WAIT,
        }
    }

    /// Adds a tool.
    pub fn tool<F, Fut>(mut self, name: &str, run: F) -> Self
    where
        F: Fn(Job) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Value, Fault>> + Send + 'static,
    {
        let run = move |job: Job| {
            let running = run(job);
            async move { Answer::from(running.await) }.boxed()
        };
        self.tools.insert(name.to_owned(), Arc::new(run));
        self
    }

    /// Sets the handler of every tool that has none itself. It may return any of the five statuses.
    pub fn any<F, Fut>(mut self, run: F) -> Self
    where
        F: Fn(Job) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer> + Send + 'static,
    {
        self.any = Some(Arc::new(move |job: Job| run(job).boxed()));
        self
    }

    /// Sets the sender name in reports and result cards.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Sets the number of commands that run concurrently.
    pub fn at_once(mut self, at_once: usize) -> Self {
        self.at_once = at_once.max(1);
        self
    }

    /// Sets the time the broker waits for a heartbeat before it redelivers a command.
    pub fn ack_wait(mut self, ack_wait: Duration) -> Self {
        self.ack_wait = ack_wait;
        self
    }

    /// Serves the commands for a target until `stop` completes, then finishes the commands already
    /// received.
    pub async fn serve(self, target: &str, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        if !toolcrib::utp::is_token(target) {
            anyhow::bail!("\"{target}\" cannot be part of a NATS subject");
        }
        let asker = Asker { link: self.link.clone(), name: self.name.clone() };
        let serving = Arc::new(Serving {
            ahead: Ahead::new(asker.clone(), target),
            crib: Crib::new(asker),
            tools: self.tools,
            any: self.any,
            running: Mutex::default(),
            returned: Mutex::default(),
            ack_wait: self.ack_wait,
            dropped: CancellationToken::new(),
        });
        // If the caller drops this future, running commands are canceled.
        let _dropped = serving.dropped.clone().drop_guard();
        let (places, tasks) = (Arc::new(Semaphore::new(self.at_once)), TaskTracker::new());
        let stopping = CancellationToken::new();
        let taking = async {
            while !stopping.is_cancelled() {
                let taken = take(&self.link, target, &serving, &places, &tasks, &stopping).await;
                if let Err(error) = taken {
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
        tasks.close();
        tasks.wait().await;
        let _ = self.link.client().flush().await;
        Ok(())
    }
}

/// Opens the consumer of a target's commands and the subscription for prefetched cards.
async fn open(
    link: &Link,
    target: &str,
    serving: &Serving,
) -> anyhow::Result<(PullConsumer, Subscriber)> {
    link.up().await;
    link.ensure_streams().await?;
    let safe: String =
        target.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let mut name = format!("tool_{safe}_cmd_{}", link.version());
    let stream = link.jetstream().get_stream(link.command_stream()).await?;
    let ours = format!("cg.{}.*.*.cmd.tool.{target}.", link.version());
    let config = |name: &str| pull::Config {
        durable_name: Some(name.to_owned()),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        ack_wait: serving.ack_wait,
        // Redelivery is unlimited: an unavailable server returns, and an unusable command becomes a
        // dead letter.
        max_deliver: -1,
        filter_subject: format!("{ours}>"),
        max_ack_pending: 10_000,
        ..pull::Config::default()
    };
    let mut consumer: PullConsumer = stream.get_or_create_consumer(&name, config(&name)).await?;
    if !consumer.cached_info().config.filter_subject.starts_with(&ours) {
        // Another target maps to the same consumer name, which allows fewer characters. A hash
        // makes the name unique.
        name = format!("{name}_{}", &hex(&Sha256::digest(target.as_bytes()))[..8]);
        consumer = stream.get_or_create_consumer(&name, config(&name)).await?;
    }
    Ok((consumer, link.client().subscribe(serving.ahead.inbox.clone()).await?))
}

/// Takes commands until the connection breaks or `stopping` is canceled. It pulls no more commands
/// than there are free permits: other processes that serve the target take the rest, and a command
/// that waited here would look to them like one that had started.
async fn take(
    link: &Link,
    target: &str,
    serving: &Arc<Serving>,
    places: &Arc<Semaphore>,
    tasks: &TaskTracker,
    stopping: &CancellationToken,
) -> anyhow::Result<()> {
    let opened = stopping.run_until_cancelled(open(link, target, serving)).await;
    let Some(opened) = opened else { return Ok(()) };
    let (consumer, mut cards) = opened?;
    // Commands that were requested over a broken connection do not arrive over the next one.
    let mut again = std::pin::pin!(link.connected_again());
    again.as_mut().enable();
    while !stopping.is_cancelled() {
        let free = serving.keeping(&mut cards, free_places(places));
        let Some(free) = stopping.run_until_cancelled(free).await else { break };
        let mut free = free?;
        let asking = consumer.batch().max_messages(free.num_permits()).expires(ASKED_FOR);
        let mut commands = asking.messages().await?;
        // This process starts every command that it has received, even while stopping.
        loop {
            let message = tokio::select! {
                biased;
                message = serving.keeping(&mut cards, commands.next()) => message,
                () = stopping.cancelled() => commands.next().now_or_never().flatten(),
                () = &mut again => return Ok(()),
            };
            let Some(message) = message.transpose().map_err(anyhow::Error::from_boxed)? else {
                break;
            };
            let Some(place) = free.split(1) else { break };
            // Boxed, because the future of a command is large and spawning moves it.
            tasks.spawn(Box::pin(serving.clone().unless_dropped(message, place)));
        }
    }
    Ok(())
}

/// Waits for a free permit and returns all free permits.
async fn free_places(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, AcquireError> {
    let mut free = places.clone().acquire_owned().await?;
    let more = u32::try_from(places.available_permits()).unwrap_or(u32::MAX);
    if let Ok(more) = places.clone().try_acquire_many_owned(more) {
        free.merge(more);
    }
    Ok(free)
}

struct Serving {
    ahead: Arc<Ahead>,
    crib: Crib,
    tools: HashMap<String, Run>,
    any: Option<Run>,
    /// Calls that run in this process; a redelivery of one is ignored.
    running: Mutex<HashSet<(String, String, String)>>,
    /// Calls that this process returned without starting, with the delivery count.
    returned: Mutex<HashMap<(String, String, String), i64>>,
    ack_wait: Duration,
    dropped: CancellationToken,
}

impl Serving {
    /// Awaits a future and stores the cards that arrive meanwhile. Cards are polled first, so that
    /// a card sent before a command is present when the command is handled.
    async fn keeping<T>(&self, cards: &mut Subscriber, wanted: impl Future<Output = T>) -> T {
        let mut wanted = std::pin::pin!(wanted);
        loop {
            tokio::select! {
                biased;
                Some(sent) = cards.next() => self.ahead.keep(&sent),
                came = &mut wanted => return came,
            }
        }
    }

    async fn unless_dropped(self: Arc<Self>, message: Message, place: OwnedSemaphorePermit) {
        self.dropped.run_until_cancelled(self.handle(&message)).await;
        drop(place);
    }

    async fn handle(&self, message: &Message) {
        let deliveries = message.info().map_or(1, |info| info.delivered);
        let command = match Command::read(message) {
            Ok(command) => command,
            Err(why) => return self.bury(message, &why).await,
        };
        if !self.running.lock().insert(command.anchor()) {
            return;
        }
        let working = self.work(&command, deliveries);
        let told = self.alive(message, working).await;
        self.running.lock().remove(&command.anchor());
        match told {
            Told::Taken => finish(message, AckKind::Ack).await,
            // The server has recorded the report, and redelivery would change nothing.
            Told::Refused(why) => {
                tracing::warn!(call = command.tool_call_id, why, "the report was refused");
                finish(message, AckKind::Ack).await;
            }
            Told::Nobody => finish(message, AckKind::Nak(Some(GIVE_AGAIN))).await,
        }
    }

    /// Sends heartbeats until the work is done.
    async fn alive<T>(&self, message: &Message, work: impl Future<Output = T>) -> T {
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

    async fn work(&self, command: &Command, deliveries: i64) -> Told {
        let prepared = match command.check() {
            Ok(()) => self.arguments(command, deliveries).await,
            Err(trouble) => Err(trouble),
        };
        let (answer, meta) = match prepared {
            Ok(Asked { tool_name, args, meta, ended, looked }) => {
                let again = deliveries > 1 && !self.was_returned(command, deliveries);
                if again && let Some(told) = self.crib.report_known(command).await {
                    return told;
                }
                let answer = match (ended, again && command.is_irreversible()) {
                    (true, _) => not_begun(&tool_name),
                    (false, true) => Answer::failed(unknown_outcome(&tool_name)),
                    (false, false) => {
                        let running = self.run(command, &tool_name, args, &meta);
                        if looked { running.await } else { self.say_soon(command, running).await }
                    }
                };
                (answer, meta)
            }
            Err(Trouble::Away) => {
                self.returned.lock().insert(command.anchor(), deliveries);
                return Told::Nobody;
            }
            Err(Trouble::Wrong(answer)) => (*answer, Value::Null),
        };
        self.crib.report(command, answer, &meta).await
    }

    /// Returns the arguments of a command: from a prefetched card, or from the server.
    async fn arguments(&self, command: &Command, deliveries: i64) -> Result<Asked, Trouble> {
        self.ahead.follow(&Crib::place(command));
        let card_id = command.card_id.as_deref().unwrap_or_default();
        match self.ahead.take(card_id).filter(|_| deliveries == 1) {
            Some(card) => Crib::asked(command, card, false),
            None => self.crib.arguments(command).await,
        }
    }

    /// Runs the tool, and announces after a delay that the call was taken. The server learns that
    /// from the request for the call's card, so for a slow tool the card is requested while the
    /// tool runs.
    async fn say_soon<T>(&self, command: &Command, running: impl Future<Output = T>) -> T {
        let mut running = std::pin::pin!(running);
        tokio::select! {
            done = &mut running => done,
            () = tokio::time::sleep(SAY_AFTER) => {
                let (done, _) = tokio::join!(running, self.crib.look(command));
                done
            }
        }
    }

    /// Returns true if this process had the previous delivery and returned it without starting.
    fn was_returned(&self, command: &Command, deliveries: i64) -> bool {
        self.returned.lock().remove(&command.anchor()) == Some(deliveries - 1)
    }

    async fn run(&self, command: &Command, tool_name: &str, args: Value, meta: &Value) -> Answer {
        let Some(run) = self.tools.get(tool_name).or(self.any.as_ref()) else {
            let message = format!("there is no tool \"{tool_name}\" here");
            return Answer::failed(Fault::new(Code::NotFound, message).not_happened());
        };
        let job = command.job(tool_name, args, meta);
        // Also catches a panic of the handler before its first await.
        let running = async move { run(job).await };
        match std::panic::AssertUnwindSafe(running).catch_unwind().await {
            Ok(answer) => answer,
            Err(_) => Answer::failed(Fault::runtime(format!("{tool_name} panicked"))),
        }
    }

    async fn bury(&self, message: &Message, why: &str) {
        let subject = message.subject.as_str();
        let kind = match self.crib.bury(message, why).await {
            Told::Taken => {
                tracing::warn!(subject, why, "a command became a dead letter");
                AckKind::Term
            }
            // The dead letter is not stored, and redelivery would change nothing.
            Told::Refused(refused) => {
                tracing::error!(subject, why, refused, "a command was dropped");
                AckKind::Term
            }
            Told::Nobody => AckKind::Nak(Some(GIVE_AGAIN)),
        };
        finish(message, kind).await;
    }
}

fn unknown_outcome(tool_name: &str) -> Fault {
    let message = format!(
        "{tool_name} was begun before and its result is not known: it may have happened, and was \
         not begun again"
    );
    Fault::new(Code::OutcomeUnknown, message)
}

/// Returns the result for a call that has already ended by timeout or cancellation. Its effect is
/// no longer expected, so the tool does not run.
fn not_begun(tool_name: &str) -> Answer {
    let message = format!("{tool_name} was not begun: its call has ended");
    let fault = Fault::new(Code::Canceled, message).not_happened();
    Answer { status: ToolStatus::Canceled, ..Answer::failed(fault) }
}

async fn finish(message: &Message, kind: AckKind) {
    if let Err(error) = message.ack_with(kind).await {
        tracing::debug!(%error, "an acknowledgement was not sent");
    }
}
