//! The single writer: takes all queued changes, commits them in one transaction, then replies to
//! every caller.
//!
//! New calls and updates of calls are pipelined: none waits for the response to another. Each
//! transaction also increments a counter in the row of `writer`. After a lost connection the writer
//! reconnects and reads that counter, which shows if its last transaction was committed; it then
//! either reports success or runs the transaction again. A change that was stored is therefore
//! never reported as lost. Callers in the transaction wait until its fate is known; changes sent
//! meanwhile are refused.
//!
//! When PostgreSQL rejects a transaction, the writer runs each of its changes separately, so that
//! one invalid change does not fail the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use toolcrib::store::StoreError;

use super::lease::{Lease, claim, end, holder};
use super::link::{Address, Broke, Session};
use crate::row::Fields;

/// Maximum number of changes that share a transaction.
const MAX_GROUP: usize = 512;
/// Maximum number of queued changes. More are refused, because they would only wait longer.
const MAX_WAITING: usize = 65_536;
/// First and longest delay before an attempt to reconnect.
const AGAIN_FIRST: Duration = Duration::from_millis(100);
const AGAIN_MOST: Duration = Duration::from_secs(2);

/// Work in progress on the writer's connection.
pub(super) type Doing<'a, T> = BoxFuture<'a, Result<T, Broke>>;

/// A change, with the channel for its reply. It may have to be made more than once.
pub(super) trait Change: Send {
    /// Starts the statements that can be pipelined with those of other changes.
    fn send<'a>(&'a mut self, desk: &'a Desk) -> Option<Doing<'a, ()>>;
    /// Assigns the numbers that the change needs, before anything is sent.
    fn number(&mut self, _numbers: &mut Numbers) {}
    /// Runs what must run alone, after the pipelined statements of the group.
    fn run<'a>(&'a mut self, desk: &'a mut Desk) -> Option<Doing<'a, ()>>;
    /// Sends the result to the caller, after the commit or the failure.
    fn tell(self: Box<Self>, committed: Result<(), StoreError>);
}

/// The last numbers that were assigned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) event: i64,
    pub(super) place: i64,
}

/// The writer's connection, with its counters and its lease.
pub(super) struct Desk {
    pub(super) session: Session,
    pub(super) numbers: Numbers,
    /// `None` when this process does not serve the database and therefore assigns no numbers.
    lease: Option<Lease>,
}

impl Desk {
    pub(super) fn new(session: Session, lease: Option<Lease>, numbers: Numbers) -> Self {
        Self { session, numbers, lease }
    }

    /// Fails unless this process serves the database: only the server assigns numbers to calls and
    /// events.
    pub(super) fn may_number(&self) -> Result<(), Broke> {
        if self.lease.is_some() {
            return Ok(());
        }
        let why = "calls are only made by the server that serves this database";
        Err(StoreError::Unavailable(why.to_owned()).into())
    }
}

/// The reason why nothing can be written at present, shared with the senders of changes.
#[derive(Clone, Default)]
pub(super) struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    fn is(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, why: Option<String>) {
        *self.0.lock() = why;
    }
}

/// A handle to the writer task.
pub(super) struct Writer {
    line: mpsc::Sender<Box<dyn Change>>,
    trouble: Trouble,
}

impl Writer {
    pub(super) fn start(desk: Desk, address: Address) -> Self {
        let (line, waiting) = mpsc::channel(MAX_WAITING);
        let trouble = Trouble::default();
        let clerk = Clerk { desk, address, trouble: trouble.clone(), waiting };
        tokio::spawn(clerk.work());
        Self { line, trouble }
    }

    pub(super) fn send(&self, change: Box<dyn Change>) -> Result<(), StoreError> {
        if let Some(why) = self.trouble.is() {
            return Err(StoreError::Unavailable(why));
        }
        self.line.try_send(change).map_err(|refused| {
            let why = match refused {
                mpsc::error::TrySendError::Full(_) => "too much waits to be written",
                mpsc::error::TrySendError::Closed(_) => "the writer has stopped",
            };
            StoreError::Unavailable(why.to_owned())
        })
    }
}

