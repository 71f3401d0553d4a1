//! Samples a JSON document for a digest: counts everything, and keeps some items of each long
//! array.
//!
//! The sample is built in one pass over the text and borrows its values from it, so it stays small
//! for a document of any size: it holds at most about as many values as the budget could show.

use crate::json::cursor::{Cursor, Kind};

/// Number of items sampled from a long array between its first items and its last one.
const SPREAD: usize = 32;
/// Below this depth only the first items of an array are sampled, because sampling others scans the
/// text a second time.
const SPREAD_DEPTH: usize = 5;

/// A sampled value.
pub(super) enum Node<'a> {
    /// A number, a boolean or null, as raw JSON.
    Plain(&'a str),
    /// A string, as raw JSON.
    Text(&'a str),
    List(List<'a>),
    Map(Map<'a>),
}

pub(super) struct List<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The first items.
    pub(super) head: Vec<Node<'a>>,
    /// Evenly spaced samples of the other items, with their indexes. The last item is always
    /// included.
    pub(super) spread: Vec<(usize, Node<'a>)>,
}

pub(super) struct Map<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The first entries, with their keys as raw JSON.
    pub(super) entries: Vec<(&'a str, Node<'a>)>,
}

impl<'a> Node<'a> {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Plain(text) | Self::Text(text) => text.len(),
            Self::List(list) => list.bytes,
            Self::Map(map) => map.bytes,
        }
    }
}

impl<'a> List<'a> {
    /// Returns the sampled items with their indexes.
    pub(super) fn seen(&self) -> impl Iterator<Item = (usize, &Node<'a>)> {
        let spread = self.spread.iter().map(|(place, node)| (*place, node));
        self.head.iter().enumerate().chain(spread)
    }
}

/// Samples a document, with about `most` values at most.
pub(super) fn skeleton(text: &str, most: usize) -> Node<'_> {
    let mut walk = Walk { left: most.max(16) };
    walk.value(&mut Cursor::new(text), 0)
}

struct Walk {
    /// Number of values that may still be kept.
    left: usize,
}

impl Walk {
    fn value<'a>(&mut self, cursor: &mut Cursor<'a>, depth: usize) -> Node<'a> {
        self.left = self.left.saturating_sub(1);
        match cursor.kind() {
            Kind::Array => Node::List(self.list(cursor, depth)),
            Kind::Object => Node::Map(self.map(cursor, depth)),
            Kind::Text => Node::Text(cursor.skip()),
            Kind::Number | Kind::Bool | Kind::Null => Node::Plain(cursor.skip()),
        }
    }

    fn list<'a>(&mut self, cursor: &mut Cursor<'a>, depth: usize) -> List<'a> {
        let begin = cursor.at();
        // One part of the remaining allowance is for the first items, one for the samples behind
        // them, and most of it for the rest of the document.
        let (first, all) = (self.left / 4 * 3, self.left / 8 * 5);
        let (mut count, mut head, mut places) = (0, Vec::new(), Places::default());
        cursor.enter();
        while cursor.more() {
            if head.is_empty() || self.left > first {
                head.push(self.value(cursor, depth + 1));
            } else {
                places.note(count, cursor.at());
                cursor.skip();
            }
            count += 1;
        }
        let bytes = cursor.at() - begin;
        let mut spread = Vec::new();
        if depth < SPREAD_DEPTH {
            for (place, at) in places.taken() {
                // The last item is always sampled, and the allowance reserves room for it.
                if self.left > all || place + 1 == count {
                    spread.push((place, self.value(&mut cursor.moved_to(at), depth + 1)));
                }
            }
        }
        List { count, bytes, head, spread }
    }

    fn map<'a>(&mut self, cursor: &mut Cursor<'a>, depth: usize) -> Map<'a> {
        let begin = cursor.at();
        let reserve = self.left / 8;
        let (mut count, mut entries) = (0, Vec::new());
        cursor.enter();
        while cursor.more() {
            let key = cursor.key();
            // A scalar costs little and is kept as long as any allowance is left.
            let nested = matches!(cursor.kind(), Kind::Array | Kind::Object);
            if self.left > if nested { reserve } else { 0 } {
                entries.push((key, self.value(cursor, depth + 1)));
            } else {
                cursor.skip();
            }
            count += 1;
        }
        Map { count, bytes: cursor.at() - begin, entries }
    }
}

/// Selects evenly spaced positions of a sequence whose length is unknown in advance.
#[derive(Default)]
struct Places {
    kept: Vec<(usize, usize)>,
    /// Binary logarithm of the sampling interval.
    stride: u32,
    seen: usize,
    last: Option<(usize, usize)>,
}

impl Places {
    fn note(&mut self, place: usize, at: usize) {
        self.last = Some((place, at));
        if self.seen.trailing_zeros() >= self.stride {
            if self.kept.len() == SPREAD {
                // Drop every other position and halve the sampling rate.
                let mut n = 0;
                self.kept.retain(|_| {
                    n += 1;
                    n % 2 == 1
                });
                self.stride += 1;
            }
            if self.seen.trailing_zeros() >= self.stride {
                self.kept.push((place, at));
            }
        }
        self.seen += 1;
    }

    fn taken(mut self) -> Vec<(usize, usize)> {
        if let Some(last) = self.last
            && self.kept.last() != Some(&last)
        {
            self.kept.push(last);
        }
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_counted_and_some_of_it_is_kept() {
        let text = format!("[{}]", (0..1_000).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        let Node::List(list) = skeleton(&text, 40) else { panic!("a list") };
        assert_eq!((list.count, list.bytes), (1_000, text.len()));
        assert!(list.head.len() < 40);
        let seen: Vec<(usize, &str)> = list
            .seen()
            .map(|(place, node)| match node {
                Node::Plain(text) => (place, *text),
                _ => panic!("a number"),
            })
            .collect();
        assert!(seen.iter().all(|(place, text)| place.to_string() == *text), "{seen:?}");
        assert_eq!(seen.last(), Some(&(999, "999")));
        assert!(seen.is_sorted());
    }

    #[test]
    fn places_are_evenly_spread() {
        let mut places = Places::default();
        (0..10_000).for_each(|n| places.note(n, n));
        let taken = places.taken();
        assert!((16..=SPREAD + 1).contains(&taken.len()), "{}", taken.len());
        assert_eq!((taken[0].0, taken.last().unwrap().0), (0, 9_999));
    }
}
