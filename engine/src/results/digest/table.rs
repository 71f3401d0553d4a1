//! Renders tables in a digest: columns, the number of rows, and some of the rows.
//!
//! A table is a long array of objects with the same keys, or of arrays of the same length whose
//! columns are named in a sibling entry, as in the result of `database.query`.

use std::fmt::Write;

use super::json::{self, RenderLimits};
use super::shape::{Shape, display_key};
use super::{render_most_detailed, scale_down};
use crate::domain::json::cursor::decode_string;
use crate::results::digest::sampling::{SampleArray, SampleNode, SampleObject};

/// Arrays with fewer rows are shown as JSON just as well.
const LEAST_ROWS: usize = 4;

pub(super) struct Table<'n, 'a> {
    pub(super) count: usize,
    columns: Vec<(String, Shape<'a>)>,
    /// Sampled rows with their indexes, with cells in column order.
    rows: Vec<(usize, Vec<&'n SampleNode<'a>>)>,
}

impl<'n, 'a> Table<'n, 'a> {
    /// Interprets an array as a table if it is one. `container` is the object that contains the
    /// array.
    pub(super) fn detect(
        list: &'n SampleArray<'a>,
        container: Option<&SampleObject<'a>>,
    ) -> Option<Self> {
        if list.count < LEAST_ROWS || list.head.len() < 2 {
            return None;
        }
        let (names, rows) = match list.head.first()? {
            SampleNode::Object(first) => rows_of_objects(list, first)?,
            SampleNode::Array(first) => rows_of_arrays(list, first, container)?,
            _ => return None,
        };
        let shape = |column: usize| {
            let mut shape = Shape::default();
            rows.iter().filter_map(|(_, row)| row.get(column)).for_each(|cell| shape.add(cell));
            shape
        };
        let columns = names.into_iter().enumerate().map(|(n, name)| (name, shape(n))).collect();
        Some(Self { count: list.count, columns, rows })
    }

    /// Renders columns and rows in at most `budget` tokens.
    pub(super) fn render(&self, pointer: &str, budget: usize) -> String {
        render_most_detailed(budget, |level| self.render_at_level(pointer, level, budget))
    }

    fn render_at_level(&self, pointer: &str, level: u32, budget: usize) -> String {
        let location = if pointer.is_empty() { String::new() } else { format!(" {pointer}") };
        let (rows, columns) = (self.count, self.columns.len());
        let mut text = format!("table{location}: {rows} rows, {columns} columns\ncolumns: ");
        let names = scale_down(256, 0.8, level, 4);
        for (n, (name, shape)) in self.columns.iter().take(names).enumerate() {
            if n > 0 {
                text.push_str(", ");
            }
            let _ = write!(text, "{name} ");
            shape.write(&mut text, 1, 6);
        }
        if columns > names {
            let _ = write!(text, ", … {} more", columns - names);
        }
        let detail = RenderLimits::at_level(level + 6, budget);
        let mut after = 0;
        for index in self.sample(scale_down(budget / 3, 0.7, level, 0)) {
            let (row, cells) = &self.rows[index];
            if *row > after {
                let _ = write!(text, "\n… {} rows", row - after);
            }
            after = row + 1;
            let _ = write!(text, "\n{row}: [");
            for (n, cell) in cells.iter().take(names).enumerate() {
                if n > 0 {
                    text.push(',');
                }
                json::write(&mut text, cell, &detail, 1);
            }
            text.push_str(if cells.len() > names { ",…]" } else { "]" });
        }
        if after < self.count {
            let _ = write!(text, "\n… {} rows", self.count - after);
        }
        text
    }

