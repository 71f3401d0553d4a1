//! Filters, selects and aggregates the rows of a table.
//!
//! The rows are visited once and never parsed into a tree. Numbers are compared by their value and
//! added exactly; a text that is a number counts as one, because many APIs write amounts as text. A
//! figure that leaves out values of a column states their number.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

use regex::Regex;
use serde_json::{Map, Value};

use super::search::decoded_forms_match;
use super::{MemberDecision, MemberWindow, SliceContent, json_from_span};
use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::pointer::invalid_field;
use crate::results::rows::decimal::{DecimalSum, parse_number};
use crate::results::rows::{Cell, KEY_COLUMN, RowTable, TableRow, VALUE_COLUMN};

/// Maximum number of columns, conditions or aggregates of a query.
const MAX_QUERY_PARTS: usize = 50;
/// Maximum number of groups.
const MAX_GROUPS: usize = 50_000;
/// Maximum number of columns listed in a fault.
const MAX_COLUMNS_LISTED: usize = 40;

/// A query over the rows of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowQuery {
    /// Conditions that a row must meet, all of them.
    pub conditions: Vec<RowCondition>,
    /// Columns to return; all if empty.
    pub select: Vec<String>,
    /// Figures to return in place of rows.
    pub aggregates: Vec<Aggregate>,
    /// Columns whose values form the groups of the aggregates.
    pub group_by: Vec<String>,
}

/// A condition on one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowCondition {
    /// The column.
    pub column: String,
    /// The comparison.
    pub comparison: Comparison,
    /// The value to compare with.
    pub value: Value,
}

/// A comparison of a cell with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// Equal.
    Equal,
    /// Different.
    Different,
    /// Greater, by number or else by text.
    Greater,
    /// Greater or equal.
    AtLeast,
    /// Less, by number or else by text.
    Less,
    /// Less or equal.
    AtMost,
    /// A text that contains the value, or an array with such an item.
    Contains,
}

/// A figure about the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aggregate {
    /// The operation.
    pub operation: AggregateOperation,
    /// The column; only `count` works without one, and then counts rows.
    pub column: Option<String>,
}

/// The operation of an aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AggregateOperation {
    /// Number of rows, or of values that are not null.
    Count,
    /// Sum of the numbers.
    Sum,
    /// Least value.
    Min,
    /// Greatest value.
    Max,
    /// Average of the numbers.
    Avg,
}

impl Comparison {
    const ALL: [(&'static str, Self); 7] = [
        ("eq", Self::Equal),
        ("ne", Self::Different),
        ("gt", Self::Greater),
        ("gte", Self::AtLeast),
        ("lt", Self::Less),
        ("lte", Self::AtMost),
        ("contains", Self::Contains),
    ];

    fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(name, _)| *name == word).map(|(_, comparison)| comparison)
    }
}

impl AggregateOperation {
    const ALL: [(&'static str, Self); 5] = [
        ("count", Self::Count),
        ("sum", Self::Sum),
        ("min", Self::Min),
        ("max", Self::Max),
        ("avg", Self::Avg),
    ];

    /// Returns the operation of this name.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(name, _)| *name == word).map(|(_, operation)| operation)
    }

    /// Returns the name of the operation.
    pub fn as_str(self) -> &'static str {
        Self::ALL.into_iter().find(|(_, other)| *other == self).map_or("", |(name, _)| name)
    }
}

impl Aggregate {
    /// Returns an aggregate; refuses an operation that needs a column and has none.
    pub fn new(operation: AggregateOperation, column: Option<String>) -> Result<Self, Fault> {
        let column = column.filter(|column| !column.is_empty() && column != "*");
        if column.is_none() && operation != AggregateOperation::Count {
            let message = format!("aggregate: {} needs a column", operation.as_str());
            return Err(invalid_field("aggregate", message));
        }
        Ok(Self { operation, column })
    }

