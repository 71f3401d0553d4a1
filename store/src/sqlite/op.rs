//! The changes that the writer accepts, and the replies to their callers.

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolcrib::delivery::{Delivery, Try};
use toolcrib::directory::{AuditEntry, Change};
use toolcrib::id::CallId;
use toolcrib::store::{Created, IdempotencyKey, Purged, Run, Saved, StoreError, Together};

use crate::row::{CallRow, LoopRow, RecordRow};

/// A closure to run in a commit. It runs again when its change group was not committed.
pub(super) type Work = Box<dyn FnMut(&Connection) -> rusqlite::Result<()> + Send>;

pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A change for the writer, with the channel for its reply.
pub(super) enum Op {
    Create {
        row: Box<CallRow>,
        records: Vec<RecordRow>,
        key: Option<IdempotencyKey>,
        /// The calls that arrived with this one and can share its flush.
        together: Option<Together>,
        reply: Reply<Created>,
    },
    Save {
        row: Box<CallRow>,
        records: Vec<RecordRow>,
        reply: Reply<Saved>,
    },
    Append {
        project: String,
        id: CallId,
        records: Vec<RecordRow>,
        reply: Reply<()>,
    },
    Purge {
        ended_before_ms: u64,
        limit: usize,
        reply: Reply<Purged>,
    },
    Change {
        change: Box<Change>,
        decided_on: u64,
        audit: Option<AuditEntry>,
        reply: Reply<Saved>,
    },
    Audit {
        entry: AuditEntry,
        reply: Reply<()>,
    },
    PutRun {
        run: Box<Run>,
        reply: Reply<()>,
    },
    Deliver {
        delivery: Box<Delivery>,
        tried: Option<Try>,
        reply: Reply<Saved>,
    },
    Check {
        reply: Reply<()>,
    },
    CreateLoop {
        row: Box<LoopRow>,
        reply: Reply<Option<(String, String)>>,
    },
    SaveLoop {
        row: Box<LoopRow>,
        reply: Reply<Saved>,
    },
    /// Any other change.
    Work {
        work: Work,
        reply: Reply<()>,
    },
}

/// The result of a change, sent to its caller after the commit.
pub(super) enum Told {
    Created(Reply<Created>, Created),
    Saved(Reply<Saved>, Saved),
    Purged(Reply<Purged>, Purged),
    Done(Reply<()>),
    Looped(Reply<Option<(String, String)>>, Option<(String, String)>),
}

impl Told {
    pub(super) fn tell(self) {
        // The caller may have gone away; the change is committed all the same.
        match self {
            Self::Created(reply, created) => drop(reply.send(Ok(created))),
            Self::Saved(reply, saved) => drop(reply.send(Ok(saved))),
            Self::Purged(reply, purged) => drop(reply.send(Ok(purged))),
            Self::Done(reply) => drop(reply.send(Ok(()))),
            Self::Looped(reply, known) => drop(reply.send(Ok(known))),
        }
    }

    pub(super) fn refuse(self, why: &str) {
        let error = || StoreError::Unavailable(why.to_owned());
        match self {
            Self::Created(reply, _) => drop(reply.send(Err(error()))),
            Self::Saved(reply, _) => drop(reply.send(Err(error()))),
            Self::Purged(reply, _) => drop(reply.send(Err(error()))),
            Self::Done(reply) => drop(reply.send(Err(error()))),
            Self::Looped(reply, _) => drop(reply.send(Err(error()))),
        }
    }
}

/// Reports to the caller that its change was not made.
pub(super) fn refuse(op: Op, why: &str) {
    let told = match op {
        Op::Create { reply, .. } => Told::Created(reply, Created::New),
        Op::Save { reply, .. } | Op::Change { reply, .. } | Op::Deliver { reply, .. } => {
            Told::Saved(reply, Saved::Stale)
        }
        Op::Work { reply, .. } => Told::Done(reply),
        Op::CreateLoop { reply, .. } => Told::Looped(reply, None),
        Op::SaveLoop { reply, .. } => Told::Saved(reply, Saved::Stale),
        Op::Append { reply, .. }
        | Op::Audit { reply, .. }
        | Op::PutRun { reply, .. }
        | Op::Check { reply } => Told::Done(reply),
        Op::Purge { reply, .. } => Told::Purged(reply, Purged { calls: 0, more: false }),
    };
    told.refuse(why);
}
