//! `toolcrib runs`: lists runs, and shows, follows and cancels single ones.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::super::CommandContext;
use super::super::client::ApiRequest;
use super::super::failure::CommandFailure;
use super::super::output::{
    Column, format_age, format_duration, now_ms, sanitize_line, sanitize_text, str_member,
    u64_member,
};
use super::RunWatcher;
use super::view::RunView;

/// Maximum number of characters shown of an answer in the list.
const MAX_ANSWER_CHARS: usize = 60;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib runs
  toolcrib runs ls --status failed --since 1h
  toolcrib runs show run_01K…
  toolcrib runs follow run_01K…      also the run of a chat completion
  toolcrib runs tree run_01K…        a run with the agents that it called
  toolcrib runs cancel run_01K… --reason 'no longer wanted'

`toolcrib run` starts, continues, resumes and replays runs.")]
pub struct RunsArgs {
    #[command(subcommand)]
    verb: Option<RunsCommand>,
    #[command(flatten)]
    filters: RunFilters,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// List runs, newest first
    #[command(alias = "list")]
    Ls(RunFilters),
    /// Show one run: status, answer, steps and calls
    #[command(alias = "get")]
    Show {
        /// The run, run_…
        id: String,
    },
    /// Follow a run from its start to its end
    Follow {
        /// The run, run_…
        id: String,
    },
    /// Show a run with the agents that it called, and theirs
    Tree {
        /// The run, run_…
        id: String,
    },
    /// Cancel a run and its open calls
    Cancel {
        /// The run, run_…
        id: String,
        /// Reason, stored with the run
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Debug, Default, PartialEq, Args)]
struct RunFilters {
    /// RUNNING, WAITING, SUCCEEDED, FAILED or CANCELED
    #[arg(long)]
    status: Option<String>,
    /// Only runs with this model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Only runs created within this time: 10m, 1h, 2d
    #[arg(long, value_name = "TIME", value_parser = toolcrib_protocol::duration::parse_duration)]
    since: Option<Duration>,
    /// Maximum number of runs, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page, with the cursor it printed
    #[arg(long)]
    cursor: Option<String>,
}

pub async fn run(context: &CommandContext, args: RunsArgs) -> Result<(), CommandFailure> {
    let RunsArgs { verb, filters } = args;
    let Some(verb) = verb else { return list(context, filters).await };
    if filters != RunFilters::default() {
        let message = "filters are for the list: write toolcrib runs ls --status …";
        return Err(CommandFailure::usage(message));
    }
    match verb {
        RunsCommand::Ls(filters) => list(context, filters).await,
        RunsCommand::Show { id } => show(context, &id).await,
        RunsCommand::Follow { id } => follow(context, &id).await,
        RunsCommand::Tree { id } => super::tree::show_tree(context, &id).await,
        RunsCommand::Cancel { id, reason } => cancel(context, &id, reason).await,
    }
}

