//! Handles the messages that an upstream sends on its own: progress, log messages, change
//! notifications and elicitations, including the attribution of each elicitation to a call.

// Logging belongs to the legacy revisions, whose servers still use it.
#![allow(deprecated)]
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{
    ClientCapabilities, ClientConfig, ClientRequest, ElicitRequest, ElicitRequestParams,
    ElicitResult, ElicitationAction, ElicitationCapability, FormElicitationCapability,
    Implementation, InputRequest, JsonObject, LoggingLevel, LoggingMessageNotificationParam,
    ProgressNotificationParam, ProgressToken, ProtocolVersion, RequestId,
    ResourceUpdatedNotificationParam, ServerNotification, UrlElicitationCapability,
};
use rmcp::service::{InboundStreamOrigin, NotificationContext, RequestContext};
use rmcp::{ClientHandler, ErrorData, RoleClient};
use serde_json::Value;
use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use tokio::time::Instant;
use toolcrib::AttemptProgress;
use toolcrib::ports::source::ProgressSink;

use super::log_messages::{UpstreamLogLevel, log_to_progress};
use super::log_owner::{ABANDONED_CALL_GRACE, LogOwner, UpstreamTaskGuard};

/// Maximum time that an elicitation may arrive before its call is registered.
const MAX_EARLY_ARRIVAL: Duration = Duration::from_secs(5);

/// Maximum number of abandoned calls that are remembered by id.
const MAX_REMEMBERED_ABANDONED: usize = 256;

/// Maximum number of log messages that are kept until their call is registered.
const MAX_EARLY_LOGS: usize = 64;

/// A change at an upstream that does not concern its tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpstreamChange {
    ResourceList,
    PromptList,
    ResourceContent(String),
    /// A log message, as the upstream wrote it.
    Log(Value),
}

/// An elicitation that waits for its answer.
pub struct UpstreamElicitation {
    pub request: Value,
    pub answer: oneshot::Sender<Value>,
}

/// An event for a call in flight.
pub enum UpstreamCallEvent {
    Elicitation(UpstreamElicitation),
    /// An elicitation arrived that may belong to this call or to another one.
    AmbiguousElicitation,
}

/// A call in flight.
struct InFlightUpstreamCall {
    progress: ProgressSink,
    /// The level of log messages that the request asks for.
    log_level: Option<LoggingLevel>,
    events: mpsc::UnboundedSender<UpstreamCallEvent>,
    /// `true` while it waits for an answer, and so cannot have sent another elicitation.
    awaits_answer: bool,
    /// `true` if it was notified that elicitations cannot be attributed, and is being abandoned.
    is_marked_ambiguous: bool,
    /// `true` if the upstream has responded.
    answered: bool,
}

/// Calls that Toolcrib gave up and the upstream has not ended: they may still send elicitations.
#[derive(Default)]
struct AbandonedCalls {
    ids: HashSet<RequestId>,
    /// Number of further calls whose ids are not stored.
    untracked: usize,
    /// `true` if an elicitation arrived that may be theirs.
    may_have_asked: bool,
}

impl AbandonedCalls {
    fn count(&self) -> usize {
        self.ids.len() + self.untracked
    }
}

/// Counters for attributing elicitations to calls.
#[derive(Default)]
struct AttributionCounts {
    /// Calls that are being sent.
    sending: usize,
    /// Elicitations that are not attributed yet.
    unattributed: usize,
}

impl InFlightUpstreamCall {
    /// Returns true if the request asks for messages of this level.
    fn wants_log(&self, level: LoggingLevel) -> bool {
        self.log_level.is_some_and(|least| level as u8 >= least as u8)
    }
}

