//! Searches a result: finds the members that match a pattern, and their pointers.
//!
//! A long member is searched recursively, so that a match is the line or item itself and not the
//! array that contains it. JSON is searched as it is written and in its decoded forms, so that a
//! pattern finds a text regardless of escapes and of spaces between the values. A string that holds
//! JSON is searched as that JSON too.

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::{GrepMatch, MAX_GREP, MemberDecision, MemberWindow, SliceContent, json_from_span};
use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::embedded::{decode_embedded_escapes, embedded_json};
use crate::results::pointer::{escape_key, invalid_field};
use crate::results::text_lines::bounded_lines;

/// Members longer than this are searched recursively.
const LONG_MEMBER_BYTES: usize = 1_000;
/// Maximum memory of a compiled pattern.
const PATTERN_BYTES: usize = 1 << 18;

/// Compiles a pattern. The search takes time linear in the text, regardless of the pattern.
pub(super) fn compile(pattern: &str) -> Result<Regex, Fault> {
    if pattern.len() > MAX_GREP {
        return Err(invalid_field("grep", format!("grep is longer than {MAX_GREP} bytes")));
    }
    let built = RegexBuilder::new(pattern)
        .size_limit(PATTERN_BYTES)
        .dfa_size_limit(PATTERN_BYTES)
        .nest_limit(50)
        // `^` and `$` match at lines, also where a text is searched as a whole.
        .multi_line(true)
        .build();
    built.map_err(|error| {
        // The last line is the reason; the lines before it draw the pattern.
        let reason = error.to_string();
        let reason = reason.lines().last().unwrap_or_default();
        let reason = reason.strip_prefix("error: ").unwrap_or(reason);
        invalid_field("grep", format!("grep is not a usable regular expression: {reason}"))
    })
}

/// Returns the matching members and the total number of members.
pub(super) fn grep_members(
    written: &str,
    pointer: &str,
    pattern: &Regex,
    take: &mut MemberWindow,
) -> (Option<usize>, SliceContent) {
    let mut search = GrepSearch { pattern, take, found: Vec::new() };
    let total = search.search_value(written, pointer);
    let GrepSearch { found: matches, take, .. } = search;
    let matched = take.seen;
    (total, SliceContent::Matches { matches, matched })
}

/// Returns whether a pattern matches a JSON value as it is written, or in one of its decoded forms.
pub(super) fn decoded_forms_match(pattern: &Regex, written: &str) -> bool {
    if JsonKind::of(written) == JsonKind::Text {
        let text = decode_string(written);
        return pattern.is_match(&text)
            || embedded_json(&text).is_some_and(|json| decoded_forms_match(pattern, json));
    }
    pattern.is_match(written)
        || pattern.is_match(&compact_decoded(written, false))
        || pattern.is_match(&compact_decoded(written, true))
}

/// Returns JSON with its strings decoded and without spaces between its values, or with one after
/// each comma and colon. A string that holds JSON is written as that JSON. For searching only: the
/// text is not always valid JSON.
pub(super) fn compact_decoded(written: &str, is_spaced: bool) -> String {
    let mut out = String::with_capacity(written.len());
    write_decoded(&mut out, written, is_spaced);
    out
}

fn write_decoded(out: &mut String, written: &str, is_spaced: bool) {
    let kind = JsonKind::of(written);
    match kind {
        JsonKind::Text => {
            let text = decode_string(written);
            match embedded_json(&text) {
                Some(json) => write_decoded(out, json, is_spaced),
                None => {
                    out.push('"');
                    out.push_str(&text);
                    out.push('"');
                }
            }
        }
        JsonKind::Array | JsonKind::Object => {
            let is_object = kind == JsonKind::Object;
            let (mut cursor, mut is_first) = (JsonCursor::new(written), true);
            out.push(if is_object { '{' } else { '[' });
            cursor.enter();
            while cursor.advance() {
                if !is_first {
                    out.push_str(if is_spaced { ", " } else { "," });
                }
                is_first = false;
                if is_object {
                    let key = decode_string(cursor.read_key());
                    out.push('"');
                    out.push_str(&key);
                    out.push_str(if is_spaced { "\": " } else { "\":" });
                }
                write_decoded(out, cursor.read_value(), is_spaced);
            }
            out.push(if is_object { '}' } else { ']' });
        }
        _ => out.push_str(written),
    }
}

struct GrepSearch<'s> {
    pattern: &'s Regex,
    take: &'s mut MemberWindow,
    found: Vec<GrepMatch>,
}