    /// Returns the name of the figure in an answer: `count`, `sum(amount)`.
    pub fn label(&self) -> String {
        match &self.column {
            Some(column) => format!("{}({column})", self.operation.as_str()),
            None => self.operation.as_str().to_owned(),
        }
    }
}

impl RowQuery {
    /// Returns whether the query asks for nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds the conditions of `{column: value | {"gt" | "lt" | "contains" …: value}}`.
    pub fn add_conditions(&mut self, conditions: &Map<String, Value>) -> Result<(), Fault> {
        for (column, wanted) in conditions {
            let comparisons = match wanted {
                Value::Object(comparisons) if !comparisons.is_empty() => comparisons.clone(),
                value => Map::from_iter([("eq".to_owned(), value.clone())]),
            };
            for (word, value) in comparisons {
                let Some(comparison) = Comparison::parse(&word) else {
                    let known = Comparison::ALL.map(|(name, _)| name).join(", ");
                    let word: String = word.chars().take(40).collect();
                    let message = format!(
                        "where: \"{word}\" is no comparison of {column:?}; use one of {known}"
                    );
                    return Err(invalid_field("where", message));
                };
                self.conditions.push(RowCondition { column: column.clone(), comparison, value });
            }
        }
        Ok(())
    }

    /// Parses the texts of a URL: `where` as JSON, columns as JSON or separated by commas,
    /// aggregates as JSON or as `sum:amount,count`.
    pub fn parse_texts(
        conditions: Option<&str>,
        select: Option<&str>,
        aggregates: Option<&str>,
        group_by: Option<&str>,
    ) -> Result<Self, Fault> {
        let given = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
        let mut query = Self {
            select: given(select).map_or(Ok(Vec::new()), |text| parse_names("select", &text))?,
            group_by: given(group_by)
                .map_or(Ok(Vec::new()), |text| parse_names("group_by", &text))?,
            ..Self::default()
        };
        if let Some(text) = given(conditions) {
            let Ok(conditions) = serde_json::from_str::<Map<String, Value>>(&text) else {
                let message = "where must be a JSON object: {\"status\": \"open\", \"sum\": \
                               {\"gt\": 10}}";
                return Err(invalid_field("where", message.into()));
            };
            query.add_conditions(&conditions)?;
        }
        if let Some(text) = given(aggregates) {
            query.aggregates = parse_aggregates(&text)?;
        }
        Ok(query)
    }

    fn check(&self) -> Result<(), Fault> {
        for (field, count) in [
            ("where", self.conditions.len()),
            ("select", self.select.len()),
            ("aggregate", self.aggregates.len()),
            ("group_by", self.group_by.len()),
        ] {
            if count > MAX_QUERY_PARTS {
                let message = format!("{field} has more than {MAX_QUERY_PARTS} parts");
                return Err(invalid_field(field, message));
            }
        }
        if !self.select.is_empty() && self.is_aggregation() {
            let message = "select returns rows, aggregate and group_by figures: give one of them";
            return Err(invalid_field("select", message.into()));
        }
        Ok(())
    }

    fn is_aggregation(&self) -> bool {
        !self.aggregates.is_empty() || !self.group_by.is_empty()
    }

    /// Returns the columns that the query names, each with the field that names it.
    fn columns(&self) -> Vec<(&'static str, &str)> {
        let conditions = self.conditions.iter().map(|one| ("where", one.column.as_str()));
        let select = self.select.iter().map(|column| ("select", column.as_str()));
        let figures = self.aggregates.iter().filter_map(|one| one.column.as_deref());
        let figures = figures.map(|column| ("aggregate", column));
        let groups = self.group_by.iter().map(|column| ("group_by", column.as_str()));
        conditions.chain(select).chain(figures).chain(groups).collect()
    }
}

fn parse_names(field: &str, text: &str) -> Result<Vec<String>, Fault> {
    if text.starts_with('[') {
        let names = serde_json::from_str(text);
        return names.map_err(|_| {
            invalid_field(field, format!("{field} must be columns: a,b or [\"a\",\"b\"]"))
        });
    }
    Ok(text.split(',').map(|name| name.trim().to_owned()).collect())
}

