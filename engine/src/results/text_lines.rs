//! Splits a text into lines, as digests and slices count them. Pure.
//!
//! A line includes its line break. A line longer than `MAX_LINE_BYTES` counts as several, so that
//! a text without line breaks can also be read in slices.

/// Maximum bytes of one line.
pub(crate) const MAX_LINE_BYTES: usize = 2_000;

/// Returns the lines of a text without their line breaks, as `str::lines` does. Vector instructions
/// search faster than that in texts with very many lines.
pub(crate) fn plain_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = memchr::memchr(b'\n', rest.as_bytes());
        let (line, behind) = match end {
            Some(at) => (&rest[..at], &rest[at + 1..]),
            None => (rest, ""),
        };
        rest = behind;
        Some(if end.is_some() { line.strip_suffix('\r').unwrap_or(line) } else { line })
    })
}

/// Iterates over the lines of a text, each with its line break.
pub(crate) struct BoundedLines<'a> {
    rest: &'a str,
}

/// Returns the lines of a text.
pub(crate) fn bounded_lines(text: &str) -> BoundedLines<'_> {
    BoundedLines { rest: text }
}

impl<'a> Iterator for BoundedLines<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let max = self.rest.floor_char_boundary(MAX_LINE_BYTES);
        let end = match memchr::memchr(b'\n', &self.rest.as_bytes()[..max]) {
            Some(at) => at + 1,
            None => max,
        };
        let (line, rest) = self.rest.split_at(end);
        self.rest = rest;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_are_those_of_the_standard_library() {
        for text in ["", "a", "a\n", "a\n\nb", "\n", "a\r\nb\r", "é\n中\n\n"] {
            let expected: Vec<&str> = text.lines().collect();
            assert_eq!(plain_lines(text).collect::<Vec<_>>(), expected, "{text:?}");
        }
    }

    #[test]
    fn lines_keep_their_breaks_and_long_lines_are_split() {
        let found: Vec<&str> = bounded_lines("a\n\nb").collect();
        assert_eq!(found, ["a\n", "\n", "b"]);
        let long = "é".repeat(MAX_LINE_BYTES);
        let found: Vec<&str> = bounded_lines(&long).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(found.concat(), long);
        assert_eq!(bounded_lines("").count(), 0);
    }
}