/// Handles the messages of one connection.
pub struct McpClientHandler {
    /// Name of the upstream.
    name: String,
    /// The level of the upstream's log messages.
    pub log_level: UpstreamLogLevel,
    /// Log messages of calls that are not registered yet.
    early_logs: Mutex<VecDeque<(RequestId, LoggingMessageNotificationParam)>>,
    log_owner: LogOwner,
    calls: Mutex<HashMap<RequestId, InFlightUpstreamCall>>,
    abandoned: Mutex<AbandonedCalls>,
    progress_tokens: Mutex<HashMap<ProgressToken, RequestId>>,
    attribution: Mutex<AttributionCounts>,
    /// Notified when the set of calls in flight, or their state, changes.
    calls_changed: Notify,
    /// Notified when the tool list has changed.
    pub tools_changed: Notify,
    pub changes: broadcast::Sender<UpstreamChange>,
}

impl McpClientHandler {
    pub fn new(name: &str, changes: broadcast::Sender<UpstreamChange>) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            log_level: UpstreamLogLevel::default(),
            early_logs: Mutex::default(),
            log_owner: LogOwner::default(),
            calls: Mutex::default(),
            abandoned: Mutex::default(),
            progress_tokens: Mutex::default(),
            attribution: Mutex::default(),
            calls_changed: Notify::new(),
            tools_changed: Notify::new(),
            changes,
        })
    }

    /// Registers a call in flight, until the returned guard is dropped.
    pub fn register_call(
        self: &Arc<Self>,
        id: RequestId,
        token: ProgressToken,
        progress: ProgressSink,
        log_level: Option<LoggingLevel>,
    ) -> (UpstreamCallGuard, mpsc::UnboundedReceiver<UpstreamCallEvent>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let call = InFlightUpstreamCall {
            progress: progress.clone(),
            log_level,
            events: sender,
            awaits_answer: false,
            is_marked_ambiguous: false,
            answered: false,
        };
        let wanted_logs = self.insert_call(&id, call);
        self.progress_tokens.lock().insert(token.clone(), id.clone());
        self.calls_changed.notify_waiters();
        for message in &wanted_logs {
            progress(log_to_progress(&self.name, message));
        }
        (UpstreamCallGuard { handler: self.clone(), id, token, ended: false }, receiver)
    }

    /// Inserts a call. Returns the messages that arrived before, of the levels that it asks for.
    fn insert_call(
        &self,
        id: &RequestId,
        call: InFlightUpstreamCall,
    ) -> Vec<LoggingMessageNotificationParam> {
        let mut calls = self.calls.lock();
        self.log_owner.record_guarded(id);
        let mut early_logs = self.early_logs.lock();
        let (of_call, of_others): (VecDeque<_>, VecDeque<_>) =
            early_logs.drain(..).partition(|(owner, _)| owner == id);
        *early_logs = of_others;
        let messages = of_call.into_iter().map(|(_, message)| message);
        let wanted = messages.filter(|message| call.wants_log(message.level)).collect();
        calls.insert(id.clone(), call);
        wanted
    }

    /// Records a request before it is sent.
    pub fn record_request(&self, id: &RequestId, request: &ClientRequest) {
        self.log_owner.record_request(id, request);
    }

    /// Records that sending a request failed. It may have arrived nevertheless.
    pub fn record_send_failure(&self, id: &RequestId) {
        self.log_owner.record_given_up(id);
    }

    /// Counts a task of the upstream, whose log messages are not those of a call in flight.
    pub fn begin_task(&self) -> UpstreamTaskGuard {
        self.log_owner.begin_task()
    }

    /// Reports a log message to the call that it belongs to, if that asks for it, before the
    /// response to the call is read. With other work at the upstream the message might be another
    /// caller's, and is reported to none. Other notifications are handled in their own time.
    pub fn report_log(&self, notification: &ServerNotification) {
        let ServerNotification::LoggingMessageNotification(log) = notification else { return };
        let message = &log.params;
        let Some(id) = self.log_owner.find() else { return };
        let progress = {
            let calls = self.calls.lock();
            let Some(call) = calls.get(&id) else {
                let mut early_logs = self.early_logs.lock();
                if early_logs.len() == MAX_EARLY_LOGS {
                    early_logs.pop_front();
                }
                early_logs.push_back((id, message.clone()));
                return;
            };
            call.wants_log(message.level).then(|| call.progress.clone())
        };
        if let Some(progress) = progress {
            progress(log_to_progress(&self.name, message));
        }
    }

    /// Records that the upstream has responded to a request. `continues` if it responded with a
    /// task, which goes on.
    pub fn record_response(&self, id: &RequestId, continues: bool) {
        match continues {
            // Counts until the task itself does.
            true => self.log_owner.record_given_up(id),
            false => self.log_owner.record_end(id),
        }
        if let Some(call) = self.calls.lock().get_mut(id) {
            call.answered = true;
        }
        if self.abandoned.lock().ids.remove(id) {
            self.calls_changed.notify_waiters();
        }
    }

    /// Waits until an elicitation arrived that may belong to an abandoned call, and no other call
    /// is in flight. From then on only a new connection can attribute elicitations again.
    pub async fn wait_until_unattributable(&self) {
        loop {
            let changed = self.calls_changed.notified();
            if self.abandoned.lock().may_have_asked && self.calls.lock().is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Waits until no call is in flight.
    pub async fn wait_until_idle(&self) {
        loop {
            let changed = self.calls_changed.notified();
            if self.calls.lock().is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Acquires a permit to send a call. While it is held, the set of calls in flight counts as
    /// incomplete. No permit is issued while an elicitation is being attributed: the new call would
    /// be one more candidate.
    pub async fn acquire_send_permit(self: &Arc<Self>) -> SendPermit {
        loop {
            let changed = self.calls_changed.notified();
            {
                let mut turns = self.attribution.lock();
                if turns.unattributed == 0 {
                    turns.sending += 1;
                    return SendPermit(self.clone());
                }
            }
            changed.await;
        }
    }

    /// Finds the call that an elicitation belongs to. Returns `None` if that is not known yet.
    ///
    /// It is the call on whose stream the elicitation arrived. Without streams the protocol does
    /// not identify the call, so it must be the only candidate. A call that waits for an answer is
    /// no candidate, unless it is the only call. The elicitation waits until one candidate is left;
    /// abandoned calls count as candidates. If there are as many unattributed elicitations as
    /// candidates, attribution is impossible, and none of the elicitations is delivered: each might
    /// be for another caller.
    fn find_owner(&self, origin: Option<&InboundStreamOrigin>) -> Option<ElicitationOwner> {
        let mut calls = self.calls.lock();
        if let Some(InboundStreamOrigin::OutboundRequest(id)) = origin {
            let call = calls.get_mut(id)?;
            call.awaits_answer = true;
            return Some(ElicitationOwner::Known(id.clone(), call.events.clone()));
        }
        let unclear = {
            let turns = self.attribution.lock();
            if turns.sending > 0 {
                return None;
            }
            turns.unattributed
        };
        let abandoned_count = self.abandoned.lock().count();
        let all = calls.len() + abandoned_count;
        let able = calls.iter_mut().filter(|(_, call)| all == 1 || !call.awaits_answer);
        let mut able: Vec<_> = able.collect();
        match (able.as_mut_slice(), abandoned_count) {
            ([], 0) if all == 0 => None,
            ([(id, call)], 0) if !call.is_marked_ambiguous => {
                call.awaits_answer = true;
                Some(ElicitationOwner::Known((*id).clone(), call.events.clone()))
            }
            // The elicitation belongs to an abandoned call, or to one that is being abandoned, so
            // no caller can answer it.
            (rest, _) if rest.iter().all(|(_, call)| call.is_marked_ambiguous) => {
                Some(ElicitationOwner::Unknown)
            }
            (several, _) if unclear < several.len() + abandoned_count => None,
            (several, _) => {
                notify_ambiguous(several.iter_mut().map(|(_, call)| &mut **call));
                Some(ElicitationOwner::Unknown)
            }
        }
    }

    /// Marks an elicitation as not attributable because some calls were abandoned.
    fn mark_unattributable(&self) -> ElicitationOwner {
        self.abandoned.lock().may_have_asked = true;
        notify_ambiguous(self.calls.lock().values_mut().filter(|call| !call.awaits_answer));
        ElicitationOwner::Unknown
    }

    async fn deliver_elicitation(
        &self,
        elicitation: Value,
        origin: Option<InboundStreamOrigin>,
    ) -> Option<Value> {
        let is_attributed = matches!(origin, Some(InboundStreamOrigin::OutboundRequest(_)));
        let unclear = (!is_attributed).then(|| UnattributedElicitation::new(self));
        let began = Instant::now();
        let finding = async {
            loop {
                let changed = self.calls_changed.notified();
                if let Some(owner) = self.find_owner(origin.as_ref()) {
                    return owner;
                }
                let has_abandoned = !is_attributed && self.abandoned.lock().count() > 0;
                // The elicitation may have arrived before its call was registered here.
                if is_attributed || self.calls.lock().is_empty() && !has_abandoned {
                    if tokio::time::timeout(MAX_EARLY_ARRIVAL, changed).await.is_err() {
                        return ElicitationOwner::Unknown;
                    }
                } else if has_abandoned {
                    if tokio::time::timeout_at(began + ABANDONED_CALL_GRACE, changed).await.is_err()
                    {
                        return self.mark_unattributable();
                    }
                } else {
                    changed.await;
                }
            }
        };
        let owner = finding.await;
        drop(unclear);
        let ElicitationOwner::Known(id, answer_sender) = owner else { return None };
        let (answer, answered) = oneshot::channel();
        answer_sender
            .send(UpstreamCallEvent::Elicitation(UpstreamElicitation {
                request: elicitation,
                answer,
            }))
            .ok()?;
        let answer = answered.await.ok();
        if let Some(call) = self.calls.lock().get_mut(&id) {
            call.awaits_answer = false;
        }
        self.calls_changed.notify_waiters();
        answer
    }
}

fn notify_ambiguous<'a>(calls: impl Iterator<Item = &'a mut InFlightUpstreamCall>) {
    for call in calls {
        call.is_marked_ambiguous = true;
        let _ = call.events.send(UpstreamCallEvent::AmbiguousElicitation);
    }
}

/// The call that an elicitation belongs to.
enum ElicitationOwner {
    Known(RequestId, mpsc::UnboundedSender<UpstreamCallEvent>),
    Unknown,
}

/// An elicitation that is not attributed yet.
struct UnattributedElicitation<'a>(&'a McpClientHandler);

impl<'a> UnattributedElicitation<'a> {
    fn new(handler: &'a McpClientHandler) -> Self {
        handler.attribution.lock().unattributed += 1;
        // Wakes the elicitations that wait, so that they count one more unattributed one.
        handler.calls_changed.notify_waiters();
        Self(handler)
    }
}

impl Drop for UnattributedElicitation<'_> {
    fn drop(&mut self) {
        self.0.attribution.lock().unattributed -= 1;
        self.0.calls_changed.notify_waiters();
    }
}

