//! Recognizes the kind of a text (a log, a diff, Markdown, a stack trace, HTML, binary data) and
//! states the facts that each kind has beyond its lines.

use std::collections::HashMap;
use std::fmt::Write;

use super::binary::{self, BinaryContent};
use super::html::{self, HtmlText};
use crate::results::text_lines::plain_lines;
use crate::results::tokens;

/// Lines that are compared to recognize a kind.
const COMPARED_LINES: usize = 300;
/// Bytes of a line in which its level is searched.
const LEVEL_BYTES: usize = 120;
/// Maximum number of different messages that are counted.
const MAX_MESSAGES: usize = 400;

/// Levels of log lines, the most severe first.
const LEVELS: [(&str, &str); 9] = [
    ("FATAL", "FATAL"),
    ("CRITICAL", "CRITICAL"),
    ("ERROR", "ERROR"),
    ("WARN", "WARN"),
    ("WARNING", "WARN"),
    ("NOTICE", "NOTICE"),
    ("INFO", "INFO"),
    ("DEBUG", "DEBUG"),
    ("TRACE", "TRACE"),
];

/// The kind of a text.
pub(super) enum TextKind {
    Plain,
    Log,
    Diff,
    Markdown,
    StackTrace,
    Html(Box<HtmlText>),
    Binary(BinaryContent),
}

impl TextKind {
    pub(super) fn detect(text: &str) -> Self {
        if let Some(content) = binary::detect_base64(text).or_else(|| binary::detect_binary(text)) {
            return Self::Binary(content);
        }
        if html::is_html(text) {
            return Self::Html(Box::new(html::extract_text(text)));
        }
        let begin = text.lines().filter(|line| !line.trim().is_empty()).take(COMPARED_LINES);
        let lines: Vec<&str> = begin.collect();
        let count = |matches: fn(&str) -> bool| lines.iter().filter(|line| matches(line)).count();
        let starts = |prefix: &str| lines.iter().any(|line| line.starts_with(prefix));
        let frames = count(is_stack_frame);
        if starts("@@ ") && starts("+++ ") || starts("diff --git ") {
            Self::Diff
        } else if lines.len() >= 4 && count(is_log_line) * 2 > lines.len() {
            Self::Log
        } else if frames >= 3 && count(is_exception_line) > 0 {
            Self::StackTrace
        } else if count(is_heading) >= 2 && count(is_heading) * 2 < lines.len() {
            Self::Markdown
        } else {
            Self::Plain
        }
    }

    /// Returns the name of the kind for the header of a digest.
    pub(super) fn describe(&self, lines: usize) -> String {
        match self {
            Self::Plain => format!("{lines} lines of text"),
            Self::Log => format!("a log of {lines} lines"),
            Self::Diff => format!("a diff of {lines} lines"),
            Self::Markdown => format!("Markdown, {lines} lines of text"),
            Self::StackTrace => format!("a stack trace, {lines} lines of text"),
            Self::Html(_) => format!("HTML, {lines} lines"),
            Self::Binary(_) => "binary data".to_owned(),
        }
    }

    /// Returns the facts about the whole text, in at most `budget` tokens.
    pub(super) fn facts(&self, text: &str, budget: usize) -> String {
        let mut facts = FactWriter { text: String::new(), budget };
        match self {
            Self::Plain => {}
            Self::Log => {
                describe_log(text, &mut facts);
                describe_exceptions(text, &mut facts);
            }
            Self::Diff => describe_diff(text, &mut facts),
            Self::Markdown => describe_outline(text, &mut facts),
            Self::StackTrace => describe_exceptions(text, &mut facts),
            Self::Html(page) => describe_page(page, &mut facts),
            Self::Binary(content) => {
                facts.push(&content.description);
            }
        }
        facts.text
    }
}

/// Collects facts as long as they fit.
struct FactWriter {
    text: String,
    budget: usize,
}

impl FactWriter {
    /// Adds a line; returns false if it does not fit.
    fn push(&mut self, line: &str) -> bool {
        let longer = format!("{}{line}\n", self.text);
        let fits = !tokens::exceeds(&longer, self.budget);
        if fits {
            self.text = longer;
        }
        fits
    }

