//! Completes started work even if its caller disconnects.
//!
//! A caller that disconnects drops the future it was waiting for. Between handing a change to the
//! store and acting on its commit, this drop must not stop the work: the change would be committed,
//! and the actions that follow it would never be performed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::calls::Dispatcher;

/// A future that is moved to a background task if it is dropped before completion.
pub(crate) struct DetachOnDrop<F>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    work: Option<Pin<Box<F>>>,
    dispatcher: Arc<Dispatcher>,
}

impl Dispatcher {
    pub(crate) fn detach_on_drop<F>(self: &Arc<Self>, work: F) -> DetachOnDrop<F>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        DetachOnDrop { work: Some(Box::pin(work)), dispatcher: self.clone() }
    }
}

impl<F> Future for DetachOnDrop<F>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Some(rest) = self.work.as_mut() else { return Poll::Pending };
        let answer = rest.as_mut().poll(context);
        if answer.is_ready() {
            self.work = None;
        }
        answer
    }
}

impl<F> Drop for DetachOnDrop<F>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn drop(&mut self) {
        let Some(rest) = self.work.take() else { return };
        // Without a runtime the process is exiting, and the next start recovers the work.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.dispatcher.attempts.spawn_on(
                async move {
                    rest.await;
                },
                &runtime,
            );
        }
    }
}
