//! `toolcrib run`: sends a question to a model and shows the agent loop while it runs.
//!
//! The server stores the run, so the command reopens a broken stream after the last event it
//! received, and prints how to follow the run when the user stops watching. If no server is running
//! and none was given, the command starts one on the data directory for the duration of the run.

pub(super) mod manage;
mod replay;
mod tree;
mod view;
use std::io::Read;
use std::time::Duration;

use clap::Args;
use parking_lot::Mutex;
use reqwest::Response;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use toolcrib_protocol::sse::SseParser;

use self::view::RunView;
use super::client::{ApiClient, ApiRequest};
use super::failure::{CommandFailure, exit};
use super::output::{str_member, u64_member};
use super::{CommandContext, StorageArgs};
use crate::bootstrap::{self, ServerRuntime};

const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// Maximum time to reconnect to an unreachable server.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that an embedded engine has to finish running work.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[command(after_help = "\
The text of the model goes to standard output, everything else to standard error.
Without a server, the command starts one on the data directory until the run has ended.

Examples:
  toolcrib run --model demo 'What is 6 * 7?'           no key and no network needed
  toolcrib run 'Which tools fail most?' --tools 'database.*'
  echo 'a long question' | toolcrib run -
  toolcrib run --continue run_… 'And in Fahrenheit?'   the same conversation
  toolcrib run --resume run_…                          after its model was unavailable
  toolcrib run --follow run_…                          watch a run, also one of a chat completion
  toolcrib run 'Book a flight' --tool-mode search --pin 'calendar.*'
  toolcrib run --replay run_…                          replay against recorded results
  toolcrib run --model demo 'What is 6 * 7?' --json | jq -r 'select(.answer) | .answer'

`toolcrib runs` lists, shows, follows and cancels runs.")]
pub struct RunArgs {
    /// The question; - reads it from standard input
    question: Option<String>,
    /// Further words, for an error message that helps
    #[arg(hide = true, conflicts_with = "which")]
    rest: Vec<String>,
    /// The model [default: the server's first; for --replay, the recorded one]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["more", "resume", "follow"])]
    model: Option<String>,
    /// Only these tools: names and patterns
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', conflicts_with = "which")]
    tools: Option<Vec<String>>,
    /// Tool definitions the model receives: auto, all, search or pinned
    #[arg(long, value_name = "MODE", conflicts_with = "which")]
    tool_mode: Option<String>,
    /// Tools that every request offers in the modes search and pinned: names and patterns
    #[arg(long = "pin", value_name = "PATTERN", value_delimiter = ',', conflicts_with = "which")]
    pinned_tools: Option<Vec<String>>,
    /// System prompt for the model
    #[arg(long, value_name = "TEXT", conflicts_with = "which")]
    system: Option<String>,
    /// Maximum number of answers from the model
    #[arg(long, value_name = "N", conflicts_with = "which")]
    steps: Option<u32>,
    /// Continue the conversation of this run
    #[arg(long = "continue", value_name = "RUN", group = "which")]
    more: Option<String>,
    /// Resume a run that failed or was canceled
    #[arg(long, value_name = "RUN", group = "which")]
    resume: Option<String>,
    /// Follow a run from its start
    #[arg(long, value_name = "RUN", group = "which")]
    follow: Option<String>,
    /// Replay a recorded run against its recorded results and show the differences
    #[arg(long, value_name = "RUN", group = "which")]
    replay: Option<String>,
    #[command(flatten)]
    storage: StorageArgs,
}

/// The server of the run: a running one, or one embedded in this process.
struct RunServer {
    client: ApiClient,
    embedded: Option<(ServerRuntime, CancellationToken)>,
}

pub async fn run(context: &CommandContext, args: RunArgs) -> Result<(), CommandFailure> {
    let question = read_question(&args)?;
    let site = connect_or_embed(context, &args).await?;
    let run_id = Mutex::new(String::new());
    let outcome = tokio::select! {
        biased;
        outcome = start_and_watch(context, &site.client, &args, question, &run_id) => outcome,
        _ = tokio::signal::ctrl_c() => {
            let how = if site.embedded.is_some() { "when a server is started here" } else { "there" };
            let run = run_id.lock().clone();
            if !run.is_empty() {
                let follow_command = format!("toolcrib run --follow {run}");
                context.output.print_note(&format!("\nthe run continues {how}; {follow_command}"));
            }
            Err(CommandFailure::interrupted())
        }
    };
    if let Some((served, stop)) = site.embedded {
        served.engine.shut_down(SHUTDOWN_TIMEOUT).await;
        stop.cancel();
        served.flush_telemetry(SHUTDOWN_TIMEOUT).await;
    }
    outcome
}

