//! Observes whether responses reach their requesters, so that a repeated request can join work
//! whose answer was not delivered.
//!
//! A handler attaches deliveries to its response ([`ResponseDeliveries`]). They pass through three
//! states. While the answer is not written, dropping the response means that the requester is gone.
//! The body hands them to the connection with the frame that carries the answer, and the next flush
//! of the connection marks them as written. The peer may still lose the answer: a connection that
//! breaks right afterwards has not delivered it. Anything that the peer sends, an orderly close, or
//! some time without an error confirms the delivery.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use toolcrib::calls::PendingDelivery;

/// The response header with the id of the call or run that the request joined.
pub(crate) const JOINED_HEADER: &str = "toolcrib-joined";

/// Time after which a written answer counts as delivered, even if the connection breaks later.
const CONFIRMATION_TIME: Duration = Duration::from_secs(5);

/// The delivery of an answer. Dropping it before it is marked means that the requester is gone.
pub(crate) trait AnswerDelivery: Send + Sync {
    /// Records that the answer was written to the connection.
    fn mark_written(&self);
    /// Records that the requester has the answer.
    fn mark_delivered(&self);
    /// Records that the requester is gone, although the work may hold this delivery longer.
    fn mark_gone(&self) {}
}

impl AnswerDelivery for PendingDelivery {
    fn mark_written(&self) {
        PendingDelivery::mark_written(self);
    }

    fn mark_delivered(&self) {
        PendingDelivery::mark_delivered(self);
    }

    fn mark_gone(&self) {
        PendingDelivery::mark_gone(self);
    }
}

type Deliveries = Vec<Box<dyn AnswerDelivery>>;

/// A response extension: the deliveries that the response completes.
#[derive(Clone, Default)]
pub struct ResponseDeliveries(Arc<ResponseState>);

#[derive(Default)]
struct ResponseState {
    deliveries: Mutex<Deliveries>,
    /// True once the next frame of the body carries the answer.
    is_answered: AtomicBool,
    /// True once the requester is gone.
    is_abandoned: AtomicBool,
    /// The deliveries of other answers that the same body carries.
    parts: Mutex<Vec<ResponseDeliveries>>,
}

impl ResponseDeliveries {
    /// Attaches a delivery to a response that carries the answer from its first frame on.
    pub(crate) fn attach(
        response: &mut Response,
        deliveries: impl IntoIterator<Item = PendingDelivery>,
    ) {
        let attached = Self::default();
        deliveries.into_iter().for_each(|delivery| attached.push(delivery));
        attached.set_answered();
        if !attached.0.deliveries.lock().is_empty() {
            response.extensions_mut().insert(attached);
        }
    }

    /// Adds a delivery.
    pub(crate) fn push(&self, delivery: impl AnswerDelivery + 'static) {
        let mut deliveries = self.0.deliveries.lock();
        match self.0.is_abandoned.load(Ordering::Acquire) {
            true => delivery.mark_gone(),
            false => deliveries.push(Box::new(delivery)),
        }
    }

    /// Adds the deliveries of another answer that the same body carries.
    pub(crate) fn add_part(&self, part: Self) {
        self.0.parts.lock().push(part);
    }

    /// Drops the deliveries: their requester is gone, or gets the answer from another response.
    pub(crate) fn clear(&self) {
        self.0.deliveries.lock().clear();
    }

    /// Records that the requester is gone, and drops the deliveries. The handler of the request may
    /// continue and hold them longer, as it does in a session of MCP.
    pub(crate) fn abandon(&self) {
        let deliveries = {
            let mut deliveries = self.0.deliveries.lock();
            self.0.is_abandoned.store(true, Ordering::Release);
            std::mem::take(&mut *deliveries)
        };
        deliveries.iter().for_each(|delivery| delivery.mark_gone());
        self.0.parts.lock().iter().for_each(Self::abandon);
    }

    /// Returns a guard for the time in which there is no response yet.
    pub(crate) fn guard(&self) -> UnansweredGuard {
        UnansweredGuard(Some(self.clone()))
    }

    /// Declares that the next frame of the body carries the answer.
    pub(crate) fn set_answered(&self) {
        self.0.is_answered.store(true, Ordering::Release);
    }

    fn take_answered(&self) -> Deliveries {
        let mut answered = match self.0.is_answered.load(Ordering::Acquire) {
            true => std::mem::take(&mut *self.0.deliveries.lock()),
            false => Vec::new(),
        };
        for part in self.0.parts.lock().iter() {
            answered.extend(part.take_answered());
        }
        answered
    }
}

/// Abandons the deliveries of a request if it is dropped before there is a response.
pub(crate) struct UnansweredGuard(Option<ResponseDeliveries>);

impl UnansweredGuard {
    /// Ends the guard: the response carries the deliveries from now on.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for UnansweredGuard {
    fn drop(&mut self) {
        if let Some(deliveries) = &self.0 {
            deliveries.abandon();
        }
    }
}

/// The deliveries of one connection.
#[derive(Clone, Default)]
pub struct ConnectionDeliveries(Arc<Mutex<ConnectionState>>);

#[derive(Default)]
struct ConnectionState {
    /// Handed over with a frame that is not flushed yet.
    unwritten: Deliveries,
    /// Written at this time and not confirmed yet.
    written: Vec<(Instant, Box<dyn AnswerDelivery>)>,
}

impl ConnectionDeliveries {
    /// Wraps the body of a response that has deliveries.
    pub fn track(&self, mut response: Response) -> Response {
        let Some(deliveries) = response.extensions_mut().remove::<ResponseDeliveries>() else {
            return response;
        };
        let connection = self.clone();
        response.map(|inner| Body::new(TrackedBody { inner, deliveries, connection }))
    }

    /// Marks the deliveries that the bodies handed over as written.
    pub(crate) fn mark_flushed(&self) {
        let mut state = self.0.lock();
        if state.unwritten.is_empty() {
            return;
        }
        let unwritten = std::mem::take(&mut state.unwritten);
        for delivery in unwritten {
            delivery.mark_written();
            state.written.push((Instant::now(), delivery));
        }
    }

    /// Confirms the written deliveries: the peer sent something, or closed the connection in an
    /// orderly way.
    pub(crate) fn confirm(&self) {
        let written = std::mem::take(&mut self.0.lock().written);
        written.into_iter().for_each(|(_, delivery)| delivery.mark_delivered());
    }

    /// Records that the connection broke: confirms the answers that were written long enough ago,
    /// and drops the other deliveries.
    fn record_break(&self) {
        let state = std::mem::take(&mut *self.0.lock());
        for (at, delivery) in state.written {
            if at.elapsed() >= CONFIRMATION_TIME {
                delivery.mark_delivered();
            }
        }
    }

    /// Records the result of reading from the connection.
    pub(crate) fn observe_read(&self, read: &Poll<io::Result<()>>) {
        match read {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => self.confirm(),
            Poll::Ready(Err(_)) => self.record_break(),
        }
    }

    /// Records the result of writing to the connection.
    pub(crate) fn observe_write(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Err(_)) = written {
            self.record_break();
        }
    }
}

/// A body that hands its deliveries to the connection with the frame that carries the answer.
struct TrackedBody {
    inner: Body,
    deliveries: ResponseDeliveries,
    connection: ConnectionDeliveries,
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        // The requester does not get an answer that was not handed over.
        self.deliveries.abandon();
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(context));
        if frame.as_ref().is_none_or(Result::is_ok) {
            let answered = this.deliveries.take_answered();
            if !answered.is_empty() {
                this.connection.0.lock().unwritten.extend(answered);
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
