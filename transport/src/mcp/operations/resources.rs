//! Resources: full results of calls, by call id, and passthrough resources.

use rmcp::ErrorData;
use rmcp::model::{
    CacheScope, ListResourceTemplatesResult, ListResourcesResult, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, ResourceContents, ResourceTemplate, ResultType,
};
use serde_json::json;
use toolcrib::CallId;

use crate::mcp::request::CallerView;
use crate::mcp::state::McpTransportState;
use crate::mcp::tool_result;

const PREFIX: &str = "toolcrib://tool_calls/";
const SUFFIX: &str = "/result";

/// Lists the passthrough resources. Results are not listed: there may be millions, and the caller
/// of each call has been given its link.
pub(crate) async fn list_resources(
    shared: &McpTransportState,
    view: &CallerView,
) -> Result<ListResourcesResult, ErrorData> {
    let resources = shared.passthrough.resources(&view.caller, view.source.as_deref()).await?;
    Ok(ListResourcesResult::with_all_items(resources)
        .with_ttl_ms(shared.settings.ttl_ms)
        .with_cache_scope(CacheScope::Private))
}

/// Lists the passthrough resource templates and the template of results.
pub(crate) async fn list_templates(
    shared: &McpTransportState,
    view: &CallerView,
) -> Result<ListResourceTemplatesResult, ErrorData> {
    let results =
        ResourceTemplate::new("toolcrib://tool_calls/{tool_call_id}/result", "tool call result")
            .with_title("Result of a tool call")
            .with_description("The whole result of a call, by its ticket")
            .with_mime_type("application/json");
    let mut all = vec![results];
    all.extend(shared.passthrough.resource_templates(&view.caller, view.source.as_deref()).await?);
    Ok(ListResourceTemplatesResult::with_all_items(all)
        .with_ttl_ms(shared.settings.ttl_ms)
        .with_cache_scope(CacheScope::Private))
}

/// Reads one resource.
pub(crate) async fn read_resource(
    shared: &McpTransportState,
    view: &CallerView,
    params: ReadResourceRequestParams,
) -> Result<ReadResourceResponse, ErrorData> {
    let uri = params.uri.clone();
    let excerpt: String = uri.chars().take(200).collect();
    let unknown = || {
        ErrorData::resource_not_found(
            format!("there is no resource \"{excerpt}\""),
            Some(json!({ "uri": excerpt })),
        )
    };
    let ticket = uri.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    let Some(ticket) = ticket else {
        let source = view.source.as_deref();
        return match shared.passthrough.read_resource(&view.caller, source, params).await? {
            Some(ReadResourceResponse::Complete(mut read)) => {
                read.result_type = Some(ResultType::COMPLETE);
                Ok(read.into())
            }
            Some(other) => Ok(other),
            None => Err(unknown()),
        };
    };
    let id: CallId = ticket.parse().map_err(|_| unknown())?;
    let call = match shared.engine.calls().call(&view.caller, &id).await {
        Ok(call) => call,
        Err(error) if error.code() == toolcrib::Code::NotFound => return Err(unknown()),
        Err(error) => return Err(tool_result::protocol_error(error)),
    };
    let data = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    let data = data.ok_or_else(unknown)?;
    let contents = ResourceContents::text(data.text(), uri).with_mime_type("application/json");
    // A call ends once, so its result never changes.
    let result = ReadResourceResult::new(vec![contents])
        .with_ttl_ms(86_400_000)
        .with_cache_scope(CacheScope::Private);
    Ok(result.into())
}
