//! `audit`: list, verify and export the audit log.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use toolcrib_transport::http::{AuditBody, AuditVerificationBody};

use super::array_member;
use super::target::AdminTarget;
use crate::cli::client::ApiRequest;
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::output::{Column, format_local_time, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};

/// Entries that one request of an export reads.
const ENTRIES_PER_PAGE: usize = 1_000;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:
  toolcrib audit
  toolcrib audit --limit 1000 --json | jq -r '.audit[] | select(.action == \"call.denied\")'
  toolcrib audit verify
  toolcrib audit verify --expect 3f79bb7b435b05321651daefd374cdc681dc06faa65e374e38337b88ca046dea
  toolcrib audit export --output audit.jsonl")]
pub struct AuditArgs {
    #[command(subcommand)]
    verb: Option<AuditCommand>,
    #[command(flatten)]
    list: AuditListArgs,
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// List the newest entries
    #[command(alias = "list")]
    Ls(AuditListArgs),
    /// Find entries that were changed, removed or moved
    Verify {
        /// Hash of an earlier head, which must be in the log
        #[arg(long, value_name = "HASH")]
        expect: Option<String>,
        #[command(flatten)]
        storage: StorageArgs,
    },
    /// Write the log as JSON Lines, oldest entry first
    Export {
        /// Only entries with a higher number
        #[arg(long, value_name = "NUMBER", default_value_t = 0)]
        after: u64,
        /// The file to write (default: standard output)
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        #[command(flatten)]
        storage: StorageArgs,
    },
}

#[derive(Debug, Args)]
struct AuditListArgs {
    /// Maximum number of entries, newest first
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    storage: StorageArgs,
}

pub async fn audit(context: &CommandContext, args: AuditArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(AuditCommand::Ls(args.list)) {
        AuditCommand::Ls(list) => print_log(context, list).await,
        AuditCommand::Verify { expect, storage } => verify(context, &storage, expect).await,
        AuditCommand::Export { after, output, storage } => {
            export(context, &storage, after, output).await
        }
    }
}

async fn print_log(context: &CommandContext, args: AuditListArgs) -> Result<(), CommandFailure> {
    let target = AdminTarget::open_existing(context, &args.storage).await?;
    let log = match &target {
        AdminTarget::Remote { client, .. } => {
            let ask = ApiRequest::get(&["v1", "audit"]).query("limit", Some(args.limit));
            client.request_json(ask).await?
        }
        AdminTarget::Local { engine, caller, .. } => {
            let rows = engine.admin().audit_log(caller, None, args.limit as usize).await?;
            let rows: Vec<AuditBody> = rows.into_iter().map(AuditBody::from).collect();
            json!({ "audit": rows })
        }
    };
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
        Column::detail("AGENT", 2),
        Column::id("ACTION"),
        Column::id("SUBJECT"),
        Column::optional_text("REASON", 3),
    ];
    context.output.print_table(&columns, rows, "nothing was denied and nothing was changed")
}

async fn verify(
    context: &CommandContext,
    storage: &StorageArgs,
    expect: Option<String>,
) -> Result<(), CommandFailure> {
    let target = AdminTarget::open_existing(context, storage).await?;
    let found = match &target {
        AdminTarget::Remote { client, .. } => {
            let ask = ApiRequest::get(&["v1", "audit", "verify"]).query("expect", expect);
            client.request_json(ask).await?
        }
        AdminTarget::Local { engine, caller, .. } => {
            let verified = engine.admin().verify_audit_log(caller, expect).await?;
            json!(AuditVerificationBody::from(verified))
        }
    };
    let is_intact = found["ok"] == true;
    if context.output.json {
        context.output.print_json(&found)?;
    } else if is_intact {
        let entries = u64_member(&found, "entries").unwrap_or_default();
        context.output.print_note(&format!("the audit log is intact: {entries} entries; head:"));
        context.output.print_line(str_member(&found["head"], "hash"))?;
    }
    if is_intact {
        return Ok(());
    }
    if context.output.json {
        return Err(CommandFailure::already_reported(exit::FAILURE));
    }
    let problems = array_member(&found, "problems");
    let problems: Vec<&str> = problems.iter().map(|found| str_member(found, "message")).collect();
    let message = format!("the audit log is not intact: {}", problems.join("; "));
    Err(CommandFailure::new(exit::FAILURE, "AUDIT_LOG_CHANGED", message))
}

async fn export(
    context: &CommandContext,
    storage: &StorageArgs,
    mut after: u64,
    file: Option<PathBuf>,
) -> Result<(), CommandFailure> {
    let target = AdminTarget::open_existing(context, storage).await?;
    let mut output: Box<dyn Write> = match &file {
        Some(path) => Box::new(std::fs::File::create(path)?),
        None => Box::new(std::io::stdout().lock()),
    };
    loop {
        let (lines, last) = read_page(&target, after).await?;
        let Some(last) = last else { break };
        output.write_all(lines.as_bytes())?;
        after = last;
    }
    output.flush()?;
    Ok(())
}

/// Returns the next entries as JSON Lines, and the number of the last one.
async fn read_page(
    target: &AdminTarget,
    after: u64,
) -> Result<(String, Option<u64>), CommandFailure> {
    match target {
        AdminTarget::Remote { client, .. } => {
            let ask = ApiRequest::get(&["v1", "audit", "export"])
                .query("after", Some(after))
                .query("limit", Some(ENTRIES_PER_PAGE));
            let lines = client.request_text(ask).await?;
            let last: Option<Value> =
                lines.lines().last().and_then(|line| serde_json::from_str(line).ok());
            let number = last.and_then(|entry| u64_member(&entry, "number"));
            Ok((lines, number))
        }
        AdminTarget::Local { engine, caller, .. } => {
            let rows = engine.admin().export_audit_log(caller, after).await?;
            let last = rows.last().map(|row| row.number);
            let mut lines = String::new();
            for row in rows {
                lines += &json!(AuditBody::from(row)).to_string();
                lines.push('\n');
            }
            Ok((lines, last))
        }
    }
}