async fn list(context: &CommandContext, filters: RunFilters) -> Result<(), CommandFailure> {
    let since = filters.since.map(|ago| now_ms().saturating_sub(ago.as_millis() as u64));
    let request = ApiRequest::get(&["v1", "runs"])
        .query("status", filters.status.map(|status| status.to_uppercase()))
        .query("model", filters.model)
        .query("since", since)
        .query("limit", filters.limit)
        .query("cursor", filters.cursor);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let runs = answer["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let now = now_ms();
    let columns = [
        Column::detail("AGE", 4),
        Column::id("STATUS"),
        Column::text("MODEL"),
        Column::detail("AGENT", 1),
        Column::detail("STEPS", 2),
        Column::detail("CALLS", 3),
        Column::detail("ANSWER", 5),
        Column::id("ID"),
    ];
    output.print_table(&columns, runs.iter().map(|run| row(run, now)).collect(), "no runs")?;
    output.print_next_page(&answer);
    Ok(())
}

fn row(run: &Value, now: u64) -> Vec<String> {
    let number = |member: &str| u64_member(run, member);
    let created = number("created_at_ms");
    let answer = match run["answer"].as_str() {
        Some(answer) => answer,
        None => str_member(&run["error"], "message"),
    };
    let excerpt: String = sanitize_line(answer).chars().take(MAX_ANSWER_CHARS).collect();
    vec![
        created.map(|ms| format_age(now.saturating_sub(ms))).unwrap_or_default(),
        str_member(run, "status").to_owned(),
        str_member(run, "model").to_owned(),
        str_member(run, "agent").to_owned(),
        number("step_count").map(|n| n.to_string()).unwrap_or_default(),
        calls_text(run),
        excerpt,
        str_member(run, "run_id").to_owned(),
    ]
}

/// Formats the number of calls, and of those that failed.
fn calls_text(run: &Value) -> String {
    let count = |member: &str| u64_member(run, member).unwrap_or_default();
    match count("failed_call_count") {
        0 => count("call_count").to_string(),
        failed => format!("{} ({failed} failed)", count("call_count")),
    }
}

async fn show(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let run = context.client()?.request_json(ApiRequest::get(&["v1", "runs", id])).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&run);
    }
    let number = |member: &str| u64_member(&run, member);
    let duration = number("created_at_ms").zip(number("completed_at_ms"));
    let duration = duration.map(|(from, to)| format_duration(to.saturating_sub(from)));
    let line = |name: &str, value: &str| match value {
        "" => Ok(()),
        value => output.print_line(&format!("{name:8}  {}", sanitize_line(value))),
    };
    line("run", str_member(&run, "run_id"))?;
    line("status", str_member(&run, "status"))?;
    line("model", str_member(&run, "model"))?;
    line("agent", str_member(&run, "agent"))?;
    line("time", &duration.unwrap_or_default())?;
    line("steps", &number("step_count").unwrap_or_default().to_string())?;
    line("calls", &calls_text(&run))?;
    line("tokens", &u64_member(&run["usage"], "total_tokens").unwrap_or_default().to_string())?;
    line("limit", str_member(&run, "limit_reached"))?;
    line("error", str_member(&run["error"], "message"))?;
    for waiting in run["waiting_for"].as_array().into_iter().flatten() {
        let (name, ticket) = (str_member(waiting, "name"), str_member(waiting, "tool_call_id"));
        line("waits", &format!("{name} {ticket}"))?;
    }
    for call in run["calls"].as_array().into_iter().flatten() {
        let took = u64_member(call, "latency_ms").map(format_duration).unwrap_or_default();
        let (status, tool) = (str_member(call, "status"), str_member(call, "tool_name"));
        line("call", &format!("{} {status} {tool} {took}", str_member(call, "tool_call_id")))?;
    }
    if let Some(answer) = run["answer"].as_str() {
        output.print_line(&format!("\n{}", sanitize_text(answer)))?;
    }
    Ok(())
}

async fn follow(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let mut view = RunView::new(context.output);
    RunWatcher::for_existing(&client, id).await?.watch_to_end(&client, &mut view).await
}

async fn cancel(
    context: &CommandContext,
    id: &str,
    reason: Option<String>,
) -> Result<(), CommandFailure> {
    let path = ["v1", "runs", id, "cancel"];
    let request = ApiRequest::post(&path, json!({ "reason": reason }));
    let canceled = context.client()?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&canceled);
    }
    let (run, status) = (str_member(&canceled, "run_id"), str_member(&canceled, "status"));
    context.output.print_note(&format!("{} {}", sanitize_line(run), sanitize_line(status)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_show_failures_and_tolerate_malformed_runs() {
        let run = json!({ "run_id": "run_1", "status": "FAILED", "model": "m", "agent": "a",
            "step_count": 2, "call_count": 3, "failed_call_count": 3, "created_at_ms": 1_000,
            "answer": null, "error": { "message": "All 3 tool calls failed" } });
        let cells =
            ["12s", "FAILED", "m", "a", "2", "3 (3 failed)", "All 3 tool calls failed", "run_1"];
        assert_eq!(row(&run, 13_000), cells);
        for odd in [json!(null), json!([]), json!({ "error": 5, "call_count": -1 })] {
            assert_eq!(row(&odd, 0).len(), 8);
        }
    }
}
