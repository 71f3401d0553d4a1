//! The lists of what lies beside the tools of upstreams, each kept for a moment: many ask for them,
//! and to read one resource it must be known who has it. One upstream that does not answer costs
//! everybody its patience once, and is left alone for a while then.

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

/// How long an upstream may take to say what it has. One that takes longer is left out of lists.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How long a list is believed, unless the upstream says that it has changed.
const BELIEVED: Duration = Duration::from_secs(5);

/// How long one that did not answer is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(60);

type Place = (String, String);

/// What one upstream has said.
struct Said<T> {
    list: Arc<Vec<T>>,
    until: Instant,
}

/// The lists of one kind.
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

    /// The list of one upstream: what it said a moment ago, or says now.
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

/// All lists.
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

    /// Forgets what is not to be believed any more.
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
                // Some were missed: nothing is known.
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
