//! Upstreams: the MCP servers that Toolcrib imports tools from, and their tools.
//!
//! The tools of an upstream are stored, so that they are known after a start before the upstream
//! answers, and so that a definition other than the accepted one is detected. A source communicates
//! with the upstream; the engine holds the record.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use super::catalog::{Catalog, Entry, check_definition};
use super::{Engine, unavailable};
use crate::caller::Caller;
use crate::directory::{AuditEntry, Change, Upstream};
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use crate::policy::Decision;
use crate::tool::{Definition, Executor, check_upstream_name};

impl Engine {
    /// Returns every upstream of all projects, for the source that connects to them.
    pub fn upstreams(&self) -> Vec<Upstream> {
        self.inner.catalog().directory().upstreams.clone()
    }

    /// Requires that this caller may add and remove the upstreams of its project.
    pub fn check_upstreams(&self, caller: &Caller) -> Result<(), Error> {
        self.require_admin(caller, Some(&caller.project))
    }

    /// Adds an upstream, or replaces its record.
    pub async fn put_upstream(
        &self,
        caller: &Caller,
        name: &str,
        kind: &str,
        settings: Json,
    ) -> Result<Upstream, Error> {
        self.check_upstreams(caller)?;
        check_upstream_name(name).map_err(|why| {
            Error::from(Fault::new(Code::ValidationError, why).with_detail(json!({
                "pointer": "/name",
            })))
        })?;
        let (inner, project) = (&self.inner, caller.project.clone());
        let added_ms = inner.clock.now_ms();
        let (name, kind) = (name.to_owned(), kind.to_owned());
        let upstream = Upstream { project, name, kind, settings, added_ms };
        let entry =
            inner.entry(caller, &upstream.project, "upstream.set", &upstream.name, &upstream.kind);
        inner
            .change(|_| {
                let change = Change::PutUpstream(Box::new(upstream.clone()));
                Ok((change, Some(entry.clone())))
            })
            .await?;
        Ok(upstream)
    }

    /// Removes an upstream with its tools. Calls already made with them run to completion.
    pub async fn drop_upstream(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.check_upstreams(caller)?;
        let (inner, project) = (&self.inner, &caller.project);
        let entry = inner.entry(caller, project, "upstream.removed", name, "");
        inner
            .change(|catalog| {
                let mut known = catalog.directory().upstreams.iter();
                if !known.any(|known| known.project == *project && known.name == name) {
                    let shown: String = name.chars().take(80).collect();
                    let message = format!("there is no source \"{shown}\"");
                    return Err(Error::refused(Code::NotFound, message));
                }
                let change =
                    Change::DropUpstream { project: project.clone(), name: name.to_owned() };
                Ok((change, Some(entry.clone())))
            })
            .await
    }

    /// Returns the stored tools of an upstream, sorted by name.
    pub fn upstream_tools(&self, project: &str, upstream: &str) -> Vec<Arc<Entry>> {
        let mut tools = self.inner.catalog().tools(project);
        tools.retain(|entry| belongs(&entry.definition, upstream));
        tools
    }

    /// Returns the project and name of each upstream that has tools here, whether or not it is
    /// still configured.
    pub fn upstreams_with_tools(&self) -> HashSet<(String, String)> {
        let catalog = self.inner.catalog();
        let brought = catalog.directory().tools.iter().filter(|t| t.executor == Executor::Mcp);
        let whose = brought.filter_map(|tool| {
            let (upstream, _) = tool.name.split_once('.')?;
            Some((tool.project.clone()?, upstream.to_owned()))
        });
        whose.collect()
    }

