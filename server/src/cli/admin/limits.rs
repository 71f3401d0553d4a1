//! `limits`: usage limits of agents, users, tools and projects.

use clap::{Args, Subcommand, ValueEnum};
use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::domain::directory::usage_limits::{LimitKind, LimitValues, UsageLimit};

use super::target::AdminTarget;
use super::{array_member, print_change};
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;
use crate::cli::output::{Column, sanitize_line, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
A limit is for one agent, user, tool or project; the name '*' sets the default of each that has no
value of its own. A call over per-minute or max-open is refused with 429 and Retry-After; a call
over max-parallel is queued.

Examples:
  toolcrib limits
  toolcrib limits set agent ada --per-minute 60 --max-open 20
  toolcrib limits set user '*' --per-minute 30
  toolcrib limits set tool mail.send --max-parallel 2
  toolcrib limits rm agent ada")]
pub struct LimitsArgs {
    #[command(subcommand)]
    verb: Option<LimitsCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum LimitsCommand {
    /// List the limits
    #[command(alias = "list")]
    Ls,
    /// Set a limit, or replace it
    Set {
        kind: LimitKindArg,
        /// Name of the agent, user, tool or project; '*' for each without a value of its own
        name: String,
        /// Maximum number of calls in any 60 seconds
        #[arg(long, value_name = "N")]
        per_minute: Option<u32>,
        /// Maximum number of calls without an outcome
        #[arg(long, value_name = "N")]
        max_open: Option<u32>,
        /// Maximum number of attempts in flight; further calls are queued
        #[arg(long, value_name = "N")]
        max_parallel: Option<u32>,
    },
    /// Remove a limit
    Rm {
        kind: LimitKindArg,
        /// Name of the agent, user, tool or project, or '*'
        name: String,
    },
}

/// The kind of a limit as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LimitKindArg {
    Agent,
    User,
    Tool,
    Project,
}

impl From<LimitKindArg> for LimitKind {
    fn from(kind: LimitKindArg) -> Self {
        match kind {
            LimitKindArg::Agent => Self::Agent,
            LimitKindArg::User => Self::User,
            LimitKindArg::Tool => Self::Tool,
            LimitKindArg::Project => Self::Project,
        }
    }
}

pub async fn limits(context: &CommandContext, args: LimitsArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(LimitsCommand::Ls) {
        LimitsCommand::Ls => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            print_limits(context, &target.limits().await?)
        }
        LimitsCommand::Set { kind, name, per_minute, max_open, max_parallel } => {
            let values = LimitValues { per_minute, max_open, max_parallel };
            if values.is_empty() {
                return Err(CommandFailure::usage(
                    "give at least one of --per-minute, --max-open and --max-parallel",
                ));
            }
            let target = AdminTarget::open_or_create(context, &args.storage).await?;
            let limit = target.set_limit(kind.into(), &name, values).await?;
            let kind = LimitKind::from(kind).as_str();
            let text = format!("limited {kind} {}: {}", sanitize_line(&name), value_text(&limit));
            print_change(context, &limit, &text)
        }
        LimitsCommand::Rm { kind, name } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            target.remove_limit(kind.into(), &name).await?;
            let kind = LimitKind::from(kind).as_str();
            let text = format!("removed the limit of {kind} {}", sanitize_line(&name));
            print_change(context, &json!({"kind": kind, "name": name, "removed": true}), &text)
        }
    }
}

fn value_text(limit: &Value) -> String {
    let fields = ["per_minute", "max_open", "max_parallel"];
    let set = fields.iter().filter_map(|field| {
        Some(format!("{} {}", u64_member(limit, field)?, field.replace('_', "-")))
    });
    set.collect::<Vec<_>>().join(", ")
}

fn print_limits(context: &CommandContext, limits: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(limits);
    }
    let row = |limit: &Value| {
        let number = |member| u64_member(limit, member).map(|n| n.to_string()).unwrap_or_default();
        let words = ["kind", "name"].map(|member| str_member(limit, member).to_owned());
        words.into_iter().chain(["per_minute", "max_open", "max_parallel"].map(number)).collect()
    };
    let rows = array_member(limits, "limits").iter().map(row).collect();
    let columns = [
        Column::id("KIND"),
        Column::text("NAME"),
        Column::id("PER MINUTE"),
        Column::id("MAX OPEN"),
        Column::id("MAX PARALLEL"),
    ];
    let none = "no limits are stored (toolcrib limits set); those of the configuration still hold";
    context.output.print_table(&columns, rows, none)
}

fn limit_body(limit: &UsageLimit) -> Value {
    json!({
        "kind": limit.kind.as_str(),
        "name": limit.name,
        "project": limit.project,
        "per_minute": limit.values.per_minute,
        "max_open": limit.values.max_open,
        "max_parallel": limit.values.max_parallel,
        "updated_at_ms": limit.updated_ms,
    })
}

impl AdminTarget {
    async fn limits(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "limits"])).await
            }
            Self::Local { engine, caller, .. } => {
                let limits: Vec<Value> =
                    engine.admin().limits(caller)?.iter().map(limit_body).collect();
                Ok(json!({ "limits": limits }))
            }
        }
    }

    async fn set_limit(
        &self,
        kind: LimitKind,
        name: &str,
        values: LimitValues,
    ) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let body = json!({
                    "per_minute": values.per_minute, "max_open": values.max_open,
                    "max_parallel": values.max_parallel,
                });
                let path = ["v1", "limits", kind.as_str(), name];
                client.request_json(ApiRequest::new(Method::PUT, &path).body(body)).await
            }
            Self::Local { engine, caller, .. } => {
                let limit = engine.admin().set_limit(caller, kind, name, values).await?;
                Ok(limit_body(&limit))
            }
        }
    }

    async fn remove_limit(&self, kind: LimitKind, name: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let path = ["v1", "limits", kind.as_str(), name];
                client.request_json(ApiRequest::new(Method::DELETE, &path)).await.map(drop)
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.admin().remove_limit(caller, kind, name).await?)
            }
        }
    }
}
