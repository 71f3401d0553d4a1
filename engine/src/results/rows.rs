//! Rows of the tables inside a result: finds a table and visits its rows. Pure.
//!
//! A table is an array of objects, an array of arrays with its column names next to it, an object
//! whose entries are objects, CSV text, or lines of JSON. A string that holds JSON is read as that
//! JSON, because many tools return their data as text. Digests describe the columns of a table, and
//! slices filter and aggregate its rows; both read tables here, so both see the same ones.

pub(crate) mod csv;
pub(crate) mod decimal;

use std::borrow::Cow;

use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::domain::json::decode_unicode_escapes;
use crate::results::embedded::{embedded_json, is_json_lines};
use crate::results::pointer::escape_key;
use csv::CsvReader;

/// Levels of a document that are searched for a table.
const MAX_TABLE_DEPTH: usize = 6;
/// Name of the only column of rows that are no objects.
pub(crate) const VALUE_COLUMN: &str = "value";
/// Name of the column with the keys of an object whose entries are the rows.
pub(crate) const KEY_COLUMN: &str = "key";
/// Texts of fewer bytes are no tables.
const MIN_TABLE_TEXT: usize = 40;

/// A table inside a result.
#[derive(Debug, Clone)]
pub(crate) struct RowTable<'a> {
    /// JSON pointer of the table within the result.
    pub(crate) pointer: String,
    /// The table as raw JSON, or as decoded text for CSV and lines of JSON.
    pub(crate) text: Cow<'a, str>,
    pub(crate) layout: RowLayout,
}

/// The way in which a table is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RowLayout {
    /// An array of objects. An item of another type has the one column `value`.
    Objects,
    /// An object whose entries are objects; the column `key` has their keys.
    Entries,
    /// An array of arrays, with the names of the columns.
    Arrays(Vec<String>),
    /// Text with one JSON object per line.
    JsonLines,
    /// Text with separated values, with the names of the columns.
    Csv { delimiter: u8, columns: Vec<String> },
}

/// One value of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cell<'a> {
    /// Raw JSON.
    Json(&'a str),
    /// A value of a text, which has no types.
    Text(Cow<'a, str>),
}

/// One row of a table.
#[derive(Debug, Clone)]
pub(crate) enum TableRow<'a> {
    /// Raw JSON of the item, and its key if the table is an object.
    Json { written: &'a str, key: Option<&'a str> },
    /// The values of a record, and its text.
    Cells { written: &'a str, cells: Vec<Cow<'a, str>> },
}

