//! Displays a run: for people, the model's text on standard output and the start and end of calls
//! on standard error, with their durations; for programs, every event as a line of JSON.

use std::collections::HashMap;
use std::io::Write;

use serde_json::Value;

use super::super::failure::{CommandFailure, exit};
use super::super::output::{
    Output, TextStyle, format_duration, sanitize_line, sanitize_text, str_member, u64_member,
};

/// Maximum number of characters shown of a call's arguments.
const MAX_ARGUMENT_CHARS: usize = 100;

pub(super) struct RunView {
    output: Output,
    run_id: String,
    start_ms: Option<u64>,
    /// Arguments by the model's id for the call, until the call starts; then tool names by call id.
    call_details: HashMap<String, String>,
    /// Start times of calls, by call id.
    call_start_ms: HashMap<String, u64>,
    /// Text printed so far, by step, until the complete answer of the step arrives. A conversation
    /// in progress has its complete answers only at its end.
    printed_texts: HashMap<u64, String>,
    /// True if the start of the answer or some of its deltas were missed: deltas are then skipped
    /// until the complete answer arrives. The server does not report that a subscriber joined in
    /// the middle of an answer.
    skips_deltas: bool,
    /// The last step whose complete answer was shown.
    step: Option<u64>,
    /// True if the cursor is at the end of an unfinished line.
    is_mid_line: bool,
    final_event: Option<Value>,
    /// Number of calls whose start was shown.
    call_count: usize,
}

impl RunView {
    pub(super) fn new(output: Output) -> Self {
        Self {
            output,
            run_id: String::new(),
            start_ms: None,
            call_details: HashMap::new(),
            call_start_ms: HashMap::new(),
            printed_texts: HashMap::new(),
            skips_deltas: true,
            step: None,
            is_mid_line: false,
            final_event: None,
            call_count: 0,
        }
    }

    pub(super) fn show_event(&mut self, event: &Value) -> Result<(), CommandFailure> {
        let kind = str_member(event, "type");
        self.run_id = str_member(event, "run_id").to_owned();
        let at_ms = u64_member(event, "at_ms");
        if self.start_ms.is_none() {
            self.start_ms = at_ms;
        }
        self.call_count += usize::from(kind == "tool.call.requested");
        if matches!(kind, "run.finished" | "run.failed" | "run.canceled") {
            self.final_event = Some(event.clone());
            // The answers so far are complete. Text of the next one has the same steps.
            self.printed_texts.clear();
        } else if kind.starts_with("run.") && !is_live_only(kind) {
            // A run that had ended continues.
            self.final_event = None;
        }
        if self.output.json {
            return self.output.print_json_line(event);
        }
        match kind {
            // Each conversation under one run id numbers its steps from 1.
            "run.created" | "run.said" => {
                self.step = None;
                Ok(())
            }
            "run.asking" => {
                self.end_line()?;
                self.reset_answer(event_step(event));
                Ok(())
            }
            "run.text" if self.skips_deltas => Ok(()),
            "run.text" => {
                let text = str_member(event, "text");
                self.printed_texts.entry(event_step(event)).or_default().push_str(text);
                self.print_text(text)
            }
            "run.missed" => {
                self.skips_deltas = true;
                Ok(())
            }
            "run.asking_again" => {
                self.end_line()?;
                self.reset_answer(event_step(event));
                let wait = format_duration(u64_member(event, "wait_ms").unwrap_or_default());
                let reason = sanitize_line(str_member(&event["error"], "message"));
                self.note(&format!("{reason}; retrying in {wait}"), TextStyle::Warning);
                Ok(())
            }
            "run.replied" => self.show_reply(event),
            "run.waiting" => {
                self.note("waiting for late results", TextStyle::Dim);
                Ok(())
            }
            "run.late" => {
                let name = sanitize_line(str_member(event, "name"));
                self.note(&format!("{name}: result received"), TextStyle::Success);
                Ok(())
            }
            "run.finished" => self.show_finished(event, at_ms),
            // A run whose calls all failed ends with an answer.
            "run.failed" if event["answer"].is_string() => self.show_finished(event, at_ms),
            _ => {
                self.show_call_event(
                    kind.strip_prefix("tool.call.").unwrap_or_default(),
                    event,
                    at_ms,
                );
                Ok(())
            }
        }
    }

