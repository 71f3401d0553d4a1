//! Upstreams: the MCP servers that Toolcrib imports tools from, and their tools.
//!
//! The tools of an upstream are stored, so that they are known after a start before the upstream
//! answers, and so that a definition other than the accepted one is detected. A source communicates
//! with the upstream; the engine holds the record.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use super::catalog::{Catalog, CatalogEntry, check_definition};
use crate::domain::caller::Caller;
use crate::domain::directory::{AuditEntry, DirectoryChange, Upstream};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::tool::{Executor, ToolDefinition, check_upstream_name, is_mcp_helper_name};
use crate::ports::core::from_store_error;
use crate::registry::Upstreams;
use crate::schema::{self, CompileBudget};

/// Prefix of the names under which event subscriptions are stored. No upstream has such a name.
const EVENT_SUBSCRIPTION_PREFIX: &str = "events:";

impl Upstreams {
    /// Returns every upstream of all projects, for the source that connects to them.
    pub fn list_all(&self) -> Vec<Upstream> {
        self.registry.catalog().directory().upstreams.clone()
    }

    /// Requires that this caller may add and remove the upstreams of its project.
    pub fn require_admin(&self, caller: &Caller) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(&caller.project))
    }

    /// Adds an upstream, or replaces its record.
    pub async fn put(
        &self,
        caller: &Caller,
        name: &str,
        kind: &str,
        settings: Json,
    ) -> Result<Upstream, Error> {
        self.require_admin(caller)?;
        check_upstream_name(name).map_err(|reason| {
            Error::from(Fault::new(Code::ValidationError, reason).with_detail(json!({
                "pointer": "/name",
            })))
        })?;
        let (registry, project) = (&self.registry, caller.project.clone());
        let added_ms = self.core.clock.wall_ms();
        let (name, kind) = (name.to_owned(), kind.to_owned());
        let upstream = Upstream { project, name, kind, settings, added_ms };
        let entry = registry.audit_entry(
            caller,
            &upstream.project,
            "upstream.set",
            &upstream.name,
            &upstream.kind,
        );
        registry
            .change_directory(|_| {
                let change = DirectoryChange::PutUpstream(Box::new(upstream.clone()));
                Ok((change, Some(entry.clone())))
            })
            .await?;
        Ok(upstream)
    }

    /// Removes an upstream with its tools. Calls already made with them run to completion.
    pub async fn remove(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.require_admin(caller)?;
        let (registry, project) = (&self.registry, &caller.project);
        let entry = registry.audit_entry(caller, project, "upstream.removed", name, "");
        registry
            .change_directory(|catalog| {
                let mut upstreams = catalog.directory().upstreams.iter();
                if !upstreams.any(|other| other.project == *project && other.name == name) {
                    let excerpt: String = name.chars().take(80).collect();
                    let message = format!("there is no MCP server \"{excerpt}\"");
                    return Err(Error::not_found(message, "toolcrib mcp ls lists the MCP servers"));
                }
                let change = DirectoryChange::DropUpstream {
                    project: project.clone(),
                    name: name.to_owned(),
                };
                Ok((change, Some(entry.clone())))
            })
            .await
    }

    /// Returns the stored tools of an upstream, sorted by name.
    pub fn tools(&self, project: &str, upstream: &str) -> Vec<Arc<CatalogEntry>> {
        let mut tools = self.registry.catalog().tools(project);
        tools.retain(|entry| belongs_to_upstream(&entry.definition, upstream));
        tools
    }

    /// Returns the project and name of each upstream that has tools here, whether or not it is
    /// still configured.
    pub fn list_with_tools(&self) -> HashSet<(String, String)> {
        let catalog = self.registry.catalog();
        let imported = catalog.directory().tools.iter().filter(|t| t.executor == Executor::MCP);
        let owners = imported.filter_map(|tool| {
            let (upstream, _) = tool.name.split_once('.')?;
            Some((tool.project.clone()?, upstream.to_owned()))
        });
        owners.collect()
    }

    /// Replaces the tools of an upstream. Returns the tools that were refused, each with the
    /// reason; one unusable tool does not exclude the others.
    pub async fn set_tools(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<ToolDefinition>,
        reason: &str,
    ) -> Result<Vec<(String, String)>, Error> {
        let checking = schema::compile_off_thread(project, move || compile_usable(tools));
        let (compiled, mut unusable) =
            checking.await.map_err(|error| Error::Internal(Box::new(error)))?;
        let usable: Vec<_> = compiled.iter().map(|entry| entry.definition.clone()).collect();
        let limit = self.core.limits.max_tools_per_project;
        let refused = Mutex::new(Vec::new());
        let entry = AuditEntry {
            at_ms: self.core.clock.wall_ms(),
            project: project.to_owned(),
            agent: upstream.to_owned(),
            action: "upstream.tools".to_owned(),
            subject: upstream.to_owned(),
            reason: reason.to_owned(),
            ..AuditEntry::default()
        };
        self.registry
            .change_directory_with(&compiled, |catalog| {
                let (fit, rest) = select_registrable(catalog, project, upstream, &usable, limit);
                *refused.lock() = rest;
                let (project, upstream) = (project.to_owned(), upstream.to_owned());
                let change = DirectoryChange::SetUpstreamTools { project, upstream, tools: fit };
                Ok((change, Some(entry.clone())))
            })
            .await?;
        unusable.extend(refused.into_inner());
        Ok(unusable)
    }

    /// Removes the tools of an upstream that is no longer configured.
    pub async fn remove_tools(&self, project: &str, upstream: &str) -> Result<(), Error> {
        let (project, name) = (project.to_owned(), upstream.to_owned());
        let change = DirectoryChange::DropUpstream { project, name };
        self.registry.change_directory(|_| Ok((change.clone(), None))).await
    }

    /// Returns the stored OAuth credential of an upstream. Only for the source that connects to it.
    pub async fn credential(&self, project: &str, upstream: &str) -> Result<Option<String>, Error> {
        self.core.store.credentials().credential(project, upstream).await.map_err(from_store_error)
    }

    /// Stores the OAuth credential of an upstream, or deletes it.
    pub async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), Error> {
        let saved = self.core.store.credentials().set_credential(project, upstream, grant).await;
        saved.map_err(from_store_error)
    }

    /// Returns the project and name of each upstream that has a stored credential.
    pub async fn list_with_credentials(&self) -> Result<Vec<(String, String)>, Error> {
        let mut stored = self.stored_credentials().await?;
        stored.retain(|(_, name)| !name.starts_with(EVENT_SUBSCRIPTION_PREFIX));
        Ok(stored)
    }

    async fn stored_credentials(&self) -> Result<Vec<(String, String)>, Error> {
        self.core.store.credentials().upstreams_with_credentials().await.map_err(from_store_error)
    }

    /// Stores an event subscription of an MCP client, or deletes it. It contains the secret of a
    /// webhook, so it is stored like a credential. The transport that writes it defines its
    /// content.
    pub async fn store_event_subscription(
        &self,
        project: &str,
        id: &str,
        subscription: Option<String>,
    ) -> Result<(), Error> {
        let name = format!("{EVENT_SUBSCRIPTION_PREFIX}{id}");
        self.set_credential(project, &name, subscription).await
    }

    /// Returns the project, id and content of each stored event subscription.
    pub async fn event_subscriptions(&self) -> Result<Vec<(String, String, String)>, Error> {
        let mut found = Vec::new();
        for (project, name) in self.stored_credentials().await? {
            let Some(id) = name.strip_prefix(EVENT_SUBSCRIPTION_PREFIX) else { continue };
            let text = self.credential(&project, &name).await?;
            found.extend(text.map(|text| (project.clone(), id.to_owned(), text)));
        }
        Ok(found)
    }
}

