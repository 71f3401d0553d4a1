//! Extracts the visible text of an HTML page, with its headings and links, for a digest.

use crate::results::text_lines::{BoundedLines, bounded_lines};

/// Elements whose content is never visible.
const HIDDEN: [&str; 6] = ["script", "style", "svg", "noscript", "template", "iframe"];
/// Elements that begin a line of their own.
const BLOCKS: [&str; 24] = [
    "p", "div", "li", "ul", "ol", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr",
    "section", "article", "header", "footer", "nav", "main", "pre", "dt", "dd",
];
/// Maximum length of an address that is shown with its link, in bytes.
const MAX_ADDRESS: usize = 120;

/// The visible text of a page.
#[derive(Debug, Default)]
pub(super) struct HtmlText {
    pub(super) title: Option<String>,
    /// The text, one line per block.
    pub(super) text: String,
    /// Number of the source line of each line.
    pub(super) source_lines: Vec<usize>,
    pub(super) links: usize,
    pub(super) tables: usize,
    pub(super) forms: usize,
}

/// Returns whether a text is an HTML page or a part of one.
pub(super) fn is_html(text: &str) -> bool {
    let begin = text.trim_start();
    let begin = begin[..begin.floor_char_boundary(8_000)].to_lowercase();
    if begin.starts_with("<!doctype html") || begin.starts_with("<html") {
        return true;
    }
    let tags = ["<div", "<p>", "<p ", "<li", "<a href", "<a class", "<span", "<td", "<h1", "<h2"];
    let count: usize = tags.iter().map(|tag| begin.matches(tag).count()).sum();
    begin.starts_with('<') && count >= 6 && begin.contains("</")
}

/// Extracts the visible text.
pub(super) fn extract_text(html: &str) -> HtmlText {
    let mut reader = HtmlReader {
        page: HtmlText::default(),
        line: String::new(),
        segments: Vec::new(),
        position: 0,
        lines: LineCounter { rest: bounded_lines(html), number: 0, end: 0 },
    };
    reader.read(html);
    reader.page
}

struct HtmlReader<'h> {
    page: HtmlText,
    line: String,
    /// The offset within the line and the position within the page of each text in the line.
    segments: Vec<(usize, usize)>,
    /// Position within the page up to which it is read.
    position: usize,
    lines: LineCounter<'h>,
}

/// Finds the line of a position, for positions in increasing order. Lines are those that slices
/// are read by, so that a page without line breaks has several.
struct LineCounter<'h> {
    rest: BoundedLines<'h>,
    number: usize,
    /// Position after the present line.
    end: usize,
}

impl LineCounter<'_> {
    fn line_at(&mut self, position: usize) -> usize {
        while position >= self.end
            && let Some(line) = self.rest.next()
        {
            self.end += line.len();
            self.number += 1;
        }
        self.number.saturating_sub(1)
    }
}

impl HtmlReader<'_> {
    fn read(&mut self, html: &str) {
        let (mut rest, mut address) = (html, None);
        let mut in_title = false;
        while let Some(at) = rest.find('<') {
            self.position = html.len() - rest.len();
            self.push_text(&rest[..at], in_title);
            rest = &rest[at..];
            self.position = html.len() - rest.len();
            if let Some(comment) = rest.strip_prefix("<!--") {
                let end = comment.find("-->").map_or(rest.len(), |end| end + 7);
                rest = &rest[end..];
                continue;
            }
            // A page can be cut within a tag.
            let Some(end) = rest.find('>') else {
                rest = "";
                break;
            };
            let tag = &rest[1..end];
            let closes = tag.starts_with('/');
            let name = tag.trim_start_matches('/').split([' ', '\n', '\t', '\r', '/']).next();
            let name = name.unwrap_or_default().to_lowercase();
            rest = &rest[end + 1..];
            if !closes && HIDDEN.contains(&name.as_str()) && !tag.ends_with('/') {
                let close = format!("</{name}");
                let end = find_ignoring_case(rest, &close).unwrap_or(rest.len());
                rest = &rest[end..];
                continue;
            }
            if name == "title" {
                in_title = !closes;
            }
            self.open_or_close(&name, tag, closes, &mut address);
        }
        self.position = html.len() - rest.len();
        self.push_text(rest, false);
        self.end_line();
    }

    fn open_or_close(&mut self, name: &str, tag: &str, closes: bool, address: &mut Option<String>) {
        if BLOCKS.contains(&name) {
            self.end_line();
        }
        match (name, closes) {
            ("h1" | "h2" | "h3", false) => self.line.push_str("# "),
            ("li", false) => self.line.push_str("- "),
            ("td" | "th", false) if !self.line.trim().is_empty() => self.line.push_str(" | "),
            ("table", false) => self.page.tables += 1,
            ("form", false) => self.page.forms += 1,
            ("a", false) => {
                self.page.links += 1;
                *address = attribute(tag, "href").filter(|href| {
                    href.len() <= MAX_ADDRESS
                        && !href.starts_with('#')
                        && !href.starts_with("javascript:")
                });
            }
            ("a", true) => {
                if let Some(href) = address.take().filter(|_| !self.line.trim().is_empty()) {
                    self.line.push_str(&format!(" ({href})"));
                }
            }
            ("img", false) => {
                if let Some(alt) = attribute(tag, "alt").filter(|alt| !alt.trim().is_empty()) {
                    self.push_text(&format!("[image: {alt}]"), false);
                }
            }
            _ => {}
        }
    }

    fn push_text(&mut self, text: &str, in_title: bool) {
        if text.trim().is_empty() {
            if !text.is_empty() && !self.line.is_empty() && !self.line.ends_with(' ') {
                self.line.push(' ');
            }
            return;
        }
        let text = decode_entities(text);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if in_title {
            self.page.title = Some(words);
            return;
        }
        if text.starts_with(char::is_whitespace) && !self.line.ends_with(' ') {
            self.line.push(' ');
        }
        self.segments.push((self.line.len(), self.position));
        self.line.push_str(&words);
        if text.ends_with(char::is_whitespace) {
            self.line.push(' ');
        }
    }

    fn end_line(&mut self) {
        let line = self.line.trim();
        if !line.is_empty() && line != "-" && line != "#" {
            let begin = self.page.text.len();
            let trimmed = self.line.len() - self.line.trim_start().len();
            self.page.text.push_str(line);
            self.page.text.push('\n');
            let (mut offset, mut segment) = (trimmed, 0);
            for part in bounded_lines(&self.page.text[begin..]) {
                // Entities and spaces make a text shorter than its source, never longer: the line
                // found is the one of the text, or one a little before it.
                while self.segments.get(segment + 1).is_some_and(|(start, _)| *start <= offset) {
                    segment += 1;
                }
                let source = self.segments.get(segment).copied().unwrap_or_default();
                let next = self.segments.get(segment + 1).map_or(self.position, |next| next.1);
                let position = source.1 + offset.saturating_sub(source.0);
                let source_line = self.lines.line_at(position.min(next));
                self.page.source_lines.push(source_line);
                offset += part.len();
            }
        }
        self.line.clear();
        self.segments.clear();
    }
}

