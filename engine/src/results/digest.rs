//! Digests: a model receives a digest in place of a result that is too long for its context. Pure.
//!
//! A digest never exceeds its token budget, and always reports the omission and how to read the
//! rest: the whole result stays stored, and the tool `result.read` returns any part of it.
//!
//! | result | digest |
//! |---|---|
//! | text | its head, its tail, the most relevant lines between them |
//! | a table | its columns, the number of rows, some of them |
//! | other JSON | its shape, counts, the first items of each long array |
//!
//! An object that wraps one long text or one table is digested as that text or table. So is an
//! array in which one item makes up most of the document, as in the results of MCP servers. The
//! document is scanned once and not parsed into a tree, so a digest needs little memory beyond the
//! result itself.

mod json;
mod sampling;
mod shape;
mod table;
mod text;

#[cfg(test)]
mod tests;
use std::borrow::Cow;

use sampling::{SampleNode, SampleObject, sample_document};
use table::Table;

use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::json::cursor::decode_string;
use crate::results::slice::escape_key;
use crate::results::tokens;

/// From this budget on, a digest always states the size of the result, the call it belongs to, and
/// how to read the rest. A smaller budget holds as much of that as fits; the digest never exceeds
/// it.
pub const MIN_BUDGET: usize = 64;

/// A text with more than this many bytes per token of the budget is assumed to exceed it. Ordinary
/// text has about four.
const BYTES_PER_TOKEN: usize = 24;

/// Maximum number of values of a document that are sampled, regardless of the budget.
const MAX_VALUES: usize = 100_000;

/// Number of detail levels.
const DETAIL_LEVELS: u32 = 24;

/// The origin of a result, and a hint about its purpose.
#[derive(Debug, Clone, Copy)]
pub struct DigestSource<'a> {
    /// Id of the call that produced the result.
    pub call_id: &'a CallId,
    /// Name of the tool that produced the result.
    pub tool: &'a str,
    /// The question or the call's arguments. Their words make a part of the result relevant.
    pub hint: Option<&'a str>,
}

/// A shortened form of a long result for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    /// Text for the model.
    pub text: String,
    /// Number of tokens of the text; never more than the budget.
    pub tokens: usize,
    /// Size of the whole result in bytes.
    pub whole_bytes: usize,
}

/// Returns a digest of a result that exceeds the budget, or `None` if the result fits unchanged.
pub fn digest(data: &Json, budget_tokens: usize, source: &DigestSource<'_>) -> Option<Digest> {
    let whole = data.text();
    if !tokens::exceeds(whole, budget_tokens) {
        return None;
    }
    let root = sample_document(whole, budget_tokens.saturating_mul(4).min(MAX_VALUES));
    let content = MainContent::find(&root);
    let note = content.header(whole.len(), budget_tokens, source);
    let mut body_budget = budget_tokens.saturating_sub(tokens::count(&note) + 1);
    let mut text = note.clone();
    // The parts may tokenize differently when they are joined than alone.
    for _ in 0..4 {
        let body = content.body(&root, source, body_budget);
        let both = format!("{note}\n{body}");
        if !body.is_empty() && !tokens::exceeds(&both, budget_tokens) {
            text = both;
            break;
        }
        body_budget = body_budget.saturating_sub(4);
    }
    Some(Digest { tokens: tokens::count(&text), text, whole_bytes: whole.len() })
}

