//! A short-lived cache of the resource, template and prompt lists of upstreams. Many requests need
//! them, and reading one resource requires knowing which upstream has it. An upstream that does not
//! answer delays requests by the timeout once, and then counts as empty for a while.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{Prompt, Resource, ResourceTemplate};
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::Instant;

use crate::sources::mcp::{News, Upstreams, pages};

/// Maximum time an upstream may take to return a list. A slower one is left out.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Time a list stays cached, unless the upstream reports a change.
const BELIEVED: Duration = Duration::from_secs(5);

/// Time an upstream that timed out is not queried again.
const LEFT_ALONE: Duration = Duration::from_secs(60);

type Place = (String, String);

/// The cached list of one upstream.
struct Said<T> {
    list: Arc<Vec<T>>,
    until: Instant,
}

/// The cached lists of one kind.
struct Kind<T> {
    method: &'static str,
    said: Mutex<HashMap<Place, Said<T>>>,
}

impl<T> Kind<T> {
    fn new(method: &'static str) -> Self {
        Self { method, said: Mutex::default() }
    }

    fn forget(&self, place: &Place) {
        self.said.lock().remove(place);
    }

    fn forget_old(&self, now: Instant) {
        self.said.lock().retain(|_, said| said.until > now);
    }

    /// Returns the list of one upstream, from the cache or freshly fetched.
    async fn of(
        &self,
        upstreams: &Upstreams,
        place: Place,
        asking: impl Future<Output = Result<Vec<T>, ServiceError>>,
    ) -> Arc<Vec<T>> {
        if let Some(said) = self.said.lock().get(&place) {
            return said.list.clone();
        }
        let (list, kept) = match tokio::time::timeout(PATIENCE, asking).await {
            Ok(Ok(list)) => (list, Some(BELIEVED)),
            Ok(Err(ServiceError::McpError(_))) => (Vec::new(), Some(BELIEVED)),
            Ok(Err(_)) => (Vec::new(), None),
            Err(_) => (Vec::new(), Some(LEFT_ALONE)),
        };
        let why = format!("it does not answer {}", self.method);
        match kept == Some(LEFT_ALONE) {
            true => upstreams.complain(&place.0, &place.1, &why),
            false => upstreams.withdraw(&place.0, &place.1, &why),
        }
        let list = Arc::new(list);
        if let Some(time) = kept {
            let said = Said { list: list.clone(), until: Instant::now() + time };
            self.said.lock().insert(place, said);
        }
        list
    }
}

/// All cached lists.
pub(super) struct Lists {
    upstreams: Arc<Upstreams>,
    heard: Mutex<broadcast::Receiver<(Place, News)>>,
    resources: Kind<Resource>,
    templates: Kind<ResourceTemplate>,
    prompts: Kind<Prompt>,
}

impl Lists {
    pub(super) fn new(upstreams: Arc<Upstreams>) -> Self {
        Self {
            heard: Mutex::new(upstreams.changes()),
            upstreams,
            resources: Kind::new("resources/list"),
            templates: Kind::new("resources/templates/list"),
            prompts: Kind::new("prompts/list"),
        }
    }

    /// Drops the entries that have expired or that an upstream reported as changed.
    fn look(&self) {
        let mut heard = self.heard.lock();
        let mut now = Instant::now();
        loop {
            match heard.try_recv() {
                Ok((place, News::Resources)) => {
                    self.resources.forget(&place);
                    self.templates.forget(&place);
                }
                Ok((place, News::Prompts)) => self.prompts.forget(&place),
                Ok((_, News::Resource(_))) => {}
                // Some changes were missed, so every entry expires.
                Err(TryRecvError::Lagged(_)) => now += LEFT_ALONE + BELIEVED,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        self.resources.forget_old(now);
        self.templates.forget_old(now);
        self.prompts.forget_old(now);
    }

    pub(super) async fn resources(
        &self,
        place: Place,
        peer: &Peer<RoleClient>,
    ) -> Arc<Vec<Resource>> {
        self.look();
        self.resources.of(&self.upstreams, place, pages::resources(peer)).await
    }

    pub(super) async fn templates(
        &self,
        place: Place,
        peer: &Peer<RoleClient>,
    ) -> Arc<Vec<ResourceTemplate>> {
        self.look();
        self.templates.of(&self.upstreams, place, pages::templates(peer)).await
    }

    pub(super) async fn prompts(&self, place: Place, peer: &Peer<RoleClient>) -> Arc<Vec<Prompt>> {
        self.look();
        self.prompts.of(&self.upstreams, place, pages::prompts(peer)).await
    }
}
