//! Client connections: the operations that all client transports share.
//!
//! A connection ends when its `ClientSession` (`queue.rs`) is dropped. `disconnect` in
//! `queue/state.rs` then decides about its work; `docs/ARCHITECTURE.md` has the rules under "When a
//! tool client disconnects".

use std::collections::BTreeMap;

use crate::clients::Clients;
use crate::clients::queue::{ClientSession, ClientView, ConnectRequest, Redelivery, Transport};
use crate::domain::caller::Caller;
use crate::domain::directory::DirectoryChange;
use crate::domain::fault::{Code, Error};
use crate::registry::catalog::{
    check_client_id, require_client_owner, require_provider, require_registered,
};

/// A request of a client to connect and receive work.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Id under which the client is registered in its project.
    pub client_id: String,
    /// Number of requests the client handles at the same time.
    pub window: usize,
    /// Acknowledged items that the client receives again when it reconnects.
    pub redelivery: Redelivery,
    /// Kind of the connection: a stream or a single poll.
    pub transport: Transport,
}

impl Clients {
    /// Connects a client to the client queue.
    pub async fn connect(
        &self,
        caller: &Caller,
        connecting: ConnectOptions,
    ) -> Result<ClientSession, Error> {
        require_provider(caller)?;
        check_client_id(&connecting.client_id)?;
        self.registry.adopt_client(caller, &connecting.client_id).await?;
        let catalog = self.registry.catalog();
        require_client_owner(&catalog, caller, &connecting.client_id)?;
        require_registered(&catalog, &caller.project, &connecting.client_id)?;
        Ok(self.client_queue.connect(ConnectRequest {
            project: caller.project.clone(),
            tools: catalog.tools_offered_by(&caller.project, &connecting.client_id),
            client_id: connecting.client_id,
            window: connecting.window,
            redelivery: connecting.redelivery,
            transport: connecting.transport,
        }))
    }

    /// Removes a client, with all tools it offers. It must be disconnected and hold no leases.
    pub async fn remove_client(&self, caller: &Caller, client_id: &str) -> Result<(), Error> {
        require_provider(caller)?;
        let project = &caller.project;
        self.registry
            .change_directory(|catalog| {
                require_client_owner(catalog, caller, client_id)?;
                if catalog.client(project, client_id).is_none() {
                    let message = format!("there is no client \"{client_id}\"");
                    return Err(Error::refused(Code::NotFound, message));
                }
                if self.client_queue.is_busy(project, client_id) {
                    let message = format!(
                        "client \"{client_id}\" is connected or holds unanswered requests; close \
                         its connections and answer the requests first"
                    );
                    return Err(Error::refused(Code::Conflict, message));
                }
                let (project, client_id) = (project.clone(), client_id.to_owned());
                Ok((DirectoryChange::DropClient { project, client_id }, None))
            })
            .await?;
        self.registry.refresh_client_offers(project, client_id);
        self.client_queue.remove_if_idle(project, client_id);
        Ok(())
    }

    /// Returns the project's clients: the registered ones, and any other that is connected or holds
    /// leases.
    pub fn clients(&self, caller: &Caller) -> Result<Vec<ClientView>, Error> {
        if !caller.may_administer() {
            let message = "only an admin's key can list clients";
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let project = &caller.project;
        let seen = self.client_queue.clients(project).into_iter();
        let mut views: BTreeMap<String, ClientView> =
            seen.map(|view| (view.client_id.clone(), view)).collect();
        let catalog = self.registry.catalog();
        let directory = catalog.directory();
        for client in directory.clients.iter().filter(|client| client.project == *project) {
            views.entry(client.client_id.clone()).or_insert_with(|| ClientView {
                client_id: client.client_id.clone(),
                connections: 0,
                leased: 0,
                tools: Vec::new(),
                last_seen_ms: None,
            });
        }
        for offer in directory.offers.iter().filter(|offer| offer.project == *project) {
            let view = views.get_mut(&offer.client_id);
            if let Some(view) = view.filter(|view| view.last_seen_ms.is_none()) {
                view.tools.push(offer.tool.clone());
            }
        }
        for view in views.values_mut() {
            view.tools.sort();
            view.tools.dedup();
        }
        Ok(views.into_values().collect())
    }

    /// Returns the number of open client connections, over all projects.
    pub fn client_connection_count(&self) -> usize {
        self.client_queue.connection_count()
    }
}
