//! Describes the columns of a table: types, ranges, sums and frequent values, from all its rows.

use std::borrow::Cow;
use std::fmt::Write;

use super::sampling::sample_document;
use super::shape::{Shape, display_key, scalar_type};
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::rows::decimal::{DecimalSum, parse_number};
use crate::results::rows::{KEY_COLUMN, RowTable, TableRow, VALUE_COLUMN};

/// Maximum number of columns that are described.
const MAX_COLUMNS: usize = 200;
/// Maximum number of different values of a column that are counted.
const MAX_DISTINCT: usize = 40;
/// Maximum length of a value that is counted, in bytes.
const MAX_COUNTED_VALUE: usize = 60;
/// Maximum number of arrays and objects of a column whose shape is described.
const MAX_SHAPES: usize = 200;

/// All rows of a table, and its columns.
pub(super) struct TableProfile<'t> {
    pub(super) rows: Vec<RowText<'t>>,
    pub(super) columns: Vec<ColumnProfile<'t>>,
    /// True if some rows are no objects, or have columns beyond the limit.
    pub(super) is_irregular: bool,
}

/// The text of one row, and its key if the table is an object.
#[derive(Clone, Copy)]
pub(super) struct RowText<'t> {
    pub(super) written: &'t str,
    pub(super) key: Option<&'t str>,
}

