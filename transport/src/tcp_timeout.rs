//! TCP connections with timeouts for data that the peer does not take: unacknowledged data
//! (`TCP_USER_TIMEOUT`), and data that the peer acknowledges but does not read.
//!
//! A peer whose machine has vanished sends nothing, not even a FIN: the kernel gives up only after
//! about 15 minutes of retransmissions. A response can request a shorter timeout for as long as it
//! is being sent.
//!
//! A peer that is alive but reads nothing would hold its connection and the buffers forever. If no
//! byte can be written for the write timeout, the connection ends.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use crate::delivery::ConnectionDeliveries;

/// A response extension: the connection is considered dead when the peer leaves data of this
/// response unacknowledged for this long.
#[derive(Debug, Clone, Copy)]
pub struct AckTimeout(pub(crate) Duration);

/// Shares the timeout requested by the current response with its connection, in milliseconds. 0
/// keeps the system's default.
#[derive(Clone, Default)]
pub struct AckTimeoutHandle(Arc<AtomicU32>);

impl AckTimeoutHandle {
    pub fn set(&self, dead_after: Option<&AckTimeout>) {
        let ms = dead_after.map_or(0, |AckTimeout(limit)| limit.as_millis());
        self.0.store(u32::try_from(ms).unwrap_or(u32::MAX), Ordering::Relaxed);
    }
}

/// A TCP stream that applies the timeout its responses request.
pub struct AckTimeoutStream {
    stream: TcpStream,
    timeout: AckTimeoutHandle,
    /// The value last passed to the system.
    applied_ms: u32,
    deliveries: ConnectionDeliveries,
    write_timeout: Duration,
    /// Set while the peer takes no data: ends the connection when it elapses.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl AckTimeoutStream {
    /// Wraps a stream. It fails if the peer takes no data for `write_timeout`. The deliveries of
    /// its responses learn what becomes of the connection.
    pub fn new(
        stream: TcpStream,
        write_timeout: Duration,
        deliveries: ConnectionDeliveries,
    ) -> (Self, AckTimeoutHandle) {
        let handle = AckTimeoutHandle::default();
        let timeout = handle.clone();
        let stalled = None;
        (Self { stream, timeout, applied_ms: 0, deliveries, write_timeout, stalled }, handle)
    }

    /// Returns the result of a write, or an error if writes have stalled for too long.
    fn check_stall(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        if stalled.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        metrics::counter!("toolcrib_connections_stalled_total").increment(1);
        tracing::debug!(?limit, "closed a connection whose peer reads no data");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads no data")))
    }

    fn apply_timeout(&mut self) {
        let ms = self.timeout.0.load(Ordering::Relaxed);
        if ms != self.applied_ms {
            self.applied_ms = ms;
            if let Err(error) = set_tcp_user_timeout(&self.stream, ms) {
                tracing::debug!(%error, "a connection keeps the system's TCP_USER_TIMEOUT");
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn set_tcp_user_timeout(stream: &TcpStream, ms: u32) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, ms)?)
}

/// Other systems have no such option for a single connection.
#[cfg(not(target_os = "linux"))]
fn set_tcp_user_timeout(_: &TcpStream, _: u32) -> io::Result<()> {
    Ok(())
}

/// A connection that the server closes after a flush has delivered what it wrote.
impl Drop for AckTimeoutStream {
    fn drop(&mut self) {
        self.deliveries.confirm();
    }
}

impl AsyncRead for AckTimeoutStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.deliveries.observe_read(&read);
        read
    }
}

impl AsyncWrite for AckTimeoutStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.apply_timeout();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        let written = this.check_stall(context, written);
        this.deliveries.observe_write(&written);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.apply_timeout();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        let written = this.check_stall(context, written);
        this.deliveries.observe_write(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(context);
        if let Poll::Ready(Ok(())) = flushed {
            this.deliveries.mark_flushed();
        }
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
