//! Passes resources and prompts of upstreams through to MCP clients, unchanged except that prompts
//! are named `NAME.prompt`. A caller that may use an upstream's tools by a rule on `NAME.*` may
//! also read its resources and prompts: rules name a prompt like a tool, and resources as
//! `NAME.resources`. Rules see them as tools of the source `mcp` with the effect `read`. A rule
//! with the verdict `ask` refuses them, because they cannot wait for a person.

// Logging belongs to the legacy revisions, whose servers still use it.
#![allow(deprecated)]
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use rmcp::model::{
    CompleteRequestParams, CompleteResult, ErrorCode, GetPromptRequestParams, GetPromptResponse,
    Prompt, ReadResourceRequestParams, ReadResourceResponse, Reference, Resource, ResourceTemplate,
};
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde_json::Value;
use tokio::sync::broadcast;
use toolcrib::{Caller, Engine};
use toolcrib_sources::mcp::{McpSource, UpstreamChange};
use toolcrib_transport::mcp::{
    PassthroughChange, PassthroughChangeKind, PassthroughChangeStream, PassthroughProvider,
};

use crate::mcp_servers::list_cache::{REQUEST_TIMEOUT, UpstreamLists};

/// Serves the resources, prompts and completions of upstreams to MCP clients.
pub struct UpstreamPassthrough {
    engine: Engine,
    upstreams: Arc<McpSource>,
    lists: UpstreamLists,
}

/// Returns true if the rules allow the caller a name of an upstream, and no kill switch covers it.
fn may_use(engine: &Engine, caller: &Caller, name: &str) -> bool {
    engine.registry().may_use_passthrough(caller, name) && engine.upstreams().is_on(caller, name)
}

/// Returns true like [`may_use`], for a name in a list: rules can hide a name from lists.
fn may_list(engine: &Engine, caller: &Caller, name: &str) -> bool {
    engine.registry().may_list_passthrough(caller, name) && engine.upstreams().is_on(caller, name)
}

type Peers = BTreeMap<String, Peer<RoleClient>>;

impl UpstreamPassthrough {
    pub(super) fn new(engine: Engine, upstreams: Arc<McpSource>) -> Self {
        let lists = UpstreamLists::new(upstreams.clone());
        Self { engine, upstreams, lists }
    }

    /// Returns the upstreams whose resources the caller may read.
    fn readable_peers(&self, caller: &Caller, source: Option<&str>) -> Peers {
        let mut peers = self.resource_peers(caller, source);
        peers.retain(|name, _| may_use(&self.engine, caller, &resources_of(name)));
        peers
    }

    /// Returns the upstreams whose resources the caller sees in lists.
    fn listed_peers(&self, caller: &Caller, source: Option<&str>) -> Peers {
        let mut peers = self.resource_peers(caller, source);
        peers.retain(|name, _| may_list(&self.engine, caller, &resources_of(name)));
        peers
    }

    /// Returns the upstreams of the caller's project that have resources.
    fn resource_peers(&self, caller: &Caller, source: Option<&str>) -> Peers {
        let mut peers = self.upstreams.peers(&caller.project);
        peers.retain(|name, peer| {
            source.is_none_or(|source| source == name)
                && peer.peer_info().is_some_and(|info| info.capabilities.resources.is_some())
        });
        peers
    }

    /// Audits a read of a resource that is in none of the upstreams whose resources the caller may
    /// read: adds one entry for each upstream that the rules withhold from the caller.
    async fn audit_withheld(&self, caller: &Caller, source: Option<&str>) -> Result<(), ErrorData> {
        for upstream in self.resource_peers(caller, source).into_keys() {
            let name = resources_of(&upstream);
            let checked = self.engine.registry().check_passthrough_use(caller, &name).await;
            checked.map_err(not_audited)?;
        }
        Ok(())
    }

