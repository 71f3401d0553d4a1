//! `toolcrib doctor`: checks everything a server needs, changes nothing and gives advice.

mod checks;
pub(super) mod disk;
mod nats;
mod port;

use clap::Args;
use serde_json::{Value, json};

use super::failure::{Failure, exit};
use super::output::{Tone, plain};
use super::{Context, Place};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib doctor
  toolcrib doctor --network
  toolcrib --config /etc/toolcrib.toml doctor --json")]
pub struct DoctorArgs {
    /// Also check the database and the weather service that the built-in tools use
    #[arg(long)]
    network: bool,
    /// Check this address instead of the configured one
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// State of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Good,
    Doubtful,
    Bad,
}

/// Result of one check.
#[derive(Debug)]
struct Finding {
    what: &'static str,
    state: State,
    message: String,
    hint: Option<String>,
}

impl Finding {
    fn good(what: &'static str, message: impl Into<String>) -> Self {
        Self { what, state: State::Good, message: message.into(), hint: None }
    }

    fn doubtful(what: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: State::Doubtful, hint: Some(hint.into()), ..Self::good(what, message) }
    }

    fn bad(what: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: State::Bad, hint: Some(hint.into()), ..Self::good(what, message) }
    }

    fn json(&self) -> Value {
        let state = match self.state {
            State::Good => "ok",
            State::Doubtful => "warning",
            State::Bad => "error",
        };
        json!({"check": self.what, "state": state, "message": self.message, "hint": self.hint})
    }
}

pub async fn run(context: &Context, args: DoctorArgs) -> Result<(), Failure> {
    let loaded = context.config(args.listen.as_ref(), &args.place);
    let mut findings = vec![checks::configuration(context, &loaded)];
    if let Ok(config) = &loaded {
        findings.extend(checks::data_directory(config));
        findings.push(checks::open_files(config));
        let (port, runs) = port::check(context, config).await;
        findings.push(port);
        let (store, has_keys) = checks::store(config).await;
        findings.push(store);
        findings.extend(checks::owner(config, runs));
        findings.push(checks::keys(config, has_keys));
        findings.push(nats::check(config).await);
        if args.network {
            findings.push(checks::database(config).await);
            findings.push(checks::weather(config).await);
        }
    }
    report(context, &findings)
}

fn report(context: &Context, findings: &[Finding]) -> Result<(), Failure> {
    let output = context.output;
    let bad = findings.iter().filter(|finding| finding.state == State::Bad).count();
    if output.json {
        let checks: Vec<Value> = findings.iter().map(Finding::json).collect();
        output.value(&json!({"ok": bad == 0, "checks": checks}))?;
    } else {
        for finding in findings {
            let (mark, tone) = match finding.state {
                State::Good => ("✓", Tone::Good),
                State::Doubtful => ("!", Tone::Doubtful),
                State::Bad => ("✗", Tone::Bad),
            };
            let mark = output.tone(mark, tone);
            output.line(&format!("{mark} {:<9} {}", finding.what, plain(&finding.message)))?;
            if let Some(hint) = &finding.hint {
                output.line(&format!("    hint: {}", plain(hint)))?;
            }
        }
    }
    match bad {
        0 => Ok(()),
        // The results are the error; with --json they are already on standard output.
        _ if output.json => Err(Failure::said(exit::FAILURE)),
        1 => Err(Failure::new(exit::FAILURE, "UNHEALTHY", "one thing must be put right")),
        n => Err(Failure::new(exit::FAILURE, "UNHEALTHY", format!("{n} things must be put right"))),
    }
}
