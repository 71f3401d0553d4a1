//! Digests: a model receives a digest in place of a result that is too long for its context. Pure.
//!
//! A digest never exceeds its token budget, and always reports the omission and how to read the
//! rest: the whole result stays stored, and the tool `result.read` returns any part of it.
//!
//! | result | digest |
//! |---|---|
//! | text | its kind and the facts of that kind, its head, its tail, the most relevant lines |
//! | a table | its columns, the number of rows, figures about all rows, the most relevant rows |
//! | other JSON | its shape, counts, the members that match the query, the first items of arrays |
//! | binary data | its type and size |
//!
//! An object that wraps one long text or one table is digested as that text or table. So is an
//! array in which one item makes up most of the document, as in the results of MCP servers, and a
//! text that holds JSON or CSV. The document is not parsed into a tree, so a digest needs little
//! memory beyond the result itself.

mod binary;
mod columns;
mod html;
mod json;
mod matches;
mod query;
mod sampling;
mod shape;
mod table;
mod text;
mod text_kind;

#[cfg(test)]
mod tests;
use query::KeywordMatcher;
use sampling::{SampleArray, SampleNode, SampleObject, sample_document};
use table::TableView;
use text::TextAnalysis;
use text_kind::TextKind;

use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::json::cursor::decode_string;
use crate::domain::json::decode_unicode_escapes;
use crate::results::embedded::{decode_embedded_escapes, embedded_json};
use crate::results::mcp_content::without_media;
use crate::results::pointer::escape_key;
use crate::results::rows::{RowLayout, RowTable};
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
    /// The question or the call's arguments. Their words make a part of the result relevant, be it
    /// a line, a row or a member.
    pub hint: Option<&'a str>,
    /// Name of the tool that reads the rest, as the reader of the digest sees it in its list.
    pub reader: &'a str,
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
    let bytes = data.text().len();
    // Media and repeated structures of an MCP result are no text for a model.
    let whole = decode_unicode_escapes(data.text());
    let envelope = tokens::exceeds(&whole, budget_tokens).then(|| without_media(data));
    let envelope = envelope.flatten();
    if envelope.is_none() && !tokens::exceeds(&whole, budget_tokens) {
        return None;
    }
    let whole = envelope.as_ref().map_or(whole, |envelope| decode_unicode_escapes(envelope.text()));
    // The arguments of a call may be escaped as well.
    let hint = source.hint.map(decode_unicode_escapes);
    let source = &DigestSource { hint: hint.as_deref(), ..*source };
    let request = DigestRequest { source, bytes, budget: budget_tokens };
    let text = request.render(&whole, "", "");
    Some(Digest { tokens: tokens::count(&text), text, whole_bytes: bytes })
}

/// The properties of a digest that hold for every part of its document.
struct DigestRequest<'s> {
    source: &'s DigestSource<'s>,
    /// Size of the whole result.
    bytes: usize,
    budget: usize,
}