    /// Returns the name and the connection of the upstream that has a resource: the first one that
    /// lists it or has a matching template.
    async fn find_resource_owner(
        &self,
        caller: &Caller,
        source: Option<&str>,
        uri: &str,
    ) -> Option<(String, Peer<RoleClient>)> {
        let peers = self.readable_peers(caller, source);
        let lookups = peers.iter().map(|(name, peer)| async move {
            let listed = self.lists.resources(upstream_key(caller, name), peer).await;
            if listed.iter().any(|resource| resource.uri == uri) {
                return true;
            }
            let templates = self.lists.resource_templates(upstream_key(caller, name), peer).await;
            templates.iter().any(|template| matches_uri_template(&template.uri_template, uri))
        });
        let found = join_all(lookups).await.into_iter().position(|has| has)?;
        peers.into_iter().nth(found)
    }

    /// Converts an upstream's error to the one that the MCP client receives, with secrets redacted.
    fn to_mcp_error(&self, caller: &Caller, upstream: &str, error: ServiceError) -> ErrorData {
        match error {
            ServiceError::McpError(mut error) => {
                let clean = |text: &str| self.upstreams.redact(&caller.project, upstream, text);
                error.message = clean(&error.message).into();
                let data = error.data.map(|data| clean(&data.to_string()));
                error.data = data.and_then(|data| serde_json::from_str(&data).ok());
                error
            }
            _ => {
                let message = "the MCP server does not answer";
                ErrorData::new(ErrorCode::INTERNAL_ERROR, message, None)
            }
        }
    }
}

/// Returns the name under which rules know the resources of an upstream.
fn resources_of(upstream: &str) -> String {
    format!("{upstream}.resources")
}

/// Returns the error of a request whose denial could not be written to the audit log.
fn not_audited(error: toolcrib::Error) -> ErrorData {
    ErrorData::new(ErrorCode::INTERNAL_ERROR, error.to_string(), None)
}

fn upstream_key(caller: &Caller, upstream: &str) -> (String, String) {
    (caller.project.clone(), upstream.to_owned())
}

/// Returns `true` if a template can produce this URI: the fixed parts of the template occur in it,
/// in order.
fn matches_uri_template(template: &str, uri: &str) -> bool {
    let mut rest = uri;
    let mut first = true;
    for part in template.split('{') {
        let fixed = match first {
            true => part,
            false => part.split_once('}').map_or("", |(_, fixed)| fixed),
        };
        match (first, rest.find(fixed)) {
            (true, Some(0)) => rest = &rest[fixed.len()..],
            (false, Some(index)) => rest = &rest[index + fixed.len()..],
            _ => return false,
        }
        first = false;
    }
    template.contains('{') && (rest.is_empty() || template.ends_with('}'))
}

async fn with_timeout<T>(
    request: impl Future<Output = Result<T, ServiceError>>,
) -> Result<T, ServiceError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(answer) => answer,
        Err(_) => Err(ServiceError::Timeout { timeout: REQUEST_TIMEOUT }),
    }
}

/// Splits a prompt's name into its upstream and the upstream's own name for it.
fn split_prompt_name(name: &str) -> Option<(&str, &str)> {
    name.split_once('.')
}

