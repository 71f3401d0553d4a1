//! Reads, lists and waits for calls, and follows their events.
//!
//! A wait subscribes first and then reads, so it misses no wakeup between the two. It also polls at
//! an interval, so a lost wakeup costs a little time and nothing else.

use std::collections::HashMap;
use std::sync::Arc;

use futures::future::BoxFuture;

use crate::calls::Calls;
use crate::calls::accept::Ticket;
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::event::{CallEvent, EventKind, EventRecord};
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::domain::tool::Effect;
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::store::{CallFilter, EventScope};

/// Size at which a page of calls ends, so that a few calls with large results fill a page.
const PAGE_BYTES: usize = 16 << 20;

/// Interval at which a waiter polls the store when no wakeup arrives.
const CALL_POLL_MS: u64 = 2_000;

/// Maximum number of stored pages that are read for one page of readable calls.
const MAX_FILTERED_PAGES: usize = 10;

/// Filter for a list of calls.
#[derive(Debug, Clone, Default)]
pub struct CallQuery {
    /// Run that the calls belong to.
    pub run_id: Option<String>,
    /// Name of the requested tool.
    pub tool_name: Option<String>,
    /// Current status of the calls.
    pub status: Option<Status>,
    /// True to list background tasks only.
    pub background: bool,
    /// Earliest creation time, in Unix milliseconds.
    pub since_ms: Option<u64>,
    /// Id of the last call of the previous page.
    pub before: Option<CallId>,
    /// Maximum number of calls on the page, clamped to 1 to 200.
    pub limit: usize,
}

/// A page of calls, newest first.
#[derive(Debug)]
pub struct CallPage {
    /// The calls that match the query.
    pub calls: Vec<Call>,
    /// Cursor for the next page, if there is one.
    pub next_before: Option<CallId>,
}

/// Scope of the events to follow.
#[derive(Debug, Clone)]
pub enum EventQuery {
    /// Events of one call.
    Call(CallId),
    /// Events of all calls of the run with this id.
    Run(String),
    /// Events of all calls of the caller's project.
    Project,
}

/// Events after a position, as they are stored now.
#[derive(Debug, Clone)]
pub struct CallEventPage {
    /// The events that the caller may read.
    pub events: Vec<CallEvent>,
    /// The position up to which no readable event is missing from this page. It passes events that
    /// the caller may not read.
    pub position: u64,
    /// True if no event was stored after this position when the page was read.
    pub is_last: bool,
}

/// A call to wait for, by its ticket or by its id. A ticket saves a lookup.
#[derive(Clone, Copy)]
pub enum CallRef<'a> {
    /// Ticket of an accepted call.
    Ticket(&'a Ticket),
    /// Id of a call, which the engine looks up.
    Id(&'a CallId),
}

impl<'a> From<&'a Ticket> for CallRef<'a> {
    fn from(ticket: &'a Ticket) -> Self {
        Self::Ticket(ticket)
    }
}

impl<'a> From<&'a CallId> for CallRef<'a> {
    fn from(id: &'a CallId) -> Self {
        Self::Id(id)
    }
}

/// The condition that ends a wait.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// The call has ended. Every call has a deadline, so this wait returns.
    Ended,
    /// The call has ended, or this many milliseconds have passed; the engine's limit caps them.
    EndedWithin(u64),
    /// The call's version differs from this one, or `within_ms` have passed.
    ChangedSince {
        /// Version of the call that the waiter has seen.
        version: u64,
        /// Maximum time to wait, in milliseconds; the engine's limit caps it.
        within_ms: u64,
    },
}

impl Until {
    fn is_met(self, call: &Call) -> bool {
        match self {
            Self::Ended | Self::EndedWithin(_) => call.status.is_terminal(),
            Self::ChangedSince { version, .. } => call.version != version,
        }
    }
}