/// A permit to send a call.
pub struct SendPermit(Arc<McpClientHandler>);

impl Drop for SendPermit {
    fn drop(&mut self) {
        self.0.attribution.lock().sending -= 1;
        self.0.calls_changed.notify_waiters();
    }
}

/// Keeps a call registered. Dropping it before the call has ended marks the call as abandoned.
pub struct UpstreamCallGuard {
    handler: Arc<McpClientHandler>,
    id: RequestId,
    token: ProgressToken,
    /// `true` if the upstream is known to have ended the call.
    ended: bool,
}

impl UpstreamCallGuard {
    /// Records that the upstream has ended the call.
    pub fn mark_ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for UpstreamCallGuard {
    fn drop(&mut self) {
        let removed = self.handler.calls.lock().remove(&self.id);
        let is_answered = self.ended || removed.is_some_and(|call| call.answered);
        if is_answered {
            self.handler.log_owner.record_end(&self.id);
        } else {
            self.handler.log_owner.record_given_up(&self.id);
            let mut abandoned = self.handler.abandoned.lock();
            match abandoned.ids.len() < MAX_REMEMBERED_ABANDONED {
                true => drop(abandoned.ids.insert(self.id.clone())),
                false => abandoned.untracked += 1,
            }
        }
        self.handler.progress_tokens.lock().remove(&self.token);
        self.handler.calls_changed.notify_waiters();
    }
}

/// Converts a progress notification to Toolcrib's form.
pub(super) fn to_progress(notification: ProgressNotificationParam) -> AttemptProgress {
    let total = notification.total.filter(|total| *total > 0.0);
    let percent = total.map(|total| (notification.progress / total * 100.0).clamp(0.0, 100.0));
    let mut data = serde_json::Map::new();
    data.insert("progress".to_owned(), notification.progress.into());
    if let Some(total) = notification.total {
        data.insert("total".to_owned(), total.into());
    }
    AttemptProgress { percent, message: notification.message, data: Some(Value::Object(data)) }
}

/// Returns Toolcrib's identity as an MCP client: it supports elicitation and tasks, and
/// expects the names of another Toolcrib with dots.
pub fn client_config() -> ClientConfig {
    let elicitation = ElicitationCapability::new()
        .with_form(FormElicitationCapability::default())
        .with_url(UrlElicitationCapability::default());
    let mut capabilities = ClientCapabilities::builder().enable_tasks().build();
    capabilities.elicitation = Some(elicitation);
    // The rules of this Toolcrib name the tools that another Toolcrib offers.
    let dotted_names = [("toolcrib/dotted_names".to_owned(), JsonObject::new())];
    capabilities.experimental = Some(dotted_names.into());
    let version = env!("CARGO_PKG_VERSION");
    let mut config = ClientConfig::new(capabilities, Implementation::new("toolcrib", version));
    config.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
    config
}

impl ClientHandler for McpClientHandler {
    fn get_info(&self) -> ClientConfig {
        client_config()
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        let origin = context.extensions.get::<InboundStreamOrigin>().cloned();
        let question = InputRequest::Elicitation(ElicitRequest::new(request));
        let elicitation = serde_json::to_value(question)
            .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
        let answer = tokio::select! {
            answer = self.deliver_elicitation(elicitation, origin) => answer,
            () = context.ct.cancelled() => None,
        };
        let answer = answer.and_then(|answer| serde_json::from_value(answer).ok());
        Ok(answer.unwrap_or_else(|| ElicitResult::new(ElicitationAction::Cancel)))
    }

