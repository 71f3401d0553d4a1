//! The audit log as a hash chain. Pure.
//!
//! Each row has a hash over the hash of the row before it and its own content, so that a row that
//! was changed, removed or moved no longer fits its neighbors. The head repeats the number, the
//! count and the hash of the last row: it reveals that rows were removed at the end. Pruning leaves
//! a checkpoint, the last pruned row, at which the rest of the chain begins.
//!
//! A party that can rewrite the whole database can also compute a whole new chain. A copy of an
//! earlier head, kept elsewhere, reveals that: its hash is no longer in the chain.

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::domain::id::hex;

/// The hash before the first row.
pub const FIRST_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Maximum number of problems that a verification lists.
const MAX_PROBLEMS: usize = 20;

/// The origin of a request: the transport, and the request as the transport knows it. The fields
/// are in the order of their names, as hashed rows require.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct RequestOrigin {
    /// Address of the other end of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Id of the request, or of the run that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The transport: `http`, `websocket`, `mcp`, `stdio`, `nats`, `run` or `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
}

impl RequestOrigin {
    /// Returns true if nothing is known about the origin.
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AuditEntry {
    /// Time of the action, in Unix milliseconds.
    pub at_ms: u64,
    /// Id of the project that the action concerns.
    pub project: String,
    /// Agent name of the caller, or the name of the upstream that changed its tools.
    pub agent: String,
    /// The kind of change or decision, such as `call.denied` or `key.created`. `docs/audit.md` has
    /// all of them.
    pub action: String,
    /// The subject of the action: a tool, a key's id, a pattern.
    pub subject: String,
    /// Reason or details in words; may be empty.
    pub reason: String,
    /// User that the agent acted for.
    pub user: Option<String>,
    /// Id of the key or session token of the caller.
    pub credential: Option<String>,
    /// Origin of the request.
    pub origin: RequestOrigin,
}

impl AuditEntry {
    /// Returns the entry without NUL characters, which PostgreSQL cannot store: the hash must be of
    /// the stored text.
    #[must_use]
    pub fn storable(self) -> Self {
        let clean = |text: String| match text.contains('\0') {
            true => text.replace('\0', ""),
            false => text,
        };
        let RequestOrigin { transport, peer, request_id } = self.origin;
        Self {
            at_ms: self.at_ms,
            project: clean(self.project),
            agent: clean(self.agent),
            action: clean(self.action),
            subject: clean(self.subject),
            reason: clean(self.reason),
            user: self.user.map(clean),
            credential: self.credential.map(clean),
            origin: RequestOrigin {
                transport: transport.map(clean),
                peer: peer.map(clean),
                request_id: request_id.map(clean),
            },
        }
    }
}

/// A stored row of the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRow {
    /// Position in the log, ascending from 1.
    pub number: u64,
    /// The content of the row.
    pub entry: AuditEntry,
    /// Hash over the hash of the row before it, and this row.
    pub hash: String,
}

impl AuditRow {
    /// Returns the row that follows a link of the chain.
    pub fn following(previous: &AuditLink, number: u64, entry: AuditEntry) -> Self {
        let entry = entry.storable();
        let hash = row_hash(&previous.hash, number, &entry);
        Self { number, entry, hash }
    }
}

/// A position in the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLink {
    /// Number of the row; 0 before the first.
    pub number: u64,
    /// Hash of the row.
    pub hash: String,
    /// Number of rows that were ever written up to this one.
    pub entries: u64,
}

impl AuditLink {
    /// Returns the link before the first row.
    pub fn first() -> Self {
        Self { number: 0, hash: FIRST_HASH.to_owned(), entries: 0 }
    }

    /// Moves to a row that follows.
    pub fn advance(&mut self, row: &AuditRow) {
        self.number = row.number;
        self.hash.clone_from(&row.hash);
        self.entries += 1;
    }
}

/// The ends of the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditChain {
    /// The last row.
    pub head: AuditLink,
    /// The last row that was pruned; the chain begins after it.
    pub pruned: AuditLink,
    /// Highest number of a stored row, which is that of the head in an intact log.
    pub last_number: u64,
}

