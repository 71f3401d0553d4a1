//! The single writer: takes all queued changes, commits them in one transaction, then replies to
//! every caller.
//!
//! New calls and updates of calls are pipelined: none waits for the response to another. Each
//! transaction also increments a counter in the row of `writer`. After a lost connection the writer
//! reconnects and reads that counter, which shows whether its last transaction was committed; it
//! then either reports success or runs the transaction again. A change that was stored is therefore
//! never reported as lost. If the counter cannot tell, because another server has taken over the
//! database or this process has no lease, the writer reports that the outcome is unknown. Callers
//! in the transaction wait until its fate is known; changes sent meanwhile are refused.
//!
//! When PostgreSQL rejects a transaction, the writer runs each of its changes separately, so that
//! one invalid change does not fail the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use toolcrib::ports::store::StoreError;

use super::change::{Change, ChangeFuture, WriterConnection};
use super::session::{Connector, SessionError};
use super::writer_lease::{
    SequenceCounters, current_backend, read_generation, terminate_backend, try_lock,
};
use crate::row::RowReader;

/// Maximum number of changes that share a transaction.
const MAX_GROUP: usize = 512;
/// Maximum number of queued changes. More are refused, because they would only wait longer.
const MAX_QUEUED_CHANGES: usize = 65_536;
/// First and longest delay before an attempt to reconnect.
const RECONNECT_DELAY_MIN: Duration = Duration::from_millis(100);
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);

/// The reason why nothing can be written at present, shared with the senders of changes.
#[derive(Clone, Default)]
pub(super) struct WriterOutage(Arc<watch::Sender<Option<String>>>);

impl WriterOutage {
    fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    fn set(&self, reason: Option<String>) {
        self.0.send_replace(reason);
    }

    /// Returns once another server has taken over the database.
    async fn lease_lost(&self) {
        let is_lost = |reason: &Option<String>| reason.as_deref() == Some(LEASE_LOST);
        // The sender lives as long as this value, so the wait ends with the loss only.
        let _ = self.0.subscribe().wait_for(is_lost).await;
    }
}

/// A handle to the writer task.
pub(super) struct PostgresWriter {
    queue: mpsc::Sender<Box<dyn Change>>,
    outage: WriterOutage,
}

impl PostgresWriter {
    pub(super) fn start(writer: WriterConnection, address: Connector) -> Self {
        let (queue, receiver) = mpsc::channel(MAX_QUEUED_CHANGES);
        let outage = WriterOutage::default();
        let task = WriterTask {
            connection: writer,
            connector: address,
            outage: outage.clone(),
            queue: receiver,
        };
        tokio::spawn(task.run());
        Self { queue, outage }
    }

    /// Returns the reason once another server has taken over the database.
    pub(super) async fn wait_for_lost_lease(&self) -> &'static str {
        self.outage.lease_lost().await;
        LEASE_LOST
    }

    pub(super) fn send(&self, change: Box<dyn Change>) -> Result<(), StoreError> {
        if let Some(reason) = self.outage.reason() {
            return Err(StoreError::Unavailable(reason));
        }
        self.queue.try_send(change).map_err(|refused| {
            let reason = match refused {
                mpsc::error::TrySendError::Full(_) => "the write queue is full",
                mpsc::error::TrySendError::Closed(_) => "the writer has stopped",
            };
            StoreError::Unavailable(reason.to_owned())
        })
    }
}

struct WriterTask {
    connection: WriterConnection,
    connector: Connector,
    outage: WriterOutage,
    queue: ChangeReceiver,
}

type ChangeGroup = Vec<Box<dyn Change>>;
type ChangeReceiver = mpsc::Receiver<Box<dyn Change>>;

impl WriterTask {
    async fn run(mut self) {
        let mut group = Vec::with_capacity(MAX_GROUP);
        while self.queue.recv_many(&mut group, MAX_GROUP).await > 0 {
            self.commit_group(std::mem::take(&mut group)).await;
            if self.connection.session.is_closed() {
                self.reconnect().await;
            }
        }
    }

    /// Commits a group, or reports to every caller in it why it failed.
    async fn commit_group(&mut self, mut group: ChangeGroup) {
        let (began, size) = (Instant::now(), group.len());
        loop {
            // The connection was lost while the writer was idle: no transaction is in flight whose
            // fate has to be determined.
            if self.connection.session.is_closed() && !self.try_reconnect().await {
                let reason = self.outage.reason().unwrap_or_default();
                return fail_group(group, &reason);
            }
            let Err(error) = self.write_group(&mut group).await else { break };
            if self.connection.session.is_closed() || error.is_connection_lost() {
                tracing::warn!(why = error.message(), "the connection to PostgreSQL is lost");
                match self.resolve_commit_fate().await {
                    CommitFate::Committed => break,
                    CommitFate::RolledBack => continue,
                    CommitFate::Unknown => {
                        let reason =
                            self.outage.reason().unwrap_or_else(|| COMMIT_FATE_UNKNOWN.to_owned());
                        let error = StoreError::OutcomeUnknown(reason);
                        group.into_iter().for_each(|change| change.reply(Err(clone_error(&error))));
                        return;
                    }
                }
            }
            let _ = self.connection.session.batch_execute("ROLLBACK").await;
            if size == 1 {
                tracing::error!(why = error.message(), "PostgreSQL refused a change");
                let error = error.into_store_error();
                return group.into_iter().for_each(|change| change.reply(Err(clone_error(&error))));
            }
            tracing::debug!(
                why = error.message(),
                size,
                "retrying the changes of a group separately"
            );
            for change in group {
                Box::pin(self.commit_group(vec![change])).await;
            }
            return;
        }
        metrics::histogram!("toolcrib_store_commit_duration_seconds").record(began.elapsed());
        metrics::histogram!("toolcrib_store_commit_group_size").record(size as f64);
        group.into_iter().for_each(|change| change.reply(Ok(())));
    }

