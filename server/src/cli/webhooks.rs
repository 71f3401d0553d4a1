//! `toolcrib webhooks`: shows webhook deliveries, repeats one, and generates a signing key.

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Context;
use super::client::Ask;
use super::failure::Failure;
use super::output::{age, duration, moment, now_ms, number, plain, text};
use crate::webhooks::new_key;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  export TOOLCRIB_WEBHOOK_SIGNING_KEY=$(toolcrib webhooks key)
  toolcrib webhooks deliveries --status exhausted
  toolcrib webhooks deliveries tc_01K…
  toolcrib webhooks repeat tc_01K…")]
pub struct WebhooksArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
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

pub async fn run(context: &Context, args: WebhooksArgs) -> Result<(), Failure> {
    match args.verb {
        Verb::Deliveries { id: Some(id), .. } => tries(context, &id).await,
        Verb::Deliveries { status, limit, cursor, .. } => {
            let ask = Ask::get(&["v1", "deliveries"])
                .query("status", status)
                .query("limit", limit)
                .query("cursor", cursor);
            list(context, ask).await
        }
        Verb::Repeat { id } => repeat(context, &id).await,
        Verb::Key => {
            // A generated secret has more than 256 random bits; its digest is a key of 32 bytes.
            let random: [u8; 32] = Sha256::digest(crate::auth::new_secret()).into();
            context.output.line(&new_key(&random))
        }
    }
}

async fn list(context: &Context, ask: Ask<'_>) -> Result<(), Failure> {
    let answer = context.client()?.ask(ask).await?;
    let output = context.output;
    if output.json {
        return output.value(&answer);
    }
    let row = |delivery: &Value| {
        vec![
            text(delivery, "status").to_owned(),
            number(delivery, "tries").map(|n| n.to_string()).unwrap_or_default(),
            number(delivery, "next_try_at_ms").map(from_now).unwrap_or_default(),
            text(delivery, "url").to_owned(),
            text(delivery, "last_error").to_owned(),
            text(delivery, "tool_call_id").to_owned(),
        ]
    };
    let heads = ["STATUS", "TRIES", "NEXT", "URL", "LAST ERROR", "ID"];
    output.table(&heads, members(&answer, "deliveries").iter().map(row).collect(), "none")?;
    if let Some(cursor) = answer["next_cursor"].as_str() {
        output.note(&format!("there are more: --cursor {}", plain(cursor)));
    }
    Ok(())
}

fn from_now(at_ms: u64) -> String {
    match at_ms.saturating_sub(now_ms()) {
        0 => "now".to_owned(),
        ms => format!("in {}", age(ms)),
    }
}

async fn tries(context: &Context, id: &str) -> Result<(), Failure> {
    let ask = Ask::get(&["v1", "tool_calls", id, "deliveries"]);
    let answer = context.client()?.ask(ask).await?;
    let output = context.output;
    if output.json {
        return output.value(&answer);
    }
    let Some(delivery) = members(&answer, "deliveries").first() else {
        output.note("this call was made without a callback_url");
        return Ok(());
    };
    let part = |member| plain(text(delivery, member));
    output.note(&format!("{} to {}: {}", part("webhook_id"), part("url"), part("status")));
    if let Some(at_ms) = number(delivery, "next_try_at_ms") {
        output.note(&format!("next try {}", from_now(at_ms)));
    }
    let row = |tried: &Value| {
        vec![
            number(tried, "number").map(|n| n.to_string()).unwrap_or_default(),
            number(tried, "at_ms").map(moment).unwrap_or_default(),
            number(tried, "duration_ms").map(duration).unwrap_or_default(),
            number(tried, "status_code").map(|code| code.to_string()).unwrap_or_default(),
            text(tried, "error").to_owned(),
        ]
    };
    let rows = members(delivery, "log").iter().map(row).collect();
    output.table(&["TRY", "TIME", "TOOK", "ANSWER", "ERROR"], rows, "not tried yet")
}

async fn repeat(context: &Context, id: &str) -> Result<(), Failure> {
    let ask = Ask::post(&["v1", "tool_calls", id, "deliveries", "repeat"], json!({}));
    let answer = context.client()?.ask(ask).await?;
    if context.output.json {
        return context.output.value(&answer);
    }
    let url = plain(text(&answer, "url"));
    context.output.note(&format!("{} is delivered to {url} again", plain(id)));
    Ok(())
}

fn members<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}
