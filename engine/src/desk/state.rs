//! The state of the client queue, behind one lock and without awaits: connections, queued items and
//! leases.

use std::collections::{BTreeMap, HashMap, HashSet};

use tokio::sync::mpsc::UnboundedSender;

use super::client::{Client, Connection, InHand};
use super::{AWAY_GRACE_MS, Arrival, Line, Memory, Message, POLL_LEASE_MS, Request};
use crate::id::CallId;
use crate::tool::Effect;

type ClientKey = (String, String);
type ToolKey = (String, String);

#[derive(Default)]
pub(super) struct State {
    /// Every unanswered item, queued or leased.
    requests: HashMap<CallId, Parked>,
    /// Items without a lease, by tool and in the order of the requests.
    lines: HashMap<ToolKey, BTreeMap<u64, CallId>>,
    clients: HashMap<ClientKey, Client>,
    /// Increases with everything that has an order: sessions, items, assignments.
    count: u64,
    /// True after shutdown: no item is assigned any more.
    closed: bool,
}

struct Parked {
    request: Request,
    pinned: Option<String>,
    order: u64,
    holder: Option<ClientKey>,
}

/// A client as the operator sees it.
#[derive(Debug, Clone)]
pub struct ClientView {
    pub client_id: String,
    pub connections: usize,
    pub in_hand: usize,
    pub tools: Vec<String>,
    /// `None` if the client has not been seen since the start.
    pub last_seen_ms: Option<u64>,
}

impl State {
    fn tick(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(super) fn connect(
        &mut self,
        arrival: Arrival,
        sender: UnboundedSender<Message>,
        now_ms: u64,
    ) -> u64 {
        let number = self.tick();
        if self.closed {
            return number;
        }
        let key = (arrival.project, arrival.client_id);
        let client = self.clients.entry(key.clone()).or_default();
        client.offers = arrival.offers;
        client.last_seen_ms = now_ms;
        let (window, line) = (arrival.window.max(1), arrival.line);
        client.unheard.drain(..).for_each(|message| drop(sender.send(message)));
        client.sessions.push(Connection { number, sender, window, line });
        // A poll is not a reconnect: the client is still working on the items it holds.
        if line == Line::Open {
            self.give_again(&key, arrival.memory);
        }
        self.pull(&key, now_ms);
        number
    }

    /// Redelivers the acknowledged and unanswered items of a client that reconnected.
    fn give_again(&mut self, key: &ClientKey, memory: Memory) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(connection) = client.sessions.last() else { return };
        for (id, held) in client.in_hand.iter_mut().filter(|(_, held)| held.session.is_none()) {
            let Some(parked) = self.requests.get_mut(id) else { continue };
            let harmless = parked.request.effect != Effect::Irreversible;
            if harmless || memory == Memory::Remembers {
                parked.request.redelivered = true;
                held.session = Some(connection.number);
                (held.polled, held.lease_until_ms) = (false, None);
                let _ = connection.sender.send(Message::Request(parked.request.clone()));
            }
        }
    }

    pub(super) fn reoffer(
        &mut self,
        project: &str,
        client_id: &str,
        offers: &HashSet<String>,
        now_ms: u64,
    ) {
        let key = (project.to_owned(), client_id.to_owned());
        if let Some(client) = self.clients.get_mut(&key) {
            client.offers.clone_from(offers);
            self.pull(&key, now_ms);
        }
    }

