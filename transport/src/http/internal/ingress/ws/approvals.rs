//! Approvals on a WebSocket: after `approvals_follow`, Toolcrib sends each new approval and each
//! decision; `approval_decide` decides. Both need the same permission as over HTTP.

use serde_json::{Value, json};
use tokio::sync::mpsc;
use toolcrib::approvals::ApprovalQuery;
use toolcrib::calls::EventQuery;
use toolcrib::domain::call::approval::ApprovalStatus;
use toolcrib::domain::event::{CallEvent, EventKind};
use toolcrib::domain::fault::Error;
use toolcrib_protocol::approval::ApprovalBody;

use super::{WsConnection, parse_payload};
use crate::http::v1::approvals::{DecisionListBody, decide_all};
use crate::http::wire::event_json;

/// Number of events read from the store per page.
const EVENT_PAGE_SIZE: usize = 200;
/// Number of pending approvals in the answer to `approvals_follow`.
const MAX_PENDING: usize = 1_000;

impl WsConnection {
    /// Makes the decisions of a message. The answer has the fields of HTTP's.
    pub(super) async fn decide_approvals(&self, payload: &[u8]) -> Result<Value, Error> {
        let body: DecisionListBody = parse_payload(payload)?;
        let mut answer = decide_all(&self.engine, &self.caller, body).await?;
        answer["type"] = "approval_results".into();
        Ok(answer)
    }

    /// Answers with the pending approvals, then sends requests and decisions until the connection
    /// ends.
    pub(super) async fn follow_approvals(
        &self,
        answers: &mpsc::Sender<Value>,
    ) -> Result<(), Error> {
        let approvals = self.engine.approvals();
        approvals.require_reader(&self.caller)?;
        // Read first, so that no approval is missed between the list and the events.
        let mut after = self.engine.calls().newest_event(&self.caller).await?;
        let status = Some(ApprovalStatus::Pending);
        let query = ApprovalQuery { status, limit: MAX_PENDING, ..ApprovalQuery::default() };
        let page = approvals.list(&self.caller, query).await?;
        let pending = page.approvals.iter();
        let pending: Vec<ApprovalBody<'_>> =
            pending.map(|one| ApprovalBody::new(one, approvals.link(&one.id))).collect();
        let listed = json!({ "type": "approvals_following", "pending": pending });
        if answers.send(listed).await.is_err() {
            return Ok(());
        }
        loop {
            let events = tokio::select! {
                events = self.engine.calls().events(
                    &self.caller, &EventQuery::Project, after, EVENT_PAGE_SIZE,
                ) => events?,
                () = answers.closed() => return Ok(()),
            };
            let Some(last) = events.last() else { return Ok(()) };
            after = last.number;
            for message in events.iter().filter_map(approval_message) {
                if answers.send(message).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Returns the message about an event of an approval.
fn approval_message(event: &CallEvent) -> Option<Value> {
    let kind = match event.record.kind {
        EventKind::ApprovalRequested => "approval_requested",
        EventKind::ApprovalDecided => "approval_decided",
        _ => return None,
    };
    let mut message: Value = serde_json::from_str(&event_json(event)).ok()?;
    message["type"] = kind.into();
    Some(message)
}
