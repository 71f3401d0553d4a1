//! Renders JSON in a digest: its shape, its counts, the first items of each long array, and
//! truncated long strings.

use std::fmt::Write;

use super::shape::describe_shape;
use super::{BYTES_PER_TOKEN, render_most_detailed, scale_down};
use crate::results::digest::sampling::{SampleArray, SampleNode, SampleObject};

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

    fn items_at(&self, depth: usize) -> usize {
        (self.items >> (2 * depth).min(60)).max(self.min_items)
    }
}

/// Renders the shape and the data in at most `budget` tokens.
pub(super) fn render(root: &SampleNode<'_>, budget: usize) -> String {
    let shape = format!("shape: {}", describe_shape(root, budget / 3));
    let rest = budget.saturating_sub(crate::results::tokens::count(&shape) + 3);
    let data = render_most_detailed(rest, |level| {
        let mut text = "data: ".to_owned();
        write(&mut text, root, &RenderLimits::at_level(level, rest), 0);
        text
    });
    format!("{shape}\n{data}")
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