    /// Ends every session by dropping the sender of its connection. Queued and leased items stay as
    /// they are: the next start finds them in the store.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.clients.values_mut().for_each(|client| client.sessions.clear());
    }

    pub(super) fn hang_up(
        &mut self,
        key: &ClientKey,
        number: u64,
        unheard: Vec<Message>,
        now_ms: u64,
    ) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.last_seen_ms = now_ms;
        let Some(at) = client.sessions.iter().position(|c| c.number == number) else { return };
        client.sessions.remove(at);
        unheard.into_iter().for_each(|message| client.tell(None, message));
        let mut back = Vec::new();
        for (id, held) in client.in_hand.iter_mut().filter(|(_, h)| h.session == Some(number)) {
            held.session = None;
            if !held.acknowledged && held.lease_until_ms.is_none() {
                back.push(id.clone());
            }
        }
        self.take_back(key, back, now_ms);
        self.forget_if_idle(key);
    }

    /// Removes a client that unregistered, once no item is queued for it.
    pub(super) fn forget(&mut self, key: &ClientKey) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.unheard.clear();
        if client.is_idle() {
            self.clients.remove(key);
        }
    }

    fn forget_if_idle(&mut self, key: &ClientKey) {
        // Recently seen clients stay visible to the operator, up to a limit. A client without tools
        // here was never connected or is no longer registered.
        let Some(client) = self.clients.get(key).filter(|client| client.is_idle()) else { return };
        if client.offers.is_empty() || self.clients.len() > 10_000 {
            self.clients.remove(key);
        }
    }

    pub(super) fn is_busy(&self, key: &ClientKey) -> bool {
        let busy = |client: &Client| !client.sessions.is_empty() || !client.in_hand.is_empty();
        self.clients.get(key).is_some_and(busy)
    }

    /// Returns items to their original positions in their queues, and assigns them again.
    fn take_back(&mut self, key: &ClientKey, ids: Vec<CallId>, now_ms: u64) {
        let mut lines = Vec::new();
        for id in ids {
            if let Some(client) = self.clients.get_mut(key) {
                client.in_hand.remove(&id);
            }
            let Some(parked) = self.requests.get_mut(&id) else { continue };
            parked.request.redelivered = true;
            parked.holder = None;
            if parked.pinned.is_some() {
                if let Some(client) = self.clients.get_mut(key) {
                    client.pinned.insert(parked.order, id);
                }
            } else {
                let line = (parked.request.project.clone(), parked.request.tool.clone());
                self.lines.entry(line.clone()).or_default().insert(parked.order, id);
                lines.push(line);
            }
        }
        for line in lines {
            self.assign(&line, now_ms);
        }
        self.pull(key, now_ms);
    }

    /// Removes an item from its queue, so that no client receives it.
    fn leave_line(&mut self, id: &CallId) {
        let Some(parked) = self.requests.get(id) else { return };
        let (project, order) = (&parked.request.project, parked.order);
        if let Some(client_id) = &parked.pinned {
            if let Some(client) = self.clients.get_mut(&(project.clone(), client_id.clone())) {
                client.pinned.remove(&order);
            }
            return;
        }
        let line = (project.clone(), parked.request.tool.clone());
        if let Some(ids) = self.lines.get_mut(&line) {
            ids.remove(&order);
            if ids.is_empty() {
                self.lines.remove(&line);
            }
        }
    }

    pub(super) fn put(
        &mut self,
        request: Request,
        pinned: Option<String>,
        taken_by: Option<String>,
        now_ms: u64,
    ) {
        let (id, project) = (request.call_id.clone(), request.project.clone());
        let line = (project.clone(), request.tool.clone());
        let order = self.tick();
        self.leave_line(&id);
        let holder = taken_by.map(|client_id| (project.clone(), client_id));
        let parked = Parked { request, pinned: pinned.clone(), order, holder: holder.clone() };
        self.requests.insert(id.clone(), parked);
        if let Some(key) = holder {
            // Acknowledged before a restart: the item still belongs to that client, on any
            // transport.
            let mut held =
                InHand { acknowledged: true, session: None, polled: true, lease_until_ms: None };
            if let Some(parked) = self.requests.get(&id) {
                held.stays(&parked.request, now_ms);
            }
            let client = self.clients.entry(key.clone()).or_default();
            client.last_seen_ms = client.last_seen_ms.max(now_ms);
            client.in_hand.insert(id, held);
            if client.sessions.iter().any(|c| c.line == Line::Open) {
                self.give_again(&key, Memory::Forgets);
            }
        } else if let Some(client_id) = pinned {
            let key = (project, client_id);
            self.clients.entry(key.clone()).or_default().pinned.insert(order, id);
            self.pull(&key, now_ms);
        } else {
            self.lines.entry(line.clone()).or_default().insert(order, id);
            self.assign(&line, now_ms);
        }
    }

    /// Assigns the queued items of a tool to the clients that provide it, the least busy first.
    fn assign(&mut self, line: &ToolKey, now_ms: u64) {
        while self.lines.contains_key(line) {
            let chosen = self
                .clients
                .iter()
                .filter(|((project, _), client)| {
                    *project == line.0
                        && client.offers.contains(&line.1)
                        && client.open_place().is_some()
                })
                .min_by_key(|(_, client)| (client.in_hand.len(), client.last_turn))
                .map(|(key, _)| key.clone());
            let Some(key) = chosen else { return };
            let Some(id) = self.first_in(line) else { return };
            self.give(&key, id, now_ms);
        }
    }

    /// Removes the first item of a queue and returns it.
    fn first_in(&mut self, line: &ToolKey) -> Option<CallId> {
        let ids = self.lines.get_mut(line)?;
        let first = ids.pop_first();
        if ids.is_empty() {
            self.lines.remove(line);
        }
        first.map(|(_, id)| id)
    }

    /// Assigns as many waiting items to a client as it has capacity for, the oldest first.
    fn pull(&mut self, key: &ClientKey, now_ms: u64) {
        while let Some(id) = self.next_for(key) {
            self.give(key, id, now_ms);
        }
    }

    fn next_for(&mut self, key: &ClientKey) -> Option<CallId> {
        self.clients.get(key)?.open_place()?;
        let client = self.clients.get_mut(key)?;
        // A pinned item of a tool that the client no longer provides waits until it does again.
        let is_offered = |id: &CallId| {
            let tool = self.requests.get(id).map(|parked| &parked.request.tool);
            tool.is_some_and(|tool| client.offers.contains(tool))
        };
        let mut pinned = client.pinned.iter();
        if let Some(order) = pinned.find(|(_, id)| is_offered(id)).map(|(order, _)| *order) {
            return client.pinned.remove(&order);
        }
        let lines = client.offers.iter().map(|tool| (key.0.clone(), tool.clone()));
        let heads = lines.filter_map(|line| {
            let (order, _) = self.lines.get(&line)?.first_key_value()?;
            Some((*order, line))
        });
        let (_, line) = heads.min()?;
        self.first_in(&line)
    }

    fn give(&mut self, key: &ClientKey, id: CallId, now_ms: u64) {
        let turn = self.tick();
        let (Some(parked), Some(client)) = (self.requests.get_mut(&id), self.clients.get_mut(key))
        else {
            return;
        };
        let Some(connection) = client.open_place() else { return };
        let (number, message) = (connection.number, Message::Request(parked.request.clone()));
        let polled = connection.line == Line::Poll;
        let _ = connection.sender.send(message);
        parked.holder = Some(key.clone());
        client.last_turn = turn;
        client.last_seen_ms = now_ms;
        let session = Some(number);
        let held = InHand { acknowledged: false, session, polled, lease_until_ms: None };
        client.in_hand.insert(id, held);
    }

    pub(super) fn acknowledged(
        &mut self,
        project: &str,
        client_id: &str,
        id: &CallId,
        now_ms: u64,
    ) {
        let key = (project.to_owned(), client_id.to_owned());
        self.leave_line(id);
        let Some(parked) = self.requests.get_mut(id) else { return };
        if parked.holder.as_ref().is_some_and(|holder| *holder != key) {
            return;
        }
        // A client may acknowledge an item that was not assigned yet: it holds the lease from now
        // on.
        parked.holder = Some(key.clone());
        let client = self.clients.entry(key).or_default();
        client.last_seen_ms = now_ms;
        let held = client.in_hand.entry(id.clone()).or_insert_with(|| InHand {
            acknowledged: true,
            session: None,
            polled: true,
            lease_until_ms: None,
        });
        held.acknowledged = true;
        held.stays(&parked.request, now_ms);
    }

    pub(super) fn lend(&mut self, key: &ClientKey, id: &CallId, now_ms: u64) {
        if let Some(held) = self.clients.get_mut(key).and_then(|c| c.in_hand.get_mut(id))
            && !held.acknowledged
        {
            held.lease_until_ms = Some(now_ms + POLL_LEASE_MS);
        }
    }

    pub(super) fn holder(&self, id: &CallId) -> Option<String> {
        self.requests.get(id)?.holder.as_ref().map(|(_, client_id)| client_id.clone())
    }

    pub(super) fn cancel(&mut self, id: &CallId, attempt: u32) {
        let Some(key) = self.requests.get(id).and_then(|parked| parked.holder.clone()) else {
            return;
        };
        let Some(client) = self.clients.get_mut(&key) else { return };
        let session = client.in_hand.get(id).and_then(|held| held.session);
        client.tell(session, Message::Cancel { call_id: id.clone(), attempt });
    }

    pub(super) fn settled(&mut self, id: &CallId, now_ms: u64) {
        self.leave_line(id);
        let Some(Parked { request, pinned, holder, .. }) = self.requests.remove(id) else { return };
        let pinned = pinned.map(|client_id| (request.project, client_id));
        let Some(key) = holder.or(pinned) else { return };
        if let Some(client) = self.clients.get_mut(&key) {
            client.in_hand.remove(id);
        }
        self.pull(&key, now_ms);
        self.forget_if_idle(&key);
    }

    pub(super) fn return_overdue(&mut self, now_ms: u64) {
        let mut overdue: Vec<(ClientKey, Vec<CallId>)> = Vec::new();
        for (key, client) in &self.clients {
            let gone = client.sessions.is_empty()
                && client.last_seen_ms.saturating_add(AWAY_GRACE_MS) <= now_ms;
            let ids = client.in_hand.iter().filter(|(id, held)| {
                let expired = held.lease_until_ms.is_some_and(|until| until <= now_ms);
                let pinned_or_once = self.requests.get(*id).is_none_or(|parked| {
                    parked.pinned.is_some() || parked.request.effect == Effect::Irreversible
                });
                expired || (gone && held.acknowledged && !pinned_or_once)
            });
            let ids: Vec<CallId> = ids.map(|(id, _)| id.clone()).collect();
            if !ids.is_empty() {
                overdue.push((key.clone(), ids));
            }
        }
        for (key, ids) in overdue {
            self.take_back(&key, ids, now_ms);
            self.forget_if_idle(&key);
        }
    }

    pub(super) fn view(&self, project: &str) -> Vec<ClientView> {
        let mine = self.clients.iter().filter(|((owner, _), _)| owner == project);
        let mut clients: Vec<ClientView> = mine
            .map(|((_, client_id), client)| {
                let mut tools: Vec<String> = client.offers.iter().cloned().collect();
                tools.sort();
                ClientView {
                    client_id: client_id.clone(),
                    connections: client.sessions.len(),
                    in_hand: client.in_hand.len(),
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
    pub(super) fn in_line(&self) -> usize {
        let anybody = self.lines.values().map(BTreeMap::len).sum::<usize>();
        anybody + self.clients.values().map(|client| client.pinned.len()).sum::<usize>()
    }

    pub(super) fn connections(&self) -> usize {
        self.clients.values().map(|client| client.sessions.len()).sum()
    }
}
