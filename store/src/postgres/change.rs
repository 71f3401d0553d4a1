//! The unit of work of the writer: a change of the database, with the channel for its reply.

use futures::future::BoxFuture;
use tokio::sync::oneshot;
use toolcrib::ports::store::StoreError;

use super::session::{Session, SessionError};
use super::writer_lease::{SequenceCounters, WriterLease};

/// Work in progress on the writer's connection.
pub(super) type ChangeFuture<'a, T> = BoxFuture<'a, Result<T, SessionError>>;

/// A change, with the channel for its reply. It may have to be made more than once.
pub(super) trait Change: Send {
    /// Starts the statements that can be pipelined with those of other changes.
    fn start_pipelined<'a>(
        &'a mut self,
        connection: &'a WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>>;
    /// Assigns the numbers that the change needs, before anything is sent.
    fn assign_numbers(&mut self, _numbers: &mut SequenceCounters) {}
    /// Runs what must run alone, after the pipelined statements of the group.
    fn run_alone<'a>(
        &'a mut self,
        connection: &'a mut WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>>;
    /// Sends the result to the caller, after the commit or the failure.
    fn reply(self: Box<Self>, committed: Result<(), StoreError>);
}

/// The writer's connection, with its counters and its lease.
pub(super) struct WriterConnection {
    pub(super) session: Session,
    pub(super) counters: SequenceCounters,
    /// `None` when this process does not serve the database and therefore assigns no numbers.
    pub(super) lease: Option<WriterLease>,
}

impl WriterConnection {
    pub(super) fn new(
        session: Session,
        lease: Option<WriterLease>,
        counters: SequenceCounters,
    ) -> Self {
        Self { session, counters, lease }
    }

    /// Fails unless this process serves the database: only the server assigns numbers to calls and
    /// events.
    pub(super) fn require_lease(&self) -> Result<(), SessionError> {
        if self.lease.is_some() {
            return Ok(());
        }
        let reason = "calls are only made by the server that serves this database";
        Err(StoreError::Unavailable(reason.to_owned()).into())
    }
}

/// A change made by a function that runs alone on the connection, with its input.
pub(super) struct FunctionChange<A, T> {
    input: A,
    function: ChangeFn<A, T>,
    output: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

/// The function of a [`FunctionChange`].
pub(super) type ChangeFn<A, T> = for<'a> fn(&'a mut WriterConnection, &'a A) -> ChangeFuture<'a, T>;

impl<A, T> FunctionChange<A, T> {
    pub(super) fn new(
        input: A,
        function: ChangeFn<A, T>,
        reply: oneshot::Sender<Result<T, StoreError>>,
    ) -> Self {
        Self { input, function, output: None, reply }
    }
}

impl<A: Send + Sync, T: Send> Change for FunctionChange<A, T> {
    fn start_pipelined<'a>(&'a mut self, _: &'a WriterConnection) -> Option<ChangeFuture<'a, ()>> {
        None
    }

    fn run_alone<'a>(
        &'a mut self,
        writer: &'a mut WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        let (input, function, output) = (&self.input, self.function, &mut self.output);
        Some(Box::pin(async move {
            *output = Some(function(writer, input).await?);
            Ok(())
        }))
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let unavailable = || StoreError::Unavailable("the writer has stopped".to_owned());
        // The caller may have gone away; the change is committed all the same.
        let output = self.output;
        let _ = self.reply.send(committed.and_then(|()| output.ok_or_else(unavailable)));
    }
}