impl Calls {
    /// Returns the last progress that the executor of a call reported.
    pub async fn newest_progress(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Option<EventRecord>, Error> {
        self.call(caller, id).await?;
        let read = self.core.store.last_record(&caller.project, id, EventKind::Progress).await;
        read.map_err(from_store_error)
    }

    /// Returns one call. A call that the caller may not read is answered like an unknown one.
    pub async fn call(&self, caller: &Caller, id: &CallId) -> Result<Arc<Call>, Error> {
        self.dispatcher.find_readable_call(caller, id).await
    }

    /// Returns a ticket for a call, to wait for it.
    pub async fn ticket(&self, caller: &Caller, id: &CallId) -> Result<Ticket, Error> {
        let call = self.call(caller, id).await?;
        let open_call = self.dispatcher.open_calls.get(id);
        let delivery = self.rejoin.take_over_id(id.as_str());
        Ok(Ticket { call, replayed: true, joined: false, open_call, delivery })
    }

    /// Waits for a call and returns it. Reads an open call from memory and any other from the
    /// store.
    ///
    /// # Errors
    /// Refuses a call that the caller may not see, and, for [`Until::Ended`], an engine that shuts
    /// down first.
    pub fn wait<'a>(
        &'a self,
        caller: &'a Caller,
        call: impl Into<CallRef<'a>>,
        until: Until,
    ) -> BoxFuture<'a, Result<Arc<Call>, Error>> {
        self.wait_boxed(caller, call.into(), until)
    }

    /// Boxes the wait, so that it is compiled with this crate's optimization settings, and not
    /// again in the crate that awaits it.
    fn wait_boxed<'a>(
        &'a self,
        caller: &'a Caller,
        call: CallRef<'a>,
        until: Until,
    ) -> BoxFuture<'a, Result<Arc<Call>, Error>> {
        Box::pin(self.wait_until(caller, call, until))
    }

    async fn wait_until(
        &self,
        caller: &Caller,
        call: CallRef<'_>,
        until: Until,
    ) -> Result<Arc<Call>, Error> {
        let (id, open_call) = match call {
            CallRef::Ticket(ticket) if ticket.call.status.is_terminal() => {
                return Ok(ticket.call.clone());
            }
            CallRef::Ticket(ticket) => (&ticket.call.id, ticket.open_call.clone()),
            CallRef::Id(id) => {
                let open_call = self.dispatcher.open_calls.get(id);
                let catalog = self.registry.catalog();
                (id, open_call.filter(|open| catalog.may_read_call(caller, &open.call())))
            }
        };
        let limit_ms = match until {
            Until::Ended => None,
            Until::EndedWithin(ms) | Until::ChangedSince { within_ms: ms, .. } => {
                Some(self.core.now_ms() + ms.min(self.core.limits.max_wait_ms))
            }
        };
        let mut wakes = self.core.bus.listen(Topic::Call(id.clone()));
        loop {
            let call = match &open_call {
                Some(open) => open.call(),
                None => self.call(caller, id).await?,
            };
            let now_ms = self.core.now_ms();
            let timed_out = limit_ms.is_some_and(|limit_ms| now_ms >= limit_ms);
            if until.is_met(&call) || timed_out {
                return Ok(call);
            }
            if self.core.shutdown.is_cancelled() {
                let message = "the engine has been shut down";
                let refused = || Error::refused(Code::Overloaded, message);
                return if limit_ms.is_some() { Ok(call) } else { Err(refused()) };
            }
            let poll_ms = limit_ms.unwrap_or(u64::MAX).min(now_ms + CALL_POLL_MS);
            tokio::select! {
                () = wakes.wait_for_wake() => {}
                () = self.core.clock.sleep_until(poll_ms) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Cancels a call whose requester has disconnected, unless a repeated request joins it within
    /// the tool's grace period. A call that only reads is canceled at once.
    pub async fn cancel_after_disconnect(
        self: &Arc<Self>,
        caller: &Caller,
        ticket: Ticket,
        reason: &str,
    ) -> Result<(), Error> {
        let (call, tool) = (ticket.call.clone(), ticket.call.tool_name.clone());
        let entry = self.registry.catalog().resolve(caller, &tool);
        let grace_ms = match &entry {
            Some(entry) => {
                self.core.policies.resolve(&caller.project, &entry.definition).disconnect_grace_ms
            }
            None => self.core.policies.global.disconnect_grace_ms,
        };
        let is_candidate = call.target.effect != Effect::Read && ticket.delivery.is_some();
        let has_grace = is_candidate && grace_ms > 0;
        // The requester is gone: a repeated request may join from here on.
        drop(ticket);
        if !has_grace {
            return self.cancel(caller, &call.id, Some(reason.to_owned())).await.map(|_| ());
        }
        let (calls, caller, reason) = (self.clone(), caller.clone(), reason.to_owned());
        self.core.tasks.spawn(async move {
            if calls.rejoin.wait_for_requester(call.id.as_str(), grace_ms).await {
                // The call may have ended meanwhile; then there is nothing to cancel.
                let _ = calls.cancel(&caller, &call.id, Some(reason)).await;
            }
        });
        Ok(())
    }

    /// Returns a page of the project's calls that the caller may read, newest first.
    pub async fn calls(&self, caller: &Caller, mut query: CallQuery) -> Result<CallPage, Error> {
        let catalog = self.registry.catalog();
        if catalog.may_read_all_calls(caller) {
            return self.list_project_calls(caller, query).await;
        }
        // The store does not know the rules, so pages are read until one has a readable call. A
        // page may be short; its cursor continues where it ended.
        for _ in 0..MAX_FILTERED_PAGES {
            let mut page = self.list_project_calls(caller, query.clone()).await?;
            page.calls.retain(|call| catalog.may_read_call(caller, call));
            if !page.calls.is_empty() || page.next_before.is_none() {
                return Ok(page);
            }
            query.before = page.next_before;
        }
        Ok(CallPage { calls: Vec::new(), next_before: query.before })
    }

    async fn list_project_calls(
        &self,
        caller: &Caller,
        query: CallQuery,
    ) -> Result<CallPage, Error> {
        let limit = query.limit.clamp(1, 200);
        let filter = CallFilter {
            project: caller.project.clone(),
            run_id: query.run_id,
            tool_name: query.tool_name,
            status: query.status,
            background: query.background,
            since_ms: query.since_ms,
            before: query.before,
            // One more than requested shows whether there is another page.
            limit: limit + 1,
            max_bytes: Some(PAGE_BYTES),
        };
        let mut listed = self.core.store.calls(filter.clone()).await.map_err(from_store_error)?;
        for stored in &listed {
            self.wait_until_visible(&stored.id, |call| call.version >= stored.version).await;
        }
        let mut bytes = 0;
        let fits = listed.iter().take_while(|call| {
            let fits = !filter.is_page_full(bytes);
            bytes += call.estimated_bytes();
            fits
        });
        let count = fits.count().min(limit);
        // A page that ended at the size limit may or may not be the last.
        let has_more = listed.len() > count || filter.is_page_full(bytes);
        listed.truncate(count);
        let before = listed.last().filter(|_| has_more).map(|last| last.id.clone());
        Ok(CallPage { calls: listed, next_before: before })
    }

    /// Returns events after this number, and waits until there is one. Returns an empty list when
    /// there can be no more: the requested call has ended, or the engine is shutting down.
    pub async fn events(
        &self,
        caller: &Caller,
        query: &EventQuery,
        mut after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, Error> {
        let project = caller.project.clone();
        let (scope, topic) = match query {
            EventQuery::Call(id) => {
                (EventScope::Call { project, id: id.clone() }, Topic::Call(id.clone()))
            }
            EventQuery::Run(run_id) => (
                EventScope::Run { project: project.clone(), run_id: run_id.clone() },
                Topic::Run { project, run_id: run_id.clone() },
            ),
            EventQuery::Project => (EventScope::Project(project.clone()), Topic::Project(project)),
        };
        let mut listener = self.core.bus.listen(topic);
        loop {
            let ended = match query {
                EventQuery::Call(id) => self.call(caller, id).await?.status.is_terminal(),
                _ => false,
            };
            let read = self.core.store.events(scope.clone(), after, limit).await;
            let mut events = read.map_err(from_store_error)?;
            let last = events.last().map(|event| event.number);
            self.retain_readable(caller, &mut events, |event| Some(event.call_id.clone())).await?;
            if let Some(last) = last.filter(|_| events.is_empty()) {
                after = last;
                continue;
            }
            for event in events.iter().filter(|event| event.record.kind.is_terminal()) {
                self.wait_until_visible(&event.call_id, |call| call.status.is_terminal()).await;
            }
            if !events.is_empty() || ended || self.core.shutdown.is_cancelled() {
                return Ok(events);
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(self.core.clock.now_ms() + CALL_POLL_MS) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Returns the events of the caller's project after this number, without waiting for one. Reads
    /// at most `limit` events.
    pub async fn read_events(
        &self,
        caller: &Caller,
        after: u64,
        limit: usize,
    ) -> Result<CallEventPage, Error> {
        let scope = EventScope::Project(caller.project.clone());
        // Every event that is stored after this has a greater number.
        let newest = self.newest_event(caller).await?;
        let read = self.core.store.events(scope, after, limit).await;
        let mut events = read.map_err(from_store_error)?;
        let is_last = events.len() < limit;
        let last = events.last().map_or(after, |event| event.number);
        let position = if is_last { last.max(newest) } else { last };
        self.retain_readable(caller, &mut events, |event| Some(event.call_id.clone())).await?;
        for event in events.iter().filter(|event| event.record.kind.is_terminal()) {
            self.wait_until_visible(&event.call_id, |call| call.status.is_terminal()).await;
        }
        Ok(CallEventPage { events, position, is_last })
    }

    /// Returns the number of the newest event, to follow only later ones.
    pub async fn newest_event(&self, caller: &Caller) -> Result<u64, Error> {
        let scope = EventScope::Project(caller.project.clone());
        let newest = self.core.store.last_event_number(scope).await;
        newest.map_err(from_store_error)
    }
}

impl Calls {
    /// Removes the items of calls that the caller may not read. `call_of` returns the call of an
    /// item; an item without one stays.
    pub(crate) async fn retain_readable<T>(
        &self,
        caller: &Caller,
        items: &mut Vec<T>,
        call_of: impl Fn(&T) -> Option<CallId>,
    ) -> Result<(), Error> {
        if self.registry.catalog().may_read_all_calls(caller) {
            return Ok(());
        }
        let mut readable: HashMap<CallId, bool> = HashMap::new();
        let ids: Vec<CallId> = items.iter().filter_map(&call_of).collect();
        for id in ids {
            if readable.contains_key(&id) {
                continue;
            }
            let found = self.call(caller, &id).await;
            if let Err(error) = &found
                && error.code() != Code::NotFound
            {
                return found.map(|_| ());
            }
            readable.insert(id, found.is_ok());
        }
        items.retain(|item| call_of(item).is_none_or(|id| readable.get(&id) == Some(&true)));
        Ok(())
    }

    /// Waits until the state in memory has caught up with the store. A call is stored a moment
    /// before its new state is visible; a caller that saw the stored state must not read an older
    /// one afterwards.
    pub(crate) async fn wait_until_visible(&self, id: &CallId, predicate: impl Fn(&Call) -> bool) {
        if let Some(entry) =
            self.dispatcher.open_calls.get(id).filter(|entry| !predicate(&entry.call()))
        {
            // The lock is held from before the commit until the new state is visible.
            drop(entry.decision_lock.lock().await);
        }
    }
}
