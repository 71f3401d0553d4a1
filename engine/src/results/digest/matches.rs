//! Finds the members of a JSON document that match a query, with their pointers.
//!
//! The document is scanned once for words; a second walk, which enters only the members on the way,
//! finds the pointers of the best matches.

use super::query::{KeywordMatcher, KeywordWeights};
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::pointer::escape_key;

/// Containers up to this size are shown as a whole.
const WHOLE_MEMBER_BYTES: usize = 500;
/// Maximum number of matches.
const MAX_MATCHES: usize = 24;

/// A member that matches the query.
pub(super) struct MemberMatch<'a> {
    pub(super) pointer: String,
    pub(super) written: &'a str,
    /// Weights of the words of the query in the document.
    pub(super) weights: KeywordWeights,
}

/// The words of one member.
struct MemberWords {
    bits: u64,
    /// Offset of the member's value.
    offset: usize,
}

/// Returns the members that match the query best, the best first.
pub(super) fn find_matches<'a>(text: &'a str, words: &KeywordMatcher) -> Vec<MemberMatch<'a>> {
    let mut scan = MatchScan { words, found: Vec::new(), members: 0 };
    scan.scan(&mut JsonCursor::new(text), 0);
    let MatchScan { found, members, .. } = scan;
    let mut having = vec![0_usize; words.len()];
    for member in &found {
        for (n, count) in having.iter_mut().enumerate() {
            *count += usize::from(member.bits & (1 << n) != 0);
        }
    }
    // A word in most members, such as a key of each item, selects none of them.
    let informative = having.iter().enumerate().fold(0_u64, |mask, (n, count)| {
        if count * 2 > members.max(4) { mask } else { mask | 1 << n }
    });
    let weights = words.weights_by_count(&having, members);
    let mut ranked: Vec<(f64, usize)> = found
        .iter()
        .filter(|member| member.bits & informative != 0)
        .map(|member| (weights.total(member.bits & informative), member.offset))
        .collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    ranked.truncate(MAX_MATCHES);
    let mut offsets: Vec<usize> = ranked.iter().map(|(_, offset)| *offset).collect();
    offsets.sort_unstable();
    let mut located = Vec::new();
    locate(&mut JsonCursor::new(text), &offsets, "", &mut located);
    let by_rank = ranked.iter().filter_map(|(_, offset)| {
        let (_, pointer, written) = located.iter().find(|(at, ..)| at == offset)?;
        Some(MemberMatch { pointer: pointer.clone(), written, weights: weights.clone() })
    });
    by_rank.collect()
}

struct MatchScan<'w> {
    words: &'w KeywordMatcher,
    found: Vec<MemberWords>,
    members: usize,
}

impl MatchScan<'_> {
    fn scan(&mut self, cursor: &mut JsonCursor<'_>, depth: usize) {
        let kind = cursor.kind();
        let is_object = kind == JsonKind::Object;
        if !is_object && kind != JsonKind::Array {
            let offset = cursor.position();
            self.add(offset, cursor.read_value());
            return;
        }
        cursor.enter();
        while cursor.advance() {
            let begin = cursor.position();
            if is_object {
                cursor.read_key();
            }
            let (offset, mut inside) = (cursor.position(), *cursor);
            let is_container = matches!(cursor.kind(), JsonKind::Array | JsonKind::Object);
            let value = cursor.read_value();
            if is_container && value.len() > WHOLE_MEMBER_BYTES && depth < 60 {
                let key = inside.text_since(begin);
                let before = self.found.len();
                self.scan(&mut inside, depth + 1);
                // A match in the key alone counts for the whole member.
                let bits = self.words.match_bits(key);
                if bits != 0 && self.found.len() == before {
                    self.found.push(MemberWords { bits, offset });
                }
            } else {
                self.add(offset, cursor.text_since(begin));
            }
        }
    }

    fn add(&mut self, offset: usize, written: &str) {
        self.members += 1;
        let bits = self.words.match_bits(written);
        if bits != 0 {
            self.found.push(MemberWords { bits, offset });
        }
    }
}

/// Finds the pointers of the values at these offsets, which are sorted.
fn locate<'a>(
    cursor: &mut JsonCursor<'a>,
    offsets: &[usize],
    pointer: &str,
    located: &mut Vec<(usize, String, &'a str)>,
) {
    let kind = cursor.kind();
    if !matches!(kind, JsonKind::Array | JsonKind::Object) {
        if offsets.contains(&cursor.position()) {
            located.push((cursor.position(), pointer.to_owned(), cursor.read_value()));
        }
        return;
    }
    cursor.enter();
    let mut index = 0;
    while cursor.advance() {
        let key = (kind == JsonKind::Object).then(|| cursor.read_key());
        let mut inside = *cursor;
        let begin = cursor.position();
        let written = cursor.read_value();
        let from = offsets.partition_point(|offset| *offset < begin);
        let to = offsets.partition_point(|offset| *offset < cursor.position());
        if from < to {
            let step = key.map_or_else(|| index.to_string(), |key| escape_key(&decode_string(key)));
            let inner = format!("{pointer}/{step}");
            if offsets[from] == begin {
                located.push((begin, inner.clone(), written));
            }
            locate(&mut inside, &offsets[from..to], &inner, located);
        }
        index += 1;
    }
}
