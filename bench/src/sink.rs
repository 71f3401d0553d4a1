//! An endpoint that takes what is exported by OTLP/HTTP and counts it: as little as a collector can
//! do, so that what tracing costs is measured at the server and not here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;

/// A running endpoint, in a thread of its own; it lasts as long as the process.
pub struct Sink {
    /// Where to export to: `http://127.0.0.1:port`.
    pub url: String,
    bytes: Arc<AtomicU64>,
}

impl Sink {
    /// Starts one on a free loopback port.
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
        // An empty body is the protobuf of "all of it was taken".
        let take_traces = async move |body: Bytes| {
            traces.fetch_add(body.len() as u64, Ordering::Relaxed);
        };
        let router = Router::new()
            .route("/v1/traces", post(take_traces))
            .route("/v1/metrics", post(async |_: Bytes| ()))
            .layer(DefaultBodyLimit::disable());
        let listener = listener.into_std()?;
        // Not in the thread that makes the load: taking a batch would hold up the next calls, and
        // that would be counted as a cost of tracing.
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

    /// Bytes of spans that came.
    #[must_use]
    pub fn trace_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}
