//! Displays a run: for people, the model's text on standard output and the start and end of calls
//! on standard error, with their durations; for programs, every event as a line of JSON.

use std::collections::HashMap;
use std::io::Write;

use serde_json::Value;

use super::super::failure::{Failure, exit};
use super::super::output::{Output, Tone, duration, number, paragraph, plain, text};

/// Maximum number of characters shown of a call's arguments.
const SHOWN: usize = 100;

pub(super) struct View {
    output: Output,
    run_id: String,
    began_ms: Option<u64>,
    /// Arguments by the model's id for the call, until the call starts; then tool names by call id.
    wanted: HashMap<String, String>,
    /// Start times of calls, by call id.
    began: HashMap<String, u64>,
    /// Text printed so far of the current answer.
    said: String,
    /// True if the start of the answer or some of its deltas were missed: deltas are then skipped
    /// until the complete answer arrives. The server does not report that a subscriber joined in
    /// the middle of an answer.
    gap: bool,
    /// The last step whose complete answer was shown.
    step: Option<u64>,
    /// True if the cursor is behind printed text.
    in_line: bool,
    end: Option<Value>,
}

impl View {
    pub(super) fn new(output: Output) -> Self {
        Self {
            output,
            run_id: String::new(),
            began_ms: None,
            wanted: HashMap::new(),
            began: HashMap::new(),
            said: String::new(),
            gap: true,
            step: None,
            in_line: false,
            end: None,
        }
    }

    pub(super) fn show(&mut self, event: &Value) -> Result<(), Failure> {
        let kind = text(event, "type");
        self.run_id = text(event, "run_id").to_owned();
        let at_ms = number(event, "at_ms");
        if self.began_ms.is_none() {
            self.began_ms = at_ms;
        }
        if matches!(kind, "run.finished" | "run.failed" | "run.canceled") {
            self.end = Some(event.clone());
        } else if kind.starts_with("run.") {
            // A run that had ended continues.
            self.end = None;
        }
        if self.output.json {
            return self.output.value_line(event);
        }
        match kind {
            "run.asking" => {
                self.begin();
                Ok(())
            }
            "run.text" if self.gap => Ok(()),
            "run.text" => self.words(text(event, "text")),
            "run.missed" => {
                self.gap = true;
                Ok(())
            }
            "run.asking_again" => {
                self.new_line()?;
                self.begin();
                let wait = duration(number(event, "wait_ms").unwrap_or_default());
                let why = plain(text(&event["error"], "message"));
                self.note(&format!("{why}; asking again in {wait}"), Tone::Doubtful);
                Ok(())
            }
            "run.replied" => self.replied(event),
            "run.waiting" => {
                self.note("waiting for results that come late", Tone::Quiet);
                Ok(())
            }
            "run.late" => {
                let name = plain(text(event, "name"));
                self.note(&format!("{name}: its result has come"), Tone::Good);
                Ok(())
            }
            "run.finished" => self.finished(event, at_ms),
            _ => {
                self.call(kind.strip_prefix("tool.call.").unwrap_or_default(), event, at_ms);
                Ok(())
            }
        }
    }

    /// Returns the outcome of the run, or `None` while it has not ended.
    pub(super) fn end(&self) -> Option<Result<(), Failure>> {
        let end = self.end.as_ref()?;
        Some(match text(end, "type") {
            "run.finished" => Ok(()),
            "run.canceled" => {
                let message = format!("{} was canceled", self.run_id);
                Err(Failure::new(exit::FAILURE, "CANCELED", message))
            }
            _ => {
                let error = &end["error"];
                let (code, message) = (text(error, "code"), text(error, "message"));
                let detail = error.get("detail").filter(|detail| !detail.is_null()).cloned();
                let retryable = error["retryable"] == true;
                let hint = format!(
                    "everything so far is kept; toolcrib run --resume {} goes on",
                    self.run_id
                );
                let failure = Failure::new(exit::FAILURE, code, message).hint(hint);
                Err(Failure { detail, retryable, ..failure })
            }
        })
    }

    /// Handles a broken stream: the current answer will arrive again as a whole.
    pub(super) fn broken(&mut self) {
        if self.in_line {
            let _ = self.new_line();
        }
        self.begin();
        self.gap = true;
        self.note("stream lost; connecting again", Tone::Doubtful);
    }

