//! The state of the client queue, behind one lock and without awaits: connections, queued items and
//! leases.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;

use super::client::{ClientConnection, Lease, QueueClient};
use super::{
    ClientMessage, ConnectRequest, DISCONNECT_GRACE_MS, DeliveryLimiter, DeliveryPermit,
    FAILOVER_GRACE_MS, POLL_LEASE_MS, Redelivery, Transport, WorkItem,
};
use crate::domain::id::CallId;
use crate::domain::tool::Effect;
use crate::domain::tool::availability::ToolClient;

/// Number of clients beyond which a disconnected client without work is removed.
const MAX_IDLE_CLIENTS: usize = 10_000;

type ClientKey = (String, String);
type ToolKey = (String, String);

#[derive(Default)]
pub(super) struct ClientQueueState {
    /// Every unanswered item, queued or leased.
    requests: HashMap<CallId, WorkEntry>,
    /// Items without a lease, by tool and in the order of the requests.
    queues: HashMap<ToolKey, BTreeMap<u64, CallId>>,
    clients: HashMap<ClientKey, QueueClient>,
    /// Increases with everything that has an order: sessions, items, assignments.
    last_order: u64,
    /// True after shutdown: no item is assigned any more.
    closed: bool,
    limiter: Option<Arc<dyn DeliveryLimiter>>,
}

struct WorkEntry {
    item: WorkItem,
    pinned: Option<String>,
    order: u64,
    holder: Option<ClientKey>,
    /// Held while a client has the item.
    permit: Option<DeliveryPermit>,
}

/// A client as the operator sees it.
#[derive(Debug, Clone)]
pub struct ClientView {
    pub client_id: String,
    pub connections: usize,
    pub leased: usize,
    pub tools: Vec<String>,
    /// Time when the client was last connected, in Unix milliseconds; `None` if it has not been
    /// seen since the start of the server.
    pub last_seen_ms: Option<u64>,
}

impl ClientQueueState {
    fn next_order(&mut self) -> u64 {
        self.last_order += 1;
        self.last_order
    }

    pub(super) fn connect(
        &mut self,
        request: ConnectRequest,
        sender: UnboundedSender<ClientMessage>,
        now_ms: u64,
    ) -> u64 {
        let number = self.next_order();
        if self.closed {
            return number;
        }
        let key = (request.project, request.client_id);
        let client = self.clients.entry(key.clone()).or_default();
        client.tools = request.tools;
        client.last_seen_ms = now_ms;
        let (window, transport) = (request.window.max(1), request.transport);
        client.is_polling = transport == Transport::Polling;
        client.undelivered_cancels.drain(..).for_each(|message| drop(sender.send(message)));
        client.sessions.push(ClientConnection { number, sender, window, transport });
        // A poll is not a reconnect: the client is still working on the items it holds.
        if transport == Transport::Streaming {
            self.redeliver(&key, request.redelivery);
        }
        self.fill_client(&key, now_ms);
        number
    }

