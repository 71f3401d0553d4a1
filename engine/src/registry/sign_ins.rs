//! Sign-ins in the audit log: the first use of each credential from each address since the start of
//! the process, and refused credentials. Refusals are limited per address and in all, and addresses
//! per credential, so that neither guessing nor changing addresses can fill the log.

use core::net::IpAddr;
use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use super::audit::{build_audit_entry, current_origin};
use crate::domain::caller::{Caller, DEFAULT_PROJECT};
use crate::domain::directory::{ApiKey, AuditEntry};
use crate::ports::core::Core;

/// Length of the period that refusals are counted over.
const WINDOW_MS: u64 = 60_000;
/// Maximum number of refusals of one address that are recorded per period.
const MAX_FAILURES_PER_PEER: u32 = 5;
/// Maximum number of refusals that are recorded per period.
const MAX_FAILURES: u32 = 100;
/// Maximum number of credentials whose first use is remembered. Beyond it, all are forgotten, and
/// their next uses are recorded as first ones.
const MAX_SEEN: usize = 100_000;
/// Maximum number of addresses that are recorded for one credential.
const MAX_ADDRESSES: usize = 32;

/// Remembers which sign-ins were recorded.
#[derive(Default)]
pub(super) struct SignInLog {
    /// The addresses that each credential was used from.
    seen: Mutex<HashMap<String, HashSet<Option<IpAddr>>>>,
    failures: Mutex<FailureWindow>,
}

#[derive(Default)]
struct FailureWindow {
    since_ms: u64,
    recorded: u32,
    omitted: u64,
    by_peer: HashMap<Option<IpAddr>, u32>,
}

impl FailureWindow {
    /// Counts a failure. Returns the number of failures that were omitted since the last recorded
    /// one, or `None` if this one is omitted too.
    fn count(&mut self, peer: Option<IpAddr>, now_ms: u64) -> Option<u64> {
        if now_ms.saturating_sub(self.since_ms) >= WINDOW_MS {
            (self.since_ms, self.recorded) = (now_ms, 0);
            self.by_peer.clear();
        }
        let of_peer = self.by_peer.get(&peer).copied().unwrap_or(0);
        if self.recorded >= MAX_FAILURES || of_peer >= MAX_FAILURES_PER_PEER {
            self.omitted += 1;
            return None;
        }
        self.recorded += 1;
        self.by_peer.insert(peer, of_peer + 1);
        Some(std::mem::take(&mut self.omitted))
    }
}

/// Credentials that were refused, for the audit log.
pub(super) struct RefusedCredential {
    pub(super) project: String,
    pub(super) agent: String,
    /// Id of the key or token; empty for an unknown secret.
    pub(super) id: String,
    pub(super) reason: &'static str,
}

impl RefusedCredential {
    pub(super) fn new(key: &ApiKey, id: &str, reason: &'static str) -> Self {
        let (project, agent) = (key.project.clone(), key.agent.clone());
        Self { project, agent, id: id.to_owned(), reason }
    }

    pub(super) fn unknown() -> Self {
        let project = DEFAULT_PROJECT.to_owned();
        Self { project, agent: String::new(), id: String::new(), reason: "unknown credentials" }
    }
}

impl SignInLog {
    /// Records the first use of a credential from an address since the start. After
    /// [`MAX_ADDRESSES`] of them, further addresses of the credential are not recorded.
    pub(super) fn record_first_use(&self, core: &Core, caller: &Caller, peer: Option<IpAddr>) {
        let credential = caller.attributes.credential.as_deref();
        let Some(number) = self.count_address(credential, caller, peer) else { return };
        let subject = credential.unwrap_or(&caller.agent);
        let reason = match number {
            1 => "first use since the start",
            MAX_ADDRESSES => "first use from this address; further addresses are not recorded",
            _ => "first use from this address",
        };
        let (at_ms, project) = (core.wall_ms(), &caller.project);
        append_entry(core, build_audit_entry(at_ms, caller, project, "sign_in", subject, reason));
    }

