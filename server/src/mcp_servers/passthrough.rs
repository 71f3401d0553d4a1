//! Passes resources and prompts of upstreams through to MCP clients, unchanged except that prompts
//! are named `NAME.prompt`. A caller that may use an upstream's tools by a rule on `NAME.*` may
//! also read its resources and prompts: rules name a prompt like a tool, and resources as
//! `NAME.resources`.

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
    engine.registry().is_allowed(caller, name) && engine.upstreams().is_on(caller, name)
}

type Peers = BTreeMap<String, Peer<RoleClient>>;

impl UpstreamPassthrough {
    pub(super) fn new(engine: Engine, upstreams: Arc<McpSource>) -> Self {
        let lists = UpstreamLists::new(upstreams.clone());
        Self { engine, upstreams, lists }
    }

    /// Returns the upstreams whose resources the caller may read.
    fn readable_peers(&self, caller: &Caller, source: Option<&str>) -> Peers {
        let mut peers = self.upstreams.peers(&caller.project);
        peers.retain(|name, _| source.is_none_or(|source| source == name));
        peers.retain(|name, peer| {
            let has = peer.peer_info().is_some_and(|info| info.capabilities.resources.is_some());
            has && may_use(&self.engine, caller, &format!("{name}.resources"))
        });
        peers
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
        let peers = self.readable_peers(caller, source);
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
        let peers = self.readable_peers(caller, source);
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
            return Ok(None);
        };
        let mut params = params;
        params.meta = None;
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
                if may_use(&self.engine, caller, &prompt.name) {
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
        let peer = self.upstreams.peers(&caller.project).remove(upstream);
        let Some(peer) = peer.filter(|_| may_use(&self.engine, caller, &name)) else {
            return Ok(None);
        };
        params.name = upstream_name.to_owned();
        params.meta = None;
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
        params.meta = None;
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

    fn has_source(&self, caller: &Caller, source: &str) -> bool {
        let (engine, prefix) = (&self.engine, format!("{source}."));
        let offered = || {
            let tools = engine.registry().tools(caller);
            tools.iter().any(|tool| tool.definition.name.starts_with(&prefix))
        };
        let is_configured = self.upstreams.has(&caller.project, source);
        is_configured && (may_use(engine, caller, &format!("{source}.resources")) || offered())
    }

    fn subscribe_changes(&self) -> Option<Box<dyn PassthroughChangeStream>> {
        Some(Box::new(UpstreamChangeStream(Some(self.upstreams.subscribe_changes()))))
    }

    fn can_see_change(
        &self,
        caller: &Caller,
        source: Option<&str>,
        change: &PassthroughChange,
    ) -> bool {
        let Some((project, name)) = &change.origin else { return true };
        let is_in_scope = *project == caller.project && source.is_none_or(|source| source == name);
        // Rules name each prompt like a tool, and the notification does not say which prompt
        // changed.
        let is_prompt_list = change.kind == PassthroughChangeKind::PromptList;
        is_in_scope
            && (is_prompt_list || may_use(&self.engine, caller, &format!("{name}.resources")))
    }
}

/// A stream of the changes that all upstreams report.
struct UpstreamChangeStream(Option<broadcast::Receiver<((String, String), UpstreamChange)>>);

#[async_trait]
impl PassthroughChangeStream for UpstreamChangeStream {
    async fn next(&mut self) -> PassthroughChange {
        loop {
            let Some(changes) = &mut self.0 else { return std::future::pending().await };
            match changes.recv().await {
                Ok((key, change)) => {
                    let kind = match change {
                        UpstreamChange::ResourceList => PassthroughChangeKind::ResourceList,
                        UpstreamChange::PromptList => PassthroughChangeKind::PromptList,
                        UpstreamChange::ResourceContent(uri) => {
                            PassthroughChangeKind::ResourceContent(uri)
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
                Err(broadcast::error::RecvError::Closed) => self.0 = None,
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