    /// Selects sampled rows to show: mostly the first ones, some of the others, and the last.
    fn sample(&self, max: usize) -> Vec<usize> {
        let seen = self.rows.len();
        // The first items of the array are contiguous; the sparse samples start after the first
        // gap.
        let near = self.rows.iter().enumerate().take_while(|(n, (row, _))| n == row).count();
        let last = seen.checked_sub(1).filter(|_| max > 1);
        let first = near.min(max - max / 3 - usize::from(last.is_some() && max > 0));
        let far = seen.saturating_sub(near + 1);
        let some = far.min(max.saturating_sub(first + 1));
        let mut indexes: Vec<usize> = (0..first).collect();
        indexes.extend((0..some).map(|n| near + n * far / some.max(1)));
        indexes.extend(last);
        indexes.sort_unstable();
        indexes.dedup();
        indexes
    }
}

type TableRows<'n, 'a> = Vec<(usize, Vec<&'n SampleNode<'a>>)>;

/// Reads rows that are objects with the same keys as the first one.
fn rows_of_objects<'n, 'a>(
    list: &'n SampleArray<'a>,
    first: &SampleObject<'a>,
) -> Option<(Vec<String>, TableRows<'n, 'a>)> {
    let keys: Vec<&str> = first.entries.iter().map(|(key, _)| *key).collect();
    if keys.is_empty() || keys.len() != first.count {
        return None;
    }
    let row = |node: &'n SampleNode<'a>| {
        let SampleNode::Object(map) = node else { return None };
        if map.count != keys.len() || map.entries.len() != map.count {
            return None;
        }
        let cell = |(n, key): (usize, &&str)| {
            // The keys are almost always in the same order.
            let entry = map.entries.get(n).filter(|(found, _)| found == key);
            let entry = entry.or_else(|| map.entries.iter().find(|(found, _)| found == key));
            entry.map(|(_, value)| value)
        };
        keys.iter().enumerate().map(cell).collect::<Option<Vec<_>>>()
    };
    let rows = uniform_rows(list, row)?;
    Some((keys.into_iter().map(display_key).collect(), rows))
}

/// Reads rows that are arrays of the same length as the first one, with column names from a sibling
/// entry.
fn rows_of_arrays<'n, 'a>(
    list: &'n SampleArray<'a>,
    first: &SampleArray<'a>,
    container: Option<&SampleObject<'a>>,
) -> Option<(Vec<String>, TableRows<'n, 'a>)> {
    let width = first.count;
    if width == 0 {
        return None;
    }
    let row = |node: &'n SampleNode<'a>| match node {
        SampleNode::Array(row) if row.count == width && row.head.len() == width => {
            Some(row.head.iter().collect())
        }
        _ => None,
    };
    let rows = uniform_rows(list, row)?;
    let header = container.and_then(|map| {
        let columns =
            map.entries.iter().find(|(key, _)| matches!(*key, "\"columns\"" | "\"fields\""));
        match columns? {
            (_, SampleNode::Array(names)) if names.head.len() == width => {
                names.head.iter().map(column_name).collect::<Option<Vec<_>>>()
            }
            _ => None,
        }
    });
    let numbered = || (0..width).map(|n| n.to_string()).collect();
    Some((header.unwrap_or_else(numbered), rows))
}

fn column_name(node: &SampleNode<'_>) -> Option<String> {
    match node {
        SampleNode::Text(name) => Some(display_key(name)),
        SampleNode::Object(column) => {
            let name = column.entries.iter().find(|(key, _)| decode_string(key) == "name")?;
            match &name.1 {
                SampleNode::Text(name) => Some(display_key(name)),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Returns the sampled rows, or `None` if one of them does not match the others. Rows whose content
/// was not sampled in full, which can be the last ones, are skipped.
fn uniform_rows<'n, 'a>(
    list: &'n SampleArray<'a>,
    row: impl Fn(&'n SampleNode<'a>) -> Option<Vec<&'n SampleNode<'a>>>,
) -> Option<TableRows<'n, 'a>> {
    let hollow = |node: &SampleNode<'a>| match node {
        SampleNode::Object(map) => map.entries.len() < map.count,
        SampleNode::Array(list) => list.head.len() < list.count,
        _ => false,
    };
    let mut rows = Vec::new();
    for (index, node) in list.sampled_items() {
        match row(node) {
            Some(cells) => rows.push((index, cells)),
            None if hollow(node) => {}
            None => return None,
        }
    }
    (rows.len() >= 2).then_some(rows)
}