    async fn on_progress(
        &self,
        params: ProgressNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let sink = {
            let id = self.progress_tokens.lock().get(&params.progress_token).cloned();
            id.and_then(|id| self.calls.lock().get(&id).map(|call| call.progress.clone()))
        };
        let Some(sink) = sink else { return };
        sink(to_progress(params));
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        self.tools_changed.notify_one();
    }

    async fn on_resource_list_changed(&self, _context: NotificationContext<RoleClient>) {
        // Sending fails if there is no subscriber.
        let _ = self.changes.send(UpstreamChange::ResourceList);
    }

    async fn on_prompt_list_changed(&self, _context: NotificationContext<RoleClient>) {
        let _ = self.changes.send(UpstreamChange::PromptList);
    }

    async fn on_logging_message(
        &self,
        params: LoggingMessageNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        if let Ok(message) = serde_json::to_value(params) {
            let _ = self.changes.send(UpstreamChange::Log(message));
        }
    }

    async fn on_resource_updated(
        &self,
        params: ResourceUpdatedNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let _ = self.changes.send(UpstreamChange::ResourceContent(params.uri));
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, poll};
    use rmcp::model::{
        CallToolRequest, CallToolRequestParams, NumberOrString, ReadResourceRequest,
        ReadResourceRequestParams,
    };
    use serde_json::json;

