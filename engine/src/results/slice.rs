//! Slices of a stored result: selected by a JSON pointer, paginated, and searchable. Pure.
//!
//! A JSON pointer (RFC 6901) selects a value. The value has members: the items of an array, the
//! entries of an object, or the lines of a text. Members are returned from an offset, up to a limit
//! and a maximum size; the answer states the total and the next offset. The rows of a table can be
//! filtered and aggregated. The result is not parsed into a tree, so reading a small slice of a
//! large result is cheap. Characters are returned as themselves, even if the tool
//! escaped them.

mod row_query;
mod search;

use std::borrow::Cow;

use serde_json::Value;

use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::domain::json::decode_unicode_escapes;
use crate::results::embedded::decode_embedded_escapes;
pub(crate) use crate::results::pointer::invalid_field;
use crate::results::pointer::{self, SelectedValue, escape_key};
use crate::results::rows::RowTable;
use crate::results::text_lines::bounded_lines;
pub use row_query::{Aggregate, AggregateOperation, Comparison, RowCondition, RowQuery};

/// Number of members returned if the query sets no limit.
pub const DEFAULT_LIMIT: u64 = 100;
/// Maximum number of members per slice.
pub const MAX_LIMIT: u64 = 1_000;
/// Maximum length of a search pattern, in bytes.
pub const MAX_GREP: usize = 1_000;

/// Selects a slice of a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SliceQuery {
    /// A JSON pointer; empty selects the whole result.
    pub pointer: String,
    /// Index of the first member; with `grep`, of the first match.
    pub offset: u64,
    /// Maximum number of members, from 1 to [`MAX_LIMIT`]. Defaults to [`DEFAULT_LIMIT`].
    pub limit: Option<u64>,
    /// A regular expression; only matching members are returned.
    pub grep: Option<String>,
    /// A query over the rows of the table at the pointer, or of the largest table inside it.
    pub rows: RowQuery,
}

/// A slice of a result.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// JSON pointer of the selected value.
    pub pointer: String,
    /// Type of the selected value.
    pub kind: JsonKind,
    /// Size of the selected value in bytes.
    pub bytes: usize,
    /// Number of items, entries or lines; `None` for a scalar.
    pub total: Option<usize>,
    /// Index of the first member in this slice; with `grep`, of the first match.
    pub offset: usize,
    /// Number of members, or matches, in this slice.
    pub shown: usize,
    /// Offset of the next slice, if there is one.
    pub next_offset: Option<usize>,
    /// True if the slice is smaller than requested because of the size limit.
    pub truncated: bool,
    /// The selected members or matches.
    pub content: SliceContent,
}

/// The content of a slice.
#[derive(Debug, Clone, PartialEq)]
pub enum SliceContent {
    /// The members in a container of the same type (an array, an object or a text), or a scalar.
    Value(Json),
    /// The members that match the pattern, and the total number of matches.
    Matches {
        /// Matching members in this slice.
        matches: Vec<GrepMatch>,
        /// Number of matches in the whole selected value.
        matched: usize,
    },
    /// The prefix of a single member that exceeds the size limit. `pointer` selects it for reading
    /// in slices.
    Prefix {
        /// Beginning of the member's JSON text.
        text: String,
        /// JSON pointer of the member.
        pointer: String,
    },
    /// The rows or figures that a query over a table returns.
    Rows {
        /// An array of rows or groups, or one object of figures.
        value: Json,
        /// Number of each row within the table.
        row_numbers: Vec<usize>,
        /// Number of rows that meet the conditions.
        matched: usize,
    },
}

/// One member that matches the pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct GrepMatch {
    /// JSON pointer of the member; for a line, of the text that contains it.
    pub pointer: String,
    /// Line number, if the match is a line.
    pub line: Option<usize>,
    /// The member; for a long one, its prefix as text.
    pub value: Json,
    /// True if the value is only a prefix.
    pub is_truncated: bool,
}

/// Reads a slice of a result, with a size of about `max_bytes` at most.
pub fn read_slice(data: &Json, part: &SliceQuery, max_bytes: usize) -> Result<Slice, Fault> {
    let limit = part.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(invalid_field("limit", format!("limit must be from 1 to {MAX_LIMIT}")));
    }
    let offset = usize::try_from(part.offset)
        .map_err(|_| invalid_field("offset", "offset is larger than any result".into()))?;
    let pattern = part.grep.as_deref().map(search::compile).transpose()?;
    let SelectedValue { written, container } =
        pointer::resolve_pointer(data.text(), &part.pointer)?;
    let bytes = written.len();
    let written = decode_unicode_escapes(&written);
    let mut take =
        MemberWindow { offset, limit: limit as usize, max_bytes, ..MemberWindow::default() };
    let mut pointer = Cow::Borrowed(&part.pointer);
    let (total, content) = match &pattern {
        _ if !part.rows.is_empty() => {
            let table = RowTable::find(&written, container.as_deref(), &part.pointer)
                .ok_or_else(|| no_table_fault(&written, &part.pointer))?;
            pointer = Cow::Owned(table.pointer.clone());
            let (rows, content) =
                row_query::query_rows(&table, &part.rows, pattern.as_ref(), &mut take)?;
            (Some(rows), content)
        }
        Some(pattern) => search::grep_members(&written, &part.pointer, pattern, &mut take),
        None => read_members(&written, &part.pointer, &mut take),
    };
    Ok(Slice {
        pointer: pointer.into_owned(),
        kind: JsonKind::of(&written),
        bytes,
        total,
        offset,
        shown: take.included,
        next_offset: take.next_offset(),
        truncated: take.is_full,
        content,
    })
}

