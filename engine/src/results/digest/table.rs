//! Renders tables in a digest: columns, the number of rows, figures about all rows, and some of the
//! rows.
//!
//! The rows that match the query are shown first, then the first rows, the last one, those with the
//! extremes of the columns that the query names, and some between.

use std::fmt::Write;

use super::columns::{RowText, TableProfile};
use super::json::{self, RenderLimits};
use super::query::KeywordMatcher;
use super::sampling::sample_document;
use super::truncate_to_tokens;
use crate::results::rows::csv::CsvReader;
use crate::results::rows::{Cell, RowLayout, RowTable};
use crate::results::tokens;

/// Arrays with fewer rows are shown as JSON just as well.
pub(super) const LEAST_ROWS: usize = 4;
/// Maximum number of rows that are considered because they match the query.
const MAX_MATCHING_ROWS: usize = 60;
/// Tokens of a mark of omitted rows.
const MARK_TOKENS: usize = 5;

/// A table with the profile of its columns.
pub(super) struct TableView<'t> {
    table: &'t RowTable<'t>,
    profile: TableProfile<'t>,
    /// Rows that match the query, the best first.
    matching: Vec<usize>,
    /// Columns that the query names.
    queried_columns: Vec<usize>,
}

impl<'t> TableView<'t> {
    /// Reads a table; returns `None` if its rows have too little in common.
    pub(super) fn new(table: &'t RowTable<'t>, words: &KeywordMatcher) -> Option<Self> {
        let profile = TableProfile::new(table);
        if profile.rows.len() < LEAST_ROWS || profile.is_irregular || profile.is_sparse() {
            return None;
        }
        let (mut matching, mut queried_columns) = (Vec::new(), Vec::new());
        if words.has_query() {
            matching = matching_rows(&table.text, &profile.rows, words);
            let is_queried = |name: &str| words.match_bits(name) != 0;
            let columns = profile.columns.iter().enumerate();
            queried_columns =
                columns.filter(|(_, column)| is_queried(&column.name)).map(|(n, _)| n).collect();
        }
        Some(Self { table, profile, matching, queried_columns })
    }

    /// Returns the number of rows.
    pub(super) fn count(&self) -> usize {
        self.profile.rows.len()
    }

    /// Renders columns, figures and rows in at most `budget` tokens.
    pub(super) fn render(&self, budget: usize) -> String {
        let pointer = &self.table.pointer;
        let location = if pointer.is_empty() { String::new() } else { format!(" {pointer}") };
        let (count, columns) = (self.count(), self.profile.columns.len());
        let head = format!("table{location}: {count} rows, {columns} columns");
        let mut text = format!("{head}\n{}", self.columns_line(budget * 2 / 5));
        if tokens::exceeds(&text, budget) {
            return truncate_to_tokens(&text, budget);
        }
        let used = tokens::count(&text) + 1;
        let left = budget.saturating_sub(used);
        let share = if self.matching.is_empty() { left / 2 } else { left * 2 / 5 };
        let values = self.values_lines(share);
        if !values.is_empty() {
            let _ = write!(text, "\n{values}");
        }
        let left = budget.saturating_sub(tokens::count(&text) + 2);
        let mut rows = self.choose_rows(left);
        loop {
            let whole = format!("{text}{}", self.rows_text(&rows));
            if !tokens::exceeds(&whole, budget) {
                return whole;
            }
            if rows.pop().is_none() {
                return truncate_to_tokens(&text, budget);
            }
        }
    }

    fn columns_line(&self, budget: usize) -> String {
        let columns = &self.profile.columns;
        let mut line = "columns: ".to_owned();
        let mut used = tokens::count(&line);
        for (n, column) in columns.iter().enumerate() {
            let mut part = if n > 0 { ", ".to_owned() } else { String::new() };
            column.write_type(&mut part, self.count());
            used += tokens::count(&part);
            if used > budget.saturating_sub(6) && n > 0 {
                let names = self.further_names(n, budget.saturating_sub(tokens::count(&line)));
                return line + &names;
            }
            line.push_str(&part);
        }
        line
    }

