//! Reading beside the writer: a few connections that are kept for the next reader.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use toolcrib::store::StoreError;

use super::link::{Address, Broke, Session};

/// Most who read at once, and connections that are kept.
const MAX_READING: usize = 8;
const KEPT: usize = 4;

/// The reading connections that nobody uses now.
pub(super) struct Pool {
    address: Address,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    turns: Arc<Semaphore>,
}

/// A connection that is given back when it is let go of.
pub(super) struct Lent {
    session: Arc<Session>,
    idle: Arc<Mutex<Vec<Arc<Session>>>>,
    /// In the middle of something that cannot be left to the next.
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
    /// From here to [`Lent::end`] everything is read as of one moment.
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
