//! `keys`, `tokens`, `allow`, `deny`, `rules`, `limits`, `switch`, `agents`, `audit`: manage
//! access, permissions and agents.
//!
//! Without `--server` the commands work on the data directory, while a server runs or before its
//! first start; write access to the directory makes the user the operator. With `--server` they
//! need an admin key. Only `tokens` always uses a server, which makes the session token from the
//! key of the request.

pub mod agents;
mod audit;
mod keys;
pub mod limits;
mod rules;
pub mod switches;
mod target;
use clap::Args;
pub use keys::{KeysArgs, TokensArgs, keys, tokens};
use serde_json::Value;
use toolcrib::domain::access_rules::RuleVerdict;

use super::failure::CommandFailure;
use super::{CommandContext, StorageArgs};

pub use audit::{AuditArgs, audit};
pub use rules::{RulesArgs, run as rules};

#[derive(Debug, Args)]
#[command(after_help = "\
A pattern is a tool's name in which * stands for any characters. Quote it for the shell.

Examples:
  toolcrib allow --agent ada 'weather.*' calculation.eval
  toolcrib deny --agent '*' 'file.*'")]
pub struct AllowDenyArgs {
    /// The agent; '*' for every agent of the project
    #[arg(long, value_name = "NAME")]
    agent: String,
    /// Patterns of tools
    #[arg(value_name = "PATTERN", required = true)]
    patterns: Vec<String>,
    #[command(flatten)]
    storage: StorageArgs,
}

pub async fn set_rules(
    context: &CommandContext,
    args: AllowDenyArgs,
    verdict: RuleVerdict,
) -> Result<(), CommandFailure> {
    rules::set_short_rules(context, &args.storage, &args.agent, &args.patterns, verdict).await
}

fn print_change(context: &CommandContext, value: &Value, text: &str) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(value);
    }
    context.output.print_note(text);
    Ok(())
}

fn array_member<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}
