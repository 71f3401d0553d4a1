//! Reads that run concurrently with the writer, on a few pooled sessions.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use toolcrib::store::StoreError;

use super::link::{Address, Broke, Session};

/// Maximum number of sessions in use at once, and of idle sessions that the pool retains.
const MAX_READING: usize = 8;
const KEPT: usize = 4;

/// A pool of read sessions.
pub(super) struct Pool {
    address: Address,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    turns: Arc<Semaphore>,
}

/// A session that returns to the pool when it is dropped.
pub(super) struct Lent {
    session: Arc<Session>,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    /// The session is inside a transaction and must not return to the pool.
    busy: bool,
    _turn: OwnedSemaphorePermit,
}

impl Pool {
    pub(super) fn new(address: Address) -> Self {
        Self { address, idle: Arc::default(), turns: Arc::new(Semaphore::new(MAX_READING)) }
    }

    pub(super) async fn lend(&self) -> Result<Lent, StoreError> {
        let gone = |_| StoreError::Unavailable("the store is closed".to_owned());
        let turn = self.turns.clone().acquire_owned().await.map_err(gone)?;
        let idle = {
            let mut idle = self.idle.lock();
            idle.retain(|session| !session.is_closed());
            idle.pop()
        };
        let session = match idle {
            Some(session) => session,
            None => {
                let made = self.address.connect(None).await;
                Arc::new(made.map_err(Broke::into_error)?)
            }
        };
        let idle = self.idle.clone();
        Ok(Lent { session, idle, busy: false, _turn: turn })
    }
}

impl Lent {
    /// Begins a transaction: all reads until [`PooledSession::end_snapshot`] see one snapshot.
    pub(super) async fn begin(&mut self) -> Result<(), Broke> {
        self.busy = true;
        self.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await
    }

    pub(super) async fn end(&mut self) -> Result<(), Broke> {
        self.run("COMMIT").await?;
        self.busy = false;
        Ok(())
    }
}

impl Deref for Lent {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut idle = self.idle.lock();
        if !self.busy && !self.session.is_closed() && idle.len() < KEPT {
            idle.push(self.session.clone());
        }
    }
}