    use super::*;

    fn register_numbered_call(
        handler: &Arc<McpClientHandler>,
        n: i64,
    ) -> (UpstreamCallGuard, mpsc::UnboundedReceiver<UpstreamCallEvent>) {
        let id = NumberOrString::Number(n);
        handler.register_call(id.clone(), ProgressToken(id), Arc::new(|_| {}), None)
    }

    #[tokio::test]
    async fn no_call_is_sent_while_an_elicitation_is_ambiguous() {
        let handler = McpClientHandler::new("x", broadcast::channel(1).0);
        let (mut first_call, _) = register_numbered_call(&handler, 1);
        let (_second_call, mut second_events) = register_numbered_call(&handler, 2);
        let mut delivery = Box::pin(handler.deliver_elicitation(json!("who?"), None));
        assert!(poll!(&mut delivery).is_pending());
        let mut permit = Box::pin(handler.acquire_send_permit());
        assert!(poll!(&mut permit).is_pending(), "another call would add to the ambiguity");
        assert!(second_events.try_recv().is_err(), "either call may have caused it");
        // The first call has its result, so the elicitation belongs to the other.
        first_call.mark_ended();
        drop(first_call);
        assert!(poll!(&mut delivery).is_pending());
        let Ok(UpstreamCallEvent::Elicitation(question)) = second_events.try_recv() else {
            panic!("the elicitation belongs to this call")
        };
        assert!(permit.now_or_never().is_some(), "calls can be sent again");
        question.answer.send(json!("Ada")).unwrap();
        assert_eq!(delivery.await, Some(json!("Ada")));
    }
    #[tokio::test]
    async fn an_elicitation_of_an_abandoned_call_goes_to_no_other_call() {
        let handler = McpClientHandler::new("x", broadcast::channel(1).0);
        let (canceled, _) = register_numbered_call(&handler, 1);
        drop(canceled);
        assert_eq!(
            handler.deliver_elicitation(json!("who?"), None).await,
            None,
            "no call can answer it"
        );
        let (second_call, mut second_events) = register_numbered_call(&handler, 2);
        let mut delivery = Box::pin(handler.deliver_elicitation(json!("who?"), None));
        assert!(poll!(&mut delivery).is_pending());
        assert!(second_events.try_recv().is_err(), "the abandoned call may have caused it");
        // The upstream ends the abandoned call after all, so the elicitation belongs to the other.
        handler.record_response(&NumberOrString::Number(1), false);
        assert!(poll!(&mut delivery).is_pending());
        let Ok(UpstreamCallEvent::Elicitation(question)) = second_events.try_recv() else {
            panic!("the elicitation belongs to this call")
        };
        question.answer.send(json!("Ada")).unwrap();
        assert_eq!(delivery.await, Some(json!("Ada")));
        // An abandoned call that never ends makes attribution impossible, and the call is notified.
        let (canceled, _) = register_numbered_call(&handler, 3);
        drop(canceled);
        assert_eq!(handler.deliver_elicitation(json!("who?"), None).await, None);
        assert!(matches!(second_events.try_recv(), Ok(UpstreamCallEvent::AmbiguousElicitation)));
        assert!(
            poll!(Box::pin(handler.wait_until_unattributable())).is_pending(),
            "a call is still in flight"
        );
        drop(second_call);
        assert!(handler.wait_until_unattributable().now_or_never().is_some());
    }