impl GrepSearch<'_> {
    /// Searches the members of a value and returns their number.
    fn search_value(&mut self, written: &str, pointer: &str) -> Option<usize> {
        match JsonKind::of(written) {
            JsonKind::Text => {
                let text = decode_string(written);
                Some(self.search_lines(&decode_embedded_escapes(&text), pointer))
            }
            JsonKind::Array | JsonKind::Object => Some(self.search_members(written, pointer)),
            _ => {
                if self.pattern.is_match(written) {
                    self.push_match(written, pointer, None);
                }
                None
            }
        }
    }

    /// Searches a text and returns the number of its lines. A text that is JSON is searched as
    /// JSON, because its lines break at other positions than its values.
    fn search_lines(&mut self, text: &str, pointer: &str) -> usize {
        let before = self.take.seen;
        if let Some(json) = embedded_json(text) {
            self.search_value(json, pointer);
        }
        let is_found = self.take.seen > before;
        let (mut count, mut rest) = (0, text);
        while !rest.is_empty() {
            let end = memchr::memchr(b'\n', rest.as_bytes()).map_or(rest.len(), |at| at + 1);
            let (line, behind) = rest.split_at(end);
            rest = behind;
            if !is_found && self.pattern.is_match(line.trim_end_matches(['\n', '\r'])) {
                self.push_line_matches(line, pointer, count);
            }
            count += bounded_lines(line).count();
        }
        count
    }

    /// Adds the parts of a matching line that match, as [`bounded_lines`] splits it. `number` is
    /// the number of its first part.
    fn push_line_matches(&mut self, line: &str, pointer: &str, number: usize) {
        let (before, mut begin) = (self.take.seen, 0);
        let mut parts = bounded_lines(line).enumerate().peekable();
        while let Some((n, part)) = parts.next() {
            let end = begin + part.len();
            let next_end = parts.peek().map_or(end, |(_, next)| end + next.len());
            let crossing = self.find_crossing(&line[begin..next_end], part.len());
            if crossing.is_some() || self.pattern.is_match(part.trim_end_matches(['\n', '\r'])) {
                let end = crossing.map_or(end, |length| begin + length);
                self.push_line(&line[begin..end], pointer, number + n);
            }
            begin = end;
        }
        // The match is longer than two parts.
        if self.take.seen == before
            && let Some(found) = self.pattern.find(line.trim_end_matches(['\n', '\r']))
        {
            let mut begin = 0;
            for (n, part) in bounded_lines(line).enumerate() {
                if found.start() < begin + part.len() {
                    return self.push_line(part, pointer, number + n);
                }
                begin += part.len();
            }
        }
    }

    /// Returns the end of a match that begins in the first of two parts and ends in the second one,
    /// if neither has a match within it.
    fn find_crossing(&self, parts: &str, first: usize) -> Option<usize> {
        let parts = parts.trim_end_matches(['\n', '\r']);
        let is_within = |from: usize, to: usize| self.pattern.is_match(&parts[from..to]);
        let mut found = self.pattern.find_iter(parts).take_while(|found| found.start() < first);
        let crosses = |found: &regex::Match<'_>| {
            found.end() > first
                && !is_within(found.start(), first)
                && !is_within(first, found.end())
        };
        found.find(crosses).map(|found| found.end())
    }

    fn push_line(&mut self, line: &str, pointer: &str, number: usize) {
        let line = Json::from_value(&Value::from(line.trim_end_matches(['\n', '\r'])));
        self.push_match(line.text(), pointer, Some(number));
    }

    fn search_members(&mut self, written: &str, pointer: &str) -> usize {
        let keyed = JsonKind::of(written) == JsonKind::Object;
        let mut cursor = JsonCursor::new(written);
        let mut count = 0;
        cursor.enter();
        while cursor.advance() {
            let key = keyed.then(|| decode_string(cursor.read_key()));
            let value = cursor.read_value();
            let key_matches = key.as_ref().is_some_and(|key| self.pattern.is_match(key));
            let step = key.map_or_else(|| count.to_string(), |key| escape_key(&key));
            let member_pointer = format!("{pointer}/{step}");
            let before = self.take.seen;
            if value.len() > LONG_MEMBER_BYTES {
                self.search_value(value, &member_pointer);
            }
            // A match in none of its parts, or only in its key, counts for the whole member.
            if self.take.seen == before && (key_matches || self.is_match(value)) {
                self.push_match(value, &member_pointer, None);
            }
            count += 1;
        }
        count
    }

    fn is_match(&self, value: &str) -> bool {
        decoded_forms_match(self.pattern, value)
    }

    fn push_match(&mut self, written: &str, pointer: &str, line: Option<usize>) {
        let cut = line.is_none() && written.len() > 2 * LONG_MEMBER_BYTES;
        let excerpt = &written
            [..written.floor_char_boundary(if cut { LONG_MEMBER_BYTES } else { written.len() })];
        if let MemberDecision::Include = self.take.admit(excerpt.len() + pointer.len()) {
            let value =
                if cut { Json::from_value(&Value::from(excerpt)) } else { json_from_span(excerpt) };
            self.found.push(GrepMatch {
                pointer: pointer.to_owned(),
                line,
                value,
                is_truncated: cut,
            });
        }
    }
}
