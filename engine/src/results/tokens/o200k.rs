//! The encoding `o200k_base`: splits a text into pieces and merges the bytes of a piece into
//! tokens. Pure.
//!
//! A piece of `n` bytes takes time in `n log n`, regardless of its content.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::LazyLock;

use foldhash::fast::FixedState;
use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};

/// Maximum bytes of a token. A text of `n` times this many bytes therefore has at least `n` tokens.
pub(super) const MAX_TOKEN_BYTES: usize = 128;

/// The number of tokens. Their ranks are the numbers below it.
const TOKENS: usize = 199_998;

/// Stands for the rank of bytes that are not a token.
const NO_RANK: u32 = u32::MAX;

/// Up to this length of a piece, looking at every pair is faster than a queue of the pairs.
const MAX_SHORT_PIECE: usize = 48;

/// The pieces of a text, as the encoding defines them. The definition ends in `\s+(?!\S)|\s+`: the
/// second pattern stands for both, and `next_piece` adds the look-ahead.
const PIECES: [&str; 2] = [
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"|\s*[\r\n]+",
    ),
    r"\s+",
];

/// Made by `engine/data/o200k_base.py`, which describes the format.
static VOCABULARY: &[u8] = include_bytes!("../../../data/o200k_base.bin");

static ENCODING: LazyLock<Encoding> = LazyLock::new(Encoding::expand);

struct Encoding {
    ranks: HashMap<&'static [u8], u32, FixedState>,
    /// The ranks of two bytes again, by their value: a merge begins with every two bytes.
    byte_pair_ranks: Vec<u32>,
    pieces: Regex,
}

impl Encoding {
    #[expect(clippy::expect_used, reason = "all input is compiled in, and a test covers it")]
    fn expand() -> Self {
        let ranks = read_vocabulary().expect("the vocabulary is complete");
        let pairs = (0..=u16::MAX).map(u16::to_be_bytes);
        let byte_pair_ranks = pairs.map(|pair| *ranks.get(&pair[..]).unwrap_or(&NO_RANK)).collect();
        let pieces = Regex::new_many(&PIECES).expect("the patterns are valid");
        Self { ranks, byte_pair_ranks, pieces }
    }

    fn rank(&self, bytes: &[u8]) -> u32 {
        if bytes.len() > MAX_TOKEN_BYTES {
            return NO_RANK;
        }
        self.ranks.get(bytes).copied().unwrap_or(NO_RANK)
    }

    fn byte_pair_rank(&self, first: u8, second: u8) -> u32 {
        self.byte_pair_ranks[usize::from(u16::from_be_bytes([first, second]))]
    }

    /// Returns the end of the piece that begins at a position.
    fn next_piece(&self, text: &str, begin: usize) -> Option<usize> {
        let input = Input::new(text).range(begin..).anchored(Anchored::Yes);
        let found = self.pieces.search(&input)?;
        let is_blank = found.pattern().as_usize() == 1;
        if !is_blank || found.end() == text.len() {
            return Some(found.end());
        }
        // The last blank before other text belongs to that text, unless it is the only blank.
        let (last, _) = text[begin..found.end()].char_indices().next_back()?;
        Some(if last == 0 { found.end() } else { begin + last })
    }
}

/// Returns the rank of each token.
fn read_vocabulary() -> Option<HashMap<&'static [u8], u32, FixedState>> {
    let content = miniz_oxide::inflate::decompress_to_vec_zlib(VOCABULARY).ok()?;
    // Lives as long as the program, like the encoding.
    let (lengths, mut bytes) = Vec::leak(content).split_at_checked(TOKENS)?;
    let mut counts = [0; MAX_TOKEN_BYTES + 1];
    for length in lengths.iter() {
        *counts.get_mut(usize::from(*length))? += 1;
    }
    // The bytes of the tokens of each length that are not read yet.
    let mut unread = [&[][..]; MAX_TOKEN_BYTES + 1];
    for (length, count) in counts.into_iter().enumerate() {
        (unread[length], bytes) = bytes.split_at_checked(length * count)?;
    }
    let mut ranks = HashMap::with_capacity_and_hasher(TOKENS, FixedState::default());
    for (length, rank) in lengths.iter().zip(0..) {
        let unread = &mut unread[usize::from(*length)];
        ranks.insert(unread.split_off(..usize::from(*length))?, rank);
    }
    Some(ranks)
}

