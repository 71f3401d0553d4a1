//! The audit log: writes entries with their actor and origin, and reads, verifies and exports the
//! log.

pub(super) mod denial_log;

use std::future::Future;

use crate::domain::caller::Caller;
use crate::domain::directory::AuditEntry;
use crate::domain::directory::audit::{AuditRow, AuditVerification, AuditVerifier, RequestOrigin};
use crate::domain::fault::{Code, Error, Fault};
use crate::ports::core::from_store_error;
use crate::ports::store::audit::{AuditFilter, AuditOrder};
use crate::registry::{Admin, Registry};

/// Rows that a verification and an export read at a time.
const ROWS_PER_PAGE: usize = 1_000;

/// Number of times that a verification starts again because rows were pruned meanwhile.
const VERIFY_ATTEMPTS: usize = 5;

tokio::task_local! {
    static ORIGIN: RequestOrigin;
}

/// Runs the work of a request. Audit entries that the work writes in this task name the origin.
pub async fn with_origin<F: Future>(origin: RequestOrigin, work: F) -> F::Output {
    ORIGIN.scope(origin, work).await
}

/// Returns the origin of the request that this task works on. Unknown outside of [`with_origin`].
pub fn current_origin() -> RequestOrigin {
    ORIGIN.try_with(RequestOrigin::clone).unwrap_or_default()
}

/// Returns an audit entry with the caller as its actor and the origin of the current request.
pub(super) fn build_audit_entry(
    at_ms: u64,
    caller: &Caller,
    project: &str,
    action: &str,
    subject: &str,
    reason: &str,
) -> AuditEntry {
    AuditEntry {
        at_ms,
        project: project.to_owned(),
        agent: caller.agent.clone(),
        action: action.to_owned(),
        subject: subject.to_owned(),
        reason: reason.to_owned(),
        user: caller.attributes.user.clone(),
        credential: caller.attributes.credential.clone(),
        origin: current_origin(),
    }
}

impl Registry {
    /// Returns an audit entry of this moment, with the caller as its actor.
    pub(crate) fn audit_entry(
        &self,
        caller: &Caller,
        project: &str,
        action: &str,
        subject: &str,
        reason: &str,
    ) -> AuditEntry {
        build_audit_entry(self.core.wall_ms(), caller, project, action, subject, reason)
    }

    /// Writes a denial to the audit log before it is answered; repetitions are counted.
    pub(super) async fn record_denial(&self, entry: AuditEntry) -> Result<(), Error> {
        self.denials.record(&self.core, entry).await
    }

    /// Writes a denial to the audit log in the background. For refusals that change nothing and
    /// concern no tool.
    pub(crate) fn record_denial_later(&self, entry: AuditEntry) {
        // Without a runtime the process is exiting.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (core, denials) = (self.core.clone(), self.denials.clone());
        self.core.tasks.spawn(async move {
            if let Err(error) = denials.record(&core, entry).await {
                tracing::warn!(%error, "a denial was not audited");
            }
        });
    }

    /// Writes one summary entry for each denial that was repeated within its minute, once that
    /// minute is over. If `is_last`, writes the summaries of unfinished minutes too.
    pub(crate) async fn write_repeated_denials(&self, is_last: bool) -> Result<(), Error> {
        self.denials.flush(&self.core, is_last).await
    }
}

impl Admin {
    /// Writes an entry about an action that changes nothing in the directory.
    pub async fn record_action(
        &self,
        caller: &Caller,
        action: &str,
        subject: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let entry = self.registry.audit_entry(caller, &caller.project, action, subject, reason);
        self.core.store.append_audit_entry(entry).await.map_err(from_store_error)
    }

    /// Returns entries about the caller's project with a lower number than `before`, newest first.
    pub async fn audit_log(
        &self,
        caller: &Caller,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<AuditRow>, Error> {
        self.registry.require_auditor(caller)?;
        let order = AuditOrder::NewestFirst { before: before.unwrap_or(u64::MAX) };
        let filter = AuditFilter { project: Some(caller.project.clone()), order, limit };
        self.core.store.audit().audit_rows(filter).await.map_err(from_store_error)
    }

    /// Returns the next page of an export, oldest first: the entries of all projects for the
    /// operator, else those of the caller's project. Empty after the last page.
    pub async fn export_audit_log(
        &self,
        caller: &Caller,
        after: u64,
    ) -> Result<Vec<AuditRow>, Error> {
        self.registry.require_auditor(caller)?;
        let project = (!caller.spans_projects()).then(|| caller.project.clone());
        let order = AuditOrder::OldestFirst { after };
        let filter = AuditFilter { project, order, limit: ROWS_PER_PAGE };
        self.core.store.audit().audit_rows(filter).await.map_err(from_store_error)
    }

    /// Checks every row of the log, of all projects, against the hash chain. With `expected`, the
    /// hash of an earlier head must be in the chain.
    pub async fn verify_audit_log(
        &self,
        caller: &Caller,
        expected: Option<String>,
    ) -> Result<AuditVerification, Error> {
        self.registry.require_auditor(caller)?;
        let is_hash =
            |text: &String| text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
        if expected.as_ref().is_some_and(|text| !is_hash(text)) {
            let message = "expect must be the hash of a head: 64 hexadecimal digits";
            let fault = Fault::new(Code::ValidationError, message).without_side_effect();
            return Err(fault.with_detail(serde_json::json!({ "field": "expect" })).into());
        }
        let expected = expected.map(|hash| hash.to_ascii_lowercase());
        for _ in 1..VERIFY_ATTEMPTS {
            if let Some(verified) = self.verify_once(expected.clone()).await? {
                return Ok(verified);
            }
        }
        let message = "the audit log is being pruned; verify it again later";
        Err(Error::refused(Code::Overloaded, message))
    }

    /// Verifies the log as it is now. Returns `None` if rows were pruned meanwhile.
    async fn verify_once(
        &self,
        expected: Option<String>,
    ) -> Result<Option<AuditVerification>, Error> {
        let store = self.core.store.audit();
        let chain = store.audit_chain().await.map_err(from_store_error)?;
        let last_number = chain.last_number.max(chain.head.number);
        let (pruned, mut after) = (chain.pruned.clone(), 0);
        let mut verifier = AuditVerifier::new(chain, expected);
        // Start before the checkpoint: a row that is still there should have been pruned.
        while after < last_number {
            let order = AuditOrder::OldestFirst { after };
            let filter = AuditFilter { project: None, order, limit: ROWS_PER_PAGE };
            let rows = store.audit_rows(filter).await.map_err(from_store_error)?;
            let Some(last) = rows.last() else { break };
            after = last.number;
            rows.iter().filter(|row| row.number <= last_number).for_each(|row| verifier.check(row));
        }
        let now = store.audit_chain().await.map_err(from_store_error)?;
        Ok((now.pruned == pruned).then(|| verifier.finish()))
    }
}
