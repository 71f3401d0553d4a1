//! Follows the changes of an upstream of revision 2026-07-28. Notifications require a subscription,
//! whose stream ends whenever an intermediary closes it; then Toolcrib subscribes again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::RoleClient;
use rmcp::model::{ServerNotification, SubscriptionFilter};
use rmcp::service::{Peer, Subscription};

use super::server_requests::{McpClientHandler, UpstreamChange};

/// Polling interval of the tool list when the upstream sends no notifications.
const TOOL_LIST_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum time for the upstream to accept a subscription.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(30);

/// First delay of the backoff between subscriptions.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// A stream that was open this long resets the backoff.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(20);

/// Follows changes for as long as it is polled. If the upstream does not announce changes,
/// refreshes the tool list periodically.
pub(in crate::mcp) async fn follow_changes(
    peer: &Peer<RoleClient>,
    handler: &Arc<McpClientHandler>,
    modern: bool,
) -> Infallible {
    match modern {
        true => subscribe_or_poll(peer, handler, TOOL_LIST_POLL_INTERVAL).await,
        false => std::future::pending().await,
    }
}

async fn subscribe_or_poll(
    peer: &Peer<RoleClient>,
    handler: &McpClientHandler,
    every: Duration,
) -> Infallible {
    let filter = subscription_filter(peer);
    let nothing = filter == SubscriptionFilter::default();
    let (mut wait, mut missed) = (FIRST_WAIT, false);
    loop {
        let subscribing = async {
            match nothing {
                true => None,
                false => {
                    let subscribed =
                        tokio::time::timeout(SUBSCRIBE_TIMEOUT, peer.listen(filter.clone())).await;
                    subscribed.ok().and_then(Result::ok)
                }
            }
        };
        let Some(stream) = subscribing.await else {
            tokio::time::sleep(every).await;
            handler.tools_changed.notify_one();
            continue;
        };
        // Changes during the gap between two streams are found by an immediate refresh.
        if std::mem::replace(&mut missed, true) {
            handler.tools_changed.notify_one();
        }
        let began = Instant::now();
        forward_notifications(stream, handler).await;
        wait =
            if began.elapsed() > BACKOFF_RESET_AFTER { FIRST_WAIT } else { (wait * 2).min(every) };
        tokio::time::sleep(wait).await;
    }
}

/// Returns a filter for the changes that the upstream can announce.
fn subscription_filter(peer: &Peer<RoleClient>) -> SubscriptionFilter {
    let mut filter = SubscriptionFilter::builder();
    let info = peer.peer_info();
    let Some(can) = info.map(|info| info.capabilities.clone()) else { return filter.build() };
    if can.tools.as_ref().is_some_and(|tools| tools.list_changed == Some(true)) {
        filter = filter.tools_list_changed();
    }
    if can.prompts.as_ref().is_some_and(|prompts| prompts.list_changed == Some(true)) {
        filter = filter.prompts_list_changed();
    }
    if can.resources.as_ref().is_some_and(|resources| resources.list_changed == Some(true)) {
        filter = filter.resources_list_changed();
    }
    filter.build()
}

/// Forwards notifications until the stream ends.
async fn forward_notifications(mut stream: Subscription, handler: &McpClientHandler) {
    loop {
        match stream.next().await {
            Ok(Some(ServerNotification::ToolListChangedNotification(_))) => {
                handler.tools_changed.notify_one();
            }
            // Sending fails if there is no subscriber.
            Ok(Some(ServerNotification::PromptListChangedNotification(_))) => {
                let _ = handler.changes.send(UpstreamChange::PromptList);
            }
            Ok(Some(ServerNotification::ResourceListChangedNotification(_))) => {
                let _ = handler.changes.send(UpstreamChange::ResourceList);
            }
            Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => {
                let _ = handler.changes.send(UpstreamChange::ResourceContent(updated.params.uri));
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rmcp::model::ProtocolVersion;
    use rmcp::service::{ClientLifecycleMode, serve_client_with_lifecycle};
    use tokio::sync::broadcast;

    use super::*;

    /// A server without any capability.
    struct ServerWithoutCapabilities;

    impl rmcp::ServerHandler for ServerWithoutCapabilities {}

    #[tokio::test]
    async fn a_server_without_change_notifications_is_polled() {
        let (client_end, server_end) = tokio::io::duplex(1 << 16);
        let serving = tokio::spawn(async move {
            rmcp::serve_server(ServerWithoutCapabilities, server_end).await.unwrap()
        });
        let handler = McpClientHandler::new(broadcast::channel(1).0);
        let mode = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: None,
        };
        let client = serve_client_with_lifecycle(handler.clone(), client_end, mode).await.unwrap();
        let refreshes = async {
            for _ in 0..3 {
                handler.tools_changed.notified().await;
            }
        };
        let interval = Duration::from_millis(5);
        tokio::select! {
            never = subscribe_or_poll(client.peer(), &handler, interval) => match never {},
            () = refreshes => {}
        }
        drop((client, serving));
    }
}
