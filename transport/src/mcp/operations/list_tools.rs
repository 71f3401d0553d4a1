//! `tools/list`: one page of the caller's tools, or the tools of the search catalogue.

use rmcp::ErrorData;
use rmcp::model::{CacheScope, ListToolsResult, PaginatedRequestParams};

use crate::mcp::request::ProtocolRevision;
use crate::mcp::state::RequestScope;
use crate::mcp::tool_list::splice::ToolListSplice;
use crate::mcp::tool_list::{cursor_after, parse_cursor};

/// Returns the page that the cursor requests.
pub(crate) fn list_tools(
    scope: RequestScope<'_>,
    params: Option<PaginatedRequestParams>,
) -> Result<ListToolsResult, ErrorData> {
    let RequestScope { shared, view, request, .. } = scope;
    let cursor = params.and_then(|params| params.cursor);
    let after = match cursor.as_deref() {
        None => None,
        Some(cursor) => Some(
            parse_cursor(cursor)
                .ok_or_else(|| ErrorData::invalid_params("this cursor is not valid", None))?,
        ),
    };
    let revision = request.client.revision;
    let list = match shared.uses_search_catalogue(view) {
        true => shared.tool_lists.for_catalogue(),
        false => shared.tool_lists.for_caller(&shared.engine, &view.caller),
    };
    let (prefix, size, form) = (view.prefix(), shared.settings.page_size, scope.name_form());
    let (tools, more) = match request.attached::<ToolListSplice>() {
        Some(splice) if revision == ProtocolRevision::Modern && prefix.is_none() => {
            let (text, more) = list.page_text(after, size, form);
            splice.set_tools(text);
            (Vec::new(), more)
        }
        _ => list.page(after, size, revision, form, prefix.as_deref()),
    };
    let mut result = ListToolsResult::with_all_items(tools);
    result.next_cursor = more.map(|name| cursor_after(&name));
    if revision == ProtocolRevision::Modern {
        result = result.with_ttl_ms(shared.settings.ttl_ms).with_cache_scope(CacheScope::Private);
    }
    Ok(result)
}