impl<'a> RowTable<'a> {
    /// Finds the table of a value: the value itself, or the largest table inside it. `container` is
    /// the object that contains the value, for the names of its columns.
    pub(crate) fn find(
        written: &'a str,
        container: Option<&str>,
        pointer: &str,
    ) -> Option<RowTable<'a>> {
        Self::find_within(written, container, pointer, 0)
    }

    fn find_within(
        written: &'a str,
        container: Option<&str>,
        pointer: &str,
        depth: usize,
    ) -> Option<RowTable<'a>> {
        if depth > MAX_TABLE_DEPTH {
            return None;
        }
        match JsonKind::of(written) {
            JsonKind::Array => Self::find_in_array(written, container, pointer, depth),
            JsonKind::Object => Self::find_in_object(written, pointer, depth),
            JsonKind::Text if written.len() >= MIN_TABLE_TEXT => {
                Self::find_in_text(decode_string(written), pointer, depth)
            }
            _ => None,
        }
    }

    fn find_in_array(
        written: &'a str,
        container: Option<&str>,
        pointer: &str,
        depth: usize,
    ) -> Option<RowTable<'a>> {
        let mut cursor = JsonCursor::new(written);
        cursor.enter();
        if !cursor.advance() {
            return None;
        }
        let (kind, first) = (cursor.kind(), cursor.read_value());
        let has_more = cursor.advance();
        let table = |layout| RowTable { pointer: pointer.to_owned(), text: written.into(), layout };
        match kind {
            JsonKind::Object if !has_more => {
                // The one item usually wraps the data, as in the results of MCP servers.
                let inner = Self::find_within(first, None, &format!("{pointer}/0"), depth + 1);
                inner.or_else(|| Some(table(RowLayout::Objects)))
            }
            JsonKind::Array => Some(table(RowLayout::Arrays(array_columns(first, container)))),
            JsonKind::Object => Some(table(RowLayout::Objects)),
            _ if depth == 0 => Some(table(RowLayout::Objects)),
            _ => None,
        }
    }

    fn find_in_object(written: &'a str, pointer: &str, depth: usize) -> Option<RowTable<'a>> {
        let (mut best, mut entries): (Option<RowTable<'a>>, _) = (None, 0);
        let (mut all_objects, mut cursor) = (true, JsonCursor::new(written));
        cursor.enter();
        while cursor.advance() {
            let key = cursor.read_key();
            all_objects &= cursor.kind() == JsonKind::Object;
            entries += 1;
            let value = cursor.read_value();
            if best.as_ref().is_some_and(|best| best.text.len() >= value.len()) {
                continue;
            }
            let inner = format!("{pointer}/{}", escape_key(&decode_string(key)));
            let found = Self::find_within(value, Some(written), &inner, depth + 1);
            if let Some(found) = found
                && best.as_ref().is_none_or(|best| best.text.len() < found.text.len())
            {
                best = Some(found);
            }
        }
        // Records keyed by their ids are a table, even if one of them contains a table itself.
        if all_objects && entries >= 4 {
            let text = written.into();
            return Some(RowTable { pointer: pointer.into(), text, layout: RowLayout::Entries });
        }
        best
    }

    fn find_in_text(text: Cow<'a, str>, pointer: &str, depth: usize) -> Option<RowTable<'a>> {
        if let Some(json) = embedded_json(&text) {
            return Self::find_within_owned(&decode_unicode_escapes(json), pointer, depth);
        }
        Self::from_plain_text(text, pointer)
    }

    /// Interprets a text that is no JSON as a table, if it is one.
    pub(crate) fn find_in_plain_text(text: &'a str, pointer: &str) -> Option<RowTable<'a>> {
        Self::from_plain_text(Cow::Borrowed(text), pointer)
    }

    fn from_plain_text(text: Cow<'a, str>, pointer: &str) -> Option<RowTable<'a>> {
        let pointer = pointer.to_owned();
        if is_json_lines(&text) {
            let text = match decode_unicode_escapes(&text) {
                Cow::Owned(decoded) => Cow::Owned(decoded),
                Cow::Borrowed(_) => text,
            };
            return Some(RowTable { pointer, text, layout: RowLayout::JsonLines });
        }
        let (delimiter, columns) = csv::detect(&text)?;
        Some(RowTable { pointer, text, layout: RowLayout::Csv { delimiter, columns } })
    }

    fn find_within_owned(json: &str, pointer: &str, depth: usize) -> Option<RowTable<'a>> {
        let RowTable { pointer, text, layout } =
            RowTable::find_within(json, None, pointer, depth + 1)?;
        Some(RowTable { pointer, text: Cow::Owned(text.into_owned()), layout })
    }

    /// Visits the rows in order, until the visitor returns false.
    pub(crate) fn visit<'t>(&'t self, mut visitor: impl FnMut(usize, TableRow<'t>) -> bool) {
        match &self.layout {
            RowLayout::Objects | RowLayout::Arrays(_) | RowLayout::Entries => {
                let is_keyed = self.layout == RowLayout::Entries;
                let (mut cursor, mut index) = (JsonCursor::new(&self.text), 0);
                cursor.enter();
                while cursor.advance() {
                    let key = is_keyed.then(|| cursor.read_key());
                    if !visitor(index, TableRow::Json { written: cursor.read_value(), key }) {
                        return;
                    }
                    index += 1;
                }
            }
            RowLayout::JsonLines => {
                let lines = self.text.lines().map(str::trim).filter(|line| !line.is_empty());
                for (index, written) in lines.enumerate() {
                    if !visitor(index, TableRow::Json { written, key: None }) {
                        return;
                    }
                }
            }
            RowLayout::Csv { delimiter, .. } => {
                // The first record has the names of the columns.
                let mut records = CsvReader::new(&self.text, *delimiter);
                records.next();
                let mut index = 0;
                while let Some((written, cells)) = records.next_with_text() {
                    if !visitor(index, TableRow::Cells { written, cells }) {
                        return;
                    }
                    index += 1;
                }
            }
        }
    }

    /// Returns the names of the columns if the table states them.
    pub(crate) fn stated_columns(&self) -> Option<&[String]> {
        match &self.layout {
            RowLayout::Arrays(columns) | RowLayout::Csv { columns, .. } => Some(columns),
            _ => None,
        }
    }
}

impl<'a> TableRow<'a> {
    /// Returns the value of a column. A path such as `to.city` or `/to/city` selects a value inside
    /// a cell.
    pub(crate) fn cell(&self, column: &str, stated: Option<&[String]>) -> Option<Cell<'a>> {
        match self {
            Self::Cells { cells, .. } => {
                let index = stated?.iter().position(|name| name == column)?;
                cells.get(index).cloned().map(Cell::Text)
            }
            Self::Json { key: Some(key), .. } if column == KEY_COLUMN => Some(Cell::Json(key)),
            Self::Json { written, .. } => json_cell(written, column, stated).map(Cell::Json),
        }
    }
}

impl Cell<'_> {
    /// Returns the text of the cell: a string decoded, everything else as it is written.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Json(written) if JsonKind::of(written) == JsonKind::Text => {
                decode_string(written)
            }
            Self::Json(written) => Cow::Borrowed(written),
            Self::Text(text) => Cow::Borrowed(text),
        }
    }

    /// Returns whether the cell holds no value.
    pub(crate) fn is_null(&self) -> bool {
        match self {
            Self::Json(written) => JsonKind::of(written) == JsonKind::Null,
            Self::Text(text) => text.is_empty(),
        }
    }

    /// Returns the cell as JSON. A value of a text that is a number becomes one.
    pub(crate) fn to_json(&self) -> Cow<'_, str> {
        match self {
            Self::Json(written) => Cow::Borrowed(written),
            Self::Text(text) if text.is_empty() => Cow::Borrowed("null"),
            Self::Text(text) if decimal::is_json_number(text) => Cow::Borrowed(text),
            Self::Text(text) => Cow::Owned(serde_json::Value::from(text.as_ref()).to_string()),
        }
    }
}

