//! `rules`: list, set, apply, explain, lint and rehearse access rules.

mod target;
use std::path::Path;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use toolcrib::domain::access_rules::RuleVerdict;
use toolcrib::registry::rules::STARTER_SETS;

use super::target::AdminTarget;
use super::{array_member, print_change};
use crate::cli::failure::CommandFailure;
use crate::cli::input::parse_arguments;
use crate::cli::output::{Column, format_local_time, sanitize_line, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};
use crate::config::rules::read_toml_or_json;

#[derive(Debug, Args)]
#[command(after_help = "\
A rule has conditions and a verdict. An absent condition matches everything; * in a pattern stands
for any characters. Deny takes precedence over ask, ask over allow.

Examples:
  toolcrib rules
  toolcrib rules allow ada 'weather.*' calculation.eval
  toolcrib rules set ask-before-payments --verdict ask --tool 'payment.*' --when 'args.amount > 100'
  toolcrib rules set night --verdict deny --effect irreversible --when 'now.getHours() < 6'
  toolcrib rules apply ask-before-writes
  toolcrib rules apply rules.toml
  toolcrib rules explain --agent ada payment.send amount=250
  toolcrib rules lint
  toolcrib rules rehearse rules.toml --days 30
  toolcrib rules rollback 7
  toolcrib rules rm ask-before-payments
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
    /// Show one rule
    Show {
        /// The rule's id
        id: String,
    },
    /// Set one rule; it replaces the rule with the same id
    Set(Box<SetArgs>),
    /// Allow tools to an agent; '*' for every agent
    Allow(ShortArgs),
    /// Deny tools to an agent; '*' for every agent
    Deny(ShortArgs),
    /// Remove a rule
    Rm {
        /// The agent of a rule of the short form
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// The rule's id; with --agent the pattern of the rule
        #[arg(value_name = "ID|PATTERN")]
        rule: String,
    },
    /// Replace all rules by a starter set or by those of a file
    #[command(after_help = "\
Starter sets:
  open               every agent may call every tool
  ask-before-writes  tools that only read are allowed, others need an approval
  locked-down        as ask-before-writes, and tools of critical risk are denied")]
    Apply {
        /// open, ask-before-writes, locked-down, or a file: JSON or TOML with rules
        #[arg(value_name = "SET|FILE")]
        set: String,
    },
    /// Explain the decision about a call, without making it
    Explain(Box<ExplainArgs>),
    /// Find rules that have no effect or whose condition fails
    Lint {
        /// File with rules to check in place of the present ones
        file: Option<String>,
    },
    /// Decide recorded calls again by the rules of a file, and list what would change
    Rehearse {
        /// JSON or TOML with rules, or the name of a starter set
        file: String,
        /// Days to look back
        #[arg(long, value_name = "N", default_value_t = 7,
            value_parser = clap::value_parser!(u32).range(1..=366))]
        days: u32,
    },
    /// List the stored versions of the rules
    Versions,
    /// Make the rules of an earlier version the present ones
    Rollback {
        /// The number of the version
        version: u64,
    },
}

#[derive(Debug, Args)]
struct ShortArgs {
    /// The agent; '*' for every agent of the project
    agent: String,
    /// Patterns of tools
    #[arg(value_name = "PATTERN", required = true)]
    patterns: Vec<String>,
}

/// A verdict as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum VerdictArg {
    /// Permit it
    Allow,
    /// Refuse it
    Deny,
    /// Permit it once an approver agrees
    Ask,
}

