//! Reads, lists and waits for calls, and follows their events.
//!
//! A wait subscribes first and then reads, so it misses no wake-up between the two. It also polls
//! at an interval, so a lost wake-up costs a little time and nothing else.

use std::sync::Arc;

use crate::calls::accept::Ticket;
use crate::calls::open_calls::OpenCall;
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::event::CallEvent;
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::engine::{Core, Engine, from_store_error};
use crate::ports::bus::Topic;
use crate::ports::store::{CallFilter, EventScope};

/// Size at which a page of calls ends, so that a few calls with large results fill a page.
const PAGE_BYTES: usize = 16 << 20;

/// Interval at which a waiter polls the store when no wake-up arrives.
const CALL_POLL_MS: u64 = 2_000;

/// Filter for a list of calls.
#[derive(Debug, Clone, Default)]
pub struct CallQuery {
    pub run_id: Option<String>,
    pub tool_name: Option<String>,
    pub status: Option<Status>,
    /// True to list background tasks only.
    pub background: bool,
    pub since_ms: Option<u64>,
    /// Id of the last call of the previous page.
    pub before: Option<CallId>,
    pub limit: usize,
}

/// A page of calls, newest first.
#[derive(Debug)]
pub struct CallPage {
    pub calls: Vec<Call>,
    /// Cursor for the next page, if there is one.
    pub next_before: Option<CallId>,
}

/// Scope of the events to follow.
#[derive(Debug, Clone)]
pub enum EventQuery {
    Call(CallId),
    Run(String),
    Project,
}

impl Engine {
    /// Returns one call.
    pub async fn call(&self, caller: &Caller, id: &CallId) -> Result<Arc<Call>, Error> {
        self.core.find_project_call(caller, id).await
    }

    /// Returns a ticket for a call, to wait for it.
    pub async fn ticket(&self, caller: &Caller, id: &CallId) -> Result<Ticket, Error> {
        let call = self.call(caller, id).await?;
        Ok(Ticket { open_call: self.core.open_calls.get(id), call, replayed: true })
    }

    /// Waits until a call has ended, at most `wait_ms`, and returns it.
    pub async fn wait(
        &self,
        caller: &Caller,
        id: &CallId,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        let entry = self.core.open_calls.get(id).filter(|e| e.call().project == caller.project);
        self.wait_until_ended(caller, id, entry, wait_ms).await
    }

    /// Waits until the call of a ticket has ended, at most `wait_ms`, and returns it.
    pub async fn wait_for_outcome(
        &self,
        caller: &Caller,
        ticket: &Ticket,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        if ticket.call.status.is_terminal() {
            return Ok(ticket.call.clone());
        }
        self.wait_until_ended(caller, &ticket.call.id, ticket.open_call.clone(), wait_ms).await
    }

    /// Waits until the call of a ticket has a version other than `seen`, at most `wait_ms`.
    pub async fn wait_for_change(
        &self,
        caller: &Caller,
        ticket: &Ticket,
        seen: u64,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        let differs = |call: &Call| call.version != seen;
        self.wait_until(caller, &ticket.call.id, ticket.open_call.clone(), wait_ms, differs).await
    }

    async fn wait_until_ended(
        &self,
        caller: &Caller,
        id: &CallId,
        entry: Option<Arc<OpenCall>>,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        self.wait_until(caller, id, entry, wait_ms, |call| call.status.is_terminal()).await
    }

    /// Waits for a condition. Reads an open call from memory and any other from the store.
    async fn wait_until(
        &self,
        caller: &Caller,
        id: &CallId,
        entry: Option<Arc<OpenCall>>,
        wait_ms: u64,
        enough: impl Fn(&Call) -> bool,
    ) -> Result<Arc<Call>, Error> {
        let inner = &self.core;
        let until_ms = inner.clock.now_ms() + wait_ms.min(inner.limits.max_wait_ms);
        let mut news = inner.bus.listen(Topic::Call(id.clone()));
        loop {
            let call = match &entry {
                Some(entry) => entry.call(),
                None => self.call(caller, id).await?,
            };
            let now_ms = inner.clock.now_ms();
            if enough(&call) || now_ms >= until_ms || inner.shutdown.is_cancelled() {
                return Ok(call);
            }
            tokio::select! {
                () = news.wait_for_wake() => {}
                () = inner.clock.sleep_until(until_ms.min(now_ms + CALL_POLL_MS)) => {}
                () = inner.shutdown.cancelled() => {}
            }
        }
    }

    /// Waits until a call has ended. Every call has a deadline, so this returns.
    pub async fn wait_until_finished(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Arc<Call>, Error> {
        loop {
            let call = self.wait(caller, id, self.core.limits.max_wait_ms).await?;
            if call.status.is_terminal() {
                return Ok(call);
            }
            if self.core.shutdown.is_cancelled() {
                let message = "the engine has been shut down";
                return Err(Error::refused(Code::Overloaded, message));
            }
        }
    }

    /// Returns a page of the project's calls, newest first.
    pub async fn calls(&self, caller: &Caller, query: CallQuery) -> Result<CallPage, Error> {
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
            self.core.wait_until_visible(&stored.id, |call| call.version >= stored.version).await;
        }
        let mut bytes = 0;
        let fits = listed.iter().take_while(|call| {
            let fits = !filter.is_page_full(bytes);
            bytes += call.estimated_bytes();
            fits
        });
        let count = fits.count().min(limit);
        // A page that ended at the size limit may or may not be the last.
        let more = listed.len() > count || filter.is_page_full(bytes);
        listed.truncate(count);
        let before = listed.last().filter(|_| more).map(|last| last.id.clone());
        Ok(CallPage { calls: listed, next_before: before })
    }

    /// Returns events after this number, and waits until there is one. Returns an empty list when
    /// there can be no more: the requested call has ended, or the engine is shutting down.
    pub async fn events(
        &self,
        caller: &Caller,
        query: &EventQuery,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, Error> {
        let inner = &self.core;
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
        let mut news = inner.bus.listen(topic);
        loop {
            let ended = match query {
                EventQuery::Call(id) => self.call(caller, id).await?.status.is_terminal(),
                _ => false,
            };
            let read = inner.store.events(scope.clone(), after, limit).await;
            let events = read.map_err(from_store_error)?;
            for event in events.iter().filter(|event| event.record.kind.is_terminal()) {
                inner.wait_until_visible(&event.call_id, |call| call.status.is_terminal()).await;
            }
            if !events.is_empty() || ended || inner.shutdown.is_cancelled() {
                return Ok(events);
            }
            tokio::select! {
                () = news.wait_for_wake() => {}
                () = inner.clock.sleep_until(inner.clock.now_ms() + CALL_POLL_MS) => {}
                () = inner.shutdown.cancelled() => {}
            }
        }
    }

    /// Returns the number of the newest event, to follow only later ones.
    pub async fn newest_event(&self, caller: &Caller) -> Result<u64, Error> {
        let scope = EventScope::Project(caller.project.clone());
        let newest = self.core.store.last_event_number(scope).await;
        newest.map_err(from_store_error)
    }
}

impl Core {
    /// Waits until the state in memory has caught up with the store. A call is stored a moment
    /// before its new state is visible; a caller that saw the stored state must not read an older
    /// one afterwards.
    pub(crate) async fn wait_until_visible(&self, id: &CallId, is_so: impl Fn(&Call) -> bool) {
        if let Some(entry) = self.open_calls.get(id).filter(|entry| !is_so(&entry.call())) {
            // The lock is held from before the commit until the new state is visible.
            drop(entry.decision_lock.lock().await);
        }
    }
}
