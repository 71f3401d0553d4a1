//! Renders text in a digest: its head, its tail, and the most relevant lines of the middle.
//!
//! A line is relevant if it contains words of the query (rare words count more), if it mentions
//! errors or results, and to a small degree if it contains figures. Every cut is marked: omitted
//! lines with their number and offset, cut lines with `…`. The same text and query always give the
//! same digest.

use std::collections::HashMap;
use std::fmt::Write;

use super::query::{KeywordMatcher, KeywordWeights};
use crate::results::text_lines::bounded_lines;
use crate::results::tokens;

/// Approximate bytes of a block; larger if there would be too many blocks.
const BLOCK: usize = 400;
const MAX_BLOCKS: usize = 2_000;
/// Maximum number of blocks whose lines are compared.
const MAX_COMPARED_BLOCKS: usize = 160;
/// Maximum number of shown lines that differ only in their figures.
const MAX_SIMILAR_LINES: usize = 2;

/// Score of a line that contains figures.
const FIGURES_SCORE: f64 = 0.25;
/// Tokens reserved for the best line and the mark before it.
const BEST_LINE_TOKENS: usize = 44;
/// Minimum token budget for which that reservation is made.
const MIN_TOKENS_FOR_BEST_LINE: usize = 36;
/// Tokens of a mark of omitted lines.
const MARK_TOKENS: usize = 14;

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
pub(super) struct TextAnalysis<'t> {
    text: &'t str,
    lines: usize,
    /// Blocks with their scores.
    blocks: Vec<(f64, LineBlock)>,
    words: &'t KeywordMatcher,
    weights: KeywordWeights,
    /// True if some block contains words of the query.
    has_query_hits: bool,
    /// Numbers of the lines within the source, if the text was extracted from one.
    source_lines: Option<&'t [usize]>,
}

/// A part of the middle that is shown.
#[derive(Clone, Copy)]
struct TextExcerpt {
    begin: usize,
    end: usize,
    line: usize,
}

impl<'t> TextAnalysis<'t> {
    /// Scores all lines of a text. `source_lines` has the numbers of the lines within the source,
    /// if the text was extracted from one.
    pub(super) fn new(
        text: &'t str,
        words: &'t KeywordMatcher,
        source_lines: Option<&'t [usize]>,
    ) -> Self {
        let blocks = split_blocks(text);
        let found: Vec<u64> =
            blocks.iter().map(|block| words.match_bits(&text[block.begin..block.end])).collect();
        let weights = words.weights(&found);
        let has_query_hits = found.iter().any(|bits| words.query_bits(*bits) != 0);
        let lines = blocks.last().map_or(0, |last| last.first_line + last.lines);
        let scored = blocks
            .into_iter()
            .zip(&found)
            .map(|(block, bits)| (score(&text[block.begin..block.end], *bits, &weights), block));
        let blocks = scored.collect();
        Self { text, lines, blocks, words, weights, has_query_hits, source_lines }
    }

    /// Renders the head, the tail and the most relevant middle in at most `budget` tokens, with a
    /// mark wherever something is omitted.
    pub(super) fn render(&self, budget: usize) -> String {
        if !tokens::exceeds(self.text, budget) {
            return self.text.to_owned();
        }
        // The cost of the marks between the parts is known only after composing.
        let mut part = budget;
        for _ in 0..14 {
            let composed = self.compose(part);
            if !tokens::exceeds(&composed, budget) {
                return composed;
            }
            part = (part * 7 / 8).saturating_sub(2);
        }
        String::new()
    }
}

/// Counts the lines of a text in the same way as readers of slices do.
pub(super) fn line_count(text: &str) -> usize {
    bounded_lines(text).count()
}

fn score(written: &str, bits: u64, weights: &KeywordWeights) -> f64 {
    let digits = count_digits(written.as_bytes());
    // Some figures among words count; a block of nothing but digits is no better than any other.
    let has_figures = digits * 25 > written.len() && digits * 2 < written.len();
    weights.total(bits) + if has_figures { FIGURES_SCORE } else { 0.0 }
}

/// Counts the digits of a text. Counts in bytes within chunks, which the compiler vectorizes.
fn count_digits(bytes: &[u8]) -> usize {
    let in_chunk = |chunk: &[u8]| {
        chunk.iter().fold(0_u8, |count, byte| count + u8::from(byte.is_ascii_digit()))
    };
    bytes.chunks(255).map(|chunk| usize::from(in_chunk(chunk))).sum()
}

