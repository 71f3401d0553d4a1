//! Renders text in a digest: its head, its tail, and the most relevant part of the middle.
//!
//! The middle is split into blocks of whole lines. A block is relevant if it contains words of the
//! query (rare words count more), if it mentions errors or results, and to a small degree if it
//! contains figures. The same text and query always give the same digest.

use std::fmt::Write;

use regex::{Regex, RegexBuilder};

use crate::results::text_lines::bounded_lines;
use crate::results::tokens;

/// Approximate bytes of a block; larger if there would be too many blocks.
const BLOCK: usize = 400;
const MAX_BLOCKS: usize = 2_000;
/// Maximum number of query words to search for.
const MAX_QUERY_WORDS: usize = 24;
/// Maximum number of hits evaluated in one block.
const MAX_HITS: usize = 48;

/// Words that make a block relevant regardless of the query.
const SALIENT: [&str; 22] = [
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
];

/// Query words that carry no information.
const STOP_WORDS: [&str; 20] = [
    "the", "and", "for", "with", "from", "that", "this", "what", "which", "who", "how", "are",
    "was", "were", "has", "have", "not", "you", "true", "false",
];

/// Score of a block that contains figures.
const FIGURES_SCORE: f64 = 0.25;
/// Bytes shown before the hit in a line that is too long.
const BYTES_BEFORE_HIT: usize = 40;
/// Tokens reserved for the best line and the mark before it.
const BEST_LINE_TOKENS: usize = 44;
/// Minimum token budget for which that reservation is made.
const MIN_TOKENS_FOR_BEST_LINE: usize = 36;

/// Token budgets of head, middle and tail.
struct SectionBudgets {
    head: usize,
    middle: usize,
    tail: usize,
}

/// A few lines of the text.
#[derive(Clone, Copy)]
struct LineBlock {
    begin: usize,
    end: usize,
    first_line: usize,
    lines: usize,
}

/// Analysis of a text, computed once because the text is long.
struct TextAnalysis<'t> {
    text: &'t str,
    lines: usize,
    /// Blocks with their scores.
    blocks: Vec<(f64, LineBlock)>,
    words: KeywordMatcher<'t>,
    weights: Vec<f64>,
}

/// Renders the head, the tail and the most relevant middle in at most `budget` tokens, with a mark
/// wherever lines are omitted.
pub(super) fn render(text: &str, hint: Option<&str>, budget: usize) -> String {
    let query = query_words(hint.unwrap_or_default());
    let Some(words) = KeywordMatcher::new(&query) else { return String::new() };
    let blocks = split_blocks(text);
    let (scores, weights) = words.score_blocks(text, &blocks);
    let lines = blocks.last().map_or(0, |last| last.first_line + last.lines);
    let blocks = scores.into_iter().zip(blocks).collect();
    let analysis = TextAnalysis { text, lines, blocks, words, weights };
    // The cost of the marks between the parts is known only after composing.
    let mut part = budget;
    for _ in 0..12 {
        let composed = analysis.compose(part);
        if !tokens::exceeds(&composed, budget) {
            return composed;
        }
        part = (part * 7 / 8).saturating_sub(2);
    }
    String::new()
}

/// Counts the lines of a text in the same way as readers of slices do.
pub(super) fn line_count(text: &str) -> usize {
    bounded_lines(text).count()
}

