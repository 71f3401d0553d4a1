//! `keys`, `allow`, `deny`, `rules`, `audit`: manage access and permissions.
//!
//! Without `--server` the commands work on the data directory, beside a running server or before
//! its first start; write access to it makes the user the operator. With `--server` they need an
//! admin key.

mod crib;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use toolcrib::Role;
use toolcrib::policy::Verdict;

use super::failure::Failure;
use super::output::{moment, number, plain, text};
use super::{Context, Place};
use crib::{Crib, KeyWanted};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib keys create --agent ada --allow 'weather.*' --allow calculation.eval
  toolcrib keys create --agent ops --role admin
  toolcrib keys create --agent browser --role provider --project acme
  toolcrib keys ls
  toolcrib keys revoke key_01K…
  KEY=$(toolcrib keys create --agent ci --allow '*')")]
pub struct KeysArgs {
    #[command(subcommand)]
    verb: Option<KeysVerb>,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Subcommand)]
enum KeysVerb {
    /// Create a key; its secret is printed once
    Create {
        /// The agent the key is for
        #[arg(long, value_name = "NAME")]
        agent: String,
        /// The role of the key
        #[arg(long, value_enum, default_value_t = RoleName::Agent)]
        role: RoleName,
        /// Pattern of tools that the agent may call; can be repeated
        #[arg(long, value_name = "PATTERN")]
        allow: Vec<String>,
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
enum RoleName {
    /// Calls tools
    Agent,
    /// Provides tools and reports results
    Provider,
    /// Administers the server
    Admin,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::Agent => Self::Agent,
            RoleName::Provider => Self::Provider,
            RoleName::Admin => Self::Admin,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "\
A pattern is a tool's name in which * stands for any characters. Quote it for the shell.

Examples:
  toolcrib allow --agent ada 'weather.*' calculation.eval
  toolcrib deny --agent '*' 'file.*'")]
pub struct VerdictArgs {
    /// The agent; '*' for every agent of the project
    #[arg(long, value_name = "NAME")]
    agent: String,
    /// Patterns of tools
    #[arg(value_name = "PATTERN", required = true)]
    patterns: Vec<String>,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib rules
  toolcrib rules rm --agent ada 'weather.*'")]
pub struct RulesArgs {
    #[command(subcommand)]
    verb: Option<RulesVerb>,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Subcommand)]
enum RulesVerb {
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
    place: Place,
}

pub async fn keys(context: &Context, args: KeysArgs) -> Result<(), Failure> {
    let output = context.output;
    match args.verb.unwrap_or(KeysVerb::Ls) {
        KeysVerb::Create { agent, role, allow } => {
            let crib = Crib::to_change(context, &args.place).await?;
            let wanted = KeyWanted { agent, role: role.into(), allow };
            created(context, &crib.create_key(wanted).await?)
        }
        KeysVerb::Ls => {
            let keys = Crib::to_look(context, &args.place).await?.keys().await?;
            if output.json {
                return output.value(&keys);
            }
            let row = |key: &Value| {
                let at = |member| number(key, member).map(moment).unwrap_or_default();
                let words = ["id", "project", "agent", "role"].map(|m| text(key, m).to_owned());
                words.into_iter().chain([at("created_at_ms"), at("revoked_at_ms")]).collect()
            };
            let heads = ["ID", "PROJECT", "AGENT", "ROLE", "CREATED", "REVOKED"];
            let none = "no keys: whoever reaches the loopback address may do everything";
            output.table(&heads, members(&keys, "keys").iter().map(row).collect(), none)
        }
        KeysVerb::Revoke { id } => {
            Crib::to_look(context, &args.place).await?.revoke_key(&id).await?;
            done(context, &json!({"id": id, "revoked": true}), &format!("revoked {}", plain(&id)))
        }
    }
}

fn created(context: &Context, made: &Value) -> Result<(), Failure> {
    let output = context.output;
    if output.json {
        return output.value(made);
    }
    let part = |member| plain(text(made, member));
    output.note(&format!(
        "{} for agent {} of project {}, role {}",
        part("id"),
        part("agent"),
        part("project"),
        part("role"),
    ));
    if made["first"] == true {
        output.note("this is the first key: from now on every request needs one");
    }
    if text(made, "role") == "agent" && made["allow"].as_array().is_some_and(Vec::is_empty) {
        let agent = part("agent");
        output.note(&format!("it may call nothing yet: toolcrib allow --agent {agent} PATTERN"));
    }
    output.note("the secret is shown this once, and is not kept:");
    output.line(&part("key"))
}

pub async fn set(context: &Context, args: VerdictArgs, verdict: Verdict) -> Result<(), Failure> {
    for pattern in &args.patterns {
        // All or nothing: a typing error in the third pattern must not leave the first two applied.
        toolcrib::policy::check_pattern(pattern).map_err(Failure::usage)?;
    }
    let crib = Crib::to_change(context, &args.place).await?;
    let mut rules = Vec::new();
    for pattern in &args.patterns {
        rules.push(crib.set_rule(&args.agent, pattern, verdict).await?);
    }
    let (word, agent) = (verdict.as_str(), plain(&args.agent));
    let text = format!("{word} {} for agent {agent}", plain(&args.patterns.join(" ")));
    done(context, &json!({ "rules": rules }), &text)
}

pub async fn rules(context: &Context, args: RulesArgs) -> Result<(), Failure> {
    let crib = Crib::to_look(context, &args.place).await?;
    match args.verb.unwrap_or(RulesVerb::Ls) {
        RulesVerb::Ls => {
            let rules = crib.rules().await?;
            if context.output.json {
                return context.output.value(&rules);
            }
            let row = |rule: &Value| {
                ["agent", "verdict", "pattern"].map(|member| text(rule, member).to_owned()).into()
            };
            let rows = members(&rules, "rules").iter().map(row).collect();
            let none = "no rules: keys of the role agent may call nothing (toolcrib allow)";
            context.output.table(&["AGENT", "VERDICT", "PATTERN"], rows, none)
        }
        RulesVerb::Rm { agent, pattern } => {
            crib.remove_rule(&agent, &pattern).await?;
            let said =
                format!("removed the rule on {} for agent {}", plain(&pattern), plain(&agent));
            done(context, &json!({"agent": agent, "pattern": pattern, "removed": true}), &said)
        }
    }
}

pub async fn audit(context: &Context, args: AuditArgs) -> Result<(), Failure> {
    let log = Crib::to_look(context, &args.place).await?.audit(args.limit).await?;
    if context.output.json {
        return context.output.value(&log);
    }
    let row = |entry: &Value| {
        let at = number(entry, "at_ms").map(moment).unwrap_or_default();
        let words = ["agent", "action", "subject", "reason"];
        [at].into_iter().chain(words.map(|member| text(entry, member).to_owned())).collect()
    };
    let rows = members(&log, "audit").iter().map(row).collect();
    let heads = ["TIME", "AGENT", "ACTION", "SUBJECT", "REASON"];
    context.output.table(&heads, rows, "nothing was denied and nothing was changed")
}

fn done(context: &Context, value: &Value, text: &str) -> Result<(), Failure> {
    if context.output.json {
        return context.output.value(value);
    }
    context.output.note(text);
    Ok(())
}

fn members<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}
