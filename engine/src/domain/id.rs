//! Prefixed, readable ids.
//!
//! Parsing and formatting are pure. Creating an id takes a clock and randomness; the engine's
//! [`IdGenerator`] does it. Ids sort by creation time.

use std::fmt;
use std::str::FromStr;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The error for a text that is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{given}\" is not an id of the form {prefix}…")]
pub struct InvalidId {
    /// The input, truncated to a readable length.
    pub given: String,
    /// The prefix of such ids.
    pub prefix: &'static str,
}

/// The id of one call: `tc_` and 26 letters and digits that sort by time.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CallId(std::sync::Arc<str>);

impl CallId {
    /// Prefix of every call id.
    pub const PREFIX: &'static str = "tc_";

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the smallest id that a call created at this time can have.
    pub fn min_at(unix_ms: u64) -> Self {
        let ulid = ulid::Ulid::from_parts(unix_ms, 0);
        Self(format!("{}{ulid}", Self::PREFIX).into())
    }
}

impl FromStr for CallId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let body = text.strip_prefix(Self::PREFIX).unwrap_or_default();
        if body.is_empty() || body.len() > 64 || !body.bytes().all(|b| b.is_ascii_alphanumeric()) {
            let given = text.chars().take(80).collect();
            return Err(InvalidId { given, prefix: Self::PREFIX });
        }
        Ok(Self(text.into()))
    }
}

impl TryFrom<String> for CallId {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<Self, InvalidId> {
        text.parse()
    }
}

impl From<CallId> for String {
    fn from(id: CallId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Creates unique ids that sort in the order of their creation.
pub struct IdGenerator {
    last: Mutex<ulid::Ulid>,
}

impl Default for IdGenerator {
    fn default() -> Self {
        Self { last: Mutex::new(ulid::Ulid::nil()) }
    }
}

impl IdGenerator {
    /// Creates a call id for this time.
    pub fn next_call_id(&self, now_ms: u64) -> CallId {
        let (next, mut buffer) = (self.next_ulid(now_ms), [0; ulid::ULID_LEN]);
        let mut text = [0; CallId::PREFIX.len() + ulid::ULID_LEN];
        text[..CallId::PREFIX.len()].copy_from_slice(CallId::PREFIX.as_bytes());
        text[CallId::PREFIX.len()..].copy_from_slice(next.array_to_str(&mut buffer).as_bytes());
        CallId(String::from_utf8_lossy(&text).into())
    }

    /// Creates an id with the given prefix.
    pub fn next_id(&self, prefix: &str, now_ms: u64) -> String {
        format!("{prefix}{}", self.next_ulid(now_ms))
    }

    fn next_ulid(&self, now_ms: u64) -> ulid::Ulid {
        let mut last = self.last.lock();
        let fresh = || ulid::Ulid::from_parts(now_ms, ulid::Ulid::generate().random());
        // Within one millisecond (or while the clock stands still) the next id is the last plus
        // one.
        let next = match now_ms > last.timestamp_ms() {
            true => fresh(),
            false => last.increment().unwrap_or_else(|_| fresh()),
        };
        *last = next;
        next
    }
}

/// Formats bytes as lowercase hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_in_creation_order() {
        let id_generator = IdGenerator::default();
        let ids: Vec<CallId> =
            (0..1000).map(|n| id_generator.next_call_id(1_700_000_000_000 + n / 100)).collect();
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(CallId::min_at(1_700_000_000_000) <= ids[0]);
        assert!(CallId::min_at(1_700_000_000_011) > ids[999]);
    }

    #[test]
    fn only_call_ids_parse() {
        assert!("tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse::<CallId>().is_ok());
        for bad in ["", "tc_", "run_1", "tc_a/b", "tc_\u{e9}", &format!("tc_{}", "a".repeat(65))] {
            assert!(bad.parse::<CallId>().is_err(), "{bad}");
        }
    }
}
