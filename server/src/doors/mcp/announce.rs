//! Notifies MCP clients of changes to their tool list and to passthrough resources and prompts.
//!
//! A `subscriptions/listen` stream receives the changes that it subscribed to; a legacy session
//! receives those that its revision defines. A caller is notified of a tool list change only if
//! that caller's own list differs from before.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rmcp::model::{
    PromptListChangedNotification, ResourceListChangedNotification, ResourceUpdatedNotification,
    ResourceUpdatedNotificationParam, ServerNotification, SubscriptionFilter,
    ToolListChangedNotification,
};
use rmcp::service::{Peer, SubscriptionContext};
use rmcp::{ErrorData, RoleServer};

use super::server::{Server, Session, Shared, View};
use super::shelf::{Change, Changed, Changes};
use super::tools::List;

/// Maximum number of resources that one stream may subscribe to.
const MAX_FOLLOWED: usize = 1_000;

/// Returns the part of a requested filter that is granted: all of it, up to the limit of resources.
pub(super) fn accepted(asked: &SubscriptionFilter) -> SubscriptionFilter {
    let mut accepted = asked.clone();
    if let Some(followed) = &mut accepted.resource_subscriptions {
        followed.truncate(MAX_FOLLOWED);
    }
    accepted
}

/// A change that MCP clients may have to be notified of.
enum News {
    /// Tools, API keys or access rules may have changed. Holds the new directory version.
    Directory(u64),
    Shelf(Change),
    Over,
}

/// Listens for changes of the directory and of the passthrough.
struct Following {
    shared: Arc<Shared>,
    version: u64,
    shelf: Option<Box<dyn Changes>>,
}

impl Following {
    fn new(shared: &Arc<Shared>) -> Self {
        let version = shared.engine.directory_version();
        Self { shared: shared.clone(), version, shelf: shared.shelf.changes() }
    }

    async fn next(&mut self) -> News {
        let news = tokio::select! {
            changed = self.shared.engine.directory_changed(self.version) => match changed {
                Some(version) => News::Directory(version),
                None => News::Over,
            },
            changed = told(&mut self.shelf) => News::Shelf(changed),
        };
        if let News::Directory(version) = news {
            self.version = version;
        }
        news
    }
}

async fn told(shelf: &mut Option<Box<dyn Changes>>) -> Change {
    match shelf {
        Some(changes) => changes.next().await,
        None => std::future::pending().await,
    }
}

fn notice(changed: Changed) -> ServerNotification {
    match changed {
        Changed::Prompts => PromptListChangedNotification::default().into(),
        Changed::Resources => ResourceListChangedNotification::default().into(),
        Changed::Resource(uri) => {
            ResourceUpdatedNotification::new(ResourceUpdatedNotificationParam::new(uri)).into()
        }
    }
}

/// Serves one stream until the MCP client disconnects, its credentials are revoked, or the server
/// stops.
pub(super) async fn listen(
    server: &Server,
    subscription: SubscriptionContext,
) -> Result<(), ErrorData> {
    let view = server.view(&subscription.request_context().extensions);
    let shared = &server.shared;
    let mut following = Following::new(shared);
    let mut shown = shared.lists.of(&shared.engine, &view.caller);
    loop {
        let news = tokio::select! {
            () = subscription.cancelled() => return Ok(()),
            news = following.next() => news,
        };
        if !stands(shared, &view) {
            return Ok(());
        }
        let notice = match news {
            News::Over => return Ok(()),
            News::Directory(_) if !differs(shared, &view, &mut shown) => continue,
            News::Directory(_) => ToolListChangedNotification::default().into(),
            News::Shelf(change) if !shows(shared, &view, &change) => continue,
            News::Shelf(change) => notice(change.what),
        };
        // The sink drops notifications that the MCP client did not subscribe to.
        let _ = subscription.sink().send(notice).await;
    }
}

fn stands(shared: &Shared, view: &View) -> bool {
    view.standing.as_ref().is_none_or(|standing| standing.check(&shared.engine).is_ok())
}

/// Returns whether the caller may learn of a passthrough change.
fn shows(shared: &Shared, view: &View, change: &Change) -> bool {
    shared.shelf.shows(&view.caller, view.source.as_deref(), change)
}

fn differs(shared: &Shared, view: &View, shown: &mut Arc<List>) -> bool {
    let now = shared.lists.of(&shared.engine, &view.caller);
    let differs = !now.same_as(shown);
    *shown = now;
    differs
}

/// The legacy sessions, which receive notifications without a subscription.
#[derive(Default)]
pub(super) struct Peers {
    /// By session id, or by the address of the session state where there is no id.
    known: Mutex<HashMap<String, Known>>,
    running: AtomicBool,
}

struct Known {
    peer: Peer<RoleServer>,
    view: View,
    session: Arc<Session>,
    shown: Arc<List>,
}

impl Peers {
    /// Adds a session. Sessions whose connection has closed are removed here and before each
    /// notification.
    pub(super) fn add(
        &self,
        server: &Server,
        id: Option<String>,
        view: View,
        peer: Peer<RoleServer>,
    ) {
        let shared = &server.shared;
        let shown = shared.lists.of(&shared.engine, &view.caller);
        let session = server.session.clone();
        let id = id.unwrap_or_else(|| format!("{:p}", Arc::as_ptr(&session)));
        {
            let mut known = self.known.lock();
            known.retain(|_, known| !known.peer.is_transport_closed());
            known.insert(id, Known { peer, view, session, shown });
        }
        if !self.running.swap(true, Ordering::AcqRel) {
            tokio::spawn(follow(Following::new(shared)));
        }
    }

    /// Replaces the credentials of a session: a later request of the MCP client may carry another
    /// token.
    pub(super) fn renew(&self, id: &str, view: &View) {
        if let Some(known) = self.known.lock().get_mut(id) {
            known.view.standing.clone_from(&view.standing);
        }
    }

    /// Returns the sessions to notify, each with its notification. A session whose token is no
    /// longer valid is skipped but stays, because the MCP client may present another token.
    fn concerned(
        &self,
        shared: &Shared,
        news: &News,
    ) -> Vec<(Peer<RoleServer>, ServerNotification)> {
        let mut known = self.known.lock();
        known.retain(|_, known| !known.peer.is_transport_closed());
        let standing = known.values_mut().filter(|known| stands(shared, &known.view));
        let concerned = standing.filter_map(|known| {
            let told = match news {
                News::Over => return None,
                News::Directory(_) => differs(shared, &known.view, &mut known.shown)
                    .then(|| ToolListChangedNotification::default().into()),
                News::Shelf(change) if !shows(shared, &known.view, change) => None,
                News::Shelf(Change { what: Changed::Resource(uri), .. })
                    if !known.session.follows(uri) =>
                {
                    None
                }
                News::Shelf(change) => Some(notice(change.what.clone())),
            };
            told.map(|told| (known.peer.clone(), told))
        });
        concerned.collect()
    }
}

/// Notifies all legacy sessions for as long as the engine runs.
async fn follow(mut following: Following) {
    loop {
        let news = following.next().await;
        if matches!(news, News::Over) {
            return;
        }
        let shared = &following.shared;
        for (peer, notice) in shared.peers.concerned(shared, &news) {
            // Sent in a task per session, so that a slow session does not delay the others.
            tokio::spawn(async move { drop(peer.send_notification(notice).await) });
        }
    }
}
