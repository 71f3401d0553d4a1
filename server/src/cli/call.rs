//! `toolcrib call`: calls a tool and waits for its outcome.
//!
//! The ticket is durable, so a server outage during the wait is no reason to give up: the command
//! polls until its time is over, and prints how to resume waiting when it stops early.

mod unanswered;

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};

use super::client::{ApiClient, ApiRequest};
use super::failure::{CommandFailure, exit};
use super::input::parse_arguments;
use super::output::{sanitize_line, str_member};
use super::{CommandContext, outcome};
use unanswered::UnansweredRequest;

/// Time to wait for the outcome, unless `--wait` sets it.
const DEFAULT_WAIT: Duration = Duration::from_secs(60);
/// Pause before a request is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_help = "\
A value that is JSON is taken as JSON, everything else as text.

Examples:
  toolcrib call calculation.eval expression='2*21'
  toolcrib call weather.query query='weather in Beijing' --wait 10s
  toolcrib call database.query --args '{\"sql\": \"select 1\"}' --json
  toolcrib call report.make --args @report.json --no-wait
  toolcrib call web.fetch url=https://example.com --timeout 30s --attempt-timeout 5s --retry 2
  echo '{\"n\": 5}' | toolcrib call some.tool --args -")]
pub struct CallCommandArgs {
    /// The tool to call
    name: String,
    /// Arguments of the tool
    #[arg(value_name = "NAME=VALUE")]
    pairs: Vec<String>,
    /// All arguments as JSON, from a file (@file) or from standard input (-)
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    args: Option<String>,
    /// Time to wait for the outcome [default: 60s]
    #[arg(long, value_name = "TIME", num_args = 0..=1)]
    wait: Option<Option<String>>,
    /// Print the ticket and do not wait
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Timeout of the call, from its acceptance to its outcome
    #[arg(long, value_name = "TIME", value_parser = toolcrib_protocol::duration::parse_duration)]
    timeout: Option<Duration>,
    /// Time limit of each attempt [default: the remaining time, divided by the attempts left]
    #[arg(long, value_name = "TIME", value_parser = toolcrib_protocol::duration::parse_duration)]
    attempt_timeout: Option<Duration>,
    /// Time to wait for answers to the tool's questions, not counted by --timeout [default: 1h]
    #[arg(long, value_name = "TIME", value_parser = toolcrib_protocol::duration::parse_duration)]
    input_timeout: Option<Duration>,
    /// Maximum number of attempts after the first
    #[arg(long, value_name = "N")]
    retry: Option<u32>,
    /// The run this call belongs to
    #[arg(long, value_name = "ID", default_value = "run_cli")]
    run: String,
    /// Idempotency key: the same key with the same request returns the same call
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Only this client may execute the call
    #[arg(long, value_name = "ID")]
    client: Option<String>,
}

impl CallCommandArgs {
    /// Returns the time to wait. Moves an argument pair that followed a bare `--wait` back to the
    /// pairs.
    fn resolve_wait(&mut self) -> Result<Duration, CommandFailure> {
        if self.no_wait {
            return Ok(Duration::ZERO);
        }
        match self.wait.take().flatten() {
            None => Ok(DEFAULT_WAIT),
            Some(text) => match toolcrib_protocol::duration::parse_duration(&text) {
                Ok(wait) => Ok(wait),
                Err(_) if text.contains('=') => {
                    self.pairs.insert(0, text);
                    Ok(DEFAULT_WAIT)
                }
                Err(reason) => Err(CommandFailure::usage(format!("--wait: {reason}"))),
            },
        }
    }

    /// Adds a hint when a value was parsed as JSON where text is required: `expression=5` is a
    /// number.
    fn add_quoting_hint(&self, failure: CommandFailure) -> CommandFailure {
        let detail = failure.detail.as_ref();
        let problems = detail.and_then(|detail| detail["problems"].as_array());
        let out_of_range = |name: &str| {
            let pointer = format!("/{name}");
            problems.into_iter().flatten().any(|problem| problem["pointer"] == *pointer)
        };
        let pairs = self.pairs.iter().filter_map(|pair| pair.split_once('='));
        let consumed = pairs
            .filter(|(_, text)| serde_json::from_str::<Value>(text).is_ok_and(|v| !v.is_string()))
            .find(|(name, _)| failure.code == "VALIDATION_ERROR" && out_of_range(name));
        match consumed {
            Some((name, text)) => {
                let hint = format!("{text} was taken as JSON; for text write {name}='\"{text}\"'");
                failure.hint(hint)
            }
            None => failure,
        }
    }

    fn request_body(&self) -> Result<Value, CommandFailure> {
        let mut body = Map::new();
        body.insert("run_id".into(), self.run.as_str().into());
        body.insert("args".into(), parse_arguments(self.args.as_deref(), &self.pairs)?);
        let more = [
            ("timeout_ms", milliseconds(self.timeout)),
            ("attempt_timeout_ms", milliseconds(self.attempt_timeout)),
            ("input_timeout_ms", milliseconds(self.input_timeout)),
            ("retry", self.retry.map(Value::from)),
            ("idempotency_key", self.idempotency_key.clone().map(Value::from)),
            ("client_id", self.client.clone().map(Value::from)),
        ];
        for (name, value) in more {
            if let Some(value) = value {
                body.insert(name.into(), value);
            }
        }
        Ok(Value::Object(body))
    }
}

fn milliseconds(time: Option<Duration>) -> Option<Value> {
    time.map(|time| json!(time.as_millis() as u64))
}

