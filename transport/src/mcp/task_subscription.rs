//! The part of `subscriptions/listen` that names tasks (`notifications.taskIds`). rmcp's filter
//! does not have this field: the task ids are read from the message, and added to the
//! acknowledgement.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures::StreamExt;
use serde::Deserialize;
use serde_json::Value;

use super::state::MAX_RESOURCE_SUBSCRIPTIONS;

/// The method of the first message of a subscription's stream.
const ACKNOWLEDGED: &str = "notifications/subscriptions/acknowledged";

/// The tasks that one `subscriptions/listen` names, in the extensions of its request.
#[derive(Debug, Clone)]
pub(super) struct TaskSubscription(pub(super) Arc<[String]>);

impl TaskSubscription {
    /// Reads the task ids of a message. Returns `None` if it names none.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let message: ListenMessage = serde_json::from_slice(message).ok()?;
        let mut ids = message.params.notifications.task_ids;
        ids.truncate(MAX_RESOURCE_SUBSCRIPTIONS);
        (!ids.is_empty()).then(|| Self(ids.into()))
    }

    /// Adds the task ids to the acknowledgement, the first message of the stream.
    pub(super) fn acknowledge_in(self, response: Response) -> Response {
        let (parts, body) = response.into_parts();
        let mut ids = Some(self.0);
        let chunks = body.into_data_stream().map(move |chunk| {
            let chunk = chunk?;
            let acknowledged = ids.as_ref().and_then(|ids| add_task_ids(&chunk, ids));
            if acknowledged.is_some() {
                ids = None;
            }
            Ok::<_, axum::Error>(acknowledged.map_or(chunk, Bytes::from))
        });
        Response::from_parts(parts, Body::from_stream(chunks))
    }
}

#[derive(Deserialize)]
struct ListenMessage {
    params: ListenParams,
}

#[derive(Deserialize)]
struct ListenParams {
    notifications: TaskFilter,
}

#[derive(Deserialize)]
struct TaskFilter {
    #[serde(rename = "taskIds", default)]
    task_ids: Vec<String>,
}

/// Adds the task ids to the event that acknowledges the subscription. Returns `None` if the chunk
/// does not have it.
fn add_task_ids(chunk: &Bytes, ids: &[String]) -> Option<String> {
    let text = std::str::from_utf8(chunk).ok().filter(|text| text.contains(ACKNOWLEDGED))?;
    let mut lines: Vec<String> = Vec::new();
    let mut is_found = false;
    for line in text.split('\n') {
        let data = line.strip_prefix("data:").and_then(|data| {
            let mut message: Value = serde_json::from_str(data.trim()).ok()?;
            let is_acknowledgement = message["method"] == ACKNOWLEDGED;
            let filter = message.pointer_mut("/params/notifications")?.as_object_mut()?;
            filter.insert("taskIds".to_owned(), ids.into());
            is_acknowledgement.then(|| format!("data: {message}"))
        });
        is_found |= data.is_some();
        lines.push(data.unwrap_or_else(|| line.to_owned()));
    }
    is_found.then(|| lines.join("\n"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn task_ids_are_read_and_acknowledged() {
        let message = br#"{"id":1,"params":{"notifications":{"taskIds":["a","b"]}}}"#;
        let subscription = TaskSubscription::parse(message).unwrap();
        assert_eq!(*subscription.0, ["a".to_owned(), "b".to_owned()]);
        for none in [r#"{"params":{"notifications":{"taskIds":[]}}}"#, "{}", "[]"] {
            assert!(TaskSubscription::parse(none.as_bytes()).is_none(), "{none}");
        }
        let event = format!(
            "id: 1\ndata: {{\"method\":\"{ACKNOWLEDGED}\",\"params\":{{\"notifications\":{{}}}}}}\n\n"
        );
        let changed = add_task_ids(&Bytes::from(event), &subscription.0).unwrap();
        assert!(changed.starts_with("id: 1\ndata: {") && changed.ends_with("}\n\n"), "{changed}");
        assert!(changed.contains(r#""taskIds":["a","b"]"#), "{changed}");
        assert!(add_task_ids(&Bytes::from_static(b"data: {}\n\n"), &subscription.0).is_none());
    }
}
