//! `keys`, `tokens`, `allow`, `deny`, `rules`, `audit`: manage access and permissions.
//!
//! Without `--server` the commands work on the data directory, beside a running server or before
//! its first start; write access to it makes the user the operator. With `--server` they need an
//! admin key.

mod keys;
mod target;
use clap::{Args, Subcommand};
pub use keys::{KeysArgs, TokensArgs, keys, tokens};
use serde_json::{Value, json};
use toolcrib::domain::access_rules::RuleVerdict;

use super::failure::CommandFailure;
use super::output::{Column, format_local_time, sanitize_line, str_member, u64_member};
use super::{CommandContext, StorageArgs};
use crate::cli::admin::target::AdminTarget;

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

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib rules
  toolcrib rules rm --agent ada 'weather.*'")]
pub struct RulesArgs {
    #[command(subcommand)]
    verb: Option<RulesCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum RulesCommand {
    /// List the project's rules
    #[command(alias = "list")]
    Ls,
    /// Remove a rule
    Rm {
        /// The agent of the rule
        #[arg(long, value_name = "NAME")]
        agent: String,
        /// The pattern of the rule
        pattern: String,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib audit
  toolcrib audit --limit 1000 --json | jq -r '.audit[] | select(.action == \"call.denied\")'")]
pub struct AuditArgs {
    /// Maximum number of entries, newest first
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    storage: StorageArgs,
}

pub async fn set_rules(
    context: &CommandContext,
    args: AllowDenyArgs,
    verdict: RuleVerdict,
) -> Result<(), CommandFailure> {
    for pattern in &args.patterns {
        // All or nothing: a typing error in the third pattern must not leave the first two applied.
        toolcrib::domain::access_rules::check_pattern(pattern).map_err(CommandFailure::usage)?;
    }
    let target = AdminTarget::open_or_create(context, &args.storage).await?;
    let mut rules = Vec::new();
    for pattern in &args.patterns {
        rules.push(target.set_rule(&args.agent, pattern, verdict).await?);
    }
    let (word, agent) = (verdict.as_str(), sanitize_line(&args.agent));
    let text = format!("{word} {} for agent {agent}", sanitize_line(&args.patterns.join(" ")));
    print_change(context, &json!({ "rules": rules }), &text)
}

pub async fn rules(context: &CommandContext, args: RulesArgs) -> Result<(), CommandFailure> {
    let target = AdminTarget::open_existing(context, &args.storage).await?;
    match args.verb.unwrap_or(RulesCommand::Ls) {
        RulesCommand::Ls => {
            let rules = target.rules().await?;
            if context.output.json {
                return context.output.print_json(&rules);
            }
            let row = |rule: &Value| {
                ["agent", "verdict", "pattern"]
                    .map(|member| str_member(rule, member).to_owned())
                    .into()
            };
            let rows = array_member(&rules, "rules").iter().map(row).collect();
            let none = "no rules: keys of the role agent may call nothing (toolcrib allow)";
            let columns = [Column::text("AGENT"), Column::id("VERDICT"), Column::text("PATTERN")];
            context.output.print_table(&columns, rows, none)
        }
        RulesCommand::Rm { agent, pattern } => {
            target.remove_rule(&agent, &pattern).await?;
            let summary = format!(
                "removed the rule on {} for agent {}",
                sanitize_line(&pattern),
                sanitize_line(&agent)
            );
            print_change(
                context,
                &json!({"agent": agent, "pattern": pattern, "removed": true}),
                &summary,
            )
        }
    }
}

pub async fn audit(context: &CommandContext, args: AuditArgs) -> Result<(), CommandFailure> {
    let log = AdminTarget::open_existing(context, &args.storage).await?.audit(args.limit).await?;
    if context.output.json {
        return context.output.print_json(&log);
    }
    let row = |entry: &Value| {
        let time = u64_member(entry, "at_ms").map(format_local_time).unwrap_or_default();
        let words = ["agent", "action", "subject", "reason"];
        [time].into_iter().chain(words.map(|member| str_member(entry, member).to_owned())).collect()
    };
    let rows = array_member(&log, "audit").iter().map(row).collect();
    let columns = [
        Column::detail("TIME", 1),
        Column::text("AGENT"),
        Column::id("ACTION"),
        Column::text("SUBJECT"),
        Column::text("REASON"),
    ];
    context.output.print_table(&columns, rows, "nothing was denied and nothing was changed")
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
