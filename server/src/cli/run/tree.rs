//! `toolcrib runs tree`: a run with the runs and turns of the agents that it called, and theirs.

use serde_json::Value;

use super::super::CommandContext;
use super::super::client::ApiRequest;
use super::super::failure::CommandFailure;
use super::super::output::{format_duration, now_ms, sanitize_line, str_member, u64_member};

/// Maximum number of characters shown of an answer or an error.
const MAX_TEXT_CHARS: usize = 60;

pub(super) async fn show_tree(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "runs", id, "tree"]);
    let tree = context.client()?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&tree);
    }
    let mut lines = Vec::new();
    collect_lines(&tree, "", "", &mut lines);
    for line in lines {
        context.output.print_line(&line)?;
    }
    let number = |member| u64_member(&tree, member).unwrap_or_default();
    let turns = match number("turn_count") {
        0 => String::new(),
        1 => ", 1 turn of a worker".to_owned(),
        turns => format!(", {turns} turns of workers"),
    };
    let note = format!("{} runs{turns}, {} open", number("run_count"), number("open_count"));
    context.output.print_note(&note);
    Ok(())
}

/// Collects one line per run or turn: `head` precedes it, `indent` those below it.
fn collect_lines(node: &Value, head: &str, indent: &str, lines: &mut Vec<String>) {
    let described = match str_member(node, "agent_turn_id") {
        "" => describe_run(node),
        _ => describe_turn(node),
    };
    lines.push(format!("{head}{described}"));
    let children = node["children"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (n, child) in children.iter().enumerate() {
        let (branch, below) =
            if n + 1 == children.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        collect_lines(child, &format!("{indent}{branch}"), &format!("{indent}{below}"), lines);
    }
}

/// Returns the duration and the tokens of a run or turn and everything below it.
fn describe_usage(node: &Value) -> String {
    let started = u64_member(node, "created_at_ms").unwrap_or_default();
    let ended = u64_member(node, "completed_at_ms").unwrap_or_else(now_ms);
    let tokens = u64_member(&node["total"], "tokens").unwrap_or_default();
    format!("{} {tokens} tokens", format_duration(ended.saturating_sub(started)))
}

fn describe_run(node: &Value) -> String {
    let name = match str_member(node, "agent_id") {
        "" => str_member(node, "model").to_owned(),
        agent => format!("{agent} v{}", u64_member(node, "agent_version").unwrap_or_default()),
    };
    let text = match str_member(&node["error"], "message") {
        "" => str_member(node, "answer"),
        message => message,
    };
    let text: String = sanitize_line(text).chars().take(MAX_TEXT_CHARS).collect();
    format!(
        "{} {} {} {}  {text}",
        str_member(node, "run_id"),
        sanitize_line(&name),
        str_member(node, "status"),
        describe_usage(node),
    )
}

fn describe_turn(node: &Value) -> String {
    let deliverable = match str_member(node, "deliverable_card_id") {
        "" => String::new(),
        card_id => format!("card {card_id} "),
    };
    let text = format!("{deliverable}{}", str_member(node, "reason"));
    let text: String = sanitize_line(text.trim_end()).chars().take(MAX_TEXT_CHARS).collect();
    format!(
        "{} {} (worker) {} {}  {text}",
        str_member(node, "agent_turn_id"),
        sanitize_line(str_member(node, "agent_id")),
        str_member(node, "status"),
        describe_usage(node),
    )
}
