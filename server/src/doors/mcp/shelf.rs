//! What lies beside the tools: resources, prompts and completions of others, passed through. The
//! crib has none of its own; a source that has some is put on the shelf when everything is put
//! together.

use async_trait::async_trait;
use rmcp::ErrorData;
use rmcp::model::{
    CompleteRequestParams, CompleteResult, GetPromptRequestParams, GetPromptResponse, Prompt,
    ReadResourceRequestParams, ReadResourceResponse, Resource, ResourceTemplate,
};
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

/// A change, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub what: Changed,
    /// The project and the source; none where some changes were missed.
    pub place: Option<(String, String)>,
}

/// Changes, one after the other; given up by dropping it.
#[async_trait]
pub trait Changes: Send + 'static {
    async fn next(&mut self) -> Change;
}

/// Whoever has resources and prompts. Every method answers for one caller; where a source is named,
/// as if there were no other.
#[async_trait]
pub trait Shelf: Send + Sync + 'static {
    /// The resources, in an order that does not change by itself.
    async fn resources(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<Resource>, ErrorData>;

    /// The templates of resources, in such an order.
    async fn templates(
        &self,
        caller: &Caller,
        source: Option<&str>,
    ) -> Result<Vec<ResourceTemplate>, ErrorData>;

    /// One resource; none when it is not on this shelf.
    async fn read(
        &self,
        caller: &Caller,
        source: Option<&str>,
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
        source: Option<&str>,
        asked: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData>;

    /// Whether there is a source of this name that the caller may know of.
    fn has(&self, _caller: &Caller, _source: &str) -> bool {
        true
    }

    /// Tells of changes from now on. None where nothing ever changes.
    fn changes(&self) -> Option<Box<dyn Changes>> {
        None
    }

    /// Whether a change is this caller's to know; where a source is named, as if there were no
    /// other.
    fn shows(&self, caller: &Caller, source: Option<&str>, change: &Change) -> bool;
}

/// A shelf with nothing on it.
pub(super) struct Empty;

#[async_trait]
impl Shelf for Empty {
    async fn resources(&self, _: &Caller, _: Option<&str>) -> Result<Vec<Resource>, ErrorData> {
        Ok(Vec::new())
    }

    async fn templates(
        &self,
        _: &Caller,
        _: Option<&str>,
    ) -> Result<Vec<ResourceTemplate>, ErrorData> {
        Ok(Vec::new())
    }

    async fn read(
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
        _: Option<&str>,
        _: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData> {
        Ok(CompleteResult::default())
    }

    fn shows(&self, _: &Caller, _: Option<&str>, _: &Change) -> bool {
        false
    }
}
