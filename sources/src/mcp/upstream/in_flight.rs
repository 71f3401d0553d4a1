//! Requests in flight at an upstream, including those that wait for an answer to an elicitation.

use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::service::RequestHandle;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use crate::mcp::connection::LiveConnection;
use crate::mcp::connection::server_requests::{
    UpstreamCallEvent, UpstreamCallGuard, UpstreamElicitation,
};

/// Maximum time spent on notifying an upstream that a call is canceled.
pub(in crate::mcp) const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

/// A request in flight.
pub(in crate::mcp) struct InFlightRequest {
    pub(in crate::mcp) handle: RequestHandle<RoleClient>,
    pub(in crate::mcp) events: mpsc::UnboundedReceiver<UpstreamCallEvent>,
    pub(in crate::mcp) connection: Arc<LiveConnection>,
    pub(in crate::mcp) guard: UpstreamCallGuard,
    /// Answers from earlier attempts, by the number of their elicitation.
    pub(in crate::mcp) prepared_answers: Map<String, Value>,
    pub(in crate::mcp) questions_asked: u32,
}

impl InFlightRequest {
    /// Ends a request whose result is no longer needed, after its elicitation was canceled. The
    /// upstream may finish on its own because of that: then the call is known to have ended, which
    /// an upstream does not confirm for a canceled request. After a grace period the request is
    /// canceled.
    pub(in crate::mcp) async fn cancel_after_grace(mut self, reason: &str) {
        if tokio::time::timeout(CANCEL_TIMEOUT, &mut self.handle.rx).await.is_ok() {
            self.guard.mark_ended();
        } else {
            let telling = self.handle.cancel(Some(reason.to_owned()));
            let _ = tokio::time::timeout(CANCEL_TIMEOUT, telling).await;
        }
    }
}

/// A request that waits for an answer to its elicitation.
pub(in crate::mcp) struct SuspendedRequest {
    pub(in crate::mcp) request: InFlightRequest,
    pub(in crate::mcp) key: String,
    pub(in crate::mcp) elicitation: UpstreamElicitation,
    pub(in crate::mcp) attempt: u32,
    /// `true` once the engine has also released the attempt that sent the elicitation.
    pub(in crate::mcp) released: bool,
}

impl SuspendedRequest {
    /// Gives up the request because no answer will come. Dropping the elicitation first tells the
    /// upstream that it was canceled.
    pub(in crate::mcp) async fn abandon(self) {
        let Self { request: out, elicitation: question, .. } = self;
        drop(question);
        out.cancel_after_grace("the call has ended").await;
    }
}
