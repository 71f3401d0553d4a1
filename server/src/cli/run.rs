//! `toolcrib run`: sends a question to a model and shows the agent loop while it runs.
//!
//! The server stores the run, so the command reopens a broken stream after the last event it
//! received, and prints how to follow the run when the user stops watching. If no server is running
//! and none was given, the command starts one on the data directory for the duration of the run.

mod replay;
mod view;

use std::io::Read;
use std::time::Duration;

use clap::Args;
use parking_lot::Mutex;
use reqwest::Response;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use self::view::View;
use super::client::{Ask, Client};
use super::failure::{Failure, exit};
use super::output::{number, text};
use super::{Context, Place};
use crate::assemble::{self, Served};
use crate::sse::Parser;

const PAUSE: Duration = Duration::from_millis(500);
/// Maximum time to reconnect to an unreachable server.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that an embedded engine has to finish running work.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[command(after_help = "\
The words of the model go to standard output, everything else to standard error.
Without a server this process is one, on the data directory, for as long as it takes.

Examples:
  toolcrib run --model demo 'What is 6 * 7?'           no key and no network needed
  toolcrib run 'Which tools fail most?' --tools 'database.*'
  echo 'a long question' | toolcrib run -
  toolcrib run --continue run_… 'And in Fahrenheit?'   the same conversation
  toolcrib run --resume run_…                          after its model was away
  toolcrib run --follow run_…                          watch one that goes on
  toolcrib run --replay run_…                          again, against recorded results
  toolcrib run --model demo 'What is 6 * 7?' --json | jq -r 'select(.answer) | .answer'")]
pub struct RunArgs {
    /// The question; - reads it from standard input
    question: Option<String>,
    /// The model [default: the server's first; for --replay, the recorded one]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["more", "resume", "follow"])]
    model: Option<String>,
    /// Only these tools: names and patterns
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', conflicts_with = "which")]
    tools: Option<Vec<String>>,
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
    place: Place,
}

/// The server of the run: a running one, or one embedded in this process.
struct Site {
    client: Client,
    own: Option<(Served, CancellationToken)>,
}

pub async fn run(context: &Context, args: RunArgs) -> Result<(), Failure> {
    let question = question(&args)?;
    let site = site(context, &args).await?;
    let known = Mutex::new(String::new());
    let outcome = tokio::select! {
        biased;
        outcome = act(context, &site.client, &args, question, &known) => outcome,
        _ = tokio::signal::ctrl_c() => {
            let how = if site.own.is_some() { "when a server is started here" } else { "there" };
            let run = known.lock().clone();
            if !run.is_empty() {
                let come_back = format!("toolcrib run --follow {run}");
                context.output.note(&format!("\nthe run goes on {how}; {come_back}"));
            }
            Err(Failure::interrupted())
        }
    };
    if let Some((served, stop)) = site.own {
        served.engine.shut_down(DRAIN).await;
        stop.cancel();
        served.flush(DRAIN).await;
    }
    outcome
}

/// Reads the question. Returns `None` for options that take no question.
fn question(args: &RunArgs) -> Result<Option<String>, Failure> {
    let silent = args.resume.is_some() || args.follow.is_some() || args.replay.is_some();
    let given = match args.question.as_deref() {
        Some("-") => {
            let mut read = String::new();
            std::io::stdin().read_to_string(&mut read)?;
            Some(read.trim().to_owned())
        }
        other => other.map(str::to_owned),
    };
    match given {
        Some(_) if silent => Err(Failure::usage("there is nothing to ask with this option")),
        None if !silent => Err(Failure::usage("what is the question?")
            .hint("toolcrib run --model demo 'What is 6 * 7?'")),
        Some(text) if text.is_empty() => Err(Failure::usage("the question is empty")),
        given => Ok(given),
    }
}

async fn site(context: &Context, args: &RunArgs) -> Result<Site, Failure> {
    let client = context.client()?;
    let embeds = args.place.is_named() && !context.server_typed;
    if !embeds && (context.global.server.is_some() || client.is_alive().await) {
        return Ok(Site { client, own: None });
    }
    let config = context.config(Some(&"127.0.0.1:0".to_owned()), &args.place)?;
    let served = assemble::engine(&config).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let router = assemble::router(&config, served.engine.clone());
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move { crate::serve::on(listener, router, &config, stopped).await });
    let (key, project) = (context.global.key.as_deref(), context.global.project.as_deref());
    Ok(Site { client: Client::new(&address, key, project)?, own: Some((served, stop)) })
}

