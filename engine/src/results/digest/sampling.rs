//! Samples a JSON document for a digest: counts everything, and keeps some items of each long
//! array.
//!
//! The sample is built in one pass over the text and borrows its values from it, so it stays small
//! for a document of any size: it holds at most about as many values as the budget could show.

use crate::domain::json::cursor::{JsonCursor, JsonKind};

/// Number of items sampled from a long array between its first items and its last one.
const SPREAD: usize = 32;
/// Below this depth only the first items of an array are sampled, because sampling others scans the
/// text a second time.
const SPREAD_DEPTH: usize = 5;

/// A sampled value.
pub(super) enum SampleNode<'a> {
    /// A number, a boolean or null, as raw JSON.
    Scalar(&'a str),
    /// A string, as raw JSON.
    Text(&'a str),
    Array(SampleArray<'a>),
    Object(SampleObject<'a>),
}

pub(super) struct SampleArray<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The whole array as raw JSON.
    pub(super) written: &'a str,
    /// The first items.
    pub(super) head: Vec<SampleNode<'a>>,
    /// Evenly spaced samples of the other items, with their indexes. The last item is always
    /// included.
    pub(super) samples: Vec<(usize, SampleNode<'a>)>,
}

pub(super) struct SampleObject<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The whole object as raw JSON.
    pub(super) written: &'a str,
    /// The first entries, with their keys as raw JSON.
    pub(super) entries: Vec<(&'a str, SampleNode<'a>)>,
}

impl<'a> SampleNode<'a> {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Scalar(text) | Self::Text(text) => text.len(),
            Self::Array(list) => list.bytes,
            Self::Object(map) => map.bytes,
        }
    }
}

impl<'a> SampleArray<'a> {
    /// Returns the sampled items with their indexes.
    pub(super) fn sampled_items(&self) -> impl Iterator<Item = (usize, &SampleNode<'a>)> {
        let spread = self.samples.iter().map(|(index, node)| (*index, node));
        self.head.iter().enumerate().chain(spread)
    }
}

/// Samples a document, with about `max` values at most.
pub(super) fn sample_document(text: &str, max: usize) -> SampleNode<'_> {
    let mut walk = DocumentSampler { left: max.max(16) };
    walk.value(&mut JsonCursor::new(text), 0)
}

struct DocumentSampler {
    /// Number of values that may still be kept.
    left: usize,
}

impl DocumentSampler {
    fn value<'a>(&mut self, cursor: &mut JsonCursor<'a>, depth: usize) -> SampleNode<'a> {
        self.left = self.left.saturating_sub(1);
        match cursor.kind() {
            JsonKind::Array => SampleNode::Array(self.list(cursor, depth)),
            JsonKind::Object => SampleNode::Object(self.map(cursor, depth)),
            JsonKind::Text => SampleNode::Text(cursor.read_value()),
            JsonKind::Number | JsonKind::Bool | JsonKind::Null => {
                SampleNode::Scalar(cursor.read_value())
            }
        }
    }

    fn list<'a>(&mut self, cursor: &mut JsonCursor<'a>, depth: usize) -> SampleArray<'a> {
        let begin = cursor.position();
        // A quarter of the remaining allowance is for the first items, an eighth for the samples
        // of the others, and most of it for the rest of the document.
        let (first, all) = (self.left / 4 * 3, self.left / 8 * 5);
        let (mut count, mut head, mut sampler) = (0, Vec::new(), StrideSampler::default());
        cursor.enter();
        while cursor.advance() {
            if head.is_empty() || self.left > first {
                head.push(self.value(cursor, depth + 1));
            } else {
                sampler.record(count, cursor.position());
                cursor.read_value();
            }
            count += 1;
        }
        let written = cursor.text_since(begin);
        let bytes = written.len();
        let mut spread = Vec::new();
        if depth < SPREAD_DEPTH {
            for (index, position) in sampler.into_positions() {
                // The last item is always sampled, and the allowance reserves room for it.
                if self.left > all || index + 1 == count {
                    spread.push((index, self.value(&mut cursor.at_position(position), depth + 1)));
                }
            }
        }
        SampleArray { count, bytes, written, head, samples: spread }
    }

    fn map<'a>(&mut self, cursor: &mut JsonCursor<'a>, depth: usize) -> SampleObject<'a> {
        let begin = cursor.position();
        let reserve = self.left / 8;
        let (mut count, mut entries) = (0, Vec::new());
        cursor.enter();
        while cursor.advance() {
            let key = cursor.read_key();
            // A scalar costs little and is kept as long as any allowance is left.
            let nested = matches!(cursor.kind(), JsonKind::Array | JsonKind::Object);
            if self.left > if nested { reserve } else { 0 } {
                entries.push((key, self.value(cursor, depth + 1)));
            } else {
                cursor.read_value();
            }
            count += 1;
        }
        let written = cursor.text_since(begin);
        SampleObject { count, bytes: written.len(), written, entries }
    }
}

/// Selects evenly spaced positions of a sequence whose length is unknown in advance.
#[derive(Default)]
struct StrideSampler {
    positions: Vec<(usize, usize)>,
    /// Binary logarithm of the sampling interval.
    stride: u32,
    seen: usize,
    last: Option<(usize, usize)>,
}

impl StrideSampler {
    fn record(&mut self, index: usize, position: usize) {
        self.last = Some((index, position));
        if self.seen.trailing_zeros() >= self.stride {
            if self.positions.len() == SPREAD {
                // Drop every other position and halve the sampling rate.
                let mut n = 0;
                self.positions.retain(|_| {
                    n += 1;
                    n % 2 == 1
                });
                self.stride += 1;
            }
            if self.seen.trailing_zeros() >= self.stride {
                self.positions.push((index, position));
            }
        }
        self.seen += 1;
    }

    fn into_positions(mut self) -> Vec<(usize, usize)> {
        if let Some(last) = self.last
            && self.positions.last() != Some(&last)
        {
            self.positions.push(last);
        }
        self.positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_items_are_counted_and_some_are_sampled() {
        let text = format!("[{}]", (0..1_000).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        let SampleNode::Array(list) = sample_document(&text, 40) else { panic!("a list") };
        assert_eq!((list.count, list.bytes), (1_000, text.len()));
        assert!(list.head.len() < 40);
        let seen: Vec<(usize, &str)> = list
            .sampled_items()
            .map(|(position, node)| match node {
                SampleNode::Scalar(text) => (position, *text),
                _ => panic!("a number"),
            })
            .collect();
        assert!(seen.iter().all(|(position, text)| position.to_string() == *text), "{seen:?}");
        assert_eq!(seen.last(), Some(&(999, "999")));
        assert!(seen.is_sorted());
    }

    #[test]
    fn sampled_positions_are_evenly_spread() {
        let mut sampler = StrideSampler::default();
        (0..10_000).for_each(|n| sampler.record(n, n));
        let positions = sampler.into_positions();
        assert!((16..=SPREAD + 1).contains(&positions.len()), "{}", positions.len());
        assert_eq!((positions[0].0, positions.last().unwrap().0), (0, 9_999));
    }
}