#[derive(Debug, Args)]
struct SetArgs {
    /// The rule's id
    id: String,
    /// The verdict of the rule
    #[arg(long, value_enum)]
    verdict: VerdictArg,
    /// Agents that it is about; can be repeated, as all lists can
    #[arg(long = "agent", value_name = "PATTERN")]
    agents: Vec<String>,
    /// Groups of the agent
    #[arg(long = "group", value_name = "PATTERN")]
    groups: Vec<String>,
    /// Users that the agent acts for
    #[arg(long = "user", value_name = "PATTERN")]
    users: Vec<String>,
    /// Sessions
    #[arg(long = "session", value_name = "PATTERN")]
    sessions: Vec<String>,
    /// Environments
    #[arg(long = "environment", value_name = "PATTERN")]
    environments: Vec<String>,
    /// Tools
    #[arg(long = "tool", value_name = "PATTERN")]
    tools: Vec<String>,
    /// Sources: server, client, an executor such as mcp, or an MCP server's name
    #[arg(long = "source", value_name = "PATTERN")]
    sources: Vec<String>,
    /// Effects: read, idempotent, irreversible
    #[arg(long = "effect", value_name = "EFFECT")]
    effects: Vec<String>,
    /// The lowest risk: low, medium, high, critical
    #[arg(long, value_name = "RISK")]
    risk_min: Option<String>,
    /// Actions: list, invoke, read, cancel, approve, register, administer [default: list, invoke]
    #[arg(long = "action", value_name = "ACTION")]
    actions: Vec<String>,
    /// CEL expression over args, caller, tool and now
    #[arg(long, value_name = "EXPRESSION")]
    when: Option<String>,
    /// Agents, groups or users who may approve; only with ask
    #[arg(long = "approver", value_name = "PATTERN")]
    approvers: Vec<String>,
    /// Milliseconds until a call without a decision fails; only with ask
    #[arg(long, value_name = "MS")]
    expires_in_ms: Option<u64>,
    /// Text for people
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

#[derive(Debug, Args)]
struct ExplainArgs {
    /// The agent
    #[arg(long, value_name = "NAME")]
    agent: String,
    /// The user that the agent acts for
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// The session that the agent asserts
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// The agent's environment
    #[arg(long, value_name = "NAME")]
    environment: Option<String>,
    /// A group of the agent; can be repeated
    #[arg(long = "group", value_name = "NAME")]
    groups: Vec<String>,
    /// A role of the agent; can be repeated
    #[arg(long = "role", value_name = "ROLE")]
    roles: Vec<String>,
    /// The action
    #[arg(long, value_name = "ACTION", default_value = "invoke")]
    action: String,
    /// The arguments as JSON
    #[arg(long, value_name = "JSON")]
    args: Option<String>,
    /// The tool
    tool: String,
    /// Arguments of the call
    #[arg(value_name = "NAME=VALUE")]
    pairs: Vec<String>,
}

pub async fn run(context: &CommandContext, args: RulesArgs) -> Result<(), CommandFailure> {
    let storage = &args.storage;
    match args.verb.unwrap_or(RulesCommand::Ls) {
        RulesCommand::Ls => {
            let target = AdminTarget::open_existing(context, storage).await?;
            print_rules(context, &target.rules().await?)
        }
        RulesCommand::Show { id } => {
            let target = AdminTarget::open_existing(context, storage).await?;
            context.output.print_json(&target.rule(&id).await?)
        }
        RulesCommand::Set(args) => {
            let target = AdminTarget::open_or_create(context, storage).await?;
            let (id, body) = rule_document(*args);
            let rule = target.put_rule(&id, body).await?;
            print_change(context, &rule, &format!("set rule {}", sanitize_line(&id)))
        }
        RulesCommand::Allow(args) => {
            set_short_rules(context, storage, &args.agent, &args.patterns, RuleVerdict::Allow).await
        }
        RulesCommand::Deny(args) => {
            set_short_rules(context, storage, &args.agent, &args.patterns, RuleVerdict::Deny).await
        }
        RulesCommand::Rm { agent, rule } => remove(context, storage, agent, rule).await,
        RulesCommand::Apply { set } => {
            let document = read_document(&set)?;
            let target = AdminTarget::open_or_create(context, storage).await?;
            let rules = target.replace_rules(&document, &format!("applied {set}")).await?;
            let count = array_member(&rules, "rules").len();
            let version = u64_member(&rules, "version").unwrap_or_default();
            let text = format!("applied {}: {count} rules, version {version}", sanitize_line(&set));
            print_change(context, &rules, &text)
        }
        RulesCommand::Explain(args) => explain(context, storage, *args).await,
        RulesCommand::Lint { file } => lint(context, storage, file).await,
        RulesCommand::Rehearse { file, days } => rehearse(context, storage, &file, days).await,
        RulesCommand::Versions => {
            let target = AdminTarget::open_existing(context, storage).await?;
            print_versions(context, &target.rule_versions().await?)
        }
        RulesCommand::Rollback { version } => {
            let target = AdminTarget::open_existing(context, storage).await?;
            let rules = target.roll_back_rules(version).await?;
            let count = array_member(&rules, "rules").len();
            let text = format!("the {count} rules of version {version} are in force");
            print_change(context, &rules, &text)
        }
    }
}

/// Allows or denies several patterns to an agent.
pub(super) async fn set_short_rules(
    context: &CommandContext,
    storage: &StorageArgs,
    agent: &str,
    patterns: &[String],
    verdict: RuleVerdict,
) -> Result<(), CommandFailure> {
    for pattern in patterns {
        // All or nothing: a typing error in the third pattern must not leave the first two applied.
        toolcrib::domain::access_rules::check_pattern(pattern).map_err(CommandFailure::usage)?;
    }
    let target = AdminTarget::open_or_create(context, storage).await?;
    let mut rules = Vec::new();
    for pattern in patterns {
        rules.push(target.set_short_rule(agent, pattern, verdict).await?);
    }
    let (word, agent) = (verdict.as_str(), sanitize_line(agent));
    let text = format!("{word} {} for agent {agent}", sanitize_line(&patterns.join(" ")));
    print_change(context, &json!({ "rules": rules }), &text)
}

async fn remove(
    context: &CommandContext,
    storage: &StorageArgs,
    agent: Option<String>,
    rule: String,
) -> Result<(), CommandFailure> {
    let target = AdminTarget::open_existing(context, storage).await?;
    let shown = sanitize_line(&rule);
    match agent {
        Some(agent) => {
            target.remove_short_rule(&agent, &rule).await?;
            let text = format!("removed the rule on {shown} for agent {}", sanitize_line(&agent));
            let value = json!({"agent": agent, "pattern": rule, "removed": true});
            print_change(context, &value, &text)
        }
        None => {
            target.remove_rule(&rule).await?;
            let value = json!({"id": rule, "removed": true});
            print_change(context, &value, &format!("removed rule {shown}"))
        }
    }
}

/// Returns the document of a rule from its options.
fn rule_document(args: SetArgs) -> (String, Value) {
    let verdict = match args.verdict {
        VerdictArg::Allow => RuleVerdict::Allow,
        VerdictArg::Deny => RuleVerdict::Deny,
        VerdictArg::Ask => RuleVerdict::Ask,
    };
    let mut fields = Map::new();
    fields.insert("verdict".to_owned(), verdict.as_str().into());
    for (name, list) in [
        ("agents", args.agents),
        ("groups", args.groups),
        ("users", args.users),
        ("sessions", args.sessions),
        ("environments", args.environments),
        ("tools", args.tools),
        ("sources", args.sources),
        ("effects", args.effects),
        ("actions", args.actions),
        ("approvers", args.approvers),
    ] {
        if !list.is_empty() {
            fields.insert(name.to_owned(), list.into());
        }
    }
    for (name, text) in [("risk_min", args.risk_min), ("when", args.when), ("note", args.note)] {
        if let Some(text) = text {
            fields.insert(name.to_owned(), text.into());
        }
    }
    if let Some(ms) = args.expires_in_ms {
        fields.insert("expires_in_ms".to_owned(), ms.into());
    }
    (args.id, Value::Object(fields))
}

/// Reads a set of rules: a starter set by its name, otherwise a file.
fn read_document(set: &str) -> Result<Value, CommandFailure> {
    if let Some(document) = AdminTarget::starter_document(set) {
        return Ok(document);
    }
    let file = Path::new(set);
    if !file.exists() {
        let message = format!("there is neither a starter set nor a file \"{set}\"");
        let hint = format!("the starter sets are {}", STARTER_SETS.join(", "));
        return Err(CommandFailure::usage(message).hint(hint));
    }
    read_toml_or_json(file).map_err(CommandFailure::usage)
}

async fn explain(
    context: &CommandContext,
    storage: &StorageArgs,
    args: ExplainArgs,
) -> Result<(), CommandFailure> {
    let has_arguments = args.args.is_some() || !args.pairs.is_empty();
    let arguments = parse_arguments(args.args.as_deref(), &args.pairs)?;
    let body = json!({
        "agent": args.agent,
        "user": args.user,
        "session": args.session,
        "environment": args.environment,
        "groups": args.groups,
        "roles": args.roles,
        "action": args.action,
        "tool": args.tool,
        "args": has_arguments.then_some(arguments),
    });
    let target = AdminTarget::open_existing(context, storage).await?;
    let explanation = target.explain_rules(body).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&explanation);
    }
    let part = |member| sanitize_line(str_member(&explanation, member));
    output.print_line(&format!("{}: {}", part("decision"), part("reason")))?;
    let row = |rule: &Value| {
        let matches = if rule["matches"] == true { "yes" } else { "no" };
        let word = |member| str_member(rule, member).to_owned();
        vec![word("rule_id"), word("verdict"), matches.to_owned(), word("reason")]
    };
    let rows: Vec<Vec<String>> = array_member(&explanation, "considered").iter().map(row).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let columns = [
        Column::text("RULE"),
        Column::id("VERDICT"),
        Column::id("MATCHES"),
        Column::text("REASON"),
    ];
    output.print_table(&columns, rows, "")
}

