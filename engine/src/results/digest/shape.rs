//! Describes the shape of a document: keys, types and item counts. For an array, merges the shapes
//! of its sampled items and marks keys that only some of them have.

use std::fmt::Write;

use crate::domain::json::cursor::decode_string;
use crate::results::digest::sampling::{SampleArray, SampleNode, SampleObject};

/// The type of a value, or of several values at the same location.
#[derive(Default, Clone)]
pub(super) struct Shape<'a> {
    /// Names of scalar types, in the order encountered.
    scalar_types: Vec<&'static str>,
    list: Option<ArrayShape<'a>>,
    map: Option<ObjectShape<'a>>,
}

#[derive(Clone)]
struct ArrayShape<'a> {
    min: usize,
    max: usize,
    item: Option<Box<Shape<'a>>>,
}

#[derive(Clone)]
struct ObjectShape<'a> {
    /// Number of objects merged into this shape.
    seen: usize,
    entries: Vec<(&'a str, usize, Shape<'a>)>,
    /// Maximum number of keys of one object beyond the sampled ones.
    more: usize,
}

/// Objects with more keys than this are not listed in full: their keys are data, not shape.
const MANY_KEYS: usize = 48;

/// Describes the shape in about `budget` tokens at most.
pub(super) fn describe_shape(node: &SampleNode<'_>, budget: usize) -> String {
    let shape = Shape::from_node(node);
    let written = |level: u32| {
        let mut text = String::new();
        let depth = 8_usize.saturating_sub(level as usize / 2);
        let keys = super::scale_down(MANY_KEYS, 0.85, level, 3);
        shape.write(&mut text, depth, keys);
        text
    };
    super::render_most_detailed(budget, written)
}

/// Formats a key for display outside JSON.
pub(super) fn display_key(key: &str) -> String {
    let plain = decode_string(key);
    let simple =
        !plain.is_empty() && plain.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    let text: &str = if simple { &plain } else { key };
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// Returns the scalar type of a JSON text.
pub(super) fn scalar_type(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b't' | b'f') => "boolean",
        Some(b'n') => "null",
        Some(b'"') => "string",
        _ => "number",
    }
}

impl<'a> Shape<'a> {
    pub(super) fn from_node(node: &SampleNode<'a>) -> Self {
        let mut shape = Self::default();
        shape.add(node);
        shape
    }

    pub(super) fn add(&mut self, node: &SampleNode<'a>) {
        match node {
            SampleNode::Scalar(text) | SampleNode::Text(text) => {
                let name = scalar_type(text);
                if !self.scalar_types.contains(&name) {
                    self.scalar_types.push(name);
                }
            }
            SampleNode::Array(list) => self.add_list(list),
            SampleNode::Object(map) => self.add_map(map),
        }
    }

    fn add_list(&mut self, list: &SampleArray<'a>) {
        let (min, max) = (list.count, list.count);
        let shape = self.list.get_or_insert(ArrayShape { min, max, item: None });
        shape.min = shape.min.min(list.count);
        shape.max = shape.max.max(list.count);
        for (_, item) in list.sampled_items() {
            shape.item.get_or_insert_default().add(item);
        }
    }

    fn add_map(&mut self, map: &SampleObject<'a>) {
        let shape =
            self.map.get_or_insert_with(|| ObjectShape { seen: 0, entries: Vec::new(), more: 0 });
        // An object that was not sampled in full says nothing about its other keys.
        if shape.seen > 0 && map.entries.len() < map.count {
            return;
        }
        shape.seen += 1;
        shape.more = shape.more.max(map.count - map.entries.len());
        for (key, value) in &map.entries {
            let position = shape.entries.iter().position(|(name, ..)| name == key);
            match position {
                Some(index) => {
                    let (_, times, value_shape) = &mut shape.entries[index];
                    *times += 1;
                    value_shape.add(value);
                }
                // Ever-changing keys are data, and searching for each among all of them would be
                // slow.
                None if shape.entries.len() >= 4 * MANY_KEYS => shape.more += 1,
                None => shape.entries.push((key, 1, Shape::from_node(value))),
            }
        }
    }

    pub(super) fn write(&self, out: &mut String, depth: usize, keys: usize) {
        let mut before = false;
        let mut or = |out: &mut String| {
            if before {
                out.push('|');
            }
            before = true;
        };
        for name in &self.scalar_types {
            or(out);
            out.push_str(name);
        }
        if let Some(list) = &self.list {
            or(out);
            list.write(out, depth, keys);
        }
        if let Some(map) = &self.map {
            or(out);
            map.write(out, depth, keys);
        }
    }
}

impl ArrayShape<'_> {
    fn write(&self, out: &mut String, depth: usize, keys: usize) {
        let _ = match (self.min, self.max) {
            (min, max) if min == max => write!(out, "[{max}"),
            (min, max) => write!(out, "[{min}–{max}"),
        };
        if let Some(item) = self.item.as_ref().filter(|_| depth > 0) {
            out.push_str(" × ");
            item.write(out, depth - 1, keys);
        }
        out.push(']');
    }
}

impl ObjectShape<'_> {
    fn write(&self, out: &mut String, depth: usize, keys: usize) {
        let all = self.entries.len() + self.more;
        if depth == 0 {
            let _ = write!(out, "{{{all} keys}}");
            return;
        }
        out.push('{');
        for (n, (key, times, shape)) in self.entries.iter().take(keys).enumerate() {
            if n > 0 {
                out.push_str(", ");
            }
            out.push_str(&display_key(key));
            // Some of the merged objects lack this key.
            if *times < self.seen {
                out.push('?');
            }
            out.push_str(": ");
            shape.write(out, depth - 1, keys);
        }
        if all > keys.min(self.entries.len()) {
            let _ = write!(out, ", … {} more keys", all - keys.min(self.entries.len()));
        }
        out.push('}');
    }
}