impl TextAnalysis<'_> {
    fn compose(&self, budget: usize) -> String {
        let text = self.text;
        let SectionBudgets { head, middle, tail } = self.section_budgets(budget);
        let head_end = snap_to_line_end(text, tokens::prefix_within(text, head).len());
        let (head, rest) = text.split_at(head_end);
        let tail_begin = text.len() - snap_to_line_start(rest, tokens::suffix_within(rest, tail));
        let tail = &text[tail_begin..];
        let mut out = head.to_owned();
        let mut written_to = head_end;
        let partial = usize::from(!head.is_empty() && !head.ends_with('\n'));
        let mut line = bounded_lines(head).count() - partial;
        for excerpt in self.select_excerpts(head_end, tail_begin, middle) {
            if excerpt.begin > written_to {
                write_omission_mark(&mut out, excerpt.first_line.saturating_sub(line), line);
            }
            let part = &text[excerpt.begin..excerpt.end];
            out.push_str(part);
            written_to = excerpt.end;
            line = excerpt.first_line + bounded_lines(part).count();
        }
        if tail_begin > written_to {
            let tail_line = self.lines.saturating_sub(bounded_lines(tail).count());
            write_omission_mark(&mut out, tail_line.saturating_sub(line), line);
        }
        out.push_str(tail);
        out
    }

    /// Divides the budget. If it is small, the best line takes precedence over head and tail.
    fn section_budgets(&self, budget: usize) -> SectionBudgets {
        let (head, tail) = (budget * 2 / 5, budget / 4);
        let middle = budget.saturating_sub(head + tail + 24);
        let relevant = || self.blocks.iter().any(|(score, _)| *score > FIGURES_SCORE);
        // If it is very small, the best line takes precedence over everything else.
        let best_line = BEST_LINE_TOKENS.min(budget.saturating_sub(8));
        if middle >= best_line || budget < MIN_TOKENS_FOR_BEST_LINE || !relevant() {
            return SectionBudgets { head, middle, tail };
        }
        let ends = budget.saturating_sub(best_line + 16);
        SectionBudgets { head: ends * 3 / 5, middle: best_line, tail: ends * 2 / 5 }
    }

    /// Selects the best blocks between two offsets, as many as fit, in text order.
    fn select_excerpts(&self, from: usize, to: usize, budget: usize) -> Vec<TextExcerpt> {
        // Too little for even one line and its mark.
        if budget < 24 {
            return Vec::new();
        }
        let within =
            |(score, block): &(f64, LineBlock)| Some((*score, self.clip_block(block, from, to)?));
        let worth = self.blocks.iter().filter(|(score, _)| *score > 0.0);
        let mut ranked: Vec<(f64, LineBlock)> = worth.filter_map(within).collect();
        // Blocks with equal scores stay in text order.
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.begin.cmp(&b.1.begin)));
        let mut remaining = budget;
        let mut chosen = Vec::new();
        for (_, block) in ranked {
            // Each block costs its own tokens and a mark before it.
            let Some(rest) = remaining.checked_sub(16).filter(|rest| *rest >= 8) else { break };
            let excerpt = self.excerpt_block(&block, rest.min((budget / 2).max(24)));
            remaining = rest - tokens::count(&self.text[excerpt.begin..excerpt.end]).min(rest);
            chosen.push(excerpt);
        }
        chosen.sort_by_key(|excerpt| excerpt.begin);
        chosen
    }

    /// Returns the whole lines of a block that lie between two offsets.
    fn clip_block(&self, block: &LineBlock, from: usize, to: usize) -> Option<LineBlock> {
        if block.begin >= from && block.end <= to {
            return Some(*block);
        }
        let mut clipped: Option<LineBlock> = None;
        let mut at = block.begin;
        for (n, line) in bounded_lines(&self.text[block.begin..block.end]).enumerate() {
            let end = at + line.len();
            if at >= from && end <= to {
                let first_line = block.first_line + n;
                let empty = LineBlock { begin: at, end, first_line, lines: 0 };
                let clipped = clipped.get_or_insert(empty);
                (clipped.end, clipped.lines) = (end, clipped.lines + 1);
            }
            at = end;
        }
        clipped
    }

    /// Returns a block if it fits; otherwise its best line and the lines after it that fit. If that
    /// line does not fit either, returns the part around its highest-scoring word.
    fn excerpt_block(&self, block: &LineBlock, budget: usize) -> TextExcerpt {
        let (mut begin, mut first_line) = (block.begin, block.first_line);
        let written = &self.text[block.begin..block.end];
        if tokens::exceeds(written, budget) {
            let (mut at, mut best, mut best_line) = (block.begin, 0.0, "");
            for (n, line) in bounded_lines(written).enumerate() {
                let score = total_weight(self.words.match_bits(line), &self.weights);
                if score > best {
                    (best, begin, first_line) = (score, at, block.first_line + n);
                    best_line = line;
                }
                at += line.len();
            }
            if tokens::exceeds(best_line, budget) {
                begin += self.words.excerpt_start(best_line, &self.weights);
            }
        }
        let rest = &self.text[begin..block.end];
        let end = begin + snap_to_line_end(rest, tokens::prefix_within(rest, budget).len());
        TextExcerpt { begin, end, first_line }
    }
}

/// Writes a mark that states how many lines are omitted and where they begin.
fn write_omission_mark(out: &mut String, count: usize, line: usize) {
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    // If a line is shown in part, that line is the omitted one.
    let count = count.max(1);
    let _ = writeln!(out, "[… {count} lines omitted, offset {line}]");
}

/// Moves an end offset back to the end of a line unless that loses too much.
fn snap_to_line_end(text: &str, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    match text[..end].rfind('\n') {
        Some(at) if at + 1 >= end / 2 => at + 1,
        _ => end,
    }
}

/// Returns the length of the tail when it starts at a line, unless that loses too much.
fn snap_to_line_start(rest: &str, tail: &str) -> usize {
    if tail.len() == rest.len() {
        return tail.len();
    }
    match tail.find('\n') {
        Some(at) if at < tail.len() / 2 => tail.len() - at - 1,
        _ => tail.len(),
    }
}