    /// Adds a line with as many of the parts as fit, and marks the others.
    fn push_list(&mut self, title: &str, separator: &str, parts: &[String]) {
        let mut line = title.to_owned();
        let mut used = tokens::count(&self.text) + tokens::count(title) + 8;
        for (n, part) in parts.iter().enumerate() {
            let before = if n > 0 { separator } else { " " };
            let longer = format!("{before}{part}");
            used += tokens::count(&longer);
            if used > self.budget {
                if n > 0 {
                    let _ = write!(line, "{separator}… {} more", parts.len() - n);
                    self.push(&line);
                }
                return;
            }
            line.push_str(&longer);
        }
        if !parts.is_empty() {
            self.push(&line);
        }
    }
}

/// Returns the level of a log line.
fn line_level(line: &str) -> Option<&'static str> {
    // Works on bytes, because a log can have hundreds of thousands of lines.
    let begin = &line.as_bytes()[..line.len().min(LEVEL_BYTES)];
    let words = begin.split(|byte| !byte.is_ascii_alphabetic()).filter(|word| !word.is_empty());
    let may_be_level = |word: &&[u8]| {
        (4..=8).contains(&word.len()) && b"fcewnidt".contains(&word[0].to_ascii_lowercase())
    };
    words.take(12).filter(may_be_level).find_map(|word| {
        let known = LEVELS.iter().find(|(name, _)| word.eq_ignore_ascii_case(name.as_bytes()));
        let (_, level) = known?;
        let is_level =
            word.iter().all(u8::is_ascii_uppercase) || word.iter().all(u8::is_ascii_lowercase);
        is_level.then_some(*level)
    })
}

/// Returns the time stamp that a line begins with.
fn line_time(line: &str) -> Option<&str> {
    let line = line.trim_start_matches(['[', ' ', '"']);
    let end = line.find([']', ',', '|', '"']).unwrap_or(line.len()).min(40);
    let end = line.floor_char_boundary(end);
    let mut words = line[..end].split(' ');
    let (first, second) = (words.next()?, words.next().unwrap_or_default());
    let digits = |text: &str| text.bytes().filter(u8::is_ascii_digit).count();
    let has_clock = |text: &str| text.matches(':').count() >= 1 && digits(text) >= 4;
    if has_clock(first) && digits(first) >= 6 {
        Some(first)
    } else if digits(first) >= 6 && first.contains(['-', '/']) && has_clock(second) {
        Some(&line[..first.len() + 1 + second.len()])
    } else {
        None
    }
}

fn is_log_line(line: &str) -> bool {
    line_time(line).is_some() || line_level(&line[..line.floor_char_boundary(24)]).is_some()
}

fn is_stack_frame(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("at ") && line.contains(['(', ':'])
        || line.starts_with("File \"") && line.contains(", line ")
        || line.split_once(": ").is_some_and(|(number, rest)| {
            !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) && rest.contains("::")
        })
}

fn is_exception_line(line: &str) -> bool {
    let trimmed = line.trim_start();
    let first = trimmed.split([':', ' ', '(']).next().unwrap_or_default();
    let is_name = first.len() > 5
        && (first.ends_with("Error") || first.ends_with("Exception") || first.ends_with("Panic"));
    is_name
        || trimmed.starts_with("Caused by:")
        || trimmed.starts_with("Exception in thread")
        || trimmed.contains("panicked at ")
        || trimmed.starts_with("Traceback (most recent")
}

fn is_heading(line: &str) -> bool {
    let marks = line.bytes().take_while(|byte| *byte == b'#').count();
    (1..=6).contains(&marks) && line[marks..].starts_with(' ')
}

