//! Connected programs that provide tools: the queue of work for them, and their connections.

pub(crate) mod connections;
pub(crate) mod queue;
use std::collections::HashSet;
use std::sync::Arc;

use queue::ClientQueue;

use crate::ports::core::Core;
use crate::registry::{DirectoryListener, Registry};

pub use connections::ConnectOptions;
pub use queue::{ClientMessage, ClientSession, Redelivery, Transport, WorkItem};

/// Connections of programs that provide tools.
pub struct Clients {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) client_queue: Arc<ClientQueue>,
}

impl DirectoryListener for ClientQueue {
    fn client_tools_changed(&self, project: &str, client_id: &str, tools: &HashSet<String>) {
        self.set_tools(project, client_id, tools);
    }
}
