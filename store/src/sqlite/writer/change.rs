//! The unit of work of the writer: a change of the database, with the channel for its reply.

use tokio::sync::oneshot;
use toolcrib::ports::store::{CommitGroup, StoreError};

use super::connection::WriterConnection;

/// A change, with the channel for its reply.
pub(crate) trait Change: Send {
    /// Returns the group of calls that were announced together with this one, if there is one: the
    /// writer waits briefly for the others, so that they share a flush.
    fn commit_group(&self) -> Option<&CommitGroup> {
        None
    }

    /// Makes the change in the open transaction. It must not fail because of the data it handles:
    /// an error fails every change that shares the transaction.
    fn apply(&mut self, writer: &mut WriterConnection) -> rusqlite::Result<()>;

    /// Sends the result to the caller, after the commit or the failure.
    fn reply(self: Box<Self>, committed: Result<(), StoreError>);
}

/// A change made by a function.
pub(crate) struct FunctionChange<F, T> {
    function: F,
    output: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<F, T> FunctionChange<F, T>
where
    F: FnMut(&mut WriterConnection) -> rusqlite::Result<T>,
{
    pub(crate) fn new(function: F, reply: oneshot::Sender<Result<T, StoreError>>) -> Self {
        Self { function, output: None, reply }
    }
}

impl<F, T> Change for FunctionChange<F, T>
where
    F: FnMut(&mut WriterConnection) -> rusqlite::Result<T> + Send,
    T: Send,
{
    fn apply(&mut self, writer: &mut WriterConnection) -> rusqlite::Result<()> {
        self.output = Some((self.function)(writer)?);
        Ok(())
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let stopped = || StoreError::Unavailable("the writer has stopped".to_owned());
        let output = self.output;
        // The caller may have gone away; the change is committed all the same.
        let _ = self.reply.send(committed.and_then(|()| output.ok_or_else(stopped)));
    }
}
