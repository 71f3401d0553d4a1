//! `toolcrib calls`: lists calls and works on single ones.

mod answer;
pub(super) mod approvals;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::client::ApiRequest;
use super::failure::CommandFailure;
use super::output::{
    Column, format_age, format_duration, now_ms, sanitize_line, str_member, u64_member,
};
use super::{CommandContext, outcome, watch};

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
  toolcrib calls result tc_01K… --where '{\"status\":\"open\",\"sum\":{\"gt\":100}}' --select id,sum
  toolcrib calls result tc_01K… --aggregate sum:amount,count --group-by city
  toolcrib calls answer tc_01K… name=Ada
  toolcrib calls cancel tc_01K… --reason 'no longer wanted'")]
pub struct CallsArgs {
    #[command(subcommand)]
    verb: Option<CallsCommand>,
    #[command(flatten)]
    filters: CallFilters,
}

#[derive(Debug, Subcommand)]
enum CallsCommand {
    /// List calls, newest first
    #[command(alias = "list")]
    Ls(CallFilters),
    /// Show one call
    Get {
        /// The ticket, tc_…
        id: String,
        /// Wait for the outcome, up to this long (1m if no time is given)
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "60s",
            value_parser = toolcrib_protocol::duration::parse_duration)]
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
    Result(ReadResultArgs),
    /// Show the events of a call; follows a call that has not ended
    Events {
        /// The ticket, tc_…
        id: String,
    },
}

#[derive(Debug, Args)]
struct ReadResultArgs {
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
    /// Conditions on the rows of a table, as JSON: {"status":"open","sum":{"gt":10}}
    #[arg(long = "where", value_name = "JSON")]
    conditions: Option<String>,
    /// Columns of the rows: id,name
    #[arg(long, value_name = "COLUMNS")]
    select: Option<String>,
    /// Figures over the rows: count, sum:amount, min:…, max:…, avg:…
    #[arg(long, value_name = "FIGURES")]
    aggregate: Option<String>,
    /// Columns that group the figures
    #[arg(long, value_name = "COLUMNS")]
    group_by: Option<String>,
    /// The tool's original result, if it did not match the output schema (for operators)
    #[arg(long)]
    raw: bool,
}

#[derive(Debug, Default, PartialEq, Args)]
struct CallFilters {
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
    #[arg(long, value_name = "TIME", value_parser = toolcrib_protocol::duration::parse_duration)]
    since: Option<Duration>,
    /// Maximum number of calls, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page, with the cursor it printed
    #[arg(long)]
    cursor: Option<String>,
}

pub async fn run(context: &CommandContext, args: CallsArgs) -> Result<(), CommandFailure> {
    let CallsArgs { verb, filters } = args;
    let Some(verb) = verb else { return list(context, filters).await };
    if filters != CallFilters::default() {
        let message = "filters are for the list: write toolcrib calls ls --status …";
        return Err(CommandFailure::usage(message));
    }
    match verb {
        CallsCommand::Ls(filters) => list(context, filters).await,
        CallsCommand::Get { id, wait } => get(context, &id, wait).await,
        CallsCommand::Cancel { id, reason } => cancel(context, &id, reason).await,
        CallsCommand::Answer(args) => answer::run(context, args).await,
        CallsCommand::Result(args) => print_result(context, args).await,
        CallsCommand::Events { id } => watch::call_events(context, &id).await,
    }
}

async fn list(context: &CommandContext, filters: CallFilters) -> Result<(), CommandFailure> {
    let since = filters.since.map(|ago| now_ms().saturating_sub(ago.as_millis() as u64));
    let request = ApiRequest::get(&["v1", "tool_calls"])
        .query("status", filters.status.map(|status| status.to_uppercase()))
        .query("tool_name", filters.tool)
        .query("run_id", filters.run)
        .query("since", since)
        .query("limit", filters.limit)
        .query("cursor", filters.cursor);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let calls = answer["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let now = now_ms();
    let columns = [
        Column::detail("AGE", 4),
        Column::id("STATUS"),
        Column::text("TOOL"),
        Column::detail("SOURCE", 1),
        Column::detail("ATTEMPT", 2),
        Column::detail("TIME", 3),
        Column::detail("ERROR", 5),
        Column::id("ID"),
    ];
    let rows = calls.iter().map(|call| row(call, now)).collect();
    output.print_table(&columns, rows, "no calls")?;
    output.print_next_page(&answer);
    Ok(())
}

fn row(call: &Value, now: u64) -> Vec<String> {
    let created = u64_member(call, "created_at_ms");
    vec![
        created.map(|ms| format_age(now.saturating_sub(ms))).unwrap_or_default(),
        str_member(call, "status").to_owned(),
        str_member(call, "tool_name").to_owned(),
        str_member(call, "source").to_owned(),
        u64_member(call, "attempt").map(|n| n.to_string()).unwrap_or_default(),
        outcome::elapsed_ms(call).map(format_duration).unwrap_or_default(),
        str_member(&call["error"], "code").to_owned(),
        str_member(call, "tool_call_id").to_owned(),
    ]
}

async fn get(
    context: &CommandContext,
    id: &str,
    wait: Option<Duration>,
) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let found = client.request_json(ApiRequest::get(&["v1", "tool_calls", id])).await?;
    let Some(wait) = wait else {
        context.output.print_note(&outcome::summary_line(context, &found));
        if let Some(detail) = outcome::hold_detail(&found) {
            context.output.print_note(&detail);
        }
        return context.output.print_json(&found);
    };
    let spinner = context.output.start_spinner(id);
    let ended =
        outcome::await_outcome(context.output, &client, &spinner, found, Instant::now() + wait)
            .await;
    spinner.finish_and_clear();
    outcome::print_outcome(context, &ended?, wait)
}