/// Returns the pieces of a text. No token spans two pieces.
pub(super) fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut begin = 0;
    std::iter::from_fn(move || {
        let end = ENCODING.next_piece(text, begin)?;
        let piece = &text[begin..end];
        begin = end;
        Some(piece)
    })
}

/// Merges the bytes of a piece into tokens. Reuses its memory for the next piece.
pub(super) struct Merger {
    /// The parts of the piece, each at the index of its first byte. Other entries have no meaning.
    parts: Vec<Part>,
    /// In a long piece, the pairs of parts that are a token, see `queue_key`. An entry whose rank
    /// is no longer that of the pair has no meaning.
    queue: BinaryHeap<Reverse<u64>>,
}

/// A sequence of bytes that is a token.
#[derive(Clone, Copy)]
struct Part {
    /// The position at which the part before this one begins.
    before: u32,
    end: u32,
    /// The rank of the pair of this part and the next one.
    pair_rank: u32,
}

/// Returns the rank of a pair and where it begins as one number: faster to compare than two.
fn queue_key(rank: u32, begin: u32) -> Reverse<u64> {
    Reverse(u64::from(rank) << 32 | u64::from(begin))
}

impl Merger {
    pub(super) fn new() -> Self {
        Self { parts: Vec::new(), queue: BinaryHeap::new() }
    }

    /// Returns the number of tokens of the piece.
    pub(super) fn count(&mut self, piece: &str) -> usize {
        if ENCODING.rank(piece.as_bytes()) != NO_RANK {
            return 1;
        }
        self.merge(piece.as_bytes());
        self.ends().count()
    }

    /// Returns the number of bytes of each token of the piece.
    pub(super) fn lengths(&mut self, piece: &str) -> Vec<usize> {
        self.merge(piece.as_bytes());
        let mut begin = 0;
        self.ends().map(|end| end - std::mem::replace(&mut begin, end)).collect()
    }

    /// Merges the pair with the lowest rank, the first of equal ones, until no pair is a token.
    fn merge(&mut self, piece: &[u8]) {
        self.begin(piece);
        while let Some(begin) = self.lowest_pair() {
            let Part { before, end: middle, .. } = self.parts[begin as usize];
            let end = self.parts[middle as usize].end;
            self.parts[middle as usize].pair_rank = NO_RANK;
            self.parts[begin as usize].end = end;
            if let Some(next) = self.parts.get_mut(end as usize) {
                next.before = begin;
            }
            self.rank_pair(piece, begin);
            if begin > 0 {
                self.rank_pair(piece, before);
            }
        }
    }

    /// Begins with one part for each byte.
    fn begin(&mut self, piece: &[u8]) {
        self.parts.clear();
        let mut queue = std::mem::take(&mut self.queue).into_vec();
        queue.clear();
        for (begin, byte) in (0_u32..).zip(piece) {
            let next = piece.get(begin as usize + 1);
            let pair_rank = next.map_or(NO_RANK, |next| ENCODING.byte_pair_rank(*byte, *next));
            self.parts.push(Part { before: begin.saturating_sub(1), end: begin + 1, pair_rank });
            if pair_rank != NO_RANK && piece.len() > MAX_SHORT_PIECE {
                queue.push(queue_key(pair_rank, begin));
            }
        }
        self.queue = queue.into();
    }