    /// Returns the outcome of the run, or `None` while it has not ended.
    pub(super) fn outcome(&self) -> Option<Result<(), CommandFailure>> {
        let end = self.final_event.as_ref()?;
        Some(match str_member(end, "type") {
            "run.finished" => Ok(()),
            "run.canceled" => {
                let message = format!("{} was canceled", self.run_id);
                Err(CommandFailure::new(exit::FAILURE, "CANCELED", message))
            }
            _ => {
                let error = &end["error"];
                let (code, message) = (str_member(error, "code"), str_member(error, "message"));
                let detail = error.get("detail").filter(|detail| !detail.is_null()).cloned();
                let retryable = error["retryable"] == true;
                let hint = format!(
                    "everything so far is stored; continue with: toolcrib run --resume {}",
                    self.run_id
                );
                let failure = CommandFailure::new(exit::FAILURE, code, message).hint(hint);
                Err(CommandFailure { detail, retryable, ..failure })
            }
        })
    }

    /// Shows the end of a run id that only groups calls. Returns false if it had no calls.
    pub(super) fn show_idle(&self) -> bool {
        if self.call_count > 0 && !self.output.json {
            let line = format!("{}  {} calls  none is running", self.run_id, self.call_count);
            self.note(&line, TextStyle::Dim);
        }
        self.call_count > 0
    }

    /// Handles a broken stream: the current answer will arrive again as a whole.
    pub(super) fn note_disconnect(&mut self) {
        if self.is_mid_line {
            let _ = self.end_line();
        }
        self.printed_texts.clear();
        self.skips_deltas = true;
        self.note("stream lost; reconnecting", TextStyle::Warning);
    }

    /// Starts a new answer of this step, of which nothing has been printed.
    fn reset_answer(&mut self, step: u64) {
        self.printed_texts.remove(&step);
        self.skips_deltas = false;
    }

    fn print_text(&mut self, text: &str) -> Result<(), CommandFailure> {
        self.is_mid_line = !text.ends_with('\n');
        let mut out = std::io::stdout().lock();
        write!(out, "{}", sanitize_text(text))?;
        out.flush()?;
        Ok(())
    }

    fn end_line(&mut self) -> Result<(), CommandFailure> {
        if std::mem::take(&mut self.is_mid_line) {
            writeln!(std::io::stdout())?;
        }
        Ok(())
    }

    fn show_reply(&mut self, event: &Value) -> Result<(), CommandFailure> {
        let step = u64_member(event, "step");
        // Older servers stored an answer again when they resumed the run after a crash.
        if step.is_some() && std::mem::replace(&mut self.step, step) == step {
            return Ok(());
        }
        let whole = str_member(event, "text");
        let printed = self.printed_texts.remove(&event_step(event)).unwrap_or_default();
        match whole.strip_prefix(printed.as_str()) {
            Some("") => {}
            Some(rest) => self.print_text(rest)?,
            None if whole.is_empty() => {}
            // The printed text is not the start of the answer: this subscriber missed deltas.
            None => {
                self.end_line()?;
                self.note("text is missing above; the complete answer:", TextStyle::Dim);
                self.print_text(whole)?;
            }
        }
        self.skips_deltas = true;
        self.end_line()?;
        for call in event["calls"].as_array().into_iter().flatten() {
            self.call_details.insert(
                str_member(call, "id").to_owned(),
                str_member(call, "arguments").to_owned(),
            );
        }
        Ok(())
    }

