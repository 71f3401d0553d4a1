//! Resources: full results of calls, by call id, and passthrough resources.

use rmcp::ErrorData;
use rmcp::model::{
    ListResourceTemplatesResult, ListResourcesResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ResourceContents,
    ResourceTemplate, ResultType,
};
use serde_json::json;
use toolcrib::CallId;

use super::server::{CallerView, McpHandler};
use crate::mcp::tool_result;

const PREFIX: &str = "toolcrib://tool_calls/";
const SUFFIX: &str = "/result";

/// Lists the passthrough resources. Results are not listed: there may be millions, and the caller
/// of each call has been given its link.
pub(super) async fn list_resources(
    server: &McpHandler,
    view: &CallerView,
    _asked: Option<PaginatedRequestParams>,
) -> Result<ListResourcesResult, ErrorData> {
    let resources =
        server.shared.passthrough.resources(&view.caller, view.source.as_deref()).await?;
    let result = ListResourcesResult::with_all_items(resources);
    Ok(super::with_cache_hints(result, server.settings(), |r, ttl, scope| {
        r.with_ttl_ms(ttl).with_cache_scope(scope)
    }))
}

/// Lists the passthrough resource templates and the template of results.
pub(super) async fn list_templates(
    server: &McpHandler,
    view: &CallerView,
) -> Result<ListResourceTemplatesResult, ErrorData> {
    let results =
        ResourceTemplate::new("toolcrib://tool_calls/{tool_call_id}/result", "tool call result")
            .with_title("Result of a tool call")
            .with_description("The whole result of a call, by its ticket")
            .with_mime_type("application/json");
    let mut all = vec![results];
    all.extend(
        server.shared.passthrough.resource_templates(&view.caller, view.source.as_deref()).await?,
    );
    let result = ListResourceTemplatesResult::with_all_items(all);
    Ok(super::with_cache_hints(result, server.settings(), |r, ttl, scope| {
        r.with_ttl_ms(ttl).with_cache_scope(scope)
    }))
}

/// Reads one resource.
pub(super) async fn read_resource(
    server: &McpHandler,
    view: &CallerView,
    asked: ReadResourceRequestParams,
) -> Result<ReadResourceResponse, ErrorData> {
    let uri = asked.uri.clone();
    let shown: String = uri.chars().take(200).collect();
    let unknown = || {
        ErrorData::resource_not_found(
            format!("there is no resource \"{shown}\""),
            Some(json!({ "uri": shown })),
        )
    };
    let ticket = uri.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    let Some(ticket) = ticket else {
        let source = view.source.as_deref();
        return match server.shared.passthrough.read_resource(&view.caller, source, asked).await? {
            Some(ReadResourceResponse::Complete(mut read)) => {
                read.result_type = Some(ResultType::COMPLETE);
                Ok(read.into())
            }
            Some(other) => Ok(other),
            None => Err(unknown()),
        };
    };
    let id: CallId = ticket.parse().map_err(|_| unknown())?;
    let call = match server.engine().call(&view.caller, &id).await {
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
        .with_cache_scope(rmcp::model::CacheScope::Private);
    Ok(result.into())
}
