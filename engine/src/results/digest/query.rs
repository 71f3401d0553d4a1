//! Words that make a part of a result relevant: those of the query, and words such as "error".
//!
//! Rare words count more than frequent ones. Text in Chinese and Japanese has no spaces, so its
//! words are pairs of characters.

use std::ops::ControlFlow;

use aho_corasick::packed::Searcher;
use aho_corasick::{AhoCorasick, MatchKind};

/// Maximum number of query words to search for.
const MAX_QUERY_WORDS: usize = 36;
/// Maximum number of hits evaluated in one part of a text.
const MAX_HITS: usize = 512;
/// Bytes shown before the hit in a line that is too long.
const BYTES_BEFORE_HIT: usize = 40;
/// Bytes of a text that are searched at once.
const WINDOW_BYTES: usize = 16_384;
/// Maximum bytes of a pattern; a longer word is searched by its beginning.
const MAX_PATTERN_BYTES: usize = 256;
/// Weight of a query word relative to a salient one.
const QUERY_WEIGHT: f64 = 3.0;

/// Words that make a part relevant regardless of the query.
const SALIENT: [&str; 24] = [
    "error",
    "fail",
    "exception",
    "panic",
    "fatal",
    "traceback",
    "denied",
    "refused",
    "timeout",
    "timed out",
    "warning",
    "critical",
    "invalid",
    "missing",
    "not found",
    "total",
    "summary",
    "conclusion",
    "result",
    "important",
    "must",
    "错误",
    "失败",
    "异常",
];

/// Query words that carry no information.
const STOP_WORDS: [&str; 46] = [
    "the", "and", "for", "with", "from", "that", "this", "what", "which", "who", "how", "are",
    "was", "were", "has", "have", "not", "you", "true", "false", "does", "did", "when", "where",
    "why", "many", "much", "most", "all", "any", "its", "into", "there", "been", "each", "per",
    "哪些", "什么", "多少", "哪个", "是否", "如何", "怎么", "请问", "为什", "几个",
];

/// Matches the words of the query and then the salient words.
pub(super) struct KeywordMatcher {
    query_count: usize,
    words: Vec<String>,
    finder: Option<PatternFinder>,
    /// Index of the word of each pattern: a word can have a second pattern, its escaped form.
    pattern_words: Vec<usize>,
}

/// Finds patterns in a text that is in lower case.
enum PatternFinder {
    /// With vector instructions: several times as fast, for few patterns.
    Packed(Searcher),
    Automaton(AhoCorasick),
}

/// Weights of the words of a matcher, by their rarity in one text.
#[derive(Debug, Clone, Default)]
pub(super) struct KeywordWeights(Vec<f64>);

impl KeywordMatcher {
    pub(super) fn new(hint: Option<&str>) -> Self {
        Self::with_salient_words(hint, &SALIENT)
    }

    /// Returns a matcher for data, in which only the words of the query are relevant.
    pub(super) fn for_data(hint: Option<&str>) -> Self {
        Self::with_salient_words(hint, &[])
    }

    fn with_salient_words(hint: Option<&str>, salient: &[&str]) -> Self {
        let query = query_words(hint.unwrap_or_default());
        let query_count = query.len();
        let words: Vec<String> =
            query.into_iter().chain(salient.iter().map(|word| (*word).to_owned())).collect();
        let (mut patterns, mut pattern_words) = (Vec::new(), Vec::new());
        for (index, word) in words.iter().enumerate() {
            let escaped = (!word.is_ascii()).then(|| escaped_form(word));
            for mut pattern in [Some(word.clone()), escaped].into_iter().flatten() {
                pattern.truncate(pattern.floor_char_boundary(MAX_PATTERN_BYTES));
                patterns.push(pattern);
                pattern_words.push(index);
            }
        }
        let finder = PatternFinder::new(&patterns);
        Self { query_count, words, finder, pattern_words }
    }

    /// Returns whether the query has words to search for.
    pub(super) fn has_query(&self) -> bool {
        self.query_count > 0 && self.finder.is_some()
    }

