//! Ignores the response to a `server/discover` that `rmcp` no longer waits for.
//!
//! `rmcp` 3.8.0 waits ten seconds for it and then sends `initialize`. A program that takes longer
//! to start reads both requests and answers both; `rmcp` would take the first response for the one
//! to `initialize` and fail.

use rmcp::RoleClient;
use rmcp::model::{ClientRequest, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};

/// The requests of the handshake that have no response yet.
#[derive(Default)]
pub(super) struct LateDiscovery {
    unanswered: Option<RequestId>,
    abandoned: Option<RequestId>,
}

impl LateDiscovery {
    /// Records a message to the upstream.
    pub(super) fn record_sent(&mut self, message: &TxJsonRpcMessage<RoleClient>) {
        let JsonRpcMessage::Request(request) = message else { return };
        match &request.request {
            ClientRequest::DiscoverRequest(_) => self.unanswered = Some(request.id.clone()),
            ClientRequest::InitializeRequest(_) => self.abandoned = self.unanswered.take(),
            _ => {}
        }
    }

    /// Records a message of the upstream. Returns true if it is the response that is no longer
    /// waited for.
    pub(super) fn is_late(&mut self, message: &RxJsonRpcMessage<RoleClient>) -> bool {
        let id = match message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        let Some(id) = id else { return false };
        self.unanswered.take_if(|unanswered| unanswered == id);
        self.abandoned.take_if(|abandoned| abandoned == id).is_some()
    }
}