/// Compiles the usable ones of an upstream's tools, within the budget of one request. Also returns
/// the others, each with the reason.
fn compile_usable(tools: Vec<ToolDefinition>) -> (Vec<Arc<CatalogEntry>>, Vec<(String, String)>) {
    let mut budget = CompileBudget::for_request();
    let (mut usable, mut unusable) = (Vec::with_capacity(tools.len()), Vec::new());
    for tool in tools {
        let name = tool.name.clone();
        let compiled = check_definition(&tool)
            .and_then(|()| CatalogEntry::compile_within(tool, &mut budget).map_err(Error::from));
        match compiled {
            Ok(entry) => usable.push(Arc::new(entry)),
            Err(error) => unusable.push((name, error_message(&error))),
        }
    }
    (usable, unusable)
}

/// Returns true if the tool was imported from this upstream. A source's own tools have no project.
fn belongs_to_upstream(tool: &ToolDefinition, upstream: &str) -> bool {
    let owner = tool.name.split_once('.').map(|(upstream, _)| upstream);
    tool.executor == Executor::MCP && tool.project.is_some() && owner == Some(upstream)
}

/// Selects the tools whose names are free, up to the limit. Also returns the refused ones, each
/// with the reason.
fn select_registrable(
    catalog: &Catalog,
    project: &str,
    upstream: &str,
    tools: &[ToolDefinition],
    limit: usize,
) -> (Vec<ToolDefinition>, Vec<(String, String)>) {
    let existing = catalog.tools(project);
    let mut used_names: HashSet<&str> = HashSet::new();
    for entry in existing.iter().filter(|entry| !belongs_to_upstream(&entry.definition, upstream)) {
        used_names.insert(entry.definition.name.as_str());
    }
    let mut capacity = limit.saturating_sub(used_names.len());
    let (mut fit, mut rest) = (Vec::new(), Vec::new());
    for tool in tools {
        let reason = match () {
            () if is_mcp_helper_name(&tool.name) => "it is the name of a tool of the MCP endpoint",
            () if !used_names.insert(tool.name.as_str()) => "there is another tool of this name",
            () if capacity == 0 => "the project has limits.max_tools_per_project tools already",
            () => {
                capacity -= 1;
                fit.push(tool.clone());
                continue;
            }
        };
        rest.push((tool.name.clone(), reason.to_owned()));
    }
    (fit, rest)
}

fn error_message(error: &Error) -> String {
    match error {
        Error::Refused { fault, .. } => fault.message.clone(),
        Error::Internal(_) => "internal error".to_owned(),
    }
}