/// The values of one column.
pub(super) struct ColumnProfile<'t> {
    /// The name as rows write it, decoded.
    pub(super) name: Cow<'t, str>,
    /// Number of rows that have the column.
    present: usize,
    nulls: usize,
    /// Names of scalar types, in the order encountered.
    types: Vec<&'static str>,
    /// Shape of the arrays and objects, if there are any.
    nested: Option<Shape<'t>>,
    nested_count: usize,
    numbers: usize,
    sum: DecimalSum,
    pub(super) least: Option<(f64, Cow<'t, str>, usize)>,
    pub(super) greatest: Option<(f64, Cow<'t, str>, usize)>,
    /// First and last of the texts that look like a date.
    dates: Option<(Cow<'t, str>, Cow<'t, str>)>,
    other_texts: usize,
    /// Different values and their counts, as long as there are few of them.
    distinct: Option<Vec<(Cow<'t, str>, usize)>>,
}

impl<'t> TableProfile<'t> {
    /// Reads all rows of a table.
    pub(super) fn new(table: &'t RowTable<'t>) -> Self {
        let mut profile = Self { rows: Vec::new(), columns: Vec::new(), is_irregular: false };
        let stated = table.stated_columns().unwrap_or_default();
        let named = stated.iter().map(|name| ColumnProfile::new(Cow::Borrowed(name.as_str())));
        profile.columns.extend(named.take(MAX_COLUMNS));
        table.visit(|index, row| {
            profile.add_row(index, row);
            true
        });
        profile
    }

    /// Returns whether most rows lack most columns: such rows are records of several kinds.
    pub(super) fn is_sparse(&self) -> bool {
        let cells: usize = self.columns.iter().map(|column| column.present).sum();
        cells * 3 < self.columns.len() * self.rows.len()
    }

    fn add_row(&mut self, index: usize, row: TableRow<'t>) {
        match row {
            TableRow::Cells { written, cells } => {
                self.rows.push(RowText { written, key: None });
                for (column, cell) in self.columns.iter_mut().zip(cells) {
                    column.add_text(index, cell);
                }
            }
            TableRow::Json { written, key } => {
                self.rows.push(RowText { written, key });
                let mut position = 0;
                if let Some(key) = key
                    && let Some(column) = self.column(KEY_COLUMN.into(), &mut position)
                {
                    column.add_json(index, key);
                }
                self.add_members(index, written, position);
            }
        }
    }

    fn add_members(&mut self, index: usize, written: &'t str, mut position: usize) {
        let mut cursor = JsonCursor::new(written);
        match cursor.kind() {
            JsonKind::Object => {
                cursor.enter();
                while cursor.advance() {
                    let name = decode_string(cursor.read_key());
                    let value = cursor.read_value();
                    match self.column(name, &mut position) {
                        Some(column) => column.add_json(index, value),
                        None => self.is_irregular = true,
                    }
                }
            }
            JsonKind::Array if !self.columns.is_empty() => {
                cursor.enter();
                while cursor.advance() {
                    let value = cursor.read_value();
                    match self.columns.get_mut(position) {
                        Some(column) => column.add_json(index, value),
                        None => self.is_irregular = true,
                    }
                    position += 1;
                }
            }
            _ => {
                self.is_irregular = true;
                if let Some(column) = self.column(VALUE_COLUMN.into(), &mut position) {
                    column.add_json(index, written);
                }
            }
        }
    }

    /// Returns the column of this name. Rows almost always have their columns in the same order, so
    /// the position is tried first.
    fn column(
        &mut self,
        name: Cow<'t, str>,
        position: &mut usize,
    ) -> Option<&mut ColumnProfile<'t>> {
        let expected = *position;
        let found = match self.columns.get(expected) {
            Some(column) if column.name == name => Some(expected),
            _ => self.columns.iter().position(|column| column.name == name),
        };
        let index = match found {
            Some(index) => index,
            None if self.columns.len() >= MAX_COLUMNS => return None,
            None => {
                self.columns.push(ColumnProfile::new(name));
                self.columns.len() - 1
            }
        };
        *position = index + 1;
        self.columns.get_mut(index)
    }
}

impl<'t> ColumnProfile<'t> {
    fn new(name: Cow<'t, str>) -> Self {
        Self {
            name,
            present: 0,
            nulls: 0,
            types: Vec::new(),
            nested: None,
            nested_count: 0,
            numbers: 0,
            sum: DecimalSum::default(),
            least: None,
            greatest: None,
            dates: None,
            other_texts: 0,
            distinct: Some(Vec::new()),
        }
    }

    fn add_json(&mut self, row: usize, written: &'t str) {
        self.present += 1;
        match JsonKind::of(written) {
            JsonKind::Array | JsonKind::Object => {
                self.nested_count += 1;
                self.distinct = None;
                if self.nested_count <= MAX_SHAPES {
                    let node = sample_document(written, 64);
                    self.nested.get_or_insert_default().add(&node);
                }
                return;
            }
            JsonKind::Null => self.nulls += 1,
            JsonKind::Number => self.add_number(row, Cow::Borrowed(written)),
            JsonKind::Text => self.add_label(decode_string(written)),
            JsonKind::Bool => self.count_value(Cow::Borrowed(written)),
        }
        self.add_type(scalar_type(written));
    }

    /// Adds a value of a text, which has no types.
    fn add_text(&mut self, row: usize, text: Cow<'t, str>) {
        self.present += 1;
        if text.is_empty() {
            self.nulls += 1;
            self.add_type("null");
        } else if parse_number(&text).is_some() {
            self.add_type("number");
            self.add_number(row, text);
        } else {
            self.add_type("string");
            self.add_label(text);
        }
    }

    fn add_type(&mut self, name: &'static str) {
        if !self.types.contains(&name) {
            self.types.push(name);
        }
    }

    fn add_number(&mut self, row: usize, written: Cow<'t, str>) {
        self.numbers += 1;
        self.sum.add(&written);
        let Ok(number) = written.parse::<f64>() else { return };
        if self.least.as_ref().is_none_or(|(least, ..)| number < *least) {
            self.least = Some((number, written.clone(), row));
        }
        if self.greatest.as_ref().is_none_or(|(greatest, ..)| number > *greatest) {
            self.greatest = Some((number, written.clone(), row));
        }
        self.count_value(written);
    }

    fn add_label(&mut self, text: Cow<'t, str>) {
        if !is_date(&text) {
            self.other_texts += 1;
        } else {
            match &mut self.dates {
                None => self.dates = Some((text.clone(), text.clone())),
                Some((first, last)) => {
                    if text < *first {
                        *first = text.clone();
                    } else if text > *last {
                        *last = text.clone();
                    }
                }
            }
        }
        self.count_value(text);
    }

    fn count_value(&mut self, value: Cow<'t, str>) {
        let Some(distinct) = &mut self.distinct else { return };
        let is_full = distinct.len() >= MAX_DISTINCT || value.len() > MAX_COUNTED_VALUE;
        match distinct.iter_mut().find(|(known, _)| *known == value) {
            Some((_, count)) => *count += 1,
            None if is_full => self.distinct = None,
            None => distinct.push((value, 1)),
        }
    }

    /// Writes the name and the type: `vip? boolean`.
    pub(super) fn write_type(&self, out: &mut String, rows: usize) {
        out.push_str(&self.shown_name());
        // Some rows lack this column.
        if self.present < rows {
            out.push('?');
        }
        out.push(' ');
        out.push_str(&self.types.join("|"));
        if let Some(shape) = &self.nested {
            if !self.types.is_empty() {
                out.push('|');
            }
            shape.write(out, 1, 6);
        }
    }

    pub(super) fn shown_name(&self) -> String {
        display_key(&serde_json::Value::from(self.name.as_ref()).to_string())
    }

    /// Returns a summary of the values: `city: Berlin 134, Oslo 133`.
    pub(super) fn describe_values(&self, rows: usize, max_values: usize) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        let distinct = self.distinct.as_ref().filter(|distinct| {
            let few = distinct.len() <= 12 || distinct.len() * 4 <= rows;
            few && !distinct.is_empty() && distinct.iter().any(|(_, count)| *count > 1)
        });
        // A few distinct numbers are categories, such as a priority or a status.
        let is_category = distinct.is_some_and(|d| d.len() <= 12 || self.numbers == 0);
        if let Some(distinct) = distinct.filter(|_| is_category) {
            let mut values: Vec<&(Cow<'_, str>, usize)> = distinct.iter().collect();
            values.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
            let shown = values.iter().take(max_values);
            parts.extend(shown.map(|(value, count)| format!("{value} {count}")));
            if values.len() > max_values {
                parts.push(format!("… {} more values", values.len() - max_values));
            }
        } else if let Some((first, last)) = self.dates.as_ref().filter(|_| self.other_texts == 0) {
            parts.push(format!("{first} to {last}"));
        }
        if let (Some((_, least, _)), Some((_, greatest, _))) = (&self.least, &self.greatest) {
            if !is_category {
                parts.push(format!("{least} to {greatest}"));
            }
            if is_summable(&self.name) && self.numbers * 2 > self.present {
                parts.push(format!("sum {}", self.sum.to_json()));
            }
        }
        if self.nulls > 0 && self.nulls < self.present {
            parts.push(format!("{} null", self.nulls));
        }
        let mut text = String::new();
        if !parts.is_empty() {
            let _ = write!(text, "{}: {}", self.shown_name(), parts.join(", "));
        }
        (!text.is_empty()).then_some(text)
    }
}

/// Returns whether the sum of a column can mean something.
fn is_summable(name: &str) -> bool {
    let name = name.to_lowercase();
    let is_label = ["id", "year", "zip", "lat", "lon", "lng", "line", "code", "number", "port"]
        .into_iter()
        .any(|word| name == word || name.ends_with(&format!("_{word}")));
    !is_label && !name.ends_with("latitude") && !name.ends_with("longitude")
}

fn is_date(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() >= 8
        && bytes.len() <= 40
        && bytes[..4].iter().all(u8::is_ascii_digit)
        && matches!(bytes[4], b'-' | b'/')
        && bytes[5].is_ascii_digit()
}
