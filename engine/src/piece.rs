//! Slices of a stored result: selected by a JSON pointer, paginated, and searchable. Pure.
//!
//! A JSON pointer (RFC 6901) selects a value. The value has members: the items of an array, the
//! entries of an object, or the lines of a text. Members are returned from an offset, up to a limit
//! and a maximum size; the answer states the total and the next offset. The result is not parsed
//! into a tree, so reading a small slice of a large result is cheap.

mod pointer;
mod search;

use serde_json::{Value, json};

use crate::fault::{Code, Fault};
use crate::json::Json;
use crate::json::cursor::{Cursor, Kind, unquoted};
use crate::lines::lines;
pub(crate) use pointer::escaped;

/// Number of members returned if the query sets no limit.
pub const DEFAULT_LIMIT: u64 = 100;
/// Maximum number of members per slice.
pub const MAX_LIMIT: u64 = 1_000;
/// Maximum length of a search pattern, in bytes.
pub const MAX_GREP: usize = 1_000;

/// Selects a slice of a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// A JSON pointer; empty selects the whole result.
    pub pointer: String,
    /// Index of the first member; with `grep`, of the first match.
    pub offset: u64,
    /// Maximum number of members, from 1 to [`MAX_LIMIT`]. Defaults to [`DEFAULT_LIMIT`].
    pub limit: Option<u64>,
    /// A regular expression; only matching members are returned.
    pub grep: Option<String>,
}

/// A slice of a result.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    pub pointer: String,
    /// Type of the selected value.
    pub kind: Kind,
    /// Size of the selected value in bytes.
    pub bytes: usize,
    /// Number of items, entries or lines; `None` for a scalar.
    pub total: Option<usize>,
    pub offset: usize,
    /// Number of members, or matches, in this slice.
    pub shown: usize,
    /// Offset of the next slice, if there is one.
    pub next_offset: Option<usize>,
    /// True if the slice is smaller than requested because of the size limit.
    pub truncated: bool,
    pub content: Content,
}

/// The content of a slice.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// The members in a container of the same type (an array, an object or a text), or a scalar.
    Value(Json),
    /// The members that match the pattern, and the total number of matches.
    Matches { matches: Vec<Match>, matched: usize },
    /// The prefix of a single member that exceeds the size limit. `pointer` selects it for reading
    /// in slices.
    Beginning { text: String, pointer: String },
}

/// One member that matches the pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct Match {
    pub pointer: String,
    /// Line number, if the match is a line.
    pub line: Option<usize>,
    /// The member; for a long one, its prefix as text.
    pub value: Json,
    /// True if the value is only a prefix.
    pub cut: bool,
}

/// Returns a fault for an invalid field of a query.
pub(crate) fn invalid(field: &str, message: String) -> Fault {
    let problem = json!({ "pointer": format!("/{field}"), "message": message });
    Fault::new(Code::ValidationError, message)
        .with_detail(json!({ "field": field, "problems": [problem] }))
        .not_happened()
}

/// Reads a slice of a result, with a size of about `most_bytes` at most.
pub fn read(data: &Json, part: &Part, most_bytes: usize) -> Result<Piece, Fault> {
    let limit = part.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(invalid("limit", format!("limit must be from 1 to {MAX_LIMIT}")));
    }
    let offset = usize::try_from(part.offset)
        .map_err(|_| invalid("offset", "offset is larger than any result".into()))?;
    let pattern = part.grep.as_deref().map(search::compile).transpose()?;
    let cursor = pointer::find(data.text(), &part.pointer)?;
    let written = { cursor }.skip();
    let mut take = Take { offset, limit: limit as usize, most_bytes, ..Take::default() };
    let (total, content) = match pattern {
        Some(pattern) => search::matches(written, &part.pointer, &pattern, &mut take),
        None => members(written, &part.pointer, &mut take),
    };
    Ok(Piece {
        pointer: part.pointer.clone(),
        kind: cursor.kind(),
        bytes: written.len(),
        total,
        offset,
        shown: take.shown,
        next_offset: take.next_offset(),
        truncated: take.full,
        content,
    })
}

