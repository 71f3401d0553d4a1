//! What lies beside the tools: resources, prompts and completions of others, passed through. The
//! crib has none of its own; a source that has some is put on the shelf when everything is put
//! together.

use async_trait::async_trait;
use rmcp::ErrorData;
use rmcp::model::{
    CompleteRequestParams, CompleteResult, GetPromptRequestParams, GetPromptResponse, Prompt,
    ReadResourceRequestParams, ReadResourceResponse, Resource, ResourceTemplate,
};
use tokio::sync::broadcast;
use toolcrib::Caller;

/// What has changed on a shelf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Which resources there are.
    Resources,
    /// Which prompts there are.
    Prompts,
    /// What is in this resource.
    Resource(String),
}

/// Whoever has resources and prompts. Every method answers for one caller.
#[async_trait]
pub trait Shelf: Send + Sync + 'static {
    /// The resources, in an order that does not change by itself.
    async fn resources(&self, caller: &Caller) -> Result<Vec<Resource>, ErrorData>;

    /// The templates of resources, in such an order.
    async fn templates(&self, caller: &Caller) -> Result<Vec<ResourceTemplate>, ErrorData>;

    /// One resource; none when it is not on this shelf.
    async fn read(
        &self,
        caller: &Caller,
        asked: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData>;

    /// The prompts, in such an order.
    async fn prompts(&self, caller: &Caller) -> Result<Vec<Prompt>, ErrorData>;

    /// One prompt; none when it is not on this shelf.
    async fn prompt(
        &self,
        caller: &Caller,
        asked: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData>;

    /// What an argument could go on with.
    async fn complete(
        &self,
        caller: &Caller,
        asked: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData>;

    /// Tells of changes from now on. None where nothing ever changes.
    fn changes(&self) -> Option<broadcast::Receiver<Changed>> {
        None
    }
}

/// A shelf with nothing on it.
pub(super) struct Empty;

#[async_trait]
impl Shelf for Empty {
    async fn resources(&self, _: &Caller) -> Result<Vec<Resource>, ErrorData> {
        Ok(Vec::new())
    }

    async fn templates(&self, _: &Caller) -> Result<Vec<ResourceTemplate>, ErrorData> {
        Ok(Vec::new())
    }

    async fn read(
        &self,
        _: &Caller,
        _: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData> {
        Ok(None)
    }

    async fn prompts(&self, _: &Caller) -> Result<Vec<Prompt>, ErrorData> {
        Ok(Vec::new())
    }

    async fn prompt(
        &self,
        _: &Caller,
        _: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData> {
        Ok(None)
    }

    async fn complete(
        &self,
        _: &Caller,
        _: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData> {
        Ok(CompleteResult::default())
    }
}
