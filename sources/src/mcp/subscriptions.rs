//! Follows the changes of an upstream of revision 2026-07-28. Notifications require a subscription,
//! whose stream ends whenever an intermediary closes it; then Toolcrib subscribes again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::RoleClient;
use rmcp::model::{ServerNotification, SubscriptionFilter};
use rmcp::service::{Peer, Subscription};

use crate::mcp::server_requests::{McpClientHandler, UpstreamChange};

/// Polling interval of the tool list when the upstream sends no notifications.
const LOOK: Duration = Duration::from_secs(60);

/// Maximum time for the upstream to accept a subscription.
const AGREEING: Duration = Duration::from_secs(30);

/// First delay of the backoff between subscriptions.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// A stream that was open this long resets the backoff.
const STEADY: Duration = Duration::from_secs(20);

/// Follows changes for as long as it is polled. If the upstream does not announce changes,
/// refreshes the tool list periodically.
pub(super) async fn follow_changes(
    peer: &Peer<RoleClient>,
    ears: &Arc<McpClientHandler>,
    modern: bool,
) -> Infallible {
    match modern {
        true => subscribe_or_poll(peer, ears, LOOK).await,
        false => std::future::pending().await,
    }
}

async fn subscribe_or_poll(
    peer: &Peer<RoleClient>,
    ears: &McpClientHandler,
    every: Duration,
) -> Infallible {
    let filter = subscription_filter(peer);
    let nothing = filter == SubscriptionFilter::default();
    let (mut wait, mut missed) = (FIRST_WAIT, false);
    loop {
        let asking = async {
            match nothing {
                true => None,
                false => {
                    let asked = tokio::time::timeout(AGREEING, peer.listen(filter.clone())).await;
                    asked.ok().and_then(Result::ok)
                }
            }
        };
        let Some(stream) = asking.await else {
            tokio::time::sleep(every).await;
            ears.tools_changed.notify_one();
            continue;
        };
        // Changes during the gap between two streams are found by an immediate refresh.
        if std::mem::replace(&mut missed, true) {
            ears.tools_changed.notify_one();
        }
        let began = Instant::now();
        forward_notifications(stream, ears).await;
        wait = if began.elapsed() > STEADY { FIRST_WAIT } else { (wait * 2).min(every) };
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
async fn forward_notifications(mut stream: Subscription, ears: &McpClientHandler) {
    loop {
        match stream.next().await {
            Ok(Some(ServerNotification::ToolListChangedNotification(_))) => {
                ears.tools_changed.notify_one();
            }
            // Sending fails if there is no subscriber.
            Ok(Some(ServerNotification::PromptListChangedNotification(_))) => {
                let _ = ears.changes.send(UpstreamChange::PromptList);
            }
            Ok(Some(ServerNotification::ResourceListChangedNotification(_))) => {
                let _ = ears.changes.send(UpstreamChange::ResourceList);
            }
            Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => {
                let _ = ears.changes.send(UpstreamChange::ResourceContent(updated.params.uri));
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
    struct Plain;

    impl rmcp::ServerHandler for Plain {}

    #[tokio::test]
    async fn one_that_says_nothing_of_changes_is_looked_at_again_and_again() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let serving = tokio::spawn(async move { rmcp::serve_server(Plain, far).await.unwrap() });
        let ears = McpClientHandler::new(broadcast::channel(1).0);
        let mode = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: None,
        };
        let client = serve_client_with_lifecycle(ears.clone(), near, mode).await.unwrap();
        let looks = async {
            for _ in 0..3 {
                ears.tools_changed.notified().await;
            }
        };
        let often = Duration::from_millis(5);
        tokio::select! {
            never = subscribe_or_poll(client.peer(), &ears, often) => match never {},
            () = looks => {}
        }
        drop((client, serving));
    }
}