async fn cancel(
    context: &CommandContext,
    id: &str,
    reason: Option<String>,
) -> Result<(), CommandFailure> {
    let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let path = ["v1", "tool_calls", id, "cancel"];
    let canceled = context.client()?.request_json(ApiRequest::post(&path, body)).await?;
    if context.output.json {
        return context.output.print_json(&canceled);
    }
    context.output.print_note(&outcome::summary_line(context, &canceled));
    Ok(())
}

async fn print_result(
    context: &CommandContext,
    args: ReadResultArgs,
) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "tool_calls", &args.id, "result"])
        .query("pointer", args.pointer)
        .query("offset", args.offset)
        .query("limit", args.limit)
        .query("grep", args.grep)
        .query("where", args.conditions)
        .query("select", args.select)
        .query("aggregate", args.aggregate)
        .query("group_by", args.group_by)
        .query("raw", args.raw.then_some(true));
    let slice = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&slice);
    }
    match (&slice["matches"], &slice["value"], &slice["beginning"]) {
        (Value::Array(matches), ..) => {
            for found in matches {
                let line = u64_member(found, "line").map(|n| format!(":{n}")).unwrap_or_default();
                let location = format!("{}{line}", sanitize_line(str_member(found, "pointer")));
                output.print_line(&format!("{location}  {}", format_value(&found["value"])))?;
            }
        }
        (_, Value::String(lines), _) => output.print_line(&format_lines(lines))?,
        (_, Value::Null, Value::String(beginning)) => {
            output.print_line(&format!("{}…", sanitize_line(beginning)))?
        }
        (_, value, _) => output.print_json(value)?,
    }
    output.print_note(&slice_note(&slice));
    Ok(())
}

/// Formats a value as one line.
fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => sanitize_line(text),
        other => sanitize_line(&other.to_string()),
    }
}

fn format_lines(text: &str) -> String {
    text.lines().map(sanitize_line).collect::<Vec<_>>().join("\n")
}

/// Describes the size of a slice and the option that shows more.
fn slice_note(slice: &Value) -> String {
    let unit = match str_member(slice, "type") {
        "array" => "items",
        "object" => "entries",
        "text" => "lines",
        _ => "values",
    };
    let count = u64_member(slice, "shown").unwrap_or_default();
    let mut note = match (u64_member(slice, "matched"), u64_member(slice, "total")) {
        (Some(matched), _) => format!("{count} of {matched} matches"),
        (None, Some(total)) => format!("{count} of {total} {unit}"),
        (None, None) => str_member(slice, "type").to_owned(),
    };
    if let Some(next) = slice["next_pointer"].as_str() {
        note =
            format!("{note}; one is too long to be shown whole: --pointer {}", sanitize_line(next));
    }
    match u64_member(slice, "next_offset") {
        Some(next) => format!("{note}; there are more: --offset {next}"),
        None => note,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slice_note_states_how_to_read_more() {
        let page = json!({"type": "array", "total": 500, "shown": 20, "next_offset": 20});
        assert_eq!(slice_note(&page), "20 of 500 items; there are more: --offset 20");
        let found = json!({"type": "text", "total": 9, "shown": 2, "matched": 2});
        assert_eq!(slice_note(&found), "2 of 2 matches");
        let long = json!({"type": "array", "total": 1, "shown": 0, "next_pointer": "/0"});
        assert!(slice_note(&long).ends_with("--pointer /0"));
        assert_eq!(slice_note(&json!({"type": "number"})), "number");
    }

    #[test]
    fn rows_tolerate_malformed_calls() {
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
