//! Agent inboxes: each outcome is delivered once, stays in order, and remains until acknowledged.

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::domain::agent::AgentEntry;
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::derived;
use crate::domain::fault::{Code, Error};
use crate::domain::id::hex;
use crate::domain::tool::Executor;
use crate::domain::utp::card::{Card, into_map};
use crate::domain::utp::{InboxItem, OutboxMessage, Route, trace};
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::store::utp::InboxPutResult;
use crate::utp::Utp;
use crate::utp::wakeups::WakeReason;

/// Interval at which a waiter polls the store when no wakeup arrives.
const INBOX_POLL_MS: u64 = 2_000;
/// Time after which an unpublished wakeup is dropped: by then another has been sent.
const WAKEUP_TTL_MS: u64 = 60_000;

/// Returns the id of a call's outcome in its agent's inbox. It is derived from the call, so that
/// repeated reports of one outcome share one id.
pub(crate) fn inbox_id(call: &Call) -> String {
    let route = Route::for_call(call);
    derive_inbox_id(&call.project, &route.turn_id, &route.tool_call_id)
}

pub(crate) fn derive_inbox_id(project: &str, turn_id: &str, tool_call_id: &str) -> String {
    let seed = json!([project, turn_id, tool_call_id]).to_string();
    format!("inbox_{}", hex(&Sha256::digest(seed.as_bytes())[..16]))
}

/// Requires that the caller is this agent, or administers the project. An agent's key gives
/// access to its own inbox and turns only.
pub(crate) fn require_agent(caller: &Caller, agent_id: &str) -> Result<(), Error> {
    let rules = caller.is_exempt_from_rules() || caller.may_administer();
    if rules || caller.may_invoke() && caller.agent == agent_id {
        return Ok(());
    }
    let message = format!("this key is not agent \"{agent_id}\"'s");
    Err(Error::refused(Code::PermissionDenied, message))
}