async fn act(
    context: &Context,
    client: &Client,
    args: &RunArgs,
    question: Option<String>,
    known: &Mutex<String>,
) -> Result<(), Failure> {
    if let Some(run) = &args.replay {
        return replay::run(context, client, run, args.model.as_deref()).await;
    }
    let mut view = View::new(context.output);
    let watched = if let Some(run) = &args.follow {
        // A run id that only groups calls has events too, but its stream never ends.
        client.ask(Ask::get(&["v1", "runs", run])).await?;
        Watched::of(run)
    } else if let Some(run) = &args.resume {
        let resumed = client.ask(Ask::post(&["v1", "runs", run, "resume"], json!({}))).await?;
        Watched { since_ms: number(&resumed, "updated_at_ms"), ..Watched::of(run) }
    } else if let Some(run) = &args.more {
        let body = json!({ "messages": [{ "role": "user", "content": question }] });
        let heard = client.ask(Ask::post(&["v1", "runs", run, "messages"], body)).await?;
        Watched { since_ms: number(&heard, "updated_at_ms"), ..Watched::of(run) }
    } else {
        let stream = client.stream_of(&["v1", "runs"], body(args, question)).await?;
        let id = stream.headers().get("toolcrib-run-id").and_then(|id| id.to_str().ok());
        let watched = Watched::of(id.unwrap_or_default());
        Watched { stream: Some(stream), ..watched }
    };
    known.lock().clone_from(&watched.run);
    watched.until_the_end(client, &mut view).await
}

fn body(args: &RunArgs, question: Option<String>) -> Value {
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
    if let Some(steps) = args.steps {
        body.insert("limits".into(), json!({ "steps": steps }));
    }
    Value::Object(body)
}

/// Reads a stream of events, batch by batch.
struct Messages {
    stream: Response,
    parser: Parser,
}

impl Messages {
    fn new(stream: Response) -> Self {
        Self { stream, parser: Parser::default() }
    }

    /// Returns the next messages, or `None` at the end of the stream. An error is a broken
    /// connection.
    async fn next(&mut self) -> Result<Option<Vec<crate::sse::Message>>, Failure> {
        let lost = |_| Failure::unreachable("the connection to the server broke");
        let Some(bytes) = self.stream.chunk().await.map_err(lost)? else { return Ok(None) };
        let messages = self.parser.push(&bytes).map_err(|_| {
            let message = "the server sends an event without an end";
            Failure::new(exit::FAILURE, "NOT_SSE", message)
        })?;
        Ok(Some(messages))
    }
}

/// Watches a run.
struct Watched {
    run: String,
    /// Id of the last stored event that was received.
    last: Option<String>,
    /// Earlier events are not shown. Cleared at the first event at or after this time.
    since_ms: Option<u64>,
    stream: Option<Response>,
}

impl Watched {
    /// Watches the run from its start.
    fn of(run: &str) -> Self {
        Self { run: run.to_owned(), last: None, since_ms: None, stream: None }
    }

    async fn until_the_end(mut self, client: &Client, view: &mut View) -> Result<(), Failure> {
        let mut away_since: Option<tokio::time::Instant> = None;
        loop {
            let stream = match self.stream.take() {
                Some(stream) => stream,
                None => match self.reopened(client).await {
                    Ok(stream) => stream,
                    Err(failure) if failure.exit == exit::UNREACHABLE => {
                        let since = *away_since.get_or_insert_with(tokio::time::Instant::now);
                        if since.elapsed() > PATIENCE {
                            return Err(failure.hint(format!(
                                "the run is kept: toolcrib run --follow {}",
                                self.run
                            )));
                        }
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                    Err(failure) => return Err(failure),
                },
            };
            away_since = None;
            let mut messages = Messages::new(stream);
            let over = loop {
                let batch = match messages.next().await {
                    Ok(Some(batch)) => batch,
                    Ok(None) => break true,
                    Err(_) => break false,
                };
                for message in batch {
                    let event = message.value();
                    if self.run.is_empty() {
                        self.run = text(&event, "run_id").to_owned();
                    }
                    if self.is_new(&event) {
                        view.show(&event)?;
                    }
                    self.last = message.id.or(self.last.take());
                }
            };
            if let Some(end) = view.end() {
                return end;
            }
            view.broken();
            // The server's clock may have been set back meanwhile: too many events are better than
            // none.
            if over && self.since_ms.take().is_some() {
                self.last = None;
            }
        }
    }

    /// Returns true if an event is to be shown. The first such event is stored before the stream is
    /// opened, so it is found however long the run's journal is.
    fn is_new(&mut self, event: &Value) -> bool {
        let Some(since_ms) = self.since_ms else { return true };
        let is_new = number(event, "at_ms").is_some_and(|at_ms| at_ms >= since_ms);
        if is_new {
            self.since_ms = None;
        }
        is_new
    }

    async fn reopened(&self, client: &Client) -> Result<Response, Failure> {
        client.stream(&["v1", "runs", &self.run, "events"], self.last.as_deref()).await
    }
}
