//! `toolcrib call`: calls a tool and waits for its outcome.
//!
//! The ticket is durable, so a server outage during the wait is no reason to give up: the command
//! polls until its time is over, and prints how to resume waiting when it stops early.

use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use super::client::{Ask, Client};
use super::failure::{Failure, exit};
use super::input::arguments;
use super::output::{self, Tone, number, plain, text};
use super::{Context, calls};

/// Time to wait for the outcome, unless `--wait` sets it.
const DEFAULT_WAIT: Duration = Duration::from_secs(60);
/// Time that one request waits; shorter than the timeouts of common proxies.
const EACH_WAIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_help = "\
A value that is JSON is taken as JSON, everything else as text.

Examples:
  toolcrib call calculation.eval expression='2*21'
  toolcrib call weather.query query='weather in Beijing' --wait 10s
  toolcrib call database.query --args '{\"sql\": \"select 1\"}' --json
  toolcrib call report.make --args @report.json --no-wait
  echo '{\"n\": 5}' | toolcrib call some.tool --args -")]
pub struct CallArgs {
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
    #[arg(long, value_name = "TIME", value_parser = crate::time::duration)]
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

impl CallArgs {
    /// Returns the time to wait. Moves an argument pair that followed a bare `--wait` back to the
    /// pairs.
    fn settle_wait(&mut self) -> Result<Duration, Failure> {
        if self.no_wait {
            return Ok(Duration::ZERO);
        }
        match self.wait.take().flatten() {
            None => Ok(DEFAULT_WAIT),
            Some(given) => match crate::time::duration(&given) {
                Ok(wait) => Ok(wait),
                Err(_) if given.contains('=') => {
                    self.pairs.insert(0, given);
                    Ok(DEFAULT_WAIT)
                }
                Err(why) => Err(Failure::usage(format!("--wait: {why}"))),
            },
        }
    }