fn parse_aggregates(text: &str) -> Result<Vec<Aggregate>, Fault> {
    let invalid = || {
        let message = "aggregate must be operations with their columns: sum:amount,count or \
                       [{\"op\":\"sum\",\"column\":\"amount\"}], with count, sum, min, max or avg";
        invalid_field("aggregate", message.into())
    };
    let pairs: Vec<(String, Option<String>)> = match text.starts_with('[') {
        true => {
            let items: Vec<Map<String, Value>> =
                serde_json::from_str(text).map_err(|_| invalid())?;
            let word = |item: &Map<String, Value>, name: &str| {
                item.get(name).and_then(Value::as_str).map(str::to_owned)
            };
            let pair = |item| Some((word(item, "op")?, word(item, "column")));
            items.iter().map(pair).collect::<Option<_>>().ok_or_else(invalid)?
        }
        false => {
            let pair = |part: &str| match part.trim().split_once(':') {
                Some((operation, column)) => (operation.to_owned(), Some(column.to_owned())),
                None => (part.trim().to_owned(), None),
            };
            text.split(',').map(pair).collect()
        }
    };
    let aggregate = |(operation, column): (String, Option<String>)| {
        let operation = AggregateOperation::parse(&operation).ok_or_else(invalid)?;
        Aggregate::new(operation, column)
    };
    pairs.into_iter().map(aggregate).collect()
}

/// Runs a query and returns the number of rows of the table and the content of the slice.
pub(super) fn query_rows(
    table: &RowTable<'_>,
    query: &RowQuery,
    pattern: Option<&Regex>,
    take: &mut MemberWindow,
) -> Result<(usize, SliceContent), Fault> {
    query.check()?;
    let named = query.columns();
    let mut unseen: BTreeSet<&str> = named.iter().map(|(_, column)| *column).collect();
    let stated = table.stated_columns();
    let mut run = QueryRun { query, stated, rows: Vec::new(), row_numbers: Vec::new(), matched: 0 };
    let mut groups = GroupTable::default();
    let (mut total, mut overflow) = (0, false);
    table.visit(|index, row| {
        total += 1;
        unseen.retain(|column| row.cell(column, stated).is_none());
        let matches = query.conditions.iter().all(|one| one.is_met(&row, stated))
            && pattern.is_none_or(|pattern| row_matches(&row, pattern));
        if matches {
            run.matched += 1;
            match query.is_aggregation() {
                true => overflow |= !groups.add(query, &row, stated),
                false => run.push_row(index, &row, take),
            }
        }
        !overflow
    });
    if overflow {
        let message = format!("group_by: there are more than {MAX_GROUPS} groups");
        return Err(invalid_field("group_by", message));
    }
    let missing = named.iter().find(|(_, column)| total > 0 && unseen.contains(column));
    if let Some((field, column)) = missing {
        return Err(unknown_column_fault(table, field, column));
    }
    let QueryRun { rows, row_numbers, matched, .. } = run;
    if !query.is_aggregation() {
        let value = json_from_span(&format!("[{}]", rows.join(",")));
        return Ok((total, SliceContent::Rows { value, row_numbers, matched }));
    }
    groups.check_numbers(query)?;
    let value = groups.into_value(query, take);
    Ok((total, SliceContent::Rows { value, row_numbers: Vec::new(), matched }))
}

/// The rows that a query has found so far.
struct QueryRun<'q> {
    query: &'q RowQuery,
    stated: Option<&'q [String]>,
    rows: Vec<String>,
    row_numbers: Vec<usize>,
    matched: usize,
}

