//! `toolcrib run`: sends a question to a model and shows the agent loop while it runs.
//!
//! The server stores the run, so the command reopens a broken stream after the last event it
//! received, and prints how to follow the run when the user stops watching. If no server is running
//! and none was given, or if a data directory is given, the command starts a server on the data
//! directory for the duration of the run.

pub(super) mod manage;
mod replay;
mod tree;
mod view;
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

/// Pause between two attempts to reconnect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// Time for which the command tries to reconnect to an unreachable server.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for an embedded server to finish running work, and again to send its telemetry.
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
    /// Further words: they are refused, with the quoted question as advice
    #[arg(hide = true, conflicts_with = "existing_run")]
    rest: Vec<String>,
    /// The model [default: the server's first; for --replay, the recorded one]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["continued", "resume", "follow"])]
    model: Option<String>,
    /// Only these tools: names and patterns
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', conflicts_with = "existing_run")]
    tools: Option<Vec<String>>,
    /// Tool definitions the model receives: auto, all, search or pinned
    #[arg(long, value_name = "MODE", conflicts_with = "existing_run")]
    tool_mode: Option<String>,
    /// Tools that every request offers in the modes search and pinned: names and patterns
    #[arg(
        long = "pin",
        value_name = "PATTERN",
        value_delimiter = ',',
        conflicts_with = "existing_run"
    )]
    pinned_tools: Option<Vec<String>>,
    /// System prompt for the model
    #[arg(long, value_name = "TEXT", conflicts_with = "existing_run")]
    system: Option<String>,
    /// Maximum number of answers from the model
    #[arg(long, value_name = "N", conflicts_with = "existing_run")]
    steps: Option<u32>,
    /// Continue the conversation of this run
    #[arg(long = "continue", value_name = "RUN", group = "existing_run")]
    continued: Option<String>,
    /// Resume a run that failed or was canceled
    #[arg(long, value_name = "RUN", group = "existing_run")]
    resume: Option<String>,
    /// Follow a run from its start
    #[arg(long, value_name = "RUN", group = "existing_run")]
    follow: Option<String>,
    /// Replay a recorded run against its recorded results and show the differences
    #[arg(long, value_name = "RUN", group = "existing_run")]
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
    let server = connect_or_embed(context, &args).await?;
    let run_id = Mutex::new(String::new());
    let outcome = tokio::select! {
        biased;
        outcome = start_and_watch(context, &server.client, &args, question, &run_id) => outcome,
        _ = tokio::signal::ctrl_c() => {
            let continuation =
                if server.embedded.is_some() { "when a server is started here" } else { "there" };
            let run = run_id.lock().clone();
            if !run.is_empty() {
                let follow_command = format!("toolcrib run --follow {run}");
                let note = format!("\nthe run continues {continuation}; {follow_command}");
                context.output.print_note(&note);
            }
            Err(CommandFailure::interrupted())
        }
    };
    if let Some((runtime, stop)) = server.embedded {
        runtime.engine.shut_down(SHUTDOWN_TIMEOUT).await;
        stop.cancel();
        runtime.flush_telemetry(SHUTDOWN_TIMEOUT).await;
    }
    outcome
}

/// Reads the question. Returns `None` for options that take no question.
fn read_question(args: &RunArgs) -> Result<Option<String>, CommandFailure> {
    check_words(args)?;
    let takes_no_question = args.resume.is_some() || args.follow.is_some() || args.replay.is_some();
    let question = match args.question.as_deref() {
        Some("-") => {
            let text = std::io::read_to_string(std::io::stdin())?;
            Some(text.trim().to_owned())
        }
        other => other.map(str::to_owned),
    };
    match question {
        Some(_) if takes_no_question => Err(CommandFailure::usage("this option takes no question")),
        None if !takes_no_question => Err(CommandFailure::usage("the question is missing")
            .hint("toolcrib run --model demo 'What is 6 * 7?'")),
        Some(text) if text.is_empty() => Err(CommandFailure::usage("the question is empty")),
        question => Ok(question),
    }
}

/// Commands of `toolcrib runs` that `toolcrib run` does not send to a model as a question.
const RUNS_COMMANDS: [&str; 7] = ["ls", "list", "show", "get", "follow", "cancel", "tree"];