/// The hashed content of a row before its number, in the order of the names.
#[derive(Serialize)]
struct HashedStart<'a> {
    action: &'a str,
    agent: &'a str,
    at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    credential: Option<&'a str>,
}

/// The hashed content of a row after its number, in the order of the names.
#[derive(Serialize)]
struct HashedEnd<'a> {
    #[serde(skip_serializing_if = "RequestOrigin::is_unknown")]
    origin: &'a RequestOrigin,
    project: &'a str,
    reason: &'a str,
    subject: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<&'a str>,
}

/// Returns the hashed text of an entry before and after its number, for a store that assigns the
/// number and computes the hash in one statement. The text is the row as JSON, with sorted names
/// and without spaces; unknown members are absent.
pub fn hashed_text(entry: &AuditEntry) -> (String, String) {
    let start = HashedStart {
        action: &entry.action,
        agent: &entry.agent,
        at_ms: entry.at_ms,
        credential: entry.credential.as_deref(),
    };
    let end = HashedEnd {
        origin: &entry.origin,
        project: &entry.project,
        reason: &entry.reason,
        subject: &entry.subject,
        user: entry.user.as_deref(),
    };
    // Structs of texts and numbers always serialize.
    let mut start = serde_json::to_string(&start).unwrap_or_default();
    let end = serde_json::to_string(&end).unwrap_or_default();
    start.pop();
    (start + ",\"number\":", format!(",{}", end.get(1..).unwrap_or_default()))
}

/// Returns the hash of a row: the SHA-256 of the previous hash, a line feed and the row's text.
pub fn row_hash(previous_hash: &str, number: u64, entry: &AuditEntry) -> String {
    let (start, end) = hashed_text(entry);
    hex(&Sha256::digest(format!("{previous_hash}\n{start}{number}{end}").as_bytes()))
}

/// A row that does not fit the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditProblem {
    /// Number of the row at which the problem was found.
    pub number: u64,
    /// The problem in words.
    pub message: String,
}

/// Checks the rows of the audit log against its chain, in order.
#[derive(Debug)]
pub struct AuditVerifier {
    chain: AuditChain,
    last: AuditLink,
    /// Hash of an earlier head that must be in the chain.
    expected: Option<String>,
    is_expected_found: bool,
    problems: Vec<AuditProblem>,
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditVerification {
    /// Rows that were checked.
    pub entries: u64,
    /// Rows that were pruned before the first checked one.
    pub pruned: u64,
    /// The head of the chain.
    pub head: AuditLink,
    /// Rows that do not fit; empty if the log is intact.
    pub problems: Vec<AuditProblem>,
}

impl AuditVerifier {
    /// Starts at the checkpoint of a chain. With `expected`, the hash of an earlier head has to be
    /// found in the chain.
    pub fn new(chain: AuditChain, expected: Option<String>) -> Self {
        let last = chain.pruned.clone();
        let is_expected_found = expected.as_ref().is_none_or(|hash| *hash == last.hash);
        Self { chain, last, expected, is_expected_found, problems: Vec::new() }
    }

    /// Checks the next row.
    pub fn check(&mut self, row: &AuditRow) {
        if row_hash(&self.last.hash, row.number, &row.entry) != row.hash {
            let message = match row.number.saturating_sub(self.last.number) {
                1 => format!("entry {} was changed, or does not belong here", row.number),
                2 => format!("entry {} was removed", row.number - 1),
                _ => format!(
                    "entries {} to {} were removed",
                    self.last.number + 1,
                    row.number.saturating_sub(1)
                ),
            };
            self.report(row.number, message);
        }
        self.is_expected_found |= self.expected.as_ref().is_some_and(|hash| *hash == row.hash);
        self.last.advance(row);
    }

