//! Accepts connections within limits, so that no client can keep others from being served.
//!
//! The number of connections is limited, and so are the time to send a request's header, the time
//! that a client may leave a response unread, and the number of streams. Beyond the limit of
//! connections a small reserve answers the health checks, and every other request with 503.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::response::Response;
use hyper::Method;
use hyper::body::Incoming;
use hyper::header::UPGRADE;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolcrib_transport::delivery::ConnectionDeliveries;
use toolcrib_transport::http::{
    ConnectionPermit, LongPollAdmission, StreamLimiter, call_router, connection_refusal,
    is_health_check, serve_request,
};
use toolcrib_transport::tcp_timeout::{AckTimeout, AckTimeoutHandle, AckTimeoutStream};

use super::pause_tolerant_timer::PauseTolerantTimer;
use crate::config::Config;

/// Connections beyond the limit, for health checks.
const RESERVED_CONNECTIONS: usize = 16;

/// Maximum time to send the header of a request on a reserved connection.
const RESERVED_HEADER_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits of the connections of one listener.
pub(super) struct ConnectionLimits {
    max_connections: usize,
    header_timeout: Duration,
    write_timeout: Duration,
    streams: Arc<StreamLimiter>,
}

impl ConnectionLimits {
    pub(super) fn from_config(config: &Config) -> Self {
        let limits = &config.limits;
        // Leaves connections for other requests, also if few are allowed.
        let most = limits.max_connections - limits.max_connections / 10;
        let streams = limits.max_streams.min(most);
        Self {
            max_connections: limits.max_connections,
            header_timeout: Duration::from_millis(limits.request_header_timeout_ms),
            write_timeout: Duration::from_millis(limits.write_timeout_ms),
            streams: StreamLimiter::new(streams, limits.max_streams_per_caller),
        }
    }
}

/// The capacity that a connection holds.
enum Capacity {
    Regular(OwnedSemaphorePermit),
    Reserved(OwnedSemaphorePermit),
}

pub(super) async fn accept_connections(
    listener: &TcpListener,
    router: Router,
    limits: &ConnectionLimits,
    connections: &TaskTracker,
    stopping: &CancellationToken,
) {
    let regular = Arc::new(Semaphore::new(limits.max_connections));
    let reserved = Arc::new(Semaphore::new(RESERVED_CONNECTIONS));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Most likely the process is out of file descriptors; that passes when connections
                // end.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // If the reserve is used up too, connections wait in the kernel's accept queue.
        let capacity = tokio::select! {
            biased;
            permit = regular.clone().acquire_owned() => permit.map(Capacity::Regular),
            permit = reserved.clone().acquire_owned() => permit.map(Capacity::Reserved),
        };
        let Ok(capacity) = capacity else { return };
        let is_reserved = matches!(capacity, Capacity::Reserved(_));
        let handler = ConnectionHandler {
            router: router.clone(),
            streams: Arc::clone(&limits.streams),
            regular: Arc::clone(&regular),
            capacity: Mutex::new(Some(capacity)),
            permit: Mutex::new(None),
            deliveries: ConnectionDeliveries::default(),
            peer,
        };
        let header_timeout = match is_reserved {
            true => limits.header_timeout.min(RESERVED_HEADER_TIMEOUT),
            false => limits.header_timeout,
        };
        // Responses are small and written whole: Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let deliveries = handler.deliveries.clone();
        let (stream, ack_timeout) = AckTimeoutStream::new(stream, limits.write_timeout, deliveries);
        let mut server = hyper::server::conn::http1::Builder::new();
        server.timer(PauseTolerantTimer).header_read_timeout(header_timeout);
        server.keep_alive(!is_reserved);
        connections.spawn(serve_connection(server, stream, ack_timeout, handler, stopping.clone()));
    }
}

/// Answers the requests of one connection.
struct ConnectionHandler {
    router: Router,
    streams: Arc<StreamLimiter>,
    regular: Arc<Semaphore>,
    /// Held until the connection ends; moves into `permit` when a request needs to share it.
    capacity: Mutex<Option<Capacity>>,
    /// The permit that an upgraded connection shares.
    permit: Mutex<Option<Arc<OwnedSemaphorePermit>>>,
    /// Tracks which answers reach the requester.
    deliveries: ConnectionDeliveries,
    /// Address of the other end.
    peer: SocketAddr,
}

impl ConnectionHandler {
    async fn answer(&self, mut request: Request) -> Response {
        if !is_health_check(request.uri().path()) && !self.ensure_regular() {
            return connection_refusal();
        }
        let (method, caller) = (request.method().clone(), self.streams.caller(request.headers()));
        if request.headers().contains_key(UPGRADE) {
            let stream = match self.streams.acquire(caller) {
                Ok(stream) => stream,
                Err(refused) => return *refused,
            };
            // An upgraded connection outlives this task, so its handler holds the permits.
            if let Some(connection) = self.share_permit() {
                let stream = Arc::new(stream);
                request.extensions_mut().insert(ConnectionPermit { connection, stream });
            }
        }
        if method == Method::GET {
            let admission = LongPollAdmission::new(&self.streams, caller);
            request.extensions_mut().insert(admission);
        }
        let answer = call_router(self.router.clone(), request).await;
        self.streams.admit(&method, caller, answer)
    }

    /// Returns true if the connection is a regular one. A reserved connection becomes regular if
    /// another connection has ended.
    fn ensure_regular(&self) -> bool {
        let mut capacity = self.capacity.lock();
        if matches!(*capacity, Some(Capacity::Reserved(_))) {
            let Ok(permit) = self.regular.clone().try_acquire_owned() else { return false };
            *capacity = Some(Capacity::Regular(permit));
        }
        true
    }

    fn share_permit(&self) -> Option<Arc<OwnedSemaphorePermit>> {
        let mut shared = self.permit.lock();
        if shared.is_none() {
            *shared = match self.capacity.lock().take() {
                Some(Capacity::Regular(permit) | Capacity::Reserved(permit)) => {
                    Some(Arc::new(permit))
                }
                None => None,
            };
        }
        shared.clone()
    }
}

async fn serve_connection(
    server: hyper::server::conn::http1::Builder,
    stream: AckTimeoutStream,
    ack_timeout: AckTimeoutHandle,
    handler: ConnectionHandler,
    stopping: CancellationToken,
) {
    let handler = Arc::new(handler);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let (handler, ack_timeout) = (Arc::clone(&handler), ack_timeout.clone());
        async move {
            let mut request = request.map(axum::body::Body::new);
            request.extensions_mut().insert(ConnectInfo(handler.peer));
            let answer = serve_request(request, |request| handler.answer(request)).await;
            ack_timeout.set(answer.extensions().get::<AckTimeout>());
            Ok::<_, Infallible>(handler.deliveries.track(answer))
        }
    });
    let connection = server.serve_connection(TokioIo::new(stream), service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
