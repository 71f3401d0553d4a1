//! The changes that the writer accepts, and the replies to their callers.

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::domain::directory::{AuditEntry, DirectoryChange};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{
    CommitGroup, CreateCallResult, IdempotencyKey, PurgeResult, RunToolDefinitions, SaveResult,
    StoreError,
};

use crate::row::{CallRow, EventRow, RunRow};

/// A closure to run in a commit. It runs again when its change group was not committed.
pub(super) type WriteClosure = Box<dyn FnMut(&Connection) -> rusqlite::Result<()> + Send>;

pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A change for the writer, with the channel for its reply.
pub(super) enum SqliteChange {
    CreateCall {
        row: Box<CallRow>,
        records: Vec<EventRow>,
        key: Option<IdempotencyKey>,
        /// The calls that arrived with this one and can share its flush.
        group: Option<CommitGroup>,
        reply: Reply<CreateCallResult>,
    },
    SaveCall {
        row: Box<CallRow>,
        records: Vec<EventRow>,
        reply: Reply<SaveResult>,
    },
    AppendEvents {
        project: String,
        id: CallId,
        records: Vec<EventRow>,
        reply: Reply<()>,
    },
    Purge {
        ended_before_ms: u64,
        limit: usize,
        reply: Reply<PurgeResult>,
    },
    ChangeDirectory {
        change: Box<DirectoryChange>,
        expected_version: u64,
        audit: Option<AuditEntry>,
        reply: Reply<SaveResult>,
    },
    AppendAudit {
        entry: AuditEntry,
        reply: Reply<()>,
    },
    PutRunTools {
        run: Box<RunToolDefinitions>,
        reply: Reply<()>,
    },
    SaveDelivery {
        delivery: Box<Delivery>,
        tried: Option<DeliveryAttempt>,
        reply: Reply<SaveResult>,
    },
    WriteProbe {
        reply: Reply<()>,
    },
    CreateRun {
        row: Box<RunRow>,
        reply: Reply<Option<(String, String)>>,
    },
    SaveRun {
        row: Box<RunRow>,
        reply: Reply<SaveResult>,
    },
    /// Any other change.
    Closure {
        closure: WriteClosure,
        reply: Reply<()>,
    },
}

/// The result of a change, sent to its caller after the commit.
pub(super) enum PendingReply {
    Created(Reply<CreateCallResult>, CreateCallResult),
    Saved(Reply<SaveResult>, SaveResult),
    Purged(Reply<PurgeResult>, PurgeResult),
    Done(Reply<()>),
    RunCreated(Reply<Option<(String, String)>>, Option<(String, String)>),
}

impl PendingReply {
    pub(super) fn send(self) {
        // The caller may have gone away; the change is committed all the same.
        match self {
            Self::Created(reply, created) => drop(reply.send(Ok(created))),
            Self::Saved(reply, saved) => drop(reply.send(Ok(saved))),
            Self::Purged(reply, purged) => drop(reply.send(Ok(purged))),
            Self::Done(reply) => drop(reply.send(Ok(()))),
            Self::RunCreated(reply, known) => drop(reply.send(Ok(known))),
        }
    }

    pub(super) fn send_error(self, why: &str) {
        let error = || StoreError::Unavailable(why.to_owned());
        match self {
            Self::Created(reply, _) => drop(reply.send(Err(error()))),
            Self::Saved(reply, _) => drop(reply.send(Err(error()))),
            Self::Purged(reply, _) => drop(reply.send(Err(error()))),
            Self::Done(reply) => drop(reply.send(Err(error()))),
            Self::RunCreated(reply, _) => drop(reply.send(Err(error()))),
        }
    }
}

/// Reports to the caller that its change was not made.
pub(super) fn fail_change(op: SqliteChange, why: &str) {
    let told = match op {
        SqliteChange::CreateCall { reply, .. } => {
            PendingReply::Created(reply, CreateCallResult::New)
        }
        SqliteChange::SaveCall { reply, .. }
        | SqliteChange::ChangeDirectory { reply, .. }
        | SqliteChange::SaveDelivery { reply, .. } => {
            PendingReply::Saved(reply, SaveResult::Conflict)
        }
        SqliteChange::Closure { reply, .. } => PendingReply::Done(reply),
        SqliteChange::CreateRun { reply, .. } => PendingReply::RunCreated(reply, None),
        SqliteChange::SaveRun { reply, .. } => PendingReply::Saved(reply, SaveResult::Conflict),
        SqliteChange::AppendEvents { reply, .. }
        | SqliteChange::AppendAudit { reply, .. }
        | SqliteChange::PutRunTools { reply, .. }
        | SqliteChange::WriteProbe { reply } => PendingReply::Done(reply),
        SqliteChange::Purge { reply, .. } => {
            PendingReply::Purged(reply, PurgeResult { calls: 0, has_more: false })
        }
    };
    told.send_error(why);
}
