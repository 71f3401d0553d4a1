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
        let compared: Vec<Vec<Cow<'_, str>>> = records.take(COMPARED_RECORDS).collect();
        if compared.iter().any(|record| record.len() != names.len()) {
            return None;
        }
        // In prose, several lines rarely have the same number of delimiters.
        let is_table = compared.len() >= 3 || compared.len() >= 2 && names.len() >= 3;
        if !is_table || is_prose(&names, &compared, delimiter) {
            return None;
        }
        Some((delimiter, names.into_iter().map(|name| name.trim().into()).collect()))
    })
}

/// Returns whether records are lines of prose or of a log that have the same number of commas: the
/// first one is then like the others, and has no names of columns.
fn is_prose(names: &[Cow<'_, str>], records: &[Vec<Cow<'_, str>>], delimiter: u8) -> bool {
    let ends_sentence = |record: &[Cow<'_, str>]| {
        let end = record.last().map(|value| value.trim_end());
        end.is_some_and(|end| end.ends_with(['.', '!', '?', '。', '！', '？', '…']))
    };
    if ends_sentence(names) && records.iter().all(|record| ends_sentence(record)) {
        return true;
    }
    let column = |n: usize| records.iter().filter_map(move |record| record.get(n));
    if names.iter().enumerate().any(|(n, name)| is_repeated(name, column(n))) {
        return true;
    }
    // In prose, a space follows each comma. A table may be written in this way too, but then its
    // columns have short names or numbers.
    let is_spaced = |record: &[Cow<'_, str>]| record[1..].iter().all(|cell| cell.starts_with(' '));
    let has_numbers = |n: usize| column(n).all(|cell| is_number_like(cell));
    names.len() == 2
        && matches!(delimiter, b',' | b';')
        && is_spaced(names)
        && records.iter().all(|record| is_spaced(record))
        && names.iter().any(|name| name.trim().contains(char::is_whitespace))
        && !(0..names.len()).any(has_numbers)
}

/// Returns whether the values of a column repeat its name: all are equal to it, or equal except for
/// their numbers, or share most of its words.
fn is_repeated<'a>(name: &str, mut values: impl Iterator<Item = &'a Cow<'a, str>>) -> bool {
    let name = name.trim();
    let words = words(name);
    let (has_digit, is_phrase) = (
        name.contains(|c: char| c.is_ascii_digit()),
        words.len() >= 2 || name.contains(|c: char| c.is_whitespace() || c == '=' || c == ':'),
    );
    let template = number_template(name);
    values.all(|value| {
        let value = value.trim();
        let shared = || {
            let others = self::words(value);
            words.iter().filter(|word| others.contains(word)).count()
        };
        value == name
            || has_digit && is_phrase && number_template(value) == template
            || words.len() >= 3 && shared() * 2 > words.len()
    })
}

/// Returns the words of a text: sequences of letters.
fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()).collect()
}

/// Returns a text with `#` in place of each number.
fn number_template(text: &str) -> String {
    let mut template = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '0'..='9' if template.ends_with('#') => {}
            '0'..='9' => template.push('#'),
            c => template.push(c),
        }
    }
    template
}

/// Returns whether a value is a number, a date, a time or an amount.
fn is_number_like(value: &str) -> bool {
    value.contains(|c: char| c.is_ascii_digit()) && !value.contains(char::is_alphabetic)
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
    #[test]
    fn prose_and_logs_with_one_comma_per_line_are_no_tables() {
        let lines = |line: &dyn Fn(usize) -> String| (0..20).map(line).collect::<String>();
        let logs: [&dyn Fn(usize) -> String; 7] = [
            &|n| format!("Connected to peer {n}, latency {} ms\n", n * 3),
            &|n| format!("peer={n},latency={}\n", n % 7),
            &|n| format!("User {} logged in, session {}\n", ["ann", "bob"][n % 2], n % 3),
            &|n| format!("Job {n} is done, exit code 0, no output\n"),
            &|n| format!("已连接节点 {n},延迟 {} 毫秒\n", n * 3),
            &|n| format!("用户{}已登录,会话正常\n", ["张三", "李四"][n % 2]),
            &|n| format!("第{n}次连接成功,{}\n", ["立即返回", "稍后重试"][n % 2]),
        ];
        for log in logs {
            assert_eq!(detect(&lines(log)), None, "{}", log(0));
        }
        for prose in [
            "When the server starts, it reads its settings.\nAfter that, it opens the store.\nIf \
             the store fails, the server ends.\nIn each case, it writes a line.\n",
            "Dear reader, welcome to the manual\nFirst of all, read the notes\nAfter that, start \
             the server\nAt the end, stop it\n",
            "服务器启动时,读取配置。\n然后,打开存储。\n如果失败,服务器退出。\n最后,写日志。\n",
        ] {
            assert_eq!(detect(prose), None, "{prose}");
        }
    }

    #[test]
    fn tables_with_spaces_or_repeated_words_stay_tables() {
        for table in [
            "a, b\n1, 2\n3, 4\n5, 6\n",
            "Order date, Customer name\n2024-01-01, Ann Lee\n2024-01-02, Bob\n2024-01-03, Cid\n",
            "name, city\nAnn Lee, New York\nBob, Rome\nCid, Berlin\n",
            "Product,Status\nProduct 1,new\nProduct 2,sold\nProduct 3,new\n",
            "Name,City\nName 1,City 1\nName 2,City 2\nName 3,City 3\n",
            "Name of the customer,Is it active?\nAnn,yes\nBob,no\nCid,yes\n",
            "姓名,城市\n张三,北京\n李四,上海\n王五,广州\n",
            "time | event\n10:01 | Connected to peer 1\n10:02 | Closed\n10:03 | Connected\n",
            "Q1 2024,Q2 2024\n1,2\n3,4\n5,6\n",
            "key,note\na,It works.\nb,It fails.\nc,Unknown.\n",
        ] {
            assert_eq!(detect(table).map(|(_, names)| names.len()), Some(2), "{table}");
        }
    }
}