/// Refuses a command of `toolcrib runs`, and a question of several arguments.
fn check_words(args: &RunArgs) -> Result<(), CommandFailure> {
    let Some(question) = &args.question else { return Ok(()) };
    let is_run_id = |word: &String| word.starts_with("run_");
    let is_command = RUNS_COMMANDS.contains(&question.as_str())
        && (args.rest.is_empty() || args.rest.iter().all(is_run_id));
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

/// Returns the running server, or starts one in this process on the data directory.
async fn connect_or_embed(
    context: &CommandContext,
    args: &RunArgs,
) -> Result<RunServer, CommandFailure> {
    context.check_one_target(&args.storage)?;
    let client = context.client()?;
    if !args.storage.is_set()
        && (context.global.server.is_some() || client.is_toolcrib_alive().await)
    {
        return Ok(RunServer { client, embedded: None });
    }
    let config = context.config(Some(&"127.0.0.1:0".to_owned()), &args.storage)?;
    let runtime = bootstrap::start_server(&config).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let router = bootstrap::router_without_mcp_servers(&config, runtime.engine.clone());
    let stop = CancellationToken::new();
    let stop_serving = stop.clone();
    tokio::spawn(async move {
        crate::serve::serve_listener(listener, router, &config, stop_serving).await
    });
    let (key, project) = (context.global.key.as_deref(), context.global.project.as_deref());
    Ok(RunServer {
        client: ApiClient::new(&address, key, project)?,
        embedded: Some((runtime, stop)),
    })
}

/// Starts, continues, resumes, follows or replays the run that the arguments name, and shows it.
/// `run_id` receives the id once it is known, so that an interruption can print it.
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
    } else if let Some(run) = &args.continued {
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

/// Builds the body of `POST /v1/runs`.
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

/// Reads the events of a stream, one batch per chunk of data.
struct RunEventReader {
    stream: Response,
    parser: SseParser,
}

impl RunEventReader {
    fn new(stream: Response) -> Self {
        Self { stream, parser: SseParser::default() }
    }

    /// Returns the next events, or `None` at the end of the stream. Fails if the connection breaks
    /// or an event is too large.
    async fn next(
        &mut self,
    ) -> Result<Option<Vec<toolcrib_protocol::sse::SseEvent>>, CommandFailure> {
        let broken = |_| CommandFailure::unreachable("the connection to the server broke");
        let Some(bytes) = self.stream.chunk().await.map_err(broken)? else { return Ok(None) };
        let events = self.parser.push(&bytes).map_err(|_| {
            let message = "an event of the server exceeds the size limit";
            CommandFailure::new(exit::FAILURE, "NOT_SSE", message)
        })?;
        Ok(Some(events))
    }
}

/// Shows the events of a run until it ends, and reopens a stream that breaks.
struct RunWatcher {
    run: String,
    /// Id of the last stored event that was received.
    last_event_id: Option<String>,
    /// Events before this time are not shown. Cleared by the first event at or after it.
    since_ms: Option<u64>,
    stream: Option<Response>,
    /// Set if the server stores no run with this id. The id may still group calls, as that of a
    /// chat completion does; this is the failure to report if it does not.
    not_stored: Option<CommandFailure>,
}

impl RunWatcher {
    /// Watches the run from its start.
    fn from_start(run: &str) -> Self {
        let (last_event_id, since_ms) = (None, None);
        Self { run: run.to_owned(), last_event_id, since_ms, stream: None, not_stored: None }
    }

    /// Watches a run that exists: a stored one, or the calls that have this run id.
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
            let mut reader = RunEventReader::new(stream);
            let is_stream_complete = loop {
                let batch = match reader.next().await {
                    Ok(Some(batch)) => batch,
                    Ok(None) => break true,
                    Err(_) => break false,
                };
                for message in batch {
                    let event = message.to_json();
                    if self.run.is_empty() {
                        self.run = str_member(&event, "run_id").to_owned();
                    }
                    if self.should_show(&event) {
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
            // No event reached `since_ms`, because the server's clock was set back. All events are
            // shown then: too many are better than none.
            if is_stream_complete && self.since_ms.take().is_some() {
                self.last_event_id = None;
            }
        }
    }

    /// Returns true if the event, or one before it, is at or after `since_ms`. The server stores
    /// the first such event before the stream is opened, so the stream always contains it.
    fn should_show(&mut self, event: &Value) -> bool {
        let Some(since_ms) = self.since_ms else { return true };
        let is_recent = u64_member(event, "at_ms").is_some_and(|at_ms| at_ms >= since_ms);
        if is_recent {
            self.since_ms = None;
        }
        is_recent
    }

    async fn reopen_stream(&self, client: &ApiClient) -> Result<Response, CommandFailure> {
        client.open_run_stream(&self.run, self.last_event_id.as_deref()).await
    }
}