fn describe_log(text: &str, facts: &mut FactWriter) {
    let mut levels: Vec<(&str, usize)> = Vec::new();
    let mut messages: HashMap<String, (usize, usize, &str)> = HashMap::new();
    let first = text.lines().take(COMPARED_LINES).find_map(line_time);
    let last = text.lines().rev().take(COMPARED_LINES).find_map(line_time);
    for (number, line) in plain_lines(text).enumerate() {
        let Some(level) = line_level(line) else { continue };
        match levels.iter_mut().find(|(name, _)| *name == level) {
            Some((_, count)) => *count += 1,
            None => levels.push((level, 1)),
        }
        if matches!(level, "FATAL" | "CRITICAL" | "ERROR" | "WARN") {
            let template = message_template(line);
            let is_full = messages.len() >= MAX_MESSAGES;
            match messages.get_mut(&template) {
                Some((count, ..)) => *count += 1,
                None if is_full => {}
                None => {
                    messages.insert(template, (1, number, line));
                }
            }
        }
    }
    let order = |level: &str| LEVELS.iter().position(|(_, name)| *name == level);
    levels.sort_by_key(|(level, _)| order(level));
    let counts: Vec<String> =
        levels.iter().map(|(level, count)| format!("{level} {count}")).collect();
    facts.push_list("levels:", ", ", &counts);
    if let (Some(first), Some(last)) = (first, last) {
        facts.push(&format!("time: {first} to {last}"));
    }
    let mut repeated: Vec<(usize, usize, &str)> =
        messages.into_values().filter(|(count, ..)| *count > 1).collect();
    let rank = |line: &str| line_level(line).and_then(order).unwrap_or(LEVELS.len());
    repeated.sort_by(|a, b| rank(a.2).cmp(&rank(b.2)).then(b.0.cmp(&a.0)).then(a.1.cmp(&b.1)));
    let shown = |(count, number, line): &(usize, usize, &str)| {
        let message: String = strip_time(line).chars().take(100).collect();
        let mark = if strip_time(line).chars().count() > 100 { "…" } else { "" };
        format!("{count} × like line {number}: {message}{mark}")
    };
    let repeated: Vec<String> = repeated.iter().take(12).map(shown).collect();
    facts.push_list("repeated:", "\n  ", &repeated);
}

fn strip_time(line: &str) -> &str {
    let time = line_time(line).map_or(0, |time| line.find(time).map_or(0, |at| at + time.len()));
    line[time..].trim_start_matches([']', ' ', ',', '|', '-'])
}

/// Reduces a message to its words, so that messages which differ only in their values are equal.
fn message_template(line: &str) -> String {
    let words = strip_time(line).split_whitespace().take(24);
    let plain = words.map(|word| if word.bytes().any(|b| b.is_ascii_digit()) { "#" } else { word });
    plain.collect::<Vec<_>>().join(" ")
}

fn describe_diff(text: &str, facts: &mut FactWriter) {
    let mut files: Vec<(&str, usize, usize)> = Vec::new();
    let is_git = text.starts_with("diff --git ") || text.contains("\ndiff --git ");
    let (mut in_hunk, mut lines) = (false, text.lines().peekable());
    while let Some(line) = lines.next() {
        let next = lines.peek().copied().unwrap_or_default();
        if line.starts_with("diff --git ") {
            files.push((line.rsplit_once(" b/").map_or(line, |(_, name)| name), 0, 0));
            in_hunk = false;
        } else if !is_git && line.starts_with("--- ") && next.starts_with("+++ ") {
            let is_deleted = next.starts_with("+++ /dev/null");
            let name = &(if is_deleted { line } else { next })[4..];
            let name = name.split('\t').next().unwrap_or(name);
            let name = name.strip_prefix("b/").or(name.strip_prefix("a/")).unwrap_or(name);
            files.push((name, 0, 0));
            in_hunk = false;
        } else if line.starts_with("@@ ") {
            in_hunk = true;
        } else if in_hunk && let Some(file) = files.last_mut() {
            file.1 += usize::from(line.starts_with('+'));
            file.2 += usize::from(line.starts_with('-'));
        }
    }
    let (added, removed) = files.iter().fold((0, 0), |(a, r), file| (a + file.1, r + file.2));
    let each: Vec<String> =
        files.iter().map(|(name, added, removed)| format!("{name} +{added} -{removed}")).collect();
    let count = files.len();
    facts.push_list(&format!("{count} files changed, +{added} -{removed}:"), ", ", &each);
}

fn describe_outline(text: &str, facts: &mut FactWriter) {
    let (mut headings, mut in_code) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            in_code = !in_code;
        } else if !in_code && is_heading(line) {
            let heading: String = line.chars().take(80).collect();
            headings.push((number, heading));
        }
    }
    let depth = |heading: &str| heading.bytes().take_while(|byte| *byte == b'#').count();
    // If not all of them fit, the upper levels are the outline.
    for max in [6, 3, 2] {
        let part = headings.iter().filter(|(_, heading)| depth(heading) <= max);
        let part: Vec<String> =
            part.map(|(number, heading)| format!("{heading} (line {number})")).collect();
        let whole = format!("outline: {}", part.join("; "));
        if max == 2 || !tokens::exceeds(&whole, facts.budget) {
            facts.push_list("outline:", "; ", &part);
            return;
        }
    }
}