impl QueryRun<'_> {
    fn push_row(&mut self, index: usize, row: &TableRow<'_>, take: &mut MemberWindow) {
        let is_shown = take.seen >= take.offset && !take.is_full;
        let text = if is_shown { self.render(row) } else { String::new() };
        match take.admit(text.len()) {
            MemberDecision::Include => {
                self.rows.push(text);
                self.row_numbers.push(index);
            }
            // One row alone is too long: its number is enough to read it at its own pointer.
            MemberDecision::IncludePrefix => self.row_numbers.push(index),
            MemberDecision::Skip => {}
        }
    }

    /// Renders a row as an object, or as it is written.
    fn render(&self, row: &TableRow<'_>) -> String {
        let object = |columns: &mut dyn Iterator<Item = &str>| {
            let cell = |column: &str| {
                let value = row.cell(column, self.stated);
                let value = value.as_ref().map_or(Cow::Borrowed("null"), Cell::to_json);
                format!("{}:{value}", Value::from(column))
            };
            format!("{{{}}}", columns.map(cell).collect::<Vec<_>>().join(","))
        };
        if !self.query.select.is_empty() {
            return object(&mut self.query.select.iter().map(String::as_str));
        }
        match (row, self.stated) {
            (_, Some(columns)) => object(&mut columns.iter().map(String::as_str)),
            (TableRow::Json { written, key: None }, None) => (*written).to_owned(),
            (TableRow::Json { written, key: Some(key) }, None) => {
                format!("{{\"{KEY_COLUMN}\":{key},\"{VALUE_COLUMN}\":{written}}}")
            }
            (TableRow::Cells { .. }, None) => "null".to_owned(),
        }
    }
}

fn row_matches(row: &TableRow<'_>, pattern: &Regex) -> bool {
    match row {
        TableRow::Json { written, key } => {
            decoded_forms_match(pattern, written)
                || key.is_some_and(|key| pattern.is_match(&decode_string(key)))
        }
        TableRow::Cells { cells, .. } => cells.iter().any(|cell| pattern.is_match(cell)),
    }
}

fn unknown_column_fault(table: &RowTable<'_>, field: &str, column: &str) -> Fault {
    let mut known: Vec<String> = Vec::new();
    match table.stated_columns() {
        Some(columns) => known.extend_from_slice(columns),
        // A column may be present in the last row alone.
        None => table.visit(|_, row| {
            if let TableRow::Json { written, .. } = row {
                add_keys(written, &mut known);
            }
            known.len() <= MAX_COLUMNS_LISTED
        }),
    }
    let more = if known.len() > MAX_COLUMNS_LISTED { ", …" } else { "" };
    known.truncate(MAX_COLUMNS_LISTED);
    let column: String = column.chars().take(80).collect();
    let names = known.join(", ");
    let message =
        format!("{field}: no row has a column {column:?}; the columns are: {names}{more}");
    let mut fault = invalid_field(field, message);
    if let Some(detail) = &mut fault.detail {
        detail["columns"] = known.into();
    }
    fault
}

fn add_keys(written: &str, known: &mut Vec<String>) {
    if JsonKind::of(written) != JsonKind::Object {
        if !known.iter().any(|name| name == VALUE_COLUMN) {
            known.push(VALUE_COLUMN.to_owned());
        }
        return;
    }
    let mut cursor = JsonCursor::new(written);
    cursor.enter();
    while cursor.advance() {
        let key = decode_string(cursor.read_key());
        cursor.read_value();
        if known.len() <= MAX_COLUMNS_LISTED && !known.iter().any(|name| *name == key) {
            known.push(key.into_owned());
        }
    }
}

impl RowCondition {
    fn is_met(&self, row: &TableRow<'_>, stated: Option<&[String]>) -> bool {
        let cell = row.cell(&self.column, stated);
        let Some(cell) = cell.filter(|cell| !cell.is_null()) else {
            // A missing value is equal to null alone, and neither greater nor less.
            return match self.comparison {
                Comparison::Equal => self.value.is_null() || self.value == "",
                Comparison::Different => !self.value.is_null(),
                _ => false,
            };
        };
        match self.comparison {
            Comparison::Equal => is_equal(&cell, &self.value),
            Comparison::Different => !is_equal(&cell, &self.value),
            Comparison::Contains => contains(&cell, &self.value),
            Comparison::Greater => compare(&cell, &self.value) == Some(Ordering::Greater),
            Comparison::Less => compare(&cell, &self.value) == Some(Ordering::Less),
            Comparison::AtLeast => compare(&cell, &self.value).is_some_and(Ordering::is_ge),
            Comparison::AtMost => compare(&cell, &self.value).is_some_and(Ordering::is_le),
        }
    }
}

