//! Hearing from an upstream of 2026-07-28 that what it has is other than it was. That has to be
//! asked for, and the stream on which it is said ends whenever something between us closes it: then
//! it is asked for again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::RoleClient;
use rmcp::model::{ServerNotification, SubscriptionFilter};
use rmcp::service::{Peer, Subscription};

use super::ears::{Ears, News};

/// How often the list is looked at where nobody says that it has changed.
const LOOK: Duration = Duration::from_secs(60);

/// How long it may take to agree that it tells us.
const AGREEING: Duration = Duration::from_secs(30);

/// The waits before a stream that has ended is asked for again.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// One that was open for so long begins with the shortest wait again.
const STEADY: Duration = Duration::from_secs(20);

/// Listens for as long as it is polled. Where it is not said that the tools have changed, they are
/// looked at from time to time.
pub(super) async fn listen(peer: &Peer<RoleClient>, ears: &Arc<Ears>, modern: bool) -> Infallible {
    match modern {
        true => listen_or_look(peer, ears, LOOK).await,
        false => std::future::pending().await,
    }
}

async fn listen_or_look(peer: &Peer<RoleClient>, ears: &Ears, every: Duration) -> Infallible {
    let filter = wanted(peer);
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
        // What was not heard of in between is seen at the next look, which is at once.
        if std::mem::replace(&mut missed, true) {
            ears.tools_changed.notify_one();
        }
        let began = Instant::now();
        hear(stream, ears).await;
        wait = if began.elapsed() > STEADY { FIRST_WAIT } else { (wait * 2).min(every) };
        tokio::time::sleep(wait).await;
    }
}

/// What it can tell us about.
fn wanted(peer: &Peer<RoleClient>) -> SubscriptionFilter {
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

/// Passes on what is said, until the stream ends.
async fn hear(mut stream: Subscription, ears: &Ears) {
    loop {
        match stream.next().await {
            Ok(Some(ServerNotification::ToolListChangedNotification(_))) => {
                ears.tools_changed.notify_one();
            }
            // Nobody may be listening.
            Ok(Some(ServerNotification::PromptListChangedNotification(_))) => {
                let _ = ears.news.send(News::Prompts);
            }
            Ok(Some(ServerNotification::ResourceListChangedNotification(_))) => {
                let _ = ears.news.send(News::Resources);
            }
            Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => {
                let _ = ears.news.send(News::Resource(updated.params.uri));
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

    /// A server that can do nothing.
    struct Plain;

    impl rmcp::ServerHandler for Plain {}

    #[tokio::test]
    async fn one_that_says_nothing_of_changes_is_looked_at_again_and_again() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let serving = tokio::spawn(async move { rmcp::serve_server(Plain, far).await.unwrap() });
        let ears = Ears::new(broadcast::channel(1).0);
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
            never = listen_or_look(client.peer(), &ears, often) => match never {},
            () = looks => {}
        }
        drop((client, serving));
    }
}
