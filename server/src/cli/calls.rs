//! `toolcrib calls`: lists calls and works on single ones.

mod answer;

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::client::Ask;
use super::failure::Failure;
use super::output::{age, duration, now_ms, number, plain, text};
use super::{Context, call, watch};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib calls
  toolcrib calls --status failed --since 1h
  toolcrib calls --run run_42 --limit 200 --json
  toolcrib calls get tc_01K… --wait 30s
  toolcrib calls events tc_01K…
  toolcrib calls result tc_01K… --pointer /rows --offset 100 --limit 20
  toolcrib calls result tc_01K… --grep 'error|timeout'
  toolcrib calls answer tc_01K… name=Ada
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
        /// Wait for the outcome, up to this long (1m if no time is given)
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "60s",
            value_parser = crate::time::duration)]
        wait: Option<Duration>,
    },
    /// Cancel a call that has not ended
    Cancel {
        /// The ticket, tc_…
        id: String,
        /// Reason, stored with the call
        #[arg(long)]
        reason: Option<String>,
    },
    /// Answer a question that a tool asked before it continues
    Answer(answer::AnswerArgs),
    /// Read the result of a call, or part of it
    Result(ResultArgs),
    /// Show the events of a call; follows a call that has not ended
    Events {
        /// The ticket, tc_…
        id: String,
    },
}

#[derive(Debug, Args)]
struct ResultArgs {
    /// The ticket, tc_…
    id: String,
    /// Part of the result, as a JSON pointer: /rows/10
    #[arg(long, value_name = "POINTER")]
    pointer: Option<String>,
    /// Index of the first item, entry, line or match
    #[arg(long, value_name = "N")]
    offset: Option<u64>,
    /// Maximum number of items, up to 1000 [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    limit: Option<u64>,
    /// Only items that match this regular expression
    #[arg(long, value_name = "REGEX")]
    grep: Option<String>,
    /// The tool's original result, if it did not match the output schema (for operators)
    #[arg(long)]
    raw: bool,
}

#[derive(Debug, Default, PartialEq, Args)]
struct Filters {
    /// PENDING, RUNNING, SUCCEEDED, FAILED, TIMEOUT or CANCELED
    #[arg(long)]
    status: Option<String>,
    /// Only calls of this tool
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// Only calls of this run
    #[arg(long, value_name = "ID")]
    run: Option<String>,
    /// Only calls created within this time: 10m, 1h, 2d
    #[arg(long, value_name = "TIME", value_parser = crate::time::duration)]
    since: Option<Duration>,
    /// Maximum number of calls, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page, with the cursor it printed
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
        Verb::Answer(args) => answer::run(context, args).await,
        Verb::Result(args) => result(context, args).await,
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
        output.note(&format!("there are more: --cursor {}", plain(cursor)));
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

/// Returns the duration of a call, up to now if it has not ended.
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

async fn result(context: &Context, args: ResultArgs) -> Result<(), Failure> {
    let ask = Ask::get(&["v1", "tool_calls", &args.id, "result"])
        .query("pointer", args.pointer)
        .query("offset", args.offset)
        .query("limit", args.limit)
        .query("grep", args.grep)
        .query("raw", args.raw.then_some(true));
    let piece = context.client()?.ask(ask).await?;
    let output = context.output;
    if output.json {
        return output.value(&piece);
    }
    match (&piece["matches"], &piece["value"], &piece["beginning"]) {
        (Value::Array(matches), ..) => {
            for found in matches {
                let line = number(found, "line").map(|n| format!(":{n}")).unwrap_or_default();
                let place = format!("{}{line}", plain(text(found, "pointer")));
                output.line(&format!("{place}  {}", shown(&found["value"])))?;
            }
        }
        (_, Value::String(lines), _) => output.line(&shown_lines(lines))?,
        (_, Value::Null, Value::String(beginning)) => {
            output.line(&format!("{}…", plain(beginning)))?
        }
        (_, value, _) => output.value(value)?,
    }
    output.note(&rest(&piece));
    Ok(())
}

/// Formats a value as one line.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => plain(text),
        other => plain(&other.to_string()),
    }
}

fn shown_lines(text: &str) -> String {
    text.lines().map(plain).collect::<Vec<_>>().join("\n")
}

/// Describes the size of a slice and the option that shows more.
fn rest(piece: &Value) -> String {
    let what = match text(piece, "type") {
        "array" => "items",
        "object" => "entries",
        "text" => "lines",
        _ => "values",
    };
    let count = number(piece, "shown").unwrap_or_default();
    let mut said = match (number(piece, "matched"), number(piece, "total")) {
        (Some(matched), _) => format!("{count} of {matched} matches"),
        (None, Some(total)) => format!("{count} of {total} {what}"),
        (None, None) => text(piece, "type").to_owned(),
    };
    if let Some(next) = piece["next_pointer"].as_str() {
        said = format!("{said}; one is too long to be shown whole: --pointer {}", plain(next));
    }
    match number(piece, "next_offset") {
        Some(next) => format!("{said}; there are more: --offset {next}"),
        None => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_says_how_to_see_more() {
        let page = json!({"type": "array", "total": 500, "shown": 20, "next_offset": 20});
        assert_eq!(rest(&page), "20 of 500 items; there are more: --offset 20");
        let found = json!({"type": "text", "total": 9, "shown": 2, "matched": 2});
        assert_eq!(rest(&found), "2 of 2 matches");
        let long = json!({"type": "array", "total": 1, "shown": 0, "next_pointer": "/0"});
        assert!(rest(&long).ends_with("--pointer /0"));
        assert_eq!(rest(&json!({"type": "number"})), "number");
    }

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