    fn report(&mut self, number: u64, message: String) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(AuditProblem { number, message });
        }
    }

    /// Compares the end of the log with the head.
    pub fn finish(mut self) -> AuditVerification {
        let head = self.chain.head.clone();
        if (self.last.number, &self.last.hash) != (head.number, &head.hash) {
            let message = format!(
                "the log ends with entry {}, and its last entry was number {}: entries at the end \
                 were removed or changed",
                self.last.number, head.number
            );
            self.report(head.number, message);
        } else if self.last.entries != head.entries && self.problems.is_empty() {
            let (found, written) = (self.last.entries, head.entries);
            self.report(head.number, format!("{written} entries were written, {found} are there"));
        }
        if !self.is_expected_found {
            let message = "the expected hash is not in the log: entries up to it were changed, \
                           removed or pruned";
            self.report(head.number, message.to_owned());
        }
        AuditVerification {
            entries: self.last.entries - self.chain.pruned.entries,
            pruned: self.chain.pruned.entries,
            head,
            problems: self.problems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(subject: &str) -> AuditEntry {
        AuditEntry {
            at_ms: 1,
            project: "p".into(),
            agent: "ada".into(),
            action: "call.denied".into(),
            subject: subject.into(),
            reason: "no rule".into(),
            ..AuditEntry::default()
        }
    }

    fn log(subjects: &[&str]) -> (Vec<AuditRow>, AuditChain) {
        let mut head = AuditLink::first();
        let rows: Vec<AuditRow> = subjects
            .iter()
            .map(|subject| {
                let row = AuditRow::following(&head, head.number + 1, entry(subject));
                head.advance(&row);
                row
            })
            .collect();
        let last_number = head.number;
        (rows, AuditChain { head, pruned: AuditLink::first(), last_number })
    }

    fn verify(rows: &[AuditRow], chain: &AuditChain, expected: Option<&str>) -> AuditVerification {
        let mut verifier = AuditVerifier::new(chain.clone(), expected.map(str::to_owned));
        rows.iter().for_each(|row| verifier.check(row));
        verifier.finish()
    }

    #[test]
    fn an_intact_log_verifies_and_contains_every_earlier_head() {
        let (rows, chain) = log(&["a", "b", "c"]);
        for row in &rows {
            let found = verify(&rows, &chain, Some(&row.hash));
            assert_eq!((found.problems, found.entries), (vec![], 3));
        }
        assert_eq!(verify(&rows, &chain, Some(&"f".repeat(64))).problems.len(), 1);
    }

    #[test]
    fn the_hash_is_of_documented_text() {
        let mut full = entry("x");
        full.user = Some("u".into());
        full.credential = Some("key_1".into());
        full.origin.transport = Some("http".into());
        let text = format!(
            "{FIRST_HASH}\n{}",
            r#"{"action":"call.denied","agent":"ada","at_ms":1,"credential":"key_1","number":7,"origin":{"transport":"http"},"project":"p","reason":"no rule","subject":"x","user":"u"}"#
        );
        assert_eq!(row_hash(FIRST_HASH, 7, &full), hex(&Sha256::digest(text.as_bytes())));
    }

    #[test]
    fn changed_removed_and_moved_rows_are_found() {
        let (rows, chain) = log(&["a", "b", "c", "d"]);
        let mut changed = rows.clone();
        changed[1].entry.reason = "allowed".into();
        assert_eq!(verify(&changed, &chain, None).problems[0].number, 2);

        let mut removed = rows.clone();
        removed.remove(1);
        let problems = verify(&removed, &chain, None).problems;
        assert_eq!(problems[0].message, "entry 2 was removed");

        let mut first_removed = rows.clone();
        first_removed.remove(0);
        assert_eq!(verify(&first_removed, &chain, None).problems[0].number, 2);

        let mut moved = rows.clone();
        let (one, two) = (moved[1].entry.clone(), moved[2].entry.clone());
        (moved[1].entry, moved[2].entry) = (two, one);
        assert_eq!(verify(&moved, &chain, None).problems.len(), 2);

        let shortened = verify(&rows[..2], &chain, None).problems;
        assert!(shortened[0].message.contains("ends with entry 2"), "{shortened:?}");
    }

    #[test]
    fn a_pruned_log_verifies_from_its_checkpoint() {
        let (rows, mut chain) = log(&["a", "b", "c"]);
        chain.pruned.advance(&rows[0]);
        let found = verify(&rows[1..], &chain, Some(&rows[0].hash));
        assert_eq!((found.problems, found.entries, found.pruned), (vec![], 2, 1));
        assert_eq!(verify(&rows[2..], &chain, None).problems.len(), 1);
    }
}