    /// Commits a group in one transaction. Restores the counters if the transaction fails.
    async fn write_group(&mut self, group: &mut [Box<dyn Change>]) -> Result<(), SessionError> {
        let before = self.connection.counters;
        let written = self.run_transaction(group).await;
        if written.is_err() {
            self.connection.counters = before;
        }
        written
    }

    async fn run_transaction(&mut self, group: &mut [Box<dyn Change>]) -> Result<(), SessionError> {
        let mut numbers = self.connection.counters;
        group.iter_mut().for_each(|change| change.assign_numbers(&mut numbers));
        self.connection.counters = numbers;
        {
            let writer = &self.connection;
            let begin = writer.session.batch_execute("BEGIN");
            let mut sent: Vec<ChangeFuture<'_, ()>> = vec![Box::pin(begin)];
            sent.extend(group.iter_mut().filter_map(|change| change.start_pipelined(writer)));
            futures::future::try_join_all(sent).await?;
        }
        for change in group.iter_mut() {
            if let Some(running) = change.run_alone(&mut self.connection) {
                running.await?;
            }
        }
        if let Some(lease) = &self.connection.lease {
            lease.record_commit(&self.connection.session, self.connection.counters).await?;
        }
        self.connection.session.batch_execute("COMMIT").await?;
        if let Some(lease) = &mut self.connection.lease {
            lease.commits += 1;
        }
        Ok(())
    }

    /// Determines whether the transaction in flight was committed before the connection was lost.
    async fn resolve_commit_fate(&mut self) -> CommitFate {
        // The connection may only appear lost from this side: nothing more must happen on it.
        self.connection.session.abort();
        let Some(lease) = &self.connection.lease else { return CommitFate::Unknown };
        let counted = lease.commits + 1;
        if !self.reconnect().await {
            return CommitFate::Unknown;
        }
        match self.connection.lease.as_ref().is_some_and(|lease| lease.commits == counted) {
            true => CommitFate::Committed,
            false => CommitFate::RolledBack,
        }
    }

    /// Reconnects, with as many attempts as it takes, and fails the changes queued meanwhile.
    /// Returns false when another server has taken over the database or the store is closed.
    async fn reconnect(&mut self) -> bool {
        let mut pause = RECONNECT_DELAY_MIN;
        while !self.try_reconnect().await {
            let reason = self.outage.reason().unwrap_or_default();
            fail_group(std::iter::from_fn(|| self.queue.try_recv().ok()).collect(), &reason);
            if reason == LEASE_LOST || self.queue.is_closed() {
                return false;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_DELAY_MAX);
        }
        true
    }

    /// Tries once to reconnect, and publishes the result to the senders of changes.
    async fn try_reconnect(&mut self) -> bool {
        if self.outage.reason().as_deref() == Some(LEASE_LOST) {
            return false;
        }
        let reason = match self.restore_session().await {
            Ok(true) => None,
            Ok(false) => Some(LEASE_LOST.to_owned()),
            Err(error) => Some(format!("the connection is lost: {}", error.message())),
        };
        match &reason {
            None => tracing::info!("connected to PostgreSQL again"),
            Some(reason) if self.outage.reason().is_none() => tracing::error!("{reason}"),
            Some(_) => {}
        }
        self.outage.set(reason.clone());
        reason.is_none()
    }

    async fn restore_session(&mut self) -> Result<bool, SessionError> {
        let session = self.connector.connect(None).await?;
        if let Some(lease) = &mut self.connection.lease {
            if !try_lock(&session).await? {
                // The holder is another server, or a lost session of this one.
                if read_generation(&session).await? != Some(lease.generation) {
                    return Ok(false);
                }
                terminate_backend(&session, &lease.backend).await?;
                let reason = "the lock of this server's lost connection is still held";
                return Err(StoreError::Unavailable(reason.to_owned()).into());
            }
            let sql = "SELECT owner, commits, last_event, last_place FROM writer";
            let Some(row) = session.query_first(sql, &[]).await? else { return Ok(false) };
            if row.integer(0)? != lease.generation {
                return Ok(false);
            }
            lease.commits = row.integer(1)?;
            lease.backend = current_backend(&session).await?;
            self.connection.counters =
                SequenceCounters { last_event: row.integer(2)?, last_position: row.integer(3)? };
        }
        self.connection.session = session;
        Ok(true)
    }
}

/// The fate of a transaction whose COMMIT was not answered.
enum CommitFate {
    Committed,
    RolledBack,
    Unknown,
}

const COMMIT_FATE_UNKNOWN: &str = "the connection was lost before PostgreSQL answered: check \
                                   whether the change was made before you repeat it";
const LEASE_LOST: &str = "another toolcrib has served this database since the connection was lost; \
     restart this one";

fn fail_group(group: ChangeGroup, reason: &str) {
    let error = StoreError::Unavailable(reason.to_owned());
    group.into_iter().for_each(|change| change.reply(Err(clone_error(&error))));
}

fn clone_error(error: &StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(reason) => StoreError::Unavailable(reason.clone()),
        StoreError::OutcomeUnknown(reason) => StoreError::OutcomeUnknown(reason.clone()),
        StoreError::Corrupt(reason) => StoreError::Corrupt(reason.clone()),
    }
}