    /// Returns the number of addresses of the credential if this one is new and to be recorded.
    fn count_address(
        &self,
        credential: Option<&str>,
        caller: &Caller,
        peer: Option<IpAddr>,
    ) -> Option<usize> {
        let mut seen = self.seen.lock();
        let is_known = |addresses: &HashSet<Option<IpAddr>>| {
            addresses.contains(&peer) || addresses.len() >= MAX_ADDRESSES
        };
        let name = match credential {
            Some(id) => match seen.get(id).is_some_and(is_known) {
                true => return None,
                false => id.to_owned(),
            },
            None => issued_name(caller),
        };
        if seen.len() >= MAX_SEEN && !seen.contains_key(&name) {
            seen.clear();
        }
        let addresses = seen.entry(name).or_default();
        if is_known(addresses) {
            return None;
        }
        addresses.insert(peer);
        Some(addresses.len())
    }

    /// Records refused credentials.
    pub(super) fn record_refused(
        &self,
        core: &Core,
        peer: Option<IpAddr>,
        refused: &RefusedCredential,
    ) {
        metrics::counter!("toolcrib_sign_in_failures_total").increment(1);
        let now_ms = core.now_ms();
        let counted = self.failures.lock().count(peer, now_ms);
        let Some(omitted) = counted else { return };
        let mut reason = refused.reason.to_owned();
        if omitted > 0 {
            reason.push_str(&format!("; {omitted} earlier ones were not recorded"));
        }
        let entry = AuditEntry {
            at_ms: core.wall_ms(),
            project: refused.project.clone(),
            agent: refused.agent.clone(),
            action: "sign_in.failed".to_owned(),
            subject: refused.id.clone(),
            reason,
            origin: current_origin(),
            ..AuditEntry::default()
        };
        append_entry(core, entry);
    }
}

/// Appends an entry in the background: no request waits for it.
fn append_entry(core: &Core, entry: AuditEntry) {
    // Without a runtime the process is exiting.
    if tokio::runtime::Handle::try_current().is_err() {
        return;
    }
    let store = core.store.clone();
    core.tasks.spawn(async move {
        if let Err(error) = store.append_audit_entry(entry).await {
            tracing::warn!(%error, "a sign-in could not be written to the audit log");
        }
    });
}

/// Returns the name under which a caller without a key or session token is remembered.
fn issued_name(caller: &Caller) -> String {
    format!("{} {}", caller.project, caller.agent)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_signs_in_once_per_address_and_from_a_bounded_number_of_them() {
        let log = SignInLog::default();
        let (caller, peer) = (Caller::anonymous("p"), |n: u32| Some(IpAddr::from(n.to_be_bytes())));
        assert_eq!(log.count_address(Some("key_1"), &caller, peer(1)), Some(1));
        assert_eq!(log.count_address(Some("key_1"), &caller, peer(1)), None);
        assert_eq!(log.count_address(Some("key_1"), &caller, peer(2)), Some(2));
        assert_eq!(log.count_address(Some("key_2"), &caller, peer(2)), Some(1));
        let new = |n: &u32| log.count_address(Some("key_1"), &caller, peer(*n)).is_some();
        assert_eq!((3..10_000).filter(new).count(), MAX_ADDRESSES - 2);
    }

    #[test]
    fn refusals_are_limited_per_address_and_in_all() {
        let mut window = FailureWindow::default();
        let peer = |n: u32| Some(IpAddr::from(n.to_be_bytes()));
        for _ in 0..MAX_FAILURES_PER_PEER {
            assert_eq!(window.count(peer(1), 1_000), Some(0));
        }
        assert_eq!(window.count(peer(1), 1_001), None);
        assert_eq!(window.count(peer(1), 1_002), None);
        assert_eq!(window.count(peer(2), 1_003), Some(2), "counts those that were left out");
        let recorded = (3..1_000).filter(|n| window.count(peer(*n), 1_004).is_some()).count();
        assert_eq!(recorded as u32, MAX_FAILURES - MAX_FAILURES_PER_PEER - 1);
        assert!(window.count(peer(1), 1_000 + WINDOW_MS + 60_000).is_some());
        assert!(window.by_peer.len() == 1, "a new period forgets the addresses");
    }
}
