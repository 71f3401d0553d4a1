//! Reads that run concurrently with the writer, on a few pooled sessions.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use toolcrib::ports::store::StoreError;

use crate::postgres::session::{Connector, Session, SessionError};

/// Maximum number of sessions in use at once.
const MAX_ACTIVE_SESSIONS: usize = 8;
/// Maximum number of idle sessions that the pool retains.
const MAX_IDLE_SESSIONS: usize = 4;

/// A pool of read sessions.
pub(super) struct SessionPool {
    address: Connector,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    permits: Arc<Semaphore>,
}

/// A session that returns to the pool when it is dropped.
pub(super) struct PooledSession {
    session: Arc<Session>,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    /// True if the session is inside a transaction and must not return to the pool.
    in_transaction: bool,
    _permit: OwnedSemaphorePermit,
}

impl SessionPool {
    pub(super) fn new(address: Connector) -> Self {
        Self {
            address,
            idle: Arc::default(),
            permits: Arc::new(Semaphore::new(MAX_ACTIVE_SESSIONS)),
        }
    }

    pub(super) async fn acquire(&self) -> Result<PooledSession, StoreError> {
        let to_unavailable = |_| StoreError::Unavailable("the store is closed".to_owned());
        let turn = self.permits.clone().acquire_owned().await.map_err(to_unavailable)?;
        let idle = {
            let mut idle = self.idle.lock();
            idle.retain(|session| !session.is_closed());
            idle.pop()
        };
        let session = match idle {
            Some(session) => session,
            None => {
                let connected = self.address.connect(None).await;
                Arc::new(connected.map_err(SessionError::into_store_error)?)
            }
        };
        let idle = self.idle.clone();
        Ok(PooledSession { session, idle, in_transaction: false, _permit: turn })
    }
}

impl PooledSession {
    /// Begins a transaction: all reads until [`PooledSession::end_snapshot`] see one snapshot.
    pub(super) async fn begin_snapshot(&mut self) -> Result<(), SessionError> {
        self.in_transaction = true;
        self.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await
    }

    pub(super) async fn end_snapshot(&mut self) -> Result<(), SessionError> {
        self.batch_execute("COMMIT").await?;
        self.in_transaction = false;
        Ok(())
    }
}

impl Deref for PooledSession {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Drop for PooledSession {
    fn drop(&mut self) {
        let mut idle = self.idle.lock();
        if !self.in_transaction && !self.session.is_closed() && idle.len() < MAX_IDLE_SESSIONS {
            idle.push(self.session.clone());
        }
    }
}