/// Reads the question. Returns `None` for options that take no question.
fn read_question(args: &RunArgs) -> Result<Option<String>, CommandFailure> {
    check_words(args)?;
    let silent = args.resume.is_some() || args.follow.is_some() || args.replay.is_some();
    let question = match args.question.as_deref() {
        Some("-") => {
            let mut read = String::new();
            std::io::stdin().read_to_string(&mut read)?;
            Some(read.trim().to_owned())
        }
        other => other.map(str::to_owned),
    };
    match question {
        Some(_) if silent => Err(CommandFailure::usage("this option takes no question")),
        None if !silent => Err(CommandFailure::usage("the question is missing")
            .hint("toolcrib run --model demo 'What is 6 * 7?'")),
        Some(text) if text.is_empty() => Err(CommandFailure::usage("the question is empty")),
        question => Ok(question),
    }
}

/// Commands of `toolcrib runs` that must not become a question to a model.
const RUNS_COMMANDS: [&str; 7] = ["ls", "list", "show", "get", "follow", "cancel", "tree"];

/// Refuses a command of `toolcrib runs`, and a question of several arguments.
fn check_words(args: &RunArgs) -> Result<(), CommandFailure> {
    let Some(question) = &args.question else { return Ok(()) };
    let is_run = |word: &String| word.starts_with("run_");
    let is_command = RUNS_COMMANDS.contains(&question.as_str())
        && (args.rest.is_empty() || args.rest.iter().all(is_run));
    if is_command {
        let rest: String = args.rest.iter().map(|word| format!(" {word}")).collect();
        let message = format!("\"{question}\" is a command of toolcrib runs, not a question");
        return Err(CommandFailure::usage(message).hint(format!(
            "toolcrib runs {question}{rest}; to send the word to a model: echo {question} | \
             toolcrib run -"
        )));
    }
    if args.rest.is_empty() {
        return Ok(());
    }
    let message = "the question has several arguments; put it in quotes";
    let words = [std::slice::from_ref(question), args.rest.as_slice()].concat().join(" ");
    Err(CommandFailure::usage(message).hint(format!("toolcrib run '{words}'")))
}

async fn connect_or_embed(
    context: &CommandContext,
    args: &RunArgs,
) -> Result<RunServer, CommandFailure> {
    let client = context.client()?;
    let embeds = args.storage.is_set() && !context.server_from_flag;
    if !embeds && (context.global.server.is_some() || client.is_toolcrib_alive().await) {
        return Ok(RunServer { client, embedded: None });
    }
    let config = context.config(Some(&"127.0.0.1:0".to_owned()), &args.storage)?;
    let served = bootstrap::start_server(&config).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let router = bootstrap::router_without_mcp_servers(&config, served.engine.clone());
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(
        async move { crate::serve::serve_listener(listener, router, &config, stopped).await },
    );
    let (key, project) = (context.global.key.as_deref(), context.global.project.as_deref());
    Ok(RunServer {
        client: ApiClient::new(&address, key, project)?,
        embedded: Some((served, stop)),
    })
}

async fn start_and_watch(
    context: &CommandContext,
    client: &ApiClient,
    args: &RunArgs,
    question: Option<String>,
    run_id: &Mutex<String>,
) -> Result<(), CommandFailure> {
    if let Some(run) = &args.replay {
        return replay::replay_run(context, client, run, args.model.as_deref()).await;
    }
    let mut view = RunView::new(context.output);
    let watcher = if let Some(run) = &args.follow {
        RunWatcher::for_existing(client, run).await?
    } else if let Some(run) = &args.resume {
        let resumed = client
            .request_json(ApiRequest::post(&["v1", "runs", run, "resume"], json!({})))
            .await?;
        RunWatcher {
            since_ms: u64_member(&resumed, "updated_at_ms"),
            ..RunWatcher::from_start(run)
        }
    } else if let Some(run) = &args.more {
        let body = json!({ "messages": [{ "role": "user", "content": question }] });
        let accepted =
            client.request_json(ApiRequest::post(&["v1", "runs", run, "messages"], body)).await?;
        RunWatcher {
            since_ms: u64_member(&accepted, "updated_at_ms"),
            ..RunWatcher::from_start(run)
        }
    } else {
        let stream =
            client.post_event_stream(&["v1", "runs"], run_request_body(args, question)).await?;
        let id = stream.headers().get("toolcrib-run-id").and_then(|id| id.to_str().ok());
        let watcher = RunWatcher::from_start(id.unwrap_or_default());
        RunWatcher { stream: Some(stream), ..watcher }
    };
    run_id.lock().clone_from(&watcher.run);
    watcher.watch_to_end(client, &mut view).await
}

fn run_request_body(args: &RunArgs, question: Option<String>) -> Value {
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": question }));
    let mut body = Map::new();
    body.insert("messages".into(), messages.into());
    body.insert("stream".into(), true.into());
    if let Some(model) = &args.model {
        body.insert("model".into(), model.as_str().into());
    }
    if let Some(tools) = &args.tools {
        body.insert("tools".into(), json!(tools));
    }
    if let Some(mode) = &args.tool_mode {
        body.insert("tool_mode".into(), mode.as_str().into());
    }
    if let Some(pinned) = &args.pinned_tools {
        body.insert("pinned_tools".into(), json!(pinned));
    }
    if let Some(steps) = args.steps {
        body.insert("limits".into(), json!({ "steps": steps }));
    }
    Value::Object(body)
}

