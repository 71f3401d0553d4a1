//! Prompts and completions. All of them are passthrough; Toolcrib has none itself.

use rmcp::ErrorData;
use rmcp::model::{
    CacheScope, CompleteRequestParams, CompleteResult, GetPromptRequestParams, GetPromptResponse,
    ListPromptsResult, Reference, ResultType,
};

use crate::mcp::request::CallerView;
use crate::mcp::state::McpTransportState;

/// Lists the prompts that the caller sees.
pub(crate) async fn list_prompts(
    shared: &McpTransportState,
    view: &CallerView,
) -> Result<ListPromptsResult, ErrorData> {
    let mut prompts = shared.passthrough.prompts(&view.caller).await?;
    if let Some(prefix) = view.prefix() {
        prompts.retain_mut(|prompt| match prompt.name.strip_prefix(&prefix) {
            Some(own_name) => {
                prompt.name = own_name.to_owned();
                true
            }
            None => false,
        });
    }
    Ok(ListPromptsResult::with_all_items(prompts)
        .with_ttl_ms(shared.settings.ttl_ms)
        .with_cache_scope(CacheScope::Private))
}

/// Returns one prompt.
pub(crate) async fn get_prompt(
    shared: &McpTransportState,
    view: &CallerView,
    mut params: GetPromptRequestParams,
) -> Result<GetPromptResponse, ErrorData> {
    let name: String = params.name.chars().take(128).collect();
    params.name = view.qualified_name(&params.name);
    match shared.passthrough.get_prompt(&view.caller, params).await? {
        Some(GetPromptResponse::Complete(mut prompt)) => {
            prompt.result_type = Some(ResultType::COMPLETE);
            Ok(prompt.into())
        }
        Some(other) => Ok(other),
        None => Err(ErrorData::invalid_params(format!("there is no prompt \"{name}\""), None)),
    }
}

/// Returns completions for an argument of a prompt or a resource template.
pub(crate) async fn complete(
    shared: &McpTransportState,
    view: &CallerView,
    mut params: CompleteRequestParams,
) -> Result<CompleteResult, ErrorData> {
    if let Reference::Prompt(prompt) = &mut params.r#ref {
        prompt.name = view.qualified_name(&prompt.name);
    }
    let source = view.source.as_deref();
    let mut completed = shared.passthrough.complete(&view.caller, source, params).await?;
    // An upstream of a legacy revision omits the result type.
    completed.result_type = Some(ResultType::COMPLETE);
    Ok(completed)
}