pub async fn run(
    context: &CommandContext,
    mut args: CallCommandArgs,
) -> Result<(), CommandFailure> {
    let wait = args.resolve_wait()?;
    let body = args.request_body()?;
    let client = context.client()?;
    let until = Instant::now() + wait;
    let spinner = context.output.start_spinner(&args.name);
    let path = ["v1", "tools", args.name.as_str(), "invoke"];
    let call = match submit_call(&client, &path, body, until).await {
        Ok(call) if wait.is_zero() => {
            spinner.finish_and_clear();
            return print_ticket(context, &client, &call).await;
        }
        Ok(mut call) => {
            call["tool_name"] = args.name.as_str().into();
            outcome::await_outcome(context.output, &client, &spinner, call, until).await
        }
        Err(failure) => Err(args.add_quoting_hint(failure)),
    };
    spinner.finish_and_clear();
    outcome::print_outcome(context, &call?, wait)
}

/// Submits the call and returns its ticket immediately: with the ticket the call can be found
/// again, regardless of what happens to the server or to this process. If it is unknown whether the
/// request was accepted, it is sent again; its idempotency key makes both requests one call. If no
/// answer arrives in time, the same command finds the key again.
async fn submit_call(
    client: &ApiClient,
    path: &[&str],
    mut body: Value,
    until: Instant,
) -> Result<Value, CommandFailure> {
    let mut unanswered = None;
    if body["idempotency_key"].is_null() {
        let directory = unanswered::state_directory(|name| std::env::var_os(name));
        let directory = directory.as_deref();
        let request = UnansweredRequest::find_or_new(directory, client.scope(), path, &body);
        body["idempotency_key"] = request.idempotency_key.as_str().into();
        unanswered = Some(request);
    }
    // The failure that left the outcome unknown. Later ones only say that the server is away.
    let mut unknown: Option<CommandFailure> = None;
    loop {
        match client.request_json(ApiRequest::post(path, body.clone()).for_tool_call()).await {
            Err(failure)
                if failure.leaves_outcome_unknown()
                    || unknown.is_some() && failure.exit == exit::UNREACHABLE =>
            {
                let is_recorded = unanswered.as_mut().is_none_or(UnansweredRequest::record);
                let mut failure = unknown.take().unwrap_or(failure);
                if Instant::now() >= until {
                    let key = str_member(&body, "idempotency_key");
                    let key = match is_recorded {
                        true => String::new(),
                        false => format!(" with --idempotency-key {key}"),
                    };
                    failure.hint = Some(format!(
                        "repeat the command{key}: it joins the call if that was accepted"
                    ));
                    return Err(failure);
                }
                unknown = Some(failure);
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            other => {
                if let Some(unanswered) = unanswered.filter(|_| other.is_ok()) {
                    unanswered.remove();
                }
                return other;
            }
        }
    }
}

async fn print_ticket(
    context: &CommandContext,
    client: &ApiClient,
    call: &Value,
) -> Result<(), CommandFailure> {
    let id = sanitize_line(str_member(call, "tool_call_id"));
    if context.output.json {
        return context.output.print_json(call);
    }
    context
        .output
        .print_note(&format!("accepted; toolcrib calls get {id} --wait   shows the outcome"));
    // The call is accepted, so the command does not fail if the call cannot be read.
    let path = ["v1", "tool_calls", id.as_str()];
    if let Ok(call) = client.request_json(ApiRequest::get(&path)).await
        && let Some(detail) = outcome::hold_detail(&call)
    {
        context.output.print_note(&detail);
    }
    context.output.print_line(&id)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct TestCommandLine {
        #[command(flatten)]
        call: CallCommandArgs,
    }

    fn args(line: &[&str]) -> CallCommandArgs {
        TestCommandLine::try_parse_from(["call"].iter().chain(line)).unwrap().call
    }

    #[test]
    fn waiting_is_the_default_and_a_pair_is_not_a_duration() {
        let mut call = args(&["t", "a=1"]);
        assert_eq!(call.resolve_wait().unwrap(), DEFAULT_WAIT);
        let mut call = args(&["t", "--wait", "5s", "a=1"]);
        assert_eq!(call.resolve_wait().unwrap(), Duration::from_secs(5));
        let mut call = args(&["t", "b=2", "--wait", "a=1"]);
        assert_eq!(call.resolve_wait().unwrap(), DEFAULT_WAIT);
        assert_eq!(call.request_body().unwrap()["args"], json!({"a": 1, "b": 2}));
        assert_eq!(args(&["t", "--no-wait"]).resolve_wait().unwrap(), Duration::ZERO);
        assert!(args(&["t", "--wait", "soon"]).resolve_wait().is_err());
    }

    #[test]
    fn the_request_body_contains_only_given_options() {
        let call = args(&["t", "--timeout", "1.5s", "--retry", "0", "--client", "c"]);
        assert_eq!(
            call.request_body().unwrap(),
            json!({"run_id": "run_cli", "args": {}, "timeout_ms": 1500, "retry": 0,
                   "client_id": "c"})
        );
    }

    #[test]
    fn a_quoting_hint_is_added_for_numbers_in_text_arguments() {
        let mut failure = CommandFailure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        failure.detail = Some(json!({"problems": [{"pointer": "/q"}, 5]}));
        let hint = args(&["t", "a=1", "q=5"]).add_quoting_hint(failure).hint.unwrap();
        assert!(hint.contains("q='\"5\"'"), "{hint}");
        let failure = CommandFailure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        assert_eq!(args(&["t", "q=5"]).add_quoting_hint(failure).hint, None);
    }
}
