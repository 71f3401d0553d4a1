//! An OTLP/HTTP endpoint that counts the exported data. It does as little as a collector can do, so
//! that the cost of tracing is measured at the server and not here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;

/// A running endpoint, on its own thread; it lives as long as the process.
pub struct OtlpSink {
    /// The export URL: `http://127.0.0.1:port`.
    pub url: String,
    bytes: Arc<AtomicU64>,
}

impl OtlpSink {
    /// Starts an endpoint on a free loopback port.
    ///
    /// # Errors
    ///
    /// When no loopback port can be bound.
    pub async fn start() -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .context("cannot bind a loopback port")?;
        let url = format!("http://{}", listener.local_addr()?);
        let bytes = Arc::new(AtomicU64::new(0));
        let traces = bytes.clone();
        // An empty body is the protobuf message for complete success.
        let take_traces = async move |body: Bytes| {
            traces.fetch_add(body.len() as u64, Ordering::Relaxed);
        };
        let router = Router::new()
            .route("/v1/traces", post(take_traces))
            .route("/v1/metrics", post(async |_: Bytes| ()))
            .layer(DefaultBodyLimit::disable());
        let listener = listener.into_std()?;
        // Not on the thread that generates the load: receiving a batch there would delay the next
        // calls, and the delay would be counted as a cost of tracing.
        let serve = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                axum::serve(listener, router).await
            })
        };
        std::thread::Builder::new()
            .name("bench-sink".to_owned())
            .spawn(serve)
            .context("cannot start a thread")?;
        Ok(Self { url, bytes })
    }

    /// Returns the number of bytes of spans received.
    #[must_use]
    pub fn trace_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}