/// Counts members as they are visited and decides which of them to include.
#[derive(Debug, Default)]
struct Take {
    offset: usize,
    limit: usize,
    most_bytes: usize,
    seen: usize,
    shown: usize,
    bytes: usize,
    /// True if another member would have exceeded the size limit.
    full: bool,
}

/// The decision about a member.
enum Verdict {
    Give,
    /// The member alone exceeds the size limit.
    Begin,
    Leave,
}

impl Take {
    fn next(&mut self, bytes: usize) -> Verdict {
        let place = self.seen;
        self.seen += 1;
        if place < self.offset || place >= self.offset.saturating_add(self.limit) || self.full {
            return Verdict::Leave;
        }
        if self.bytes + bytes > self.most_bytes {
            self.full = true;
            return if self.shown == 0 { Verdict::Begin } else { Verdict::Leave };
        }
        self.bytes += bytes;
        self.shown += 1;
        Verdict::Give
    }

    fn next_offset(&self) -> Option<usize> {
        // A member that exceeds the limit on its own is skipped: it is read at its own pointer.
        let passed = usize::from(self.full && self.shown == 0);
        let next = self.offset.saturating_add(self.shown + passed);
        (next < self.seen).then_some(next)
    }
}

/// Returns the selected members of a raw JSON value, in a container of the same type.
fn members(written: &str, pointer: &str, take: &mut Take) -> (Option<usize>, Content) {
    match Kind::of(written) {
        Kind::Array => collect(written, pointer, take, '['),
        Kind::Object => collect(written, pointer, take, '{'),
        Kind::Text => {
            let (text, mut given) = (unquoted(written), String::new());
            for line in lines(&text) {
                // A line is never too long to include.
                if let Verdict::Give | Verdict::Begin = take.next(line.len()) {
                    given.push_str(line);
                    take.shown = take.shown.max(1);
                }
            }
            (Some(take.seen), Content::Value(Json::of_value(&Value::from(given))))
        }
        Kind::Number | Kind::Bool | Kind::Null => {
            take.shown = 1;
            if written.len() <= take.most_bytes {
                return (None, Content::Value(raw(written)));
            }
            take.full = true;
            (None, beginning(written, take.most_bytes, pointer.to_owned()))
        }
    }
}

fn collect(written: &str, pointer: &str, take: &mut Take, open: char) -> (Option<usize>, Content) {
    let mut given = String::from(open);
    let mut long = None;
    let mut cursor = Cursor::new(written);
    cursor.enter();
    while cursor.more() {
        let place = take.seen;
        let key = (open == '{').then(|| cursor.key());
        let value = cursor.skip();
        match take.next(value.len() + key.map_or(0, str::len)) {
            Verdict::Leave => {}
            Verdict::Begin => {
                let step = key.map_or_else(|| place.to_string(), |key| escaped(&unquoted(key)));
                long = Some(beginning(value, take.most_bytes, format!("{pointer}/{step}")));
            }
            Verdict::Give => {
                if take.shown > 1 {
                    given.push(',');
                }
                if let Some(key) = key {
                    given.push_str(key);
                    given.push(':');
                }
                given.push_str(value);
            }
        }
    }
    given.push(if open == '{' { '}' } else { ']' });
    (Some(take.seen), long.unwrap_or_else(|| Content::Value(raw(&given))))
}

fn beginning(written: &str, most_bytes: usize, pointer: String) -> Content {
    let text = written[..written.floor_char_boundary(most_bytes)].to_owned();
    Content::Beginning { text, pointer }
}

/// Wraps text that was cut out of valid JSON at value boundaries.
fn raw(written: &str) -> Json {
    Json::parse(written).unwrap_or_else(|_| Json::of_value(&Value::from(written)))
}

#[cfg(test)]
mod tests;