    /// Redelivers the acknowledged and unanswered items of a client that reconnected.
    fn redeliver(&mut self, key: &ClientKey, redelivery: Redelivery) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(connection) = client.sessions.last() else { return };
        for (id, lease) in client.leases.iter_mut().filter(|(_, lease)| lease.session.is_none()) {
            let Some(entry) = self.requests.get_mut(id) else { continue };
            let is_repeatable = entry.item.effect != Effect::Irreversible;
            if is_repeatable || redelivery == Redelivery::All {
                entry.item.redelivered = true;
                lease.session = Some(connection.number);
                (lease.polled, lease.lease_until_ms) = (false, None);
                let _ = connection.sender.send(ClientMessage::Execute(entry.item.clone()));
            }
        }
    }

    pub(super) fn set_tools(
        &mut self,
        project: &str,
        client_id: &str,
        tools: &HashSet<String>,
        now_ms: u64,
    ) {
        let key = (project.to_owned(), client_id.to_owned());
        if let Some(client) = self.clients.get_mut(&key) {
            client.tools.clone_from(tools);
            self.fill_client(&key, now_ms);
        }
    }

    /// Ends every session by dropping the sender of its connection. Queued and leased items stay as
    /// they are: the next start finds them in the store.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.clients.values_mut().for_each(|client| client.sessions.clear());
    }

    /// Ends a connection. Items that were sent and not acknowledged return to the queue at once.
    /// `requeue_expired` takes back the others: an acknowledged item that is safe to repeat after
    /// the grace period, a polled one when its lease ends. An acknowledged item that is
    /// irreversible or pinned stays with the client.
    pub(super) fn disconnect(
        &mut self,
        key: &ClientKey,
        number: u64,
        undelivered: Vec<ClientMessage>,
        now_ms: u64,
    ) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.last_seen_ms = now_ms;
        let Some(index) = client.sessions.iter().position(|c| c.number == number) else { return };
        client.sessions.remove(index);
        undelivered.into_iter().for_each(|message| client.send_or_buffer(None, message));
        let mut requeued = Vec::new();
        for (id, lease) in
            client.leases.iter_mut().filter(|(_, lease)| lease.session == Some(number))
        {
            lease.session = None;
            if !lease.acknowledged && lease.lease_until_ms.is_none() {
                requeued.push(id.clone());
            }
        }
        self.requeue(key, requeued, now_ms);
        self.remove_if_stale(key);
    }

    /// Removes a client that unregistered, once no item is queued for it.
    pub(super) fn remove_if_idle(&mut self, key: &ClientKey) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.undelivered_cancels.clear();
        if client.is_idle() {
            self.clients.remove(key);
        }
    }

    fn remove_if_stale(&mut self, key: &ClientKey) {
        // Recently seen clients stay visible to the operator, up to a limit. A client without tools
        // here was never connected or is no longer registered.
        let Some(client) = self.clients.get(key).filter(|client| client.is_idle()) else { return };
        if client.tools.is_empty() || self.clients.len() > MAX_IDLE_CLIENTS {
            self.clients.remove(key);
        }
    }

    pub(super) fn is_busy(&self, key: &ClientKey) -> bool {
        let busy = |client: &QueueClient| !client.sessions.is_empty() || !client.leases.is_empty();
        self.clients.get(key).is_some_and(busy)
    }

    /// Returns items to their original positions in their queues, and assigns them again.
    fn requeue(&mut self, key: &ClientKey, ids: Vec<CallId>, now_ms: u64) {
        let mut queues = Vec::new();
        for id in ids {
            if let Some(client) = self.clients.get_mut(key) {
                client.leases.remove(&id);
            }
            let Some(entry) = self.requests.get_mut(&id) else { continue };
            entry.item.redelivered = true;
            (entry.holder, entry.permit) = (None, None);
            if entry.pinned.is_some() {
                if let Some(client) = self.clients.get_mut(key) {
                    client.pinned.insert(entry.order, id);
                }
            } else {
                let queue = (entry.item.project.clone(), entry.item.tool.clone());
                self.queues.entry(queue.clone()).or_default().insert(entry.order, id);
                queues.push(queue);
            }
        }
        for queue in queues {
            self.assign_queued(&queue, now_ms);
        }
        self.fill_client(key, now_ms);
    }

    /// Removes an item from its queue, so that no client receives it.
    fn dequeue(&mut self, id: &CallId) {
        let Some(entry) = self.requests.get(id) else { return };
        let (project, order) = (&entry.item.project, entry.order);
        if let Some(client_id) = &entry.pinned {
            if let Some(client) = self.clients.get_mut(&(project.clone(), client_id.clone())) {
                client.pinned.remove(&order);
            }
            return;
        }
        let queue = (project.clone(), entry.item.tool.clone());
        if let Some(ids) = self.queues.get_mut(&queue) {
            ids.remove(&order);
            if ids.is_empty() {
                self.queues.remove(&queue);
            }
        }
    }

    pub(super) fn enqueue(
        &mut self,
        request: WorkItem,
        pinned: Option<String>,
        acknowledged_by: Option<String>,
        now_ms: u64,
    ) {
        let (id, project) = (request.call_id.clone(), request.project.clone());
        let queue = (project.clone(), request.tool.clone());
        let order = self.next_order();
        self.dequeue(&id);
        let holder = acknowledged_by.map(|client_id| (project.clone(), client_id));
        let permit = holder.as_ref().and_then(|_| self.limiter.as_ref()?.force_acquire(&project));
        let entry = WorkEntry {
            item: request,
            pinned: pinned.clone(),
            order,
            holder: holder.clone(),
            permit,
        };
        self.requests.insert(id.clone(), entry);
        if let Some(key) = holder {
            // Acknowledged before a restart: the item still belongs to that client, on any
            // transport.
            let mut lease = Lease {
                acknowledged: true,
                since_ms: now_ms,
                session: None,
                polled: true,
                lease_until_ms: None,
            };
            if let Some(entry) = self.requests.get(&id) {
                lease.extend(&entry.item, now_ms);
            }
            let client = self.clients.entry(key.clone()).or_default();
            client.last_seen_ms = client.last_seen_ms.max(now_ms);
            client.leases.insert(id, lease);
            if client.sessions.iter().any(|c| c.transport == Transport::Streaming) {
                self.redeliver(&key, Redelivery::ReversibleOnly);
            }
        } else if let Some(client_id) = pinned {
            let key = (project, client_id);
            self.clients.entry(key.clone()).or_default().pinned.insert(order, id);
            self.fill_client(&key, now_ms);
        } else {
            self.queues.entry(queue.clone()).or_default().insert(order, id);
            self.assign_queued(&queue, now_ms);
        }
    }

    /// Assigns the queued items of a tool to the clients that provide it, the least busy first.
    fn assign_queued(&mut self, queue: &ToolKey, now_ms: u64) {
        while self.queues.contains_key(queue) {
            let chosen = self
                .clients
                .iter()
                .filter(|((project, _), client)| {
                    *project == queue.0
                        && client.tools.contains(&queue.1)
                        && client.connection_with_capacity().is_some()
                })
                .min_by_key(|(_, client)| (client.leases.len(), client.last_assigned))
                .map(|(key, _)| key.clone());
            let Some(key) = chosen else { return };
            let Some(id) = self.pop_first(queue) else { return };
            if !self.lease_to(&key, id, now_ms) {
                return;
            }
        }
    }

    /// Removes the first item of a queue and returns it.
    fn pop_first(&mut self, queue: &ToolKey) -> Option<CallId> {
        let ids = self.queues.get_mut(queue)?;
        let first = ids.pop_first();
        if ids.is_empty() {
            self.queues.remove(queue);
        }
        first.map(|(_, id)| id)
    }

    /// Assigns as many waiting items to a client as it has capacity for, the oldest first.
    fn fill_client(&mut self, key: &ClientKey, now_ms: u64) {
        while let Some(id) = self.take_next_for(key) {
            if !self.lease_to(key, id, now_ms) {
                return;
            }
        }
    }

    /// Assigns items that waited for a permit.
    pub(super) fn assign_waiting(&mut self, now_ms: u64) {
        let keys: Vec<ClientKey> = self.clients.keys().cloned().collect();
        keys.iter().for_each(|key| self.fill_client(key, now_ms));
    }

    pub(super) fn set_limiter(&mut self, limiter: Arc<dyn DeliveryLimiter>) {
        self.limiter = Some(limiter);
    }

    fn take_next_for(&mut self, key: &ClientKey) -> Option<CallId> {
        self.clients.get(key)?.connection_with_capacity()?;
        let client = self.clients.get_mut(key)?;
        // A pinned item of a tool that the client no longer provides waits until it does again.
        let is_offered = |id: &CallId| {
            let tool = self.requests.get(id).map(|entry| &entry.item.tool);
            tool.is_some_and(|tool| client.tools.contains(tool))
        };
        let mut pinned = client.pinned.iter();
        if let Some(order) = pinned.find(|(_, id)| is_offered(id)).map(|(order, _)| *order) {
            return client.pinned.remove(&order);
        }
        let queues = client.tools.iter().map(|tool| (key.0.clone(), tool.clone()));
        let heads = queues.filter_map(|queue| {
            let (order, _) = self.queues.get(&queue)?.first_key_value()?;
            Some((*order, queue))
        });
        let (_, queue) = heads.min()?;
        self.pop_first(&queue)
    }

    /// Hands an item to a client. Returns false if no permit is free; the item is queued again.
    fn lease_to(&mut self, key: &ClientKey, id: CallId, now_ms: u64) -> bool {
        let assignment_order = self.next_order();
        let (Some(entry), Some(client)) = (self.requests.get_mut(&id), self.clients.get_mut(key))
        else {
            return true;
        };
        let Some(connection) = client.connection_with_capacity() else { return true };
        if let Some(limiter) = &self.limiter {
            entry.permit = limiter.try_acquire(&key.0);
            if entry.permit.is_none() {
                let (order, tool) = (entry.order, entry.item.tool.clone());
                match entry.pinned {
                    Some(_) => client.pinned.insert(order, id),
                    None => {
                        let queue = (key.0.clone(), tool);
                        self.queues.entry(queue).or_default().insert(order, id)
                    }
                };
                return false;
            }
        }
        let (number, message) = (connection.number, ClientMessage::Execute(entry.item.clone()));
        let polled = connection.transport == Transport::Polling;
        let _ = connection.sender.send(message);
        entry.holder = Some(key.clone());
        client.last_assigned = assignment_order;
        client.last_seen_ms = now_ms;
        let session = Some(number);
        let lease =
            Lease { acknowledged: false, since_ms: now_ms, session, polled, lease_until_ms: None };
        client.leases.insert(id, lease);
        true
    }

    pub(super) fn acknowledge(&mut self, project: &str, client_id: &str, id: &CallId, now_ms: u64) {
        let key = (project.to_owned(), client_id.to_owned());
        self.dequeue(id);
        let Some(entry) = self.requests.get_mut(id) else { return };
        if entry.holder.as_ref().is_some_and(|holder| *holder != key) {
            return;
        }
        // A client may acknowledge an item that was not assigned yet: it holds the lease from now
        // on.
        entry.holder = Some(key.clone());
        if entry.permit.is_none() {
            entry.permit = self.limiter.as_ref().and_then(|limiter| limiter.force_acquire(&key.0));
        }
        let client = self.clients.entry(key).or_default();
        client.last_seen_ms = now_ms;
        let lease = client.leases.entry(id.clone()).or_insert_with(|| Lease {
            acknowledged: true,
            since_ms: now_ms,
            session: None,
            polled: true,
            lease_until_ms: None,
        });
        (lease.acknowledged, lease.since_ms) = (true, now_ms);
        lease.extend(&entry.item, now_ms);
    }

    pub(super) fn start_poll_lease(&mut self, key: &ClientKey, id: &CallId, now_ms: u64) {
        if let Some(lease) = self.clients.get_mut(key).and_then(|c| c.leases.get_mut(id))
            && !lease.acknowledged
        {
            lease.lease_until_ms = Some(now_ms + POLL_LEASE_MS);
        }
    }

    pub(super) fn lease_holder(&self, id: &CallId) -> Option<String> {
        self.requests.get(id)?.holder.as_ref().map(|(_, client_id)| client_id.clone())
    }

    pub(super) fn delivered_ms(&self, id: &CallId) -> Option<u64> {
        let holder = self.requests.get(id)?.holder.as_ref()?;
        self.clients.get(holder)?.leases.get(id).map(|lease| lease.since_ms)
    }

    pub(super) fn cancel(&mut self, id: &CallId, attempt: u32) {
        let Some(key) = self.requests.get(id).and_then(|entry| entry.holder.clone()) else {
            return;
        };
        let Some(client) = self.clients.get_mut(&key) else { return };
        let session = client.leases.get(id).and_then(|lease| lease.session);
        client.send_or_buffer(session, ClientMessage::Cancel { call_id: id.clone(), attempt });
    }

    pub(super) fn release(&mut self, id: &CallId, now_ms: u64) {
        self.dequeue(id);
        let Some(WorkEntry { item: request, pinned, holder, .. }) = self.requests.remove(id) else {
            return;
        };
        let pinned = pinned.map(|client_id| (request.project, client_id));
        let Some(key) = holder.or(pinned) else { return };
        if let Some(client) = self.clients.get_mut(&key) {
            client.leases.remove(id);
        }
        self.fill_client(&key, now_ms);
        self.remove_if_stale(&key);
    }

    pub(super) fn requeue_expired(&mut self, now_ms: u64) {
        let mut overdue: Vec<(ClientKey, Vec<CallId>)> = Vec::new();
        for (key, client) in &self.clients {
            let away_ms = match client.sessions.is_empty() {
                true => now_ms.saturating_sub(client.last_seen_ms),
                false => 0,
            };
            let ids = client.leases.iter().filter(|(id, lease)| {
                let expired = lease.lease_until_ms.is_some_and(|until| until <= now_ms);
                let movable_entry = self.requests.get(*id).filter(|entry| {
                    entry.pinned.is_none() && entry.item.effect != Effect::Irreversible
                });
                // A client that polls has no connection while it works, and is not gone: its lease
                // alone decides. After a restart it is known to poll once it has polled again.
                let is_gone = |entry: &WorkEntry| {
                    let has_left = !lease.polled && away_ms >= FAILOVER_GRACE_MS;
                    let is_away = away_ms >= DISCONNECT_GRACE_MS;
                    let works_between_polls = lease.polled && client.is_polling;
                    is_away && !works_between_polls || has_left && self.has_other_client(key, entry)
                };
                expired || lease.acknowledged && movable_entry.is_some_and(is_gone)
            });
            let ids: Vec<CallId> = ids.map(|(id, _)| id.clone()).collect();
            if !ids.is_empty() {
                overdue.push((key.clone(), ids));
            }
        }
        for (key, ids) in overdue {
            self.requeue(&key, ids, now_ms);
            self.remove_if_stale(&key);
        }
    }

    /// Returns a client of a tool, as its callers see it.
    pub(super) fn tool_client(&self, project: &str, client_id: &str, now_ms: u64) -> ToolClient {
        let client = self.clients.get(&(project.to_owned(), client_id.to_owned()));
        let last_seen_ms = client
            .map(|client| if client.sessions.is_empty() { client.last_seen_ms } else { now_ms });
        ToolClient {
            client_id: client_id.to_owned(),
            is_connected: client.is_some_and(|client| client.is_present(now_ms)),
            last_seen_ms: last_seen_ms.filter(|ms| *ms > 0),
        }
    }

    /// Returns true if another connected client can take the item now.
    fn has_other_client(&self, key: &ClientKey, entry: &WorkEntry) -> bool {
        self.clients.iter().any(|(other, client)| {
            other != key
                && other.0 == key.0
                && client.tools.contains(&entry.item.tool)
                && client.connection_with_capacity().is_some()
        })
    }

    pub(super) fn list_clients(&self, project: &str) -> Vec<ClientView> {
        let matching = self.clients.iter().filter(|((owner, _), _)| owner == project);
        let mut clients: Vec<ClientView> = matching
            .map(|((_, client_id), client)| {
                let mut tools: Vec<String> = client.tools.iter().cloned().collect();
                tools.sort();
                ClientView {
                    client_id: client_id.clone(),
                    connections: client.sessions.len(),
                    leased: client.leases.len(),
                    tools,
                    last_seen_ms: Some(client.last_seen_ms).filter(|ms| *ms > 0),
                }
            })
            .collect();
        clients.sort_by(|a, b| a.client_id.cmp(&b.client_id));
        clients
    }

    /// Returns the number of queued items, shared and pinned.
    #[cfg(test)]
    pub(super) fn queued_count(&self) -> usize {
        let shared = self.queues.values().map(BTreeMap::len).sum::<usize>();
        shared + self.clients.values().map(|client| client.pinned.len()).sum::<usize>()
    }

    pub(super) fn connection_count(&self) -> usize {
        self.clients.values().map(|client| client.sessions.len()).sum()
    }
}