fn cell_number(cell: &Cell<'_>) -> Option<f64> {
    match cell {
        Cell::Json(written) => match JsonKind::of(written) {
            JsonKind::Number => written.parse().ok(),
            JsonKind::Text => parse_number(decode_string(written).trim()),
            _ => None,
        },
        Cell::Text(text) => parse_number(text.trim()),
    }
}

fn value_number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => parse_number(text.trim()),
        _ => None,
    }
}

fn value_text(value: &Value) -> Cow<'_, str> {
    match value {
        Value::String(text) => Cow::Borrowed(text),
        other => Cow::Owned(other.to_string()),
    }
}

fn is_equal(cell: &Cell<'_>, value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Number(_) => cell_number(cell).zip(value_number(value)).is_some_and(|(a, b)| a == b),
        Value::Bool(_) => cell.text().eq_ignore_ascii_case(&value.to_string()),
        Value::String(text) => {
            let is_number = matches!(cell, Cell::Json(w) if JsonKind::of(w) == JsonKind::Number);
            cell.text() == *text || is_number && cell_number(cell) == value_number(value)
        }
        Value::Array(_) | Value::Object(_) => {
            let parsed = match cell {
                Cell::Json(written) => serde_json::from_str::<Value>(written).ok(),
                Cell::Text(_) => None,
            };
            parsed.as_ref() == Some(value)
        }
    }
}

fn contains(cell: &Cell<'_>, value: &Value) -> bool {
    if let Cell::Json(written) = cell
        && JsonKind::of(written) == JsonKind::Array
    {
        let mut cursor = JsonCursor::new(written);
        cursor.enter();
        while cursor.advance() {
            let item = Cell::Json(cursor.read_value());
            if is_equal(&item, value) || value.is_string() && contains(&item, value) {
                return true;
            }
        }
        return false;
    }
    match cell {
        Cell::Json(written) if JsonKind::of(written) == JsonKind::Object => {
            super::search::compact_decoded(written, false).contains(value_text(value).as_ref())
        }
        _ => cell.text().contains(value_text(value).as_ref()),
    }
}

fn compare(cell: &Cell<'_>, value: &Value) -> Option<Ordering> {
    match (cell_number(cell), value_number(value)) {
        (Some(a), Some(b)) => a.partial_cmp(&b),
        // A number and a text have no order.
        (Some(_), None) | (None, Some(_)) if value.is_number() => None,
        _ => Some(cell.text().as_ref().cmp(value_text(value).as_ref())),
    }
}

/// The groups of an aggregation, in the order in which they appear.
#[derive(Default)]
struct GroupTable {
    index_by_key: HashMap<String, usize>,
    groups: Vec<(Vec<String>, Vec<Accumulator>)>,
}

/// The state of one figure.
#[derive(Debug, Clone, Default)]
struct Accumulator {
    count: usize,
    numbers: usize,
    sum: DecimalSum,
    /// Least and greatest number, with their text.
    least: Option<(f64, String)>,
    greatest: Option<(f64, String)>,
    /// First and last text that is no number, by its characters.
    first: Option<String>,
    last: Option<String>,
}

