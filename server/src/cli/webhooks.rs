//! `toolcrib webhooks`: shows webhook deliveries, repeats one, and generates a signing key.

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::CommandContext;
use super::client::ApiRequest;
use super::failure::CommandFailure;
use super::output::{
    Column, format_age, format_duration, format_local_time, now_ms, sanitize_line, str_member,
    u64_member,
};
use crate::webhooks::encode_key;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  export TOOLCRIB_WEBHOOK_SIGNING_KEY=$(toolcrib webhooks key)
  toolcrib webhooks deliveries --status exhausted
  toolcrib webhooks deliveries tc_01K…
  toolcrib webhooks repeat tc_01K…")]
pub struct WebhooksArgs {
    #[command(subcommand)]
    verb: WebhooksCommand,
}

#[derive(Debug, Subcommand)]
enum WebhooksCommand {
    /// List deliveries, or show every attempt of one
    Deliveries {
        /// The ticket, tc_…
        id: Option<String>,
        /// waiting, pending, delivered, gone or exhausted
        #[arg(long, conflicts_with = "id")]
        status: Option<String>,
        /// Maximum number of deliveries, up to 200 [default: 50]
        #[arg(long, value_name = "N", conflicts_with = "id")]
        limit: Option<u32>,
        /// Continue after a page, with the cursor it printed
        #[arg(long, conflicts_with = "id")]
        cursor: Option<String>,
    },
    /// Deliver again, regardless of earlier attempts
    Repeat {
        /// The ticket, tc_…
        id: String,
    },
    /// Generate a signing key; it is printed and not stored
    Key,
}

pub async fn run(context: &CommandContext, args: WebhooksArgs) -> Result<(), CommandFailure> {
    match args.verb {
        WebhooksCommand::Deliveries { id: Some(id), .. } => show_delivery(context, &id).await,
        WebhooksCommand::Deliveries { status, limit, cursor, .. } => {
            let request = ApiRequest::get(&["v1", "deliveries"])
                .query("status", status)
                .query("limit", limit)
                .query("cursor", cursor);
            list(context, request).await
        }
        WebhooksCommand::Repeat { id } => repeat(context, &id).await,
        WebhooksCommand::Key => {
            // A generated secret has more than 256 random bits; its digest is a key of 32 bytes.
            let random: [u8; 32] =
                Sha256::digest(toolcrib_transport::auth::generate_secret()).into();
            context.output.print_line(&encode_key(&random))
        }
    }
}

async fn list(context: &CommandContext, request: ApiRequest<'_>) -> Result<(), CommandFailure> {
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let row = |delivery: &Value| {
        vec![
            str_member(delivery, "status").to_owned(),
            u64_member(delivery, "tries").map(|n| n.to_string()).unwrap_or_default(),
            u64_member(delivery, "next_try_at_ms").map(format_time_until).unwrap_or_default(),
            str_member(delivery, "url").to_owned(),
            str_member(delivery, "last_error").to_owned(),
            str_member(delivery, "tool_call_id").to_owned(),
        ]
    };
    let columns = [
        Column::id("STATUS"),
        Column::detail("TRIES", 2),
        Column::detail("NEXT", 1),
        Column::text("URL"),
        Column::text("LAST ERROR"),
        Column::id("ID"),
    ];
    output.print_table(
        &columns,
        array_member(&answer, "deliveries").iter().map(row).collect(),
        "none",
    )?;
    output.print_next_page(&answer);
    Ok(())
}

fn format_time_until(at_ms: u64) -> String {
    match at_ms.saturating_sub(now_ms()) {
        0 => "now".to_owned(),
        ms => format!("in {}", format_age(ms)),
    }
}

async fn show_delivery(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "tool_calls", id, "deliveries"]);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let Some(delivery) = array_member(&answer, "deliveries").first() else {
        output.print_note("this call was made without a callback_url");
        return Ok(());
    };
    let part = |member| sanitize_line(str_member(delivery, member));
    output.print_note(&format!("{} to {}: {}", part("webhook_id"), part("url"), part("status")));
    if let Some(at_ms) = u64_member(delivery, "next_try_at_ms") {
        output.print_note(&format!("next try {}", format_time_until(at_ms)));
    }
    let row = |tried: &Value| {
        vec![
            u64_member(tried, "number").map(|n| n.to_string()).unwrap_or_default(),
            u64_member(tried, "at_ms").map(format_local_time).unwrap_or_default(),
            u64_member(tried, "duration_ms").map(format_duration).unwrap_or_default(),
            u64_member(tried, "status_code").map(|code| code.to_string()).unwrap_or_default(),
            str_member(tried, "error").to_owned(),
        ]
    };
    let rows = array_member(delivery, "log").iter().map(row).collect();
    let columns = [
        Column::id("TRY"),
        Column::id("TIME"),
        Column::detail("TOOK", 1),
        Column::id("ANSWER"),
        Column::text("ERROR"),
    ];
    output.print_table(&columns, rows, "not tried yet")
}

async fn repeat(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::post(&["v1", "tool_calls", id, "deliveries", "repeat"], json!({}));
    let answer = context.client()?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&answer);
    }
    let url = sanitize_line(str_member(&answer, "url"));
    context.output.print_note(&format!("{} is delivered to {url} again", sanitize_line(id)));
    Ok(())
}

fn array_member<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}
