//! `toolcrib doctor`: checks everything a server needs, changes nothing and gives advice.

mod checks;
pub(super) mod disk;
mod nats;
mod port;
use clap::Args;
use serde_json::{Value, json};

use super::failure::{CommandFailure, exit};
use super::output::{TextStyle, sanitize_line};
use super::{CommandContext, StorageArgs};

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
    storage: StorageArgs,
}

/// State of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckState {
    Ok,
    Warning,
    Error,
}

/// Result of one check.
#[derive(Debug)]
struct CheckResult {
    check: &'static str,
    state: CheckState,
    message: String,
    hint: Option<String>,
}

impl CheckResult {
    fn ok(check: &'static str, message: impl Into<String>) -> Self {
        Self { check, state: CheckState::Ok, message: message.into(), hint: None }
    }

    fn warning(name: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: CheckState::Warning, hint: Some(hint.into()), ..Self::ok(name, message) }
    }

    fn error(name: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: CheckState::Error, hint: Some(hint.into()), ..Self::ok(name, message) }
    }

    fn json(&self) -> Value {
        let state = match self.state {
            CheckState::Ok => "ok",
            CheckState::Warning => "warning",
            CheckState::Error => "error",
        };
        json!({"check": self.check, "state": state, "message": self.message, "hint": self.hint})
    }
}

pub async fn run(context: &CommandContext, args: DoctorArgs) -> Result<(), CommandFailure> {
    let loaded = context.config(args.listen.as_ref(), &args.storage);
    let mut findings = vec![checks::check_config(context, &loaded)];
    if let Ok(config) = &loaded {
        findings.extend(checks::check_data_dir(config));
        findings.push(checks::check_open_files(config));
        let (port, responds_on_port) = port::check(context, config).await;
        findings.push(port);
        let (store, has_keys) = checks::check_store(config).await;
        findings.push(store);
        findings.extend(checks::check_store_lock(config, responds_on_port));
        findings.push(checks::check_keys(config, has_keys));
        findings.push(nats::check(config).await);
        if args.network {
            findings.push(checks::check_database(config).await);
            findings.push(checks::check_weather(config).await);
        }
    }
    report(context, &findings)
}

fn report(context: &CommandContext, findings: &[CheckResult]) -> Result<(), CommandFailure> {
    let output = context.output;
    let bad = findings.iter().filter(|finding| finding.state == CheckState::Error).count();
    if output.json {
        let checks: Vec<Value> = findings.iter().map(CheckResult::json).collect();
        output.print_json(&json!({"ok": bad == 0, "checks": checks}))?;
    } else {
        for finding in findings {
            let (symbol, style) = match finding.state {
                CheckState::Ok => ("✓", TextStyle::Success),
                CheckState::Warning => ("!", TextStyle::Warning),
                CheckState::Error => ("✗", TextStyle::Error),
            };
            let symbol = output.paint(symbol, style);
            output.print_line(&format!(
                "{symbol} {:<9} {}",
                finding.check,
                sanitize_line(&finding.message)
            ))?;
            if let Some(hint) = &finding.hint {
                output.print_line(&format!("    hint: {}", sanitize_line(hint)))?;
            }
        }
    }
    match bad {
        0 => Ok(()),
        // The results are the error; with --json they are already on standard output.
        _ if output.json => Err(CommandFailure::already_reported(exit::FAILURE)),
        1 => Err(CommandFailure::new(exit::FAILURE, "UNHEALTHY", "one check failed")),
        n => Err(CommandFailure::new(exit::FAILURE, "UNHEALTHY", format!("{n} checks failed"))),
    }
}
