//! `toolcrib run`: a question goes to a model, and the loop is shown while it happens.
//!
//! The run is kept by the server, so a stream that breaks is opened again after the last event that
//! was seen, and whoever stops watching is told how to come back. Where no server runs and none was
//! named, this process is one for as long as the run takes, on the data directory.

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
/// How long a server that is away is tried to be reached again.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long an engine of this process has to finish what runs.
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
    /// What to ask; - reads it from standard input
    question: Option<String>,
    /// The model; unless said, the server's first, and of a replay, the recorded one
    #[arg(long, value_name = "NAME", conflicts_with_all = ["more", "resume", "follow"])]
    model: Option<String>,
    /// Only these tools: names and patterns
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', conflicts_with = "which")]
    tools: Option<Vec<String>>,
    /// What the model is told before the question
    #[arg(long, value_name = "TEXT", conflicts_with = "which")]
    system: Option<String>,
    /// At most so many answers of the model
    #[arg(long, value_name = "N", conflicts_with = "which")]
    steps: Option<u32>,
    /// Say more to this run
    #[arg(long = "continue", value_name = "RUN", group = "which")]
    more: Option<String>,
    /// Take up a run that failed or was canceled
    #[arg(long, value_name = "RUN", group = "which")]
    resume: Option<String>,
    /// Watch a run that goes on, from its beginning
    #[arg(long, value_name = "RUN", group = "which")]
    follow: Option<String>,
    /// Play a recorded run again, against the recorded results, and say where it differs
    #[arg(long, value_name = "RUN", group = "which")]
    replay: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Where the run is: a server, or this process.
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

/// What is asked; none where nothing is to be said.
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
        // A name that only groups calls has events too, and they never end.
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

/// A stream of events, read message by message.
struct Messages {
    stream: Response,
    parser: Parser,
}

impl Messages {
    fn new(stream: Response) -> Self {
        Self { stream, parser: Parser::default() }
    }

    /// More messages; none at the end of the stream. An error is a connection that broke.
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

/// A run that is watched.
struct Watched {
    run: String,
    /// The last kept event that was seen.
    last: Option<String>,
    /// What happened before is not shown: the first event that is, has this time, or a later one.
    since_ms: Option<u64>,
    stream: Option<Response>,
}

impl Watched {
    /// One that is watched from its beginning.
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
            // Where the server's clock was set back meanwhile, too much is better than nothing.
            if over && self.since_ms.take().is_some() {
                self.last = None;
            }
        }
    }

    /// Whether an event belongs to what is watched. What it begins with is in the run's story
    /// before the stream is opened, so it is found there however long the story is.
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
