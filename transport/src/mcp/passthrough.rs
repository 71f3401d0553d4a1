//! Passthrough: resources, prompts and completions of MCP servers, offered unchanged. Toolcrib has
//! none itself; the server registers a provider at startup.

use async_trait::async_trait;
use rmcp::ErrorData;
use rmcp::model::{
    CompleteRequestParams, CompleteResult, GetPromptRequestParams, GetPromptResponse, Prompt,
    ReadResourceRequestParams, ReadResourceResponse, Resource, ResourceTemplate,
};
use serde_json::Value;
use toolcrib::Caller;

/// The kind of a passthrough change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PassthroughChangeKind {
    /// The list of resources changed.
    ResourceList,
    /// The list of prompts changed.
    PromptList,
    /// The content of this resource changed.
    ResourceContent(String),
    /// An MCP server wrote this log message.
    Log(Value),
}

/// A change and its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassthroughChange {
    pub kind: PassthroughChangeKind,
    /// The project and the source; `None` if some changes were missed.
    pub origin: Option<(String, String)>,
}

/// A stream of changes. Drop it to unsubscribe.
#[async_trait]
pub trait PassthroughChangeStream: Send + 'static {
    async fn next(&mut self) -> PassthroughChange;
}

/// A provider of resources and prompts. Every method answers for one caller; if a source is given,
/// only that source is visible.
#[async_trait]
pub trait PassthroughProvider: Send + Sync + 'static {
    /// Returns the resources in a stable order.
    async fn resources(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<Resource>, ErrorData>;

    /// Returns the resource templates in a stable order.
    async fn resource_templates(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<ResourceTemplate>, ErrorData>;

    /// Reads one resource. Returns `None` if this provider does not have it.
    async fn read_resource(
        &self,
        caller: &Caller,
        source: Option<&str>,
        params: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData>;

    /// Returns the prompts in a stable order.
    async fn prompts(&self, caller: &Caller) -> Result<Vec<Prompt>, ErrorData>;

    /// Returns one prompt, or `None` if this provider does not have it.
    async fn get_prompt(
        &self,
        caller: &Caller,
        params: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData>;

    /// Returns completions for an argument.
    async fn complete(
        &self,
        caller: &Caller,
        source: Option<&str>,
        params: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData>;

    /// Asks the MCP server that has a resource for notifications of its changes.
    async fn subscribe_resource(
        &self,
        _caller: &Caller,
        _source: Option<&str>,
        _uri: &str,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    /// Asks the MCP servers for log messages of this level, in MCP's format, and above.
    async fn set_log_level(&self, _caller: &Caller, _source: Option<&str>, _level: &Value) {}

    /// Returns the instructions of MCP servers for models, by the name of the source.
    fn instructions(&self, _caller: &Caller, _source: Option<&str>) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns whether the caller may see a source of this name.
    fn has_source(&self, _caller: &Caller, _source: &str) -> bool {
        true
    }

    /// Subscribes to changes from now on. Returns `None` if nothing ever changes.
    fn subscribe_changes(&self) -> Option<Box<dyn PassthroughChangeStream>> {
        None
    }

    /// Returns whether the caller may learn of a change; if a source is given, only that source is
    /// visible.
    fn can_see_change(
        &self,
        caller: &Caller,
        source: Option<&str>,
        change: &PassthroughChange,
    ) -> bool;
}

/// A provider without resources and prompts.
pub(super) struct EmptyPassthrough;

#[async_trait]
impl PassthroughProvider for EmptyPassthrough {
    async fn resources(&self, _: &Caller, _: Option<&str>) -> Result<Vec<Resource>, ErrorData> {
        Ok(Vec::new())
    }

    async fn resource_templates(
        &self,
        _: &Caller,
        _: Option<&str>,
    ) -> Result<Vec<ResourceTemplate>, ErrorData> {
        Ok(Vec::new())
    }

    async fn read_resource(
        &self,
        _: &Caller,
        _: Option<&str>,
        _: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData> {
        Ok(None)
    }

    async fn prompts(&self, _: &Caller) -> Result<Vec<Prompt>, ErrorData> {
        Ok(Vec::new())
    }

    async fn get_prompt(
        &self,
        _: &Caller,
        _: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData> {
        Ok(None)
    }

    async fn complete(
        &self,
        _: &Caller,
        _: Option<&str>,
        _: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData> {
        Ok(CompleteResult::default())
    }

    fn can_see_change(&self, _: &Caller, _: Option<&str>, _: &PassthroughChange) -> bool {
        false
    }
}
