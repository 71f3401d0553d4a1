//! Log messages of an upstream, for the requests that asked for them: the level at the upstream,
//! and the messages in Toolcrib's form.

// Logging belongs to the legacy revisions, whose servers still use it.
#![allow(deprecated)]
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::RoleClient;
use rmcp::model::{
    LoggingLevel, LoggingMessageNotificationParam, RequestMetaObject, SetLevelRequestParams,
};
use rmcp::service::Peer;
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
        {
            let mut set = self.0.lock();
            if !is_settable || set.is_some_and(|set| set as u8 <= level as u8) {
                return;
            }
            *set = Some(level);
        }
        let request = peer.set_level(SetLevelRequestParams::new(level));
        let _ = tokio::time::timeout(SET_LEVEL_TIMEOUT, request).await;
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