impl TextAnalysis<'_> {
    fn compose(&self, budget: usize) -> String {
        let text = self.text;
        let SectionBudgets { head, middle, tail } = self.section_budgets(budget);
        let head_end = snap_to_line_end(text, tokens::prefix_within(text, head).len());
        let tail_length = tokens::suffix_within(&text[head_end..], tail).len();
        let tail_begin = snap_to_line_start(text, text.len() - tail_length, head_end);
        let mut out = CutWriter::new(text, self.source_lines);
        out.push(0, head_end, 0);
        for excerpt in self.select_excerpts(head_end, tail_begin, middle) {
            out.push(excerpt.begin, excerpt.end, excerpt.line);
        }
        let tail = bounded_lines(&text[tail_begin..]).count();
        out.push(tail_begin, text.len(), self.lines.saturating_sub(tail));
        out.finish(self.lines)
    }

    /// Divides the budget. If the text contains words of the query, the middle gets more of it. If
    /// the budget is small, the best line takes precedence over head and tail.
    fn section_budgets(&self, budget: usize) -> SectionBudgets {
        let (head, tail) = match self.has_query_hits {
            true => (budget / 4, budget / 8),
            false => (budget * 2 / 5, budget / 4),
        };
        let middle = budget.saturating_sub(head + tail + 24);
        let relevant = || self.blocks.iter().any(|(score, _)| *score > FIGURES_SCORE);
        // With a very small budget, the best line takes precedence over everything else.
        let best_line = BEST_LINE_TOKENS.min(budget.saturating_sub(8));
        if middle >= best_line || budget < MIN_TOKENS_FOR_BEST_LINE || !relevant() {
            return SectionBudgets { head, middle, tail };
        }
        let ends = budget.saturating_sub(best_line + 16);
        SectionBudgets { head: ends * 3 / 5, middle: best_line, tail: ends * 2 / 5 }
    }

    /// Selects the best lines between two offsets, as many as fit, in text order.
    fn select_excerpts(&self, from: usize, to: usize, budget: usize) -> Vec<TextExcerpt> {
        // Too little for even one line and its mark.
        if budget < 24 {
            return Vec::new();
        }
        let ranked = self.ranked_lines(from, to);
        let mut remaining = budget;
        let mut similar: HashMap<String, usize> = HashMap::new();
        let mut chosen: Vec<TextExcerpt> = Vec::new();
        for (line_score, line) in ranked {
            // Each line costs its own tokens and a mark before it.
            let is_adjacent =
                chosen.iter().any(|other| other.end == line.begin || line.end == other.begin);
            let mark = if is_adjacent { 0 } else { MARK_TOKENS };
            let Some(rest) = remaining.checked_sub(mark).filter(|rest| *rest >= 8) else { break };
            let written = &self.text[line.begin..line.end];
            let seen = similar.entry(line_template(written)).or_default();
            if *seen >= MAX_SIMILAR_LINES && line_score < self.best_score() {
                continue;
            }
            *seen += 1;
            let excerpt = self.excerpt_line(&line, rest.min((budget / 2).max(24)));
            let cost = tokens::count(&self.text[excerpt.begin..excerpt.end]);
            remaining = rest.saturating_sub(cost);
            chosen.push(excerpt);
        }
        chosen.sort_by_key(|excerpt| excerpt.begin);
        chosen
    }

    fn best_score(&self) -> f64 {
        self.blocks.iter().map(|(score, _)| *score).fold(0.0, f64::max)
    }

    /// Returns the whole lines between two offsets with their scores, the best first.
    fn ranked_lines(&self, from: usize, to: usize) -> Vec<(f64, TextExcerpt)> {
        let overlaps = |block: &LineBlock| block.end > from && block.begin < to;
        let mut blocks: Vec<&(f64, LineBlock)> =
            self.blocks.iter().filter(|(score, block)| *score > 0.0 && overlaps(block)).collect();
        // Blocks with equal scores stay in text order.
        blocks.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.begin.cmp(&b.1.begin)));
        let mut ranked = Vec::new();
        for (_, block) in blocks.into_iter().take(MAX_COMPARED_BLOCKS) {
            let mut at = block.begin;
            for (n, line) in bounded_lines(&self.text[block.begin..block.end]).enumerate() {
                let (begin, end) = (at, at + line.len());
                at = end;
                if begin < from || end > to || line.trim().is_empty() {
                    continue;
                }
                let line_score = score(line, self.words.match_bits(line), &self.weights);
                if line_score > 0.0 {
                    let excerpt = TextExcerpt { begin, end, line: block.first_line + n };
                    ranked.push((line_score, excerpt));
                }
            }
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.begin.cmp(&b.1.begin)));
        ranked
    }

    /// Returns a line if it fits, otherwise the part around its highest-scoring word.
    fn excerpt_line(&self, line: &TextExcerpt, budget: usize) -> TextExcerpt {
        let written = &self.text[line.begin..line.end];
        if !tokens::exceeds(written, budget) {
            return *line;
        }
        let begin = line.begin + self.words.excerpt_start(written, &self.weights);
        let rest = &self.text[begin..line.end];
        let end = begin + snap_to_word_end(rest, tokens::prefix_within(rest, budget).len());
        TextExcerpt { begin, end, ..*line }
    }
}

