//! Denials in the audit log. The first of equal denials is written before it is answered; its
//! repetitions in the next minute become one summary entry with their count. One agent causes a
//! bounded number of entries per minute, whatever names it tries: its further denials become one
//! summary entry too.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use crate::domain::directory::AuditEntry;
use crate::domain::fault::Error;
use crate::ports::core::{Core, from_store_error};

/// Length of the window in which equal denials become one entry.
const WINDOW_MS: u64 = 60_000;
/// Maximum number of different denials of one agent that are written per window.
const MAX_PER_AGENT: usize = 100;

/// Counts the denials that are not written one by one.
#[derive(Default)]
pub(in crate::registry) struct DenialLog {
    windows: Mutex<HashMap<AgentKey, AgentWindow>>,
    /// Summary entries that are not written yet.
    summaries: Mutex<VecDeque<AuditEntry>>,
}

/// Project and agent.
type AgentKey = (String, String);

/// The denials of one agent in one window.
struct AgentWindow {
    since_ms: u64,
    /// The denials that were written, each with the number of its repetitions since.
    written: Vec<(AuditEntry, u64)>,
    /// The last denial over the maximum, and the number of denials over it.
    others: Option<(AuditEntry, u64)>,
}

impl AgentWindow {
    fn new(since_ms: u64) -> Self {
        Self { since_ms, written: Vec::new(), others: None }
    }

    /// Counts a denial. Returns true if it is a new one that must be written.
    fn count(&mut self, entry: &AuditEntry) -> bool {
        if let Some((_, repeats)) = self.written.iter_mut().find(|(one, _)| is_equal(one, entry)) {
            *repeats += 1;
            return false;
        }
        if self.written.len() >= MAX_PER_AGENT {
            let count = self.others.as_ref().map_or(0, |(_, count)| *count);
            self.others = Some((entry.clone(), count + 1));
            return false;
        }
        self.written.push((entry.clone(), 0));
        true
    }

    /// Returns the summary entries: the repetitions of each written denial, and the denials over
    /// the maximum.
    fn into_summaries(self) -> Vec<AuditEntry> {
        let repeated = self.written.into_iter().filter(|(_, repeats)| *repeats > 0);
        let repeated = repeated.map(|(entry, repeats)| {
            let reason = format!("{repeats} more like it: {}", entry.reason);
            AuditEntry { reason, ..entry }
        });
        let others = self.others.map(|(entry, count)| {
            let reason = format!(
                "{count} other denials of this agent, the last of \"{}\": {}",
                entry.subject, entry.reason
            );
            AuditEntry { subject: String::new(), reason, ..entry }
        });
        repeated.chain(others).collect()
    }
}

/// Returns true if two denials differ only in their times and the ids of their requests.
fn is_equal(a: &AuditEntry, b: &AuditEntry) -> bool {
    a.subject == b.subject
        && a.reason == b.reason
        && a.action == b.action
        && a.user == b.user
        && a.credential == b.credential
        && a.origin.transport == b.origin.transport
        && a.origin.peer == b.origin.peer
}

impl DenialLog {
    /// Writes a denial, or counts it if an equal one was written in the same window or the agent
    /// has reached the maximum.
    pub(in crate::registry) async fn record(
        &self,
        core: &Core,
        entry: AuditEntry,
    ) -> Result<(), Error> {
        let now_ms = core.now_ms();
        let key = (entry.project.clone(), entry.agent.clone());
        let is_new = {
            let mut windows = self.windows.lock();
            let is_over = |window: &AgentWindow| now_ms >= window.since_ms + WINDOW_MS;
            if windows.get(&key).is_some_and(is_over) {
                let ended = windows.remove(&key).map(AgentWindow::into_summaries);
                self.summaries.lock().extend(ended.into_iter().flatten());
            }
            let window = windows.entry(key.clone()).or_insert_with(|| AgentWindow::new(now_ms));
            window.count(&entry)
        };
        if !is_new {
            return Ok(());
        }
        let written = core.store.append_audit_entry(entry.clone()).await;
        written.map_err(|error| {
            self.forget(&key, &entry);
            from_store_error(error)
        })
    }

    /// Makes the next equal denial a new one, because this one was not written.
    fn forget(&self, key: &AgentKey, entry: &AuditEntry) {
        if let Some(window) = self.windows.lock().get_mut(key) {
            window.written.retain(|(one, _)| !is_equal(one, entry));
        }
    }

    /// Writes the summary entries of the windows that are over; those of all windows if `is_last`.
    pub(in crate::registry) async fn flush(&self, core: &Core, is_last: bool) -> Result<(), Error> {
        let now_ms = core.now_ms();
        {
            let mut windows = self.windows.lock();
            let is_over = |window: &AgentWindow| is_last || now_ms >= window.since_ms + WINDOW_MS;
            let ended = windows.extract_if(|_, window| is_over(window));
            let summaries = ended.flat_map(|(_, window)| window.into_summaries());
            self.summaries.lock().extend(summaries);
        }
        loop {
            let Some(entry) = self.summaries.lock().pop_front() else { return Ok(()) };
            let written = AuditEntry { at_ms: core.wall_ms(), ..entry.clone() };
            if let Err(error) = core.store.append_audit_entry(written).await {
                self.summaries.lock().push_front(entry);
                return Err(from_store_error(error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denial(tool: &str) -> AuditEntry {
        let (subject, reason) = (tool.to_owned(), "no rule".to_owned());
        AuditEntry { subject, reason, ..AuditEntry::default() }
    }

    #[test]
    fn equal_denials_are_written_once_and_counted() {
        let mut window = AgentWindow::new(0);
        assert!(window.count(&denial("a")));
        assert!(!window.count(&denial("a")) && !window.count(&denial("a")));
        assert!(window.count(&denial("b")));
        let summaries = window.into_summaries();
        assert_eq!(summaries.len(), 1);
        assert_eq!(summaries[0].reason, "2 more like it: no rule");
    }

    #[test]
    fn one_agent_causes_a_bounded_number_of_entries() {
        let mut window = AgentWindow::new(0);
        let written = (0..10_000).filter(|n| window.count(&denial(&format!("t{n}")))).count();
        assert_eq!(written, MAX_PER_AGENT);
        let summaries = window.into_summaries();
        assert_eq!(summaries.len(), 1);
        assert!(summaries[0].reason.starts_with("9900 other denials"), "{}", summaries[0].reason);
    }
}