    /// Looks up the rank of the pair that begins here.
    fn rank_pair(&mut self, piece: &[u8], begin: u32) {
        let middle = self.parts[begin as usize].end;
        let end = self.parts.get(middle as usize).map(|next| next.end);
        let pair = end.map(|end| &piece[begin as usize..end as usize]);
        let pair_rank = pair.map_or(NO_RANK, |pair| ENCODING.rank(pair));
        self.parts[begin as usize].pair_rank = pair_rank;
        if pair_rank != NO_RANK && piece.len() > MAX_SHORT_PIECE {
            self.queue.push(queue_key(pair_rank, begin));
        }
    }

    /// Returns where the first pair with the lowest rank begins.
    fn lowest_pair(&mut self) -> Option<u32> {
        if self.parts.len() > MAX_SHORT_PIECE {
            while let Some(Reverse(key)) = self.queue.pop() {
                let (rank, begin) = ((key >> 32) as u32, key as u32);
                if self.parts[begin as usize].pair_rank == rank {
                    return Some(begin);
                }
            }
            return None;
        }
        let (mut begin, mut lowest, mut found) = (0, NO_RANK, None);
        while let Some(part) = self.parts.get(begin as usize) {
            if part.pair_rank < lowest {
                (lowest, found) = (part.pair_rank, Some(begin));
            }
            begin = part.end;
        }
        found
    }

    /// Returns where each part ends.
    fn ends(&self) -> impl Iterator<Item = usize> {
        let end_of = |begin: usize| self.parts.get(begin).map(|part| part.end as usize);
        std::iter::successors(end_of(0), move |end| end_of(*end))
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    #[test]
    fn the_vocabulary_is_complete() {
        let content = miniz_oxide::inflate::decompress_to_vec_zlib(VOCABULARY).unwrap();
        let checksum: String = Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect();
        // `engine/data/o200k_base.py` prints it.
        assert_eq!(checksum, "542b2b8767b2a8d5c670e660e9791ae87d71fb8f1f3b41458e2166e2f4d3cec9");
        let ranks = &ENCODING.ranks;
        assert_eq!(ranks.len(), TOKENS);
        assert_eq!(ranks.keys().map(|token| token.len()).max(), Some(MAX_TOKEN_BYTES));
        assert!((0..=u8::MAX).all(|byte| ranks.contains_key(&[byte][..])));
        assert_eq!(ranks.get(&b"hello"[..]), Some(&24_912));
    }

    #[test]
    fn every_token_is_one_token_on_its_own() {
        let mut merger = Merger::new();
        for token in ENCODING.ranks.keys() {
            merger.merge(token);
            assert_eq!(merger.ends().collect::<Vec<_>>(), [token.len()], "{token:?}");
        }
    }

    #[test]
    fn tokens_match_another_implementation() {
        // Texts with the number of bytes of each token, made with the crate `bpe-openai`.
        let reference = include_str!("../../../data/o200k_base.reference.json");
        let reference: Vec<(String, Vec<usize>)> = serde_json::from_str(reference).unwrap();
        assert!(reference.len() > 200);
        let mut merger = Merger::new();
        for (text, expected) in reference {
            let lengths: Vec<usize> = split(&text).flat_map(|p| merger.lengths(p)).collect();
            assert_eq!(lengths, expected, "{text:?}");
            let count: usize = split(&text).map(|piece| merger.count(piece)).sum();
            assert_eq!(count, expected.len(), "{text:?}");
        }
    }

    #[test]
    fn long_pieces_match_another_implementation() {
        // Made with the crate `bpe-openai`. Quadratic time would be minutes.
        for (unit, times, tokens) in [
            ("a", 5_000, 625),
            (" ", 9_000, 71),
            ("a", 100_000, 12_500),
            ("\n", 100_000, 6_250),
            ("漢", 30_000, 30_000),
        ] {
            let text = unit.repeat(times);
            assert_eq!(split(&text).collect::<Vec<_>>(), [&text]);
            assert_eq!(Merger::new().count(&text), tokens, "{unit:?}");
        }
    }
}
