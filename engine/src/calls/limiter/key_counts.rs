//! Counters by key, for keys that appear and disappear frequently.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;

/// Maximum number of keys that stay in the map at zero. Most of them are used again soon.
const MAX_IDLE_KEYS: usize = 1_024;

/// Counts by key. A missing key counts as zero.
pub(crate) struct KeyCounts<K>(HashMap<K, u32, foldhash::fast::RandomState>);

impl<K> Default for KeyCounts<K> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<K: Hash + Eq + Clone> KeyCounts<K> {
    /// Returns the count of a key.
    pub(crate) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> u32
    where
        K: Borrow<Q>,
    {
        self.0.get(key).copied().unwrap_or(0)
    }

    /// Increments a count and returns the new value.
    pub(crate) fn increment(&mut self, key: &K) -> u32 {
        match self.0.get_mut(key) {
            Some(count) => {
                *count += 1;
                *count
            }
            None => {
                self.0.insert(key.clone(), 1);
                1
            }
        }
    }

    /// Decrements a count, unless it is zero.
    pub(crate) fn decrement<Q: Hash + Eq + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        let is_over_limit = self.0.len() > MAX_IDLE_KEYS;
        if let Some(count) = self.0.get_mut(key) {
            *count = count.saturating_sub(1);
            if *count == 0 && is_over_limit {
                self.0.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_keys_are_removed() {
        let mut counts = KeyCounts::<String>::default();
        for n in 0..10 * MAX_IDLE_KEYS {
            let key = format!("key {n}");
            assert_eq!((counts.increment(&key), counts.increment(&key)), (1, 2));
            counts.decrement(key.as_str());
            assert_eq!(counts.get(key.as_str()), 1);
            counts.decrement(key.as_str());
            counts.decrement(key.as_str());
            assert_eq!(counts.get(key.as_str()), 0);
        }
        assert!(counts.0.len() <= MAX_IDLE_KEYS + 1, "{}", counts.0.len());
    }
}