struct Clerk {
    desk: Desk,
    address: Address,
    trouble: Trouble,
    waiting: Waiting,
}

type Group = Vec<Box<dyn Change>>;
type Waiting = mpsc::Receiver<Box<dyn Change>>;

impl Clerk {
    async fn work(mut self) {
        let mut group = Vec::with_capacity(MAX_GROUP);
        while self.waiting.recv_many(&mut group, MAX_GROUP).await > 0 {
            self.commit(std::mem::take(&mut group)).await;
            if self.desk.session.is_closed() {
                self.reconnect().await;
            }
        }
    }

    /// Commits a group, or reports to every caller in it why it failed.
    async fn commit(&mut self, mut group: Group) {
        let (began, size) = (Instant::now(), group.len());
        loop {
            // The connection was lost while the writer was idle: no transaction is in flight whose
            // fate has to be determined.
            if self.desk.session.is_closed() && !self.connect_once().await {
                let why = self.trouble.is().unwrap_or_default();
                return refuse(group, &why);
            }
            let Err(broke) = self.write(&mut group).await else { break };
            if self.desk.session.is_closed() || broke.is_loss() {
                tracing::warn!(why = broke.said(), "the connection to PostgreSQL is lost");
                match self.resolve().await {
                    Became::Committed => break,
                    Became::Nothing => continue,
                    Became::Unknown => {
                        let why = self.trouble.is().unwrap_or_else(|| UNKNOWN.to_owned());
                        return refuse(group, &why);
                    }
                }
            }
            let _ = self.desk.session.run("ROLLBACK").await;
            if size == 1 {
                tracing::error!(why = broke.said(), "a change was refused by PostgreSQL");
                let error = broke.into_error();
                return group.into_iter().for_each(|one| one.tell(Err(copy(&error))));
            }
            tracing::debug!(why = broke.said(), size, "retrying the changes of a group separately");
            for one in group {
                Box::pin(self.commit(vec![one])).await;
            }
            return;
        }
        metrics::histogram!("toolcrib_store_commit_duration_seconds").record(began.elapsed());
        metrics::histogram!("toolcrib_store_commit_group_size").record(size as f64);
        group.into_iter().for_each(|one| one.tell(Ok(())));
    }

    /// Commits a group in one transaction. Restores the counters if the transaction fails.
    async fn write(&mut self, group: &mut [Box<dyn Change>]) -> Result<(), Broke> {
        let before = self.desk.numbers;
        let written = self.attempt(group).await;
        if written.is_err() {
            self.desk.numbers = before;
        }
        written
    }

    async fn attempt(&mut self, group: &mut [Box<dyn Change>]) -> Result<(), Broke> {
        let mut numbers = self.desk.numbers;
        group.iter_mut().for_each(|one| one.number(&mut numbers));
        self.desk.numbers = numbers;
        {
            let desk = &self.desk;
            let begun = desk.session.run("BEGIN");
            let mut sent: Vec<Doing<'_, ()>> = vec![Box::pin(begun)];
            sent.extend(group.iter_mut().filter_map(|one| one.send(desk)));
            futures::future::try_join_all(sent).await?;
        }
        for one in group.iter_mut() {
            if let Some(running) = one.run(&mut self.desk) {
                running.await?;
            }
        }
        if let Some(lease) = &self.desk.lease {
            lease.mark(&self.desk.session, self.desk.numbers).await?;
        }
        self.desk.session.run("COMMIT").await?;
        if let Some(lease) = &mut self.desk.lease {
            lease.commits += 1;
        }
        Ok(())
    }

    /// Determines what became of the transaction in flight when the connection was lost.
    async fn resolve(&mut self) -> Became {
        // The connection may only appear lost from this side: nothing more must happen on it.
        self.desk.session.hang_up();
        let Some(lease) = &self.desk.lease else { return Became::Unknown };
        let counted = lease.commits + 1;
        if !self.reconnect().await {
            return Became::Unknown;
        }
        match self.desk.lease.as_ref().is_some_and(|lease| lease.commits == counted) {
            true => Became::Committed,
            false => Became::Nothing,
        }
    }