    #[tokio::test]
    async fn the_record_of_abandoned_calls_is_bounded() {
        let handler = McpClientHandler::new("x", broadcast::channel(1).0);
        for n in 0..MAX_REMEMBERED_ABANDONED as i64 + 10 {
            drop(register_numbered_call(&handler, n));
        }
        let abandoned = handler.abandoned.lock();
        assert_eq!(
            (abandoned.ids.len(), abandoned.count()),
            (MAX_REMEMBERED_ABANDONED, MAX_REMEMBERED_ABANDONED + 10)
        );
    }

    /// A handler with the log messages that each call received.
    struct LogFixture {
        handler: Arc<McpClientHandler>,
        logged: Arc<Mutex<Vec<(i64, Value)>>>,
    }

    impl LogFixture {
        fn new() -> Self {
            let handler = McpClientHandler::new("disk", broadcast::channel(1).0);
            Self { handler, logged: Arc::default() }
        }

        fn send(&self, n: i64, request: impl Into<ClientRequest>) {
            self.handler.record_request(&NumberOrString::Number(n), &request.into());
        }

        fn send_call(&self, n: i64) {
            self.send(n, CallToolRequest::new(CallToolRequestParams::new("work")));
        }

        fn register(&self, n: i64, level: Option<LoggingLevel>) -> UpstreamCallGuard {
            let (id, logged) = (NumberOrString::Number(n), self.logged.clone());
            let sink: ProgressSink = Arc::new(move |report: AttemptProgress| {
                logged.lock().push((n, report.data.unwrap()["log"].clone()));
            });
            self.handler.register_call(id.clone(), ProgressToken(id), sink, level).0
        }