impl DigestRequest<'_> {
    /// Renders a document: the result, or a text within it that holds JSON. `pointer` is its
    /// location, `around` describes the result around it.
    fn render(&self, json: &str, pointer: &str, around: &str) -> String {
        let root = sample_document(json, self.budget.saturating_mul(4).min(MAX_VALUES));
        let content = MainContent::find(&root, pointer);
        let around = match content.written().filter(|_| !is_plain_envelope(&root)) {
            Some(main) => {
                let matches = self.matches_around(json, main, pointer);
                format!("{around}{}{matches}", enclosing_line(&root, self.budget / 8))
            }
            None => around.to_owned(),
        };
        match content {
            MainContent::Text { pointer, written } => {
                self.render_text(&decode_string(written), &pointer, &around)
            }
            MainContent::Table(table, _) => {
                let words = KeywordMatcher::for_data(self.source.hint);
                match TableView::new(&table, &words) {
                    Some(view) => self.render_table(&table, &view, "a table", &around),
                    None => self.render_json(json, &root, pointer, &around),
                }
            }
            MainContent::Json => self.render_json(json, &root, pointer, &around),
        }
    }

    /// Renders the members around the main content that match the query.
    fn matches_around(&self, json: &str, main: &str, pointer: &str) -> String {
        let words = KeywordMatcher::for_data(self.source.hint);
        let begin = (main.as_ptr() as usize).checked_sub(json.as_ptr() as usize);
        let (Some(begin), true) = (begin, words.has_query()) else { return String::new() };
        let (before, behind) = (json.get(..begin), json.get(begin + main.len()..));
        let (Some(before), Some(behind)) = (before, behind) else { return String::new() };
        let rest = format!("{before}null{behind}");
        json::render_matches(&rest, pointer, &words, self.budget / 8)
    }

    fn render_text(&self, text: &str, pointer: &str, around: &str) -> String {
        let text: &str = &decode_embedded_escapes(text);
        if let Some(json) = embedded_json(text) {
            return self.render(json, pointer, around);
        }
        if let Some(table) = RowTable::find_in_plain_text(text, pointer) {
            let words = KeywordMatcher::for_data(self.source.hint);
            if let Some(view) = TableView::new(&table, &words) {
                let kind = match table.layout {
                    RowLayout::Csv { .. } => "CSV, a table",
                    _ => "lines of JSON, a table",
                };
                return self.render_table(&table, &view, kind, around);
            }
        }
        let kind = TextKind::detect(text);
        let lines = text::line_count(text);
        let part = read_arguments_example(pointer, 100);
        let note = self.header(&kind.describe(lines), &part, matches!(kind, TextKind::Plain));
        let words = KeywordMatcher::new(self.source.hint);
        let left = self.budget.saturating_sub(tokens::count(&note) + 1);
        let around = if tokens::exceeds(around, left / 3) { "" } else { around };
        let facts = kind.facts(text, left.saturating_sub(tokens::count(around)) * 2 / 5);
        let (shown, source_lines) = match &kind {
            TextKind::Html(page) => (page.text.as_str(), Some(page.source_lines.as_slice())),
            TextKind::Binary(content) => (content.decoded_text.as_deref().unwrap_or(""), None),
            _ => (text, None),
        };
        let analysis = TextAnalysis::new(shown, &words, source_lines);
        self.assemble(&note, |budget| {
            let budget = budget.saturating_sub(tokens::count(around));
            let rest = budget.saturating_sub(tokens::count(&facts));
            format!("{around}{facts}{}", analysis.render(rest))
        })
    }

    fn render_table(
        &self,
        table: &RowTable<'_>,
        view: &TableView<'_>,
        kind: &str,
        around: &str,
    ) -> String {
        let part = read_arguments_example(&table.pointer, 20);
        let note = self.header(&format!("{kind} of {} rows", view.count()), &part, false);
        self.assemble(&note, |budget| {
            let around = if tokens::exceeds(around, budget / 5) { "" } else { around };
            let rest = budget.saturating_sub(tokens::count(around));
            format!("{around}{}", view.render(rest))
        })
    }

    fn render_json(
        &self,
        json: &str,
        root: &SampleNode<'_>,
        pointer: &str,
        around: &str,
    ) -> String {
        let note = self.header("JSON", r#","pointer":"/…""#, false);
        let words = KeywordMatcher::for_data(self.source.hint);
        self.assemble(&note, |budget| {
            let around = if tokens::exceeds(around, budget / 5) { "" } else { around };
            let rest = budget.saturating_sub(tokens::count(around));
            let document = json::JsonDocument { root, text: json, pointer };
            format!("{around}{}", json::render(&document, &words, rest))
        })
    }

    /// Joins the header and the body within the budget.
    fn assemble(&self, note: &str, body: impl Fn(usize) -> String) -> String {
        let mut body_budget = self.budget.saturating_sub(tokens::count(note) + 1);
        // The parts may tokenize differently when they are joined than alone.
        for _ in 0..4 {
            let body = body(body_budget);
            let both = format!("{note}\n{body}");
            if !body.is_empty() && !tokens::exceeds(&both, self.budget) {
                return both;
            }
            body_budget = body_budget.saturating_sub(4);
        }
        note.to_owned()
    }

    /// Returns the header that states the omission and how to read the rest, in the longest form
    /// that fits.
    fn header(&self, kind: &str, part: &str, is_plain_text: bool) -> String {
        let DigestSource { call_id, tool, reader, .. } = self.source;
        let (bytes, budget) = (self.bytes, self.budget);
        let call = format!(r#"{reader} {{"tool_call_id":"{call_id}""#);
        let query = match kind.contains("table") {
            true => {
                concat!(
                    r#"search it with "grep", or query its rows with "where", "select", "#,
                    r#""aggregate", "group_by""#
                )
            }
            false => r#"or search it with "grep""#,
        };
        let candidates = [
            format!(
                "[digest of {tool}: {kind}, {bytes} bytes; parts are omitted, the full result is \
                 stored. Read any part: {call}{part}}}, {query}]"
            ),
            format!("[digest: {kind}, {bytes} bytes; parts omitted. Read them: {call}{part}}}]"),
            format!("[{bytes} bytes, parts omitted. Read them: {call}}}]"),
            format!("[omitted: {reader} {call_id}]"),
            "[omitted]".to_owned(),
            "…".to_owned(),
        ];
        // With a small budget, the header takes only part of it as long as a shorter form exists:
        // the content needs the room.
        let share = |n: usize| match (n, is_plain_text) {
            (0, true) => budget * 2 / 5,
            (0, false) => budget / 4,
            (1, _) => budget / 2,
            _ => budget * 2 / 3,
        };
        let fits = |(n, candidate): &(usize, String)| {
            let tokens = tokens::count(candidate);
            tokens <= budget && (tokens <= share(*n) || tokens <= MIN_BUDGET / 2)
        };
        let found = candidates.into_iter().enumerate().find(fits);
        found.map(|(_, candidate)| candidate).unwrap_or_default()
    }
}

/// The main content of a result, and its location.
enum MainContent<'a> {
    /// A text, as raw JSON.
    Text {
        pointer: String,
        written: &'a str,
    },
    /// A table, and its raw JSON.
    Table(RowTable<'a>, &'a str),
    Json,
}