impl GroupTable {
    /// Adds a row; returns false if there are too many groups.
    fn add(&mut self, query: &RowQuery, row: &TableRow<'_>, stated: Option<&[String]>) -> bool {
        let group_value = |column: &String| {
            let cell = row.cell(column, stated);
            cell.map_or_else(|| "null".to_owned(), |cell| cell.to_json().into_owned())
        };
        let values: Vec<String> = query.group_by.iter().map(group_value).collect();
        let key = values.join("\n");
        let index = match self.index_by_key.get(&key) {
            Some(index) => *index,
            None if self.groups.len() >= MAX_GROUPS => return false,
            None => {
                let figures = vec![Accumulator::default(); query.aggregates.len().max(1)];
                self.groups.push((values, figures));
                self.index_by_key.insert(key, self.groups.len() - 1);
                self.groups.len() - 1
            }
        };
        let figures = &mut self.groups[index].1;
        if query.aggregates.is_empty() {
            figures[0].count += 1;
        }
        for (figure, aggregate) in figures.iter_mut().zip(&query.aggregates) {
            match &aggregate.column {
                None => figure.count += 1,
                Some(column) => {
                    let cell = row.cell(column, stated);
                    if let Some(cell) = cell.filter(|cell| !cell.is_null()) {
                        figure.add(&cell);
                    }
                }
            }
        }
        true
    }

    /// Refuses a sum or an average of a column that holds no number at all: its figure would look
    /// like a fact.
    fn check_numbers(&self, query: &RowQuery) -> Result<(), Fault> {
        for (n, aggregate) in query.aggregates.iter().enumerate() {
            let operation = aggregate.operation;
            if !matches!(operation, AggregateOperation::Sum | AggregateOperation::Avg) {
                continue;
            }
            let figures = || self.groups.iter().filter_map(|(_, figures)| figures.get(n));
            let values: usize = figures().map(|figure| figure.count).sum();
            if values == 0 || figures().any(|figure| figure.numbers > 0) {
                continue;
            }
            let (word, column) = (operation.as_str(), aggregate.column.as_deref());
            let example = figures().find_map(|figure| figure.first.as_deref()).unwrap_or_default();
            let example: String = example.chars().take(40).collect();
            let message = format!(
                "aggregate: {word} needs numbers, and none of the {values} values of {:?} is one; \
                 such as {example:?}; use count, min or max",
                column.unwrap_or_default(),
            );
            return Err(invalid_field("aggregate", message));
        }
        Ok(())
    }

    /// Returns the groups as JSON, those with the greatest first figure first; or one object if
    /// there are no groups.
    fn into_value(mut self, query: &RowQuery, take: &mut MemberWindow) -> Json {
        let counted = [Aggregate { operation: AggregateOperation::Count, column: None }];
        let aggregates = match query.aggregates.is_empty() {
            true => &counted[..],
            false => &query.aggregates[..],
        };
        if query.group_by.is_empty() {
            let (values, figures) = self
                .groups
                .pop()
                .unwrap_or_else(|| (Vec::new(), vec![Accumulator::default(); aggregates.len()]));
            take.included = 1;
            return json_from_span(&render_group(query, aggregates, &values, &figures));
        }
        let rank = |figures: &[Accumulator]| {
            let first = figures.first().zip(aggregates.first());
            first.and_then(|(figure, aggregate)| figure.number(aggregate.operation))
        };
        self.groups.sort_by(|(_, a), (_, b)| {
            let (a, b) = (rank(a), rank(b));
            b.partial_cmp(&a).unwrap_or(Ordering::Equal)
        });
        let mut rows = Vec::new();
        for (values, figures) in &self.groups {
            let text = render_group(query, aggregates, values, figures);
            if let MemberDecision::Include = take.admit(text.len()) {
                rows.push(text);
            }
        }
        json_from_span(&format!("[{}]", rows.join(",")))
    }
}

fn render_group(
    query: &RowQuery,
    aggregates: &[Aggregate],
    values: &[String],
    figures: &[Accumulator],
) -> String {
    let columns = query.group_by.iter().zip(values);
    let columns =
        columns.map(|(column, value)| format!("{}:{value}", Value::from(column.as_str())));
    let shown = aggregates.iter().zip(figures).map(|(aggregate, figure)| {
        format!("{}:{}", Value::from(aggregate.label()), figure.to_json(aggregate.operation))
    });
    let notes = mixed_columns(aggregates, figures);
    format!("{{{}}}", columns.chain(shown).chain(notes).collect::<Vec<_>>().join(","))
}

