//! `toolcrib calls`: what was called, and what became of it.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::client::Ask;
use super::failure::Failure;
use super::input;
use super::output::{age, duration, now_ms, number, text};
use super::{Context, call, watch};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib calls
  toolcrib calls --status failed --since 1h
  toolcrib calls --run run_42 --limit 200 --json
  toolcrib calls get tc_01K… --wait 30s
  toolcrib calls events tc_01K…
  toolcrib calls cancel tc_01K… --reason 'no longer wanted'")]
pub struct CallsArgs {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    filters: Filters,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List calls, newest first
    #[command(alias = "list")]
    Ls(Filters),
    /// Show one call
    Get {
        /// The ticket, tc_…
        id: String,
        /// Wait for its outcome, up to a minute or this long
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "60s",
            value_parser = input::duration)]
        wait: Option<Duration>,
    },
    /// Cancel a call that has not ended
    Cancel {
        /// The ticket, tc_…
        id: String,
        /// Why; kept with the call
        #[arg(long)]
        reason: Option<String>,
    },
    /// Show what happened to a call; follows one that has not ended
    Events {
        /// The ticket, tc_…
        id: String,
    },
}

#[derive(Debug, Default, PartialEq, Args)]
struct Filters {
    /// PENDING, RUNNING, SUCCEEDED, FAILED, TIMEOUT or CANCELED
    #[arg(long)]
    status: Option<String>,
    /// Only of this tool
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// Only of this run
    #[arg(long, value_name = "ID")]
    run: Option<String>,
    /// Only made in the last so long: 10m, 1h, 2d
    #[arg(long, value_name = "TIME", value_parser = input::duration)]
    since: Option<Duration>,
    /// At most so many, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Go on where a page ended
    #[arg(long)]
    cursor: Option<String>,
}

pub async fn run(context: &Context, args: CallsArgs) -> Result<(), Failure> {
    let CallsArgs { verb, filters } = args;
    let Some(verb) = verb else { return list(context, filters).await };
    if filters != Filters::default() {
        let message = "filters are for the list: write toolcrib calls ls --status …";
        return Err(Failure::usage(message));
    }
    match verb {
        Verb::Ls(filters) => list(context, filters).await,
        Verb::Get { id, wait } => get(context, &id, wait).await,
        Verb::Cancel { id, reason } => cancel(context, &id, reason).await,
        Verb::Events { id } => watch::call_events(context, &id).await,
    }
}

async fn list(context: &Context, filters: Filters) -> Result<(), Failure> {
    let since = filters.since.map(|ago| now_ms().saturating_sub(ago.as_millis() as u64));
    let ask = Ask::get(&["v1", "tool_calls"])
        .query("status", filters.status.map(|status| status.to_uppercase()))
        .query("tool_name", filters.tool)
        .query("run_id", filters.run)
        .query("since", since)
        .query("limit", filters.limit)
        .query("cursor", filters.cursor);
    let answer = context.client()?.ask(ask).await?;
    let output = context.output;
    if output.json {
        return output.value(&answer);
    }
    let calls = answer["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let now = now_ms();
    let heads = ["AGE", "STATUS", "TOOL", "SOURCE", "ATTEMPT", "TIME", "ERROR", "ID"];
    let rows = calls.iter().map(|call| row(call, now)).collect();
    output.table(&heads, rows, "no calls")?;
    if let Some(cursor) = answer["next_cursor"].as_str() {
        output.note(&format!("there are more: --cursor {}", super::output::plain(cursor)));
    }
    Ok(())
}

fn row(call: &Value, now: u64) -> Vec<String> {
    let created = number(call, "created_at_ms");
    vec![
        created.map(|ms| age(now.saturating_sub(ms))).unwrap_or_default(),
        text(call, "status").to_owned(),
        text(call, "tool_name").to_owned(),
        text(call, "source").to_owned(),
        number(call, "attempt").map(|n| n.to_string()).unwrap_or_default(),
        took_ms(call).map(duration).unwrap_or_default(),
        text(&call["error"], "code").to_owned(),
        text(call, "tool_call_id").to_owned(),
    ]
}

/// How long it took, or has taken up to now.
pub fn took_ms(call: &Value) -> Option<u64> {
    if let Some(ms) = number(&call["outcome"]["metrics"], "latency_ms") {
        return Some(ms);
    }
    let end = number(call, "completed_at_ms").unwrap_or_else(now_ms);
    number(call, "created_at_ms").map(|begin| end.saturating_sub(begin))
}

async fn get(context: &Context, id: &str, wait: Option<Duration>) -> Result<(), Failure> {
    let client = context.client()?;
    let found = client.ask(Ask::get(&["v1", "tool_calls", id])).await?;
    let Some(wait) = wait else {
        context.output.note(&call::headline(context, &found));
        return context.output.value(&found);
    };
    let spinner = context.output.spinner(id);
    let ended = call::await_outcome(&client, &spinner, found, Instant::now() + wait).await;
    spinner.finish_and_clear();
    call::conclude(context, &ended?, wait)
}

async fn cancel(context: &Context, id: &str, reason: Option<String>) -> Result<(), Failure> {
    let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let path = ["v1", "tool_calls", id, "cancel"];
    let canceled = context.client()?.ask(Ask::post(&path, body)).await?;
    if context.output.json {
        return context.output.value(&canceled);
    }
    context.output.note(&call::headline(context, &canceled));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_bear_whatever_a_server_sends() {
        let call = json!({"tool_call_id": "tc_1", "status": "FAILED", "tool_name": "a.b",
            "source": "client", "attempt": 3, "created_at_ms": 1_000, "completed_at_ms": 32_200,
            "error": {"code": "UPSTREAM_UNAVAILABLE"}});
        let cells =
            ["12s", "FAILED", "a.b", "client", "3", "31.2 s", "UPSTREAM_UNAVAILABLE", "tc_1"];
        assert_eq!(row(&call, 13_000), cells);
        for odd in [json!(null), json!([]), json!({"error": 5, "attempt": -1, "outcome": []})] {
            assert_eq!(row(&odd, 0).len(), 8);
        }
    }
}
