//! Forwards the progress and the log messages of a call to an MCP client that subscribed to them,
//! while it waits.
//!
//! Both are events of the call. A tool of an MCP server logs in the data of a progress event, as
//! `{"log": {"level", "logger", "data"}}`.

// Logging belongs to the legacy revisions, whose clients still use it.
#![allow(deprecated)]
use rmcp::model::{
    LoggingLevel, LoggingMessageNotificationParam, ProgressNotificationParam, ProgressToken,
};
use serde::Deserialize;
use serde_json::Value;
use toolcrib::calls::EventQuery;
use toolcrib::domain::call::Call;
use toolcrib::domain::event::{CallEvent, EventData, EventKind};
use toolcrib::{Caller, Engine};

use crate::mcp::request::{McpPeer, ProtocolRevision};
use crate::mcp::state::RequestScope;

/// Maximum number of events read at once.
const EVENT_PAGE_SIZE: usize = 100;

/// Forwards the events of one call, and remembers the position reached.
pub(crate) struct ProgressForwarder {
    subscription: Option<ProgressSubscription>,
}

struct ProgressSubscription {
    engine: Engine,
    caller: Caller,
    peer: McpPeer,
    token: Option<ProgressToken>,
    level: Option<LoggingLevel>,
    query: EventQuery,
    after: u64,
    last_progress: Option<f64>,
}

/// A log message of a tool.
#[derive(Deserialize)]
struct ToolLogMessage {
    level: LoggingLevel,
    logger: Option<String>,
    #[serde(default)]
    data: Value,
}

impl ProgressForwarder {
    /// Returns a forwarder for this call, which does nothing if the MCP client did not subscribe.
    pub(crate) fn new(scope: RequestScope<'_>, call: &Call) -> Self {
        let RequestScope { shared, session, view, request } = scope;
        let token = request.meta.get_progress_token();
        // Only tools of MCP servers log. The current revision sets the level with each request,
        // legacy revisions for the whole session; a legacy client that set no level gets `info`.
        let level = match request.client.revision {
            _ if !call.target.traits.mcp_results => None,
            ProtocolRevision::Modern => request.meta.log_level(),
            ProtocolRevision::Legacy => session.level().or(Some(LoggingLevel::Info)),
        };
        let subscription = (token.is_some() || level.is_some()).then(|| ProgressSubscription {
            engine: shared.engine.clone(),
            caller: view.caller.clone(),
            peer: request.peer.clone(),
            token,
            level,
            query: EventQuery::Call(call.id.clone()),
            after: 0,
            last_progress: None,
        });
        Self { subscription }
    }

    /// Waits for new events and forwards them. Never returns if no more events can come.
    pub(crate) async fn forward_next(&mut self) {
        let Some(subscription) = &mut self.subscription else {
            return std::future::pending().await;
        };
        let read = subscription
            .engine
            .calls()
            .events(&subscription.caller, &subscription.query, subscription.after, EVENT_PAGE_SIZE)
            .await;
        match read {
            Ok(events) if !events.is_empty() => subscription.forward(events).await,
            // The call has ended, or the store is unavailable: the result is reported elsewhere.
            _ => std::future::pending().await,
        }
    }

    /// Forwards the remaining events of an ended call.
    pub(crate) async fn forward_remaining(&mut self) {
        let Some(subscription) = &mut self.subscription else { return };
        loop {
            let read = subscription.engine.calls().events(
                &subscription.caller,
                &subscription.query,
                subscription.after,
                EVENT_PAGE_SIZE,
            );
            match read.await {
                Ok(events) if !events.is_empty() => subscription.forward(events).await,
                _ => return,
            }
        }
    }
}

impl ProgressSubscription {
    async fn forward(&mut self, events: Vec<CallEvent>) {
        for event in events {
            self.after = event.number;
            if event.record.kind != EventKind::Progress {
                continue;
            }
            let event_data = &event.record.data;
            match event_data.get("data").and_then(|data| data.get("log")) {
                Some(log) => self.send_log(log).await,
                None => self.send_progress(event_data).await,
            }
        }
    }

    async fn send_progress(&mut self, progress: &EventData) {
        let Some(token) = self.token.clone() else { return };
        let percent = progress.get("percent").and_then(Value::as_f64);
        // An MCP server that does not know the total reports progress without one.
        let counted = || progress.get("data")?.get("progress")?.as_f64();
        let next = next_progress_value(self.last_progress, percent.or_else(counted));
        self.last_progress = Some(next);
        let mut param = ProgressNotificationParam::new(token, next);
        if percent.is_some() {
            param = param.with_total(100.0);
        }
        if let Some(message) = progress.get("message").and_then(Value::as_str) {
            param = param.with_message(message);
        }
        self.peer.notify_progress(param).await;
    }

    async fn send_log(&self, log: &Value) {
        let Ok(logged) = ToolLogMessage::deserialize(log) else { return };
        if self.level.is_none_or(|min_level| severity(logged.level) < severity(min_level)) {
            return;
        }
        let mut param = LoggingMessageNotificationParam::new(logged.level, logged.data);
        param.logger = logged.logger;
        self.peer.notify_log(param).await;
    }
}

/// Returns the next progress value. MCP requires each value to exceed the one before, so this does
/// not repeat or decrease a value even if the tool does.
fn next_progress_value(last: Option<f64>, reported: Option<f64>) -> f64 {
    let reported =
        reported.filter(|reported| last.map_or(*reported >= 0.0, |last| *reported > last));
    reported.unwrap_or_else(|| last.map_or(0.0, |last| (last + 0.01).max(last.next_up())))
}

fn severity(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        LoggingLevel::Alert => 6,
        LoggingLevel::Emergency => 7,
    }
}