    /// Replaces the tools of an upstream. Returns the tools that were refused, each with the
    /// reason; one unusable tool does not exclude the others.
    pub async fn set_upstream_tools(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<Definition>,
        why: &str,
    ) -> Result<Vec<(String, String)>, Error> {
        let inner = &self.inner;
        let mut unusable = Vec::new();
        let mut usable = Vec::with_capacity(tools.len());
        for tool in tools {
            match check_definition(&tool) {
                Ok(()) => usable.push(tool),
                Err(error) => unusable.push((tool.name, told(&error))),
            }
        }
        let limit = inner.limits.max_tools_per_project;
        let refused = Mutex::new(Vec::new());
        let entry = AuditEntry {
            at_ms: inner.clock.now_ms(),
            project: project.to_owned(),
            agent: upstream.to_owned(),
            action: "upstream.tools".to_owned(),
            subject: upstream.to_owned(),
            reason: why.to_owned(),
        };
        inner
            .change(|catalog| {
                let (fit, rest) = fitting(catalog, project, upstream, &usable, limit);
                *refused.lock() = rest;
                let (project, upstream) = (project.to_owned(), upstream.to_owned());
                let change = Change::SetUpstreamTools { project, upstream, tools: fit };
                Ok((change, Some(entry.clone())))
            })
            .await?;
        unusable.extend(refused.into_inner());
        Ok(unusable)
    }

    /// Removes the tools of an upstream that is no longer configured.
    pub async fn forget_upstream(&self, project: &str, upstream: &str) -> Result<(), Error> {
        let (project, name) = (project.to_owned(), upstream.to_owned());
        let change = Change::DropUpstream { project, name };
        self.inner.change(|_| Ok((change.clone(), None))).await
    }

    /// Returns the stored OAuth credential of an upstream. Only for the source that connects to it.
    pub async fn upstream_grant(
        &self,
        project: &str,
        upstream: &str,
    ) -> Result<Option<String>, Error> {
        self.inner.store.grants().grant(project, upstream).await.map_err(unavailable)
    }

    /// Stores the OAuth credential of an upstream, or deletes it.
    pub async fn keep_upstream_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), Error> {
        let kept = self.inner.store.grants().keep_grant(project, upstream, grant).await;
        kept.map_err(unavailable)
    }

    /// Returns the project and name of each upstream that has a stored credential.
    pub async fn upstream_grants(&self) -> Result<Vec<(String, String)>, Error> {
        self.inner.store.grants().grants().await.map_err(unavailable)
    }

    /// Returns true if the access rules allow the caller to use this name, be it a tool or another
    /// feature of an upstream.
    pub fn may_use(&self, caller: &Caller, name: &str) -> bool {
        self.inner.catalog().decide(caller, name) == Decision::Allowed
    }
}

/// Returns true if the tool was imported from this upstream. A source's own tools have no project.
fn belongs(tool: &Definition, upstream: &str) -> bool {
    let whose = tool.name.split_once('.').map(|(upstream, _)| upstream);
    tool.executor == Executor::Mcp && tool.project.is_some() && whose == Some(upstream)
}

/// Selects the tools whose names are free, up to the limit. Also returns the refused ones, each
/// with the reason.
fn fitting(
    catalog: &Catalog,
    project: &str,
    upstream: &str,
    tools: &[Definition],
    limit: usize,
) -> (Vec<Definition>, Vec<(String, String)>) {
    let others = catalog.tools(project);
    let mut taken: HashSet<&str> = HashSet::new();
    for entry in others.iter().filter(|entry| !belongs(&entry.definition, upstream)) {
        taken.insert(entry.definition.name.as_str());
    }
    let mut room = limit.saturating_sub(taken.len());
    let (mut fit, mut rest) = (Vec::new(), Vec::new());
    for tool in tools {
        let why = match () {
            () if !taken.insert(tool.name.as_str()) => "there is another tool of this name",
            () if room == 0 => "the project has limits.max_tools_per_project tools already",
            () => {
                room -= 1;
                fit.push(tool.clone());
                continue;
            }
        };
        rest.push((tool.name.clone(), why.to_owned()));
    }
    (fit, rest)
}

fn told(error: &Error) -> String {
    match error {
        Error::Refused { fault, .. } => fault.message.clone(),
        Error::Internal(_) => "internal error".to_owned(),
    }
}