    /// Adds a hint when a value was parsed as JSON where text is required: `expression=5` is a
    /// number.
    fn explained(&self, failure: Failure) -> Failure {
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

    fn envelope(&self) -> Result<Value, Failure> {
        let mut body = Map::new();
        body.insert("run_id".into(), self.run.as_str().into());
        body.insert("args".into(), arguments(self.args.as_deref(), &self.pairs)?);
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

pub async fn run(context: &Context, mut args: CallArgs) -> Result<(), Failure> {
    let wait = args.settle_wait()?;
    let body = args.envelope()?;
    let client = context.client()?;
    let until = Instant::now() + wait;
    let spinner = context.output.spinner(&args.name);
    let path = ["v1", "tools", args.name.as_str(), "invoke"];
    let call = match hand_over(&client, &path, body, until).await {
        Ok(call) if wait.is_zero() => {
            spinner.finish_and_clear();
            return ticket(context, &call);
        }
        Ok(mut call) => {
            call["tool_name"] = args.name.as_str().into();
            await_outcome(&client, &spinner, call, until).await
        }
        Err(failure) => Err(args.explained(failure)),
    };
    spinner.finish_and_clear();
    conclude(context, &call?, wait)
}

/// Submits the call and returns its ticket immediately: with the ticket the call can be found
/// again, whatever happens to the server or to this process. If it is unknown whether the request
/// arrived, it is sent again; its idempotency key makes both requests one call.
async fn hand_over(
    client: &Client,
    path: &[&str],
    mut body: Value,
    until: Instant,
) -> Result<Value, Failure> {
    if body["idempotency_key"].is_null() {
        body["idempotency_key"] = format!("cli-{}", ulid::Ulid::generate()).into();
    }
    let mut sent = false;
    loop {
        match client.ask(Ask::post(path, body.clone()).calls_tool()).await {
            Err(failure) if (sent || failure.sent) && failure.exit == exit::UNREACHABLE => {
                sent = true;
                if Instant::now() >= until {
                    return Err(failure);
                }
                tokio::time::sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}

fn ticket(context: &Context, call: &Value) -> Result<(), Failure> {
    let id = plain(text(call, "tool_call_id"));
    if context.output.json {
        return context.output.value(call);
    }
    context.output.note(&format!("accepted; toolcrib calls get {id} --wait   shows the outcome"));
    context.output.line(&id)
}

/// Polls until the call has ended or the time is over, including across a restart of the server.
pub async fn await_outcome(
    client: &Client,
    spinner: &ProgressBar,
    first: Value,
    until: Instant,
) -> Result<Value, Failure> {
    let mut call = first;
    let id = text(&call, "tool_call_id").to_owned();
    let tool = plain(text(&call, "tool_name"));
    let mut away: Option<Failure> = None;
    while !is_terminal(&call) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return match away {
                Some(failure) => Err(failure.hint(come_back(&id))),
                None => Ok(call),
            };
        }
        let status = plain(text(&call, "status"));
        spinner.set_message(match away {
            None => format!("{tool}  {status}  {id}"),
            Some(_) => format!("{tool}  server away, the call is safe, asking again  {id}"),
        });
        let begun = Instant::now();
        let path = ["v1", "tool_calls", id.as_str()];
        let ask = Ask::get(&path).wait(left.min(EACH_WAIT));
        let answer = tokio::select! {
            answer = client.ask(ask) => answer,
            _ = tokio::signal::ctrl_c() => {
                let interrupted = Failure { silent: false, ..Failure::interrupted() };
                return Err(interrupted.hint(come_back(&id)));
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
        if begun.elapsed() < PAUSE && !is_terminal(&call) {
            tokio::time::sleep(PAUSE).await;
        }
    }
    Ok(call)
}

fn come_back(id: &str) -> String {
    format!("the call goes on; come back to it with: toolcrib calls get {} --wait", plain(id))
}

pub fn is_terminal(call: &Value) -> bool {
    matches!(text(call, "status"), "SUCCEEDED" | "FAILED" | "TIMEOUT" | "CANCELED")
}

/// Prints the outcome: a summary line for people, the result, and the exit code.
pub fn conclude(context: &Context, call: &Value, waited: Duration) -> Result<(), Failure> {
    let output = context.output;
    if output.json {
        output.value(call)?;
    }
    let failure = match text(call, "status") {
        "SUCCEEDED" => {
            output.note(&headline(context, call));
            return if output.json { Ok(()) } else { output.value(&call["result"]) };
        }
        "FAILED" => fault(call, exit::TOOL_FAILED),
        "TIMEOUT" => fault(call, exit::TIMED_OUT),
        "CANCELED" => fault(call, exit::FAILURE),
        status => {
            let status = plain(status);
            let time = output::duration(waited.as_millis() as u64);
            let message = format!("still {status} after {time} of waiting");
            Failure::new(exit::TIMED_OUT, "STILL_OPEN", message)
                .hint(come_back(text(call, "tool_call_id")))
        }
    };
    output.note(&headline(context, call));
    Err(failure)
}

/// Formats the summary line: `✓ weather.query  SUCCEEDED in 212 ms   tc_…   attempt 1`
pub fn headline(context: &Context, call: &Value) -> String {
    let status = text(call, "status");
    let (mark, tone) = match status {
        "SUCCEEDED" => ("✓", Tone::Good),
        "PENDING" | "RUNNING" => ("…", Tone::Doubtful),
        _ => ("✗", Tone::Bad),
    };
    let mark = context.output.message_tone(mark, tone);
    let tool = plain(text(call, "tool_name"));
    let ran = text(call, "ran_tool");
    let ran = if ran.is_empty() || ran == text(call, "tool_name") {
        String::new()
    } else {
        format!(" (ran {})", plain(ran))
    };
    let took = calls::took_ms(call).map_or_else(String::new, |ms| {
        format!(" {} {}", if is_terminal(call) { "in" } else { "for" }, output::duration(ms))
    });
    let id = plain(text(call, "tool_call_id"));
    let attempt = number(call, "attempt").unwrap_or_default();
    format!("{mark} {tool}{ran}  {}{took}   {id}   attempt {attempt}", plain(status))
}

fn fault(call: &Value, exit: u8) -> Failure {
    let error = &call["error"];
    let code = text(error, "code");
    let message = match text(error, "message") {
        "" => format!("the call ended as {}", plain(text(call, "status"))),
        message => message.to_owned(),
    };
    let mut failure = super::failure::refused(code, format!("{}: {message}", plain(code)), exit);
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
    struct Line {
        #[command(flatten)]
        call: CallArgs,
    }

    fn args(line: &[&str]) -> CallArgs {
        Line::try_parse_from(["call"].iter().chain(line)).unwrap().call
    }

    #[test]
    fn waiting_is_the_default_and_a_pair_is_not_a_time() {
        let mut call = args(&["t", "a=1"]);
        assert_eq!(call.settle_wait().unwrap(), DEFAULT_WAIT);
        let mut call = args(&["t", "--wait", "5s", "a=1"]);
        assert_eq!(call.settle_wait().unwrap(), Duration::from_secs(5));
        let mut call = args(&["t", "b=2", "--wait", "a=1"]);
        assert_eq!(call.settle_wait().unwrap(), DEFAULT_WAIT);
        assert_eq!(call.envelope().unwrap()["args"], json!({"a": 1, "b": 2}));
        assert_eq!(args(&["t", "--no-wait"]).settle_wait().unwrap(), Duration::ZERO);
        assert!(args(&["t", "--wait", "soon"]).settle_wait().is_err());
    }

    #[test]
    fn the_envelope_has_what_was_given_and_nothing_else() {
        let call = args(&["t", "--timeout", "1.5s", "--retry", "0", "--client", "c"]);
        assert_eq!(
            call.envelope().unwrap(),
            json!({"run_id": "run_cli", "args": {}, "timeout_ms": 1500, "retry": 0,
                   "client_id": "c"})
        );
    }

    #[test]
    fn a_number_where_text_is_wanted_is_explained() {
        let mut failure = Failure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        failure.detail = Some(json!({"problems": [{"pointer": "/q"}, 5]}));
        let hint = args(&["t", "a=1", "q=5"]).explained(failure).hint.unwrap();
        assert!(hint.contains("q='\"5\"'"), "{hint}");
        let failure = Failure::new(exit::FAILURE, "VALIDATION_ERROR", "m");
        assert_eq!(args(&["t", "q=5"]).explained(failure).hint, None);
    }

    #[test]
    fn ends_have_their_exit_codes() {
        let context = super::super::tests::context(true);
        let exit = |status: &str| {
            let call = json!({"tool_call_id": "tc_1", "status": status, "error": {"code": "X"}});
            conclude(&context, &call, Duration::ZERO).err().map(|failure| failure.exit)
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
        let line = headline(&context, &call);
        assert_eq!(line, "✓ a.b (ran c.d)  SUCCEEDED in 212 ms   tc_1   attempt 2");
    }
}