/// Returns a member for each column with numbers and other values, of which a figure covers only
/// one kind: `"values(amount)":{"numbers":8,"others":2}`.
fn mixed_columns(aggregates: &[Aggregate], figures: &[Accumulator]) -> Vec<String> {
    let (mut notes, mut noted) = (Vec::new(), BTreeSet::new());
    for (aggregate, figure) in aggregates.iter().zip(figures) {
        let Some(column) = aggregate.column.as_deref() else { continue };
        let others = figure.count - figure.numbers;
        let is_partial = match aggregate.operation {
            AggregateOperation::Count => false,
            AggregateOperation::Sum | AggregateOperation::Avg => others > 0,
            AggregateOperation::Min | AggregateOperation::Max => others > 0 && figure.numbers > 0,
        };
        if is_partial && noted.insert(column) {
            let (label, numbers) = (Value::from(format!("values({column})")), figure.numbers);
            notes.push(format!("{label}:{{\"numbers\":{numbers},\"others\":{others}}}"));
        }
    }
    notes
}

impl Accumulator {
    /// Returns whether there are values, but no number among them.
    fn lacks_numbers(&self) -> bool {
        self.numbers == 0 && self.count > 0
    }

    fn add(&mut self, cell: &Cell<'_>) {
        self.count += 1;
        let text = cell.text();
        let text = text.trim();
        let Some(number) = cell_number(cell) else {
            if self.first.as_deref().is_none_or(|first| text < first) {
                self.first = Some(text.to_owned());
            }
            if self.last.as_deref().is_none_or(|last| text > last) {
                self.last = Some(text.to_owned());
            }
            return;
        };
        self.numbers += 1;
        self.sum.add(text);
        if self.least.as_ref().is_none_or(|(least, _)| number < *least) {
            self.least = Some((number, text.to_owned()));
        }
        if self.greatest.as_ref().is_none_or(|(greatest, _)| number > *greatest) {
            self.greatest = Some((number, text.to_owned()));
        }
    }

    fn number(&self, operation: AggregateOperation) -> Option<f64> {
        match operation {
            AggregateOperation::Count => Some(self.count as f64),
            AggregateOperation::Sum => (!self.lacks_numbers()).then(|| self.sum.to_f64()),
            AggregateOperation::Min => self.least.as_ref().map(|(number, _)| *number),
            AggregateOperation::Max => self.greatest.as_ref().map(|(number, _)| *number),
            AggregateOperation::Avg => {
                (self.numbers > 0).then(|| self.sum.to_f64() / self.numbers as f64)
            }
        }
    }

    fn to_json(&self, operation: AggregateOperation) -> String {
        let extreme = |number: &Option<(f64, String)>, text: &Option<String>| {
            // A column of texts with a few numbers among them is compared as text.
            match (number, text) {
                (Some((number, written)), _) if self.numbers * 2 >= self.count => {
                    let is_json = serde_json::from_str::<serde_json::Number>(written).is_ok();
                    if is_json { written.clone() } else { Value::from(*number).to_string() }
                }
                (_, Some(text)) => Value::from(text.as_str()).to_string(),
                _ => "null".to_owned(),
            }
        };
        match operation {
            AggregateOperation::Count => self.count.to_string(),
            AggregateOperation::Sum if self.lacks_numbers() => "null".to_owned(),
            AggregateOperation::Sum => self.sum.to_json(),
            AggregateOperation::Min => extreme(&self.least, &self.first),
            AggregateOperation::Max => extreme(&self.greatest, &self.last),
            AggregateOperation::Avg => match self.number(operation) {
                Some(average) => Value::from((average * 1e9).round() / 1e9).to_string(),
                None => "null".to_owned(),
            },
        }
    }
}