    /// Starts a new answer, of which nothing has been printed.
    fn begin(&mut self) {
        self.said.clear();
        self.gap = false;
    }

    fn words(&mut self, words: &str) -> Result<(), Failure> {
        self.said.push_str(words);
        self.in_line = !words.ends_with('\n');
        let mut out = std::io::stdout().lock();
        write!(out, "{}", paragraph(words))?;
        out.flush()?;
        Ok(())
    }

    fn new_line(&mut self) -> Result<(), Failure> {
        if std::mem::take(&mut self.in_line) {
            writeln!(std::io::stdout())?;
        }
        Ok(())
    }

    fn replied(&mut self, event: &Value) -> Result<(), Failure> {
        let step = number(event, "step");
        // Older servers stored an answer again when they resumed the run after a crash.
        if step.is_some() && std::mem::replace(&mut self.step, step) == step {
            return Ok(());
        }
        let whole = text(event, "text");
        match whole.strip_prefix(self.said.as_str()) {
            Some("") => {}
            Some(rest) => self.words(rest)?,
            None if whole.is_empty() => {}
            // The printed text is not the start of the answer: this subscriber missed deltas.
            None => {
                self.new_line()?;
                self.note("words are missing above; the answer from its beginning:", Tone::Quiet);
                self.words(whole)?;
            }
        }
        self.begin();
        self.gap = true;
        self.new_line()?;
        for call in event["calls"].as_array().into_iter().flatten() {
            self.wanted.insert(text(call, "id").to_owned(), text(call, "arguments").to_owned());
        }
        Ok(())
    }

    fn call(&mut self, word: &str, event: &Value, at_ms: Option<u64>) {
        let id = text(event, "tool_call_id").to_owned();
        let tool = plain(text(event, "tool"));
        match word {
            "requested" => {
                let arguments = self.wanted.remove(text(event, "call_id")).unwrap_or_default();
                let shown: String = plain(&arguments).chars().take(SHOWN).collect();
                let more = if arguments.chars().count() > SHOWN { "…" } else { "" };
                self.began.insert(id.clone(), at_ms.unwrap_or_default());
                self.wanted.insert(id, tool.clone());
                self.note(&format!("→ {tool} {shown}{more}"), Tone::Strong);
            }
            "finished" | "failed" | "timeout" | "canceled" => {
                let began_ms = self.began.remove(&id);
                let took_ms = at_ms.zip(began_ms).map(|(at, began)| at.saturating_sub(began));
                let took = took_ms.map(duration).unwrap_or_default();
                let tool = self.wanted.remove(&id).unwrap_or(tool);
                let (mark, tone) =
                    if word == "finished" { ("✓", Tone::Good) } else { ("✗", Tone::Bad) };
                let error = &event["error"];
                let why = match text(error, "message") {
                    "" if word == "finished" => String::new(),
                    "" => format!(" {word}"),
                    message => format!(" {}: {}", text(error, "code"), plain(message)),
                };
                self.note(&format!("{mark} {tool} {took}{why}"), tone);
            }
            "retrying" | "fallback" => {
                let tool = self.wanted.get(&id).cloned().unwrap_or(tool);
                self.note(&format!("  {tool}: {word}"), Tone::Doubtful);
            }
            _ => {}
        }
    }

    fn finished(&mut self, event: &Value, at_ms: Option<u64>) -> Result<(), Failure> {
        self.new_line()?;
        if let Some(limit) = event["limit"].as_str() {
            self.note(&format!("the limit of {limit} was reached"), Tone::Doubtful);
        }
        let usage = &event["usage"];
        let count = |name: &str| number(usage, name).unwrap_or_default();
        let took_ms = at_ms.zip(self.began_ms).map(|(at, began)| at.saturating_sub(began));
        let line = format!(
            "{}  {} steps  {} calls  {}  {} + {} tokens",
            self.run_id,
            number(event, "steps").unwrap_or_default(),
            number(event, "calls").unwrap_or_default(),
            took_ms.map(duration).unwrap_or_default(),
            count("prompt_tokens"),
            count("completion_tokens"),
        );
        self.note(&line, Tone::Quiet);
        Ok(())
    }

    fn note(&self, line: &str, tone: Tone) {
        self.output.note(&self.output.message_tone(line, tone));
    }
}