    /// Visits the hits of a text in order, at most `max` of them: their offsets and words.
    pub(super) fn visit_hits(&self, text: &str, max: usize, mut visitor: impl FnMut(usize, usize)) {
        let Some(finder) = &self.finder else { return };
        let mut remaining = max;
        finder.visit(text, |start, end, pattern| {
            let word = self.pattern_words.get(pattern).copied();
            if let Some(word) = word.filter(|_| is_whole_word(text, start, end)) {
                visitor(start, word);
                remaining = remaining.saturating_sub(1);
            }
            if remaining == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
    }

    /// Returns the set of matched words as bits.
    pub(super) fn match_bits(&self, text: &str) -> u64 {
        let mut bits = 0;
        self.visit_hits(text, MAX_HITS, |_, word| bits |= 1 << word);
        bits
    }

    /// Returns only the bits of the query's words.
    pub(super) fn query_bits(&self, bits: u64) -> u64 {
        bits & ((1_u64 << self.query_count) - 1)
    }

    /// Returns the weight of each word, given the words of each part of a text.
    pub(super) fn weights(&self, parts: &[u64]) -> KeywordWeights {
        let mut having = vec![0_usize; self.words.len()];
        for bits in parts.iter().copied().filter(|bits| *bits != 0) {
            for (n, count) in having.iter_mut().enumerate() {
                *count += usize::from(bits & (1 << n) != 0);
            }
        }
        self.weights_by_count(&having, parts.len())
    }

    /// Returns the weight of each word, given the number of parts that have it.
    pub(super) fn weights_by_count(&self, having: &[usize], parts: usize) -> KeywordWeights {
        let weight = |(n, having): (usize, &usize)| {
            // A word that occurs everywhere carries no information.
            let rarity = (1.0 + parts as f64 / (1.0 + *having as f64)).ln();
            if n < self.query_count { QUERY_WEIGHT * rarity } else { rarity }
        };
        KeywordWeights(having.iter().enumerate().map(weight).collect())
    }

    /// Returns the number of words.
    pub(super) fn len(&self) -> usize {
        self.words.len()
    }

    /// Returns the offset at which to start showing a line so that its best word is visible.
    pub(super) fn excerpt_start(&self, line: &str, weights: &KeywordWeights) -> usize {
        let (mut best, mut position) = (0.0, 0);
        self.visit_hits(line, MAX_HITS, |start, word| {
            let weight = weights.0.get(word).copied().unwrap_or_default();
            if weight > best {
                (best, position) = (weight, start);
            }
        });
        let from = line.floor_char_boundary(position.saturating_sub(BYTES_BEFORE_HIT));
        // Start at a sentence or at least at a whole word, if there is one.
        let before = &line[from..position];
        let sentence = before.rfind(['。', '！', '？']).map(|at| at + '。'.len_utf8());
        let word = before.find(' ').filter(|_| from > 0).map(|space| space + 1);
        from + sentence.or(word).unwrap_or(0)
    }
}

impl PatternFinder {
    fn new(patterns: &[String]) -> Option<Self> {
        if patterns.is_empty() {
            return None;
        }
        // Vector instructions need a processor that has them, and few patterns.
        if let Some(searcher) = Searcher::new(patterns) {
            return Some(Self::Packed(searcher));
        }
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::LeftmostFirst).build(patterns).ok().map(Self::Automaton)
    }

    /// Visits the matches in order: their start, their end, and the number of their pattern. ASCII
    /// letters match in either case, because each window of the text is searched in lower case.
    fn visit(&self, text: &str, mut visitor: impl FnMut(usize, usize, usize) -> ControlFlow<()>) {
        let longest = MAX_PATTERN_BYTES;
        let (bytes, mut begin) = (text.as_bytes(), 0);
        let mut window: Vec<u8> = Vec::with_capacity(bytes.len().min(WINDOW_BYTES + longest));
        while begin < bytes.len() {
            let end = bytes.len().min(begin + WINDOW_BYTES + longest);
            window.clear();
            window.extend_from_slice(&bytes[begin..end]);
            window.make_ascii_lowercase();
            // A match that begins behind the window's own part belongs to the next window.
            let mut next = begin + WINDOW_BYTES;
            let mut visit_match = |start: usize, end: usize, pattern: usize| {
                if start >= WINDOW_BYTES {
                    return ControlFlow::Break(false);
                }
                next = next.max(begin + end);
                visitor(begin + start, begin + end, pattern).map_break(|()| true)
            };
            let visited = match self {
                Self::Packed(finder) => finder
                    .find_iter(&window)
                    .try_for_each(|m| visit_match(m.start(), m.end(), m.pattern().as_usize())),
                Self::Automaton(finder) => finder
                    .find_iter(&window)
                    .try_for_each(|m| visit_match(m.start(), m.end(), m.pattern().as_usize())),
            };
            if visited == ControlFlow::Break(true) {
                return;
            }
            begin = next;
        }
    }
}

impl KeywordWeights {
    /// Returns the sum of the weights of a set of words.
    pub(super) fn total(&self, bits: u64) -> f64 {
        if bits == 0 {
            return 0.0;
        }
        let found = self.0.iter().enumerate().filter(|(n, _)| bits & (1 << n) != 0);
        found.map(|(_, weight)| weight).sum()
    }
}

/// Returns whether a hit is not the inside of another word or number.
fn is_whole_word(text: &str, start: usize, end: usize) -> bool {
    let hit = &text[start..end];
    let Some(first) = hit.chars().next().filter(char::is_ascii) else { return true };
    let before = text[..start].chars().next_back();
    let begins = before.is_none_or(|c| !c.is_ascii_alphanumeric())
        || first.is_ascii_uppercase() && before.is_some_and(|c| c.is_ascii_lowercase());
    let is_number = hit.bytes().all(|byte| byte.is_ascii_digit());
    let ends = || text[end..].chars().next().is_none_or(|c| !c.is_ascii_alphanumeric());
    begins && (!is_number || ends())
}

/// Returns a word as JSON may escape it.
fn escaped_form(word: &str) -> String {
    let mut units = [0; 2];
    let unit = |unit: &u16| format!("\\u{unit:04x}");
    word.chars().map(|c| c.encode_utf16(&mut units).iter().map(unit).collect::<String>()).collect()
}

/// Extracts the words of a query that are worth searching for.
fn query_words(hint: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    // A query can be as long as the arguments of a call; its beginning is enough.
    let hint = &hint[..hint.floor_char_boundary(4_000)];
    let mut push = |word: String| {
        if words.len() < MAX_QUERY_WORDS
            && !STOP_WORDS.contains(&word.as_str())
            && !words.contains(&word)
        {
            words.push(word);
        }
    };
    for run in hint.split(|c: char| !c.is_alphanumeric() && c != '_') {
        for part in split_scripts(run) {
            let characters: Vec<char> = part.chars().collect();
            if !characters.first().is_some_and(|c| is_unspaced(*c)) {
                let word = stem(&part.to_lowercase());
                let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
                if characters.len() >= 3 || is_number && characters.len() >= 2 {
                    push(word);
                }
                continue;
            }
            if (2..=4).contains(&characters.len()) {
                push(part.to_owned());
            }
            // In scripts without spaces, two characters are about a word.
            for pair in characters.windows(2).filter(|_| characters.len() > 2) {
                push(pair.iter().collect());
            }
        }
    }
    words
}

/// Splits a run of characters where it changes between scripts with and without spaces.
fn split_scripts(run: &str) -> Vec<&str> {
    let (mut parts, mut begin) = (Vec::new(), 0);
    let mut before: Option<bool> = None;
    for (at, c) in run.char_indices() {
        let is_other = is_unspaced(c);
        if before.is_some_and(|before| before != is_other) {
            parts.push(&run[begin..at]);
            begin = at;
        }
        before = Some(is_other);
    }
    parts.push(&run[begin..]);
    parts.retain(|part| !part.is_empty());
    parts
}

fn is_unspaced(c: char) -> bool {
    ('\u{2e80}'..='\u{9fff}').contains(&c) || ('\u{f900}'..='\u{faff}').contains(&c)
}

/// Removes the ending of an English word, so that other forms of it are found too.
fn stem(word: &str) -> String {
    let rules = [("ing", 7), ("ed", 6), ("es", 7), ("s", 5)];
    let is_plain = word.bytes().all(|byte| byte.is_ascii_lowercase());
    let found = rules.into_iter().find_map(|(ending, min)| {
        word.strip_suffix(ending).filter(|_| word.len() >= min && is_plain)
    });
    found.filter(|stem| !stem.ends_with('s')).unwrap_or(word).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_other_forms_and_scripts() {
        assert_eq!(query_words("which orders failed?"), ["order", "fail"]);
        assert_eq!(query_words("哪些账户已冻结"), ["些账", "账户", "户已", "已冻", "冻结"]);
        let matcher = KeywordMatcher::for_data(Some("冻结 order 42"));
        assert_ne!(matcher.match_bits(r#"{"state":"\u51bb\u7ed3"}"#), 0, "escaped in JSON");
        assert_ne!(matcher.match_bits("three Orders"), 0);
        assert_eq!(matcher.match_bits("border 1423"), 0, "inside other words");
        assert_ne!(matcher.match_bits("n=42,"), 0);
    }
}
