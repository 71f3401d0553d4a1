//! Follows the changes of an upstream. In revision 2026-07-28 notifications require a subscription,
//! whose stream ends whenever an intermediary closes it; then Toolcrib subscribes again. In older
//! revisions only single resources are subscribed to.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::model::{ServerNotification, SubscribeRequestParams, SubscriptionFilter};
use rmcp::service::{Peer, Subscription};
use rmcp::{RoleClient, ServiceError};

use super::followed_resources::FollowedResources;
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
    followed: &FollowedResources,
    modern: bool,
) -> Infallible {
    match modern {
        true => subscribe_or_poll(peer, handler, followed, TOOL_LIST_POLL_INTERVAL).await,
        false => subscribe_again(peer, followed).await,
    }
}

/// Subscribes to the followed resources on a new connection. Those that are added later are
/// subscribed to when they are added ([`subscribe_resource`]).
async fn subscribe_again(peer: &Peer<RoleClient>, followed: &FollowedResources) -> Infallible {
    for uri in followed.uris() {
        // An upstream that refuses sends no updates of this resource; its tools are not concerned.
        let _ = subscribe_resource(peer, &uri).await;
    }
    std::future::pending().await
}

/// Subscribes to a resource of an upstream of a legacy revision, if it supports that.
#[allow(deprecated)]
pub(in crate::mcp) async fn subscribe_resource(
    peer: &Peer<RoleClient>,
    uri: &str,
) -> Result<(), ServiceError> {
    let info = peer.peer_info();
    let resources = info.as_ref().and_then(|info| info.capabilities.resources.as_ref());
    if resources.is_none_or(|resources| resources.subscribe != Some(true)) {
        return Ok(());
    }
    let subscribing = peer.subscribe(SubscribeRequestParams::new(uri));
    match tokio::time::timeout(SUBSCRIBE_TIMEOUT, subscribing).await {
        Ok(subscribed) => subscribed,
        Err(_) => Err(ServiceError::Timeout { timeout: SUBSCRIBE_TIMEOUT }),
    }
}

async fn subscribe_or_poll(
    peer: &Peer<RoleClient>,
    handler: &McpClientHandler,
    followed: &FollowedResources,
    every: Duration,
) -> Infallible {
    let (mut wait, mut missed) = (FIRST_WAIT, false);
    loop {
        let more_followed = followed.next_change();
        let filter = subscription_filter(peer, followed);
        let nothing = filter == SubscriptionFilter::default();
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
            tokio::select! {
                () = tokio::time::sleep(every) => handler.tools_changed.notify_one(),
                () = more_followed => {}
            }
            continue;
        };
        // Changes during the gap between two streams are found by an immediate refresh.
        if std::mem::replace(&mut missed, true) {
            handler.tools_changed.notify_one();
        }
        let began = Instant::now();
        tokio::select! {
            () = forward_notifications(stream, handler) => {}
            // The next subscription covers the new resource too.
            () = more_followed => continue,
        }
        wait =
            if began.elapsed() > BACKOFF_RESET_AFTER { FIRST_WAIT } else { (wait * 2).min(every) };
        tokio::time::sleep(wait).await;
    }
}

/// Returns a filter for the changes that the upstream can announce.
fn subscription_filter(
    peer: &Peer<RoleClient>,
    followed: &FollowedResources,
) -> SubscriptionFilter {
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
    let uris = followed.uris();
    if can.resources.is_some() && !uris.is_empty() {
        filter = filter.resource_subscriptions(uris);
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
        let handler = McpClientHandler::new("x", broadcast::channel(1).0);
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
        let (interval, followed) = (Duration::from_millis(5), FollowedResources::default());
        let peer = client.peer();
        tokio::select! {
            never = subscribe_or_poll(peer, &handler, &followed, interval) => match never {},
            () = refreshes => {}
        }
        drop((client, serving));
    }
}