impl Utp {
    /// Returns an agent's unacknowledged items, in order. Waits until there is one, at most
    /// `wait_ms` and the engine's limit. Reading removes nothing.
    pub async fn inbox(
        &self,
        caller: &Caller,
        agent_id: &str,
        limit: usize,
        wait_ms: u64,
    ) -> Result<Vec<InboxItem>, Error> {
        require_agent(caller, agent_id)?;
        let until_ms = self.core.clock.now_ms() + wait_ms.min(self.core.limits.max_wait_ms);
        let project = caller.project.clone();
        let mut listener =
            self.core.bus.listen(Topic::Inbox { project, agent: agent_id.to_owned() });
        loop {
            let found = self.core.store.utp().inbox(&caller.project, agent_id, limit).await;
            let items = found.map_err(from_store_error)?;
            let now_ms = self.core.clock.now_ms();
            if !items.is_empty() || now_ms >= until_ms || self.core.shutdown.is_cancelled() {
                return Ok(items);
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(until_ms.min(now_ms + INBOX_POLL_MS)) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Acknowledges inbox items. Returns the number of items that were still unacknowledged.
    pub async fn take_from_inbox(
        &self,
        caller: &Caller,
        agent_id: &str,
        inbox_ids: &[String],
    ) -> Result<usize, Error> {
        require_agent(caller, agent_id)?;
        let now_ms = self.core.clock.wall_ms();
        let utp = self.core.store.utp();
        let acknowledged =
            utp.acknowledge_inbox_items(&caller.project, agent_id, inbox_ids, now_ms).await;
        acknowledged.map_err(from_store_error)
    }
}

impl Utp {
    /// Returns true if the outcome of a call goes to an inbox. That holds for calls made in a turn
    /// and, if the agent is on the roster, for detached calls and for calls of UTP tools. The
    /// outcome of a task of a join goes to the joining call and to no inbox.
    pub(crate) fn uses_inbox(&self, call: &Call) -> bool {
        let is_on_roster =
            |agent: &str| self.registry.find_agent_entry(&call.project, agent).is_some();
        match call.origin.route.as_deref() {
            Some(route) if route.joined_by.is_some() => false,
            Some(route) => !route.is_detached || is_on_roster(&route.agent_id),
            None => call.target.executor == Executor::UTP && is_on_roster(&call.origin.agent),
        }
    }

    /// Delivers the outcome of a call that has ended to the inbox. If this fails, the turn watchdog
    /// delivers it later.
    pub(crate) async fn deliver_outcome(&self, call: &Call) {
        if !self.uses_inbox(call) {
            return;
        }
        // Boxed to keep the caller's future small: every call passes here, few are delivered.
        if let Err(error) = Box::pin(self.deliver_to_inbox(call)).await {
            tracing::warn!(call = %call.id, %error, "outcome not in the inbox; will retry");
        }
    }

    pub(crate) async fn deliver_to_inbox(&self, call: &Call) -> Result<(), Error> {
        let Some(card) = self.cards.result_card(call).await? else { return Ok(()) };
        let route = Route::for_call(call);
        let inbound = self.report_traceparents.lock().get(&call.id).cloned();
        let call_traceparent = derived::call_traceparent(call);
        // A report from another trace must not move the call into that trace.
        let is_same = |text: &String| {
            let id = |text: &str| trace::parse(text).map(|(trace_id, _)| trace_id);
            id(text) == id(&call_traceparent)
        };
        let parent = inbound.filter(is_same).unwrap_or_else(|| call_traceparent.clone());
        let item = self.build_inbox_item(call, &route, &card, &parent);
        let message = self.build_wakeup(&item, &route.channel);
        let wakes = message.is_some();
        let delivered = self.core.store.utp().deliver_to_inbox(item, &card.card_id, message).await;
        if delivered.map_err(from_store_error)? == InboxPutResult::New {
            self.wake_inbox_listeners(&call.project, &route.agent_id, wakes);
        }
        Ok(())
    }

    pub(crate) fn wake_inbox_listeners(&self, project: &str, agent_id: &str, wakes: bool) {
        let (project, agent) = (project.to_owned(), agent_id.to_owned());
        self.wakeups.queue(&project, &agent, WakeReason::NewItems);
        self.core.bus.wake(&Topic::Inbox { project, agent });
        if wakes {
            self.core.bus.wake(&Topic::Outbox);
        }
    }

    fn build_inbox_item(&self, call: &Call, route: &Route, card: &Card, parent: &str) -> InboxItem {
        let by_clock = call.status == Status::Timeout && card.author_id == "worker.watchdog";
        let inbox_id = inbox_id(call);
        let payload = json!({
            "tool_call_id": route.tool_call_id,
            "agent_turn_id": route.turn_id,
            "turn_epoch": route.epoch,
            "agent_id": route.agent_id,
            "after_execution": card.content_text("after_execution"),
            "status": card.content_text("status"),
            "tool_result_card_id": card.card_id,
            "step_id": route.step_id,
        });
        InboxItem {
            project: call.project.clone(),
            agent_id: route.agent_id.clone(),
            message_type: if by_clock { "timeout" } else { "tool_result" }.to_owned(),
            turn_id: route.turn_id.clone(),
            tool_call_id: route.tool_call_id.clone(),
            payload: into_map(payload),
            traceparent: trace::child_traceparent(parent, &inbox_id),
            tracestate: route.tracestate.clone(),
            parent_step_id: Some(route.step_id.clone()),
            source_agent_id: Some(card.author_id.clone()),
            depth: route.depth,
            created_ms: self.core.clock.wall_ms(),
            inbox_id,
        }
    }

    /// Builds the wakeup for an inbox item. Returns `None` if the agent has no worker or no
    /// publisher drains the outbox.
    pub(crate) fn build_wakeup(&self, item: &InboxItem, channel: &str) -> Option<OutboxMessage> {
        let found = self.registry.find_agent_entry(&item.project, &item.agent_id);
        let AgentEntry { worker_target, .. } = found.filter(AgentEntry::is_wakeable)?;
        if !self.publishes_outbox {
            return None;
        }
        let mut headers = vec![
            ("traceparent".to_owned(), item.traceparent.clone()),
            ("CG-Msg-Type".to_owned(), "AgentWakeup".to_owned()),
            ("CG-Recursion-Depth".to_owned(), item.depth.to_string()),
        ];
        headers.extend(item.tracestate.clone().map(|state| ("tracestate".to_owned(), state)));
        Some(OutboxMessage {
            id: format!("wake-{}", item.inbox_id),
            subject: format!("{}.{channel}.cmd.agent.{worker_target}.wakeup", item.project),
            headers,
            payload: json!({
                "agent_id": item.agent_id,
                "inbox_id": item.inbox_id,
                "reason": item.message_type,
                "metadata": { "agent_turn_id": item.turn_id },
            }),
            expires_ms: self.core.clock.wall_ms() + WAKEUP_TTL_MS,
        })
    }
}