fn describe_exceptions(text: &str, facts: &mut FactWriter) {
    let marks = ["Exception", "Error", "Panic", "Caused by:", "panicked at "];
    if !marks.iter().any(|mark| text.contains(mark)) {
        return;
    }
    let mut found: Vec<(String, usize, usize, Option<String>)> = Vec::new();
    let (mut frame, mut awaits_frame): (Option<String>, Option<usize>) = (None, None);
    for (number, line) in text.lines().enumerate() {
        if is_stack_frame(line) {
            let shown: String = line.trim().chars().take(120).collect();
            // Java and JavaScript write the innermost frame first, Python last.
            if let Some(index) = awaits_frame.take()
                && let Some((.., innermost)) = found.get_mut(index)
            {
                innermost.get_or_insert(shown.clone());
            }
            frame = Some(shown);
        } else if is_exception_line(line) && !line.trim_start().starts_with("Traceback") {
            let shown: String = line.trim().chars().take(200).collect();
            let template = message_template(&shown);
            let is_full = found.len() >= 40;
            match found.iter_mut().find(|(known, ..)| message_template(known) == template) {
                Some((_, _, count, _)) => *count += 1,
                None if is_full => {}
                None => {
                    awaits_frame = Some(found.len());
                    found.push((shown, number, 1, frame.take().filter(|f| f.starts_with("File"))));
                }
            }
        }
    }
    let describe = |(line, number, count, frame): &(String, usize, usize, Option<String>)| {
        let times = if *count > 1 { format!(", {count} times") } else { String::new() };
        let frame = frame.as_ref().map(|frame| format!(" {frame}")).unwrap_or_default();
        format!("{line} (line {number}{times}){frame}")
    };
    let parts: Vec<String> = found.iter().map(describe).collect();
    facts.push_list("exceptions:", "\n  ", &parts);
}

fn describe_page(page: &HtmlText, facts: &mut FactWriter) {
    if let Some(title) = &page.title {
        facts.push(&format!("title: {title}"));
    }
    let HtmlText { links, tables, forms, .. } = page;
    facts.push(&format!("{links} links, {tables} tables, {forms} forms; visible text:"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> String {
        let kind = TextKind::detect(text);
        format!("{}\n{}", kind.describe(text.lines().count()), kind.facts(text, 300))
    }

    #[test]
    fn each_kind_of_text_states_its_facts() {
        let log: String = (0..50)
            .map(|n| {
                let level = if n % 10 == 3 { "ERROR order 17 lost" } else { "INFO all well" };
                format!("2026-03-01T10:00:{n:02}Z {level} #{n}\n")
            })
            .collect();
        let log = kind(&log);
        assert!(log.contains("a log of 50 lines") && log.contains("ERROR 5, INFO 45"), "{log}");
        assert!(log.contains("5 × like line 3: ERROR order 17 lost"), "{log}");
        assert!(log.contains("2026-03-01T10:00:00Z to 2026-03-01T10:00:49Z"), "{log}");

        let diff = "diff --git a/x.rs b/x.rs\n--- a/x.rs\n+++ b/x.rs\n@@ -1,2 +1,3 @@\n a\n-b\n+c\n+d\n\
                    diff --git a/y b/y\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-1\n+2\n";
        let diff = kind(diff);
        assert!(diff.contains("2 files changed, +3 -2: x.rs +2 -1, y +1 -1"), "{diff}");
        let plain = kind("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n");
        assert!(plain.contains("1 files changed, +1 -1: x +1 -1"), "{plain}");

        let page =
            kind("# Guide\nText.\n## Install\nRun it.\n```\n# no heading\n```\n## Use\nSo.\nx\n");
        assert!(page.contains("# Guide (line 0); ## Install (line 2); ## Use (line 7)"), "{page}");

        let java = "Exception in thread \"main\" java.lang.IllegalStateException: no route\n\tat \
                    a.b.C.run(C.java:12)\n\tat a.b.D.main(D.java:3)\nCaused by: \
                    java.io.IOException: reset\n\tat a.b.E.read(E.java:99)\n\t... 2 more\n";
        let java = kind(java);
        assert!(java.contains("a stack trace") && java.contains("IOException: reset"), "{java}");
        assert!(java.contains("E.java:99"), "{java}");
        let python = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    \
                      f()\n  File \"b.py\", line 8, in f\n    g()\n  File \"c.py\", line 2, in g\n    \
                      x[1]\nKeyError: 1\n";
        assert!(
            kind(python).contains("KeyError: 1 (line 7) File \"c.py\", line 2"),
            "{}",
            kind(python)
        );
    }
}