    /// Returns the names of the columns from this one on, without their types.
    fn further_names(&self, from: usize, budget: usize) -> String {
        let columns = &self.profile.columns;
        let (mut text, mut used) = (String::new(), 0);
        for (n, column) in columns.iter().enumerate().skip(from) {
            let part = format!(", {}", column.shown_name());
            used += tokens::count(&part);
            if used > budget.saturating_sub(6) {
                let _ = write!(text, ", … {} more", columns.len() - n);
                break;
            }
            text.push_str(&part);
        }
        text
    }

    /// Describes the values of the columns, those that the query names first.
    fn values_lines(&self, budget: usize) -> String {
        let (columns, rows) = (&self.profile.columns, self.count());
        let others = (0..columns.len()).filter(|n| !self.queried_columns.contains(n));
        let mut parts: Vec<String> = Vec::new();
        let mut left = budget.saturating_sub(3);
        for index in self.queried_columns.iter().copied().chain(others) {
            let is_queried = self.queried_columns.contains(&index);
            let most = if is_queried { 20 } else { 8 };
            let candidates = [most, 4, 2].into_iter();
            let described = candidates.filter_map(|max| columns[index].describe_values(rows, max));
            let fitting = described.map(|part| (tokens::count(&part) + 1, part));
            if let Some((cost, part)) = fitting.into_iter().find(|(cost, _)| *cost <= left) {
                left -= cost;
                parts.push(part);
            }
        }
        if parts.is_empty() { String::new() } else { format!("values: {}", parts.join("; ")) }
    }

    /// Chooses the rows to show, the most important first, in about `budget` tokens.
    fn choose_rows(&self, budget: usize) -> Vec<(usize, String)> {
        let mut chosen: Vec<(usize, String)> = Vec::new();
        let mut left = budget;
        let shown_columns = self.visible_columns(budget);
        for index in self.row_candidates() {
            if chosen.iter().any(|(row, _)| *row == index) {
                continue;
            }
            let is_match = self.matching.contains(&index);
            let limit =
                if is_match { (budget / 2).clamp(40, 400) } else { (budget / 6).clamp(24, 80) };
            let line = self.row_line(index, &shown_columns, limit);
            let cost = tokens::count(&line) + MARK_TOKENS;
            if cost > left {
                // A row that matches the query is worth its shortest form.
                let short = self.row_line(index, &shown_columns, 16);
                let cost = tokens::count(&short) + MARK_TOKENS;
                if !is_match || cost > left {
                    if left < 12 || !is_match {
                        break;
                    }
                    continue;
                }
                left -= cost;
                chosen.push((index, short));
                continue;
            }
            left -= cost;
            chosen.push((index, line));
        }
        chosen
    }

    fn row_candidates(&self) -> Vec<usize> {
        let (count, mut order) = (self.count(), vec![0]);
        let best = self.matching.len().min(3);
        order.extend_from_slice(&self.matching[..best]);
        order.push(count - 1);
        for column in self.queried_columns.iter().filter_map(|n| self.profile.columns.get(*n)) {
            let extremes = [&column.greatest, &column.least].into_iter().flatten();
            order.extend(extremes.map(|(_, _, row)| *row));
        }
        order.extend_from_slice(&self.matching[best..]);
        order.push(1);
        order.extend([count / 2, 2, count / 4, count * 3 / 4, 3]);
        let step = (count / 64).max(1);
        for n in 0..64 {
            order.extend([4 + n, n * step]);
        }
        order.retain(|row| *row < count);
        order
    }

    /// Returns the columns to show, if not all of them fit into a row.
    fn visible_columns(&self, budget: usize) -> Vec<usize> {
        let all: Vec<usize> = (0..self.profile.columns.len()).collect();
        let max = (budget / 2).max(24);
        let cost = |columns: &[usize]| tokens::count(&self.row_line(0, columns, 24));
        if cost(&all) <= max {
            return all;
        }
        let mut shown: Vec<usize> = Vec::new();
        let others = all.iter().filter(|n| !self.queried_columns.contains(n));
        let mut used = 0;
        for index in self.queried_columns.iter().chain(others) {
            used += cost(&[*index]);
            if used > max && !shown.is_empty() {
                break;
            }
            shown.push(*index);
        }
        shown.sort_unstable();
        shown
    }

