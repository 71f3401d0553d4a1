//! Parts of a result: found by a pointer, given in portions, searched. Pure.
//!
//! A part is named by a JSON pointer (RFC 6901). What it points at has members: the items of an
//! array, the entries of an object, the lines of a text. Members are given from an offset on, up to
//! a limit, and never more bytes at once than the reader takes; the answer says how many there are
//! and where to go on. The result is not taken apart for it, so that reading a little of a large
//! one is cheap.

mod pointer;
mod search;

use serde_json::{Value, json};

use crate::fault::{Code, Fault};
use crate::json::Json;
use crate::json::cursor::{Cursor, Kind, unquoted};
use crate::lines::lines;
pub(crate) use pointer::escaped;

/// So many members are given where nobody says how many.
pub const DEFAULT_LIMIT: u64 = 100;
/// More are never given at once.
pub const MAX_LIMIT: u64 = 1_000;
/// The longest pattern to search for.
pub const MAX_GREP: usize = 1_000;

/// Which part of a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// A JSON pointer; empty = the whole.
    pub pointer: String,
    /// The first member; with `grep`, the first match.
    pub offset: u64,
    /// How many, from 1 to [`MAX_LIMIT`]; [`DEFAULT_LIMIT`] where none is given.
    pub limit: Option<u64>,
    /// A regular expression: only the members that it fits.
    pub grep: Option<String>,
}

/// A part that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    pub pointer: String,
    /// What the pointer points at.
    pub kind: Kind,
    /// How many bytes that is.
    pub bytes: usize,
    /// How many items, entries or lines it has; none for what has no members.
    pub total: Option<usize>,
    pub offset: usize,
    /// How many members, or matches, are given here.
    pub shown: usize,
    /// Where to go on, if there is more.
    pub next_offset: Option<usize>,
    /// Less was given than asked for, because it would have been too much at once.
    pub truncated: bool,
    pub content: Content,
}

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// The members, as what they are members of: an array, an object, a text; or a plain value.
    Value(Json),
    /// The members that fit the pattern, and how many there are of them altogether.
    Matches { matches: Vec<Match>, matched: usize },
    /// The beginning of one member that is too long by itself; it can be read in parts there.
    Beginning { text: String, pointer: String },
}

/// One member that fits the pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct Match {
    pub pointer: String,
    /// Which line, where it is one.
    pub line: Option<usize>,
    /// The member; of a long one, its beginning as text.
    pub value: Json,
    /// Whether it is only the beginning.
    pub cut: bool,
}

/// A wrong setting of a part, by its name.
pub(crate) fn invalid(field: &str, message: String) -> Fault {
    let problem = json!({ "pointer": format!("/{field}"), "message": message });
    Fault::new(Code::ValidationError, message)
        .with_detail(json!({ "field": field, "problems": [problem] }))
        .not_happened()
}

/// Reads a part of a result, of not much more than so many bytes.
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

/// Counts members as they come, and says which of them to give.
#[derive(Debug, Default)]
struct Take {
    offset: usize,
    limit: usize,
    most_bytes: usize,
    seen: usize,
    shown: usize,
    bytes: usize,
    /// One more would have been too much at once.
    full: bool,
}

/// What to do with a member.
enum Verdict {
    Give,
    /// It alone is too long.
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
        // One that is too long by itself is passed over: it is read at its own pointer.
        let passed = usize::from(self.full && self.shown == 0);
        let next = self.offset.saturating_add(self.shown + passed);
        (next < self.seen).then_some(next)
    }
}

/// The members of what is written so, in their own form.
fn members(written: &str, pointer: &str, take: &mut Take) -> (Option<usize>, Content) {
    match Kind::of(written) {
        Kind::Array => collect(written, pointer, take, '['),
        Kind::Object => collect(written, pointer, take, '{'),
        Kind::Text => {
            let (text, mut given) = (unquoted(written), String::new());
            for line in lines(&text) {
                // A line is never so long that it could not be given.
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

/// What was cut out of JSON at its seams is JSON.
fn raw(written: &str) -> Json {
    Json::parse(written).unwrap_or_else(|_| Json::of_value(&Value::from(written)))
}

#[cfg(test)]
mod tests;
