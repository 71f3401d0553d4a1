//! Log messages of an upstream, for the requests that asked for them: the level at the upstream,
//! and the messages in Toolcrib's form.

// Logging belongs to the legacy revisions, whose servers still use it.
#![allow(deprecated)]
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{
    LoggingLevel, LoggingMessageNotificationParam, RequestMetaObject, SetLevelRequestParams,
};
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use serde_json::{Value, json};
use toolcrib::AttemptProgress;

/// The name of the level in the metadata of a request of revision 2026-07-28.
const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";

/// Maximum time for setting the level at an upstream. A call does not fail with it.
const SET_LEVEL_TIMEOUT: Duration = Duration::from_secs(2);

/// The most verbose level that was set at an upstream of a legacy revision, where it holds for the
/// whole connection.
#[derive(Default)]
pub struct UpstreamLogLevel(Mutex<Option<LoggingLevel>>);

impl UpstreamLogLevel {
    /// Sets the level, unless the upstream sends these messages already. Each receiver selects
    /// those of its own level. An upstream that refuses sends its messages as before.
    pub async fn include(&self, peer: &Peer<RoleClient>, level: LoggingLevel) {
        let info = peer.peer_info();
        let is_settable = info.is_some_and(|info| {
            info.capabilities.logging.is_some() && info.protocol_version.has_initialize()
        });
        let mut pending = {
            let mut set = self.0.lock();
            if !is_settable || set.is_some_and(|set| set as u8 <= level as u8) {
                return;
            }
            let previous = set.replace(level);
            PendingLevel { set: &self.0, level, previous, is_answered: false }
        };
        let request = peer.set_level(SetLevelRequestParams::new(level));
        let answer = tokio::time::timeout(SET_LEVEL_TIMEOUT, request).await;
        pending.is_answered = matches!(answer, Ok(Ok(_) | Err(ServiceError::McpError(_))));
    }
}

/// A level that counts as set while its request waits for the answer. Without an answer the level
/// before it counts again, so that the next receiver requests its level.
struct PendingLevel<'a> {
    set: &'a Mutex<Option<LoggingLevel>>,
    level: LoggingLevel,
    previous: Option<LoggingLevel>,
    is_answered: bool,
}

impl Drop for PendingLevel<'_> {
    fn drop(&mut self) {
        let mut set = self.set.lock();
        if !self.is_answered && *set == Some(self.level) {
            *set = self.previous;
        }
    }
}

/// Parses the level of a request `logging/setLevel`.
pub fn parse_level(level: &Value) -> Option<LoggingLevel> {
    serde_json::from_value(level.clone()).ok()
}

/// Returns the level of log messages that a request asks for.
pub fn requested_level(meta: &RequestMetaObject) -> Option<LoggingLevel> {
    meta.log_level()
}

/// Removes the level from the metadata of a request, for an upstream of a legacy revision, which
/// has another request for it.
pub fn remove_level(meta: &mut RequestMetaObject) {
    meta.0.0.remove(LOG_LEVEL);
}

/// Converts a log message of a tool to Toolcrib's form, with the upstream's name before the
/// logger's.
pub(super) fn log_to_progress(
    upstream: &str,
    message: &LoggingMessageNotificationParam,
) -> AttemptProgress {
    let logger = match &message.logger {
        Some(logger) => format!("{upstream}.{logger}"),
        None => upstream.to_owned(),
    };
    let log = json!({ "level": message.level, "logger": logger, "data": message.data });
    AttemptProgress { percent: None, message: None, data: Some(json!({ "log": log })) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use futures::poll;
    use rmcp::model::{ErrorData, ServerCapabilities, ServerInfo};
    use rmcp::service::RequestContext;
    use rmcp::{RoleServer, ServerHandler};
    use tokio::sync::Notify;

    use super::*;

    /// A server that answers the first request for a level only after a notification.
    #[derive(Clone, Default)]
    struct SlowServer {
        levels: Arc<Mutex<Vec<LoggingLevel>>>,
        received: Arc<Notify>,
    }

    impl ServerHandler for SlowServer {
        fn get_info(&self) -> ServerInfo {
            ServerInfo::new(ServerCapabilities::builder().enable_logging().build())
        }

        async fn set_level(
            &self,
            request: SetLevelRequestParams,
            _context: RequestContext<RoleServer>,
        ) -> Result<(), ErrorData> {
            let is_first = {
                let mut levels = self.levels.lock();
                levels.push(request.level);
                levels.len() == 1
            };
            self.received.notify_one();
            match is_first {
                true => std::future::pending().await,
                false => Err(ErrorData::invalid_params("not now", None)),
            }
        }
    }

    #[tokio::test]
    async fn a_level_counts_as_set_only_after_an_answer() {
        let (client_end, server_end) = tokio::io::duplex(1 << 16);
        let server = SlowServer::default();
        let serving = tokio::spawn(rmcp::serve_server(server.clone(), server_end));
        let client = rmcp::serve_client((), client_end).await.unwrap();
        let level = UpstreamLogLevel::default();
        let mut first = Box::pin(level.include(client.peer(), LoggingLevel::Info));
        assert!(poll!(&mut first).is_pending());
        server.received.notified().await;
        level.include(client.peer(), LoggingLevel::Warning).await;
        assert_eq!(*server.levels.lock(), [LoggingLevel::Info], "the request covers this level");
        // The wait for the answer ends without one.
        drop(first);
        for _ in 0..2 {
            level.include(client.peer(), LoggingLevel::Info).await;
        }
        assert_eq!(
            *server.levels.lock(),
            [LoggingLevel::Info; 2],
            "a refusal is an answer, and not repeated"
        );
        drop((client, serving));
    }
}
