//! Renders pending calls, grouped by tool: in as much detail as a budget allows.

use std::collections::HashSet;

use super::text::{LINE_TOKENS, format_elapsed, one_line, truncate_to_tokens};
use super::{ToolCall, ToolCallContext};
use crate::domain::call::Status;
use crate::domain::id::CallId;
use crate::registry::model_tool_names;
use crate::results::tokens;

/// Maximum tokens of a call's arguments in a group.
const GROUPED_ARGUMENT_TOKENS: usize = 8;

/// Number of ids that a group shows if not all of them fit.
const SAMPLE_IDS: usize = 3;

const STATE_TITLE: &str = "Pending tool calls. Their results come later by themselves: do not call \
                           them again, and do not make up their results.";

/// Detail in which the pending calls of one tool are shown, from the most to the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingDetail {
    /// One line per call, with its arguments.
    Lines,
    /// One line per tool, with the id and the start of the arguments of each call.
    Arguments,
    /// One line per tool, with the id of each call.
    Ids,
    /// One line per tool, with some ids.
    Sample,
    /// One line per tool, with the number of calls.
    Count,
}

impl PendingDetail {
    pub(super) const ALL: [Self; 5] =
        [Self::Lines, Self::Arguments, Self::Ids, Self::Sample, Self::Count];
}

/// A line of a prompt and the number of calls that it stands for.
pub(super) struct PendingLine {
    pub(super) text: String,
    pub(super) calls: usize,
}

/// Renders pending calls; `model_name` returns the model-facing name of a tool.
pub(super) fn pending_lines<'a>(
    calls: impl Iterator<Item = &'a ToolCall>,
    detail: PendingDetail,
    now_ms: u64,
    model_name: impl Fn(&str) -> String,
) -> Vec<PendingLine> {
    if detail == PendingDetail::Lines {
        let line = |call: &ToolCall| PendingLine {
            text: call_line(call, &model_name(&call.name), now_ms),
            calls: 1,
        };
        return calls.map(line).collect();
    }
    let mut groups: Vec<Vec<&ToolCall>> = Vec::new();
    for call in calls {
        match groups.iter_mut().find(|group| group[0].name == call.name) {
            Some(group) => group.push(call),
            None => groups.push(vec![call]),
        }
    }
    let line = |group: Vec<&ToolCall>| PendingLine {
        text: group_line(&group, &model_name(&group[0].name), detail, now_ms),
        calls: group.len(),
    };
    groups.into_iter().map(line).collect()
}

fn call_line(call: &ToolCall, name: &str, now_ms: u64) -> String {
    let kind = if call.background { "async, in the background" } else { "sync" };
    let state = match state_text(call) {
        RUNNING => String::new(),
        other => format!(", {other}"),
    };
    let args = truncate_to_tokens(&one_line(call.args.text()), LINE_TOKENS);
    let since =
        call.created_ms.map(|at_ms| format!(", pending for {}", format_elapsed(at_ms, now_ms)));
    let since = since.unwrap_or_default();
    format!("- {name} ({kind}), call_id {}{state}{since}: {args}", call.call_id)
}

fn group_line(group: &[&ToolCall], name: &str, detail: PendingDetail, now_ms: u64) -> String {
    if detail == PendingDetail::Count {
        return format!("- {name} × {}", group.len());
    }
    let kind = match group.iter().filter(|call| call.background).count() {
        0 => "sync",
        count if count == group.len() => "async",
        _ => "sync and async",
    };
    let ids = group.iter().map(|call| match detail {
        PendingDetail::Arguments => {
            let args = one_line(call.args.text());
            format!("{} {}", call.call_id, truncate_to_tokens(&args, GROUPED_ARGUMENT_TOKENS))
        }
        _ => call.call_id.clone(),
    });
    let ids: Vec<String> = match detail {
        PendingDetail::Sample => ids.take(SAMPLE_IDS).collect(),
        _ => ids.collect(),
    };
    let separator = if detail == PendingDetail::Arguments { "; " } else { ", " };
    let more = match group.len() - ids.len() {
        0 => String::new(),
        omitted => format!(" and {omitted} more"),
    };
    format!(
        "- {name} ({kind}) × {}, {}{}: {}{more}",
        group.len(),
        group_state(group),
        group_age(group, now_ms),
        ids.join(separator)
    )
}

const RUNNING: &str = "running";

/// Returns the state of a pending call in words.
fn state_text(call: &ToolCall) -> &'static str {
    match call.status {
        _ if call.awaits_approval => "waiting for approval",
        Status::Pending => "queued",
        _ => RUNNING,
    }
}

fn group_state(group: &[&ToolCall]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for state in group.iter().map(|call| state_text(call)) {
        match counts.iter_mut().find(|(known, _)| *known == state) {
            Some((_, count)) => *count += 1,
            None => counts.push((state, 1)),
        }
    }
    match counts.as_slice() {
        [(state, _)] => (*state).to_owned(),
        _ => {
            let states = counts.iter().map(|(state, count)| format!("{count} {state}"));
            states.collect::<Vec<_>>().join(", ")
        }
    }
}

fn group_age(group: &[&ToolCall], now_ms: u64) -> String {
    let times = || group.iter().filter_map(|call| call.created_ms);
    let (Some(oldest), Some(newest)) = (times().min(), times().max()) else {
        return String::new();
    };
    let (longest, shortest) = (format_elapsed(oldest, now_ms), format_elapsed(newest, now_ms));
    match longest == shortest {
        true => format!(" for {longest}"),
        false => format!(" for {shortest} to {longest}"),
    }
}

impl ToolCallContext {
    /// Renders the state of the pending background calls, and of those in `late`, grouped by tool
    /// in at most `budget_tokens` tokens as of `now_ms`. Returns `None` if there are none.
    pub fn pending_state(
        &self,
        late: &[CallId],
        budget_tokens: usize,
        now_ms: u64,
    ) -> Option<String> {
        let late: HashSet<&CallId> = late.iter().collect();
        let is_late = |call: &ToolCall| {
            call.background || call.tool_call_id.as_ref().is_some_and(|id| late.contains(id))
        };
        let calls: Vec<&ToolCall> = self.pending_calls().filter(|call| is_late(call)).collect();
        if calls.is_empty() {
            return None;
        }
        let render = |lines: &[PendingLine]| {
            let mut text = format!("{STATE_TITLE}\n");
            for line in lines {
                text.push_str(&line.text);
                text.push('\n');
            }
            let omitted = calls.len() - lines.iter().map(|line| line.calls).sum::<usize>();
            if omitted > 0 {
                text.push_str(&format!("and {omitted} more\n"));
            }
            text
        };
        let mut lines = Vec::new();
        for detail in PendingDetail::ALL {
            let name = model_tool_names::name_for_model;
            lines = pending_lines(calls.iter().copied(), detail, now_ms, name);
            let text = render(&lines);
            if !tokens::exceeds(&text, budget_tokens) {
                return Some(text);
            }
        }
        while lines.pop().is_some() {
            let text = render(&lines);
            if !tokens::exceeds(&text, budget_tokens) {
                return Some(text);
            }
        }
        let count = format!("{} tool calls are pending.\n", calls.len());
        Some(tokens::prefix_within(&count, budget_tokens).to_owned())
    }
}
