//! `keys`, `allow`, `deny`, `rules`, `audit`: manage access and permissions.
//!
//! Without `--server` the commands work on the data directory, beside a running server or before
//! its first start; write access to it makes the user the operator. With `--server` they need an
//! admin key.

mod target;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use toolcrib::Role;
use toolcrib::domain::access_rules::RuleVerdict;

use super::failure::CommandFailure;
use super::output::{Column, format_local_time, sanitize_line, str_member, u64_member};
use super::{CommandContext, StorageArgs};
use crate::cli::admin::target::{AdminTarget, KeyRequest};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib keys create --agent ada --allow 'weather.*' --allow calculation.eval
  toolcrib keys create --agent ops --role admin
  toolcrib keys create --agent browser --role provider --project acme
  toolcrib keys create --agent cron --allow 'mail.*' --no-rejoin
  toolcrib keys ls
  toolcrib keys revoke key_01K…
  KEY=$(toolcrib keys create --agent ci --allow '*')")]
pub struct KeysArgs {
    #[command(subcommand)]
    verb: Option<KeysCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Create a key; its secret is printed once
    Create {
        /// The agent the key is for
        #[arg(long, value_name = "NAME")]
        agent: String,
        /// The role of the key
        #[arg(long, value_enum, default_value_t = RoleArg::Agent)]
        role: RoleArg,
        /// Pattern of tools that the agent may call; can be repeated
        #[arg(long, value_name = "PATTERN")]
        allow: Vec<String>,
        /// A repeated request of the agent never joins an earlier call
        #[arg(long)]
        no_rejoin: bool,
    },
    /// List keys, without their secrets
    #[command(alias = "list")]
    Ls,
    /// Revoke a key immediately
    Revoke {
        /// The key's id, key_…
        id: String,
    },
}

/// A role as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Calls tools
    Agent,
    /// Provides tools and reports results
    Provider,
    /// Administers the server
    Admin,
}

impl From<RoleArg> for Role {
    fn from(name: RoleArg) -> Self {
        match name {
            RoleArg::Agent => Self::Agent,
            RoleArg::Provider => Self::Provider,
            RoleArg::Admin => Self::Admin,
        }
    }
}

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

pub async fn keys(context: &CommandContext, args: KeysArgs) -> Result<(), CommandFailure> {
    let output = context.output;
    match args.verb.unwrap_or(KeysCommand::Ls) {
        KeysCommand::Create { agent, role, allow, no_rejoin } => {
            let target = AdminTarget::open_or_create(context, &args.storage).await?;
            let request = KeyRequest { agent, role: role.into(), allow, rejoin: !no_rejoin };
            print_created_key(context, &target.create_key(request).await?)
        }
        KeysCommand::Ls => {
            let keys = AdminTarget::open_existing(context, &args.storage).await?.keys().await?;
            if output.json {
                return output.print_json(&keys);
            }
            let row = |key: &Value| {
                let time_cell =
                    |member| u64_member(key, member).map(format_local_time).unwrap_or_default();
                let words =
                    ["id", "project", "agent", "role"].map(|m| str_member(key, m).to_owned());
                words
                    .into_iter()
                    .chain([time_cell("created_at_ms"), time_cell("revoked_at_ms")])
                    .collect()
            };
            let columns = [
                Column::id("ID"),
                Column::detail("PROJECT", 2),
                Column::text("AGENT"),
                Column::id("ROLE"),
                Column::detail("CREATED", 1),
                Column::detail("REVOKED", 3),
            ];
            let none = "no keys: every program that reaches the loopback address may call tools; \
                        administration needs the operator token";
            let rows = array_member(&keys, "keys").iter().map(row).collect();
            output.print_table(&columns, rows, none)
        }
        KeysCommand::Revoke { id } => {
            AdminTarget::open_existing(context, &args.storage).await?.revoke_key(&id).await?;
            print_change(
                context,
                &json!({"id": id, "revoked": true}),
                &format!("revoked {}", sanitize_line(&id)),
            )
        }
    }
}

fn print_created_key(context: &CommandContext, created: &Value) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        return output.print_json(created);
    }
    let part = |member| sanitize_line(str_member(created, member));
    output.print_note(&format!(
        "{} for agent {} of project {}, role {}",
        part("id"),
        part("agent"),
        part("project"),
        part("role"),
    ));
    if created["first"] == true {
        output.print_note("this is the first key: from now on every request needs one");
        output.print_note(
            "programs that provide tools need one too: toolcrib keys create --agent NAME --role \
             provider",
        );
    }
    if str_member(created, "role") == "agent"
        && created["allow"].as_array().is_some_and(Vec::is_empty)
    {
        let agent = part("agent");
        output.print_note(&format!(
            "it may call nothing yet: toolcrib allow --agent {agent} PATTERN"
        ));
    }
    output.print_note("the secret is shown this once, and is not kept:");
    output.print_line(&part("key"))
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