fn find_ignoring_case(text: &str, wanted: &str) -> Option<usize> {
    let (text, wanted) = (text.as_bytes(), wanted.as_bytes());
    text.windows(wanted.len()).position(|window| window.eq_ignore_ascii_case(wanted))
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let at = find_ignoring_case(tag, &format!("{name}="))? + name.len() + 1;
    let value = &tag[at..];
    let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''));
    let value = match quote {
        Some(quote) => value[1..].split(quote).next(),
        None => value.split([' ', '>']).next(),
    };
    value.map(|value| decode_entities(value).into_owned())
}

fn decode_entities(text: &str) -> std::borrow::Cow<'_, str> {
    if !text.contains('&') {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.char_indices().take(12).find(|(_, c)| *c == ';').map(|(end, _)| end);
        let decoded = end.and_then(|end| decode_entity(&rest[1..end]).map(|c| (c, end)));
        match decoded {
            Some((c, end)) => {
                out.push(c);
                rest = &rest[end + 1..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out.into()
}

fn decode_entity(name: &str) -> Option<char> {
    Some(match name {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        "nbsp" => ' ',
        "euro" => '€',
        "copy" => '©',
        "mdash" => '—',
        "ndash" => '–',
        "hellip" => '…',
        _ => {
            let number = name.strip_prefix('#')?;
            let code = match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                None => number.parse().ok()?,
            };
            char::from_u32(code)?
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_page_without_breaks_are_those_of_slices() {
        let paragraph = |n: usize| format!("<p>Paragraph {n} has <b>some</b> text &amp; more.</p>");
        let page: String = (0..400).map(paragraph).collect();
        let long = format!("<h1>Start</h1><p>{}</p>", "word &amp; ".repeat(1_500));
        for html in [format!("<html>{page}</html>"), format!("{page}{long}{page}"), long] {
            let extracted = extract_text(&html);
            let lines: Vec<&str> = bounded_lines(&html).collect();
            let shown: Vec<&str> = bounded_lines(&extracted.text).collect();
            assert_eq!(shown.len(), extracted.source_lines.len());
            assert!(extracted.source_lines.is_sorted());
            for (text, line) in shown.iter().zip(&extracted.source_lines) {
                if let Some(words) = text.find("Paragraph ").map(|at| &text[at..at + 13]) {
                    let source = lines[*line..].iter().take(2).copied().collect::<String>();
                    assert!(source.contains(words), "{words} is not in line {line}");
                }
            }
            assert!(extracted.source_lines.last() > Some(&(lines.len() / 2)), "{}", lines.len());
        }
    }

    #[test]
    fn visible_text_is_extracted_with_links_and_source_lines() {
        let html = "<!DOCTYPE html>\n<html><head><title>A &amp; B</title>\n<script>var x = '<p>';\n\
                    </script></head>\n<body><h1>News</h1><!-- <p>no</p> -->\n<p>Fish <b>and</b> \
                    chips, 5&nbsp;&euro; <a href=\"/order?x=1&amp;y=2\">Order</a></p>\n<ul><li>One\
                    <li>Two</ul><table><tr><td>a</td><td>b</td></tr></table>\n<a href='#x";
        assert!(is_html(html));
        let page = extract_text(html);
        assert_eq!(page.title.as_deref(), Some("A & B"));
        let lines: Vec<&str> = page.text.lines().collect();
        let expected =
            ["# News", "Fish and chips, 5 € Order (/order?x=1&y=2)", "- One", "- Two", "a | b"];
        assert_eq!(lines, expected);
        assert_eq!(page.source_lines, [4, 5, 6, 6, 6]);
        assert!(!is_html("<a> plain text"));
    }
}
