//! Reading calls, waiting for them, listing them, and following their events.
//!
//! A wait listens first and then looks, so a wake between the two is not missed; and it looks
//! again after a while in any case, so a lost wake costs a little time and nothing else.

use std::sync::Arc;

use super::invoke::Ticket;
use super::live::Entry;
use super::{Engine, Inner, unavailable};
use crate::bus::Topic;
use crate::call::{Call, Status};
use crate::caller::Caller;
use crate::event::Event;
use crate::fault::{Code, Error};
use crate::id::CallId;
use crate::store::{CallFilter, EventScope};

/// A page of calls ends with the one that brings it to so many bytes: a few calls with large
/// results are as much as one can want at once.
const PAGE_BYTES: usize = 16 << 20;

/// How often a waiter looks without having been woken.
const LOOK_AGAIN_MS: u64 = 2_000;

/// Which calls to list.
#[derive(Debug, Clone, Default)]
pub struct CallQuery {
    pub run_id: Option<String>,
    pub tool_name: Option<String>,
    pub status: Option<Status>,
    /// Only background tasks.
    pub background: bool,
    pub since_ms: Option<u64>,
    /// The last call of the page before.
    pub before: Option<CallId>,
    pub limit: usize,
}

/// A page of calls, newest first.
#[derive(Debug)]
pub struct CallPage {
    pub calls: Vec<Call>,
    /// For the next page, if there is one.
    pub before: Option<CallId>,
}

/// Whose events to follow.
#[derive(Debug, Clone)]
pub enum EventQuery {
    Call(CallId),
    Run(String),
    Project,
}

impl Engine {
    /// One call.
    pub async fn call(&self, caller: &Caller, id: &CallId) -> Result<Arc<Call>, Error> {
        self.inner.own_call(caller, id).await
    }

    /// A call as its ticket, to wait for it.
    pub async fn ticket(&self, caller: &Caller, id: &CallId) -> Result<Ticket, Error> {
        let call = self.call(caller, id).await?;
        Ok(Ticket { entry: self.inner.live.get(id), call, replayed: true })
    }

    /// One call, once it has ended or `wait_ms` have passed, whichever is first.
    pub async fn wait(
        &self,
        caller: &Caller,
        id: &CallId,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        let entry = self.inner.live.get(id).filter(|e| e.call().project == caller.project);
        self.wait_for(caller, id, entry, wait_ms).await
    }

    /// The call of a ticket, once it has ended or `wait_ms` have passed, whichever is first.
    pub async fn outcome(
        &self,
        caller: &Caller,
        ticket: &Ticket,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        if ticket.call.status.is_terminal() {
            return Ok(ticket.call.clone());
        }
        self.wait_for(caller, &ticket.call.id, ticket.entry.clone(), wait_ms).await
    }

    /// The call of a ticket, once it is not as it was at this version, or `wait_ms` have passed.
    pub async fn news(
        &self,
        caller: &Caller,
        ticket: &Ticket,
        seen: u64,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        let differs = |call: &Call| call.version != seen;
        self.wait_until(caller, &ticket.call.id, ticket.entry.clone(), wait_ms, differs).await
    }

    async fn wait_for(
        &self,
        caller: &Caller,
        id: &CallId,
        entry: Option<Arc<Entry>>,
        wait_ms: u64,
    ) -> Result<Arc<Call>, Error> {
        self.wait_until(caller, id, entry, wait_ms, |call| call.status.is_terminal()).await
    }

    /// A live call is watched where its states are shown; any other is looked up in the store.
    async fn wait_until(
        &self,
        caller: &Caller,
        id: &CallId,
        entry: Option<Arc<Entry>>,
        wait_ms: u64,
        enough: impl Fn(&Call) -> bool,
    ) -> Result<Arc<Call>, Error> {
        let inner = &self.inner;
        let until_ms = inner.clock.now_ms() + wait_ms.min(inner.limits.max_wait_ms);
        let mut news = inner.bus.listen(Topic::Call(id.clone()));
        loop {
            let call = match &entry {
                Some(entry) => entry.call(),
                None => self.call(caller, id).await?,
            };
            let now_ms = inner.clock.now_ms();
            if enough(&call) || now_ms >= until_ms || inner.stopping.is_cancelled() {
                return Ok(call);
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(until_ms.min(now_ms + LOOK_AGAIN_MS)) => {}
                () = inner.stopping.cancelled() => {}
            }
        }
    }

    /// One call, once it has ended. Every call has a deadline, so this returns.
    pub async fn finished(&self, caller: &Caller, id: &CallId) -> Result<Arc<Call>, Error> {
        loop {
            let call = self.wait(caller, id, self.inner.limits.max_wait_ms).await?;
            if call.status.is_terminal() {
                return Ok(call);
            }
            if self.inner.stopping.is_cancelled() {
                let message = "the engine has been shut down";
                return Err(Error::refused(Code::Overloaded, message));
            }
        }
    }

    /// A page of the project's calls, newest first.
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
            // One more than asked tells whether there is another page.
            limit: limit + 1,
            enough_bytes: Some(PAGE_BYTES),
        };
        let mut listed = self.inner.store.calls(filter.clone()).await.map_err(unavailable)?;
        for stored in &listed {
            self.inner.until_shown(&stored.id, |call| call.version >= stored.version).await;
        }
        let mut bytes = 0;
        let fits = listed.iter().take_while(|call| {
            let fits = !filter.is_enough(bytes);
            bytes += call.bytes();
            fits
        });
        let count = fits.count().min(limit);
        // Of a page that is full of bytes nobody knows whether it is the last.
        let more = listed.len() > count || filter.is_enough(bytes);
        listed.truncate(count);
        let before = listed.last().filter(|_| more).map(|last| last.id.clone());
        Ok(CallPage { calls: listed, before })
    }

    /// Events after this number, waiting until there are some. Empty when there can be no more:
    /// the one call asked about has ended, or the engine is being shut down.
    pub async fn events(
        &self,
        caller: &Caller,
        query: &EventQuery,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, Error> {
        let inner = &self.inner;
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
            let events = read.map_err(unavailable)?;
            for event in events.iter().filter(|event| event.record.kind.is_terminal()) {
                inner.until_shown(&event.call_id, |call| call.status.is_terminal()).await;
            }
            if !events.is_empty() || ended || inner.stopping.is_cancelled() {
                return Ok(events);
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(inner.clock.now_ms() + LOOK_AGAIN_MS) => {}
                () = inner.stopping.cancelled() => {}
            }
        }
    }

    /// The number of the newest event, to follow only what comes from now on.
    pub async fn newest_event(&self, caller: &Caller) -> Result<u64, Error> {
        let scope = EventScope::Project(caller.project.clone());
        let newest = self.inner.store.newest_event(scope).await;
        newest.map_err(unavailable)
    }
}

impl Inner {
    /// Returns when a call is shown as it is stored. It is stored a moment before: who was told of
    /// what is stored must not find the call as it was, afterwards.
    pub(crate) async fn until_shown(&self, id: &CallId, is_so: impl Fn(&Call) -> bool) {
        if let Some(entry) = self.live.get(id).filter(|entry| !is_so(&entry.call())) {
            // Whoever decides has this from before the commit until the new state is shown.
            drop(entry.deciding.lock().await);
        }
    }
}