    fn row_line(&self, index: usize, columns: &[usize], text_limit: usize) -> String {
        let all = &self.profile.columns;
        let detail = RenderLimits::for_cell(text_limit);
        let cells = self.cells(&self.profile.rows[index]);
        let is_whole = columns.len() == all.len();
        let mut line = format!("{index}: {}", if is_whole { '[' } else { '{' });
        for (n, column) in columns.iter().enumerate() {
            if n > 0 {
                line.push(',');
            }
            if !is_whole {
                let _ = write!(line, "{}:", all[*column].shown_name());
            }
            if let Some(cell) = cells.get(*column).and_then(Option::as_ref) {
                json::write(&mut line, &sample_document(cell, 32), &detail, 1);
            }
        }
        line.push_str(if is_whole { "]" } else { ",…}" });
        line
    }

    /// Returns the cells of a row as JSON, in column order.
    fn cells(&self, row: &RowText<'t>) -> Vec<Option<String>> {
        let columns = self.profile.columns.iter();
        if let RowLayout::Csv { delimiter, .. } = &self.table.layout {
            let record = CsvReader::new(row.written, *delimiter).next().unwrap_or_default();
            return record
                .into_iter()
                .map(|cell| Some(Cell::Text(cell).to_json().into()))
                .collect();
        }
        let (written, key) = (row.written, row.key);
        let row = crate::results::rows::TableRow::Json { written, key };
        let stated = self.table.stated_columns();
        let cell = |name: &str| row.cell(name, stated).map(|cell| cell.to_json().into_owned());
        columns.map(|column| cell(&column.name)).collect()
    }

    fn rows_text(&self, chosen: &[(usize, String)]) -> String {
        let mut rows: Vec<&(usize, String)> = chosen.iter().collect();
        rows.sort_by_key(|(index, _)| *index);
        let (mut text, mut after) = (String::new(), 0);
        for (index, line) in rows {
            if *index > after {
                let _ = write!(text, "\n… {} rows", index - after);
            }
            after = index + 1;
            let _ = write!(text, "\n{line}");
        }
        if after < self.count() {
            let _ = write!(text, "\n… {} rows", self.count() - after);
        }
        text
    }
}

/// Returns the rows that match the query, the best first.
fn matching_rows(text: &str, rows: &[RowText<'_>], words: &KeywordMatcher) -> Vec<usize> {
    // The whole text is searched at once, which is faster than each row by itself.
    let mut bits = vec![0_u64; rows.len()];
    let end = |row: &RowText<'_>| {
        (row.written.as_ptr() as usize).saturating_sub(text.as_ptr() as usize) + row.written.len()
    };
    let mut row = 0;
    words.visit_hits(text, usize::MAX, |offset, word| {
        while rows.get(row).is_some_and(|row| end(row) <= offset) {
            row += 1;
        }
        if let Some(bits) = bits.get_mut(row) {
            *bits |= 1 << word;
        }
    });
    let mut having = vec![0_usize; words.len()];
    for bits in bits.iter().filter(|bits| **bits != 0) {
        for (n, count) in having.iter_mut().enumerate() {
            *count += usize::from(bits & (1 << n) != 0);
        }
    }
    // A word in most rows, such as the name of a column, selects none of them.
    let informative = having
        .iter()
        .enumerate()
        .fold(0_u64, |mask, (n, count)| if count * 2 > rows.len() { mask } else { mask | 1 << n });
    let weights = words.weights_by_count(&having, rows.len());
    let scored = bits.iter().enumerate().filter(|(_, bits)| **bits & informative != 0);
    let mut scored: Vec<(f64, usize)> =
        scored.map(|(row, bits)| (weights.total(bits & informative), row)).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    scored.truncate(MAX_MATCHING_ROWS);
    scored.into_iter().map(|(_, row)| row).collect()
}