async fn lint(
    context: &CommandContext,
    storage: &StorageArgs,
    file: Option<String>,
) -> Result<(), CommandFailure> {
    let body = match &file {
        Some(file) => json!({ "rules": read_document(file)?["rules"] }),
        None => json!({}),
    };
    let target = AdminTarget::open_existing(context, storage).await?;
    let findings = target.lint_rules(body).await?;
    if context.output.json {
        return context.output.print_json(&findings);
    }
    let row = |finding: &Value| {
        ["rule_id", "kind", "message"].map(|member| str_member(finding, member).to_owned()).into()
    };
    let rows = array_member(&findings, "findings").iter().map(row).collect();
    let columns = [Column::text("RULE"), Column::id("FINDING"), Column::text("REASON")];
    context.output.print_table(&columns, rows, "every rule can have an effect")
}

async fn rehearse(
    context: &CommandContext,
    storage: &StorageArgs,
    file: &str,
    days: u32,
) -> Result<(), CommandFailure> {
    let document = read_document(file)?;
    let target = AdminTarget::open_existing(context, storage).await?;
    let body = json!({ "rules": document["rules"], "days": days });
    let result = target.rehearse_rules(body).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&result);
    }
    let count = |member| u64_member(&result, member).unwrap_or_default();
    let (calls, changed) = (count("calls"), count("changed"));
    output.print_note(&format!(
        "{changed} of {calls} calls of the last {days} days would be decided differently"
    ));
    let row = |change: &Value| {
        let word = |member| str_member(change, member).to_owned();
        let calls = u64_member(change, "calls").unwrap_or_default().to_string();
        let decision = format!("{} -> {}", word("before"), word("after"));
        vec![word("tool"), word("agent"), decision, calls, word("rule_id"), word("example")]
    };
    let rows = array_member(&result, "changes").iter().map(row).collect();
    let columns = [
        Column::text("TOOL"),
        Column::text("AGENT"),
        Column::id("DECISION"),
        Column::id("CALLS"),
        Column::text("RULE"),
        Column::detail("EXAMPLE", 1),
    ];
    output.print_table(&columns, rows, "nothing would change")
}

