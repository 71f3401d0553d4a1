//! Output of commands: data on standard output, everything else on standard error.
//!
//! Names, ids and messages come from other programs, so output for people replaces control
//! characters: foreign text must not move the cursor of this terminal.

mod table;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::failure::CommandFailure;
pub use table::Column;
use table::render_table;

/// Output settings of this process.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
    colour: bool,
    colour_messages: bool,
}

/// Text styles by meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStyle {
    Success,
    Error,
    Warning,
    Dim,
    Bold,
}

impl TextStyle {
    fn code(self) -> &'static str {
        match self {
            Self::Success => "32",
            Self::Error => "31",
            Self::Warning => "33",
            Self::Dim => "2",
            Self::Bold => "1",
        }
    }
}

impl Output {
    pub fn new(json: bool, no_color: bool) -> Self {
        // As no-color.org defines it: set to a non-empty value.
        let unwanted = no_color || std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Self {
            json,
            colour: !unwanted && io::stdout().is_terminal(),
            colour_messages: !unwanted && io::stderr().is_terminal(),
        }
    }

    /// Returns true if a person reads the messages: standard error is a terminal and `--json` is
    /// off.
    pub fn is_interactive(self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    /// Prints a line of data.
    pub fn print_line(self, text: &str) -> Result<(), CommandFailure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()?;
        Ok(())
    }

    /// Prints a value as indented JSON.
    pub fn print_json(self, value: &Value) -> Result<(), CommandFailure> {
        self.print_line(&pretty_json(value))
    }

    /// Prints a value as one line of JSON, for programs that read line by line.
    pub fn print_json_line(self, value: &Value) -> Result<(), CommandFailure> {
        self.print_line(&escape_control_chars(&value.to_string()))
    }

    /// Prints a message to standard error, except with `--json`.
    pub fn print_note(self, text: &str) {
        if !self.json {
            // A closed standard error is no reason to fail.
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Prints how to continue a list, if its answer has another page.
    pub fn print_next_page(self, answer: &Value) {
        if let Some(cursor) = answer["next_cursor"].as_str() {
            self.print_note(&format!("there are more: --cursor {}", sanitize_line(cursor)));
        }
    }

    /// Prints the failure of a command.
    pub fn print_failure(self, failure: &CommandFailure) {
        if failure.is_reported {
            return;
        }
        let mut err = io::stderr().lock();
        // If standard error is closed, only the exit code reports the failure.
        let _ = if self.json {
            writeln!(err, "{}", escape_control_chars(&failure.json().to_string()))
        } else {
            let error = self.paint_message("error:", TextStyle::Error);
            writeln!(err, "{error} {}", sanitize_text(&failure.message)).and_then(|()| {
                match &failure.hint {
                    Some(hint) => {
                        let word = self.paint_message("hint: ", TextStyle::Warning);
                        writeln!(err, "{word} {}", sanitize_text(hint))
                    }
                    None => Ok(()),
                }
            })
        };
    }

    /// Prints a table that fits the terminal, and sanitizes its cells. Prints the note `none` if
    /// there are no rows.
    pub fn print_table(
        self,
        columns: &[Column],
        rows: Vec<Vec<String>>,
        none: &str,
    ) -> Result<(), CommandFailure> {
        if rows.is_empty() {
            self.print_note(none);
            return Ok(());
        }
        let table = render_table(columns, &rows, self.colour, terminal_width());
        self.print_line(&table.text)?;
        if !table.hidden.is_empty() {
            let hidden = table.hidden.join(", ");
            self.print_note(&format!("hidden: {hidden} (see --json)"));
        }
        Ok(())
    }

    /// Styles text for standard output.
    pub fn paint(self, text: &str, tone: TextStyle) -> String {
        apply_style(text, tone, self.colour)
    }

    /// Styles text for standard error.
    pub fn paint_message(self, text: &str, tone: TextStyle) -> String {
        apply_style(text, tone, self.colour_messages)
    }

    /// Shows a spinner during a wait; hidden when the output is not interactive.
    pub fn start_spinner(self, message: &str) -> ProgressBar {
        if !self.is_interactive() {
            return ProgressBar::hidden();
        }
        let spinner = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            spinner.set_style(style);
        }
        spinner.set_message(sanitize_line(message));
        spinner.enable_steady_tick(std::time::Duration::from_millis(100));
        spinner
    }
}

/// Returns the width of the terminal that shows standard output: `COLUMNS`, if it is set, or the
/// terminal's own. Output to a file or a program has no limit.
pub fn terminal_width() -> Option<u16> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let variable = std::env::var("COLUMNS").ok().and_then(|text| text.trim().parse().ok());
    variable.filter(|width| *width > 0).or_else(|| comfy_table::Table::new().width())
}

