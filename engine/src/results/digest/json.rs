//! Renders JSON in a digest: its shape, its counts, the members that match the query, figures about
//! its tables, the first items of each long array, and truncated long strings.

use std::fmt::Write;

use super::binary;
use super::columns::TableProfile;
use super::matches::find_matches;
use super::query::KeywordMatcher;
use super::shape::describe_shape;
use super::{BYTES_PER_TOKEN, render_most_detailed, scale_down};
use crate::domain::json::cursor::{JsonKind, decode_string};
use crate::results::digest::sampling::{SampleArray, SampleNode, SampleObject};
use crate::results::pointer::escape_key;
use crate::results::rows::{RowLayout, RowTable};
use crate::results::tokens;

/// Strings of more bytes are examined for binary data.
const MIN_BINARY_TEXT: usize = 200;
/// Arrays of objects with fewer items need no figures.
const LEAST_PROFILED_ROWS: usize = 8;
/// Levels of a document whose arrays are described by figures.
const PROFILED_DEPTH: usize = 4;

/// Limits on the amount of detail in a rendering.
#[derive(Debug, Clone, Copy)]
pub(super) struct RenderLimits {
    /// Maximum items of an array at the top level; fewer at deeper levels.
    items: usize,
    min_items: usize,
    /// Arrays with at most this many items are shown in full.
    full_up_to_items: usize,
    /// Maximum entries of an object.
    keys: usize,
    /// Maximum bytes of a string.
    text: usize,
    /// Maximum depth.
    depth: usize,
    /// Upper bound on the length of a rendering that could fit the budget.
    max_bytes: usize,
}

impl RenderLimits {
    /// Returns the limits of a detail level, from everything the budget could hold (0) down to the
    /// least.
    pub(super) fn at_level(level: u32, budget: usize) -> Self {
        Self {
            items: scale_down(budget / 4, 0.7, level, 0),
            min_items: match level {
                0..14 => 3,
                14..18 => 2,
                18..23 => 1,
                _ => 0,
            },
            full_up_to_items: 0,
            keys: scale_down(512, 0.7, level, 4),
            text: scale_down(4_096, 0.6, level, 16),
            depth: 10_usize.saturating_sub(level as usize / 4).max(2),
            max_bytes: budget.saturating_mul(BYTES_PER_TOKEN),
        }
    }

    /// Returns the limits of one cell of a table, whose texts have at most `text` bytes.
    pub(super) fn for_cell(text: usize) -> Self {
        Self {
            items: 8,
            min_items: 2,
            full_up_to_items: 6,
            keys: 24,
            text,
            depth: 4,
            max_bytes: 8_000,
        }
    }

    fn items_at(&self, depth: usize) -> usize {
        (self.items >> (2 * depth).min(60)).max(self.min_items)
    }
}

/// A JSON document to be rendered.
pub(super) struct JsonDocument<'n, 'a> {
    pub(super) root: &'n SampleNode<'a>,
    pub(super) text: &'a str,
    /// Pointer of the document, if it is a text within another one.
    pub(super) pointer: &'n str,
}

/// Renders the shape, the relevant members and the data in at most `budget` tokens.
pub(super) fn render(
    document: &JsonDocument<'_, '_>,
    words: &KeywordMatcher,
    budget: usize,
) -> String {
    let JsonDocument { root, text, pointer } = document;
    let matches = match words.has_query() {
        true => render_matches(text, pointer, words, budget * 2 / 5),
        false => String::new(),
    };
    let left = budget.saturating_sub(tokens::count(&matches));
    let shape = format!("shape: {}", describe_shape(root, left / 3));
    let mut values = String::new();
    write_values(&mut values, root, pointer, left / 4, 0);
    let used = tokens::count(&shape) + tokens::count(&values) + 3;
    let rest = left.saturating_sub(used);
    let data = render_most_detailed(rest, |level| {
        let mut text = "data: ".to_owned();
        write(&mut text, root, &RenderLimits::at_level(level, rest), 0);
        text
    });
    format!("{matches}{shape}\n{values}{data}")
}

/// Renders the members that match the query, each with its pointer.
pub(super) fn render_matches(
    text: &str,
    prefix: &str,
    words: &KeywordMatcher,
    budget: usize,
) -> String {
    let mut out = String::new();
    for found in find_matches(text, words) {
        let limit = (budget / 2).clamp(32, 400);
        let mut line = format!("match {prefix}{}: ", found.pointer);
        match JsonKind::of(found.written) {
            // The relevant part of a long text can be anywhere in it.
            JsonKind::Text if found.written.len() > limit => {
                let decoded = decode_string(found.written);
                let from = words.excerpt_start(&decoded, &found.weights);
                let part = &decoded[from..decoded.floor_char_boundary(from + limit)];
                let begins = if from > 0 { "…" } else { "" };
                let ends = if from + part.len() < decoded.len() { "…" } else { "" };
                let _ = write!(line, "{begins}{part}{ends}");
            }
            _ => {
                let node = super::sampling::sample_document(found.written, 64);
                write(&mut line, &node, &RenderLimits::for_cell(limit), 0);
            }
        }
        let line = line.replace('\n', " ");
        if tokens::exceeds(&format!("{out}{line}\n"), budget) {
            continue;
        }
        out.push_str(&line);
        out.push('\n');
    }
    out
}

