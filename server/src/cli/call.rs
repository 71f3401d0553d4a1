//! `toolcrib call`: calls a tool and waits for its outcome.
//!
//! The ticket is durable, so a server outage during the wait is no reason to give up: the command
//! polls until its time is over, and prints how to resume waiting when it stops early.

use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use super::client::{ApiClient, ApiRequest};
use super::failure::{CommandFailure, exit};
use super::input::parse_arguments;
use super::output::{self, TextStyle, sanitize_line, str_member, u64_member};
use super::{CommandContext, calls};

/// Time to wait for the outcome, unless `--wait` sets it.
const DEFAULT_WAIT: Duration = Duration::from_secs(60);
/// Time that one request waits; shorter than the timeouts of common proxies.
const POLL_WAIT: Duration = Duration::from_secs(20);
const POLL_PAUSE: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_help = "\
A value that is JSON is taken as JSON, everything else as text.

Examples:
  toolcrib call calculation.eval expression='2*21'
  toolcrib call weather.query query='weather in Beijing' --wait 10s
  toolcrib call database.query --args '{\"sql\": \"select 1\"}' --json
  toolcrib call report.make --args @report.json --no-wait
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
            Some(given) => match toolcrib_protocol::duration::parse_duration(&given) {
                Ok(wait) => Ok(wait),
                Err(_) if given.contains('=') => {
                    self.pairs.insert(0, given);
                    Ok(DEFAULT_WAIT)
                }
                Err(why) => Err(CommandFailure::usage(format!("--wait: {why}"))),
            },
        }
    }

    /// Adds a hint when a value was parsed as JSON where text is required: `expression=5` is a
    /// number.
    fn add_quoting_hint(&self, failure: CommandFailure) -> CommandFailure {
        let detail = failure.detail.as_ref();
        let problems = detail.and_then(|detail| detail["problems"].as_array());
        let wrong = |name: &str| {
            let pointer = format!("/{name}");
            problems.into_iter().flatten().any(|problem| problem["pointer"] == *pointer)
        };
        let pairs = self.pairs.iter().filter_map(|pair| pair.split_once('='));
        let taken = pairs
            .filter(|(_, text)| serde_json::from_str::<Value>(text).is_ok_and(|v| !v.is_string()))
            .find(|(name, _)| failure.code == "VALIDATION_ERROR" && wrong(name));
        match taken {
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
            ("timeout_ms", self.timeout.map(|time| json!(time.as_millis() as u64))),
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
            return print_ticket(context, &call);
        }
        Ok(mut call) => {
            call["tool_name"] = args.name.as_str().into();
            await_outcome(&client, &spinner, call, until).await
        }
        Err(failure) => Err(args.add_quoting_hint(failure)),
    };
    spinner.finish_and_clear();
    print_outcome(context, &call?, wait)
}

/// Submits the call and returns its ticket immediately: with the ticket the call can be found
/// again, whatever happens to the server or to this process. If it is unknown whether the request
/// arrived, it is sent again; its idempotency key makes both requests one call.
async fn submit_call(
    client: &ApiClient,
    path: &[&str],
    mut body: Value,
    until: Instant,
) -> Result<Value, CommandFailure> {
    if body["idempotency_key"].is_null() {
        body["idempotency_key"] = format!("cli-{}", ulid::Ulid::generate()).into();
    }
    let mut sent = false;
    loop {
        match client.request_json(ApiRequest::post(path, body.clone()).for_tool_call()).await {
            Err(failure)
                if (sent || failure.may_have_been_sent) && failure.exit == exit::UNREACHABLE =>
            {
                sent = true;
                if Instant::now() >= until {
                    return Err(failure);
                }
                tokio::time::sleep(POLL_PAUSE).await;
            }
            other => return other,
        }
    }
}

fn print_ticket(context: &CommandContext, call: &Value) -> Result<(), CommandFailure> {
    let id = sanitize_line(str_member(call, "tool_call_id"));
    if context.output.json {
        return context.output.print_json(call);
    }
    context
        .output
        .print_note(&format!("accepted; toolcrib calls get {id} --wait   shows the outcome"));
    context.output.print_line(&id)
}

/// Polls until the call has ended or the time is over, including across a restart of the server.
pub async fn await_outcome(
    client: &ApiClient,
    spinner: &ProgressBar,
    first: Value,
    until: Instant,
) -> Result<Value, CommandFailure> {
    let mut call = first;
    let id = str_member(&call, "tool_call_id").to_owned();
    let tool = sanitize_line(str_member(&call, "tool_name"));
    let mut away: Option<CommandFailure> = None;
    while !is_terminal(&call) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return match away {
                Some(failure) => Err(failure.hint(resume_hint(&id))),
                None => Ok(call),
            };
        }
        let status = sanitize_line(str_member(&call, "status"));
        spinner.set_message(match away {
            None => format!("{tool}  {status}  {id}"),
            Some(_) => format!("{tool}  server away, the call is safe, asking again  {id}"),
        });
        let begun = Instant::now();
        let path = ["v1", "tool_calls", id.as_str()];
        let ask = ApiRequest::get(&path).wait(left.min(POLL_WAIT));
        let answer = tokio::select! {
            answer = client.request_json(ask) => answer,
            _ = tokio::signal::ctrl_c() => {
                let interrupted = CommandFailure { is_reported: false, ..CommandFailure::interrupted() };
                return Err(interrupted.hint(resume_hint(&id)));
            }
        };
        match answer {
            Ok(now) => {
                call = now;
                away = None;
            }
            Err(failure) if failure.exit == exit::UNREACHABLE => away = Some(failure),
            Err(failure) => return Err(failure),
        }
        // Pauses between requests when the server does not wait or is unreachable.
        if begun.elapsed() < POLL_PAUSE && !is_terminal(&call) {
            tokio::time::sleep(POLL_PAUSE).await;
        }
    }
    Ok(call)
}