fn json_cell<'a>(written: &'a str, column: &str, stated: Option<&[String]>) -> Option<&'a str> {
    match JsonKind::of(written) {
        JsonKind::Array => {
            let index = stated?.iter().position(|name| name == column)?;
            member_at(written, index)
        }
        JsonKind::Object => {
            if let Some(value) = member_named(written, column) {
                return Some(value);
            }
            let steps: Vec<&str> = match column.strip_prefix('/') {
                Some(path) => path.split('/').collect(),
                None if column.contains('.') => column.split('.').collect(),
                None => return None,
            };
            steps.into_iter().try_fold(written, |value, step| match JsonKind::of(value) {
                JsonKind::Array => member_at(value, step.parse().ok()?),
                JsonKind::Object => member_named(value, step),
                _ => None,
            })
        }
        _ => (column == VALUE_COLUMN).then_some(written),
    }
}

fn member_at(written: &str, index: usize) -> Option<&str> {
    let mut cursor = JsonCursor::new(written);
    cursor.enter();
    for _ in 0..index {
        if !cursor.advance() {
            return None;
        }
        cursor.read_value();
    }
    cursor.advance().then(|| cursor.read_value())
}

fn member_named<'a>(written: &'a str, name: &str) -> Option<&'a str> {
    let mut cursor = JsonCursor::new(written);
    cursor.enter();
    while cursor.advance() {
        let key = cursor.read_key();
        let value = cursor.read_value();
        if decode_string(key) == name {
            return Some(value);
        }
    }
    None
}

/// Returns the names of the columns of an array of arrays: those that its container states, or
/// their numbers.
fn array_columns(first: &str, container: Option<&str>) -> Vec<String> {
    let width = count_members(first);
    let stated = |key: &str| {
        let written = member_named(container?, key)?;
        if JsonKind::of(written) != JsonKind::Array {
            return None;
        }
        let (mut names, mut cursor) = (Vec::new(), JsonCursor::new(written));
        cursor.enter();
        while cursor.advance() {
            let value = cursor.read_value();
            let name = match JsonKind::of(value) {
                JsonKind::Object => member_named(value, "name")?,
                _ => value,
            };
            names.push(decode_string(name).into_owned());
        }
        (names.len() == width).then_some(names)
    };
    let names = ["columns", "fields", "header", "headers"].into_iter().find_map(stated);
    names.unwrap_or_else(|| (0..width).map(|n| n.to_string()).collect())
}

fn count_members(written: &str) -> usize {
    if JsonKind::of(written) != JsonKind::Array {
        return 0;
    }
    let (mut cursor, mut count) = (JsonCursor::new(written), 0);
    cursor.enter();
    while cursor.advance() {
        cursor.read_value();
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(data: &str) -> (String, Vec<String>, usize) {
        let table = RowTable::find(data, None, "").unwrap();
        let mut names = Vec::new();
        table.visit(|_, row| {
            names.push(row.cell("name", table.stated_columns()).unwrap().text().into_owned());
            true
        });
        (table.pointer.clone(), names.clone(), names.len())
    }

    #[test]
    fn tables_are_found_in_every_form() {
        let expected = vec!["a".to_owned(), "b, c".to_owned()];
        let objects = r#"{"page":{"items":[{"name":"a","n":1},{"n":2,"name":"b, c"}]},"n":2}"#;
        assert_eq!(rows(objects), ("/page/items".into(), expected.clone(), 2));
        let arrays = r#"{"columns":["n","name"],"rows":[[1,"a"],[2,"b, c"]]}"#;
        assert_eq!(rows(arrays), ("/rows".into(), expected.clone(), 2));
        let csv =
            serde_json::json!({ "text": "n,name\n1,a\n2,\"b, c\"\n3,d\n4,e\n5,f\n6,\"g\n h\"\n" });
        let (pointer, names, count) = rows(&csv.to_string());
        assert_eq!((pointer.as_str(), count, &names[..2]), ("/text", 6, &expected[..]));
        assert_eq!(names[5], "g\n h");
        let inner = serde_json::json!({ "content": [{ "type": "text", "text": objects }] });
        assert_eq!(
            rows(&inner.to_string()),
            ("/content/0/text/page/items".into(), expected.clone(), 2)
        );
        let lines =
            serde_json::json!("{\"name\":\"a\", \"n\": 1}\n{\"name\":\"b, c\", \"n\": 2}\n");
        assert_eq!(rows(&lines.to_string()), (String::new(), expected, 2));
        let entries =
            r#"{"u1":{"name":"a"},"u2":{"name":"b"},"u3":{"name":"c"},"u4":{"name":"d"}}"#;
        assert_eq!(rows(entries).2, 4);
        assert!(
            RowTable::find("\"a plain text of several words, with commas, and more\"", None, "")
                .is_none()
        );
    }
}
