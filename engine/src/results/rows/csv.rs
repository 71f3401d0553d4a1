//! Separated values (RFC 4180): recognizes a text as a table and reads its records. Pure.

use std::borrow::Cow;

/// Records that are compared to recognize a table.
const COMPARED_RECORDS: usize = 12;
/// Maximum length of a column's name, in bytes.
const MAX_NAME: usize = 80;
/// Maximum length of the first line of a table, in bytes.
const MAX_RECORD: usize = 20_000;

/// Iterates over the records of a text.
#[derive(Debug, Clone)]
pub(crate) struct CsvReader<'a> {
    rest: &'a str,
    delimiter: u8,
}

impl<'a> CsvReader<'a> {
    pub(crate) fn new(text: &'a str, delimiter: u8) -> Self {
        Self { rest: text.strip_prefix('\u{feff}').unwrap_or(text), delimiter }
    }

    /// Returns the next record with its text.
    pub(crate) fn next_with_text(&mut self) -> Option<(&'a str, Vec<Cow<'a, str>>)> {
        self.skip_empty_lines();
        let before = self.rest;
        let record = self.next()?;
        Some((before[..before.len() - self.rest.len()].trim_end_matches(['\n', '\r']), record))
    }

    fn skip_empty_lines(&mut self) {
        self.rest = self.rest.trim_start_matches(['\n', '\r']);
    }

    /// Reads one value, and returns it with true if the record continues.
    fn read_value(&mut self) -> (Cow<'a, str>, bool) {
        if let Some(quoted) = self.rest.strip_prefix('"') {
            return self.read_quoted(quoted);
        }
        let ends = |byte: &u8| *byte == self.delimiter || *byte == b'\n';
        let end = self.rest.bytes().position(|byte| ends(&byte)).unwrap_or(self.rest.len());
        let value = &self.rest[..end];
        (value.strip_suffix('\r').unwrap_or(value).into(), self.pass_separator(end))
    }

    fn read_quoted(&mut self, quoted: &'a str) -> (Cow<'a, str>, bool) {
        let mut from = 0;
        let end = loop {
            match quoted[from..].find('"').map(|at| from + at) {
                Some(at) if quoted.as_bytes().get(at + 1) == Some(&b'"') => from = at + 2,
                Some(at) => break at,
                None => break quoted.len(),
            }
        };
        let inner = &quoted[..end];
        let value = match inner.contains("\"\"") {
            true => Cow::Owned(inner.replace("\"\"", "\"")),
            false => Cow::Borrowed(inner),
        };
        // Anything between the quote and the separator is not part of a value.
        let behind = (end + 2).min(self.rest.len());
        let rest = &self.rest[behind..];
        let separator = |byte: u8| byte == self.delimiter || byte == b'\n';
        let skipped = rest.bytes().position(separator).unwrap_or(rest.len());
        (value, self.pass_separator(behind + skipped))
    }

    fn pass_separator(&mut self, end: usize) -> bool {
        let continues = self.rest.as_bytes().get(end) == Some(&self.delimiter);
        self.rest = self.rest.get(end + 1..).unwrap_or_default();
        continues
    }
}

impl<'a> Iterator for CsvReader<'a> {
    type Item = Vec<Cow<'a, str>>;

    fn next(&mut self) -> Option<Self::Item> {
        // Empty lines are no records.
        self.skip_empty_lines();
        if self.rest.is_empty() {
            return None;
        }
        let mut record = Vec::new();
        loop {
            let (value, continues) = self.read_value();
            record.push(value);
            if !continues {
                return Some(record);
            }
        }
    }
}

/// Recognizes a table with named columns: returns its delimiter and its columns.
pub(crate) fn detect(text: &str) -> Option<(u8, Vec<String>)> {
    let first_line = text.lines().next()?;
    if first_line.len() > MAX_RECORD || text.starts_with(['{', '[', '<', '#']) {
        return None;
    }
    [b',', b'\t', b';', b'|'].into_iter().find_map(|delimiter| {
        let mut records = CsvReader::new(text, delimiter);
        let names = records.next()?;
        if names.len() < 2 || !names.iter().all(|name| is_column_name(name)) {
            return None;
        }
        let mut compared = 0;
        for record in records.take(COMPARED_RECORDS) {
            if record.len() != names.len() {
                return None;
            }
            compared += 1;
        }
        // In prose, several lines rarely have the same number of delimiters.
        let is_table = compared >= 3 || compared >= 2 && names.len() >= 3;
        is_table.then(|| (delimiter, names.into_iter().map(|name| name.trim().into()).collect()))
    })
}

fn is_column_name(name: &str) -> bool {
    let name = name.trim();
    let is_number = name.parse::<f64>().is_ok();
    !name.is_empty() && !is_number && name.len() <= MAX_NAME && !name.contains(['\n', '{', '<'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str) -> Vec<Vec<String>> {
        let strings = |record: Vec<Cow<'_, str>>| record.into_iter().map(Cow::into_owned).collect();
        CsvReader::new(text, b',').map(strings).collect()
    }

    #[test]
    fn quoted_values_keep_separators_and_breaks() {
        let text = "a,b\r\n\"x, \"\"y\"\"\",\"two\nlines\"\r\n\r\n,\nlast,\"open";
        let expected: [&[&str]; 4] =
            [&["a", "b"], &["x, \"y\"", "two\nlines"], &["", ""], &["last", "open"]];
        assert_eq!(records(text), expected);
        for odd in ["", "\n\n", "\"", "\"a\"b,c", ",,,", "é\"ü\",\""] {
            let _ = records(odd);
        }
    }

    #[test]
    fn only_tables_are_recognized_as_tables() {
        let table = "id;name\n1;a\n2;b\n3;c\n";
        assert_eq!(detect(table), Some((b';', vec!["id".to_owned(), "name".to_owned()])));
        let prose =
            "Well, this is prose.\nIt has commas, sometimes, and often none.\nSo, no table.";
        assert_eq!(detect(prose), None);
        assert_eq!(detect("1,2\n3,4\n5,6\n7,8\n"), None, "numbers are no names of columns");
    }
}