    fn show_call_event(&mut self, event_name: &str, event: &Value, at_ms: Option<u64>) {
        let id = str_member(event, "tool_call_id").to_owned();
        let tool = sanitize_line(str_member(event, "tool"));
        match event_name {
            "requested" => {
                let arguments =
                    self.call_details.remove(str_member(event, "call_id")).unwrap_or_default();
                let excerpt: String =
                    sanitize_line(&arguments).chars().take(MAX_ARGUMENT_CHARS).collect();
                let ellipsis =
                    if arguments.chars().count() > MAX_ARGUMENT_CHARS { "…" } else { "" };
                self.call_start_ms.insert(id.clone(), at_ms.unwrap_or_default());
                self.call_details.insert(id, tool.clone());
                self.note(&format!("→ {tool} {excerpt}{ellipsis}"), TextStyle::Bold);
            }
            "finished" | "failed" | "timeout" | "canceled" => {
                let began_ms = self.call_start_ms.remove(&id);
                let duration_ms = at_ms.zip(began_ms).map(|(end, began)| end.saturating_sub(began));
                let duration = duration_ms.map(format_duration).unwrap_or_default();
                let tool = self.call_details.remove(&id).unwrap_or(tool);
                let (symbol, style) = if event_name == "finished" {
                    ("✓", TextStyle::Success)
                } else {
                    ("✗", TextStyle::Error)
                };
                let error = &event["error"];
                let reason = match str_member(error, "message") {
                    "" if event_name == "finished" => String::new(),
                    "" => format!(" {event_name}"),
                    message => {
                        format!(" {}: {}", str_member(error, "code"), sanitize_line(message))
                    }
                };
                self.note(&format!("{symbol} {tool} {duration}{reason}"), style);
            }
            "retrying" | "fallback" => {
                let tool = self.call_details.get(&id).cloned().unwrap_or(tool);
                self.note(&format!("  {tool}: {event_name}"), TextStyle::Warning);
            }
            _ => {}
        }
    }

    fn show_finished(&mut self, event: &Value, at_ms: Option<u64>) -> Result<(), CommandFailure> {
        self.end_line()?;
        if let Some(limit) = event["limit"].as_str() {
            self.note(&format!("the limit of {limit} was reached"), TextStyle::Warning);
        }
        let usage = &event["usage"];
        let count = |name: &str| u64_member(usage, name).unwrap_or_default();
        let duration_ms = at_ms.zip(self.start_ms).map(|(end, began)| end.saturating_sub(began));
        let line = format!(
            "{}  {} steps  {} calls  {}  {} + {} tokens",
            self.run_id,
            u64_member(event, "steps").unwrap_or_default(),
            u64_member(event, "calls").unwrap_or_default(),
            duration_ms.map(format_duration).unwrap_or_default(),
            count("prompt_tokens"),
            count("completion_tokens"),
        );
        self.note(&line, TextStyle::Dim);
        Ok(())
    }

    fn note(&self, line: &str, style: TextStyle) {
        self.output.print_note(&self.output.paint_message(line, style));
    }
}

/// Returns the step that an event belongs to; 0 if it names none.
fn event_step(event: &Value) -> u64 {
    u64_member(event, "step").unwrap_or_default()
}

/// Returns true for events that are streamed while the model answers and are not in the journal.
/// One of them may arrive after the event that ended the run.
fn is_live_only(kind: &str) -> bool {
    matches!(kind, "run.asking" | "run.asking_again" | "run.text" | "run.missed")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_late_live_event_does_not_reopen_an_ended_run() {
        let mut view = RunView::new(Output::new(true, true));
        let event = |kind: &str| json!({ "type": kind, "run_id": "run_1", "at_ms": 1 });
        view.show_event(&event("run.finished")).unwrap();
        for kind in ["run.text", "run.asking", "run.asking_again", "run.missed"] {
            view.show_event(&event(kind)).unwrap();
            assert!(view.outcome().is_some(), "{kind}");
        }
        view.show_event(&event("run.said")).unwrap();
        assert!(view.outcome().is_none(), "a message reopens the run");
    }
}
