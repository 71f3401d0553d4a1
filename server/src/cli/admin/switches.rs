//! `switch`: kill switches of tools, agents, sources and projects.

use clap::{Args, Subcommand, ValueEnum};
use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::domain::directory::kill_switches::{KillSwitch, SwitchKind};

use super::target::AdminTarget;
use super::{array_member, print_change};
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;
use crate::cli::output::{Column, format_local_time, sanitize_line, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
New calls of what is off are refused with the reason. Open calls end as FAILED with it within a
second, and work in flight is canceled at its source. Names of tools and sources can be patterns.
A source is an executor (builtin, client, http, mcp, utp) or the name of an MCP server.

Examples:
  toolcrib switch off tool mail.send --reason 'wrong receivers'
  toolcrib switch off tool 'file.*' --reason 'disk is being moved'
  toolcrib switch off agent ada --reason 'key leaked'
  toolcrib switch off source github --reason 'maintenance until 14:00'
  toolcrib switch
  toolcrib switch on tool mail.send")]
pub struct SwitchArgs {
    #[command(subcommand)]
    verb: Option<SwitchCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum SwitchCommand {
    /// List what is switched off
    #[command(alias = "list")]
    Ls,
    /// Switch a tool, an agent, a source or a project off
    Off {
        kind: SwitchKindArg,
        /// Name, or for tools and sources a pattern
        name: String,
        /// The reason, which callers and models read
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Switch it on again
    On {
        kind: SwitchKindArg,
        /// Name or pattern, as it was switched off
        name: String,
    },
}

/// The kind of a switch as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum SwitchKindArg {
    Tool,
    Agent,
    Source,
    Project,
}

impl From<SwitchKindArg> for SwitchKind {
    fn from(kind: SwitchKindArg) -> Self {
        match kind {
            SwitchKindArg::Tool => Self::Tool,
            SwitchKindArg::Agent => Self::Agent,
            SwitchKindArg::Source => Self::Source,
            SwitchKindArg::Project => Self::Project,
        }
    }
}

pub async fn switch(context: &CommandContext, args: SwitchArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(SwitchCommand::Ls) {
        SwitchCommand::Ls => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            print_switches(context, &target.switches().await?)
        }
        SwitchCommand::Off { kind, name, reason } => {
            let target = AdminTarget::open_or_create(context, &args.storage).await?;
            let switch = target.set_switch(kind.into(), &name, &reason).await?;
            let kind = SwitchKind::from(kind).as_str();
            let text =
                format!("{kind} {} is off: {}", sanitize_line(&name), sanitize_line(&reason));
            print_change(context, &switch, &text)
        }
        SwitchCommand::On { kind, name } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            target.remove_switch(kind.into(), &name).await?;
            let kind = SwitchKind::from(kind).as_str();
            let text = format!("{kind} {} is on", sanitize_line(&name));
            print_change(context, &json!({"kind": kind, "name": name, "removed": true}), &text)
        }
    }
}

fn print_switches(context: &CommandContext, switches: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(switches);
    }
    let row = |switch: &Value| {
        let time = u64_member(switch, "set_at_ms").map(format_local_time).unwrap_or_default();
        let words = ["kind", "name", "reason", "set_by"];
        words
            .map(|member| str_member(switch, member).to_owned())
            .into_iter()
            .chain([time])
            .collect()
    };
    let rows = array_member(switches, "switches").iter().map(row).collect();
    let columns = [
        Column::id("KIND"),
        Column::text("NAME"),
        Column::text("REASON"),
        Column::detail("BY", 2),
        Column::detail("SINCE", 1),
    ];
    context.output.print_table(&columns, rows, "nothing is switched off")
}

fn switch_body(switch: &KillSwitch) -> Value {
    json!({
        "kind": switch.kind.as_str(),
        "name": switch.name,
        "project": switch.project,
        "reason": switch.reason,
        "set_by": switch.set_by,
        "set_at_ms": switch.set_ms,
    })
}

impl AdminTarget {
    async fn switches(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                client.request_json(ApiRequest::get(&["v1", "switches"])).await
            }
            Self::Local { engine, caller, .. } => {
                let switches: Vec<Value> =
                    engine.admin().switches(caller)?.iter().map(switch_body).collect();
                Ok(json!({ "switches": switches }))
            }
        }
    }

    async fn set_switch(
        &self,
        kind: SwitchKind,
        name: &str,
        reason: &str,
    ) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let path = ["v1", "switches", kind.as_str(), name];
                let body = json!({ "reason": reason });
                client.request_json(ApiRequest::new(Method::PUT, &path).body(body)).await
            }
            Self::Local { engine, caller, .. } => {
                let switch = engine.admin().set_switch(caller, kind, name, reason).await?;
                Ok(switch_body(&switch))
            }
        }
    }

    async fn remove_switch(&self, kind: SwitchKind, name: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client, .. } => {
                let path = ["v1", "switches", kind.as_str(), name];
                client.request_json(ApiRequest::new(Method::DELETE, &path)).await.map(drop)
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.admin().remove_switch(caller, kind, name).await?)
            }
        }
    }
}
