//! Finds the call that a log message of an upstream belongs to. A message names no call, so it
//! belongs to one only if the upstream does nothing else for a caller that could have caused it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{ClientRequest, RequestId};
use tokio::time::Instant;

/// Time to wait for abandoned calls to end before an elicitation counts as possibly theirs; after
/// it no log message counts as theirs. Many upstreams send nothing more for a canceled request.
pub(super) const ABANDONED_CALL_GRACE: Duration = Duration::from_secs(2);

/// Time for which a request counts whose end nothing but its response shows. Longer than Toolcrib
/// waits for the answer to a read.
const MAX_UNANSWERED: Duration = Duration::from_secs(30);

/// Something that an upstream does for a caller.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Work {
    Request(RequestId),
    /// A task, which goes on without a request. Identified by a number of its own.
    Task(u64),
}

struct OutstandingWork {
    is_call: bool,
    /// `None` until its end is known or it is given up.
    counts_until: Option<Instant>,
}

#[derive(Default)]
struct Outstanding {
    work: HashMap<Work, OutstandingWork>,
    tasks_begun: u64,
}

/// The work that an upstream does for callers over one connection.
#[derive(Clone, Default)]
pub(super) struct LogOwner(Arc<Mutex<Outstanding>>);

impl LogOwner {
    /// Records a request before it is sent.
    pub(super) fn record_request(&self, id: &RequestId, request: &ClientRequest) {
        if !is_for_caller(request) {
            return;
        }
        let is_call = matches!(request, ClientRequest::CallToolRequest(_));
        let counts_until = Some(Instant::now() + MAX_UNANSWERED);
        let work = OutstandingWork { is_call, counts_until };
        self.0.lock().work.insert(Work::Request(id.clone()), work);
    }

    /// Records that a guard of the call will record its end.
    pub(super) fn record_guarded(&self, id: &RequestId) {
        if let Some(work) = self.0.lock().work.get_mut(&Work::Request(id.clone())) {
            work.counts_until = None;
        }
    }

    /// Records that the upstream has ended a request.
    pub(super) fn record_end(&self, id: &RequestId) {
        self.0.lock().work.remove(&Work::Request(id.clone()));
    }

    /// Records that the caller no longer waits for a request. The upstream may work on it for a
    /// while.
    pub(super) fn record_given_up(&self, id: &RequestId) {
        self.give_up(&Work::Request(id.clone()));
    }

    /// Begins to count a task, until the returned guard is dropped.
    pub(super) fn begin_task(&self) -> UpstreamTaskGuard {
        let mut outstanding = self.0.lock();
        outstanding.tasks_begun += 1;
        let task = Work::Task(outstanding.tasks_begun);
        let work = OutstandingWork { is_call: false, counts_until: None };
        outstanding.work.insert(task.clone(), work);
        UpstreamTaskGuard { owner: self.clone(), task, ended: false }
    }

    /// Returns the call that a message belongs to: the only work for a caller.
    pub(super) fn find(&self) -> Option<RequestId> {
        self.find_at(Instant::now())
    }

    fn find_at(&self, now: Instant) -> Option<RequestId> {
        let mut outstanding = self.0.lock();
        outstanding.work.retain(|_, work| work.counts_until.is_none_or(|until| until > now));
        let mut all = outstanding.work.iter();
        match (all.next(), all.next()) {
            (Some((Work::Request(id), work)), None) if work.is_call => Some(id.clone()),
            _ => None,
        }
    }

    fn give_up(&self, work: &Work) {
        if let Some(work) = self.0.lock().work.get_mut(work) {
            work.counts_until = Some(Instant::now() + ABANDONED_CALL_GRACE);
        }
    }
}

/// Counts a task of an upstream. Dropping it before the task has ended gives the task up.
pub struct UpstreamTaskGuard {
    owner: LogOwner,
    task: Work,
    ended: bool,
}

impl UpstreamTaskGuard {
    /// Records that the upstream has ended the task, or waits for answers.
    pub fn mark_ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for UpstreamTaskGuard {
    fn drop(&mut self) {
        match self.ended {
            true => drop(self.owner.0.lock().work.remove(&self.task)),
            false => self.owner.give_up(&self.task),
        }
    }
}

/// Returns true for requests on behalf of a caller. The others are the connection's own.
fn is_for_caller(request: &ClientRequest) -> bool {
    !matches!(
        request,
        ClientRequest::PingRequest(_)
            | ClientRequest::InitializeRequest(_)
            | ClientRequest::DiscoverRequest(_)
            | ClientRequest::SetLevelRequest(_)
            | ClientRequest::SubscriptionsListenRequest(_)
            | ClientRequest::ListToolsRequest(_)
    )
}

#[cfg(test)]
mod tests {
    use rmcp::model::{
        CallToolRequest, CallToolRequestParams, NumberOrString, PingRequest, ReadResourceRequest,
        ReadResourceRequestParams,
    };

    use super::*;

    fn begin(owner: &LogOwner, n: i64, request: impl Into<ClientRequest>) -> RequestId {
        let id = NumberOrString::Number(n);
        owner.record_request(&id, &request.into());
        id
    }

    fn begin_call(owner: &LogOwner, n: i64) -> RequestId {
        begin(owner, n, CallToolRequest::new(CallToolRequestParams::new("work")))
    }

    #[test]
    fn a_message_belongs_to_a_call_only_if_no_other_caller_has_work_there() {
        let owner = LogOwner::default();
        let call = begin_call(&owner, 1);
        owner.record_guarded(&call);
        assert_eq!(owner.find(), Some(call.clone()));
        begin(&owner, 2, PingRequest::default());
        assert_eq!(owner.find(), Some(call.clone()), "the connection's own request");
        // A read of another caller.
        let read = ReadResourceRequest::new(ReadResourceRequestParams::new("file:///x"));
        let read = begin(&owner, 3, read);
        assert_eq!(owner.find(), None);
        owner.record_end(&read);
        assert_eq!(owner.find(), Some(call.clone()));
        // A task of another caller.
        let mut task = owner.begin_task();
        assert_eq!(owner.find(), None);
        task.mark_ended();
        drop(task);
        assert_eq!(owner.find(), Some(call.clone()));
        // A call of another caller that was sent and is not registered.
        let other = begin_call(&owner, 4);
        assert_eq!(owner.find(), None);
        owner.record_end(&call);
        assert_eq!(owner.find(), Some(other), "its messages wait for its registration");
    }

    #[test]
    fn work_that_was_given_up_counts_for_a_while() {
        let owner = LogOwner::default();
        let abandoned = begin_call(&owner, 1);
        owner.record_guarded(&abandoned);
        owner.record_given_up(&abandoned);
        drop(owner.begin_task());
        let call = begin_call(&owner, 2);
        owner.record_guarded(&call);
        assert_eq!(owner.find(), None, "the message may be one of the earlier call or task");
        let later = Instant::now() + ABANDONED_CALL_GRACE;
        assert_eq!(owner.find_at(later), Some(call.clone()));
        // A read that the upstream never answers.
        begin(&owner, 3, ReadResourceRequest::new(ReadResourceRequestParams::new("file:///x")));
        assert_eq!(owner.find_at(later), None);
        assert_eq!(owner.find_at(later + MAX_UNANSWERED), Some(call));
    }
}