    /// Reconnects, with as many attempts as it takes, and fails the changes queued meanwhile.
    /// Returns false when another server has taken over the database or the store is closed.
    async fn reconnect(&mut self) -> bool {
        let mut pause = AGAIN_FIRST;
        while !self.connect_once().await {
            let why = self.trouble.is().unwrap_or_default();
            refuse(std::iter::from_fn(|| self.waiting.try_recv().ok()).collect(), &why);
            if why == GONE || self.waiting.is_closed() {
                return false;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(AGAIN_MOST);
        }
        true
    }

    /// Tries once to reconnect, and publishes the result to the senders of changes.
    async fn connect_once(&mut self) -> bool {
        if self.trouble.is().as_deref() == Some(GONE) {
            return false;
        }
        let why = match self.connect_again().await {
            Ok(true) => None,
            Ok(false) => Some(GONE.to_owned()),
            Err(broke) => Some(format!("the connection is lost: {}", broke.said())),
        };
        match &why {
            None => tracing::info!("connected to PostgreSQL again"),
            Some(why) if self.trouble.is().is_none() => tracing::error!("{why}"),
            Some(_) => {}
        }
        self.trouble.set(why.clone());
        why.is_none()
    }

    async fn connect_again(&mut self) -> Result<bool, Broke> {
        let session = self.address.connect(None).await?;
        if let Some(lease) = &mut self.desk.lease {
            if !claim(&session).await? {
                end(&session, &lease.holder).await?;
                let why = "the lock of this server's lost connection is still held";
                return Err(StoreError::Unavailable(why.to_owned()).into());
            }
            let sql = "SELECT owner, commits, last_event, last_place FROM writer";
            let Some(row) = session.row(sql, &[]).await? else { return Ok(false) };
            if row.number(0)? != lease.owner {
                return Ok(false);
            }
            lease.commits = row.number(1)?;
            lease.holder = holder(&session).await?;
            self.desk.numbers = Numbers { event: row.number(2)?, place: row.number(3)? };
        }
        self.desk.session = session;
        Ok(true)
    }
}

/// The fate of a transaction whose COMMIT was not answered.
enum Became {
    Committed,
    Nothing,
    Unknown,
}

const UNKNOWN: &str = "the connection was lost before PostgreSQL answered: look whether it was \
     done before you do it again";
const GONE: &str = "another toolcrib has served this database since the connection was lost; \
     restart this one";

fn refuse(group: Group, why: &str) {
    let error = StoreError::Unavailable(why.to_owned());
    group.into_iter().for_each(|one| one.tell(Err(copy(&error))));
}

fn copy(error: &StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(why) => StoreError::Unavailable(why.clone()),
        StoreError::Corrupt(why) => StoreError::Corrupt(why.clone()),
    }
}

/// A change made by a function that runs alone on the connection, with its input.
pub(super) struct Job<A, T> {
    given: A,
    doing: Work<A, T>,
    made: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

/// The function of a [`FunctionChange`].
pub(super) type Work<A, T> = for<'a> fn(&'a mut Desk, &'a A) -> Doing<'a, T>;

impl<A, T> Job<A, T> {
    pub(super) fn new(
        given: A,
        doing: Work<A, T>,
        reply: oneshot::Sender<Result<T, StoreError>>,
    ) -> Self {
        Self { given, doing, made: None, reply }
    }
}

impl<A: Send + Sync, T: Send> Change for Job<A, T> {
    fn send<'a>(&'a mut self, _: &'a Desk) -> Option<Doing<'a, ()>> {
        None
    }

    fn run<'a>(&'a mut self, desk: &'a mut Desk) -> Option<Doing<'a, ()>> {
        let (given, doing, made) = (&self.given, self.doing, &mut self.made);
        Some(Box::pin(async move {
            *made = Some(doing(desk, given).await?);
            Ok(())
        }))
    }

    fn tell(self: Box<Self>, committed: Result<(), StoreError>) {
        let gone = || StoreError::Unavailable("the writer has stopped".to_owned());
        // The caller may have gone away; the change is committed all the same.
        let made = self.made;
        let _ = self.reply.send(committed.and_then(|()| made.ok_or_else(gone)));
    }
}