        fn start_call(&self, n: i64, level: Option<LoggingLevel>) -> UpstreamCallGuard {
            self.send_call(n);
            self.register(n, level)
        }

        fn log(&self, level: LoggingLevel, data: &str) {
            let param = LoggingMessageNotificationParam::new(level, json!(data));
            let notification = rmcp::model::LoggingMessageNotification::new(param);
            let notification = ServerNotification::LoggingMessageNotification(notification);
            self.handler.report_log(&notification);
        }

        /// Returns the messages so far, each with its call.
        fn received(&self) -> Vec<(i64, String)> {
            let text = |log: &Value| log["data"].as_str().unwrap().to_owned();
            self.logged.lock().iter().map(|(n, log)| (*n, text(log))).collect()
        }
    }

    #[test]
    fn a_log_message_reaches_the_only_call_that_asks_for_its_level() {
        let fixture = LogFixture::new();
        let count = || fixture.logged.lock().len();
        let mut first = fixture.start_call(1, Some(LoggingLevel::Warning));
        fixture.log(LoggingLevel::Info, "x");
        fixture.log(LoggingLevel::Error, "x");
        let shown = json!({ "level": "error", "logger": "disk", "data": "x" });
        assert_eq!(*fixture.logged.lock(), [(1, shown)]);
        // With two calls in flight, the message may be that of the other caller.
        let mut second = fixture.start_call(2, Some(LoggingLevel::Warning));
        fixture.log(LoggingLevel::Error, "x");
        assert_eq!(count(), 1);
        first.mark_ended();
        drop(first);
        fixture.log(LoggingLevel::Error, "x");
        assert_eq!(count(), 2);
        second.mark_ended();
        drop(second);
        // A message can arrive before the call that was sent is registered.
        fixture.send_call(3);
        fixture.log(LoggingLevel::Error, "x");
        assert_eq!(count(), 2);
        let mut third = fixture.register(3, Some(LoggingLevel::Debug));
        assert_eq!(count(), 3);
        third.mark_ended();
        drop(third);
        let _quiet = fixture.start_call(4, None);
        fixture.log(LoggingLevel::Emergency, "x");
        assert_eq!(count(), 3, "a request that asks for none gets none");
    }

    #[test]
    fn a_log_message_of_another_callers_work_reaches_no_call() {
        let fixture = LogFixture::new();
        let debug = Some(LoggingLevel::Debug);
        let mut first = fixture.start_call(1, debug);
        fixture.send(2, ReadResourceRequest::new(ReadResourceRequestParams::new("file:///x")));
        fixture.log(LoggingLevel::Info, "of the read");
        fixture.handler.record_response(&NumberOrString::Number(2), false);
        // The other caller's call is sent, and not registered before its message arrives.
        fixture.send_call(3);
        fixture.log(LoggingLevel::Info, "of either call");
        first.mark_ended();
        drop(first);
        fixture.log(LoggingLevel::Info, "of the other call");
        let mut second = fixture.register(3, debug);
        assert_eq!(fixture.received(), [(3, "of the other call".to_owned())]);
        // It becomes a task, and another call begins.
        fixture.handler.record_response(&NumberOrString::Number(3), true);
        let third = fixture.start_call(4, debug);
        fixture.log(LoggingLevel::Info, "of the task, before it is polled");
        let mut task = fixture.handler.begin_task();
        second.mark_ended();
        drop(second);
        fixture.log(LoggingLevel::Info, "of the task");
        task.mark_ended();
        drop(task);
        assert_eq!(fixture.received().len(), 1, "the task is another caller's");
        fixture.log(LoggingLevel::Info, "of the only call");
        assert_eq!(fixture.received()[1..], [(4, "of the only call".to_owned())]);
        drop(third);
    }
}