fn print_rules(context: &CommandContext, rules: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(rules);
    }
    let row = |rule: &Value| {
        let word = |member| str_member(rule, member).to_owned();
        vec![
            word("id"),
            word("verdict"),
            list_cell(rule, "agents"),
            list_cell(rule, "tools"),
            other_conditions(rule),
            word("note"),
        ]
    };
    let rows = array_member(rules, "rules").iter().map(row).collect();
    let none = "no rules: keys of the role agent may call nothing (toolcrib allow)";
    let columns = [
        Column::text("ID"),
        Column::id("VERDICT"),
        Column::text("AGENTS"),
        Column::text("TOOLS"),
        Column::detail("CONDITIONS", 1),
        Column::detail("NOTE", 2),
    ];
    context.output.print_table(&columns, rows, none)
}

fn list_cell(rule: &Value, member: &str) -> String {
    let list: Vec<&str> = array_member(rule, member).iter().filter_map(Value::as_str).collect();
    if list.is_empty() { "*".to_owned() } else { list.join(" ") }
}

/// Describes the conditions of a rule that have no column of their own.
fn other_conditions(rule: &Value) -> String {
    let lists =
        ["groups", "users", "sessions", "environments", "sources", "effects", "actions"].iter();
    let lists = lists
        .filter(|member| !array_member(rule, member).is_empty())
        .map(|member| format!("{member}: {}", list_cell(rule, member)));
    let texts = ["risk_min", "when"].iter();
    let texts = texts
        .filter(|member| !str_member(rule, member).is_empty())
        .map(|member| format!("{member}: {}", str_member(rule, member)));
    lists.chain(texts).collect::<Vec<_>>().join("; ")
}

fn print_versions(context: &CommandContext, versions: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(versions);
    }
    let row = |version: &Value| {
        let number = u64_member(version, "version").unwrap_or_default().to_string();
        let time = u64_member(version, "at_ms").map(format_local_time).unwrap_or_default();
        let word = |member| str_member(version, member).to_owned();
        vec![number, time, word("agent"), word("summary")]
    };
    let rows = array_member(versions, "versions").iter().map(row).collect();
    let columns = [
        Column::id("VERSION"),
        Column::detail("TIME", 1),
        Column::text("AGENT"),
        Column::text("CHANGE"),
    ];
    context.output.print_table(&columns, rows, "the rules were never changed")
}
