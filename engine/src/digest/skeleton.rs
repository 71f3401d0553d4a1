//! What a digest needs of a JSON document: counts of everything, and some of each long array.
//!
//! Made in one walk over the text. Values are borrowed from it, so a skeleton of a document of any
//! size is small: at most so many values as the budget could show.

use crate::json::cursor::{Cursor, Kind};

/// Of a long array, so many items between the first ones and the last one are looked at.
const SPREAD: usize = 32;
/// Below this depth only the first items of an array are looked at: the others are found by going
/// over the text a second time.
const SPREAD_DEPTH: usize = 5;

/// A value, with as much in it as is worth showing.
pub(super) enum Node<'a> {
    /// A number, a boolean or null, as it is written.
    Plain(&'a str),
    /// A text, as it is written.
    Text(&'a str),
    List(List<'a>),
    Map(Map<'a>),
}

pub(super) struct List<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The first items.
    pub(super) head: Vec<Node<'a>>,
    /// Some of the others, evenly spread, with their places; the last item is the last of them.
    pub(super) spread: Vec<(usize, Node<'a>)>,
}

pub(super) struct Map<'a> {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// The first entries; keys as they are written.
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
    /// The items that were looked at, with their places.
    pub(super) fn seen(&self) -> impl Iterator<Item = (usize, &Node<'a>)> {
        let spread = self.spread.iter().map(|(place, node)| (*place, node));
        self.head.iter().enumerate().chain(spread)
    }
}

/// The skeleton of a document, with at most about so many values.
pub(super) fn skeleton(text: &str, most: usize) -> Node<'_> {
    let mut walk = Walk { left: most.max(16) };
    walk.value(&mut Cursor::new(text), 0)
}

struct Walk {
    /// How many more values are kept.
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
        // A part of what is left is for the first items, a part for those behind them, and most
        // of it for what comes after this array.
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
                // The last one is always looked at, and has something left for it.
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
            // A plain value costs little, and is told as long as anything is.
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

/// Evenly spread places of a row whose length is not known before its end.
#[derive(Default)]
struct Places {
    kept: Vec<(usize, usize)>,
    /// Every so many is kept, as a power of two.
    stride: u32,
    seen: usize,
    last: Option<(usize, usize)>,
}

impl Places {
    fn note(&mut self, place: usize, at: usize) {
        self.last = Some((place, at));
        if self.seen.trailing_zeros() >= self.stride {
            if self.kept.len() == SPREAD {
                // Every other one goes, and from here on they come half as often.
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