/// Reduces a line to its words, so that lines which differ only in their figures are equal.
fn line_template(line: &str) -> String {
    let letters = line.chars().filter(|c| !c.is_ascii_digit());
    letters.take(120).collect()
}

/// Writes parts of a text and marks every cut between them.
struct CutWriter<'t> {
    text: &'t str,
    source_lines: Option<&'t [usize]>,
    out: String,
    written_to: usize,
    /// Number of the first line that is not written in full.
    line: usize,
}

impl<'t> CutWriter<'t> {
    fn new(text: &'t str, source_lines: Option<&'t [usize]>) -> Self {
        Self { text, source_lines, out: String::new(), written_to: 0, line: 0 }
    }

    /// Writes the part between two offsets, which begins in this line.
    fn push(&mut self, begin: usize, end: usize, line: usize) {
        if end <= begin || begin < self.written_to {
            return;
        }
        if begin > self.written_to {
            self.mark_omission(line);
            if !is_line_start(self.text, begin) {
                self.out.push('…');
            }
        }
        let part = &self.text[begin..end];
        self.out.push_str(part);
        self.written_to = end;
        let is_whole = is_line_start(self.text, end) || end == self.text.len();
        self.line = line + bounded_lines(part).count() - usize::from(!is_whole);
    }

    /// Writes a mark that states how many lines are omitted and where they begin.
    fn mark_omission(&mut self, next_line: usize) {
        let is_cut = self.written_to > 0 && !is_line_start(self.text, self.written_to);
        if is_cut {
            self.out.push('…');
        }
        if !self.out.is_empty() && !self.out.ends_with('\n') {
            self.out.push('\n');
        }
        // If a line is shown in part, that line is the omitted one.
        let count = next_line.saturating_sub(self.line).max(1);
        let lines = self.source_lines;
        let offset = lines.and_then(|lines| lines.get(self.line).copied()).unwrap_or(self.line);
        let _ = writeln!(self.out, "[… {count} lines omitted, offset {offset}]");
    }

    fn finish(mut self, lines: usize) -> String {
        if self.written_to < self.text.len() {
            self.mark_omission(lines);
        }
        self.out
    }
}

/// Returns whether an offset is the start of a line or of the text.
fn is_line_start(text: &str, at: usize) -> bool {
    at == 0 || text.as_bytes().get(at - 1) == Some(&b'\n')
}

/// Moves an end offset back to the end of a line or of a word unless that loses too much.
fn snap_to_line_end(text: &str, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    match text[..end].rfind('\n') {
        Some(at) if at + 1 >= end / 2 => at + 1,
        _ => snap_to_word_end(text, end),
    }
}

/// Moves an end offset back to the end of a word, so that no number is shown in part.
fn snap_to_word_end(text: &str, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    let splits = |c: char| c.is_alphanumeric() || matches!(c, '.' | ',' | '_' | '-');
    let is_inside = |at: usize| {
        let before = text[..at].chars().next_back().is_some_and(splits);
        before && text[at..].chars().next().is_some_and(splits)
    };
    let is_unspaced = |c: char| c > '\u{2e80}';
    if !is_inside(end) || text[..end].chars().next_back().is_some_and(is_unspaced) {
        return end;
    }
    let begin = text.floor_char_boundary(end.saturating_sub(40));
    let word = text[begin..end].rfind(|c: char| !splits(c) || is_unspaced(c));
    word.map_or(end, |at| begin + at + text[begin + at..].chars().next().map_or(1, char::len_utf8))
}

/// Moves the start of the tail to the start of a line or of a word, unless that loses too much.
fn snap_to_line_start(text: &str, begin: usize, min: usize) -> usize {
    if begin <= min || is_line_start(text, begin) {
        return begin;
    }
    let tail = &text[begin..];
    match tail.find('\n') {
        Some(at) if at < tail.len() / 2 => begin + at + 1,
        _ => match tail.find([' ', '。', ',']).filter(|at| *at < tail.len() / 4) {
            Some(at) => begin + at + tail[at..].chars().next().map_or(1, char::len_utf8),
            None => begin,
        },
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