#[async_trait]
impl PassthroughProvider for UpstreamPassthrough {
    async fn resources(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<Resource>, ErrorData> {
        let peers = self.listed_peers(caller, source);
        let fetches =
            peers.iter().map(|(name, peer)| self.lists.resources(upstream_key(caller, name), peer));
        let mut all: Vec<Resource> = Vec::new();
        for list in join_all(fetches).await {
            // If two resources share a URI, the first upstream's is listed, as in `read`.
            all.extend(list.iter().filter(|resource| !resource.uri.is_empty()).cloned());
        }
        let mut seen = std::collections::HashSet::new();
        all.retain(|resource| seen.insert(resource.uri.clone()));
        Ok(all)
    }

    async fn resource_templates(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<ResourceTemplate>, ErrorData> {
        let peers = self.listed_peers(caller, source);
        let fetches = peers
            .iter()
            .map(|(name, peer)| self.lists.resource_templates(upstream_key(caller, name), peer));
        Ok(join_all(fetches).await.iter().flat_map(|list| list.iter().cloned()).collect())
    }

    async fn read_resource(
        &self,
        caller: &Caller,
        source: Option<&str>,
        params: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData> {
        let Some((name, peer)) = self.find_resource_owner(caller, source, &params.uri).await else {
            self.audit_withheld(caller, source).await?;
            return Ok(None);
        };
        let read = with_timeout(peer.read_resource_once(params)).await;
        read.map(Some).map_err(|error| self.to_mcp_error(caller, &name, error))
    }

    async fn prompts(&self, caller: &Caller) -> Result<Vec<Prompt>, ErrorData> {
        let mut peers = self.upstreams.peers(&caller.project);
        peers.retain(|_, peer| {
            peer.peer_info().is_some_and(|info| info.capabilities.prompts.is_some())
        });
        let fetches = peers.iter().map(|(name, peer)| async move {
            (name, self.lists.prompts(upstream_key(caller, name), peer).await)
        });
        let mut all = Vec::new();
        for (upstream, list) in join_all(fetches).await {
            for mut prompt in list.iter().cloned() {
                prompt.name = format!("{upstream}.{}", prompt.name);
                if may_list(&self.engine, caller, &prompt.name) {
                    all.push(prompt);
                }
            }
        }
        Ok(all)
    }

    async fn get_prompt(
        &self,
        caller: &Caller,
        params: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData> {
        let mut params = params;
        let name = params.name.to_string();
        let Some((upstream, upstream_name)) = split_prompt_name(&name) else { return Ok(None) };
        let checked = self.engine.registry().check_passthrough_use(caller, &name).await;
        let is_allowed = checked.map_err(not_audited)?;
        let peer = self.upstreams.peers(&caller.project).remove(upstream);
        let is_on = || self.engine.upstreams().is_on(caller, &name);
        let Some(peer) = peer.filter(|_| is_allowed && is_on()) else { return Ok(None) };
        params.name = upstream_name.to_owned();
        let got = with_timeout(peer.get_prompt_once(params)).await;
        got.map(Some).map_err(|error| self.to_mcp_error(caller, upstream, error))
    }

    async fn complete(
        &self,
        caller: &Caller,
        source: Option<&str>,
        params: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData> {
        let mut params = params;
        let peer = match &mut params.r#ref {
            Reference::Prompt(prompt) => {
                let name = prompt.name.clone();
                let Some((upstream, upstream_name)) = split_prompt_name(&name) else {
                    return Ok(CompleteResult::default());
                };
                prompt.name = upstream_name.to_owned();
                let allowed = may_use(&self.engine, caller, &name);
                let peer = self.upstreams.peers(&caller.project).remove(upstream);
                peer.filter(|_| allowed).map(|peer| (upstream.to_owned(), peer))
            }
            Reference::Resource(resource) => {
                let uri = resource.uri.clone();
                let peers = self.readable_peers(caller, source);
                let fetches = peers.iter().map(|(name, peer)| {
                    self.lists.resource_templates(upstream_key(caller, name), peer)
                });
                let listed = join_all(fetches).await;
                let has = listed.iter().position(|list| list.iter().any(|t| t.uri_template == uri));
                has.and_then(|found| peers.into_iter().nth(found))
            }
            _ => None,
        };
        match peer {
            Some((name, peer)) => {
                let completed = with_timeout(peer.complete(params)).await;
                completed.map_err(|error| self.to_mcp_error(caller, &name, error))
            }
            None => Ok(CompleteResult::default()),
        }
    }

    async fn subscribe_resource(
        &self,
        caller: &Caller,
        source: Option<&str>,
        uri: &str,
    ) -> Result<(), ErrorData> {
        let Some((name, _)) = self.find_resource_owner(caller, source, uri).await else {
            return Ok(());
        };
        let followed = self.upstreams.follow_resource(&caller.project, &name, uri).await;
        followed.map_err(|error| self.to_mcp_error(caller, &name, error))
    }

    async fn set_log_level(&self, caller: &Caller, source: Option<&str>, level: &Value) {
        let mut names: Vec<String> = self.upstreams.peers(&caller.project).into_keys().collect();
        names.retain(|name| {
            source.is_none_or(|source| source == name) && self.has_source(caller, name)
        });
        self.upstreams.include_logs(&caller.project, &names, level).await;
    }

    fn instructions(&self, caller: &Caller, source: Option<&str>) -> Vec<(String, String)> {
        let mut peers = self.upstreams.peers(&caller.project);
        peers.retain(|name, _| {
            source.is_none_or(|source| source == name) && self.has_source(caller, name)
        });
        let instructions = peers.into_iter().filter_map(|(name, peer)| {
            let text = peer.peer_info()?.instructions.clone()?;
            let text = self.upstreams.redact(&caller.project, &name, &text);
            Some((name, text))
        });
        instructions.collect()
    }

    fn has_source(&self, caller: &Caller, source: &str) -> bool {
        let (engine, prefix) = (&self.engine, format!("{source}."));
        let offered = || {
            let tools = engine.registry().tools(caller);
            tools.iter().any(|tool| tool.definition.name.starts_with(&prefix))
        };
        let is_configured = self.upstreams.has(&caller.project, source);
        is_configured && (may_use(engine, caller, &resources_of(source)) || offered())
    }

    fn subscribe_changes(&self) -> Option<Box<dyn PassthroughChangeStream>> {
        let changes = Some(self.upstreams.subscribe_changes());
        Some(Box::new(UpstreamChangeStream { changes, upstreams: self.upstreams.clone() }))
    }

    fn can_see_change(
        &self,
        caller: &Caller,
        source: Option<&str>,
        change: &PassthroughChange,
    ) -> bool {
        let Some((project, name)) = &change.origin else { return true };
        let is_in_scope = *project == caller.project && source.is_none_or(|source| source == name);
        if matches!(change.kind, PassthroughChangeKind::Log(_)) {
            return is_in_scope && self.has_source(caller, name);
        }
        // Rules name each prompt like a tool, and the notification does not say which prompt
        // changed.
        let is_prompt_list = change.kind == PassthroughChangeKind::PromptList;
        is_in_scope && (is_prompt_list || may_use(&self.engine, caller, &resources_of(name)))
    }
}

/// A stream of the changes that all upstreams report.
struct UpstreamChangeStream {
    changes: Option<broadcast::Receiver<((String, String), UpstreamChange)>>,
    upstreams: Arc<McpSource>,
}

impl UpstreamChangeStream {
    /// Returns a log message with secrets redacted, and with the upstream's name before that of its
    /// logger.
    fn log_message(&self, (project, name): &(String, String), message: &Value) -> Value {
        let redacted = self.upstreams.redact(project, name, &message.to_string());
        let mut message: Value = serde_json::from_str(&redacted).unwrap_or_default();
        let logger = message.get("logger").and_then(Value::as_str);
        let logger = logger.map_or_else(|| name.clone(), |own| format!("{name}.{own}"));
        if let Value::Object(fields) = &mut message {
            fields.insert("logger".to_owned(), logger.into());
        }
        message
    }
}

#[async_trait]
impl PassthroughChangeStream for UpstreamChangeStream {
    async fn next(&mut self) -> PassthroughChange {
        loop {
            let Some(changes) = &mut self.changes else { return std::future::pending().await };
            match changes.recv().await {
                Ok((key, change)) => {
                    let kind = match change {
                        UpstreamChange::ResourceList => PassthroughChangeKind::ResourceList,
                        UpstreamChange::PromptList => PassthroughChangeKind::PromptList,
                        UpstreamChange::ResourceContent(uri) => {
                            PassthroughChangeKind::ResourceContent(uri)
                        }
                        UpstreamChange::Log(message) => {
                            PassthroughChangeKind::Log(self.log_message(&key, &message))
                        }
                    };
                    return PassthroughChange { kind, origin: Some(key) };
                }
                // Some changes were missed: report one that makes the client fetch the lists again.
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    return PassthroughChange {
                        kind: PassthroughChangeKind::ResourceList,
                        origin: None,
                    };
                }
                Err(broadcast::error::RecvError::Closed) => self.changes = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches_uri_template;

    #[test]
    fn uri_templates_match_their_expansions() {
        assert!(matches_uri_template("file:///{path}", "file:///a/b.txt"));
        assert!(matches_uri_template("test://t/{id}/data", "test://t/7/data"));
        assert!(!matches_uri_template("test://t/{id}/data", "test://t/7/other"));
        assert!(!matches_uri_template("test://t/{id}", "else://t/7"));
        assert!(!matches_uri_template("test://fixed", "test://fixed"));
    }
}
