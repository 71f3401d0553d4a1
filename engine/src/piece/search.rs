//! Searches a result: finds the members that match a pattern, and their pointers.
//!
//! A long member is searched recursively, so that a match is the line or item itself and not the
//! array that contains it.

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::{Content, MAX_GREP, Match, Take, Verdict, escaped, invalid, raw};
use crate::fault::Fault;
use crate::json::Json;
use crate::json::cursor::{Cursor, Kind, unquoted};
use crate::lines::lines;

/// Members longer than this are searched recursively.
const LONG: usize = 1_000;
/// Maximum memory of a compiled pattern.
const PATTERN_BYTES: usize = 1 << 18;

/// Compiles a pattern. The search takes time linear in the text, whatever the pattern.
pub(super) fn compile(pattern: &str) -> Result<Regex, Fault> {
    if pattern.len() > MAX_GREP {
        return Err(invalid("grep", format!("grep is longer than {MAX_GREP} bytes")));
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
        invalid("grep", format!("grep is not a usable regular expression: {reason}"))
    })
}

/// Returns the matching members and the total number of members.
pub(super) fn matches(
    written: &str,
    pointer: &str,
    pattern: &Regex,
    take: &mut Take,
) -> (Option<usize>, Content) {
    let mut search = Search { pattern, take, found: Vec::new() };
    let total = search.within(written, pointer);
    let Search { found: matches, take, .. } = search;
    let matched = take.seen;
    (total, Content::Matches { matches, matched })
}

struct Search<'s> {
    pattern: &'s Regex,
    take: &'s mut Take,
    found: Vec<Match>,
}

impl Search<'_> {
    /// Searches the members of a value and returns their number.
    fn within(&mut self, written: &str, pointer: &str) -> Option<usize> {
        match Kind::of(written) {
            Kind::Text => Some(self.lines(&unquoted(written), pointer)),
            Kind::Array | Kind::Object => Some(self.members(written, pointer)),
            _ => {
                if self.pattern.is_match(written) {
                    self.give(written, pointer, None);
                }
                None
            }
        }
    }

    fn lines(&mut self, text: &str, pointer: &str) -> usize {
        let mut count = 0;
        for (n, line) in lines(text).enumerate() {
            count += 1;
            let line = line.trim_end_matches(['\n', '\r']);
            if self.pattern.is_match(line) {
                let line = Json::of_value(&Value::from(line));
                self.give(line.text(), pointer, Some(n));
            }
        }
        count
    }

    fn members(&mut self, written: &str, pointer: &str) -> usize {
        let keyed = Kind::of(written) == Kind::Object;
        let mut cursor = Cursor::new(written);
        let mut count = 0;
        cursor.enter();
        while cursor.more() {
            let key = keyed.then(|| unquoted(cursor.key()));
            let value = cursor.skip();
            let named = key.as_ref().is_some_and(|key| self.pattern.is_match(key));
            let step = key.map_or_else(|| count.to_string(), |key| escaped(&key));
            let place = format!("{pointer}/{step}");
            let before = self.take.seen;
            if value.len() > LONG {
                self.within(value, &place);
            }
            // A match in none of its parts, or only in its key, counts for the whole member.
            if self.take.seen == before && (named || self.fits(value)) {
                self.give(value, &place, None);
            }
            count += 1;
        }
        count
    }

    fn fits(&self, value: &str) -> bool {
        match Kind::of(value) {
            Kind::Text => self.pattern.is_match(&unquoted(value)),
            _ => self.pattern.is_match(value),
        }
    }

    fn give(&mut self, written: &str, pointer: &str, line: Option<usize>) {
        let cut = line.is_none() && written.len() > 2 * LONG;
        let shown = &written[..written.floor_char_boundary(if cut { LONG } else { written.len() })];
        if let Verdict::Give = self.take.next(shown.len() + pointer.len()) {
            let value = if cut { Json::of_value(&Value::from(shown)) } else { raw(shown) };
            self.found.push(Match { pointer: pointer.to_owned(), line, value, cut });
        }
    }
}
