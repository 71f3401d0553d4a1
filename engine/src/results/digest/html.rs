//! Extracts the visible text of an HTML page, with its headings and links, for a digest.

/// Elements whose content is never visible.
const HIDDEN: [&str; 6] = ["script", "style", "svg", "noscript", "template", "iframe"];
/// Elements that begin a line of their own.
const BLOCKS: [&str; 24] = [
    "p", "div", "li", "ul", "ol", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr",
    "section", "article", "header", "footer", "nav", "main", "pre", "dt", "dd",
];
/// Maximum length of an address that is shown with its link.
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
    let mut reader = HtmlReader { page: HtmlText::default(), line: String::new(), source_line: 0 };
    reader.read(html);
    reader.page
}

struct HtmlReader {
    page: HtmlText,
    line: String,
    source_line: usize,
}

impl HtmlReader {
    fn read(&mut self, html: &str) {
        let (mut rest, mut address) = (html, None);
        let mut in_title = false;
        while let Some(at) = rest.find('<') {
            self.push_text(&rest[..at], in_title);
            self.count_lines(&rest[..at]);
            rest = &rest[at..];
            if let Some(comment) = rest.strip_prefix("<!--") {
                let end = comment.find("-->").map_or(rest.len(), |end| end + 7);
                self.count_lines(&rest[..end]);
                rest = &rest[end..];
                continue;
            }
            // A page can be cut within a tag.
            let Some(end) = rest.find('>') else {
                rest = "";
                break;
            };
            let tag = &rest[1..end];
            self.count_lines(tag);
            let closes = tag.starts_with('/');
            let name = tag.trim_start_matches('/').split([' ', '\n', '\t', '\r', '/']).next();
            let name = name.unwrap_or_default().to_lowercase();
            rest = &rest[end + 1..];
            if !closes && HIDDEN.contains(&name.as_str()) && !tag.ends_with('/') {
                let close = format!("</{name}");
                let end = find_ignoring_case(rest, &close).unwrap_or(rest.len());
                self.count_lines(&rest[..end]);
                rest = &rest[end..];
                continue;
            }
            if name == "title" {
                in_title = !closes;
            }
            self.open_or_close(&name, tag, closes, &mut address);
        }
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
        self.line.push_str(&words);
        if text.ends_with(char::is_whitespace) {
            self.line.push(' ');
        }
    }

    fn end_line(&mut self) {
        let line = self.line.trim();
        if !line.is_empty() && line != "-" && line != "#" {
            self.page.text.push_str(line);
            self.page.text.push('\n');
            let lines = crate::results::text_lines::bounded_lines(line).count().max(1);
            self.page.source_lines.extend(std::iter::repeat_n(self.source_line, lines));
        }
        self.line.clear();
    }

    fn count_lines(&mut self, passed: &str) {
        self.source_line += passed.bytes().filter(|byte| *byte == b'\n').count();
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