/// Describes the values of the arrays of objects in a document.
fn write_values(
    out: &mut String,
    node: &SampleNode<'_>,
    pointer: &str,
    budget: usize,
    depth: usize,
) {
    match node {
        SampleNode::Array(list) => {
            let is_table = matches!(list.head.first(), Some(SampleNode::Object(_)));
            if !is_table || list.count < LEAST_PROFILED_ROWS {
                return;
            }
            let (pointer, text) = (pointer.to_owned(), list.written.into());
            let table = RowTable { pointer, text, layout: RowLayout::Objects };
            let profile = TableProfile::new(&table);
            let mut line = format!("values {}: ", table.pointer);
            let mut is_empty = true;
            for column in &profile.columns {
                let Some(part) = column.describe_values(profile.rows.len(), 4) else { continue };
                let longer = format!("{line}{}{part}", if is_empty { "" } else { "; " });
                if tokens::exceeds(&format!("{out}{longer}\n"), budget) {
                    continue;
                }
                (line, is_empty) = (longer, false);
            }
            if !is_empty {
                out.push_str(&line);
                out.push('\n');
            }
        }
        SampleNode::Object(map) if depth < PROFILED_DEPTH => {
            for (key, value) in &map.entries {
                let pointer = format!("{pointer}/{}", escape_key(&decode_string(key)));
                write_values(out, value, &pointer, budget, depth + 1);
            }
        }
        _ => {}
    }
}

/// Writes a value as JSON, with `…` and counts in place of omitted parts.
pub(super) fn write(out: &mut String, node: &SampleNode<'_>, detail: &RenderLimits, depth: usize) {
    // Stop writing a text that is far too long, because it would be discarded.
    if out.len() > detail.max_bytes {
        return;
    }
    match node {
        SampleNode::Scalar(text) => write_plain(out, text, detail),
        SampleNode::Text(text) => write_text(out, text, detail),
        SampleNode::Array(list) => write_list(out, list, detail, depth),
        SampleNode::Object(map) => write_map(out, map, detail, depth),
    }
}

fn write_plain(out: &mut String, text: &str, detail: &RenderLimits) {
    // A number may have any number of digits.
    let max = detail.text.max(40);
    match text.get(..max).filter(|_| text.len() > max) {
        Some(begin) => {
            let _ = write!(out, "{begin}… {} more digits", text.len() - max);
        }
        None => out.push_str(text),
    }
}

fn write_text(out: &mut String, text: &str, detail: &RenderLimits) {
    if text.len() <= detail.text + 16 {
        out.push_str(text);
        return;
    }
    if text.len() > MIN_BINARY_TEXT
        && let Some(content) = binary::detect_base64(&decode_string(text))
    {
        let _ = write!(out, "\"<{}>\"", content.description);
        return;
    }
    // Cut so that no escape sequence is split.
    let begin = text.get(..text.floor_char_boundary(detail.text)).unwrap_or_default();
    let begin =
        begin.rfind('\\').filter(|at| at + 6 > begin.len()).map_or(begin, |at| &begin[..at]);
    let _ = write!(out, "{begin}…\" +{} bytes", text.len() - begin.len() - 1);
}

fn write_list(out: &mut String, list: &SampleArray<'_>, detail: &RenderLimits, depth: usize) {
    if depth >= detail.depth && list.count > 0 {
        let _ = write!(out, "[{} items]", list.count);
        return;
    }
    let max =
        if list.count <= detail.full_up_to_items { list.count } else { detail.items_at(depth) };
    let visible = list.head.len().min(max);
    out.push('[');
    for (n, item) in list.head[..visible].iter().enumerate() {
        if n > 0 {
            out.push(',');
        }
        write(out, item, detail, depth + 1);
    }
    if list.count > visible {
        let comma = if visible > 0 { "," } else { "" };
        let more = if visible > 0 { " more" } else { " items" };
        let _ = write!(out, "{comma}… {}{more}", list.count - visible);
    }
    out.push(']');
}

fn write_map(out: &mut String, map: &SampleObject<'_>, detail: &RenderLimits, depth: usize) {
    if depth >= detail.depth && map.count > 0 {
        let _ = write!(out, "{{{} keys}}", map.count);
        return;
    }
    let visible = map.entries.len().min(detail.keys);
    out.push('{');
    for (n, (key, value)) in map.entries[..visible].iter().enumerate() {
        if n > 0 {
            out.push(',');
        }
        write_text(out, key, detail);
        out.push(':');
        write(out, value, detail, depth + 1);
    }
    if map.count > visible {
        let comma = if visible > 0 { "," } else { "" };
        let more = if visible > 0 { " more keys" } else { " keys" };
        let _ = write!(out, "{comma}… {}{more}", map.count - visible);
    }
    out.push('}');
}

/// Renders the object that encloses the main content: its other entries, with long ones reduced to
/// their size.
pub(super) fn render_enclosing(root: &SampleNode<'_>, budget: usize) -> String {
    let detail = |level: u32| RenderLimits {
        items: 3,
        min_items: 0,
        // No table is this short, so the main content is not shown twice.
        full_up_to_items: 3,
        keys: scale_down(64, 0.8, level, 3),
        text: scale_down(400, 0.75, level, 12),
        depth: 4_usize.saturating_sub(level as usize / 4).max(1),
        max_bytes: budget.saturating_mul(BYTES_PER_TOKEN),
    };
    render_most_detailed(budget, |level| {
        let mut text = "around it: ".to_owned();
        write(&mut text, root, &detail(level), 0);
        text
    })
}