fn split_blocks(text: &str) -> Vec<LineBlock> {
    let size = BLOCK.max(text.len() / MAX_BLOCKS);
    let mut blocks: Vec<LineBlock> = Vec::new();
    let (mut at, mut number) = (0, 0);
    for line in bounded_lines(text) {
        let end = at + line.len();
        match blocks.last_mut().filter(|block| block.end - block.begin < size) {
            Some(block) => (block.end, block.lines) = (end, block.lines + 1),
            None => blocks.push(LineBlock { begin: at, end, first_line: number, lines: 1 }),
        }
        at = end;
        number += 1;
    }
    blocks
}

/// Lines of the middle that are shown.
struct TextExcerpt {
    begin: usize,
    end: usize,
    first_line: usize,
}

/// Matches the words of the query and then the salient words.
struct KeywordMatcher<'a> {
    query_count: usize,
    all: Vec<&'a str>,
    finder: Regex,
}

impl<'a> KeywordMatcher<'a> {
    fn new(query: &'a [String]) -> Option<Self> {
        let all: Vec<&str> = query.iter().map(String::as_str).chain(SALIENT).collect();
        let pattern: Vec<String> = all.iter().map(|word| regex::escape(word)).collect();
        let finder = RegexBuilder::new(&pattern.join("|")).case_insensitive(true).build().ok()?;
        Some(Self { query_count: query.len(), all, finder })
    }

    /// Returns the set of matched words as bits.
    fn match_bits(&self, text: &str) -> u64 {
        let mut bits = 0;
        for hit in self.finder.find_iter(text).take(MAX_HITS) {
            let hit = hit.as_str().to_lowercase();
            if let Some(n) = self.all.iter().position(|word| *word == hit) {
                bits |= 1 << n;
            }
        }
        bits
    }

    /// Returns the offset at which to start showing a line so that its best word is visible.
    fn excerpt_start(&self, line: &str, weights: &[f64]) -> usize {
        let (mut best, mut position) = (0.0, 0);
        for hit in self.finder.find_iter(line).take(MAX_HITS) {
            let word = hit.as_str().to_lowercase();
            let index = self.all.iter().position(|other| *other == word);
            let weight = index.map_or(0.0, |n| weights[n]);
            if weight > best {
                (best, position) = (weight, hit.start());
            }
        }
        let from = line.floor_char_boundary(position.saturating_sub(BYTES_BEFORE_HIT));
        // Start at a whole word if there is one.
        let word = line[from..position].find(' ').filter(|_| from > 0);
        word.map_or(from, |space| from + space + 1)
    }

    /// Returns the score of each block and the weight of each word.
    fn score_blocks(&self, text: &str, blocks: &[LineBlock]) -> (Vec<f64>, Vec<f64>) {
        let found: Vec<u64> =
            blocks.iter().map(|block| self.match_bits(&text[block.begin..block.end])).collect();
        let weight = |n: usize| {
            let having = found.iter().filter(|bits| *bits & (1 << n) != 0).count();
            // A word that occurs everywhere carries no information.
            let rarity = (1.0 + blocks.len() as f64 / (1.0 + having as f64)).ln();
            if n < self.query_count { 3.0 * rarity } else { rarity }
        };
        let weights: Vec<f64> = (0..self.all.len()).map(weight).collect();
        let score = |(block, bits): (&LineBlock, &u64)| {
            let written = &text.as_bytes()[block.begin..block.end];
            let digits = written.iter().filter(|byte| byte.is_ascii_digit()).count();
            // Some figures among words count; a block of nothing but digits is no better than any
            // other.
            let figures = digits * 25 > written.len() && digits * 2 < written.len();
            total_weight(*bits, &weights) + if figures { FIGURES_SCORE } else { 0.0 }
        };
        (blocks.iter().zip(&found).map(score).collect(), weights)
    }
}

fn total_weight(bits: u64, weights: &[f64]) -> f64 {
    let found = weights.iter().enumerate().filter(|(n, _)| bits & (1 << n) != 0);
    found.map(|(_, weight)| weight).sum()
}

/// Extracts the words of a query that are worth searching for.
fn query_words(hint: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    // A query can be as long as the arguments of a call; its beginning is enough.
    let hint = &hint[..hint.floor_char_boundary(4_000)];
    for word in hint.split(|c: char| !c.is_alphanumeric() && c != '_') {
        let word = word.to_lowercase();
        // In scripts without spaces, a word carries more information in fewer characters.
        let long = word.chars().count() >= 3 || word.chars().any(|c| c > '\u{2e80}');
        if long && !STOP_WORDS.contains(&word.as_str()) && !words.contains(&word) {
            words.push(word);
        }
        if words.len() == MAX_QUERY_WORDS {
            break;
        }
    }
    words
}