/// Returns the fault for a query over rows where there is no table.
fn no_table_fault(written: &str, pointer: &str) -> Fault {
    let kind = JsonKind::of(written).as_str();
    let message = format!(
        "pointer: where, select, aggregate and group_by need a table: an array of objects, rows \
         with columns, or CSV; there is none in the {kind} at {pointer:?}"
    );
    invalid_field("pointer", message)
}

/// Counts members as they are visited and decides which of them to include.
#[derive(Debug, Default)]
struct MemberWindow {
    offset: usize,
    limit: usize,
    max_bytes: usize,
    seen: usize,
    included: usize,
    bytes: usize,
    /// True if another member would have exceeded the size limit.
    is_full: bool,
}

/// The decision about a member.
enum MemberDecision {
    Include,
    /// The member alone exceeds the size limit.
    IncludePrefix,
    Skip,
}

impl MemberWindow {
    fn admit(&mut self, bytes: usize) -> MemberDecision {
        let index = self.seen;
        self.seen += 1;
        if index < self.offset || index >= self.offset.saturating_add(self.limit) || self.is_full {
            return MemberDecision::Skip;
        }
        if self.bytes + bytes > self.max_bytes {
            self.is_full = true;
            return if self.included == 0 {
                MemberDecision::IncludePrefix
            } else {
                MemberDecision::Skip
            };
        }
        self.bytes += bytes;
        self.included += 1;
        MemberDecision::Include
    }

    fn next_offset(&self) -> Option<usize> {
        // A member that exceeds the limit on its own is skipped: it is read at its own pointer.
        let passed = usize::from(self.is_full && self.included == 0);
        let next = self.offset.saturating_add(self.included + passed);
        (next < self.seen).then_some(next)
    }
}

/// Returns the selected members of a raw JSON value, in a container of the same type.
fn read_members(
    written: &str,
    pointer: &str,
    take: &mut MemberWindow,
) -> (Option<usize>, SliceContent) {
    match JsonKind::of(written) {
        JsonKind::Array => collect_members(written, pointer, take, '['),
        JsonKind::Object => collect_members(written, pointer, take, '{'),
        JsonKind::Text => {
            let (text, mut selected) = (decode_string(written), String::new());
            for line in bounded_lines(&decode_embedded_escapes(&text)) {
                // A line is never too long to include.
                if let MemberDecision::Include | MemberDecision::IncludePrefix =
                    take.admit(line.len())
                {
                    selected.push_str(line);
                    take.included = take.included.max(1);
                }
            }
            (Some(take.seen), SliceContent::Value(Json::from_value(&Value::from(selected))))
        }
        JsonKind::Number | JsonKind::Bool | JsonKind::Null => {
            take.included = 1;
            if written.len() <= take.max_bytes {
                return (None, SliceContent::Value(json_from_span(written)));
            }
            take.is_full = true;
            (None, prefix_content(written, take.max_bytes, pointer.to_owned()))
        }
    }
}

fn collect_members(
    written: &str,
    pointer: &str,
    take: &mut MemberWindow,
    open: char,
) -> (Option<usize>, SliceContent) {
    let mut selected = String::from(open);
    let mut long = None;
    let mut cursor = JsonCursor::new(written);
    cursor.enter();
    while cursor.advance() {
        let index = take.seen;
        let key = (open == '{').then(|| cursor.read_key());
        let value = cursor.read_value();
        match take.admit(value.len() + key.map_or(0, str::len)) {
            MemberDecision::Skip => {}
            MemberDecision::IncludePrefix => {
                let step =
                    key.map_or_else(|| index.to_string(), |key| escape_key(&decode_string(key)));
                long = Some(prefix_content(value, take.max_bytes, format!("{pointer}/{step}")));
            }
            MemberDecision::Include => {
                if take.included > 1 {
                    selected.push(',');
                }
                if let Some(key) = key {
                    selected.push_str(key);
                    selected.push(':');
                }
                selected.push_str(value);
            }
        }
    }
    selected.push(if open == '{' { '}' } else { ']' });
    (Some(take.seen), long.unwrap_or_else(|| SliceContent::Value(json_from_span(&selected))))
}

fn prefix_content(written: &str, max_bytes: usize, pointer: String) -> SliceContent {
    let text = written[..written.floor_char_boundary(max_bytes)].to_owned();
    SliceContent::Prefix { text, pointer }
}

/// Wraps text that was cut out of valid JSON at value boundaries.
fn json_from_span(written: &str) -> Json {
    Json::parse(written).unwrap_or_else(|_| Json::from_value(&Value::from(written)))
}

#[cfg(test)]
mod tests;