/// The main content of a result, and its location.
enum MainContent<'n, 'a> {
    Text { pointer: String, text: Cow<'a, str>, lines: usize },
    Table { pointer: String, table: Table<'n, 'a> },
    Json,
}

impl<'n, 'a> MainContent<'n, 'a> {
    /// Descends to the value that makes up most of the document.
    fn find(root: &'n SampleNode<'a>) -> Self {
        let (mut node, mut container, mut pointer): (_, Option<&SampleObject<'a>>, _) =
            (root, None, String::new());
        loop {
            match node {
                SampleNode::Text(written) => {
                    let text = decode_string(written);
                    let lines = text::line_count(&text);
                    return Self::Text { pointer, text, lines };
                }
                SampleNode::Array(list) => {
                    // Next to a table that is almost the whole document, other items need no room.
                    let nearly_all = list.bytes > root.bytes() / 10 * 9;
                    if let Some(table) =
                        nearly_all.then(|| Table::detect(list, container)).flatten()
                    {
                        return Self::Table { pointer, table };
                    }
                    let heaviest = list.sampled_items().max_by_key(|(_, item)| item.bytes());
                    let dominant = heaviest.filter(|(_, item)| item.bytes() > list.bytes / 10 * 7);
                    let Some((index, item)) = dominant else { return Self::Json };
                    pointer = format!("{pointer}/{index}");
                    (node, container) = (item, None);
                }
                SampleNode::Object(map) => {
                    let heaviest = map.entries.iter().max_by_key(|(_, value)| value.bytes());
                    let dominant = heaviest.filter(|(_, value)| value.bytes() > map.bytes / 10 * 7);
                    let Some((key, value)) = dominant else { return Self::Json };
                    pointer = format!("{pointer}/{}", escape_key(&decode_string(key)));
                    (node, container) = (value, Some(map));
                }
                SampleNode::Scalar(_) => return Self::Json,
            }
        }
    }

    /// Returns the header that states the omission and how to read the rest, in the longest form
    /// that fits.
    fn header(&self, bytes: usize, budget: usize, source: &DigestSource<'_>) -> String {
        let DigestSource { call_id, tool, .. } = source;
        let (kind, part) = match self {
            Self::Text { pointer, lines, .. } => {
                (format!("{lines} lines of text"), read_arguments_example(pointer, 100))
            }
            Self::Table { pointer, table } => {
                (format!("a table of {} rows", table.count), read_arguments_example(pointer, 20))
            }
            Self::Json => ("JSON".to_owned(), r#","pointer":"/…""#.to_owned()),
        };
        let call = format!(r#"result.read {{"tool_call_id":"{call_id}""#);
        let candidates = [
            format!(
                "[digest of {tool}: {kind}, {bytes} bytes; parts are omitted, the full result is \
                 stored. Read any part: {call}{part}}}, or search it with \"grep\"]"
            ),
            format!("[digest: {kind}, {bytes} bytes; parts omitted. Read them: {call}{part}}}]"),
            format!("[{bytes} bytes, parts omitted. Read them: {call}}}]"),
            format!("[omitted: result.read {call_id}]"),
            "[omitted]".to_owned(),
            "…".to_owned(),
        ];
        // With a small budget, the header takes only part of it as long as a shorter form exists.
        // For text that part is smaller while the header remains complete, because the relevant
        // line needs the room.
        let fits = |(n, candidate): &(usize, String)| {
            let small = matches!(self, Self::Text { .. }) && *n < 2;
            let part = if small { budget / 2 } else { budget * 2 / 3 };
            let tokens = tokens::count(candidate);
            tokens <= budget && (tokens <= part || tokens <= MIN_BUDGET / 2)
        };
        candidates
            .into_iter()
            .enumerate()
            .find(fits)
            .map(|(_, candidate)| candidate)
            .unwrap_or_default()
    }

    fn body(&self, root: &SampleNode<'a>, source: &DigestSource<'_>, budget: usize) -> String {
        match self {
            Self::Text { pointer, text, .. } => {
                let around = if pointer.is_empty() {
                    String::new()
                } else {
                    enclosing_line(root, budget / 5)
                };
                let rest = budget.saturating_sub(tokens::count(&around));
                around + &text::render(text, source.hint, rest)
            }
            Self::Table { pointer, table } => {
                let around = if pointer.is_empty() {
                    String::new()
                } else {
                    enclosing_line(root, budget / 5)
                };
                let rest = budget.saturating_sub(tokens::count(&around));
                around + &table.render(pointer, rest)
            }
            Self::Json => json::render(root, budget),
        }
    }
}

/// Returns example arguments for `result.read`.
fn read_arguments_example(pointer: &str, limit: usize) -> String {
    let pointer = match pointer {
        "" => String::new(),
        pointer => format!(r#","pointer":{}"#, serde_json::Value::from(pointer)),
    };
    format!(r#"{pointer},"offset":0,"limit":{limit}"#)
}

/// Renders the object that encloses the main content, in one line.
fn enclosing_line(root: &SampleNode<'_>, budget: usize) -> String {
    let around = json::render_enclosing(root, budget.saturating_sub(1));
    if around.is_empty() { around } else { around + "\n" }
}

/// Returns the most detailed of several renderings that fits, or a truncated form of the least
/// detailed one.
fn render_most_detailed(budget: usize, render: impl Fn(u32) -> String) -> String {
    let fits = |text: &str| {
        text.len() <= budget.saturating_mul(BYTES_PER_TOKEN) && !tokens::exceeds(text, budget)
    };
    let (mut low, mut high) = (0, DETAIL_LEVELS);
    let mut best = None;
    while low < high {
        let middle = low.midpoint(high);
        let text = render(middle);
        if fits(&text) {
            best = Some(text);
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    best.unwrap_or_else(|| truncate_to_tokens(&render(DETAIL_LEVELS), budget))
}

/// Scales a number down for each detail level that is given up.
fn scale_down(number: usize, factor: f64, level: u32, min: usize) -> usize {
    ((number as f64 * factor.powf(f64::from(level))) as usize).max(min)
}

/// Truncates a text to `budget` tokens and marks the truncation.
fn truncate_to_tokens(text: &str, budget: usize) -> String {
    if !tokens::exceeds(text, budget) {
        return text.to_owned();
    }
    let mut begin = tokens::prefix_within(text, budget.saturating_sub(1));
    loop {
        let marked = format!("{begin}…");
        if !tokens::exceeds(&marked, budget) {
            return marked;
        }
        if begin.is_empty() {
            return String::new();
        }
        begin = &begin[..begin.floor_char_boundary(begin.len() - 1)];
    }
}