/// Reads a stream of events, batch by batch.
struct RunEventReader {
    stream: Response,
    parser: SseParser,
}

impl RunEventReader {
    fn new(stream: Response) -> Self {
        Self { stream, parser: SseParser::default() }
    }

    /// Returns the next messages, or `None` at the end of the stream. An error is a broken
    /// connection.
    async fn next(
        &mut self,
    ) -> Result<Option<Vec<toolcrib_protocol::sse::SseEvent>>, CommandFailure> {
        let lost = |_| CommandFailure::unreachable("the connection to the server broke");
        let Some(bytes) = self.stream.chunk().await.map_err(lost)? else { return Ok(None) };
        let messages = self.parser.push(&bytes).map_err(|_| {
            let message = "an event of the server exceeds the size limit";
            CommandFailure::new(exit::FAILURE, "NOT_SSE", message)
        })?;
        Ok(Some(messages))
    }
}

/// Watches a run.
struct RunWatcher {
    run: String,
    /// Id of the last stored event that was received.
    last_event_id: Option<String>,
    /// Earlier events are not shown. Cleared at the first event at or after this time.
    since_ms: Option<u64>,
    stream: Option<Response>,
    /// Set if the server stores no run with this id, which then only groups calls, like that of a
    /// chat completion: the failure to report if there are no calls either.
    not_stored: Option<CommandFailure>,
}

impl RunWatcher {
    /// Watches the run from its start.
    fn from_start(run: &str) -> Self {
        let (last_event_id, since_ms) = (None, None);
        Self { run: run.to_owned(), last_event_id, since_ms, stream: None, not_stored: None }
    }

    /// Watches a run that exists: a stored one, or the calls of a conversation.
    async fn for_existing(client: &ApiClient, run: &str) -> Result<Self, CommandFailure> {
        let not_stored = match client.request_json(ApiRequest::get(&["v1", "runs", run])).await {
            Ok(_) => None,
            Err(failure) if failure.code == "NOT_FOUND" => Some(failure),
            Err(failure) => return Err(failure),
        };
        Ok(Self { not_stored, ..Self::from_start(run) })
    }

    async fn watch_to_end(
        mut self,
        client: &ApiClient,
        view: &mut RunView,
    ) -> Result<(), CommandFailure> {
        let mut unreachable_since: Option<tokio::time::Instant> = None;
        loop {
            let stream = match self.stream.take() {
                Some(stream) => stream,
                None => match self.reopen_stream(client).await {
                    Ok(stream) => stream,
                    Err(failure) if failure.exit == exit::UNREACHABLE => {
                        let since =
                            *unreachable_since.get_or_insert_with(tokio::time::Instant::now);
                        if since.elapsed() > RECONNECT_TIMEOUT {
                            return Err(failure.hint(format!(
                                "the run is stored: toolcrib run --follow {}",
                                self.run
                            )));
                        }
                        tokio::time::sleep(RECONNECT_PAUSE).await;
                        continue;
                    }
                    Err(failure) => return Err(failure),
                },
            };
            unreachable_since = None;
            let mut messages = RunEventReader::new(stream);
            let is_stream_complete = loop {
                let batch = match messages.next().await {
                    Ok(Some(batch)) => batch,
                    Ok(None) => break true,
                    Err(_) => break false,
                };
                for message in batch {
                    let event = message.to_json();
                    if self.run.is_empty() {
                        self.run = str_member(&event, "run_id").to_owned();
                    }
                    if self.is_new(&event) {
                        view.show_event(&event)?;
                    }
                    self.last_event_id = message.id.or(self.last_event_id.take());
                }
            };
            if let Some(end) = view.outcome() {
                return end;
            }
            if is_stream_complete && let Some(not_stored) = self.not_stored.take() {
                return if view.show_idle() { Ok(()) } else { Err(not_stored) };
            }
            view.note_disconnect();
            // The server's clock may have been set back meanwhile: too many events are better than
            // none.
            if is_stream_complete && self.since_ms.take().is_some() {
                self.last_event_id = None;
            }
        }
    }

    /// Returns true if an event is to be shown. The first such event is stored before the stream is
    /// opened, so it is found however long the run's journal is.
    fn is_new(&mut self, event: &Value) -> bool {
        let Some(since_ms) = self.since_ms else { return true };
        let is_new = u64_member(event, "at_ms").is_some_and(|at_ms| at_ms >= since_ms);
        if is_new {
            self.since_ms = None;
        }
        is_new
    }

    async fn reopen_stream(&self, client: &ApiClient) -> Result<Response, CommandFailure> {
        client.open_run_stream(&self.run, self.last_event_id.as_deref()).await
    }
}