fn resume_hint(id: &str) -> String {
    format!(
        "the call goes on; come back to it with: toolcrib calls get {} --wait",
        sanitize_line(id)
    )
}

pub fn is_terminal(call: &Value) -> bool {
    matches!(str_member(call, "status"), "SUCCEEDED" | "FAILED" | "TIMEOUT" | "CANCELED")
}

/// Prints the outcome: a summary line for people, the result, and the exit code.
pub fn print_outcome(
    context: &CommandContext,
    call: &Value,
    waited: Duration,
) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        output.print_json(call)?;
    }
    let failure = match str_member(call, "status") {
        "SUCCEEDED" => {
            output.print_note(&summary_line(context, call));
            return if output.json { Ok(()) } else { output.print_json(&call["result"]) };
        }
        "FAILED" => outcome_failure(call, exit::TOOL_FAILED),
        "TIMEOUT" => outcome_failure(call, exit::TIMED_OUT),
        "CANCELED" => outcome_failure(call, exit::FAILURE),
        status => {
            let status = sanitize_line(status);
            let time = output::format_duration(waited.as_millis() as u64);
            let message = format!("still {status} after {time} of waiting");
            CommandFailure::new(exit::TIMED_OUT, "STILL_OPEN", message)
                .hint(resume_hint(str_member(call, "tool_call_id")))
        }
    };
    output.print_note(&summary_line(context, call));
    Err(failure)
}

/// Formats the summary line: `✓ weather.query  SUCCEEDED in 212 ms   tc_…   attempt 1`
pub fn summary_line(context: &CommandContext, call: &Value) -> String {
    let status = str_member(call, "status");
    let (mark, tone) = match status {
        "SUCCEEDED" => ("✓", TextStyle::Success),
        "PENDING" | "RUNNING" => ("…", TextStyle::Warning),
        _ => ("✗", TextStyle::Error),
    };
    let mark = context.output.paint_message(mark, tone);
    let tool = sanitize_line(str_member(call, "tool_name"));
    let ran = str_member(call, "ran_tool");
    let ran = if ran.is_empty() || ran == str_member(call, "tool_name") {
        String::new()
    } else {
        format!(" (ran {})", sanitize_line(ran))
    };
    let took = calls::elapsed_ms(call).map_or_else(String::new, |ms| {
        format!(" {} {}", if is_terminal(call) { "in" } else { "for" }, output::format_duration(ms))
    });
    let id = sanitize_line(str_member(call, "tool_call_id"));
    let attempt = u64_member(call, "attempt").unwrap_or_default();
    format!("{mark} {tool}{ran}  {}{took}   {id}   attempt {attempt}", sanitize_line(status))
}

fn outcome_failure(call: &Value, exit: u8) -> CommandFailure {
    let error = &call["error"];
    let code = str_member(error, "code");
    let message = match str_member(error, "message") {
        "" => format!("the call ended as {}", sanitize_line(str_member(call, "status"))),
        message => message.to_owned(),
    };
    let mut failure =
        super::failure::failure_for_code(code, format!("{}: {message}", sanitize_line(code)), exit);
    failure.retryable = error["retryable"].as_bool().unwrap_or(false);
    failure.detail = error.get("detail").filter(|detail| !detail.is_null()).cloned();
    failure
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
    fn waiting_is_the_default_and_a_pair_is_not_a_time() {
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
    fn the_envelope_has_what_was_given_and_nothing_else() {
        let call = args(&["t", "--timeout", "1.5s", "--retry", "0", "--client", "c"]);
        assert_eq!(
            call.request_body().unwrap(),
            json!({"run_id": "run_cli", "args": {}, "timeout_ms": 1500, "retry": 0,
                   "client_id": "c"})
        );
    }

    #[test]
    fn a_number_where_text_is_wanted_is_explained() {
        let mut failure = CommandFailure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        failure.detail = Some(json!({"problems": [{"pointer": "/q"}, 5]}));
        let hint = args(&["t", "a=1", "q=5"]).add_quoting_hint(failure).hint.unwrap();
        assert!(hint.contains("q='\"5\"'"), "{hint}");
        let failure = CommandFailure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        assert_eq!(args(&["t", "q=5"]).add_quoting_hint(failure).hint, None);
    }

    #[test]
    fn ends_have_their_exit_codes() {
        let context = super::super::tests::context(true);
        let exit = |status: &str| {
            let call = json!({"tool_call_id": "tc_1", "status": status, "error": {"code": "X"}});
            print_outcome(&context, &call, Duration::ZERO).err().map(|failure| failure.exit)
        };
        assert_eq!(exit("SUCCEEDED"), None);
        assert_eq!(exit("FAILED"), Some(exit::TOOL_FAILED));
        assert_eq!(exit("TIMEOUT"), Some(exit::TIMED_OUT));
        assert_eq!(exit("CANCELED"), Some(exit::FAILURE));
        assert_eq!(exit("RUNNING"), Some(exit::TIMED_OUT));
        assert_eq!(exit("\u{1b}?"), Some(exit::TIMED_OUT));
    }

    #[test]
    fn the_line_about_a_call() {
        let context = super::super::tests::context(false);
        let call = json!({"tool_call_id": "tc_1", "status": "SUCCEEDED", "tool_name": "a.b",
            "ran_tool": "c.d", "attempt": 2, "outcome": {"metrics": {"latency_ms": 212}}});
        let line = summary_line(&context, &call);
        assert_eq!(line, "✓ a.b (ran c.d)  SUCCEEDED in 212 ms   tc_1   attempt 2");
    }
}