fn apply_style(text: &str, tone: TextStyle, is_enabled: bool) -> String {
    if is_enabled { format!("\u{1b}[{}m{text}\u{1b}[0m", tone.code()) } else { text.to_owned() }
}

/// Returns the text as one line without control characters.
pub fn sanitize_line(text: &str) -> String {
    text.chars().map(replace_control_char).collect()
}

/// Same as [`sanitize_line`], but keeps line breaks.
pub fn sanitize_text(text: &str) -> String {
    text.chars().map(|c| if c == '\n' { c } else { replace_control_char(c) }).collect()
}

fn replace_control_char(c: char) -> char {
    match c {
        '\n' | '\r' | '\t' => ' ',
        // Bidirectional marks can make one text look like another.
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        c if c.is_control() => '\u{fffd}',
        c => c,
    }
}

/// Formats a value as indented JSON.
pub fn pretty_json(value: &Value) -> String {
    escape_control_chars(&serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string()))
}

/// Escapes control characters beyond ASCII, which JSON permits unescaped and some terminals obey.
/// They only occur within strings, so the escape does not change the value.
fn escape_control_chars(json: &str) -> String {
    let obeyed = |c: char| matches!(c, '\u{7f}'..='\u{9f}' | '\u{202a}'..='\u{202e}');
    if !json.contains(obeyed) {
        return json.to_owned();
    }
    let mut text = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if obeyed(c) {
            text.push_str(&format!("\\u{:04x}", c as u32));
        } else {
            text.push(c);
        }
    }
    text
}

/// Returns the string member of an object, or "".
pub fn str_member<'v>(value: &'v Value, member: &str) -> &'v str {
    value.get(member).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the number member of an object.
pub fn u64_member(value: &Value, member: &str) -> Option<u64> {
    value.get(member).and_then(Value::as_u64)
}

/// Formats an age: `12s`, `3m`, `5h`, `2d`.
pub fn format_age(ms: u64) -> String {
    match ms / 1_000 {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3_600 => format!("{}m", seconds / 60),
        seconds @ 3_600..86_400 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// Formats a duration: `212 ms`, `3.4 s`, `12 min`.
pub fn format_duration(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{:.1} s", ms as f64 / 1_000.0),
        _ => format!("{} min", ms / 60_000),
    }
}

/// Formats a size: `21.3 MiB`.
pub fn format_bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let (mut size, mut unit) = (count as f64, 0);
    while size >= 1_024.0 && unit + 1 < UNITS.len() {
        size /= 1_024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} bytes") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// Returns the current time in Unix milliseconds.
pub fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default()
}

/// Formats a time in the local time zone: `2026-05-01 12:03:04`. Returns "" for a time out of
/// range.
pub fn format_local_time(ms: u64) -> String {
    to_local_time(ms).map(|time| time.strftime("%Y-%m-%d %H:%M:%S").to_string()).unwrap_or_default()
}

/// Formats a time of day in the local time zone: `12:03:04.123`.
pub fn format_clock_time(ms: u64) -> String {
    to_local_time(ms).map(|time| time.strftime("%H:%M:%S%.3f").to_string()).unwrap_or_default()
}

fn to_local_time(ms: u64) -> Option<jiff::Zoned> {
    let timestamp = jiff::Timestamp::from_millisecond(i64::try_from(ms).ok()?).ok()?;
    Some(timestamp.to_zoned(jiff::tz::TimeZone::system()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_removed_from_output() {
        assert_eq!(sanitize_line("a\u{1b}[2Jb\nc\u{9b}d"), "a\u{fffd}[2Jb c\u{fffd}d");
        let json = pretty_json(&Value::from("x\u{9b}y\u{1b}"));
        assert_eq!(json, "\"x\\u009by\\u001b\"");
        let back: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(back, "x\u{9b}y\u{1b}");
    }

    #[test]
    fn times_and_sizes_are_formatted() {
        assert_eq!(
            [format_age(0), format_age(61_000), format_age(7_200_000), format_age(200_000_000)],
            ["0s", "1m", "2h", "2d"]
        );
        assert_eq!(
            [format_duration(212), format_duration(3_400), format_duration(720_000)],
            ["212 ms", "3.4 s", "12 min"]
        );
        assert_eq!([format_bytes(5), format_bytes(2 << 20)], ["5 bytes", "2.0 MiB"]);
        assert_eq!(format_local_time(u64::MAX), "");
        assert_eq!(format_clock_time(1_500).len(), "00:00:01.500".len());
    }
}
