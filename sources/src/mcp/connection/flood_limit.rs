//! Limits the rate of messages that an upstream sends without being asked.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::RoleClient;
use rmcp::model::{JsonRpcError, JsonRpcMessage, ServerResult};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;

use super::late_discovery::LateDiscovery;
use super::server_requests::McpClientHandler;

/// Limits of unsolicited messages: burst size, and sustained rate per second.
const UNSOLICITED_BURST: f64 = 5_000.0;
const UNSOLICITED_PER_SECOND: f64 = 500.0;

/// Maximum time for an orderly close of the transport.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Set when Toolcrib closes a connection because the upstream floods it.
#[derive(Clone, Default)]
pub(super) struct FloodFlag(Arc<Mutex<bool>>);

impl FloodFlag {
    /// Returns the problem, if the upstream flooded the connection.
    pub(super) fn problem(&self) -> Option<String> {
        let limit = UNSOLICITED_PER_SECOND;
        let describe = || format!("it sent more than {limit} unsolicited messages per second");
        self.0.lock().then(describe)
    }
}

/// A transport that stops reading when the upstream floods it.
pub(super) struct FloodLimitedTransport<T> {
    inner: T,
    flood_flag: FloodFlag,
    /// Records which requests are sent and answered, including those without a waiting caller, and
    /// gets log messages in their order.
    handler: Arc<McpClientHandler>,
    budget: f64,
    refilled_at: Instant,
    late_discovery: LateDiscovery,
}

impl<T> FloodLimitedTransport<T> {
    pub(super) fn new(inner: T, flood_flag: FloodFlag, handler: Arc<McpClientHandler>) -> Self {
        Self {
            inner,
            flood_flag,
            handler,
            budget: UNSOLICITED_BURST,
            refilled_at: Instant::now(),
            late_discovery: LateDiscovery::default(),
        }
    }

    fn take_budget(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.refilled_at).as_secs_f64();
        self.refilled_at = now;
        self.budget = (self.budget + passed * UNSOLICITED_PER_SECOND).min(UNSOLICITED_BURST) - 1.0;
        self.budget > 0.0
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for FloodLimitedTransport<T> {
    type Error = T::Error;

    fn name() -> Cow<'static, str> {
        "MCP".into()
    }

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.late_discovery.record_sent(&item);
        let sent_request = match &item {
            JsonRpcMessage::Request(request) => {
                self.handler.record_request(&request.id, &request.request);
                Some((self.handler.clone(), request.id.clone()))
            }
            _ => None,
        };
        let sending = self.inner.send(item);
        async move {
            let sent = sending.await;
            if let Some((handler, id)) = sent_request.filter(|_| sent.is_err()) {
                handler.record_send_failure(&id);
            }
            sent
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        let mut message = self.inner.receive().await?;
        while self.late_discovery.is_late(&message) {
            message = self.inner.receive().await?;
        }
        let is_unsolicited =
            matches!(message, JsonRpcMessage::Notification(_) | JsonRpcMessage::Request(_));
        if is_unsolicited && !self.take_budget() {
            *self.flood_flag.0.lock() = true;
            return None;
        }
        if let JsonRpcMessage::Notification(notification) = &message {
            self.handler.report_log(&notification.notification);
        }
        match &message {
            JsonRpcMessage::Response(answer) => {
                let continues = matches!(answer.result, ServerResult::CreateTaskResult(_));
                self.handler.record_response(&answer.id, continues);
            }
            JsonRpcMessage::Error(JsonRpcError { id: Some(id), .. }) => {
                self.handler.record_response(id, false);
            }
            _ => {}
        }
        Some(message)
    }

    /// Closes the transport, with a timeout. An upstream that keeps sending while no reader is left
    /// prevents an orderly close; dropping the transport ends it then.
    async fn close(&mut self) -> Result<(), Self::Error> {
        let closed = tokio::time::timeout(CLOSE_TIMEOUT, self.inner.close()).await;
        closed.unwrap_or(Ok(()))
    }
}