impl<'a> MainContent<'a> {
    /// Returns the raw JSON of the content, if it is a part of the document.
    fn written(&self) -> Option<&'a str> {
        match self {
            Self::Text { written, .. } | Self::Table(_, written) => Some(written),
            Self::Json => None,
        }
    }

    /// Descends to the value that makes up most of the document.
    fn find(root: &SampleNode<'a>, pointer: &str) -> Self {
        let (mut node, mut container, mut pointer): (_, Option<&SampleObject<'a>>, _) =
            (root, None, pointer.to_owned());
        loop {
            match node {
                SampleNode::Text(written) => {
                    return Self::Text { pointer, written };
                }
                SampleNode::Array(list) => {
                    // Next to a table that is almost the whole document, other items need no room.
                    let nearly_all = list.bytes > root.bytes() / 10 * 9;
                    if nearly_all && is_row_list(list) {
                        let container = container.map(|map| map.written);
                        if let Some(table) = RowTable::find(list.written, container, &pointer) {
                            return Self::Table(table, list.written);
                        }
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
                    if let Some((key, value)) = dominant {
                        pointer = format!("{pointer}/{}", escape_key(&decode_string(key)));
                        (node, container) = (value, Some(map));
                        continue;
                    }
                    let is_record = |value: &SampleNode<'_>| matches!(value, SampleNode::Object(_));
                    let nearly_all = map.bytes > root.bytes() / 10 * 9;
                    if nearly_all
                        && map.count >= 2 * table::LEAST_ROWS
                        && map.entries.iter().all(|(_, value)| is_record(value))
                    {
                        let (text, layout) = (map.written.into(), RowLayout::Entries);
                        let table = RowTable { pointer, text, layout };
                        return Self::Table(table, map.written);
                    }
                    return Self::Json;
                }
                SampleNode::Scalar(_) => return Self::Json,
            }
        }
    }
}

/// Returns whether an array looks like the rows of a table.
fn is_row_list(list: &SampleArray<'_>) -> bool {
    let is_object = |item: &SampleNode<'_>| matches!(item, SampleNode::Object(_));
    let width = |item: &SampleNode<'_>| match item {
        SampleNode::Array(row) => Some(row.count),
        _ => None,
    };
    let mut items = list.sampled_items().map(|(_, item)| item);
    if list.count < table::LEAST_ROWS || list.head.len() < 2 {
        return false;
    }
    match items.next() {
        Some(SampleNode::Object(_)) => items.all(is_object),
        Some(first @ SampleNode::Array(_)) => {
            width(first) != Some(0) && items.all(|item| width(item) == width(first))
        }
        _ => false,
    }
}

/// Returns whether a document is an MCP result with one part, which has nothing else to say.
fn is_plain_envelope(root: &SampleNode<'_>) -> bool {
    let SampleNode::Object(map) = root else { return false };
    let is_known = |key: &str| {
        let known = ["\"content\"", "\"isError\"", "\"_meta\"", "\"resultType\""];
        known.contains(&key) || key == "\"structuredContent\""
    };
    let has_one_part = |value: &SampleNode<'_>| match value {
        SampleNode::Array(parts) => parts.count == 1,
        _ => false,
    };
    map.entries.iter().all(|(key, _)| is_known(key))
        && map.entries.iter().any(|(key, value)| *key == "\"content\"" && has_one_part(value))
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
    if matches!(root, SampleNode::Text(_) | SampleNode::Scalar(_)) {
        return String::new();
    }
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
